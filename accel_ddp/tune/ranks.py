"""The rank processes of one node in one trial. None outlives the trial, nor its parent."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ddp.net.sanitize import printable


class Ranks:
    """Starts, listens to and ends them. `tell` hears each line that one says, each end, and {"over": trial} after the last."""

    def __init__(
        self, node: int, nodes: int, local: int, address: str, base: dict[str, str], may_set: set[str],
        tell: Callable[[dict[str, Any]], None],
    ):  # fmt: skip
        self.node, self.nodes, self.local, self.address, self.base, self.tell = node, nodes, local, address, base, tell
        self.may_set = may_set  # variables that the main node may set here
        self.processes: list[asyncio.subprocess.Process] = []
        self.running: asyncio.Future | None = None

    def start(self, trial: int, port: int, settings: dict[str, str], spec: dict[str, Any]) -> None:
        if not settings.keys() <= self.may_set:
            raise ValueError(f"it wants to set {', '.join(settings.keys() - self.may_set)}")
        self.running = asyncio.ensure_future(self._run(trial, port, settings, spec))

    async def _run(self, trial: int, port: int, settings: dict[str, str], spec: dict[str, Any]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="accel_ddp_tune_"))
        try:
            (folder / "spec").write_text(json.dumps(spec))
            self.processes, readers = [], []
            for one in range(self.local):
                rank = self.node * self.local + one
                env = {
                    **self.base, **settings, "RANK": str(rank), "WORLD_SIZE": str(self.nodes * self.local),
                    "LOCAL_RANK": str(one), "LOCAL_WORLD_SIZE": str(self.local), "GROUP_RANK": str(self.node),
                    "MASTER_ADDR": self.address, "MASTER_PORT": str(port), "NCCL_DEBUG": "INFO" if spec["log"] else "WARN",
                    "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV", "NCCL_DEBUG_FILE": str(folder / f"nccl.{one}"),
                }  # fmt: skip
                command = [sys.executable, "-m", "accel_ddp.tune.rank", str(folder / "spec"), str(os.getpid())]
                with open(folder / f"words.{one}", "w") as words:
                    process = await asyncio.create_subprocess_exec(
                        *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=words,
                        start_new_session=True,  # Ctrl-C is for the parent, which says so and ends them
                    )  # fmt: skip
                self.processes.append(process)
                readers.append(asyncio.ensure_future(self._listen(process, trial, rank, one, folder)))
            await asyncio.gather(*readers)
        except OSError as error:
            self.kill()
            self.tell({"trial": trial, "rank": self.node * self.local, "exit": 1, "words": f"cannot be started: {error}"})
        finally:
            self.kill()
            shutil.rmtree(folder, ignore_errors=True)
        self.tell({"trial": trial, "over": True})

    async def _listen(self, process: asyncio.subprocess.Process, trial: int, rank: int, one: int, folder: Path) -> None:
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # what a library prints
                said = json.loads(line)
                if isinstance(said, dict):
                    self.tell({"trial": trial, "rank": rank, "said": said})
        code = await process.wait()
        self.tell({"trial": trial, "rank": rank, "exit": code, "words": last_words(folder, one) if code else ""})

    def kill(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def close(self) -> None:
        self.kill()
        if self.running:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(self.running), 5)


def last_words(folder: Path, one: int) -> str:
    """What NCCL warned of, or else the last line of a process that failed."""
    with contextlib.suppress(OSError):
        if warned := re.findall("NCCL WARN (.*)", (folder / f"nccl.{one}").read_text(errors="replace")):
            return printable(f"NCCL: {warned[0]}", 300)
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in (folder / f"words.{one}").read_text(errors="replace").splitlines() if line.strip()]
        return printable(lines[-1], 300) if lines else ""
    return ""
