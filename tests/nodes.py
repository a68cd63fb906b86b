"""Nodes on one machine for tests, each with its own address, host name, hosts file, firewall and loopback.

A node is a set of Linux namespaces. A bridge in one more namespace connects the nodes, so the machine's own network does not
change. Files, processes and clocks are those of the machine: nodes share one file system, and a pid is the same in all of them.

There are three kinds, from best to worst:
"root"      namespaces of `ip netns`.
"user"      namespaces inside one unprivileged user namespace, for users who are not root. Commands see themselves as root.
"loopback"  the addresses 127.0.0.2 and following, without firewalls, host names and links. Tests that need these are skipped.
"""

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # not in the PATH of users who are not root
NETNS = Path("/etc/netns")  # `ip netns exec` mounts the files of /etc/netns/NAME over those of /etc
PREFIX = "accel-ddp-tests-"
MARK = "TESTS_NODE"  # a variable that identifies the processes of a loopback node

counter = itertools.count()


class NotPossible(Exception):
    """Nodes of this kind cannot be created on this machine. The message is the reason."""


def run(words: list[str], text: str = "") -> None:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    except OSError as error:
        raise NotPossible(str(error)) from error
    if done.returncode:
        raise NotPossible(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def tool(name: str) -> str:
    """Return the path of a program. A name is not enough, because a command may run with another PATH."""
    return shutil.which(name, path=PATH) or name


class RootSpace:
    """A network namespace of `ip netns`. Each command gets its own mount namespace and host name."""

    def __init__(self, name: str, texts: dict[str, str], first: "RootSpace | None"):
        self.name, self.texts = name, texts
        self.handle = f"{PREFIX}{os.getpid()}-{next(counter)}-{name}"
        self.files = NETNS / self.handle
        self.identity = 0  # inode of the network namespace; 0: there is none yet

    def make(self) -> None:
        if os.geteuid():
            raise NotPossible("the user is not root")
        # Remove what killed sessions have left. Another session may do the same at this moment.
        for folder in NETNS.glob(f"{PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(PREFIX).split("-")[0]).exists():
                with contextlib.suppress(NotPossible):
                    remove_namespace(folder.name)
        write_all(self.files, self.texts)  # first, because a namespace without a folder is never removed by a later session
        run([tool("ip"), "netns", "add", self.handle])
        self.identity = os.stat(f"/run/netns/{self.handle}").st_ino

    def command(self, words: list) -> list[str]:
        script = 'hostname "$0" && exec "$@"'
        enter = [tool("ip"), "netns", "exec", self.handle, tool("unshare"), "--uts", "sh", "-c", script, self.name]
        return [*enter, *map(str, words)]

    def pids(self) -> list[int]:
        return pids_in_network(self.identity)

    def remove(self) -> None:
        remove_namespace(self.handle)


class UserSpace:
    """Namespaces that a process holds, inside the user namespace of the first one. They end when that process ends."""

    def __init__(self, name: str, texts: dict[str, str], first: "UserSpace | None"):
        self.name, self.texts, self.first = name, texts, first
        self.holder: subprocess.Popen | None = None
        self.identity = 0  # inode of the network namespace; 0: there is none yet

    def make(self) -> None:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        write_all(Path(folder), self.texts)
        unshare = [tool("unshare"), "--net", "--mount", "--uts", "--propagation", "slave"]
        if self.first:
            unshare = [tool("nsenter"), "--target", self.first.handle, "--user", "--preserve-credentials", *unshare]
        else:
            unshare += ["--user", "--map-root-user"]
        # /sys/class/net shows the interfaces of the namespace in which it was mounted. In most containers, mounting is
        # forbidden, and it shows those of the machine.
        script = (
            'set -e; hostname "$0"; for file in "$1"/*; do mount --bind "$file" "/etc/${file##*/}"; done; rm -r "$1"; '
            "mount -t sysfs sysfs /sys 2>/dev/null || true; echo ready; exec cat"
        )
        # It has its own session, so that Ctrl-C reaches only the tests. It ends when its stdin is closed, also if this process
        # is killed.
        self.holder = subprocess.Popen(
            [*unshare, "sh", "-c", script, self.name, folder], env={**os.environ, "PATH": PATH}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        line = self.holder.stdout.readline()
        if line != "ready\n":
            shutil.rmtree(folder, ignore_errors=True)
            raise NotPossible((line + self.holder.stdout.read()).strip() or "unshare was killed")
        self.handle = str(self.holder.pid)
        # The files in `folder` are already deleted, so that none is left behind. They exist only as mounts.
        self.files = Path("/proc", self.handle, "root", "etc")
        self.identity = os.stat(f"/proc/{self.handle}/ns/net").st_ino

    def command(self, words: list) -> list[str]:
        # A process that enters a mount namespace starts in its root folder. Popen's cwd does not change $PWD, but the shell
        # corrects it.
        spaces = "--user --net --mount --uts --preserve-credentials"
        script = f'exec {tool("nsenter")} --target "$0" {spaces} env --chdir="$PWD" "$@"'
        return ["sh", "-c", script, self.handle, *map(str, words)]

    def pids(self) -> list[int]:
        return [pid for pid in pids_in_network(self.identity) if pid != self.holder.pid]

    def remove(self) -> None:
        if self.holder:
            self.holder.kill()
            self.holder.wait()
            self.holder.stdin.close()
            self.holder.stdout.close()


class NoSpace:
    """No namespace, for nodes on loopback addresses. A variable in their environment identifies their processes."""

    def __init__(self, name: str, texts: dict[str, str], first: "NoSpace | None"):
        self.mark = f"{MARK}={os.getpid()}-{next(counter)}-{name}"

    def make(self) -> None:
        pass

    def command(self, words: list) -> list[str]:
        return [tool("env"), self.mark, *map(str, words)]

    def pids(self) -> list[int]:
        found = []
        for pid in all_pids():
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def remove(self) -> None:
        pass


SPACES = {"root": RootSpace, "user": UserSpace, "loopback": NoSpace}


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def kill_until_none(list_pids: Callable[[], list[int]]) -> None:
    """Kill the processes that `list_pids` returns, until it returns none."""
    deadline = time.monotonic() + 180
    while left := list_pids():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} do not end although they were killed")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def pids_in_network(identity: int) -> list[int]:
    """Return the processes in a network namespace. Zombies are in none."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.stat(f"/proc/{pid}/ns/net").st_ino == identity:
                found.append(pid)
    return found


def write_all(folder: Path, texts: dict[str, str]) -> None:
    while not folder.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another session has just removed the empty folder above
            folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)  # every user must be able to read /etc/hosts, whatever the umask is


def remove_namespace(handle: str) -> None:
    if Path("/run/netns", handle).exists():
        run([tool("ip"), "netns", "del", handle])
    shutil.rmtree(NETNS / handle, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: other sessions use it
        NETNS.rmdir()


class Node:
    """One node. `command` translates a command into one that runs inside the node."""

    def __init__(self, cluster: "Nodes", number: int, name: str, address: str):
        self.cluster, self.number, self.name, self.address = cluster, number, name, address
        self.space: RootSpace | UserSpace | NoSpace

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    def command(self, words: list) -> list[str]:
        """Return the command that runs `words` inside this node, with the same pid, exit code, signals, folder and variables."""
        return self.space.command(words)

    def firewall(self, *rules: str) -> None:
        """Replace the rules for incoming packets by these nft rules. What they do not decide is accepted.

        Packets of a node to itself are always accepted, as with the firewall of a cloud.
        """
        self.cluster.require("a firewall")
        lines = "\n".join(['iifname "lo" accept', *rules])
        chain = f"chain input {{\ntype filter hook input priority 0; policy accept;\n{lines}\n}}"
        run(self.command([tool("nft"), "-f", "-"]), f"flush ruleset\ntable inet node {{\n{chain}\n}}\n")

    def hosts(self, lines: dict[str, str]) -> None:
        """Write the hosts file of this node: all nodes, with these changes (name to address). Running processes see it too."""
        self.cluster.require("a hosts file")
        names = {**self.cluster.names, **lines}
        text = "".join(f"{address} {name}\n" for name, address in names.items())
        (self.space.files / "hosts").write_text(text)  # in place, because this file is the one that is mounted

    def link(self, up: bool) -> None:
        """Connect this node to the bridge, or disconnect it: packets are then dropped, and its address and routes remain.

        Both take effect immediately. Setting the bridge's port down and up would not: the kernel notices it up to a second
        later.
        """
        self.cluster.require("a link")
        run(self.cluster.switch.command([tool("ip"), "link", "set", self.name, *(["master", "bridge"] if up else ["nomaster"])]))

    def pids(self) -> list[int]:
        """Return the processes inside. One that was started some milliseconds ago may not have entered yet."""
        return self.space.pids()


class Nodes:
    """Several nodes, numbered from 0. `reset` does not undo what a test changes by its own commands, such as tc."""

    def __init__(self, count: int, kind: str | None = None):
        self.kind = kind or best_kind()[0]
        if self.kind == "loopback":
            places = [(socket.gethostname(), f"127.0.0.{2 + number}") for number in range(count)]
        else:
            places = [(f"node{number}", f"10.77.0.{1 + number}") for number in range(count)]
        self.names = {"localhost": "127.0.0.1", **dict(places)}
        self.nodes = [Node(self, number, *place) for number, place in enumerate(places)]
        self.spaces: list[RootSpace | UserSpace | NoSpace] = []
        self.owner = os.getpid()
        atexit.register(self.close)
        try:
            self.make()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # for example, /etc is read-only
                raise NotPossible(str(error)) from error
            raise

    def make(self) -> None:
        texts = {"hosts": "", "resolv.conf": "", "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}
        texts = {name: text for name, text in texts.items() if Path("/etc", name).exists()}  # mounting needs an existing file
        for name in ["switch", *(node.name for node in self.nodes)]:
            self.spaces.append(SPACES[self.kind](name, texts, self.spaces[0] if self.spaces else None))
            self.spaces[-1].make()
        self.switch = self.spaces[0]
        for node, space in zip(self.nodes, self.spaces[1:], strict=True):
            node.space = space
        if self.kind == "loopback":
            return
        links = ["link add bridge type bridge", "link set bridge up"]
        for node in self.nodes:
            links.append(f"link add {node.name} type veth peer name eth0 netns {node.space.handle}")
            links.append(f"link set {node.name} master bridge up")
        run(self.switch.command([tool("ip"), "-batch", "-"]), "\n".join(links))
        for node in self.nodes:
            own = ["link set lo up", f"address add {node.address}/24 dev eth0", "link set eth0 up"]
            run(node.command([tool("ip"), "-batch", "-"]), "\n".join(own))
            node.hosts({})

    def reset(self) -> None:
        """Restore the initial state: open firewalls, original hosts files, all nodes connected, and no process running."""
        self.kill()
        if self.kind == "loopback":
            return
        links = "\n".join(f"link set {node.name} master bridge" for node in self.nodes)
        run(self.switch.command([tool("ip"), "-batch", "-"]), links)
        for node in self.nodes:
            node.firewall()
            node.hosts({})

    def kill(self) -> None:
        """Kill all processes inside the nodes, until there are none."""
        kill_until_none(lambda: [pid for space in self.spaces for pid in space.pids()])

    def close(self) -> None:
        """Remove the nodes. It may be called more than once."""
        if os.getpid() != self.owner:  # a forked process runs the exit handlers of its parent
            return
        self.kill()
        while self.spaces:
            self.spaces.pop().remove()
        atexit.unregister(self.close)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def require(self, *what: str) -> None:
        """Skip the test if the nodes do not have this, for example "a firewall". For the first line of a test."""
        if self.kind == "loopback":
            skip(" and ".join(what))


@functools.cache
def best_kind() -> tuple[str, str]:
    """Return (the best kind that works here, why better ones do not).

    It is found by trying, because there are too many reasons why a permission may be missing.
    """
    reasons = []
    for kind in ("root", "user"):
        try:
            with Nodes(1, kind) as trial:
                trial.nodes[0].firewall("ct state established,related accept", "meta length gt 1400 drop", "tcp dport 1 drop")
            return kind, "; ".join(reasons)
        except NotPossible as error:
            reasons.append(f"{kind}: {error}")
    return "loopback", "; ".join(reasons)


def skip(what: str) -> NoReturn:
    """Skip the test. If CI runs as root, let it fail instead, because nobody would notice that the machine is misconfigured."""
    why = best_kind()[1] or "these are available, but loopback was requested"
    reason = f"not tested: this needs nodes with {what}. That needs root, or unprivileged user namespaces: {why}"
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster():
    """Three nodes for the whole session. Tests use the fixture `nodes`; those that need two nodes use the first two."""
    with Nodes(3) as made:
        yield made


@pytest.fixture
def nodes(cluster: Nodes):
    """Three nodes in their initial state. Processes that a failed test has left are killed, so they do not slow the next one."""
    cluster.reset()
    yield cluster
    cluster.kill()
