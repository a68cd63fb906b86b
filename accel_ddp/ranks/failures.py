"""How a rank ends: the kinds of failures, their messages and their exit codes."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR


class Failure(NamedTuple):
    """Why a rank ends before its time. The first failure of a run is stored for all ranks, and every rank prints it."""

    kind: str  # error: a user's mistake; unsaved; stopped; interrupted; died: without an error message; failed: an exception
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.kind in ('died', 'failed') else self.kind}: {self.text}"

    @property
    def is_signal(self) -> bool:
        """Return whether a signal ended a rank. The main rank of each node then prints it, shortly before it ends."""
        return self.kind in ("stopped", "interrupted")

    @property
    def exit_code(self) -> int:
        return {"error": USER_ERROR, "unsaved": UNSAVED, "stopped": STOPPED, "interrupted": INTERRUPTED}.get(self.kind, 1)

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, stored: bytes) -> "Failure":
        return cls(*json.loads(stored))


class Stopped(Exception):
    """The run was asked to stop before its last step, and every rank stopped after the same step with a checkpoint."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class EvaluationStopped(Exception):
    """An evaluation was interrupted on every rank because the run was asked to stop."""


def write_error_file(text: str) -> None:
    """Let torchrun print `text` as the root cause. Without this file torchrun reports no reason."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            Path(file).write_text(json.dumps({"message": message}))
