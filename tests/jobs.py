"""Jobs of several ranks whose output is read with its time, for tests and benchmarks that inject faults.

A job runs on nodes of tests/nodes.py, either under a launcher on each node, or as forks of one fork server inside each node, which
saves most of the time of a start.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import forking
from tests.conftest import BIN, PROGRAMS, ROOT, clean_environment, free_port
from tests.nodes import PATH, Node, Nodes, NotPossible, tool

FAULTY = PROGRAMS / "faulty.py"
DIAGNOSIS = re.compile(r"^(error|warning|info): ([A-Z][A-Z_]+): (.*)$")


@dataclass
class Diagnosis:
    """One message of the monitors, as one process has printed it."""

    seconds: float  # time.monotonic() when the line arrived
    process: int  # number of the process that printed it
    level: str
    kind: str
    text: str

    def number(self, word: str) -> int | None:
        """Return the first number after this word, for example the rank or the step."""
        found = re.search(rf"\b{word} (\d+)", self.text, re.IGNORECASE)
        return int(found[1]) if found else None

    @property
    def host(self) -> str:
        """Return the first host that the message names."""
        found = re.search(r"\((?:rank \d+, )?(node\d|[^\s,()]+)[,)]", self.text)
        return found[1] if found else ""


class Job:
    """Processes that are ranks or launchers. `nodes` has the node of each process."""

    def __init__(self, processes: list[subprocess.Popen | forking.Forked], nodes: list[Node], servers: list[int]):
        self.processes, self.nodes, self.servers = processes, nodes, servers
        self.lines: list[list[tuple[float, str]]] = [[] for _ in processes]
        self.readers: list[threading.Thread] = []
        for number in range(len(processes)):
            self.read(number)

    def read(self, number: int) -> None:
        def collect() -> None:
            for line in process.stdout:
                self.lines[number].append((time.monotonic(), line.rstrip("\n")))

        process = self.processes[number]
        self.readers.append(threading.Thread(target=collect, daemon=True))
        self.readers[-1].start()

    def replace(self, number: int, process: subprocess.Popen) -> None:
        """Continue with another process in this place, for example a launcher that is started again."""
        self.processes[number] = process
        self.read(number)

    def text(self, number: int | None = None) -> str:
        chosen = range(len(self.lines)) if number is None else [number]
        return "\n".join(line for index in chosen for _, line in list(self.lines[index]))

    def text_of_node(self, node: Node) -> str:
        return "\n".join(self.text(number) for number, place in enumerate(self.nodes) if place is node)

    def until(
        self, pattern: str, of: int | None = None, timeout: float = 240, after: float = 0.0
    ) -> tuple[float, int, re.Match[str]]:
        """Wait for a line with this pattern that was printed after `after`. Return its time, its process and the match."""
        expected, deadline = re.compile(pattern), time.monotonic() + timeout
        chosen = range(len(self.lines)) if of is None else [of]
        checked = [0] * len(self.lines)
        while True:
            is_over = time.monotonic() > deadline or not any(reader.is_alive() for reader in self.readers)
            for number in chosen:
                lines = self.lines[number]
                while checked[number] < len(lines):
                    seconds, line = lines[checked[number]]
                    checked[number] += 1
                    if seconds >= after and (found := expected.search(line)):
                        return seconds, number, found
            if is_over:
                raise AssertionError(f"no process has printed {pattern!r} in {timeout} s. Output:\n{self.all_output()}")
            time.sleep(0.02)

    def until_step(self, step: int, timeout: float = 240) -> None:
        """Wait until the main rank prints this step, or a later one."""
        deadline = time.monotonic() + timeout
        while self.last_step() < step:
            assert time.monotonic() < deadline, f"step {step} was not reached in {timeout} s. Output:\n{self.all_output()}"
            assert any(reader.is_alive() for reader in self.readers), f"the job has ended. Output:\n{self.all_output()}"
            time.sleep(0.02)

    def steps(self) -> list[tuple[float, int]]:
        """Return the steps that the main rank has printed, with their times."""
        found = [(seconds, re.match(r"step +(\d+)/", line)) for lines in self.lines for seconds, line in list(lines)]
        return sorted((seconds, int(match[1])) for seconds, match in found if match)

    def last_step(self) -> int:
        return self.steps()[-1][1] if self.steps() else 0

    def rank_pid(self, rank: int) -> int:
        """Return the pid of a rank, after a restart that of the newest one."""
        self.until(rf"rank {rank} is pid (\d+)")
        found = [
            (seconds, match) for lines in self.lines for seconds, line in list(lines)
            if (match := re.search(rf"rank {rank} is pid (\d+)", line))
        ]  # fmt: skip
        return int(max(found, key=lambda entry: entry[0])[1][1])

    def diagnoses(self, after: float = 0.0) -> list[Diagnosis]:
        """Return all diagnoses in the order of their time."""
        found = []
        for number, lines in enumerate(self.lines):
            for seconds, line in list(lines):
                if seconds >= after and (match := DIAGNOSIS.match(line)):
                    found.append(Diagnosis(seconds, number, *match.groups()))
        return sorted(found, key=lambda diagnosis: diagnosis.seconds)

    def until_diagnosis(self, kind: str, level: str, timeout: float, after: float = 0.0, of: int | None = None) -> Diagnosis:
        seconds, number, _ = self.until(rf"^(?:{level}): (?:{kind}): ", of, timeout, after)
        return next(
            diagnosis for diagnosis in self.diagnoses(after)
            if (diagnosis.process, diagnosis.seconds) == (number, seconds) and re.fullmatch(kind, diagnosis.kind)
        )  # fmt: skip

    def codes(self, timeout: float = 240) -> list[int | None]:
        """Wait for all processes and their output, and return their exit codes. None stands for a process that has not ended."""
        deadline = time.monotonic() + timeout
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.01, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        if None not in codes:
            deadline = time.monotonic() + 30  # a process that is left may have the pipe open; `nothing_is_left` finds it
            for reader in self.readers:
                reader.join(max(0.0, deadline - time.monotonic()))
        return codes

    def left(self) -> list[str]:
        """Return the processes of the job that still run."""
        found = []
        for node in {id(node): node for node in self.nodes}.values():
            for pid in node.pids():
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                    if pid not in self.servers and state != "Z":
                        found.append(f"{node.name}: {pid} {state} {line[:150]}")
        return found

    def nothing_is_left(self, timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while left := self.left():
            assert time.monotonic() < deadline, f"processes remain {timeout} s after the end: {left}\n{self.all_output()}"
            time.sleep(0.05)

    def all_output(self) -> str:
        return "\n".join(
            f"---- process {number} ({node.name})\n{self.text(number)[-6000:]}" for number, node in enumerate(self.nodes)
        )

    def kill(self) -> None:
        """Kill all processes of the job, in all nodes."""
        deadline = time.monotonic() + 90
        while (left := self.left()) and time.monotonic() < deadline:
            for line in left:
                kill(int(line.split()[1]))
            time.sleep(0.01)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind:
            print(self.all_output())
        self.kill()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Jobs:
    """Starts jobs on the nodes of a cluster. The fork servers are started when they are needed first."""

    def __init__(self, cluster: Nodes):
        self.cluster = cluster
        self.servers: dict[int, forking.Server] = {}

    def server(self, number: int) -> forking.Server:
        if number not in self.servers:
            self.servers[number] = forking.Server(clean_environment(), self.cluster.nodes[number].command, "loop")
        return self.servers[number]

    def close(self) -> None:
        for server in self.servers.values():
            server.end()

    def environment(self, node: Node, **more: str) -> dict[str, str]:
        mark = dict([node.space.mark.split("=", 1)]) if self.cluster.kind == "loopback" else {}
        return clean_environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", **mark, **more)

    def ranks(self, places: list[int], *arguments: object, script: Path = FAULTY, **more: str) -> Job:
        """Start one rank on the node of each number in `places`, as forks, without a launcher."""
        for place in set(places):
            self.server(place)
        port, processes = str(free_port()), []
        for rank, place in enumerate(places):
            local = {"LOCAL_RANK": str(places[:rank].count(place)), "LOCAL_WORLD_SIZE": str(places.count(place))}
            world = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "MASTER_PORT": port}
            address = self.cluster.nodes[places[0]].address if len(set(places)) > 1 else "127.0.0.1"
            env = self.environment(self.cluster.nodes[place], MASTER_ADDR=address, **world, **local, **more)
            processes.append(self.server(place).fork([str(script), *map(str, arguments)], env, ROOT, True))
        return self.job(processes, [self.cluster.nodes[place] for place in places])

    def job(self, processes: list, nodes: list[Node]) -> Job:
        return Job(processes, nodes, [server.process.pid for server in self.servers.values()])

    def launch(self, node: Node, command: list, **env: str) -> subprocess.Popen:
        """Start a command in a node."""
        return subprocess.Popen(
            node.command(command), env=self.environment(node, **env), cwd=ROOT, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        )  # fmt: skip

    def launched(self, launcher: str, num_nodes: int, *arguments: object, **options: object) -> Job:
        """Start a launcher on each node. `launcher` is accelerate or torchrun. On one node there are two ranks."""
        start = self.launchers(launcher, num_nodes, *arguments, **options)
        nodes = self.cluster.nodes[:num_nodes]
        return self.job([start(number) for number in range(num_nodes)], nodes)

    def launchers(
        self, launcher: str, num_nodes: int, *arguments: object, backend: str = "static", max_restarts: int = 0,
        script: Path = FAULTY, ranks: list[int] | None = None, **env: str,
    ) -> Callable[[int], subprocess.Popen]:  # fmt: skip
        """Return a function that starts the launcher of a node, which may be called again for the same node.

        `ranks` is the number of ranks of each node under torchrun.
        """
        address = self.cluster.nodes[0].address if num_nodes > 1 else "127.0.0.1"
        port = free_port()

        def start(number: int) -> subprocess.Popen:
            if launcher == "accelerate":
                words = [BIN / "accelerate", "launch", "--multi_gpu", "--num_machines", num_nodes, "--num_processes", 2]
                words += ["--machine_rank", number, "--main_process_ip", address, "--main_process_port", port]
                words += ["--rdzv_backend", backend, "--max_restarts", max_restarts, "--mixed_precision", "no"]
                words += ["--dynamo_backend", "no"]
            else:
                own = ranks[number] if ranks else 2 // num_nodes
                words = [BIN / "torchrun", "--nnodes", num_nodes, "--nproc_per_node", own, "--node_rank", number]
                words += ["--max_restarts", max_restarts]
                if backend == "static":
                    words += ["--master_addr", address, "--master_port", port]
                else:
                    words += ["--rdzv_backend", backend, "--rdzv_endpoint", f"{address}:{port}", "--rdzv_id", "job"]
            return self.launch(
                self.cluster.nodes[number], [*words, script, *arguments], ACCELERATE_USE_CPU="true",
                **env,
            )  # fmt: skip

        return start


def shape_link(node: Node, rate: str) -> None:
    """Limit what the node sends to this rate, for example "1mbit", or remove the limit if the rate is empty."""
    words = ["replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
    subprocess.run(
        node.command([tool("tc"), "qdisc", *(words if rate else ["del", "dev", "eth0", "root"])]), check=bool(rate),
        capture_output=not rate,
    )  # fmt: skip


class HangingDisk:
    """An ext4 file system in a file. While it is frozen, a process that writes to it is in state D, as on a disk that hangs.

    It is mounted in a mount namespace of its own, because other tests would copy a mount of the machine into their namespaces and
    keep it. A guard process holds the namespace. It thaws and unmounts the file system when this process ends, also if it is killed.
    """

    GUARD = """
set -e
truncate --size 32M "$0.img"
mkfs.ext4 -q -F "$0.img"
mkdir -p "$0"
mount -o loop "$0.img" "$0"
echo ready
while read line; do fsfreeze --$line "$0" && echo $line; done
fsfreeze --unfreeze "$0" 2>/dev/null || true
for i in $(seq 100); do umount "$0" 2>/dev/null && exit; sleep 0.1; done
umount --lazy "$0"
"""

    def __init__(self, path: Path):
        self.path = path
        self.guard = subprocess.Popen(
            [tool("unshare"), "--mount", "sh", "-c", self.GUARD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, env={**os.environ, "PATH": PATH},
        )  # fmt: skip
        self.expect("ready")
        # The same folder, as processes outside of the namespace see it.
        self.outside = Path(f"/proc/{self.guard.pid}/root") / path.relative_to("/")

    def command(self, words: list) -> list[str]:
        """Return the command that runs `words` where the disk is mounted."""
        return [tool("nsenter"), "--target", str(self.guard.pid), "--mount", f"--wd={ROOT}", *map(str, words)]

    def expect(self, word: str) -> None:
        line = self.guard.stdout.readline()
        if line != f"{word}\n":
            self.close()
            raise NotPossible(line.strip() or "the guard has ended")

    def freeze(self) -> None:
        self.tell("freeze")

    def unfreeze(self) -> None:
        self.tell("unfreeze")

    def tell(self, word: str) -> None:
        self.guard.stdin.write(f"{word}\n")
        self.guard.stdin.flush()
        self.expect(word)

    def close(self) -> None:
        """Thaw and unmount. Processes that still use the disk delay it by at most 10 s."""
        self.guard.stdin.close()
        self.guard.wait()


def remove_memory_limits(text: str) -> None:
    """Remove the memory cgroups that faulty.py has created, according to its output."""
    for path in re.findall(r"^memory cgroup (\S+)", text, re.MULTILINE):
        deadline = time.monotonic() + 60
        while Path(path).exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # its processes have not all ended
                Path(path).rmdir()
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []
