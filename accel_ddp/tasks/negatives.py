"""Hard negatives of embeddings: from a file, and mined with the model itself at steps that depend on the options only."""

import io
import random
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.phases import EVALUATE, METRICS
from accel_ddp.ranks.agreement import broadcast_object, gather_objects, print_on_main, together
from accel_ddp.ranks.team import Team
from accel_ddp.records.files import replace_file
from accel_ddp.saving.resume import folder_of_resume
from accel_ddp.seeds import mixed
from accel_ddp.sources.data import describe_columns, is_missing, place_of, row_numbers, with_row_numbers
from accel_ddp.sources.many_files import read_all
from accel_ddp.sources.places import warn
from accel_ddp.sources.table_files import load_file
from accel_ddp.tasks.contrastive import MORE, NOTHING
from accel_ddp.training.evaluation import EvalBatches
from accel_ddp.training.padding_check import without_tf32
from accel_ddp.training.sharding import gathered
from accel_ddp.training.stream import TrainBatches, count_tokens

if TYPE_CHECKING:
    import datasets

BLOCK = 1 << 27  # scores that are computed at once
SAME = 1e-4  # cosines that differ by less may belong to the same tokens


# ---- from a file


def add_negatives(rows: "datasets.Dataset", cfg: Any) -> "datasets.Dataset":
    """Return the training rows with a column MORE: the first `--num_negatives` texts of `--negatives_file` for their anchors.

    If the file has no column of anchors, it is a pool of texts, of which the seed and the anchor draw so many.
    """
    table = read_all("--negatives_file", [cfg.negatives_file], load_file, RecipeConfig.file_endings, cfg.cache_dir)
    names, number = table.column_names, cfg.num_negatives
    columns = [name for name in names if re.fullmatch(r"negatives|negative_?\d+", name)]
    columns = ["negative"] * ("negative" in names) + columns
    is_pool = cfg.anchor_column not in names
    if is_pool:
        columns = [name for name in (*columns, cfg.positive_column, "text") if name in names][:1]
    if not columns:
        where = {"anchor_column": cfg.anchor_column, "negative": "negative"}
        raise UserError(
            f"--negatives_file {cfg.negatives_file}: needs a column {cfg.anchor_column} with columns negative, negatives or negative_1 "
            f"..., or a column of texts (negative, {cfg.positive_column} or text). {describe_columns(table, where)}"
        )
    known: dict[str, list[str]] = {}
    for place, row in enumerate(table):
        anchor = "" if is_pool else row[cfg.anchor_column]
        texts = [text for name in columns for text in (row[name] if isinstance(row[name], list) else [row[name]])]
        wrong = [text for text in ([] if is_pool else [anchor]) + texts if is_missing(text) or not isinstance(text, str)]
        if wrong and not cfg.skip_broken:
            raise UserError(
                f"--negatives_file {place_of(table, place)} has a cell that is empty or not text ({wrong[0]!r:.40}). "
                "Correct it, or leave such rows out with --skip_broken."
            )
        if not wrong:
            known.setdefault(anchor, []).extend(texts)
    anchors = rows[cfg.anchor_column][:]
    if is_pool:
        pool = known.get("", [])
        draw = lambda text: random.Random(mixed(cfg.seed, f"negatives {text}")).sample(pool, min(number, len(pool)))
        found = [draw(text) for text in anchors]
    else:
        found = [list(dict.fromkeys(known.get(text, ())))[:number] for text in anchors]
    if lacking := sum(len(texts) < number for texts in found):
        if lacking == len(found) and not any(found):
            raise UserError(f"--negatives_file {cfg.negatives_file}: has no negatives for any anchor of the training data.")
        warn(f"--num_negatives {number}: {lacking:,} of {len(found):,} training rows have fewer negatives, and get no others.")
    return with_row_numbers(rows.add_column(MORE, found), row_numbers(rows))


# ---- mined


class RowsWithNegatives:
    """Rows with the positives of other rows as further texts. -1 in `negatives` is a text that the loss leaves out."""

    def __init__(self, rows: "datasets.Dataset", negatives: np.ndarray):
        self.rows, self.negatives, self.mixture = rows, negatives, getattr(rows, "mixture", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, places = self.rows[index], self.negatives[index]
        others = self.rows[places[places >= 0].tolist()]
        missing = int((places < 0).sum())
        ids = [*row["input_ids"], *(ids[1] for ids in others["input_ids"]), *[row["input_ids"][0][:1]] * missing]
        return {**row, "input_ids": ids, "keys": [*row["keys"], *(keys[1] for keys in others["keys"]), *[NOTHING] * missing]}


class MinedBatches(TrainBatches):
    """Training batches in which each anchor has mined negatives, which are chosen again every `--mine_every` steps.

    `mine()` returns the rows of the negatives of each row, for the current weights. It is a collective. They are stored in the run
    folder, so a resumed run reads them instead of computing them with other weights. Each part between two minings has a loader of its
    own, because workers read ahead.
    """

    def __init__(self, rows: "datasets.Dataset", collate: Callable, fingerprint: str, cfg: Any, mine: Callable[[], np.ndarray]):
        self.rows, self.mine, self.own_lengths = rows, mine, count_tokens(rows)
        # Trials before the first mining compute the longest texts.
        longest = np.broadcast_to(self.own_lengths[:, 1].argmax(), (len(rows), cfg.mine_negatives))
        super().__init__(RowsWithNegatives(rows, longest), collate, fingerprint, self._count)

    def _count(self, dataset: RowsWithNegatives) -> np.ndarray:
        lengths = np.where(dataset.negatives < 0, 1, self.own_lengths[:, 1][dataset.negatives])
        return np.concatenate([self.own_lengths, lengths], axis=1)

    def items(self, seed: int) -> Any:
        return TrainBatches(self.rows, self.collate).items(seed)  # before the first mining there are no negatives to show

    def starting_at(self, step: int, accelerator: Accelerator, cfg: Any, team: Team | None = None) -> Iterator[list[Any]]:
        team = team or Team.of(accelerator)
        while True:
            begin = step - step % cfg.mine_every if cfg.mine_every else 0
            rows = RowsWithNegatives(self.rows, self._negatives_of(begin, step, cfg, accelerator.is_main_process))
            batches = TrainBatches(rows, self.collate, lengths=self._count).starting_at(step, accelerator, cfg, team)
            # `starting_at` yields once for each local worker.
            number = (begin + cfg.mine_every - step) * len(team.workers)
            yield from islice(batches, number if cfg.mine_every else None)
            batches.close()  # ends its workers
            step = begin + cfg.mine_every

    def _negatives_of(self, begin: int, step: int, cfg: Any, is_main: bool) -> np.ndarray:
        """Return the negatives that were mined before step `begin` + 1, or mine them now. Call it on every rank."""
        name, shape = f"negatives_{begin:08d}.npy", (len(self.rows), cfg.mine_negatives)
        stored, is_kept = None, False
        with together("read mined negatives"):
            places = [Path(folder) / name for folder in (cfg.output_dir, folder_of_resume(cfg)) if folder]
            # At `begin` the weights are those that mine them. A file of that name may be of a run that was set aside.
            there = next((path for path in places if path.is_file()), None) if is_main and step > begin else None
            if is_main and not step:  # an earlier run that had no checkpoint may have left some
                for path in Path(cfg.output_dir).glob("negatives_*.npy"):
                    path.unlink()
            if there:
                stored, is_kept = np.load(there), there == places[0]
                if stored.shape != shape:
                    raise UserError(f"{there}: has negatives of the shape {stored.shape}, but the data need {shape}.")
            elif is_main and step > begin:
                raise UserError(
                    f"{places[0]} is missing: the negatives that were mined after step {begin}, which step {step + 1} needs. Copy "
                    f"the file from the run, or resume from a checkpoint of step {begin} or before."
                )
        negatives, is_kept = broadcast_object((stored, is_kept))
        if negatives is None:
            began = time.monotonic()
            negatives = self.mine()
            lacking = int((negatives < 0).any(1).sum())
            more = f"; {lacking:,} anchors have fewer (--mine_margin)" if lacking else ""
            seconds = time.monotonic() - began
            print_on_main(f"step {begin}: mined {shape[1]} negatives for each of {shape[0]:,} anchors in {seconds:.1f} s{more}")
        if not is_kept:
            with together("store mined negatives"):
                if is_main:
                    np.save(file := io.BytesIO(), negatives)
                    replace_file(Path(cfg.output_dir) / name, file.getvalue(), syncs=True)
        return negatives


@torch.no_grad()
@phases.phase(METRICS)
def mine(
    accelerator: Accelerator,
    model: nn.Module,
    batches: EvalBatches,
    embed: Callable,
    keys: np.ndarray,
    number: int,
    margin: float,
) -> np.ndarray:
    """Return the rows of the `number` hardest negatives of each anchor. All ranks embed their share of the rows, and rank 0 compares.

    It does not stop for a signal: the step that follows needs the result, and is saved after it.
    """
    was_training = model.training
    model.eval()
    parts: list[Tensor] = []
    with gathered(model):
        for done, batch in enumerate(batches):
            phases.enter(EVALUATE)
            phases.HERE.progress = done, len(batches.loader)
            parts.append(embed(model, batch)[:, :2].float().cpu())
    phases.HERE.progress = 0, 0
    phases.enter(METRICS)
    model.train(was_training)
    shares = gather_objects(torch.cat(parts)[: batches.num_own].numpy())
    found = None
    if shares:
        rows = np.empty((batches.num_items, *shares[0].shape[1:]), dtype=np.float32)
        for rank, share in enumerate(shares):
            rows[rank :: len(shares)] = share
        found = hardest(torch.from_numpy(rows), keys, number, margin, accelerator.device)
    return broadcast_object(found)


def hardest(
    rows: Tensor, keys: np.ndarray, number: int, margin: float, device: torch.device | str = "cpu", block: int = BLOCK
) -> np.ndarray:
    """Return for each anchor the rows of the `number` positives with the highest cosines, which are not its own; -1: there is none.

    `rows` are embeddings of anchors and positives, `keys` come from `text_keys`. Texts that equal the anchor or a positive of an equal
    anchor are left out, and those whose cosine is above the one of the anchor's own positive minus `margin` and
    SAME, because other texts with the same tokens have the same cosine up to rounding. Of equal cosines the first row is taken.
    """
    unit = F.normalize(rows.float(), dim=-1)
    first = np.sort(np.unique(keys[:, 1], return_index=True)[1])  # a row for each distinct positive
    column = {key: place for place, key in enumerate(keys[first, 1].tolist())}
    own: dict[int, set[int]] = {}
    for anchor, positive in keys.tolist():
        own.setdefault(anchor, {column[anchor]} if anchor in column else set()).add(column[positive])
    candidates = unit[first, 1].to(device)
    found = np.full((len(unit), number), -1, dtype=np.int32)
    step = max(1, min(1024, block // len(first)))
    for start in range(0, len(unit), step):
        phases.enter(METRICS)  # the monitor sees that it goes on
        anchors = unit[start : start + step].to(device)
        with without_tf32():
            scores = anchors[:, 0] @ candidates.T
        scores[scores > ((anchors[:, 0] * anchors[:, 1]).sum(-1) - margin - SAME)[:, None]] = -torch.inf
        distinct, which = np.unique(keys[start : start + step, 0], return_inverse=True)
        for number_of, key in enumerate(distinct.tolist()):
            at = torch.from_numpy(np.flatnonzero(which == number_of)).to(device)
            scores[at[:, None], torch.tensor(sorted(own[key]), device=device)] = -torch.inf
        lowest = scores.topk(min(number, len(first))).values[:, -1:]
        at, place = ((scores >= lowest) & (scores > -torch.inf)).nonzero(as_tuple=True)
        values, at, place = scores[at, place].cpu().numpy(), at.cpu().numpy(), place.cpu().numpy()
        order = np.lexsort((place, -values, at))
        at, place = at[order], place[order]
        rank = np.arange(len(at)) - np.searchsorted(at, at)
        found[start + at[rank < number], rank[rank < number]] = first[place[rank < number]]
    return found
