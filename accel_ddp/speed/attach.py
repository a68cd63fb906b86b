"""The entry point of the package: `attach` makes a model faster without changing what it computes."""

import contextlib
import logging
import math
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from accel_ddp.config import choices
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rehearsal import rehearse
from accel_ddp.engine.rows import Rows
from accel_ddp.engine.terms import Terms, checked
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main, together
from accel_ddp.ranks.reporting import warn, warn_on_main
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.seeds import mixed, seed_torch
from accel_ddp.speed import autobatch, linear_cross_entropy, modules
from accel_ddp.speed.called_model import CalledModel
from accel_ddp.speed.compilation import Compilation, choose_step, compiled
from accel_ddp.speed.cuda_graphs import GRAPH_MEMORY, GraphedLayers
from accel_ddp.speed.flops import FlopCounter, peak
from accel_ddp.speed.packed_layers import PackedLayers
from accel_ddp.speed.padding_free import LEAST_SHARED, NeedsPadding
from accel_ddp.speed.row_model import FixedModel, RowModel
from accel_ddp.training import padding_check, sharding
from accel_ddp.training.step_plan import BY_TOKENS, Cost
from accel_ddp.training.stream import TrainBatches

log = logging.getLogger(__name__)

# Tokens of a run times its layers. Compiling before the first step takes about 20 s and saves 0.05 (BERT-base) to 0.12 us (a small
# decoder) for each, forward and backward (benchmarks/README.md). A run of less than the second number takes a few seconds.
WORK_WORTH_COMPILING = 250_000_000
WORK_WORTH_MEASURING = 5_000_000

NO_TEXTS = "its batches are no rows of texts"
NOT_CAPTURED = "layers are not captured as CUDA graphs: "  # and why not, for items of a fixed length


def attach(accelerator: Accelerator, cfg: TrainConfig, terms: Terms, train: TrainBatches, total_steps: int) -> "Speed":
    """Make the model faster and return an object for the rest of the run. Call it on every rank, before `prepare`.

    `terms` are `alone()`, because ranks try other micro-batches.

    It prints what is done, and why something is not. The decision is the same on all ranks.
    """
    speed = Speed(accelerator, cfg, terms, train, total_steps)
    speed.remove_padding()
    if speed.padding_free and accelerator.device.type == "cuda":
        modules.install(speed.padding_free.layers, is_sharded(terms.model))
    train.cost = speed.cost
    speed.capture_layers()
    done = ["padding-free"] * bool(speed.padding_free and not speed.padding_free.is_fixed)
    done += ["CUDA graphs"] * bool(speed.graphs)
    if done:
        print_on_main("speed: " + ", ".join(done))
    return speed


class Speed:
    """What was done to a model, and how much the model computes."""

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, terms: Terms, train: TrainBatches, total_steps: int = 0):
        self.accelerator, self.cfg, self.terms, self.train, self.total_steps = accelerator, cfg, terms, train, total_steps
        self.model = model = terms.model
        self.compilation: Compilation | None = None
        self.compiled_from: int | None = None  # the first step with compiled layers; None: there is none
        self._is_warm = False  # whether they were compiled and have not been compiled again
        self.padding_free: CalledModel | None = None
        self.graphs: list[GraphedLayers] = []  # of each stack of layers
        self.plain_calls: list[Callable[..., Any]] = []  # the layers before they were compiled; empty if they were not
        self.heads = linear_cross_entropy.output_heads_of(model)
        self.softmax: linear_cross_entropy.Softmax = linear_cross_entropy.plain_softmax  # of the heads
        self.peak_flops: float | None = None  # FLOP/s of all ranks, whose GPUs are assumed to be the same, if they are known
        self._on_gpu = accelerator.device.type == "cuda"
        if self._on_gpu:
            of_one = peak(torch.cuda.get_device_name(accelerator.device), self._narrow, cfg.tf32)
            self.peak_flops = of_one * accelerator.num_processes if of_one else None
        self._has_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._flops: FlopCounter | None = None
        try:
            self._flops = FlopCounter(model)
        except Exception as error:  # they are a statistic, and no reason not to train an unusual model
            if accelerator.is_main_process and not isinstance(error, NeedsPadding):
                log.warning(f"TFLOP/s and MFU are not measured, because FLOPs cannot be counted: {type(error).__name__}: {error}")

    # ---- what `fit` calls

    def choose_micro_batch_size(self, optimizer: torch.optim.Optimizer, workers: int = 1) -> None:
        """Replace `--micro_batch_size auto` by a number. Call it after `prepare` and after a restore."""
        room = GRAPH_MEMORY if self.graphs else 1.0
        with self.plain_layers():
            autobatch.choose(self.accelerator, self.cfg, self.terms, optimizer, self.train, room, workers)

    def choose_compilation(self, step: int) -> None:
        """Replace `--compile auto` by the step from which on layers are compiled, the same on all ranks, and prepare for it.

        Call it after `choose_micro_batch_size`. The step is stored with the options, and a resumed run follows it. Until then
        another process compiles, unless the code is cached.
        """
        cfg = self.cfg
        if not self.padding_free or cfg.compile in ("off", "graphs") or (not self._on_gpu and cfg.compile == "auto"):
            return
        if self.padding_free.why_plain:
            self._refuse_to_compile(self.padding_free.why_plain)
            if cfg.compile == "auto":
                choices.choose(cfg, "compile", "off", self.padding_free.why_plain)
            return
        lacks_triton = self._on_gpu and not find_spec("triton")
        missing = [host for host in gather_everywhere(socket.gethostname() if lacks_triton else "") if host]
        if missing:
            self._refuse_to_compile(f"triton is not installed on {', '.join(missing)}")
            return
        is_usual = self.padding_free.is_plain and not self.padding_free.is_fixed
        if cfg.compile == "auto" and not is_usual and not is_sharded(self.model):
            self._check_captured_layers()
            return
        self.compilation = Compilation(cfg.cache_dir, self.accelerator.device, self.model)
        if cfg.compile == "auto":
            choices.choose(cfg, "compile", *self._when_to_compile(step))
        if cfg.compile == "graphs":
            return
        self.compiled_from = 0 if cfg.compile == "on" else int(cfg.compile)
        self._record_calls()
        if step < self.compiled_from and not self.compilation.unsent and not self.compilation.is_cached():
            self.compilation.start()

    def is_due(self, step: int) -> bool:
        """Return whether the layers must be compiled before this step."""
        return self.compiled_from is not None and step >= self.compiled_from and not self.plain_calls

    def compile_layers(self) -> float:
        """Use compiled layers from now on, and return the seconds that it took. Call it on every rank if it `is_due`.

        The process that compiles has time until here. If compiling fails on a rank, all ranks continue without it.
        """
        began = time.monotonic()
        print_on_main(f"compiling the layers (cached in {self.compilation.folder}; --compile graphs skips this)")
        # Not together, if each pass gathers weights.
        with contextlib.nullcontext() if is_sharded(self.model) else together("compile the layers"):
            if problem := self.compilation.wait():
                log.warning("the compiling process has failed, so this one compiles: %s", problem)
            reason = self._try_compiled_layers()
        reasons = gather_everywhere(reason and f"{reason} (rank {self.accelerator.process_index})")
        if any(reasons):
            warn_on_main(f"the layers cannot be compiled and run without compilation: {max(reasons)}", "FALLBACK")
            choices.choose(self.cfg, "compile", "graphs", "compiling has failed")  # also after a resume
            self.compiled_from, calls, self.plain_calls = None, self.plain_calls or self.padding_free.calls, []
            self._set_softmax(linear_cross_entropy.plain_softmax)
            self._capture(calls)
        self._is_warm = not any(reasons)
        return time.monotonic() - began

    def _report_compilation(self) -> None:
        """Warn about code that a step has compiled. It depends on this step, at which a resumed run may not compile."""
        if self._is_warm:
            self._is_warm, rank = False, self.accelerator.process_index  # one warning for each rank
            text = f"--compile {self.cfg.compile}: rank {rank} had to compile layers again for the shapes of a step"
            warn(f"{text}. A resumed run may round differently. --compile graphs avoids this.", "INEXACT")

    def close(self) -> None:
        """End the process that compiles, if the run ends before it."""
        if self.compilation:
            self.compilation.close()

    def _try_compiled_layers(self) -> str:
        """Compile, or load code from the cache, in two passes. Return why it failed, or "".

        The micro-batch is the same after every restart, because the choices of a compiler may depend on its size. A rank of a sharded
        model whose compiler fails computes as it is, because the others need it for their gathers. An error in a backward pass
        ends such a run, because it cannot be continued.
        """
        layers, sharded, batch = self.padding_free, is_sharded(self.model), self._warm_up_batch()
        self._install_compiled_layers()
        calls, softmax, fallbacks = layers.calls, self.softmax, []
        if sharded:
            layers.calls = fallbacks = [_Fallback(call, plain) for call, plain in zip(calls, self.plain_calls, strict=True)]
            self._set_softmax(_Fallback(softmax, linear_cross_entropy.plain_softmax))
            fallbacks = [*fallbacks, self.softmax]
        try:
            self.compilation.load()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")  # users cannot act on it
                seed_torch(mixed(self.cfg.seed, "warm-up"), self.accelerator.device)
                self._rehearse(batch)
                rehearse(self.terms, batch)  # the second pass captures the graphs
            self.compilation.store()
        except Exception as error:  # compilers fail in many ways, and two passes need more memory than a step
            if not sharded:
                torch.cuda.empty_cache()
                return _reason(error)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = f"The layers cannot be compiled on {socket.gethostname()}: {_reason(error)}. Add --compile off."
            raise UserError(text) from error
        layers.calls = calls
        self._set_softmax(softmax)
        return next((fallback.reason for fallback in fallbacks if fallback.reason), "")

    def _install_compiled_layers(self) -> None:
        self.plain_calls = self.padding_free.calls
        self._capture([compiled(call, self._report_compilation) for call in self.plain_calls])
        self._set_softmax(compiled(linear_cross_entropy.fused_softmax, self._report_compilation))

    def _check_captured_layers(self) -> None:
        """Keep CUDA graphs of layers that get more than a row of texts only if they compute the bits of plain layers.

        Such layers are compiled only on request.
        """
        if not self.graphs:
            choices.choose(self.cfg, "compile", "off", "layers of this model are compiled only with --compile on")
            return
        was_training = self.model.training
        self.model.train(self.cfg.dropout)

        def gradients() -> tuple[torch.Tensor | None, ...]:
            seed_torch(mixed(self.cfg.seed, "warm-up"), self.accelerator.device)
            return rehearse(self.terms, batch)

        with together("compare captured layers with plain ones"):
            batch = self._warm_up_batch()
            with self.plain_layers():
                plain = [None if one is None else one.clone() for one in gradients()]
            gradients(), gradients()  # the second pass captures graphs
            is_same = all(a is b or torch.equal(a, b) for a, b in zip(plain, gradients()))
        self.model.train(was_training)
        if all(gather_everywhere(is_same)):
            choices.choose(self.cfg, "compile", "graphs", "CUDA graphs of this model give the same bits; on: compile layers too")
            return
        self.padding_free.run, self.graphs = None, []
        choices.choose(self.cfg, "compile", "off", "CUDA graphs of this model give other bits than plain layers")

    def _when_to_compile(self, step: int) -> tuple[int | str, str]:
        """Return the first step with compiled layers, or "graphs" for none, and the reason. It is the same on every rank."""
        short, work = ("graphs", "the run is too short to gain from compiled layers"), self._count_work()
        by_work = (0, "the run is long enough") if work >= WORK_WORTH_COMPILING else short
        # Numbers of the data decide for --deterministic, for runs that an older version began, and if ranks must compile together.
        if step or self.cfg.deterministic or is_sharded(self.model) or work < WORK_WORTH_MEASURING:
            return by_work
        seconds = self._record_calls(measures=True)
        facts = gather_everywhere((self.compilation.is_cached(), not self.compilation.unsent, seconds))
        is_cached, can_send = (all(column) for column in [*zip(*facts)][:2])
        if not (is_cached or can_send):
            return by_work
        seconds = max(one for *_, one in facts)
        first = choose_step(self.total_steps, seconds, is_cached)
        why = "compiled code is cached" if is_cached else "another process compiles until then"
        return short if first is None else (first, f"{why}; a step takes {seconds:.2g} s without it")

    def _count_work(self) -> float:
        """Return the tokens of all steps times the layers, from the lengths of all rows or, if they are not known, of a sample."""
        with together("count tokens"):
            known = self.train.lengths
            if self.padding_free.is_fixed:
                known = [self.padding_free.width]
            elif known is None:
                known = [self.train.sample(64, self.accelerator, self.cfg).whole / 64]
        tokens = self.cfg.global_batch_tokens or self.cfg.global_batch_size * float(np.mean(known))
        return self.total_steps * tokens * len(self.padding_free.calls)

    def _record_calls(self, measures: bool = False) -> float:
        """Store how layers are called, for the key of the cache. With `measures`, return the seconds of a step."""
        layers, found, seconds = self.padding_free, self.compilation, 0.0
        if found.calls:
            return seconds
        was_training = self.model.training
        self.model.train(self.cfg.dropout)
        with contextlib.nullcontext() if is_sharded(self.model) else together("record the calls of layers"):
            batch = self._warm_up_batch()
            seed_torch(mixed(self.cfg.seed, "warm-up"), self.accelerator.device)
            with self.plain_layers():
                layers.calls = [found.recording(target, call) for target, call in zip(layers.targets, layers.calls)]
                self._set_softmax(found.recording(linear_cross_entropy.fused_softmax, linear_cross_entropy.plain_softmax))
                self._rehearse(batch)
            for _ in range(3 if measures else 0):  # the second pass captures graphs
                began = time.monotonic()
                rehearse(self.terms, batch)
                if self._on_gpu:
                    torch.cuda.synchronize(self.accelerator.device)
                seconds = time.monotonic() - began
        self.model.train(was_training)
        return seconds * self.cfg.split(self.accelerator.num_processes)[1]

    def _rehearse(self, batch: Any) -> None:
        """Do each kind of pass of a step. With several micro-batches, as many on every rank, `GradCache` has one without gradients."""
        if self.terms.is_whole and self.cfg.split(self.accelerator.num_processes)[1] > 1:
            rehearse(self.terms, batch, with_gradients=False)
        rehearse(self.terms, batch)

    def _warm_up_batch(self) -> Any:
        return self.train.sample(self.cfg.split(self.accelerator.num_processes)[0], self.accelerator, self.cfg)

    def _refuse_to_compile(self, reason: str) -> None:
        if self.cfg.compile not in ("auto", "graphs", "off"):
            text = f"--compile {self.cfg.compile} is not possible: {reason}. The layers run without compilation."
            warn_on_main(text, "FALLBACK")

    def describe(self) -> dict[str, bool]:
        """Return what was done to the layers."""
        compiles = self.compiled_from is not None
        return {"padding_free": bool(self.padding_free), "captured": bool(self.graphs), "compiled": compiles}

    def work_of(self, batches: Sequence[Any]) -> tuple[float, float]:
        """Return (tokens, FLOPs) of this rank's share of an update. They are 0 if they are not known."""
        some = [batch for batch in batches if isinstance(batch, Rows)]
        tokens = sum(rows.whole + (rows.targets if self._has_decoder else 0) for rows in some)
        if self._flops is None:
            return float(tokens), 0.0
        return float(tokens), float(sum(self._flops.count(s.used, s.squares, s.targets, s.texts) for s in some))

    @property
    def cost(self) -> Cost:
        """What an item costs. Targets are not known before an item is read, and their part is small."""
        per_token, per_square = (self._flops.per_token, self._flops.per_square) if self._flops else BY_TOKENS[:2]
        return Cost(per_token, per_square, pads=self.padding_free is None)

    # ---- what `attach` does

    def remove_padding(self) -> None:
        asked = self.cfg.padding_free
        reason = "--padding_free off" if asked == "off" else self._try_without_padding()
        reasons = [found for found in gather_everywhere(reason) if found]
        if reasons and self.padding_free is not None:
            self.padding_free.remove()
            self.padding_free = None
        if reasons and asked == "on":
            warn_on_main(f"--padding_free on is not possible: {reasons[0]}. Texts are padded.", "FALLBACK")
        elif reasons and reasons[0].startswith(NOT_CAPTURED):
            print_on_main(reasons[0])
        elif reasons and reasons[0] not in ("--padding_free off", NO_TEXTS):
            print_on_main(f"texts are padded: {reasons[0]}.")

    def _try_without_padding(self) -> str:
        """Install padding-free layers and compare them with padding on a few items. Return why they cannot be used, or ""."""
        accelerator, model = self.accelerator, self.model
        sharded = is_sharded(model)
        with together("compare texts with and without padding"):
            batch = self.train.sample(4, accelerator, self.cfg)
            is_fixed = not isinstance(batch, Rows)
            if is_fixed and isinstance(batch, Mapping) and "attention_mask" in batch:
                return "their collate function pads them (`make_rows` of docs/own_recipe.md does not)"
            # A run that has found its graphs to differ keeps its layers when it is resumed.
            is_off = self.cfg.compile == "off" and not choices.was_auto(self.cfg, "compile")
            if is_fixed and (not self._on_gpu or is_off or not isinstance(batch, Mapping)):
                return NO_TEXTS
            kept = NOT_CAPTURED if is_fixed else ""
            if not getattr(model, "is_quantized", False) and not sharded:
                model.to(accelerator.device)
            shares = True
            if not is_fixed and "shared" in batch:  # one decision for all micro-batches: layers are compiled for one of both
                rows = self.train.sample(64, accelerator, self.cfg)
                shares = rows.whole - rows.used >= LEAST_SHARED * rows.whole
            is_own = getattr(self.cfg, "attn_implementation", "auto") in ("auto", "sdpa")  # otherwise it is the user's choice
        kinds: list[Callable[[], CalledModel]] = [lambda: RowModel(model, self._narrow, sharded)]
        kinds = [lambda: FixedModel(model, sharded)] if is_fixed else [*kinds * is_own, lambda: PackedLayers(model, sharded)]
        compared, refused = [], []
        # For a sharded model each comparison is a collective, and so outside of the block.
        with contextlib.nullcontext() if sharded else together("compare texts with and without padding"):
            for make in kinds:
                try:
                    found = make()
                except NeedsPadding as reason:
                    refused.append(str(reason))
                    continue
                found.shares = found.shares and shares
                if not (reason := self._install(found, batch)):
                    return ""
                compared.append(reason)
        return f"{kept}{(compared or refused[-1:])[0]}"

    def _install(self, found: CalledModel, batch: Any) -> str:
        """Install what computes without padding, and compare it with padding. Return why it was removed, or ""."""
        found.install()
        reason = self._compare(found, batch)
        if is_sharded(self.model):
            sharding.recover(self.model)  # the forward pass may have raised an error
        if reason:
            found.remove()
        else:
            self.padding_free = found
        return reason

    @property
    def _narrow(self) -> torch.dtype:
        """The type of autocast."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.float32)

    def problem_of_rows(self) -> str:
        """Return why the layers must not compute without padding after all, or "": weights that were 0 may now have an effect."""
        if not self.padding_free:
            return ""
        # Accelerate has put autocast into the forward pass, which is compared without it first.
        wrapped = {name: vars(self.model).pop(name) for name in ("forward", "_original_forward") if name in vars(self.model)}
        try:
            with self.plain_layers():
                return self._compare(self.padding_free, self.train.sample(4, self.accelerator, self.cfg))
        finally:
            vars(self.model).update(wrapped)

    def _compare(self, layers: CalledModel, batch: Any) -> str:
        """Compare in float32, and as the run computes it if that is another precision, which uses another attention.

        A difference that rounding may explain is computed in float64 too. All ranks of a sharded model compute the same batch and go on
        alike, because each forward pass gathers weights.
        """
        model, exact = self.model, torch.float32
        loss = lambda batch: checked(self.terms.trial(batch), needs_gradient=False).double()
        agreed = lambda found: next(filter(None, gather_everywhere(found)), "") if is_sharded(model) else found
        with padding_check.computed_exactly(model, exact):
            reason = agreed(layers.check(loss, batch))
        of_padding = layers.of_padding
        if reason and agreed("rounding" * (1e-4 < layers.apart < 1e-2)):
            # A rank of a sharded model that is out of memory ends the run, because the others wait for its gathers.
            full = () if is_sharded(model) else (MemoryError, torch.OutOfMemoryError)
            with contextlib.suppress(*full), padding_check.computed_exactly(model, torch.float64):
                reason = agreed(layers.check(loss, batch, 1e-6))
        if not reason and (self.accelerator.mixed_precision != "no" or next(model.parameters()).dtype.itemsize < 4):
            with self.accelerator.autocast():
                reason = agreed(layers.check(loss, batch, exact=of_padding))
        padding_check.forget_peak(self.accelerator.device)
        return reason

    def capture_layers(self) -> None:
        """Capture the layers as CUDA graphs if there is a GPU."""
        if not self.padding_free:
            self._refuse_to_compile("texts are padded, so every batch has a different shape")
        elif self._on_gpu and self.cfg.compile != "off" and self.padding_free.why_plain:
            print_on_main(f"layers are neither captured as CUDA graphs nor compiled: {self.padding_free.why_plain}")
        elif self._on_gpu and self.cfg.compile != "off":
            self._capture(self.padding_free.calls)
            if is_sharded(self.model):
                print_on_main("layers are not captured as CUDA graphs: the weights of a sharded model have no fixed addresses")

    def _capture(self, calls: list[Callable[..., Any]]) -> None:
        layers = self.padding_free
        layers.calls, layers.run, self.graphs = calls, None, []
        # Checkpointing runs a layer again in the backward pass, and the weights of a sharded model have no fixed addresses.
        if self._on_gpu and not is_sharded(self.model) and self.cfg.gradient_checkpointing is not True:
            # With one rank all layers are one graph. DDP gets gradients as soon as they fill one of its buckets.
            group_bytes = math.inf if self.accelerator.num_processes == 1 else self.cfg.bucket_cap_mb << 20
            device = self.accelerator.device
            is_compiled = bool(self.plain_calls)
            self.graphs = layers.capture(lambda some, calls: GraphedLayers(some, calls, device, is_compiled, group_bytes))

    @contextlib.contextmanager
    def plain_layers(self) -> Iterator[None]:
        """Run the layers without compilation and without CUDA graphs inside the block."""
        if self.padding_free is None:
            yield
            return
        layers = self.padding_free
        before = layers.calls, layers.run, self.softmax
        layers.calls, layers.run = self.plain_calls or layers.calls, None
        self._set_softmax(linear_cross_entropy.plain_softmax)
        try:
            yield
        finally:
            layers.calls, layers.run, softmax = before
            self._set_softmax(softmax)

    def _set_softmax(self, softmax: linear_cross_entropy.Softmax) -> None:
        self.softmax = softmax
        for head in self.heads:
            head.softmax = softmax


class _Fallback:
    """A compiled function that is computed without compilation from its first error on."""

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any]):
        self.compiled, self.plain, self.reason = compiled, plain, ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.reason:
            try:
                return self.compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.reason = _reason(error)
        return self.plain(*args, **kwargs)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]  # the second one has the reason
    return f"{type(error).__name__}: {' '.join(lines)[:200]}"
