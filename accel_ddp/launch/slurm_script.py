"""The batch script of a job for Slurm, and the same script for an allocation that already exists.

The script starts one launcher on each node with srun. Preemption and the end of the time limit signal every process of the job: the
ranks save and return 75, and so do the launchers and srun. The script then requeues the job, and Slurm starts the same script
with SLURM_RESTART_COUNT set, which adds `--resume`. A stop on request first forbids Slurm to requeue the job.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from accel_ddp.errors import STOPPED, USER_ERROR, UserError
from accel_ddp.launch.description import Cluster, read_env_file, shown_value
from accel_ddp.launch.job_commands import Job, Shell, config_word, launcher_words, node_environment, replace_home, uses_torchrun
from accel_ddp.text import counted
from accel_ddp.words import has_option, script_at

SIGNAL_SECONDS = 120  # before the time limit; it must cover the longest step and a checkpoint
# Main ports are 10000 to 19999: the preflight derives more ports from the main port, from 20000 to 32003, and systems assign ports
# from 32768 on. Each task of an array has a job id of its own.
FIRST_PORT, NUM_PORTS = 10000, 10000


def render(cluster: Cluster, job: Job, is_batch: bool = True) -> str:
    """Return the batch script of a job. Without `is_batch` it is the script for an allocation that already exists."""
    _check(cluster)
    job = _of_array_task(job) if is_array(cluster) else job
    written, sent = split_environment(cluster)
    nodes, ranks = counted(len(cluster.nodes), "node"), counted(cluster.nodes[0].processes, "rank")
    lines = [
        "#!/bin/bash",
        f"# {job.name}: {nodes} with {ranks} each, for `accel-ddp launch {cluster.file}`.",
        *(_before_submission(cluster, job) + _directives(cluster, job) if is_batch else []),
        "",
        *_variables(cluster, job),
        *(f"export {name}={shlex.quote(value)}" for name, value in written.items()),
        *_check_of_sent(cluster, sent),
        "",
        *_nodes_and_port(cluster, is_batch),
        "",
        *_functions(cluster, job),
        "",
        *_steps(cluster, is_batch),
    ]
    return "\n".join(lines) + "\n"


def _check(cluster: Cluster) -> None:
    if len({(node.gpus, node.processes) for node in cluster.nodes}) > 1:
        raise UserError(
            f"{cluster.file}: nodes of different size are not supported with backend: slurm. Write the number of nodes, "
            "and gpus_per_node and processes_per_node for all of them."
        )
    if cluster.time_limit and signal_seconds(cluster) >= cluster.time_limit:
        raise UserError(
            f"{cluster.file}: slurm.signal_seconds {signal_seconds(cluster)}: must be less than time_limit ({cluster.time_limit} s). "
            "In these seconds before the limit, the ranks save a checkpoint."
        )


# ---- parts of the script


def _before_submission(cluster: Cluster, job: Job) -> list[str]:
    """Return the command that a user of `--print` needs. Slurm ends a job whose log it cannot create, without any message."""
    return [
        f"# Before you submit this file yourself, create the folder of its log: mkdir -p {_quote(launch_folder(cluster, job))}"
    ]


def _directives(cluster: Cluster, job: Job) -> list[str]:
    node, slurm, seconds = cluster.nodes[0], cluster.slurm, signal_seconds(cluster)
    log = str(launch_folder(cluster, job)).replace("%", "%%") + f"/slurm-{'%A_%a' if is_array(cluster) else '%j'}.log"
    is_requeued = slurm.get("requeue", True)
    more = slurm.get("options", ())
    has_gpus = any(re.match(r"--gres|--gpus|-G", option) for option in more)
    gres = slurm.get("gres", f"gpu:{min(node.gpus, node.processes)}" if node.gpus and not has_gpus else "")
    options = [
        ("job-name", job.name, ""),
        *((key, slurm[key], "") for key in ("partition", "account", "qos") if key in slurm),
        ("nodes", len(cluster.nodes), ""),
        ("ntasks-per-node", 1, "One launcher runs on each node, and starts the ranks of this node."),
        *([("gres", gres, "")] if gres else []),
        *([("cpus-per-task", slurm["cpu"], "")] if "cpu" in slurm else []),
        *([("mem", slurm["memory"], "")] if "memory" in slurm else []),
        *([("time", _slurm_time(cluster.time_limit), "")] if cluster.time_limit else []),
        ("signal", f"USR2@{seconds}", f"{seconds} s before the time limit, the ranks save a checkpoint and stop."),
        (
            "requeue" if is_requeued else "no-requeue",
            "",
            "A job that is queued again has the same id and continues its log file.",
        ),
        ("open-mode", "append", ""),
        ("output", log, ""),
        ("chdir", code_folder(cluster), ""),
        ("export", "ALL", ""),
    ]
    lines = []
    for name, value, comment in options:
        lines += [f"# {comment}"] if comment else []
        lines.append(f"#SBATCH --{name}" + (f"={_quote(value)}" if value else ""))
    for word in more:
        if word.startswith("-"):
            lines.append(f"#SBATCH {_quote(word)}")
        else:  # the value of the option before it
            lines[-1] += f" {_quote(word)}"
    return lines


def _variables(cluster: Cluster, job: Job) -> list[str]:
    node, folder = cluster.nodes[0], code_folder(cluster)
    lines = [f"export FOLDER={_quote(folder)} SCRIPT={_quote(job.script)}"]
    if node.venv:
        lines.append(f"export VENV={_quote(folder / Path(node.venv).expanduser())}")
    return [
        *lines,
        "export PYTHONUNBUFFERED=1",
        "# The launchers give their ranks as long to save as Slurm gives the job.",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={signal_seconds(cluster)}",
    ]


def _check_of_sent(cluster: Cluster, sent: Iterable[str]) -> list[str]:
    if not sent:
        return []
    files = " and ".join(cluster.env_files) or str(cluster.file)
    return [
        "# The values of these variables are not in this file. `accel-ddp launch` gives them to sbatch in its environment.",
        f"for name in {' '.join(sent)}; do",
        '    if [ -z "${!name+set}" ]; then',
        '        echo "error: the variable $name is not set. Submit the job with accel-ddp launch, or export the variables of" \\',
        f"            {_quote(files)} >&2",
        f"        exit {USER_ERROR}",
        "    fi",
        "done",
    ]


def _nodes_and_port(cluster: Cluster, is_batch: bool) -> list[str]:
    address = _quote(cluster.main_address) if cluster.main_address else "${nodes%%,*}"
    # One allocation may run several jobs at the same time, so its id is not enough there.
    number = "SLURM_JOB_ID" if is_batch else "(SLURM_JOB_ID + $$)"
    port = str(cluster.main_port) if cluster.has_main_port else f"$(({FIRST_PORT} + {number} % {NUM_PORTS}))"
    return [
        "# The first node of the list is the main node. The port depends on the job id, so that jobs on one node do not collide.",
        f'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n {len(cluster.nodes)} | paste -sd ,)',
        f"export MAIN_ADDRESS={address} MAIN_PORT={port}",
    ]


def _functions(cluster: Cluster, job: Job) -> list[str]:
    launcher = "torchrun" if uses_torchrun(cluster) else "accelerate"
    words = launcher_words(
        cluster, job, node_rank=Shell('"$SLURM_NODEID"'), address=Shell('"$MAIN_ADDRESS"'), port=Shell('"$MAIN_PORT"')
    )
    words = replace_home(words, [config_word(cluster), job.run_folder], os.path.expanduser)  # nodes and login node share the home
    if has_option(job.options, "output_dir") and not has_option(job.options, "resume"):
        words.append(Shell("${SLURM_RESTART_COUNT:+--resume=auto}"))
    lines = [
        "# ---- These functions run on each node.",
        "fail() {",
        '    echo "error: $(hostname): $1" >&2',
        f"    exit {USER_ERROR}",
        "}",
        "",
        "enter() {",
        '    cd "$FOLDER" || fail "folder $FOLDER: this node cannot enter it. Put the code there, or change the key folder."',
    ]
    if cluster.nodes[0].venv:
        lines += [
            '    [ -f "$VENV/bin/activate" ] || fail "venv $VENV: this node does not have it. Create it, or change the key venv."',
            '    . "$VENV/bin/activate"',
        ]
    else:
        lines.append("    if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi")
    return [
        *lines,
        "}",
        "",
        "check() {",
        "    enter",
        f"    command -v {launcher} >/dev/null ||",
        f'        fail "the PATH of this node has no {launcher}. Set the key venv to an environment with accel_ddp."',
        '    [ -f "$SCRIPT" ] || fail "there is no $SCRIPT in $FOLDER on this node."',
        "    # Slurm gives a task one CPU by default. nproc returns OMP_NUM_THREADS if it is set.",
        "    cpus=$(env -u OMP_NUM_THREADS nproc)",
        f'    [ "$cpus" -ge {cluster.nodes[0].processes} ] || echo "warning: $(hostname): CPUs of the job: $cpus, ranks: '
        f'{cluster.nodes[0].processes}. Set the key slurm.cpu." >&2',
        "}",
        "",
        "train() {",
        "    # Slurm signals every process. USR2 would end the launcher, so the launcher ignores it. The ranks handle it.",
        '    trap "" USR2',
        "    enter",
        *_command_lines(words, is_array(cluster)),
        "}",
    ]


def _command_lines(words: list[str], has_tasks: bool) -> list[str]:
    """Return the command as lines with one option each."""
    lines = ["exec"]
    script = script_at(words)
    for at, word in enumerate(words):
        text = word if isinstance(word, Shell) else _quote_task(word) if has_tasks else shlex.quote(word)
        if word.startswith(("--", "${")) or at == script:
            lines.append(text)
        else:
            lines[-1] += f" {text}"
    return [f"    {lines[0]} \\", *(f"        {line} \\" for line in lines[1:-1]), f"        {lines[-1]}"]


def _steps(cluster: Cluster, is_batch: bool) -> list[str]:
    nodes = len(cluster.nodes)
    options = [f'--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --nodelist="$nodes"']
    # With SBATCH_EXPORT=NONE in the environment of the user, srun would not give the variables of the script to the tasks either.
    options.append("--export=ALL --kill-on-bad-exit=0" + (" --label" if nodes > 1 else ""))
    # Some clusters bind a task to one core (CpuBind), and Slurm 22.05 and newer do not give srun the --cpus-per-task of the job.
    options.append("--cpu-bind=none --mpi=none")
    if not is_batch:
        # Ctrl-C reaches the ranks at once. A shell of `srun --pty` has already taken all resources of the allocation.
        options.append("--disable-status ${SLURM_STEP_ID:+--overlap}")
    lines = [
        "on_each_node() {",
        "    # With --kill-on-bad-exit=1, the first launcher that ends would end the others while they save, and srun returns 143.",
        "    # With --cpu-bind=none, the ranks use all CPUs of the job on their node. The ranks do not use MPI.",
        f"    srun {' '.join(options[:1])} \\",
        *(f"        {option} \\" for option in options[1:]),
        '        bash -c "$(declare -f fail enter check train); $1"',
        "}",
        "",
        "# All nodes are checked before a launcher waits for the others.",
        "on_each_node check && on_each_node train",
        "code=$?",
    ]
    # The id of the last task is also that of the whole array.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array(cluster) else '"$SLURM_JOB_ID"'
    if is_batch:
        lines += [
            f"# {STOPPED}: the ranks have saved and stopped, because of preemption, the time limit, or a stop on request.",
            "# `accel-ddp stop` sets Requeue=0 before it stops the ranks.",
            "# Another code, if Slurm preempts the job: the ranks were not ready yet, and have nothing to save.",
            f"state=$(scontrol show job {job})",
            f'if [ "$code" = {STOPPED} ] || {{ [ "$code" != 0 ] && [[ $state == *" PreemptTime="[0-9]* ]]; }} &&',
            '    [[ $state == *" Requeue=1 "* ]]; then',
            '    echo "the job is queued again: restart $((${SLURM_RESTART_COUNT:-0} + 1))"',
            f"    scontrol requeue {job}",
            "fi",
        ]
    return [*lines, 'exit "$code"']


# ---- values


def signal_seconds(cluster: Cluster) -> int:
    return cluster.slurm.get("signal_seconds", SIGNAL_SECONDS)


def code_folder(cluster: Cluster) -> Path:
    """Return the code folder, which is the same on this machine and on the nodes."""
    return Path(os.path.abspath(Path(cluster.nodes[0].folder or ".").expanduser()))


def launch_folder(cluster: Cluster, job: Job) -> Path:
    """Return the folder of the script and the logs: below the folder of the job, and for an array beside those of its tasks."""
    path = job.run_folder.removesuffix("/%a") if is_array(cluster) else job.run_folder
    if is_array(cluster) and "%a" in path:
        path = f"{cluster.output}/{job.name}"
    return code_folder(cluster) / Path(path).expanduser() / "launch"


def split_environment(cluster: Cluster) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that the script contains, and those that only the environment of sbatch contains."""
    node = cluster.nodes[0]
    every = node_environment(cluster, node)
    if "CUDA_VISIBLE_DEVICES" not in node.env:
        every.pop("CUDA_VISIBLE_DEVICES", None)  # Slurm chooses the GPUs
    from_files = {name for file in cluster.env_files for name in read_env_file(Path(file), file)}
    sent = {name: value for name, value in every.items() if name in from_files or shown_value(name, value) != value}
    return {name: value for name, value in every.items() if name not in sent}, sent


def is_array(cluster: Cluster) -> bool:
    return any(re.match(r"(--array|-a)", option) for option in cluster.slurm.get("options", ()))


def _of_array_task(job: Job) -> Job:
    """Return the job of one task of an array. Each task needs its own folder, whose name is the number of the task by default."""
    if "%a" in job.run_folder:
        return job
    folder = f"{job.run_folder}/%a"
    options = [
        folder if word == job.run_folder and re.fullmatch(r"--output[_-]dir", job.options[at - 1])
        else re.sub(r"^(--output[_-]dir=).*", lambda found: found[1] + folder, word)
        for at, word in enumerate(job.options)
    ]  # fmt: skip
    return dataclasses.replace(job, options=tuple(options), run_folder=folder)


def _quote_task(word: str) -> str:
    """Return a quoted word in which %a is replaced by the number of the array's task, as in Slurm's own options."""
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split("%a")) or "''"


def _quote(value: object) -> str:
    return shlex.quote(str(value))


def _slurm_time(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{seconds:02}"
