"""The rules by which the monitors find the rank, node or link that is at fault, and the pages that the ranks write."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_ddp import phases
from accel_ddp.records.incidents import ERROR, INFO, WARNING
from accel_ddp.watch import processes
from accel_ddp.watch.diagnosis import Event, Judge, NodeView, RankView
from accel_ddp.watch.processes import OutOfMemoryKills, Stack, memory_limit
from accel_ddp.watch.slow_run import Flows

IN_BARRIER = Stack(["barrier (torch/distributed/distributed_c10d.py:5)", "wrapper (c10d_logger.py:9)", "loss (mine.py:3)"])
IN_BACKWARD = Stack(["_engine_run_backward (torch/autograd/graph.py:869)", "backward (tensor.py:1)", "update (update.py:90)"])
IN_USER_CODE = Stack(["compute (mine.py:7)", "update (update.py:90)"])


def rank(number: int, phase: int, age: float = 0.0, **more) -> RankView:
    usual = {"step": 18, "normal": 0.5}
    return RankView(number, number, f"node{number}", 100 + number, phase=phase, age=age, **{**usual, **more})


class Course:
    """Shows observations to a judge every half second, as the monitor does."""

    def __init__(self, report: float = 5, abort: float = 30):
        self.judge, self.events = Judge("node0", report, abort, lambda cause: f"{cause.kind} continues."), []

    def show(
        self, ranks: list[RankView], nodes: list[NodeView] | None = None, read: dict[int, Stack] | None = None
    ) -> list[Event]:
        new = self.judge.examine(0.5, ranks, nodes or [], read or {})
        self.events += new
        return new

    def pass_time(self, seconds: float, make) -> "Course":
        """Show what `make` returns for each moment of these seconds: the ranks, or the ranks and the nodes, and the stacks."""
        for tick in range(int(seconds * 2) + 1):
            made = make(tick / 2)
            self.show(*made if isinstance(made, tuple) else (made,))
        return self

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(event.severity, event.kind) for event in self.events]


def test_a_stopped_rank_is_reported_after_5_s_and_ends_the_run_after_30():
    course = Course()
    at = lambda s: ([rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s, state="T", stopped=s)], [], {1: IN_USER_CODE})
    course.pass_time(29.5, at)
    assert course.kinds == [(WARNING, "RANK_STOPPED")]
    text = course.events[0].text
    assert text.startswith(
        "rank 1 (node1, pid 101) has been stopped (SIGSTOP) for 6 s at step 19, in forward. Rank 0 waits for it."
    )
    assert "`kill -CONT 101` on node1 continues it. The ranks exit in 24 s if nothing changes." in text
    assert "The innermost calls of rank 1:\n    compute (mine.py:7)" in text
    course.show(*at(30))
    assert course.kinds[1:] == [(ERROR, "RANK_STOPPED")]
    assert (course.events[1].rank, course.events[1].host, course.events[1].step) == (1, "node1", 19)
    assert "continues it. The ranks exit. RANK_STOPPED continues.\n  The innermost calls" in course.events[1].text


def test_a_rank_that_is_stopped_for_20_s_is_reported_afterwards_and_the_run_continues():
    course = Course().pass_time(20, lambda s: [rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s, state="T", stopped=s)])
    course.show([rank(0, phases.DATA), rank(1, phases.DATA)])
    assert course.kinds == [(WARNING, "RANK_STOPPED"), (INFO, "RANK_STOPPED")]
    assert "this fault was over after 20 s, at step 19" in course.events[1].text


def test_the_duration_of_a_fault_is_not_learned_as_usual():
    """The ranks have measured 20.3 s for the phases in which rank 1 was stopped. The next fault is reported as early as the first."""
    course = Course().pass_time(20, lambda s: [rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s, state="T", stopped=s)])
    course.show([rank(0, phases.DATA), rank(1, phases.DATA)])
    course.events.clear()
    later = lambda s: [rank(0, phases.BACKWARD, s, normal=20.3), rank(1, phases.FORWARD, s, normal=20.3)]
    course.pass_time(29.5, later)
    assert course.kinds == [(WARNING, "RANK_HUNG")]
    assert "for 8 s (usually 500 ms at most)" in course.events[0].text
    course.pass_time(1, lambda s: later(29.5 + s))
    assert course.kinds[1] == (ERROR, "RANK_HUNG")
    slower = lambda s: [rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s, normal=40.0)]  # learned since, without a fault
    course.show([rank(0, phases.DATA), rank(1, phases.DATA)])
    course.events.clear()
    assert course.pass_time(44, slower).events == []


def test_a_node_that_was_cut_off_closes_its_reports_when_the_coordinator_decides_again():
    lost = lambda s: ([rank(1, phases.BACKWARD, s)], [NodeView(0, "node0", "10.77.0.1", silent=s)], {})
    course = Course().pass_time(8, lost)
    assert course.kinds == [(WARNING, "LINK_LOST")]
    assert [(event.severity, event.kind) for event in course.judge.close([rank(1, phases.DATA)])] == [(INFO, "LINK_LOST")]
    assert course.judge.close([]) == []
    assert course.pass_time(8, lost).kinds == [(WARNING, "LINK_LOST")] * 2, "a second interruption is not reported"


@pytest.mark.parametrize("phase", [phases.START, phases.LOAD, phases.COMPILE, phases.WAIT, phases.END])
def test_phases_without_a_usual_duration_are_never_reported(phase):
    course = Course().pass_time(900, lambda s: [rank(0, phases.WAIT, s), rank(1, phase, s)])
    assert course.events == []


def test_a_phase_that_was_not_learned_yet_has_more_time():
    first = lambda s: [rank(0, phases.BACKWARD, s, normal=None), rank(1, phases.DATA, s, normal=None)]
    course = Course().pass_time(124, first)
    assert course.events == []
    course.pass_time(3, lambda s: first(124 + s))
    assert course.kinds == [(WARNING, "DATA_HUNG")]
    assert "usually" not in course.events[0].text


def test_a_slow_phase_is_normal_if_it_was_slow_before():
    """An evaluation batch of 20 s is reported after 25 s and ends the run after 100 s."""
    at = lambda s: [rank(0, phases.EVALUATE, s, normal=20.0), rank(1, phases.WAIT, s)]
    course = Course().pass_time(99, at)
    assert course.kinds == [(WARNING, "RANK_HUNG")]
    expected = "rank 0 (node0, pid 100) has not progressed for 27 s (usually 20 s at most) at step 18, in evaluate."
    assert expected in course.events[0].text
    course.pass_time(1, lambda s: at(99 + s))
    assert course.kinds[1][0] == ERROR


def test_the_rank_that_waits_is_never_blamed():
    """Rank 0 is in backward longer than rank 1 is in data, but it waits for rank 1."""
    course = Course().pass_time(8, lambda s: ([rank(0, phases.BACKWARD, s + 2), rank(1, phases.DATA, s)], [], {1: IN_USER_CODE}))
    assert course.kinds == [(WARNING, "DATA_HUNG")]
    assert course.events[0].rank == 1


def test_a_rank_of_a_gpu_that_waits_in_its_forward_pass_is_not_blamed():
    """Its host launches kernels of the next step and waits there for the GPU, which waits for the other rank."""
    ranks = lambda s: [rank(0, phases.FORWARD, s, step=19), rank(1, phases.FORWARD, s, step=18)]
    course = Course().pass_time(8, lambda s: (ranks(s), [], {0: IN_USER_CODE, 1: IN_USER_CODE}))
    assert (course.kinds, course.events[0].rank) == ([(WARNING, "RANK_HUNG")], 1)
    course = Course().pass_time(8, lambda s: (ranks(s), [], {0: IN_USER_CODE, 1: IN_BARRIER}))
    assert course.kinds == [(WARNING, "DEADLOCK")]
    saves = lambda s: [rank(0, phases.FORWARD, s, step=19), rank(1, phases.SAVE, s, step=19, normal=60.0)]
    assert Course().pass_time(50, saves).events == [], "rank 1 is behind, and its save takes as long as usual"


def test_a_slow_disk_is_no_fault_but_a_disk_that_does_not_answer_is():
    at = lambda s: [rank(0, phases.SAVE, s), rank(1, phases.BACKWARD, s)]
    course = Course().pass_time(200, at)
    assert course.events == []
    course.judge.disk_hung = 5.0
    course.pass_time(2, lambda s: at(10 + s))
    assert course.kinds == [(WARNING, "DISK_HUNG")]


def test_a_kill_for_memory_is_seen_also_where_the_files_of_cgroups_are_hidden(tmp_path):
    kills = OutOfMemoryKills(os.getpid())
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "0::/")
    is_first_version = ":memory:" in line
    folder = Path(
        "/sys/fs/cgroup", "memory" if is_first_version else "", line.split(":", 2)[2].lstrip("/"), "accel-ddp-tests-watch"
    )
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(60 << 20))
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be used: {error}")
    inside = (
        f"import os; open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); bytearray(os.urandom(1) * (200 << 20))"
    )
    try:
        assert not kills.happened_on_machine()
        assert subprocess.run([sys.executable, "-c", inside]).returncode == -9
        assert kills.happened_on_machine()
        assert kills.happened() == [] or not is_first_version, "the process was not in a cgroup of this process"
        assert memory_limit([folder]) == 60 << 20
    finally:
        folder.rmdir()


def test_a_rank_that_the_kernel_blocks_while_it_loads_data_is_reported_as_blocked():
    course = Course().pass_time(8, lambda s: [rank(0, phases.BACKWARD, s), rank(1, phases.DATA, s, state="D")])
    assert course.kinds == [(WARNING, "RANK_BLOCKED")]
    assert "rank 1 (node1, pid 101) has been blocked in the kernel (state D) for " in course.events[0].text


def test_a_log_on_the_disk_that_does_not_answer_is_reported_as_that_disk():
    """The main rank writes its log in every step. It is blocked in the kernel, and the disk has not answered the monitor."""
    course = Course()
    at = lambda s: [rank(0, phases.HOOKS, s, state="D"), rank(1, phases.BACKWARD, s)]
    course.pass_time(8, at)
    assert course.kinds == [(WARNING, "RANK_BLOCKED")]
    course.judge.disk_hung = 5.0
    course.pass_time(23, lambda s: at(8 + s))
    assert len(course.kinds) == 1, "a slow disk may need long for a large checkpoint"
    course.judge.disk_hung = 120.0
    course.show(at(130))
    assert course.kinds[1] == (ERROR, "DISK_HUNG")


def test_a_collective_that_only_one_rank_calls_is_a_deadlock():
    ranks = lambda s: [rank(0, phases.FORWARD, s, step=20), rank(1, phases.BACKWARD, s, step=20)]
    course = Course().pass_time(8, lambda s: (ranks(s), [], {0: IN_BARRIER, 1: IN_BACKWARD}))
    assert course.kinds == [(WARNING, "DEADLOCK")]
    assert (
        "rank 0 (node0, pid 100) is at step 21 in barrier; rank 1 (node1, pid 101) is at step 21 in backward"
        in course.events[0].text
    )


def test_ranks_whose_collectives_move_bytes_are_in_no_deadlock_until_the_bytes_stop():
    ranks = lambda s: ([rank(0, phases.SYNC, s), rank(1, phases.BACKWARD, s)], [], {0: IN_BARRIER, 1: IN_BACKWARD})
    course = Course()
    course.judge.quiet = 0.5
    assert course.pass_time(300, ranks).events == []
    assert course.judge.waits_for_link
    for tick in range(60):
        course.judge.quiet = tick / 2
        course.show(*ranks(300 + tick / 2))
    assert course.kinds == [(WARNING, "DEADLOCK")]
    course.judge.quiet = 30.0
    course.show(*ranks(330))
    assert course.kinds == [(WARNING, "DEADLOCK"), (ERROR, "DEADLOCK")]


def test_the_slow_link_is_the_one_on_which_bytes_wait():
    flows = Flows([{"node": node, "address": f"10.0.0.{node}"} for node in range(3)])
    assert flows.seconds_since(100.0) == float("inf")
    for tick in range(6):  # in a ring all links have the same rate; a tracker's server (8.8.8.8) is no node
        for node in range(3):
            to, sent = (node + 1) % 3, 1000 * tick
            other = [f"192.168.0.{node}", f"192.168.0.{to}", sent, 0, 50_000 if node == 1 else 10]  # another interface
            flows.add(node, [other, [f"10.0.0.{node}", "8.8.8.8", 10**6 * tick, 0, 10**6]], 100 + tick / 2)
    assert flows.slowest(103.0, 5.0) == ((1, 2), 2000.0)
    assert flows.seconds_since(104.5) == 2.0
    for tick in range(6):  # a deadlock: only the tracker sends
        flows.add(0, [["10.0.0.0", "8.8.8.8", 10**8 + tick, 0, 0]], 110 + tick / 2)
    assert flows.seconds_since(112.5) == 10.0
    assert flows.slowest(112.5, 5.0) is None


def test_a_rank_that_computes_forever_in_its_backward_pass_is_no_deadlock():
    ranks = lambda s: [rank(0, phases.BACKWARD, s), rank(1, phases.BACKWARD, s)]
    course = Course().pass_time(8, lambda s: (ranks(s), [], {0: IN_BACKWARD, 1: IN_USER_CODE} if s > 6 else {}))
    assert (course.kinds, course.events[0].rank) == ([(WARNING, "RANK_HUNG")], 1)


def test_a_node_that_does_not_answer_ends_the_run_after_30_s_but_not_while_training_progresses():
    node = NodeView(1, "node1", "10.0.0.2")
    silent = lambda s: [NodeView(1, "node1", "10.0.0.2", silent=s)]
    course = Course().pass_time(60, lambda s: ([rank(0, phases.EVALUATE, 0.1), rank(1, phases.EVALUATE, s)], silent(s)))
    assert course.kinds == [(WARNING, "LINK_LOST")]
    course.show([rank(0, phases.BACKWARD, 30), rank(1, phases.EVALUATE, 60)], silent(60))
    assert course.kinds[1:] == [(ERROR, "LINK_LOST")]
    assert (
        "the link between node0 and node1 has been lost for more than 5 s. On node1, rank 1 (pid 101) was last seen at step 18, in "
        "evaluate." in course.events[1].text
    )
    assert node.silent == 0


def test_an_interruption_that_is_too_short_for_a_report_is_reported_afterwards():
    view = [rank(0, phases.BACKWARD), rank(1, phases.BACKWARD)]
    course = Course().pass_time(4, lambda s: (view, [NodeView(1, "node1", "10.0.0.2", silent=s)]))
    assert course.events == []
    course.show(view, [NodeView(1, "node1", "10.0.0.2", silent=0.2)])
    assert course.kinds == [(INFO, "LINK_LOST")]
    assert "did not answer node0 for 4 s, and does again." in course.events[0].text


def test_a_node_whose_kernel_closed_the_connection_is_lost_at_once():
    closed = lambda s: (
        [rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s)],
        [NodeView(1, "node1", "10.0.0.2", silent=s, closed=s)],
    )
    course = Course().pass_time(6, closed)
    assert course.kinds[:2] == [(WARNING, "NODE_LOST"), (ERROR, "NODE_LOST")]
    slow = lambda s: ([rank(0, phases.FORWARD, s % 6, normal=6.0), rank(1, phases.FORWARD, s)], closed(s)[1])
    assert Course().pass_time(40, slow).kinds == [(WARNING, "NODE_LOST")], "training progresses: only the monitor was lost"
    left = lambda s: ([rank(0, phases.END, s), rank(1, phases.END, s, is_finished=True)], closed(s)[1])
    assert Course().pass_time(100, left).events == [], "a node whose ranks have ended may leave"


def test_code_of_the_user_outside_of_a_step_never_ends_a_run():
    """It may evaluate, upload or wait for input. It is reported if other ranks wait for it."""
    assert Course().pass_time(900, lambda s: [rank(0, phases.OTHER, s)]).events == []
    course = Course().pass_time(900, lambda s: ([rank(0, phases.OTHER, s), rank(1, phases.BACKWARD, s)], [], {0: IN_USER_CODE}))
    assert course.kinds == [(WARNING, "RANK_HUNG")]
    assert "The ranks exit" not in course.events[0].text


@pytest.mark.parametrize("phase", [phases.METRICS, phases.HOOKS])
def test_metrics_and_hooks_may_be_slow_now_and_then(phase):
    assert Course().pass_time(60, lambda s: [rank(0, phase, s, normal=0.001), rank(1, phases.WAIT, s)]).events == []


def test_a_run_that_the_user_has_suspended_or_debugs_is_not_ended():
    suspended = lambda s: [rank(n, phases.FORWARD, s, state="T", stopped=s, is_suspended=True) for n in (0, 1)]
    course = Course().pass_time(300, suspended)
    assert course.kinds == [(WARNING, "RANK_STOPPED")] * 2
    debugger = Stack(["readline (/usr/lib/python3.11/pdb.py:12)", "loss (mine.py:3)"])
    course = Course().pass_time(300, lambda s: ([rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s)], [], {1: debugger}))
    assert course.kinds == [(WARNING, "RANK_HUNG")]


def test_a_single_rank_has_no_deadlock():
    course = Course().pass_time(40, lambda s: ([rank(0, phases.DEVICE, s)], [], {0: IN_USER_CODE}))
    assert course.kinds[0] == (WARNING, "RANK_HUNG")


def test_many_lost_nodes_are_one_report():
    """A switch fails, behind which are 500 of 512 nodes. Some of them are noticed a moment earlier."""
    silent = lambda node, s: max(0.0, s - (0 if node < 20 else 0.5)) if node >= 12 else 0.0
    nodes = lambda s: [NodeView(node, f"node{node}", f"10.0.0.{node}", silent=silent(node, s)) for node in range(1, 512)]
    ranks = lambda s: [rank(0, phases.BACKWARD, s), *(rank(node, phases.FORWARD, s) for node in range(1, 512))]
    course = Course().pass_time(29, lambda s: (ranks(s), nodes(s)))
    assert course.kinds == [(WARNING, "LINK_LOST")]
    assert "8 of 512 nodes have not answered node0 for 6 s: node12 (10.0.0.12), node13 " in course.events[0].text
    assert course.pass_time(2, lambda s: (ranks(29 + s), nodes(29 + s))).kinds[1] == (ERROR, "LINK_LOST")
    assert "500 of 512 nodes have not answered node0 for" in course.events[1].text
    assert "node15 (10.0.0.15) and 496 more." in course.events[1].text


def test_packets_that_are_dropped_in_one_direction_are_recognised():
    one_way = lambda s: [NodeView(1, "node1", "10.0.0.2", silent=s, one_way="node0")]
    course = Course().pass_time(6, lambda s: ([rank(0, phases.BACKWARD, s), rank(1, phases.FORWARD, s)], one_way(s)))
    assert "node0 receives packets from node1, but node1 receives none from node0: a firewall" in course.events[0].text
    course.show([rank(0, phases.DATA), rank(1, phases.DATA)])
    assert "receives packets" not in course.events[1].text


def test_the_majority_of_nodes_decides_which_one_is_lost():
    ranks = lambda s: [rank(node, phases.BACKWARD, s) for node in range(3)]
    main, second = (lambda s, more: NodeView(0, "node0", "10.0.0.1", s, **more)), NodeView(2, "node2", "10.0.0.3")

    def text(s, more, other=second):
        judge = Judge("node1", 5, 30, lambda cause: "")
        (event,) = judge.examine(0.5, ranks(s), [main(s, more), other], {})
        return f"{event.kind}: {event.text}"

    assert text(6, {"lost_by": ["node2"]}).startswith(
        "MAIN_NODE_LOST: the main node node0 (10.0.0.1) has not answered node1, node2 for"
    )
    neutral = "LINK_LOST: the link between node0 and node1 has been lost for more than 5 s."
    assert text(6, {"heard_by": ["node2"]}).startswith(f"{neutral} node2 still hears both. On node0, rank 0")
    assert "node0 receives packets from node1, but node1 receives none" in text(6, {"heard_by": ["node2"], "one_way": "node0"})
    alone = text(6, {}, NodeView(2, "node2", "10.0.0.3", 4.5))
    assert alone.startswith(
        "LINK_LOST: all 2 nodes that should answer have not answered node1 for 4 s: node0 (10.0.0.1), node2 ("
    )
    assert "The network of node1 itself is interrupted." in alone


def test_a_run_that_is_never_aborted_is_still_reported():
    course = Course(abort=0).pass_time(500, lambda s: [rank(0, phases.BACKWARD, s), rank(1, phases.DATA, s)])
    assert course.kinds == [(WARNING, "DATA_HUNG")]


def test_a_page_contains_where_the_rank_is_and_what_is_usual(tmp_path):
    heartbeat = phases.Phases()
    heartbeat.enter(phases.FORWARD)
    heartbeat.publish(tmp_path / "page")
    memory = (tmp_path / "page").read_bytes
    for step in range(1, 4):
        heartbeat.enter(phases.DATA)
        heartbeat.enter(phases.FORWARD)
        heartbeat.advance(step)
    found = phases.read(memory())
    assert (found.step, found.phase) == (3, phases.FORWARD)
    assert found.normal is not None
    heartbeat.enter(phases.EVALUATE)
    assert phases.read(memory()).normal is None
    time.sleep(0.2)
    for _ in range(3):
        heartbeat.beat()
    assert phases.read(memory()).normal < 0.2, "the first durations are not usual ones"
    time.sleep(0.2)
    heartbeat.beat()
    for step in range(4, 400):
        heartbeat.advance(step)
    assert phases.read(memory()).normal >= 0.2, "an evaluation keeps what it has learned until the next one"
    assert not phases.read(memory()).writing
    heartbeat.report_writer(True)
    assert phases.read(memory()).writing > 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import os; os._exit(3)", "exited with code 3"), ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV")],
)
def test_the_end_of_a_process_is_read_before_its_parent_reads_it(code, expected):
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    while processes.state_of(child.pid) != "Z":
        time.sleep(0.01)
    assert processes.describe_exit(processes.exit_status(child.pid)) == expected
    child.wait()
    assert processes.exit_status(child.pid) is None


def test_the_stack_of_a_running_and_of_a_stopped_process_is_read(tmp_path):
    import asyncio

    code = f"""
import pathlib, time
from accel_ddp.watch import processes
file = processes.print_on_signal(pathlib.Path({str(tmp_path / "stack")!r}))
def waits_here():
    print("ready", flush=True)
    time.sleep(60)
waits_here()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        running = asyncio.run(processes.read_stack(child.pid, tmp_path / "stack", "S"))
        os.kill(child.pid, signal.SIGSTOP)
        stopped = asyncio.run(processes.read_stack(child.pid, tmp_path / "stack", "T"))
    finally:
        child.kill()
        child.communicate()
    assert running[0].startswith("waits_here (")
    assert any(frame.startswith("waits_here (") for frame in stopped), "py-spy reads the memory of a stopped process"


def test_a_compilation_in_the_middle_of_a_step_is_published():
    import torch

    from accel_ddp.training import run_facts

    import torch._dynamo  # isort: skip  # a run that compiles has imported it

    seen = []

    def backend(graph, inputs):
        seen.append(phases.HERE.phase)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with phases.phase(phases.FORWARD):
        with run_facts.compilations_published():
            compiled(torch.ones(2))
            assert phases.HERE.phase == phases.FORWARD
        compiled(torch.ones(2, 2))
    assert seen == [phases.COMPILE, phases.FORWARD]


def test_a_message_that_cannot_be_handled_does_not_end_the_connection_of_a_node(capfd):
    import asyncio

    from accel_ddp.watch.link import Peers

    async def exchange() -> tuple[list[dict], bool]:
        received = []

        def handle(node: int, message: dict) -> None:
            received.append(message["value"])

        server = await asyncio.start_server(lambda *streams: first.accept(*streams), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        roster = [{"node": node, "host": f"node{node}", "address": "127.0.0.1", "port": port, "key": "ab"} for node in range(2)]
        first, second = Peers(0, roster, handle), Peers(1, roster, handle)
        second.start()
        while not second.peers[0].stream:
            await asyncio.sleep(0.01)
        for message in ({"value": 1}, {}, {}, {"value": 2}):
            second.send(0, message)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if len(received) == 2:
                break
        is_open = bool(first.peers[1].stream) and not first.peers[1].closed_at
        await second.close()
        await first.close()
        server.close()
        return received, is_open

    assert asyncio.run(exchange()) == ([1, 2], True)
    expected = "warning: a message of the monitor of node1 cannot be handled: KeyError: 'value'\n"
    assert capfd.readouterr().err.count(expected) == 1
