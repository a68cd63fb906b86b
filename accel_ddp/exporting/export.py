"""The export of a trained model: a folder that transformers loads: weights, config, tokenizer, label names and a model card."""

import copy
import functools
import json
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.exporting import export_files
from accel_ddp.phases import EXPORT
from accel_ddp.ranks import reporting
from accel_ddp.ranks.agreement import print_on_main, together
from accel_ddp.ranks.process import ending, this_rank
from accel_ddp.ranks.shards import class_name, is_sharded
from accel_ddp.records.redaction import redact_values
from accel_ddp.saving import checkpoint_format, resume
from accel_ddp.saving.checkpoint_format import read_facts as read_facts  # of exported folders too
from accel_ddp.saving.checkpoints import Metrics
from accel_ddp.saving.pieces import AveragedPieces, Pieces, has_averages
from accel_ddp.saving.state_tensors import digest_of_frozen, has_adapters, to_save, versions
from accel_ddp.sources import builtin
from accel_ddp.sources.adapters import adapter_config, load_base
from accel_ddp.sources.builtin import locate
from accel_ddp.sources.places import prepare_hub
from accel_ddp.tasks import examples
from accel_ddp.text import did_you_mean_path, first_line

FOLDER = "model"  # in the folder of the run
BASE = "base"  # subfolder for the config of the model below adapters
ADAPTER = "adapter"  # subfolder for the adapters of a merged model
ADAPTER_CONFIG = "adapter_config.json"
CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json", "preprocessor_config.json", ADAPTER_CONFIG)
PIPELINES = {
    "ForSequenceClassification": "text-classification", "ForTokenClassification": "token-classification",
    "ForCausalLM": "text-generation", "LMHeadModel": "text-generation", "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}  # the pipeline of transformers for a class, by its ending  # fmt: skip
# peft's other classes would load the base model with labels of its own.
PEFT_CLASSES = {"CAUSAL_LM": "AutoPeftModelForCausalLM", "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM"}


def files_of(model: Any, processor: Any, more: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the files of the exported folder except the weights. Every checkpoint has them, so each can be exported alone."""
    base = model.get_base_model() if has_adapters(model) else model
    config = copy.deepcopy(getattr(base, "_original_config", base.config))
    config.architectures = [class_name(base)]
    config.update(getattr(base, "_exported_values", {}))
    config.dtype = getattr(base, "_stored_dtype", None) or config.dtype  # not that of the weights in training
    with tempfile.TemporaryDirectory() as folder:
        # Next to adapters, transformers would take the config of the whole model for the model itself.
        place = f"{folder}/{BASE}" if has_adapters(model) else folder
        config.save_pretrained(place)
        if base.can_generate():  # not with `save_pretrained`, which refuses settings that many models come with
            base.generation_config.to_json_file(f"{place}/generation_config.json")
        if getattr(processor, "is_fast", False):  # otherwise the file would depend on whether the rows came from the cache
            processor.backend_tokenizer.no_truncation()
            processor.backend_tokenizer.no_padding()
        side, given = getattr(processor, "padding_side", None), getattr(processor, "init_kwargs", {})
        if "padding_side" in given:  # training pads on the right; who generates with the exported tokenizer may need the left
            processor.padding_side = given["padding_side"]
        processor.save_pretrained(folder)
        if "padding_side" in given:
            processor.padding_side = side
        if has_adapters(model):
            (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(model), indent=1))
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {**{str(path.relative_to(folder)): path.read_bytes() for path in paths}, **(more or {})}


def at_the_end(
    accelerator: Accelerator, cfg: TrainConfig, model: Any, files: dict[str, bytes], metrics: Metrics, example: str = "",
    best: int | None = None,
) -> None:  # fmt: skip
    """Write OUTPUT_DIR/model, completely or not at all, and upload it if `--push_to_hub` asks for it. Call it on every rank.

    `example` is Python code that uses the exported {folder}. With `best`, export the checkpoint of this step instead of the weights
    in memory. A sharded model is always exported from a checkpoint, so no rank gathers it. The run must be over: weights of the
    best step are copied into the model of rank 0, and adapters are merged in place.
    """
    sharded = is_sharded(model)
    if sharded and ending.unsaved and best is None:
        print_on_main("The model is not exported, because its last checkpoint could not be written.")
        return
    with phases.phase(EXPORT), together("export the model"):
        if not accelerator.is_main_process:
            return
        folder = Path(cfg.output_dir) / FOLDER
        config = redact_values(as_plain_dict(cfg))
        facts = {"config": config, "metrics": metrics, "versions": versions(), "num_ranks": accelerator.num_processes}
        if best is not None:
            facts["step"] = best
            print(f"--keep_best: exporting step {best}, the checkpoint with the best {cfg.best().name}.")
            there = [Path(cfg.output_dir) / f"step_{best:08d}"]
        elif sharded:  # a run that was resumed after its last step has no checkpoint of its own
            there = checkpoint_format.list_checkpoints(cfg.output_dir) or resume.candidates(cfg)
            if not there:
                where = f"--output_dir {cfg.output_dir} contains no checkpoint on {this_rank.host}"
                raise UserError(f"{where}, so no model can be exported.")
        if sharded:
            model = _weights_of(there[-1], cfg.ema_decay > 0)
        elif best is not None:
            _load(model, _pieces_of(there[-1], cfg.ema_decay > 0))
        options = {"merge": getattr(cfg, "merge_adapters", "auto"), "dtype": getattr(cfg, "export_dtype", "auto")}
        _write(folder, model, files, {"recipe": Path(sys.argv[0]).name, **facts}, **options)
        if cfg.push_to_hub:
            push(folder, cfg.push_to_hub)
        print(describe(folder, files, config, example))
        if not getattr(cfg, "train_file", "") and getattr(cfg, "dataset", "").startswith(builtin.PREFIX):
            print("next: train on your own data with --train_file or --dataset. --help shows all options.")


def describe(folder: Path, files: dict[str, bytes], config: dict[str, Any], example: str = "") -> str:
    """Return lines on what the exported folder contains and a command that loads it. `example` uses {folder} or {model}."""
    lines, base = [f"model saved in {folder}"], _base_of(files)
    if (whole := folder / "config.json").is_file():
        dtype = _exported_dtype({whole.name: whole.read_bytes()}, "auto")
        if dtype in ("bfloat16", "float16") and (base or dtype != config.get("dtype", "float32")):
            lines[0] += f" ({dtype}; its metrics are those before the weights were rounded)"
    if (folder / ADAPTER_CONFIG).is_file():
        ways = "--merge_adapters on, or accel-ddp export --merge on"
        lines.append(f"It contains only the adapters for {base}. To write the whole model: {ways}.")
        if not _is_on_hub(base):
            lines.append("On another machine, replace the place of that model in the last line.")
            base = _locate(base, config)
    elif base:
        hint = "" if _is_on_hub(base) else " To write only the adapters: --merge_adapters off, or accel-ddp export --merge off."
        lines.append(f"The adapters are merged into it. Alone they are in {folder / ADAPTER}.{hint}")
    if base:
        place = folder if (folder / ADAPTER_CONFIG).is_file() else folder / ADAPTER
        written = json.loads((place / ADAPTER_CONFIG).read_text())
        kind = PEFT_CLASSES.get(written.get("task_type") or "")
        load = f'peft.{kind}.from_pretrained("{place}") loads them with their model, and ' if kind else ""
        lines.append(f"{load}--model {place} trains them further.")
        if not _is_on_hub(_base_of(files)):
            where = f"base_model_name_or_path in {place / ADAPTER_CONFIG}"
            is_there = Path(written["base_model_name_or_path"]).is_dir()
            lines[-1] += f" If the model moves, change {where}." if is_there else f" First write the model's folder into {where}."
    of_model = files.get(f"{BASE}/config.json") or files["config.json"]
    place, can_chat = shlex.quote(str(folder)), b"ForCausalLM" in of_model or b"LMHeadModel" in of_model
    use = f"chat {place}{examples.system_option(example)}" if can_chat else f"predict {place} --input FILE --output FILE"
    lines.append(f"use:  accel-ddp {use}")
    return "\n".join([*lines, f"try:  {examples.command(*_code(folder, files, base, example))}"])


def _code(folder: Path, files: dict[str, bytes], base: str, example: str = "") -> tuple[str, str, str]:
    """Return the arguments of `examples.command` for code that loads the exported folder and runs the example."""
    is_adapter, is_on_hub = (folder / ADAPTER_CONFIG).is_file(), _is_on_hub(_base_of(files))
    architecture = json.loads(files.get(f"{BASE}/config.json") or files["config.json"])["architectures"][0]
    task = next((task for ending, task in PIPELINES.items() if architecture.endswith(ending)), "")
    if not example and task:
        remote = ", trust_remote_code=True" if architecture.startswith("MiniResNet") else ""
        example = f'from transformers import pipeline; use = pipeline("{task}", {{model}}{remote}); print(type(use.model))'
    if not example and "modules.json" in files:
        example = "from sentence_transformers import SentenceTransformer; use = SentenceTransformer({folder})"
    if not example:
        example = f"from transformers import {architecture}; model = {architecture}.from_pretrained({{folder}})"
    has_labels = architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))
    if is_adapter and _adds_tokens(files):  # peft adds rows for the tokens of the tokenizer in the folder
        kind, one = ("SequenceClassification", ", num_labels=1") if has_labels else ("CausalLM", "")
        code = f"import peft; model = peft.AutoPeftModelFor{kind}.from_pretrained({{folder}}{one}).get_base_model(); "
    elif not is_adapter or (is_on_hub and not has_labels):
        return example, str(folder), "{folder}"
    else:  # `pipeline` and peft's classes would load the model below the adapters with labels of its own
        place = "{folder}" if is_on_hub else examples.literal(base)
        code = f"from transformers import AutoConfig, {architecture}; "
        code += f'config = AutoConfig.from_pretrained({{folder}}, subfolder="{BASE}"); '
        code += f"model = {architecture}.from_pretrained({place}, config=config, ignore_mismatched_sizes=True); "
        code += "" if is_on_hub else "model.load_adapter({folder}); "
    return code + (example if "{model}" in example else "print(type(model))"), str(folder), "model, tokenizer={folder}"


def _base_of(files: dict[str, bytes]) -> str:
    return json.loads(files[ADAPTER_CONFIG])["base_model_name_or_path"] if ADAPTER_CONFIG in files else ""


def _locate(base: str, config: dict[str, Any]) -> str:
    return locate(base, config.get("cache_dir") or TrainConfig.cache_dir)


def _adds_tokens(files: dict[str, bytes]) -> bool:
    return bool(json.loads(files.get(ADAPTER_CONFIG, b"{}")).get("trainable_token_indices"))


def _is_on_hub(base: str) -> bool:
    return not base.startswith(builtin.PREFIX) and not Path(base).is_absolute()


def from_checkpoint(
    place: str, out: str, push_to_hub: str = "", merge: str = "auto", weights: str = "auto", dtype: str = "auto"
) -> Path:
    """Export a checkpoint, print how to load the result, and return its folder.

    If `place` is the folder of a run, export its best checkpoint, or else its newest complete one. `weights` is "ema" for the
    averages of `--ema_decay`, "raw" for the weights that training continues with, or "auto" for averages if there are some.
    `dtype` is "auto" for the dtype of the model that the run has loaded.
    """
    reporting.configure()
    folder = Path(out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{out}: exists already. Name a folder that does not exist.")
    path = _chosen(Path(place), weights)
    if not any((path / "files" / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        model = checkpoint_format.MODEL
        stored = path / (model if (path / model).is_file() else checkpoint_format.PIECES[model])
        reason = f"contains no config of a transformers model, so it cannot be exported. Its weights are in {stored}"
        raise UserError(f"{path}: {reason}. Load them with safetensors.")
    averages = weights != "raw" and has_averages(path)
    if weights == "ema" and not averages:
        instead = "Leave --weights out"
        raise UserError(f"--weights ema: {path} has no average of weights, because its run had no --ema_decay. {instead}.")
    run = checkpoint_format.read_run(path)
    files = {str(p.relative_to(path / "files")): p.read_bytes() for p in (path / "files").rglob("*") if p.is_file()}
    facts = {name: value for name, value in read_facts(path).items() if name not in ("options", "checkpoint")}
    facts["config"] = {**run["config"], **({"push_to_hub": push_to_hub} if push_to_hub else {})}
    weights_there = _weights_of(path, averages)
    _write(folder, weights_there, files, facts, merge, dtype)
    if push_to_hub:
        push(folder, push_to_hub)
    print(describe(folder, files, run["config"]))
    return folder


def _chosen(place: Path, weights: str) -> Path:
    there = checkpoint_format.list_checkpoints(place)
    if not there and not place.is_dir():
        raise UserError(f"{place}: there is no such folder.{did_you_mean_path(place)}")
    best = checkpoint_format.read_json(place / "best.json") if there else None
    if not there:
        path, problem = place, _problem(place, weights)
    elif isinstance(best, dict) and (place / best["checkpoint"]).is_dir():
        print(f"{place}: exporting the best checkpoint, {best['checkpoint']} ({best['metric']} {best['value']:.4f})")
        path, problem = place / best["checkpoint"], _problem(place / best["checkpoint"], weights)
    else:
        for path in reversed(there):
            problem = _problem(path, weights)
            if not problem:
                print(f"{place}: exporting the newest checkpoint, {path.name}")
                break
            print(f"{path}: {problem}", file=sys.stderr)
        else:
            raise UserError(f"{place}: contains no complete checkpoint. Copy one there, or continue the run with --resume.")
    if problem:
        raise UserError(f"{path}: {problem}. It cannot be exported.")
    return path


def _problem(path: Path, weights: str) -> str:
    """Return why a checkpoint cannot be exported. Averages of weights are stored with the state of the optimizer."""
    averages = weights != "raw" and bool(checkpoint_format.read_run(path).get("config", {}).get("ema_decay"))
    return checkpoint_format.find_problem(path, with_optimizer=averages or weights == "ema")


class Stream(NamedTuple):
    pieces: Pieces
    names: dict[str, str]  # the name in the checkpoint of each tensor
    kind: Any  # the class of the model


def _pieces_of(path: Path, averaged: bool) -> Pieces:
    return AveragedPieces(path) if averaged and has_averages(path) else Pieces(path, checkpoint_format.MODEL)


def _load(model: Any, pieces: Pieces) -> None:
    """Copy the weights of a checkpoint into the model, one at a time, so that the model is not in memory twice."""
    import torch

    with torch.no_grad():
        for name, tensor in to_save(model).items():
            tensor.copy_(pieces.read(name))


def _weights_of(path: Path, averaged: bool) -> Any:
    """Return the weights of a checkpoint or their averages as a `Stream`, or the model with its adapters."""
    import torch
    import transformers

    from accel_ddp.tasks import vision  # registers its models with transformers

    prepare_hub()
    with_adapters = (path / "files" / ADAPTER_CONFIG).is_file()
    config = transformers.AutoConfig.from_pretrained(path / "files" / (BASE if with_adapters else "."))
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None) or getattr(vision, name, None)
    if kind is None:
        raise UserError(f"{path}: the installed transformers has no {name}. Install the version that run.json names.")
    pieces = _pieces_of(path, averaged)
    there, run = pieces.tensors, checkpoint_format.read_run(path)
    if with_adapters:
        import peft

        adapters = peft.PeftConfig.from_pretrained(path / "files")
        adapters.inference_mode = False
        source = adapters.base_model_name_or_path
        try:
            place = _locate(source, run["config"])
            dtype = getattr(torch, run["config"].get("dtype", "auto"), config.dtype)  # as in training, for the digest below
            base = load_base(functools.partial(kind.from_pretrained, place, dtype=dtype), place, config, adapters)
        except Exception as error:
            raise UserError(f"{path}: the model below its adapters, {source}, cannot be loaded: {error}") from error
        adapters.base_model_name_or_path = None  # peft sets it, and warns if it changes
        model = peft.get_peft_model(base, adapters)
    else:
        if names := export_files.find_names(kind, config, there):
            return Stream(pieces, names, kind)
        model = kind(config)
    weights = to_save(model)
    if weights.keys() != there.keys():
        first = sorted(weights.keys() ^ there.keys())[:3]
        raise UserError(f"{path}: the weights do not belong to a {type(model).__name__}: {', '.join(first)} ...")
    # With --quantize the adapters were trained on rounded weights, and are exported for the original ones.
    if run["config"].get("quantize", "no") == "no" and digest_of_frozen(model) != run.get("frozen", ""):
        raise UserError(f"{path}: its adapters were trained on other weights than {source} has now.")
    for name, p in model.named_parameters():  # new layers above a base model of 16 bits are trained in float32
        p.data = p.data.to(there[name][1]) if name in there else p.data
    _load(model, pieces)
    return model


def _write(
    folder: Path, model: Any, files: dict[str, bytes], facts: dict[str, Any], merge: str = "auto", dtype: str = "auto"
) -> None:
    """Write the folder. `model` is a model, whose adapters are merged in place, or a `Stream`."""
    base, original = _base_of(files), files
    is_quantized = getattr(model, "is_quantized", False)  # merged weights would be rounded to 4 or 8 bits again
    # Few programs read the embeddings of new tokens from adapters, so these are merged.
    wanted = merge == "auto" and (_adds_tokens(files) or not _is_on_hub(base)) and not is_quantized
    merges = bool(base) and (merge == "on" or wanted)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        config = facts["config"]
        if base:  # who publishes the folder does not publish where the base model lies
            is_published = _is_on_hub(base) or config.get("push_to_hub") or config.get("log_model")
            place = export_files.public_name(base) if is_published else _locate(base, config)
            adapters = {**json.loads(export_files.without_paths(files[ADAPTER_CONFIG])), "base_model_name_or_path": place}
            files = {**files, ADAPTER_CONFIG: json.dumps(adapters, indent=1).encode()}
        more = json.loads(files.get(checkpoint_format.FACTS, b"{}"))  # of the recipe, such as the columns that it has chosen
        published = {**facts, **more, "config": export_files.public_options(config)}
        stored = json.dumps({("options" if name == "config" else name): value for name, value in published.items()}, indent=1)
        if merges:
            _save(partial / ADAPTER, model, files, dtype)
            (partial / ADAPTER / checkpoint_format.FACTS).write_text(stored)
            files = {name.removeprefix(f"{BASE}/"): content for name, content in files.items() if name != ADAPTER_CONFIG}
            model = _merge(model, _exported_dtype(files, dtype))
        _save(partial, model, files, dtype)
        name = published["config"].get("push_to_hub") or "FOLDER"
        code, _, pipeline = _code(partial, original, export_files.public_name(base))
        use = code.replace("{model}", pipeline).replace("{folder}", examples.literal(name)).replace("; ", "\n")
        (partial / "README.md").write_text(export_files.card(published, use, base and export_files.public_name(base)))
        (partial / checkpoint_format.FACTS).write_text(stored)
        if folder.exists():  # hidden first, so that a kill meanwhile leaves no partial folder
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        partial.rename(folder)
    except Exception as error:  # safetensors has its own error for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or "os error" in str(error):
            instead = f"Free some space, and export a checkpoint with: accel-ddp export {folder.parent} FOLDER"
            raise UserError(f"{folder}: the model could not be written on {this_rank.host}: {error}. {instead}") from error
        raise


def _save(folder: Path, model: Any, files: dict[str, bytes], dtype: str) -> None:
    """Write the weights and the files. Weights of a whole model have the dtype of its config, adapters the one they were trained in."""
    if "config.json" in files and dtype not in ("auto", (config := json.loads(files["config.json"])).get("dtype")):
        files = {**files, "config.json": json.dumps({**config, "dtype": dtype}, indent=2).encode()}
    dtype = _exported_dtype(files, dtype).replace("auto", "")
    if isinstance(model, Stream):
        export_files.write_weights(folder, *model, dtype)
    else:
        weights = export_files.cast_weights(to_save(model) if has_adapters(model) else model.state_dict(), type(model), dtype)
        options: dict[str, Any] = {"state_dict": weights} if weights else {}
        if has_adapters(model):  # embeddings below them are not trained; peft would ask the Hub whether they were resized
            model.save_pretrained(folder, save_embedding_layers=False, **options)
        else:
            generation = getattr(model, "generation_config", None)  # `files` have it, and `save_pretrained` refuses unusual ones
            model.generation_config = generation and type(generation)()
            model.save_pretrained(folder, **options)
            model.generation_config = generation
        (folder / "README.md").unlink(missing_ok=True)  # a template of peft with the path of the model
    for name, content in files.items():  # they replace those that `save_pretrained` has written
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        is_config = Path(name).name in CONFIGS and name != ADAPTER_CONFIG
        (folder / name).write_bytes(export_files.without_paths(content) if is_config else content)


def _exported_dtype(files: dict[str, bytes], dtype: str) -> str:
    """Return the dtype of exported weights: `auto` means that of config.json, and stays `auto` for adapters, which have none."""
    config = json.loads(files.get("config.json", b"{}"))
    return (config.get("dtype") or config.get("torch_dtype") or dtype) if dtype == "auto" else dtype


def _merge(model: Any, dtype: str) -> Any:
    """Return the model with merged adapters. They are added in float32, one layer at a time, and the sum is rounded once."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]:
        own = next(layer.get_base_layer().parameters()).dtype if dtype == "auto" else getattr(torch, dtype)
        layer.float()
        layer.merge()
        layer.to(own)
    with warnings.catch_warnings():  # peft warns that there is nothing left to merge
        warnings.simplefilter("ignore")
        return model.merge_and_unload()


def push(folder: Path, name: str) -> None:
    """Upload the folder to the Hub. The folder stays in its place, also if the upload fails."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repository = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except Exception as error:  # of many kinds: no network, no permission, no token
        reason = f"{first_line(error)} The model is in {folder}"
        raise UserError(f"--push_to_hub {name}: {reason}. Upload it later with: hf upload {name} {folder}") from error
    print(f"model uploaded to {repository}")
