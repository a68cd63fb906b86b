"""One run of the recipe for a setting, and its log: on this machine, or on nodes through `accel-ddp launch`."""

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp.errors import UserError
from accel_ddp.launch.connection import ssh_words
from accel_ddp.launch.description import Cluster, read_description
from accel_ddp.launch.job_commands import config_word, shell_path
from accel_ddp.measure.scaling_plan import Placement
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import read_accelerate_config
from accel_ddp.nodes.messages import find_free_port
from accel_ddp.nodes.sharding_plan import require_ddp
from accel_ddp.nodes.spawn import MODULE, clean_environment, die_with_parent, kill_tree
from accel_ddp.records.run_log import FILE, read_log

_SSH_SECONDS = 60
TIMED_OUT = 124  # the exit code of `timeout`


class Ended(NamedTuple):
    code: int
    text: str  # its output
    events: list[dict[str, Any]]  # of its log
    seconds: float


class LocalRuns:
    """Runs on this machine, each by its own `accelerate launch`."""

    def __init__(self, folder: Path, launch: Sequence[str], launch_one: Sequence[str], recipe: str, limit: float):
        self.folder, self.launch, self.launch_one, self.recipe, self.limit = folder, launch, launch_one, recipe, limit

    def run(self, name: str, place: Placement, options: Sequence[str]) -> Ended:
        """Run the recipe and return when it has ended. Only its log and its output are kept."""
        path, began = self.folder / name, time.monotonic()
        port = ["--main_process_port", str(find_free_port("127.0.0.1"))]
        launch = self.launch_one if place.ranks == 1 else [*self.launch, "--num_processes", str(place.ranks), *port]
        words = [sys.executable, *MODULE, "accelerate.commands.launch", "-q", *launch]
        words += [self.recipe, *options, "--output_dir", str(path)]
        code, text = execute(words, self.folder / f"{name}.txt", self.limit)
        events = read_log(path / FILE)
        for entry in path.iterdir() if path.is_dir() else ():
            if entry.name != FILE:  # a checkpoint may be large
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        return Ended(code, text, events, time.monotonic() - began)


class ClusterRuns:
    """Runs on the first nodes of a cluster, each by its own `accel-ddp launch`.

    One program decides what runs when. Nodes that do not take part need not wait, and nodes need not agree on anything.
    The guards of `launch` end the processes of all nodes if one node fails or this program is killed.
    """

    def __init__(self, file: str, folder: Path, recipe: str, limit: float):
        import yaml

        self.file, self.folder, self.recipe, self.limit = file, folder, recipe, limit
        self.cluster: Cluster = read_description(file)
        if self.cluster.backend not in ("ssh", "local"):
            raise UserError(
                f"--cluster {file}: has backend: {self.cluster.backend}, where each run would wait in a queue. Describe the hosts "
                "of an allocation with backend: ssh."
            )
        config = Path(config_word(self.cluster)).expanduser()
        if "/" not in self.cluster.accelerate_config and not config.is_file():
            config = recipe_files.config_path(self.cluster.accelerate_config)
        if config.is_file():  # otherwise it is only on the nodes, and the log of a run states that its model is sharded
            require_ddp(read_accelerate_config(str(config)), "accel-ddp scaling")
        listed = yaml.safe_load(Path(file).read_text())["nodes"]
        listed = [f"node{number}" for number in range(listed)] if isinstance(listed, int) else listed
        self.nodes = [{"host": node} if isinstance(node, str) else node for node in listed]
        self.job = f"scaling-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def run(self, name: str, place: Placement, options: Sequence[str]) -> Ended:
        """Run the recipe and return when it has ended. Its folder is deleted on all nodes."""
        began, job = time.monotonic(), f"{self.job}-{name}"
        nodes = [dict(node) for node in self.nodes[: place.nodes]]
        if place.nodes == 1:
            nodes[0]["processes"] = place.ranks
        changes = [f"nodes={json.dumps(nodes)}", "restarts=0"]
        words = [sys.executable, *MODULE, "accel_ddp.cli", "launch", "--name", job]
        words += [word for change in changes for word in ("--set", change)]
        code, text = execute([*words, self.file, self.recipe, *options], self.folder / f"{name}.txt", self.limit, is_remote=True)
        log = self.folder / name / FILE
        log.parent.mkdir(exist_ok=True)
        output = f"{self.cluster.output.rstrip('/')}/{job}"
        log.write_bytes(self._on_node(0, f"cat {shell_path(output)}/{FILE}"))
        for number in range(place.nodes):
            self._on_node(number, f"rm -rf {shell_path(output)}")
        return Ended(code, text, read_log(log), time.monotonic() - began)

    def cores(self) -> int:
        """Return the number of cores of the first node, 0 if it is not known. nproc does not need our code there."""
        text = self._on_node(0, "nproc").strip()
        return int(text) if text.isdigit() else 0

    def _on_node(self, number: int, command: str) -> bytes:
        node, is_local = self.cluster.nodes[number], self.cluster.backend == "local"
        script = f"cd {shell_path(node.folder or ('.' if is_local else '~'))} && {command}"
        words = ["sh", "-c", script] if is_local else [*ssh_words(self.cluster, node), f"sh -c {shlex.quote(script)}"]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SSH_SECONDS).stdout
        return b""


def execute(words: Sequence[str], output: Path, limit: float, is_remote: bool = False) -> tuple[int, str]:
    """Run a command and return its exit code and output. End it after `limit` seconds, and if this process is interrupted."""
    env = clean_environment()
    # The command must find the package of this process, also if it is not installed.
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [env.get("PYTHONPATH")])])
    with output.open("w") as file:
        # In a session of its own the command does not receive the Ctrl-C of the terminal. This process decides when it ends.
        process = subprocess.Popen(
            words, env={**env, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process, is_remote)
            code = TIMED_OUT
            file.write(f"\nerror: the run did not finish within {limit:.0f} s (--run_seconds).\n")
        except BaseException:
            _end(process, is_remote)
            raise
    return code, output.read_text(errors="replace")


def _end(process: subprocess.Popen, is_remote: bool) -> None:
    """End a command with all its processes. `accel-ddp launch` itself ends those on other machines, at the second signal at once."""
    for _ in range(2 if is_remote else 0):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20 if is_remote else 0)
    kill_tree(process.pid)
    process.wait()
