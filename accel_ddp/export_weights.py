"""Writes the weights of a checkpoint as files that transformers loads, one tensor at a time."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.saving.pieces import Pieces, write_file

if TYPE_CHECKING:
    import torch

    Facts = dict[str, tuple[list[int], torch.dtype]]

MAX_FILE_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"


def find_names(kind: Any, config: Any, there: "Facts") -> dict[str, str] | None:
    """Return the name in the checkpoint of each tensor that `save_pretrained` writes, by the name that it writes.

    `kind` is a class of models. None: the model must be loaded, because `save_pretrained` changes tensors of this class, because the
    class has its own `save_pretrained`, or because the checkpoint belongs to another model.
    """
    import torch
    from transformers import PreTrainedModel

    try:  # functions that `save_pretrained` of transformers 5 calls; they are not documented
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        return None
    if getattr(kind, "save_pretrained", None) is not PreTrainedModel.save_pretrained:
        return None
    try:
        with torch.device("meta"):
            model = kind(config)
            model.tie_weights()
    except Exception:  # a class that computes with its weights when it is made
        return None
    state = model.state_dict()
    originals = {id(tensor): name for name, tensor in state.items()}
    keep_alive = [*state.values()]  # so that no other tensor gets the same id
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    try:
        written = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    except Exception:  # of code for tensors that have values
        return None
    if any(id(tensor) not in originals for tensor in written.values()):
        return None
    del keep_alive
    # A checkpoint stores tied weights once, under the first of their names.
    same = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    alias = {name: names for names in same.values() for name in names}
    names = {}
    for new, tensor in written.items():
        own = originals[id(tensor)]
        stored = [name for name in [own, *alias.get(own, [])] if name in there]
        if not stored or there[stored[0]][0] != [*tensor.shape]:
            return None
        names[new] = stored[0]
    return names


def write_weights(folder: Path, pieces: Pieces, names: dict[str, str], max_bytes: int = MAX_FILE_BYTES) -> None:
    """Write the tensors to model.safetensors, or to several files with an index. One tensor at a time is in memory."""
    there = pieces.tensors
    sizes = {new: math.prod(there[old][0]) * there[old][1].itemsize for new, old in names.items()}
    files: list[list[str]] = [[]]
    used = 0
    for new, size in sizes.items():
        if files[-1] and used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append(new)
        used += size
    count = len(files)
    file_names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    file_names = file_names if count > 1 else ["model.safetensors"]
    for file, own in zip(file_names, files):
        tensors = {new: (*there[names[new]], lambda old=names[new]: pieces.read(old)) for new in own}
        write_file(folder / file, tensors, {"format": "pt"})
    if count > 1:
        places = {new: file for file, own in zip(file_names, files) for new in own}
        parameters = sum(math.prod(there[old][0]) for old in names.values())
        index = {"metadata": {"total_parameters": parameters, "total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
