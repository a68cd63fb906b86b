"""The table of preference losses. An entry is a formula with its defaults and its options.

The choices, options, defaults, checks and help of the recipe `dpo`, the table in docs/preferences.md, `accel-ddp convert` and the
hint of `accel-ddp run kto` follow from it. This module does not import torch, because `--help` reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from accel_ddp.config.chat_options import PairConfig
from accel_ddp.config.options import option
from accel_ddp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Answers(NamedTuple):
    """What a formula reads: of pairs in the shape (pairs, 2), the chosen answer first, or of labeled answers in (answers,)."""

    policy: "Tensor"  # summed log-probabilities
    reference: "Tensor | None"  # the same of the reference
    tokens: "Tensor"  # lengths
    means: "Tensor"  # a: policy / tokens
    rewards: "Tensor"  # β r, and β a without a reference
    good: "Tensor | None"  # of labeled answers: 1 if desirable, else 0
    z: "Tensor | float"  # of labeled answers: max(0, mean of r) over the whole batch

    @property
    def margins(self) -> "Tensor":
        return self.rewards[:, 0] - self.rewards[:, 1]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """An entry of the table. `terms(cfg, answers)` returns the loss of each pair or labeled answer, without the SFT term."""

    terms: Callable[[Any, Answers], "Tensor"]
    formula: str  # for docs/preferences.md
    beta: float = 0.1  # of `--beta auto`
    lr_part: float = 0.05  # `--lr auto`, as a part of the one of `sft`
    has_reference: bool = True
    learns_labels: bool = False  # an item is a labeled answer, and a step begins with `z` of its whole batch
    options: dict[str, Any] = field(default_factory=dict)  # by name; several losses may have the same one
    also: tuple[str, ...] = ()  # its names in other toolkits
    # By toolkit and option: the name there, and the default there if it is not ours.
    elsewhere: dict[str, dict[str, tuple[str, float]]] = field(default_factory=dict)


LOSSES: dict[str, Loss] = {}


def entry(formula: str, **facts: Any) -> Callable[[Callable], Callable]:
    """Return a decorator that adds a formula to the table, with the fields of `Loss` that are not the usual ones."""

    def add(terms: Callable) -> Callable:
        LOSSES[terms.__name__] = Loss(terms=terms, formula=formula, **facts)
        return terms

    return add


def log_sigmoid(x: "Tensor") -> "Tensor":
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


SFT = {"sft_weight": option(
    0.0, "weight of an SFT loss on the chosen answers (mean per token)", at_least=0, also=("rpo_alpha", "pref_ftx", "cpo_alpha")
)}  # fmt: skip
SMOOTHING = {"label_smoothing": option(
    0.0, "probability that a pair is labeled the wrong way round (cDPO); 0.1 is usual, at 0.5 both answers are equally good",
    at_least=0, below=0.5, also=("dpo_label_smoothing",),
)}  # fmt: skip


@entry("-(1 - ε) log σ(βd) - ε log σ(-βd), ε is `--label_smoothing`", options=SMOOTHING | SFT, also=("sigmoid",))
def dpo(cfg: Any, x: Answers) -> "Tensor":
    margins = x.margins
    return -(1 - cfg.label_smoothing) * log_sigmoid(margins) - cfg.label_smoothing * log_sigmoid(-margins)


@entry("(d - 1 / (2β))²", options=SFT)
def ipo(cfg: Any, x: Answers) -> "Tensor":  # over sums, as in the paper
    return (x.margins / cfg.beta - 1 / (2 * cfg.beta)).square()


@entry(
    "-a(chosen) - β log σ(log odds(chosen) - log odds(rejected)), odds = exp(a) / (1 - exp(a))", lr_part=0.4, has_reference=False
)
def orpo(cfg: Any, x: Answers) -> "Tensor":  # the likelihood is over the answer without its prompt
    a = x.means.clamp(max=-1e-7)  # an answer of probability 1 has infinite odds
    odds = a - (-a.expm1()).log()
    return -x.means[:, 0] - cfg.beta * log_sigmoid(odds[:, 0] - odds[:, 1])


@entry(
    "-log σ(β (a(chosen) - a(rejected)) - γ), γ is `--gamma`", beta=2.0, lr_part=0.025, has_reference=False,
    options={"gamma": option(0.5, "margin by which the chosen answer must win", also=("simpo_gamma",)), **SFT},
    elsewhere={"axolotl": {"sft_weight": ("cpo_alpha", 1.0)}},
)  # fmt: skip
def simpo(cfg: Any, x: Answers) -> "Tensor":
    return -log_sigmoid(x.margins - cfg.gamma)


@entry(
    "desirable: w (1 - σ(β (r - z))), undesirable: w (1 - σ(β (z - r))), w is `--desirable_weight` or `--undesirable_weight`",
    learns_labels=True,
    options=SFT | {
        f"{kind}_weight": option(1.0, f"weight of {kind} answers", above=0, also=(f"kto_{kind}_weight", f"kto_{other}_weight"))
        for kind, other in (("desirable", "chosen"), ("undesirable", "rejected"))
    } | {
        "label_column": option("", "column that is 1 or true for desirable answers; default: label or kto_tag", group="data"),
        "answer_column": option("", "column of answers; default: answer, output, completion or response", group="data"),
    },
)  # fmt: skip
def kto(cfg: Any, x: Answers) -> "Tensor":
    weights = cfg.desirable_weight * x.good + cfg.undesirable_weight * (1 - x.good)
    return weights * ((1 - 2 * x.good) * (x.rewards - cfg.beta * x.z)).sigmoid()


def compute(
    cfg: Any, policy: "Tensor", reference: "Tensor | None", tokens: "Tensor", good: "Tensor | None" = None, z: Any = 0.0
) -> tuple["Tensor", "Tensor"]:
    """Return the loss of each item, and the rewards without gradient. The arguments are those of `Answers`."""
    means, good = policy / tokens, None if good is None else good.to(policy)
    rewards = cfg.beta * (means if reference is None else policy - reference)
    losses = LOSSES[cfg.loss].terms(cfg, Answers(policy, reference, tokens, means, rewards, good, z))
    if cfg.sft_weight:
        losses = losses - (cfg.sft_weight * means[:, 0] if good is None else cfg.sft_weight * good * policy / tokens)
    return losses, rewards.detach()


REFERENCE_FREE = [name for name, one in LOSSES.items() if not one.has_reference]
LABELED = [name for name, one in LOSSES.items() if one.learns_labels]
USERS = {name: [loss for loss, one in LOSSES.items() if name in one.options] for one in LOSSES.values() for name in one.options}
_BETAS = ", ".join(["0.1", *(f"{name} {one.beta:g}" for name, one in LOSSES.items() if one.beta != Loss.beta)])


@dataclass(kw_only=True)
class _LossConfig(PairConfig):
    """The options that all losses share, and the checks."""

    loss: Literal[tuple(LOSSES)] = option(  # type: ignore[valid-type]
        "dpo", f"without a reference model: {', '.join(REFERENCE_FREE)}; from single answers with a label: {', '.join(LABELED)}",
        group="training", also=("loss_type", "pref_loss"),
    )  # fmt: skip
    beta: float | Literal["auto"] = option(
        "auto", f"strength: how much rewards count (orpo: weight of the odds ratio); auto: {_BETAS}", group="training", above=0,
        legacy="auto", also=("pref_beta", "orpo_alpha", "rl_beta"),
    )  # fmt: skip
    losses = LOSSES  # for `accel-ddp convert`

    @property
    def has_reference(self) -> bool:
        return LOSSES[self.loss].has_reference

    def lr_part(self) -> tuple[float, str]:
        """Return the part of the learning rate of `sft` that this loss needs, and the reason."""
        return LOSSES[self.loss].lr_part, f"--loss {self.loss}"

    def validate(self) -> None:
        super().validate()
        for name, losses in USERS.items():
            if (value := getattr(self, name)) != getattr(type(self), name) and self.loss not in losses:
                reason = f"is an option of --loss {' and '.join(losses)}, not of {self.loss}"
                raise UserError(f"--{name} {value}: {reason}. Leave it out.")


def _declare(name: str) -> tuple[str, type, Any]:
    """Return the field of an option, whose help begins with the losses that have it."""
    made = LOSSES[USERS[name][0]].options[name]
    facts = {"group": "training", **made.metadata, "help": f"{', '.join(USERS[name])}: {made.metadata['help']}"}
    return name, type(made.default), field(default=made.default, metadata=facts)


# The options of the recipe `dpo`: these, and those of each loss.
LossConfig: Any = make_dataclass(
    "LossConfig", map(_declare, USERS), bases=(_LossConfig,), kw_only=True, namespace={"__module__": __name__}
)
