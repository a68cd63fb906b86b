"""Prints the output of all nodes in one terminal, and remembers the first error."""

import asyncio
import re
import sys
from typing import TextIO

from accel_ddp.nodes.terminal import erase_before_line, split_incomplete_frame, without_controls
from accel_ddp.records.files import BackgroundWriter

_CAUSE = re.compile(r"^(?:\[rank \d+\] )?error: ")
_RESTART = re.compile(r"^restart \d+")  # the job continues after the errors before it
_KIND = re.compile(r"error: [A-Z][A-Z_]+: ")
_MOST_LINES = 20  # of a cause
_MOST_WAITING = 1000  # texts that are not printed yet
# Scripts that do not use this package print only a traceback, and torch then prints a report with the exit code of the rank.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_REPORT = re.compile(r"^Root Cause \(first observed failure\)")
_EXIT_CODE = re.compile(r"^\s+exitcode\s*: (-?\d+) \(pid")


def _erase_before_line(stream: TextIO) -> str:
    try:
        return erase_before_line(stream.fileno())
    except (AttributeError, OSError, ValueError):  # a stream without a descriptor
        return ""


class Console:
    """Prints lines of the main rank as they are, and lines of others with their node and rank, above the panel of the main rank.

    A thread prints, because a terminal that the user has stopped with Ctrl-S, or a pager that does not read, blocks a program that
    prints. The heartbeats must go on, or all nodes would stop the job.
    """

    def __init__(self, stream: TextIO | None = None, ends_with_reader: bool = False):
        self.stream = stream or sys.stdout
        self.erase = _erase_before_line(self.stream)  # of the panel of the main rank
        self.frame = ""  # the part of a frame that has arrived
        self.ends_with_reader = ends_with_reader  # raise BrokenPipeError, as other programs do
        self.at_line_start = True
        self.writer = BackgroundWriter(self._write_now, "console")
        self.writer.start()
        self.causes: list[tuple[str, list[str]]] = []  # host, lines; the first cause comes first
        self._open: dict[tuple[str, int | None], list[str]] = {}  # a cause whose further lines may follow
        self.exceptions: dict[str, str] = {}  # host -> the last exception before the report of torch
        self.exit_codes: dict[str, int | None] = {}  # host -> exit code in the report of torch; None: the report has begun

    def show(self, host: str, rank: int | None, lines: list[str]) -> None:
        """Print lines of a rank, or of the launcher of a node if `rank` is None."""
        prefix = "" if rank == 0 else f"[{host}] " if rank is None else f"[{host} rank {rank}] "
        for line in lines:
            self._remember(host, rank, line)
            self._print(f"{prefix}{line}\n")

    def show_terminal(self, host: str, text: str, lines: list[str]) -> None:
        """Print what the main rank has written to its terminal, including its panel. `lines` are those that are complete."""
        for line in lines:
            self._remember(host, 0, line)
        # A frame arrives in several parts. No other line may be printed between them.
        text, self.frame = split_incomplete_frame(self.frame + text)
        self._write(text)
        if outside := without_controls(text):
            self.at_line_start = outside.endswith(("\n", "\r"))

    def note(self, text: str) -> None:
        """Print a message of the launching machine itself."""
        self._print(f"accel-ddp: {text}\n")

    def first_cause(self, host: str = "") -> str:
        """Return the first error with its host, or "". Of several errors, a diagnosis of the monitors or of the doctor is preferred.

        `host` is the node that ended first. Without any error, its last exception is returned.
        """
        named = [cause for cause in self.causes if _KIND.search(cause[1][0])] or self.causes
        for where, lines in named:
            return f"[{where}] " + "\n".join(lines)
        return f"[{host}] {self.exceptions[host]}" if host in self.exceptions else ""

    def _remember(self, host: str, rank: int | None, line: str) -> None:
        key = (host, rank)
        if _RESTART.match(line):
            self.causes.clear(), self._open.clear(), self.exceptions.clear(), self.exit_codes.clear()
        if _EXCEPTION.match(line) and "ChildFailedError" not in line and host not in self.exit_codes:
            self.exceptions[host] = line
        elif _REPORT.match(line):
            self.exit_codes.setdefault(host)
        elif self.exit_codes.get(host, 0) is None and (found := _EXIT_CODE.match(line)):
            self.exit_codes[host] = int(found[1]) if int(found[1]) >= 0 else 128 - int(found[1])
        if _CAUSE.match(line):
            if all(line != lines[0] for _, lines in self.causes):
                self._open[key] = [line]
                self.causes.append((host, self._open[key]))
            else:
                self._open.pop(key, None)
        elif key in self._open:
            if line.strip() and len(self._open[key]) < _MOST_LINES and line[:1] in " \tEW":
                self._open[key].append(line)
            else:
                del self._open[key]

    def _print(self, text: str) -> None:
        self._write(f"{self.erase}{text}" if self.at_line_start else f"\n{self.erase}{text}")
        self.at_line_start = True

    def _write(self, text: str) -> None:
        if self.writer.failure and self.ends_with_reader:
            raise self.writer.failure
        self.writer.put(text)

    def _write_now(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()  # an OSError here: nobody reads the output any more; the logs have it

    async def wait_until_printed(self, most: int = 0) -> None:
        """Wait until at most `most` texts are left to print."""
        while self.writer.num_unwritten > most:
            await asyncio.sleep(0.01)

    async def wait_for_room(self) -> None:
        """Wait while much is left to print. Call it before more output is received from a node."""
        await self.wait_until_printed(_MOST_WAITING)
