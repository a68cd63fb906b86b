"""Finds what to change if a run does not fit into the memory of its GPUs. Each suggestion fits by the estimate itself."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from accel_ddp.environment.sharding import CONFIG, ShardingPlan
from accel_ddp.errors import UserError
from accel_ddp.memory import estimate as memory
from accel_ddp.memory.estimate import GIB, Estimate, Run, needed
from accel_ddp.memory.fake_model import LORA_TASKS

NUMBERS = (2, 4, 8, 16, 32, 64)  # of GPUs that are suggested
CONFIG_OF_NODES = "accelerate_configs/2node_fsdp.yaml"
Change = tuple[str, int, ShardingPlan | None, dict[str, Any]]  # words, ranks, how the model is sharded, options
CHECKPOINTED = {"gradient_checkpointing": True}
ADAPTERS = {"lora_r": 16}
NARROW_ADAPTERS = {"lora_r": 16, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Suggestion:
    """What to type, and the memory of the run with it."""

    words: str
    found: Estimate

    def __str__(self) -> str:
        more = "" if self.found.has_activations else "more than "
        return f"{self.words} ({more}{self.found.peak / GIB:.1f} GiB)"


class Estimator:
    """Estimates a run, and the same run with other options or GPUs. A micro-batch is traced once for each set of options."""

    def __init__(self, cfg: Any, model_class: str, precision: str, num_nodes: int = 1):
        """`precision` is no, bf16 or fp16."""
        self.cfg, self.model_class, self.precision, self.num_nodes = cfg, model_class, precision, num_nodes
        self._runs: dict[tuple[Any, ...], Run] = {}

    def estimate(self, ranks: int, plan: ShardingPlan | None = None, **changes: Any) -> Estimate:
        """Return the peak of a rank. Raise UserError if the batch cannot be split over the ranks.

        `--micro_batch_size auto` counts as 1, which is the least that it may choose.
        """
        cfg = copy.copy(self.cfg)
        for name, value in changes.items():
            setattr(cfg, name, value)
        if cfg.micro_batch_size == "auto":
            cfg.micro_batch_size = 1
        cfg.gradient_checkpointing |= plan is not None and plan.activation_checkpointing
        micro, count = cfg.split(ranks)
        options = sorted((name, value) for name, value in changes.items() if name not in ("micro_batch_size", *CHECKPOINTED))
        key = (micro, cfg.gradient_checkpointing, *options)
        if key not in self._runs:
            self._runs[key] = memory.prepare(cfg, self.model_class, self.precision, micro)
        return memory.estimate(self._runs[key], ranks, count, plan)

    def can_be_sharded(self) -> bool:
        """Return whether FSDP accepts the model and the options. Call it after `estimate`."""
        try:
            self.require_sharded()
        except UserError:
            return False
        return True

    def require_sharded(self) -> None:
        """Raise UserError if FSDP does not accept the model or the options. Call it after `estimate`."""
        cfg, states = self.cfg, next(iter(self._runs.values())).states
        cfg.validate_sharded()
        cfg.check_installed(is_sharded=True)
        refused = {
            f"mixed precision {self.precision}": self.precision == "fp16",
            f"--model {cfg.model}": states.has_batch_norm or not states.num_layers,
        }
        for what, is_refused in refused.items():
            if is_refused:
                raise UserError(
                    f"{what}: cannot be combined with FSDP, which the accelerate config asks for, so that a run would be refused. Use "
                    "accelerate_configs/1node.yaml, or leave --config_file out."
                )

    def suggest(self, ranks: int, plan: ShardingPlan | None, available: float) -> list[Suggestion]:
        """Return changes with which the run fits: first one that keeps the result, then one that changes what is learned."""
        kept = next(self._fitting(self._same_result(ranks, plan, available), available), None)
        changed = next(self._fitting(self._other_result(ranks, plan), available), None)
        return [one for one in (kept, changed) if one]

    def _fitting(self, changes: Iterator[Change], available: float) -> Iterator[Suggestion]:
        for words, ranks, plan, options in changes:
            # A batch may not be divisible, and a model may not support gradient checkpointing or not be traceable.
            try:
                found = self.estimate(ranks, plan, **options)
            except Exception:
                continue
            if fits(found, available):
                yield Suggestion(words, found)

    def _same_result(self, ranks: int, plan: ShardingPlan | None, available: float) -> Iterator[Change]:
        """Yield changes that affect time and memory only, from the cheapest one on."""
        layouts: list[tuple[str, int, ShardingPlan | None]] = [("", ranks, plan)]
        if plan and plan.replicas > 1:
            words = "one copy of the model on all nodes (--fsdp_sharding_strategy FULL_SHARD)"
            layouts.append((words, ranks, dataclasses.replace(plan, replicas=1)))
        if plan and not plan.reshard_after_forward:
            freed = dataclasses.replace(plan, reshard_after_forward=True)
            layouts.append(("--fsdp_reshard_after_forward true", ranks, freed))
        if self.can_be_sharded():
            sharded = dataclasses.replace(plan or ShardingPlan(), replicas=1, reshard_after_forward=True)
            how = "" if plan else f" (--config_file {CONFIG})"
            if self.num_nodes > 1 and not plan:
                how = f" (--config_file {CONFIG_OF_NODES} --fsdp_sharding_strategy FULL_SHARD)"
            if ranks > 1 and not plan:
                layouts.append((f"FSDP over the same {ranks} GPUs{how}", ranks, sharded))
            layouts += [(f"FSDP over {number} GPUs{how}", number, sharded) for number in NUMBERS if number > ranks]
            if plan and not plan.cpu_offload:
                layouts.append(("--fsdp_offload_params true", ranks, dataclasses.replace(plan, cpu_offload=True)))
        for words, number, other in layouts:
            with contextlib.suppress(UserError):  # the batch cannot be split over so many GPUs
                if needed(self.estimate(number, other).states, number) <= available:
                    yield from self._smaller_steps(words, number, other)

    def _smaller_steps(self, words: str, ranks: int, plan: ShardingPlan | None) -> Iterator[Change]:
        """Yield a layout alone, and with smaller micro-batches and gradient checkpointing."""
        join = lambda more: f"{words} with {more}" if words else more
        if words:
            yield words, ranks, plan, {}
        sizes = self._sizes(ranks)
        for size in sizes:
            yield join(f"--micro_batch_size {size}"), ranks, plan, {"micro_batch_size": size}
        if self.cfg.gradient_checkpointing or (plan and plan.activation_checkpointing):
            return
        yield join("--gradient_checkpointing"), ranks, plan, CHECKPOINTED
        if sizes:
            smallest = {**CHECKPOINTED, "micro_batch_size": sizes[-1]}
            yield join(f"--gradient_checkpointing --micro_batch_size {sizes[-1]}"), ranks, plan, smallest

    def _sizes(self, ranks: int) -> list[int]:
        """Return smaller micro-batches: a half, a quarter, and 1."""
        micro = 1 if self.cfg.micro_batch_size == "auto" else self.cfg.split(ranks)[0]
        return sorted({size for size in (micro // 2, micro // 4, 1) if 0 < size < micro and micro % size == 0}, reverse=True)

    def _other_result(self, ranks: int, plan: ShardingPlan | None) -> Iterator[Change]:
        cfg = self.cfg
        if cfg.optimizer == "adamw" and plan is None and find_spec("torchao"):
            yield "--optimizer adamw8bit", ranks, plan, {"optimizer": "adamw8bit"}
        if not LORA_TASKS.get(self.model_class) or getattr(cfg, "lora_r", 1):
            return
        yield "--lora_r 16", ranks, plan, ADAPTERS
        yield "--lora_r 16 --dtype bfloat16", ranks, plan, NARROW_ADAPTERS
        smaller = {**NARROW_ADAPTERS, **CHECKPOINTED, "micro_batch_size": 1}
        yield "--lora_r 16 --dtype bfloat16 --gradient_checkpointing --micro_batch_size 1", ranks, plan, smaller
        if plan is None:
            quantised = {**ADAPTERS, "quantize": "4bit", **CHECKPOINTED, "micro_batch_size": 1}
            yield "--lora_r 16 --quantize 4bit --gradient_checkpointing --micro_batch_size 1", ranks, plan, quantised


def fits(found: Estimate, available: float) -> bool:
    """Return whether a run fits into a GPU with so many bytes."""
    return needed(found.peak, found.ranks) <= available
