"""Random faults in one run on two nodes: what is diagnosed, how fast, and how much training time is lost.

    python benchmarks/chaos.py                                  # 20 faults with the default limits, about 25 minutes on 2 cores
    python benchmarks/chaos.py --faults 5 --seed 3 --quick      # short limits

The nodes are network namespaces, or loopback addresses for users who may not create them. Both nodes have a launcher with enough
restarts. A launcher that has ended is started again, as a scheduler does with a node that returns. At the end the weights and the
state of the optimizer are compared with those of a run without faults, and must be equal bit by bit. The effective training time is
the part of the time after the first step that was spent on steps that were not lost.
"""

import argparse
import itertools
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from accel_ddp.saving.checkpoint_format import MODEL, OPTIMIZER, list_checkpoints
from accel_ddp.saving.pieces import is_identical
from tests.jobs import Job, Jobs, kill
from tests.nodes import Nodes

# name -> (does it end the run?, how often it is chosen)
FAULTS = {
    "kill rank": (True, 3), "exception": (True, 2), "exit": (True, 2), "segv": (True, 2), "stop 4 s": (False, 2),
    "stop": (True, 2), "kill launcher": (True, 1), "kill node": (True, 1), "link down 3 s": (False, 2), "link down": (True, 2),
    "data": (True, 2), "straggler": (False, 2), "gil": (False, 1), "hang": (True, 1), "barrier": (True, 1), "worker": (True, 1),
    "leave": (True, 1), "skip": (True, 1), "abort": (True, 1), "one way": (True, 1), "drop": (True, 1), "freeze node 3 s": (False, 1),
}  # fmt: skip
OF_LINKS = {"link down 3 s", "link down", "one way", "drop"}
PATIENCE = 300.0  # seconds until training must have continued
RETURN_SECONDS = 2.0  # until a launcher that has ended is started again


@dataclass
class Row:
    fault: str
    target: int
    step: int
    diagnosed: str = ""
    report: float | None = None
    abort: float | None = None
    again: float | None = None
    lost: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="steps of the run; 0: 25 for each fault")
    parser.add_argument("--launcher", choices=["accelerate", "torchrun"], default="accelerate")
    parser.add_argument("--backend", choices=["static", "c10d"], default="static")
    parser.add_argument(
        "--quick", action="store_true", help="report after 1.5 s and abort after 4 s instead of the default limits"
    )
    parser.add_argument("--once", action="store_true", help="inject each of the faults once, in a random order")
    parser.add_argument("--only", nargs="*", default=[], help=f"choose from these faults: {', '.join(FAULTS)}")
    parser.add_argument("--show_output", action="store_true", help="print the output of both nodes at the end")
    options = parser.parse_args()
    if options.once:
        options.faults = len(options.only or FAULTS)
    steps = options.steps or 25 * (options.faults + 1)
    with Nodes(2) as cluster, tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(cluster)
        chaos = Chaos(jobs, Path(folder), options, steps)
        try:
            is_same = chaos.run()
        finally:
            if options.show_output:
                print(chaos.job.all_output())
            chaos.job.kill()
            jobs.close()
    raise SystemExit(0 if is_same else 1)


class Chaos:
    """One run with faults."""

    def __init__(self, jobs: Jobs, folder: Path, options: argparse.Namespace, steps: int):
        self.jobs, self.folder, self.options, self.steps = jobs, folder, options, steps
        self.random = random.Random(options.seed)
        limits = ["--hang_report_seconds", 1.5, "--hang_abort_seconds", 4] if options.quick else []
        self.arguments = ["--steps", steps, "--num_workers", 1, "--save_every", 5]
        self.faults = folder / "faults"
        self.start = jobs.launchers(
            options.launcher, 2, "--output_dir", folder / "run", "--fault_folder", self.faults, *self.arguments, *limits,
            backend=options.backend, max_restarts=10 * options.faults,
        )  # fmt: skip
        self.job: Job = jobs.job([self.start(number) for number in (0, 1)], jobs.cluster.nodes)
        self.ended_at: dict[int, float] = {}
        self.starts = 2
        names = options.only or list(FAULTS)
        self.left = self.random.sample(names, len(names)) if options.once else []

    def run(self) -> bool:
        began = time.monotonic()
        self.wait_for_step(3)
        first = self.job.steps()[0][0]
        print(f"first step after {first - began:.0f} s. {self.options.faults} faults in {self.steps} steps:\n", flush=True)
        print(
            f"{'fault':16}{'of':>4}{'step':>7}  {'diagnosed':58}{'report s':>9}{'abort s':>9}{'again s':>9}{'lost steps':>11}",
            flush=True,
        )
        rows = []
        for number in range(self.options.faults):
            self.wait_for_step(int((number + self.random.uniform(0.6, 1.0)) * self.steps / (self.options.faults + 1)))
            rows.append(self.inject(self.choose()))
            row = rows[-1]
            shown = [f"{value:.1f}" if value is not None else "" for value in (row.report, row.abort, row.again)]
            print(
                f"{row.fault:16}{row.target:>4}{row.step:>7}  {row.diagnosed:58}{shown[0]:>9}{shown[1]:>9}{shown[2]:>9}{row.lost:>11}",
                flush=True,
            )
        self.wait_for_step(self.steps)
        codes = self.job.codes(60)
        ended = self.job.steps()[-1][0]
        self.job.nothing_is_left()
        return self.conclude(rows, codes, ended - first)

    def conclude(self, rows: list[Row], codes: list[int | None], seconds: float) -> bool:
        reference = self.folder / "reference"
        with self.jobs.ranks([0, 1], "--output_dir", reference, *self.arguments, "--step_seconds", 0) as undisturbed:
            assert undisturbed.codes(300) == [0, 0], undisturbed.all_output()
        ends = [last_checkpoint(folder, self.steps) for folder in (self.folder / "run", reference)]
        is_same = all(is_identical(*ends, group) for group in (MODEL, OPTIMIZER))
        times = self.job.steps()
        step_seconds = statistics.median(
            later - earlier for (earlier, step), (later, next_step) in itertools.pairwise(times) if next_step == step + 1
        )
        again = [row.again for row in rows if row.again is not None]
        print(
            f"\nexit codes {codes}, {self.starts - 2} launchers were started again, {sum(row.lost for row in rows)} steps were lost"
        )
        if again:
            print(f"from the fault to training again: median {statistics.median(again):.1f} s, at most {max(again):.1f} s")
        print(
            f"effective training time: {self.steps} steps x {step_seconds:.3f} s = {self.steps * step_seconds:.0f} s of "
            f"{seconds:.0f} s = {self.steps * step_seconds / seconds:.1%}; one fault per {seconds / max(len(rows), 1):.0f} s"
        )
        print(
            f"the weights and the optimizer are {'bit-identical to' if is_same else 'DIFFERENT from'} those of a run without faults"
        )
        return is_same and codes == [0, 0]

    def choose(self) -> str:
        if self.options.once:
            return self.left.pop()
        names = self.options.only or list(FAULTS)
        if self.jobs.cluster.kind == "loopback":
            names = [name for name in names if name not in OF_LINKS]
        return self.random.choices(names, [FAULTS[name][1] for name in names])[0]

    def inject(self, fault: str) -> Row:
        """Inject one fault and wait until training continues."""
        job, target = self.job, self.random.randrange(2)
        is_fatal = FAULTS[fault][0]
        row, began = Row(fault, target, job.last_step()), time.monotonic()
        self.begin(fault, target)
        if is_fatal:
            self.wait(lambda: any(d.level == "error" for d in job.diagnoses(began)), "a diagnosis")
            abort = next(d for d in job.diagnoses(began) if d.level == "error")
            row.abort = abort.seconds - began
            if fault in OF_LINKS:
                time.sleep(1)
                for node in self.jobs.cluster.nodes:
                    node.link(True)
                    node.firewall()
            self.wait(lambda: any(seconds > abort.seconds + 1 for seconds, _ in job.steps()), "training again")
            again = next((seconds, step) for seconds, step in job.steps() if seconds > abort.seconds + 1)
            row.again, row.lost = again[0] - began, max(0, job_step(job, abort.seconds) - again[1] + 1)
        else:
            self.wait_for_step(job.last_step() + (22 if fault == "straggler" else 10))
            if fault == "straggler":
                self.request(target, "fast 0")
            row.again = next(seconds for seconds, step in job.steps() if seconds > began and step > row.step + 1) - began
        found = job.diagnoses(began)
        row.diagnosed = " ".join(dict.fromkeys(f"{d.level[0]}:{d.kind}" for d in found))
        row.report = found[0].seconds - began if found else None
        return row

    def begin(self, fault: str, target: int) -> None:
        """Inject a fault into a rank, or into the node with the same number. One that ends by itself is over after this."""
        pid, node = self.job.rank_pid(target), self.jobs.cluster.nodes[target]
        if fault in ("kill rank", "abort"):
            kill(pid, signal.SIGKILL if fault == "kill rank" else signal.SIGABRT)
        elif fault in ("stop", "stop 4 s", "freeze node 3 s"):
            stopped, seconds = ([pid], 4) if "node" not in fault else (node.pids(), 3)
            for one in stopped:
                kill(one, signal.SIGSTOP)
            if fault != "stop":
                time.sleep(seconds)
                for one in stopped:
                    kill(one, signal.SIGCONT)
        elif fault == "kill launcher":
            kill(self.job.processes[target].pid)
        elif fault == "kill node":
            for other in node.pids():
                kill(other)
        elif fault.startswith("link"):
            node.link(False)
            if fault == "link down 3 s":
                time.sleep(3)
                node.link(True)
        elif fault in ("one way", "drop"):
            for one in self.jobs.cluster.nodes if fault == "drop" else [node]:
                one.firewall("drop")
        else:
            self.request(target, {"straggler": "straggler 0.3", "gil": "gil 3"}.get(fault, f"{fault} 9999"))

    def request(self, rank: int, text: str) -> None:
        (self.faults / ".new").write_text(text)
        (self.faults / ".new").rename(self.faults / f"rank-{rank}")
        self.wait(lambda: not (self.faults / f"rank-{rank}").exists(), "the injection")

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.job.last_step() >= step, f"step {step}")

    def wait(self, is_done, what: str) -> None:
        """Wait for something, and meanwhile start the launchers again that have ended."""
        deadline = time.monotonic() + PATIENCE
        while not is_done():
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} did not happen within {PATIENCE:.0f} s. Output:\n{self.job.all_output()}")
            for number, process in enumerate(self.job.processes):
                code = process.poll()
                if code is None or (code == 0 and self.job.last_step() >= self.steps):
                    continue
                if re.search(r"^stopped: ", self.job.text(number), re.MULTILINE):
                    raise SystemExit(f"a fault was taken for a stop that a user requested:\n{self.job.all_output()}")
                ended = self.ended_at.setdefault(number, time.monotonic())
                if time.monotonic() - ended > RETURN_SECONDS:
                    del self.ended_at[number]
                    self.starts += 1
                    self.job.replace(number, self.start(number))
            time.sleep(0.02)


def job_step(job: Job, seconds: float) -> int:
    """Return the step that the run had reached at this time."""
    return max((step for when, step in job.steps() if when <= seconds), default=0)


def last_checkpoint(folder: Path, step: int) -> Path:
    """Return the last checkpoint, whose tensors must not depend on faults."""
    newest = list_checkpoints(folder)[-1]
    assert int(newest.name[5:]) == step, f"the newest checkpoint is {newest.name}, not that of step {step}"
    return newest


if __name__ == "__main__":
    main()
