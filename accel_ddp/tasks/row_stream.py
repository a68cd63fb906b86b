"""Rows that are read in order and tokenized during training: Hub datasets, and files that are too large to be stored as tokens."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import builtin, data, many_files, places, tokenization
from accel_ddp.sources.table_files import ending_of
from accel_ddp.tasks.chat import TOKENS, Format
from accel_ddp.text import first_line, listed
from accel_ddp.training.stream import Shuffle, TrainBatches

if TYPE_CHECKING:
    import datasets

HEAD = 1000  # rows that are tokenized at the start: they show the columns and the usual lengths
KINDS = {".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
PAUSES = 1, 4, 10  # seconds before a failed read is repeated
STATE, ERROR = "_stream", "_error"  # what a micro-batch carries besides its tensors
Encoded = tuple[list[dict[str, list[int]]], str]  # the examples of a row, and why it cannot be used or ""


class RowStream(TrainBatches):
    """The micro-batches of rows that are read in order, pass after pass, and shuffled in blocks of `--shuffle_block` rows.

    The order in a block depends on the seed and the number of the block. Every rank reads all rows and tokenizes its own, so the order
    does not depend on the number of ranks. A checkpoint contains the state of the source before the block of its step.
    """

    knows_lengths = False

    def __init__(self, source: Callable[[], Any], skipped: int, head: "datasets.Dataset", form: Format, collate: Any, cfg: Any):
        """`source` opens the rows, of which the first `skipped` are evaluated. `head` are tokenized rows from their beginning."""
        super().__init__(head, partial(collate_read, collate))
        self.num_items, self.block = cfg.steps * cfg.global_batch_size, cfg.shuffle_block
        encode = partial(encode_row, form, cfg.max_length, cfg.skip_broken)
        self.open_reader = partial(_Reader, source, skipped, self.block, encode)
        # Without a fingerprint, a resumed run must have the same options that name the data.
        self.identity = {"items": 0, "fingerprint": "", "stream": [self.block, skipped, tokenization.fingerprint(head)]}

    def __len__(self) -> int:
        return self.num_items  # of the run: how many rows the source has is not known

    def describe(self, total_steps: int, cfg: TrainConfig) -> tuple[str, list[str]]:
        return (
            f"{total_steps} steps of {cfg.global_batch_size} rows. --streaming: rows are shuffled in blocks of {self.block:,} only and "
            "tokenized during training, and a change of the data is not noticed."
        ), []

    def order(self, seed: int) -> Shuffle:
        return _BlockShuffle(self.block, seed)

    def by_index(self) -> Any:
        return self.open_reader(self.state)

    def starting_at(self, step: int, accelerator: Accelerator, cfg: TrainConfig, team: Any = None) -> Iterator[list[Any]]:
        workers = cfg.num_workers if cfg.num_workers >= 0 else int(accelerator.device.type == "cuda")
        # `datasets` would give each of several workers other rows.
        for batches in super().starting_at(step, accelerator, dataclasses.replace(cfg, num_workers=min(workers, 1)), team):
            for batch in batches:
                if ERROR in batch:
                    raise UserError(batch[ERROR])
                self.state = batch.columns.pop(STATE)
            yield batches


class _BlockShuffle(Shuffle):
    """Permutes blocks of consecutive rows. The number of a block is what the number of an epoch is for other data."""

    def items(self, position: int, number: int) -> list[int]:
        block = lambda place: place - place % self.num_items
        return [block(position + i) + row for i, row in enumerate(super().items(position, number))]


class _Reader:
    """The examples of each row, by the number of the row over all passes. Blocks are read forward from the one of `state`."""

    def __init__(self, source: Callable[[], Any], skipped: int, block: int, encode: Callable[[int, Any], Encoded], state: str):
        self.source, self.skipped, self.block, self.encode = source, skipped, block, encode
        known = json.loads(state or "{}")  # of blocks of another size (--allow_config_change) it is of no use
        self.state = known if known.get("size") == block else {"size": block, "block": 0, "row": skipped, "source": None}
        self.blocks: dict[int, tuple[str, list[tuple[int, Any]]]] = {}  # the state before each, and its rows with their numbers
        self.rows: Iterator[Any] | None = None

    def __getitem__(self, index: int) -> tuple[Encoded, str]:
        block, place = divmod(index, self.block)
        try:
            while self.state["block"] <= block:
                self._read_patiently()
        except Exception as error:  # many types of datasets, pyarrow and fsspec
            return ([], f"--streaming: cannot read the row after row {self.state['row']:,}: {first_line(error)}"), ""
        self.blocks = {number: rows for number, rows in self.blocks.items() if number >= block}
        before, rows = self.blocks[block]
        return self.encode(*rows[place]), before

    def _read_patiently(self) -> None:
        """Read the next block, and again from its beginning if a read fails, which happens over a network."""
        before = json.dumps(self.state)
        for pause in (*PAUSES, 0):
            try:
                return self._read_block()
            except OSError:
                if not pause:
                    raise
                self.rows, self.state = None, json.loads(before)
                time.sleep(pause)

    def _read_block(self) -> None:
        before, found = json.dumps(self.state), []
        while len(found) < self.block:
            if self.rows is None:  # in the process that reads, and at the beginning of each pass
                self.opened, known = self.source(), self.state["source"]
                if known:
                    self.opened.load_state_dict(known)
                self.rows = iter(self.opened) if known else islice(self.opened, self.state["row"], None)
            if (row := next(self.rows, None)) is not None:
                found.append((self.state["row"], row))
                self.state["row"] += 1
            elif self.state["row"] == self.skipped:
                raise UserError(f"the data have only the {self.skipped:,} rows that are evaluated.")
            else:
                self.rows, self.state = None, {**self.state, "row": self.skipped, "source": None}
        known = self.opened.state_dict() if hasattr(self.opened, "state_dict") else None
        self.blocks[self.state["block"]] = before, found
        self.state |= {"block": self.state["block"] + 1, "source": known}


def encode_row(form: Format, width: int, skips: bool, number: int, row: dict[str, Any]) -> Encoded:
    """Return the examples of a row with at most `width` tokens, one that teaches nothing if it is skipped, or the reason to stop."""
    made = form.encode({name: [value] for name, value in {**dict.fromkeys(form.columns), **row}.items()})
    problem = next(filter(None, made["problem"]), "").replace("\t", ": ")
    if not problem and form.kind != "texts" and max(made["first"]) >= width:
        problem = f"its prompt fills --max_length {width} and leaves no room for its answer"
    if not problem:
        return [{name: made[name][i][:width] for name in TOKENS} for i in range(len(made["problem"]))], ""
    problem = f"--streaming: row {number + 1:,} cannot be used: {problem}."
    if not skips:
        return [], f"{problem} Correct it, or use --skip_broken to train without such rows."
    print(f"{problem} --skip_broken: nothing is learned from it.", file=sys.stderr, flush=True)
    return [{"input_ids": [form.tokenizer.pad_token_id or 0], "attention_mask": [1], "labels": [-100]}], ""


def collate_read(collate: Callable[[list], Any], rows: list) -> Any:
    """Collate what `_Reader` returns, or rows of the head."""
    if isinstance(rows[0], dict):
        return collate(rows)
    if problem := next((problem for (_, problem), _ in rows if problem), ""):
        return {ERROR: problem}
    made = collate([example for (examples, _), _ in rows for example in examples])
    made[STATE] = rows[-1][1]
    return made


def open_rows(cfg: Any) -> tuple[list["datasets.Dataset"], Callable[[], Any], int]:
    """Return the first training and all evaluation rows, a function that opens the rows, and how many of the first are evaluated."""
    from datasets import Dataset

    files = [file for _, file in many_files.expand("--train_file", cfg.train_file, (" ".join(KINDS),))]
    source = partial(_open, files, cfg.dataset, cfg.train_split)
    skipped = 0 if cfg.eval_file or cfg.eval_split else cfg.max_eval_items
    opened = source()
    try:
        first = list(islice(opened, skipped + HEAD))
    except Exception as error:  # many types of datasets, pyarrow and fsspec
        raise UserError(f"--streaming: the first rows cannot be read: {first_line(error)[:300]}") from error
    if len(first) <= skipped:
        reason = f"the data have {len(first):,} rows, and none is left to be trained"
        raise UserError(f"--streaming --max_eval_items {skipped}: {reason}.")
    if cfg.eval_file:
        test = many_files.read_all("--eval_file", cfg.eval_file, data.load_file, cfg.file_endings, cfg.cache_dir)
        test = data.draw_sample(data.attach(test), "max_eval_items", cfg)
    elif cfg.eval_split:
        test = Dataset.from_list(list(islice(_open([], cfg.dataset, cfg.eval_split), cfg.max_eval_items or None)))
    else:
        test = Dataset.from_list(first[:skipped])
    head = data.with_row_numbers(Dataset.from_list(first[skipped:]), np.arange(skipped, len(first)))
    return [head, test], source, skipped


def _open(files: list[str], name: str, split: str) -> "datasets.IterableDataset":
    from datasets import load_dataset

    places.prepare_hub()
    kinds = {KINDS.get(ending_of(Path(file)), "") for file in files}
    if "" in kinds or len(kinds) > 1:
        reason = f"reads files of one kind: {', '.join(KINDS)}, also .gz or .zst"
        raise UserError(f"--streaming --train_file {listed(files, 3)}: {reason}.")
    if not files and name.startswith(builtin.PREFIX):
        raise UserError(f"--streaming --dataset {name}: is a small built-in dataset. Leave --streaming out.")
    try:
        paths = [str(Path(file).resolve()) for file in files] or None
        return load_dataset(*(kinds or name.split(":", 1)), data_files=paths, split="train" if files else split, streaming=True)
    except Exception as error:  # many types of datasets and fsspec
        given = f"--train_file {listed(files, 3)}" if files else f"--dataset {name} with the split {split}"
        raise UserError(f"--streaming: {given} cannot be read: {first_line(error)}") from error
