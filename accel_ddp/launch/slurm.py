"""Jobs on Slurm, or in the foreground of an allocation. The programs used work without Slurm's accounting database."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from accel_ddp.errors import INTERRUPTED, STOPPED, UserError
from accel_ddp.launch.description import Cluster
from accel_ddp.launch.job_commands import REFUSALS, Job, follow_lines, words_of_job
from accel_ddp.launch.job_record import skip_to_last_lines
from accel_ddp.launch.slurm_script import code_folder, launch_folder, render, split_environment
from accel_ddp.text import counted

CALL_SECONDS = 60.0  # for the answer of Slurm's controller
SUBMIT_SECONDS = 5.0  # for Slurm's scheduler to start a job or to state why it waits
STOP_SECONDS = 660.0
RESEND_SECONDS = 5.0  # a signal is lost in the moment before the launcher of a node blocks it
# Reasons why a job waits that end by themselves, when other jobs end or at a time that is known.
USUAL_REASONS = ("None", "Resources", "Priority", "BeginTime", "Dependency", "Licenses", "Prolog", "Cleaning")
# Limits of an account or a QOS that other jobs have reached. Limits per job are not among them: such a job never starts.
USUAL_LIMITS = re.compile(
    r"(QOS|Assoc)(Grp|Max\w*(Jobs|Per(User|Account|Acct)))|QOS(Job|Resource)Limit|Association(Job|Resource)Limit"
)
# Variables of sbatch that are not called as their options.
_OTHER_VARIABLES = {"time": "timelimit", "mem": "mem_per_node"}
_OF_USER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # they tell clients where the controller is
ACTIVE = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "REQUEUED",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    number: str
    name: str
    state: str
    reason: str
    nodes: str
    run_time: str
    code: int  # of the batch script; 128 + N: it was ended by signal N
    restarts: int
    host: str  # of the batch script
    folder: Path
    log: Path

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def describe(self) -> str:
        if self.state == "PENDING":
            return f"waiting ({self.reason})"
        if self.is_active:
            return f"{self.state.lower()} on {self.nodes} for {self.run_time}"
        if self.state == "CANCELLED":
            return "cancelled"
        return f"exited with code {self.code} ({self.state})"


# ---- commands


def launch(cluster: Cluster, job: Job) -> int:
    if "SLURM_JOB_ID" in os.environ:
        return _run_in_allocation(cluster, job)
    script = render(cluster, job)
    folder = launch_folder(cluster, job)
    if one := next((one for one in _find_jobs(cluster, job.name) if one.log.parent == folder), None):
        raise UserError(
            f"job {one.number} is a leftover job of the same name {job.name!r} with the same folder {folder.parent}, and is "
            f"{one.describe()}. Stop it with `accel-ddp stop {words_of_job(cluster, job)}`, or choose another name with --name."
        )
    file = _write_script(cluster, job, "job.sh", script)
    done = _call("sbatch", "--parsable", str(file), environment=_sbatch_environment(script) | split_environment(cluster)[1])
    if done.returncode:
        raise UserError(_explain_refusal(cluster, done.stderr))
    number = done.stdout.strip().split(";")[0]  # NUMBER;CLUSTER on a machine with several clusters
    ranks = counted(cluster.nodes[0].processes, "rank")
    print(f"job {number} ({job.name}) is submitted: {counted(len(cluster.nodes), 'node')} with {ranks} each")
    print(f"  script:  {file}\n  log:     {file.parent}/slurm-{number}.log")
    print("\n".join(follow_lines(cluster, job)), flush=True)
    return _report_start(number)


def status(cluster: Cluster, job: Job | None) -> int:
    """Print the state of a job, or of all jobs in the code folder, also of those that have ended."""
    found = _find_jobs(cluster, job.name if job else "")
    output = code_folder(cluster) / Path(cluster.output).expanduser()
    folders = [launch_folder(cluster, job)] if job else output.glob("*/launch")
    lines = []
    for folder in set(folders) - {one.log.parent for one in found}:
        for file in _log_files(folder)[-1:]:
            if one := _job_of(file):
                found.append(one)
            else:  # Slurm removes a job some minutes after its end. Its log stays.
                lines.append(f"{folder.parent.name}  job {file.stem[6:]}  ended  log {file}")
    for one in found:
        restarts = f", {counted(one.restarts, 'restart')}" if one.restarts else ""
        lines.append(f"{one.name}  job {one.number}  {one.describe()}{restarts}  log {one.log}")
    what = f"job named {job.name!r}" if job else f"job in {output}"
    print("\n".join(sorted(lines)) or f"There is no {what}.")
    return 0


def logs(cluster: Cluster, job: Job, follow: bool, lines: int) -> int:
    """Print the end of the job's log. With `follow`, continue until the job has ended, and return its exit code."""
    folder = launch_folder(cluster, job)
    last = _log_files(folder)[-1:]
    jobs = sorted(_find_jobs(cluster, job.name), key=lambda one: one.log.parent != folder) or [*filter(None, map(_job_of, last))]
    if not jobs and not last:
        raise UserError(f"there is no log of a job named {job.name!r} in {folder}.")
    reader = _read_on(jobs[0].log if jobs else last[0], lines)
    while True:
        # The state is read before the log. Otherwise the last lines of a job that has just ended would be missed.
        now = _show(jobs[0].number) if jobs and follow else None
        print(next(reader), end="", flush=True)
        if not now and follow:
            print("Slurm no longer knows this job, so its exit code is not known.", file=sys.stderr)
            return 1
        if not now or not now.is_active:
            return now.code if now else 0
        time.sleep(1)


def stop(cluster: Cluster, job: Job, is_now: bool) -> int:
    """Let the ranks save and end the job, or with `is_now` end it at once, and wait for its end. Slurm does not queue it again."""
    jobs = _find_jobs(cluster, job.name)
    if not jobs:
        raise UserError(f"Slurm has no job named {job.name!r} of this user. `accel-ddp status {cluster.file}` lists the jobs.")
    for one in jobs:
        if is_now or one.state == "PENDING":
            _call("scancel", one.number)
        else:
            # First, because the batch script reads this when the ranks have stopped.
            _call("scontrol", "update", f"JobId={one.number}", "Requeue=0")
    deadline, signalled_at = time.monotonic() + (CALL_SECONDS if is_now else STOP_SECONDS), -RESEND_SECONDS
    while _active(now := [_show(one.number) for one in jobs]) and time.monotonic() <= deadline:
        if not is_now and time.monotonic() - signalled_at >= RESEND_SECONDS:
            signalled_at = time.monotonic()
            for one in _active(now):
                if one.state in ("RUNNING", "PENDING"):  # a job that was queued again a moment before is cancelled
                    _call("scancel", *(["--signal=USR2"] if one.state == "RUNNING" else []), one.number)
        time.sleep(0.5)
    for before, one in zip(jobs, now):
        has_saved = one and one.code == STOPPED and not one.is_active
        more = ". It has saved a checkpoint, and --resume continues it." if has_saved else ""
        print(f"job {before.number} ({before.name}): {one.describe() if one else 'ended'}{more}")
    return 1 if _active(now) else 0


def _active(jobs: Iterable[SlurmJob | None]) -> list[SlurmJob]:
    return [one for one in jobs if one and one.is_active]


# ---- submitting


def _write_script(cluster: Cluster, job: Job, name: str, script: str) -> Path:
    """Write the script into the folder of the job and return its path. Slurm does not create the folder of a log itself."""
    if not (folder := code_folder(cluster)).is_dir():
        raise UserError(
            f"{cluster.file}: folder {str(folder)!r}: there is no such folder on this machine. This machine and the nodes must "
            "have the same code folder."
        )
    file = launch_folder(cluster, job) / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
    except OSError as error:
        raise UserError(f"{file}: the script of the job cannot be written: {error.strerror}. Change the key output.") from None
    return file


def _sbatch_environment(script: str) -> dict[str, str]:
    """Without SBATCH_ variables, which outrank the script, and those of an outer allocation, which would reach its srun."""
    options = [*re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE), "requeue", "no-requeue"]
    given = {f"SBATCH_{_OTHER_VARIABLES.get(name, name).upper().replace('-', '_')}" for name in options}
    is_inside = "SLURM_JOBID" in os.environ
    is_left_out = lambda name: name in given or (is_inside and name.startswith("SLURM_") and name not in _OF_USER)
    return {name: value for name, value in os.environ.items() if not is_left_out(name)}


def _explain_refusal(cluster: Cluster, text: str) -> str:
    reason = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in text.strip().splitlines())
    if "contact slurm controller" in reason:
        return f"sbatch cannot reach Slurm's controller: {reason}. Try `sinfo` on this machine."
    key = next((key for word, key in REFUSALS["sbatch"].items() if word in reason.lower()), "slurm")
    values = [f"{part} {cluster.slurm[part.removeprefix('slurm.')]!r}" for part in key.split(" or ") if part[6:] in cluster.slurm]
    check = f"Check {', '.join(values) or key}. `sinfo` lists the partitions."
    return f"{cluster.file}: sbatch has refused the job: {reason}. {check}"


def _report_start(number: str) -> int:
    """Print whether the job runs or why it waits. Return 1 if it may never start, and its exit code if it has failed at once."""
    began = time.monotonic()
    try:
        while (one := _show(number)) and not _has_started(one, time.monotonic() - began):
            time.sleep(0.25)
    except UserError as error:  # the job is in the queue, and must not be submitted again
        print(f"warning: {error}", file=sys.stderr)
        return 0
    if one is None:
        return 0
    if _ends_by_itself(one.reason) if one.state == "PENDING" else one.is_active or one.code == 0:
        print(f"  state:   {one.describe()}")
        return 0
    if one.state == "PENDING":
        done = _call("sinfo", "--noheader", "--list-reasons", "--format=%n is %T (%E)")
        nodes = ", ".join(dict.fromkeys(done.stdout.splitlines()))
        broken = f" Nodes that are not available (`sinfo -R`): {nodes}." if nodes else ""
        print(
            f"warning: job {number} waits and may never start: {one.reason}.{broken} The job stays in the queue. "
            f"`scontrol show job {number}` shows more.",
            file=sys.stderr,
        )
        return 1
    print(f"error: job {number} {one.describe()} at once: {one.reason}.", file=sys.stderr)
    if one.log.exists():
        print("".join(one.log.read_text(errors="replace").splitlines(keepends=True)[-20:]), end="", file=sys.stderr)
    else:
        print(f"{one.host} cannot write {one.log}. Put this folder on a disk that all nodes share.", file=sys.stderr)
    return one.code


def _has_started(one: SlurmJob, waited: float) -> bool:
    if waited > SUBMIT_SECONDS:
        return True
    if one.state == "PENDING":  # the first reason may be replaced when the scheduler has looked at the job
        return not _ends_by_itself(one.reason) and waited > SUBMIT_SECONDS / 2
    # The checks of the nodes at the begin of the script take less than a second.
    return not one.is_active or (one.state == "RUNNING" and one.run_time >= "00:00:02")


def _ends_by_itself(reason: str) -> bool:
    return reason.split(",")[0] in USUAL_REASONS or USUAL_LIMITS.match(reason) is not None


# ---- inside an allocation


def _run_in_allocation(cluster: Cluster, job: Job) -> int:
    number, nodes = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
    if nodes < len(cluster.nodes):
        raise UserError(
            f"{cluster.file}: nodes {len(cluster.nodes)}: the allocation {number} (SLURM_JOB_ID) has {counted(nodes, 'node')}. Use "
            f"--set nodes={nodes}, or allocate more: salloc --nodes={len(cluster.nodes)}."
        )
    script = render(cluster, job, is_batch=False)
    file = _write_script(cluster, job, f"allocation-{number}.sh", script)
    print(f"using the allocation {number} (SLURM_JOB_ID)", flush=True)
    process = psutil.Popen(["bash", str(file)], env={**os.environ, **split_environment(cluster)[1]})

    def interrupt(*_: object) -> None:
        for child in process.children(recursive=True) if process.is_running() else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGINT)

    interrupts = iter(range(1, 1_000))
    # srun gets Ctrl-C too: the ranks save and return 75. The third one returns at once: srun waits for blocked ranks.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED) if next(interrupts) > 2 else None)
    signal.signal(signal.SIGTERM, interrupt)
    return process.wait()


# ---- Slurm's answers


def _call(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        return subprocess.run(words, text=True, timeout=CALL_SECONDS, env=environment, **pipes)
    except FileNotFoundError:
        raise UserError(
            f"{words[0]} is not installed on this machine. Run the command on a login node of the Slurm cluster, or use --print and "
            "submit the script there."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} has not answered within {CALL_SECONDS:.0f} s. Try `sinfo` on this machine.") from None


def _find_jobs(cluster: Cluster, name: str) -> list[SlurmJob]:
    done = _call("squeue", "--me", "--noheader", "--format=%A", *([f"--name={name}"] if name else []))
    if done.returncode:
        raise UserError(f"squeue has failed: {done.stderr.strip()}. Try `sinfo` on this machine.")
    folder = code_folder(cluster)
    found = _active(map(_show, done.stdout.split()))
    return [one for one in found if one.folder == folder and one.log.parent.name == "launch"]


def _show(number: str) -> SlurmJob | None:
    """Return a job, or None if Slurm has removed it, by default 5 minutes after its end. Raise UserError without an answer."""
    done = _call("scontrol", "--oneliner", "show", "job", number)
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise UserError(f"scontrol has failed for job {number}: {done.stderr.strip()}. Try `sinfo` on this machine.")
    return next((_parse(line) for line in done.stdout.splitlines() if "JobId=" in line), None)


def _parse(line: str) -> SlurmJob:
    values = {name: value.strip() for name, value in re.findall(r"(\S+?)=(.*?)(?= \S+=|$)", line)}
    number_of_exit, _, by_signal = values.get("ExitCode", "0:0").partition(":")
    code = int(number_of_exit) or (128 + int(by_signal) if int(by_signal or 0) else 0)
    state = values.get("JobState", "?")
    if not code and state not in (*ACTIVE, "COMPLETED"):
        code = 1  # Slurm has ended the job, for example at its time limit, and stores 0
    return SlurmJob(
        number=values["JobId"], name=values.get("JobName", ""), state=state,
        reason=values.get("Reason", "").replace("_", " "),
        nodes=values.get("NodeList", "").replace("(null)", ""), run_time=values.get("RunTime", ""),
        code=code, restarts=int(values.get("Restarts", 0)),
        host=values.get("BatchHost", "the node"), folder=Path(values.get("WorkDir", "")), log=Path(values.get("StdOut", "")),
    )  # fmt: skip


# ---- logs


def _log_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("slurm-*.log"), key=lambda file: file.stat().st_mtime)


def _job_of(log: Path) -> SlurmJob | None:
    one = _show(log.stem.removeprefix("slurm-"))
    return one if one and one.log == log else None


def _read_on(file: Path, lines: int) -> Iterator[str]:
    position = None if file.exists() else 0
    while True:
        text = b""
        if file.exists():
            with file.open("rb") as opened:
                skip_to_last_lines(opened, lines) if position is None else opened.seek(position)
                text, position = opened.read(), opened.tell()
        yield text.decode(errors="replace")
