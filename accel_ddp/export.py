"""A trained model as an ordinary transformers folder: weights, config, tokenizer, label names and a model card."""

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from accel_ddp import snapshot, world
from accel_ddp.checkpoint import Metrics
from accel_ddp.config import TrainConfig, UserError, as_plain_dict
from accel_ddp.data import prepare_hub
from accel_ddp.state import unique, versions


def files_of(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """What such a folder has beside the weights. In every checkpoint, so that each one can be exported alone."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def at_the_end(model: Any, tokenizer: Any, cfg: TrainConfig, metrics: Metrics) -> Path:
    """OUTPUT_DIR/model, whole or not there, and on the hub if `--push_to_hub` asks for it. Call on the main rank."""
    folder = Path(cfg.output_dir) / "model"
    facts = {"config": as_plain_dict(cfg), "metrics": metrics, "versions": versions(), "num_ranks": world.NUM_RANKS}
    _write(folder, model, files_of(model, tokenizer), {"recipe": Path(sys.argv[0]).name, **facts})
    if cfg.push_to_hub:
        push(folder, cfg.push_to_hub)
    return folder


def from_checkpoint(place: str, out: str, push_to_hub: str = "") -> Path:
    """Export a checkpoint, or of a run's folder the best one, or the newest whole one where none is marked."""
    path, folder = _chosen(Path(place)), Path(out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{out}: is there already. Give a folder that is not.")
    problem = snapshot.problem(path)
    if problem:
        raise UserError(f"{path}: {problem}. It is not exported.")
    if not (path / "files" / "config.json").is_file():
        raise UserError(
            f"{path}: holds no config of a transformers model, so that it cannot become such a folder. Its weights are in "
            f"{path / snapshot.MODEL}: load them with safetensors."
        )
    run = snapshot.run_of(path)
    known = {**(snapshot.read_json(path.parent / "evaluations.json") or {}), **run["evaluations"]}
    files = {str(p.relative_to(path / "files")): p.read_bytes() for p in (path / "files").rglob("*") if p.is_file()}
    facts = {name: run[name] for name in ("recipe", "step", "config", "versions", "num_ranks")}
    _write(folder, _model_of(path), files, {**facts, "metrics": known.get(str(run["step"]), {})})
    if push_to_hub:
        push(folder, push_to_hub)
    return folder


def _chosen(place: Path) -> Path:
    there = snapshot.all_of(place)
    if not there:
        if not place.is_dir():
            raise UserError(f"{place}: there is no such folder.")
        return place
    best = snapshot.read_json(place / "best.json")
    if isinstance(best, dict) and (place / best["checkpoint"]).is_dir():
        print(f"{place}: the best is {best['checkpoint']} ({best['metric']} {best['value']:.4f})")
        return place / best["checkpoint"]
    for path in reversed(there):
        problem = snapshot.problem(path)
        if not problem:
            print(f"{place}: the newest is {path.name}")
            return path
        print(f"{path}: {problem}", file=sys.stderr)
    raise UserError(f"{place}: no checkpoint in it is whole.")


def _model_of(path: Path) -> Any:
    import transformers
    from safetensors.torch import load_file

    prepare_hub()
    config = transformers.AutoConfig.from_pretrained(path / "files")
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise UserError(f"{path}: this transformers has no {config.architectures}. Install the version of the run: see run.json.")
    model = kind(config)
    weights = load_file(path / snapshot.MODEL)
    names = unique(model.state_dict())
    if names.keys() != weights.keys():
        first = sorted(names.keys() ^ weights.keys())[:3]
        raise UserError(f"{path}: the weights are not those of a {type(model).__name__}: {', '.join(first)} ...")
    model.load_state_dict(weights, strict=False)  # tied weights are there once
    return model


def _write(folder: Path, model: nn.Module, files: dict[str, bytes], facts: dict[str, Any]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
        model.save_pretrained(partial)
        (partial / "README.md").write_text(card(facts))
        (partial / "accel_ddp.json").write_text(json.dumps(facts, indent=1))
        if folder.exists():  # out of sight first: a kill meanwhile must not leave half of it
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        partial.rename(folder)
    except Exception as error:  # also safetensors' own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or "os error" in str(error):
            raise UserError(
                f"{folder}: the model could not be written on {world.HOST}: {error}. When there is room, export a checkpoint: "
                f"accel-ddp export {folder.parent} OUT."
            ) from error
        raise


def card(facts: dict[str, Any]) -> str:
    """The README.md of a model: what it was made of and how good it is, for people and for the hub."""
    from huggingface_hub import EvalResult, ModelCardData

    config, metrics = facts["config"], facts["metrics"]
    base, data = config.get("model", ""), config.get("train_file") or config.get("dataset", "")
    is_name = lambda text: text.count("/") == 1 and not text.startswith((".", "/", "~")) and "." not in text.split("/")[1][-5:]
    task = {"classify.py": "text-classification"}.get(facts["recipe"])
    head = ModelCardData(
        library_name="transformers",
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
    lines += [f"`{base or 'A model'}`, fine-tuned with accel_ddp's `{facts['recipe']}` on `{data or 'data of its own'}`.", ""]
    if metrics:
        lines += ["## Evaluation", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in metrics.items()] + [""]
    step = f"{facts['step']} steps" if "step" in facts else "All steps"
    lines += ["## Training", "", f"{step} on {facts['num_ranks']} rank{'s' * (facts['num_ranks'] > 1)}, with these options:", ""]
    lines += ["```yaml", *(f"{name}: {json.dumps(value)}" for name, value in config.items()), "```", ""]
    lines += ["Versions: " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()), ""]
    return "\n".join(lines)


def push(folder: Path, name: str) -> None:
    """To the hub; the folder stays where it is, whatever happens."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repository = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except Exception as error:  # of many kinds: no network, no right, no token
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--push_to_hub {name}: {first} The model is in {folder}; upload it later: hf upload {name} {folder}."
        ) from error
    print(f"model uploaded to {repository}")
