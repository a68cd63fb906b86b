"""The options of the optimizer, the learning rate and the average of the weights, and what they cost in memory.

This module needs the standard library only, so a wrong option is reported before torch is imported.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, NamedTuple

from accel_ddp.config.options import of_group, option
from accel_ddp.errors import UserError

ADAM = ("beta1", "beta2", "eps")


class Optimizer(NamedTuple):
    """What options, messages, `convert` and the estimate know of an optimizer. `training.optim.build` makes it."""

    bytes_of: Callable[..., int]  # of its state, from the bytes of a parameter, its shape, whether it is hidden, and --momentum
    others: str  # its names in other toolkits, a regular expression
    uses: tuple[str, ...] = ()  # which of the options of optimizers
    usual_lr: float = 0.0  # if it is unlike that of AdamW
    package: str = ""  # that it needs
    not_sharded: str = ""  # why it cannot step the shards of FSDP


OPTIMIZERS = {
    "adamw": Optimizer(lambda weights, *_: 2 * weights, "adamw(?!.*8bit)", ADAM),
    "adamw8bit": Optimizer(
        lambda weights, shape, *_: 2 * weights if (size := math.prod(shape)) < 4096 or size % 256 else
        2 * (size + 4 * size // 256 + 4 * 256),  # codes, the scale of each block, and a table of 256 values
        "adamw.*8bit", ADAM, package="torchao",
        not_sharded="it quantizes blocks of 256 values, and another number of ranks would have other blocks",
    ),
    "adafactor": Optimizer(
        lambda weights, shape, *_: weights // shape[-1] + weights // shape[-2] if len(shape) > 1 else weights,
        "adafactor", usual_lr=1e-3, not_sharded="the Adafactor of torch cannot step sharded parameters",
    ),
    "muon": Optimizer(lambda weights, _, is_hidden, *__: weights * (2 - is_hidden), "muon", ("momentum", *ADAM)),
    "sgd": Optimizer(lambda weights, _, __, momentum: weights * (momentum > 0), "^sgd$", ("momentum",), usual_lr=1e-2),
}  # fmt: skip


def _using(option: str) -> list[str]:
    return [name for name, entry in OPTIMIZERS.items() if option in entry.uses]


@dataclass(kw_only=True)
@of_group("training", at_least=0)
class OptimizerConfig:
    """The options that decide how gradients change the weights."""

    optimizer: Literal[tuple(OPTIMIZERS)] = option(  # type: ignore[valid-type]
        "adamw", "optimizer (docs/optimizers.md compares their memory); adamw8bit needs torchao"
    )
    lr: float = option(2e-5, "peak learning rate")
    lr_of: tuple[str, ...] = option(
        (), "peak learning rate of parameters whose names contain a word: classifier=1e-3; the last match wins"
    )
    lr_schedule: Literal["linear", "cosine", "wsd", "constant"] = option(
        "linear", "linear and cosine decay from the warm-up to the end; wsd is constant, then decays for --decay_ratio"
    )
    warmup_steps: int = option(0, "steps until --lr is reached")
    warmup_ratio: float = option(0.0, "warm-up as a fraction of all steps, if --warmup_steps is 0")
    min_lr_ratio: float = option(0.0, "final learning rate as a fraction of --lr; not with --lr_schedule constant")
    decay_ratio: float = option(0.1, "fraction of all steps in which --lr_schedule wsd decays")
    weight_decay: float = option(0.01, "weight decay of weight matrices; biases and norms have none")
    momentum: float = option(0.9, f"momentum of --optimizer {', '.join(_using('momentum'))}")
    beta1: float = option(0.9, f"decay of the first moment in {', '.join(_using('beta1'))}")
    beta2: float = option(0.999, "decay of the second moment")
    eps: float = option(1e-8, f"term added to the denominator in {', '.join(_using('eps'))}")
    ema_decay: float = option(
        0.0, "evaluate and export an exponential moving average of the weights with this decay, such as 0.999; 0: off"
    )

    def check_optimizer(self) -> None:
        below_1 = [(name, getattr(self, name) < 1) for name in ("momentum", "beta1", "beta2", "ema_decay")]
        for name, is_valid, expected in (
            *((*pair, "a fraction, from 0 to below 1") for pair in below_1),
            ("eps", self.eps > 0, "above 0, for example 1e-8"),
            ("warmup_ratio", 0 <= self.warmup_ratio <= 1, "a fraction of all steps, from 0 to 1"),
            ("decay_ratio", 0 < self.decay_ratio <= 1, "a fraction of all steps, above 0 and at most 1"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "a fraction of --lr, from 0 to 1"),
        ):
            if not is_valid:
                raise UserError(f"--{name} {getattr(self, name)}: must be {expected}.")
        for name in ("momentum", "beta1", "beta2", "eps"):
            if getattr(self, name) != getattr(type(self), name) and name not in OPTIMIZERS[self.optimizer].uses:
                instead = f"Leave it out, or use --optimizer {' or '.join(_using(name))}"
                raise UserError(f"--{name} {getattr(self, name)}: --optimizer {self.optimizer} does not use it. {instead}.")
        if self.min_lr_ratio != type(self).min_lr_ratio and self.lr_schedule == "constant":
            reason = "the learning rate of --lr_schedule constant never falls"
            raise UserError(f"--min_lr_ratio {self.min_lr_ratio}: {reason}. Leave it out.")
        if self.decay_ratio != type(self).decay_ratio and self.lr_schedule != "wsd":
            raise UserError(f"--decay_ratio {self.decay_ratio}: needs --lr_schedule wsd, and it is {self.lr_schedule}.")
        if self.lr_schedule == "wsd" and not self.warmup_steps and self.warmup_ratio + self.decay_ratio > 1:
            given = f"--warmup_ratio {self.warmup_ratio} --decay_ratio {self.decay_ratio}"
            raise UserError(f"{given}: warm-up and decay together take more than all steps. Use smaller fractions.")
        self.learning_rates()

    def learning_rates(self) -> dict[str, float]:
        found = {}
        for given in self.lr_of:
            word, _, value = given.rpartition("=")
            try:
                found[word] = float(value)
            except ValueError:
                found[word] = -1
            if not word or not 0 <= found[word] < math.inf:
                raise UserError(f"--lr_of {given}: must be a part of parameter names, = and a learning rate: classifier=1e-3")
        if found and not self.lr:
            raise UserError("--lr 0 --lr_of: learning rates follow the schedule of --lr, which must be above 0. Use --freeze.")
        return found

    def check_installed(self, is_sharded: bool) -> None:
        entry = OPTIMIZERS[self.optimizer]
        if is_sharded and entry.not_sharded:
            raise UserError(
                f"--optimizer {self.optimizer} cannot be used with FSDP, because {entry.not_sharded}. Use --optimizer "
                f"{', '.join(name for name, one in OPTIMIZERS.items() if not one.not_sharded)}, whose state is sharded too. Or train "
                "with DDP: accelerate_configs/1node.yaml or 2node.yaml."
            )
        if entry.package and find_spec(entry.package) is None:
            raise UserError(f"--optimizer {self.optimizer}: needs {entry.package}. Install it: pip install {entry.package}")


def ema_bytes(cfg: OptimizerConfig, shape: Sequence[int], itemsize: int = 4) -> int:
    """Return how many bytes the average of a trained parameter takes. It has 32 bits or more."""
    return max(4, itemsize) * math.prod(shape) if cfg.ema_decay else 0
