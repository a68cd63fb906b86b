"""The cost of observing a run: heartbeats and time breakdown in a rank, the monitor of a node, the main node of a large cluster.

    python benchmarks/watch_overhead.py                     # all, about a minute
    python benchmarks/watch_overhead.py --only breakdown    # 1 and 2 with steps of 0.1 s, without the large cluster
    python benchmarks/watch_overhead.py --nodes 512 --ranks_per_node 8 --seconds 20

1. Heartbeats and time breakdown. Every call of a heartbeat is timed inside a real run, and so is everything that the breakdown adds
   to a step: the clock of the rank's own time, the sample of the rank, the larger vector that is summed, the samples of all ranks,
   and the line of the log. The calls hold the GIL and do not wait, so that their CPU time is also the time in which they hold the
   GIL. The time of the timer itself is subtracted. The thread that measures GPU, CPU and memory is added. With --log_every 1
   every step is logged, which is the worst case.
2. Monitor. Its CPU time per second of the same run, from /proc.
3. Main node. A real monitor process is the coordinator of a cluster whose other nodes are simulated by one process: each has its own
   connection, speaks the protocol of the monitors, and sends heartbeats of its ranks every 0.5 s. The messages per second, their
   bytes, and the CPU time and memory of the monitor are measured.

The goal is below 0.5 % of a step for the sum of 1 and 2, and below 0.5 % for the breakdown alone.
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import multiprocessing
import os
import re
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
BEAT_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of the run in which heartbeats are timed")
    parser.add_argument("--step_seconds", type=float, default=0.1, help="minimum duration of a step of that run")
    parser.add_argument("--log_every", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--ranks_per_node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15, help="for how long the main node is measured")
    if sys.argv[1:2] == ["--inside"]:  # this process is a rank of the run
        return time_heartbeats(sys.argv[2], sys.argv[3:])
    parser.add_argument("--only", choices=["all", "breakdown"], default="all")
    options = parser.parse_args()
    measure_run(options)
    if options.only == "all":
        measure_main_node(options)


# ---- 1 and 2: a real run


def time_heartbeats(report: str, arguments: list[str]) -> None:
    """Run tests/programs/faulty.py with a timer around everything that is measured, and write the sums to a file."""
    import runpy

    from accel_ddp.engine import step_numbers, step_sums
    from accel_ddp.engine.step_numbers import RankSample
    from accel_ddp.engine.step_times import StepTimes
    from accel_ddp.observe.log_hook import JsonlLog
    from accel_ddp.phases import Phases
    from accel_ddp.training.breakdown import Breakdown
    from accel_ddp.training.system_sample import SystemSample

    calls, spent, depth = {}, {"heartbeat": 0, "breakdown": 0, "thread": 0}, 0

    def timed(name: str, group: str, method):
        calls[name] = 0

        def wrapper(*args):
            nonlocal depth
            calls[name] += 1
            depth += 1
            began = time.thread_time_ns()
            try:
                return method(*args)
            finally:
                depth -= 1
                if depth == 0:
                    spent[group] += time.thread_time_ns() - began

        return wrapper

    def timed_in_thread(method):
        def wrapper(*args):
            began = time.thread_time_ns()
            try:
                return method(*args)
            finally:
                spent["thread"] += time.thread_time_ns() - began

        return wrapper

    for owner, group in ((Phases, "heartbeat"), (StepTimes, "breakdown")):
        for name, method in list(vars(owner).items()):
            if inspect.isfunction(method) and (not name.startswith("_") or name == "__call__"):
                setattr(owner, name, timed(f"{owner.__name__}.{name}", group, method))
    RankSample.of = timed("RankSample.of", "breakdown", RankSample.of)
    Breakdown.on_update = timed("Breakdown.on_update", "breakdown", Breakdown.on_update)
    JsonlLog._write_ranks = timed("JsonlLog._write_ranks", "breakdown", JsonlLog._write_ranks)
    step_sums.append_sample = timed("append_sample", "breakdown", step_sums.append_sample)
    step_numbers.split_samples = timed("split_samples", "breakdown", step_numbers.split_samples)
    SystemSample._measure = timed_in_thread(SystemSample._measure)
    began = time.thread_time_ns()
    for _ in range(10_000):
        time.thread_time_ns()
    timer = (time.thread_time_ns() - began) / 10_000
    sys.argv = [str(ROOT / "tests" / "programs" / "faulty.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        of_heartbeat = sum(count for name, count in calls.items() if name.startswith("Phases"))
        spent["heartbeat"] -= timer * of_heartbeat
        spent["breakdown"] -= timer * (sum(calls.values()) - of_heartbeat)
        seconds = {group: value * 1e-9 for group, value in spent.items()}
        Path(report).write_text(json.dumps({"calls": calls, "seconds": seconds}))


def measure_run(options: argparse.Namespace) -> None:
    """Run one rank, and print the cost of its heartbeats and of its monitor."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, __file__, "--inside", report, "--output_dir", Path(folder, "run"), "--steps", options.steps]
        command += ["--step_seconds", options.step_seconds, "--global_batch_size", 2, "--save_every", 1000]
        command += ["--log_every", options.log_every]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        # A run of a single process has no other rank to wait for, and may have no monitor. torchrun's variables make it one of two.
        process, other = start_two_ranks([str(word) for word in command], env, folder)
        times: list[float] = []
        cpu: list[float] = []
        monitor = 0
        for line in process.stdout:
            if re.match(r"step +\d+/", line):
                times.append(time.monotonic())
                monitor = monitor or find_monitor()
                cpu.append(cpu_seconds(monitor))
        codes = (process.wait(), other.wait())
        assert codes == (0, 0), f"exit codes {codes}"
        found = json.loads(report.read_text())
    half = len(times) // 4
    step = (times[-1] - times[half]) / (len(times) - 1 - half) / options.log_every
    per_step = {group: seconds / options.steps for group, seconds in found["seconds"].items()}
    counts = lambda is_heartbeat: {
        name: count for name, count in found["calls"].items() if count and name.startswith("Phases") == is_heartbeat
    }
    monitor_share = (cpu[-1] - cpu[half]) / (times[-1] - times[half])
    print(f"1. in a rank, per step of {step * 1e3:.1f} ms with --log_every {options.log_every}, CPU time:")
    for name, seconds, called in (
        ("heartbeats", per_step["heartbeat"], counts(True)),
        ("time breakdown", per_step["breakdown"], counts(False)),
        ("thread of the system metrics", per_step["thread"], {}),
    ):
        print(
            f"   {name}: {seconds * 1e6:.1f} us = {seconds / step:.4%} of a step, {sum(called.values()) / options.steps:.1f} calls"
        )
        print(
            f"      {', '.join(f'{name} {count}' for name, count in called.items())}" if called else "", end="\n" * bool(called)
        )
    breakdown = (per_step["breakdown"] + per_step["thread"]) / step
    print(f"   time breakdown with its thread: {breakdown:.4%} of a step (goal: below 0.5 %)")
    print(f"   one call of a heartbeat in a loop: {cost_of_a_call() * 1e6:.2f} us")
    print(f"2. monitor (pid {monitor}): {monitor_share * 1e3:.2f} ms of CPU time per second = {monitor_share:.4%} of one core")
    cores = os.cpu_count() or 1
    print(f"   = {monitor_share / cores:.4%} of the {cores} cores of this node")
    total = sum(per_step.values()) / step + monitor_share / cores
    print(f"   sum of 1 and 2: {total:.4%} of a step (goal: below 0.5 %)\n", flush=True)


def cost_of_a_call() -> float:
    """Return the CPU time of one change of the phase, in a loop. Changes of the phase are the most frequent calls."""
    from accel_ddp import phases

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        heartbeat = phases.Phases()
        heartbeat.publish(Path(folder, "page"))
        began = time.thread_time()
        for _ in range(50_000):
            heartbeat.enter(phases.FORWARD)
            heartbeat.enter(phases.BACKWARD)
        return (time.thread_time() - began) / 100_000


def start_two_ranks(command: list[str], env: dict[str, str], folder: str) -> tuple[subprocess.Popen, subprocess.Popen]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = []
    for rank in (0, 1):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        variables = {name: str(value) for name, value in {**world, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}.items()}
        words = [word if rank == 0 or word != f"{folder}/report.json" else f"{folder}/other.json" for word in command]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        words[words.index("--global_batch_size") + 1] = "4"
        started.append(subprocess.Popen(words, env={**env, **variables}, stdout=output, text=True))
    return started[0], started[1]


def find_monitor() -> int:
    """Return the pid of the monitor that a child of this process has started."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_text().split("\0")
            if "accel_ddp.watch.monitor" in words and parent(parent(int(entry))) in (os.getpid(), 1):
                return int(entry)
    raise SystemExit("the run has no monitor")


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid: int) -> int:
    return int(stat(pid)[1])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds. schedstat has nanoseconds, stat only ticks of 10 ms."""
    with contextlib.suppress(OSError, ValueError):
        tasks = os.listdir(f"/proc/{pid}/task")
        return sum(int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) for task in tasks) * 1e-9
    return sum(map(int, stat(pid)[11:13])) / TICKS


def memory_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024


# ---- 3: a large cluster


def measure_main_node(options: argparse.Namespace) -> None:
    """Start a monitor as node 0, simulate the other nodes, and print what both cost."""
    raise_file_limit(options.nodes + 200)
    print(f"3. main node of {options.nodes} nodes with {options.ranks_per_node} ranks each:")
    measurements = {}
    for nodes in (2, options.nodes):
        measurements[nodes] = coordinate(nodes, options.ranks_per_node, options.seconds)
    few, many = measurements[2], measurements[options.nodes]
    beats = 2 * (options.nodes - 1) / BEAT_SECONDS  # one in each direction
    print(f"   messages per second: {many['received']:.0f} received (expected {beats / 2:.0f}), about as many sent")
    print(f"   one heartbeat of a node: {many['size']} bytes; {many['received'] * many['size'] / 1e6:.2f} MB/s received")
    print(f"   memory: {many['memory'] / 2**20:.1f} MiB, with 2 nodes {few['memory'] / 2**20:.1f} MiB, ", end="")
    print(f"{(many['memory'] - few['memory']) / 2**10 / (options.nodes - 2):.1f} KiB per node")
    print(f"   CPU time: {many['cpu'] * 1e3:.0f} ms per second, with 2 nodes {few['cpu'] * 1e3:.1f} ms per second")


def raise_file_limit(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, number), hard), hard))


def coordinate(num_nodes: int, ranks_per_node: int, seconds: float) -> dict[str, float]:
    """Run the monitor of node 0 beside simulated nodes. Return its memory, CPU time and messages per second."""
    from accel_ddp import phases

    token = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory() as folder:
        node_socket = socket.create_server(("127.0.0.1", 0), backlog=num_nodes)
        rank_socket = socket.socket(socket.AF_UNIX)
        rank_socket.bind(f"{folder}/socket")
        rank_socket.listen(ranks_per_node)
        port = node_socket.getsockname()[1]
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        fields = {
            "node": 0, "host": "node0", "num_local": ranks_per_node, "launcher": 0, "parent": os.getpid(), "report_after": 30.0,
            "abort_after": 60.0, "rank_socket": rank_socket.fileno(), "node_socket": node_socket.fileno(), "folder": str(scratch),
        }  # fmt: skip
        monitor = subprocess.Popen(
            [sys.executable, "-m", "accel_ddp.watch.monitor", json.dumps(fields)],
            pass_fds=[rank_socket.fileno(), node_socket.fileno()], env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        ready, counted = multiprocessing.Event(), multiprocessing.Value("q", 0)
        nodes = multiprocessing.Process(
            target=simulate_nodes, args=(num_nodes, ranks_per_node, port, token, ready, counted), daemon=True
        )
        nodes.start()
        # The ranks of node 0 are this process.
        beats, connections = [], []
        for rank in range(ranks_per_node):
            heartbeat = phases.Phases()
            heartbeat.publish(Path(folder, f"page-{rank}"))
            beats.append(heartbeat)
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"{folder}/socket")
            hello = {"rank": rank, "pid": os.getpid(), "page": f"{folder}/page-{rank}", "stack": f"{folder}/stack-{rank}"}
            connection.sendall(json.dumps({"hello": hello}).encode() + b"\n")
            connections.append(connection)
        roster = [
            {"node": n, "host": f"node{n}", "address": "127.0.0.1", "port": port, "key": token.hex()} for n in range(num_nodes)
        ]
        ranks = [
            {"rank": r, "node": r // ranks_per_node, "host": f"node{r // ranks_per_node}", "pid": 1000 + r}
            for r in range(num_nodes * ranks_per_node)
        ]
        connections[0].sendall(json.dumps({"roster": roster, "ranks": ranks}).encode() + b"\n")
        try:
            assert ready.wait(120), "the simulated nodes could not connect"
            end = time.monotonic() + seconds + 3
            measured: tuple[float, float, int] | None = None
            step = 0
            while time.monotonic() < end:
                step += 1
                for heartbeat in beats:
                    heartbeat.enter(phases.FORWARD)
                    heartbeat.enter(phases.BACKWARD)
                    heartbeat.advance(step)
                    heartbeat.report_timing(timing_of(step))
                if measured is None and time.monotonic() > end - seconds:  # after the first connections
                    measured = (time.monotonic(), cpu_seconds(monitor.pid), counted.value)
                time.sleep(BEAT_SECONDS)
            passed = time.monotonic() - measured[0]
            row = heartbeat_of(10, 123)
            return {
                "memory": memory_bytes(monitor.pid), "cpu": (cpu_seconds(monitor.pid) - measured[1]) / passed,
                "received": (counted.value - measured[2]) / passed, "size": 36 + len(json.dumps({"ranks": [row] * ranks_per_node})),
            }  # fmt: skip
        finally:
            nodes.kill()
            monitor.kill()
            nodes.join(), monitor.wait()


def heartbeat_of(rank: int, step: int) -> list:
    """Return what a monitor sends about one rank, as `Monitor._send_beat` does."""
    from accel_ddp import phases

    return [rank, step, phases.BACKWARD, 0.05, 0.123456789, "S", 0.0, False, 0.0, False, *timing_of(step)]


def timing_of(step: int):
    from accel_ddp import phases

    return phases.Timing(step, *[0.1234] * (len(phases.Timing._fields) - 1))


def simulate_nodes(num_nodes: int, ranks_per_node: int, port: int, token: bytes, ready, counted) -> None:
    """Be all nodes but node 0. Runs in its own process."""
    raise_file_limit(num_nodes + 200)
    asyncio.run(be_nodes(num_nodes, ranks_per_node, port, token, ready, counted))


async def be_nodes(num_nodes: int, ranks_per_node: int, port: int, token: bytes, ready, counted) -> None:
    from accel_ddp.nodes import messages

    connected = 0
    gate = asyncio.Semaphore(16)

    async def be_node(node: int) -> None:
        nonlocal connected
        while True:  # the monitor accepts nodes when its ranks have sent it the roster
            try:
                async with gate:
                    reader, writer = await messages.connect("127.0.0.1", port, 10, small_segments=True)
                    stream = await messages.handshake(reader, writer, token, node)
                break
            except (OSError, messages.HandshakeError, asyncio.TimeoutError):
                await asyncio.sleep(0.5)
        stream.write({"hello": True})
        connected += 1
        if connected == num_nodes - 1:
            ready.set()

        async def drain() -> None:
            while await reader.read(1 << 16):
                pass

        reading = asyncio.ensure_future(drain())
        await asyncio.sleep(BEAT_SECONDS * node / num_nodes)
        step = 0
        while not reading.done():
            step += 1
            first = node * ranks_per_node
            rows = [heartbeat_of(first + r, step) for r in range(ranks_per_node)]
            stream.write({"ranks": rows})
            with counted.get_lock():
                counted.value += 1
            await asyncio.sleep(BEAT_SECONDS)

    await asyncio.gather(*(be_node(node) for node in range(1, num_nodes)))


if __name__ == "__main__":
    main()
