"""The batch script of a job for Slurm, and the same script for an allocation that already exists.

The script starts one launcher on each node with srun. Preemption and the end of the time limit signal every process of the job: the
ranks save and return 75, and so do the launchers and srun. The script then requeues the job, and Slurm starts the same script
with SLURM_RESTART_COUNT set, which adds `--resume`. A stop on request first forbids Slurm to requeue the job.
"""

import os
import re
import shlex
import string
import time
from pathlib import Path

from accel_ddp.errors import STOPPED, USER_ERROR, UserError
from accel_ddp.launch import job_commands
from accel_ddp.launch.description import Cluster, read_env_file, shown_value
from accel_ddp.launch.job_commands import Job, Shell
from accel_ddp.text import counted
from accel_ddp.words import has_option

SIGNAL_SECONDS = 120  # before the time limit; it must cover the longest step and a checkpoint
# Main ports: the preflight derives further ones, 20000 to 32003, and systems assign ports from 32768 on.
FIRST_PORT, NUM_PORTS = 10000, 10000


class _Script(string.Template):
    delimiter = "@"


# With SBATCH_EXPORT=NONE in the environment of the user, srun would not give the variables of the script to the tasks either.
# Some clusters bind a task to one core (CpuBind), and Slurm 22.05 and newer do not give srun the --cpus-per-task of the job.
_SCRIPT, _REQUEUE, _CHECK_OF_SENT = (
    _Script(Path(__file__).with_name(f"slurm_{name}.sh").read_text(encoding="utf-8")) for name in ("job", "requeue", "sent")
)
_BLOCK = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); os.execvp(sys.argv[1], sys.argv[1:])"
)
_ACTIVATE_VENV = """\
[ -f "$VENV/bin/activate" ] || fail "venv $VENV: this node does not have it. Create it, or change the key venv."
    . "$VENV/bin/activate"\
"""


def render(cluster: Cluster, job: Job, is_batch: bool = True) -> str:
    _check(cluster)
    node, folder, nodes = cluster.nodes[0], code_folder(cluster), len(cluster.nodes)
    written, sent = split_environment(cluster)
    exports = "".join(f"export {name}={_quote(value)}\n" for name, value in written.items())
    if sent:
        files = _quote(" and ".join(cluster.env_files) or cluster.file)
        exports += _CHECK_OF_SENT.substitute(names=" ".join(sent), files=files, user_error=USER_ERROR)
    # One allocation may run several jobs at the same time, so its id is not enough there.
    number = "SLURM_JOB_ID" if is_batch else "(SLURM_JOB_ID + $$)"
    return _SCRIPT.substitute(
        job=job.name,
        size=f"{counted(nodes, 'node')} with {counted(node.processes, 'rank')}",
        file=cluster.file,
        directives="".join(f"{line}\n" for line in _directives(cluster, job)) if is_batch else "",
        folder=_quote(folder),
        script=_quote(job.script),
        venv=f"export VENV={_quote(folder / Path(node.venv).expanduser())}\n" if node.venv else "",
        signal_seconds=signal_seconds(cluster),
        exports=exports,
        nodes=nodes,
        ranks=node.processes,
        address=_quote(cluster.main_address) if cluster.main_address else "${nodes%%,*}",
        port=cluster.main_port if cluster.has_main_port else f"$(({FIRST_PORT} + {number} % {NUM_PORTS}))",
        user_error=USER_ERROR,
        stopped=STOPPED,
        block=_quote(_BLOCK),
        activate=_ACTIVATE_VENV if node.venv else "if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi",
        launcher="torchrun" if job_commands.uses_torchrun(cluster) else "accelerate",
        command=_command(cluster, job),
        label=" --label" if nodes > 1 else "",
        # Ctrl-C reaches the ranks at once. A shell of `srun --pty` has already taken all resources of the allocation.
        overlap="" if is_batch else "--disable-status ${SLURM_STEP_ID:+--overlap} \\\n        ",
        requeue=_REQUEUE.substitute(stopped=STOPPED) if is_batch else "",
    )


def _check(cluster: Cluster) -> None:
    if cluster.time_limit and signal_seconds(cluster) >= cluster.time_limit:
        raise UserError(
            f"{cluster.file}: slurm.signal_seconds {signal_seconds(cluster)}: must be less than time_limit ({cluster.time_limit} s). "
            "In these seconds before the limit, the ranks save a checkpoint."
        )
    if array := next((option for option in cluster.slurm.get("options", ()) if re.match(r"--array|-a", option)), ""):
        raise UserError(
            f"{cluster.file}: slurm.options {array}: the tasks of an array would write into one folder. Launch several jobs, for "
            "example with --name seed-1, each of which has its own folder."
        )


def _directives(cluster: Cluster, job: Job) -> list[str]:
    node, slurm, seconds = cluster.nodes[0], cluster.slurm, signal_seconds(cluster)
    more = slurm.get("options", ())
    has_gpus = any(re.match(r"--gres|--gpus|-G", option) for option in more)
    days, rest = divmod(cluster.time_limit or 0, 86400)
    clock = (f"{days}-" if days else "") + time.strftime("%H:%M:%S", time.gmtime(rest))
    folder = launch_folder(cluster, job)
    options = {
        "job-name": job.name,
        **{key: slurm.get(key) for key in ("partition", "account", "qos")},
        "nodes": len(cluster.nodes),
        "ntasks-per-node": 1,
        "gres": slurm.get("gres", f"gpu:{min(node.gpus, node.processes)}" if node.gpus and not has_gpus else None),
        "cpus-per-task": slurm.get("cpu"),
        "mem": slurm.get("memory"),
        "time": clock if cluster.time_limit else None,
        "signal": f"USR2@{seconds}",
        "requeue" if slurm.get("requeue", True) else "no-requeue": "",
        "open-mode": "append",
        "output": str(folder).replace("%", "%%") + "/slurm-%j.log",
        "chdir": code_folder(cluster),
        "export": "ALL",
    }
    comments = {
        "ntasks-per-node": "One launcher runs on each node, and starts the ranks of this node.",
        "signal": f"{seconds} s before the time limit, the ranks save a checkpoint and stop.",
        "requeue": "A requeued job has the same id and continues its log file.",
    }
    # Slurm ends a job whose log it cannot create, without any message.
    lines = [f"# Before you submit this file yourself, create its log folder: mkdir -p {_quote(folder)}"]
    for name, value in options.items():
        if value is not None:
            lines += [f"# {comments[key]}"] if (key := name.removeprefix("no-")) in comments else []
            lines.append(f"#SBATCH --{name}" + (f"={_quote(value)}" if value else ""))
    for word in more:
        if word.startswith("-"):
            lines.append(f"#SBATCH {_quote(word)}")
        else:  # the value of the option before it
            lines[-1] += f" {_quote(word)}"
    return lines


def _command(cluster: Cluster, job: Job) -> str:
    rank, address, port = map(Shell, ('"$SLURM_NODEID"', '"$MAIN_ADDRESS"', '"$MAIN_PORT"'))
    words = job_commands.launcher_words(cluster, job, node_rank=rank, address=address, port=port)
    paths = [job_commands.config_word(cluster), job.run_folder]
    words = job_commands.replace_home(words, paths, os.path.expanduser)  # nodes and login node share the home
    if has_option(job.options, "output_dir") and not has_option(job.options, "resume"):
        words.append(Shell("${SLURM_RESTART_COUNT:+--resume=auto}"))
    return job_commands.wrap(words, " \\\n        ")


def signal_seconds(cluster: Cluster) -> int:
    return cluster.slurm.get("signal_seconds", SIGNAL_SECONDS)


def code_folder(cluster: Cluster) -> Path:
    """Return the code folder, which is the same on this machine and on the nodes."""
    return Path(os.path.abspath(Path(cluster.nodes[0].folder or ".").expanduser()))


def launch_folder(cluster: Cluster, job: Job) -> Path:
    return code_folder(cluster) / Path(job.run_folder).expanduser() / "launch"


def split_environment(cluster: Cluster) -> tuple[dict[str, str], dict[str, str]]:
    node = cluster.nodes[0]
    every = job_commands.node_environment(cluster, node)
    if "CUDA_VISIBLE_DEVICES" not in node.env:
        every.pop("CUDA_VISIBLE_DEVICES", None)  # Slurm chooses the GPUs
    from_files = {name for file in cluster.env_files for name in read_env_file(Path(file), file)}
    sent = {name: value for name, value in every.items() if name in from_files or shown_value(name, value) != value}
    return {name: value for name, value in every.items() if name not in sent}, sent


def _quote(value: object) -> str:
    return shlex.quote(str(value))
