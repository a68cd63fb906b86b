"""Runs a recipe's `main` and turns its end into messages on every node and an exit code on every rank."""

import atexit
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks import signals
from accel_ddp.ranks.failures import Failure, Stopped, write_error_file
from accel_ddp.ranks.liveness import find_dead_rank, is_first_on_node, store_failure
from accel_ddp.ranks.process import process


def supervise(main: Callable[[Any], Any], cfg: TrainConfig) -> int:
    """Run `main(cfg)`, print what went wrong if anything did, and return the exit code."""
    process.is_supervised = True
    signals.listen(cfg)
    try:
        try:
            main(cfg)
        except SystemExit as exit:
            if exit.code:
                raise
        return _finish(exits=True)
    except (Exception, SystemExit) as error:
        return _fail(error, cfg)


def supervise_program(cfg: TrainConfig) -> None:
    """Let a program that calls `start` without `run` end as one that uses `run`. Its signal handlers stay as they are.

    Otherwise the other ranks would take a rank that has returned normally for a dead one, and would wait for one that has raised.
    """
    if process.is_supervised:
        return
    process.is_supervised = True
    own_pid, hook_before = os.getpid(), sys.excepthook  # a child process inherits both handlers and must not use them

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive  # its user types on after an exception
        if os.getpid() != own_pid or (is_interactive and process.num_ranks == 1):
            return hook_before(kind, error, trace)
        # torch calls this function from a hook of its own, which prints our text after we have returned.
        with contextlib.redirect_stderr(sys.__stderr__):
            _exit(_fail(error, cfg))

    def finish() -> None:
        if os.getpid() != own_pid:
            return
        try:
            code = _finish(exits=False)  # the program may have called sys.exit with a code that cannot be read here
        except Exception as error:
            code = _fail(error, cfg)
        if code:
            _exit(code)

    sys.excepthook = fail
    atexit.register(finish)


def _exit(code: int) -> None:
    """Exit at once. An interpreter that shuts down may wait for ranks that are gone."""
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def _finish(exits: bool) -> int:
    """Close the connections of a rank whose program is complete. Return the exit code, or exit if a rank that runs on delays it."""
    if process.unsaved:
        return _leave(Failure("unsaved", process.unsaved))
    if process.store:
        # Without `run`, ranks may end long after each other, and rank 0, which may host the store, does not wait for all.
        with contextlib.nullcontext() if exits else contextlib.suppress(Exception):
            _wait_for_last_collectives()
        if not process.close_watch():
            if exits:
                _exit(0)
            return 0
    if dist.is_initialized():  # torchrun opens a process group for a single rank too
        dist.destroy_process_group()
    return 0


def _fail(error: BaseException, cfg: TrainConfig) -> int:
    """Print what went wrong, store it for the other ranks, and return the exit code."""
    if isinstance(error, Stopped):
        return _leave(error.failure)
    if isinstance(error, SystemExit):  # raised by the user's own code
        text = f"rank {process.rank} on {process.host} called sys.exit({error.code!r})."
        _leave(store_failure(Failure("failed", text)))
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):  # only in a program without `run`
        return _leave(store_failure(Failure("interrupted", f"received Ctrl-C on {process.host}. Every rank ends now.")))
    if isinstance(error, UserError):
        text = str(error).rpartition("UserError: ")[2].strip()  # a DataLoader puts the traceback of its worker before it
        failure = _with_unsaved(Failure("error", text))
        store_failure(failure)
        return _leave(failure)
    return _leave(_with_unsaved(_diagnose(error, cfg)))


def _with_unsaved(failure: Failure) -> Failure:
    """Return the failure together with the reason why the last checkpoint is missing, if it is."""
    return Failure("unsaved", f"{process.unsaved} Another error followed: {failure.text}") if process.unsaved else failure


def _diagnose(error: BaseException, cfg: TrainConfig) -> Failure:
    """Return the first failure of the run: that of another rank, or the one that `error` describes."""
    if _is_lost_connection(error):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by the launcher because of the dead rank
        if dead := find_dead_rank() or _find_finished_rank():
            return store_failure(dead)
    if _is_out_of_memory(error):
        micro = cfg.split(process.num_ranks)[0]
        advice = "--gradient_checkpointing"
        if micro > 1:
            advice = f"--micro_batch_size {micro // 2} (--global_batch_size stays the same), or --gradient_checkpointing"
        return store_failure(
            Failure(
                "error",
                f"rank {process.rank} on {process.host} is out of memory with --micro_batch_size {micro}. Use {advice}, "
                f"--mixed_precision bf16, or shorter items; in an evaluation a smaller --eval_batch_size. ({_first_line(error)})",
            )
        )
    failure = Failure("failed", f"rank {process.rank} on {process.host} failed: {type(error).__name__}: {error}")
    first = store_failure(failure)
    if first == failure:
        traceback.print_exception(error)
    return first


def _find_finished_rank() -> Failure | None:
    """Return the failure of a connection to a rank whose program has ended normally, or None if there is no such rank."""
    with contextlib.suppress(Exception):  # the store may be lost with its host
        for rank in range(process.num_ranks if process.store else 0):
            if process.store.check([f"finished/{rank}"]):
                return Failure(
                    "failed",
                    f"rank {process.rank} on {process.host} still waited for rank {rank}, whose program has ended without an error. "
                    "Every rank must do the same updates and evaluations. Look for a return or an exit on some ranks only.",
                )
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)  # a MemoryError has no text


def _wait_for_last_collectives() -> None:
    """Wait until every rank has finished its last collective.

    A rank that ended earlier would interrupt it on the other ranks, and a launcher waits 300 s for a node that failed at the
    end.
    """
    process.store.set(f"finished/{process.rank}", "")
    process.store.add("done", 1)
    deadline = time.monotonic() + 60
    while process.store.add("done", 0) < process.num_ranks and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.is_main:
        time.sleep(0.2)  # rank 0 may host the store, which the other ranks have just read


def _leave(failure: Failure) -> int:
    """Print the failure once per node, write it for the launcher's report, and wait for the other ranks. Return the exit code.

    The launcher ends all ranks as soon as one of them ends. Ranks that are about to end with the same failure get a moment.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's answer to the end of another rank; this one ends soon
    process.is_leaving.set()
    text = str(failure)
    # If the listener received this failure, that was some time ago, and the store may be lost by now. The listener has printed it.
    is_received = failure == process.failure
    store = None if is_received else process.store
    try:
        is_first = failure.is_signal and process.is_local_main if is_received else is_first_on_node(text)
    except Exception:  # the store is lost with its host; printing twice is better than not at all
        is_first, store = True, None
    if is_first:
        print(text, file=sys.stderr, flush=True)
    write_error_file(text)
    process.complete_save()
    with contextlib.suppress(Exception):
        deadline = time.monotonic() + (2 if failure.kind == "died" else 5)
        leaving = store.add("leaving", 1) if store else process.num_ranks
        while leaving < process.num_ranks and time.monotonic() < deadline:
            time.sleep(0.05)
            leaving = store.add("leaving", 0)
        if process.is_main and process.num_ranks > 1:
            time.sleep(0.3)  # rank 0 may host the store, which the other ranks have just read
    return failure.exit_code


def _is_lost_connection(error: BaseException) -> bool:
    parts = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "NCCL error")
    return isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in parts)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    parts = ("can't allocate memory", "CUDA out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(part in str(error) for part in parts)
