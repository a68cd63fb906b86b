"""One rank of a trial of `accel-ddp tune`: `python -m accel_ddp.measure.trial_worker SPEC PARENT`, see `collective_worker`.

It times all-reduces, or steps of DDP with a model that costs as much as the user's. The agent kills it at its time limit.
"""

import contextlib
import gc
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

from accel_ddp.doctor import collective_worker
from accel_ddp.doctor.collective_worker import CollectiveWorker, read_nccl_log, report
from accel_ddp.measure.tune_results import DEFAULT, Choice, DdpConfig, Entries, Transport, best_choice, best_exact
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.nodes.launcher import cpu_is_wanted
from accel_ddp.text import first_line

WARM_UP_STEPS = 4  # DDP rebuilds its buckets after the first step, and PowerSGD compresses from the third step on
MAX_REPETITIONS = 40
LEAVE_SECONDS = 5.0


class TrialFailed(Exception):
    """The trial cannot continue. The argument is the reason."""


class TrialWorker(CollectiveWorker):
    def run(self) -> None:
        code = 1
        try:
            self.measure()
            code = 0
        except TrialFailed as error:
            report("failed", reason=str(error))
        except Exception as error:
            is_out_of_memory = "OutOfMemory" in type(error).__name__ or "not enough memory" in str(error)
            report("failed", reason="out of memory" if is_out_of_memory else f"{type(error).__name__}: {first_line(error)}"[:300])
        sys.stderr.flush()
        os._exit(code)

    def measure(self) -> None:
        self.import_torch()
        if self.spec["measure"] == "ddp":
            import_module("torch._dynamo")  # the first DDP imports it, which takes seconds that would count as part of a step
        report("imported")
        self.connect()
        {"all_reduce": self.measure_all_reduce, "ddp": self.measure_ddp}[self.spec["measure"]]()
        self.wait_until_all_left(self.store, LEAVE_SECONDS)
        report("done")

    def connect(self) -> None:
        torch = self.torch
        gpus = 0 if cpu_is_wanted() or self.spec["backend"] == "gloo" else torch.cuda.device_count()
        if 0 < gpus < self.num_local:
            raise TrialFailed(f"{self.num_local} ranks on a node with {gpus} GPU(s): NCCL needs one GPU for each rank")
        if not gpus and self.spec["backend"] == "nccl":
            raise TrialFailed("--backend nccl: torch finds no GPU on this node")
        self.use_device(torch.device("cuda", self.local_rank) if gpus else torch.device("cpu"))
        if not gpus:
            torch.set_num_threads(max(1, usable_cores() // self.num_local))
        seconds = self.spec["seconds"] + 30
        self.store = self.connect_store(self.rank == 0, seconds)
        self.open_group(self.store, seconds)
        self.all_reduce(torch.ones(1 << 18, device=self.device))  # NCCL writes to its log which transport it chooses here
        paths, network, interfaces = read_nccl_log(self.read_log()) if gpus else ([], "", [])
        device = torch.cuda.get_device_name() if gpus else f"CPU, {torch.get_num_threads()} threads"
        version = f"torch {torch.__version__}, {f'NCCL {self.nccl_version()}' if gpus else 'gloo'}"
        report("connected", **asdict(Transport("nccl" if gpus else "gloo", device, version, network, paths, interfaces)))

    def median_time(self, function: Callable[[], Any], warm_up: int, seconds: float) -> float:
        """Return the median of the milliseconds of a call."""
        self.time_each(function, warm_up)
        spans = self.time_each(function, 3)
        repetitions = min(MAX_REPETITIONS, int(seconds * 1000 / max(statistics.median(spans), 1e-3)) - 3)
        return statistics.median(spans + (self.time_each(function, repetitions) if repetitions > 0 else []))

    def measure_all_reduce(self) -> None:
        """Report the time of an all-reduce for each message size in increasing order. Sizes that take too long are skipped."""
        ms_per_byte, limit_ms = 0.0, self.spec["seconds"] * 1000
        for size in self.spec["sizes"]:
            if ms_per_byte * size * 5 > limit_ms / 2:
                report("skipped", size=size, ms=ms_per_byte * size)
                continue
            buffer = self.torch.zeros(size // 4, device=self.device)
            ms = self.median_time(lambda buffer=buffer: self.dist.all_reduce(buffer), 2, self.spec["seconds"] / 20)
            ms_per_byte = ms / size
            self.check_collectives(buffer)
            report("measured", size=size, ms=ms)

    def check_collectives(self, buffer: Any) -> None:
        """Raise TrialFailed if a sum is wrong, and fail if another collective fails: such settings must not count as fast."""
        buffer.fill_(self.rank + 1)
        expected, actual = self.num_ranks * (self.num_ranks + 1) / 2, self.all_reduce(buffer)
        if actual.min().item() != expected or actual.max().item() != expected:
            raise TrialFailed(f"wrong sums: {actual.min().item()} to {actual.max().item()} instead of {expected}")
        self.dist.broadcast(buffer[:1024], src=0)
        gathered = [self.torch.empty_like(buffer[:64]) for _ in range(self.num_ranks)]
        self.collective(lambda: self.dist.all_gather(gathered, buffer[:64].contiguous()))

    def measure_ddp(self) -> None:
        torch, spec = self.torch, self.spec
        model = build_proxy_model(torch, spec["entries"], getattr(torch, spec["dtype"]), self.device)
        self.autocast = contextlib.nullcontext()
        dtype = spec["autocast"]
        if dtype == "auto":
            dtype = "bfloat16" if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] >= 8 else ""
        if dtype:
            self.autocast = torch.autocast(self.device.type, getattr(torch, dtype))
        report("tokens", tokens=self.choose_tokens(model))
        times: dict[Choice, float] = {(size, hook): ms for size, hook, ms in spec["times"]}
        is_first = True
        for number, fields in spec["configs"]:
            config = resolve_config(DdpConfig(**fields), times)
            if config is None:
                report("redundant", number=number)
                continue
            report("config", number=number, bucket_cap_mb=config.bucket_cap_mb, comm_hook=config.comm_hook)
            ms, is_first = self.time_ddp(model, config, is_first), False
            if config.gradient_as_bucket_view:
                times[config.choice] = min(ms, times.get(config.choice, ms))
            report("timed", number=number, ms=ms)
            for parameter in model.parameters():
                parameter.grad = None
            gc.collect()  # the DDP of this config has reference cycles that hold its buckets

    def time_ddp(self, model: Any, config: DdpConfig, is_first: bool) -> float:
        """Return the median of the milliseconds of a step.

        Before and after the first config of this process more is done: clocks, caches and allocators warm up first, and then the
        time of a step without communication is reported.
        """
        ddp, seconds = self.wrap(model, config), self.spec["config_seconds"]

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            with self.autocast:
                loss = ddp()
            self.torch.autograd.backward([loss])

        def step_without_communication() -> None:
            with ddp.no_sync():
                step()

        if is_first:
            spans = self.time_each(step, WARM_UP_STEPS)
            self.time_each(step, max(0, min(50, int(1000 / spans[-1]))))
        result = self.median_time(step, WARM_UP_STEPS, seconds)
        if is_first:  # not earlier: the first step of a DDP must communicate
            report("compute_only", ms=self.median_time(step_without_communication, 1, seconds))
        return result

    def choose_tokens(self, model: Any) -> int:
        """Set and return the tokens of a step, the same on every rank: as requested, or fewer if a step would take too long."""
        requested, longest_ms = self.spec["tokens"], self.spec["config_seconds"] * 1000 / 4

        def step() -> None:
            with self.autocast:
                loss = model()
            self.torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad])

        tokens = min(8, requested)
        while True:  # from few to many, because a step with all tokens could take minutes on a CPU
            model.set_tokens(tokens)
            self.time_each(step, 1)
            ms = min(self.time_each(step, 2))
            report("alive")
            if tokens == requested or ms * 2 > longest_ms:
                return tokens
            tokens = min(requested, tokens * 4 if ms * 4 < longest_ms else tokens * 2)

    def wrap(self, model: Any, config: DdpConfig) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        # Without device_ids: they are for moving inputs, and DDP fails if it has device_ids and the model has no inputs.
        ddp = DistributedDataParallel(
            model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=config.gradient_as_bucket_view,
            broadcast_buffers=False,
        )  # fmt: skip
        if config.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)  # early, so that compressed steps are timed
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif config.comm_hook != "none":
            ddp.register_comm_hook(None, getattr(default_hooks, f"{config.comm_hook}_compress_hook"))
        return ddp


def resolve_config(config: DdpConfig, times: dict[Choice, float]) -> DdpConfig | None:
    """Replace the "best so far" values of a config, equally on every rank. Return None for a repetition that is not needed."""
    best = best_exact(times) if config.comm_hook == "none" else best_choice(times)
    resolved = replace(config, bucket_cap_mb=config.bucket_cap_mb or best[0], comm_hook=config.comm_hook or best[1])
    is_repeated = resolved.choice == DEFAULT or (resolved.comm_hook == "none" and not config.comm_hook)
    return None if is_repeated and config.is_repeat and not config.bucket_cap_mb else resolved


def build_proxy_model(torch: Any, entries: Entries, dtype: Any, device: Any) -> Any:
    """Return a module with these parameters, in this order, whose forward and backward passes cost about what the model's do.

    Each matrix is multiplied with as many rows as there are tokens. Every parameter's output is an input of the next one, so the
    backward pass computes the gradients one after the other, in reverse order. DDP overlaps communication with this computation.
    """
    nn = torch.nn

    class ProxyModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = [kind for kind, _, _ in entries]
            self.weights = nn.ParameterList(
                nn.Parameter(torch.full(shape, 0.01, dtype=dtype, device=device), requires_grad=is_trained)
                for _, shape, is_trained in entries
            )

        def set_tokens(self, tokens: int) -> None:
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

    return ProxyModel()


if __name__ == "__main__":
    collective_worker.main(TrialWorker)
