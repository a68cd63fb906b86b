"""One rank of `accel-ddp doctor`'s small training: how it speaks with the others, and how it ends.

The main thread does the steps (see `deep`). A second one, with a connection of its own, tells rank 0 where this rank is,
hears the report and ends the process; a third ends it when the store is silent too. Always with os._exit: a NCCL
collective cannot be interrupted.
"""

import argparse
import json
import math
import os
import re
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HOST = socket.gethostname()
STEPS = ("import torch", "initialise", "all-reduce is right", "bandwidth", "transport", "gradient synchronisation")
STEPS += ("communication share", "report")
REPORT = len(STEPS) - 1
POLL, SILENT, LISTEN, ACKS = 0.5, 2.0, 3.0, 10.0  # seconds; a rank that failed listens who has gone before it says so
BUCKET = 25e6  # bytes, of DDP
PARAMETERS, ITEMS, TOKENS, USE = 110_000_000, 8, 128, 0.4  # assumed where nothing is given
WRONG = "use the same torch, NCCL and driver on every node; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1, NCCL_ALGO=Ring narrow it down"
FIXES = {
    "E_COLLECTIVE_STUCK": "NCCL_DEBUG=INFO shows the interface NCCL took; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose "
    "another; NCCL_IB_DISABLE=1 rules InfiniBand out",
    "E_COLLECTIVE_FAILED": "read what this rank printed; NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
    "choose the interface",
    **dict.fromkeys(("E_COLLECTIVE_WRONG", "E_GRADIENTS", "E_BUFFERS", "E_WEIGHTS"), WRONG),
    "E_GPU_PLACEMENT": "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build there, or ACCELERATE_USE_CPU=true everywhere",
    "W_GPU_SHARED": "one rank per GPU: num_processes is the nodes times the GPUs of one node; check CUDA_VISIBLE_DEVICES",
    "W_SLOW_TRANSPORT": "check ibv_devinfo, libibverbs, /dev/infiniband in the container and NCCL_IB_DISABLE",
}
FIX_EFA = "install aws-ofi-nccl and libfabric, with its folder in LD_LIBRARY_PATH: without it NCCL does not use EFA"
FIX_ENDED = "find out on that host why it ended or stands still: its output, dmesg (out of memory), nvidia-smi"


class Refused(Exception):
    """A rank knows what is wrong: the argument is the finding."""


class Rank:
    """How a rank speaks with the others and ends. What rank 0 puts under `report` is what every rank writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.node = int(os.environ.get("GROUP_RANK", self.rank // self.local_ranks))
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.step, self.step_began, self.calls = 0, self.began, 0  # calls: collectives that this rank has entered
        self.store = self.ear = None  # connections of the main thread, which may wait in it, and of the listener
        self.failure, self.failure_is_said_at = None, math.inf
        self.ending, self.code = threading.Lock(), 1
        # On rank 0: what it knows of each rank; lines as (step, code with which it would not be true, text).
        self.facts, self.lines, self.figures = [], [], {}
        self.beats, self.heard = [b""] * self.num_ranks, [self.began] * self.num_ranks
        self.log = Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", HOST.split(".")[0]).replace("%p", str(os.getpid())))
        # By default torch aborts a process whose NCCL reports that another is gone, before it could say who.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        self.log_is_ours = "NCCL_DEBUG" not in os.environ
        if self.log_is_ours:
            self.log = Path(tempfile.gettempdir(), f"accel_ddp_nccl_{os.getpid()}.log")
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV", "NCCL_DEBUG_FILE": str(self.log)}

    def finding(self, code: str, saw: str, rank: int | None = None, fix: str = "") -> dict[str, Any]:
        """About this rank or, where `rank` says so, another: rank 0 knows the hosts of those that have come."""
        rank = self.rank if rank is None else rank
        host = HOST if rank == self.rank else "?" if rank else os.environ["MASTER_ADDR"]
        about = {"host": host, "node": self.node if rank == self.rank else rank // self.local_ranks}
        about |= {name: self.facts[rank][name] for name in about} if self.facts else {}
        severity = "error" if code.startswith("E_") else "warning"
        return {"code": code, "severity": severity, **about, "rank": rank, "saw": saw, "fix": fix or FIXES[code]}

    def found(self, code: str, saw: str, rank: int | None = None, fix: str = "") -> None:
        """Something is not right, and the steps go on."""
        self.store.set(f"finding/{self.store.add('findings', 1)}", json.dumps(self.finding(code, saw, rank, fix)))

    def say(self, text: str, unless: str = "") -> None:
        self.lines.append((self.step, unless, text))

    def run(self) -> None:
        """The steps. Does not return: the process ends."""
        threading.Thread(target=self._end_at_last, daemon=True).start()
        try:
            for number, do in enumerate((*self.steps(), lambda: None)):
                self.step, self.step_began = number, time.monotonic()
                do()
        except Refused as refused:
            self.failure, self.failure_is_said_at = refused.args[0], 0.0
        except Exception as error:
            said = [f"{type(error).__name__}: {str(error).strip()}".splitlines()[0], *re.findall("NCCL WARN (.*)", self._log())]
            self.failure = self.finding("E_COLLECTIVE_FAILED", f"step '{STEPS[self.step]}': {' | '.join(said[:2])}")
            self.failure_is_said_at = time.monotonic() + LISTEN
        if self.ear is None:  # there is nobody to tell
            self._end({"findings": [self.failure], "lines": [], "figures": {}}, ask_store=False)
        threading.Event().wait()

    def _give_up_at(self) -> float:
        return self.began + self.options.seconds - min(3.0, self.options.seconds / 4)  # the rest is for the report to travel

    def _listen(self) -> None:
        try:
            for beat in range(1 << 40):
                now = time.monotonic()
                self.ear.set(f"beat/{self.rank}", json.dumps([beat, self.step, self.calls]))
                # Another rank may import torch for long: before all have met, only the whole time counts.
                is_late = now > self._give_up_at() or (self.step > 1 and now - self.step_began > self.options.seconds / 3)
                if self.failure and now > self.failure_is_said_at:
                    self.ear.compare_set("failed", "", json.dumps(self.failure))
                elif is_late and not self.failure:
                    self.ear.compare_set("late", "", f"{now - self.step_began:.0f}")
                if self.rank == 0:
                    self._compose_if_over(now)
                if self.ear.check(["report"]):
                    self._end(json.loads(self.ear.get("report")))
                time.sleep(0.05 if self.step == REPORT else POLL)
        except Exception as error:
            text = "ended without a word, and its store with it" if self.rank else f"{type(error).__name__}: {error}"
            self._end({"findings": [self.finding("E_COLLECTIVE_FAILED", text, 0)], "lines": [], "figures": {}}, ask_store=False)

    def _compose_if_over(self, now: float) -> None:
        """Rank 0: the report, when all ranks have come to the end, or one has failed, or one has waited for too long."""
        for rank, beat in enumerate(self.ear.multi_get([f"beat/{rank}" for rank in range(self.num_ranks)])):
            if beat != self.beats[rank]:
                self.beats[rank], self.heard[rank] = beat, now
        reached = [json.loads(beat)[1:] if beat else [-1, 0] for beat in self.beats]  # step and calls; -1: never came
        silent = [rank for rank in range(self.num_ranks) if reached[rank][0] < 0 or now - self.heard[rank] > SILENT]
        findings = []
        if self.ear.check(["failed"]):
            findings = [json.loads(self.ear.get("failed"))]
            if silent and findings[0]["code"] == "E_COLLECTIVE_FAILED":  # that one only noticed it
                text = f"{self._where(silent[0], reached)}; rank {findings[0]['rank']} saw: {findings[0]['saw']}"
                findings = [self.finding("E_COLLECTIVE_FAILED", text, silent[0], FIX_ENDED)]
        elif min(reached)[0] < REPORT and self.ear.check(["late"]):
            behind = silent or [rank for rank in range(self.num_ranks) if reached[rank] < max(reached)]
            who = "; ".join(self._where(rank, reached) for rank in behind[:8]) or "every rank is in it and none comes out"
            text = f"stuck in step '{STEPS[max(reached)[0]]}' for {self.ear.get('late').decode()} s: {who}"
            findings = [self.finding("E_COLLECTIVE_STUCK", text, behind[0] if behind else None)]
            findings[0] |= {} if behind else {"host": "every host", "node": None, "rank": None}
        elif min(reached)[0] < REPORT:
            return
        known = [json.loads(self.ear.get(f"finding/{i + 1}")) for i in range(self.ear.add("findings", 0))]
        same = {}  # what many ranks saw is said once
        for finding in sorted(known, key=lambda finding: (finding["severity"], finding["rank"])):
            same.setdefault((finding["code"], finding["saw"]), []).append(finding)
        for (_, saw), group in same.items():
            ranks = ", ".join(str(finding["rank"]) for finding in group)
            findings.append({**group[0], "saw": f"{saw} (on ranks {ranks})" if len(group) > 1 else saw})
        codes = {finding["code"] for finding in findings}
        lines = [text for step, unless, text in self.lines if step < min(reached)[0] and unless not in codes]
        self.ear.set("report", json.dumps({"findings": findings, "lines": lines, "figures": dict(self.figures)}))

    def _where(self, rank: int, reached: list[list[int]]) -> str:
        (step, calls), name = reached[rank], f"rank {rank} on {self.facts[rank]['host']}" if self.facts else f"rank {rank}"
        if step < 0:
            return f"{name} has not come to rank 0's store at {self.address}"
        silence = time.monotonic() - self.heard[rank]
        last = f"step '{STEPS[step]}' after {calls} collectives"
        return f"{name} has said nothing for {silence:.0f} s, since {last}" if silence > SILENT else f"{name} is still in {last}"

    def _end_at_last(self) -> None:
        """A store that is stopped, not gone, keeps those waiting who ask it: this thread does not."""
        time.sleep(self.options.seconds - 0.7)  # an interpreter needs some to start
        if not self.ending.locked():
            waits = f": the store of rank 0 at {self.address} does not answer" if self.step else ""
            stuck = self.finding("E_COLLECTIVE_STUCK", f"stuck in step '{STEPS[self.step]}'{waits}", 0 if self.step else None)
            self._end({"findings": [self.failure or stuck], "lines": [], "figures": {}}, ask_store=False)
        time.sleep(0.4)
        os._exit(self.code)

    def _end(self, report: dict[str, Any], ask_store: bool = True) -> None:
        self.ending.acquire()  # and never released
        self.code = int(any(finding["severity"] == "error" for finding in report["findings"]))
        file = Path(self.options.result)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(json.dumps(report, indent=1))
        draft.replace(file)  # who finds it finds all of it
        if self.log_is_ours:
            self.log.unlink(missing_ok=True)
        try:
            acks = self.ear.add("acks", 1) if ask_store else self.num_ranks
            until = min(time.monotonic() + ACKS, self.began + self.options.seconds - 0.8)
            while self.rank == 0 and acks < self.num_ranks and time.monotonic() < until:  # the store ends with this process
                time.sleep(0.02)
                acks = self.ear.add("acks", 0)
        finally:
            os._exit(self.code)

    def _log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.is_file() else ""
