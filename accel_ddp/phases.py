"""The heartbeat of a rank: where it is and how long its phases take, in memory that the monitor of its node reads.

A rank only writes to memory, which takes about a microsecond. It does not send anything, and no thread of the rank is involved, so
that a rank that holds the GIL for long still has a heartbeat: it is in its phase, since a known time.
"""

import contextlib
import mmap
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The phases of a rank. A rank that is in none of them runs code of the user (a loop of its own, for example).
(
    START, LOAD, COMPILE, DATA, FORWARD, BACKWARD, OPTIMIZER, DEVICE, EVALUATE, METRICS, SAVE, HOOKS, WAIT, OTHER, END,
    TOKENISE, EXPORT, PROFILE,
) = range(18)  # fmt: skip
NAMES = (
    "start", "load", "compile", "data", "forward", "backward", "optimizer", "device", "evaluate", "metrics", "save", "hooks", "wait",
    "other", "end", "tokenise", "export", "profile",
)  # fmt: skip
# In these phases a rank may wait for other ranks, so that its own delay proves nothing.
WAITING = (BACKWARD, OPTIMIZER, DEVICE, WAIT)
# These have no usual duration: downloads, tokenisation, compilation, traces of a profile, and code of the user before and after
# the training.
UNLIMITED = (START, LOAD, COMPILE, WAIT, END, TOKENISE, EXPORT, PROFILE)
# The usual duration in seconds of a phase that has not been completed LEARN_AFTER times. The first batch starts data workers, the
# first passes choose kernels.
UNLEARNED = {DATA: 120.0, EVALUATE: 120.0}
UNLEARNED_OTHERWISE = 60.0
# The least usual duration of phases that run code of the user or wait for a disk. They are short most of the time, and long now and
# then: a tracker that tries again, a metric after the last batch, an upload.
LEAST = {METRICS: 120.0, SAVE: 120.0, HOOKS: 60.0, OTHER: 60.0}
LEARN_AFTER = 3

_UNUSUAL = 2  # the first durations of a phase are not usual ones: workers start, kernels are chosen, connections are opened
_WINDOW = 64  # steps after which the slowest duration of a phase is no longer recent

_NOW = struct.Struct("@qqqq")  # step, phase, start of the phase (ns of the monotonic clock), beats
_WRITER = struct.Struct("@q")  # since when a checkpoint is being written (ns); 0: none is
_TIMING = struct.Struct("@qdddddd")  # Timing
_SLOWEST = struct.Struct("@qdd")  # for each phase: completed durations, the slowest of this window, of the window before
_NOW_AT, _WRITER_AT, _TIMING_AT = 0, _NOW.size, _NOW.size + _WRITER.size
_SLOWEST_AT = _TIMING_AT + _TIMING.size
SIZE = _SLOWEST_AT + _SLOWEST.size * len(NAMES)


class Timing(NamedTuple):
    """How long a rank has needed since its first step: seconds in total, so that a reader may miss any number of steps.

    Evaluations and saves are not included.
    """

    step: int  # the last step that is included
    data: float  # waiting for the data loader
    forward: float
    backward: float
    optimizer: float
    other: float  # logging and hooks, between two steps
    communication: float  # waiting for other ranks and for the network; what overlaps with computation is not included


class Heartbeat:
    """Publishes the step and the phase of this rank."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | bytearray = bytearray(
            SIZE
        )  # until `publish`; with it, callers need not ask whether there is one
        self.step, self.phase, self.since, self.beats = 0, START, time.monotonic_ns(), 0
        self.progress = 0, 0  # of an evaluation: batches done, batches in total; only the panel of this process reads it
        self._window_began = 0
        self._error = 0, START  # the identity of the last exception, and the phase in which it was raised

    def publish(self, path: Path) -> None:
        """Write into this file from now on. It should be on a file system in memory."""
        with open(path, "wb+") as file:
            file.write(bytes(self.memory))
            file.flush()
            self.memory = mmap.mmap(file.fileno(), SIZE)
        self._write()

    def enter(self, phase: int) -> int:
        """End the current phase and begin another one. Return the phase that has ended."""
        ended = self.phase
        if ended != phase:
            self._begin(phase)
        return ended

    @contextlib.contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Enter a phase for the duration of a block, and the phase before it again at its end, however it ends."""
        before = self.enter(phase)
        try:
            yield
        except BaseException as error:
            if self._error[0] != id(error):  # in the innermost block
                self._error = id(error), self.phase
            raise
        finally:
            self.enter(before)

    def enter_phase_of(self, error: BaseException) -> None:
        """Enter the phase in which an exception was raised, for the report about it."""
        if self._error[0] == id(error):
            self.enter(self._error[1])

    def beat(self) -> None:
        """Report progress inside of a long phase: the phase begins again."""
        self._begin(self.phase)

    def _begin(self, phase: int) -> None:
        now = time.monotonic_ns()
        seconds = (now - self.since) * 1e-9
        at = _SLOWEST_AT + _SLOWEST.size * self.phase
        count, slowest, before = _SLOWEST.unpack_from(self.memory, at)
        is_slowest = seconds > slowest and count >= _UNUSUAL
        _SLOWEST.pack_into(self.memory, at, count + 1, seconds if is_slowest else slowest, before)
        self.phase, self.since, self.beats = phase, now, self.beats + 1
        _NOW.pack_into(self.memory, _NOW_AT, self.step, phase, now, self.beats)

    def advance(self, step: int) -> None:
        """Report that `step` updates are done."""
        self.step = step
        if step - self._window_began >= _WINDOW:
            self._window_began = step
            for at in range(_SLOWEST_AT, SIZE, _SLOWEST.size):
                count, slowest, before = _SLOWEST.unpack_from(self.memory, at)
                # A phase that was not completed in this window, such as an evaluation, keeps what it has learned.
                _SLOWEST.pack_into(self.memory, at, count, 0.0, slowest or before)
        self._write()

    def report_writer(self, is_writing: bool) -> None:
        """Report that a checkpoint is being written in the background, or that this has ended."""
        _WRITER.pack_into(self.memory, _WRITER_AT, time.monotonic_ns() if is_writing else 0)

    def report_timing(self, timing: Timing) -> None:
        _TIMING.pack_into(self.memory, _TIMING_AT, *timing)

    def _write(self) -> None:
        _NOW.pack_into(self.memory, _NOW_AT, self.step, self.phase, self.since, self.beats)


HERE = Heartbeat()  # of this process


def format_place(step: int, phase: int) -> str:
    """Return where a rank is that has done `step` updates, for example "at step 4, in backward"."""
    return f"at step {step_of(step, phase)}, in {NAMES[phase]}"


def step_of(step: int, phase: int) -> int:
    """Return the step to which a phase belongs, if `step` updates are done: that of an update is the next one."""
    return step + (phase in (DATA, FORWARD, BACKWARD, OPTIMIZER))


class Reading(NamedTuple):
    """What the monitor reads from a page. Times are seconds before the reading."""

    step: int
    phase: int
    age: float  # seconds in this phase
    beats: int
    normal: float | None  # the slowest recent duration of this phase; None: not learned yet
    writing: float  # seconds for which a checkpoint has been written; 0: none is written
    timing: Timing


def read(memory: mmap.mmap | bytes | bytearray) -> Reading:
    """Return the heartbeat in a page."""
    now = time.monotonic_ns()
    step, phase, since, beats = _NOW.unpack_from(memory, _NOW_AT)
    (writing,) = _WRITER.unpack_from(memory, _WRITER_AT)
    phase = phase if 0 <= phase < len(NAMES) else OTHER
    count, slowest, before = _SLOWEST.unpack_from(memory, _SLOWEST_AT + _SLOWEST.size * phase)
    return Reading(
        step, phase, (now - since) * 1e-9, beats, max(slowest, before) if count >= LEARN_AFTER else None,
        (now - writing) * 1e-9 if writing else 0.0, Timing(*_TIMING.unpack_from(memory, _TIMING_AT)),
    )  # fmt: skip


def usual_seconds(phase: int, normals: list[float | None]) -> float:
    """Return how long this phase usually takes at most, from what the ranks have learned. Infinity: it has no usual duration."""
    if phase in UNLIMITED:
        return float("inf")
    learned = [normal for normal in normals if normal is not None]
    return max(LEAST.get(phase, 0.0), max(learned) if learned else UNLEARNED.get(phase, UNLEARNED_OTHERWISE))
