"""Our recipes compared with HF Trainer on one GPU: samples/s, tokens/s, warm-up, seconds of whole jobs, memory, loss curves.

    python benchmarks/vs_trainer.py --work DIR --out speed.json                         # steady state of each variant
    python benchmarks/vs_trainer.py --work DIR --only bert32 --ours "eager=--compile off" --ours "rows=--padding_free off"
    python benchmarks/vs_trainer.py --work DIR --long --seconds_job 180                 # whole jobs, including the start
    python benchmarks/vs_trainer.py --work DIR --seeds 0 1 2                            # loss curves of both sides
    python benchmarks/vs_trainer.py --work DIR --tiny --variants trainer ours           # on a CPU, to test the script

The jobs are a BERT-base classifier with batches of 32 and of 128 texts, and a decoder of SmolLM2-135M's shape with batches of 16.
Models (random weights) and texts (lognormal lengths, mean 232 tokens, at most 512) are generated from seeds. Both sides load the
same model folder. They train on the same rows in the same order, except where Trainer groups by length. Both use AdamW with the
same learning rates, bf16 autocast over float32 weights, a log line every 10 steps, tokenised data in a warm cache, and an empty
cache of compiled kernels. Each variant runs in its own process.

A run that is complete in DIR is not repeated, so that a call can be interrupted and started again. The table shows why a run
failed. "To the end of training" does not include the last evaluation and save.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from curves import curve_table, draw_curves
from synthetic import FAMILIES, TINY_FAMILIES, Family, make_data, make_model

ROOT = Path(__file__).resolve().parents[1]
NEVER = str(10**9)  # steps until an evaluation or a save
LOG_EVERY = 10  # steps; the default of our recipes, which Trainer gets too
Spec = dict[str, Any]


@dataclasses.dataclass
class Job:
    family: str  # key of FAMILIES: the model and its data
    recipe: str
    batch: int
    steps: int  # of a run that is timed
    warm: int  # steps before the measured ones; both are multiples of 50, because Trainer groups 50 batches by length
    curve_steps: int
    lr: float


JOBS = {
    "bert32": Job("bert", "classify", 32, steps=350, warm=100, curve_steps=600, lr=1e-4),
    "bert128": Job("bert", "classify", 128, steps=150, warm=50, curve_steps=200, lr=1e-4),
    "sft16": Job("decoder", "sft", 16, steps=150, warm=50, curve_steps=200, lr=6e-4),
}
# Trainer uses fused AdamW by default with torch 2.8 or newer, and pins memory by default. Every variant has both.
TRAINER = {
    "trainer": {},
    "trainer+group": {"group": True},
    "trainer+workers": {"dataloader_num_workers": 4, "dataloader_persistent_workers": True, "dataloader_pin_memory": True},
    "trainer+compile": {"torch_compile": True},
}
TRAINER["trainer+all"] = {name: value for flags in TRAINER.values() for name, value in flags.items()}


TINY_JOBS = {
    "bert32": Job("bert", "classify", 8, steps=40, warm=20, curve_steps=60, lr=1e-3),
    "bert128": Job("bert", "classify", 16, steps=40, warm=20, curve_steps=60, lr=1e-3),
    "sft16": Job("decoder", "sft", 8, steps=40, warm=20, curve_steps=60, lr=3e-3),
}


def fill_our_cache(job: Job, words: list[str]) -> None:
    """Tokenise as the recipe does. The tokens of both sides are on disk before a run is timed."""
    sys.path.append(str(ROOT / "recipes"))
    from importlib import import_module

    from accel_ddp.config.parsing import parse_config
    from accel_ddp.sources.models import load_tokenizer

    recipe = import_module(job.recipe)
    cfg = parse_config(recipe.Config, words)
    recipe.build_data(cfg, load_tokenizer(cfg, cfg.max_length))


def our_order(num_rows: int, seed: int, number: int) -> np.ndarray:
    """Return the first rows of our data stream, in the order in which any number of ranks trains on them."""
    from accel_ddp.training.stream import Shuffle

    return np.array(Shuffle(num_rows, seed).items(0, number))


# ---------------------------------------------------------------------------------- one run in its process


def environment(work: Path) -> dict[str, str]:
    """Return variables for every process: no Hub, caches in `work`, and only the first GPU, because Trainer would use several."""
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache" / "datasets"),
        "ACCEL_DDP_CACHE": str(work / "cache" / "accel_ddp"),
        "TOKENIZERS_PARALLELISM": "true",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


# Content of sitecustomize.py, which Python imports at its start. It writes the peak of GPU memory at the exit of any process.
PEAK_AT_EXIT = """
import atexit, json, os, sys
def write_peak():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        open(os.environ["PEAK_MEMORY_FILE"], "w").write(json.dumps(peak))
atexit.register(write_peak)
"""


def busy_seconds() -> tuple[float, float]:
    """Return the CPU seconds of the whole machine, and those of ended processes that this process has started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _waiting, *interrupts = ticks[:7]
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), own.ru_utime + own.ru_stime


def run_process(command: list[str], folder: Path, work: Path, timeout: float) -> dict[str, Any]:
    """Run a process and return when it began and how it ended. Its output is in log.txt."""
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(PEAK_AT_EXIT)
    env = {**os.environ, **environment(work), "PEAK_MEMORY_FILE": str(folder / "peak.json")}
    env["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), env["PYTHONPATH"]])
    # An empty folder. Otherwise the second run of a variant would use the kernels that the first one has compiled.
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    began, before = time.time(), busy_seconds()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"more than {timeout:.0f} s"
            process.wait()
    ended, after = time.time(), busy_seconds()
    shutil.rmtree(folder / "inductor", ignore_errors=True)
    peak = folder / "peak.json"
    return {
        "began": began,
        "process_seconds": ended - began,
        # Cores that other processes used during the run. If they used many, the time of the run means nothing.
        "others_cores": max(0.0, (after[0] - before[0]) - (after[1] - before[1])) / (ended - began),
        "peak": json.loads(peak.read_text()) if peak.exists() else None,
        "failed": "" if code == 0 else f"{code}: {reason_in(folder / 'log.txt')}",
    }


def reason_in(log: Path) -> str:
    """Return the line of a log that states why the process failed: one with `error:`, or the last line of a traceback."""
    lines = [line.strip(" │╭╮╰╯─") for line in log.read_text(errors="replace").splitlines()]  # tyro draws a frame around errors
    lines = [line for line in lines if line]
    words = ("error: ", " failed: ", "Error: ", "Unrecognized", "invalid choice", "Missing value")
    named = [line for line in lines if any(word in line for word in words)]
    return (named or lines or ["it printed nothing"])[-1][:200]


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def figures(times: dict[int, float], began: float, batch: int, warm: int, tokens_of_step: np.ndarray) -> dict[str, float]:
    """Return rates and durations, given the time at which each step ended. The steady state begins after step `warm`."""
    last = max(times)
    seconds = times[last] - times[warm]
    rate = (last - warm) / seconds
    grid = sorted(step for step in times if step % LOG_EVERY == 0)
    spans = [(b, (times[b] - times[a]) / (b - a)) for a, b in itertools.pairwise(grid)]
    typical = statistics.median([span for step, span in spans if step > warm] or [seconds / (last - warm)])
    slow = [step for step, span in spans if span > 1.5 * typical and step <= warm]
    return {
        "samples_per_second": rate * batch,
        "tokens_per_second": float(tokens_of_step[warm:last].sum()) / seconds,
        "to_step_10": times[grid[0]] - began,
        # From then on, no ten steps took 1.5 times as long as typical ones.
        "to_steady": times[max(slow, default=grid[0])] - began,
        "start_cost": times[last] - began - last / rate,  # seconds in addition to those of all steps at the steady rate
        "to_end_of_training": times[last] - began,
        "steps": last,
    }


def run_ours(spec: Spec, folder: Path, work: Path, timeout: float) -> dict[str, Any]:
    result = run_process([*spec["command"], "--output_dir", str(folder / "run")], folder, work, timeout)
    if result["failed"]:
        return result
    updates = [event for event in read_events(folder / "run") if event["event"] == "update"]
    lengths = np.load(Path(spec["data"]) / "train_lengths.npy")
    order = our_order(len(lengths), spec["seed"], spec["steps"] * spec["batch"])
    tokens_of_step = lengths[order].reshape(spec["steps"], spec["batch"]).sum(1)
    if spec["recipe"] == "sft" and any(e["items"] != tokens_of_step[e["step"] - 1] - spec["batch"] for e in updates):
        result["note"] = "rows came in an unexpected order, so that tokens/s are computed with the mean length"
        tokens_of_step = np.full(spec["steps"], lengths.mean() * spec["batch"])
    times = {event["step"]: event["time"] for event in updates}
    if spec["kind"] == "curve":
        result["losses"] = [event["loss"] for event in updates]
        (folder / "run" / "model").rename(folder / "model")
    result |= figures(times, result["began"], spec["batch"], spec["warm"], tokens_of_step)
    shutil.rmtree(folder / "run")  # it contains a checkpoint of a gigabyte
    return result


def run_trainer(spec: Spec, folder: Path, work: Path, timeout: float) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    result = run_process([__file__, "--trainer_in", str(folder)], folder, work, timeout)
    if result["failed"]:
        return result
    measured = json.loads((folder / "measured.json").read_text())
    lengths = np.load(Path(spec["data"]) / "train_lengths.npy")
    tokens_of_step = lengths[np.array(measured["rows"])].reshape(-1, spec["batch"]).sum(1)
    times = {step: moment for step, moment in enumerate(measured["times"], start=1)}
    if spec["kind"] == "curve":
        result["losses"] = measured["losses"]
    return {**result, **figures(times, result["began"], spec["batch"], spec["warm"], tokens_of_step)}


def train_with_trainer(folder: Path) -> None:
    """Train as spec.json in the folder says. It has its own process, because some flags, such as torch_compile, stay in effect."""
    spec = json.loads((folder / "spec.json").read_text())
    import datasets
    import torch
    import transformers
    from torch.utils.data import Sampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    on_gpu = torch.cuda.is_available()
    transformers.set_seed(spec["seed"])
    transformers.utils.logging.disable_progress_bar()
    data, place, batch = Path(spec["data"]), spec["model"], spec["batch"]
    rows, lengths = datasets.load_from_disk(str(data / "train_tokens")), np.load(data / "train_lengths.npy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    if spec["recipe"] == "sft":
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float32)
        collate = transformers.DataCollatorWithPadding(tokenizer)
    flags = dict(spec["flags"])
    is_grouped = flags.pop("group", False)
    if is_grouped:  # transformers 5 has renamed the flag
        known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        is_new = "train_sampling_strategy" in known
        flags |= {"train_sampling_strategy": "group_by_length"} if is_new else {"group_by_length": True}
    order, seen = np.load(spec["order"]).tolist(), []

    class StoringSampler(Sampler):
        """Yields rows in our order or grouped by length, and stores them, because their tokens are counted afterwards."""

        def __init__(self):
            # The sampler that the flag creates. Here it gets the lengths; otherwise it would read every row at the start.
            self.inner = LengthGroupedSampler(batch, lengths=lengths.tolist()) if is_grouped else None
            self.epoch = 0

        def __len__(self):
            return len(rows)

        def __iter__(self):
            start = self.epoch * len(rows)
            self.epoch += 1
            for row in self.inner or order[start : start + len(rows)]:
                seen.append(row)
                yield row

    class Timed(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return StoringSampler()

        def create_scheduler(self, num_training_steps, optimizer=None):
            """Use our linear schedule. Trainer's own begins with a rate of 0, so that its curve would be one step behind."""
            warm, total = spec["warmup_steps"], spec["steps"]
            share = lambda step: min((step + 1) / max(warm, 1), (total - step) / (total - warm))
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    offset = time.time() - time.perf_counter()
    times, losses = [], []

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (spec["warm"], spec["steps"]):
                wait()
            times.append(offset + time.perf_counter())

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), seed=spec["seed"], use_cpu=not on_gpu, max_steps=spec["steps"],
        per_device_train_batch_size=batch, learning_rate=spec["lr"], weight_decay=0.01, max_grad_norm=1.0,
        bf16=spec["precision"] == "bf16",
        logging_steps=spec["log_every"], save_strategy="no", eval_strategy="no", report_to=[], disable_tqdm=True, **flags,
    )  # fmt: skip
    parts = {"model": model, "args": arguments, "train_dataset": rows, "data_collator": collate, "processing_class": tokenizer}
    trainer = Timed(**parts, callbacks=[Stopwatch()])
    trainer.train()
    if spec["kind"] == "curve":
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    measured = {"times": times, "losses": losses, "rows": seen[: spec["steps"] * batch]}
    (folder / "measured.json").write_text(json.dumps(measured))


def score_models(folders: list[Path]) -> None:
    """Write the evaluation loss of each saved model to its result.json: a mean over rows, or over tokens of a decoder."""
    import datasets
    import torch
    import torch.nn.functional as F
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        is_lm = result["spec"]["recipe"] == "sft"
        kind = transformers.AutoModelForCausalLM if is_lm else transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(folder / "model", dtype=torch.float32).eval().to(device)
        rows = datasets.load_from_disk(str(Path(result["spec"]["data"]) / "eval_tokens"))
        total, number = 0.0, 0
        for row in sorted(rows, key=lambda row: len(row["input_ids"])):
            ids = torch.tensor([row["input_ids"]], device=device)
            with torch.no_grad():
                logits = model(input_ids=ids).logits.float()
            if is_lm:
                total += float(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
                number += ids.shape[1] - 1
            else:
                total += float(F.cross_entropy(logits, torch.tensor([row["labels"]], device=device)))
                number += 1
        result["eval_loss"] = total / number
        (folder / "result.json").write_text(json.dumps(result))
        shutil.rmtree(folder / "model")


# ----------------------------------------------------------------------------------------- which runs to do


def our_command(
    job: Job,
    family: Family,
    data: Path,
    model: Path,
    precision: str,
    steps: int,
    seed: int,
    extra: str,
    log_every: int = LOG_EVERY,
) -> list[str]:
    words = {
        "model": model, "train_file": data / "train.jsonl", "eval_file": data / "eval.jsonl", "mixed_precision": precision,
        "global_batch_size": job.batch, "micro_batch_size": job.batch, "max_length": family.max_length, "lr": job.lr,
        "warmup_steps": math.ceil(0.1 * steps), "weight_decay": 0.01, "max_grad_norm": 1.0, "lr_schedule": "linear",
        "steps": steps, "seed": seed, "eval_every": NEVER, "save_every": NEVER, "max_eval_items": 64, "log_every": log_every,
    }  # fmt: skip
    more = ["--no_eval_first", *(["--samples", "0"] if job.recipe == "sft" else []), *shlex.split(extra)]
    return [f"recipes/{job.recipe}.py", *(part for name, value in words.items() for part in (f"--{name}", str(value))), *more]


class Bench:
    """The runs of this call, and those of earlier calls in the same folder."""

    def __init__(self, options: argparse.Namespace):
        os.environ |= environment(options.work.resolve())  # libraries read it when they are imported
        import torch

        self.options, self.work, self.began = options, options.work.resolve(), time.monotonic()
        self.jobs, self.families = (TINY_JOBS, TINY_FAMILIES) if options.tiny else (JOBS, FAMILIES)
        if options.rows:
            self.families = {name: dataclasses.replace(family, rows=options.rows) for name, family in self.families.items()}
        # This does not initialise CUDA, which would take GPU memory.
        self.precision = "bf16" if torch.cuda.device_count() else "no"
        self.ours = {"ours": "", **dict(entry.split("=", 1) for entry in options.ours)}
        names = [*TRAINER, *self.ours]
        unknown = [name for name in options.variants or [] if name not in names]
        if unknown:
            sys.exit(f"--variants {' '.join(unknown)}: must be some of {', '.join(names)}")
        self.variants = [name for name in names if not options.variants or name in options.variants]
        self.cached: set[str] = set()

    def spec(self, kind: str, name: str, variant: str, steps: int, warm: int, seed: int = 0) -> Spec:
        """Return everything on which a run depends. If it has changed, the run is repeated."""
        job = self.jobs[name]
        family = self.families[job.family]
        data = make_data(self.work, job.family, family)
        model = make_model(self.work, job.family, family, seed)
        log_every = 1 if kind == "curve" else LOG_EVERY
        spec = {
            "kind": kind, "job": name, "variant": variant, "recipe": job.recipe, "batch": job.batch, "steps": steps, "warm": warm,
            "seed": seed, "lr": job.lr, "warmup_steps": math.ceil(0.1 * steps), "precision": self.precision, "data": str(data),
            "model": str(model), "log_every": log_every,
        }  # fmt: skip
        if variant in TRAINER:
            order = self.work / "data" / f"order-{name}-{seed}-{steps}.npy"
            if not order.exists():  # whole epochs, and one more because Trainer reads ahead
                rows = family.rows
                np.save(order, our_order(rows, seed, (steps * job.batch // rows + 2) * rows))
            return {**spec, "flags": TRAINER[variant], "order": str(order)}
        words = our_command(job, family, data, model, self.precision, steps, seed, self.ours[variant], log_every)
        if job.family not in self.cached:
            fill_our_cache(job, our_command(job, family, data, model, self.precision, steps, seed, "")[1:])
            self.cached.add(job.family)
        return {**spec, "command": words}

    def folder_of(self, spec: Spec, round_number: int = 0) -> Path:
        return self.work / "runs" / f"{spec['kind']}-{spec['job']}-{spec['variant']}-seed{spec['seed']}-round{round_number}"

    def run(self, spec: Spec, round_number: int = 0) -> dict[str, Any] | None:
        """Return the result of an earlier call, or run it. Return None if this call has no time left."""
        folder = self.folder_of(spec, round_number)
        name, file = folder.name, folder / "result.json"
        if file.exists():
            result = json.loads(file.read_text())
            if result["spec"] == spec and not (result["failed"] and self.options.retry):
                return result
        if self.options.limit and time.monotonic() - self.began > self.options.limit:
            print(f"{name}: not started because of --limit", flush=True)
            return None
        shutil.rmtree(folder, ignore_errors=True)
        run = run_trainer if spec["variant"] in TRAINER else run_ours
        result = {"spec": spec, "round": round_number, **run(spec, folder, self.work, self.options.timeout)}
        file.write_text(json.dumps(result))
        what = result["failed"] or f"{result['samples_per_second']:.1f} samples/s, {result['to_end_of_training']:.1f} s"
        print(f"{name}: {what}", flush=True)
        return result

    def timings(self, name: str) -> list[dict[str, Any]]:
        """Time all variants in each round, so that a machine that slows down slows all of them."""
        job = self.jobs[name]
        steps = self.options.steps or job.steps
        warm = min(job.warm, steps // 2 // LOG_EVERY * LOG_EVERY)
        found = []
        for number in range(self.options.rounds):
            for variant in self.variants:
                found.append(self.run(self.spec("speed", name, variant, steps, warm), number))
        return [result for result in found if result]

    def long_jobs(self, name: str) -> list[dict[str, Any]]:
        """Run whole jobs of as many steps as Trainer's default does in --seconds_job. The number is stored for later calls."""
        job = self.jobs[name]
        file = self.work / f"long-{name}-{self.options.seconds_job:g}.json"
        if not file.exists():
            base = self.run(self.spec("speed", name, "trainer", job.steps, job.warm))
            if not base or base["failed"]:
                return []
            seconds = max(self.options.seconds_job - base["start_cost"], self.options.seconds_job / 2)
            steps = int(seconds * base["samples_per_second"] / job.batch) // LOG_EVERY * LOG_EVERY
            file.write_text(json.dumps(max(steps, 2 * LOG_EVERY)))
        steps = json.loads(file.read_text())
        warm = min(job.warm, steps // 2 // LOG_EVERY * LOG_EVERY)
        found = [self.run(self.spec("long", name, variant, steps, warm)) for variant in self.variants]
        return [result for result in found if result]

    def curves(self, name: str) -> list[dict[str, Any]]:
        job, found = self.jobs[name], []
        steps = self.options.steps or job.curve_steps
        chosen = self.options.variants or ["trainer", *self.ours]
        for seed in self.options.seeds:
            for variant in chosen:
                warm = min(job.warm, steps // 2 // LOG_EVERY * LOG_EVERY)
                found.append(self.run(self.spec("curve", name, variant, steps, warm, seed)))
        folders = [self.folder_of(result["spec"]) for result in found if result]  # not those of another call that runs now
        unscored = [str(folder) for folder in folders if (folder / "model").is_dir()]
        if unscored:
            env = {**os.environ, **environment(self.work)}
            subprocess.run([sys.executable, __file__, "--score", *unscored], env=env, check=False)
        return [self.run(result["spec"]) for result in found if result]


# ------------------------------------------------------------------------------------------------ output


def speed_table(found: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row for each job and variant: medians over the rounds, and ratios to Trainer's default."""
    titles = ["job", "variant", "samples/s", "tokens/s", "ratio", "to step 10, s", "to steady, s", "start cost, s", "steps"]
    titles += ["to the end of training, s", "ratio of times", "peak GB", ""]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for key in dict.fromkeys((r["spec"]["job"], r["spec"]["variant"]) for r in found):
        runs = [r for r in found if (r["spec"]["job"], r["spec"]["variant"]) == key]
        whole = [r for r in runs if not r["failed"]]
        if not whole:
            lines.append(f"| {key[0]} | {key[1]} |" + " |" * 10 + f" failed: {runs[0]['failed'].replace('|', '/')} |")
            continue
        base = [r for r in found if (r["spec"]["job"], r["spec"]["variant"]) == (key[0], "trainer") and not r["failed"]]
        middle = lambda name, some=whole: statistics.median(r[name] for r in some)
        ratio = f"{middle('samples_per_second') / middle('samples_per_second', base):.2f}" if base else ""
        times = f"{middle('to_end_of_training') / middle('to_end_of_training', base):.2f}" if base else ""
        peak = f"{statistics.median(r['peak']['allocated'] for r in whole) / 1e9:.2f}" if whole[0]["peak"] else ""
        cells = [f"{middle('samples_per_second'):,.1f}", f"{middle('tokens_per_second'):,.0f}", ratio]
        to_steady = (
            "" if "group" in key[1] or "all" in key[1] else f"{middle('to_steady'):.1f}"
        )  # with groups, long texts look slow
        cells += [f"{middle('to_step_10'):.1f}", to_steady, f"{middle('start_cost'):.1f}"]
        cells += [str(whole[0]["steps"]), f"{middle('to_end_of_training'):.1f}", times, peak, whole[0].get("note", "")]
        lines.append(f"| {' | '.join([*key, *cells])} |")
    return lines


def about_the_machine() -> dict[str, Any]:
    import accelerate
    import torch
    import transformers

    asked = ["nvidia-smi", "-L"] if shutil.which("nvidia-smi") else ["true"]
    gpu = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = {package.__name__: package.__version__ for package in (torch, transformers, accelerate)}
    return {"gpu": gpu, "cores": os.cpu_count(), "commit": commit, **versions}


def main(options: argparse.Namespace) -> None:
    bench, found, parts = Bench(options), {"speed": [], "long": [], "curve": []}, []
    names = options.only or list(bench.jobs)
    what = "curve" if options.seeds else "long" if options.long else "speed"
    for name in names:
        run = {"curve": bench.curves, "long": bench.long_jobs, "speed": bench.timings}[what]
        found[what] += run(name)
        if what == "curve" and (whole := [r for r in found["curve"] if not r["failed"] and r["spec"]["job"] == name]):
            path = (options.out.parent if options.out else options.work) / f"curves-{name}.png"
            draw_curves(whole, f"{name}: training loss, moving mean of {max(1, whole[0]['steps'] // 40)}", path)
            print(f"curves in {path}")
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"machine": about_the_machine(), **found}, indent=1))
    if what == "curve":
        parts += ["", *curve_table(found["curve"])]
    else:
        parts += ["", *speed_table(found[what])]
    print("\n".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/vs_trainer"), help="folder for data, models and runs, which are reused"
    )
    parser.add_argument("--only", nargs="+", choices=JOBS, help="jobs to run; default: all")
    parser.add_argument("--variants", nargs="+", help=f"some of {', '.join([*TRAINER, 'ours'])}, and names of --ours")
    parser.add_argument(
        "--ours", action="append", default=[], metavar="NAME=OPTIONS", help="one more variant of our recipe; repeatable"
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of each run, a multiple of 10; default: those of the job")
    parser.add_argument("--rows", type=int, default=0, help="number of training rows; default: that of the job")
    parser.add_argument("--rounds", type=int, default=1, help="how often all variants are timed")
    parser.add_argument("--long", action="store_true", help="time whole jobs of as many steps as Trainer does in --seconds_job")
    parser.add_argument("--seconds_job", type=float, default=180)
    parser.add_argument("--seeds", type=int, nargs="+", help="draw loss curves with these seeds instead of timing")
    parser.add_argument("--tiny", action="store_true", help="tiny models and texts, for a CPU")
    parser.add_argument("--out", type=Path, help="a .json file for all results; images of curves go to the same folder")
    parser.add_argument("--limit", type=float, default=0, help="seconds after which no further run is started")
    parser.add_argument("--timeout", type=float, default=540, help="seconds that one run may take")
    parser.add_argument("--retry", action="store_true", help="repeat runs that failed in an earlier call")
    parser.add_argument("--trainer_in", type=Path, help=argparse.SUPPRESS)  # in the process of a Trainer: its folder
    parser.add_argument(
        "--score", type=Path, nargs="+", help=argparse.SUPPRESS
    )  # in the process of `score_models`: folders of runs
    options = parser.parse_args()
    if options.trainer_in:
        train_with_trainer(options.trainer_in)
    elif options.score:
        score_models(options.score)
    elif options.steps % LOG_EVERY or any("=" not in entry for entry in options.ours):
        parser.error(f"--steps {options.steps} must be a multiple of {LOG_EVERY}, and --ours must have the form NAME=OPTIONS")
    else:
        main(options)
