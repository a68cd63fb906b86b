"""Private interfaces of torch, accelerate and transformers, each behind one function.

An upgrade of torch begins with this file: tests/test_compat.py has a test for each function. torch is imported inside the
functions, because launchers and the doctor use this module too and do not wait for torch.
"""

import atexit
import contextlib
import json
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import date

    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

# ---- modules and tensors


def own_parameters(module: "nn.Module") -> dict[str, Any]:
    """Return the own parameters of a module, to replace one: `setattr` refuses a plain tensor. Tested with torch 2.13."""
    return module._parameters


def own_buffers(module: "nn.Module") -> dict[str, Any]:
    """Return the dictionary of the own buffers of a module. See `own_parameters`. Tested with torch 2.13."""
    return module._buffers


def map_tensors(model: "nn.Module", function: Callable[["Tensor"], "Tensor"]) -> None:
    """Replace each parameter and buffer of a model. Only this lets FSDP look for its parameters again. Tested with torch 2.13."""
    model._apply(function)


def has_batch_norm(model: "nn.Module") -> bool:
    """Return whether a model has batch norm. Its public classes have no public base class. Tested with torch 2.13."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in model.modules())


def storage_key(tensor: "Tensor") -> int:
    """Return what tensors over the same memory share. Fake ones have no `data_ptr`. Tested with torch 2.13."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: "Tensor") -> int:
    """Return a number that changes when a tensor is modified in place. Nothing public does. Tested with torch 2.13."""
    return tensor._version


def copy_all(targets: "Sequence[Tensor]", sources: "Sequence[Tensor]") -> None:
    """Copy sources to targets with few kernels. `copy_` starts one kernel per tensor. Tested with torch 2.13."""
    import torch

    torch._foreach_copy_(targets, sources)


def move_all(averages: "Sequence[Tensor]", weights: "Sequence[Tensor]", amount: "Tensor") -> None:
    """Move averages towards weights by `amount` of their difference, with few kernels for many. Tested with torch 2.13."""
    # `torch._foreach_lerp_` does not read `amount` from a device.
    import torch

    differences = torch._foreach_sub(weights, averages)
    torch._foreach_mul_(differences, amount)
    torch._foreach_add_(averages, differences)


def split_like(flat: "Tensor", tensors: "list[Tensor]") -> "tuple[Tensor, ...]":
    """Return parts of `flat` in the shapes of `tensors`, with one call for hundreds of them. Tested with torch 2.13."""
    import torch

    return torch._C._nn.unflatten_dense_tensors(flat, tensors)


def norm_of(tensors: "Sequence[Tensor]") -> "Tensor":
    """Return the bits of `get_total_norm`, with half of its host time if all have one type and device. Tested with torch 2.13."""
    import torch
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    if {*map(type, tensors)} != {torch.Tensor} or tensors[0].device.type not in ("cpu", "cuda"):
        return torch.nn.utils.get_total_norm(tensors)
    with torch.no_grad():
        if len(_group_tensors_by_device_and_dtype([tensors])) > 1:
            return torch.nn.utils.get_total_norm(tensors)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2.0)), 2.0)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested arguments and their structure, whose `unflatten` restores them. Tested with torch 2.13."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def fake_mode() -> Any:
    """Return a context of tensors without values. The public meta device has no autocast. Tested with torch 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> Any:
    """Return a context of tensors with values, inside a `fake_mode`. Tested with torch 2.13."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


# ---- operators


def flash_attention(
    q: "Tensor", k: "Tensor", v: "Tensor", starts: "Tensor", key_starts: "Tensor", longest: int, dropout: float, causal: bool,
    scale: float | None, window: int = -1,
) -> "tuple[Tensor, Tensor, Tensor]":  # fmt: skip
    """Return the output of attention over concatenated texts, the log of its sums, and the state of the random generator.

    A text may have more keys than queries. The last query then sees all of them. A query sees `window` keys before it, and as many
    after it if the attention is not causal, or all of them if `window` is -1.

    No public function has all three: dropout, no further package, and a gradient that sums in a deterministic order. Its arguments
    are tested with torch 2.13 on the meta device, its values by tests that need a GPU.
    """
    import torch

    forward = torch.ops.aten._flash_attention_forward
    sides = {"window_size_left": window, "window_size_right": 0 if causal else window} if window >= 0 else {}
    return forward(q, k, v, starts, key_starts, longest, longest, dropout, causal, False, scale=scale, **sides)[:3]


def flash_attention_gradients(
    gradient: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", starts: "Tensor",
    key_starts: "Tensor", longest: int, dropout: float, causal: bool, random_state: "Tensor", scale: float | None,
    window: int = -1,
) -> "tuple[Tensor, Tensor, Tensor]":  # fmt: skip
    """Return the gradients of queries, keys and values of `flash_attention`. Tested like it with torch 2.13."""
    import torch

    sides = {"window_size_left": window, "window_size_right": 0 if causal else window} if window >= 0 else {}
    return torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), q, k, v, out, lse, starts, key_starts, longest, longest, dropout, causal,
        random_state, torch.empty(0, device=q.device), scale=scale, **sides,
    )  # fmt: skip


def grouped_products() -> set[Callable[..., Any]]:
    """Return the products of experts. Older versions have only a private one. Tested with torch 2.13."""
    import torch
    import torch.nn.functional as F

    return {getattr(home, name) for home, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(home, name)}


def cpu_has_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 itself, instead of emulating it. torch has no public test. Tested with torch 2.13."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# ---- backward passes, optimizers and CUDA graphs


def queue_after_backward(loss: "Tensor", function: Callable[[], None]) -> None:
    """Call `function` when the last gradient of the next `loss.backward()` is computed, before DDP waits for its all-reduces.

    The engine calls its callbacks after the last gradient, in the order in which they were queued. DDP queues the callback that waits
    during the backward pass, and this one is queued at its start. Public hooks belong to single tensors. Tested with torch 2.13.
    """
    import torch

    queue = torch.autograd.Variable._execution_engine.queue_callback
    loss.register_hook(lambda gradient: queue(function))


def gradients_in_modes(loss: "Tensor", parameters: "Sequence[Tensor]") -> "tuple[Tensor | None, ...]":
    """Return gradients. Unlike with `torch.autograd.grad`, checkpointed layers stay in a function mode. Tested with torch 2.13."""
    import torch
    from torch.autograd.graph import _engine_run_backward

    return _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tuple(parameters), allow_unreachable=True, accumulate_grad=False
    )


def reads_found_inf(optimizer: "torch.optim.Optimizer") -> bool:
    """Return whether an optimizer skips a step on the device by `found_inf`. GradScaler reads it too. Tested with torch 2.13."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@contextlib.contextmanager
def compile_callbacks(begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    """Call `begin` and `end` around each compilation inside the block. Nothing is done if torch.compile is not imported.

    torch has no public notification of a compilation, which may take minutes in the middle of a step. Tested with torch 2.13.
    """
    if "torch._dynamo" not in sys.modules:  # its import takes seconds
        yield
        return
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def compile_options(rows: int = 0, columns: int = 0) -> dict[str, Any]:
    """Set what torch.compile has no option for, and return its options. Tested with torch 2.11 and 2.13.

    Without the first setting, a layer with a float such as a scaling factor is traced and compiled twice. Without the second one, a
    number of tokens that equals the hidden size is taken for it, and the next number compiles again. Without the third one, a DDP model
    would split what is compiled within it at its buckets. Without the fourth one, layers with a custom gradient are not cached.
    Without the fifth one, torch starts a Python process for each core, and the exit of this process waits until they have imported
    torch. Without `deterministic`, kernels with sums are chosen by measured times.

    One kernel for the sums over rows and over columns is faster from a certain size on. torch compiles a layer again when a step
    crosses this size, in the middle of training and with choices for that step, so a resumed run would round differently. Here
    `rows` and `columns`, of the first call, decide for all steps by torch's own limits, unless torch's option is off.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    torch._dynamo.config.specialize_float = True
    torch.fx.experimental._config.use_duck_shape = False
    torch._dynamo.config.optimize_ddp = False
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    torch._inductor.config.compile_threads = 1
    options: dict[str, Any] = {"deterministic": True} if hasattr(torch._inductor.config, "deterministic") else {}
    triton, without_limits = torch._inductor.config.triton, "mix_order_reduction_non_strict_mode"
    if hasattr(triton, "mix_order_reduction"):
        is_large = rows * columns >= 5 * 2**20 and rows >= max(4096, 2 * columns)
        options["triton.mix_order_reduction"] = is_large and triton.mix_order_reduction and hasattr(triton, without_limits)
        options |= {f"triton.{without_limits}": True} if hasattr(triton, without_limits) else {}
    return options


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled and not found in a cache. Tested with torch 2.13."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def end_failed_capture(device: int, pool: Any) -> None:
    """Let the allocator and the generator of a GPU leave a capture that failed. Call it with the stream of the capture.

    In the state of a capture the allocator returns no memory to the device, and the generator of torch 2.11 draws nothing. Its test
    needs a GPU and has not run with torch 2.13.
    """
    import torch

    with contextlib.suppress(RuntimeError):  # the allocator has left the capture already
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with contextlib.suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=f"cuda:{device}")
        graph.capture_end()  # the end of a capture that succeeds resets the generator


# ---- DDP


def gradient_times(model: "nn.Module") -> list[int]:
    """Return when DDP received each gradient of the last backward pass, or [] without DDP. Tested with torch 2.13."""
    from torch.nn.parallel import DistributedDataParallel

    return model.reducer.get_backward_stats() if isinstance(model, DistributedDataParallel) else []


def without_gradient(model: "nn.Module") -> list[int]:
    """Return the places of the parameters that the last backward pass has not reached. DDP waits for these, and has them summed
    when another pass reaches them. It names them only in an error of the next step, at most 100. Tested with torch 2.13.
    """
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        if not found:
            raise
        return [int(place) for place in found[1].split()]
    return []


def around_buffer_sync(model: "nn.Module", before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around DDP's broadcast of buffers in training, which has no hook. Tested with torch 2.13."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel) or not model.will_sync_module_buffers():
        return
    broadcast = model._sync_buffers

    def surrounded() -> None:
        if not model.training or not torch.is_grad_enabled():  # an evaluation, or a trial
            return broadcast()
        before()
        broadcast()
        after()

    model._sync_buffers = surrounded


def ignored_by_ddp(module: "nn.Module") -> set[str]:
    """Return the names that DDP does not keep equal. They are set by a private method only. Tested with torch 2.13."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(module: "nn.Module", names: list[str]) -> None:
    """Let DDP not keep these parameters and buffers equal. Tested with torch 2.13."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


# ---- FSDP and DTensor


def fsdp_groups(part: "nn.Module") -> list[Any]:
    """Return the groups of parameters that are gathered with a module, in this order. None are public. Tested with torch 2.13."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # after torch 2.11 a module may have several
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def within_forward(model: "nn.Module", compute: Callable[[], Any]) -> Any:
    """Run a function that calls the root of a sharded model, or its parts only, which then needs the passes around a forward method.

    `register_fsdp_forward_method` frees the root if the function calls it too. Tested with torch 2.13.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = model._get_fsdp_state()
    state._pre_forward(model, (None,), {})  # on a GPU, it moves arguments to the device and cannot do that with none
    found = compute()
    return state._post_forward(model, (), found) if state._training_state == TrainingState.FORWARD else found


def observe_group(group: Any, begins: Callable[[], None], sums: Callable[..., None], waits: Callable[[], Any]) -> None:
    """Call `begins` before a group gathers in a backward pass, and `sums` when its parameters have their gradients.

    The second argument of `sums` tells whether FSDP is about to sum them over ranks. The context of `waits` surrounds waits for
    weights and for earlier sums: on a GPU the stream waits, on a CPU the host. Public hooks run too late. Tested with torch 2.13.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    name = "unshard" if group.device.type == "cpu" else "wait_for_unshard"
    gather, before, reduce = getattr(group, name), group.pre_backward, group.post_backward

    def gather_and_wait(*args: Any, **kwargs: Any) -> Any:
        is_done = group.is_unsharded or (name == "wait_for_unshard") == (group._all_gather_result is None)
        with contextlib.nullcontext() if is_done else waits():
            return gather(*args, **kwargs)

    def pre_backward(*args: Any) -> Any:
        if group._training_state != TrainingState.PRE_BACKWARD:  # it is called once for each output of a layer
            begins()
        return before(*args)

    def post_backward(*args: Any) -> Any:
        params = [p for p in group.fsdp_params if p.sharded_state == ShardedState.UNSHARDED and p.sharded_param.requires_grad]
        if params:
            sums(params, group.reduce_grads)
        with waits():
            return reduce(*args)

    setattr(group, name, gather_and_wait)
    group.pre_backward, group.post_backward = pre_backward, post_backward


def collect_gradients(params: list[Any], is_sent: bool) -> list[Any]:
    """Return the parameters of a group that have a gradient. If a sum is about to be sent, let the others contribute zeros to it.

    Gradients that are not sent are added up in float32. FSDP would add in the dtype of the sum, and refuse a group in which some
    parameters have a gradient in the last micro-batch only. torch 2.11 cannot send zeros itself. Tested with torch 2.13.
    """
    import torch

    found = []
    adds = not is_sent or any(param.unsharded_accumulated_grad is not None for param in params)
    for param in params:
        whole, total = param.unsharded_param, param.unsharded_accumulated_grad
        if whole.grad is not None or total is not None:
            found.append(param)
        if adds and whole.grad is not None:
            wide = torch.promote_types(whole.grad.dtype, torch.float32)
            total, whole.grad = whole.grad.to(wide) if total is None else total.add_(whole.grad), None
        if is_sent and whole.grad is None:
            total = torch.zeros_like(whole) if total is None else total
            total = total.to((param.reduce_dtype if adds else None) or whole.dtype)
        param.unsharded_accumulated_grad = total
    return found


def make_root(model: "nn.Module") -> None:
    """Make a sharded model the root of its layers. Otherwise the layer that is called first is the root. Tested with torch 2.13."""
    model._get_fsdp_state()._lazy_init()


def reset_sharded(parts: "Sequence[nn.Module]") -> None:
    """Make a sharded model usable again after an error in a forward or backward pass. `parts` begin with the root.

    `reset_iter_state` is public since torch 2.12. It is tested with torch 2.13. The rest is for torch 2.11.
    """
    if hasattr(parts[0], "reset_iter_state"):
        parts[0].reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for state in [part._get_fsdp_state() for part in parts]:
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


def let_all_ranks_generate(model: "nn.Module") -> None:
    """Let `generate` do the same number of forward passes on all ranks of a sharded model. Tested with transformers 5.22."""
    model._is_fsdp_managed_module = True


def region_of(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the offsets and lengths of the part of a DTensor that this rank holds. None are public. Tested with torch 2.13."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [*offsets], [*lengths]


def dtensor_like(part: "Tensor", like: Any) -> "Tensor":
    """Return a DTensor of which this rank holds `part`, spread over ranks like another one of the same shape.

    `DTensor.from_local` would move a part that is offloaded to host memory to the GPU. Tested with torch 2.13.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(like.shape, like.stride(), part.dtype))
    return DTensor(part, spec, requires_grad=False)


# ---- data loaders


def end_workers_at_exit(loader: "DataLoader", before: Callable[[], None]) -> None:
    """Let the workers of `loader` end as soon as this process exits, after `before()`. Call it when they have started.

    torch 2.11 joins each worker of a loader with pinned memory for 5 s at the exit, before anything tells it to end: 40 s for the 8
    workers of a run. torch 2.13 tells them. One that is busy is joined for 5 s too, although nobody needs its batch. Tested with both.
    Workers without pinned memory are left to Python, which terminates them.
    """
    iterator = loader._iterator  # of workers that stay alive between epochs; otherwise None, and its truth is its length
    if iterator is None or not iterator._pin_memory or hasattr(iterator, "ends_at_exit"):
        return
    iterator.ends_at_exit = True
    reference, process = weakref.ref(iterator), os.getpid()

    def end() -> None:
        if (still := reference()) is None or os.getpid() != process:
            return
        before()
        for worker in still._workers:  # instead of 5 s here, and without a limit when Python itself joins its children
            worker.join = lambda timeout=None, join=worker.join: join(0.1)
        still._shutdown_workers()  # it terminates workers that are still busy

    atexit.register(end)  # the last one registered runs first: before torch's


# ---- Accelerate


def skip_port_check() -> None:
    """Let `accelerate launch` start although another program uses the main port, because the preflight reports it on every node.

    Accelerate has no option for it. Nothing is done in other programs. Tested with accelerate 1.15.
    """
    launch = sys.modules.get("accelerate.utils.launch")
    if hasattr(launch, "is_port_in_use"):
        launch.is_port_in_use = lambda port=None: False


# ---- torch's launcher and process groups


def rendezvous_creators() -> dict[str, Callable[..., Any]]:
    """Return torch's rendezvous backends by name, to replace one. `register` refuses to. Tested with torch 2.13."""
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    return rendezvous_handler_registry._registry


def store_of_handler(handler: Any) -> Any:
    """Return the store of a rendezvous handler, or None before its first round. Tested with torch 2.13."""
    return getattr(handler, "_store", None)


def stop_keep_alive(handler: Any) -> None:
    """Stop the timer that writes to the store of a handler, and prints errors if the store is lost. Tested with torch 2.13."""
    if timer := getattr(handler, "_keep_alive_timer", None):
        timer.cancel()


def exit_codes_of(agent: object) -> list[int | None]:
    """Return the exit codes of the ranks of torch's agent, or [] of any other object. A rank that runs has None.

    The agent raises an error with the codes only after a failure, and not after a signal. Tested with torch 2.13.
    """
    ranks = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", None) or {}
    return [ranks[rank].proc.returncode for rank in sorted(ranks)]


def hides_output(specs: object) -> bool:
    """Return whether torchrun hides output of ranks. Its options have no public attributes. Tested with torch 2.13."""
    return bool(getattr(specs, "_redirects", False) or getattr(specs, "_local_ranks_filter", None))


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the last collectives of this process. torch itself writes them after a timeout only. Tested with torch 2.13."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    return json.loads(_dump_fr_trace_json(True, False))["entries"]


# ---- transformers


def checkpoint_layers(model: "nn.Module") -> None:
    """Turn on gradient checkpointing of a transformers model, also in eval mode, in which `--no_dropout` trains.

    Alone, transformers checkpoints only layers in training mode: without dropout, which is the default of `dpo`, a run would store
    all activations. Tested with transformers 5.22.
    """
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Reentrant checkpointing fails with find_unused_parameters of DDP, and if the first layers are frozen.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = GradientCheckpointingLayer.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.gradient_checkpointing or self.training or not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        # Recomputed layers would write the cache twice.
        cache = {} if getattr(self, "_can_checkpoint_with_cache", False) else {"past_key_values": None, "layer_past": None}
        kwargs |= {name: value for name, value in {"use_cache": False, **cache}.items() if name in kwargs}
        return self._gradient_checkpointing_func(partial(torch.nn.Module.__call__, self, **kwargs), *args)

    if plain.__module__ != __name__:
        GradientCheckpointingLayer.__call__ = call


def set_template_date(template: str, day: "date") -> None:
    """Let a chat template write this day instead of today, in this process. Tested with transformers 5.22, which has no option."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template).environment.globals["strftime_now"] = day.strftime  # it is compiled once
