"""Our recipes compared with HF Trainer on one GPU: samples/s, tokens/s, seconds of whole jobs, memory, loss curves.

    python benchmarks/vs_trainer.py --work DIR --out speed.json --rounds 3              # all jobs and variants, with their spread
    python benchmarks/vs_trainer.py --table speed.json                                  # the table and its commands, in Markdown
    python benchmarks/vs_trainer.py --work DIR --only sft1b4 --variants trainer trainer+flex ours --limit 500
    python benchmarks/vs_trainer.py --work DIR --only bert32 --ours "eager=--compile off" --ours "rows=--padding_free off"
    python benchmarks/vs_trainer.py --work DIR --long --seconds_job 180                 # whole jobs, including the start
    python benchmarks/vs_trainer.py --work DIR --seeds 0 1 2                            # loss curves of both sides
    python benchmarks/vs_trainer.py --work DIR --tiny --variants trainer ours           # on a CPU, to test the script
    python benchmarks/vs_trainer.py --work DIR --short --before CHECKOUT                # 4 jobs, also with the code of an older version

The jobs are a BERT-base classifier with batches of 32 and of 128 texts, a decoder of SmolLM2-135M's shape and one of 1.4 billion
parameters with batches of 16, LoRA and QLoRA (4 bits) of Llama 3.1 8B's shape with batches of 8, DPO of the 135M decoder, and decoders
of the shapes of Qwen3-0.6B, Qwen3.5 and gpt-oss (the last two are smaller). Models (random weights) and texts
(lognormal lengths: mean 232 tokens and at most 512, or from 1.4B on mean 400 and at most 1,024) are generated from seeds. Both sides
load the same model folder. They train on the same rows in the same order, except where Trainer groups by length. Both use AdamW with
the same learning rates, bf16 autocast over float32 weights (bf16 weights below adapters), a log line every 10 steps, and tokenized
data in a warm cache. Each variant runs in its own process.

`ours, cold` begins with an empty cache of compiled kernels, as every Trainer does, and `ours, warm` with the cache that the last cold
run of the job has left; `--variants ours` means both. A run too short to be compiled leaves none: to measure a warm cache then, first
run `--ours "compiled=--compile on" --variants "compiled, cold"`. `trainer+flat` uses DataCollatorWithFlattening, and `trainer+flex`
FlexAttention besides. A job's seconds are those from the command to the end of the last step: a timed process leaves there, without
evaluating and saving. A run that is complete in DIR is not repeated, so a call can be cut with `--limit` and continued by the same
command. The table shows why a run failed.

`--short` answers in less than 6 minutes on an H200 whether a change made training slower: a row for each job, whose rates are those of
the code in `--before`, of this code and of Trainer, one after the other on this machine. These runs are too short to be compiled. They
are repeated in each call, because the code may have changed.
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
PROCESS = str(ROOT / "benchmarks" / "trainer_process.py")
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
    adapters: str = ""  # "lora", "qlora"
    short: tuple[int, int] = (0, 0)  # steps, and those before the measured ones, of --short


JOBS = {
    "bert32": Job("bert", "classify", 32, steps=350, warm=100, curve_steps=600, lr=1e-4, short=(200, 100)),
    "bert128": Job("bert", "classify", 128, steps=150, warm=50, curve_steps=200, lr=1e-4),
    "sft16": Job("decoder", "sft", 16, steps=150, warm=50, curve_steps=200, lr=6e-4, short=(100, 50)),
    "sft1b4": Job("decoder1b4", "sft", 16, steps=100, warm=50, curve_steps=100, lr=1e-4, short=(50, 30)),
    "lora8b": Job("decoder8b", "sft", 8, steps=50, warm=30, curve_steps=50, lr=2e-4, adapters="lora"),
    "qlora8b": Job("decoder8b", "sft", 8, steps=50, warm=30, curve_steps=50, lr=2e-4, adapters="qlora"),
    "dpo": Job("pairs", "dpo", 16, steps=150, warm=50, curve_steps=100, lr=1e-5, short=(80, 40)),
    "qwen3": Job("qwen3", "sft", 16, steps=100, warm=50, curve_steps=100, lr=1e-4, short=(60, 30)),
    "qwen3.5": Job("qwen3.5", "sft", 16, steps=100, warm=50, curve_steps=100, lr=1e-4, short=(60, 30)),
    "gpt-oss": Job("gpt-oss", "sft", 16, steps=100, warm=50, curve_steps=100, lr=1e-4, short=(60, 30)),
}
SHORT = ("bert32", "sft16", "sft1b4", "dpo")
# Trainer uses fused AdamW by default with torch 2.8 or newer, and pins memory by default. Every variant has both.
TRAINER = {
    "trainer": {},
    "trainer+group": {"group": True},
    "trainer+workers": {"dataloader_num_workers": 4, "dataloader_persistent_workers": True, "dataloader_pin_memory": True},
    "trainer+compile": {"torch_compile": True},
}
TRAINER["trainer+all"] = {name: value for flags in TRAINER.values() for name, value in flags.items()}
DECODERS = {  # which Liger supports, and whose texts need no own row
    "trainer+liger": {"use_liger_kernel": True},
    "trainer+flat": {"flat": True},
    "trainer+flex": {"flat": True, "attention": "flex_attention"},
    "trainer+flat+liger": {"flat": True, "use_liger_kernel": True},
}
TRAINER |= DECODERS

TINY_JOBS = {
    name: dataclasses.replace(job, batch=16 if name == "bert128" else 8, steps=40, warm=20, curve_steps=60, short=(20, 10))
    for name, job in JOBS.items()
    if job.adapters != "qlora"
}
TINY_JOBS = {name: dataclasses.replace(job, lr=1e-3 if job.recipe == "classify" else 3e-3) for name, job in TINY_JOBS.items()}


def fill_our_cache(job: Job, words: list[str]) -> None:
    """Tokenise as the recipe does. The tokens of both sides are on disk before a run is timed."""
    sys.path.append(str(ROOT / "recipes"))
    from importlib import import_module

    from accel_ddp.config.parsing import parse_config

    recipe = import_module(job.recipe)
    recipe.Task(parse_config(recipe.Config, words), None)


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


# Content of sitecustomize.py, which Python imports at its start. It writes the peak of GPU memory at the exit of any process. A timed
# run exits after its last step, because the checkpoint of a large model takes more time and disk than all steps.
PEAK_AT_EXIT = """
import atexit, json, os, sys, threading, time
def write_peak():
    torch, file = sys.modules.get("torch"), os.environ["PEAK_MEMORY_FILE"]
    if torch is not None and torch.cuda.is_initialized():
        peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if not os.path.exists(file) or json.load(open(file))["allocated"] < peak["allocated"]:  # not that of a helper process
            open(file, "w").write(json.dumps(peak))
atexit.register(write_peak)
def leave_after(step, log):
    while not (os.path.exists(log) and any(e["event"] == "update" and e["step"] >= step for e in read(log))):
        time.sleep(0.1)
    write_peak()
    os._exit(0)
def read(log):
    with open(log) as file:
        return [json.loads(line) for line in file.readlines()[-3:] if line.endswith("\\n")]
if "LEAVE_AFTER" in os.environ:  # not in child processes
    step, log = os.environ.pop("LEAVE_AFTER").split(":", 1)
    threading.Thread(target=leave_after, args=(int(step), log), daemon=True).start()
"""


def busy_seconds() -> tuple[float, float]:
    """Return the CPU seconds of the whole machine, and those of ended processes that this process has started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _waiting, *interrupts = ticks[:7]
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), own.ru_utime + own.ru_stime


def run_process(
    command: list[str], folder: Path, work: Path, timeout: float, own_env: dict[str, str] | None = None, root: Path = ROOT
) -> dict[str, Any]:
    """Run a process and return when it began and how it ended. Its output is in log.txt."""
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(PEAK_AT_EXIT)
    env = {**os.environ, **environment(work), "PEAK_MEMORY_FILE": str(folder / "peak.json")}
    env["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), str(root), env["PYTHONPATH"]])
    # An empty folder. Otherwise the second run of a variant would use the kernels that the first one has compiled.
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    if own_env:  # it has a cache of its own
        del env["TORCHINDUCTOR_CACHE_DIR"]
        env |= own_env
    began, before = time.time(), busy_seconds()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=env, cwd=root)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"more than {timeout:.0f} s"
            process.wait()
    ended, after = time.time(), busy_seconds()
    shutil.rmtree(folder / "inductor", ignore_errors=True)
    peak = json.loads((folder / "peak.json").read_text()) if (folder / "peak.json").exists() else None
    return {
        "began": began,
        "process_seconds": ended - began,
        # Cores that other processes used during the run. If they used many, the time of the run means nothing.
        "others_cores": max(0.0, (after[0] - before[0]) - (after[1] - before[1])) / (ended - began),
        "peak": peak,
        "peak_gb": (peak or {}).get("allocated", 0) / 1e9,
        "failed": "" if code == 0 else f"{code}: {reason_in(folder / 'log.txt')}",
    }


def reason_in(log: Path) -> str:
    """Return the line of a log that states why the process failed: one with `error:`, or the last line of a traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
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


def kernels_for(spec: Spec, work: Path) -> Path:
    """Return a copy of the cache without compiled kernels or, for a warm run, the cache that the last cold run has left."""
    cache = work / "kernels" / f"{spec['kind']}-{spec['job']}"
    if not spec["variant"].endswith(", warm"):
        shutil.rmtree(cache, ignore_errors=True)
        if spec["kind"] == "short":  # each version of the code tokenises
            cache.mkdir(parents=True)
            return cache
        shutil.copytree(environment(work)["ACCEL_DDP_CACHE"], cache, copy_function=os.link)
    return cache


def remove(folder: Path) -> None:
    """Delete a run, to whose folder its monitor may still write for a moment."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.5)


def run_ours(spec: Spec, folder: Path, work: Path, timeout: float) -> dict[str, Any]:
    own_env = {"ACCEL_DDP_CACHE": str(kernels_for(spec, work))}
    if spec["kind"] != "curve" and spec.get("leaves", True):
        own_env["LEAVE_AFTER"] = f"{spec['steps']}:{folder / 'run' / 'log.jsonl'}"
    if not Path(own_env["ACCEL_DDP_CACHE"]).exists():
        folder.mkdir(parents=True)
        return {"failed": "a warm run needs the cache of a cold one; add it to --variants"}
    command = [*spec["command"], "--output_dir", str(folder / "run")]
    result = run_process(command, folder, work, timeout, own_env, Path(spec.get("root", ROOT)))
    if result["failed"]:
        remove(folder / "run")
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
    remove(folder / "run")
    return result


def run_trainer(spec: Spec, folder: Path, work: Path, timeout: float) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    result = run_process([PROCESS, "train", str(folder)], folder, work, timeout)
    if result["failed"]:
        return result
    measured = json.loads((folder / "measured.json").read_text())
    lengths = np.load(Path(spec["data"]) / "train_lengths.npy")
    tokens_of_step = lengths[np.array(measured["rows"])].reshape(-1, spec["batch"]).sum(1)
    times = {step: moment for step, moment in enumerate(measured["times"], start=1)}
    if spec["kind"] == "curve":
        result["losses"] = measured["losses"]
    return {**result, **figures(times, result["began"], spec["batch"], spec["warm"], tokens_of_step)}


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
    words |= {"lora_r": 16, "lora_alpha": 16, "merge_adapters": "off", "gradient_checkpointing": "false"} if job.adapters else {}
    words |= {"quantize": "4bit"} if job.adapters == "qlora" else {"dtype": family.dtype} if precision == "bf16" else {}
    more = ["--no_eval_first", *(["--samples", "0", "--packing", "off"] if job.recipe == "sft" else []), *shlex.split(extra)]
    return [f"recipes/{job.recipe}.py", *(part for name, value in words.items() for part in (f"--{name}", str(value))), *more]


class Bench:
    """The runs of this call, and those of earlier calls in the same folder."""

    def __init__(self, options: argparse.Namespace):
        os.environ |= environment(options.work.resolve())  # libraries read it when they are imported
        import torch

        work = options.work / "short" if options.short else options.work  # with fewer rows
        self.options, self.work, self.began = options, work.resolve(), time.monotonic()
        self.jobs, self.families = (TINY_JOBS, TINY_FAMILIES) if options.tiny else (JOBS, FAMILIES)
        if options.rows or options.short:
            rows_of = lambda family: options.rows or min(family.rows, 6400)
            self.families = {name: dataclasses.replace(family, rows=rows_of(family)) for name, family in self.families.items()}
        # This does not initialise CUDA, which would take GPU memory.
        self.precision = "bf16" if torch.cuda.device_count() else "no"
        ours = {"ours": "", **dict(entry.split("=", 1) for entry in options.ours)}
        self.ours = {f"{name}, {state}": extra for name, extra in ours.items() for state in ("cold", "warm")}
        names, asked = [*TRAINER, *self.ours], options.variants or [*TRAINER, *ours]
        unknown = [name for name in asked if name not in (*names, *ours)]
        if unknown:
            sys.exit(f"--variants {' '.join(unknown)}: must be some of {', '.join([*names, *ours])}")
        # In the order asked for. "ours" means both of its states.
        self.variants = [name for one in asked for name in names if one in (name, name.rsplit(", ", 1)[0])]
        self.cached: set[str] = set()

    def variants_of(self, name: str) -> list[str]:
        """Return the variants of a job. Only decoders can flatten their texts."""
        without = {"sft": {}, "classify": DECODERS, "dpo": TRAINER}[self.jobs[name].recipe]
        return [variant for variant in self.variants if variant not in without]

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
            "model": str(model), "log_every": log_every, "adapters": job.adapters,
        }  # fmt: skip
        if variant in TRAINER:
            order = self.work / "data" / f"order-{name}-{seed}-{steps}.npy"
            if not order.exists():  # whole epochs, and one more because Trainer reads ahead
                rows = family.rows
                np.save(order, our_order(rows, seed, (steps * job.batch // rows + 2) * rows))
            return {**spec, "flags": TRAINER[variant], "order": str(order)}
        words = our_command(job, family, data, model, self.precision, steps, seed, self.ours.get(variant, ""), log_every)
        if kind == "short":
            return {**spec, "command": words, "root": str(ROOT if variant == "now" else self.options.before.resolve())}
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
        if file.exists() and spec["kind"] != "short":
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
            for variant in self.variants_of(name):
                found.append(self.run(self.spec("speed", name, variant, steps, warm), number))
        return [result for result in found if result]

    def short_runs(self, name: str) -> list[dict[str, Any]]:
        steps, warm = self.jobs[name].short
        has = {"before": self.options.before, "now": True, "trainer": self.jobs[name].recipe != "dpo"}
        found = [self.run(self.spec("short", name, variant, steps, warm)) for variant in has if has[variant]]
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
        found = [self.run(self.spec("long", name, variant, steps, warm)) for variant in self.variants_of(name)]
        return [result for result in found if result]

    def curves(self, name: str) -> list[dict[str, Any]]:
        job, found = self.jobs[name], []
        steps = self.options.steps or job.curve_steps
        chosen = self.variants if self.options.variants else ["trainer", *(one for one in self.ours if one.endswith("cold"))]
        for seed in self.options.seeds:
            for variant in chosen:
                warm = min(job.warm, steps // 2 // LOG_EVERY * LOG_EVERY)
                found.append(self.run(self.spec("curve", name, variant, steps, warm, seed)))
        folders = [self.folder_of(result["spec"]) for result in found if result]  # not those of another call that runs now
        unscored = [str(folder) for folder in folders if (folder / "model").is_dir()]
        if unscored:
            env = {**os.environ, **environment(self.work)}
            subprocess.run([sys.executable, PROCESS, "score", *unscored], env=env, check=False)
        return [self.run(result["spec"]) for result in found if result]


# ------------------------------------------------------------------------------------------------ output


def spread(values: list[float], digits: int = 1) -> str:
    """Return the median and, of several values, the smallest and the largest."""
    ends = f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.median(values):,.{digits}f}{ends}"


def speed_table(found: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row for each job and variant: medians over the rounds, and ratios to Trainer's default."""
    titles = ["job", "variant", "samples/s", "ratio", "tokens/s", "s to step 10", "steps", "s", "ratio", "peak GB", "ratio", ""]
    lines = [f"| {' | '.join(titles)} |", "|---|---" + "|--:" * 9 + "|---|"]
    runs_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in found:
        runs_of.setdefault((run["spec"]["job"], run["spec"]["variant"]), []).append(run)
    last = ""
    for (job, variant), runs in runs_of.items():
        shown, last = "" if job == last else job, job
        whole = [run for run in runs if not run["failed"]]
        if not whole:
            lines.append(f"| {shown} | {variant} |" + " |" * 9 + f" failed: {runs[0]['failed'].replace('|', '/')} |")
            continue
        base = [run for run in runs_of.get((job, "trainer"), []) if not run["failed"]]
        names = ("samples_per_second", "tokens_per_second", "to_step_10", "to_end_of_training", "peak_gb")
        ours, theirs = (
            {name: statistics.median(run.get(name, 0) for run in some) for name in names} for some in (whole, base or whole)
        )
        ratio = {name: f"{ours[name] / theirs[name]:.2f}" if base and theirs[name] else "" for name in names}
        if base and base[0]["steps"] != whole[0]["steps"]:
            ratio["to_end_of_training"] = ""
        cells = [spread([run["samples_per_second"] for run in whole]), ratio["samples_per_second"]]
        cells += [f"{ours['tokens_per_second']:,.0f}", f"{ours['to_step_10']:.1f}", str(whole[0]["steps"])]
        cells += [spread([run["to_end_of_training"] for run in whole]), ratio["to_end_of_training"]]
        cells += [f"{ours['peak_gb']:.1f}", ratio["peak_gb"], whole[0].get("note", "")]
        lines.append(f"| {' | '.join([shown, variant, *cells])} |")
    return lines


def short_table(found: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row for each job: samples/s of the older code, of this code and of Trainer, and ratios of this code."""
    lines = ["| job | before | now | now / before | HF Trainer | now / HF Trainer |", "|---" + "|--:" * 5 + "|"]
    for job in dict.fromkeys(run["spec"]["job"] for run in found):
        rates = {run["spec"]["variant"]: run.get("samples_per_second") for run in found if run["spec"]["job"] == job}
        own = {"before": rates.get("before"), "now": rates.get("now"), "trainer": rates.get("trainer")}
        cells = [f"{rate:,.1f}" if rate else "failed" * (name in rates) for name, rate in own.items()]
        now, others = rates.get("now"), (rates.get("before"), rates.get("trainer"))
        ratios = [f"{now / other:.2f}" if now and other else "" for other in others]
        lines.append(f"| {job} | {cells[0]} | {cells[1]} | {ratios[0]} | {cells[2]} | {ratios[1]} |")
    return lines


def commands_of(found: list[dict[str, Any]], call: list[str]) -> list[str]:
    """Return the call of this script, and for each variant the options in which it differs from the others."""
    lines = ["", f"`python {shlex.join(call)}`", ""]
    for variant, spec in {run["spec"]["variant"]: run["spec"] for run in found}.items():
        flags = ", ".join(f"{name}={value}" for name, value in spec.get("flags", {}).items())
        example = shlex.join(word for word in spec.get("command", []))
        lines.append(f"- {variant}: " + (f"`python {example}`" if example else f"TrainingArguments({flags})"))
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
    bench, found, parts = Bench(options), {"speed": [], "long": [], "curve": [], "short": []}, []
    names = options.only or (SHORT if options.short else list(bench.jobs))
    what = "short" if options.short else "curve" if options.seeds else "long" if options.long else "speed"
    for name in names:
        run = {"curve": bench.curves, "long": bench.long_jobs, "speed": bench.timings, "short": bench.short_runs}[what]
        found[what] += run(name)
        if what == "curve" and (whole := [r for r in found["curve"] if not r["failed"] and r["spec"]["job"] == name]):
            path = (options.out.parent if options.out else options.work) / f"curves-{name}.png"
            draw_curves(whole, f"{name}: training loss, moving mean of {max(1, whole[0]['steps'] // 40)}", path)
            print(f"curves in {path}")
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"machine": about_the_machine(), "call": sys.argv, **found}, indent=1))
    if what == "curve":
        parts += ["", *curve_table(found["curve"])]
    elif what == "short":
        parts += ["", *short_table(found["short"])]
    else:
        parts += ["", *speed_table(found[what])]
    print("\n".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/vs_trainer"), help="folder for data, models and runs, which are reused"
    )
    parser.add_argument("--table", type=Path, help="print the results of this .json file as Markdown, and run nothing")
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
    parser.add_argument("--short", action="store_true", help=f"compare few steps of {', '.join(SHORT)} (or of --only)")
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an older version, for --short")
    parser.add_argument("--tiny", action="store_true", help="tiny models and texts, for a CPU")
    parser.add_argument("--out", type=Path, help="a .json file for all results; images of curves go to the same folder")
    parser.add_argument("--limit", type=float, default=0, help="seconds after which no further run is started")
    parser.add_argument("--timeout", type=float, default=540, help="seconds that one run may take")
    parser.add_argument("--retry", action="store_true", help="repeat runs that failed in an earlier call")
    options = parser.parse_args()
    if options.table:
        stored = json.loads(options.table.read_text())
        runs = stored["speed"] + stored["long"]
        print("\n".join([*speed_table(runs), *commands_of(runs, stored["call"])]))
    elif options.steps % LOG_EVERY or any("=" not in entry for entry in options.ours):
        parser.error(f"--steps {options.steps} must be a multiple of {LOG_EVERY}, and --ours must have the form NAME=OPTIONS")
    elif options.before and not (options.short and (options.before / "recipes").is_dir()):
        parser.error(f"--before {options.before}: must be a checkout with the folder recipes, and needs --short")
    elif options.short and (lasting := [name for name in options.only or () if not JOBS[name].short[0]]):
        parser.error(f"--short: {', '.join(lasting)} cannot be short")
    else:
        main(options)
