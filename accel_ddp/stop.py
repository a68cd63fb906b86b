"""The agreed stop: any rank of any node may be asked for it; all ranks end after the same step, with one checkpoint.

SIGTERM, SIGHUP, `--stop_signal`, Ctrl-C once, or a file OUTPUT_DIR/STOP ask for it. Whoever is asked only sets a flag.
In training the flag travels with the small reduce that each step already does, in an evaluation through the store.
"""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from accel_ddp import world
from accel_ddp.config import TrainConfig
from accel_ddp.environment.topology import is_local_main

ONE_CTRL_C = 0.2  # seconds: `timeout`, for one, hands on a Ctrl-C that the terminal has sent to everyone already

_agreed = False  # all ranks know of the stop, and save
_armed = False  # while a checkpoint can be made; before and after it there is nothing to save
_reason = ""  # of this rank
_signals: list[signal.Signals] = []
_file: Path | None = None
_looked = 0.0
_rank = 0  # the process that listens for signals
_at_exit: tuple[int, int] = (-1, -1)  # a pipe that has something to read from the moment when this process exits


class EvaluationStopped(Exception):
    """An evaluation was cut short on every rank, because the run was asked to end."""


def listen(cfg: TrainConfig) -> None:
    """From now on signals ask for a stop. A second Ctrl-C ends this rank at once, also inside a collective.

    Python runs signal handlers only between its own instructions, and a rank inside a collective is not
    there; a thread that reads the wake-up pipe is told by the C level in any case.
    """
    global _at_exit, _rank
    _rank = os.getpid()
    _at_exit = os.pipe()
    atexit.register(os.write, _at_exit[1], b"x")
    _signals[:] = [signal.SIGINT, signal.SIGTERM, signal.Signals[f"SIG{cfg.stop_signal}"]]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup a lost terminal means nothing
        _signals.append(signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _signals:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)  # or a child would write into our pipe
    threading.Thread(target=_hear, args=(reader,), daemon=True).start()


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    for number in _signals:
        signal.signal(number, signal.SIG_DFL)


def leave_signals_to_the_rank(*_: object) -> None:
    """In a data worker: Slurm, Kubernetes and torchrun signal every process of a rank, and a worker that ended would
    take the rank with it. It ends with its rank instead, also when that is killed."""

    def end_if_the_rank_does(*_: object) -> None:
        if select.select([_at_exit[0]], [], [], 0)[0]:
            os._exit(0)

    for number in _signals:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_if_the_rank_does)  # Python ends the workers of a process at its exit by SIGTERM
    world.end_with_the_parent(signal.SIGKILL)
    if _rank and os.getppid() != _rank:  # killed before that: this worker would live for ever, and hold the rank's connections
        os._exit(0)


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are started here (those of trackers) are kept from the signals: what is blocked here is blocked in them.

    Unless they unblock it: wandb's does so for SIGTERM and SIGINT. It has a session of its own, so that Ctrl-C and the
    launchers do not reach it; a SIGTERM to every process of a job does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear(reader: int) -> None:
    interrupted = 0.0  # when
    while True:
        number = os.read(reader, 1)[0]
        if number not in _signals:
            continue
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        now = time.monotonic()
        if number == signal.SIGINT and interrupted and now - interrupted < ONE_CTRL_C:
            continue
        # torchrun answers a second Ctrl-C with SIGTERM.
        again = bool(interrupted) and number in (signal.SIGINT, signal.SIGTERM)
        if number == signal.SIGINT:
            interrupted = interrupted or now
        if again or not _armed:
            kind = "interrupted" if interrupted else "stopped"
            text = f"{kind}: {name} on {world.HOST}; every rank ends at once. --resume goes on from the last checkpoint."
            if number == signal.SIGTERM and not again and "TORCHELASTIC_RUN_ID" in os.environ:
                text = world.who_is_gone(2 * world.GRACE) or text  # torchrun sends it also when another rank has died
            _end_now(text, is_urgent=again)
        elif not _reason:
            _ask(f"{name} on rank {world.RANK} ({world.HOST})")
            if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                threading.Thread(target=_end_before_the_launcher_does, daemon=True).start()
            if is_local_main():
                more = "; Ctrl-C again ends at once" if interrupted else ""
                print(f"\n{world.HOST}: {name}: saving after this step, then the end{more}.", file=sys.stderr, flush=True)


def _end_before_the_launcher_does() -> None:
    """torchrun sends SIGTERM also when another of its ranks has died, and then no step will ever end here. It kills after
    its time is up, without a word on any node; so we say it, everywhere, a little earlier."""
    seconds = 0.8 * float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
    time.sleep(seconds)
    if _armed and not _agreed:
        _end_now(
            f"stopped: SIGTERM on {world.HOST}, and the step did not end within {seconds:.0f} s, so nothing was saved: another "
            "rank may be gone (see above), or TORCH_ELASTIC_SHUTDOWN_TIMEOUT must be longer. --resume goes on from the last "
            "checkpoint."
        )


def _ask(reason: str) -> None:
    global _reason
    _reason = reason
    # The store may be slow, and a second Ctrl-C must be heard meanwhile.
    threading.Thread(target=world.ask_all_to_stop, args=(reason,), daemon=True).start()


def _end_now(text: str, is_urgent: bool = False) -> None:
    telling = threading.Thread(target=world.first_failure, args=(text,), daemon=True)
    telling.start()
    telling.join(1)
    if world.RANK == 0 and world.store and not is_urgent:
        time.sleep(1.5)  # rank 0 may host the store, in which the others look for this word once a second
    if is_local_main():
        print(f"\n{text}", file=sys.stderr, flush=True)
    os._exit(world.exit_code(text))


@contextlib.contextmanager
def armed(cfg: TrainConfig) -> Iterator[None]:
    """In here a stop is agreed and saved; elsewhere a signal ends the rank at once, because there is nothing to save."""
    global _armed, _file
    _armed, _file = True, Path(cfg.output_dir) / "STOP"
    try:
        yield
    finally:
        _armed = False


def is_asked() -> bool:
    """Whether this rank, or another that it has heard of, was asked to stop."""
    global _looked
    if not _reason and _file and is_local_main() and time.monotonic() - _looked > 1:  # a look may cross the network
        _looked = time.monotonic()
        with contextlib.suppress(OSError):  # a network disk that does not answer for once
            if _file.exists():
                _ask(f"the file {_file} on {world.HOST}")
    return bool(_reason or world.stop_heard)


def all_know() -> None:
    """Every rank has come to the stop, and saves: however long that takes, nobody ends it early."""
    global _agreed
    _agreed = True


def reason() -> str:
    """What was asked first, the same on every rank. A collective."""
    reasons = world.gathered(_reason)
    return world.agreed(next((r for r in reasons if r), "--stop_after") if reasons else None)


def remove_file(output_dir: str) -> None:
    """One that is there before the run, or has been obeyed, would end the next one."""
    if is_local_main():
        with contextlib.suppress(OSError):
            (Path(output_dir) / "STOP").unlink()
