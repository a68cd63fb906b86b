"""The files of an exported model: its weights, which transformers loads, and its README.md.

The weights of a checkpoint are copied one tensor at a time. What is published of a run are names of files and of the Hub, but no
local paths.
"""

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.saving.pieces import Pieces, write_file
from accel_ddp.sources import builtin

if TYPE_CHECKING:
    import torch
    from huggingface_hub import ModelCardData

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
    state, ignored = model.state_dict(), getattr(model, "_keys_to_ignore_on_save", None) or ()
    originals = {id(tensor): name for name, tensor in state.items()}
    saved = {name: tensor for name, tensor in state.items() if name not in ignored}
    try:
        written = revert_weight_conversion(model, remove_tied_weights_from_state_dict(saved, model))
    except Exception:  # of code for tensors that have values
        return None
    if any(id(tensor) not in originals for tensor in written.values()):
        return None
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


def written_as(name: str, stored: "torch.dtype", kind: Any, dtype: str) -> "torch.dtype":
    """Return the dtype in which a tensor is written. transformers keeps some tensors of a class in float32, also in 16-bit models."""
    import torch

    kept = "|".join(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())
    if not dtype or not stored.is_floating_point:
        return stored
    return torch.float32 if kept and re.search(rf"(^|\.)({kept})($|\.)", name) else getattr(torch, dtype)


def cast_weights(weights: "dict[str, torch.Tensor]", kind: Any, dtype: str) -> "dict[str, torch.Tensor] | None":
    """Return the weights in `dtype`, in host memory. Tied weights stay tied. None: they have this dtype already."""
    wanted = {name: written_as(name, tensor.dtype, kind, dtype) for name, tensor in weights.items()}
    if all(wanted[name] == tensor.dtype for name, tensor in weights.items()):
        return None
    done: dict[Any, torch.Tensor] = {}
    place = lambda name, tensor: (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
    for name, tensor in weights.items():
        if place(name, tensor) not in done:
            done[place(name, tensor)] = tensor.detach().to("cpu", wanted[name])
    return {name: done[place(name, tensor)] for name, tensor in weights.items()}


def write_weights(folder: Path, pieces: Pieces, names: dict[str, str], kind: Any, dtype: str) -> None:
    """Write the tensors to model.safetensors, or to several files with an index. One tensor at a time is in memory."""
    from huggingface_hub import split_state_dict_into_shards_factory

    there = {old: (shape, written_as(old, stored, kind, dtype)) for old, (shape, stored) in pieces.tensors.items()}
    split = split_state_dict_into_shards_factory(
        {new: there[old] for new, old in names.items()}, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_FILE_BYTES,
        get_storage_size=lambda tensor: math.prod(tensor[0]) * tensor[1].itemsize,
    )  # fmt: skip
    for file, own in split.filename_to_tensors.items():
        tensors = {new: (*there[names[new]], lambda old=names[new]: pieces.read(old).to(there[old][1])) for new in own}
        write_file(folder / file, tensors, {"format": "pt"})
    if split.is_sharded:
        parameters = sum(math.prod(there[old][0]) for old in names.values())
        index = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


TASKS = {
    "classify.py": "text-classification", "tag.py": "token-classification", "sft.py": "text-generation",
    "seq2seq.py": "text2text-generation", "images.py": "image-classification", "embed.py": "sentence-similarity",
    "pretrain_mlm.py": "fill-mask", "rerank.py": "text-ranking", "reward.py": "text-classification",
}  # the Hub's names of tasks  # fmt: skip


def public_name(value: str) -> str:
    """Return the last part of a path, so that the folders of this machine are not published. Return a Hub name as it is."""
    is_path = value.startswith((".", "/", "~")) or value.count("/") > 1 or Path(value).exists()
    return Path(value).expanduser().resolve().name if is_path and not value.startswith(builtin.PREFIX) else value


def public_options(config: dict[str, Any]) -> dict[str, Any]:
    files = ("train_file", "eval_file", "output_dir", "cache_dir", "resume")  # their values are never names of the Hub
    last = lambda value: "\n".join(Path(one).expanduser().resolve().name for one in value.split("\n"))  # of one or several paths
    public = lambda name, value: last(value) if name in files else public_name(value)
    is_place = lambda name, value: value and (name in (*files, "model", "dataset") or ("/" in value and Path(value).exists()))
    published = {
        name: public(name, value) if isinstance(value, str) and is_place(name, value) else value for name, value in config.items()
    }
    if config.get("metrics"):  # several names and folders, separated by spaces
        published["metrics"] = " ".join(map(public_name, config["metrics"].split()))
    return published


def without_paths(content: bytes) -> bytes:
    """Return the JSON of a config without the folders of this machine, which some libraries write into it."""
    is_place = lambda name, value: name.endswith(("_path", "_file")) and isinstance(value, str) and "/" in value
    public = lambda pairs: {name: public_name(value) if is_place(name, value) else value for name, value in pairs}
    published = json.loads(content, object_pairs_hook=public)
    return content if published == json.loads(content) else json.dumps(published, indent=1).encode()


def card(facts: dict[str, Any], use: str, base: str) -> str:
    """Return the README.md of a model, for people and the Hub. `use` is code that loads it; options have no local paths."""
    import jinja2

    files = {name: value.replace("\n", " ") for name, value in facts["config"].items() if value and name.endswith("_file")}
    config = facts["config"] | files
    base, facts = base or config.get("model", ""), facts | {"config": config}
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters["json"] = json.dumps
    more = {"head": _head_of_card(facts, base).to_yaml().strip(), "evaluated_on": _describe_evaluation_data(config)}
    template = environment.from_string(Path(__file__).with_name("model_card.jinja").read_text("utf-8"))
    return template.render(**facts, **more, base=base, use=use)


def _describe_evaluation_data(config: dict[str, Any]) -> str:
    data, split = (config.get("train_file") or config.get("dataset", "")), config.get("eval_split")
    if config.get("eval_file"):
        return f"`{config['eval_file']}`"
    if config.get("train_file"):
        return f"rows of `{data}` that were not used for training"
    return f"the split `{split}` of `{data}`" if split else f"the evaluation rows of `{data or 'other data'}`"


def _head_of_card(facts: dict[str, Any], base: str) -> "ModelCardData":
    from huggingface_hub import EvalResult, ModelCardData

    config, task = facts["config"], TASKS.get(facts["recipe"])
    data = config.get("train_file") or config.get("dataset", "")
    is_name = lambda text: text.count("/") == 1 and "." not in text.split("/")[1][-5:]
    is_dataset = is_name(data) and not config.get("train_file")
    tested = config.get("eval_file") or data or "unknown"
    kind = tested.split(":")[0] if is_dataset else tested
    split = config.get("eval_split") or None if is_dataset else None
    results = [
        EvalResult(task or "other", kind, tested, name, round(value, 6), dataset_split=split)
        for name, value in facts["metrics"].items()
    ]
    library = "sentence-transformers" if facts["recipe"] == "embed.py" else "transformers"
    return ModelCardData(
        library_name=library, base_model=base if is_name(base) else None, datasets=[data.split(":")[0]] if is_dataset else None,
        pipeline_tag=task, tags=["accel_ddp"], model_name=config["output_dir"], eval_results=results or None,
    )  # fmt: skip
