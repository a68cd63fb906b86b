"""Raw text for masked language models: cut into blocks of tokens, once or as it is read, with other words hidden each time."""

import codecs
import glob
import hashlib
import inspect
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources import data, hub, models, tokenisation

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import datasets

SPECIAL = -1  # the word number of tokens that belong to no word
Block = dict[str, list[int]]  # `input_ids`, and `words`: the number of the word that each token is of, from 0


class Tokens:
    """Texts as tokens of which one knows where a word begins; blocks of them with the model's special tokens around."""

    def __init__(self, tokenizer: Any, name: str, max_length: int):
        """`name` is the model's, for the words to the user."""
        if tokenizer.mask_token_id is None:
            raise UserError(f"--model {name}: its tokenizer has no mask token, so that it is no masked language model.")
        if not tokenizer.is_fast:
            raise UserError(f"--model {name}: its tokenizer does not say which tokens are of one word (it has no fast version).")
        probe = tokenizer("a", return_special_tokens_mask=True)
        first, last = (tokens.index(0) for tokens in (probe["special_tokens_mask"], probe["special_tokens_mask"][::-1]))
        ids = probe["input_ids"]
        self.before, self.after = ids[:first], ids[len(ids) - last :]
        self.tokenizer, self.max_length, self.room = tokenizer, max_length, max_length - first - last
        if self.room < 1:
            raise UserError(f"--max_length {max_length}: the model puts {first + last} tokens of its own around a text.")
        self.identity = [models.identity(tokenizer), max_length]

    def of(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all texts, one after the other, and whether each begins a word.

        What looks like a special token ([MASK], </s>) is text here like any other.
        """
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        ids = [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
        begins = [np.diff(np.array(encoded.word_ids(i), dtype=np.int32), prepend=-1) != 0 for i in range(len(texts))]
        return np.concatenate(ids), np.concatenate(begins)

    def block(self, ids: np.ndarray, begins: np.ndarray) -> Block:
        """Of at most `room` tokens. A word that the block's edge cuts is a word in each of the two blocks."""
        words = np.cumsum(begins) - begins[:1]
        around = [[SPECIAL] * len(self.before), [SPECIAL] * len(self.after)]
        return {"input_ids": [*self.before, *ids.tolist(), *self.after], "words": [*around[0], *words.tolist(), *around[1]]}


# ------------------------------------------------------------------------------------- all of it, once


def load_texts(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """(training rows, evaluation rows) like `data.load_rows`, also of several .txt files.

    Lines of a .txt follow each other, so that of one without `--eval_file` not some lines but the last tenth (at most
    2,000 lines) is set aside.
    """
    if cfg.eval_file or not cfg.train_file or _is_table(cfg.train_file):
        return data.load_rows(cfg, load_file)
    hub.prepare_hub()
    rows = load_file("--train_file", cfg.train_file)
    if len(rows) < 2:
        raise UserError(f"--train_file {cfg.train_file}: one line is too little to train and to evaluate on.")
    first = len(rows) - max(1, min(2000, len(rows) // 10))
    places, aside = range(first), range(first, len(rows))
    return rows.select(places[: cfg.max_train_items or first]), rows.select(aside[: cfg.max_eval_items or len(aside)])


def load_file(option: str, place: str) -> "datasets.Dataset":
    """The rows of a file; the lines of a .txt, of a folder or of a pattern of them, in the column `text`."""
    import datasets

    if _is_table(place):
        if Path(place).suffix != ".parquet" and Path(place).is_file():
            _require_utf8(Path(place))
        return data.load_file(option, place)
    files = text_files(option, place)
    for file in files:
        _require_utf8(file)
    return datasets.load_dataset("text", data_files=[str(file.resolve()) for file in files], split="train")


def text_files(option: str, place: str) -> list[Path]:
    """The .txt that `place` names, those in a folder and below it, or those of a pattern, by name; empty ones are left out."""
    if Path(place).is_dir():
        files = sorted(Path(place).rglob("*.txt"))
    else:
        files = [Path(place)] if Path(place).is_file() else sorted(map(Path, glob.glob(place, recursive=True)))
    if not files:
        raise UserError(f"{option} {place}: there is no such file, nor a .txt in or below it (looked in {Path.cwd()}).")
    if others := [file for file in files if file.suffix != ".txt"]:
        raise UserError(f"{option} {place}: {others[0].name} is no .txt.")
    with_text = [file for file in files if file.stat().st_size]
    if not with_text:
        raise UserError(f"{option} {place}: {'the file is' if len(files) == 1 else 'all files are'} empty.")
    return with_text


def _require_utf8(path: Path) -> None:
    """Of a whole file; a small part of the time that tokenising it takes."""
    rest, done, is_last = b"", 0, False
    with path.open("rb") as file:
        while not is_last:
            piece = file.read(1 << 20)
            is_last = not piece
            _, used = _decoded(rest + piece, path, done, is_last)
            rest, done = (rest + piece)[used:], done + used  # a character may go on in the next piece


def _decoded(raw: bytes, path: Path, first: int, is_last: bool = True) -> tuple[str, int]:
    """(text, bytes that it took) of what begins at byte `first` of the file."""
    try:
        return codecs.utf_8_decode(raw, "strict", is_last)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8: {error.reason} at byte {first + error.start} (0x{raw[error.start]:02x}). "
            f"Convert it, for example: iconv -f LATIN1 -t UTF-8 {path.name} > new.txt"
        ) from error


def _is_table(place: str) -> bool:
    """A file with columns, by its ending."""
    return Path(place).suffix in data.FILE_FORMATS.keys() - {".txt"}


def chunks(rows: "datasets.Dataset", column: str, tokens: Tokens, cfg: RecipeConfig) -> "datasets.Dataset":
    """The rows' texts, one after the other without a mark between them, as `Block`s; once, kept on disk.

    Every token is in exactly one block, and blocks are full. `datasets` hands over 1,000 rows at a time: the rest of each
    thousand is a shorter block, which costs half a block of padding on average, and the context at that place.
    """

    def cut(rows):
        texts = [text for text in data.texts(rows, column) if text.strip()]
        ids, begins = tokens.of(texts or [""])
        places = [slice(first, first + tokens.room) for first in range(0, len(ids), tokens.room)]
        blocks = [tokens.block(ids[place], begins[place]) for place in places]
        return {name: [block[name] for block in blocks] for name in ("input_ids", "words")}

    if not any(text.strip() for some in rows.iter(1000) for text in data.texts(some, column)):
        raise UserError(f"All {len(rows):,} texts are empty (column {column!r}).")
    return tokenisation.map_once(rows, cut, depends_on=[tokens.identity, column, inspect.getsource(Tokens)], cfg=cfg)


# ------------------------------------------------------------------------------------ while it is read


class TextBlocks(Dataset):
    """Large .txt files by the block: nothing is loaded, tokenised or cached before; memory does not grow with the files.

    Item `i` is the text that begins in bytes [i * block, (i + 1) * block) of the files, one after the other. It is read and
    tokenised when it is asked for, so that order, ranks, workers and a restart are functions of the step as they are with rows.
    Both ends are moved on to the next start of a line; where there is none within a quarter of a block, to the next word, or
    else the next character. Together the items are the files, byte for byte. An item of 128 tokens costs 0.8 ms of a slow core,
    five times what it costs from a table.

    What is weaker than with `chunks`: a block has about as many bytes as fit, not exactly as many tokens. What goes beyond
    `max_length` tokens is never seen, blocks below it are padded (`about` says how much of both), and the fingerprint is of
    the files' names, sizes and 64 samples: a change elsewhere in them is not noticed, and bytes that are not UTF-8 only
    when they are read.
    """

    SAMPLES, UNSEEN = 64, 0.02  # blocks become smaller until no more than this share of the sampled tokens is beyond the end

    def __init__(self, option: str, place: str, tokens: Tokens):
        self.files, self.tokens = text_files(option, place), tokens
        sizes = [file.stat().st_size for file in self.files]
        self.ends, self.num_bytes = list(accumulate(sizes)), sum(sizes)
        self._open: dict[int, BinaryIO] = {}
        self.block_bytes = 4 * tokens.room
        samples = [self.text(i) for i in self._some()]
        words = [*(file.name for file in self.files), *map(str, sizes), *samples]
        num_tokens = len(tokens.of(samples)[0])
        if num_tokens == 0:
            raise UserError(f"{option} {place}: there is no text in {len(samples)} samples of it, only blanks.")
        per_token = sum(len(sample.encode()) for sample in samples) / num_tokens
        for fill in np.arange(1, 0.5, -0.05):
            self.block_bytes = max(4, int(per_token * tokens.room * fill))
            lengths = np.array([len(tokens.of([self.text(i)])[0]) for i in self._some()])
            unseen = np.maximum(lengths - tokens.room, 0).sum() / max(1, lengths.sum())
            if unseen <= self.UNSEEN:
                break
        words += [str(self.block_bytes), *map(str, tokens.identity)]
        self.fingerprint = hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()
        full = np.minimum(lengths, tokens.room).mean() / tokens.room
        self.about = (
            f"{self.num_bytes / 1e6:,.1f} MB in {len(self):,} blocks of about {self.block_bytes:,} bytes, read as they are "
            f"needed: about {unseen:.1%} of the tokens lie beyond --max_length {tokens.max_length} and are not seen, and "
            f"blocks are {full:.0%} full"
        )

    def __len__(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def __getitem__(self, index: int) -> Block:
        ids, begins = self.tokens.of([self.text(index)])
        return self.tokens.block(ids[: self.tokens.room], begins[: self.tokens.room])

    def text(self, index: int) -> str:
        """A file that does not end with a line's end does not run into the next one."""
        return "\n".join(self.pieces(index))

    def pieces(self, index: int) -> list[str]:
        """The item's text, for each of the files that it is of."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = self._cut(index * self.block_bytes), self._cut((index + 1) * self.block_bytes)
        found = []
        while first < last:
            number, begin, end = self._file_at(first)
            raw = self._read(number, first - begin, min(last, end) - begin)
            found.append(_decoded(raw, self.files[number], first - begin)[0])
            first += len(raw)
        return found

    def _cut(self, place: int) -> int:
        """Where the item that begins at `place` or after it really begins; at most a quarter of a block later."""
        if place >= self.num_bytes:
            return self.num_bytes
        number, begin, end = self._file_at(place)
        if place == begin:
            return place
        last = min(end, place + max(4, self.block_bytes // 4))  # 4: the longest character
        near = self._read(number, place - 1 - begin, last - begin)  # with the byte before: a line may begin at `place` itself
        if (newline := near.find(b"\n")) >= 0:
            return place + newline
        if last == end:
            return end
        if blank := re.search(rb"\s", near):
            return place + blank.start()
        return place + next((i for i, byte in enumerate(near[1:]) if byte & 0xC0 != 0x80), 0)  # 10xxxxxx: inside of a character

    def _file_at(self, place: int) -> tuple[int, int, int]:
        """(number, first byte, end) of the file that has the byte `place` of all files together."""
        number = bisect_right(self.ends, place)
        return number, self.ends[number - 1] if number else 0, self.ends[number]

    def _read(self, number: int, first: int, end: int) -> bytes:
        if number not in self._open:
            if len(self._open) >= 64:  # of thousands of files not all can be open
                self._open.clear()
            self._open[number] = self.files[number].open("rb", buffering=0)
        raw = os.pread(self._open[number].fileno(), end - first, first)  # moves no position that forked workers would share
        if len(raw) != end - first:
            raise UserError(f"{self.files[number]}: has become shorter while it is read.")
        return raw

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a worker that is not forked opens its own

    def _some(self) -> list[int]:
        """Some items, evenly spread."""
        return np.unique(np.linspace(0, len(self) - 1, self.SAMPLES).astype(int)).tolist()


def streamed(cfg: RecipeConfig, tokens: Tokens) -> tuple[Dataset, Dataset, list[str]]:
    """(training blocks, evaluation blocks, a fingerprint of each) of `--train_file`, and of `--eval_file` where there is one.

    Else the last hundredth of the blocks (at most 2,000) is set aside; of few blocks up to 100, but no more than a tenth.
    """
    if not cfg.train_file or _is_table(cfg.train_file):
        raise UserError("--streaming reads .txt files: give one, a folder or a pattern of them with --train_file.")
    blocks = TextBlocks("--train_file", cfg.train_file, tokens)
    log.info(f"--streaming: {blocks.about}")
    if cfg.eval_file:
        test, places = TextBlocks("--eval_file", cfg.eval_file, tokens), range(len(blocks))
        aside = range(len(test))
    else:
        if len(blocks) < 2:
            raise UserError(f"--train_file {cfg.train_file}: one block of text is too little to train and to evaluate on.")
        first = len(blocks) - min(2000, max(1, len(blocks) // 100, min(100, len(blocks) // 10)))
        test, places, aside = blocks, range(first), range(first, len(blocks))
    train = Subset(blocks, places[: cfg.max_train_items or len(places)])
    return train, Subset(test, aside[: cfg.max_eval_items or len(aside)]), [blocks.fingerprint, test.fingerprint]


# ---------------------------------------------------------------------------------------------- masks


class Masked(Dataset):
    """Blocks in which some words are hidden: `input_ids` with other tokens there, and `labels` with what they were.

    Each word is chosen with probability `share`, and with all of its tokens; at least one in each block that has any. Of the
    chosen words 80 % become mask tokens, 10 % random tokens, 10 % stay as they are, each word as a whole. (BERT decides
    that for each token: a word of which one half stays is half given away.) A word is what the tokenizer splits a text into
    first: mostly what stands between blanks, so that in a language without them it may be a phrase.

    With a `seed`, for evaluations, item `i` always has the same words hidden. Without one they are drawn from numpy's
    generator, which `TrainBatches` seeds by the position in the stream: other ones in each epoch, the same on any rank.
    """

    def __init__(self, blocks: Any, tokenizer: Any, share: float, seed: int | None = None):
        self.blocks, self.share, self.seed, self.mask = blocks, share, seed, tokenizer.mask_token_id
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        block = self.blocks[index]
        ids, words = np.array(block["input_ids"]), np.array(block["words"])
        # RandomState is frozen: numpy's newer generators may draw other numbers in another version.
        draw = np.random if self.seed is None else np.random.RandomState(mixed(self.seed, "masks", index) % 2**32)
        number = words.max(initial=SPECIAL) + 1
        lots = np.append(draw.random_sample(number), np.inf)  # the last is the one of SPECIAL: never drawn
        is_chosen = (lots <= max(self.share, lots.min(initial=1)))[words]
        becomes = np.append(draw.random_sample(number), 1)[words]
        labels = np.where(is_chosen, ids, -100)
        ids[is_chosen & (becomes < 0.8)] = self.mask
        at_random = is_chosen & (becomes >= 0.8) & (becomes < 0.9)
        ids[at_random] = self.ordinary[draw.randint(len(self.ordinary), size=at_random.sum())]
        return {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels.tolist()}


def padded(tokenizer: Any, accelerator: Accelerator) -> Callable[[list], Any]:
    """Collate `Masked` items; `places` are those of the hidden tokens in the batch, counted over all of its rows.

    They are found here, on the host: to look for them in `labels` on a GPU would make every micro-batch wait for it.
    """
    pad = tokenisation.padded(tokenizer, accelerator, per_token=("labels",))

    def collate(rows: list[dict[str, Any]]) -> Any:
        batch = pad(rows)
        batch["places"] = (batch["labels"] != -100).flatten().nonzero().squeeze(1)
        return batch

    return collate


def score_places_only(model: nn.Module) -> nn.Module:
    """With the argument `places` the model computes the logits of these tokens alone, as one row.

    Those of the other 85 % are thrown away otherwise, and with a vocabulary of 30,000 they take half of the time and most of
    the memory. Heads look at each token by itself, so that the encoder's output can be thinned out on its way to them; a
    model whose encoder cannot be told from its head computes all and gives these.
    """
    part, name = (model, "logits") if model.base_model is model else (model.base_model, "last_hidden_state")
    wanted: list[Tensor | None] = [None]

    def take(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted[0] = options.pop("places", None)
        return args, options

    def keep(_: nn.Module, args: Any, output: Any) -> Any:
        if wanted[0] is not None:
            output[name] = output[name].flatten(0, 1)[wanted[0]].unsqueeze(0)
        return output

    model.register_forward_pre_hook(take, with_kwargs=True)
    part.register_forward_hook(keep)
    return model


def scores_and_answers(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """(logits, right tokens) of the hidden tokens of all rows."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return model(**inputs).logits[0], batch["labels"].flatten()[batch["places"]]


def by_row(values: Tensor, batch: Any) -> Tensor:
    """Values of the hidden tokens, summed over each row of the batch."""
    whole = values.new_zeros(batch["labels"].numel())
    whole[batch["places"]] = values
    return whole.view(batch["labels"].shape).sum(-1)


@torch.no_grad()
def guesses(model: nn.Module, tokenizer: Any, blocks: Any, number: int = 3) -> str:
    """What the model takes for a hidden word, in a line for each of the first blocks; to look at."""
    lines = []
    model.eval()
    for block in (blocks[i] for i in range(min(number, len(blocks)))):
        ids, words = block["input_ids"], block["words"]
        names = [tokenizer.decode([token]).strip() for token in ids[:32]]
        whole = [i for i, word in enumerate(words[:32]) if words.count(word) == 1 and len(names[i]) > 2 and names[i].isalpha()]
        if not whole:
            continue
        place = whole[len(whole) // 2]
        hidden = torch.tensor([ids[:place] + [tokenizer.mask_token_id] + ids[place + 1 :]], device=model.device)
        best = model(input_ids=hidden).logits[0, place].float().softmax(-1).topk(3)
        before, after = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:place], ids[place + 1 : 40]))
        answers = ", ".join(
            f"{tokenizer.decode([i]).strip()} {p:.0%}" for p, i in zip(best.values.tolist(), best.indices.tolist())
        )
        lines.append(f"{before} [{names[place]}] {after}\n    {answers}")
    return "\n".join(["a hidden word, and the three best guesses:", *lines]) if lines else ""
