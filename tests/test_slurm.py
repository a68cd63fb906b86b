"""`accel-ddp launch` with `backend: slurm`: the script, and jobs on a real Slurm cluster (`pytest -m slurm`)."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from accel_ddp.errors import UserError
from accel_ddp.launch.description import read_description
from accel_ddp.launch.job_commands import make_job
from accel_ddp.launch.slurm import _ends_by_itself, _parse, _read_on, _sbatch_environment, _show
from accel_ddp.launch.slurm_script import render
from tests.conftest import BIN, ROOT, clean_environment, free_port, run_all
from tests.slurm_cluster import GPUS, USER, SlurmCluster

CLI = [sys.executable, str(BIN / "accel-ddp")]
TRAINS = "tests/programs/trains.py"
DESCRIPTION = """
backend: slurm
nodes: 2
gpus_per_node: 0
"""


# ---- the script, without Slurm


def description(folder: Path, text: str = "", **keys: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(DESCRIPTION + text + "".join(f"{name}: {value}\n" for name, value in keys.items()))
    return file


def rendered(folder: Path, text: str = "", options: tuple[str, ...] = (), is_batch: bool = True) -> str:
    cluster = read_description(description(folder, text))
    return render(cluster, make_job(cluster, "recipes/own_model.py", options), is_batch)


def runnable(folder: Path, text: str = "", **more: Any) -> str:
    """Return a script whose virtual environment changes nothing: that of the repository would come before other programs."""
    (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "venv" / "bin" / "activate").touch()
    return rendered(folder, f"{text}venv: {folder}/venv\n", **more)


def directives(script: str) -> list[str]:
    return [" ".join(shlex.split(line[8:])) for line in script.splitlines() if line.startswith("#SBATCH ")]


EVERYTHING = """
name: sine
time_limit: "1-12:30:00"
folder: /code with spaces
venv: .venv
interface: eth1
restarts: 2
env: {NCCL_DEBUG: "it's $HOME"}
slurm:
  {partition: train, account: lab, qos: high, gres: "gpu:a100:8", cpu: 64, memory: 128G, signal_seconds: 300,
   options: [--exclusive, --comment=two words]}
"""


def test_the_script_has_an_option_for_every_key(tmp_path):
    script = rendered(tmp_path, EVERYTHING.replace("gpus_per_node: 0", ""))
    assert directives(script) == [
        "--job-name=sine", "--partition=train", "--account=lab", "--qos=high", "--nodes=2", "--ntasks-per-node=1",
        "--gres=gpu:a100:8", "--cpus-per-task=64", "--mem=128G", "--time=1-12:30:00", "--signal=USR2@300",
        "--requeue", "--open-mode=append",
        "--output=/code with spaces/runs/sine/launch/slurm-%j.log", "--chdir=/code with spaces", "--export=ALL", "--exclusive",
        "--comment=two words",
    ]  # fmt: skip
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300" in script
    assert "--max_restarts 2" in script
    assert "export NCCL_SOCKET_IFNAME=eth1" in script
    assert "--requeue" not in directives(rendered(tmp_path, "slurm: {requeue: false}"))
    script = rendered(tmp_path).replace("\\\n        ", "")
    assert not [line for line in directives(script) if line.startswith(("--gres", "--time", "--partition"))]
    assert "--num_machines 2 --num_processes 2" in script
    assert "export ACCELERATE_USE_CPU=true" in script


def variants(folder: Path) -> Iterator[str]:
    for is_batch in (True, False):
        yield rendered(folder, is_batch=is_batch)
        yield rendered(folder, EVERYTHING, ("--lr", "1e-5", "--note", "it's $HOME"), is_batch)
    yield rendered(folder, "env: {WANDB_API_KEY: hidden}\n")


def test_bash_accepts_the_script(tmp_path):
    for script in variants(tmp_path):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        if shutil.which("shellcheck"):
            # Not reported: values in single quotes, a loop over one name, functions that run on nodes, and a file that is not here.
            done = subprocess.run(
                ["shellcheck", "--exclude=SC2016,SC2043,SC2317,SC1091", "-"], input=script, text=True, capture_output=True
            )
            assert done.returncode == 0, done.stdout


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
SCONTROL = """#!/bin/bash
echo scontrol "$@" >&2
[ "$2" = hostnames ] && printf 'a1\\na2\\na3\\n'
[ "$2" = job ] && printf '   PreemptTime=%s\\n   Requeue=%s Restarts=0\\n' "${PREEMPTED:-None}" "$REQUEUE"
exit 0
"""
ACCELERATE = f"""#!{sys.executable}
import json, os, signal, sys
print(json.dumps(sys.argv))
os.kill(os.getpid(), signal.SIGUSR2)
print(signal.sigpending())
if "SHOWN" in os.environ:
    print(os.environ[os.environ["SHOWN"]])
sys.exit(int(os.environ.get("CODE", 0)))
"""


def run_on_this_machine(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a script with programs in the place of Slurm's and of the launcher, which run the tasks here or print their words."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    texts = {"srun": SRUN, "scontrol": SCONTROL, "accelerate": ACCELERATE}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "a[1-3]", **variables}
    env = clean_environment(**env, PATH=f"{programs}:{os.environ['PATH']}")
    return subprocess.run(["bash"], input=script, env=env, cwd=ROOT, capture_output=True, text=True)


def words_of(done: subprocess.CompletedProcess) -> list[str]:
    return json.loads(done.stdout.splitlines()[0])


def test_options_arrive_unchanged(tmp_path):
    options = ("--note", 'it\'s "quoted" $HOME `date` \\ * ; & | # %a\t', "--lr=1e-5", "--empty", "", "ünï")
    done = run_on_this_machine(runnable(tmp_path, options=options), tmp_path)
    assert done.returncode == 0, done.stderr
    words = words_of(done)
    at = words.index("recipes/own_model.py")
    assert words[at + 1 :] == [*options, "--output_dir", "runs/own_model"]
    given = dict(zip(words[2:at:2], words[3:at:2]))
    assert given["--machine_rank"] == "1", "of the node"
    assert given["--main_process_ip"] == "a1", "the first node of the list"
    assert given["--main_process_port"] == "12345", "derived from the job id"


def test_the_stop_signal_stays_pending_until_a_rank_handles_it(tmp_path):
    done = run_on_this_machine(runnable(tmp_path), tmp_path)
    assert done.stdout.splitlines()[1] == "{<Signals.SIGUSR2: 12>}", done


def test_a_requeued_job_resumes_in_any_case(tmp_path):
    own = lambda *options: words_of(run_on_this_machine(runnable(tmp_path, options=options), tmp_path, SLURM_RESTART_COUNT="1"))
    assert own()[-3:] == ["--output_dir", "runs/own_model", "--resume=auto"]
    assert own("--output_dir=x")[-2:] == ["--output_dir=x", "--resume=auto"]
    assert "--resume=auto" not in own("--resume"), "the user's own --resume finds the checkpoints of a requeued job too"
    assert "--resume=auto" not in own("--resume=other_run"), "until the job has a checkpoint, it continues from the other run"


@pytest.mark.parametrize(
    ("code", "requeue", "is_requeued"), [(75, 1, True), (75, 0, False), (0, 1, False), (2, 1, False), (1, 1, False)]
)
def test_only_a_job_that_was_stopped_with_a_checkpoint_is_queued_again(tmp_path, code, requeue, is_requeued):
    done = run_on_this_machine(runnable(tmp_path), tmp_path, CODE=str(code), REQUEUE=str(requeue))
    assert done.returncode == code
    assert ("scontrol requeue 12345" in done.stderr) == is_requeued
    done = run_on_this_machine(
        runnable(tmp_path), tmp_path, CODE=str(code), REQUEUE=str(requeue), PREEMPTED="2026-11-16T14:33:01"
    )
    assert ("scontrol requeue 12345" in done.stderr) == (code != 0 and requeue == 1), "a preemption before the ranks can save"
    done = run_on_this_machine(runnable(tmp_path, is_batch=False), tmp_path, CODE=str(code), REQUEUE="1")
    assert done.returncode == code
    assert "scontrol requeue" not in done.stderr, "an allocation is not a job that can be queued again"


def test_an_array_is_refused_because_its_tasks_would_share_a_folder(tmp_path):
    with pytest.raises(UserError, match=r"slurm.options --array=0-3: the tasks of an array would write into one folder"):
        rendered(tmp_path, 'slurm: {options: ["--array=0-3"]}')


def test_ports_of_jobs_do_not_collide():
    """Neither main ports nor the ports that the preflight derives from them, for jobs whose numbers are near each other."""
    from accel_ddp.nodes.topology import Topology

    def ports(number: int) -> set[int]:
        main = 10000 + number % 10000
        first = Topology(node_rank=0, num_nodes=2, num_ranks=2, main_address="a", main_port=main).other_ports
        return {main, *range(first, first + 4)}

    used: dict[int, int] = {}
    for number in range(995_000, 997_000):  # two thousand jobs in a row
        for port in ports(number):
            assert port < 32768, "systems assign the ports above"
            assert number - used.get(port, -9999) > 200, f"jobs {number} and {used[port]} use port {port}"
            used[port] = number


def test_secrets_are_not_in_the_script(tmp_path):
    (tmp_path / "secret.env").write_text("PLAIN=hidden1\nWANDB_API_KEY='hidden2'\n")
    text = "env_file: secret.env\nenv: {HF_TOKEN: hidden3, PROXY: 'http://me:hidden4@proxy', NCCL_DEBUG: INFO}\n"
    script = rendered(tmp_path, text)
    assert "hidden" not in script
    assert "export NCCL_DEBUG=INFO" in script
    done = run_on_this_machine(script, tmp_path, PLAIN="x", HF_TOKEN="x", PROXY="x")
    assert done.returncode == 2
    assert "the variable WANDB_API_KEY is not set" in done.stderr
    assert "secret.env" in done.stderr
    show = lambda **own: run_on_this_machine(runnable(tmp_path), tmp_path, SHOWN="ACCEL_DDP_TOKEN", **own).stdout.splitlines()[-1]
    tokens = {show(), show()}
    assert len(tokens) == 2, "each run makes a secret of its own when it starts"
    assert all(re.fullmatch(r"[0-9a-f]{64}", token) for token in tokens), tokens
    assert show(ACCEL_DDP_TOKEN="of the user") == "of the user"


def test_a_missing_folder_environment_launcher_or_script_is_named(tmp_path):
    for text, expected in [
        ("folder: /nowhere", "folder /nowhere: this node cannot enter it"),
        ("venv: /nowhere/venv", "venv /nowhere/venv: this node does not have it"),
        (f"folder: {tmp_path}", f"there is no recipes/own_model.py in {tmp_path}"),
    ]:
        done = run_on_this_machine(rendered(tmp_path, text), tmp_path)
        assert done.returncode == 2
        assert f"error: {os.uname().nodename}: {expected}" in done.stderr
    (tmp_path / "programs" / "accelerate").unlink()
    script = runnable(tmp_path)
    done = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, cwd=ROOT,
        env={"PATH": f"{tmp_path}/programs:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "the PATH of this node has no accelerate" in done.stderr


def test_fewer_cpus_than_ranks_are_reported(tmp_path):
    """Most clusters give a task one CPU, and the ranks of a node would share it."""
    script = runnable(tmp_path, "processes_per_node: 3\n")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "nproc").write_text("#!/bin/sh\necho ${OMP_NUM_THREADS:-2}\n")
    (tmp_path / "programs" / "nproc").chmod(0o755)
    done = run_on_this_machine(script, tmp_path, OMP_NUM_THREADS="9")
    assert done.returncode == 0
    assert "CPUs of the job: 2, ranks: 3. Set the key slurm.cpu." in done.stderr
    assert "Set the key slurm.cpu" not in run_on_this_machine(runnable(tmp_path), tmp_path).stderr


def test_slurm_chooses_the_gpus(tmp_path):
    file = tmp_path / "gpus.yaml"
    file.write_text("backend: slurm\nnodes: 2\ngpus_per_node: 8\nprocesses_per_node: 4\n")
    script = render(cluster := read_description(file), make_job(cluster, "recipes/own_model.py", []))
    assert "--gres=gpu:4" in directives(script), "those that are used"
    assert "CUDA_VISIBLE_DEVICES" not in script
    file.write_text("backend: slurm\nnodes: 2\ngpus_per_node: 8\nslurm: {options: [--gpus-per-node=a100:8]}\n")
    script = render(cluster := read_description(file), make_job(cluster, "recipes/own_model.py", []))
    assert not [line for line in directives(script) if line.startswith("--gres")], "those of the option"


def test_an_option_and_its_value_may_be_two_words(tmp_path):
    script = rendered(tmp_path, "slurm: {options: [--exclude, 'a1,a2', --comment, two words]}")
    assert directives(script)[-2:] == ["--exclude a1,a2", "--comment two words"]


def test_variables_of_the_user_do_not_change_the_script(tmp_path, monkeypatch):
    """For sbatch, variables take precedence over the lines of a script."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    outside = {"SBATCH_RESERVATION": "r", "SLURM_CONF": "/c", "EXPORT": "x", "TIME": "x"}
    inside = {"SLURM_JOBID": "1", "SLURM_MEM_PER_CPU": "100", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}
    replaced = {"SBATCH_PARTITION": "p", "SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1"}
    for name, value in (outside | inside | replaced).items():
        monkeypatch.setenv(name, value)
    found = _sbatch_environment(rendered(tmp_path, EVERYTHING))
    assert outside.items() <= found.items()
    assert not {*inside, *replaced} & found.keys()
    assert "SBATCH_PARTITION" in _sbatch_environment(rendered(tmp_path)), "the description has no partition"


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        ("QOSMaxJobsPerUserLimit", True), ("QOSMaxGRESPerUser", True), ("AssocGrpGRES", True), ("AssocMaxJobsLimit", True),
        ("QOSMaxWallDurationPerJobLimit", False), ("AssocMaxNodePerJobLimit", False), ("QOSMinGRES", False), ("JobHeldAdmin", False),
    ],
)  # fmt: skip
def test_a_limit_that_other_jobs_have_reached_ends_by_itself(reason, ends):
    assert _ends_by_itself(reason) is ends


@pytest.mark.parametrize(("state", "code"), [("TIMEOUT", 1), ("NODE_FAIL", 1), ("COMPLETED", 0), ("RUNNING", 0)])
def test_a_job_that_slurm_has_ended_has_failed(state, code):
    assert _parse(f"JobId=1 JobName=a JobState={state} ExitCode=0:0").code == code


@pytest.mark.parametrize(("lines", "expected"), [(0, ""), (1, "c\n"), (2, "b\nc\n"), (100, "a\nb\nc\n")])
def test_the_last_lines_of_a_log_are_read_and_then_those_that_are_added(tmp_path, lines, expected):
    log, later = tmp_path / "slurm-1.log", tmp_path / "slurm-2.log"
    log.write_text("a\nb\nc\n")
    reader, waiting = _read_on(log, lines), _read_on(later, lines)
    assert (next(reader), next(waiting)) == (expected, "")
    with log.open("a") as file:
        file.write("d\n")
    later.write_text("first\n")
    assert (next(reader), next(waiting)) == ("d\n", "first\n"), "a log that begins later is new"


def test_wrong_descriptions_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"slurm.signal_seconds 120: must be less than time_limit \(60 s\)"):
        rendered(tmp_path, 'time_limit: "00:01:00"')
    file = tmp_path / "unequal.yaml"
    file.write_text("backend: slurm\nnodes: [{host: a, gpus: 1}, {host: b, gpus: 2}]\n")
    with pytest.raises(UserError, match="must be the number of nodes with backend: slurm"):
        read_description(file)


def test_the_page_shows_the_script_as_it_is(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "slurm.md").read_text()
    keys, shown = (re.search(rf"^```{kind}(.*?)^```$", page, re.M | re.S)[1] for kind in (r"yaml\n", r"text\n(?=#!)"))
    monkeypatch.chdir(ROOT)
    Path(tmp_path, "cluster.yaml").write_text(keys)
    cluster = read_description(tmp_path / "cluster.yaml")
    script = render(cluster, make_job(cluster, "recipes/own_model.py", ["--steps", "6000", "--lr", "1e-3"]))
    assert shown == script.replace(str(tmp_path / "cluster.yaml"), "cluster.yaml").replace(str(ROOT), "/home/me/accel_ddp")


def launch_here(*words: object, **variables: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in clean_environment(**variables).items() if not name.startswith("SLURM_")}
    return subprocess.run([*CLI, *map(str, words)], env=env, cwd=ROOT, capture_output=True, text=True)


def test_print_needs_no_slurm_and_submission_does(tmp_path):
    """The commands run where Slurm is not installed: PATH has no program at all."""
    file = description(tmp_path, f"output: {tmp_path}/runs\n")
    printed = launch_here("launch", "--print", file, "own_model", PATH="")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("#!/bin/bash\n")
    for command in (["launch", file, "own_model"], ["status", file], ["stop", file, "--name=x"], ["logs", file, "--name=x"]):
        done = launch_here(*command, PATH="/nowhere")
        assert done.returncode == 2, done.stderr
        assert re.search(r"error: s\w+ is not installed on this machine. .* use --print", done.stderr)
        assert "Traceback" not in done.stderr


# ---- jobs on a real cluster


class User:
    """A user of the cluster with a folder of its own, who types commands on the login node."""

    def __init__(self, cluster: SlurmCluster, home: Path):
        self.cluster, self.home = cluster, home

    def describe(self, name: str = "job", **keys: str) -> Path:
        """Write a description. A key in `keys` replaces the default."""
        values = {
            "name": name, "backend": "slurm", "nodes": "2", "gpus_per_node": "0", "folder": str(ROOT), "output": f"{self.home}/runs",
            **keys,
        }  # fmt: skip
        file = self.home / f"{name}.yaml"
        file.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
        return file

    def run(self, *words: object, check: bool = True, **more: str) -> subprocess.CompletedProcess:
        return self.cluster.run(*CLI, *words, check=check, HOME=str(self.home), **more)

    def launch(self, file: Path, *options: object, script: str = TRAINS) -> str:
        """Submit a job and return its number."""
        done = self.run("launch", file, script, *options, check=False)  # it returns the exit code of a job that fails at once
        return re.search(r"^job (\d+) ", done.stdout, flags=re.MULTILINE)[1]

    def step(self, name: str = "job") -> int:
        """Return the last step in the log of a run."""
        file = self.home / "runs" / name / "log.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max([json.loads(line).get("step") or 0 for line in lines if line.endswith("}")] or [0])

    def wait_for_step(self, step: int, name: str = "job") -> None:
        self.cluster.wait(lambda: self.step(name) >= step, f"step {step} of {name}\n{self.log(name)}")

    def wait_for_end(self, number: str, seconds: float = 150) -> dict[str, str]:
        states = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
        self.cluster.wait(lambda: self.cluster.job(number)["JobState"] not in states, f"end of job {number}", seconds)
        return self.cluster.job(number)

    def wait_for_requeue(self, number: str, restarts: int) -> None:
        def is_queued() -> bool:
            job = self.cluster.job(number)
            return job["JobState"] == "PENDING" and job["Restarts"] == str(restarts)

        self.cluster.wait(is_queued, f"requeue {restarts} of job {number}")
        self.cluster.start_now(number)

    def log(self, name: str = "job") -> str:
        return "\n".join(file.read_text() for file in sorted((self.home / "runs" / name / "launch").glob("*.log")))

    def weights(self, step: int, name: str = "job") -> bytes:
        return (self.home / "runs" / name / f"step_{step:08d}" / "model.safetensors").read_bytes()


@pytest.fixture
def user(slurm) -> Iterator[User]:
    home = Path(tempfile.mkdtemp(prefix="accel-ddp-home-"))
    os.chown(home, USER, USER)
    yield User(slurm, home)
    slurm.cancel_all()
    shutil.rmtree(home)


def weights_of_one_node(folder: Path, steps: int) -> bytes:
    """Return the weights that two ranks on one node without Slurm end with."""
    words = [
        BIN / "torchrun",
        "--nproc_per_node",
        2,
        "--master_port",
        free_port(),
        TRAINS,
        "--steps",
        steps,
        "--output_dir",
        folder / "one",
    ]
    run_all([words], [clean_environment(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")]).well()
    return (folder / "one" / f"step_{steps:08d}" / "model.safetensors").read_bytes()


@pytest.mark.slurm
def test_two_nodes_train_as_one_node_does_and_logs_follow_until_the_end(user, tmp_path):
    file = user.describe()
    done = user.run("launch", file, TRAINS)
    assert re.search(
        rf"^job (\d+) \(job\) is submitted: 2 nodes with 1 rank each\n  script:  {user.home}/runs/job/launch/job.sh\n",
        done.stdout,
    )
    followed = user.run("logs", "-f", file)
    assert "0: " in followed.stdout
    assert "2 nodes x 1 rank" in followed.stdout
    number = re.search(r"job (\d+)", done.stdout)[1]
    job = user.wait_for_end(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    assert user.weights(12) == weights_of_one_node(tmp_path, 12)
    for words in (["status", file], ["status", file, "--name=job"]):
        assert (
            f"job  job {number}  exited with code 0 (COMPLETED)  log {user.home}/runs/job/launch/slurm-"
            in user.run(*words).stdout
        )
    (user.home / "runs" / "job" / "launch" / f"slurm-{number}.log").rename(
        user.home / "runs" / "job" / "launch" / "slurm-999.log"
    )
    assert user.run("status", file).stdout.startswith("job  job 999  ended  log "), "Slurm does not store this job any more"
    assert user.run("status", file, "--name=other").stdout == "There is no job named 'other'.\n"


@pytest.mark.slurm
def test_three_requeues_end_with_the_same_weights(user, tmp_path):
    """The job is preempted with a notice, receives the signal of the time limit, and loses a node without any notice."""
    steps = 60
    file = user.describe()
    number = user.launch(file, "--steps", steps, "--step_seconds", 0.2)
    user.wait_for_step(5)
    urgent = user.home / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    user.cluster.run("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", urgent, cwd=user.home)
    user.wait_for_requeue(number, 1)
    first = user.step()
    assert 5 <= first < steps - 20, "the test needs steps that are left"
    assert "received SIGTERM" in user.log()
    assert "the job is requeued: restart 1" in user.log()

    user.wait_for_step(first + 5)
    user.cluster.run("scancel", "--signal=USR2", number)
    user.wait_for_requeue(number, 2)
    second = user.step()
    assert "received SIGUSR2" in user.log()

    user.wait_for_step(second + 5)
    assert user.step() < steps
    user.cluster.admin("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=test")
    user.cluster.wait(lambda: user.cluster.job(number)["Restarts"] == "3", "requeue by Slurm")
    user.cluster.resume_nodes()
    user.wait_for_requeue(number, 3)
    job = user.wait_for_end(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "3")
    assert user.weights(steps) == weights_of_one_node(tmp_path, steps)


@pytest.mark.slurm
def test_the_time_limit_saves_and_continues(user, tmp_path):
    file = user.describe(time_limit='"00:02:00"', slurm="{signal_seconds: 60}")
    number = user.launch(file, "--steps", 40, "--step_seconds", 1)  # at least 80 s
    user.wait_for_requeue(number, 1)
    assert 0 < user.step() < 40
    assert "received SIGUSR2" in user.log()
    deadline = time.monotonic() + 240
    while user.cluster.job(number)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline, user.log()
        if user.cluster.job(number)["JobState"] == "PENDING":
            user.cluster.start_now(number)
        time.sleep(1)
    job = user.cluster.job(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0")
    assert user.weights(40) == weights_of_one_node(tmp_path, 40)


@pytest.mark.slurm
def test_a_job_that_is_preempted_while_it_starts_is_queued_again(user):
    """The launchers do not handle signals yet, and SIGTERM ends them. Slurm does not queue a job again that ends by itself."""
    number = user.launch(user.describe())
    user.cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    user.wait_for_requeue(number, 1)
    assert "the job is requeued: restart 1" in user.log()
    assert user.step() == 0, "it was preempted before its first step"
    assert user.wait_for_end(number)["JobState"] == "COMPLETED", user.log()


@pytest.mark.slurm
def test_a_stop_signal_while_the_launchers_start_queues_the_job_again(user):
    """Slurm sends it once, before the time limit."""
    number = user.launch(user.describe())
    user.cluster.wait(lambda: user.cluster.job(number)["JobState"] == "RUNNING", "running job")
    time.sleep(2)
    user.cluster.run("scancel", "--signal=USR2", number)
    user.wait_for_requeue(number, 1)
    assert "the job is requeued: restart 1" in user.log()
    assert user.step() == 0, "it was stopped before its first step"
    assert user.wait_for_end(number)["JobState"] == "COMPLETED", user.log()


@pytest.mark.slurm
def test_two_jobs_run_on_one_node_at_once(user):
    keys = {"nodes": "1", "processes_per_node": "2", "slurm": '{options: ["--nodelist=node1"]}'}
    numbers = [user.launch(user.describe(name, **keys), "--step_seconds", 1) for name in ("a", "b")]
    jobs = [user.wait_for_end(number) for number in numbers]
    assert [job["JobState"] for job in jobs] == ["COMPLETED"] * 2, user.log("a") + user.log("b")
    assert [job["NodeList"] for job in jobs] == ["node1"] * 2
    assert jobs[1]["StartTime"] < jobs[0]["EndTime"], "at the same time"


@pytest.mark.slurm
def test_an_allocation_is_used_and_ctrl_c_saves(user, tmp_path):
    file = user.describe()
    command = " ".join(map(str, [*CLI, "launch", file, TRAINS, "--steps", 40]))
    program, *words = user.cluster.command(["salloc", "--nodes=2", "--ntasks-per-node=1", "bash", "--norc"])
    env = user.cluster.environment(HOME=str(user.home), PS1="$ ")
    terminal = pexpect.spawn(program, words, env=env, cwd=str(ROOT), encoding="utf-8", timeout=120)
    try:
        terminal.expect("Granted job allocation")
        terminal.sendline(f"{command} --step_seconds 0.5; echo first=$?")
        terminal.expect("using the allocation")
        user.wait_for_step(3)
        terminal.sendintr()
        terminal.expect("received Ctrl-C")
        terminal.expect(r"first=(\d+)")
        assert terminal.match[1] == "75"
        terminal.sendline(f"{command} --resume; echo second=$?")
        terminal.expect(r"second=(\d+)")
        assert terminal.match[1] == "0"
        terminal.sendline(f"{command.replace('launch', 'launch --set nodes=3')}; echo third=$?")
        terminal.expect(r"nodes 3: the allocation \d+ \(SLURM_JOB_ID\) has 2 nodes")
        terminal.expect(r"third=(\d+)")
        assert terminal.match[1] == "2"
        terminal.sendline("exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert user.weights(40) == weights_of_one_node(tmp_path, 40)


@pytest.mark.slurm
def test_stop_saves_and_the_job_is_not_queued_again(user):
    file = user.describe()
    number = user.launch(file, "--steps", 500, "--step_seconds", 0.5)
    leftover = user.run("launch", file, TRAINS, check=False)
    assert leftover.returncode == 2
    assert f"job {number} is a leftover job of the same name 'job'" in leftover.stderr
    user.wait_for_step(3)
    assert re.search(rf"^job  job {number}  running on node\[0-1\] for 00:", user.run("status", file).stdout)
    assert "step" in user.run("logs", file).stdout
    assert len(user.run("logs", "-n", 2, file).stdout.splitlines()) == 2
    assert user.run("logs", "-n", 0, file).stdout == ""
    stopped = user.run("stop", file)
    assert f"job {number} (job): exited with code 75 (FAILED). It has saved a checkpoint" in stopped.stdout
    job = user.cluster.job(number)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")
    assert list((user.home / "runs" / "job").glob("step_*"))
    again = user.run("stop", file, check=False)
    assert again.returncode == 2
    assert "Slurm has no job named 'job'" in again.stderr


@pytest.mark.slurm
def test_stop_ends_a_job_that_is_still_starting_and_stop_now_one_that_trains(user):
    file = user.describe()
    number = user.launch(file, "--steps", 500, "--step_seconds", 0.5)
    user.cluster.wait(lambda: user.cluster.job(number)["JobState"] == "RUNNING", "running job")
    began = time.monotonic()
    user.run("stop", file)
    assert time.monotonic() - began < 100, "not after a timeout"
    assert user.cluster.job(number)["Restarts"] == "0"
    number = user.launch(file, "--steps", 500, "--step_seconds", 0.5, "--resume")
    user.wait_for_step(1)
    assert user.run("stop", "--now", file).stdout == f"job {number} (job): cancelled\n"
    assert user.cluster.job(number)["JobState"] == "CANCELLED"


@pytest.mark.slurm
def test_sbatch_refuses_and_the_key_is_named(user):
    for slurm, expected in {
        "{partition: none}": "Invalid partition name specified. Check slurm.partition 'none'",
        "{gres: 'tpu:1'}": "Invalid generic resource (gres) specification. Check slurm.gres 'tpu:1'",
        "{gres: 'gpu:9'}": "Requested node configuration is not available. Check",
        "{options: [--bogus]}": "unrecognized option '--bogus'",
    }.items():
        done = user.run("launch", user.describe(slurm=slurm), TRAINS, check=False)
        assert done.returncode == 2, done.stdout
        assert "job.yaml: sbatch has refused the job:" in done.stderr
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
    assert not user.cluster.run("squeue", "--noheader").stdout


@pytest.mark.slurm
def test_a_job_that_may_never_start_is_reported(user):
    user.cluster.admin("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=fan is broken")
    drained = user.run("launch", user.describe("drained"), TRAINS, check=False)
    assert drained.returncode == 1
    assert "waits and may never start: Nodes required for job are DOWN, DRAINED" in drained.stderr
    assert "node1 is drained (fan is broken)" in drained.stderr
    assert "accel-ddp stop" in drained.stdout
    assert "waiting (" in user.run("status", user.describe("drained")).stdout
    user.run("stop", user.describe("drained"))
    many = user.run("launch", user.describe("many", nodes="5"), TRAINS, check=False)
    assert many.returncode == 1
    assert re.search(r"waits and may never start: Partition(Config|NodeLimit)\.", many.stderr)
    user.run("stop", user.describe("many"))


@pytest.mark.slurm
def test_a_node_without_the_folder_or_the_environment_is_named(user):
    code, venv = user.home / "code", user.home / "venv"
    for name in ("recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, code / name)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("")
    slurmd = user.cluster.daemons[-1].pid
    in_node1 = ["nsenter", "--target", slurmd, "--mount"]
    for hidden, key in ((code, "folder"), (venv, "venv")):
        subprocess.run([*map(str, in_node1), "mount", "-t", "tmpfs", "-o", "mode=000", "tmpfs", hidden], check=True)
        try:
            file = user.describe(key, folder=str(code), venv=str(venv), output=f"{user.home}/runs")
            job = user.wait_for_end(user.launch(file, script="recipes/own_model.py"))
        finally:
            subprocess.run([*map(str, in_node1), "umount", hidden], check=True)
        assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0")
        assert f"error: node1: {key} {hidden}: this node" in user.log(key)
        assert "node0: " not in user.log(key)


@pytest.mark.slurm
def test_a_folder_that_no_node_can_write_is_reported(user):
    """The log is in that folder, so that Slurm can start nothing there."""
    hidden = user.home / "private"
    hidden.mkdir()
    os.chown(hidden, USER, USER)
    pids = [daemon.pid for daemon in user.cluster.daemons[-2:]]
    for pid in pids:
        subprocess.run(["nsenter", f"--target={pid}", "--mount", "mount", "-t", "tmpfs", "tmpfs", hidden], check=True)
    try:
        done = user.run("launch", user.describe(output=str(hidden)), TRAINS, check=False)
    finally:
        for pid in pids:
            subprocess.run(["nsenter", f"--target={pid}", "--mount", "umount", hidden], check=True)
    assert done.returncode > 0, done.stdout + done.stderr
    assert re.search(rf"node0 cannot write {hidden}/job/launch/slurm-\d+.log", done.stderr)


@pytest.mark.slurm
def test_a_port_in_use_is_reported(user):
    listens = "import socket, time; s = socket.create_server(('', 12399)); print('ready', flush=True); time.sleep(200)"
    process = subprocess.Popen(
        user.cluster.workers[0].command([sys.executable, "-c", listens]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        job = user.wait_for_end(user.launch(user.describe(main_port="12399")))
    finally:
        process.kill()
        process.wait()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0"), user.log()
    assert "12399" in user.log()


@pytest.mark.slurm
def test_gpus_and_secrets_reach_the_ranks(user):
    """The GPUs are device files that are not GPUs, so that the script only prints its variables."""
    script = user.home / "prints.py"
    script.write_text("import os\nprint({name: os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'TOKEN_X', 'PLAIN')})\n")
    (user.home / "secret.env").write_text("TOKEN_X='it is $HIDDEN'\nPLAIN=plain\n")
    file = user.describe(gpus_per_node=str(GPUS), env_file="secret.env")
    number = user.launch(file, script=str(script))
    job = user.wait_for_end(number)
    assert job["TresPerNode"] == "gres:gpu:2"
    assert user.log().count("{'CUDA_VISIBLE_DEVICES': '0,1', 'TOKEN_X': 'it is $HIDDEN', 'PLAIN': 'plain'}") == 4, user.log()
    assert "HIDDEN" not in (user.home / "runs" / "job" / "launch" / "job.sh").read_text()


@pytest.mark.slurm
def test_a_user_error_is_not_queued_again(user):
    number = user.launch(user.describe(), "--resume", "no_such_run")
    job = user.wait_for_end(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), user.log()


def test_a_controller_that_does_not_answer_does_not_look_like_the_end_of_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    texts = {
        "slurm_load_jobs error: Invalid job id specified": None,
        "slurm_load_jobs error: Unable to contact slurm controller": 1,
    }
    for text, refused in texts.items():
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
        (tmp_path / "scontrol").chmod(0o755)
        with pytest.raises(UserError, match="Unable to contact") if refused else contextlib.nullcontext():
            assert _show("7") is None
