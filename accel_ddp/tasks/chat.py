"""Rows for a causal language model: chats, instructions and plain texts as tokens, with the answers marked."""

import difflib
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_ddp.errors import UserError
from accel_ddp.sources.tokenisation import SOURCE

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import datasets

# Names that columns have in public data, tried in this order where the option is empty.
KNOWN = {
    "messages_column": ("messages", "conversations", "conversation"),
    "prompt_column": ("prompt", "instruction", "question"),
    "answer_column": ("answer", "output", "completion", "response"),
    "text_column": ("text",),
}


class Format:
    """How the rows of a table become conversations: of which columns, and in whose words."""

    def __init__(self, rows: "datasets.Dataset", tokenizer: Any, cfg: Any):
        self.tokenizer, self.max_length, self.train_on_prompts = tokenizer, cfg.max_length, cfg.train_on_prompts
        given = {option: getattr(cfg, option) for option in KNOWN}
        for option, column in given.items():
            if column and column not in rows.column_names:
                raise UserError(f"--{option} {column}: there is no such column. The data have: {', '.join(rows.column_names)}.")
        wants_chat = given["messages_column"] or not any(given.values())
        wants_pair = given["prompt_column"] or given["answer_column"] or not any(given.values())
        found = {option: given[option] or next((n for n in KNOWN[option] if n in rows.column_names), "") for option in KNOWN}
        self.columns: tuple[str, ...]
        if wants_chat and found["messages_column"]:
            self.kind, self.columns = "chats", (found["messages_column"],)
        elif wants_pair and found["prompt_column"] and found["answer_column"]:
            more = ("input",) if found["prompt_column"] == "instruction" and "input" in rows.column_names else ()
            self.kind, self.columns = "instructions", (found["prompt_column"], *more, found["answer_column"])
        elif found["text_column"]:
            self.kind, self.columns = "texts", (found["text_column"],)
        else:
            raise UserError(
                "The data need a column of chats (--messages_column), two of prompts and answers (--prompt_column, "
                f"--answer_column), or one of texts (--text_column). They have: {', '.join(rows.column_names)}."
            )
        ignored = [f"--{option} {column}" for option, column in given.items() if column and column not in self.columns]
        if ignored:
            raise UserError(
                f"{' '.join(ignored)}: the rows would be read as {self.kind} ({', '.join(self.columns)}). Give --messages_column "
                "alone, --prompt_column with --answer_column, or --text_column alone."
            )
        if self.kind == "chats" and not tokenizer.chat_template:
            raise UserError(
                f"--model {cfg.model}: its tokenizer has no chat template, so that chats cannot be spelled out. Take a model "
                "that was tuned for chats, or save a template with the tokenizer (tokenizer.chat_template = ...)."
            )

    @property
    def identity(self) -> list[Any]:
        """What the encoded rows depend on, beside the tokenizer's vocabulary."""
        return [
            inspect.getsource(Format),
            self.kind,
            self.columns,
            self.max_length,
            self.train_on_prompts,
            self.tokenizer.chat_template,
        ]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """`input_ids`, `attention_mask` and `labels`: -100 but for the tokens that are to be learned; `cut` and `problem`."""
        done: dict[str, list] = {name: [] for name in ("input_ids", "attention_mask", "labels", "cut", "problem", SOURCE)}
        for number, row in enumerate(zip(*(rows[column] for column in self.columns))):
            try:
                pieces, problem = self._pieces(row), ""
            except _Broken as error:
                pieces, problem = [], str(error)
            ids, labels = self._tokens(pieces)
            # Plain text is cut into as many rows as it needs; of the others the end is lost.
            places = range(0, max(len(ids), 1), self.max_length) if self.kind == "texts" else (0,)
            for at in places:
                part = slice(at, at + self.max_length)
                learns = any(label != -100 for label in labels[part][1:])
                if at and not learns:
                    continue  # a last token alone: nothing precedes it
                done[SOURCE].append(number)
                done["input_ids"].append(ids[part])
                done["attention_mask"].append([1] * len(ids[part]))
                done["labels"].append(labels[part])
                done["cut"].append(0 if self.kind == "texts" or len(ids) <= self.max_length else 1 if learns else 2)
                done["problem"].append(problem or ("" if learns or done["cut"][-1] else "there is nothing to learn in it"))
        return done

    def samples(self, rows: "datasets.Dataset", number: int, max_tokens: float) -> list[tuple[str, str]]:
        """(all before the last answer, that answer) of the first rows that can be used, with prompts of at most `max_tokens`."""
        found: list[tuple[str, str]] = []
        for row in rows.select(range(min(len(rows), 100))):
            if len(found) == number:
                break
            try:
                pieces = self._pieces(tuple(row[column] for column in self.columns))
            except _Broken:
                continue
            words = pieces[0][0].split(" ")
            is_text = self.kind == "texts"
            prompt = " ".join(words[:8]) if is_text else "".join(text for text, _ in pieces[:-1])
            answer = " ".join(words[8:40]) if is_text else pieces[-1][0]
            if prompt and len(self.tokenizer(prompt)["input_ids"]) <= max_tokens:
                found.append((prompt, answer))
        return found

    def _pieces(self, row: tuple) -> list[tuple[str, bool]]:
        """(text, whether it is learned) one after the other."""
        if self.kind == "texts":
            return [(_text(row[0], self.columns[0]) + (self.tokenizer.eos_token or ""), True)]
        if self.kind == "chats":
            if not isinstance(row[0], list):
                raise _Broken(f"its {self.columns[0]} are no list of messages")
            return self._spelled([_message(message) for message in row[0]])
        extra = len(row) == 3  # alpaca's `input`, which may be empty
        *asked, answer = (_text(value, column, extra and i == 1) for i, (value, column) in enumerate(zip(row, self.columns)))
        prompt = "\n\n".join(text for text in asked if text)
        if self.tokenizer.chat_template:
            return self._spelled([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
        return [(prompt + "\n", False), (answer + (self.tokenizer.eos_token or ""), True)]

    def _spelled(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """As the chat template has it: what the model would be given before each answer, and the answer with its end."""
        from jinja2 import TemplateError

        pieces, so_far = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not message["content"].strip():
                raise _Broken("an answer is empty")
            if i == 0:
                raise _Broken("it begins with an answer")
            try:
                before = self.tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
                after = self.tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
            except TemplateError as error:
                raise _Broken(f"the chat template refuses it: {error}") from error
            if not (before.startswith(so_far) and after.startswith(before)):
                raise _Broken("the chat template changes earlier turns when later ones come, so that answers cannot be marked")
            pieces += [(before[len(so_far) :], False), (after[len(before) :], True)]
            so_far = after
        if not pieces:
            raise _Broken("no message is of the role assistant" if messages else "it has no messages")
        return pieces

    def _tokens(self, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Piece by piece, as when the model is used: a prompt is tokenised before there is an answer."""
        first = self.tokenizer("")["input_ids"][:1]  # some models are used to a token before every text
        spells_it = not pieces or pieces[0][0].startswith(self.tokenizer.bos_token or "\0")
        ids: list[int] = first if first == [self.tokenizer.bos_token_id] and not spells_it else []
        labels: list[int] = [-100] * len(ids)
        for text, is_learned in pieces:
            new = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += new
            labels += new if is_learned or self.train_on_prompts else [-100] * len(new)
        return ids, labels


ROLES = ("system", "user", "assistant", "tool", "developer", "function")


class _Broken(Exception):
    """Why a row cannot be used."""


def _text(value: Any, column: str, may_be_empty: bool = False) -> str:
    if value is not None and not isinstance(value, str):
        raise _Broken(f"its {column} is {value!r:.40}, not text")
    if not (value or "").strip() and not may_be_empty:
        raise _Broken(f"its {column} is empty")
    return value or ""


def _message(message: Any) -> dict[str, str]:
    """{role, content}; also {from, value} with ShareGPT's names of roles."""
    if not isinstance(message, dict):
        raise _Broken("a message has no role and content")
    roles = {"human": "user", "gpt": "assistant", "bot": "assistant"}
    role, content = (message.get(a) or message.get(b) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise _Broken("a message has no role and content")
    role = roles.get(role, role)
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.8)
    if role not in ROLES and near and abs(len(role) - len(near[0])) < 3:  # a template may know others
        raise _Broken(f"a message has the role {role!r} (did you mean {near[0]!r}?)")
    return {"role": role, "content": content or ""}


def without_cut_off(tables: list["datasets.Dataset"], max_length: int) -> list["datasets.Dataset"]:
    """Rows with something of the answer left. Says how many answers were cut, and how many rows have nothing left."""
    kept = []
    for rows, name in zip(tables, ("training", "evaluation")):
        cut = rows.with_format("numpy")["cut"][:]
        some, none = int((cut == 1).sum()), int((cut == 2).sum())
        if some or none:
            log.info(
                f"{some + none:,} of {len(rows):,} {name} rows are longer than --max_length {max_length}: of {some:,} the end of "
                f"the answer is cut, and {none:,} have no answer left and are left out."
            )
        if none == len(rows):
            raise UserError(f"--max_length {max_length}: no answer of the {name} data begins before it. Give a higher one.")
        kept.append(rows.select((cut < 2).nonzero()[0]).remove_columns("cut"))
    return kept


@torch.no_grad()
def generated(model: nn.Module, tokenizer: Any, prompts: list[str], max_new_tokens: int) -> list[str]:
    """What the model says after each prompt, the likeliest token at a time. For one rank alone: no collectives."""
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


def table_of_samples(samples: list[tuple[str, str]], before: list[str] | None, after: list[str]) -> str:
    """Prompts with what was wanted, and what the model said before and after."""
    short: Callable[[str], str] = lambda text: " ".join(text.split())[:160]
    lines = []
    for i, (prompt, answer) in enumerate(samples):
        lines += [f"prompt  {short(prompt)}", f"  wanted  {short(answer)}"]
        lines += [f"  before  {short(before[i])}"] if before else []
        lines += [f"  after   {short(after[i])}"]
    return "\n".join(lines)
