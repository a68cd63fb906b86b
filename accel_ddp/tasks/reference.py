"""The log-probabilities of a reference: the model as it was before training, with which losses of preferences compare it.

`stored` computes them once, before training, and keeps them in the cache. The others compute one more forward pass in every step:
`adapters` without the new adapters, `copy` with the weights as they were. All three give the same numbers, up to rounding.
"""

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp.config.choices import choose
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, print_on_main, together
from accel_ddp.ranks.shards import is_first_copy, is_sharded, local
from accel_ddp.records.files import replace_file
from accel_ddp.seeds import mixed
from accel_ddp.sources.adapters import find_adapters
from accel_ddp.sources.data import row_numbers, with_row_numbers
from accel_ddp.speed.attach import Speed
from accel_ddp.training.divergence import bits_of
from accel_ddp.training.evaluation import EvalBatches, measure_all
from accel_ddp.training.padding_check import forget_peak
from accel_ddp.training.sharding import reshard
from accel_ddp.training.stream import TrainBatches

if TYPE_CHECKING:
    import datasets

COLUMN = "reference"  # of rows with stored values: a number for each text of a row
PART = 20_000  # rows after which values are kept, in case the process is killed


def choose_reference(cfg: Any, num_rows: int) -> None:
    """Set `--reference auto`, and check `adapters`. Call it before `fit_memory`, because a copy needs memory."""
    by_rows = cfg.total_steps(num_rows) * cfg.global_batch_size / max(1, num_rows)
    share = cfg.epochs if cfg.global_batch_tokens else by_rows
    old = cfg.lora_r and find_adapters(cfg.model, cfg.cache_dir)
    is_new = bool(cfg.lora_r and not old)
    if cfg.reference == "auto":
        # One pass before training takes as long as without adapters 1.4 to 3 epochs do in addition (benchmarks/README.md).
        found = "stored" if share >= (2 if is_new else 1) else "adapters" if is_new else "copy"
        choose(cfg, "reference", found, f"training reads each row {share:.2g} times")
    elif cfg.reference == "adapters" and not is_new:
        why = f"those in --model {cfg.model} were trained before, and belong to the reference" if old else "there are none"
        raise UserError(f"--reference adapters: needs new adapters, and {why}. Use --reference stored or copy.")


class Reference:
    """Returns the log-probabilities of the texts of a micro-batch under the model as it was before training.

    Make it after the model and before `fit`, on every rank. Train and evaluate on its `rows`: with
    `--reference stored` they have one more column, which `collate` must return as a tensor.
    """

    def __init__(
        self, cfg: Any, accelerator: Accelerator, model: nn.Module, rows: Sequence["datasets.Dataset"], fingerprints: Sequence[str],
        collate: Callable[[list], Any], logps: Callable[[nn.Module, Any], Tensor],
    ):  # fmt: skip
        """`rows` and their `fingerprints` are for training and for evaluation.

        `logps(model, batch)` returns the log-probabilities of shape (items, texts of an item).
        """
        choose_reference(cfg, len(rows[0]))
        self.cfg, self.accelerator, self.rows, self._collate, self._logps = cfg, accelerator, list(rows), collate, logps
        self._layers: list[Any] = []  # with adapters
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # trained parameters as they were
        if not getattr(model, "is_quantized", False) and not is_sharded(model):
            model.to(accelerator.device)
        if cfg.reference == "adapters":
            from peft.tuners.tuners_utils import BaseTunerLayer

            self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        elif cfg.reference == "copy":
            self._kept = [(p, local(p).detach().clone()) for p in model.parameters() if p.requires_grad]
        else:
            self.rows = self._store(model, fingerprints)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return what `logps(model, batch)` returned before training. Call it before the forward pass of the model itself."""
        if COLUMN in batch:
            return batch[COLUMN]
        module = model.module if hasattr(model, "module") else model  # without DDP, which expects a backward pass
        was_training = module.training
        module.eval()
        self._switch(module, off=True)
        try:
            with torch.no_grad():
                return self._logps(module, batch)
        finally:
            self._switch(module, off=False)
            module.train(was_training)

    def _switch(self, model: nn.Module, off: bool) -> None:
        """Switch what was trained off or on: adapters, or all trained parameters, which are exchanged with their copies.

        Parameters stay at their addresses, which FSDP and CUDA graphs know. peft's own switch changes `requires_grad` too.
        """
        for layer in self._layers:
            layer._disable_adapters = off
        for p, kept in self._kept:
            now = local(p.detach()).clone()
            local(p.detach()).copy_(kept)
            kept.copy_(now)
        if self._kept:
            reshard(model)  # what a pass has left gathered

    def _store(self, model: nn.Module, fingerprints: Sequence[str]) -> list["datasets.Dataset"]:
        """Return the rows with a column of values. All ranks compute those that the main rank has not in its cache."""
        cfg, folder = self.cfg, Path(self.cfg.cache_dir).expanduser() / "reference"
        settings = model.config.to_json_string(use_diff=False)  # the same weights may be used in another way
        computed = [self.accelerator.mixed_precision, cfg.dtype, cfg.quantize, cfg.attn_implementation]
        key = [_digest(model), settings, torch.__version__, *computed]
        files = [folder / f"{mixed(0, json.dumps([*key, one])):016x}.npy" for one in fingerprints]
        with together("read --cache_dir"):
            folder.mkdir(parents=True, exist_ok=True)
            own = [hashlib.blake2b(file.read_bytes()).hexdigest() if file.exists() else "" for file in files]
        stored, speed, made = gather_everywhere(own), None, []
        for rows, file, known, what in zip(self.rows, files, zip(*stored), ("training", "evaluation")):
            if len(set(known)) > 1 or not known[0]:  # nodes have different values, or none
                values = broadcast_object(_read(file) if self.accelerator.is_main_process else None)
                if values is None:
                    if speed is None:
                        train = TrainBatches(self.rows[0], self._collate)
                        scores = SimpleNamespace(terms=lambda model, batch, team: {"loss": self._logps(model, batch).sum(-1)})
                        speed = Speed(self.accelerator, cfg, Terms(model, scores), train)
                        speed.remove_padding()
                    values = self._compute(model, rows, file, what)
                with together("store the log-probabilities of the reference"):
                    if not np.isfinite(values).all():
                        row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
                        reason = f"the model computes no finite value for item {row + 1:,} of the {what} data"
                        raise UserError(f"--reference stored: {reason}.")
                    if self.accelerator.is_local_main_process:
                        _write(file, values)
            made.append(_with_column(rows, np.load(file, mmap_mode="r")))
        if speed and speed.padding_free:  # `fit` decides again, with the loss
            speed.padding_free.remove()
        forget_peak(self.accelerator.device)
        return made

    def _compute(self, model: nn.Module, rows: "datasets.Dataset", file: Path, what: str) -> np.ndarray:
        """Return the values of all rows. Those that a killed process has left are read."""
        drafts, parts, began = [], [], time.monotonic()
        for first in range(0, len(rows), PART):
            some = rows.select(range(first, min(first + PART, len(rows))))
            drafts.append(file.with_name(f"{file.stem}.{first}.part.npy"))
            part = broadcast_object(_read(drafts[-1]) if self.accelerator.is_main_process else None)
            if part is None:
                batches = EvalBatches(some, self._collate, self.cfg.eval_batch_size, self.accelerator, self.cfg)
                found: list[np.ndarray] = []  # on the main rank
                with self.accelerator.autocast():  # which Accelerate adds to the model only later
                    measure = lambda model, batch: {"logps": self._logps(model, batch)}
                    store = lambda table, found=found: found.append(table["logps"]) or {}
                    measure_all(self.accelerator, model, batches, measure, store)
                part = broadcast_object(found[0] if found else None)
                if self.accelerator.is_main_process:
                    with contextlib.suppress(OSError):  # then there is nothing to read after a kill
                        _write(drafts[-1], part)
            parts.append(part)
            done, seconds = first + len(some), time.monotonic() - began
            print_on_main(f"reference: log-probabilities of {done:,} of {len(rows):,} {what} rows in {seconds:.1f} s")
        for draft in drafts if self.accelerator.is_main_process else ():
            draft.unlink(missing_ok=True)
        return np.concatenate(parts)


def _digest(model: nn.Module) -> str:
    """Return a digest of all weights. For a sharded model this is a collective."""
    sharded = is_sharded(model)
    held = [(name, p) for name, p in model.named_parameters() if local(p).numel() and (not sharded or is_first_copy(p))]
    own = {name: int(bits_of(p).sum()) for name, p in held}
    shares = gather_everywhere(own) if sharded else [own]
    sums = {name: sum(share.get(name, 0) for share in shares) for name, _ in model.named_parameters()}
    return hashlib.blake2b(json.dumps(sums).encode(), digest_size=16).hexdigest()


def _read(file: Path) -> np.ndarray | None:
    """Return the values of a file, or None if there are none."""
    with contextlib.suppress(OSError, ValueError):
        return np.load(file)
    return None


def _write(file: Path, values: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, values)
    replace_file(file, content.getvalue(), has_rivals=True)


def _with_column(rows: "datasets.Dataset", values: np.ndarray) -> "datasets.Dataset":
    """Return the rows with their values. Both stay memory-mapped."""
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    made = rows.add_column(COLUMN, column, new_fingerprint=f"{rows._fingerprint}-{COLUMN}")
    return with_row_numbers(made, row_numbers(rows))
