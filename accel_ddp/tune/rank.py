"""One rank of a trial: `python -m accel_ddp.tune.rank SPEC PARENT`, with RANK, WORLD_SIZE ... in the environment.

It says what it measures as lines of JSON, and ends. It promises nothing in time: its parent ends it.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_ddp.doctor.nccl import read_nccl_log
from accel_ddp.environment.launcher import cpu_is_wanted
from accel_ddp.tune.search import CLEARLY_WORSE, DEFAULT, best_choice, best_exact
from accel_ddp.tune.shapes import unpacked

WARM_UP = 4  # steps: DDP lays out its buckets after the first, PowerSGD compresses from the third on


def say(**words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")  # in one piece: the pipe is read line by line


class Failed(Exception):
    """This trial cannot be; the argument says why."""


class Rank:
    def __init__(self, spec: dict[str, Any]):
        self.spec, self.said_at = spec, time.perf_counter()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])

    def run(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        if self.spec["part"] == "ddp":
            import torch._dynamo  # DDP does when it is first made, for seconds; here it counts as part of the start
        say(at="imported")
        self.connect()
        {"reduce": self.measure_reduce, "ddp": self.measure_ddp}[self.spec["part"]]()
        self.part()

    def connect(self) -> None:
        torch, dist = self.torch, self.dist
        gpus = 0 if cpu_is_wanted() or self.spec["backend"] == "gloo" else torch.cuda.device_count()
        if 0 < gpus < self.local:
            raise Failed(f"{self.local} ranks on a node with {gpus} GPU: NCCL needs one for each rank")
        if not gpus and self.spec["backend"] == "nccl":
            raise Failed("--backend nccl: torch sees no GPU here")
        self.device = torch.device("cuda", self.local_rank) if gpus else torch.device("cpu")
        backend = "nccl" if gpus else "gloo"
        if gpus:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.local))
        dist.init_process_group(
            backend, timeout=timedelta(seconds=self.spec["seconds"] + 30), device_id=self.device if gpus else None
        )
        self.reduced(torch.ones(1 << 18, device=self.device))  # NCCL chooses its ways now, and they stand in its log
        paths, network, names = [], "", []
        if log := os.environ.get("NCCL_DEBUG_FILE"):
            with contextlib.suppress(OSError):
                paths, network, names = read_nccl_log(Path(log).read_text(errors="replace"))
        device = torch.cuda.get_device_name() if gpus else f"CPU, {torch.get_num_threads()} threads"
        version = "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if gpus else "gloo"
        say(
            at="connected", backend=backend, device=device, version=f"torch {torch.__version__}, {version}", paths=paths,
            network=network, interfaces=list(dict.fromkeys(names)),
        )  # fmt: skip

    def finish(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def reduced(self, tensor: Any, operation: str = "SUM") -> Any:
        self.dist.all_reduce(tensor, op=getattr(self.dist.ReduceOp, operation))
        self.finish()
        return tensor

    def timed(self, do: Callable[[], Any], times: int) -> list[float]:
        """Milliseconds of each, on the rank where it took longest: the same numbers on every rank, so all decide alike."""
        spans = []
        for _ in range(times):
            began = time.perf_counter()
            do()
            self.finish()
            spans.append((time.perf_counter() - began) * 1000)
            if time.perf_counter() - self.said_at > 0.5:  # slow, and not stuck
                self.said_at = time.perf_counter()
                say(at="alive")
        if not spans:
            return []
        return self.reduced(self.torch.tensor(spans, dtype=self.torch.float64, device=self.device), "MAX").tolist()

    def median(self, do: Callable[[], Any], warm_up: int, seconds: float, worse_than: float = 0.0) -> tuple[float, bool]:
        """(milliseconds, whether it was given up as clearly worse than another)."""
        self.timed(do, warm_up)
        spans = self.timed(do, 3)
        if worse_than and min(spans) > worse_than * CLEARLY_WORSE:
            return statistics.median(spans), True
        times = min(40, int(seconds * 1000 / max(statistics.median(spans), 1e-3)) - 3)
        spans += self.timed(do, times) if times > 0 else []
        return statistics.median(spans), False

    def measure_reduce(self) -> None:
        per_byte, limit = 0.0, self.spec["seconds"] * 1000
        for size in self.spec["sizes"]:
            if per_byte * size * 5 > limit / 2:
                say(at="left out", size=size, ms=per_byte * size)
                continue
            buffer = self.torch.zeros(size // 4, device=self.device)
            best = self.spec["best"].get(str(size), 0.0)
            ms, is_worse = self.median(lambda b=buffer: self.dist.all_reduce(b), 2, self.spec["seconds"] / 20, best)
            per_byte = ms / size
            self.check(buffer)
            say(at="measured", size=size, ms=ms, early=is_worse)
            if is_worse:
                return

    def check(self, buffer: Any) -> None:
        """A setting that makes sums wrong, or another collective fail, must not look fast."""
        buffer.fill_(self.rank + 1)
        right, got = self.world * (self.world + 1) / 2, self.reduced(buffer)
        if got.min().item() != right or got.max().item() != right:
            raise Failed(f"the sums are wrong: {got.min().item()} to {got.max().item()}, not {right}")
        self.dist.broadcast(buffer[:1024], src=0)
        self.dist.all_gather([self.torch.empty_like(buffer[:64]) for _ in range(self.world)], buffer[:64].contiguous())
        self.finish()

    def measure_ddp(self) -> None:
        torch, spec = self.torch, self.spec
        model = shaped(torch, unpacked(spec["entries"]), getattr(torch, spec["dtype"]), self.device)
        autocast = torch.autocast(self.device.type, getattr(torch, spec["autocast"])) if spec["autocast"] else None
        self.choose_tokens(model, autocast)
        best, has_base, times = 0.0, False, {(size, hook): ms for size, hook, ms in spec["times"]}
        for number, config in spec["configs"]:
            # 0 and "" are the best so far: the same on every rank, as all have the same times.
            so_far = best_exact(times) if config["comm_hook"] == "none" else best_choice(times)
            bucket, hook = config["bucket_cap_mb"] or so_far[0], config["comm_hook"] or so_far[1]
            is_done = (bucket, hook) == DEFAULT or (hook == "none" and not config["comm_hook"])
            if is_done and config["again"] and not config["bucket_cap_mb"]:
                say(at="needless", number=number)  # the default, or the best without a hook, which have just been done again
                continue
            say(at="config", number=number, bucket=bucket, hook=hook)
            config = {**config, "bucket_cap_mb": bucket, "comm_hook": hook}
            ddp = self.wrapped(model, config)

            def step(ddp: Any = ddp) -> None:
                for parameter in model.parameters():
                    parameter.grad = None
                with autocast or contextlib.nullcontext():
                    loss = ddp()
                torch.autograd.backward([loss])

            def step_alone(ddp: Any = ddp, step: Any = step) -> None:
                with ddp.no_sync():
                    step()

            seconds = spec["config_seconds"]
            if not has_base:  # clocks, caches and allocators wake up at the cost of the first, which is the default
                spans = self.timed(step, WARM_UP)
                self.timed(step, max(0, min(50, int(1000 / spans[-1]))))
            ms, is_worse = self.median(step, WARM_UP, seconds, 0.0 if config["again"] else best)
            if not has_base:  # after the step: DDP wants a synchronised one first
                say(at="alone", ms=self.median(step_alone, 1, seconds)[0])
                has_base = True
            best = min(best or ms, ms)
            if config["gradient_as_bucket_view"] and not is_worse:
                times[bucket, hook] = min(ms, times.get((bucket, hook), ms))
            say(at="timed", number=number, ms=ms, early=is_worse)
            for parameter in model.parameters():
                parameter.grad = None
            del ddp, step, step_alone
            gc.collect()

    def choose_tokens(self, model: Any, autocast: Any) -> None:
        """As many as were asked for, or as few as a step must have to be timed often enough; the same on every rank."""
        tokens, longest = self.spec["tokens"], self.spec["config_seconds"] * 1000 / 4

        def step() -> None:
            with autocast or contextlib.nullcontext():
                loss = model()
            self.torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad])

        count = min(8, tokens)
        while True:  # from few to many: a step of all could take minutes on a CPU
            model.take(count)
            self.timed(step, 1)
            ms = min(self.timed(step, 2))
            say(at="alive")
            if count == tokens or ms * 2 > longest:
                break
            count = min(tokens, count * 4 if ms * 4 < longest else count * 2)
        say(at="tokens", tokens=count)

    def wrapped(self, model: Any, config: dict[str, Any]) -> Any:
        """As Accelerate does it with the options of the same names."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        # Without device_ids, which are for moving inputs: there are none, and DDP fails where it looks for the first.
        ddp = DistributedDataParallel(
            model, bucket_cap_mb=config["bucket_cap_mb"], gradient_as_bucket_view=config["gradient_as_bucket_view"],
            broadcast_buffers=False,
        )  # fmt: skip
        hook = config["comm_hook"]
        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)  # soon, so that it is what is timed
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif hook != "none":
            ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
        return ddp

    def part(self) -> None:
        """Nobody leaves while another is in the last collective; rank 0, whose store it is, goes last."""
        store, deadline = self.dist.distributed_c10d._get_default_store(), time.monotonic() + 5
        here = store.add("parted", 1)
        while self.rank == 0 and here < self.world and time.monotonic() < deadline:
            time.sleep(0.01)
            here = store.add("parted", 0)
        say(at="done")


def shaped(torch: Any, entries: list[list[Any]], dtype: Any, device: Any) -> Any:
    """A module with these parameters, in this order, whose passes cost about what the model's do.

    Each matrix multiplies as many rows as `take` says. A number is handed from one to the next, so that the backward pass
    computes both products of each and makes the gradients one after the other, the last first: what DDP hides communication
    behind.
    """
    nn = torch.nn

    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = [kind for kind, _, _ in entries]
            self.weights = nn.ParameterList(
                nn.Parameter(torch.full(shape, 0.01, dtype=dtype, device=device), requires_grad=is_trained)
                for _, shape, is_trained in entries
            )

        def take(self, tokens: int) -> None:
            self.inputs = {}
            for kind, weight in zip(self.kinds, self.weights):
                if kind == "embedding":
                    self.inputs[kind, len(weight)] = torch.arange(tokens, device=device) % len(weight)
                elif kind == "matrix":
                    width = weight[0].numel()
                    self.inputs[kind, width] = torch.full((tokens, width), 0.01, dtype=dtype, device=device)

        def forward(self) -> Any:
            carried = torch.zeros((), dtype=dtype, device=device)
            for kind, weight in zip(self.kinds, self.weights):
                if kind == "embedding":
                    carried = carried + nn.functional.embedding(self.inputs[kind, len(weight)], weight).mean()
                elif kind == "matrix":
                    flat = weight.flatten(1)
                    carried = nn.functional.linear(self.inputs[kind, flat.shape[1]] + carried, flat).mean()
                else:
                    carried = carried + weight.mean()
            return carried

    return Shaped()


def main() -> None:
    spec, parent = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    if sys.platform == "linux":  # a tune that is killed takes its ranks with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before we could ask for that
        os._exit(1)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # our parent ends us; torch would write pages about it
    code = 1
    try:
        Rank(spec).run()
        code = 0
    except Failed as why:
        say(at="failed", why=str(why))
    except Exception as error:
        out_of_memory = "OutOfMemory" in type(error).__name__ or "not enough memory" in str(error)
        first = (str(error).strip().splitlines() or [""])[0]
        say(at="failed", why="out of memory" if out_of_memory else f"{type(error).__name__}: {first}"[:300])
    sys.stderr.flush()
    os._exit(code)  # an interpreter that shuts down may wait for ranks that are gone


if __name__ == "__main__":
    main()
