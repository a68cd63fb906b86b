"""How processes share a terminal in which the main rank shows a live panel. It depends on nothing but the standard library.

The panel is below the cursor. Its process draws it with one write, between BEGIN_FRAME and END_FRAME, and returns the cursor to where
it was: to an empty line above the panel, or behind a text whose line is not complete. Monitors, other ranks and launchers print to the
same terminal. Their lines begin at the cursor, therefore above the panel, and the next frame is drawn below them. ERASE_BELOW before a
line removes the panel, so that no rest of it is left beside a text of several lines. No mode of the terminal is changed, so that a
process that is killed leaves nothing behind but its last panel, which the next line of a monitor removes.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

ERASE_BELOW = "\x1b[J"
# Terminals that support synchronized output show a frame at once. Others ignore it. It also marks what does not belong into a log.
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"

_FRAME = re.compile(f"{re.escape(BEGIN_FRAME)}.*?{re.escape(END_FRAME)}", re.DOTALL)
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\^_78=>])")


def can_draw(descriptor: int, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this is a terminal that can move its cursor."""
    try:
        return os.isatty(descriptor) and (environ or os.environ).get("TERM", "") not in ("", "dumb", "unknown")
    except OSError:
        return False


def erase_before_line(descriptor: int) -> str:
    """Return what to write before a line that another process than that of the panel prints. "" if this is no terminal."""
    return ERASE_BELOW if can_draw(descriptor) else ""


def split_incomplete_frame(text: str) -> tuple[str, str]:
    """Return the text up to a frame that is not complete, and the beginning of that frame."""
    at = text.rfind(BEGIN_FRAME)
    if at >= 0 and END_FRAME not in text[at:]:
        return text[:at], text[at:]
    for length in range(min(len(BEGIN_FRAME) - 1, len(text)), 0, -1):  # the mark itself may arrive in two parts
        if BEGIN_FRAME.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""


def without_frames(text: str) -> str:
    """Return the text without frames."""
    return _FRAME.sub("", text)


def without_controls(text: str) -> str:
    """Return the text without control sequences, as it is stored in a log."""
    return _CONTROL.sub("", without_frames(text))


class SharedStream:
    """A stream of a rank that shares its terminal with the panel of the main rank."""

    def __init__(self, stream: Any):
        self.stream, self.at_line_start = stream, True

    def write(self, text: str) -> int:
        if text:
            self.stream.write(ERASE_BELOW + text if self.at_line_start else text)
            self.at_line_start = text.endswith("\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
