"""Muon: steps the matrices of hidden layers by orthogonal matrices, and all other parameters with AdamW, as one optimizer.

torch's own Muon multiplies in bfloat16 and only steps whole matrices. Here the products have the precision of the weights, so that
the number of ranks changes the result by rounding in that precision only, and a matrix may be spread over ranks.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.errors import UserError
from accel_ddp.sharding.tensors import full, local, region, sharded_like

ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the usual quintic iteration, which brings singular values near 1 in 5 rounds


class Muon(torch.optim.Optimizer):
    """Steps groups with `is_hidden` with Muon (Nesterov momentum), and other groups with AdamW.

    The steps of matrices are scaled to the size of AdamW's steps, so that learning rate and weight decay mean the same.
    """

    _step_supports_amp_scaling = True  # `step` reads `found_inf` on the device and then changes nothing

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
    body = getattr(whole, getattr(whole, "base_model_prefix", "") or "-", None)
    if isinstance(body, nn.Module):
        others |= set(whole.parameters()) - set(body.parameters())
    return {p for p in model.parameters() if p.requires_grad and p.ndim == 2 and p not in others}


def require_hidden(matrices: set[nn.Parameter]) -> None:
    """Raise UserError if there is nothing that Muon could step."""
    if not matrices:
        raise UserError("--optimizer muon: no matrix of a hidden layer is trained. Use --optimizer adamw.")
