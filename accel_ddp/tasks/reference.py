"""The log-probabilities of a reference: the model as it was before training, with which losses of preferences compare it.

`stored` computes them once, before training, and keeps them in the cache. The others compute a forward pass more in every step:
`adapters` without the new adapters, `copy` with the weights as they were. All three give the same numbers, up to rounding.
"""

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_ddp import phases
from accel_ddp.config.choices import choose
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.phases import EVALUATE
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, print_on_main, together
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.shards import is_first_copy, is_sharded, local
from accel_ddp.records.files import replace_file
from accel_ddp.saving.state_tensors import has_adapters
from accel_ddp.seeds import mixed
from accel_ddp.sources.adapters import find_adapters
from accel_ddp.sources.data import row_numbers, with_row_numbers
from accel_ddp.speed.attach import Speed
from accel_ddp.training.divergence import bits_of
from accel_ddp.training.losses import CurrentBatch
from accel_ddp.training.padding_check import forget_peak
from accel_ddp.training.sharding import gathered, reshard
from accel_ddp.training.stream import CountingCollate, TrainBatches, count_tokens, with_sizes
from accel_ddp.training.workers import loader_options, starting_workers

if TYPE_CHECKING:
    import datasets

HELP = (
    "where the log-probabilities of the untrained model come from: stored (computed once before training, and cached), adapters (the "
    "model without its new adapters, in every step) or copy (a frozen copy of the trained weights); auto: stored, if training reads "
    "all rows"
)
COLUMN = "reference"  # of rows with stored values: a number for each text of a row
BATCH_TOKENS = 1 << 14  # of a batch whose values are stored; it depends on nothing, so values are equal on any number of ranks
PART_BATCHES = 256  # after which values are kept, in case the process is killed

Logps = Callable[[nn.Module, Any], Tensor]


def choose_reference(cfg: Any, num_rows: int) -> None:
    """Set `--reference auto`. Call it before `fit_memory`, because a copy needs memory."""
    if cfg.reference != "auto":
        return
    share = cfg.total_steps(num_rows) * cfg.global_batch_size / max(1, num_rows)
    if share >= 1:
        choose(cfg, "reference", "stored", f"training reads each row {share:.1f} times, and a row needs one pass for all of them")
    else:
        is_new = cfg.lora_r and not find_adapters(cfg.model, cfg.cache_dir)
        choose(cfg, "reference", "adapters" if is_new else "copy", f"training reads only {share:.0%} of the rows")


class Reference:
    """Returns the log-probabilities of the texts of a micro-batch under the model as it was before training.

    Make it after the model and before `fit`, on every rank. Train and evaluate on its `rows` with its `collate`: with
    `--reference stored` they have a column more.
    """

    def __init__(
        self,
        cfg: RecipeConfig,
        accelerator: Accelerator,
        model: nn.Module,
        rows: Sequence["datasets.Dataset"],
        fingerprints: Sequence[str],
        collate: Callable[[list], Any],
        logps: Logps,
    ):
        """`rows` and their `fingerprints` are for training and for evaluation.

        `logps(model, batch)` returns the log-probabilities of shape (items, texts of an item).
        """
        choose_reference(cfg, len(rows[0]))
        self.kind, self.rows, self.collate, self._logps = cfg.reference, list(rows), collate, logps
        self._layers: list[Any] = []  # with adapters
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # trained parameters as they were
        if not getattr(model, "is_quantized", False) and not is_sharded(model):
            model.to(accelerator.device)
        if self.kind == "adapters":
            self._layers = _layers_with_adapters(model, cfg)
        elif self.kind == "copy":
            self._kept = [(p, local(p).detach().clone()) for p in model.parameters() if p.requires_grad]
        else:
            self.rows = self._store(cfg, accelerator, model, fingerprints)
            wide = self.rows[0].features[COLUMN].feature.dtype == "float64"
            self.collate = _Collate(collate, torch.float64 if wide else torch.float32)

    def logps(self, model: nn.Module, batch: Any) -> Tensor:
        """Return what `logps(model, batch)` returned before training. Call it before the forward pass of the model itself."""
        if self.kind == "stored":
            return batch[COLUMN]
        module = model.module if hasattr(model, "module") else model  # without DDP, which expects a backward pass
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), self._as_before(module):
                return self._logps(module, batch)
        finally:
            module.train(was_training)

    @contextlib.contextmanager
    def _as_before(self, model: nn.Module) -> Iterator[None]:
        """Let the model compute as before training inside of the block: without adapters, or with the weights as they were."""
        for layer in self._layers:  # not by peft's context manager, which changes `requires_grad` too
            layer._disable_adapters = True
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)
            for layer in self._layers:
                layer._disable_adapters = False

    def _swap(self, model: nn.Module) -> None:
        """Exchange trained parameters and their copies. Those of a sharded model stay at their addresses, which FSDP knows."""
        sharded = bool(self._kept) and is_sharded(model)
        for i, (p, kept) in enumerate(self._kept):
            if sharded:
                now = local(p.detach()).clone()
                local(p.detach()).copy_(kept)
                kept.copy_(now)
            else:
                self._kept[i] = p, p.data
                p.data = kept
        if sharded:  # what a pass has left gathered
            reshard(model)

    # ---- stored values

    def _store(
        self, cfg: RecipeConfig, accelerator: Accelerator, model: nn.Module, fingerprints: Sequence[str]
    ) -> list["datasets.Dataset"]:
        """Return the rows with a column of values, which are computed if they are not in the cache."""
        parts = [_digest(model), accelerator.mixed_precision, cfg.dtype, cfg.quantize, cfg.attn_implementation]
        folder = Path(cfg.cache_dir).expanduser() / "reference"
        files = [folder / f"{mixed(0, json.dumps([1, *parts, one])):016x}.npy" for one in fingerprints]
        with together("read --cache_dir"):
            _make_folder(folder, cfg.cache_dir)
            stored = [hashlib.blake2b(file.read_bytes()).hexdigest() if file.exists() else "" for file in files]
        everyone = gather_everywhere(stored)
        computing = _Computing(cfg, accelerator, model, self.rows[0], self.collate, self._logps)
        made = []
        for rows, file, known, what in zip(self.rows, files, zip(*everyone), ("training", "evaluation")):
            if len(set(known)) > 1 or not known[0]:  # nodes have different values, or none
                values = broadcast_object(_read(file))
                if values is None:
                    values = computing.values(rows, file, what)
                with together("store the log-probabilities of the reference"):
                    _write(file, values)
            made.append(_with_column(rows, np.load(file, mmap_mode="r")))
        computing.close()
        return made


class _Computing:
    """Computes values in batches whose texts depend on the rows alone. Each rank computes its share of them."""

    def __init__(
        self,
        cfg: RecipeConfig,
        accelerator: Accelerator,
        model: nn.Module,
        rows: Any,
        collate: Callable[[list], Any],
        logps: Logps,
    ):
        self.cfg, self.accelerator, self.model, self.collate, self.logps = cfg, accelerator, model, collate, logps
        self.train, self.speed = TrainBatches(rows, collate), None

    def values(self, rows: "datasets.Dataset", file: Path, what: str) -> np.ndarray:
        """Return the values of all rows. Those that a killed process has left are read."""
        if self.speed is None:
            self.speed = Speed(
                self.accelerator, self.cfg, self.model, self.train, lambda model, batch: self.logps(model, batch).sum()
            )
            self.speed.remove_padding()
        batches, began, done, found = _batches_of(rows), time.monotonic(), 0, None
        drafts = [file.with_name(f"{file.stem}.{first}.part.npy") for first in range(0, len(batches), PART_BATCHES)]
        for number, draft in enumerate(drafts):
            some = batches[number * PART_BATCHES : (number + 1) * PART_BATCHES]
            part = broadcast_object(_read(draft))
            if part is None:
                part = self._part(rows, some)
                if this_rank.is_main:
                    with contextlib.suppress(OSError):  # then there is nothing to read after a kill
                        _write(draft, part)
            found = np.zeros((len(rows), part.shape[1]), part.dtype) if found is None else found
            found[np.concatenate(some)] = part
            done += len(part)
            rate = done / (time.monotonic() - began)
            print_on_main(f"reference: log-probabilities of {done:,} of {len(rows):,} {what} rows, {rate:,.0f} rows/s")
        for draft in drafts if this_rank.is_main else ():
            draft.unlink(missing_ok=True)
        return found

    @torch.no_grad()
    def _part(self, rows: "datasets.Dataset", batches: list[list[int]]) -> np.ndarray:
        """Return the values of some batches, one after the other. The ranks of a sharded model compute equally many."""
        ranks, sharded = this_rank.num_ranks, is_sharded(self.model)
        own = batches[this_rank.rank :: ranks]
        if sharded:
            own = [*own, batches[0]][: -(-len(batches) // ranks)]
        loader = DataLoader(
            rows, batch_sampler=own, collate_fn=CountingCollate(self.collate), **loader_options(self.cfg, self.accelerator)
        )
        found = []
        was_training = self.model.training
        self.model.eval()
        with contextlib.nullcontext() if sharded else together("compute the reference"), gathered(self.model):
            with starting_workers(loader):
                loaded = iter(loader)
            for indices, batch in zip(own, loaded):
                batch = with_sizes(send_to_device(batch, self.accelerator.device, non_blocking=True))
                with phases.phase(EVALUATE), CurrentBatch(batch), self.accelerator.autocast():
                    found.append(self.logps(self.model, batch).reshape(len(indices), -1))
            mine = [values.cpu().numpy() for values in found]
        self.model.train(was_training)
        shares = gather_everywhere(mine)
        return np.concatenate([shares[i % ranks][i // ranks] for i in range(len(batches))])

    def close(self) -> None:
        """Leave the model as it was. `fit` decides about its layers again, with the loss."""
        if self.speed is not None and self.speed.padding_free is not None:
            self.speed.padding_free.remove()
        forget_peak(self.accelerator.device)


class _Collate:
    """Collates rows without their stored values, and adds these as one tensor."""

    def __init__(self, collate: Callable[[list], Any], dtype: torch.dtype):
        self.collate, self.dtype = collate, dtype

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = self.collate([{name: value for name, value in row.items() if name != COLUMN} for row in rows])
        batch[COLUMN] = torch.tensor([row[COLUMN] for row in rows], dtype=self.dtype)
        return batch


def _layers_with_adapters(model: nn.Module, cfg: Any) -> list[Any]:
    """Return the layers whose adapters can be switched off. Raise UserError if the model without them is not the reference."""
    if not has_adapters(model):
        raise UserError("--reference adapters: needs adapters, which --lora_r adds. Use --reference stored or copy.")
    if getattr(model, "_adapters", None):
        raise UserError(
            f"--reference adapters: --model {cfg.model} contains adapters, which are trained further. Without them it is another "
            "model. Use --reference stored or copy."
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _digest(model: nn.Module) -> str:
    """Return a digest of all weights, which is the same for a sharded model. For a sharded model this is a collective."""
    sharded = is_sharded(model)
    own = {
        name: int(bits_of(p).sum()) for name, p in model.named_parameters()
        if local(p).numel() and (not sharded or is_first_copy(p))
    }  # fmt: skip
    shares = gather_everywhere(own) if sharded else [own]
    sums = {name: sum(share.get(name, 0) for share in shares) for name, _ in model.named_parameters()}
    return hashlib.blake2b(json.dumps(sums).encode(), digest_size=16).hexdigest()


def _batches_of(rows: "datasets.Dataset") -> list[list[int]]:
    """Return the indices of rows of similar lengths, of at most `BATCH_TOKENS` with padding, the longest first."""
    known = count_tokens(rows)
    lengths = np.full((len(rows), 1), BATCH_TOKENS // 8) if known is None else np.asarray(known).reshape(len(rows), -1)
    widest = lengths.max(1) * lengths.shape[1]
    found: list[list[int]] = []
    for index in np.argsort(-widest, kind="stable").tolist():
        if not found or (len(found[-1]) + 1) * widest[found[-1][0]] > BATCH_TOKENS:
            found.append([])
        found[-1].append(index)
    return found


def _read(file: Path) -> np.ndarray | None:
    """Return the values of a file on the main rank, and None if there are none."""
    if this_rank.is_main:
        with contextlib.suppress(OSError, ValueError):
            return np.load(file)
    return None


def _make_folder(folder: Path, cache_dir: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--cache_dir {cache_dir}: cannot be written: {error.strerror or error}. Give another folder.") from error


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
