"""The process of one rank in the collective checks: how it communicates with the other ranks, and how it ends.

The main thread runs the steps (see `collectives`). A second thread, with its own connection to the store of rank 0, publishes
the progress of this rank, receives the report and ends the process. A third thread ends the process if the store does not
answer either. All of them end it with os._exit, because an NCCL collective cannot be interrupted.
"""

import argparse
import contextlib
import json
import math
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from accel_ddp.doctor.findings import CODES
from accel_ddp.doctor.host import HOST

# What NCCL's log and the InfiniBand devices of a host show about the transport between ranks.


def read_nccl_log(log: str) -> tuple[list[str], str, list[str]]:
    """Return (transports between ranks such as `P2P/CUMEM`, network to other nodes, its interfaces) from a log of NCCL.

    Lists are empty, and the network is `unknown`, if the log does not contain them.
    """
    paths = {"/".join(filter(None, path)) for path in re.findall(r" via (P2P|SHM|NET)(?:/([A-Za-z][\w ]*))?", log)}
    network = re.findall(r"Using network (.*\S)", log)[:1] or ["unknown"]
    names = re.findall(r"\[\d+\]([\w.-]+):", "\n".join(re.findall(r"NET/\w+ ?: Using (.*)", log)))
    return sorted(paths), network[0], names


def find_infiniband_devices() -> list[str]:
    """Return the InfiniBand devices with a port that is up, with their drivers. Amazon's EFA is among them."""
    devices = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        ports = []
        with contextlib.suppress(OSError):  # a container may show the folder but not allow reading it
            ports = [port.read_text() for port in device.glob("ports/*/state")]
        if not ports or any("ACTIVE" in port for port in ports):
            devices.append(f"{device.name} ({(device / 'device' / 'driver').resolve().name})")
    return devices


# The expected duration of a training step on more nodes, from a measured bandwidth and latency.
BUCKET_BYTES = 25e6  # of DDP
# Assumed if the model and the duration of a step are not given: BERT-base in fp32, and this share of the measured FLOP/s.
PARAMETERS, ITEMS, TOKENS, UTILISATION = 110_000_000, 8, 128, 0.4


def expected_step(num_nodes: int, ranks: int, size: float, compute: float, bus: float, hop: float) -> dict[str, float]:
    """Return the expected times of a step, and the share of it in which a rank computes.

    `size` is the bytes of gradients, `compute` the seconds of computing per step, `bus` the bus bandwidth in bytes per second
    and `hop` the seconds of one hop in the ring. `worst` is the share if nothing overlaps, `best` if communication is hidden
    behind the backward pass.
    """
    communication = 2 * (ranks - 1) / ranks * size / bus + 2 * (ranks - 1) * hop * math.ceil(size / BUCKET_BYTES)
    exposed = max(0.0, communication - compute * 2 / 3)  # the backward pass is two thirds of the computing
    shares = {"worst": compute / (compute + communication), "best": compute / (compute + exposed)}
    return {"nodes": num_nodes, "ranks": ranks, "communication_seconds": communication, "compute_seconds": compute, **shares}


STEPS = ("import torch", "initialise", "all-reduce is right", "bandwidth", "transport", "gradient synchronisation")
STEPS += ("communication share", "report")
REPORT = len(STEPS) - 1
POLL_SECONDS = 0.5
SILENT_SECONDS = 2.0  # without progress messages, until a rank is reported as silent
FAILURE_SECONDS = 3.0  # a rank that failed waits this long before it reports, because a rank that died may be the cause
ACK_SECONDS = 10.0  # for all ranks to fetch the report from rank 0's store
FIX_DEAD_RANK = "find out on that host why the rank died or hangs: its output, dmesg (out of memory), nvidia-smi"


class CheckFailed(Exception):
    """A check has found what is wrong, and the steps end. The argument is the finding as a dictionary."""


class RankProcess:
    """Runs the steps of a subclass. Every rank writes the report that rank 0 puts into its store."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        counts = map(int, options.ranks_of_nodes.split(",")) if options.ranks_of_nodes else [num_local] * self.num_ranks
        self.nodes = [node for node, count in enumerate(counts) for _ in range(count)]  # of each rank
        self.node = int(os.environ.get("GROUP_RANK", self.nodes[self.rank]))
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.step, self.step_began = 0, self.began
        self.num_collectives = 0  # that this rank has entered
        self.store = None  # connection of the main thread, which may block in it
        self.monitor_store = None  # connection of the monitor thread
        self.failure, self.report_failure_at = None, math.inf
        self.ending, self.exit_code = threading.Lock(), 1
        # On rank 0: the facts of each rank, and lines as (step, code of the finding that contradicts the line, text).
        self.facts, self.lines, self.figures = [], [], {}
        self.beats, self.beat_times = [b""] * self.num_ranks, [self.began] * self.num_ranks
        self.log = Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", HOST.split(".")[0]).replace("%p", str(os.getpid())))
        # By default torch aborts a process whose NCCL reports that another rank is gone, before it can report which one.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        self.owns_log = "NCCL_DEBUG" not in os.environ
        if self.owns_log:
            self.log = Path(tempfile.gettempdir(), f"accel_ddp_nccl_{os.getpid()}.log")
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV", "NCCL_DEBUG_FILE": str(self.log)}

    def finding(self, code: str, saw: str, rank: int | None = None, fix: str = "") -> dict[str, Any]:
        """Return a finding about a rank, by default this one. Only rank 0 has the hosts of the other ranks."""
        rank = self.rank if rank is None else rank
        host = HOST if rank == self.rank else "?" if rank else os.environ["MASTER_ADDR"]
        about = {"host": host, "node": self.node if rank == self.rank else self.nodes[rank]}
        about |= {name: self.facts[rank][name] for name in about} if self.facts else {}
        severity = "error" if code.startswith("E_") else "warning"
        return {"code": code, "severity": severity, **about, "rank": rank, "saw": saw, "fix": fix or CODES[code].fix}

    def add_finding(self, code: str, saw: str, rank: int | None = None, fix: str = "") -> None:
        """Store a finding, and continue with the steps."""
        self.store.set(f"finding/{self.store.add('findings', 1)}", json.dumps(self.finding(code, saw, rank, fix)))

    def add_line(self, text: str, unless: str = "") -> None:
        """Add a line to the report, unless it has a finding with the code `unless`."""
        self.lines.append((self.step, unless, text))

    def run(self) -> None:
        """Run the steps. This function does not return: the monitor thread ends the process."""
        threading.Thread(target=self._enforce_deadline, daemon=True).start()
        try:
            for number, do in enumerate((*self.steps(), lambda: None)):
                self.step, self.step_began = number, time.monotonic()
                do()
        except CheckFailed as failed:
            self.failure, self.report_failure_at = failed.args[0], 0.0
        except Exception as error:
            causes = [f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]]
            causes += re.findall("NCCL WARN (.*)", self.read_log())
            self.failure = self.finding("E_COLLECTIVE_FAILED", f"step '{STEPS[self.step]}': {' | '.join(causes[:2])}")
            self.report_failure_at = time.monotonic() + FAILURE_SECONDS
        if self.monitor_store is None:  # there is no connection over which to report
            self._end({"findings": [self.failure], "lines": [], "figures": {}}, uses_store=False)
        threading.Event().wait()

    def give_up_at(self) -> float:
        """Return the time at which waiting for other ranks ends. The rest of the time limit is for sending the report."""
        return self.began + self.options.seconds - min(3.0, self.options.seconds / 4)

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    def start_monitor(self) -> None:
        threading.Thread(target=self._monitor, daemon=True).start()

    def _monitor(self) -> None:
        """Publish progress and failures of this rank until there is a report, then end the process."""
        try:
            for beat in range(1 << 40):
                now = time.monotonic()
                self.monitor_store.set(f"beat/{self.rank}", json.dumps([beat, self.step, self.num_collectives]))
                # Importing torch may take long on some ranks. Until all ranks are initialised, only the total time counts.
                is_late = now > self.give_up_at() or (self.step > 1 and now - self.step_began > self.options.seconds / 3)
                if self.failure and now > self.report_failure_at:
                    self.monitor_store.compare_set("failed", "", json.dumps(self.failure))
                elif is_late and not self.failure:
                    self.monitor_store.compare_set("late", "", f"{now - self.step_began:.0f}")
                if self.rank == 0:
                    self._compose_report_if_over(now)
                if self.monitor_store.check(["report"]):
                    self._end(json.loads(self.monitor_store.get("report")))
                time.sleep(0.05 if self.step == REPORT else POLL_SECONDS)
        except Exception as error:
            text = "died without an error message, and its store with it" if self.rank else f"{type(error).__name__}: {error}"
            self._end({"findings": [self.finding("E_COLLECTIVE_FAILED", text, 0)], "lines": [], "figures": {}}, uses_store=False)

    def _compose_report_if_over(self, now: float) -> None:
        """On rank 0, store the report if all ranks are done, one has failed, or one has waited too long."""
        store = self.monitor_store
        for rank, beat in enumerate(store.multi_get([f"beat/{rank}" for rank in range(self.num_ranks)])):
            if beat != self.beats[rank]:
                self.beats[rank], self.beat_times[rank] = beat, now
        reached = [json.loads(beat)[1:] if beat else [-1, 0] for beat in self.beats]  # step and collectives; -1: not connected
        silent = [rank for rank in range(self.num_ranks) if reached[rank][0] < 0 or now - self.beat_times[rank] > SILENT_SECONDS]
        findings = []
        if store.check(["failed"]):
            findings = [json.loads(store.get("failed"))]
            if silent and findings[0]["code"] == "E_COLLECTIVE_FAILED":  # a consequence of the rank that is silent
                text = f"{self._describe_progress(silent[0], reached)}; rank {findings[0]['rank']} saw: {findings[0]['saw']}"
                findings = [self.finding("E_COLLECTIVE_FAILED", text, silent[0], FIX_DEAD_RANK)]
        elif min(reached)[0] < REPORT and store.check(["late"]):
            behind = silent or [rank for rank in range(self.num_ranks) if reached[rank] < max(reached)]
            ranks = "; ".join(self._describe_progress(rank, reached) for rank in behind[:8])
            text = f"stuck in step '{STEPS[max(reached)[0]]}' for {store.get('late').decode()} s: "
            text += ranks or "every rank has entered the collective, and none returns"
            findings = [self.finding("E_COLLECTIVE_STUCK", text, behind[0] if behind else None)]
            findings[0] |= {} if behind else {"host": "every host", "node": None, "rank": None}
        elif min(reached)[0] < REPORT:
            return
        findings += self._merge_findings([json.loads(store.get(f"finding/{i + 1}")) for i in range(store.add("findings", 0))])
        codes = {finding["code"] for finding in findings}
        lines = [text for step, unless, text in self.lines if step < min(reached)[0] and unless not in codes]
        store.set("report", json.dumps({"findings": findings, "lines": lines, "figures": dict(self.figures)}))

    @staticmethod
    def _merge_findings(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the findings, with those that several ranks made merged into one."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for finding in sorted(findings, key=lambda finding: (finding["severity"], finding["rank"])):
            groups.setdefault((finding["code"], finding["saw"]), []).append(finding)
        merged = []
        for (_, saw), group in groups.items():
            ranks = ", ".join(str(finding["rank"]) for finding in group)
            merged.append({**group[0], "saw": f"{saw} (on ranks {ranks})" if len(group) > 1 else saw})
        return merged

    def _describe_progress(self, rank: int, reached: list[list[int]]) -> str:
        (step, calls), name = reached[rank], f"rank {rank} on {self.facts[rank]['host']}" if self.facts else f"rank {rank}"
        if step < 0:
            return f"{name} has not connected to rank 0's store at {self.address}"
        silence = time.monotonic() - self.beat_times[rank]
        last = f"step '{STEPS[step]}' after {calls} collectives"
        if silence > SILENT_SECONDS:
            return f"{name} has sent nothing for {silence:.0f} s, since {last}"
        return f"{name} is still in {last}"

    def _enforce_deadline(self) -> None:
        """End the process at the time limit. A store that is stopped, but not closed, blocks the monitor thread."""
        time.sleep(self.options.seconds - 0.7)  # starting the interpreter takes a part of the limit
        if not self.ending.locked():
            waits = f": the store of rank 0 at {self.address} does not answer" if self.step else ""
            stuck = self.finding("E_COLLECTIVE_STUCK", f"stuck in step '{STEPS[self.step]}'{waits}", 0 if self.step else None)
            self._end({"findings": [self.failure or stuck], "lines": [], "figures": {}}, uses_store=False)
        time.sleep(0.4)
        os._exit(self.exit_code)

    def _end(self, report: dict[str, Any], uses_store: bool = True) -> None:
        """Write the report and end the process. Rank 0 first waits until the other ranks have fetched the report."""
        self.ending.acquire()  # never released: only one thread ends the process
        self.exit_code = int(any(finding["severity"] == "error" for finding in report["findings"]))
        file = Path(self.options.result)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(json.dumps(report, indent=1))
        draft.replace(file)  # a reader never sees a part of it
        if self.owns_log:
            self.log.unlink(missing_ok=True)
        try:
            acks = self.monitor_store.add("acks", 1) if uses_store else self.num_ranks
            until = min(time.monotonic() + ACK_SECONDS, self.began + self.options.seconds - 0.8)
            while self.rank == 0 and acks < self.num_ranks and time.monotonic() < until:  # the store ends with this process
                time.sleep(0.02)
                acks = self.monitor_store.add("acks", 0)
        finally:
            os._exit(self.exit_code)
