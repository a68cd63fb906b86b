"""Shards a model with torch's `fully_shard` (FSDP2), in the same way on GPUs and on CPUs.

Accelerate's own FSDP code is not used, although its config and its names are. On CPUs it silently uses DDP. On GPUs rank 0 loads the
whole model, and all weights are gathered in one dtype, so that results differ from those of DDP.

Each layer is gathered when it is computed. Everything else (embeddings, last norm, output head) belongs to the root. The root is
gathered from the beginning of the forward pass to the end of the backward pass, because the loss over a vocabulary reads the weight
of the output head after the forward pass.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils.checkpoint import checkpoint

from accel_ddp.environment.sharding import ShardingPlan
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import process
from accel_ddp.sharding.lockstep import Lockstep


def shard(
    model: nn.Module, plan: ShardingPlan, device: torch.device, precision: str = "no", reduce_dtype: torch.dtype = torch.float32
) -> None:
    """Replace the parameters of a model by shards, each a `DTensor`, on `device`. This is a collective.

    Parameters on the meta device stay there. With `precision` bf16 the layers are gathered in bfloat16, the format in which autocast
    multiplies. The shards and the root stay in float32, as with DDP. Gradients are summed in `reduce_dtype`.
    """
    layers = find_layers(model, plan)
    mesh = make_mesh(plan, device)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    reduce = None if any(p.dtype == torch.float64 for p in model.parameters()) else reduce_dtype
    narrow = torch.bfloat16 if precision == "bf16" and _can_be_narrow(layers, device) else None
    # Autocast converts the inputs of operations, not of layers.
    policy = lambda dtype: MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=plan.reshard_after_forward, mp_policy=policy(narrow), offload_policy=offload
        )
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy(None), offload_policy=offload)
    model._gathered_dtype = narrow
    # `generate` of transformers then does the same number of forward passes on all ranks. With adapters it is that of the model below.
    for one in (model, model.get_base_model() if hasattr(model, "get_base_model") else model):
        one._is_fsdp_managed_module = True
    if narrow and hasattr(model, "generate"):  # it calls encoders and models below adapters without the root
        model.generate = torch.autocast(device.type, narrow)(model.generate)
    _prefetch(model, layers)
    model._lockstep = Lockstep(model)
    # Our last layer and many models return views. torch warns of in-place operations on them, which neither of us does.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


def _can_be_narrow(layers: list[nn.Module], device: torch.device) -> bool:
    """Return whether layers can be gathered in bfloat16. On CPUs, autocast leaves the inputs of these norms in another dtype."""
    norms = (nn.LayerNorm, nn.GroupNorm)
    return device.type != "cpu" or not any(isinstance(module, norms) for layer in layers for module in layer.modules())


def _prefetch(model: nn.Module, layers: list[nn.Module]) -> None:
    """Gather each layer of a list while the layer before it is computed, also if the host is slower than the GPU.

    Backward passes need nothing, because FSDP gathers in the reverse order of the forward pass. An unused gather is dropped.
    """
    known = set(layers)
    lists = [[one for one in module if one in known] for module in model.modules() if isinstance(module, nn.ModuleList)]
    for row in lists:
        for layer, following in itertools.pairwise(row):
            layer.set_modules_to_forward_prefetch([following])
    if len([row for row in lists if row]) == 1 and len(layers) == max(map(len, lists)):
        model.set_modules_to_forward_prefetch([layers[0]])


def make_mesh(plan: ShardingPlan, device: torch.device) -> DeviceMesh:
    """Return the ranks as a mesh: one row, or one row for each copy of the model. The ranks of a node have consecutive numbers."""
    if plan.replicas == 1:
        return init_device_mesh(device.type, (process.num_ranks,), mesh_dim_names=("shard",))
    shape = (plan.replicas, process.num_ranks // plan.replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def own_rows(length: int, plan: ShardingPlan) -> tuple[int, int]:
    """Return the first row that this rank holds of a parameter with `length` rows, and the row after its last one."""
    ranks = process.num_ranks // plan.replicas
    size = -(-length // ranks)
    begin = min(length, process.rank % ranks * size)
    return begin, min(length, begin + size)


def find_layers(model: nn.Module, plan: ShardingPlan) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, in the order of the model. Raise UserError if there are none.

    They are the outermost elements of lists of modules, or those of the classes that the config names.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise UserError(
            f"The accelerate config asks for FSDP, but {type(model).__name__} has batch norm, whose statistics each rank would compute "
            "alone. Train it with DDP: use accelerate_configs/1node.yaml or 2node.yaml."
        )
    if plan.layer_classes:
        is_layer: Callable[[nn.Module], bool] = lambda module: type(module).__name__ in plan.layer_classes
    else:
        elements = {
            element for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1 for element in module
            if not isinstance(element, nn.ModuleList | nn.ModuleDict)  # a list of lists, as in Funnel; these are not called
        }  # fmt: skip
        is_layer = elements.__contains__
    layers = [layer for layer in _outermost(model, is_layer) if any(True for _ in layer.parameters())]
    if not layers and plan.layer_classes:
        raise UserError(
            f"The accelerate config has fsdp_transformer_layer_cls_to_wrap: {','.join(plan.layer_classes)}, but "
            f"{type(model).__name__} has no such module. Remove this line: the layers are then found by themselves."
        )
    if not layers:
        raise UserError(
            f"The accelerate config asks for FSDP, but {type(model).__name__} has no list of layers that could be gathered one at a "
            "time. Train it with DDP: use accelerate_configs/1node.yaml or 2node.yaml."
        )
    return _without_shared_parameters(model, layers)


def _outermost(module: nn.Module, is_layer: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if is_layer(child):
            yield child
        else:
            yield from _outermost(child, is_layer)


def _without_shared_parameters(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the layers except those that share a parameter with another module. These belong to the root."""
    layers = list(dict.fromkeys(layers))
    users: dict[nn.Parameter, set[int]] = {}
    places = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, set()).add(places.get(module, -1))
    return [layer for layer in layers if all(len(users[parameter]) == 1 for parameter in layer.parameters())]


def sharded_parts(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that are gathered at once: the layers and the root."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered. It needs no communication."""
    for part in sharded_parts(model):
        part.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep everything except the layers gathered inside of the block, and free it at the end. Other models stay as they are.

    Every rank must call it. The parts of a model can then be called without the model itself, as `generate` of transformers calls an
    encoder. Parameters can be read again after the block.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # otherwise the first layer that is called would become the root
    model.unshard()
    try:
        yield
    finally:
        reshard(model)


@contextlib.contextmanager
def computed_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute a sharded model in `dtype` inside of the block, with copies of what is gathered, for a comparison of two results.

    Every rank must call it. Gradients cannot be computed. Only one layer at a time and the root have copies.
    """
    layers = [part for part in sharded_parts(model) if part is not model]
    inside = {module for layer in layers for module in layer.modules()}
    forwards = [(layer, layer.__dict__.get("forward"), layer.forward) for layer in layers]
    with gathered(model), _converted([module for module in model.modules() if module not in inside], dtype):
        for layer, _, forward in forwards:
            layer.forward = functools.partial(_compute_converted, layer, forward, dtype)
        try:
            yield
        finally:
            for layer, own, _ in forwards:
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own


def _compute_converted(layer: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with _converted(list(layer.modules()), dtype):
        return forward(*args, **kwargs)


@contextlib.contextmanager
def _converted(modules: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Replace the parameters and buffers of these modules by copies inside of the block. The modules below them stay as they are."""
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    before = [(table, name, value) for table in tables for name, value in table.items() if value is not None]
    copies: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for table, name, value in before:
        if value.is_floating_point():
            table[name] = copies.setdefault(id(value), value.detach().to(dtype))
    try:
        yield
    finally:
        for table, name, value in before:
            table[name] = value


def autocast(model: nn.Module, device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which a sharded model can be computed before Accelerate has added autocast to its forward pass."""
    dtype = getattr(model, "_gathered_dtype", None)
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def recover(model: nn.Module) -> None:
    """Make a model usable again after an error in a forward or backward pass, which all ranks have caught at the same place."""
    root = next(sharded_parts(model))
    if hasattr(root, "reset_iter_state"):  # since torch 2.12
        root.reset_iter_state()
        return
    states = [part._get_fsdp_state() for part in sharded_parts(model)]
    for state in states:
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root, state._state_ctx.post_backward_final_callback_queued = None, False
        state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
        state._comm_ctx.post_forward_order.clear()
        group = state._fsdp_param_group
        if group is not None:
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()  # of a prefetched layer
            group._post_forward_indices.clear()
            group.reshard()


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, plan: ShardingPlan, *more: Any) -> None:
    """Shard a model whose optimizer exists already, and let the optimizer step the shards. `more` are arguments of `shard`."""
    names = {id(p): name for name, p in model.named_parameters()}
    positions = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if plan.activation_checkpointing and getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif plan.activation_checkpointing:
        for layer in find_layers(model, plan):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    shard(model, plan, *more)
    now = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, positions):
        group["params"] = [now[name] for name in own]
