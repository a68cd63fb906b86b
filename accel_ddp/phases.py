"""Where a rank is: its step and its phase, published to the monitor of its node, and the clock of a training.

`enter` and `phase` are the only calls. A transition writes to memory that the monitor reads, which takes about a microsecond.
Nothing is sent and no thread is involved, so a rank that holds the GIL for long still shows its phase and since when. Listeners
receive every transition too: the time breakdown (`engine.step_times`) and the ranges of a profile (`observe.recorder`).
"""

import contextlib
import mmap
import struct
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

# The parts into which the time of a step is divided. log.jsonl, the trackers and the report use these names.
PARTS = ("data", "forward", "backward", "optimizer", "other", "communication")
# The time belongs to no step; it belongs to the part of the phase before, which this phase interrupts.
NO_PART, SAME_PART = -1, -2
DEFAULT_USUAL = 60.0  # seconds that a phase usually takes at most, until LEARN_AFTER durations are known
LEARN_AFTER = 3


class Phase(IntEnum):
    """What a rank does. Inside of a step the order is the order in which a step enters them.

    `part` is the part of a step to which the time belongs. In a phase with `may_wait` a rank may wait for other ranks, so its own
    delay proves nothing. `usual` is the longest usual duration until one is learned: the first batch starts data workers, the first
    passes choose kernels; infinity means that there is none (downloads, compilation). `least` is the least usual duration of phases
    that run code of the user or wait for a disk. They are short most of the time, and long now and then.
    """

    part: int
    may_wait: bool
    usual: float
    least: float

    def __new__(cls, number: int, part: str = "", may_wait: bool = False, usual: float = DEFAULT_USUAL, least: float = 0.0):
        self = int.__new__(cls, number)
        self._value_ = number
        self.part = {"": NO_PART, "same": SAME_PART}[part] if part in ("", "same") else PARTS.index(part)
        self.may_wait, self.usual, self.least = may_wait, usual, least
        return self

    START = 0, "", False, float("inf")
    LOAD = 1, "", False, float("inf")
    COMPILE = 2, "same", False, float("inf")
    DATA = 3, "data", False, 120.0
    FORWARD = 4, "forward"
    BACKWARD = 5, "backward", True  # a sharded model gathers weights in it
    SYNC = 6, "communication", True  # waits for the sums of all ranks
    OPTIMIZER = 7, "optimizer", True  # the norm of sharded gradients needs all ranks
    DEVICE = 8, "other", True  # waits for numbers of the GPU
    CHECK = 9, "communication", True  # compares the weights of all ranks
    EVAL_DATA = 10, "", False, 5.0  # the first batch too is reported after 10 s
    EVALUATE = 11, "", False, 120.0
    METRICS = 12, "", False, DEFAULT_USUAL, 120.0
    SAVE = 13, "", False, DEFAULT_USUAL, 120.0
    HOOKS = 14, "same", False, DEFAULT_USUAL, 60.0
    WAIT = 15, "", True, float("inf")
    OTHER = 16, "other", False, DEFAULT_USUAL, 60.0  # also code of the user: a loop of its own, for example
    END = 17, "", False, float("inf")
    TOKENIZE = 18, "", False, float("inf")
    EXPORT = 19, "", False, float("inf")
    PROFILE = 20, "", False, float("inf")


(
    START, LOAD, COMPILE, DATA, FORWARD, BACKWARD, SYNC, OPTIMIZER, DEVICE, CHECK, EVAL_DATA, EVALUATE, METRICS, SAVE, HOOKS, WAIT,
    OTHER, END, TOKENIZE, EXPORT, PROFILE,
) = Phase  # fmt: skip
NAMES = tuple(phase.name.lower() for phase in Phase)
WAITING = tuple(phase for phase in Phase if phase.may_wait)
UNLIMITED = tuple(phase for phase in Phase if phase.usual == float("inf"))
LOADING = (DATA, EVAL_DATA)
LEAST = {phase: phase.least for phase in Phase if phase.least}
_OF_AN_UPDATE = (DATA, FORWARD, BACKWARD, SYNC, OPTIMIZER)

_UNUSUAL = 2  # the first durations of a phase are not usual ones: workers start, kernels are chosen, connections are opened
_WINDOW = 64  # steps after which the slowest duration of a phase is no longer recent

_NOW = struct.Struct("@qqqq")  # step, phase, start of the phase (ns of the monotonic clock), beats
_WRITER = struct.Struct("@q")  # since when a checkpoint is being written (ns); 0: none is
_TIMING = struct.Struct(f"@q{len(PARTS)}d")  # Timing
_SLOWEST = struct.Struct("@qdd")  # for each phase: completed durations, the slowest of this window, of the window before
_NOW_AT, _WRITER_AT, _TIMING_AT = 0, _NOW.size, _NOW.size + _WRITER.size
_SLOWEST_AT = _TIMING_AT + _TIMING.size
SIZE = _SLOWEST_AT + _SLOWEST.size * len(NAMES)

# How one rank spends a step, in seconds.
Split = NamedTuple("Split", [(part, float) for part in PARTS])
# The last step that is included, and the seconds since the first step of the process in each part. They are totals, so a reader may
# miss any number of steps. Evaluations and saves are not included.
Timing = NamedTuple("Timing", [("step", int), *((part, float) for part in PARTS)])
# Called at each transition with the part of the phase that ends, its seconds, and the phase that begins.
Listener = Callable[[int, float, Phase], None]


class Phases:
    """The step and the phase of one rank."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | bytearray = bytearray(SIZE)  # until `publish`: callers need not ask if there is a monitor
        self.step, self.phase, self.since, self.beats = 0, START, time.monotonic_ns(), 0
        self.progress = 0, 0  # of an evaluation: batches done, batches in total; only the panel of this process reads it
        self.listeners: list[Listener] = []
        self.part = NO_PART  # to which the time of the current phase belongs
        self._trained = 0.0  # seconds in phases that belong to a step
        self._window_began = 0
        self._error = 0, START  # the identity of the last exception, and the phase in which it was raised

    def publish(self, path: Path) -> None:
        """Write into this file from now on. It should be on a file system in memory."""
        with open(path, "wb+") as file:
            file.write(bytes(self.memory))
            file.flush()
            self.memory = mmap.mmap(file.fileno(), SIZE)
        self._write()

    def enter(self, phase: Phase) -> Phase:
        """End the current phase and begin another one. Return the phase that has ended."""
        ended = self.phase
        if ended is not phase:
            self._begin(phase, self.part if phase.part == SAME_PART else phase.part)
        return ended

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter a phase for the duration of a block, and return to the phase before it, however the block ends."""
        before, part = self.phase, self.part
        self.enter(phase)
        try:
            yield
        except BaseException as error:
            if self._error[0] != id(error):  # in the innermost block
                self._error = id(error), self.phase
            raise
        finally:
            if self.phase is not before:
                self._begin(before, part)

    def enter_phase_of(self, error: BaseException) -> None:
        """Enter the phase in which an exception was raised, for the report about it."""
        if self._error[0] == id(error):
            self.enter(self._error[1])

    def beat(self) -> None:
        """Report progress inside a long phase: the phase begins again."""
        self._begin(self.phase, self.part)

    def training_seconds(self) -> float:
        """Return the time of this process in steps. The clock stands still in evaluations, saves and other pauses."""
        return self._trained + ((time.monotonic_ns() - self.since) * 1e-9 if self.part >= 0 else 0.0)

    def _begin(self, phase: Phase, part: int) -> None:
        now = time.monotonic_ns()
        seconds = (now - self.since) * 1e-9
        at = _SLOWEST_AT + _SLOWEST.size * self.phase
        count, slowest, before = _SLOWEST.unpack_from(self.memory, at)
        is_slowest = seconds > slowest and count >= _UNUSUAL
        _SLOWEST.pack_into(self.memory, at, count + 1, seconds if is_slowest else slowest, before)
        ended, self.part = self.part, part
        if ended >= 0:
            self._trained += seconds
        self.phase, self.since, self.beats = phase, now, self.beats + 1
        _NOW.pack_into(self.memory, _NOW_AT, self.step, phase, now, self.beats)
        for listener in self.listeners:
            listener(ended, seconds, phase)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def advance(self, step: int) -> None:
        self.step = step
        if step - self._window_began >= _WINDOW:
            self._window_began = step
            for at in range(_SLOWEST_AT, SIZE, _SLOWEST.size):
                count, slowest, before = _SLOWEST.unpack_from(self.memory, at)
                # A phase that was not completed in this window, such as an evaluation, keeps what it has learned.
                _SLOWEST.pack_into(self.memory, at, count, 0.0, slowest or before)
        self._write()

    def report_writer(self, is_writing: bool) -> None:
        _WRITER.pack_into(self.memory, _WRITER_AT, time.monotonic_ns() if is_writing else 0)

    def report_timing(self, timing: Timing) -> None:
        _TIMING.pack_into(self.memory, _TIMING_AT, *timing)

    def _write(self) -> None:
        _NOW.pack_into(self.memory, _NOW_AT, self.step, self.phase, self.since, self.beats)


HERE = Phases()  # of this process
enter, phase = HERE.enter, HERE.within


def format_place(step: int, phase: int) -> str:
    """Return where a rank is that has done `step` updates, for example "at step 4, in backward"."""
    return f"at step {step_of(step, phase)}, in {NAMES[phase]}"


def step_of(step: int, phase: int) -> int:
    """Return the step a phase belongs to. During an update that is the step being computed, `step` + 1."""
    return step + (phase in _OF_AN_UPDATE)


class Reading(NamedTuple):
    """What the monitor reads about a rank. Times are seconds before the reading."""

    step: int
    phase: int
    age: float  # seconds in this phase
    beats: int
    normal: float | None  # the slowest recent duration of this phase; None: not learned yet
    writing: float  # seconds for which a checkpoint has been written; 0: none is written
    timing: Timing


def read(memory: mmap.mmap | bytes | bytearray) -> Reading:
    now = time.monotonic_ns()
    step, phase, since, beats = _NOW.unpack_from(memory, _NOW_AT)
    (writing,) = _WRITER.unpack_from(memory, _WRITER_AT)
    phase = phase if 0 <= phase < len(NAMES) else int(OTHER)
    count, slowest, before = _SLOWEST.unpack_from(memory, _SLOWEST_AT + _SLOWEST.size * phase)
    return Reading(
        step, phase, (now - since) * 1e-9, beats, max(slowest, before) if count >= LEARN_AFTER else None,
        (now - writing) * 1e-9 if writing else 0.0, Timing(*_TIMING.unpack_from(memory, _TIMING_AT)),
    )  # fmt: skip


def usual_seconds(phase: int, normals: list[float | None]) -> float:
    """Return how long this phase usually takes at most, from what the ranks have learned. Infinity: it has no usual duration."""
    known = Phase(phase)
    learned = [normal for normal in normals if normal is not None]
    return known.usual if known.usual == float("inf") else max(known.least, max(learned) if learned else known.usual)
