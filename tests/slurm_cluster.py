"""A real Slurm cluster for tests: munged, slurmctld and one slurmd in each of two nodes of tests/nodes.py.

It needs root and Slurm: `apt-get install -y --no-install-recommends slurm-wlm munge`. The daemons of the machine, if there are any,
are not used. Jobs belong to an unprivileged user.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment
from tests.nodes import PATH, Node, Nodes, best_kind, tool

INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
USER = 65534  # nobody
GPUS = 2  # of each node, made of device files that are not GPUs

# `config_overrides`: a node has the CPUs and the memory of this file, whatever the machine has. 4 CPUs let two jobs share a node.
SLURM_CONF = """
ClusterName=tests
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
{nodes}
PartitionName=train Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
"""
NODE_LINE = (
    "NodeName={name} NodeAddr={address} NodeHostname={name} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 "
    "Gres=gpu:{gpus} RealMemory=8000 State=UNKNOWN"
)


# Python may be inside a folder that only root may enter, such as /root. In the mount namespace of a node, which the machine does
# not see, an empty folder with only Python in it takes the place of that folder.
OPEN = """set -e
if [ -n "$1" ]; then
    mount --bind "$2" "$0/python"
    mount -t tmpfs -o mode=755 tmpfs "$1"
    mkdir -p "$2"
    mount --move "$0/python" "$2"
fi
shift 2
exec "$@"
"""


class SlurmCluster:
    """Two compute nodes (`workers`) and a node on which users type commands and the controller runs (`login`)."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="accel-ddp-slurm-"))
        self.folder.chmod(0o755)
        self.nodes = Nodes(3, "root")
        *self.workers, self.login = self.nodes.nodes
        self.daemons: list[subprocess.Popen] = []
        self.user = USER
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in ("state", "dev", "python", *(f"spool-{node.name}" for node in self.workers)):
            (self.folder / name).mkdir()
        lines = [NODE_LINE.format(name=node.name, address=node.address, gpus=GPUS) for node in self.workers]
        names = ",".join(node.name for node in self.workers)
        config = SLURM_CONF.format(
            controller=self.login.name, address=self.login.address, folder=self.folder, nodes="\n".join(lines), names=names
        )
        (self.folder / "slurm.conf").write_text(config)
        # `ip netns exec` mounts /sys again, so that Slurm would find no cgroups by itself.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number in range(GPUS):
            os.mknod(self.folder / "dev" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={self.folder}/dev/gpu[0-{GPUS - 1}]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self.daemon(
            self.login, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}",
            f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}",
        )  # fmt: skip
        self.wait(lambda: Path(files["socket"]).exists(), "munged")
        self.daemon(self.login, "slurmctld", "-D", "-c", "-f", self.folder / "slurm.conf")
        for node in self.workers:
            self.daemon(node, "slurmd", "-D", "-c", "-N", node.name, "-f", self.folder / "slurm.conf")
        self.wait(lambda: self.states() == ["idle"] * len(self.workers), "idle nodes")

    def daemon(self, node: Node, name: str, *options: object) -> None:
        with (self.folder / f"{name}.out").open("a") as output:
            self.daemons.append(
                subprocess.Popen(
                    self.inside(node, [tool(name), *options]), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=self.environment(), start_new_session=True,
                )
            )  # fmt: skip

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a user of this cluster."""
        env = {name: value for name, value in clean_environment().items() if not name.startswith(("SLURM_", "SBATCH_"))}
        more = {"SLURM_CONF": f"{self.folder}/slurm.conf", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        return {**env, "PATH": f"{env['PATH']}{os.pathsep}{PATH}", **more}

    def command(self, words: list) -> list[str]:
        """Return the command that runs `words` on the login node as the unprivileged user."""
        user = [tool("setpriv"), f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return self.inside(self.login, [*user, *words])

    def inside(self, node: Node, words: list) -> list[str]:
        """Return the command that runs `words` as root on a node, where every user may read Python."""
        python = Path(sys.base_prefix).resolve()
        closed = [path for path in python.parents if not path.stat().st_mode & 0o001]
        return node.command(["sh", "-c", OPEN, self.folder, closed[-1] if closed else "", python, *words])

    def run(
        self, *words: object, check: bool = True, cwd: Path = ROOT, timeout: float = 120, **more: str
    ) -> subprocess.CompletedProcess:
        """Run a command on the login node as the user, and return its result. Assert that it succeeds if `check` is set."""
        done = subprocess.run(
            self.command(list(words)), env=self.environment(**more), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def admin(self, *words: object) -> str:
        """Run a command on the login node as root, and return its output."""
        done = subprocess.run(self.login.command(list(words)), env=self.environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> list[str]:
        command = self.login.command(["timeout", 10, tool("sinfo"), "--noheader", "--Node", "--partition=train", "--format=%T"])
        return subprocess.run(command, env=self.environment(), capture_output=True, text=True).stdout.split()

    def job(self, number: object) -> dict[str, str]:
        """Return what `scontrol show job` prints, as name and value. Slurm removes a job 300 s after its end."""
        text = self.admin("scontrol", "--oneliner", "show", "job", number)
        return {name: value.strip() for name, value in re.findall(r"(\S+?)=(.*?)(?= \S+=|$)", text.splitlines()[0])}

    def wait(self, is_true: Callable[[], object], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not is_true():
            ended = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            assert not ended, f"a daemon has ended: {ended}\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-25:]) for file in files)

    def start_now(self, number: object) -> None:
        """Let a requeued job start in two seconds. Slurm itself waits about two minutes.

        slurmd refuses a job ("already killed") whose credential was made in the same second in which the job ended there.
        """
        time.sleep(2)
        if self.job(number)["Reason"] == "BeginTime":  # otherwise it has been started by an earlier call
            self.admin("scontrol", "update", f"JobId={number}", "StartTime=now")

    def left(self) -> list[str]:
        """Return the command lines of the processes on all nodes that are not the daemons."""
        daemons = {daemon.pid for daemon in self.daemons}
        found = []
        for pid in {pid for space in self.nodes.spaces for pid in space.pids()} - daemons:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode()
                if words and not words.startswith("slurmctld: slurmscriptd"):  # a zombie has no words
                    found.append(f"{pid} {words}")
        return found

    def cancel_all(self) -> None:
        """End all jobs and make all nodes available again."""
        self.admin("scancel", f"--user={self.user}")
        self.resume_nodes()

    def resume_nodes(self) -> None:
        """Make all nodes available, and wait until no job uses them."""
        for node in self.workers:
            with contextlib.suppress(AssertionError):  # a node that is available cannot be resumed
                self.admin("scontrol", "update", f"NodeName={node.name}", "State=RESUME")
        self.wait(lambda: self.states() == ["idle"] * len(self.workers), "idle nodes")

    def close(self) -> None:
        """Stop the daemons and all their jobs, and remove the nodes."""
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        self.nodes.close()  # kills what is left
        for daemon in self.daemons:
            daemon.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=PATH)]
    if missing:
        pytest.skip(f"Slurm is not tested: {', '.join(missing)} is missing. Run: {INSTALL}")
    if best_kind()[0] != "root":
        pytest.skip("Slurm is not tested: it needs root.")
    made = SlurmCluster()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster with idle nodes and no job. After the test, no process of a job may be left on any node."""
    yield slurm_cluster
    slurm_cluster.cancel_all()
    slurm_cluster.wait(lambda: not slurm_cluster.left(), "end of all processes", seconds=30)
