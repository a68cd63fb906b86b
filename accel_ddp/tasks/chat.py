"""Rows for causal language models: chats, instructions and plain texts as tokens, with labels for the answers."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accel_ddp import phases
from accel_ddp.errors import UserError
from accel_ddp.sources.places import warn
from accel_ddp.sources.tokenization import SOURCE
from accel_ddp.tasks.chat_rows import (
    UNSUPPORTED_COLUMNS,
    USUAL_COLUMNS,
    UnusableRow,
    check_message,
    check_text,
    choose_columns,
    without_none,
)
from accel_ddp.tasks.chat_template import Rendered, tokenize
from accel_ddp.tasks.examples import shorten

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)


class Format:
    """How the rows of a table become tokens: `kind` is "chats", "instructions" or "texts", read from `columns`."""

    def __init__(self, rows: "datasets.Dataset", tokenizer: Any, cfg: Any):
        self.tokenizer, self.max_length, self.train_on_prompts = tokenizer, cfg.max_length, cfg.train_on_prompts
        given = {option: getattr(cfg, option) for option in USUAL_COLUMNS}
        self.kind, self.columns = choose_columns(rows, given)
        ignored = [f"--{option} {column}" for option, column in given.items() if column and column not in self.columns]
        if ignored:
            raise UserError(
                f"{' '.join(ignored)}: would be ignored, because the rows are read as {self.kind} ({', '.join(self.columns)}). "
                "Give --messages_column alone, --prompt_column with --answer_column, or --text_column alone."
            )
        if self.kind == "chats" and not tokenizer.chat_template:
            raise UserError(
                f"--model {cfg.model}: its tokenizer has no chat template, which chats need. Use a model that was tuned for "
                "chats, or set tokenizer.chat_template and save the tokenizer in a folder."
            )
        others = [column for column in rows.column_names if column not in self.columns]
        if others:
            log.info(f"rows are {self.kind} of {', '.join(self.columns)}. These columns are not used: {', '.join(others)}.")
        uses_template = self.kind != "texts" and tokenizer.chat_template
        self.first_ids = [] if uses_template else self._find_first_ids(cfg.model)

    def _find_first_ids(self, name: str) -> list[int]:
        """Return the tokens that the tokenizer puts before every text, for example a bos token. Warn about those behind it."""
        whole, bare = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        if last := whole[start + len(bare) :]:
            warn(
                f"--model {name}: its tokenizer puts {self.tokenizer.decode(last)} behind every text. Prompts are trained without "
                "it, so remove it from the end of a prompt before you generate."
            )
        return whole[:start]

    def require_columns(self, test: "datasets.Dataset") -> None:
        """Raise UserError if the evaluation rows lack a column from which the training rows are read."""
        if missing := [column for column in self.columns if column not in test.column_names]:
            raise UserError(
                f"The evaluation data lack the column {missing[0]!r} of the training data. They have: {', '.join(test.column_names)}."
            )

    @property
    def identity(self) -> list[Any]:
        """What the encoded rows depend on besides the vocabulary, for the cache key of tokenized data."""
        return [self.kind, self.columns, self.first_ids, self.max_length, self.train_on_prompts, self.tokenizer.chat_template]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """Return `input_ids`, `attention_mask` and `labels`, which are -100 for tokens that are not learned.

        The ids of a chat are what `apply_chat_template` returns for the whole chat. `cut` is 0 for a complete row, 1 if a part of
        what it teaches is truncated, and 2 if nothing of it is left; see `drop_truncated`. `problem` is why a row cannot be
        used, or "".
        """
        done: dict[str, list] = {name: [] for name in ("input_ids", "attention_mask", "labels", "cut", "problem", SOURCE)}
        for number, row in enumerate(self._tokenize([self._render(rows, i) for i in range(len(rows[self.columns[0]]))])):
            ids, labels, problem = row
            # A plain text becomes as many rows as it needs. Other rows are truncated.
            starts = range(0, max(len(ids), 1), self.max_length) if self.kind == "texts" else (0,)
            for start in starts:
                part = slice(start, start + self.max_length)
                learns = any(label != -100 for label in labels[part][1:])
                if start and not learns:
                    continue  # the last token alone: no token before it predicts it
                loses = self.kind != "texts" and any(label != -100 for label in labels[self.max_length :])
                done[SOURCE].append(number)
                done["input_ids"].append(ids[part])
                done["attention_mask"].append([1] * len(ids[part]))
                done["labels"].append(labels[part])
                done["cut"].append(0 if not loses else 1 if learns else 2)
                done["problem"].append(problem or ("" if learns or loses else "it contains nothing to learn"))
        return done

    def select_samples(self, rows: "datasets.Dataset", number: int, max_tokens: float) -> list["Sample"]:
        """Return the last answers of the first rows with at most `max_tokens` before it, and the tokens before them."""
        found: list[Sample] = []
        for _, rendered in self._usable(rows[: max(100, 2 * number)]):
            if len(found) == number:
                break
            if self.kind == "texts":
                words = rendered.text.removesuffix(self.tokenizer.eos_token or "").split(" ")
                prompt, answer = " ".join(words[:8]), " ".join(words[8:40])
            else:
                prompt, end = rendered.answers[-1]
                answer = end[len(prompt) :]
            ids = self._prompt_ids(prompt) if prompt else []
            if ids and len(ids) <= max_tokens:
                found.append(Sample(prompt, answer, ids))
        return found

    def first_prompt(self, rows: "datasets.Dataset") -> str | list[dict[str, Any]]:
        """Return what the pipeline "text-generation" takes, from the first usable row: the chat before an answer, or a text."""
        some = rows[:100]
        for i, rendered in self._usable(some):
            if self.kind == "texts":
                return " ".join(rendered.text.removesuffix(self.tokenizer.eos_token or "").split(" ")[:8])
            if not self.tokenizer.chat_template:
                return rendered.answers[0][0]
            if self.kind == "instructions":
                asked = [some[column][i] for column in self.columns[:-1]]
                return [{"role": "user", "content": shorten("\n\n".join(text for text in asked if text))}]
            messages = [check_message(message) for message in some[self.columns[0]][i]]
            first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            return [{**message, "content": shorten(message["content"])} for message in messages[:first]]
        return "Hi"

    def _usable(self, rows: dict[str, list]) -> Iterator[tuple[int, Rendered]]:
        """Yield the rows that can be used, with their places."""
        rendered = ((i, self._render(rows, i)) for i in range(len(rows[self.columns[0]])))
        return ((i, row) for i, row in rendered if not row.problem)

    def _render(self, rows: dict[str, list], i: int) -> Rendered:
        """Return row `i` as one text, or the reason why it cannot be used."""
        try:
            for column in UNSUPPORTED_COLUMNS:
                is_ignored = self.kind != "texts" and column in rows and column not in self.columns
                if is_ignored and rows[column][i] not in (None, "", [], {}, "[]", "{}"):
                    raise UnusableRow(
                        f"its column {column} has content, which {self.kind} cannot include yet. Remove the column to train without it"
                    )
            return self._format(tuple(rows[column][i] for column in self.columns))
        except UnusableRow as error:
            return Rendered("", [], str(error))

    def _format(self, row: tuple) -> Rendered:
        end = self.tokenizer.eos_token or ""
        if self.kind == "texts":
            return Rendered(check_text(row[0], self.columns[0]) + end, [])
        if self.kind == "chats":
            if not isinstance(row[0], list):
                raise UnusableRow(f"the column {self.columns[0]} is not a list of messages")
            return self._apply_template(row[0])
        may_be_empty = self.columns[1:-1]  # the column `input` of Alpaca
        *asked, answer = (check_text(value, column, column in may_be_empty) for value, column in zip(row, self.columns))
        prompt = "\n\n".join(text for text in asked if text)
        if self.tokenizer.chat_template:
            return self._apply_template([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
        return Rendered(f"{prompt}\n{answer}{end}", [(prompt + "\n", f"{prompt}\n{answer}{end}")])

    def _apply_template(self, given: list[Any]) -> Rendered:
        """Return the whole chat as text. An answer reaches from the end of the generation prompt through the end-of-turn token."""
        messages = [check_message(message) for message in given]
        text = self._fill_template(messages) if messages else ""
        if any(isinstance(message.get("content") or message.get("value"), list) for message in given):
            try:
                is_same = self._fill_template([without_none(message) for message in given]) == text
            except UnusableRow:
                is_same = False
            if not is_same:
                raise UnusableRow("a message has its content in parts, which the chat template does not join. Write one text")
        answers = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not message["content"].strip():
                raise UnusableRow("an answer is empty")
            if i == 0:
                raise UnusableRow("it begins with an answer")
            before = self._fill_template(messages[:i], add_generation_prompt=True)
            until = text if i == len(messages) - 1 else self._fill_template(messages[: i + 1])
            if not (text.startswith(until) and until.startswith(before)):
                raise UnusableRow("the chat template changes earlier turns when later turns follow, so answers are not marked")
            answers.append((before, until))
        if not answers:
            raise UnusableRow("no message has the role assistant" if messages else "it has no messages")
        return Rendered(text, answers)

    def _fill_template(self, messages: list[dict[str, Any]], **options: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is a program and can fail in many ways
            raise UnusableRow(f"the chat template rejects it: {str(error) or type(error).__name__}") from error

    def _tokenize(self, rows: list[Rendered]) -> list[tuple[list[int], list[int], str]]:
        """Return token ids, labels and the problem of each row, with the tokens that the tokenizer puts before every text."""
        done = []
        for ids, labels, problem in tokenize(rows, self.tokenizer, learn_all=self.train_on_prompts or self.kind == "texts"):
            first = [] if problem or ids[: len(self.first_ids)] == self.first_ids else self.first_ids
            done.append(([*first, *ids], [-100] * len(first) + labels, problem))
        return done

    def _prompt_ids(self, text: str) -> list[int]:
        """Return the tokens that the model is given for this text in use, without tokens that follow a text."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if ids[: len(self.first_ids)] == self.first_ids else [*self.first_ids, *ids]


class Sample(NamedTuple):
    """An answer, and the text and the tokens before it."""

    prompt: str
    answer: str
    ids: list[int]


def drop_truncated(tables: list["datasets.Dataset"], max_length: int) -> list["datasets.Dataset"]:
    """Return the rows in which a part of the answer is left, without the column `cut`. Warn about truncated rows."""
    kept = []
    for rows, name in zip(tables, ("training", "evaluation")):
        cut = rows.with_format("numpy")["cut"][:]
        some, none = int((cut == 1).sum()), int((cut == 2).sum())
        if none == len(rows):
            raise UserError(
                f"--max_length {max_length}: no answer of the {name} data begins within this length. Give a higher value."
            )
        effects = [f"{some:,} lose the end of their answer"] if some else []
        effects += [f"{none:,} have no answer left and are dropped"] if none else []
        if effects:
            warn(f"--max_length {max_length}: {some + none:,} of {len(rows):,} {name} rows are longer: {', and '.join(effects)}.")
        kept.append(rows.select((cut < 2).nonzero()[0]).remove_columns("cut"))
    return kept


@torch.no_grad()
def generate(model: nn.Module, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    """Return a greedy continuation of each prompt, given as tokens. It uses no collectives unless the model is sharded."""
    was_training = model.training
    model.eval()
    answers = []
    for prompt in prompts:
        phases.HERE.beat()  # each answer is progress, so many of them do not look like a hang
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=False, pad_token_id=tokenizer.pad_token_id, use_cache=True,
        )  # fmt: skip
        answers.append(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True))
    model.train(was_training)
    return answers
