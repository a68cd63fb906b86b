"""The last part of `accel-ddp doctor`: one rank of a small real training, `python -m accel_ddp.doctor.collectives --result FILE`.

It promises FILE within --seconds whatever the other ranks do, and the same FILE on every rank as long as rank 0's
store answers.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_ddp.doctor.collective_process import BUCKET, FIX_EFA, HOST, ITEMS, PARAMETERS, TOKENS, USE, Rank, Refused
from accel_ddp.doctor.gpus import cpu_is_wanted


class Child(Rank):
    """What a rank does."""

    def steps(self) -> tuple[Callable[[], None], ...]:
        first = (self.import_torch, self.initialise, self.check_sums, self.measure_bandwidth, self.find_transport)
        return (*first, self.check_gradients, self.estimate_share)

    def import_torch(self) -> None:
        import torch  # seconds; a minute from a cold network disk

        self.torch, self.dist = torch, torch.distributed

    def initialise(self) -> None:
        torch, dist, (host, port) = self.torch, self.dist, self.address.rsplit(":", 1)
        timeout = timedelta(seconds=self.options.seconds + 60)  # after our own, which say more
        while self.rank > 0:  # TCPStore would print a warning for every try
            try:
                socket.create_connection((host, int(port)), timeout=2).close()
                break
            except OSError as error:
                if time.monotonic() > self._give_up_at():
                    text = f"its store at {self.address} cannot be reached: {error}"
                    raise Refused(self.finding("E_COLLECTIVE_STUCK", text, 0)) from error
                time.sleep(0.1)
        connect = lambda serve: dist.TCPStore(host, int(port), is_master=serve, timeout=timeout, wait_for_workers=False)
        self.store = connect(self.rank == 0)
        for rank in range(self.num_ranks if self.rank == 0 else 0):
            self.store.compare_set(f"beat/{rank}", "", "")  # multi_get waits for keys that are not there
        self.ear = connect(False)
        threading.Thread(target=self._listen, daemon=True).start()

        gpus = 0 if cpu_is_wanted() else torch.cuda.device_count()
        index = self.local_rank % max(gpus, 1)
        gpu = str(torch.cuda.get_device_properties(index).uuid) if gpus else None
        # NCCL takes two ranks on one GPU for two nodes if their NCCL_HOSTID differ, and refuses them otherwise.
        mine = {"host": HOST, "node": self.node, "gpu": gpu, "nccl_sees": [os.environ.get("NCCL_HOSTID", HOST), gpu]}
        self.store.set(f"facts/{self.rank}", json.dumps({**mine, "infiniband": _infiniband()}))
        if self.rank == 0:
            self.facts = self._gathered("facts")
            self.store.set("backend", self._backend())
        backend = self.figures["backend"] = self.store.get("backend").decode()
        self.device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(self.device)
        lies_on = torch.zeros(1, device=self.device.type).device
        if lies_on != self.device:
            self.found("E_GPU_PLACEMENT", f"a tensor of local rank {self.local_rank} lies on {lies_on}, not on {self.device}")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=timeout,
            device_id=self.device if backend == "nccl" else None,  # NCCL connects here and not in the first collective
        )
        self.hosts, self.nodes = sorted({fact["host"] for fact in self.facts}), len({fact["node"] for fact in self.facts})
        nccl = " " + ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
        ranks, nodes = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}", f"{self.nodes} node{'s' * (self.nodes > 1)}"
        where = f"{ranks} on {nodes} ({', '.join(self.hosts)})"
        self.say(f"torch {torch.__version__}, {backend}{nccl}: {where}")

    def _gathered(self, name: str) -> list[Any]:
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.num_ranks)]

    def _backend(self) -> str:
        asked, first = self.options.backend, {}
        without = [rank for rank, fact in enumerate(self.facts) if not fact["gpu"]]
        if asked == "gloo" or (asked == "auto" and len(without) == self.num_ranks):
            return "gloo"
        if without:
            names = ", ".join(f"rank {rank} on {self.facts[rank]['host']}" for rank in without)
            raise Refused(self.finding("E_GPU_PLACEMENT", f"no GPU: {names}; NCCL needs one on every rank", without[0]))
        for rank, fact in enumerate(self.facts):
            if first.setdefault(fact["gpu"], rank) != rank:
                self.found("W_GPU_SHARED", f"rank {first[fact['gpu']]} and rank {rank} share the GPU {fact['gpu']}", rank)
        is_alone = len({tuple(fact["nccl_sees"]) for fact in self.facts}) == self.num_ranks
        return "nccl" if asked == "nccl" or is_alone else "gloo"

    def _reduce(self, tensor: Any, operation: str = "SUM") -> Any:
        self._collective(lambda: self.dist.all_reduce(tensor, op=getattr(self.dist.ReduceOp, operation)))
        return tensor

    def _collective(self, do: Callable[[], Any]) -> Any:
        """Counted, so that a rank that does not come can be named; done when it returns, on a GPU too."""
        self.calls += 1
        result = do()
        self._finish()
        return result

    def _finish(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def check_sums(self) -> None:
        torch, n, sizes, wrongs = self.torch, self.num_ranks, (1, 1023, 65536, 1_000_003), []
        for dtype in ("float32", "bfloat16") if self.device.type == "cuda" else ("float32",):
            for size in sizes:
                at = torch.arange(size, device=self.device)
                # Each element from one rank alone, so that a wrong one names it, and from all ranks (of 100 at most: the sums
                # are small whole numbers, exact in bf16 too).
                alone, right_alone = (at % n == self.rank) * (at % 5 + 1), at % 5 + 1
                for mine, right in ((alone, right_alone), ((at + self.rank) % n < 100, at * 0 + min(n, 100))):
                    got = self._reduce(mine.to(getattr(torch, dtype)))
                    for i in (got != right).nonzero().flatten().tolist()[:1]:
                        origin = f"rank {i % n} alone" if mine is alone else "all ranks"
                        text = f"all-reduce of {size} {dtype}: element {i}, from {origin}"
                        wrongs.append(f"{text}, is {got[i].item()}, not {right[i].item()}")
        if wrongs:
            self.found("E_COLLECTIVE_WRONG", wrongs[0])
        self.say(f"all-reduce: the sums are right on every rank ({', '.join(map(str, sizes))} elements)", "E_COLLECTIVE_WRONG")

    def _timed(self, buffer: Any, times: int) -> list[float]:
        """Seconds of each all-reduce, on the rank where it took longest."""
        spans = []
        for _ in range(times):
            began = time.perf_counter()
            self._reduce(buffer)
            spans.append(time.perf_counter() - began)
        return self._reduce(self.torch.tensor(spans, dtype=self.torch.float64, device=self.device), "MAX").tolist()

    def measure_bandwidth(self) -> None:
        largest, seconds = self.options.megabytes or (64 if self.device.type == "cuda" else 8), self.options.seconds
        ring = 2 * (self.num_ranks - 1) / self.num_ranks  # as in nccl-tests: what each link carries, per byte
        self.latency = statistics.median(self._timed(self.torch.zeros(2, device=self.device), 30)[5:])
        per_byte, rows = 0.0, []
        for size in sorted({size * 1_000_000 for size in (1, 8, largest) if size <= largest}):
            if per_byte * size * 7 > seconds / 8:  # the same on all ranks; 2 to warm up and 5 would not fit
                self.say(f"  {size // 1_000_000} MB left out: one would take {per_byte * size:.1f} s")
                continue
            buffer = self.torch.zeros(size // 4, device=self.device)
            slow = self._timed(buffer, 2)[-1]
            spans = self._timed(buffer, max(5, min(100, int(min(2.0, seconds / 12) / slow))))
            per_byte = statistics.median(spans) / size
            rows.append({"bytes": size, "seconds": per_byte * size, "bus_bytes_per_second": ring / per_byte, "times": len(spans)})
            if self.num_ranks == 1:  # nothing travels
                continue
            text = f"bandwidth: {size // 1_000_000} MB in {_short(per_byte * size)}s (median of {len(spans)}, slowest rank)"
            self.say(f"{text}: algorithm {_short(1 / per_byte)}B/s, bus {_short(ring / per_byte)}B/s")
        self.bus = ring / per_byte
        self.say(f"latency: all-reduce of 8 bytes in {_short(self.latency)}s")
        self.figures |= {"bus_bytes_per_second": self.bus, "algorithm_bytes_per_second": 1 / per_byte}
        self.figures |= {"latency_seconds": self.latency, "bandwidth": rows}

    def find_transport(self) -> None:
        log, mine = self._log(), "gloo over TCP"
        names = [os.environ.get("GLOO_SOCKET_IFNAME", "")]
        if self.device.type == "cuda":
            paths, network, names = read_nccl_log(log)
            mine = f"NCCL {' and '.join(paths) or 'in a way that its log does not tell'}, network {network}"
        names = list(dict.fromkeys(filter(None, names)))
        self.store.set(f"transport/{self.rank}", json.dumps(mine + f" through {', '.join(names)}" * bool(names)))
        if self.rank:
            return
        ways = self._gathered("transport")
        for rank, (way, fact) in enumerate(zip(ways, self.facts)):
            if "NET/Socket" in way and fact["infiniband"]:
                text = f"{fact['host']} has {', '.join(fact['infiniband'])}, but NCCL took sockets: {way}"
                self.found("W_SLOW_TRANSPORT", text, rank, FIX_EFA if "efa" in text else "")
        for way in dict.fromkeys(ways):
            ranks = [rank for rank in range(self.num_ranks) if ways[rank] == way]
            self.say(f"transport: {way} ({'every rank' if len(ranks) == len(ways) else f'ranks {ranks}'})")
        self.figures["transport"] = "; ".join(dict.fromkeys(ways))

    def check_gradients(self) -> None:
        torch, nn, device = self.torch, self.torch.nn, self.device

        def model_of(rank: int) -> Any:
            torch.manual_seed(1000 + rank)
            return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)).eval().to(device)

        def fill_buffers_of(model: Any, rank: int) -> None:
            for buffer in model.buffers():
                buffer.fill_(rank + 1)

        def loss_of(model: Any, rank: int) -> Any:
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
            return model(inputs.to(device)).square().mean()

        alone, mine = model_of(0), model_of(self.rank)
        devices = [device] if device.type == "cuda" else None
        ddp = self._collective(lambda: nn.parallel.DistributedDataParallel(mine, device_ids=devices))
        if not all(map(torch.equal, mine.parameters(), alone.parameters())):
            self.found("E_WEIGHTS", "the weights are not rank 0's after DDP has sent them")
        fill_buffers_of(alone, 0)
        fill_buffers_of(mine, self.rank)
        loss = self._collective(lambda: loss_of(ddp, self.rank))
        if not all(map(torch.equal, mine.buffers(), alone.buffers())):
            self.found("E_BUFFERS", "the buffers (BatchNorm) are not rank 0's after a forward pass")
        self._collective(lambda: torch.autograd.backward([loss]))
        weights = list(alone.parameters())
        local = [torch.autograd.grad(loss_of(alone, rank), weights) for rank in range(self.num_ranks)]
        offs = []
        for weight, parts in zip(mine.parameters(), zip(*local)):
            right = sum(parts) / self.num_ranks
            offs.append(((weight.grad - right).abs().max() / right.abs().max()).item())
            weight.data.sub_(weight.grad, alpha=0.1)  # a step of SGD
        if not all(off < 1e-5 for off in offs):  # nor is NaN
            text = ", ".join(f"{off:.0e}" for off in offs)
            self.found("E_GRADIENTS", f"gradients are not the average of all ranks', but off by (relative, of each layer) {text}")
        content = b"".join(weight.detach().cpu().numpy().tobytes() for weight in mine.parameters())
        self.store.set(f"weights/{self.rank}", json.dumps(hashlib.sha256(content).hexdigest()))
        hashes = self._gathered("weights") if self.rank == 0 else []
        for rank in [rank for rank, value in enumerate(hashes) if value != hashes[0]]:
            self.found("E_WEIGHTS", f"after a step the weights of rank {rank} are not those of rank 0", rank)
        self.say("DDP: rank 0's weights reach every rank and are the same bits after a step", "E_WEIGHTS")
        self.say("DDP: rank 0's buffers reach every rank in a forward pass", "E_BUFFERS")
        self.say(f"DDP: gradients are the average of all ranks' (relative difference on rank 0: {max(offs):.0e})", "E_GRADIENTS")

    def estimate_share(self) -> None:
        torch, on_gpu, given = self.torch, self.device.type == "cuda", self.options.step_ms
        side, times = (4096, 20) if on_gpu else (512, 5)
        matrix = torch.randn(side, side, device=self.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        spans = []
        for _ in range(5):  # the first ones choose a kernel and wake the clock; many at once, for a launch takes as long as one
            began = time.perf_counter()
            for _ in range(times):
                torch.mm(matrix, matrix)
            self._finish()
            spans.append((time.perf_counter() - began) / times)
        slowest = self._reduce(torch.tensor([min(spans)], dtype=torch.float64, device=self.device), "MAX").item()
        flops = self.figures["flops_per_second"] = 2 * side**3 / slowest
        if self.rank or self.num_ranks == 1:
            self.say("one rank alone: nothing travels, and there is no table of efficiency")
            return
        parameters = (self.options.model_bytes or 4 * PARAMETERS) / 4
        compute = given / 1000 if given else 6 * parameters * ITEMS * TOKENS / (USE * flops)
        hop = self.latency / (2 * (self.num_ranks - 1))
        table = self.figures["table"] = [
            expected_step(nodes, self.local_ranks, 4 * parameters, compute, self.bus, hop)
            for nodes in sorted({self.nodes, 2, 4, 8, 16})
        ]
        sizes = f"{_short(4 * parameters)}B of gradients, {_short(compute)}s of computing"
        self.say(f"expected share of a step in which a rank computes; {sizes}:")
        self.say("  nodes  ranks  communication  nothing overlaps  hidden behind the backward pass")
        for row in table:
            text = f"  {row['nodes']:5}  {row['ranks']:5}  {_short(row['communication_seconds']) + 's':>13}"
            self.say(f"{text}  {row['worst']:16.0%}  {row['best']:31.0%}" + "  <- here" * (row["nodes"] == self.nodes))
        kind = f"{'bf16' if on_gpu else 'float32'} matmul of {side}: {_short(flops)}FLOP/s on the slowest rank"
        self.say(f"  measured: bus bandwidth, latency, {kind}.")
        assumed = [] if self.options.model_bytes else [f"{PARAMETERS // 10**6} M parameters in fp32, as BERT-base"]
        assumed += [] if given else [f"{ITEMS} items of {TOKENS} tokens per rank and step at {USE:.0%} of these FLOP/s"]
        self.say(f"  assumed: {'; '.join([*assumed, 'a ring with the same bandwidth at every size'])}.")
        if len(self.hosts) == 1:
            self.say(f"  All ranks are on {self.hosts[0]}: the table is for links between nodes as fast as those measured here.")
        here = next(row for row in table if row["nodes"] == self.nodes)
        if here["worst"] < 0.8:
            hook = f"--comm_hook {'bf16' if on_gpu else 'fp16'} (half the bytes)"
            self.say(
                f"  What helps: a larger --global_batch_size in more micro-batches (fewer synchronisations per item); {hook}."
            )


def read_nccl_log(log: str) -> tuple[list[str], str, list[str]]:
    """Ways between ranks ("P2P/CUMEM", "NET/Socket"), the network for other nodes, its interfaces. Empty where it is silent."""
    paths = {"/".join(filter(None, path)) for path in re.findall(r" via (P2P|SHM|NET)(?:/([A-Za-z][\w ]*))?", log)}
    network = re.findall(r"Using network (.*\S)", log)[:1] or ["unknown"]
    names = re.findall(r"\[\d+\]([\w.-]+):", "\n".join(re.findall(r"NET/\w+ ?: Using (.*)", log)))
    return sorted(paths), network[0], names


def expected_step(nodes: int, local_ranks: int, size: float, compute: float, bus: float, hop: float) -> dict[str, float]:
    """Of a ring over all ranks: a step's seconds of communication, and the share of it that computes, at worst and at best."""
    ranks = nodes * local_ranks
    communication = 2 * (ranks - 1) / ranks * size / bus + 2 * (ranks - 1) * hop * math.ceil(size / BUCKET)
    exposed = max(0.0, communication - compute * 2 / 3)  # the backward pass is two thirds
    shares = {"worst": compute / (compute + communication), "best": compute / (compute + exposed)}
    return {"nodes": nodes, "ranks": ranks, "communication_seconds": communication, "compute_seconds": compute, **shares}


def _infiniband() -> list[str]:
    """Devices with a port that is up, with their drivers; Amazon's EFA is among them."""
    devices = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        ports = []
        with contextlib.suppress(OSError):  # a container may show the folder and not let it be read
            ports = [port.read_text() for port in device.glob("ports/*/state")]
        if not ports or any("ACTIVE" in port for port in ports):
            devices.append(f"{device.name} ({(device / 'device' / 'driver').resolve().name})")
    return devices


def _short(value: float) -> str:
    """With three digits and the letter of the unit: 12.3 G."""
    units = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1, "m": 1e-3, "u": 1e-6}
    letter = next((letter for letter, unit in units.items() if value >= unit), "u")
    return f"{value / units[letter]:.3g} {letter}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", required=True)
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model_bytes", type=float)
    parser.add_argument("--step_ms", type=float)
    parser.add_argument("--megabytes", type=int)
    options = parser.parse_args()
    if sys.platform == "linux":  # a doctor that is killed takes its ranks with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    Child(options).run()


if __name__ == "__main__":
    main()
