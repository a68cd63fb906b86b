"""Raw text as blocks of tokens: tokenized once and cached, or tokenized while large files are read."""

import hashlib
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from torch import nn
from torch.utils.data import Dataset, Subset

from accel_ddp.config.choices import choose
from accel_ddp.config.train_config import TEXT_FILES, RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import data, model_kinds, models, places, tokenization
from accel_ddp.sources.many_files import PATTERN, decompress, expand, find_files, read_all
from accel_ddp.sources.table_files import ending_of, load_file, require_file, require_utf8

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)


def share_rows(
    tables: list["datasets.Dataset"], cfg: Any, model: nn.Module, tokenizer: Any, device: Any
) -> list["datasets.Dataset"]:
    """Return tokenized texts in rows of up to `--max_length` tokens, if `--packing` is on. With `auto` this depends on the model."""
    if cfg.packing == "off":
        return tables
    reason = model_kinds.why_mixed(model, tokenizer, device)
    if reason and cfg.packing == "on":
        raise UserError(f"--packing on: texts of {cfg.model} cannot share rows, because {reason}. Use --packing off.")
    if cfg.packing == "auto":
        choose(cfg, "packing", "off" if reason else "on", reason or "short texts share rows")

    def pack(rows: dict[str, list]) -> dict[str, list]:
        return tokenization.pack_documents(rows, cfg.max_length)

    make = lambda rows: tokenization.map_once(rows, pack, depends_on=cfg.max_length, cfg=cfg)
    return tables if reason else [data.for_each_dataset(rows, make) for rows in tables]


def load_texts(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows like `data.load_rows`. Many .txt files are read at once.

    Consecutive lines of a .txt belong together. Without `--eval_file`, the last tenth of its lines (at most 2,000) is therefore
    set aside, and not lines that are drawn at random.
    """
    if not are_texts("--train_file", cfg.train_file):
        return data.load_rows(cfg, endings=TEXT_FILES)
    if cfg.eval_fraction:
        reason = "lines of .txt files belong together and cannot be chosen one by one"
        instead = "Give --eval_file, or leave it out: the last tenth is used"
        raise UserError(f"--eval_fraction {cfg.eval_fraction:g}: {reason}. {instead}.")
    places.prepare_hub()
    if cfg.eval_file:
        tables = [load_lines(f"--{name}", getattr(cfg, name), cfg) for name in ("train_file", "eval_file")]
    else:
        rows = load_lines("--train_file", cfg.train_file, cfg)
        if len(rows) < 2:
            instead = "Give --eval_file"
            raise UserError(f"--train_file {cfg.train_file[0]}: has one line, and training and evaluation need two. {instead}.")
        numbers = data.dataset_numbers(rows)
        parts = (
            [np.arange(len(rows))] if numbers is None else np.split(np.arange(len(rows)), np.flatnonzero(np.diff(numbers)) + 1)
        )
        test = np.concatenate([part[-max(1, min(2000, len(part) // 10)) :] for part in parts])
        tables = [data.select(rows, positions) for positions in (np.delete(np.arange(len(rows)), test), test)]
    # Lines are drawn in runs of 100, because blocks of unrelated lines are not the text that is to be learned.
    options = ("max_train_items", "max_eval_items")
    return tuple(data.draw_sample(rows, option, cfg, 100) for rows, option in zip(tables, options))


def load_lines(option: str, arguments: Sequence[str], cfg: RecipeConfig) -> "datasets.Dataset":
    """Return the lines of .txt files in the column `text`, or the rows of tables."""
    import datasets

    def read(option: str, place: str) -> "datasets.Dataset":
        files = [decompress(option, file, cfg.cache_dir) for file in find_files(option, place, (".txt",))]
        for file in files:
            require_utf8(option, require_file(option, file))
        return datasets.load_dataset("text", data_files=[str(Path(file).resolve()) for file in files], split="train")

    if not are_texts(option, arguments):
        return data.attach(read_all(option, arguments, load_file, TEXT_FILES, cfg.cache_dir))
    return data.attach(read_all(option, arguments, read, (PATTERN,), cfg.cache_dir))


def are_texts(option: str, arguments: Sequence[str]) -> bool:
    files = expand(option, arguments, TEXT_FILES)
    return bool(files) and all(ending_of(Path(file)) == ".txt" for _, file in files)


def drop_other_values(tables: Sequence["datasets.Dataset"], cfg: Any) -> Sequence["datasets.Dataset"]:
    """Return the rows whose `--text_column` is text or empty. Other rows are handled as in `data.drop_broken`."""
    if all(str(getattr(rows.features[cfg.text_column], "dtype", "")) == "string" for rows in tables):
        return tables
    problems = [
        [f"its {cfg.text_column} is not text\t{value!r:.40}" if not isinstance(value, str | None) else "" for value in values]
        for values in (rows[cfg.text_column] for rows in tables)
    ]
    return data.drop_broken([
        data.with_row_numbers(rows.add_column("problem", texts), data.row_numbers(rows)) for rows, texts in zip(tables, problems)
    ], cfg)  # fmt: skip


SPECIAL = -1  # the word number of special tokens, which belong to no word
Block = dict[str, list[int]]  # `input_ids`, and `words`: the number of each token's word in the block, counted from 0


class BlockTokenizer:
    """Tokenizes texts, finds where words begin, and makes blocks with the model's special tokens."""

    def __init__(self, tokenizer: Any, model: str, max_length: int):
        """`model` is the value of `--model`, for error messages."""
        if tokenizer.mask_token_id is None:
            raise UserError(f"--model {model}: its tokenizer has no mask token. Use a masked language model such as BERT.")
        if not tokenizer.is_fast:
            raise UserError(f"--model {model}: its tokenizer has no fast version, which maps tokens to words. Use another one.")
        probe = tokenizer("a", return_special_tokens_mask=True)
        first, last = (tokens.index(0) for tokens in (probe["special_tokens_mask"], probe["special_tokens_mask"][::-1]))
        ids = probe["input_ids"]
        self.prefix, self.suffix = ids[:first], ids[len(ids) - last :]
        self.tokenizer, self.max_length, self.room = tokenizer, max_length, max_length - first - last
        if self.room < 1:
            reason = f"the model adds {first + last} special tokens, which leaves no room for text"
            raise UserError(f"--max_length {max_length}: {reason}. Give a higher value.")
        self.identity = [models.tokenizer_digest(tokenizer), max_length]

    def tokenize(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all texts in one array, and whether each token begins a word.

        Special tokens in a text, such as [MASK] or </s>, are treated as ordinary text.
        """
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        ids = [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
        begins = [np.diff(np.array(encoded.word_ids(i), dtype=np.int32), prepend=-1) != 0 for i in range(len(texts))]
        return np.concatenate(ids), np.concatenate(begins)

    def make_block(self, ids: np.ndarray, begins: np.ndarray) -> Block:
        """Return a block of at most `room` tokens. A word that is cut by the edge of a block counts as a word in both blocks."""
        words = np.cumsum(begins) - begins[:1]
        before, after = [SPECIAL] * len(self.prefix), [SPECIAL] * len(self.suffix)
        return {"input_ids": [*self.prefix, *ids.tolist(), *self.suffix], "words": [*before, *words.tolist(), *after]}


def cut_into_blocks(
    rows: "datasets.Dataset", column: str, block_tokenizer: BlockTokenizer, cfg: RecipeConfig
) -> "datasets.Dataset":
    """Return the texts of all rows as blocks, one after the other without a separator. The result is cached on disk.

    Every token is in exactly one block, and blocks are full. `datasets` maps 1,000 rows at a time. The last block of each
    thousand rows is shorter, which costs half a block of padding on average.
    """

    def cut(rows):
        texts = [text for text in data.read_texts(rows, column) if text.strip()]
        ids, begins = block_tokenizer.tokenize(texts or [""])
        parts = [slice(first, first + block_tokenizer.room) for first in range(0, len(ids), block_tokenizer.room)]
        blocks = [block_tokenizer.make_block(ids[part], begins[part]) for part in parts]
        return {name: [block[name] for block in blocks] for name in ("input_ids", "words")}

    if not any(text.strip() for some in rows.iter(1000) for text in data.read_texts(some, column)):
        raise UserError(f"--text_column {column}: all {len(rows):,} texts are empty.")
    make = lambda rows: tokenization.map_once(rows, cut, depends_on=[block_tokenizer.identity, column], cfg=cfg)
    return data.for_each_dataset(rows, make)


class StreamedBlocks(Dataset):
    """Blocks of large .txt files. Nothing is loaded, tokenized or cached in advance, and memory does not grow with the files.

    Item `i` is the text that begins in the bytes [i * block, (i + 1) * block) of the concatenated files. It is read and tokenized
    when it is requested, so the order, the ranks, the workers and a restart depend on the step only, as with rows. Both ends
    are moved forward to the next start of a line. If there is none within a quarter of a block, they are moved to the next word,
    or else to the next character. Together the items are the files, byte for byte. An item of 128 tokens costs 0.8 ms on a slow
    core, five times as much as from a table.

    Limits compared with `cut_into_blocks`: a block has about as many bytes as fit, and not an exact number of tokens. Tokens beyond
    `max_length` are not used, and shorter blocks are padded; `summary` has the amount of both. The fingerprint covers the names and
    sizes of the files and 64 samples, so a change elsewhere is not detected. Bytes that are not UTF-8 are detected only when
    they are read.
    """

    SAMPLES = 64
    MAX_UNUSED = 0.02  # blocks are made smaller until at most this fraction of the sampled tokens is beyond `max_length`

    def __init__(self, option: str, places: str | Sequence[str], block_tokenizer: BlockTokenizer):
        places = [places] if isinstance(places, str) else places
        self.files = [require_file(option, file) for _, file in expand(option, places, (".txt",))]
        if other := [file for file in self.files if file.suffix != ".txt"]:
            raise UserError(f"{option} {other[0]}: is not a .txt file, and --streaming reads no others. Convert it.")
        self.block_tokenizer = block_tokenizer
        sizes, room = [file.stat().st_size for file in self.files], block_tokenizer.room
        self.ends, self.num_bytes = list(accumulate(sizes)), sum(sizes)
        self._open: dict[int, BinaryIO] = {}
        self.block_bytes = 4 * room
        samples = [self.text(i) for i in self._sample_indices()]
        identity = [*(file.name for file in self.files), *map(str, sizes), *samples]
        num_tokens = len(block_tokenizer.tokenize(samples)[0])
        if num_tokens == 0:
            reason = f"{len(samples)} samples of the files contain white space only, and no text"
            raise UserError(f"{option} {' '.join(places)}: {reason}.")
        bytes_per_token = sum(len(sample.encode()) for sample in samples) / num_tokens
        for fill in np.arange(1, 0.5, -0.05):
            self.block_bytes = max(4, int(bytes_per_token * room * fill))
            lengths = np.array([len(block_tokenizer.tokenize([self.text(i)])[0]) for i in self._sample_indices()])
            unused = np.maximum(lengths - room, 0).sum() / max(1, lengths.sum())
            if unused <= self.MAX_UNUSED:
                break
        identity += [str(self.block_bytes), *map(str, block_tokenizer.identity)]
        self.fingerprint = hashlib.blake2b("\0".join(identity).encode(), digest_size=16).hexdigest()
        full = np.minimum(lengths, room).mean() / room
        self.summary = (
            f"{self.num_bytes / 1e6:,.1f} MB in {len(self):,} blocks of about {self.block_bytes:,} bytes, which are read as needed. "
            f"About {unused:.1%} of the tokens are beyond --max_length {block_tokenizer.max_length} and are not used. Blocks are "
            f"{full:.0%} full."
        )

    def __len__(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def __getitem__(self, index: int) -> Block:
        ids, begins = self.block_tokenizer.tokenize([self.text(index)])
        room = self.block_tokenizer.room
        return self.block_tokenizer.make_block(ids[:room], begins[:room])

    def text(self, index: int) -> str:
        """Return the text of an item. A line break separates the parts from different files."""
        return "\n".join(self.pieces(index))

    def pieces(self, index: int) -> list[str]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = self._boundary(index * self.block_bytes), self._boundary((index + 1) * self.block_bytes)
        found = []
        while first < last:
            number, begin, end = self._file_at(first)
            raw = self._read(number, first - begin, min(last, end) - begin)
            try:
                found.append(raw.decode())
            except UnicodeDecodeError as error:
                path, place = self.files[number], f"byte {first - begin + error.start} (0x{raw[error.start]:02x})"
                convert = f"Convert it, for example: iconv -f LATIN1 -t UTF-8 {path.name} > new.txt"
                raise UserError(f"{path}: the file is not UTF-8: {error.reason} at {place}. {convert}") from error
            first += len(raw)
        return found

    def _boundary(self, place: int) -> int:
        """Return where the first item at or after byte `place` begins; at most a quarter of a block later."""
        if place >= self.num_bytes:
            return self.num_bytes
        number, begin, end = self._file_at(place)
        if place == begin:
            return place
        last = min(end, place + max(4, self.block_bytes // 4))  # 4: the longest UTF-8 character
        near = self._read(number, place - 1 - begin, last - begin)  # includes the byte before, which may be a line break
        if (newline := near.find(b"\n")) >= 0:
            return place + newline
        if last == end:
            return end
        if blank := re.search(rb"\s", near):
            return place + blank.start()
        return place + next((i for i, byte in enumerate(near[1:]) if byte & 0xC0 != 0x80), 0)  # 10xxxxxx: inside a character

    def _file_at(self, place: int) -> tuple[int, int, int]:
        """Return (number, first byte, end) of the file that contains byte `place` of the concatenated files."""
        number = bisect_right(self.ends, place)
        return number, self.ends[number - 1] if number else 0, self.ends[number]

    def _read(self, number: int, first: int, end: int) -> bytes:
        if number not in self._open:
            if len(self._open) >= 64:  # a process may not have thousands of open files
                self._open.clear()
            self._open[number] = self.files[number].open("rb", buffering=0)
        raw = os.pread(self._open[number].fileno(), end - first, first)  # forked workers share the position, which pread ignores
        if len(raw) != end - first:
            raise UserError(f"{self.files[number]}: the file was truncated while it was read. Do not change it during a run.")
        return raw

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a spawned worker opens the files itself

    def _sample_indices(self) -> list[int]:
        return np.unique(np.linspace(0, len(self) - 1, self.SAMPLES).astype(int)).tolist()


def make_blocks(cfg: Any, tokenizer: Any, tables: Sequence["datasets.Dataset"] | None) -> list[Any]:
    """Return blocks of `input_ids` and `words` of the tables for training and evaluation, or with `--streaming` of the files."""
    block_tokenizer = BlockTokenizer(tokenizer, cfg.model, cfg.max_length)
    if tables is None:
        return stream_blocks(cfg, block_tokenizer)
    data.require_texts({"text_column": cfg.text_column}, *tables)
    return [cut_into_blocks(rows, cfg.text_column, block_tokenizer, cfg) for rows in drop_other_values(tables, cfg)]


def stream_blocks(cfg: RecipeConfig, block_tokenizer: BlockTokenizer) -> list[Dataset]:
    """Return training and evaluation blocks with their `fingerprint`, from `--train_file` and `--eval_file`.

    Without `--eval_file`, the last hundredth of the blocks (at most 2,000) is set aside. From fewer than 10,000 blocks, 100 are set
    aside, but at most a tenth.
    """
    if not are_texts("--train_file", cfg.train_file):
        raise UserError("--streaming: reads .txt files only. Give a .txt file, a folder or a pattern with --train_file.")
    if cfg.eval_fraction or data.mixture_weights(cfg):
        name = "--eval_fraction" if cfg.eval_fraction else "weights of --train_file"
        raise UserError(f"--streaming and {name}: blocks of large files are not rows. Leave one of them out.")
    blocks = StreamedBlocks("--train_file", cfg.train_file, block_tokenizer)
    log.info(f"--streaming: {blocks.summary}")
    if cfg.eval_file:
        test_blocks = StreamedBlocks("--eval_file", cfg.eval_file, block_tokenizer)
        train, test = range(len(blocks)), range(len(test_blocks))
    else:
        if len(blocks) < 2:
            reason = "the text fills one block, but training and evaluation need two"
            raise UserError(f"--train_file {cfg.train_file[0]}: {reason}. Give more text, a lower --max_length, or --eval_file.")
        num_train = len(blocks) - min(2000, max(1, len(blocks) // 100, min(100, len(blocks) // 10)))
        test_blocks, train, test = blocks, range(num_train), range(num_train, len(blocks))
    parts = []
    for option, part, its_blocks in (("max_train_items", train, blocks), ("max_eval_items", test, test_blocks)):
        drawn = data.draw_positions(len(part), option, cfg)
        parts.append(Subset(its_blocks, part if isinstance(drawn, range) else [part[i] for i in drawn]))
        parts[-1].fingerprint = its_blocks.fingerprint
    if len(parts[1]) < len(test_blocks):
        parts[1].row_numbers = np.array(parts[1].indices)
    return parts
