"""Makes a model fast without changing what it computes: packed texts, compiled layers, recorded kernels."""

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.ranks import world
from accel_ddp.speed import flops, linear_cross_entropy, padding_free
from accel_ddp.config import TrainConfig
from accel_ddp.speed.cuda_graphs import Recorded
from accel_ddp.speed.padding_free_model import Packed
from accel_ddp.seeds import mixed, seed_torch
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.update import LossSum, WholeBatch, rehearse

# Compiling takes about 20 s, and saves 0.05 (BERT-base) to 0.12 us (a small decoder) whenever a token goes through a layer,
# forward and back (benchmarks/README.md). Counted in tokens and not in seconds: a resumed run must come to the same answer.
TOKENS_THAT_PAY = 250_000_000


class Speed:
    """What was done to a model, and how much it computes."""

    def __init__(self, model: nn.Module, cfg: TrainConfig) -> None:
        self.cfg = cfg
        self.packed: Packed | None = None
        self.recorded: Recorded | None = None
        self.plain: list[Callable[..., Any]] = []  # the layers before they were compiled; none where they were not
        self.reads_targets = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))  # with its decoder
        self.work: flops.Work | None = None
        with contextlib.suppress(Exception):  # a statistic: no reason not to train a model of some other make
            self.work = flops.Work(model)

    def work_of(self, batches: list[Any]) -> tuple[float, float]:
        """(tokens, FLOPs) of this rank's share of an update; zeros where they are not known."""
        sizes = [size for batch in batches if (size := getattr(batch, "sizes", None))]
        tokens = sum(size.real + (size.targets if self.reads_targets else 0) for size in sizes)
        if self.work is None:
            return float(tokens), 0.0
        return float(tokens), float(sum(self.work.of(s.real, s.squares, s.targets, s.texts) for s in sizes))

    def warm_up(self, accelerator: Accelerator, model: nn.Module, train: TrainBatches, loss_sum: LossSum) -> float | None:
        """Compile now, before the first step: the seconds that it took, or None where there is nothing to compile.

        On each node one rank compiles and the others find its work in the cache. A model that cannot be compiled is
        computed as it is, after one line that says so. The micro-batch is the same in every life of a run, because what a
        compiler chooses may depend on its size.
        """
        if not self.plain:
            return None
        began = time.monotonic()
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        world.say(f"warm-up: compiling the layers (kept in {folder}; without it: --compile off)")
        module = accelerator.unwrap_model(model)
        micro = self.cfg.split(world.NUM_RANKS)[0]
        with (
            world.together("compile the layers"),
            _one_at_a_time(folder, self.cfg.ddp_timeout_seconds / 2),
            warnings.catch_warnings(),
        ):
            # How the compiler goes about the loss of a large vocabulary is no business of the user's.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            try:
                batch = train.sample(micro, accelerator, self.cfg)
                seed_torch(mixed(self.cfg.seed, "warm-up"), accelerator.device)
                rehearse(module, batch, loss_sum)
                rehearse(module, batch, loss_sum)  # the second time it is recorded
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler may run into
                words = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])  # the second: why
                print(f"rank {world.RANK} on {world.HOST}: the layers cannot be compiled and are computed as they are: "
                      f"{type(error).__name__}: {words[:200]}", file=sys.stderr, flush=True)  # fmt: skip
                calls, self.plain, linear_cross_entropy.softmax = self.plain, [], linear_cross_entropy.plain_softmax
                self._record(calls, accelerator.device)
        return time.monotonic() - began

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """For a while the layers are computed as they are: neither compiled nor recorded."""
        if self.packed is None:
            yield
            return
        now = self.packed.calls, self.packed.run, linear_cross_entropy.softmax
        self.packed.calls, self.packed.run, linear_cross_entropy.softmax = self.plain or self.packed.calls, None, linear_cross_entropy.plain_softmax
        try:
            yield
        finally:
            self.packed.calls, self.packed.run, linear_cross_entropy.softmax = now

    def _record(self, calls: list[Callable[..., Any]], device: torch.device) -> None:
        packed = self.packed
        packed.calls, packed.run, self.recorded = calls, None, None
        if not self.cfg.gradient_checkpointing:  # which runs a layer again in its backward pass
            # Alone, all layers start at once; DDP is given gradients as soon as they fill one of its buckets.
            group_bytes = math.inf if world.NUM_RANKS == 1 else self.cfg.bucket_cap_mb << 20
            self.recorded = Recorded(packed.layers, calls, device, bool(self.plain), group_bytes)
            packed.run, packed.forget = self.recorded.call, self.recorded.forget


@contextlib.contextmanager
def _one_at_a_time(folder: Path, patience: float) -> Iterator[None]:
    """Among the processes that share the folder; whoever has waited too long, or cannot lock there, goes on."""
    from filelock import FileLock, Timeout

    lock = None
    with contextlib.suppress(OSError, NotImplementedError, Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "accel_ddp.lock")
        lock.acquire(timeout=patience)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def prepare(
    accelerator: Accelerator, cfg: TrainConfig, model: nn.Module, train: TrainBatches, loss_sum: LossSum, total_steps: int
) -> Speed:
    """Before `accelerator.prepare`. Says in a line what is done, and why something is not; the same on all ranks."""
    speed = Speed(model, cfg)
    why = "--packing off" if cfg.packing == "off" else _pack(accelerator, cfg, model, train, loss_sum, speed)
    whys = [found for found in _of_all(why) if found]
    if whys and speed.packed is not None:
        speed.packed.remove()
        speed.packed = None
    if whys and (cfg.packing == "on" or whys[0] not in ("--packing off", NO_TEXTS)):
        asked = "--packing on: not possible: " if cfg.packing == "on" else "texts are padded: "
        world.say(f"{asked}{whys[0]}." + (" Texts are padded." if cfg.packing == "on" and whys[0] != NO_TEXTS else ""))
    why = "--compile off" if cfg.compile == "off" else _compile(accelerator, cfg, train, speed, total_steps)
    if why and cfg.compile == "on":
        world.say(f"--compile on: not possible: {why}. Layers are computed as they are.")
    done = ["texts are packed"] * bool(speed.packed) + ["layers are recorded"] * bool(speed.recorded)
    if done:
        world.say("fast: " + ", ".join(done + ["and compiled"] * bool(speed.plain)))
    return speed


NO_TEXTS = "its batches have no attention mask"


def _of_all(mine: str) -> list[str]:
    """What each rank says, on every rank: they do the same, or a meeting of some would wait for the others."""
    return world.agreed(world.gathered(mine))


def _pack(
    accelerator: Accelerator, cfg: TrainConfig, model: nn.Module, train: TrainBatches, loss_sum: LossSum, speed: Speed
) -> str:
    """Why not, or nothing."""
    with world.together("compare packed and padded texts"):
        batch = train.sample(4, accelerator, cfg)
        if getattr(batch, "sizes", None) is None:
            return NO_TEXTS
        if not getattr(model, "is_quantized", False):
            model.to(accelerator.device)
        try:
            packed = Packed(model)
        except padding_free.Unpackable as why:
            return str(why)
        packed.install()
        by_batch = loss_sum.embed if isinstance(loss_sum, WholeBatch) else loss_sum
        loss = lambda batch: by_batch(model, batch).double().sum()
        is_wide = next(model.parameters()).dtype in (torch.float32, torch.float64)
        why = packed.holds_for(loss, batch, allowed=1e-4 if is_wide else 3e-2)
        if not why and accelerator.mixed_precision != "no":  # then attention is another
            with accelerator.autocast():
                why = packed.holds_for(loss, batch, allowed=5e-2)
        if why:
            packed.remove()
            return why
    speed.packed = packed
    return ""


def _pays(accelerator: Accelerator, cfg: TrainConfig, train: TrainBatches, num_layers: int, total_steps: int) -> bool:
    """Whether compiling saves more time than it takes; the same answer on every rank and in every life of a run."""
    with world.together("count tokens"):
        known = train.lengths  # of each item, where they can be had
        length = train.sample(64, accelerator, cfg).sizes.real / 64 if known is None else float(known.mean())
    return total_steps * cfg.global_batch_size * length * num_layers >= TOKENS_THAT_PAY


def _compile(accelerator: Accelerator, cfg: TrainConfig, train: TrainBatches, speed: Speed, total_steps: int) -> str:
    """Records the layers' kernels where there is a GPU; compiles them too where that pays."""
    device = accelerator.device
    if device.type != "cuda":
        return "there is no GPU"
    if speed.packed is None:
        return "its texts are not packed, so that every batch has another shape"
    calls = speed.packed.calls
    missing = [host for host in _of_all("" if find_spec("triton") else world.HOST) if host]
    if not missing and (cfg.compile == "on" or _pays(accelerator, cfg, train, len(calls), total_steps)):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser(f"{cfg.cache_dir}/inductor"))
        speed.plain, calls = calls, [torch.compile(call, dynamic=True) for call in calls]
        linear_cross_entropy.softmax = torch.compile(linear_cross_entropy.fused_softmax, dynamic=True)
    speed._record(calls, device)
    return f"triton is not installed on {', '.join(missing)}" if missing else ""
