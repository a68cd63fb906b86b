"""Faults of a running job are diagnosed on every node, with rank, host and step, and end the job or are survived.

`pytest -m slow tests/test_faults.py` runs the complete matrix: every fault on one node and on two, and the limits that are the
default of a run. The other tests use short limits and one place for each fault.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_ddp.records.incidents import read_incidents
from accel_ddp.saving.checkpoint_format import find_problem, list_checkpoints
from tests.jobs import Diagnosis, HangingDisk, Job, Jobs, children, kill, remove_memory_limits, shape_link
from tests.log_schema import require_documented
from tests.nodes import Nodes, NotPossible

# FAULTS_DEFAULT_LIMITS=1 measures the times with the limits that a run has by default.
IS_DEFAULT = bool(os.environ.get("FAULTS_DEFAULT_LIMITS"))
SHORT = [] if IS_DEFAULT else ["--hang_report_seconds", 1.5, "--hang_abort_seconds", 4]
REPORT_SECONDS, ABORT_SECONDS = 10, 45  # the promise for the default limits
BY_HAND = "To continue from the last checkpoint, run the same command with --resume --output_dir"
FAILED = 1  # exit code of a rank that ends because of a fault of another one
HEARTBEAT_STEPS = 25  # in the half second between two heartbeats of a node, and 2 s for which its monitor may get no core


@pytest.fixture(scope="module")
def one() -> Iterator[Jobs]:
    """Jobs on this machine, without namespaces, which hide the memory cgroups."""
    with Nodes(1, "loopback") as cluster:
        jobs = Jobs(cluster)
        yield jobs
        jobs.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Jobs]:
    """Jobs on two nodes. The fixture `nodes` would end the fork servers after every test."""
    with Nodes(2) as cluster:
        jobs = Jobs(cluster)
        yield jobs
        jobs.close()


@pytest.fixture(autouse=True)
def open_links(request) -> Iterator[None]:
    yield
    if "two" in request.fixturenames:
        jobs = request.getfixturevalue("two")
        if jobs.cluster.kind != "loopback":
            for node in jobs.cluster.nodes:
                node.link(True)
                node.firewall()
                shape_link(node, "")


def is_monitor(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return "accel_ddp.watch.monitor" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def newest_checkpoint_loads(folder: Path) -> int:
    """Assert that the newest checkpoint is complete. Return its step."""
    from safetensors.torch import load_file

    newest = list_checkpoints(folder)[-1]
    assert find_problem(newest) == ""
    assert load_file(newest / "model.safetensors")
    return int(newest.name[5:])


def host_of(job: Job, rank: int, places: list[int]) -> str:
    node = job.nodes[rank]
    return socket.gethostname() if node.cluster.kind == "loopback" else f"node{places[rank]}"


def steps_from(step: int, job: Job) -> range:
    """Return the steps in which a fault can have happened that came after this one: until the last one that the job has printed.

    Numbers are printed one step late, and the rank at fault may be one step ahead of the main rank.
    """
    return range(step, job.last_step() + 4)


def agree(job: Job, level: str, kind: str, after: float = 0.0) -> Diagnosis:
    """Assert that every node has printed this diagnosis once, with the same text. Return it."""
    found = [d for d in job.diagnoses(after) if d.level == level and re.fullmatch(kind, d.kind)]
    assert len({d.text for d in found}) == 1, f"different texts: {[d.text for d in found]}\n{job.all_output()}"
    printed = [job.nodes[d.process] for d in found]
    for node in job.nodes:
        assert printed.count(node) == 1, f"{node.name} has printed the diagnosis {printed.count(node)} times\n{job.all_output()}"
    return found[0]


@dataclass
class Case:
    """A fault that faulty.py injects, and what must be reported."""

    fault: str
    kind: str
    words: str = ""  # a pattern in the first line
    code: int | None = FAILED  # of the rank at fault
    more: str = ""  # a pattern anywhere in the output of every node
    reports_first: bool = False  # a warning comes before the error
    options: tuple = ()
    rank: int | None = 1  # that is named; None: all are


CASES = {
    "segv": Case("segv", "RANK_DIED", "SIGSEGV", code=-11),
    "exit": Case("exit", "RANK_DIED", "exit code 3", code=3),
    "exception": Case("exception", "RANK_FAILED", "RuntimeError: a fault of this test", more=r"faulty.py.*in inject\n"),
    "stop": Case("stop", "RANK_STOPPED", "SIGCONT|SIGSTOP|stopped", code=-9, reports_first=True),
    "hang": Case("hang", "RANK_HUNG", "forward", more=r"inject \(.*faulty.py", code=None, reports_first=True),
    "barrier": Case("barrier", "DEADLOCK", "", reports_first=True, rank=None, code=None, more="barrier"),
    "deadlock": Case("deadlock", "DEADLOCK", "", reports_first=True, rank=None, code=None, more="barrier"),
    "data": Case("data", "DATA_HUNG", "data", reports_first=True, code=None),
    "worker data": Case("data", "DATA_HUNG", "data", reports_first=True, code=None, options=("--num_workers", 2)),
    "worker": Case("worker", "RANK_FAILED|DATA_HUNG|RANK_DIED", "worker", options=("--num_workers", 2)),
    "skip": Case("skip", "DIVERGED|DEADLOCK|RANK_FAILED|RANK_DIED", "", code=None, rank=None, options=("--check_every", 5)),
    "lr": Case("lr", "DIVERGED", "", code=None, options=("--check_every", 5), rank=None),
}
# The place of each fault in a test that is not slow. The slow ones do the other place.
ON_TWO_NODES = {"segv", "exception", "stop", "hang", "barrier", "data", "lr"}
LIKE_OTHERS = {"exit", "hang", "deadlock"}  # always slow, because segv, data and barrier take the same ways


def pairs() -> list:
    found = []
    for name in CASES:
        for place in ("one", "two"):
            is_default = (place == "two") == (name in ON_TWO_NODES) and name not in LIKE_OTHERS
            found.append(pytest.param(place, name, id=f"{name}-{place}", marks=[] if is_default else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("place", "name"), pairs())
def test_a_fault_inside_a_rank_is_diagnosed_on_every_node(request, tmp_path, place, name):
    case, places = CASES[name], [0, 0] if place == "one" else [0, 1]
    arguments = ["--output_dir", tmp_path / "run", *SHORT, "--fault", case.fault, *case.options]
    with request.getfixturevalue(place).ranks(places, *arguments) as job:
        began, _, injected = job.until(r"rank 1 \(pid (\d+)\) injects \w+ at step (\d+)")
        began = min([began, *(d.seconds for d in job.diagnoses())])  # it may have been read from another pipe before
        fatal = job.until_diagnosis(case.kind, "error", ABORT_SECONDS, began)
        codes = job.codes()
        ended = time.monotonic()
        job.nothing_is_left()
        print(job.all_output())
        diagnosis = agree(job, "error", case.kind)
        assert re.search(case.words, diagnosis.text), diagnosis.text
        if case.rank is not None:
            assert diagnosis.number("rank") == case.rank
            assert diagnosis.number("pid") == int(injected[1])
            assert diagnosis.host == host_of(job, 1, places)
        # Data workers load batches of later steps, and a divergence is found at the next check.
        steps = range(7, 20) if name in ("lr", "skip", "worker data", "data") else range(7, 10)
        assert diagnosis.number("step") in steps
        for node in job.nodes:
            assert re.search(case.more, job.text_of_node(node)), f"{case.more!r} is missing\n{job.all_output()}"
            assert f"{BY_HAND} {tmp_path / 'run'}" in job.text_of_node(node), job.all_output()
        first = case.code if name == "exit" else FAILED  # every rank ends with the code that the program has chosen
        assert codes == [first, codes[1] if case.code is None else case.code], job.all_output()
        assert codes[1] is not None
        if case.reports_first:
            early = next(d for d in job.diagnoses(began) if d.level == "warning")
            assert early.seconds - began < REPORT_SECONDS
            assert re.fullmatch(case.kind, early.kind), early
            agree(job, "warning", case.kind)
        incidents = [(one.level, one.kind, one.text.splitlines()[0]) for one in read_incidents(tmp_path / "run")]
        assert incidents == [(d.level, d.kind, d.text) for d in job.diagnoses() if d.process == 0]
        require_documented(tmp_path / "run")
        others = {d.kind for d in job.diagnoses() if not re.fullmatch(case.kind, d.kind)}
        assert others == set(), f"other diagnoses: {others}"
        assert newest_checkpoint_loads(tmp_path / "run") == 5 or name in ("lr", "skip", "data", "worker data", "worker")
        first = min(d.seconds for d in job.diagnoses(began))
        print(
            f"MEASURED {name} {place}: report {first - began:.1f} s, abort {fatal.seconds - began:.1f} s, end {ended - began:.1f} s"
        )


@pytest.mark.parametrize("place", ["two", pytest.param("one", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_diagnosed_on_every_node(request, tmp_path, place, rank):
    places = [0, 0] if place == "one" else [0, 1]
    with request.getfixturevalue(place).ranks(places, "--output_dir", tmp_path / "run", *SHORT) as job:
        job.until_step(7)
        step, pid, began = job.last_step(), job.rank_pid(rank), time.monotonic()
        kill(pid)
        fatal = job.until_diagnosis("RANK_DIED", "error", REPORT_SECONDS)
        codes = job.codes()
        job.nothing_is_left()
        print(job.all_output())
        diagnosis = agree(job, "error", "RANK_DIED")
        assert (diagnosis.number("rank"), diagnosis.number("pid"), diagnosis.host) == (rank, pid, host_of(job, rank, places))
        assert diagnosis.number("step") in steps_from(step, job)
        assert "SIGKILL" in diagnosis.text
        assert codes == [-9 if rank == 0 else FAILED, -9 if rank == 1 else FAILED]
        assert newest_checkpoint_loads(tmp_path / "run") >= 5
        print(f"MEASURED SIGKILL of rank {rank} {place}: report {fatal.seconds - began:.1f} s")


def test_a_data_worker_that_hangs_in_an_evaluation_is_reported_with_its_stack(one, tmp_path):
    """In the first one, whose usual duration is not known: 5 s are assumed, and the run goes on for 5 minutes."""
    fault = ["--fault", "eval_data", "--fault_step", 2, "--fault_seconds", 9, "--num_workers", 1, "--steps", 2, "--eval_every", 2]
    with one.ranks([0, 0], "--output_dir", tmp_path / "run", *SHORT, *fault) as job:
        began = job.until(r"an item takes \S+ s in pid")[0]
        found = job.until_diagnosis("DATA_HUNG", "warning", REPORT_SECONDS, began)
        assert found.seconds - began < REPORT_SECONDS
        assert re.search(r"^rank 1 \(.*\) has waited for its data for \d+ s at step 2, in eval_data", found.text)
        assert job.codes() == [0, 0], job.all_output()
        assert re.search(r"__getitem__ \(.*faulty.py(.*\n)+.*a data worker, for which", job.text()), job.all_output()
        assert [(d.level, d.kind) for d in job.diagnoses()] == [("warning", "DATA_HUNG"), ("info", "DATA_HUNG")]


def test_a_rank_that_the_kernel_kills_for_its_memory_is_reported_as_such(one, tmp_path):
    with one.ranks([0, 0], "--output_dir", tmp_path / "run", *SHORT, "--fault", "oom") as job:
        try:
            began = job.until(r"rank 1 \(pid (\d+)\) injects|not possible: (.*)")
            if began[2][2]:
                pytest.skip(f"memory cgroups cannot be used: {began[2][2]}")
            found = job.until_diagnosis("RANK_DIED", "error", REPORT_SECONDS)
            assert job.codes() == [FAILED, -9]
            print(f"MEASURED memory: report {found.seconds - began[0]:.1f} s, end {time.monotonic() - began[0]:.1f} s")
            job.nothing_is_left()
            print(job.all_output())
            diagnosis = agree(job, "error", "RANK_DIED")
            assert diagnosis.number("rank") == 1
            assert (
                "because its cgroup (container, Slurm job) used more memory than its limit of 400 MiB, at step" in diagnosis.text
            )
        finally:
            job.kill()
            remove_memory_limits(job.text())


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[HangingDisk]:
    if os.geteuid():
        pytest.skip("a hanging disk needs root")
    try:
        made = HangingDisk(tmp_path_factory.mktemp("hanging") / "disk")
    except NotPossible as error:
        pytest.skip(f"not tested: a hanging disk needs loop devices: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def beside_disk(disk) -> Iterator[Jobs]:
    """Jobs on this machine that have access to the disk."""
    with Nodes(1, "loopback") as cluster:
        plain = cluster.nodes[0].command
        cluster.nodes[0].command = lambda words: disk.command(plain(words))
        jobs = Jobs(cluster)
        yield jobs
        jobs.close()


@pytest.mark.slow
def test_a_rank_that_is_blocked_in_the_kernel_is_reported_and_nothing_waits_for_it(disk, beside_disk, tmp_path):
    """The rank is in state D and cannot be killed. Everything else ends, and the rank ends when the disk answers again."""
    arguments = ["--output_dir", tmp_path / "run", *SHORT, "--fault", "disk", "--fault_path", disk.path]
    with beside_disk.ranks([0, 0], *arguments) as job:
        job.until_step(4)
        disk.freeze()
        try:
            began, _, injected = job.until(r"rank 1 \(pid (\d+)\) injects")
            diagnosis = job.until_diagnosis("RANK_BLOCKED", "error", ABORT_SECONDS, began)
            assert job.processes[0].wait(120) == FAILED
            deadline = time.monotonic() + 90
            while len(left := job.left()) > 1:  # the rank that is in state D
                assert time.monotonic() < deadline, f"{left}\n{job.all_output()}"
                time.sleep(0.05)
            print(job.all_output())
            assert f" {injected[1]} D " in left[0]
            assert (diagnosis.number("rank"), diagnosis.number("pid")) == (1, int(injected[1]))
            job.until(rf"error: RANK_BLOCKED: rank 1 \({diagnosis.host}, pid {injected[1]}\) cannot be killed", timeout=5)
        finally:
            disk.unfreeze()
        assert job.processes[1].wait(120) != 0
        job.nothing_is_left()
        assert "Exception" not in job.text()
        assert newest_checkpoint_loads(tmp_path / "run") == 5


@pytest.mark.slow
def test_a_disk_of_the_output_folder_that_hangs_is_reported(disk, beside_disk, tmp_path):
    """The main rank writes its log to the disk in every step. The other rank ends, although the main rank cannot."""
    arguments = ["--output_dir", disk.path / "run", "--fault_folder", tmp_path, *SHORT, "--steps", 60]
    with beside_disk.ranks([0, 0], *arguments) as job:
        job.until_step(7)
        disk.freeze()
        try:
            began = time.monotonic()
            first = job.until_diagnosis("DISK_HUNG|RANK_BLOCKED", "error|warning", ABORT_SECONDS, began)
            job.until_diagnosis("DISK_HUNG|RANK_BLOCKED", "error", ABORT_SECONDS, began)
            assert job.processes[1].wait(120) == FAILED
            print(job.all_output())
            assert first.number("rank") == 0
            assert {d.number("rank") for d in job.diagnoses()} == {0}, "a rank that waits is reported"
        finally:
            disk.unfreeze()
        assert job.codes()[0] not in (0, None)
        job.nothing_is_left()
        # The monitor has reported the disk without waiting for it, and writes when the disk answers again.
        assert {one.kind for one in read_incidents(disk.outside / "run")} >= {d.kind for d in job.diagnoses()}
        newest_checkpoint_loads(disk.outside / "run")


# ---- faults of a node or of its connection


def cut_link(jobs: Jobs) -> None:
    jobs.cluster.nodes[1].link(False)


def drop_both(jobs: Jobs) -> None:
    for node in jobs.cluster.nodes:
        node.firewall("drop")


def drop_to_main(jobs: Jobs) -> None:
    jobs.cluster.nodes[0].firewall("drop")


def drop_from_main(jobs: Jobs) -> None:
    jobs.cluster.nodes[1].firewall("drop")


CUTS = [cut_link, drop_both, drop_to_main, drop_from_main]


@pytest.mark.parametrize(
    "cut",
    [pytest.param(cut, id=cut.__name__, marks=[] if cut is cut_link else [pytest.mark.slow]) for cut in CUTS],
)
def test_both_sides_of_a_lost_link_report_it_and_end(two, tmp_path, cut):
    two.cluster.require("a link")
    with two.ranks([0, 1], "--output_dir", tmp_path / "run", *SHORT, "--steps", 300) as job:
        job.until_step(7)
        step, began = job.last_step(), time.monotonic()
        cut(two)
        kinds = "NODE_LOST|LINK_LOST|MAIN_NODE_LOST"
        first = [job.until_diagnosis(kinds, "warning", REPORT_SECONDS, of=side).seconds - began for side in (0, 1)]
        codes = job.codes(ABORT_SECONDS)
        ended = time.monotonic()
        job.nothing_is_left()
        print(job.all_output())
        assert codes == [FAILED, FAILED]
        for side in (0, 1):
            (diagnosis,) = [d for d in job.diagnoses() if d.process == side and d.level == "error"]
            assert diagnosis.kind in ("NODE_LOST", "LINK_LOST", "MAIN_NODE_LOST")
            assert f"node{1 - side}" in diagnosis.text, "the other node is not named"
            assert "LINK_LOST: the link between node0 and node1 has been lost for" in f"{diagnosis.kind}: {diagnosis.text}"
            assert diagnosis.text.endswith(f"The ranks exit. {BY_HAND} {tmp_path / 'run'}")
            assert diagnosis.number("step") in steps_from(step - HEARTBEAT_STEPS, job)
        assert newest_checkpoint_loads(tmp_path / "run") >= 5
        print(f"MEASURED {cut.__name__}: report {first[0]:.1f} and {first[1]:.1f} s, end {ended - began:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["from node0", "to node0", "isolated"])
def test_three_nodes_agree_on_what_is_lost(tmp_path, cut):
    """Node 1 reaches both sides of a link that is open in one direction, and passes on what they know."""
    with Nodes(3) as cluster:
        cluster.require("a firewall")
        jobs = Jobs(cluster)
        limits = ["--hang_report_seconds", 4, "--hang_abort_seconds", 8]
        with jobs.ranks([0, 1, 2], "--output_dir", tmp_path / "run", *limits, "--steps", 300, "--global_batch_size", 6) as job:
            job.until_step(7)
            main, _, last = cluster.nodes
            if cut == "isolated":
                main.link(False)
            elif cut == "from node0":
                last.firewall(f"ip saddr {main.address} drop")
            else:
                main.firewall(f"ip saddr {last.address} drop")
            assert job.codes(ABORT_SECONDS) == [FAILED] * 3, job.all_output()
            print(job.all_output())
            for level in ("warning", "error"):
                found = [
                    [f"{d.kind}: {d.text}" for d in job.diagnoses() if (d.process, d.level) == (node, level)] for node in range(3)
                ]
                if cut == "isolated":
                    assert "The network of node0 itself is interrupted." in found[0][0]
                    expected = "MAIN_NODE_LOST: the main node node0 (10.77.0.1) has not answered node1, node2 for "
                    found = found[1:]
                else:
                    expected = (
                        "LINK_LOST: the link between node0 and node2 has been lost for more than 4 s. node1 still hears both. "
                    )
                    direction = (
                        "node0 receives packets from node2, but node2"
                        if cut == "from node0"
                        else "node2 receives packets from node0"
                    )
                    assert direction in found[0][0]
                assert [len(each) for each in found] == [1] * len(found), found
                assert len({each[0] for each in found}) == 1, found
                assert found[0][0].startswith(expected)
        jobs.close()


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_node_is_reported_by_the_other_one(two, tmp_path, lost):
    """All processes of a node are killed at once, including its monitor. Its connections are closed by the kernel."""
    two.cluster.require("a link")
    # A machine that stands still for 2 s notices the closed connections late. The hang of the rank must not end the run before.
    options = [*SHORT, *([] if IS_DEFAULT else ["--hang_abort_seconds", 8])]
    with two.ranks([0, 1], "--output_dir", tmp_path / "run", *options, "--steps", 300) as job:
        job.until_step(7)
        step, began = job.last_step(), time.monotonic()
        # The monitor first, and all of them before one is killed: otherwise it may still see that its rank has died.
        alive = sorted(set(two.cluster.nodes[lost].pids()) - set(job.servers), key=lambda pid: not is_monitor(pid))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                kill(pid, number)
        kinds = "MAIN_NODE_LOST" if lost == 0 else "NODE_LOST|LINK_LOST"
        first = job.until_diagnosis(kinds, "warning|error", REPORT_SECONDS, of=1 - lost)
        assert job.processes[1 - lost].wait(ABORT_SECONDS) == FAILED
        ended = time.monotonic()
        job.nothing_is_left()
        print(job.all_output())
        (diagnosis,) = [d for d in job.diagnoses() if d.process == 1 - lost and d.level == "error"]
        assert diagnosis.kind == ("MAIN_NODE_LOST" if lost == 0 else "NODE_LOST")
        assert f"node{lost}" in diagnosis.text
        assert diagnosis.text.endswith(f"The ranks exit. {BY_HAND} {tmp_path / 'run'}")
        assert diagnosis.number("step") in steps_from(step - HEARTBEAT_STEPS, job)
        assert newest_checkpoint_loads(tmp_path / "run") >= 5
        print(f"MEASURED node {lost} killed: report {first.seconds - began:.1f} s, end {ended - began:.1f} s")


# ---- faults that end by themselves, and slow ranks and links


def result(folder: Path) -> dict[str, bytes]:
    newest = list_checkpoints(folder)[-1]
    return {name: (newest / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


@pytest.mark.parametrize("timeout", [600, pytest.param(10, marks=pytest.mark.slow)])
def test_a_link_that_becomes_slow_is_named_and_never_ends_a_run_whose_collectives_progress(two, tmp_path, timeout):
    """A step takes longer than --hang_abort_seconds. Without a look at the bytes, it is a deadlock."""
    two.cluster.require("a link")
    width = 10_000 if timeout > 10 else 40_000  # 80 bytes each: 6 s or 26 s at 1 Mbit/s
    options = ["--width", width, "--step_seconds", 0.05, "--save_every", 50, "--steps", 14, "--ddp_timeout_seconds", timeout]
    with two.ranks([0, 1], "--output_dir", tmp_path / "run", *SHORT, *options) as job:
        job.until_step(7)
        began = time.monotonic()
        shape_link(two.cluster.nodes[1], "1mbit")
        job.until_diagnosis("SLOW_LINK", "warning", REPORT_SECONDS, began)
        if timeout == 10:
            assert job.codes() == [FAILED, FAILED], job.all_output()
            print(job.all_output())
            for node in (0, 1):
                assert "Timed out waiting 10000ms" in job.text(node)
                assert "A link was slow: the link node1 -> node0 transfers 0." in job.text(node)
            return
        step = job.last_step()
        job.until_step(step + 1)
        duration = job.steps()[-1][0] - began
        shape_link(two.cluster.nodes[1], "")
        assert job.codes() == [0, 0], job.all_output()
        print(job.all_output())
        found = agree(job, "warning", "SLOW_LINK")
        rate = re.search(r"the link node1 -> node0 transfers (\S+) MB/s(; at the start it was \S+ MB/s)?\. All ranks", found.text)
        assert rate, found.text
        assert 0 < float(rate[1]) < 0.25, "1 Mbit/s are 0.125 MB/s, of which a busy machine may use a part"
        assert {d.kind for d in job.diagnoses()} == {"SLOW_LINK"}
        assert duration > 5, "longer than the limit for an abort"


@pytest.mark.slow
@pytest.mark.parametrize("is_default", [False, True])
def test_short_faults_are_survived_and_reported_afterwards(two, tmp_path, is_default):
    """One run has them all: a stopped rank, an interrupted link, the GIL held in C, a slow rank and a slow link."""
    two.cluster.require("a link")
    limits = [] if is_default else ["--hang_report_seconds", 1.5, "--hang_abort_seconds", 15]
    stop_seconds, link_seconds, gil_seconds = (20, 5, 8) if is_default else (5, 3, 3)
    folder, faults = tmp_path / "run", tmp_path / "faults"
    options = ["--width", 1000, "--steps", 200, "--step_seconds", 0.05, "--save_every", 50]
    with two.ranks([0, 1], "--output_dir", folder, "--fault_folder", faults, *options, *limits) as job:

        def request(text: str) -> float:
            (faults / ".new").write_text(text)
            (faults / ".new").rename(faults / "rank-1")
            return job.until(rf"rank 1 \(pid \d+\) injects {text.split()[0]}", after=time.monotonic())[0]

        def wait_steps(number: int) -> None:
            job.until_step(job.last_step() + number)

        job.until_step(8)
        node = two.cluster.nodes[1]
        # A stopped rank.
        began, pid = time.monotonic(), job.rank_pid(1)
        kill(pid, signal.SIGSTOP)
        assert job.until_diagnosis("RANK_STOPPED", "warning", REPORT_SECONDS, began).number("pid") == pid
        time.sleep(max(0.0, began + stop_seconds - time.monotonic()))
        kill(pid, signal.SIGCONT)
        job.until_diagnosis("RANK_STOPPED", "info", 15, began)
        agree(job, "warning", "RANK_STOPPED")
        agree(job, "info", "RANK_STOPPED")
        wait_steps(8)
        # An interrupted link.
        began = time.monotonic()
        node.link(False)
        time.sleep(link_seconds)
        node.link(True)
        job.until_diagnosis("LINK_LOST|NODE_LOST|MAIN_NODE_LOST", "info", 30, began)
        wait_steps(8)
        # A rank that holds the GIL.
        began = request(f"gil {gil_seconds}")
        wait_steps(8)
        assert {d.kind for d in job.diagnoses(began) if d.level != "info"} <= {"RANK_HUNG"}
        # A slow rank.
        began, first = request("straggler 0.4"), job.last_step()
        found = job.until_diagnosis("STRAGGLER", "warning", 60, began)
        assert job.last_step() - first <= 21
        assert (found.number("rank"), found.host) == (1, "node1")
        request("fast 0")
        wait_steps(10)
        # A slow link.
        began, first = time.monotonic(), job.last_step()
        shape_link(node, "1mbit")
        found = job.until_diagnosis("SLOW_LINK", "warning", 90, began)
        assert job.last_step() - first <= 21
        assert "node1" in found.text
        shape_link(node, "")
        assert job.codes() == [0, 0], job.all_output()
        job.nothing_is_left()
        print(job.all_output())
        assert [d for d in job.diagnoses() if d.level == "error"] == []
    undisturbed = tmp_path / "undisturbed"
    with two.ranks([0, 1], "--output_dir", undisturbed, *options, "--step_seconds", 0) as job:
        assert job.codes() == [0, 0]
        assert job.diagnoses() == []
    assert result(folder) == result(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["one", "two"])
def test_slow_data_loading_is_reported(request, tmp_path, place):
    places = [0, 0] if place == "one" else [0, 1]
    arguments = ["--fault", "slow_data", "--fault_seconds", 0.1, "--steps", 35, "--step_seconds", 0.05]
    with request.getfixturevalue(place).ranks(places, "--output_dir", tmp_path / "run", *arguments) as job:
        assert job.codes() == [0, 0], job.all_output()
        print(job.all_output())
        found = [d for d in job.diagnoses() if d.level == "warning"]
        assert {d.kind for d in found} <= {"STRAGGLER", "DATA_SLOW"}
        assert found[0].number("rank") == 1
        assert "data" in found[0].text


def test_a_removed_output_folder_is_reported(one, tmp_path):
    folder = tmp_path / "run"
    with one.ranks([0, 0], "--output_dir", folder, *SHORT, "--steps", 60) as job:
        job.until_step(7)
        began = time.monotonic()
        folder.rename(tmp_path / "removed")  # at once, because the job writes to it
        shutil.rmtree(tmp_path / "removed")
        found = job.until_diagnosis("OUTPUT_REMOVED", "warning|error", REPORT_SECONDS, began)
        codes = job.codes()
        job.nothing_is_left()
        print(job.all_output())
        assert str(folder) in found.text
        assert len(set(codes)) == 1
        if codes == [0, 0]:
            assert newest_checkpoint_loads(folder) == 60


def test_incidents_of_a_single_rank_are_stored_also_after_its_monitor_was_killed(one, tmp_path):
    folder, faults = tmp_path / "run", tmp_path / "faults"
    with one.ranks([0], "--output_dir", folder, "--fault_folder", faults, *SHORT, "--steps", 3000) as job:
        job.until_step(4)
        (monitor,) = filter(is_monitor, one.cluster.nodes[0].pids())
        kill(monitor)
        deadline = time.monotonic() + 120
        while not read_incidents(folder):
            assert time.monotonic() < deadline, job.all_output()
            time.sleep(0.02)
        (faults / "rank-0.new").write_text("exception 0")
        (faults / "rank-0.new").rename(faults / "rank-0")
        assert job.codes() == [FAILED]
        print(job.all_output())
    found = read_incidents(folder)
    assert [(one.level, one.kind) for one in found] == [("warning", "MONITOR_LOST"), ("error", "RANK_FAILED")]
    assert f"(pid {monitor}) was killed" in found[0].text
    assert "RuntimeError: a fault of this test" in found[1].text
    require_documented(folder)


# ---- launchers


def rank_of_launcher(job: Job, number: int) -> int:
    """Return the pid of the rank that the launcher `number` of two has started."""
    pid = job.rank_pid(number)
    assert pid in children(job.processes[number].pid)
    return pid


LAUNCHED = [
    pytest.param("torchrun", "stop", marks=pytest.mark.slow),
    ("accelerate", "launcher"), pytest.param("accelerate", "kill", marks=pytest.mark.slow),
    pytest.param("torchrun", "kill", marks=pytest.mark.slow), pytest.param("accelerate", "stop", marks=pytest.mark.slow),
    pytest.param("torchrun", "launcher", marks=pytest.mark.slow), pytest.param("torchrun", "main launcher", marks=pytest.mark.slow),
    pytest.param("accelerate", "main launcher", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "fault"), LAUNCHED)
def test_faults_under_launchers_on_two_nodes(two, tmp_path, launcher, fault):
    two.cluster.require("host names")
    with two.launched(launcher, 2, "--output_dir", tmp_path / "run", *SHORT, "--steps", 600) as job:
        job.until_step(7)
        step, began = job.last_step(), time.monotonic()
        at_fault = 0 if fault == "main launcher" else 1
        pid = rank_of_launcher(job, at_fault)
        if fault in ("launcher", "main launcher"):
            kind = "LAUNCHER_DIED"
            kill(job.processes[at_fault].pid)
        else:
            kind = "RANK_DIED" if fault == "kill" else "RANK_STOPPED"
            kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        first = job.until_diagnosis(kind, "warning|error", REPORT_SECONDS, began)
        job.until_diagnosis(kind, "error", ABORT_SECONDS, began)
        codes = job.codes()
        ended = time.monotonic()
        job.nothing_is_left()
        print(job.all_output())
        expected = [1, 1]
        if kind == "LAUNCHER_DIED":
            expected[at_fault] = -9
        assert codes == expected
        diagnosis = agree(job, "error", kind)
        assert f"node{at_fault}" in diagnosis.text
        assert diagnosis.number("step") in steps_from(step, job)
        if kind != "LAUNCHER_DIED":
            assert (diagnosis.number("rank"), diagnosis.number("pid")) == (at_fault, pid)
        assert "stopped: " not in job.text(), "the fault is reported as a stop that a user requested"
        assert newest_checkpoint_loads(tmp_path / "run") >= 5
        print(f"MEASURED {launcher} {fault}: report {first.seconds - began:.1f} s, end {ended - began:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_stopped_rank_with_the_default_limits(two, tmp_path, launcher):
    two.cluster.require("host names")
    with two.launched(launcher, 2, "--output_dir", tmp_path / "run", "--steps", 600) as job:
        job.until_step(7)
        began, pid = time.monotonic(), rank_of_launcher(job, 1)
        kill(pid, signal.SIGSTOP)
        early = job.until_diagnosis("RANK_STOPPED", "warning", REPORT_SECONDS, began)
        late = job.until_diagnosis("RANK_STOPPED", "error", ABORT_SECONDS, began)
        assert early.seconds - began > 3
        assert late.seconds - began > 25
        assert job.codes() == [1, 1]
        job.nothing_is_left()
        print(job.all_output())
        print(f"MEASURED {launcher} default limits: report {early.seconds - began:.1f} s, abort {late.seconds - began:.1f} s")


# ---- restarts


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "backend"), [("accelerate", "static"), ("torchrun", "c10d")])
def test_different_faults_use_one_restart_each_and_leave_the_result_unchanged(two, tmp_path, launcher, backend):
    two.cluster.require("host names")
    faults, folder = tmp_path / "faults", tmp_path / "run"
    arguments = ["--output_dir", folder, "--fault_folder", faults, *SHORT, "--steps", 40, "--num_workers", 1]
    with two.launched(launcher, 2, *arguments, backend=backend, max_restarts=4) as job:
        for step, fault in ((8, "kill"), (14, "exception"), (20, "stop"), (26, "exit")):
            job.until_step(step, timeout=180)
            if fault in ("kill", "stop"):
                kill(job.rank_pid(1), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            else:
                (faults / "rank-0").write_text(f"{fault} 0")
            began = time.monotonic()
            job.until(r"resumed at step (\d+)", timeout=120, after=began)
        assert job.codes(180) == [0, 0], job.all_output()
        job.nothing_is_left()
        print(job.all_output())
    undisturbed = tmp_path / "undisturbed"
    with two.ranks([0, 1], "--output_dir", undisturbed, "--steps", 40, "--num_workers", 1, "--step_seconds", 0) as job:
        assert job.codes() == [0, 0]
    assert result(folder) == result(undisturbed)


@pytest.mark.slow
def test_a_step_that_fails_three_times_stops_the_job(two, tmp_path):
    two.cluster.require("host names")
    arguments = ["--output_dir", tmp_path / "run", *SHORT, "--fault", "exception"]
    with two.launched("torchrun", 2, *arguments, backend="c10d", max_restarts=10) as job:
        codes = job.codes(240)
        job.nothing_is_left()
        print(job.all_output())
        assert None not in codes
        assert 0 not in codes
        assert job.text(1).count("injects exception at step 8") == 3


@pytest.mark.parametrize(
    ("places", "dies"),
    [([0, 1, 0], 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [([0, 0, 1], 1), ([0, 1, 1], 2)])],
    ids=str,
)
def test_ranks_whose_variables_are_set_by_hand_find_their_nodes(two, tmp_path, places, dies):
    """RANK and the like do not state how many nodes there are. In the last case the ranks are distributed in turn."""
    two.cluster.require("host names")
    with two.ranks(places, "--global_batch_size", 6, "--steps", 100, "--output_dir", tmp_path / "run") as job:
        job.until_step(2)
        kill(job.rank_pid(dies))
        assert None not in job.codes()
        counts = f"{places.count(0)} on node0, {places.count(1)} on node1"
        assert f"6 items per step = 3 ranks ({counts}) x 2 per micro-batch" in job.text(0)
        assert "preflight: 2 nodes match and reach each other" in job.text(0)
        for node in {node.name: node for node in job.nodes}.values():
            died = re.findall(r"RANK_DIED: (rank \d+ \(\w+), pid", job.text_of_node(node))
            assert died == [f"rank {dies} (node{places[dies]}"], job.all_output()
