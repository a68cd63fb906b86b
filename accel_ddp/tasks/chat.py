"""Rows for causal language models: chats, instructions and plain texts as tokens, with labels for the answers."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accel_ddp.errors import UserError
from accel_ddp.sources.places import warn
from accel_ddp.sources.tokenization import SOURCE
from accel_ddp.tasks.chat_rows import OPTIONAL_COLUMNS, USUAL_COLUMNS, Chat, Pair, UnusableRow, choose_columns, read_row
from accel_ddp.tasks.chat_template import Rendered, tokenize
from accel_ddp.tasks.examples import shorten

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)


class Format:
    """How the rows of a table become tokens: `kind` is "chats", "instructions" or "texts", read from `columns`."""

    def __init__(self, rows: "datasets.Dataset", tokenizer: Any, cfg: Any):
        self.tokenizer, self.max_length, self.train_on_prompts = tokenizer, cfg.max_length, cfg.train_on_prompts
        self.row_format = cfg.row_format
        # Runs before this option had a newline there.
        self.separator = cfg.separator.replace(r"\n", "\n").replace(r"\t", "\t") if self.row_format > 1 else "\n"
        given = {option: getattr(cfg, option) for option in USUAL_COLUMNS}
        self.kind, self.columns = choose_columns(rows, given, self.row_format)
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
        used = self.columns if self.kind == "texts" else (*self.columns, *OPTIONAL_COLUMNS)
        others = [column for column in rows.column_names if column not in used]
        if others:
            log.info(f"rows are {self.kind} of {', '.join(self.columns)}. These columns are not used: {', '.join(others)}.")
        uses_template = self.kind != "texts" and tokenizer.chat_template
        if cfg.separator and (uses_template or self.kind != "instructions"):
            reason = "the chat template separates prompts and answers" if uses_template else f"the rows are {self.kind}"
            raise UserError(f"--separator {cfg.separator!r}: would be ignored, because {reason}. Leave it out.")
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
        own = [self.kind, self.columns, self.first_ids, self.max_length, self.train_on_prompts, self.row_format, self.separator]
        return [*own, self.tokenizer.chat_template]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """Return `input_ids`, `attention_mask` and `labels`, which are -100 for tokens that are not learned.

        The ids of a chat are what `apply_chat_template` returns for the whole chat. `cut` is 0 for a complete row, 1 if a part of
        what it teaches is truncated, and 2 if nothing of it is left; see `drop_truncated`. `problem` is why a row cannot be
        used, or "".
        """
        done: dict[str, list] = {name: [] for name in ("input_ids", "attention_mask", "labels", "cut", "problem", SOURCE)}
        for number, row in enumerate(self._tokenize([self._render(rows, i) for i in range(len(rows[self.columns[0]]))])):
            ids, labels, problem = row
            for start in self._part_starts(len(ids)):
                part = slice(start, start + self.max_length)
                if self.kind == "texts" and self.row_format > 1:
                    labels[start : start + 1] = [-100]  # the context of a part, or a first token, which nothing predicts
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

    def _part_starts(self, number: int) -> range:
        """Return where the parts of a row of tokens begin. A text becomes as many parts as it needs. Other rows are truncated.

        A part begins with the last token of the part before it, so every token but the first one is predicted.
        """
        if self.kind != "texts" or self.row_format == 1:
            return range(0, max(number, 1), self.max_length if self.kind == "texts" else max(number, 1))
        return range(0, max(number - 1, 1), max(self.max_length - 1, 1))

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
            row = self._read(some, i)
            if not isinstance(row, Chat):
                return rendered.answers[0][0]
            first = row.trained.index(True)
            return [{**message, "content": shorten(message["content"])} for message in row.messages[:first]]
        return "Hi"

    def _usable(self, rows: dict[str, list]) -> Iterator[tuple[int, Rendered]]:
        """Yield the rows that can be used, with their places."""
        rendered = ((i, self._render(rows, i)) for i in range(len(rows[self.columns[0]])))
        return ((i, row) for i, row in rendered if not row.problem)

    def _render(self, rows: dict[str, list], i: int) -> Rendered:
        """Return row `i` as one text, or the reason why it cannot be used."""
        try:
            return self._format(self._read(rows, i))
        except UnusableRow as error:
            return Rendered("", [], str(error))

    def _read(self, rows: dict[str, list], i: int) -> Chat | Pair | str:
        row = {column: values[i] for column, values in rows.items()}
        return read_row(self.kind, self.columns, row, self.tokenizer.chat_template or "", self.row_format)

    def _format(self, row: Chat | Pair | str) -> Rendered:
        end = self.tokenizer.eos_token or ""
        if isinstance(row, str):
            has_end = self.row_format > 1 and row.endswith(end)
            return Rendered(row if has_end else row + end, [])
        if isinstance(row, Chat):
            return self._apply_template(row)
        prompt = row.prompt + self.separator
        return Rendered(f"{prompt}{row.answer}{end}", [(prompt, f"{prompt}{row.answer}{end}")])

    def _apply_template(self, chat: Chat) -> Rendered:
        """Return the whole chat as text. An answer reaches from the end of the generation prompt through the end-of-turn token."""
        messages, options = chat.messages, {"tools": chat.tools, **chat.template_options}
        text = self._fill_template(messages, **options)
        answers = []
        for i in range(len(messages)):
            if not chat.trained[i]:
                continue
            before = self._fill_template(messages[:i], add_generation_prompt=True, **options)
            until = text if i == len(messages) - 1 else self._fill_template(messages[: i + 1], **options)
            if not (text.startswith(until) and until.startswith(before)):
                raise UnusableRow("the chat template changes earlier turns when later turns follow, so answers are not marked")
            answers.append((before, until))
        return Rendered(text, answers)

    def _fill_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is a program and can fail in many ways
            raise UnusableRow(f"the chat template rejects it: {str(error) or type(error).__name__}") from error

    def _tokenize(self, rows: list[Rendered]) -> list[tuple[list[int], list[int], str]]:
        """Return token ids, labels and the problem of each row, with the tokens that the tokenizer puts before every text."""
        done = []
        tokenized = tokenize(rows, self.tokenizer, learn_all=self.train_on_prompts or self.kind == "texts")
        for row, (ids, labels, problem) in zip(rows, tokenized):
            if problem and not row.problem and self.row_format > 1 and not self.tokenizer.chat_template:
                ids, labels, problem = self._tokenize_apart(row, problem)
            first = [] if problem or ids[: len(self.first_ids)] == self.first_ids else self.first_ids
            done.append(([*first, *ids], [-100] * len(first) + labels, problem))
        return done

    def _tokenize_apart(self, row: Rendered, problem: str) -> tuple[list[int], list[int], str]:
        """Return the tokens of a prompt and those of its answer, if together they are the text of the row.

        In use the prompt is tokenized alone. Some tokenizers put a space before an answer alone, but not behind a special token.
        """
        ((prompt, whole),), mark = row.answers, self.tokenizer.eos_token or ""
        split = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]
        before, answer = split(prompt), whole[len(prompt) :]
        for after in (split(answer), split(mark + answer)[len(split(mark)) :]):
            if self.tokenizer.decode(before + after) == self.tokenizer.decode(split(whole)):
                return before + after, (before if self.train_on_prompts else [-100] * len(before)) + after, ""
        return [], [], problem

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
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        answers.append(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True))
    model.train(was_training)
    return answers


def format_samples(samples: list[Sample], before: list[str] | None, after: list[str]) -> str:
    """Return prompts with the expected answers and the model's answers before and after training, to print."""
    one_line = lambda text: " ".join(text.split())[:160]
    lines = []
    for i, (prompt, answer, _) in enumerate(samples):
        lines += [f"prompt  {one_line(prompt)}", f"  wanted  {one_line(answer)}"]
        lines += [f"  before  {one_line(before[i])}"] if before else []
        lines += [f"  after   {one_line(after[i])}"]
    return "\n".join(lines)
