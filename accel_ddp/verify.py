"""`accel-ddp verify`: a test of the promises on the user's own machine or cluster, with the user's model and data.

Every run launches the recipe unchanged and stops it after a few steps. `training.recorded` starts the recipe and records which
samples its data loaders read. Then these samples and the files of the last checkpoint are compared.
"""

import functools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.nodes.launcher import cpu_is_wanted, parse_accelerate_command, stated_precision
from accel_ddp.nodes.messages import find_free_port
from accel_ddp.nodes.spawn import MODULE, clean_environment, kill_tree, rank_environment
from accel_ddp.records import run_log
from accel_ddp.saving import checkpoint_format
from accel_ddp.saving.pieces import is_identical, largest_difference
from accel_ddp.text import counted, table
from accel_ddp.words import script_at

# SGD without dropout: AdamW makes full steps of rounding errors where a gradient is zero, and dropout draws other values for other
# micro-batches. With gradients clipped to 1, a step moves the weights by at most this learning rate.
EXACT = ["--no_dropout", "--no_tf32", "--optimizer", "sgd", "--lr", "0.01", "--lr_schedule", "constant", "--warmup_steps", "1"]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # as `accelerate launch` sets it for accelerate_configs/fsdp.yaml
TWO_COPIES = {**FSDP, "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
RECORDED = str(Path(__file__).parent / "training" / "recorded.py")  # runs in the ranks: it is in a higher layer
ALLOWED = {"no": 1e-5, "bf16": 2e-4, "fp16": 2e-4}  # largest difference of any weight, by the precision of computation
SCALE = {"no": 1e-3, "bf16": 0.1, "fp16": 0.1}  # largest relative difference of the first loss and gradient norm


Row = tuple[tuple[str, ...], str]  # a row of the table, and why the comparison failed; "": it passed


def verify(words: list[str], steps: int, folder: str, shards: bool = False) -> int:
    """Print a table of comparisons. Return 0 if all passed, and 1 if one failed."""
    at = script_at(words)
    if at == len(words):
        raise UserError("accel-ddp verify needs a recipe: accel-ddp verify recipes/classify.py [options of the recipe]")
    launch, recipe, options = words[:at], words[at], words[at + 1 :]
    if not Path(recipe).is_file():
        raise UserError(f"accel-ddp verify {recipe}: there is no such file.")
    if steps < 4:
        raise UserError(f"--steps {steps}: must be 4 or more, so that a run can be killed between two checkpoints.")
    if shards and launch:
        raise UserError(
            f"--fsdp and {launch[0]}: with options of accelerate launch, the config decides whether the model is sharded. Leave --fsdp "
            "out, and use --config_file accelerate_configs/fsdp.yaml or 2node_fsdp.yaml."
        )
    place = Path(folder or tempfile.mkdtemp(prefix="accel_ddp_verify_"))
    place.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        code = _Verification(place, launch, recipe, options, steps, shards).compare_all()
        print(f"{time.monotonic() - began:.0f} seconds" + (f"; the runs are in {place}" if folder else ""))
        return code
    finally:
        if not folder:
            shutil.rmtree(place, ignore_errors=True)


class _Verification:
    def __init__(self, place: Path, launch: list[str], recipe: str, options: list[str], steps: int, shards: bool):
        self.place, self.launch, self.recipe, self.steps, self.shards = place, launch, recipe, steps, shards
        every = ["--save_every", "2", "--keep_last", "2", "--log_every", "1"]
        if not any(word.startswith("--compile") for word in options):
            every += ["--compile", "graphs"]  # `auto` would choose another step in each run
        self.options = [*options, *every, "--eval_every", "1000000000", "--no_eval_first", "--report_to", "", "--push_to_hub", ""]
        request = (parse_accelerate_command(["accelerate", "launch", *launch]) or {}) if launch else {}
        self.node = int(request.get("machine_rank") or os.environ.get("NODE_RANK", 0))
        self.port = int(request.get("main_process_port") or 29500)
        self.precision = stated_precision(request) or "no"  # an option of the recipe takes precedence
        self.runs = 0
        self.has_log = True

    def compare_all(self) -> int:
        import torch

        gpus = 0 if cpu_is_wanted() else torch.cuda.device_count()
        # A power of 2, which divides most batches. With options of a launcher, they decide.
        several = 0 if self.launch else 2 if gpus == 0 else 1 << (gpus.bit_length() - 1)
        if self.shards and several < 2:
            raise UserError("--fsdp: needs two GPUs, and there is one. To use CPUs instead, set ACCELERATE_USE_CPU=true.")
        sharded = FSDP if self.shards else None

        # The runs on all nodes come first, so that the other nodes do not have to wait for the runs on node 0 alone.
        killed, end = self.killed("killed", several or 1, sharded)
        straight = self.run("straight", several or 1, end, env=sharded)
        ranks = self.run("ranks", several, self.steps, *EXACT) if several > 1 or self.launch else None
        if self.node > 0:
            print(f"node {self.node} has finished its runs. The table is printed on node 0.")
            return 0
        one = self.run("one", 1, self.steps, *EXACT, alone=True)
        self.has_log = bool(one.updates)
        lines = []
        options = one.run["config"]
        kind = "tokens" if options.get("micro_batch_tokens") else "size"
        share = options.get("micro_batch_tokens") or min(options["micro_batch_size"], options["global_batch_size"])
        if share > 1 and not self.shards:
            other = share // 2 if share % 2 == 0 else 1
            smaller = self.run("micro", 1, self.steps, *EXACT, f"--micro_batch_{kind}", str(other), alone=True)
            lines.append(self.within(f"micro-batch {other} and {share}{' tokens' * (kind == 'tokens')}", one, smaller))
        if ranks:
            lines.append(self.within(f"{_describe(ranks)} and 1 rank", one, ranks))
        lines += self.compare_sharded(one, ranks, gpus) if ranks and self.shards else []
        lines += self.isolated(one)
        lines.append(self.identical(straight, killed))
        last_two = checkpoint_format.list_checkpoints(one.path.parent)[-2:]
        device = torch.cuda.get_device_name() if gpus else "CPU"
        self.show(lines, one.run["precision"], device, moved=largest_difference(last_two[0], last_two[-1])[0])
        if not ranks:
            print("Another number of ranks was not compared, because there is only one GPU.")
        return 1 if any(problem for _, problem in lines) else 0

    def compare_sharded(self, one: "VerifiedRun", ddp: "VerifiedRun", gpus: int) -> list[Row]:
        """Run with FSDP, with two copies of the model (HSDP), and resumed from FSDP to DDP and back. Compare each with one rank."""
        several = ddp.run["num_ranks"]
        fsdp = self.run("fsdp", several, self.steps, *EXACT, env=FSDP)
        lines = [self.within(f"{_describe(fsdp)} and 1 rank", one, fsdp)]
        four = max(4, several)
        if (not gpus or gpus >= four) and one.run["config"]["global_batch_size"] % four == 0:
            copies = self.run("copies", four, self.steps, *EXACT, env=TWO_COPIES)
            lines.append(self.within(f"{_describe(copies)} and 1 rank", one, copies))
        for name, before, env in (("fsdp_to_ddp", fsdp, None), ("ddp_to_fsdp", ddp, FSDP)):
            middle = checkpoint_format.list_checkpoints(before.path.parent)[-2]
            after = self.run(name, several, self.steps, *EXACT, "--resume", str(middle), env=env)
            kinds = ["FSDP", "DDP"] if env is None else ["DDP", "FSDP"]
            step = checkpoint_format.step_of(middle)
            lines.append(self.within(f"{kinds[0]} until step {step}, then {kinds[1]}", one, after, since=step))
        return lines

    def command(
        self, name: str, ranks: int, more: list[str], alone: bool, sharded: dict[str, str] | None
    ) -> list[tuple[list[str], dict[str, str]]]:
        record = self.place / name / "samples"
        record.mkdir(parents=True, exist_ok=True)
        words = [RECORDED, str(record), self.recipe, *self.options, *more, "--output_dir", str(self.place / name)]
        env = clean_environment() | (sharded or {}) | {"PYTHONUNBUFFERED": "1", "ACCELERATE_MIXED_PRECISION": self.precision}
        self.runs += 1
        if self.launch and not alone:
            launch = [w for i, w in enumerate(self.launch) if "--main_process_port" not in (w, *self.launch[max(0, i - 1) : i])]
            launch += ["--main_process_port", str(self.port + self.runs)]  # the port of the last run may still be closing
            launch += ["--mixed_precision", self.precision]
            return [([sys.executable, *MODULE, "accelerate.commands.launch", *launch, *words], env)]
        if ranks == 1:
            return [([sys.executable, *words], {"CUDA_VISIBLE_DEVICES": "0", **env})]
        place = "127.0.0.1", find_free_port("127.0.0.1")
        return [([sys.executable, *words], env | rank_environment([ranks], 0, rank, *place)) for rank in range(ranks)]

    def run(
        self, name: str, ranks: int, end: int, *more: str, alone: bool = False, env: dict[str, str] | None = None, how: str = ""
    ) -> "VerifiedRun":
        started = self.start(f"{name}{how}", name, self.command(name, ranks, ["--stop_after", str(end), *more], alone, env))
        for process in started:
            process.wait()
        return self.result(name, started, end)

    def start(self, title: str, name: str, commands: list[tuple[list[str], dict[str, str]]]) -> list[subprocess.Popen]:
        print(f"running: {title} ...", flush=True)
        log = (self.place / f"{name}.txt").open("a")
        return [subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT) for words, env in commands]

    def killed(self, name: str, ranks: int, env: dict[str, str] | None) -> tuple["VerifiedRun", int]:
        """Kill a run at its first checkpoint on node 0, and resume it. Return it and its last step, which several nodes fix."""
        fixed = self.steps + 20 if self.launch else 0
        started = self.start(name, name, self.command(name, ranks, ["--stop_after", str(fixed)], False, env))
        while any(process.poll() is None for process in started):
            if self.node == 0 and checkpoint_format.list_checkpoints(self.place / name):
                for process in started:
                    kill_tree(process.pid)
            time.sleep(0.002)
        before = checkpoint_format.list_checkpoints(self.place / name)
        at = checkpoint_format.step_of(before[-1]) if before else 0
        end = fixed or at + 4
        if not before and self.node == 0:  # the run failed by itself
            return self.result(name, started, end), end
        result = self.run(name, ranks, end, "--resume", env=env, how=f"{f' at step {at}' if at else ''}, resumed")
        result.killed_at = at
        return result, end

    def result(self, name: str, started: list[subprocess.Popen], end: int) -> "VerifiedRun":
        found = checkpoint_format.list_checkpoints(self.place / name)
        if self.node > 0:
            return VerifiedRun(Path(), {}, {})
        problem = checkpoint_format.find_problem(found[-1]) if found else "there is no checkpoint"
        run = checkpoint_format.read_run(found[-1]) if found and not problem else {}
        if run and run["step"] != min(end, run["total_steps"]):
            problem = f"it stopped at step {run['step']} instead of {end}"
        if problem:
            output = (self.place / f"{name}.txt").read_text().splitlines()
            codes = ", ".join(str(process.returncode) for process in started)
            errors = [line for line in output if line.startswith("error: ")]
            if errors and all(process.returncode == USER_ERROR for process in started) and output[-1].strip() in ("", errors[-1]):
                reason = errors[-1].removeprefix("error: ")
            else:
                reason = "Its last output:\n" + "\n".join(output[-25:])
            raise UserError(f"the run '{name}' exited with code {codes}: {problem}. {reason}")
        if run["config"].get("global_batch_tokens"):
            raise UserError("--global_batch_tokens: verify compares steps of equal numbers of items. Use --global_batch_size.")
        samples = _samples(self.place / name / "samples", run["step"] * run["config"]["global_batch_size"])
        return VerifiedRun(found[-1], run, samples)

    def within(self, what: str, a: "VerifiedRun", b: "VerifiedRun", since: int = 0) -> Row:
        """Compare the weights up to rounding. `since` is the step from which `b` was resumed."""
        difference, name = largest_difference(a.path, b.path)
        allowed = ALLOWED[a.run["precision"]]
        problem = f"{name} differs by {difference:.1e}" if not difference <= allowed else ""
        return self.row(what, a, b, difference, f"{allowed:.0e}", _compare_scales(a, b) or problem, since)

    def identical(self, a: "VerifiedRun", b: "VerifiedRun") -> Row:
        names = (checkpoint_format.MODEL, checkpoint_format.OPTIMIZER)
        differing = [name.removesuffix(".safetensors") for name in names if not is_identical(a.path, b.path, name)]
        problem = f"{' and '.join(differing)} differ" if differing else ""
        if not 0 < b.killed_at < a.run["step"]:
            problem = problem or "the run finished before it could be killed. Use more data or more --steps"
        what = f"{'FSDP, ' * bool(b.run.get('shards'))}killed at step {b.killed_at}, resumed"
        return self.row(what, a, b, largest_difference(a.path, b.path)[0], "0", problem)

    def isolated(self, one: "VerifiedRun") -> list[Row]:
        """Return whether texts that are computed without padding are isolated from each other after the last step."""
        found = self.place / "one" / "samples" / "rows"
        if not found.is_file():
            return []
        problem, numbers = found.read_text(), (str(one.run["num_ranks"]), str(one.run["config"]["micro_batch_size"]))
        return [
            (("another text in a row", *numbers, "", "some" if problem else "0", "0", "FAIL" if problem else "PASS"), problem)
        ]

    def row(
        self, what: str, a: "VerifiedRun", b: "VerifiedRun", difference: float, allowed: str, problem: str, since: int = 0
    ) -> Row:
        """Return a row of the table, and its problem. Samples that differ are named before other problems."""
        first = since * a.run["config"]["global_batch_size"]
        samples = {position: found for position, found in a.samples.items() if position >= first}
        same, seen = _compared(samples, b.samples, is_share=bool(self.launch))
        problem = problem if same else seen
        numbers = str(b.run["num_ranks"]), str(b.run["config"]["micro_batch_size"])
        return (what, *numbers, seen, f"{difference:.1e}", allowed, "FAIL" if problem else "PASS"), problem

    def show(self, lines: list[Row], precision: str, device: str, moved: float) -> None:
        head = ("what", "ranks", "micro", "samples", "difference", "allowed", "")
        print(f"\n{self.steps} steps of {self.recipe} on {device}, in {'float32' if precision == 'no' else precision}\n")
        print("\n".join(table([head, *(row for row, _ in lines)])))
        print(
            "\nMicro-batches and ranks are compared without dropout and with SGD. Dropout draws other values for other micro-batches,"
            "\nand AdamW makes full steps of rounding errors where a gradient is zero. Weights may differ by at most "
            f"{ALLOWED[precision]:.0e},\nbecause sums in another order are rounded differently. In the last two steps weights moved by "
            f"up to {moved:.0e}.\nClipping hides a wrong scale, so the items of all steps, and the first loss and gradient norm "
            "before clipping,\nare compared too. A run that was killed and resumed uses your options. Its weights and optimizer must "
            "be bit-identical."
        )
        if not self.has_log:
            print("Items, loss and gradient norm were not compared, because the recipe writes no log.jsonl (hooks.standard).")
        padded = re.findall(r"^texts are padded: .*", (self.place / "one.txt").read_text(), flags=re.MULTILINE)
        for line in padded[:1]:
            print(f"T{line[1:]}")
        for row, problem in lines:
            if problem:
                print(f"FAIL: {row[0]}: {problem}")


@dataclass
class VerifiedRun:
    path: Path
    run: dict[str, Any]
    samples: dict[int, set[int]]  # position in the stream: the samples that were fetched for it
    killed_at: int = 0

    @functools.cached_property
    def updates(self) -> list[dict[str, Any]]:
        file = self.path.parent / run_log.FILE
        return [event for event in run_log.read_log(file) if event["event"] == "update"] if file.is_file() else []


def _compare_scales(a: VerifiedRun, b: VerifiedRun) -> str:
    """Return which number of a step depends on how its items are split, or "". Gradients are clipped, so weights may not show it."""
    logs = [{event["step"]: event for event in run.updates} for run in (a, b)]
    common = sorted(logs[0].keys() & logs[1].keys())
    hint = "`terms` must return the loss of each item, or their sum, and `count` the number of these items"
    for step in common:
        one, other = (log[step] for log in logs)
        if not math.isclose(one["items"], other["items"], rel_tol=1e-6):
            return f"`count` adds up to {other['items']:g} and {one['items']:g} items in step {step}. {hint}"
    for step in common[:1]:  # before it the weights are the same, so these numbers differ by rounding only
        for name, text in (("loss", "mean loss"), ("grad_norm", "gradient norm before clipping")):
            one, other = (float(log[step][name]) for log in logs)
            if not math.isclose(one, other, rel_tol=SCALE[a.run["precision"]], abs_tol=1e-6):
                return f"the {text} of step {step} is {other:.4g} and {one:.4g}. {hint}"
    return ""


def _describe(run: VerifiedRun) -> str:
    ranks, shards = run.run["num_ranks"], run.run.get("shards", 0)
    copies = ranks // shards if shards else 0
    return f"{'' if not shards else 'FSDP on ' if copies == 1 else f'{copies} copies (HSDP) on '}{counted(ranks, 'rank')}"


def _samples(folder: Path, end: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for file in folder.glob("*.txt"):
        for line in file.read_text().splitlines():
            position, index = map(int, line.split())
            if position < end:  # loaders read ahead
                found.setdefault(position, set()).add(index)
    return found


def _compared(a: dict[int, set[int]], b: dict[int, set[int]], is_share: bool) -> tuple[bool, str]:
    """Return whether each position of the stream got the same sample. `is_share`: `b` contains only the samples of this node."""
    if is_share and 0 < len(b) < len(a):
        same = sum(len(found) == 1 and a.get(position) == found for position, found in b.items())
        return same == len(b), f"{same} of {len(a)}, on this node"
    same = sum(a[position] == b.get(position) and len(a[position]) == 1 for position in a)
    return same == len(a) == len(b) > 0, f"{same} of {max(len(a), len(b))} the same"
