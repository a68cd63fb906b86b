"""Masked words in blocks of tokens: the masks, and predictions as text."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_ddp.engine.losses import cross_entropy
from accel_ddp.engine.rows import Rows
from accel_ddp.records.eval_tables import Table
from accel_ddp.seeds import mixed
from accel_ddp.tasks import tables
from accel_ddp.tasks.examples import literal
from accel_ddp.tasks.text_blocks import SPECIAL


class MaskedBlocks(Dataset):
    """Blocks in which some words are masked: `input_ids` with other tokens there, and `labels` with the original tokens.

    Each word is chosen with probability `mask_share`, with all of its tokens, and at least one word in each block that has any. Of
    the chosen words 80 % become mask tokens, 10 % become random tokens, and 10 % stay as they are, each word as a whole. (BERT
    decides this for each token. The part of a word that stays would then give the rest away.) A word is what the tokenizer splits a
    text into first. That is usually the text between spaces, and in a language without spaces it may be a phrase.

    With a `seed`, for evaluations, item `i` always has the same words masked. Without a seed, words are drawn from numpy's
    generator. `TrainBatches` seeds it by the position in the stream, so masks differ between epochs and are the same on any
    rank.
    """

    def __init__(self, blocks: Any, tokenizer: Any, mask_share: float, seed: int | None = None):
        self.blocks, self.mask_share, self.seed, self.mask = blocks, mask_share, seed, tokenizer.mask_token_id
        self.mixture = getattr(blocks, "mixture", None)
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        block = self.blocks[index]
        ids, words = np.array(block["input_ids"]), np.array(block["words"])
        # The numbers of RandomState are fixed. Numpy's newer generators may change in another version.
        draw = np.random if self.seed is None else np.random.RandomState(mixed(self.seed, "masks", index) % 2**32)
        num_words = words.max(initial=SPECIAL) + 1
        lots = np.append(draw.random_sample(num_words), np.inf)  # the last one is for SPECIAL, which is never chosen
        is_chosen = (lots <= max(self.mask_share, lots.min(initial=1)))[words]
        becomes = np.append(draw.random_sample(num_words), 1)[words]
        labels = np.where(is_chosen, ids, -100)
        ids[is_chosen & (becomes < 0.8)] = self.mask
        at_random = is_chosen & (becomes >= 0.8) & (becomes < 0.9)
        ids[at_random] = self.ordinary[draw.randint(len(self.ordinary), size=at_random.sum())]
        return {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels.tolist()}


def measure(scores: Tensor, rows: Rows, number: int) -> dict[str, Tensor]:
    """Return the loss, the right and all masked tokens of each row, and to show `number` predictions also its first guess.

    `scores` are the logits of masked tokens.
    """
    places, answers = rows["labelled"][: len(scores)], rows["answers"][: len(scores)]
    losses, right = cross_entropy(scores, answers, reduction="none"), (scores.argmax(-1) == answers).float()
    room = len(rows["labelled"]) - len(scores)
    sums = {name: rows.sum(rows.spread(F.pad(values, (0, room)))) for name, values in (("loss", losses), ("right", right))}
    sums["tokens"] = rows.sum((rows["labels"] != -100).long())
    return sums | (first_guesses(scores, losses, places, rows) if number else {})


def first_guesses(scores: Tensor, losses: Tensor, places: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Return for each row the position of its first masked token (-1: none), this token, the guess, its probability and the loss."""
    number = len(places)
    if not number:
        nothing = places.new_full((rows.texts,), -1)
        return dict.fromkeys(("position", "truth", "guess"), nothing) | dict.fromkeys(
            ("confidence", "guess_loss"), nothing.float()
        )
    indices = torch.arange(number, device=places.device)
    text = torch.searchsorted(rows.starts[1:].long(), places, right=True)
    first = indices.new_full((rows.texts,), number).scatter_reduce(0, text, indices, "amin")
    is_there, at = first < number, first.clamp(max=number - 1)
    return {
        "position": torch.where(is_there, rows["positions"][places[at]], -1),
        "truth": rows["answers"][at],
        "guess": scores.argmax(-1)[at],
        "confidence": tables.confidence(scores)[at],
        "guess_loss": losses[at],
    }


def make_tables(number: int, rows: dict[str, np.ndarray], blocks: MaskedBlocks, tokenizer: Any) -> dict[str, Table]:
    """Return `number` guesses of masked tokens of each group. The token is marked in its text, as the model reads it."""
    if not number:
        return {}
    items = np.flatnonzero(rows["position"] >= 0)
    names = ("position", "truth", "guess", "confidence", "guess_loss")
    place, truth, guess, certainty, losses = (rows[name][items] for name in names)
    word = lambda token: tokenizer.decode([int(token)]).strip()

    def text(i: int) -> str:
        row, at = blocks[int(items[i])]["input_ids"], place[i]
        before, after = (tokenizer.decode(part) for part in (row[max(0, at - 20) : at], row[at + 1 : at + 21]))
        return f"{before} «{word(row[at])}» {after}".strip()

    columns = {"true": lambda i: word(truth[i]), "predicted": lambda i: word(guess[i]), "confidence": certainty, "loss": losses}
    describe = lambda chosen: {"text": [text(i) for i in chosen]}
    return tables.of_predictions(number, describe, is_correct=guess == truth, certainty=certainty, columns=columns)


def example(tokenizer: Any, blocks: Any) -> str:
    """Return code that fills in a masked word at the beginning of the first block."""
    ids, words = ([*blocks[0][name][:24]] for name in ("input_ids", "words"))
    there = sorted(set(words) - {SPECIAL})
    chosen = there[len(there) // 2] if there else None
    first = words.index(chosen) if there else 0
    before, after = ids[:first], [token for token, word in zip(ids[first:], words[first:]) if word != chosen]
    texts = [tokenizer.decode(part, skip_special_tokens=True).strip() for part in (before, after)]
    row = literal(" ".join(text for text in (texts[0], tokenizer.mask_token, texts[1]) if text))
    return f'from transformers import pipeline; print(*pipeline("fill-mask", {{model}})({row}), sep="\\n")'


@torch.no_grad()
def format_guesses(model: nn.Module, tokenizer: Any, blocks: Any) -> str:
    """Return the model's three best guesses of a masked word in each of the first three blocks, to print."""
    lines = []
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
    for block in (blocks[i] for i in range(min(3, len(blocks)))):
        ids, words = block["input_ids"], block["words"]
        names = [tokenizer.decode([token]).strip() for token in ids[:32]]
        # Words of one token and three or more letters.
        simple = [i for i, word in enumerate(words[:32]) if words.count(word) == 1 and len(names[i]) > 2 and names[i].isalpha()]
        if not simple:
            continue
        position = simple[len(simple) // 2]
        masked = torch.tensor([ids[:position] + [tokenizer.mask_token_id] + ids[position + 1 :]], device=model.device)
        best = model(input_ids=masked).logits[0, position].float().softmax(-1).topk(3)
        text = f"{decode(ids[:position])} [{names[position]}] {decode(ids[position + 1 : 40])}"
        pairs = zip(best.values.tolist(), best.indices.tolist())
        lines.append(f"{text}\n    {', '.join(f'{tokenizer.decode([i]).strip()} {p:.0%}' for p, i in pairs)}")
    return "\n".join(["a masked word, and the three best guesses:", *lines]) if lines else ""
