"""The collective checks of one rank: `python -m accel_ddp.doctor.collectives --result FILE`.

The process writes FILE within --seconds, whatever the other ranks do. FILE is the same on every rank as long as the store of
rank 0 answers.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from accel_ddp.doctor.collective_process import (
    ITEMS,
    PARAMETERS,
    TOKENS,
    UTILISATION,
    CheckFailed,
    RankProcess,
    expected_step,
    find_infiniband_devices,
    read_nccl_log,
)
from accel_ddp.doctor.host import HOST
from accel_ddp.nodes.launcher import cpu_is_wanted
from accel_ddp.text import counted, format_si

FIX_EFA = "install aws-ofi-nccl and libfabric, with its folder in LD_LIBRARY_PATH: without it NCCL does not use EFA"


class CollectiveChecks(RankProcess):
    """The steps of the checks. torch is imported in the first step, because importing it may hang."""

    def steps(self) -> tuple[Callable[[], None], ...]:
        first = (self.import_torch, self.initialise, self.check_sums, self.measure_bandwidth, self.find_transport)
        return (*first, self.check_gradients, self.estimate_share)

    def import_torch(self) -> None:
        import torch  # takes seconds; a minute from a cold network disk

        self.torch, self.dist = torch, torch.distributed

    def initialise(self) -> None:
        """Connect to the store of rank 0, choose the backend and create the process group."""
        torch, dist, (host, port) = self.torch, self.dist, self.address.rsplit(":", 1)
        timeout = timedelta(seconds=self.options.seconds + 60)  # later than the time limits here, which report more
        if self.rank > 0:
            self._wait_for_store(host, int(port))
        connect = lambda is_server: dist.TCPStore(host, int(port), is_master=is_server, timeout=timeout, wait_for_workers=False)
        self.store = connect(self.rank == 0)
        for rank in range(self.num_ranks if self.rank == 0 else 0):
            self.store.compare_set(f"beat/{rank}", "", "")  # multi_get would wait for keys that do not exist
        self.monitor_store = connect(False)
        self.start_monitor()

        num_gpus = 0 if cpu_is_wanted() else torch.cuda.device_count()
        index = self.local_rank % max(num_gpus, 1)
        gpu = str(torch.cuda.get_device_properties(index).uuid) if num_gpus else None
        # NCCL refuses two ranks on one GPU, unless their NCCL_HOSTID differ: then it takes them for two nodes.
        mine = {"host": HOST, "node": self.node, "gpu": gpu, "nccl_sees": [os.environ.get("NCCL_HOSTID", HOST), gpu]}
        self.store.set(f"facts/{self.rank}", json.dumps({**mine, "infiniband": find_infiniband_devices()}))
        if self.rank == 0:
            self.facts = self._gather("facts")
            self.store.set("backend", self._choose_backend())
        backend = self.figures["backend"] = self.store.get("backend").decode()
        self.device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(self.device)
        actual = torch.zeros(1, device=self.device.type).device
        if actual != self.device:
            self.add_finding("E_GPU_PLACEMENT", f"a tensor of local rank {self.local_rank} is on {actual}, not on {self.device}")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=timeout,
            device_id=self.device if backend == "nccl" else None,  # NCCL then connects here, not in the first collective
        )
        self.hosts, self.num_nodes = sorted({fact["host"] for fact in self.facts}), len({fact["node"] for fact in self.facts})
        nccl = " " + ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
        ranks, nodes = counted(self.num_ranks, "rank"), counted(self.num_nodes, "node")
        self.add_line(f"torch {torch.__version__}, {backend}{nccl}: {ranks} on {nodes} ({', '.join(self.hosts)})")

    def _wait_for_store(self, host: str, port: int) -> None:
        """Wait until rank 0's store listens. TCPStore itself would print a warning for every attempt."""
        while True:
            try:
                socket.create_connection((host, port), timeout=2).close()
                return
            except OSError as error:
                if time.monotonic() > self.give_up_at():
                    text = f"its store at {self.address} cannot be reached: {error}"
                    raise CheckFailed(self.finding("E_COLLECTIVE_STUCK", text, 0)) from error
                time.sleep(0.1)

    def _gather(self, name: str) -> list[Any]:
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.num_ranks)]

    def _choose_backend(self) -> str:
        requested, first = self.options.backend, {}
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

    def _all_reduce(self, tensor: Any, operation: str = "SUM") -> Any:
        self._collective(lambda: self.dist.all_reduce(tensor, op=getattr(self.dist.ReduceOp, operation)))
        return tensor

    def _collective(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns when it is complete, also on a GPU. Calls are counted to find ranks that lag behind."""
        self.num_collectives += 1
        result = call()
        self._synchronize()
        return result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def check_sums(self) -> None:
        """Compare all-reduces of several sizes and types with the known sums."""
        torch, n, sizes, wrong = self.torch, self.num_ranks, (1, 1023, 65536, 1_000_003), []
        for dtype in ("float32", "bfloat16") if self.device.type == "cuda" else ("float32",):
            for size in sizes:
                at = torch.arange(size, device=self.device)
                # First each element comes from one rank, so that a wrong element identifies the rank. Then each comes from
                # all ranks, or from 100 of them, so that sums are small whole numbers, which are exact in bf16 too.
                single, expected_single = (at % n == self.rank) * (at % 5 + 1), at % 5 + 1
                for mine, expected in ((single, expected_single), ((at + self.rank) % n < 100, at * 0 + min(n, 100))):
                    got = self._all_reduce(mine.to(getattr(torch, dtype)))
                    for i in (got != expected).nonzero().flatten().tolist()[:1]:
                        origin = f"rank {i % n} alone" if mine is single else "all ranks"
                        text = f"all-reduce of {size} {dtype}: element {i}, from {origin}"
                        wrong.append(f"{text}, is {got[i].item()}, not {expected[i].item()}")
        if wrong:
            self.add_finding("E_COLLECTIVE_WRONG", wrong[0])
        sizes = ", ".join(map(str, sizes))
        self.add_line(f"all-reduce: the sums are right on every rank ({sizes} elements)", unless="E_COLLECTIVE_WRONG")

    def _time_all_reduces(self, buffer: Any, times: int) -> list[float]:
        """Return the seconds of each all-reduce on the rank where it took longest."""
        durations = []
        for _ in range(times):
            began = time.perf_counter()
            self._all_reduce(buffer)
            durations.append(time.perf_counter() - began)
        return self._all_reduce(self.torch.tensor(durations, dtype=self.torch.float64, device=self.device), "MAX").tolist()

    def measure_bandwidth(self) -> None:
        """Measure the latency and the bandwidth of all-reduces, defined as in nccl-tests."""
        largest, seconds = self.options.megabytes or (64 if self.device.type == "cuda" else 8), self.options.seconds
        ring = 2 * (self.num_ranks - 1) / self.num_ranks  # bytes that each link carries, per byte of the buffer
        self.latency = statistics.median(self._time_all_reduces(self.torch.zeros(2, device=self.device), 30)[5:])
        per_byte, rows = 0.0, []
        for size in sorted({size * 1_000_000 for size in (1, 8, largest) if size <= largest}):
            if per_byte * size * 7 > seconds / 8:  # 2 warm-ups and 5 measurements; all ranks decide the same
                self.add_line(f"  {size // 1_000_000} MB skipped: one all-reduce would take {per_byte * size:.1f} s")
                continue
            buffer = self.torch.zeros(size // 4, device=self.device)
            first = self._time_all_reduces(buffer, 2)[-1]
            durations = self._time_all_reduces(buffer, max(5, min(100, int(min(2.0, seconds / 12) / first))))
            per_byte = statistics.median(durations) / size
            rows.append(
                {"bytes": size, "seconds": per_byte * size, "bus_bytes_per_second": ring / per_byte, "times": len(durations)}
            )
            if self.num_ranks == 1:  # nothing is sent
                continue
            took = f"{size // 1_000_000} MB in {format_si(per_byte * size)}s (median of {len(durations)}, slowest rank)"
            rates = f"algorithm {format_si(1 / per_byte)}B/s, bus {format_si(ring / per_byte)}B/s"
            self.add_line(f"bandwidth: {took}: {rates}")
        self.bus = ring / per_byte
        self.add_line(f"latency: all-reduce of 8 bytes in {format_si(self.latency)}s")
        self.figures |= {"bus_bytes_per_second": self.bus, "algorithm_bytes_per_second": 1 / per_byte}
        self.figures |= {"latency_seconds": self.latency, "bandwidth": rows}

    def find_transport(self) -> None:
        """Report which transport and interface each rank uses, and warn about sockets where there is InfiniBand."""
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
                self.add_finding("W_SLOW_TRANSPORT", text, rank, FIX_EFA if "efa" in text else "")
        for one in dict.fromkeys(transports):
            ranks = [rank for rank in range(self.num_ranks) if transports[rank] == one]
            self.add_line(f"transport: {one} ({'every rank' if len(ranks) == len(transports) else f'ranks {ranks}'})")
        self.figures["transport"] = "; ".join(dict.fromkeys(transports))

    def check_gradients(self) -> None:
        """Run one step of a small DDP model, and compare weights, buffers and gradients with those of a single process."""
        torch, nn, device = self.torch, self.torch.nn, self.device

        def make_model(rank: int) -> Any:
            torch.manual_seed(1000 + rank)
            return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)).eval().to(device)

        def fill_buffers(model: Any, rank: int) -> None:
            for buffer in model.buffers():
                buffer.fill_(rank + 1)

        def compute_loss(model: Any, rank: int) -> Any:
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
            return model(inputs.to(device)).square().mean()

        reference, mine = make_model(0), make_model(self.rank)
        devices = [device] if device.type == "cuda" else None
        ddp = self._collective(lambda: nn.parallel.DistributedDataParallel(mine, device_ids=devices))
        if not all(map(torch.equal, mine.parameters(), reference.parameters())):
            self.add_finding("E_WEIGHTS", "the weights are not those of rank 0 after DDP has sent them")
        fill_buffers(reference, 0)
        fill_buffers(mine, self.rank)
        loss = self._collective(lambda: compute_loss(ddp, self.rank))
        if not all(map(torch.equal, mine.buffers(), reference.buffers())):
            self.add_finding("E_BUFFERS", "the buffers (BatchNorm) are not those of rank 0 after a forward pass")
        self._collective(lambda: torch.autograd.backward([loss]))
        weights = list(reference.parameters())
        local = [torch.autograd.grad(compute_loss(reference, rank), weights) for rank in range(self.num_ranks)]
        errors = []
        for weight, parts in zip(mine.parameters(), zip(*local)):
            expected = sum(parts) / self.num_ranks
            errors.append(((weight.grad - expected).abs().max() / expected.abs().max()).item())
            weight.data.sub_(weight.grad, alpha=0.1)  # a step of SGD
        if not all(error < 1e-5 for error in errors):  # also true for NaN
            text = ", ".join(f"{error:.0e}" for error in errors)
            self.add_finding("E_GRADIENTS", f"gradients are not the average of all ranks'; relative error of each layer: {text}")
        content = b"".join(weight.detach().cpu().numpy().tobytes() for weight in mine.parameters())
        self.store.set(f"weights/{self.rank}", json.dumps(hashlib.sha256(content).hexdigest()))
        hashes = self._gather("weights") if self.rank == 0 else []
        for rank in [rank for rank, value in enumerate(hashes) if value != hashes[0]]:
            self.add_finding("E_WEIGHTS", f"after a step, the weights of rank {rank} are not those of rank 0", rank)
        self.add_line("DDP: every rank has rank 0's weights, and the same bits after a step", unless="E_WEIGHTS")
        self.add_line("DDP: every rank has rank 0's buffers after a forward pass", unless="E_BUFFERS")
        text = f"DDP: gradients are the average of all ranks' (relative difference on rank 0: {max(errors):.0e})"
        self.add_line(text, unless="E_GRADIENTS")

    def estimate_share(self) -> None:
        """Report which share of a step communication would take on 2 to 16 nodes."""
        on_gpu, step_ms = self.device.type == "cuda", self.options.step_ms
        side, flops = self._measure_flops(on_gpu)
        if self.rank or self.num_ranks == 1:
            self.add_line("one rank alone: nothing is sent, so there is no table of efficiency")
            return
        parameters = (self.options.model_bytes or 4 * PARAMETERS) / 4
        compute = step_ms / 1000 if step_ms else 6 * parameters * ITEMS * TOKENS / (UTILISATION * flops)
        hop = self.latency / (2 * (self.num_ranks - 1))
        table = self.figures["table"] = [
            expected_step(num_nodes, round(num_nodes * self.num_ranks / self.num_nodes), 4 * parameters, compute, self.bus, hop)
            for num_nodes in sorted({self.num_nodes, 2, 4, 8, 16})
        ]
        sizes = f"{format_si(4 * parameters)}B of gradients, {format_si(compute)}s of computing"
        self.add_line(f"expected share of a step in which a rank computes; {sizes}:")
        self.add_line("  nodes  ranks  communication  nothing overlaps  hidden behind the backward pass")
        for row in table:
            text = f"  {row['nodes']:5}  {row['ranks']:5}  {format_si(row['communication_seconds']) + 's':>13}"
            marker = "  <- this cluster" * (row["nodes"] == self.num_nodes)
            self.add_line(f"{text}  {row['worst']:16.0%}  {row['best']:31.0%}{marker}")
        kind = f"{'bf16' if on_gpu else 'float32'} matmul of {side}: {format_si(flops)}FLOP/s on the slowest rank"
        self.add_line(f"  measured: bus bandwidth, latency, {kind}.")
        assumed = [] if self.options.model_bytes else [f"{PARAMETERS // 10**6} M parameters in fp32, as BERT-base"]
        assumed += [] if step_ms else [f"{ITEMS} items of {TOKENS} tokens per rank and step at {UTILISATION:.0%} of these FLOP/s"]
        self.add_line(f"  assumed: {'; '.join([*assumed, 'a ring with the same bandwidth at every size'])}.")
        if len(self.hosts) == 1:
            text = f"All ranks are on {self.hosts[0]}: the table assumes links between nodes as fast as those measured here."
            self.add_line(f"  {text}")
        if next(row for row in table if row["nodes"] == self.num_nodes)["worst"] < 0.8:
            hook = f"--comm_hook {'bf16' if on_gpu else 'fp16'} (half the bytes)"
            text = "To improve it: a larger --global_batch_size in more micro-batches (fewer synchronisations per item)"
            self.add_line(f"  {text}; {hook}.")

    def _measure_flops(self, on_gpu: bool) -> tuple[int, float]:
        """Return (size of the matrices, FLOP/s of their product on the slowest rank)."""
        torch = self.torch
        side, times = (4096, 20) if on_gpu else (512, 5)
        matrix = torch.randn(side, side, device=self.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        durations = []
        # The first repetitions select a kernel and raise the clock. Products are launched many at a time, because a single
        # launch takes as long as a product.
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(times):
                torch.mm(matrix, matrix)
            self._synchronize()
            durations.append((time.perf_counter() - began) / times)
        slowest = self._all_reduce(torch.tensor([min(durations)], dtype=torch.float64, device=self.device), "MAX").item()
        flops = self.figures["flops_per_second"] = 2 * side**3 / slowest
        return side, flops


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", required=True)
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model_bytes", type=float)
    parser.add_argument("--step_ms", type=float)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--ranks_of_nodes", default="", help="number of ranks of each node, for example 2,1")
    options = parser.parse_args()
    if sys.platform == "linux":  # if the doctor is killed, its ranks are killed too
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    CollectiveChecks(options).run()


if __name__ == "__main__":
    main()
