"""How a rank ends: the kinds of failures, their messages and their exit codes."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR
from accel_ddp.records.redaction import redact

LAUNCHER_DIED = "LAUNCHER_DIED"  # the beginning of the reason of a stop that nobody has asked for

MAX_TEXT = 20_000  # characters of a failure


class Failure(NamedTuple):
    """Why a rank ends before its time. The first failure of a run is stored for all ranks, and every rank prints it."""

    kind: str  # error: a user's mistake; unsaved; stopped; interrupted; died: found by the monitors; failed: an exception
    text: str
    step: int = -1  # -1: not known
    rank: int = -1
    host: str = ""
    code: int = 0  # the exit code that the program has chosen; 0: the usual one of the kind

    def __str__(self) -> str:
        return f"{'error' if self.kind in ('died', 'failed') else self.kind}: {self.text}"

    @property
    def is_signal(self) -> bool:
        """Return whether a signal ended a rank. The main rank of each node then prints it, shortly before it ends."""
        return self.kind in ("stopped", "interrupted")

    @property
    def exit_code(self) -> int:
        codes = {"error": USER_ERROR, "unsaved": UNSAVED, "stopped": STOPPED, "interrupted": INTERRUPTED}
        return self.code or codes.get(self.kind, 1)

    def as_message(self) -> dict[str, Any]:
        """Return what the monitors need to know. Other nodes print the beginning and the end of a long text."""
        text = self.text
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT // 2]}\n... (shortened)\n{text[-MAX_TEXT // 2 :]}"
        short = self._replace(text=redact(text))
        return {**short._asdict(), "line": str(short), "exit_code": self.exit_code}

    def as_outcome(self) -> dict[str, Any]:
        """Return what the launcher needs to know to decide whether it starts the ranks again. See `watch.restart_files`."""
        step = None if self.step < 0 else self.step
        return {**self._asdict(), "text": redact(str(self)), "step": step, "exit_code": self.exit_code, "time": time.time()}


class Stopped(Exception):
    """The run was asked to stop before its last step, and every rank stopped after the same step with a checkpoint."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class Diverged(Exception):
    """The parameters of ranks are no longer equal. Every rank raises it with the same failure."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class EvaluationStopped(Exception):
    """An evaluation was interrupted on every rank because the run was asked to stop."""


def write_error_file(text: str) -> None:
    """Let torchrun print `text` as the root cause. Without this file torchrun reports no reason."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = redact(text)
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            Path(file).write_text(json.dumps({"message": message}))
