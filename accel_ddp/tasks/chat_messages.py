"""Checks the messages and texts of a row before a chat template gets them."""

import difflib
from typing import Any

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
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.8)
    if role not in ROLES and near and abs(len(role) - len(near[0])) < 3:  # a template may define further roles
        raise UnusableRow(f"a message has the role {role!r} (did you mean {near[0]!r}?)")
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
