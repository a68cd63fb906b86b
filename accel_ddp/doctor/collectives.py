"""The doctor's collective checks on one rank: `python -m accel_ddp.doctor.collectives SPEC PARENT`, see `collective_worker`.

The main thread runs the steps. A second thread, with its own connection to the store of rank 0, publishes the progress of this
rank, receives the report and ends the process. A third thread ends the process if the store does not answer either. The process
reports within the time limit, whatever the other ranks do. Every rank has the same report as long as the store of rank 0 answers.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from accel_ddp.doctor import collective_worker
from accel_ddp.doctor.collective_worker import CollectiveWorker, read_nccl_log, report
from accel_ddp.doctor.findings import Finding
from accel_ddp.doctor.host import HOST, port_answers
from accel_ddp.nodes.launcher import cpu_is_wanted
from accel_ddp.text import counted, format_si

STEPS = ("import torch", "initialize", "all-reduce is right", "bandwidth", "transport", "gradient synchronization", "report")
REPORT = len(STEPS) - 1
POLL_SECONDS = 0.5
SILENT_SECONDS = 2.0  # without progress messages, until a rank is reported as silent
FAILURE_SECONDS = 3.0  # a rank that failed waits this long before it reports, because a rank that died may be the cause
LEAVE_SECONDS = 10.0  # for all ranks to fetch the report from rank 0's store
FIX_DEAD_RANK = "find out on that host why the rank died or hangs: its output, dmesg (out of memory), nvidia-smi"
FIX_EFA = "install aws-ofi-nccl and libfabric, with its folder in LD_LIBRARY_PATH: without it NCCL does not use EFA"


class CheckFailed(Exception):
    """A check has found what is wrong, and the steps end. The argument is the finding as a dictionary."""


class CollectiveChecks(CollectiveWorker):
    def __init__(self, spec: dict[str, Any]):
        super().__init__(spec)
        self.seconds, self.began = spec["seconds"], time.monotonic()
        # Then waiting for other ranks ends. The rest of the time limit is for sending the report.
        self.give_up_at = self.began + self.seconds - min(3.0, self.seconds / 4)
        self.nodes = [node for node, count in enumerate(spec["ranks_of_nodes"]) for _ in range(count)]  # of each rank
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.step, self.step_began = 0, self.began
        self.store = None  # connection of the main thread, which may block in it
        self.monitor_store = None  # connection of the monitor thread
        self.failure, self.report_failure_at = None, math.inf
        self.ending, self.exit_code = threading.Lock(), 1
        # On rank 0: the facts of each rank, and lines as (step, code of the finding that contradicts the line, text).
        self.facts, self.lines, self.figures = [], [], {}
        self.beats, self.beat_times = [b""] * self.num_ranks, [self.began] * self.num_ranks

    def finding(self, code: str, saw: str, rank: int | None = None, fix: str | None = None) -> dict[str, Any]:
        """Return a finding about a rank, by default this one. Only rank 0 has the hosts of the other ranks."""
        rank = self.rank if rank is None else rank
        about = {"host": HOST if rank == self.rank else "?" if rank else os.environ["MASTER_ADDR"], "node": self.nodes[rank]}
        about |= {name: self.facts[rank][name] for name in about} if self.facts else {}
        return Finding(code, saw, fix, rank=rank, **about).as_dict()

    def add_finding(self, code: str, saw: str, rank: int | None = None, fix: str | None = None) -> None:
        self.store.set(f"finding/{self.store.add('findings', 1)}", json.dumps(self.finding(code, saw, rank, fix)))

    def add_line(self, text: str, unless: str = "") -> None:
        self.lines.append((self.step, unless, text))

    def run(self) -> None:
        """Run the steps. This function does not return: the monitor thread ends the process."""
        threading.Thread(target=self._enforce_deadline, daemon=True).start()
        try:
            steps = (self.import_torch, self.connect, self.check_sums, self.measure_bandwidth, self.find_transport)
            for number, do in enumerate((*steps, self.check_gradients, lambda: None)):
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
            self._end_alone(self.failure)
        threading.Event().wait()

    def _monitor(self) -> None:
        try:
            for beat in range(1 << 40):
                now = time.monotonic()
                self.monitor_store.set(f"beat/{self.rank}", json.dumps([beat, self.step, self.num_collectives]))
                # Importing torch may take long on some ranks. Until all ranks are initialized, only the total time counts.
                is_late = now > self.give_up_at or (self.step > 1 and now - self.step_began > self.seconds / 3)
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
            self._end_alone(self.finding("E_COLLECTIVE_FAILED", text, 0))

    def _compose_report_if_over(self, now: float) -> None:
        store = self.monitor_store
        for rank, beat in enumerate(store.multi_get([f"beat/{rank}" for rank in range(self.num_ranks)])):
            if beat != self.beats[rank]:
                self.beats[rank], self.beat_times[rank] = beat, now
        reached = [json.loads(beat)[1:] if beat else [-1, 0] for beat in self.beats]  # step and collectives; -1: not connected
        silent = [rank for rank in range(self.num_ranks) if reached[rank][0] < 0 or now - self.beat_times[rank] > SILENT_SECONDS]
        findings = []
        if store.check(["failed"]):
            findings = [json.loads(store.get("failed"))]
            if silent and findings[0]["code"] == "E_COLLECTIVE_FAILED":  # the silent rank is the cause
                text = f"{self._describe_progress(silent[0], reached)}; rank {findings[0]['rank']} saw: {findings[0]['saw']}"
                findings = [self.finding("E_COLLECTIVE_FAILED", text, silent[0], FIX_DEAD_RANK)]
        elif min(reached)[0] < REPORT and store.check(["late"]):
            behind = silent or [rank for rank in range(self.num_ranks) if reached[rank] < max(reached)]
            ranks = "; ".join(self._describe_progress(rank, reached) for rank in behind[:8])
            text = f"stuck in step '{STEPS[max(reached)[0]]}' for {store.get('late').decode()} s: "
            text += ranks or "every rank has entered the collective, and none returns"
            found = self.finding("E_COLLECTIVE_STUCK", text, behind[0] if behind else None)
            findings = [found if behind else found | {"host": "every host", "node": None, "rank": None}]
        elif min(reached)[0] < REPORT:
            return
        findings += [json.loads(store.get(f"finding/{i + 1}")) for i in range(store.add("findings", 0))]
        codes = {finding["code"] for finding in findings}
        lines = [text for step, unless, text in self.lines if step < min(reached)[0] and unless not in codes]
        store.set("report", json.dumps({"findings": findings, "lines": lines, "figures": dict(self.figures)}))

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
        time.sleep(self.seconds - 0.7)  # starting the interpreter takes a part of the limit
        if not self.ending.locked():
            waits = f": the store of rank 0 at {self.address} does not answer" if self.step else ""
            stuck = self.finding("E_COLLECTIVE_STUCK", f"stuck in step '{STEPS[self.step]}'{waits}", 0 if self.step else None)
            self._end_alone(self.failure or stuck)
        time.sleep(0.4)
        os._exit(self.exit_code)

    def _end_alone(self, finding: dict[str, Any]) -> None:
        self._end({"findings": [finding], "lines": [], "figures": {}}, uses_store=False)

    def _end(self, found: dict[str, Any], uses_store: bool = True) -> None:
        """Print the report and end the process. Rank 0 first waits until the other ranks have fetched the report."""
        self.ending.acquire()  # never released: only one thread ends the process
        self.exit_code = int(any(finding["severity"] == "error" for finding in found["findings"]))
        try:
            report("report", **found)
            if uses_store:
                limit = self.began + self.seconds - 0.8 - time.monotonic()
                self.wait_until_all_left(self.monitor_store, min(LEAVE_SECONDS, limit))
        finally:
            os._exit(self.exit_code)

    # ---- the steps

    def connect(self) -> None:
        torch, seconds = self.torch, self.seconds + 60  # later than the time limits here, which report more
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        while self.rank > 0 and not port_answers(*address):  # TCPStore itself would print a warning for every attempt
            if time.monotonic() > self.give_up_at:
                raise CheckFailed(self.finding("E_COLLECTIVE_STUCK", f"its store at {self.address} cannot be reached", 0))
            time.sleep(0.1)
        self.store = self.connect_store(self.rank == 0, seconds)
        for rank in range(self.num_ranks if self.rank == 0 else 0):
            self.store.compare_set(f"beat/{rank}", "", "")  # multi_get would wait for keys that do not exist
        self.monitor_store = self.connect_store(False, seconds)
        threading.Thread(target=self._monitor, daemon=True).start()

        num_gpus = 0 if cpu_is_wanted() else torch.cuda.device_count()
        index = self.local_rank % max(num_gpus, 1)
        gpu = str(torch.cuda.get_device_properties(index).uuid) if num_gpus else None
        # NCCL refuses two ranks on one GPU, unless their NCCL_HOSTID differ: then it takes them for two nodes.
        mine = {"host": HOST, "node": self.nodes[self.rank], "gpu": gpu, "nccl_sees": [os.environ.get("NCCL_HOSTID", HOST), gpu]}
        self.store.set(f"facts/{self.rank}", json.dumps({**mine, "infiniband": find_infiniband_devices()}))
        if self.rank == 0:
            self.facts = self._gather("facts")
            self.store.set("backend", self._choose_backend())
        backend = self.figures["backend"] = self.store.get("backend").decode()
        self.use_device(torch.device("cuda", index) if backend == "nccl" else torch.device("cpu"))
        actual = torch.zeros(1, device=self.device.type).device
        if actual != self.device:
            self.add_finding("E_GPU_PLACEMENT", f"a tensor of local rank {self.local_rank} is on {actual}, not on {self.device}")
        self.open_group(self.store, seconds)
        hosts, num_nodes = sorted({fact["host"] for fact in self.facts}), len(set(self.nodes))
        nccl = f" {self.nccl_version()}" if backend == "nccl" else ""
        ranks, nodes = counted(self.num_ranks, "rank"), counted(num_nodes, "node")
        self.add_line(f"torch {torch.__version__}, {backend}{nccl}: {ranks} on {nodes} ({', '.join(hosts)})")

    def _gather(self, name: str) -> list[Any]:
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.num_ranks)]

    def _choose_backend(self) -> str:
        requested, first = self.spec["backend"], {}
        without = [rank for rank, fact in enumerate(self.facts) if not fact["gpu"]]
        if requested == "gloo" or (requested == "auto" and len(without) == self.num_ranks):
            return "gloo"
        if without:
            names = ", ".join(f"rank {rank} on {self.facts[rank]['host']}" for rank in without)
            raise CheckFailed(self.finding("E_GPU_PLACEMENT", f"no GPU: {names}; NCCL needs one on every rank", without[0]))
        for rank, fact in enumerate(self.facts):
            if first.setdefault(fact["gpu"], rank) != rank:
                self.add_finding("W_GPU_SHARED", f"rank {first[fact['gpu']]} and rank {rank} share the GPU {fact['gpu']}", rank)
        has_own_gpus = len({tuple(fact["nccl_sees"]) for fact in self.facts}) == self.num_ranks
        return "nccl" if requested == "nccl" or has_own_gpus else "gloo"

    def check_sums(self) -> None:
        torch, n, sizes, wrong = self.torch, self.num_ranks, (1, 1023, 65536, 1_000_003), []
        for dtype in ("float32", "bfloat16") if self.device.type == "cuda" else ("float32",):
            for size in sizes:
                at = torch.arange(size, device=self.device)
                # One rank per element: a wrong one names its rank. Then up to 100: their sums are exact in bf16 too.
                single, expected_single = (at % n == self.rank) * (at % 5 + 1), at % 5 + 1
                for mine, expected in ((single, expected_single), ((at + self.rank) % n < 100, at * 0 + min(n, 100))):
                    got = self.all_reduce(mine.to(getattr(torch, dtype)))
                    for i in (got != expected).nonzero().flatten().tolist()[:1]:
                        origin = f"rank {i % n} alone" if mine is single else "all ranks"
                        text = f"all-reduce of {size} {dtype}: element {i}, from {origin}"
                        wrong.append(f"{text}, is {got[i].item()}, not {expected[i].item()}")
        if wrong:
            self.add_finding("E_COLLECTIVE_WRONG", wrong[0])
        sizes = ", ".join(map(str, sizes))
        self.add_line(f"all-reduce: the sums are right on every rank ({sizes} elements)", unless="E_COLLECTIVE_WRONG")

    def measure_bandwidth(self) -> None:
        largest, seconds = self.spec["megabytes"] or (64 if self.device.type == "cuda" else 8), self.seconds
        time_all_reduces = lambda buffer, times: [ms / 1000 for ms in self.time_each(lambda: self.dist.all_reduce(buffer), times)]
        ring = 2 * (self.num_ranks - 1) / self.num_ranks  # bytes that each link carries, per byte of the buffer
        latency = statistics.median(time_all_reduces(self.torch.zeros(2, device=self.device), 30)[5:])
        per_byte, rows = 0.0, []
        for size in sorted({size * 1_000_000 for size in (1, 8, largest) if size <= largest}):
            if per_byte * size * 7 > seconds / 8:  # 2 warm-ups and 5 measurements; all ranks decide the same
                self.add_line(f"  {size // 1_000_000} MB skipped: one all-reduce would take {per_byte * size:.1f} s")
                continue
            buffer = self.torch.zeros(size // 4, device=self.device)
            first = time_all_reduces(buffer, 2)[-1]
            durations = time_all_reduces(buffer, max(5, min(100, int(min(2.0, seconds / 12) / first))))
            per_byte = statistics.median(durations) / size
            row = {"bytes": size, "seconds": per_byte * size, "bus_bytes_per_second": ring / per_byte, "times": len(durations)}
            rows.append(row)
            if self.num_ranks == 1:  # nothing is sent
                continue
            took = f"{size // 1_000_000} MB in {format_si(per_byte * size)}s (median of {len(durations)}, slowest rank)"
            rates = f"algorithm {format_si(1 / per_byte)}B/s, bus {format_si(ring / per_byte)}B/s"
            self.add_line(f"bandwidth: {took}: {rates}")
        self.add_line(f"latency: all-reduce of 8 bytes in {format_si(latency)}s")
        self.figures |= {"bus_bytes_per_second": ring / per_byte, "algorithm_bytes_per_second": 1 / per_byte}
        self.figures |= {"latency_seconds": latency, "bandwidth": rows}

    def find_transport(self) -> None:
        transport, names = "gloo over TCP", [os.environ.get("GLOO_SOCKET_IFNAME", "")]
        if self.device.type == "cuda":
            ways, network, names = read_nccl_log(self.read_log())
            transport = f"NCCL {' and '.join(ways) or 'with a transport that its log does not show'}, network {network}"
        names = list(dict.fromkeys(filter(None, names)))
        self.store.set(f"transport/{self.rank}", json.dumps(transport + f" through {', '.join(names)}" * bool(names)))
        if self.rank:
            return
        transports = self._gather("transport")
        for rank, (one, fact) in enumerate(zip(transports, self.facts)):
            if "NET/Socket" in one and fact["infiniband"]:
                text = f"{fact['host']} has {', '.join(fact['infiniband'])}, but NCCL uses sockets: {one}"
                self.add_finding("W_SLOW_TRANSPORT", text, rank, FIX_EFA if "efa" in text else None)
        for one in dict.fromkeys(transports):
            ranks = [rank for rank in range(self.num_ranks) if transports[rank] == one]
            self.add_line(f"transport: {one} ({'every rank' if len(ranks) == len(transports) else f'ranks {ranks}'})")
        self.figures["transport"] = "; ".join(dict.fromkeys(transports))

    def check_gradients(self) -> None:
        torch, nn, device = self.torch, self.torch.nn, self.device

        def make_model(rank: int) -> Any:
            torch.manual_seed(1000 + rank)
            return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)).eval().to(device)

        def compute_loss(model: Any, rank: int) -> Any:
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
            return model(inputs.to(device)).square().mean()

        def compare(what: str, ours: Any, expected: Any) -> None:
            if not all(map(torch.equal, ours, expected)):
                self.add_finding("E_COLLECTIVE_WRONG", f"DDP: {what}")

        reference, mine = make_model(0), make_model(self.rank)
        devices = [device] if device.type == "cuda" else None
        ddp = self.collective(lambda: nn.parallel.DistributedDataParallel(mine, device_ids=devices))
        compare("the weights differ from rank 0 after DDP has sent them", mine.parameters(), reference.parameters())
        for model, rank in ((reference, 0), (mine, self.rank)):
            for buffer in model.buffers():
                buffer.fill_(rank + 1)
        loss = self.collective(lambda: compute_loss(ddp, self.rank))
        compare("the buffers (BatchNorm) differ from rank 0 after a forward pass", mine.buffers(), reference.buffers())
        self.collective(lambda: torch.autograd.backward([loss]))
        weights = list(reference.parameters())
        local = [torch.autograd.grad(compute_loss(reference, rank), weights) for rank in range(self.num_ranks)]
        errors = []
        for weight, parts in zip(mine.parameters(), zip(*local)):
            expected = sum(parts) / self.num_ranks
            errors.append(((weight.grad - expected).abs().max() / expected.abs().max()).item())
            weight.data.sub_(weight.grad, alpha=0.1)  # a step of SGD
        if not all(error < 1e-5 for error in errors):  # also true for NaN
            text = ", ".join(f"{error:.0e}" for error in errors)
            text = f"DDP: gradients are not the average of all ranks'; relative error of each layer: {text}"
            self.add_finding("E_COLLECTIVE_WRONG", text)
        content = b"".join(weight.detach().cpu().numpy().tobytes() for weight in mine.parameters())
        self.store.set(f"weights/{self.rank}", json.dumps(hashlib.sha256(content).hexdigest()))
        hashes = self._gather("weights") if self.rank == 0 else []
        for rank in [rank for rank, value in enumerate(hashes) if value != hashes[0]]:
            self.add_finding("E_COLLECTIVE_WRONG", f"DDP: after a step, the weights of rank {rank} differ from rank 0", rank)
        text = f"DDP: gradients are the average of all ranks' (relative difference on rank 0: {max(errors):.0e}), and every rank has "
        self.add_line(f"{text}rank 0's buffers and, after a step, its weights", unless="E_COLLECTIVE_WRONG")


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


if __name__ == "__main__":
    collective_worker.main(CollectiveChecks)
