"""Real nodes on one machine: each with its own address, host name, hosts file, firewall and loopback.

They are Linux namespaces that are joined by a bridge in one more namespace; the machine's own network is not touched. Files,
processes and clocks are the machine's: nodes have one shared file system, and a pid is the same seen from all of them.

Three kinds, from best to worst:
"root"      namespaces of `ip netns`.
"user"      namespaces of one unprivileged user namespace, for those who are not root. Commands in them believe to be root.
"loopback"  127.0.0.2 and so on: no firewall, no host names, no link. Tests that need these are skipped there, with the reason.
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
from pathlib import Path
from typing import NoReturn

import pytest

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where users who are not root do not look
NETNS = Path("/etc/netns")  # `ip netns exec` mounts the files of /etc/netns/NAME over those of /etc
PREFIX = "accel-ddp-tests-"
MARK = "TESTS_NODE"  # in the environment of processes on loopback nodes, which nothing else tells apart

counter = itertools.count()


class NotPossible(Exception):
    """Nodes of this kind cannot be made here; says why."""


def run(words: list[str], text: str = "") -> None:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    except OSError as error:
        raise NotPossible(str(error)) from error
    if done.returncode:
        raise NotPossible(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def tool(name: str) -> str:
    """With its folder: the environment of a command may have another PATH."""
    return shutil.which(name, path=PATH) or name


class RootSpace:
    """Namespaces by `ip netns`. One mount namespace and one host name are made for each command."""

    def __init__(self, name: str, texts: dict[str, str], first: "RootSpace | None"):
        self.name, self.texts = name, texts
        self.handle = f"{PREFIX}{os.getpid()}-{next(counter)}-{name}"
        self.files = NETNS / self.handle
        self.identity = 0  # of no network, until there is one

    def make(self) -> None:
        if os.geteuid():
            raise NotPossible("this is not root")
        # Sessions that were killed could not clean up. Others may do the same at this moment.
        for folder in NETNS.glob(f"{PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(PREFIX).split("-")[0]).exists():
                with contextlib.suppress(NotPossible):
                    remove_namespace(folder.name)
        write_all(self.files, self.texts)  # before there is a namespace: one without a folder would never be found again
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
    """Namespaces that a process holds, all in the user namespace of the first one. They end with this process, even if killed."""

    def __init__(self, name: str, texts: dict[str, str], first: "UserSpace | None"):
        self.name, self.texts, self.first = name, texts, first
        self.holder: subprocess.Popen | None = None
        self.identity = 0  # of no network, until there is one

    def make(self) -> None:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        write_all(Path(folder), self.texts)
        unshare = [tool("unshare"), "--net", "--mount", "--uts", "--propagation", "slave"]
        if self.first:
            unshare = [tool("nsenter"), "--target", self.first.handle, "--user", "--preserve-credentials", *unshare]
        else:
            unshare += ["--user", "--map-root-user"]
        # /sys/class/net has the interfaces of who mounted it: the machine's, where mounting is forbidden (in most containers).
        script = (
            'set -e; hostname "$0"; for file in "$1"/*; do mount --bind "$file" "/etc/${file##*/}"; done; rm -r "$1"; '
            "mount -t sysfs sysfs /sys 2>/dev/null || true; echo ready; exec cat"
        )
        # In a session of its own, for Ctrl-C is for the tests. It ends with its stdin, whatever ends us.
        self.holder = subprocess.Popen(
            [*unshare, "sh", "-c", script, self.name, folder], env={**os.environ, "PATH": PATH}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        said = self.holder.stdout.readline()
        if said != "ready\n":
            shutil.rmtree(folder, ignore_errors=True)
            raise NotPossible((said + self.holder.stdout.read()).strip() or "unshare was killed")
        self.handle = str(self.holder.pid)
        self.files = Path(
            "/proc", str(self.handle), "root", "etc"
        )  # those in the folder have no name any more, so that none is left
        self.identity = os.stat(f"/proc/{self.handle}/ns/net").st_ino

    def command(self, words: list) -> list[str]:
        # Who enters a mount namespace is in its root folder. Popen's cwd does not change $PWD, but the shell corrects it.
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
    """For nodes on loopback addresses: nothing but a mark by which its processes are found."""

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


def pids_in_network(identity: int) -> list[int]:
    """Without the dead that nobody has waited for: they are in no namespace."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if os.stat(f"/proc/{pid}/ns/net").st_ino == identity:
                found.append(pid)
    return found


def write_all(folder: Path, texts: dict[str, str]) -> None:
    while not folder.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another session has just removed the empty folder above
            folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)  # whatever the umask: /etc/hosts is for all


def remove_namespace(handle: str) -> None:
    if Path("/run/netns", handle).exists():
        run([tool("ip"), "netns", "del", handle])
    shutil.rmtree(NETNS / handle, ignore_errors=True)
    with contextlib.suppress(OSError):  # others have theirs in it
        NETNS.rmdir()


class Node:
    def __init__(self, cluster: "Nodes", number: int, name: str, address: str):
        self.cluster, self.number, self.name, self.address = cluster, number, name, address
        self.space: RootSpace | UserSpace | NoSpace

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    def command(self, words: list) -> list[str]:
        """The same command, inside this node. Its pid, exit code, signals, folder and environment are as without the node."""
        return self.space.command(words)

    def firewall(self, *rules: str) -> None:
        """These nft rules decide what comes in, instead of those before; what they leave open is accepted.

        As with the firewall of a cloud, what a node says to itself is not asked about.
        """
        self.cluster.require("a firewall")
        lines = "\n".join(['iifname "lo" accept', *rules])
        chain = f"chain input {{\ntype filter hook input priority 0; policy accept;\n{lines}\n}}"
        run(self.command([tool("nft"), "-f", "-"]), f"flush ruleset\ntable inet node {{\n{chain}\n}}\n")

    def hosts(self, lines: dict[str, str]) -> None:
        """The hosts file of this node as at the start, but for these names (name to address). Running processes see it too."""
        self.cluster.require("a hosts file")
        names = {**self.cluster.names, **lines}
        text = "".join(f"{address} {name}\n" for name, address in names.items())
        (self.space.files / "hosts").write_text(text)  # never a new file: the old one is what is mounted

    def link(self, up: bool) -> None:
        """Whether the switch knows this node. If not, packets are lost in silence; the node keeps its address and its routes.

        Both take effect at once. Taking the switch's port down would not: the kernel notices its return up to a second later.
        """
        self.cluster.require("a link")
        run(self.cluster.switch.command([tool("ip"), "link", "set", self.name, *(["master", "bridge"] if up else ["nomaster"])]))

    def pids(self) -> list[int]:
        """Processes inside. One that was started some milliseconds ago may not have arrived."""
        return self.space.pids()


class Nodes:
    """Some nodes, numbered from 0. What a test changes by commands of its own, such as tc, is not undone by `reset`."""

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
            if isinstance(error, OSError):  # /etc is read-only, or the like
                raise NotPossible(str(error)) from error
            raise

    def make(self) -> None:
        texts = {"hosts": "", "resolv.conf": "", "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}
        texts = {name: text for name, text in texts.items() if Path("/etc", name).exists()}  # else nothing to mount it over
        for name in ["switch", *(node.name for node in self.nodes)]:
            self.spaces.append(SPACES[self.kind](name, texts, self.spaces[0] if self.spaces else None))
            self.spaces[-1].make()
        self.switch = self.spaces[0]
        for node, space in zip(self.nodes, self.spaces[1:], strict=True):
            node.space = space
        if self.kind == "loopback":
            return
        wires = ["link add bridge type bridge", "link set bridge up"]
        for node in self.nodes:
            wires.append(f"link add {node.name} type veth peer name eth0 netns {node.space.handle}")
            wires.append(f"link set {node.name} master bridge up")
        run(self.switch.command([tool("ip"), "-batch", "-"]), "\n".join(wires))
        for node in self.nodes:
            own = ["link set lo up", f"address add {node.address}/24 dev eth0", "link set eth0 up"]
            run(node.command([tool("ip"), "-batch", "-"]), "\n".join(own))
            node.hosts({})

    def reset(self) -> None:
        """As at the start: firewalls open, hosts files and links as they were, and no process left."""
        self.kill()
        if self.kind == "loopback":
            return
        links = "\n".join(f"link set {node.name} master bridge" for node in self.nodes)
        run(self.switch.command([tool("ip"), "-batch", "-"]), links)
        for node in self.nodes:
            node.firewall()
            node.hosts({})

    def kill(self) -> None:
        """Whatever runs inside, until nothing does."""
        deadline = time.monotonic() + 10
        while left := [pid for space in self.spaces for pid in space.pids()]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{left} do not end, though killed")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def close(self) -> None:
        """Nothing is left of them. Safe to call twice."""
        if os.getpid() != self.owner:  # a fork that ends runs what its parent has registered
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
        """For the first line of a test that needs more than addresses, such as "a firewall": without it, the test ends here."""
        if self.kind == "loopback":
            skip(" and ".join(what))


@functools.cache
def best_kind() -> tuple[str, str]:
    """The best kind that works here, and why not a better one. Found by trying, for permissions have too many causes."""
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
    """Ends the test: skipped, but failed on a root's CI, where it is a mistake of the machine that nobody would notice."""
    why = best_kind()[1] or "which are here, but loopback was asked for"
    reason = f"not tested: what needs nodes with {what}. That needs root, or unprivileged user namespaces: {why}"
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster():
    """Three nodes for the whole session. Tests take them from `nodes`; those that need two use the first two."""
    with Nodes(3) as made:
        yield made


@pytest.fixture
def nodes(cluster: Nodes):
    """Three nodes as if new. What a failed test leaves running in them does not slow down the next one."""
    cluster.reset()
    yield cluster
    cluster.kill()
