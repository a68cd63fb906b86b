"""Rows for causal language models: chats, instructions and plain texts as tokens, with labels for the answers."""

import difflib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_ddp.errors import UserError
from accel_ddp.sources.messages import warn
from accel_ddp.sources.tokenisation import SOURCE

if TYPE_CHECKING:
    import datasets

# Usual names of columns in public datasets, tried in this order if the option is empty.
USUAL_COLUMNS = {
    "messages_column": ("messages", "conversations", "conversation"),
    "prompt_column": ("prompt", "instruction", "question"),
    "answer_column": ("answer", "output", "completion", "response"),
    "text_column": ("text",),
}
ROLES = ("system", "user", "assistant", "tool", "developer", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


class Format:
    """How the rows of a table become tokens: `kind` is "chats", "instructions" or "texts", read from `columns`."""

    def __init__(self, rows: "datasets.Dataset", tokenizer: Any, cfg: Any):
        self.tokenizer, self.max_length, self.train_on_prompts = tokenizer, cfg.max_length, cfg.train_on_prompts
        given = {option: getattr(cfg, option) for option in USUAL_COLUMNS}
        names = ", ".join(rows.column_names)
        for option, column in given.items():
            if column and column not in rows.column_names:
                raise UserError(f"--{option} {column}: there is no such column. The data have: {names}.")
        usual = {option: next((n for n in USUAL_COLUMNS[option] if n in rows.column_names), "") for option in USUAL_COLUMNS}
        found = {option: given[option] or usual[option] for option in USUAL_COLUMNS}
        may_be_chats = given["messages_column"] or not any(given.values())
        may_be_pairs = given["prompt_column"] or given["answer_column"] or not any(given.values())
        self.columns: tuple[str, ...]
        if may_be_chats and found["messages_column"]:
            self.kind, self.columns = "chats", (found["messages_column"],)
        elif may_be_pairs and found["prompt_column"] and found["answer_column"]:
            more = ("input",) if found["prompt_column"] == "instruction" and "input" in rows.column_names else ()
            self.kind, self.columns = "instructions", (found["prompt_column"], *more, found["answer_column"])
        elif found["text_column"]:
            self.kind, self.columns = "texts", (found["text_column"],)
        else:
            raise UserError(
                "The data need a column of chats (--messages_column), columns of prompts and answers (--prompt_column, "
                f"--answer_column), or a column of texts (--text_column). They have: {names}."
            )
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

    def require_columns(self, test: "datasets.Dataset") -> None:
        """Raise UserError if the evaluation rows lack a column from which the training rows are read."""
        if missing := [column for column in self.columns if column not in test.column_names]:
            raise UserError(
                f"The evaluation data lack the column {missing[0]!r} of the training data. They have: {', '.join(test.column_names)}."
            )

    @property
    def identity(self) -> list[Any]:
        """What the encoded rows depend on besides the vocabulary, for the cache key of tokenised data."""
        return [self.kind, self.columns, self.max_length, self.train_on_prompts, self.tokenizer.chat_template]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """Return `input_ids`, `attention_mask` and `labels`, which are -100 for tokens that are not learned.

        `cut` is 0 for a complete row, 1 if its end is truncated, and 2 if no part of the answer is left; see `drop_truncated`.
        `problem` is why a row cannot be used, or "".
        """
        done: dict[str, list] = {name: [] for name in ("input_ids", "attention_mask", "labels", "cut", "problem", SOURCE)}
        for number, row in enumerate(zip(*(rows[column] for column in self.columns))):
            try:
                segments, problem = self._split(row), ""
            except _UnusableRow as error:
                segments, problem = [], str(error)
            ids, labels = self._tokenise(segments)
            # A plain text becomes as many rows as it needs. Other rows are truncated.
            starts = range(0, max(len(ids), 1), self.max_length) if self.kind == "texts" else (0,)
            for start in starts:
                part = slice(start, start + self.max_length)
                learns = any(label != -100 for label in labels[part][1:])
                if start and not learns:
                    continue  # the last token alone: no token before it predicts it
                done[SOURCE].append(number)
                done["input_ids"].append(ids[part])
                done["attention_mask"].append([1] * len(ids[part]))
                done["labels"].append(labels[part])
                done["cut"].append(0 if self.kind == "texts" or len(ids) <= self.max_length else 1 if learns else 2)
                done["problem"].append(problem or ("" if learns or done["cut"][-1] else "it contains nothing to learn"))
        return done

    def select_samples(self, rows: "datasets.Dataset", number: int, max_tokens: float) -> list[tuple[str, str]]:
        """Return (everything before the last answer, the last answer) of the first rows with at most `max_tokens` of prompt."""
        found: list[tuple[str, str]] = []
        for row in rows.select(range(min(len(rows), 100))):
            if len(found) == number:
                break
            try:
                segments = self._split(tuple(row[column] for column in self.columns))
            except _UnusableRow:
                continue
            words = segments[0][0].split(" ")
            is_text = self.kind == "texts"
            prompt = " ".join(words[:8]) if is_text else "".join(text for text, _ in segments[:-1])
            answer = " ".join(words[8:40]) if is_text else segments[-1][0]
            if prompt and len(self.tokenizer(prompt)["input_ids"]) <= max_tokens:
                found.append((prompt, answer))
        return found

    def _split(self, row: tuple) -> list[tuple[str, bool]]:
        """Return the row as consecutive segments: (text, whether it is learned)."""
        if self.kind == "texts":
            return [(_check_text(row[0], self.columns[0]) + (self.tokenizer.eos_token or ""), True)]
        if self.kind == "chats":
            if not isinstance(row[0], list):
                raise _UnusableRow(f"the column {self.columns[0]} is not a list of messages")
            return self._apply_template([_check_message(message) for message in row[0]])
        has_input = len(row) == 3  # the column `input` of Alpaca, which may be empty
        *asked, answer = (
            _check_text(value, column, has_input and i == 1) for i, (value, column) in enumerate(zip(row, self.columns))
        )
        prompt = "\n\n".join(text for text in asked if text)
        if self.tokenizer.chat_template:
            return self._apply_template([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
        return [(prompt + "\n", False), (answer + (self.tokenizer.eos_token or ""), True)]

    def _apply_template(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """Return two segments for each answer: the prompt that the model is given in use, and the answer with its end token."""
        from jinja2 import TemplateError

        segments, so_far = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not message["content"].strip():
                raise _UnusableRow("an answer is empty")
            if i == 0:
                raise _UnusableRow("it begins with an answer")
            try:
                before = self.tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
                after = self.tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
            except TemplateError as error:
                raise _UnusableRow(f"the chat template rejects it: {error}") from error
            if not (before.startswith(so_far) and after.startswith(before)):
                raise _UnusableRow(
                    "the chat template changes earlier turns when later turns follow, so that answers are not marked"
                )
            segments += [(before[len(so_far) :], False), (after[len(before) :], True)]
            so_far = after
        if not segments:
            raise _UnusableRow("no message has the role assistant" if messages else "it has no messages")
        return segments

    def _tokenise(self, segments: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Return token ids and labels. Segments are tokenised separately, as in use, where the prompt has no answer yet."""
        first = self.tokenizer("")["input_ids"][:1]  # some tokenizers put a bos token before every text
        has_bos = not segments or segments[0][0].startswith(self.tokenizer.bos_token or "\0")
        ids: list[int] = first if first == [self.tokenizer.bos_token_id] and not has_bos else []
        labels: list[int] = [-100] * len(ids)
        for text, is_learned in segments:
            new = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += new
            labels += new if is_learned or self.train_on_prompts else [-100] * len(new)
        return ids, labels


class _UnusableRow(Exception):
    """Why a row cannot be used."""


def _check_text(value: Any, column: str, may_be_empty: bool = False) -> str:
    if value is not None and not isinstance(value, str):
        raise _UnusableRow(f"its {column} is {value!r:.40}, not text")
    if not (value or "").strip() and not may_be_empty:
        raise _UnusableRow(f"its {column} is empty")
    return value or ""


def _check_message(message: Any) -> dict[str, str]:
    """Return the message with `role` and `content`. The keys `from` and `value` and the roles of ShareGPT are translated."""
    if not isinstance(message, dict):
        raise _UnusableRow("a message has no role and content")
    role, content = (message.get(a) or message.get(b) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise _UnusableRow("a message has no role and content")
    role = SHAREGPT_ROLES.get(role, role)
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.8)
    if role not in ROLES and near and abs(len(role) - len(near[0])) < 3:  # a template may define further roles
        raise _UnusableRow(f"a message has the role {role!r} (did you mean {near[0]!r}?)")
    return {"role": role, "content": content or ""}


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
def generate(model: nn.Module, tokenizer: Any, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Return a greedy continuation of each prompt. It uses no collectives, so that one rank can call it alone."""
    was_training = model.training
    model.eval()
    answers = []
    for prompt in prompts:
        tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
        ids = model.generate(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], max_new_tokens=max_new_tokens,
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        answers.append(tokenizer.decode(ids[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))
    model.train(was_training)
    return answers


def format_samples(samples: list[tuple[str, str]], before: list[str] | None, after: list[str]) -> str:
    """Return prompts with the expected answers and the model's answers before and after training, to print."""
    shorten = lambda text: " ".join(text.split())[:160]
    lines = []
    for i, (prompt, answer) in enumerate(samples):
        lines += [f"prompt  {shorten(prompt)}", f"  wanted  {shorten(answer)}"]
        lines += [f"  before  {shorten(before[i])}"] if before else []
        lines += [f"  after   {shorten(after[i])}"]
    return "\n".join(lines)
