"""Splits the output of a process into lines. A progress bar, which returns to the start of its line, counts as one line.

The live panel of the main rank is not part of any line.
"""

import codecs

from accel_ddp.environment.terminal import split_incomplete_frame, without_controls, without_frames


class Lines:
    """Collects bytes of one stream and returns complete lines."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may arrive in two parts
        self.rest = self.frame = ""

    def add(self, data: bytes) -> list[str]:
        """Return the lines that are complete now, each without its end."""
        text, self.frame = split_incomplete_frame(self.frame + self.decoder.decode(data))
        *lines, self.rest = (self.rest + without_frames(text)).split("\n")
        if len(self.rest) > 1 << 16:  # output without line ends must not use memory without a limit
            lines, self.rest = [*lines, self.rest], ""
        if "\r" in self.rest[:-1]:
            self.rest = self.rest[self.rest.rindex("\r", 0, -1) :]
        return [visible(line) for line in lines]

    def end(self) -> list[str]:
        """Return what is left after the end of the stream."""
        rest, self.rest = self.rest, ""
        return [visible(rest)] if rest.strip() else []


def visible(line: str) -> str:
    """Return what a terminal shows after this line, without colours: a carriage return starts the line again."""
    return without_controls(line).rstrip("\r").rpartition("\r")[2]
