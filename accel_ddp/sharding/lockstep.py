"""Keeps the ranks of a sharded model in step: each gather and each sum of gradients needs all of them at the same place.

Torch matches the collectives of ranks by their order only. If one rank computes another layer than the others, weights of different
layers are mixed without an error, or the run hangs. If a parameter has a gradient on some ranks only, as an expert that no token of a
batch has reached, the sizes of the sums differ.

- A parameter without a gradient contributes zeros to the sum. If no rank has a gradient for it in a step, it gets none, as on one rank.
- All ranks compare the order of layers in their first micro-batch. From then on, each rank compares its order with the first one, which
  needs no communication.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.process import process

BEGIN, END, BACKWARD, LAST = "begins the forward pass", "ends the forward pass", "begins the backward pass", "ends a micro-batch"


class Lockstep:
    """The order in which a rank computes and sums the parts of a sharded model, and which parameters have gradients."""

    def __init__(self, model: nn.Module):
        self._names = [BEGIN, END, BACKWARD, LAST]
        self._order: list[int] = []  # of the first micro-batch
        self._is_compared = False  # whether all ranks have the same order
        self._place: int | None = None  # in the order; None outside of the micro-batches of a step
        self._params: list[FSDPParam] = []
        self._trained: list[FSDPParam] = []  # in this step
        self._used: set[FSDPParam] = set()  # those with a gradient in this step
        self._all_used: Tensor | None = None  # the numbers that are sent if every parameter has a gradient
        for name, part in model.named_modules():
            if isinstance(part, FSDPModule):
                self._attach(part, name or type(model).__name__.removeprefix("FSDP"), is_root=part is model)

    def _attach(self, part: nn.Module, name: str, is_root: bool) -> None:
        """Let a part report where it is, before it communicates. Its group has an own object for each part of the model."""
        first = len(self._names)
        self._names += [f"computes {name}", f"computes the gradients of {name}", f"sums the gradients of {name}"]
        forward = lambda *_: self._enter_forward(self._names.index(BEGIN) if is_root else first)
        part.register_forward_pre_hook(forward, prepend=True)  # before the hook that gathers
        if is_root:
            part.register_forward_hook(lambda *_: self._enter_forward(self._names.index(END)))
        for group in _groups(part):
            self._params += group.fsdp_params
            group.pre_backward = functools.partial(self._pre_backward, group, group.pre_backward, first + 1)
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward, first + 2)

    def _pre_backward(self, group: Any, original: Callable[..., Any], place: int, *args: Any) -> Any:
        if group._training_state != TrainingState.PRE_BACKWARD:  # it is called once for each output of a layer
            self._enter(place)
        return original(*args)

    def _post_backward(self, group: Any, original: Callable[..., Any], place: int, *args: Any) -> Any:
        summed = [p for p in group.fsdp_params if p.sharded_state == ShardedState.UNSHARDED and p.sharded_param.requires_grad]
        if summed:
            self._enter(place)
        for param in summed:
            if param.unsharded_param.grad is None and param.unsharded_accumulated_grad is None:
                # `set_reduce_scatter_unused_params` does the same, but torch 2.11 does not have it.
                param.unsharded_accumulated_grad = torch.zeros_like(param.unsharded_param)
            else:
                self._used.add(param)
        return original(*args)

    def _enter_forward(self, place: int) -> None:
        if torch.is_grad_enabled():  # other forward passes have no backward pass
            self._enter(place)

    def _enter(self, place: int) -> None:
        """Require that every rank is at the same place."""
        if self._place is None:
            return
        if not self._is_compared:
            self._compare(place)
            self._order.append(place)
            return
        expected = self._order[self._place] if self._place < len(self._order) else self._names.index(LAST)
        self._place += 1
        if place != expected:
            self._refuse(f"rank {process.rank} {self._names[place]}, while it {self._names[expected]} in its first micro-batch")

    def _compare(self, place: int) -> None:
        places = torch.tensor([place, -place])
        if process.num_ranks > 1:
            dist.all_reduce(places, dist.ReduceOp.MAX, group=process.slow_group)
        if places[0] == -places[1]:
            return
        everyone = gather_everywhere(self._names[place])
        other = next(rank for rank, text in enumerate(everyone) if text != everyone[0])
        self._refuse(f"rank 0 {everyone[0]}, while rank {other} {everyone[other]}")

    def _refuse(self, found: str) -> None:
        self._place = None
        raise UserError(
            f"The model is sharded (FSDP), so that all ranks must compute the same layers in every micro-batch, but {found}. Do not "
            "skip layers (layerdrop). Or set fsdp_transformer_layer_cls_to_wrap in the accelerate config to the classes of the layers "
            "that every batch uses. Or train with DDP: accelerate_configs/1node.yaml and --find_unused_parameters."
        )

    # ---- what `update` calls

    def begin_step(self) -> None:
        self._used.clear()
        self._trained = [param for param in self._params if param.sharded_param.requires_grad]

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Compare the order of layers inside of the block, which computes one micro-batch."""
        self._place = 0
        if not self._is_compared:
            self._order = []
        try:
            yield
            self._enter(self._names.index(LAST))
            self._is_compared = True
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UserError(
                "The model is sharded (FSDP), but its code computes with weights that are not gathered. It calls the `forward` method "
                "of a layer instead of the layer, or uses a weight of one layer in another one. Train it with DDP: use "
                f"accelerate_configs/1node.yaml or 2node.yaml. ({str(error).splitlines()[0][:120]})"
            ) from error
        finally:
            self._place = None

    def begin_backward(self) -> None:
        self._enter(self._names.index(BACKWARD))

    def counts(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return for each trained parameter 1 if it has a gradient on this rank in this step, otherwise 0."""
        number = len(self._trained)
        if self._all_used is None or len(self._all_used) != number:
            self._all_used = torch.ones(number, device=device, dtype=dtype)
        if len(self._used) == number:
            return self._all_used
        return torch.tensor([param in self._used for param in self._trained], dtype=dtype).to(device)

    def find_unused(self, counts: Tensor) -> list[nn.Parameter]:
        """Return the parameters that no rank has used in this step, whose gradients are 0. `counts` are the sums over ranks.

        The host waits for a GPU only if this rank has not used a parameter.
        """
        if len(self._used) == len(self._trained):
            return []
        return [param.sharded_param for param, count in zip(self._trained, counts.tolist()) if not count]


def _groups(part: nn.Module) -> list[Any]:
    """Return the groups of parameters that are gathered with a module. In newer versions than torch 2.11 a module may have several."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]
