"""Machines with a real sshd and an unprivileged user, for tests of `accel-ddp launch` over ssh.

Each machine is a node of tests/nodes.py with its own mount namespace, in which the same paths are different folders: a home folder
with a copy of this repository, a temporary folder, and a small disk. The last machine is the laptop, where `accel-ddp launch` is
typed. Every machine has its own host key, and the user has the same key and `~/.ssh/config` on all of them.

This needs root, because sshd changes the user of a login.
"""

import contextlib
import itertools
import os
import pwd
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import BIN, OUTSIDE, ROOT, Ended, Running, free_port
from tests.nodes import PATH, Node, Nodes, NotPossible, all_pids, best_kind, kill_until_none, run, tool

PREFIX = "accel-ddp-ssh-"
USER = "trainer"
SMALL_DISK = 8192  # KiB
STAGE = "/run/machine"  # in the mount namespace of a machine

SSH_CONFIG = """
Host behind
    HostName node1
    HostKeyAlias node1
    ProxyJump node0
Host same-as-node0
    HostName node0
    HostKeyAlias node0
Host *
    IdentityFile ~/.ssh/{key}
    UserKnownHostsFile ~/.ssh/{known_hosts}
"""
SSHD_CONFIG = """
ListenAddress 0.0.0.0
HostKey {etc}/host_key
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
MaxStartups 100
SetEnv PYTHONPATH={home}/work TMPDIR={home}/tmp
"""


def missing() -> str:
    """Return why machines with sshd cannot be created here, or an empty text."""
    if best_kind()[0] != "root":
        return best_kind()[1]
    programs = [name for name in ("sshd", "ssh", "ssh-keygen", "setpriv", "git") if not shutil.which(name, path=PATH)]
    return f"these programs are missing: {', '.join(programs)}" if programs else ""


def closed_folders(path: Path) -> list[Path]:
    """Return the folders above `path`, from the root on, that other users may not enter."""
    return [folder for folder in reversed(path.parents) if not folder.stat().st_mode & stat.S_IXOTH]


class Machine:
    """One machine. `home` is its home folder as the tests see it; on the machine itself, the path is `machines.home`."""

    def __init__(self, machines: "Machines", node: Node):
        self.machines, self.node, self.name, self.address = machines, node, node.name, node.address
        self.home, self.etc = machines.base / node.name, machines.base / "etc" / node.name
        self.work = self.home / "work"

    def start(self) -> None:
        """Mount the folders of the machine and start sshd. The mounts end with the processes of the machine."""
        machines = self.machines
        log = (self.etc / "sshd.log").open("w")
        serve = f'exec {tool("setpriv")} --pdeathsig TERM {tool("sshd")} -D -e -f "$0"'  # it ends with the tests, in any case
        self.sshd = subprocess.Popen(
            self.node.command(["sh", "-euc", machines.mounts(self) + serve, self.etc / "sshd_config"]),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PATH": PATH},
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until sshd listens."""
        deadline, log = time.monotonic() + 90, self.etc / "sshd.log"
        while "Server listening" not in log.read_text():
            if self.sshd.poll() is not None or time.monotonic() > deadline:
                raise NotPossible(f"sshd on {self.name}: {log.read_text().strip()}")
            time.sleep(0.01)

    def command(self, words: list, user: bool = True, folder: str = "") -> list[str]:
        """Return the command that runs `words` on this machine as the user or as root, with the same pid, code and signals."""
        login = (
            [tool("setpriv"), f"--reuid={self.machines.uid}", f"--regid={self.machines.uid}", "--clear-groups"] if user else []
        )
        enter = [tool("nsenter"), f"--target={self.sshd.pid}", "--mount", "--net", "--uts"]
        return [*enter, *login, "env", f"--chdir={folder or f'{self.machines.home}/work'}", *map(str, words)]

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a login on this machine."""
        home = str(self.machines.home)
        env = {"HOME": home, "USER": USER, "LOGNAME": USER, "SHELL": "/bin/bash", "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"}
        env |= {"PYTHONPATH": f"{home}/work", "TMPDIR": f"{home}/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**env, **{name: OUTSIDE[name] for name in ("CI",) if name in OUTSIDE}, **more}

    def start_command(self, words: list, **env: str) -> Running:
        return Running([self.command(words)], [self.environment(**env)])

    def run(self, *words: object, timeout: float = 300, **env: str) -> Ended:
        """Run a command as the user and wait for its end."""
        return self.start_command(list(words), **env).ended(timeout)

    def path(self, path: str | Path) -> Path:
        """Return the path below the home folder of this machine, as the tests reach it, with the mounts of the machine."""
        return Path(f"/proc/{self.sshd.pid}/root{self.machines.home}") / path

    def fill_disk(self) -> None:
        """Fill the small disk of this machine, `~/small`, until nothing can be written to it."""
        with contextlib.suppress(OSError), (self.path("small") / "filled").open("wb", buffering=0) as out:
            while True:
                out.write(bytes(1 << 16))

    def block_from(self, *others: "Machine", ports: str = "") -> None:
        """Drop all packets that come from these machines, or only those to `ports`, without an answer."""
        match = f"tcp dport {ports}" if ports else "meta l4proto { tcp, udp, icmp }"
        self.node.firewall(*(f"ip saddr {other.address} {match} drop" for other in others))

    def processes(self) -> dict[int, str]:
        """Return pid and command line of each process of this machine, without the sshd that listens."""
        return self.machines.all_processes()[self.name]

    def die(self) -> None:
        """Let the machine disappear from the network without a last packet, as if its power were cut. `Machines.reset` starts it."""
        self.node.link(False)
        self.sshd.kill()
        self.sshd.wait()
        while left := self.node.pids():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)


class Machines:
    """Some nodes and the laptop, each with sshd."""

    def __init__(self, count: int):
        remove_leftovers()
        self.base = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
        self.base.chmod(0o755)
        self.home = self.base / "home"  # an empty folder; each machine mounts its own folder here
        self.home.mkdir()
        self.uid = next(uid for uid in itertools.count(20_000) if not has_name(uid))
        self.cluster = Nodes(count + 1, "root")
        machines = [Machine(self, node) for node in self.cluster.nodes]
        self.all, self.nodes, self.laptop = machines, machines[:-1], machines[-1]
        try:
            self.make()
        except BaseException:
            self.close()
            raise

    def make(self) -> None:
        home = self.all[0].home
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        for folder in ("tmp", "small", "work"):
            (home / folder).mkdir()
        copy_repository(home / "work")
        for name in ("key", "other_key"):
            run([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", USER, "-f", str(home / ".ssh" / name)])
        shutil.copy(home / ".ssh" / "key.pub", home / ".ssh" / "authorized_keys")
        for name, changes in {
            "config": {},
            "config_wrong_key": {"key": "other_key"},
            "config_unknown_host": {"known_hosts": "known_hosts_without_node1"},
            "config_changed_host": {"known_hosts": "known_hosts_with_other_node1"},
        }.items():
            (home / ".ssh" / name).write_text(SSH_CONFIG.format(**{"key": "key", "known_hosts": "known_hosts", **changes}))
        known = []
        for machine in self.all:
            machine.etc.mkdir(parents=True)
            run([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(machine.etc / "host_key")])
            known.append(f"{machine.name},{machine.address} {(machine.etc / 'host_key.pub').read_text().strip()}\n")
            (machine.etc / "sshd_config").write_text(SSHD_CONFIG.format(etc=machine.etc, home=self.home))
        (home / ".ssh" / "known_hosts").write_text("".join(known))
        without = "".join(line for line in known if not line.startswith("node1,"))
        (home / ".ssh" / "known_hosts_without_node1").write_text(without)
        other = known[0].replace(known[0].split()[0], known[1].split()[0])  # the key of node0
        (home / ".ssh" / "known_hosts_with_other_node1").write_text(without + other)
        accounts = {"passwd": f"{USER}:x:{self.uid}:{self.uid}::{self.home}:/bin/bash\n", "group": f"{USER}:x:{self.uid}:\n"}
        for name, line in accounts.items():
            (self.base / "etc" / name).write_text(Path("/etc", name).read_text().rstrip("\n") + f"\n{line}")
        run(["chown", "-R", f"{self.uid}:{self.uid}", str(home)])
        for machine in self.all[1:]:
            run(["cp", "-a", str(home), str(machine.home)])
        for machine in self.all:
            machine.start()
        for machine in self.all:
            machine.wait()

    def mounts(self, machine: Machine) -> str:
        """Return the shell commands that mount the folders and accounts of a machine, and make Python readable for its user."""
        lines = ["mount -t tmpfs -o mode=755 tmpfs /run", f"mkdir -p /run/sshd {STAGE}"]

        def bind(source: object, target: object) -> str:
            return f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(target))}"

        lines += [bind(machine.home, self.home), bind(self.base / "etc" / "passwd", "/etc/passwd")]
        lines += [bind(self.base / "etc" / "group", "/etc/group")]
        lines += [f"mount -t tmpfs -o size={SMALL_DISK}k,uid={self.uid},gid={self.uid} tmpfs {self.home}/small"]
        # A virtual environment of root may use a Python in a folder that only root may enter. Such a folder is replaced by one that
        # contains nothing else.
        needed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
        for number, path in enumerate(sorted(needed)):
            if closed := closed_folders(path):
                place = f"{STAGE}/{number}"
                lines += [f"mkdir {place}", bind(path, place), f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed[0]))}"]
                lines += [f"mkdir -p {shlex.quote(str(path))}", bind(place, path)]
        return "\n".join([*lines, ""])

    def all_processes(self) -> dict[str, dict[int, str]]:
        """Return the processes of each machine, without the sshd that listen. /proc is read once for all machines, which is slow."""
        names = {machine.node.space.identity: machine.name for machine in self.all}
        listening = {machine.sshd.pid for machine in self.all}
        found: dict[str, dict[int, str]] = {machine.name: {} for machine in self.all}
        for pid in all_pids():
            with contextlib.suppress(OSError):
                name = names.get(os.stat(f"/proc/{pid}/ns/net").st_ino)
                if name and pid not in listening:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    found[name][pid] = shlex.join(word.decode(errors="replace") for word in words)
        return found

    def processes(self) -> list[str]:
        """Return "machine pid command" of each process on any machine, without the sshd that listen."""
        return [f"{name} {pid} {words}" for name, found in self.all_processes().items() for pid, words in found.items()]

    def left(self, seconds: float = 30) -> list[str]:
        """Return the processes that have not ended after some seconds. The sshd of a connection needs a moment to end."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def until(self, expected: Callable[[], Any], seconds: float, what: str) -> Any:
        """Wait until `expected` returns a true value, and return it."""
        deadline = time.monotonic() + seconds
        while not (value := expected()):
            assert time.monotonic() < deadline, f"{what}: not after {seconds} s. Processes:\n" + "\n".join(self.processes())
            time.sleep(0.2)
        return value

    def describe(self, nodes: list[Any] | None = None, name: str = "cluster.yaml", on: Machine | None = None, **keys: Any) -> str:
        """Write a description into the code folder of the laptop and return its name. The nodes are the first two by default."""
        nodes = ["node0", "node1"] if nodes is None else nodes
        defaults = {"backend": "ssh", "gpus_per_node": 0, "main_port": free_port(), "folder": "~/work", "venv": sys.prefix}
        env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **keys.pop("env", {})}
        text = yaml.safe_dump({**defaults, "nodes": nodes, "env": env, **keys}, sort_keys=False, allow_unicode=True)
        self.write(on or self.laptop, f"work/{name}", text)
        return name

    def write(self, machine: Machine, name: str, text: str) -> Path:
        """Write a file of the user into the home folder of a machine."""
        path = machine.home / name
        missing = [folder for folder in (path, *path.parents) if folder != machine.home and not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for entry in missing:
            if machine.home in entry.parents:
                os.chown(entry, self.uid, self.uid)
        return path

    def reset(self) -> None:
        """Restore the initial state: all machines run and are connected, no process but sshd, no files of other tests."""
        self.kill()
        for machine in self.all:
            if machine.sshd.poll() is not None:
                machine.start()
                machine.wait()
            machine.node.link(True)
            machine.node.firewall()
            run(machine.command([tool("ip"), "neigh", "flush", "all"], user=False))
            for path in machine.home.iterdir():
                if path.name not in (".ssh", "tmp", "small", "work"):
                    remove(path)
            for entry in (machine.home / "tmp").iterdir():
                remove(entry)
            script = "git reset -q --hard copied && git clean -qfdx -e __pycache__"  # compiled files stay valid
            run(machine.command(["sh", "-c", script]))
            for entry in machine.path("small").iterdir():
                remove(entry)

    def kill(self) -> None:
        """Kill all processes but the sshd that listen."""
        kill_until_none(lambda: [pid for found in self.all_processes().values() for pid in found])

    def close(self) -> None:
        self.cluster.close()
        for machine in self.all:
            if hasattr(machine, "sshd"):
                machine.sshd.wait()
        shutil.rmtree(self.base, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the folders of sessions that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if not Path("/proc", folder.name.removeprefix(PREFIX).split("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def has_name(uid: int) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwuid(uid))
    return False


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def copy_repository(folder: Path) -> None:
    """Copy the files of this repository that git does not ignore, also changed ones, and commit them there."""
    listing = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "init.defaultBranch=main", "-c", "gc.auto=0"]
    for words in (
        ["init", "-q"],
        ["add", "--all"],
        ["commit", "-q", "--no-verify", "-m", "A copy for tests."],
        ["tag", "copied"],
    ):
        subprocess.run([*git, *words], cwd=folder, check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def all_machines() -> Iterator[Machines]:
    """Three nodes and a laptop for the whole session. Tests use the fixture `machines`."""
    if reason := missing():
        reason = f"not tested: this needs nodes with sshd and unprivileged users. That needs root and openssh-server: {reason}"
        (pytest.fail if os.environ.get("CI") and os.geteuid() == 0 else pytest.skip)(reason)
    made = Machines(3)
    yield made
    made.close()


@pytest.fixture
def machines(all_machines: Machines) -> Iterator[Machines]:
    """Three nodes and a laptop in their initial state. What a failed test has left is killed."""
    all_machines.reset()
    yield all_machines
    all_machines.kill()
