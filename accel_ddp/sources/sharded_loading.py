"""The loading of a pretrained model of which each rank reads and holds only its own rows.

`from_pretrained` of transformers does the work: names, conversions, dtypes, new weights and tied weights are therefore the same as
without sharding. transformers could read the parts of a sharded model itself, but it cuts a tensor before it converts the tensor,
which yields other rows (for example if it joins two matrices). Here a tensor that is converted is read as a whole, and cut afterwards.

Until the model is sharded, a parameter whose rows were read is a stand-in: a tensor of the right shape, dtype and device that uses
the memory of one element. Adapters can then be added as usual.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.errors import UserError
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.shards import region, sharded_like
from accel_ddp.sources.adapters import Adapters
from accel_ddp.sources.builtin import from_pretrained
from accel_ddp.sources.model_kinds import num_embeddings
from accel_ddp.sources.places import warn
from accel_ddp.training.sharding import own_rows, shard

BATCH_BYTES = 1 << 30  # of tensors that are converted at once
HEADS = ("classifier", "score", "qa_outputs")  # peft copies modules with these names
INITS = (True, False, "gaussian", "orthogonal")  # of LoRA adapters that do not depend on the weights of the model


class _Rows:
    """A tensor in a file, of which only some rows are read. transformers reads tensors with `[...]`."""

    def __init__(self, tensor: Any, begin: int, end: int) -> None:
        self.tensor, self.begin, self.end = tensor, begin, end

    def __getitem__(self, _: Any) -> Tensor:
        if self.begin == self.end:  # there are fewer rows than ranks
            return torch.empty(0, *_shape(self.tensor)[1:])
        return self.tensor[self.begin : self.end]


class RowLoader:
    """Reads the rows of this rank. Afterwards `rows` maps each stand-in to its rows, and `digest` describes the files."""

    def __init__(self, plan: ShardingPlan, num_tokens: int, copied: tuple[str, ...]) -> None:
        self.plan = plan
        self.num_tokens = num_tokens  # of the tokenizer; if they are more than the embeddings, the embeddings are resized
        self.copied = copied  # names of modules that adapters copy
        self.rows: dict[nn.Parameter, Tensor] = {}
        self.digest = ""

    def from_pretrained(self, auto_class: Any, name: str, place: str, **options: Any) -> Any:
        from transformers import PreTrainedModel

        read = PreTrainedModel._load_pretrained_model

        def read_rows(model: Any, state_dict: Any, files: list[str] | None, load_config: Any, *more: Any) -> Any:
            if files is None or load_config.hf_quantizer is not None:
                return read(model, state_dict, files, load_config, *more)
            return self._read(read, model, files, load_config)

        generator = torch.get_rng_state()
        PreTrainedModel._load_pretrained_model = staticmethod(read_rows)
        try:
            return from_pretrained(auto_class, name, place, **options)
        except UserError as error:
            reason = str(error)
        finally:
            PreTrainedModel._load_pretrained_model = staticmethod(read)
        self.rows.clear()
        torch.set_rng_state(generator)
        whole = from_pretrained(auto_class, name, place, **options)  # raises the error of damaged files again
        warn(f"{reason.rstrip('.')}. Each rank therefore loads the whole model into host memory before the model is sharded.")
        return whole

    def _read(self, read: Callable[..., Any], model: Any, files: list[str], load_config: Any) -> tuple[Any, Any]:
        """Load the files into the model, and put stand-ins into it. Return what the function of transformers returns."""
        with contextlib.ExitStack() as stack:
            tensors = _open(files, load_config, stack)
            sizes = sorted((os.path.basename(file), os.path.getsize(file)) for file in files)
            shapes = sorted((key, _shape(tensor)) for key, tensor in tensors.items())
            self.digest = hashlib.blake2b(f"{sizes}{shapes}".encode(), digest_size=16).hexdigest()
            targets = _targets(model, tensors, load_config)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            whole = self._whole(model, parameters, {name for name, _ in targets.values()})
            for key, (name, is_converted) in targets.items():
                p = parameters.get(name)
                if is_converted or p is None or name in whole or _shape(tensors[key]) != [*p.shape]:
                    continue
                begin, end = own_rows(len(p), self.plan)
                tensors[key] = _Rows(tensors[key], begin, end)
                part = torch.empty(end - begin, *p.shape[1:], dtype=p.dtype, device="meta")
                _put(model, name, nn.Parameter(part, p.requires_grad))
            infos = []
            for batch in _batches(tensors, targets):
                infos.append(read(model, batch, None, load_config)[0])
                for name, p in [*model.named_parameters(remove_duplicate=False)]:
                    if p.is_meta or name in whole or p in self.rows:
                        continue
                    rows, shape = p.detach(), parameters[name].shape
                    if p.shape == shape:
                        rows = rows[slice(*own_rows(shape[0], self.plan))]
                    if rows.untyped_storage().nbytes() != rows.nbytes:  # a view of a file, or of the whole tensor
                        rows = rows.clone()
                    stand_in = nn.Parameter(torch.zeros((), dtype=rows.dtype).expand(shape), p.requires_grad)
                    stand_in._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers draws no values for it
                    self.rows[stand_in] = rows
                    _put(model, name, stand_in)
            for name, p in parameters.items():  # those whose rows could not be read, which transformers reports
                if model.get_parameter(name).shape != p.shape:
                    _put(model, name, p)
        return _joined(infos), None

    def _whole(self, model: Any, parameters: dict[str, nn.Parameter], found: set[str]) -> set[str]:
        """Return the names of parameters that every rank needs completely until the model is sharded."""
        names = {name for name, p in parameters.items() if p.dim() == 0}
        names |= {name for name in parameters if any(f".{word}." in f".{name}" for word in self.copied)}
        if 0 < num_embeddings(model) < self.num_tokens:  # new embeddings are drawn from the distribution of all others
            tables = [model.get_input_embeddings(), model.get_output_embeddings()]
            ids = {id(p) for table in tables if table is not None for p in table.parameters()}
            names |= {name for name, p in parameters.items() if id(p) in ids}
        groups: dict[str, set[str]] = {}
        for target, source in getattr(model, "all_tied_weights_keys", {}).items():
            groups.setdefault(source, {source}).add(target)
        for group in groups.values():
            # transformers ties weights that are all in the files only if their values are equal.
            if len(group & found) > 1 or group & names:
                names |= group
        return names


def shard_loaded(
    model: nn.Module, rows: dict[nn.Parameter, Tensor], plan: ShardingPlan, device: torch.device, *more: Any
) -> None:
    """Shard a model, and give each parameter with a stand-in its rows. `more` are arguments of `shard`. This is a collective."""
    for module in model.modules():
        original = dict(module.named_children()).get("original_module")  # of a module that peft has copied
        if original is not None and any(p in rows for p in original.parameters()):
            raise UserError(f"The adapters train a copy of {type(original).__name__}, which FSDP cannot shard. Train with DDP.")
    empty = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad) for p in rows}
    by_name = {name: rows[p] for name, p in model.named_parameters() if p in rows}
    for module in model.modules():
        for name, p in compat.own_parameters(module).items():
            if p is not None and p in empty:
                compat.own_parameters(module)[name] = empty[p]
    rows.clear()
    empty.clear()
    shard(model, plan, device, *more)
    parts = {p: by_name.pop(name) for name, p in model.named_parameters() if name in by_name}
    home = torch.device("cpu") if plan.cpu_offload else device

    def fill(tensor: Tensor) -> Tensor:
        part = parts.pop(tensor, None) if isinstance(tensor, nn.Parameter) else None
        if part is None:
            return tensor
        if [*part.shape] != region(tensor)[1]:
            raise RuntimeError(f"FSDP holds {region(tensor)[1]} of {[*tensor.shape]} here, but {[*part.shape]} were read.")
        return sharded_like(part.to(home), tensor)

    compat.map_tensors(model, fill)


def copied_modules(lora_r: int, adapters: Adapters | None) -> tuple[str, ...]:
    """Return the names of modules that adapters copy. Raise UserError for adapters that need the weights of the model."""
    if adapters is None:
        return HEADS if lora_r else ()
    config = adapters.config
    unusual = [] if config.init_lora_weights in INITS else [f"init_lora_weights: {config.init_lora_weights}"]
    if config.trainable_token_indices:
        unusual.append(f"trainable_token_indices: {config.trainable_token_indices}")
    if unusual:
        raise UserError(
            f"The adapters in {adapters.place} have {' and '.join(unusual)}, which needs the whole weights of the model, but FSDP "
            "shards them. Train them with DDP: use accelerate_configs/1node.yaml or 2node.yaml."
        )
    return (*HEADS, *(config.modules_to_save or ()))


def _open(files: list[str], load_config: Any, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the tensors of the files by name. None of them is read yet, except those of files in torch's oldest format."""
    from safetensors import safe_open
    from transformers.modeling_utils import load_state_dict

    tensors: dict[str, Any] = {}
    for file in files:
        if file.endswith(".safetensors"):
            opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            tensors |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (it is not a dictionary)
        else:
            tensors |= load_state_dict(file, weights_only=load_config.weights_only)
    return tensors


def _targets(model: Any, tensors: dict[str, Any], load_config: Any) -> dict[str, tuple[str, bool]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = load_config.weight_mapping or []
    renamings, converters = (
        [entry for entry in mapping if isinstance(entry, kind)] for kind in (WeightRenaming, WeightConverter)
    )
    own, prefix = model.state_dict(), model.base_model_prefix
    targets = {}
    for key in tensors:
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        targets[key] = name, pattern is not None
    return targets


def _batches(tensors: dict[str, Any], targets: dict[str, tuple[str, bool]]) -> Iterator[dict[str, Any]]:
    """Yield the tensors that are not converted, and then the others, as many at once as `BATCH_BYTES` allows."""
    yield {key: tensor for key, tensor in tensors.items() if not targets[key][1]}
    groups: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, is_converted = targets[key]
        if is_converted:
            groups.setdefault(name, {})[key] = tensor
    batch: dict[str, Any] = {}
    size = 0
    for group in groups.values():
        new = sum(4 * torch.Size(_shape(tensor)).numel() for tensor in group.values())
        if batch and size + new > BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch |= group
        size += new
    if batch:
        yield batch


def _joined(infos: list[Any]) -> Any:
    """Return what transformers reports about loading, as if all batches had been one."""
    first = infos[0]
    for info in infos[1:]:
        first.missing_keys &= info.missing_keys
        first.unexpected_keys |= info.unexpected_keys
        first.mismatched_keys |= info.mismatched_keys
        first.conversion_errors.update(info.conversion_errors)
        first.error_msgs += info.error_msgs
    return first


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, own = name.rpartition(".")
    compat.own_parameters(model.get_submodule(path))[own] = parameter


def _shape(tensor: Any) -> list[int]:
    return [*tensor.shape] if isinstance(tensor, Tensor) else tensor.get_shape()
