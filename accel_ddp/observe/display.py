"""The live panel of the main rank, below the lines that the processes print. A terminal that is not read never blocks the caller.

`start` opens the panel, and it is closed when the process ends, however it ends.
"""

import contextlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.nodes.terminal import BEGIN_FRAME, END_FRAME, ERASE_BELOW, SharedStream, can_draw
from accel_ddp.observe.progress import Renderer, State, shows_unicode
from accel_ddp.ranks.process import Moment, ending, links, this_rank
from accel_ddp.records.redaction import redact

_MOST_WAITING = 1 << 20  # bytes that a terminal has not taken yet
_DROPPED = b"\n(some output is missing here, because the terminal did not take it in time)\n"
_INDEX, _SAVE, _RESTORE, _ERASE_LINE = "\x1bD", "\x1b7", "\x1b8", "\x1b[K"
# Sequences that move the cursor or erase. Colors end with `m` and stay.
_MOVES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|[78DEM])")
# What tqdm writes: "Map:  45%|####5     | 900/2000 [00:01<00:02, 640.54 examples/s]" or "12it [00:01, 9.8it/s]".
_TQDM = re.compile(r"\d+%\||\d\S* \[\d\d:\d\d")


class Terminal:
    """A terminal with a panel of some rows below the cursor. All methods can be called from any thread.

    A terminal can be opened for writing without waiting, so a text appears before `print` returns, in the order of what other
    processes print. A `BackgroundWriter` would print it later, and could not drop frames that are no longer needed.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8"):
        """Open the terminal again. Each call of `open` has flags of its own, so other writers still wait as they expect."""
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.descriptor = os.open(os.ttyname(descriptor), flags)
        except OSError:  # a terminal without a name, as in some containers
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        self.encoding = encoding
        self.bar = ""  # the progress bar of a library, which the panel shows
        self.pid = os.getpid()
        self.lock = threading.RLock()  # a signal handler may print while its own thread prints
        self._frame = b""
        self._waiting = bytearray()

    def size(self) -> tuple[int, int]:
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self.descriptor)
            if columns and lines:
                return columns, lines
        return 80, 24

    def draw(self, rows: Sequence[str]) -> None:
        """Show these rows below the cursor, instead of those before. Without rows, the panel disappears."""
        text = ""
        if rows:
            # Moving down by `index` keeps the column and scrolls if necessary. Then there is room, and the saved place stays valid.
            room = f"{_ERASE_LINE}{_INDEX * len(rows)}\x1b[{len(rows)}A{_SAVE}"
            text = room + "".join(f"\r\n{row}\x1b[0m{_ERASE_LINE}" for row in rows) + ERASE_BELOW + _RESTORE
        frame = f"{BEGIN_FRAME}{text or ERASE_BELOW}{END_FRAME}".encode(self.encoding, "replace")
        with self.lock:
            self._frame = frame if rows else b""
            if self._drain():  # a frame that cannot be shown now is not needed later
                self._waiting += frame
                self._drain()

    def print(self, text: str) -> None:
        """Print a text above the panel. A line may be printed in several parts."""
        if not text:
            return
        with self.lock:
            is_read = self._drain()
            self._waiting += (ERASE_BELOW + _MOVES.sub("", text)).encode(self.encoding, "replace")
            if is_read:  # otherwise the next frame follows when the terminal takes it
                self._waiting += self._frame
                self._drain()
            elif len(self._waiting) > _MOST_WAITING:
                self._drop_middle()

    def write_stream(self, text: str) -> None:
        """Print what a program has written to its stdout or stderr. A progress bar becomes `bar` instead of a line."""
        with self.lock:
            if text.startswith("\r") and "\n" not in text:
                self.bar = next((part.strip() for part in reversed(_MOVES.sub("", text).split("\r")) if part.strip()), "")
            elif self.bar and not _MOVES.sub("", text).strip():
                bar, self.bar = self.bar, self.bar if "\n" not in text else ""
                if "\n" in text and not _TQDM.search(bar):  # the last state of a line that the program itself has updated
                    self.print(f"{bar}\n")
            else:
                self.print(text)

    def flush(self, seconds: float = 0.0) -> bool:
        """Wait until the terminal has taken everything, at most `seconds`. Return whether it has."""
        deadline = time.monotonic() + seconds
        while not self._drain():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(OSError, ValueError):
                select.select([], [self.descriptor], [], min(left, 0.1))
        return True

    def close(self, seconds: float) -> None:
        """Remove the panel, and wait at most `seconds` until the terminal has taken everything."""
        self.draw([])
        self.flush(seconds)
        with self.lock:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _drop_middle(self) -> None:
        """Keep the oldest and the newest lines of what is waiting: the beginning of an error, and the end of the run."""
        end = self._waiting.find(b"\n", _MOST_WAITING // 4) + 1
        begin = self._waiting.rfind(b"\n", 0, -_MOST_WAITING // 4) + 1
        if end < begin:
            self._waiting[end:begin] = _DROPPED

    def _drain(self) -> bool:
        """Write what is waiting, as far as the terminal takes it. Return whether nothing is left."""
        with self.lock:
            try:
                while self._waiting:
                    del self._waiting[: os.write(self.descriptor, bytes(self._waiting[: 1 << 16]))]
            except BlockingIOError:
                return False
            except OSError:  # the terminal is gone, or closed
                self._waiting.clear()
            return True


class TerminalStream:
    """Replaces stdout or stderr while there is a panel. As in Python's own, a text appears when its line ends or at `flush`.

    A data worker, which is forked, writes to the stream itself.
    """

    def __init__(self, terminal: Terminal, stream: Any):
        self.terminal, self.stream, self.is_open, self._line = terminal, stream, True, ""

    @property
    def _is_used(self) -> bool:
        return self.is_open and os.getpid() == self.terminal.pid

    def write(self, text: str) -> int:
        if self._is_used:
            with self.terminal.lock:
                self._line += text
                if "\n" in text or "\r" in text:
                    self.flush()
        else:
            self.stream.write(ERASE_BELOW + text if self.is_open and text != "\n" else text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._is_used:
            return self.stream.flush()
        with self.terminal.lock:
            text, self._line = self._line, ""
            self.terminal.write_stream(redact(text))
        self.stream.flush()  # what was written to its `buffer`

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# ---- the panel

_SOONEST, _LATEST = 0.25, 2.0  # seconds between two frames
CLOSE_SECONDS = 10.0, 2.0, 2.0  # for a terminal that takes no output, after a run that is finished, stopped or failed
_SHARE = 0.002  # of the time of one processor core that the frames may use; it determines how often they are drawn


def share_terminal(cfg: TrainConfig) -> None:
    """Show the panel if this is the main rank and it has a terminal. Let other ranks print beside it.

    A notebook has no terminal, and neither has a pipe. In these, in an interactive Python, and where CI is set, lines are printed.
    """
    if display := ending.find(Moment.MESSAGES):
        display.begin(cfg)
    elif _is_one_terminal():
        if not this_rank.is_main:
            if links.node == 0 and not isinstance(sys.stdout, SharedStream):
                sys.stdout, sys.stderr = SharedStream(sys.stdout), SharedStream(sys.stderr)
        elif is_wanted():
            with contextlib.suppress(OSError):  # the terminal belongs to another user, for example after `su`
                display = Display(cfg)
                ending.add(Moment.MESSAGES, display, display.close, CLOSE_SECONDS)


def _is_one_terminal() -> bool:
    try:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        # The streams of a notebook may have the descriptor of the terminal in which Jupyter was started.
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            return False
        return can_draw(out) and can_draw(err) and os.path.samestat(os.fstat(out), os.fstat(err))
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something without a descriptor, as in notebooks
        return False


def is_wanted() -> bool:
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    is_ci = any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "TF_BUILD", "TEAMCITY_VERSION"))
    return _is_one_terminal() and not is_interactive and not is_ci


class Display:
    """Draws the panel from a thread, and prints the output of this process above it.

    A frame takes 0.7 ms of CPU time on a slow core, and the time between frames grows with it: measured, the thread uses 2 ms of CPU
    time per second, which is 0.2 % of one core. The training thread only stores references, which takes 1 microsecond per step, and
    40 microseconds for each line that it prints. Neither thread ever waits for the terminal.
    """

    def __init__(self, cfg: TrainConfig):
        encoding = sys.stderr.encoding or "utf-8"
        self.terminal = Terminal(sys.stderr.fileno(), encoding)
        self.renderer = Renderer(encoding if shows_unicode(encoding) else "ascii")
        self.begin(cfg)
        self._closing = threading.Lock()
        self._stop = threading.Event()
        self._streams = [TerminalStream(self.terminal, stream) for stream in (sys.stdout, sys.stderr)]
        self._handlers = _handlers_of(sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._handlers:
            handler.setStream(self._streams[stream is self._streams[1].stream])
        self.thread = threading.Thread(target=self._draw_frames, name="panel", daemon=True)
        self.thread.start()

    def begin(self, cfg: TrainConfig) -> None:
        self.state = State(cfg.output_dir)

    def finish(self, phase: str) -> None:
        """Print the panel as lines that stay. From now on it shows only the phase."""
        before = self.state
        before.phase, before.bar = phase, ""
        self.terminal.print("".join(f"{row}\n" for row in self._rows(before)))
        self.state = State(before.title, before.opened)

    def close(self, seconds: float) -> None:
        """Remove the panel and restore the streams. Wait at most `seconds` for a terminal that takes no output."""
        with self._closing:
            if self._stop.is_set() or os.getpid() != self.terminal.pid:
                return
            self._stop.set()
        ending.remove(self)
        if threading.current_thread() is not self.thread:
            self.thread.join(1)
        for handler, stream in self._handlers:
            handler.setStream(stream)
        for stream in self._streams:
            stream.flush()
            stream.is_open = False  # it writes to the stream itself from now on
        for name, stream in zip(("stdout", "stderr"), self._streams):
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        self.terminal.close(seconds)

    def _draw_frames(self) -> None:
        seconds = 0.0
        while not self._stop.wait(seconds):
            began = time.thread_time()
            # Whatever goes wrong here must not end the run, and a message about it would be repeated with each frame.
            with contextlib.suppress(Exception):
                state = self.state
                state.observe_phase()
                state.bar = self.terminal.bar
                rows = self._rows(state)
                if not self._stop.is_set():
                    self.terminal.draw(rows)
            seconds = min(max((time.thread_time() - began) / _SHARE, _SOONEST), _LATEST)

    def _rows(self, state: State) -> list[str]:
        columns, lines = self.terminal.size()
        return self.renderer.rows(state, columns, lines - 1)


def _handlers_of(*streams: Any) -> list[tuple[logging.StreamHandler, Any]]:
    """Return the handlers that write to these streams, each with its stream. Libraries make them when they are imported."""
    handlers = [reference() for reference in getattr(logging, "_handlerList", [])]  # logging itself closes them with this list
    # A property is the stream of a handler that always uses the current sys.stderr.
    is_set = lambda handler: not isinstance(getattr(type(handler), "stream", None), property)
    found = [handler for handler in handlers if isinstance(handler, logging.StreamHandler) and is_set(handler)]
    # The stream below a wrapper, such as the one of `entry.run`, is the same stream.
    inner = {id(getattr(stream, "stream", stream)): stream for stream in streams} | {id(stream): stream for stream in streams}
    return [(handler, inner[id(handler.stream)]) for handler in found if id(handler.stream) in inner]
