"""Sharded models (FSDP2) on two NCCL ranks that share one GPU as two nodes: speed, memory, and seconds to load, save and export.

    python benchmarks/fsdp.py compare --work DIR          # beside DDP and HF Trainer with FSDP2, about 6 minutes on an H200
    python benchmarks/fsdp.py compare --work DIR --batch 64 --rows varied        # larger micro-batches, texts of different lengths
    python benchmarks/fsdp.py compare --work DIR --batch 128 --micro 32 --rows varied      # computation limits a step, not the network
    python benchmarks/fsdp.py large --work DIR --models 1.4b             # about 2 minutes for each model; 8b-lora, 3b
    python benchmarks/fsdp.py compare --work DIR --tiny   # on a CPU, over gloo; Trainer then uses DDP

Models are Llamas with random weights, which are written on the GPU, file by file. A row has 512 tokens, or a lognormal length with
--rows varied. Each rank has its own NCCL_HOSTID, so that NCCL connects the ranks over TCP on the loopback interface, with the
settings of two_nodes.py. Tokens per second are those of the steps after the warm-up. Memory is the peak that torch has allocated on
the GPU, and the peak of the process on the host, without mapped pages of files. A folder of weights is deleted at the end, because
the largest has 16 GB.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import synthetic
import two_nodes
import vs_trainer

LENGTH = 512  # tokens of a row
ROWS = 256
GIB = 2**30
LLAMA = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "initializer_range": 0.02}
SHAPES: dict[str, dict[str, Any]] = {
    "1.4b": {
        "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 5632, "tie_word_embeddings": False,
    },
    "3b": {
        "vocab_size": 128256, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
# The shape of a model, and options of the recipe.
LARGE: dict[str, tuple[str, str]] = {"1.4b": ("1.4b", ""), "8b-lora": ("8b", "--lora_r 16 --dtype bfloat16"), "3b": ("3b", "")}
# Whether the model is sharded, and options of the recipe. Trainer sums gradients in bf16, as --comm_hook bf16 does.
SIDES = {
    "ours, FSDP": (True, ""),
    "ours, FSDP, --comm_hook bf16": (True, "--comm_hook bf16"),
    "ours, FSDP, bf16, compiled": (True, "--comm_hook bf16 --compile on"),
    "ours, FSDP, bf16, nothing kept": (True, "--comm_hook bf16 --keep_gathered none"),
    "Trainer, FSDP2": (True, ""),
    "Trainer, FSDP2, weights kept": (True, ""),
    "ours, DDP": (False, ""),
}
KEPT = {"FSDP_RESHARD_AFTER_FORWARD": "false"}
# What `accelerate launch` sets for an FSDP2 config. Ours needs the first two.
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_OFFLOAD_PARAMS": "false",
}  # fmt: skip


# ---------------------------------------------------------------------------------- models and data


def make_model(work: Path, name: str, length: int) -> Path:
    """Write random weights in bf16, a tokenizer of words, and rows for a model of this shape. Return the folder."""

    def make(folder: Path) -> None:
        import numpy as np
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        shape = SHAPES[name]
        tokenizer = synthetic.make_tokenizer("decoder", synthetic.Family(shape["vocab_size"], {}, ROWS, max_length=length))
        tokenizer.save_pretrained(folder)
        ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = LlamaConfig(**shape, **LLAMA, **ids, architectures=["LlamaForCausalLM"], dtype="bfloat16")
        config.save_pretrained(folder)
        with torch.device("meta"):
            weights = LlamaForCausalLM(config).state_dict()
        if config.tie_word_embeddings:
            weights.pop("lm_head.weight")
        place, part, size, number = {}, {}, 0, 0
        names = list(weights)
        for key in names:
            value = torch.empty(weights[key].shape, dtype=torch.bfloat16, device=device)
            part[key] = (value.fill_(1) if value.ndim == 1 else value.normal_(0, 0.02)).cpu()
            place[key] = f"model-{number:05d}.safetensors"
            size += value.numel() * 2
            if size > 2 * 10**9 or key == names[-1]:
                save_file(part, folder / place[key], metadata={"format": "pt"})
                part, size, number = {}, 0, number + 1
        index = {"metadata": {}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        rng = np.random.default_rng(1)
        drawn = rng.integers(0, shape["vocab_size"] - 5, (ROWS, length - 1))  # and the token at the end
        cut = np.clip(np.exp(rng.normal(np.log(0.4 * length), 0.6, ROWS)), 8, length - 1).astype(int)
        for file, ends in (("train", [length] * ROWS), ("varied", cut), ("eval", [length] * 8)):
            rows = [json.dumps({"text": " ".join(f"w{i}" for i in row[:end])}) + "\n" for row, end in zip(drawn, ends)]
            (folder / f"{file}.jsonl").write_text("".join(rows))

    return synthetic.make_once(work / "models" / name, make)


# ---------------------------------------------------------------------------------- one rank


class HostMemory(threading.Thread):
    """Finds the peak of the host memory of this process. Mapped pages of files are not counted: the kernel can drop them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        while True:
            words = Path("/proc/self/statm").read_text().split()
            self.peak = max(self.peak, (int(words[1]) - int(words[2])) * resource.getpagesize())
            time.sleep(0.05)


def write_measured(facts: dict[str, Any], memory: HostMemory) -> None:
    import torch

    if torch.cuda.is_available():
        facts["gpu"], facts["reserved"] = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    facts["host"] = memory.peak / GIB
    Path(os.environ["MEASURED"]).write_text(json.dumps(facts))


def run_ours() -> None:
    """Run the recipe sft in this process, and measure how long it loads the model and writes the last checkpoint."""
    sys.path.insert(0, str(vs_trainer.ROOT / "recipes"))
    import sft

    from accel_ddp.entry import run
    from accel_ddp.saving.checkpoints import Checkpoints

    facts: dict[str, Any] = {}
    memory = HostMemory()
    build, save = sft.Task.build, Checkpoints.save

    def timed_build(*args: Any, **options: Any) -> Any:
        import torch

        began = time.perf_counter()
        model = build(*args, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        facts["load_seconds"], facts["load_host"] = time.perf_counter() - began, memory.peak / GIB
        return model

    def timed_save(self: Any, *args: Any, **options: Any) -> Any:
        if "ONLY_STEPS" in os.environ:  # a checkpoint of 16 GB and its export would take longer than the steps
            write_measured(facts, memory)
            time.sleep(2)  # the other rank and the writer of log.jsonl end their work
            os._exit(0)
        began = time.perf_counter()
        result = save(self, *args, **options)
        facts["save_seconds"] = time.perf_counter() - began  # the last save returns when the checkpoint is complete
        return result

    sft.Task.build, Checkpoints.save = timed_build, timed_save

    def main(cfg: Any) -> Any:
        try:
            return sft.main(cfg)
        finally:
            write_measured(facts, memory)

    run(sft.Config, main)


def run_trainer(options: argparse.Namespace) -> None:
    """Train the same model on the same rows with HF Trainer, which reads the FSDP variables through Accelerate."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    on_gpu, folder, memory = torch.cuda.is_available(), options.model, HostMemory()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = (folder / f"{options.rows}.jsonl").read_text().splitlines()
    rows = [{"input_ids": tokenizer(json.loads(line)["text"] + tokenizer.eos_token)["input_ids"]} for line in lines]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    times = []

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if on_gpu and state.global_step in (options.warm, options.steps):
                torch.cuda.synchronize()
            times.append(time.time())
            print(f"step {state.global_step}: {times[-1] - times[-2] if len(times) > 1 else 0:.3f} s", flush=True)

    arguments = transformers.TrainingArguments(
        output_dir=str(options.output_dir), seed=0, use_cpu=not on_gpu, max_steps=options.steps, bf16=on_gpu,
        per_device_train_batch_size=options.micro, gradient_accumulation_steps=options.batch // 2 // options.micro,
        learning_rate=1e-5, weight_decay=0.01, max_grad_norm=1.0,
        logging_steps=10, save_strategy="no", eval_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[Stopwatch()]
    )
    trainer.train()
    write_measured({"times": times, "wrapped": type(trainer.model_wrapped).__name__}, memory)


# ---------------------------------------------------------------------------------- two ranks


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.work = options, options.work.resolve()
        os.environ |= vs_trainer.environment(self.work)
        import torch

        self.on_gpu = torch.cuda.is_available()
        self.length = self.mean_length = 32 if options.tiny else LENGTH
        self.began = time.monotonic()

    def ranks(self, name: str, command: list[str], env: dict[str, str]) -> tuple[Path, list[dict[str, Any]]]:
        """Run a command on two ranks. Return the folder and what each rank has measured. Raise RuntimeError if one fails."""
        folder, port = self.work / "fsdp" / name, str(two_nodes.free_port())
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shared = {**os.environ, **two_nodes.read_env(None), **env, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared["OMP_NUM_THREADS"] = "6" if self.on_gpu else "1"
        started = []
        for rank in (0, 1):
            own = {**shared, "RANK": str(rank), "NCCL_HOSTID": f"node{rank}", "MEASURED": str(folder / f"measured{rank}.json")}
            with (folder / f"rank{rank}.txt").open("w") as log:
                words = [sys.executable, *command, "--output_dir", str(folder / "run")]
                started.append(subprocess.Popen(words, env=own, cwd=vs_trainer.ROOT, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + self.options.timeout
        while any(process.poll() is None for process in started):
            time.sleep(0.2)
            failed = any(process.poll() not in (None, 0) for process in started)
            if time.monotonic() > deadline or failed:
                time.sleep(5 if failed else 0)  # the other rank reports it too
                for process in started:
                    process.kill()
        codes = [process.wait() for process in started]
        if codes != [0, 0]:
            raise RuntimeError(f"{name}: {codes}: {vs_trainer.reason_in(folder / f'rank{0 if codes[0] else 1}.txt')}")
        return folder, [json.loads((folder / f"measured{rank}.json").read_text()) for rank in (0, 1)]

    def ours(self, name: str, model: Path, sharded: bool, more: str = "", env: dict[str, str] | None = None) -> dict[str, Any]:
        options = self.options
        words = {
            "model": model, "train_file": model / f"{options.rows}.jsonl", "eval_file": model / "eval.jsonl", "max_length": self.length,
            "mixed_precision": "bf16" if self.on_gpu else "no", "global_batch_size": options.batch,
            "micro_batch_size": options.micro, "gpu_memory_gb": options.memory / 2 if self.on_gpu else 0,
            "lr": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1.0, "steps": options.steps,
            "eval_every": vs_trainer.NEVER, "save_every": vs_trainer.NEVER, "log_every": 1, "samples": 0, "max_eval_items": 2,
            "eval_batch_size": 1,
        }  # fmt: skip
        command = [__file__, "ours", *(part for key, value in words.items() for part in (f"--{key}", str(value)))]
        folder, ranks = self.ranks(name, [*command, "--no_eval_first", *more.split()], (FSDP if sharded else {}) | (env or {}))
        times = {e["step"]: e["time"] for e in vs_trainer.read_events(folder / "run") if e["event"] == "update"}
        return self.summary([times[step] for step in sorted(times)], ranks) | {"run": folder / "run"}

    def trainer(self, name: str, model: Path, env: dict[str, str]) -> dict[str, Any]:
        options = self.options
        words = {"model": model, **{key: getattr(options, key) for key in ("steps", "warm", "batch", "micro", "rows")}}
        command = [__file__, "trainer", *(part for key, value in words.items() for part in (f"--{key}", str(value)))]
        folder, ranks = self.ranks(name, command, FSDP | env)
        return self.summary(ranks[0]["times"], ranks) | {"run": folder / "run"}

    def summary(self, times: list[float], ranks: list[dict[str, Any]]) -> dict[str, Any]:
        warm = self.options.warm
        seconds = (times[-1] - times[warm - 1]) / (len(times) - warm)
        largest = lambda key: max(rank.get(key, 0.0) for rank in ranks)
        return {
            "step": seconds, "tokens": self.options.batch * self.mean_length / seconds,
            **{key: largest(key) for key in ("gpu", "reserved", "host", "load_host", "load_seconds", "save_seconds")},
        }  # fmt: skip

    def compare(self) -> None:
        """Run each side `--rounds` times, in turns that change their direction."""
        model = make_model(self.work, "tiny" if self.options.tiny else "1.4b", self.length)
        texts = (model / f"{self.options.rows}.jsonl").read_text().splitlines()
        self.mean_length = sum(1 + len(json.loads(text)["text"].split()) for text in texts) / len(texts)
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in self.options.sides}
        for turn in range(self.options.rounds):
            for side in self.options.sides[:: -1 if turn % 2 else 1]:
                name = f"{side.replace(', ', '-')}-{turn}".replace(" ", "-")
                try:
                    if side.startswith("Trainer"):
                        result = self.trainer(name, model, KEPT if side.endswith("kept") else {})
                    else:
                        result = self.ours(name, model, *SIDES[side], env={"ONLY_STEPS": "1"})
                except RuntimeError as error:
                    print(error, flush=True)
                    continue
                shutil.rmtree(result["run"], ignore_errors=True)
                found[side].append(result)
                print(f"{side}: {result['step'] * 1e3:.0f} ms per step, {result['gpu']:.1f} GiB ({self.elapsed()})", flush=True)
        print("\n| | ms per step | tokens/s | peak GPU memory per rank |\n|---|---|---|---|")
        for side, results in found.items():
            if results:
                best = min(results, key=lambda result: result["step"])
                each = ", ".join(f"{result['step'] * 1e3:.0f}" for result in results)
                print(f"| {side} | {each} | {best['tokens']:,.0f} | {best['gpu']:.1f} GiB |")

    def large(self) -> None:
        lines = []
        for name in self.options.models:
            shape, more = ("tiny", LARGE[name][1]) if self.options.tiny else LARGE[name]
            began = time.monotonic()
            model = make_model(self.work, shape, self.length)
            print(f"{name}: weights written in {time.monotonic() - began:.0f} s", flush=True)
            try:
                result = self.ours(name, model, True, more)
                size = sum(file.stat().st_size for file in result["run"].glob("step_*/**/*") if file.is_file()) / 1e9
                shutil.rmtree(result["run"] / "model", ignore_errors=True)  # what the run itself has exported; disks are small
                began, out = time.monotonic(), self.work / "fsdp" / f"{name}-exported"
                shutil.rmtree(out, ignore_errors=True)
                command = [sys.executable, "-m", "accel_ddp.cli", "export", str(result["run"]), str(out)]
                command += ["--merge", "off"] if "lora" in name else []
                log = self.work / "fsdp" / f"{name}-export.txt"
                with log.open("w") as file:
                    process = subprocess.Popen(command, cwd=vs_trainer.ROOT, stdout=file, stderr=subprocess.STDOUT)
                    _, status, usage = os.wait4(process.pid, 0)
                if status:
                    raise RuntimeError(f"{name}: the export failed: {log.read_text()[-2000:]}")
                export = f"{time.monotonic() - began:.1f} ({usage.ru_maxrss * 1024 / GIB:.1f} GiB)"
                lines.append(
                    f"| {name} | {result['tokens']:,.0f} | {result['step'] * 1e3:.0f} | {result['gpu']:.1f} GiB "
                    f"| {result['host']:.1f} GiB "
                    f"| {result['load_seconds']:.1f} ({result['load_host']:.1f} GiB) "
                    f"| {result['save_seconds']:.1f} ({size:.1f} GB) | {export} |"
                )
                print(f"{lines[-1]} ({self.elapsed()})", flush=True)
            except RuntimeError as error:
                print(error, flush=True)
            finally:
                for folder in (self.work / "fsdp" / f"{name}-exported", self.work / "fsdp" / name / "run"):
                    shutil.rmtree(folder, ignore_errors=True)
                if not self.options.keep:
                    shutil.rmtree(model)
        sizes = "peak GPU memory per rank | peak host memory"
        print(f"\n| model | tokens/s | ms per step | {sizes} | load, s (host) | save, s | export, s (host) |")
        print("|---" * 8 + "|")
        print("\n".join(lines))

    def elapsed(self) -> str:
        return f"{time.monotonic() - self.began:.0f} s since the start"


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        sys.argv = [sys.argv[0], *sys.argv[2:]]
        run_ours()
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "large", "trainer"), help="trainer: one rank of Trainer, started by compare")
    parser.add_argument("--work", type=Path, default=Path("runs/fsdp"), help="folder for models and runs")
    parser.add_argument("--models", nargs="+", choices=LARGE, default=list(LARGE))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rows", choices=("train", "varied"), default="train", help="varied: texts of different lengths")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, over both ranks")
    parser.add_argument("--micro", type=int, default=0, help="rows of a micro-batch of a rank; 0: all of its rows")
    parser.add_argument(
        "--memory", type=float, default=130, help="GiB of the GPU that both ranks share; with less, ours keeps less"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=8, help="steps before the measured ones")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows, for a CPU")
    parser.add_argument("--keep", action="store_true", help="do not delete the weights")
    parser.add_argument("--timeout", type=float, default=140, help="seconds that one run may take")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output_dir", type=Path)
    options = parser.parse_args()
    options.micro = options.micro or options.batch // 2
    if options.what == "trainer":
        run_trainer(options)
    else:
        getattr(Bench(options), options.what)()
