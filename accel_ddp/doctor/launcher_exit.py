"""Lets `accelerate launch` and torchrun return the exit code of the ranks. By themselves they return 1 for every failure.

A scheduler sees only the exit code of the launcher. With the code of the ranks it can tell a user's mistake (2), which must not be
started again, from a stop with a checkpoint (75), which can be continued.

After a mistake or a stop, the launchers also print for each rank that they end it, and a report that the script has FAILED. These
lines are left out, because the ranks have printed in a line or two why they end.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterable
from types import TracebackType

from accel_ddp import compat
from accel_ddp.errors import INTERRUPTED, STOPPED, USER_ERROR

EXPLAINED = (USER_ERROR, STOPPED, INTERRUPTED)
_NOT_LOGGED = (
    *(f"failed (exitcode: {code})" for code in (*EXPLAINED, -signal.SIGTERM)),
    "no error file defined for parent",  # for launchers inside of launchers
    "closing signal",
    "death signal, shutting down",
)


def return_exit_code_of_ranks() -> None:
    """Let this launcher end with the exit code of its ranks. An excepthook is enough: torch's own handling stays as it is."""
    hook_before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = _find_exit_code(error, trace)
        if not code:
            return hook_before(kind, error, trace)
        if not is_explained(error, code) or _hides_output(trace):
            # This is torch's report. The traceback of the launcher, which would hide it, is left out.
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(code)  # the interpreter uses the code of a SystemExit that an excepthook raises

    sys.excepthook = end
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(part in text for part in _NOT_LOGGED)


def _find_exit_code(error: BaseException, trace: TracebackType | None) -> int:
    """Return the exit code of the ranks if `error` was raised because they ended, and 0 otherwise or if a signal ended them."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return choose_exit_code(failure.exitcode for failure in failures)
    if isinstance(error, SignalException):  # sent to the launcher, which has forwarded the signal and waited for its ranks
        return choose_exit_code(_codes_of_ended_ranks(trace))
    return 0


def choose_exit_code(codes: Iterable[int | None]) -> int:
    """Return the first code of a rank that ended by itself. The launcher ends the remaining ranks with SIGTERM (-15)."""
    return next((code for code in codes if code is not None and code > 0), 0)


def is_explained(error: BaseException, code: int) -> bool:
    """Return whether the first rank of this node has printed why the ranks end, and no rank has ended for another reason."""
    failures = list(getattr(error, "failures", {}).values())
    if code not in EXPLAINED or any(one.exitcode not in (*EXPLAINED, -signal.SIGTERM) for one in failures):
        return False
    if not failures:  # a SignalException: the ranks have reported the stop
        return True
    return any(
        one.local_rank == 0 and os.path.isfile(one.error_file) for one in failures
    )  # it prints first, and then writes this


def _hides_output(trace: TracebackType | None) -> bool:
    """Return whether the output of some ranks is not shown, because of `--redirects` or `--local_ranks_filter` of torchrun."""
    while trace:
        if specs := getattr(trace.tb_frame.f_locals.get("config"), "logs_specs", None):
            return compat.hides_output(specs)
        trace = trace.tb_next
    return False


def _codes_of_ended_ranks(trace: TracebackType | None) -> list[int | None]:
    """Return the exit codes of the ranks of torch's agent, which is a local variable of a function in the traceback."""
    while trace:
        if codes := compat.exit_codes_of(trace.tb_frame.f_locals.get("agent")):
            return codes
        trace = trace.tb_next
    return []


def codes_of_agent() -> list[int | None]:
    """Return the exit codes of the ranks of the agent that calls this code."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if codes := compat.exit_codes_of(frame.f_locals.get("self")):
            return codes
    return []


def find_max_restarts() -> int:
    """Return `--max_restarts` of the launcher that calls this code, or 0. It may come from an environment variable too."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if isinstance(count := getattr(frame.f_locals.get("config"), "max_restarts", None), int):
            return count
    return 0
