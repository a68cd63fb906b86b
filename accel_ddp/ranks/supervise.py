"""The end of a recipe's `main`: messages on every node and an exit code on every rank."""

import atexit
import contextlib
import errno
import multiprocessing.util
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.phases import UNLIMITED, format_place
from accel_ddp.ranks import signals
from accel_ddp.ranks.failures import Diverged, Failure, Stopped, write_error_file
from accel_ddp.ranks.process import Exit, Moment, begin_again, ending, links, this_rank
from accel_ddp.ranks.reporting import record, report_failure, wait_for_failure
from accel_ddp.records.incidents import ERROR, INFO
from accel_ddp.text import first_line
from accel_ddp.watch.restart_files import launcher_pid, write_outcome

LEAVE_SECONDS = 1.0  # between the first and the last rank, if all call sys.exit(0) at the same place
MAX_TRACEBACK = 4000  # characters, for the output of the other nodes
# Texts of errors
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "NCCL error")
OUT_OF_MEMORY = ("can't allocate memory", "CUDA out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def supervise(main: Callable[[Any], Any], cfg: TrainConfig) -> int:
    """Run `main(cfg)`, print what went wrong if anything did, and return the exit code."""
    ending.supervised_pid = os.getpid()
    signals.listen(cfg)
    try:
        try:
            main(cfg)
        except SystemExit as exit:
            if exit.code or not _leaves_with_others():
                raise
        return _finish(exits=True)
    except (Exception, SystemExit) as error:
        return _fail(error, cfg)


def supervise_program(cfg: TrainConfig) -> None:
    """Let a program that calls `start` without `run` end as one that uses `run`. Its signal handlers stay as they are.

    Otherwise the other ranks would take a rank that has returned normally for a dead one, and would wait for one that has raised.
    """
    if ending.is_supervised:
        return
    ending.supervised_pid = os.getpid()
    is_child = multiprocessing.parent_process() is not None  # of `notebook_launcher`: it runs no atexit and no excepthook
    own_pid, hook_before = os.getpid(), sys.excepthook  # a child process inherits both handlers and must not use them

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive  # its user types on after an exception
        if os.getpid() != own_pid or (is_interactive and this_rank.num_ranks == 1):
            return hook_before(kind, error, trace)
        # torch calls this function from a hook of its own, which prints our text after we have returned.
        with contextlib.redirect_stderr(sys.__stderr__):
            _exit(_fail(error, cfg))

    def finish() -> None:
        if os.getpid() != own_pid:
            return
        try:
            raised = sys.exc_info()[1] if is_child else None
            if isinstance(raised, SystemExit):  # torch has stored an error, and exits
                raised = raised.__context__ if raised.code else None
            if isinstance(raised, Exception):
                raise raised
            if ending.early_exit and (ending.early_exit.code or not _leaves_with_others()):
                raise ending.early_exit
            code = _finish(exits=False)  # after `fit`, the program may have called sys.exit with a code that cannot be read here
        except (Exception, SystemExit) as error:
            code = _fail(error, cfg)
        if code:
            _exit(code)

    if is_child:
        # The signals of a rank are not the notebook's. A single process, for example of a `Pool`, ends at SIGTERM as before.
        if this_rank.num_ranks > 1 and threading.current_thread() is threading.main_thread():
            signals.listen(cfg)
        multiprocessing.util.Finalize(None, finish, exitpriority=100)
        return
    sys.excepthook = fail
    atexit.register(finish)


def forget_run() -> None:
    """Close what a run has left open in a notebook: its monitor, its trackers and the lock of its folder."""
    for moment in (Moment.MESSAGES, Moment.SAVE, Moment.TRACKERS):
        ending.run(moment, Exit.STOPPED)
    links.incidents.close(1)
    for opened in (links.monitor, ending.run_folder_lock):
        if opened:
            opened.close()
    pid = ending.supervised_pid
    begin_again()
    ending.supervised_pid = pid  # its handlers stay


def _exit(code: int) -> None:
    """Exit at once. An interpreter that shuts down may wait for ranks that are gone."""
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def _leaves_with_others() -> bool:
    """Return whether a rank may leave with code 0: after `fit`, or if every rank leaves it at about the same time."""
    return not ending.early_exit or not links.store or _all_arrive("left", LEAVE_SECONDS)


def _all_arrive(place: str, seconds: float) -> bool:
    """Return whether all ranks get here within some seconds. The store answers when the last one does, so no rank polls it."""
    if links.store.add(place, 1) == this_rank.num_ranks:
        links.store.set(f"{place}/all", "")
    try:
        links.store.wait([f"{place}/all"], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True


def _finish(exits: bool) -> int:
    """Close the connections of a rank whose program is complete. Return the exit code."""
    ending.run(Moment.MESSAGES)
    if ending.unsaved:
        return _leave(report_failure(Failure("unsaved", ending.unsaved)))
    links.incidents.close(1)
    if links.store:
        # Without `run`, ranks may end long after each other, and rank 0, which may host the store, does not wait for all.
        with contextlib.nullcontext() if exits else contextlib.suppress(Exception):
            # A rank that ended earlier would interrupt the last collective of the others, and a launcher waits 300 s for a node that
            # failed at the end.
            links.store.set(f"finished/{this_rank.rank}", "")
            _all_arrive("done", 60)
            if this_rank.is_main:
                time.sleep(0.2)  # rank 0 may host the store, which the other ranks have just read
    ending.is_leaving.set()
    link, links.monitor = links.monitor, None
    if link:
        link.close()  # the monitor then does not take the end of this rank for a failure
    if dist.is_initialized():  # torchrun opens a process group for a single rank too
        dist.destroy_process_group()
    links.slow_group = None  # this ends its threads, which would otherwise run while the interpreter ends
    ending.run(Moment.TRACKERS)
    return 0


def _fail(error: BaseException, cfg: TrainConfig) -> int:
    """Print what went wrong, store it for the other ranks, and return the exit code."""
    with contextlib.suppress(ValueError):  # in another thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a data worker that ends now would raise an error of torch in here
    ending.run(Moment.MESSAGES, Exit.FAILED)
    phases.HERE.enter_phase_of(error)
    if isinstance(error, (Stopped, Diverged)):
        return _leave(report_failure(error.failure if isinstance(error, Stopped) else _with_unsaved(error.failure)))
    if isinstance(error, SystemExit):  # raised by the user's own code
        code = (isinstance(error.code, int) and error.code % 256) or 1
        text = f"RANK_FAILED: {_this_rank()} called sys.exit({error.code!r}){_where()}."
        if not error.code:
            text = f"RANK_FAILED: {_this_rank()} left{_where()}, with code 0, before the run was complete. Look for sys.exit."
        return _leave(report_failure(Failure("failed", text, code=code)))
    if isinstance(error, KeyboardInterrupt):  # only in a program without `run`
        return _leave(report_failure(Failure("interrupted", f"received Ctrl-C on {this_rank.host}. Every rank exits now.")))
    if isinstance(error, UserError):
        text = str(error).rpartition("UserError: ")[2].strip()  # a DataLoader puts the traceback of its worker before it
        return _leave(report_failure(_with_unsaved(Failure("error", text))))
    return _leave(_with_unsaved(_diagnose(error, cfg)))


def _this_rank() -> str:
    return f"rank {this_rank.rank} ({this_rank.host}, pid {os.getpid()})"


def _where() -> str:
    heartbeat = phases.HERE
    return "" if heartbeat.phase in UNLIMITED else f" {format_place(heartbeat.step, heartbeat.phase)}"


def _with_unsaved(failure: Failure) -> Failure:
    """Return the failure together with the reason why the last checkpoint is missing, if it is."""
    return Failure("unsaved", f"{ending.unsaved} Another error followed: {failure.text}") if ending.unsaved else failure


def _diagnose(error: BaseException, cfg: TrainConfig) -> Failure:
    """Return the first failure of the run: another rank's, or the one that `error` describes."""
    is_lost = isinstance(error, dist.DistNetworkError) or (isinstance(error, RuntimeError) and _mentions(error, LOST))
    if is_lost:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by the launcher because of the dead rank
        # The monitors name the rank that is at fault. A rank that hangs is reported and ended by them too.
        seconds = max(2 * cfg.hang_report_seconds, cfg.hang_abort_seconds) + 10 if this_rank.num_ranks > 1 else 0
        if failure := wait_for_failure(3) or _find_finished_rank() or wait_for_failure(seconds):
            return report_failure(failure)
        text = (
            f"a connection between ranks broke{_where()}, as seen by {_this_rank()}, but no rank or node was found to be at fault. "
            f"Check the network with `accel-ddp doctor`. ({type(error).__name__}: {first_line(error)})"
        )
        return report_failure(Failure("died", f"LINK_LOST: {text}"), is_secondary=True)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _mentions(error, OUT_OF_MEMORY):
        kind, micro = (
            ("tokens", cfg.micro_batch_tokens) if cfg.micro_batch_tokens else ("size", cfg.split(this_rank.num_ranks)[0])
        )
        advice = "--gradient_checkpointing"
        if micro > 1:
            advice = f"--micro_batch_{kind} {micro // 2} (the items of a step stay the same), or --gradient_checkpointing"
        text = (
            f"{_this_rank()} is out of memory{_where()} with --micro_batch_{kind} {micro}. Use {advice}, --mixed_precision bf16, or "
            f"shorter items; in an evaluation a smaller --eval_batch_size. ({first_line(error)})"
        )
        return report_failure(Failure("error", text))
    if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE) or _mentions(error, ("Too many open files",)):
        text = (
            f"{_this_rank()} has too many open files and connections{_where()}: {first_line(error)}. The limit is "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}. Raise it (`ulimit -Hn 65536` as root), or use fewer --num_workers. If "
            "strangers connect to its ports (`ss -tnp` shows it), close them with a firewall (SECURITY.md)."
        )
        return report_failure(Failure("failed", f"RANK_FAILED: {text}"))
    lines = "".join(traceback.format_exception(error)).rstrip()
    text = f"RANK_FAILED: {_this_rank()} failed{_where()}: {type(error).__name__}: {error}\n{lines[-MAX_TRACEBACK:]}"
    # An error of a collective may be the consequence of the failure of another rank.
    is_secondary = isinstance(error, dist.DistError) or _mentions(error, ("gloo", "NCCL", "nccl", "ProcessGroup"))
    return report_failure(Failure("failed", text), is_secondary=is_secondary)


def _find_finished_rank() -> Failure | None:
    """Return the failure of a connection to a rank whose program has ended normally, or None if there is no such rank."""
    with contextlib.suppress(Exception):  # the store may be lost with its host
        for rank in range(this_rank.num_ranks if links.store else 0):
            if links.store.check([f"finished/{rank}"]):
                return Failure(
                    "failed",
                    f"RANK_FAILED: {_this_rank()} still waited for rank {rank}, whose program has exited without an error. "
                    "Every rank must do the same updates and evaluations. Look for a return or an exit on some ranks only.",
                )
    return None


def _leave(failure: Failure) -> int:
    """Print the failure if no monitor has printed it, and write it for the launcher's report. Return the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's answer to the end of another rank; this one ends soon
    ending.is_leaving.set()
    is_first = write_outcome(launcher_pid(), failure.as_outcome())  # after most failures, the monitor has written it already
    is_printed = ending.failure is not None
    if links.monitor is None and not is_printed and this_rank.is_main:  # otherwise the monitor stores it
        record(str(failure), failure.kind.upper(), INFO if failure.is_signal else ERROR, failure.step)
        links.incidents.close(1)
    # Before `start`, no monitor collects the failures of a node, and the launcher may end its first rank before that prints its own.
    if not is_printed and (this_rank.is_local_main or (is_first and links.monitor is None and launcher_pid())):
        print(failure, file=sys.stderr, flush=True)
    write_error_file(str(failure))
    ending.run(Moment.SAVE, Exit.FAILED)
    ending.run(Moment.TRACKERS, Exit.FAILED)
    return failure.exit_code


def _mentions(error: BaseException, parts: tuple[str, ...]) -> bool:
    return any(part in str(error) for part in parts)
