"""Tokenises rows that were rendered as text, and marks the tokens of their answers."""

import re
from typing import Any, NamedTuple

from accel_ddp.text import nearest

# Checks the messages and texts of a row before a chat template gets them.
ROLES = ("system", "user", "assistant", "tool", "developer", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}

# What a chat template may use and this module does not pass to it. Rows with content there are refused.
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
UNSUPPORTED_ROLES = ("tool_call", "function_call")


class UnusableRow(Exception):
    """Why a row cannot be used."""


def check_text(value: Any, column: str, may_be_empty: bool = False) -> str:
    if value is not None and not isinstance(value, str):
        raise UnusableRow(f"its {column} is {value!r:.40}, not text")
    if not (value or "").strip() and not may_be_empty:
        raise UnusableRow(f"its {column} is empty")
    return value or ""


def check_message(message: Any) -> dict[str, Any]:
    """Return the message with `role`, `content` as one text, and its other keys, which the chat template may use.

    The keys `from` and `value` and the roles of ShareGPT are translated.
    """
    if not isinstance(message, dict):
        raise UnusableRow("a message has no role and content")
    role, content = (message.get(a) or message.get(b) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(role, str):
        raise UnusableRow(f"a message has no role (its keys are {', '.join(message)})")
    role = SHAREGPT_ROLES.get(role, role)
    near = nearest(role.lower(), ROLES, cutoff=0.8)
    if role not in ROLES and near and abs(len(role) - len(near)) < 3:  # a template may define further roles
        raise UnusableRow(f"a message has the role {role!r} (did you mean {near!r}?)")
    if found := next((key for key in UNSUPPORTED_KEYS if message.get(key)), role if role in UNSUPPORTED_ROLES else ""):
        raise UnusableRow(f"a message has {found}, which sft cannot learn yet")
    if message.get("weight") not in (None, 1):
        raise UnusableRow(f"a message has the weight {message['weight']}, but all answers of a chat are learned equally")
    others = {key: value for key, value in without_none(message).items() if key not in ("role", "from", "content", "value")}
    text = _join_parts(content)
    if role == "user" and not text:
        raise UnusableRow("a message of the user is empty")
    return {**others, "role": role, "content": text}


def _join_parts(content: Any) -> str:
    """Return the content of a message as one text. Parts of it that are texts are joined."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise UnusableRow(f"the content of a message is {content!r:.40}, not text")
        return content or ""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UnusableRow(f"a message has a part of the type {kind or type(part).__name__!r}, and only texts can be learned")
    return "".join(part["text"] for part in content)


def without_none(value: Any) -> Any:
    """Return the value without the keys whose value is None, which a table adds if other rows have these keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


class Rendered(NamedTuple):
    """A row as text. Each of its answers is a pair: the text before the answer, and the text until the end of the answer."""

    text: str
    answers: list[tuple[str, str]]
    problem: str = ""


def tokenise(rows: list[Rendered], tokenizer: Any, learn_all: bool) -> list[tuple[list[int], list[int], str]]:
    """Return token ids, labels and the problem of each row. With `learn_all` all tokens are learned, and not only the answers.

    Parts of a text that are tokenised separately may have other tokens than the whole text. The whole text is therefore
    tokenised. Its beginnings are tokenised too, from their last special token on, to find the places of the answers.
    """
    special_tokens = _pattern_of_special_tokens(tokenizer)
    encoded = tokenizer([row.text for row in rows], add_special_tokens=False, verbose=False)
    beginnings = {text: _find_last(special_tokens, text) for row in rows for answer in row.answers for text in answer}
    tails = list({text[start:]: 0 for text, start in beginnings.items()})
    tokens = dict(zip(tails, tokenizer(tails, add_special_tokens=False)["input_ids"])) if tails else {}

    def compare(number: int, text: str) -> tuple[int, int]:
        """Return how many tokens the beginning of a row has, and how many of these are the same in the whole row."""
        start, ids = beginnings[text], encoded["input_ids"][number]
        place = (encoded.char_to_token(number, start) or 0) if start else 0
        tail = tokens[text[start:]]
        pairs = enumerate(zip(tail, ids[place : place + len(tail)]))
        same = next((i for i, (a, b) in pairs if a != b), min(len(tail), len(ids) - place))
        return place + len(tail), place + same

    done = []
    for number, row in enumerate(rows):
        ids, problem = [] if row.problem else encoded["input_ids"][number], row.problem
        labels = list(ids) if learn_all else [-100] * len(ids)
        for before, until in row.answers:
            start, same = compare(number, before)
            if same < start:
                # In use the prompt is tokenised alone, so that the model would get tokens that it was not trained on.
                problem = (
                    "the tokens of its prompt change if the answer follows, often because the answer begins with white space"
                )
            end = compare(number, until)[1]  # a token that also contains a part of the next turn is not learned
            labels[start:end] = ids[start:end]
        done.append(([], [], problem) if problem else (ids, labels, ""))
    return done


def _find_last(special_tokens: re.Pattern[str] | None, text: str) -> int:
    """Return where the last special token begins in the text, or 0. Tokenizers split a text there before anything else."""
    start = 0
    for found in special_tokens.finditer(text) if special_tokens else ():
        start = found.start()
    return start


def _pattern_of_special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the tokens at which the tokenizer splits every text, or None if it has none or is a slow one."""
    tokens = tokenizer.added_tokens_decoder.values() if tokenizer.is_fast else ()
    words = sorted((token.content for token in tokens if not (token.normalized or token.single_word)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None
