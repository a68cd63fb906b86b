"""Rows of conversations as users have them: the columns and formats in the wild, and their messages in one form."""

from typing import TYPE_CHECKING, Any, NamedTuple

from accel_ddp.errors import UserError
from accel_ddp.sources.data import describe_columns
from accel_ddp.text import nearest

if TYPE_CHECKING:
    import datasets

# Usual names of columns in public datasets, tried in this order if the option is empty.
USUAL_COLUMNS = {
    "messages_column": ("messages", "conversations", "conversation"),
    "prompt_column": ("prompt", "instruction", "question"),
    "answer_column": ("answer", "output", "completion", "response"),
    "text_column": ("text",),
}
# Columns that a chat template may use and that this module does not pass to it. Rows with content there are refused.
UNSUPPORTED_COLUMNS = ("tools", "functions", "documents", "system", "history", "chat_template_kwargs")


def choose_columns(rows: "datasets.Dataset", given: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the kind of the rows and their columns: those that are `given`, otherwise the usual ones. Raise UserError without any."""
    for option, column in given.items():
        if column and column not in rows.column_names:
            raise UserError(f"--{option} {column}: there is no such column. {describe_columns(rows, {option: column})}")
    usual = {option: next((name for name in names if name in rows.column_names), "") for option, names in USUAL_COLUMNS.items()}
    messages, prompt, answer, text = (given[option] or usual[option] for option in USUAL_COLUMNS)
    is_open = not any(given.values())
    if messages and (given["messages_column"] or is_open):
        return "chats", (messages,)
    if prompt and answer and (given["prompt_column"] or given["answer_column"] or is_open):
        more = ("input",) if prompt == "instruction" and "input" in rows.column_names else ()
        return "instructions", (prompt, *more, answer)
    if text:
        return "texts", (text,)
    raise UserError(
        "The data need a column of chats (--messages_column), columns of prompts and answers (--prompt_column, "
        f"--answer_column), or a column of texts (--text_column). "
        f"{describe_columns(rows, {'prompt_column': 'prompt', 'answer_column': 'answer'})}"
    )


ROLES = ("system", "user", "assistant", "tool", "developer", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}

# What a chat template may use and this module does not pass to it. Rows with content there are refused.
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
UNSUPPORTED_ROLES = ("tool_call", "function_call")


class Chat(NamedTuple):
    """A conversation in one form, ready for a chat template."""

    messages: list[dict[str, Any]]  # role, content, tool_calls (arguments are dicts), reasoning_content, name, tool_call_id
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # further variables of the template: documents, chat_template_kwargs
    trained: tuple[bool, ...] = ()  # whether a message may be trained: an answer without `weight: 0`


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
