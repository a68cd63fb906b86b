"""The live panel of the main rank: opened by `start`, closed when the process ends, however it ends."""

import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

from accel_ddp.config import TrainConfig
from accel_ddp.environment.terminal import SharedStream, can_draw
from accel_ddp.observing.panel import Renderer, State, shows_unicode
from accel_ddp.observing.terminal import Terminal, TerminalStream
from accel_ddp.ranks.process import process

_SOONEST, _LATEST = 0.25, 2.0  # seconds between two frames
_SHARE = 0.002  # of the time of one processor core that the frames may use; it determines how often they are drawn


def share_terminal(cfg: TrainConfig) -> None:
    """Show the panel if this is the main rank and it has a terminal. Let other ranks print beside it.

    A notebook has no terminal, and neither has a pipe. In these, in an interactive Python, and where CI is set, lines are printed.
    """
    if process.display is not None:
        process.display.begin(cfg)
    elif _is_one_terminal():
        if not process.is_main:
            if process.node == 0 and not isinstance(sys.stdout, SharedStream):
                sys.stdout, sys.stderr = SharedStream(sys.stdout), SharedStream(sys.stderr)
        elif is_wanted():
            with contextlib.suppress(OSError):  # the terminal belongs to another user, for example after `su`
                process.display = Display(cfg)


def _is_one_terminal() -> bool:
    """Return whether stdout and stderr are the same terminal, and can be replaced."""
    try:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        # The streams of a notebook may have the descriptor of the terminal in which Jupyter was started.
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            return False
        return can_draw(out) and can_draw(err) and os.path.samestat(os.fstat(out), os.fstat(err))
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something without a descriptor, as in notebooks
        return False


def is_wanted() -> bool:
    """Return whether a panel is better than lines."""
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
        """Show another run."""
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
        if threading.current_thread() is not self.thread:
            self.thread.join(1)
        for handler, stream in self._handlers:
            handler.setStream(stream)
        for stream in self._streams:
            stream.close_panel()
        if sys.stdout is self._streams[0]:
            sys.stdout = self._streams[0].stream
        if sys.stderr is self._streams[1]:
            sys.stderr = self._streams[1].stream
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
    found = [handler for handler in handlers if isinstance(handler, logging.StreamHandler) and _can_set(handler)]
    # The stream below a wrapper, such as that of `entry.run`, is the same stream.
    inner = {id(getattr(stream, "stream", stream)): stream for stream in streams} | {id(stream): stream for stream in streams}
    return [(handler, inner[id(handler.stream)]) for handler in found if id(handler.stream) in inner]


def _can_set(handler: logging.StreamHandler) -> bool:
    return not isinstance(getattr(type(handler), "stream", None), property)  # one that always uses the current sys.stderr
