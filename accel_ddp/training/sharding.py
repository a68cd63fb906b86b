"""Models that are sharded with torch's `fully_shard` (FSDP2), in the same way on GPUs and on CPUs, or wrapped with DDP.

Accelerate's own FSDP code is not used, although its config and its names are. On CPUs it silently uses DDP. On GPUs rank 0 loads the
whole model, and all weights are gathered in one dtype, so results differ from DDP.

Each layer is gathered when it is computed. Everything else (embeddings, last norm, output head) belongs to the root. The root is
gathered from the beginning of the forward pass to the end of the backward pass, because the loss over a vocabulary reads the weight
of the output head after the forward pass.
"""

import contextlib
import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accel_ddp import compat, phases
from accel_ddp.engine.terms import Terms, model_of
from accel_ddp.errors import UserError
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.ranks.team import Team
from accel_ddp.text import first_line

if TYPE_CHECKING:
    from accel_ddp.config.train_config import TrainConfig

BEGIN, END, BACKWARD, LAST = "begins the forward pass", "ends the forward pass", "begins the backward pass", "ends a micro-batch"


class Lockstep:
    """Keeps the ranks of a sharded model in step: each gather and each sum of gradients needs all of them at the same place.

    torch matches the collectives of ranks by their order only. If one rank computes another layer than the others, weights of
    different layers are mixed without an error, or the run hangs. If a parameter has a gradient on some ranks only, as an expert that
    no token of a batch has reached, the sizes of the sums differ.

    - A parameter without a gradient contributes zeros to the sum. If no rank has a gradient for it in a step, it gets none, as on
      one rank.
    - All ranks compare the order of layers in their first micro-batch. From then on, each rank compares its order with the first
      one, which needs no communication.
    """

    def __init__(self, model: nn.Module):
        self._names = [BEGIN, END, BACKWARD, LAST]
        self._order: list[int] = []  # of the first micro-batch
        self._is_compared = False  # whether all ranks have the same order
        self._place: int | None = None  # in the order; None outside of the micro-batches of a step
        self._params: list[Any] = []
        self._trained: list[Any] = []  # in this step
        self._used: set[Any] = set()  # those with a gradient in this step
        self._all_used: Tensor | None = None  # the numbers that are sent if every parameter has a gradient
        for name, part in model.named_modules():
            if isinstance(part, FSDPModule):
                self._attach(part, name or type(model).__name__.removeprefix("FSDP"), is_root=part is model)

    def _attach(self, part: nn.Module, name: str, is_root: bool) -> None:
        """Let a part report where it is, before it communicates. Its group has an own object for each part of the model."""
        first = len(self._names)
        self._names += [f"computes {name}", f"computes the gradients of {name}", f"sums the gradients of {name}"]
        forward = lambda *_: self._enter(self._names.index(BEGIN) if is_root else first, is_forward=True)
        part.register_forward_pre_hook(forward, prepend=True)  # before the hook that gathers
        if is_root:
            part.register_forward_hook(lambda *_: self._enter(self._names.index(END), is_forward=True))
        for group in compat.fsdp_groups(part):
            self._params += group.fsdp_params
            enter, collect = functools.partial(self._enter, first + 1), functools.partial(self._sum, first + 2)
            compat.observe_group(group, enter, collect, _communicating)

    def _sum(self, place: int, params: list[Any], is_sent: bool) -> None:
        """Note which parameters have a gradient, before FSDP sums it over ranks, or adds it to those of the next micro-batch."""
        self._enter(place)
        self._used.update(compat.collect_gradients(params, is_sent))

    def _enter(self, place: int, is_forward: bool = False) -> None:
        """Require that every rank is at the same place."""
        if self._place is None or (is_forward and not torch.is_grad_enabled()):  # other forward passes have no backward pass
            return
        if not self._is_compared:
            self._compare(place)
            self._order.append(place)
            return
        expected = self._order[self._place] if self._place < len(self._order) else self._names.index(LAST)
        self._place += 1
        if place != expected:
            self._refuse(f"rank {this_rank.rank} {self._names[place]}, while it {self._names[expected]} in its first micro-batch")

    def _compare(self, place: int) -> None:
        places = torch.tensor([place, -place])
        if this_rank.num_ranks > 1:
            dist.all_reduce(places, dist.ReduceOp.MAX, group=links.slow_group)
        if places[0] == -places[1]:
            return
        everyone = gather_everywhere(self._names[place])
        other = next(rank for rank, text in enumerate(everyone) if text != everyone[0])
        self._refuse(f"rank 0 {everyone[0]}, while rank {other} {everyone[other]}")

    def _refuse(self, found: str) -> None:
        self._place = None
        raise UserError(
            f"The model is sharded (FSDP), so all ranks must compute the same layers in every micro-batch, but {found}. Do not "
            "skip layers (layerdrop). Or set fsdp_transformer_layer_cls_to_wrap in the accelerate config to the classes of the layers "
            "that every batch uses. Or train with DDP: accelerate_configs/1node.yaml."
        )

    # ---- what `train_step` calls

    def begin_step(self) -> None:
        self._used.clear()
        self._trained = [param for param in self._params if param.sharded_param.requires_grad]

    @contextlib.contextmanager
    def micro_batch(self, terms: nn.Module, is_last: bool) -> Iterator[None]:
        """Compare the order of layers inside the block, which computes one micro-batch. `is_last`: of the step."""
        _begin_micro_batch(model_of(terms), is_last)
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
                f"accelerate_configs/1node.yaml or 2node.yaml. ({first_line(error)[:120]})"
            ) from error
        finally:
            self._place = None

    def begin_backward(self) -> None:
        self._enter(self._names.index(BACKWARD))

    def end_backward(self) -> None:
        phases.enter(phases.OPTIMIZER)

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


def _communicating() -> contextlib.AbstractContextManager:
    """Return a context in which the time of a pass counts as communication. Evaluations and saves have no such part."""
    is_in_step = phases.HERE.phase in (phases.FORWARD, phases.BACKWARD)
    return phases.phase(phases.SYNC) if is_in_step else contextlib.nullcontext()


def shard(
    model: nn.Module,
    plan: ShardingPlan,
    device: torch.device,
    precision: str = "no",
    reduce_dtype: torch.dtype = torch.float32,
    keep: str = "none",
) -> None:
    """Replace the parameters of a model by shards, each a `DTensor`, on `device`. This is a collective.

    Parameters on the meta device stay there. With `precision` bf16 the layers are gathered in bfloat16, the format in which autocast
    multiplies. The shards and the root stay in float32, as with DDP. Gradients are summed in `reduce_dtype`. `keep` is a value of
    `--keep_gathered`.
    """
    layers = find_layers(model, plan)
    mesh = make_mesh(plan, device)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    reduce = None if any(p.dtype == torch.float64 for p in model.parameters()) else reduce_dtype
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)]
    # On CPUs, autocast leaves the inputs of these norms in another dtype.
    narrow = torch.bfloat16 if precision == "bf16" and not (device.type == "cpu" and norms) else None
    # Autocast converts the inputs of operations, not of layers.
    policy = lambda dtype: MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=keep == "none", mp_policy=policy(narrow), offload_policy=offload)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy(None), offload_policy=offload)
    model._gathered_dtype, model._keeps = narrow, keep
    model._within_forward = types.MethodType(compat.within_forward, model)  # how `Terms` calls parts of the model
    # With adapters, `generate` of the base model runs.
    for one in (model, model.get_base_model() if hasattr(model, "get_base_model") else model):
        compat.let_all_ranks_generate(one)
    if narrow and hasattr(model, "generate"):  # it calls encoders and models below adapters without the root
        model.generate = torch.autocast(device.type, narrow)(model.generate)
    _prefetch(model, layers)
    model._lockstep = Lockstep(model)
    # Our last layer and many models return views. torch warns of in-place operations on them, which neither of us does.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


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
    shape, names = (plan.replicas, this_rank.num_ranks // plan.replicas), ("replicate", "shard")
    first = int(plan.replicas == 1)
    return init_device_mesh(device.type, shape[first:], mesh_dim_names=names[first:])


def own_rows(length: int, plan: ShardingPlan) -> tuple[int, int]:
    """Return the first row that this rank holds of a parameter with `length` rows, and the row after its last one."""
    ranks = this_rank.num_ranks // plan.replicas
    size = -(-length // ranks)
    begin = min(length, this_rank.rank % ranks * size)
    return begin, min(length, begin + size)


def find_layers(model: nn.Module, plan: ShardingPlan) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, in the order of the model. Raise UserError if there are none.

    They are the outermost elements of lists of modules, or modules of the classes that the config names.
    """
    if compat.has_batch_norm(model):
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
        for parameter in compat.own_parameters(module).values():
            if parameter is not None:
                users.setdefault(parameter, set()).add(places.get(module, -1))
    return [layer for layer in layers if all(len(users[parameter]) == 1 for parameter in layer.parameters())]


def sharded_parts(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that are gathered at once: the layers and the root."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _begin_micro_batch(model: FSDPModule, is_last: bool) -> None:
    """Set what the backward pass of a micro-batch sums and frees. `is_last`: of the step.

    By default gradients are summed over ranks after every micro-batch, because the gradients of a whole model may not fit on one GPU.
    Only the sum over replicas, which are on different nodes, waits for the last one.
    """
    keeps = model._keeps
    if keeps == "gradients":
        model.set_requires_gradient_sync(is_last)
    if keeps != "none":
        model.set_reshard_after_backward(is_last)
    model.set_requires_all_reduce(is_last)
    model.set_is_last_backward(is_last)


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered. It needs no communication."""
    for part in sharded_parts(model):
        part.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep everything except the layers gathered inside the block, and free it at the end. Other models stay as they are.

    Every rank must call it. The parts of a model can then be called without the model itself, as `generate` of transformers calls an
    encoder. Parameters can be read again after the block.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    compat.make_root(model)
    model.unshard()
    try:
        yield
    finally:
        reshard(model)


@contextlib.contextmanager
def computed_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute a sharded model in `dtype` inside the block, with copies of what is gathered, for a comparison of two results.

    Every rank must call it. Gradients cannot be computed. Only one layer at a time and the root have copies.
    """
    layers = [part for part in sharded_parts(model) if part is not model]
    inside = {module for layer in layers for module in layer.modules()}
    forwards = [(layer, layer.__dict__.get("forward"), layer.forward) for layer in layers]
    with gathered(model), _converted([module for module in model.modules() if module not in inside], dtype):
        for layer, _, forward in forwards:
            layer.forward = _converted(list(layer.modules()), dtype)(forward)
        try:
            yield
        finally:
            for layer, own, _ in forwards:
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own


@contextlib.contextmanager
def _converted(modules: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Replace the parameters and buffers of these modules by copies inside the block. The modules below them stay as they are."""
    tables = [table for module in modules for table in (compat.own_parameters(module), compat.own_buffers(module))]
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
    compat.reset_sharded(list(sharded_parts(model)))


def prepare(
    accelerator: Accelerator, cfg: "TrainConfig", task: Any, model: nn.Module, optimizer: torch.optim.Optimizer,
    team: Team | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:  # fmt: skip
    """Return `Terms` and optimizer for `train_step`: wrapped with DDP, or with a sharded model if the accelerate config asks for that.

    Accelerate puts autocast around the model, so a loss is computed outside of it, and its settings of DDP around `Terms`. `team`
    are the ranks that compute a step; default: all.
    """
    team = team or Team.of(accelerator)
    _check_optimizer(optimizer, cfg.lr)
    if hasattr(optimizer, "choose_kernel"):
        optimizer.choose_kernel(accelerator.device)
    if (plan := plan_of(accelerator)) is None:
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return _with_ddp(accelerator, Terms(model, task, team)), accelerator.prepare_optimizer(optimizer)
    if not is_sharded(model):  # `models.prepare` shards a model of transformers before its weights are loaded
        names = {id(p): name for name, p in model.named_parameters()}
        positions = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if plan.activation_checkpointing and getattr(model, "supports_gradient_checkpointing", False):
            compat.checkpoint_layers(model)
        elif plan.activation_checkpointing:
            for layer in find_layers(model, plan):
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        shard(model, plan, *sharding_options(accelerator, cfg))
        now = dict(model.named_parameters())
        for group, own in zip(optimizer.param_groups, positions):
            group["params"] = [now[name] for name in own]
    reshard(model)
    known = set(model.parameters())
    if not all(p in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "The optimizer has parameters that do not belong to the sharded model, and would not train it. Build the optimizer with "
            "accel_ddp.optim.build(model, cfg) after accel_ddp.models.prepare."
        )
    # This adds autocast and nothing else.
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    return Terms(model, task, team), optimizer


def _with_ddp(accelerator: Accelerator, terms: Terms) -> nn.Module:
    """Return terms with DDP over the ranks of their team, which may be those of a local worker."""
    if terms.team.size == 1 or not any(p.requires_grad for p in terms.parameters()):
        return terms
    compat.ignore_in_ddp(terms, [f"model.{name}" for name in compat.ignored_by_ddp(terms.model)])
    devices, handler = [accelerator.device.index] if accelerator.device.type == "cuda" else None, accelerator.ddp_handler
    wrapped = DistributedDataParallel(terms, devices, process_group=terms.team.group, **handler.to_kwargs() if handler else {})
    if handler:
        handler.register_comm_hook(wrapped)
    return wrapped


def _check_optimizer(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Remember the ratio of each group's own learning rate to `--lr`, for `set_lr`. Groups of `optim.build` have it."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{type(optimizer).__name__}: this optimizer computes the loss again within a step (it needs a closure), which `fit` does "
            "not support. Use one that steps with given gradients, for example accel_ddp.optim.build(model, cfg)."
        )
    own: dict[str, None] = {}
    for group in optimizer.param_groups:
        if "lr_ratio" in group and "initial_lr" not in group:
            continue
        base = float(group.setdefault("initial_lr", float(group["lr"])))  # as torch's schedulers name it
        if base and not lr:
            raise UserError(f"--lr 0: the schedule scales the optimizer's own learning rate {base:g} by --lr. Give --lr above 0.")
        group["lr_ratio"] = base / lr if base != lr else 1.0
        own |= {f"{base:g}": None} if base != lr else {}
    if own:
        print_on_main(
            f"The optimizer has its own learning rates ({', '.join(own)}) instead of --lr {lr:g}. The schedule scales them."
        )


def plan_of(accelerator: Accelerator) -> ShardingPlan | None:
    """Return how models are spread over ranks, as `start` has found it. None: every rank has the whole model."""
    return getattr(accelerator, "sharding_plan", None)


def sharding_options(accelerator: Accelerator, cfg: "TrainConfig") -> tuple[torch.device, str, torch.dtype, str]:
    """Return device, precision, the dtype in which gradients are summed, and what stays gathered: the arguments of `shard`."""
    reduce_dtype = torch.bfloat16 if cfg.comm_hook == "bf16" else torch.float32
    return accelerator.device, accelerator.mixed_precision, reduce_dtype, plan_of(accelerator).keeps(cfg.keep_gathered)
