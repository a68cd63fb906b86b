"""Ranks and links that slow a run down are reported, with the rank, the part, the loss and the step; noise is not."""

import itertools
import json
import math
import random
import re
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel_ddp.engine.step_numbers import RankSample, Split
from accel_ddp.phases import Timing
from accel_ddp.records.incidents import read_incidents
from accel_ddp.records.run_log import read_log
from accel_ddp.training.breakdown import Breakdown
from accel_ddp.watch import slowness
from accel_ddp.watch.slowness import DATA_SLOW, SLOW_LINK, STRAGGLER, Notice, Slowness, neighbours
from tests.conftest import PROGRAMS, Running, clean_environment, run_all
from tests.jobs import Jobs, kill, shape_link
from tests.log_schema import require_documented
from tests.nodes import Nodes

PARTS = ("data", "forward", "backward", "optimizer", "other")
FAST = 100e6  # bytes per second


class Simulated:
    """A run whose ranks wait for each other. Each rank's heartbeat is observed every 0.5 s, as by the monitors."""

    def __init__(self, ranks: int, own: Callable[[int, int], dict[str, float]], ranks_per_node: int = 1):
        """`own(rank, step)` are the seconds that a rank needs itself, by part."""
        self.own, self.nodes = own, [rank // ranks_per_node for rank in range(ranks)]
        self.judge = Slowness([f"node{node}" for node in self.nodes], self.nodes, list(range(100, 100 + ranks)))
        self.times = [Timing(0, *[0.0] * 6) for _ in range(ranks)]
        self.clock, self.observed_at, self.step = 0.0, 0.0, 0
        self.found: list[tuple[int, Notice]] = []  # step of the report

    def run(self, steps: int, communication: float = 0.01, pauses: dict[int, float] | None = None) -> "Simulated":
        for _ in range(steps):
            self.step += 1
            parts = [self.own(rank, self.step) for rank in range(len(self.times))]
            longest = max(sum(each.values()) for each in parts) + communication
            self._observe(self.clock + longest)
            self.times = [
                Timing(
                    self.step, *(getattr(before, name) + each.get(name, 0.0) for name in PARTS),
                    before.communication + longest - sum(each.values()),
                )
                for before, each in zip(self.times, parts)
            ]  # fmt: skip
            self.clock += longest
            self._observe(self.clock + (pauses or {}).get(self.step, 0.0))
        return self

    def _observe(self, until: float) -> None:
        while self.observed_at <= until:
            for rank, times in enumerate(self.times):
                self.found += [(self.step, notice) for notice in self.judge.observe(rank, times)]
            self.observed_at += 0.5

    @property
    def kinds(self) -> list[tuple[str, bool]]:
        return [(notice.kind, notice.is_over) for _, notice in self.found]


def steady(seconds: float) -> dict[str, float]:
    return {"data": 0.1 * seconds, "forward": 0.3 * seconds, "backward": 0.5 * seconds, "optimizer": 0.1 * seconds}


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, 1), (3, 1), (8, 1), (16, 8)])
@pytest.mark.parametrize("part", PARTS)
def test_a_slow_rank_is_reported_within_20_steps(ranks, ranks_per_node, part):
    draw = random.Random(ranks)

    def own(rank, step):
        seconds = {name: value * draw.uniform(0.9, 1.1) for name, value in steady(0.3).items()}
        if rank == ranks - 1 and step >= 30:
            seconds[part] = seconds.get(part, 0.0) + 0.2
        return seconds

    run = Simulated(ranks, own, ranks_per_node).run(60)
    (at, notice), *more = run.found
    assert not more
    assert notice.kind == STRAGGLER
    assert notice.ranks == (ranks - 1,)
    assert 30 <= at <= 50
    assert 29 <= notice.since <= 31
    host = f"node{run.nodes[-1]}"
    assert notice.host == host
    found = re.match(
        rf"rank {ranks - 1} \({host}\) is (\d+) % slower than the others, which wait (\d+) ms per step for it, 3\d % of the step",
        notice.text,
    )
    assert 50 < int(found[1]) < 70
    assert 160 < int(found[2]) < 205, "the slowest of the others is 10 % slower than 300 ms"
    assert f"it {slowness.PARTS[part][0]} (pid {99 + ranks}): it needs " in notice.text
    if part == "data":
        assert re.search(rf"Loading data takes (4\d|5\d) % of each step on {host}; increase --num_workers", notice.text)


def test_a_rank_that_is_slow_from_the_first_step_is_reported_and_its_recovery_as_well():
    run = Simulated(2, lambda rank, step: steady(0.9 if rank == 1 and step < 60 else 0.3)).run(120)
    assert run.kinds == [(STRAGGLER, False), (STRAGGLER, True)]
    assert run.found[0][0] <= 20
    assert 60 <= run.found[1][0] <= 80
    began, ended = (notice.text for _, notice in run.found)
    assert "which wait 600 ms per step for it, 66 % of the step time, " in began
    found = re.match(
        r"rank 1 \(node1\) is as fast as the others again\. From step \d+ to step (\d+) the others waited (\d+) ms per step for it, "
        r"\d\d % of the step time, ([\d.]+) s in all\.",
        ended,
    )
    assert int(found[1]) in range(58, 62)
    assert int(found[2]) in range(570, 610), "the same as at the beginning"
    assert 33 < float(found[3]) < 37  # 59 steps


def test_all_slow_ranks_of_a_node_are_in_one_report():
    run = Simulated(16, lambda rank, step: steady(0.5 if rank >= 8 else 0.3), 8).run(40)
    assert run.kinds == [(STRAGGLER, False)]
    assert run.found[0][1].ranks == tuple(range(8, 16))
    assert "ranks 8, 9, 10" in run.found[0][1].text


def test_a_lasting_case_is_reported_again_after_100_200_and_400_steps_and_when_it_becomes_worse():
    run = Simulated(2, lambda rank, step: steady(0.6 if rank == 1 else 0.3)).run(900)
    steps = [at for at, _ in run.found]
    assert [b - a for a, b in itertools.pairwise(steps)] == [100, 200, 400]
    run = Simulated(2, lambda rank, step: steady((0.6 if step < 40 else 1.2) if rank == 1 else 0.3)).run(80)
    assert len(run.found) == 2
    assert 40 < run.found[1][0] < 60


def test_a_rank_that_is_interrupted_again_and_again_is_reported():
    """Its steps are short, and most of them are as fast as those of the others."""
    run = Simulated(2, lambda rank, step: steady(3.0 if rank == 1 and step % 50 == 0 else 0.02)).run(2000, 0.002)
    assert {(notice.kind, notice.is_over) for _, notice in run.found} == {(STRAGGLER, False)}
    assert run.found[0][1].ranks == (1,)


def test_a_rank_that_a_signal_stops_repeatedly_is_reported_even_if_it_is_always_stopped_while_it_waits():
    judge = Slowness(["a", "b"], [0, 1], [100, 101])
    found = []
    for i in range(40):
        for rank in range(2):
            found += judge.observe(rank, Timing(i, 0, 0.1 * i, 0, 0, 0, 0.4 * i), is_stopped=rank == 1 and i % 5 != 0)
    assert [(notice.kind, notice.ranks) for notice in found] == [(STRAGGLER, (1,))]
    assert "stopped by a signal (state T) in" in found[0].text
    assert not judge.wants_probe
    judge = Slowness(["a", "b"], [0, 1], [100, 101])
    for i in range(60):  # stopped once, for 20 s
        step = min(i, 10) + max(0, i - 50)
        for rank in range(2):
            times = Timing(step, 0, 0.1 * step, 0, 0, 0, 0.4 * step + (20 if step > 10 else 0))
            assert not judge.observe(rank, times, is_stopped=rank == 1 and 10 < i < 50)


@pytest.mark.parametrize(
    "name", ["noise", "uneven", "one_slow_step", "all_slow", "pauses", "short_steps", "slow_now_and_then", "main_saves"]
)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_nothing_is_reported_without_a_straggler(name, ranks):
    draw = random.Random(1)
    own, pauses = {
        "noise": (lambda rank, step: steady(0.3 * draw.lognormvariate(0, 0.3)), {}),
        "uneven": (lambda rank, step: steady(draw.choice([0.1, 0.2, 0.5])), {}),
        "one_slow_step": (lambda rank, step: steady(20 if (rank, step) == (ranks - 1, 50) else 0.3), {}),
        "all_slow": (lambda rank, step: steady((0.3 if step < 100 else 3.0) * draw.uniform(0.95, 1.05)), {}),
        "pauses": (lambda rank, step: steady(0.1 * draw.uniform(0.9, 1.1)), {step: 30.0 for step in range(20, 1000, 20)}),
        "short_steps": (lambda rank, step: steady(0.005 * draw.lognormvariate(0, 0.5)), {}),
        "slow_now_and_then": (lambda rank, step: steady(0.8 if step // 5 % 8 == rank else 0.4), {}),
        "main_saves": (lambda rank, step: steady(0.6 if rank == 0 and step % 20 < 3 else 0.3), {}),
    }[name]
    run = Simulated(ranks, own).run(1500, communication=0.001, pauses=pauses)
    assert not run.found, run.found[0]
    assert not run.judge.wants_probe


def test_a_slow_link_is_reported_after_a_measurement_and_its_recovery_as_well():
    draw = random.Random(2)
    run = Simulated(2, lambda rank, step: steady(0.1 * draw.uniform(0.9, 1.1)))
    run.judge.reference |= {(0, 1): FAST, (1, 0): FAST}
    run.run(20, communication=0.02)
    assert not run.judge.wants_probe
    while not run.judge.wants_probe:
        run.run(1, communication=1.0)
    assert run.step <= 30
    assert not run.found
    (notice,) = run.judge.add_rates({(0, 1): 0.9 * FAST, (1, 0): 0.12e6})
    assert notice.kind == SLOW_LINK
    assert 20 <= notice.since <= 22
    assert "node1 -> node0 transfers 0.1 MB/s; at the start it was 100.0 MB/s" in notice.text
    assert re.search(r"all ranks wait 1\.\d s per step for communication, instead of 2\d ms\. They lose 8\d %", notice.text)
    run.run(50, communication=1.0)
    assert not run.found
    assert not run.judge.wants_probe
    run.run(40, communication=0.02)
    assert run.kinds == [(SLOW_LINK, True)]


def test_links_that_are_as_fast_as_before_are_not_reported_although_communication_takes_longer():
    run = Simulated(3, lambda rank, step: steady(0.1))
    run.judge.reference |= {pair: FAST for pair in neighbours([0, 1, 2])}
    run.run(20, 0.02).run(10, 0.5)
    assert run.judge.wants_probe
    assert not run.judge.add_rates({pair: 0.5 * FAST for pair in neighbours([0, 1, 2])})
    run.run(60, 0.5)
    assert not run.judge.wants_probe  # not again in every step


@pytest.mark.parametrize(
    ("waits", "options", "sharded", "device", "expected"),
    [
        ((0.4, 0.5), {}, True, "cuda", "40 % of a step, also on the rank that waits least. --comm_hook bf16 "),
        ((0.4, 0.5), {}, False, "cpu", "--comm_hook fp16 "),
        ((0.4, 0.5), {}, True, "cpu", ""),  # gloo has no sums in bf16
        ((0.4, 0.5), {"comm_hook": ["bf16", "none"]}, True, "cuda", ""),
        ((0.1, 0.8), {}, True, "cuda", ""),  # one rank waits for the other
    ],
)
def test_a_run_whose_ranks_all_wait_for_the_network_names_the_option_for_smaller_sums_once(
    capsys, waits, options, sharded, device, expected
):
    hook = Breakdown(torch.device(device))
    facts = {"ranks": [{"host": "a"}, {"host": "b"}], "options": options, "model": {"gradient_bytes": 1 << 30}}
    hook.on_describe(facts | ({"sharding": {}} if sharded else {}))
    for step in (1, 5, 10, 20):
        parts = [{"forward": (1 - wait) * step, "communication": wait * step} for wait in waits]
        ranks = [RankSample.of(Timing(step, *(part.get(name, 0.0) for name in Split._fields))) for part in parts]
        hook.on_update(SimpleNamespace(ranks=ranks), None)
    said = capsys.readouterr().out
    assert expected in said
    assert said.count("\n") == bool(expected)


def test_a_busy_processor_is_not_taken_for_a_slow_link():
    reference = dict.fromkeys([(0, 1), (1, 0), (0, 0), (1, 1)], FAST)
    assert not slowness.find_slow_link(dict.fromkeys(reference, FAST / 6), reference)
    assert slowness.find_slow_link({**reference, (1, 0): FAST / 6}, reference) == ((1, 0), FAST / 6, FAST)
    assert slowness.find_slow_link({**dict.fromkeys(reference, FAST / 2), (1, 0): FAST / 50}, reference)[0] == (1, 0)


def test_of_several_links_the_one_that_is_slower_than_the_others_is_reported_even_without_a_reference():
    assert neighbours([0, 0, 1, 1]) == [(0, 1), (1, 0)]
    assert len(neighbours([0, 1, 2, 3])) == 8
    assert not neighbours([0, 0])
    run = Simulated(4, lambda rank, step: steady(0.1)).run(30, 0.5)
    assert run.judge.wants_probe  # communication takes more than half of the step, although it always did
    (notice,) = run.judge.add_rates({pair: FAST / 50 if pair == (2, 3) else FAST for pair in neighbours([0, 1, 2, 3])})
    assert "node2 -> node3 transfers 2.0 MB/s; the median of the other pairs is 100.0 MB/s" in notice.text


def test_a_straggler_is_not_taken_for_a_slow_link_and_one_node_has_no_link():
    run = Simulated(2, lambda rank, step: steady(1.0 if rank and step > 20 else 0.1)).run(60)
    assert run.kinds == [(STRAGGLER, False)]
    assert not run.judge.wants_probe
    run = Simulated(2, lambda rank, step: steady(0.1), ranks_per_node=2).run(20, 0.01).run(40, 1.0)
    assert not run.found
    assert not run.judge.wants_probe


def test_a_loss_that_is_not_material_or_hits_each_rank_in_turn_is_not_reported():
    """On a busy machine one of two ranks may lose half of 5 s. 5 % of the last minute are material."""
    for_seconds = lambda seconds: lambda rank, step: steady(0.2 if rank == 1 and step < seconds / 0.2 else 0.1)
    assert Simulated(2, for_seconds(5), ranks_per_node=2).run(600).found == []
    assert Simulated(2, for_seconds(10), ranks_per_node=2).run(600).kinds == [(STRAGGLER, False), (STRAGGLER, True)]
    in_turn = lambda rank, step: steady(0.2 if step // 25 % 2 == rank else 0.1)
    assert Simulated(2, in_turn, ranks_per_node=2).run(3000).found == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_slow_data_loading_on_all_ranks_is_reported(ranks):
    draw = random.Random(3)
    own = lambda rank, step: {**steady(0.1), "data": draw.uniform(0.45, 0.55) if 30 <= step < 90 else 0.01}
    run = Simulated(ranks, own).run(150)
    assert run.kinds == [(DATA_SLOW, False), (DATA_SLOW, True)]
    assert run.found[0][0] <= 50
    where = "node0" if ranks == 1 else "node0 and node1 and node2"
    assert re.match(rf"loading data takes 8\d % of each step on {where}; increase --num_workers", run.found[0][1].text)
    assert 28 <= run.found[0][1].since <= 31  # the first block may include fast steps


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_data_loading_that_takes_40_percent_is_reported_with_its_node_also_in_short_steps(seconds):
    """Node 1 loads longer than node 0, but the others do not wait for it, because it computes faster."""
    draw = random.Random(3)

    def own(rank, step):
        data = 0.4 if rank // 2 == 1 else 0.2
        return {"data": data * seconds * draw.uniform(0.9, 1.1), "forward": (0.9 - data) * seconds * draw.uniform(0.95, 1.05)}

    run = Simulated(4, own, ranks_per_node=2).run(int(20 / seconds), communication=0.1 * seconds)
    assert {notice.kind for _, notice in run.found} == {DATA_SLOW}
    assert len(run.found) <= 2, "short steps are not a reason for many reports"
    notice = run.found[0][1]
    assert (notice.host, notice.ranks) == ("node1", ())
    share = re.match(
        r"loading data takes (\d+) % of each step on node1; increase --num_workers\. Each rank there waits", notice.text
    )
    assert 34 <= int(share[1]) <= 42


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_usual_data_loading_is_not_reported(ranks):
    draw = random.Random(4)
    uneven = lambda rank, step: {"data": 0.5 if step % 10 == 0 else 0.0, "forward": 0.2}  # the first batch of many small files
    noisy = lambda rank, step: {"data": 0.02 * draw.lognormvariate(0, 0.5), "forward": 0.1 * draw.uniform(0.9, 1.1)}
    tiny = lambda rank, step: {"data": 0.001, "forward": 0.001}
    for own in (uneven, noisy, tiny):
        run = Simulated(ranks, own).run(1500, communication=0.001)
        assert not run.found, run.found[0]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """Jobs on this machine, as forks of one process that has imported torch."""
    with Nodes(1, "loopback") as cluster:
        jobs = Jobs(cluster)
        yield jobs
        jobs.close()


def seconds_of(folder: Path, rank: int) -> Timing:
    """Return the seconds per step of each part in the second half of the run."""
    rows = [json.loads(line)[1:] for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
    first, last = rows[len(rows) // 2 - 1], rows[-1]
    return Timing(last[0], *[(b - a) / (last[0] - first[0]) for a, b in zip(first[1:], last[1:])])


def timings_of(folder: Path, rank: int) -> list[Timing]:
    """Return the seconds of each part in each step."""
    rows = [[0.0] * 7, *(json.loads(line)[1:] for line in (folder / f"{rank}.jsonl").read_text().splitlines())]
    return [Timing(b[0], *(y - x for x, y in zip(a[1:], b[1:]))) for a, b in itertools.pairwise(rows)]


@pytest.mark.parametrize(
    ("slow", "part", "options"),
    [
        ("loss", "forward", []),
        pytest.param(
            "backward", "backward", ["--micro_batch_size", 8, "--batch_norm", "--broadcast_buffers", "on"], marks=pytest.mark.slow
        ),
        ("data", "data", ["--seconds", 0.02]),
        pytest.param("hook", "other", ["--save_every", 1000], marks=pytest.mark.slow),
    ],
)
def test_the_time_of_a_slow_rank_is_its_own_and_that_of_the_others_is_communication(jobs, tmp_path, slow, part, options):
    arguments = ["--out", tmp_path, "--output_dir", tmp_path / "run", "--slow", slow, "--seconds", 0.1, "--steps", 8, *options]
    with jobs.ranks([0, 0], *arguments, script=PROGRAMS / "slow_rank.py") as job:
        assert job.codes() == [0, 0], job.all_output()
    own = lambda timing: sum(timing[1:-1])
    steps = zip(*(timings_of(tmp_path, rank)[2:] for rank in range(2)), strict=True)
    fast, slowed = min(steps, key=lambda pair: own(pair[0]) + own(pair[1]))  # the step that other processes disturbed least
    added = {"loss": 0.2, "backward": 0.1, "data": 0.16, "hook": 0.1}[slow]
    assert getattr(slowed, part) > added > 2 * (own(slowed) - getattr(slowed, part))
    assert fast.communication > 0.6 * added > 2 * own(fast)
    assert abs(sum(fast[1:]) - sum(slowed[1:])) < 0.3 * sum(fast[1:])  # a step takes equally long on both


def test_a_rank_that_is_stopped_for_most_of_the_time_is_reported_and_never_ended(jobs, tmp_path):
    arguments = ["--out", tmp_path, "--output_dir", tmp_path / "run", "--pause", 0.02, "--steps", 80, "--save_every", 1000]
    with jobs.ranks([0, 0], *arguments, script=PROGRAMS / "slow_rank.py") as job:
        job.until_step(8)
        pid = job.processes[1].pid
        while not any(d.kind == STRAGGLER for d in job.diagnoses()) and job.last_step() < 75:
            for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                kill(pid, number)
                time.sleep(seconds)
        assert job.codes() == [0, 0], job.all_output()
        found = next(
            d for d in job.diagnoses() if d.kind == STRAGGLER
        )  # the simulated runs state after how many steps; here a busy machine slows both ranks
    assert (found.level, found.kind, found.number("rank"), found.number("pid")) == ("warning", STRAGGLER, 1, pid)


def test_the_rate_of_a_path_is_measured_with_few_bytes_if_it_is_slow(nodes):
    nodes.require("a link")
    code = """
import asyncio, sys
from accel_ddp.nodes.probe import ProbeServer, measure_rate
async def main(ip, port):
    if port:
        print(await asyncio.wait_for(measure_rate(ip, int(port), b"token"), 20), flush=True)
        return
    server = ProbeServer(b"token")
    await server.open(ip, 1)
    print(server.ports[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""
    source, target = nodes.nodes[:2]
    words = [sys.executable, "-c", code, target.address]
    server = Running([target.command([*words, ""])], [clean_environment()], fresh=True)
    server.until("\n")
    port = server.read[0].strip()
    rates = []
    try:
        for rate in ("", "1mbit"):
            shape_link(source, rate) if rate else None
            for _ in range(3):  # a process that gets no core for a moment measures a lower rate
                measured = float(run_all([source.command([*words, port])], [clean_environment()], fresh=True).well().text)
                if measured > (5e4 if rate else 5e6):
                    break
            rates.append(measured)
    finally:
        shape_link(source, "")
        server.kill()
    assert rates[0] > 5e6
    assert 5e4 < rates[1] < 5e5
    closed = run_all([source.command([*words, "1"])], [clean_environment()], fresh=True).well()
    assert closed.text.strip() == "None"


def test_a_straggler_of_50_ms_is_reported_with_its_host_and_what_it_costs(jobs, tmp_path):
    """One rank sleeps 50 ms in every step. The truth is by how much its own time is longer, as both ranks have measured it.

    Other processes of a busy machine slow both ranks, which may hide the 50 ms, and a report covers blocks of steps. Therefore one
    of three runs must have the right cost. Everything else must be right in each that is reported.
    """
    costs = []
    for attempt in range(3):
        costs.append(costs_of_straggler(jobs, tmp_path / str(attempt)))
        if costs[-1] == (pytest.approx(1, abs=0.1), pytest.approx(1, abs=0.02)):
            return
    pytest.fail(f"the reported costs are these multiples of the true ones: {costs}")


def costs_of_straggler(jobs: Jobs, folder: Path) -> tuple[float, float]:
    """Run a straggler, and return its cost in the report and at the end, as multiples of the true one."""
    folder.mkdir()
    arguments = ["--out", folder, "--output_dir", folder / "run", "--slow", "loss", "--seconds", 0.05, "--micro_batch_size", 8]
    with jobs.ranks([0, 0], *arguments, "--steps", 110, "--save_every", 1000, script=PROGRAMS / "slow_rank.py") as job:
        assert job.codes() == [0, 0], job.all_output()
        found = next((d for d in job.diagnoses() if d.kind == STRAGGLER), None)
        printed = job.text(0)
    if found is None:  # on a busy machine, 50 ms may be less than the differences between steps
        return math.inf, math.inf
    host = socket.gethostname()
    text = re.match(
        rf"rank 1 \({re.escape(host)}\) is .* slower than the others, which wait (\d+) ms per step for it, .* % of the step time, "
        r"(\S+) s in all\. Since step (\d+) it",
        found.text,
    )
    assert "(pid " in found.text
    incident = next(one for one in read_incidents(folder / "run") if one.kind == STRAGGLER)
    assert (incident.level, incident.text, incident.rank, incident.host) == ("warning", found.text, 1, host)

    require_documented(folder / "run")
    events = read_log(folder / "run" / "log.jsonl")
    summary = events[-1]["breakdown"]
    assert (events[-1]["event"], summary["slowest_rank"], summary["slowest_host"]) == ("end", 1, host)
    assert sum(summary[part] for part in Split._fields) == pytest.approx(1, abs=0.001)
    assert re.search(
        rf"time of a step \(mean over 2 ranks\): \d+ ms: data .* The slowest is rank 1 \({re.escape(host)}\)", printed
    )

    # The parts of each rank add up to the time that has passed.
    updates = {event["step"]: event["time"] for event in events if event["event"] == "update"}
    lines = [event for event in events if event["event"] == "ranks"]
    first, last = lines[1]["first_step"], lines[-1]["last_step"]
    for rank in range(2):
        parts = sum(sum(line[part][rank] for part in Split._fields) for line in lines[1:])
        assert parts == pytest.approx(updates[last] - updates[first - 1], rel=0.05)

    steps = [timings_of(folder, rank) for rank in range(2)]
    slept = statistics.mean(json.loads((folder / "slept.json").read_text()))
    assert statistics.mean(timing.forward for timing in steps[1]) > 0.98 * slept > 0.049

    def truth(first: int, last: int) -> float:
        own = [statistics.mean(sum(timing[1:-1]) for timing in each if first <= timing.step <= last) for each in steps]
        return own[1] - own[0]

    per_step, total, since = float(text[1]) / 1000, float(text[2]), int(text[3])
    return (
        per_step / truth(since, since + round(total / per_step) - 1),
        summary["slowest_cost"] / truth(summary["first_step"], summary["last_step"]),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_a_step_are_what_they_are_called_and_add_up_to_its_duration(jobs, tmp_path, monkeypatch, ranks):
    monkeypatch.syspath_prepend(PROGRAMS)
    import parts_of_time as true

    with jobs.ranks(
        [0] * ranks, "--out", tmp_path, "--output_dir", tmp_path / "run", script=PROGRAMS / "parts_of_time.py"
    ) as job:
        assert job.codes() == [0] * ranks, job.all_output()
    measured = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert len(measured[0]) == 7
    # name: forward passes, and those that the backward pass repeats
    passes = {"plain": (1, 0), "accumulation": (3, 0), "whole batch": (1, 0), "whole batch in parts": (4, 0), "unused": (2, 0),
              "checkpointing": (2, 2), "scaler": (2, 0)}  # fmt: skip
    backwards = {"plain": 1, "accumulation": 3, "whole batch": 1}
    for name, (forwards, repeated) in passes.items():
        steps = list(zip(*(measured[rank][name] for rank in range(ranks)), strict=True))
        quiet = min(steps, key=lambda step: max(most for _, most, *_ in step))  # the step that other processes disturbed least
        for rank in range(ranks):
            least, most, *parts = quiet[rank]
            data, forward, backward, optimizer, other, communication = parts
            assert 0.97 * least < sum(parts), (name, rank)
            assert sum(parts) - other < 1.03 * most, (name, rank)  # `other` may have begun at the end of the step before
            one = true.FORWARD + true.SLOWER * (ranks > 1 and rank == ranks - 1)
            expected = {
                "data": (data, true.DATA), "forward": (forward, forwards * one), "optimizer": (optimizer, true.OPTIMIZER),
                "backward": (backward, backwards.get(name, 2) * true.BACKWARD + repeated * one), "other": (other, 0.0),
            }  # fmt: skip
            for part, (seconds, truth) in expected.items():
                assert truth <= seconds < 1.5 * truth + 0.06, (name, rank, part)
        if ranks == 1:
            assert communication == 0.0
        else:
            expected = (forwards + repeated) * true.SLOWER
            waits = [(step[0][-1] - step[1][-1], step[1][-1]) for step in steps]  # of the first rank beyond the last; of the last
            assert any(abs(more - expected) < 0.02 + 0.03 * most and last < 0.05 for more, last in waits), (name, waits)
