"""The decision which checkpoint a run resumes from and whether it may, and loading it. No other module makes this decision."""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_ddp.config.choices import take_saved
from accel_ddp.config.train_config import TrainConfig, as_plain_dict, options_that_keep_the_result
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, gather_objects, together
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.ranks.restarts import read_earlier_run
from accel_ddp.ranks.shards import is_sharded, local, region, sharded_like
from accel_ddp.records.redaction import redact_values
from accel_ddp.saving import checkpoint_format, state_tensors
from accel_ddp.saving.checkpoint_format import MODEL, OPTIMIZER
from accel_ddp.saving.pieces import Pieces

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

log = logging.getLogger(__name__)

SAVED = ("config", "chosen", "precision")  # what run.json contains about options
BLOCK = 1 << 28  # bytes of a tensor that are sent at once to ranks that cannot read the checkpoint


# ---- which folder and which checkpoints `--resume` means


def folder_of_resume(cfg: TrainConfig) -> str:
    return str(_run_folder(Path(cfg.resume))) if cfg.resume not in ("", "auto") else ""


def continues_run_in(folder: Path, cfg: TrainConfig) -> bool:
    if not cfg.resume:
        return False
    source = folder if cfg.resume == "auto" else Path(cfg.resume)
    return _run_folder(source).resolve() == folder.resolve() or _was_continued_in(folder, source)


def _run_folder(path: Path) -> Path:
    return path.parent if checkpoint_format.is_checkpoint_name(path) or (path / checkpoint_format.MANIFEST).is_file() else path


def _was_continued_in(folder: Path, source: Path) -> bool:
    """Return whether `folder`, which is not the folder of `source`, holds a run that continued from `source`."""
    paths = [source] if (source / checkpoint_format.MANIFEST).is_file() else checkpoint_format.list_checkpoints(source)
    if any(path.resolve().parent == folder.resolve() for path in paths):
        return False
    runs = [
        {checkpoint_format.read_run(path).get("run") for path in some} - {None}
        for some in (paths, checkpoint_format.list_checkpoints(folder))
    ]
    return bool(runs[0] & runs[1])


def candidates(cfg: TrainConfig) -> list[Path]:
    """Return the checkpoints on this disk that `--resume` may mean, oldest first."""
    if not cfg.resume:
        return []
    path = Path(cfg.resume)
    # A requeued job repeats its command after the run has continued from there.
    if cfg.resume == "auto" or _was_continued_in(Path(cfg.output_dir), path):
        return checkpoint_format.list_checkpoints(cfg.output_dir)
    return checkpoint_format.list_checkpoints(path) if _run_folder(path) == path else [path] if path.is_dir() else []


def choose(cfg: TrainConfig) -> tuple[int, Path] | None:
    """Return (rank that reads it, path) of the newest complete checkpoint on any disk, or None. This is a collective."""
    folder = Path(cfg.output_dir)
    mine = []
    if this_rank.is_local_main:  # once per node
        for path in candidates(cfg):
            run = checkpoint_format.read_run(path)
            step = checkpoint_format.step_of(path) if checkpoint_format.is_checkpoint_name(path) else run.get("step", 0)
            mine.append((step, str(path), run.get("run")))
    shares = gather_objects((this_rank.host, mine)) or []
    _check_one_run(shares, folder)
    found = [(step, rank, path) for rank, (_, share) in enumerate(shares) for step, path, _ in share]
    found = broadcast_object(sorted(found, key=lambda one: (-one[0], one[1])))
    if not found and cfg.resume != "auto":
        raise UserError(f"--resume {cfg.resume}: no node has a checkpoint there.")
    damaged = []
    for _step, rank, path in found:
        problem = _verify(Path(path), rank)
        if not problem:
            for owner, other, why in damaged:
                # It keeps its name if another node has a complete checkpoint at this path, or if the file could not be read.
                if owner == this_rank.rank and other != path and "cannot be read" not in why:
                    set_aside(Path(other), folder, "damaged")
            return rank, Path(path)
        damaged.append((rank, path, problem))
        host = broadcast_object(this_rank.host, rank)
        warn_on_main(f"--resume: {path} on {host} cannot be used: {problem}.", "CHECKPOINT_DAMAGED")
    if damaged:
        instead = "Copy a complete one there, or start again in another --output_dir"
        raise UserError(f"--resume: no complete checkpoint is left. {damaged[0][1]}: {damaged[0][2]}. {instead}.")
    return None


def _verify(path: Path, source: int) -> str:
    """Return why rank `source`'s checkpoint is unusable, or "". A collective: ranks that see it share the work, 1 GB/s each."""
    views = gather_everywhere(checkpoint_format.identify(path))
    ranks = [rank for rank, view in enumerate(views) if rank == source or (view is not None and view == views[source])]
    with together("verify the checkpoint"):
        rank = this_rank.rank
        problem = checkpoint_format.find_problem(path, ranks.index(rank), len(ranks)) if rank in ranks else ""
    return next(filter(None, gather_everywhere(problem)), "")


def _check_one_run(shares: list[tuple[str, list]], folder: Path) -> None:
    """Raise UserError if nodes have checkpoints of different runs in the same folder. `shares` is empty except on rank 0."""
    holders = [(host, {run for *_, run in share if run}) for host, share in shares]
    holders = [(host, runs) for host, runs in holders if runs]
    others = [host for host, runs in holders if not runs & holders[0][1]]
    hosts = broadcast_object([holders[0][0], *others] if others else [])
    if hosts:
        instead = "Name the right one with --resume PATH, or remove the checkpoints of the other run"
        raise UserError(f"--resume: the nodes {' and '.join(hosts)} have checkpoints of different runs in {folder}. {instead}.")


def set_aside(path: Path, folder: Path, prefix: str) -> None:
    """Rename a checkpoint of the run's own folder, which is locked. Checkpoints elsewhere stay as they are."""
    if path.parent.resolve() == folder.resolve():
        with contextlib.suppress(OSError):  # another node shares the disk and was faster, or the disk is read-only
            print(f"{this_rank.host}: renamed {path.name} to {checkpoint_format.set_aside(path, prefix).name}", flush=True)


# ---- whether the run may continue with these options and data


def take_saved_options(cfg: TrainConfig) -> None:
    """A collective, before data and model are loaded. A damaged newest checkpoint has the same options as the one before."""
    if not cfg.resume:
        return
    mine: tuple[int, dict[str, Any]] = (-1, {})
    with together("look for checkpoints"):
        if this_rank.is_local_main:  # once per node
            runs = [checkpoint_format.read_run(path) for path in reversed(candidates(cfg))]
            mine = next(((run["step"], {key: run.get(key, {}) for key in SAVED}) for run in runs if "step" in run), mine)
    step, run = max(gather_everywhere(mine), key=lambda one: one[0])  # of equal steps that of the first rank
    if step >= 0:
        take_saved(cfg, run)


def settings_of_run(cfg: TrainConfig) -> dict[str, Any]:
    """Each node reads its own disk, since these options are needed to communicate. {}: it was another number of ranks."""
    earlier = read_earlier_run().get("absolute", "")
    if not this_rank.is_local_main or not (cfg.resume or earlier):
        return {}
    folder = cfg.output_dir or folder_of_resume(cfg) or earlier
    with contextlib.suppress(OSError):  # it is reported when the checkpoint is read
        paths = candidates(dataclasses.replace(cfg, resume=cfg.resume or "auto", output_dir=folder))
        run = next(filter(None, map(checkpoint_format.read_run, reversed(paths))), {})
        if run.get("num_ranks") == this_rank.num_ranks:
            stored = {name: run["config"].get(name, default) for name, default in (("tuned", "off"), ("bucket_cap_mb", 25))}
            return {"step": run["step"], "chosen": run.get("chosen", {}), **stored}
    return {}


def check_options(cfg: TrainConfig, run: dict[str, Any], data: dict[str, Any] | None = None, precision: str = "") -> None:
    """Raise UserError if the result would change. Without `data`, the options that name the data are not compared."""
    if cfg.evaluate_only:  # on other data, or with other options
        return
    total, total_before = last_steps(cfg, run, data)
    step = run.get("step", 0)
    if 0 < total < step:
        length = f"--steps {cfg.steps}" if cfg.steps else f"--epochs {cfg.epochs:g}"
        raise UserError(
            f"--resume: {length} stops the run after step {total}, but the checkpoint is at step {step} already. To continue, use "
            f"--steps {max(step, total_before)} or more. To use the model as it is, run: accel-ddp export "
            f"{cfg.output_dir if cfg.resume == 'auto' else cfg.resume} FOLDER"
        )
    # A longer run needs no permission, because its user has asked for it. `fit` prints how the learning rate changes.
    may_be_longer = total >= total_before or (cfg.lr_schedule == "constant" and not cfg.warmup_ratio)
    changed = _find_changes(cfg, run, data, {"steps", "epochs"} if may_be_longer else set())
    if precision and precision != run.get("precision"):
        changed.append(f"--mixed_precision was {run.get('precision')!r} and is now {precision!r}")
    before = run.get("data")
    if data and before and data["items"] != before["items"]:
        changed.append(f"the training data had {before['items']:,} items and now have {data['items']:,}")
    elif data and before and data.get("mixture") != before.get("mixture"):
        weights = [" ".join(f"{weight:g}" for weight, _ in one.get("mixture", ())) or "none" for one in (before, data)]
        rows = [" + ".join(f"{size:,}" for _, size in one.get("mixture", ())) for one in (before, data)]
        changed.append(f"the weights of --train_file were {weights[0]} and are now {weights[1]}" if weights[0] != weights[1]
                       else f"the datasets of --train_file had {rows[0]} rows and now have {rows[1]}")  # fmt: skip
    elif data and before and data != before:
        changed.append("the content of the training data has changed")
    if changed and not cfg.allow_config_change:
        raise UserError(
            f"--resume: the run was saved with other options, which change its result: {'; '.join(changed)}. Use the old values "
            "again, or add --allow_config_change to continue with the new ones."
        )
    if changed:
        log.info("--allow_config_change: continuing although %s", "; ".join(changed))


def _find_changes(cfg: TrainConfig, run: dict[str, Any], data: dict[str, Any] | None, free: set[str]) -> list[str]:
    """Return the options that differ from the saved run. Those that are `free` or keep the result may differ."""
    # Checkpoints contain no secrets. Two passwords in the same URL are no difference.
    # A run that is older than these options had steps of items, and summed gradients in every step.
    older = {"global_batch_tokens": 0, "sync_every": 0}
    then, now = redact_values(older | run.get("config", {})), redact_values(as_plain_dict(cfg))
    before = run.get("data") or {}
    free = {*free, *options_that_keep_the_result(type(cfg)), "mixed_precision"}
    if data is None or (data["fingerprint"] and data["fingerprint"] == before.get("fingerprint")):
        free |= {"dataset", "train_file", "train_split"}  # these options name files, whose content is compared by its fingerprint
    return [
        f"--{name} was {then[name]!r} and is now {value!r}"
        for name, value in now.items() if name in then and name not in free and then[name] != value
    ]  # fmt: skip


def last_steps(cfg: TrainConfig, run: dict[str, Any], data: dict[str, Any] | None = None) -> tuple[int, int]:
    """Return the last step of this run and of the saved one (0: not known), whose number of items counts without `data`."""
    then, before = run.get("config", {}), run.get("data") or {}
    size_of = lambda options, found: found.get("tokens" if options.global_batch_tokens else "items", 0)
    last_step = lambda options, found: (
        options.total_steps(size_of(options, found)) if size_of(options, found) or options.steps else 0
    )
    names = ("steps", "epochs", "global_batch_size", "global_batch_tokens")
    saved = dataclasses.replace(cfg, **{name: then[name] for name in names if name in then})
    total = run.get("total_steps") or last_step(saved, before)
    return last_step(cfg, data or before), total


# ---- loading


def load(
    accelerator: "Accelerator", model: "nn.Module", optimizer: torch.optim.Optimizer | None, kept: dict[str, Tensor],
    states: Callable[[], Iterable[str]], path: Path, run: dict[str, Any], source: int, num_workers: int = 1,
) -> None:  # fmt: skip
    """Load a checkpoint from rank `source` into the model, the optimizer (if any) and the tensors that are kept with its state.

    This is a collective. A rank of a sharded model, or of local workers, reads only what it holds. If some ranks do not see the files,
    and for a model that every rank holds completely, rank `source` reads each tensor and sends it.
    """
    weights = state_tensors.to_save(model)
    in_parts = is_sharded(model) or any([*states()])
    reads_alone = in_parts and len({*gather_everywhere(checkpoint_format.identify(path))}) == 1
    reads = reads_alone or source == this_rank.rank
    with together("read the checkpoint"):
        files = {group: Pieces(path, group) for group in (MODEL, OPTIMIZER)} if reads else {}
    there = broadcast_object({group: file.tensors for group, file in files.items()}, source)
    state_tensors.check_same_model({name: ([*t.shape], t.dtype) for name, t in weights.items()}, there[MODEL], path)
    if run.get("frozen", "") != state_tensors.digest_of_frozen(model):
        instead = f"Use the model of the run: --model {run['config'].get('model')}"
        raise UserError(f"--resume: the adapters in {path} were trained on other weights than --model has now. {instead}.")

    def receive(group: str, name: str, offsets: list[int], lengths: list[int]) -> Tensor:
        if reads_alone:
            return files[group].read(name, offsets, lengths)
        shape, dtype = there[group][name]
        size = BLOCK if is_sharded(model) else math.inf
        return _receive(files.get(group), name, shape, dtype, offsets, lengths, accelerator.device, source, size)

    with torch.no_grad():
        for name in sorted(weights):
            local(weights[name]).copy_(receive(MODEL, name, *region(weights[name])))
        for full, tensor in sorted(kept.items()):  # a run that had no averages begins them with its weights
            name, _, key = full.rpartition("/")
            if full in there[OPTIMIZER]:
                local(tensor).copy_(receive(OPTIMIZER, full, *region(tensor)))
            elif key == state_tensors.EMA:
                local(tensor).copy_(local(weights[name]))
    if optimizer is None:
        return
    if run["optimizer"] != type(optimizer).__name__:  # possible with --allow_config_change
        log.info("the optimizer was %s and is now %s: its state starts from zero", run["optimizer"], type(optimizer).__name__)
        return
    _load_states(
        accelerator.device, model, optimizer, states, there[OPTIMIZER], run, functools.partial(receive, OPTIMIZER), reads_alone,
        num_workers,
    )  # fmt: skip
    if accelerator.scaler and run["scaler"]:
        accelerator.scaler.load_state_dict(run["scaler"])


def _load_states(
    device: torch.device, model: "nn.Module", optimizer: torch.optim.Optimizer, states: Callable[[], Iterable[str]],
    there: dict[str, Any], run: dict[str, Any], receive: Callable[..., Tensor], reads_alone: bool, num_workers: int = 1,
) -> None:  # fmt: skip
    """Load the state of the optimizer, or of each local worker of this rank. `there` are the shapes of the tensors in the files."""
    # The last two: the number of workers was changed (--allow_config_change). Else a worker has not stepped yet.
    is_same = num_workers > 1 and run["config"].get("local_workers") == num_workers
    found: dict[str, dict[str, dict[str, Any]]] = {suffix: {} for suffix in (*states(), "", "@0")}
    on_host = {full.partition("@")[0] for full in run["on_host"]}  # of the workers of the main rank
    parameters = dict(model.named_parameters())
    for full in sorted(there):
        name, _, key = full.rpartition("/")
        key, at, worker = key.partition("@")
        is_own = at + worker in found
        if key in (state_tensors.EMA, state_tensors.OUTER) or (reads_alone and not is_own):
            continue
        shape, parameter = there[full][0], parameters.get(name)
        is_like_parameter = isinstance(parameter, DTensor) and shape and shape == [*parameter.shape]
        part = receive(full, *(region(parameter) if is_like_parameter else ([0] * len(shape), shape)))
        part = part.to("cpu" if f"{name}/{key}" in on_host else device)
        if is_own:
            part = sharded_like(part.to(local(parameter).device), parameter) if is_like_parameter else part
            found[at + worker].setdefault(name, {})[key] = part
    for full, values in run["values"].items():
        name, at, worker = full.partition("@")
        found.get(at + worker, {}).setdefault(name, {}).update(values)
    for suffix in states():
        # A copy, because an optimizer keeps the tensors that it loads, and each worker changes its own.
        others = {} if is_same else copy.deepcopy(found[""] or found["@0"])
        state_tensors.restore(optimizer, model, found[suffix] or others)


def _receive(
    file: Pieces | None, name: str, shape: list[int], dtype: torch.dtype, offsets: list[int], lengths: list[int],
    device: torch.device, source: int, block_bytes: float,
) -> Tensor:  # fmt: skip
    rows = shape[0] if shape else 1
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    step = max(1, int(min(rows, block_bytes // row_bytes)))  # the same on every rank
    result = None
    for begin in range(0, max(1, rows), step):
        size = [min(step, rows - begin), *shape[1:]] if shape else []
        if file is None:
            block = torch.empty(size, dtype=dtype, device=device)
        else:
            block = file.read(name, [begin, *[0] * (len(shape) - 1)] if shape else [], size).to(device)
        if this_rank.num_ranks > 1:
            dist.broadcast(block.reshape(-1).view(torch.uint8), src=source)  # as bytes, because gloo lacks some types
        if size == lengths == shape:
            return block
        result = torch.empty(lengths, dtype=dtype, device=device) if result is None else result
        first, last = max(begin, offsets[0]), min(begin + size[0], offsets[0] + lengths[0])
        if first < last:
            result[first - offsets[0] : last - offsets[0]] = block[first - begin : last - begin]
    return result


def report_differences(cfg: TrainConfig, run: dict[str, Any], shards: int = 0) -> None:
    if run["num_ranks"] != this_rank.num_ranks:
        log.info(
            "saved on %d ranks, now %d: the same batches in the same order; weights agree up to rounding",
            run["num_ranks"], this_rank.num_ranks,
        )  # fmt: skip
    elif run.get("shards", 0) != shards:
        kinds = [f"sharded over {number} ranks" if number else "whole on every rank" for number in (run.get("shards", 0), shards)]
        log.info("the model was %s, now it is %s: weights agree up to rounding", *kinds)
    for name in ("micro_batch_size", "micro_batch_tokens", "balance", "padding_free", "compile"):
        if run["config"].get(name, 0 if name == "micro_batch_tokens" else "off") != getattr(cfg, name):
            log.info("--%s has changed: results agree up to rounding, but dropout masks differ", name)
    if cfg.comm_hook == "powersgd":
        log.info("--comm_hook powersgd: its error feedback starts from zero, so the resumed run is not bit-identical")
    then = run["versions"]
    now = state_tensors.versions()
    changed = [f"{name} {then.get(name)} then, {version} now" for name, version in now.items() if then.get(name) != version]
    if changed:
        log.info("versions have changed, so the resumed run may not be bit-identical: %s", "; ".join(changed))
