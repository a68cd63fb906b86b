"""The agreed stop: any rank of any node may be asked to stop, and all ranks stop after the same step, with one checkpoint.

SIGTERM, SIGHUP, `--stop_signal`, one Ctrl-C, or a file OUTPUT_DIR/STOP ask for it. The rank that is asked only sets a flag. During
training the flag travels with the small all-reduce of each step, and during an evaluation through the monitors.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.nodes.spawn import die_with_parent
from accel_ddp.nodes.terminal import in_notebook
from accel_ddp.ranks.agreement import broadcast_object, gather_objects
from accel_ddp.ranks.failures import LAUNCHER_DIED, Failure, write_error_file
from accel_ddp.ranks.process import Exit, Moment, ending, links, this_rank
from accel_ddp.ranks.reporting import report_failure, wait_for_failure
from accel_ddp.watch.restart_files import launcher_pid, write_outcome

SAME_CTRL_C_SECONDS = 0.2  # `timeout`, for example, passes on a Ctrl-C that the terminal has already sent to every process


def listen(cfg: TrainConfig) -> None:
    """Install handlers that turn signals into stop requests. A second Ctrl-C ends this rank at once, also inside a collective.

    Python runs signal handlers only between its own instructions, which a rank inside a collective does not reach. A thread
    that reads the wake-up pipe receives every signal from the C level.
    """
    stop = ending.stop
    stop.pid = os.getpid()
    stop.exit_pipe = multiprocessing.Pipe(duplex=False)
    atexit.register(stop.announce_exit)
    stop.handled_signals[:] = [signal.SIGINT, signal.SIGTERM, signal.Signals[f"SIG{cfg.stop_signal}"]]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup a closed terminal must not stop the run
        stop.handled_signals.append(signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in stop.handled_signals:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_reset_in_child)  # otherwise a child would write into our pipe
    threading.Thread(target=_handle_signals, args=(reader,), daemon=True).start()


def _reset_in_child() -> None:
    signal.set_wakeup_fd(-1)
    for number in ending.stop.handled_signals:
        signal.signal(number, signal.SIG_DFL)


class IgnoreInWorker:
    """Ignores stop signals in a data worker. The worker ends with its rank instead, also when the rank is killed.

    Slurm, Kubernetes and torchrun signal every process of a rank, and a worker that ended would end the rank with it. An object is
    created in the rank and called in the worker. It holds what the worker needs, because only a forked worker has the state of
    its rank. Start workers inside `blocked_for_children`.
    """

    def __init__(self, start_method: str):
        stop = ending.stop
        self.handled_signals = list(stop.handled_signals)
        self.exit_pipe = stop.exit_pipe[0] if stop.exit_pipe else None  # None in a program that does not use `run`
        self.parent = stop.pid
        self.has_fork_server = start_method == "forkserver"

    def __call__(self, *_: object) -> None:
        def exit_with_rank(*_: object) -> None:
            if self.exit_pipe is None or self.exit_pipe.poll():
                os._exit(0)

        for number in self.handled_signals:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, exit_with_rank)  # Python ends the workers of a process at its exit with SIGTERM
        if self.has_fork_server:  # it is the parent, and it ends after its last worker
            threading.Thread(target=_exit_after_rank, daemon=True).start()
        else:
            die_with_parent()
            # If the rank died before the line above, no signal arrives, and this worker would run forever with the rank's
            # connections.
            if self.parent and os.getppid() != self.parent:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.handled_signals)


def _exit_after_rank() -> None:
    multiprocessing.parent_process().join()  # returns at once if the rank has already died
    os._exit(0)


@contextlib.contextmanager
def blocked_for_children(forks: bool = False) -> Iterator[None]:
    """Block stop signals for processes that are started inside the block (trackers, data workers), which inherit this.

    This rank still receives the signals, in the thread of `listen`. wandb's process unblocks SIGTERM and SIGINT again. It has its
    own session, so Ctrl-C and the launchers do not reach it. A SIGTERM to every process of a job does. With `forks`, what must end
    before a fork is waited for.
    """
    if forks:
        ending.run(Moment.FORK)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending.stop.handled_signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle_signals(reader: int) -> None:
    interrupted_at = 0.0
    while True:
        number = os.read(reader, 1)[0]
        if number not in ending.stop.handled_signals:
            continue
        was_interrupted = bool(interrupted_at)
        if number == signal.SIGINT:
            now = time.monotonic()
            if was_interrupted and now - interrupted_at < SAME_CTRL_C_SECONDS:
                continue
            interrupted_at = interrupted_at or now
        _handle(signal.Signals(number), was_interrupted)


def _handle(number: signal.Signals, was_interrupted: bool) -> None:
    """Let all ranks save and stop after this step. Exit at once if that is impossible, or if the user does not want to wait."""
    stop, is_under_torchrun = ending.stop, "TORCHELASTIC_RUN_ID" in os.environ
    is_interrupt = was_interrupted or number == signal.SIGINT
    is_repeated = was_interrupted and number in (signal.SIGINT, signal.SIGTERM)  # torchrun answers a second Ctrl-C with SIGTERM
    # torchrun also sends SIGTERM when another rank has died. The monitor reports that within milliseconds.
    is_from_launcher = number == signal.SIGTERM and is_under_torchrun and not is_repeated
    if is_from_launcher and wait_for_failure(0.3 if stop.can_save else 2):
        return  # `_leave_late` ends this rank
    is_orphan = bool(this_rank.launcher) and not is_repeated and _has_lost_launcher(number)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    if is_orphan:
        name = f"{LAUNCHER_DIED}: the launcher of {this_rank.host} (pid {this_rank.launcher}) died"
    elif is_repeated and (number == signal.SIGINT or is_under_torchrun):
        name = "a second Ctrl-C"
    if is_repeated or not stop.can_save:
        failure = Failure(
            "interrupted" if is_interrupt else "stopped",
            f"received {name} on {this_rank.host}. Every rank exits now. If there is a checkpoint, --resume continues from it. "
            "Otherwise run the same command again.",
        )
        if is_orphan:
            failure = Failure("died", f"{name} before the first step. Start it again.")
        # torchrun also sends SIGTERM to several ranks when one of them has failed, and may start them again after that.
        is_request = failure.is_signal and (number != signal.SIGTERM or this_rank.num_ranks == 1)
        _exit_now(failure, is_urgent=is_repeated, ends_job=is_request)
    elif not stop.reason:
        _request(name if is_orphan else f"{name} on rank {this_rank.rank} ({this_rank.host})")
        if number in (signal.SIGTERM, signal.SIGINT) and is_under_torchrun:
            threading.Thread(target=_exit_before_the_launcher_kills, args=(name,), daemon=True).start()
        if this_rank.is_local_main and not is_orphan:  # the monitor reports the death of the launcher
            more = " Press Ctrl-C again to kill the job at once without saving." if is_interrupt else ""
            text = f"\n{this_rank.host}: received {name}; saving {stop.when}, then stopping.{more}"
            print(text, file=sys.stderr, flush=True)


def _has_lost_launcher(number: signal.Signals) -> bool:
    """Return whether the launcher is gone, at whose death Linux sends the stop signal to this rank.

    Linux sends the signal when the thread ends that has started this rank. The other threads of a launcher that is killed may end
    some milliseconds later, and it is the parent of this rank until then.
    """
    deadline = time.monotonic() + (0 if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) else 0.5)
    while os.getppid() == this_rank.launcher and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getppid() != this_rank.launcher


def _exit_before_the_launcher_kills(name: str) -> None:
    """Exit with a message shortly before torchrun would send SIGKILL, if the current step does not end.

    torchrun sends SIGKILL some time after SIGTERM and after Ctrl-C. It also sends SIGTERM when another of its ranks has died, and
    then no step of this rank can end.
    """
    seconds = 0.8 * float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
    time.sleep(seconds)
    if ending.stop.can_save and not ending.stop.is_agreed:
        _exit_now(
            Failure(
                "stopped",
                f"received {name} on {this_rank.host}, and the step did not finish within {seconds:.0f} s, so nothing was saved. "
                "Another rank may have died (see above), or TORCH_ELASTIC_SHUTDOWN_TIMEOUT is too short. Continue from the last "
                "checkpoint with --resume.",
            ),
            ends_job=this_rank.num_ranks == 1,
        )


def _request(reason: str) -> None:
    ending.stop.reason = reason
    # In a thread, because the monitor may be slow and a second Ctrl-C must be handled meanwhile. The next all-reduce carries it too.
    threading.Thread(target=links.tell_monitor, args=({"stop": reason},), daemon=True).start()


def _exit_now(failure: Failure, is_urgent: bool = False, ends_job: bool = False) -> None:
    ending.run(Moment.MESSAGES, Exit.FAILED)
    if ends_job:
        write_outcome(launcher_pid(), failure.as_outcome())
    first = report_failure(failure, seconds=0.5 if is_urgent else 3)
    if ending.failure is None and this_rank.is_local_main:  # otherwise the monitor has printed it
        print(f"\n{failure}", file=sys.stderr, flush=True)
    write_error_file(str(first))
    os._exit(first.exit_code)


@contextlib.contextmanager
def can_save(cfg: TrainConfig) -> Iterator[None]:
    """Turn signals into a checkpoint and a stop of all ranks inside the block. Outside of it a signal ends the rank at once."""
    ending.stop.can_save, ending.stop.file = True, Path(cfg.output_dir) / "STOP"
    is_cell = in_notebook() and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, _interrupt_cell) if is_cell else None
    try:
        yield
    finally:
        ending.stop.can_save = False
        if is_cell:
            signal.signal(signal.SIGINT, before)
            phases.enter(phases.END)  # whatever was raised; otherwise the monitor would report that a step does not end


def _interrupt_cell(*_: object) -> None:
    """Let the run of a notebook save and stop. A second interrupt stops it at once."""
    if ending.stop.reason:
        raise KeyboardInterrupt
    _request("an interrupt of the notebook")
    with contextlib.suppress(RuntimeError):  # this may have interrupted a `print`
        print(f"saving {ending.stop.when}, then stopping. Interrupt again to stop at once without saving.", flush=True)


def is_stop_requested() -> bool:
    """Return whether this rank, or another one whose request has arrived here, was asked to stop."""
    stop = ending.stop
    # Once a second, because the file may be on a network disk.
    if not stop.reason and stop.file and this_rank.is_local_main and time.monotonic() - stop.file_checked_at > 1:
        stop.file_checked_at = time.monotonic()
        with contextlib.suppress(OSError):  # a network disk that does not answer this time
            if stop.file.exists():
                _request(f"the file {stop.file} on {this_rank.host}")
    return bool(stop.reason or stop.reason_of_others)


def gather_reason() -> str:
    """Return the reason of the first rank that was asked to stop, the same on every rank. This is a collective."""
    reasons = gather_objects(ending.stop.reason)
    return broadcast_object(next((reason for reason in reasons if reason), "--stop_after") if reasons else None)


def remove_stop_file(output_dir: str) -> None:
    """Remove OUTPUT_DIR/STOP, which would stop the next run too."""
    if this_rank.is_local_main:
        with contextlib.suppress(OSError):
            (Path(output_dir) / "STOP").unlink()
