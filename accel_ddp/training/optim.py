"""The optimizers, frozen parameters, and a learning-rate schedule that is a function of the step.

torch's own Muon multiplies in bfloat16 and steps only whole matrices. The products of `Muon` have the precision of the weights, so
the number of ranks changes the result by rounding in that precision only, and a matrix may be spread over ranks.
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.config.optimizer_options import OPTIMIZERS
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main
from accel_ddp.ranks.process import links
from accel_ddp.ranks.shards import full, local, region, sharded_like
from accel_ddp.text import first_line
from accel_ddp.training.sharding import reshard

log = logging.getLogger(__name__)

ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the usual quintic iteration, which brings singular values near 1 in 5 rounds


class Muon(torch.optim.Optimizer):
    """Steps groups with `is_hidden` with Muon (Nesterov momentum), and other groups with AdamW.

    The steps of matrices are scaled to the size of AdamW's steps, so learning rate and weight decay mean the same.
    """

    _step_supports_amp_scaling = True  # `step` reads `found_inf` on the device and then changes nothing
    divides_gradients = True  # by `grad_scale`, see `engine.scaler`

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, fused: bool):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "is_hidden": False, "fused": fused})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["is_hidden"] else ():
                if p.grad is not None:
                    self._step_matrix(p, group)
        if others := [group for group in self.param_groups if not group["is_hidden"]]:
            self._adamw(others).step()

    def _step_matrix(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        gradient, momentum = local(p.grad), local(state["momentum_buffer"])
        if (divisor := getattr(self, "grad_scale", None)) is not None:
            gradient = gradient / divisor
        new_momentum = momentum.lerp(gradient, 1 - group["momentum"])
        direction = orthogonalize(full(sharded_like(gradient.lerp(new_momentum, group["momentum"]), p)))
        (first, _), (rows, _) = region(p)
        weights, lr = local(p), group["lr"]
        own = direction[first : first + rows].to(weights)
        scale = 0.2 * math.sqrt(max(p.shape))  # the elements of AdamW's steps have a root mean square of about 0.2
        new_weights = weights.mul(1 - lr * group["weight_decay"]).add_(own, alpha=-lr * scale)
        found = getattr(self, "found_inf", None)
        for value, new in ((momentum, new_momentum), (weights, new_weights)):
            value.copy_(new if found is None else torch.where(found.bool(), value, new))

    def _adamw(self, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
        """Return an AdamW that steps these groups and stores its state here.

        It is built in each step, because loading a checkpoint replaces groups and state.
        """
        adamw = torch.optim.AdamW([dict(group) for group in groups], fused=groups[0]["fused"])
        adamw.state, adamw.param_groups = self.state, [{**made, **own} for made, own in zip(adamw.param_groups, groups)]
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                setattr(adamw, name, getattr(self, name))
        return adamw


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the same state, whose step on a GPU needs less memory bandwidth."""

    divides_gradients = True  # by `grad_scale`, see `engine.scaler`
    kernel: Any = None  # the module `adamw_kernel`, if it is used

    def choose_kernel(self, device: torch.device) -> None:
        """Use our kernel if every rank can compile it, because all have to compute the same bits. Call it on every rank."""
        if device.type != "cuda" or links.sharding is not None:
            return
        try:
            from accel_ddp.training import adamw_kernel as own

            own.try_to_compile(device)
        except Exception as error:  # of many kinds: no Triton, or no compiler for it
            own = None
            log.warning("AdamW uses torch's kernel: %s: %s", type(error).__name__, first_line(error))
        self.kernel = None if any(gather_everywhere(own is None)) else own

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        is_ready = self.kernel and hasattr(self, "found_inf")
        stepped = [self._tensors_of(group) if is_ready else None for group in self.param_groups]
        if not all(stepped):
            return super().step()
        for group, tensors in zip(self.param_groups, stepped):
            if tensors[0]:
                rest = [group[name] for name in ("betas", "eps", "weight_decay")]
                self.kernel.step_all(*tensors, float(group["lr"]), *rest, self.found_inf, self.grad_scale)

    def _tensors_of(self, group: dict[str, Any]) -> tuple[list[Tensor], ...] | None:
        """Return the parameters, gradients, means, squares and counts of a group, or None if torch has to step it.

        torch does the first step of a parameter, which makes its state, and steps parameters of other types and layouts. This runs in
        every step: the hash of a parameter is a Python function, so it is computed once.
        """
        params = [p for p in group["params"] if p.grad is not None]
        grads, states = [p.grad for p in params], [self.state.get(p) for p in params]
        if not all(states):
            return None
        means, squares, counts = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        is_usual = all(x.dtype == torch.float32 and x.is_contiguous() for tensors in (params, grads) for x in tensors)
        is_usual = is_usual and all(p.numel() < 2**31 for p in params)  # the kernel counts in 32 bits
        return (params, grads, means, squares, counts) if is_usual and all(count.is_cuda for count in counts) else None


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return U V' of the singular value decomposition U S V' of a matrix, approximately, by a Newton-Schulz iteration."""
    x = matrix if matrix.dtype == torch.float64 else matrix.float()
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices that Muon steps: all except embeddings and heads.

    A head is the output layer of a transformers model, and whatever lies outside of its base model.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    others = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    others |= set(head.parameters()) if isinstance(head, nn.Module) else set()
    others |= {p for name, p in model.named_parameters() if "trainable_tokens_delta" in name}  # embeddings of new tokens
    body = getattr(whole, getattr(whole, "base_model_prefix", "") or "-", None)
    if isinstance(body, nn.Module):
        others |= set(whole.parameters()) - set(body.parameters())
    return {p for p in model.parameters() if p.requires_grad and p.ndim == 2 and p not in others}


def build_adamw8bit(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW of torchao, whose moments have 8 bits. `to_plain` and `from_plain` convert its state for checkpoints.

    bitsandbytes has such an optimizer too, but it waits for the GPU after every parameter.
    """
    from torchao.optim import AdamW8bit as Original
    from torchao.optim.subclass_8bit import OptimState8bit

    class AdamW8bit(Original):
        def step(self, closure: None = None) -> None:
            # torchao compiles its step. A CPU may have no compiler, and on a GPU the kernels are chosen by measured times and round
            # differently in each process, so a resumed run would differ from an uninterrupted one.
            with torch.compiler.set_stance("force_eager"):
                super().step()

        def to_plain(self, state: dict[str, Any]) -> dict[str, Any]:
            """Return the state of a parameter without tensor subclasses."""
            plain = {}
            for key, value in state.items():
                is_8bit = isinstance(value, OptimState8bit)
                plain |= {f"{key}.{part}": getattr(value, part) for part in PARTS} if is_8bit else {key: value}
            return plain

        def from_plain(self, plain: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
            """Return the state of a parameter from what `to_plain` has returned."""
            state = {key.removesuffix(".codes"): value for key, value in plain.items() if key.partition(".")[2] in ("", "codes")}
            for name in [name for name in state if name not in plain]:
                values = [plain[f"{name}.{part}"] for part in PARTS]
                state[name] = OptimState8bit(*values, signed=name == "exp_avg", dtype=parameter.dtype)
            return state

    return AdamW8bit(groups, **options)


PARTS = ("codes", "scale", "qmap")  # of a state of torchao


def build(model: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the options. Only matrices get weight decay. It is fused if the device supports that.

    The parameters of `--freeze` are frozen first.
    """
    reshard(model)  # a forward pass without a backward pass leaves weights gathered, which are no parameters of the optimizer
    freeze(model, cfg.freeze)
    groups = _groups(model, cfg)
    # On a CPU the fused kernel is as exact and about twice as fast. It needs floating-point tensors.
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    adam: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    if cfg.optimizer == "adafactor" and cfg.lr < 1e-4:
        print_on_main(
            f"--optimizer adafactor --lr {cfg.lr}: Adafactor multiplies the learning rate by the size of the weights, so the model "
            "will hardly learn. Usual values are from 1e-3 to 1e-2."
        )
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: AdamW(groups, **adam, fused=fused),
        "adamw8bit": lambda: build_adamw8bit(groups, **adam),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=cfg.lr),
        "muon": lambda: Muon(groups, **adam, fused=fused),
        # torch has no fused SGD for shards.
        "sgd": lambda: torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=fused and links.sharding is None),
    }
    return make[cfg.optimizer]()


def _groups(model: nn.Module, cfg: TrainConfig) -> list[dict[str, Any]]:
    """Return the groups of trained parameters that have the same learning rate, weight decay and kind of step."""
    rates = _rates_of_parameters(model, cfg)
    hidden = hidden_matrices(model) if cfg.optimizer == "muon" else set()
    if cfg.optimizer == "muon" and not hidden:
        raise UserError("--optimizer muon: no matrix of a hidden layer is trained. Use --optimizer adamw.")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in sorted(trainable, key=lambda p: p.ndim < 2):  # matrices first; otherwise in the order of the model
        rate = rates.get(p, cfg.lr)
        values: dict[str, Any] = {"weight_decay": cfg.weight_decay if p.ndim >= 2 else 0.0, "lr": rate}
        values["lr_ratio"] = rate / cfg.lr if p in rates else 1.0
        if cfg.optimizer == "muon":
            values |= {"is_hidden": True, "momentum": cfg.momentum} if p in hidden else {"is_hidden": False}
        groups.setdefault(tuple(values.values()), {"params": [], **values})["params"].append(p)
    return list(groups.values())


def _rates_of_parameters(model: nn.Module, cfg: TrainConfig) -> dict[nn.Parameter, float]:
    """Return the learning rates of `--lr_of`. Raise UserError for a word that no trained parameter contains."""
    named, rates = dict(model.named_parameters()), {}
    for word, rate in cfg.learning_rates().items():
        found = [p for name, p in named.items() if word in name]
        if not any(p.requires_grad for p in found):
            reason = "these parameters are not trained." if found else f"no parameter has this in its name. {_parts_of(named)}"
            raise UserError(f"--lr_of {word}={rate:g}: {reason}")
        rates |= dict.fromkeys(found, rate)
    return rates


def state_bytes(model: nn.Module, cfg: TrainConfig) -> int:
    """Return how many bytes the optimizer stores for the trained parameters of a model, which may be on the meta device."""
    hidden, bytes_of = hidden_matrices(model), OPTIMIZERS[cfg.optimizer].bytes_of
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(bytes_of(p.numel() * p.element_size(), p.shape, p in hidden, cfg.momentum) for p in trained)


def freeze(model: nn.Module, words: tuple[str, ...]) -> None:
    """Freeze the parameters whose names contain one of the words."""
    named = dict(model.named_parameters())
    for word in words:
        found = [parameter for name, parameter in named.items() if word in name]
        if not found:
            raise UserError(f"--freeze {word}: no parameter has this in its name. {_parts_of(named)}")
        for parameter in found:
            parameter.requires_grad_(False)
    if words and not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze {' '.join(words)}: leaves nothing to train. Freeze fewer parameters.")


def _parts_of(names: Iterable[str]) -> str:
    parts = sorted({".".join(name.split(".")[:2]) for name in names})
    return f"There are: {', '.join(parts[:20])}."


def lr_at(step: int, cfg: TrainConfig, total_steps: int) -> float:
    """Return the learning rate of update `step` (from 0): a linear warm-up, then the schedule down to its minimum at the end."""
    warmup = cfg.warmup_steps or math.ceil(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1.0
    if cfg.lr_schedule == "linear":
        left = 1 - done
    elif cfg.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    elif cfg.lr_schedule == "wsd":
        left = min(1.0, max(0, total_steps - step) / math.ceil(cfg.decay_ratio * total_steps))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Set the learning rate of every group, and return `lr`, or the first one if no group has it.

    Groups of `--lr_of`, and of an optimizer with its own learning rates, keep their ratio to `--lr`.
    """
    for group in optimizer.param_groups:
        own = lr * group.get("lr_ratio", 1.0)
        # torchao compiles its step, and a number would be compiled into it.
        group["lr"] = torch.tensor(own, dtype=torch.float32) if isinstance(group["lr"], torch.Tensor) else own
    has_lr = any(group.get("lr_ratio", 1.0) == 1 for group in optimizer.param_groups)
    return lr if has_lr else float(optimizer.param_groups[0]["lr"])
