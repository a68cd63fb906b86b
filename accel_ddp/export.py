"""Exports a trained model as a folder that transformers loads: weights, config, tokenizer, label names and a model card."""

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_ddp.config import TrainConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import together
from accel_ddp.ranks.process import process
from accel_ddp.saving import format
from accel_ddp.saving.checkpoints import Metrics
from accel_ddp.saving.tensors import digest_of_frozen, has_adapters, to_save, versions
from accel_ddp.sources.hub import prepare_hub

BASE = "base"  # subfolder for the config of the model below adapters

TASKS = {
    "classify.py": "text-classification", "tag.py": "token-classification", "sft.py": "text-generation",
    "seq2seq.py": "text2text-generation", "images.py": "image-classification", "embed.py": "sentence-similarity",
    "pretrain_mlm.py": "fill-mask",
}  # the Hub's names of tasks  # fmt: skip


def files_of(model: Any, processor: Any, more: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the files of the exported folder except the weights, and `more`.

    They are stored in every checkpoint, so that each one can be exported alone. `processor` is a tokenizer or an image
    processor.
    """
    base = model.get_base_model() if has_adapters(model) else model
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    with tempfile.TemporaryDirectory() as folder:
        if has_adapters(model):
            model.peft_config["default"].save_pretrained(folder)
        # Next to adapters, transformers would take the config of the whole model for the model itself.
        config.save_pretrained(f"{folder}/{BASE}" if has_adapters(model) else folder)
        if base.can_generate():
            base.generation_config.save_pretrained(f"{folder}/{BASE}" if has_adapters(model) else folder)
        if getattr(processor, "is_fast", False):  # otherwise the file would depend on whether the rows came from the cache
            processor.backend_tokenizer.no_truncation()
            processor.backend_tokenizer.no_padding()
        processor.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {**{str(path.relative_to(folder)): path.read_bytes() for path in paths}, **(more or {})}


def at_the_end(
    accelerator: Accelerator, cfg: TrainConfig, model: Any, files: dict[str, bytes], metrics: Metrics, example: str = ""
) -> None:
    """Write OUTPUT_DIR/model, completely or not at all, and upload it if `--push_to_hub` asks for it. Call it on every rank.

    `example` is Python code that uses the exported {folder}.
    """
    with together("export the model"):
        if not accelerator.is_main_process:
            return
        folder = Path(cfg.output_dir) / "model"
        facts = {"config": as_plain_dict(cfg), "metrics": metrics, "versions": versions(), "num_ranks": process.num_ranks}
        merge = getattr(cfg, "merge_adapters", False)
        _write(folder, model, files, {"recipe": Path(sys.argv[0]).name, **facts}, merge)
        if cfg.push_to_hub:
            push(folder, cfg.push_to_hub)
        print(f"model saved in {folder}")
        if has_adapters(model) and not merge:
            print("To get one model, add --merge_adapters to the command, or run accel-ddp export --merge on a checkpoint.")
        elif example:
            print(f'try:  python -c "{example.format(folder=folder)}"')
        print("next: train on your own data with --train_file or --dataset. --help shows all options.")


def from_checkpoint(place: str, out: str, push_to_hub: str = "", merge: bool = False) -> Path:
    """Export a checkpoint. If `place` is the folder of a run, export its best checkpoint, or else its newest complete one."""
    path, folder = _chosen(Path(place)), Path(out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{out}: exists already. Name a folder that does not exist.")
    problem = format.find_problem(path)
    if problem:
        raise UserError(f"{path}: {problem}. It cannot be exported.")
    if not any((path / "files" / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(
            f"{path}: contains no config of a transformers model, so that it cannot be exported. Its weights are in "
            f"{path / format.MODEL}. Load them with safetensors."
        )
    run = format.read_run(path)
    known = {**(format.read_json(path.parent / "evaluations.json") or {}), **run["evaluations"]}
    files = {str(p.relative_to(path / "files")): p.read_bytes() for p in (path / "files").rglob("*") if p.is_file()}
    facts = {name: run[name] for name in ("recipe", "step", "config", "versions", "num_ranks")}
    _write(folder, _model_of(path), files, {**facts, "metrics": known.get(str(run["step"]), {})}, merge)
    if push_to_hub:
        push(folder, push_to_hub)
    return folder


def _chosen(place: Path) -> Path:
    there = format.list_checkpoints(place)
    if not there:
        if not place.is_dir():
            raise UserError(f"{place}: there is no such folder.")
        return place
    best = format.read_json(place / "best.json")
    if isinstance(best, dict) and (place / best["checkpoint"]).is_dir():
        print(f"{place}: exporting the best checkpoint, {best['checkpoint']} ({best['metric']} {best['value']:.4f})")
        return place / best["checkpoint"]
    for path in reversed(there):
        problem = format.find_problem(path)
        if not problem:
            print(f"{place}: exporting the newest checkpoint, {path.name}")
            return path
        print(f"{path}: {problem}", file=sys.stderr)
    raise UserError(f"{place}: contains no complete checkpoint.")


def _model_of(path: Path) -> Any:
    import transformers
    from safetensors.torch import load_file

    from accel_ddp.tasks import vision  # registers its models with transformers

    prepare_hub()
    with_adapters = (path / "files" / "adapter_config.json").is_file()
    config = transformers.AutoConfig.from_pretrained(path / "files" / (BASE if with_adapters else "."))
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None) or getattr(vision, name, None)
    if kind is None:
        raise UserError(f"{path}: the installed transformers has no {name}. Install the version that run.json names.")
    if with_adapters:
        import peft

        adapters = peft.PeftConfig.from_pretrained(path / "files")
        adapters.inference_mode = False
        place = adapters.base_model_name_or_path
        try:
            base = kind.from_pretrained(place, config=config, ignore_mismatched_sizes=True, dtype=config.dtype)
        except Exception as error:
            raise UserError(f"{path}: the model below its adapters, {place}, cannot be loaded: {error}") from error
        model = peft.get_peft_model(base, adapters)
    else:
        model = kind(config)
    weights, names = load_file(path / format.MODEL), to_save(model)
    if names.keys() != weights.keys():
        first = sorted(names.keys() ^ weights.keys())[:3]
        raise UserError(f"{path}: the weights do not belong to a {type(model).__name__}: {', '.join(first)} ...")
    if digest_of_frozen(model) != format.read_run(path).get("frozen", ""):
        raise UserError(f"{path}: its adapters were trained on other weights than {adapters.base_model_name_or_path} has now.")
    model.load_state_dict(weights, strict=False)  # tied weights are stored once
    return model


def _write(folder: Path, model: Any, files: dict[str, bytes], facts: dict[str, Any], merge: bool = False) -> None:
    if merge and has_adapters(model):  # a copy, so that the trained model keeps its adapters
        model = copy.deepcopy(model).merge_and_unload()
        files = {name.removeprefix(f"{BASE}/"): content for name, content in files.items() if name != "adapter_config.json"}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        for name, content in files.items():  # they replace those that `save_pretrained` has written
            if name != "adapter_config.json":
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes(content)
        (partial / "README.md").write_text(card(facts))
        (partial / "accel_ddp.json").write_text(json.dumps(facts, indent=1))
        if folder.exists():  # hidden first, so that a kill meanwhile leaves no partial folder
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        partial.rename(folder)
    except Exception as error:  # safetensors has its own error for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or "os error" in str(error):
            raise UserError(
                f"{folder}: the model could not be written on {process.host}: {error}. Free some space, and export a checkpoint with: "
                f"accel-ddp export {folder.parent} FOLDER"
            ) from error
        raise


def card(facts: dict[str, Any]) -> str:
    """Return the README.md of a model: its origin, its metrics and its options, for people and for the Hub."""
    from huggingface_hub import EvalResult, ModelCardData

    config, metrics = facts["config"], facts["metrics"]
    base, data = config.get("model", ""), config.get("train_file") or config.get("dataset", "")
    is_name = lambda text: text.count("/") == 1 and not text.startswith((".", "/", "~")) and "." not in text.split("/")[1][-5:]
    task = TASKS.get(facts["recipe"])
    head = ModelCardData(
        library_name="sentence-transformers" if facts["recipe"] == "embed.py" else "transformers",
        base_model=base if is_name(base) else None,
        datasets=[data.split(":")[0]] if is_name(data) else None,
        pipeline_tag=task,
        tags=["accel_ddp"],
        model_name=Path(config["output_dir"]).name,
        eval_results=[
            EvalResult(task or "other", data or "unknown", Path(data).name or "unknown", name, round(value, 6))
            for name, value in metrics.items()
        ]
        or None,
    )
    lines = ["---", head.to_yaml().strip(), "---", "", f"# {head.model_name}", ""]
    lines += [f"`{base or 'A model'}`, fine-tuned with accel_ddp's `{facts['recipe']}` on `{data or 'other data'}`.", ""]
    if metrics:
        lines += ["## Evaluation", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in metrics.items()] + [""]
    step = f"{facts['step']} steps" if "step" in facts else "All steps"
    lines += ["## Training", "", f"{step} on {facts['num_ranks']} rank{'s' * (facts['num_ranks'] > 1)}, with these options:", ""]
    lines += ["```yaml", *(f"{name}: {json.dumps(value)}" for name, value in config.items()), "```", ""]
    lines += ["Versions: " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()), ""]
    return "\n".join(lines)


def push(folder: Path, name: str) -> None:
    """Upload the folder to the Hub. The folder stays in its place, also if the upload fails."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repository = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except Exception as error:  # of many kinds: no network, no permission, no token
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--push_to_hub {name}: {first} The model is in {folder}. Upload it later with: hf upload {name} {folder}"
        ) from error
    print(f"model uploaded to {repository}")
