"""Rows of conversations as users have them: the columns and formats in the wild, and their messages in one form."""

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_ddp.errors import UserError
from accel_ddp.sources.data import describe_columns, require_columns, require_types
from accel_ddp.tasks.preference_losses import LABELED
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
# Columns of chats and of prompts with answers that are read too, where a row has content there.
TEMPLATE_COLUMNS = ("documents", "chat_template_kwargs")
SYSTEM_COLUMNS = ("system", "system_prompt")
OPTIONAL_COLUMNS = (*SYSTEM_COLUMNS, "tools", "functions", "history", *TEMPLATE_COLUMNS)
INPUT_COLUMNS = {"instruction": ("input", "context"), "question": ("context",)}  # what a prompt is about: Alpaca, Dolly
LABEL_COLUMNS = ("label", "kto_tag")  # of KTO
PROMPT, ANSWER = "prompt", "completion"  # names of the parts of whole chats
MEDIA_COLUMNS = ("images", "videos", "audios", "image", "video", "audio")
READ_COLUMNS = {
    "chosen", "rejected", *LABEL_COLUMNS, *MEDIA_COLUMNS, *OPTIONAL_COLUMNS, *chain(*USUAL_COLUMNS.values(), *INPUT_COLUMNS.values())
}  # fmt: skip


def choose_columns(rows: "datasets.Dataset", given: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the kind of the rows and their columns: those that are `given`, otherwise the usual ones. Raise UserError without any."""
    require_types(rows, READ_COLUMNS)
    for option, column in given.items():
        if column and column not in rows.column_names:
            raise UserError(f"--{option} {column}: there is no such column. {describe_columns(rows, {option: column})}")
    usual = {option: _usual_column(rows, names) for option, names in USUAL_COLUMNS.items()}
    messages, prompt, answer, text = (given[option] or usual[option] for option in USUAL_COLUMNS)
    is_open = not any(given.values())
    if not any(given[option] for option in ("messages_column", "answer_column", "text_column")):
        _refuse_preferences(rows, prompt or messages)
    if messages and (given["messages_column"] or is_open):
        require_columns({"messages_column": messages}, rows)
        return "chats", (messages,)
    if prompt and answer and (given["prompt_column"] or given["answer_column"] or is_open):
        require_columns({"prompt_column": prompt, "answer_column": answer}, rows)
        more = [name for name in INPUT_COLUMNS.get(prompt, ()) if name in rows.column_names and name != answer]
        return "instructions", (prompt, *more, answer)
    if text:
        require_columns({"text_column": text}, rows)
        return "texts", (text,)
    raise UserError(
        "The data need a column of chats (--messages_column), columns of prompts and answers (--prompt_column, "
        f"--answer_column), or a column of texts (--text_column). "
        f"{describe_columns(rows, {'prompt_column': 'prompt', 'answer_column': 'answer'})}"
    )


def _usual_column(rows: "datasets.Dataset", names: tuple[str, ...]) -> str:
    """Return the first of these columns, or "". A row of another format adds a column that most rows lack, which comes last."""
    table = getattr(rows, "data", None)  # the check before ranks start knows only names
    is_rare = lambda name: table is not None and 2 * table.column(name).null_count > table.num_rows
    return min((name for name in names if name in rows.column_names), key=is_rare, default="")


def _refuse_preferences(rows: "datasets.Dataset", prompt: str) -> None:
    """Raise UserError for pairs of a good and a bad answer, and for answers that are labeled as good or bad."""
    names = rows.column_names
    if {"chosen", "rejected"} <= {*names}:
        first = rows[0]["chosen"] if isinstance(rows[0]["chosen"], list) else []
        is_whole = "user" in map(role_of, first)
        pair = f"--prompt_column {prompt} --answer_column chosen" if prompt else "--text_column chosen"
        raise UserError(
            "The data have preferences (columns chosen and rejected), and sft would train rejected answers too. To learn them, run "
            "`accel-ddp run dpo` with the same --train_file or --dataset. To train on the chosen answers only, use "
            f"{'--messages_column chosen' if is_whole else pair}."
        )
    label = next((name for name in LABEL_COLUMNS if name in names), "")
    values = {str(value).lower() for value in rows.select_columns([label])[:][label]} if label and prompt else set()
    if (bad := values & {"false", "0", "0.0"}) and values <= {*bad, "true", "1", "1.0", "none", "nan"}:
        raise UserError(
            f"The data have answers that are labeled as good or bad (column {label}), and sft would train the answers whose {label} is "
            f"{min(bad)} too. To learn the labels, run `accel-ddp run dpo --loss {LABELED[0]}` with the same --train_file or "
            "--dataset. If the column means something else, name the columns to train on (--messages_column, or --prompt_column and "
            "--answer_column)."
        )


def choose_preference_columns(rows: "datasets.Dataset", cfg: Any) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the columns of prompts, of answers, and of labels, which is "" for pairs. Raise UserError if the loss needs others."""
    require_types(rows, READ_COLUMNS)
    names = rows.column_names
    for option in (f"{name}_column" for name in ("messages", "prompt", "answer", "chosen", "rejected", "label")):
        if (column := getattr(cfg, option)) and column not in names and column != getattr(type(cfg), option):
            raise UserError(f"--{option} {column}: there is no such column. {describe_columns(rows, {option: column})}")
    first = lambda option, *usual: getattr(cfg, option, "") or _usual_column(rows, usual)
    messages, prompt = (first(option, *USUAL_COLUMNS[option]) for option in ("messages_column", "prompt_column"))
    answer, label = first("answer_column", *USUAL_COLUMNS["answer_column"]), first("label_column", *LABEL_COLUMNS)
    pair = (cfg.chosen_column, cfg.rejected_column)
    is_pair = {*pair} <= {*names}
    prompt = prompt or (messages if is_pair or not answer else "")
    more = [name for name in INPUT_COLUMNS.get(prompt, ()) if name in names and name not in (answer, *pair)]
    prompts = (prompt, *more) if prompt else ()
    if is_pair and not (cfg.loss in LABELED and (cfg.label_column or cfg.answer_column)):
        require_columns({"prompt_column": prompt, "chosen_column": pair[0], "rejected_column": pair[1]}, rows)
        return prompts, pair, ""
    has_labels = label and (answer or messages)
    if cfg.loss in LABELED and has_labels:
        read = {"prompt_column": prompt, "answer_column": answer} if answer else {"messages_column": messages}
        require_columns({**read, "label_column": label}, rows)
        return (prompts, (answer,), label) if answer else ((messages,), (ANSWER,), label)
    what = "labeled answers (--answer_column, --label_column) or pairs" if cfg.loss in LABELED else "pairs of answers"
    learned = f"Labeled answers are learned with --loss {LABELED[0]}"
    instead = learned if has_labels else "To learn chats as they are, use `accel-ddp run sft`"
    described = describe_columns(rows, {"chosen_column": pair[0], "rejected_column": pair[1]})
    raise UserError(f"--loss {cfg.loss}: needs {what} (--chosen_column, --rejected_column). {described} {instead}.")


class Chat(NamedTuple):
    """A conversation in one form, ready for a chat template."""

    messages: list[dict[str, Any]]  # role, content, tool_calls (arguments are dicts), reasoning_content, name, tool_call_id
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # further variables of the template: documents, chat_template_kwargs
    trained: tuple[bool, ...] = ()  # whether a message may be trained: an answer without `weight: 0`
    left_out: int = 0  # answers before the first question, see `leave_out_first`


class Pair(NamedTuple):
    prompt: str
    answer: str


class UnusableRow(Exception):
    """Why a row cannot be used. What is special to the row follows a tab, see `drop_broken`."""


ROLES = ("system", "user", "assistant", "tool", "developer", "function")
OTHER_ROLES = {  # names in ShareGPT and its variants, LangChain, Gemini and ms-swift
    "human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "ai": "assistant", "model": "assistant",
    "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool", "tool_result": "tool",
}  # fmt: skip
CALL_ROLES = ("function_call", "tool_call")  # of LLaMA-Factory: the content is the call
REASONING = ("reasoning_content", "thinking", "reasoning")
WEIGHTS = ("weight", "train", "training")  # of a message: 0 or false if it is not trained
KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING, *WEIGHTS, "function_call", "from", "value")
TEXT_PARTS = ("text", "input_text", "output_text")
EMPTY: tuple[Any, ...] = (None, "", [], {})


def read_row(
    kind: str, columns: tuple[str, ...], row: dict[str, Any], template: str = "", needs_answer: bool = True
) -> Chat | Pair | str:
    """Return a row as a chat, as a prompt with its answer, or as a text. Raise UnusableRow with the reason if that is impossible.

    `template` is the source of the chat template. Without one, prompts and answers stay texts. Without `needs_answer` all `columns`
    are those of the prompt, and answers at the end of a chat are left out.
    """
    if kind == "texts":
        return check_text(row[columns[0]], columns[0])
    extra = {name: row[name] for name in OPTIONAL_COLUMNS if name not in columns and row.get(name) not in (*EMPTY, "[]", "{}")}
    if found := next((name for name in MEDIA_COLUMNS if name not in columns and row.get(name)), ""):
        raise UnusableRow(f"only text can be used, and its column {found} has content")
    before, after = row[columns[0]], row[columns[-1]] if needs_answer else []
    if kind == "chats":
        before, after = [], read_json(before, f"the column {columns[0]}")
        if not isinstance(after, list):
            raise UnusableRow(f"the column {columns[0]} is not a list of messages")
        last = next((i for i in range(len(after), 0, -1) if needs_answer or role_of(after[i - 1]) != "assistant"), 0)
        after = after[:last]
    elif not isinstance(before, list | dict) and not (needs_answer and isinstance(after, list | dict)):
        asked = columns[:-1] if needs_answer else columns
        texts = [check_text(row[name], name, may_be_empty=name != columns[0]) for name in asked]  # Alpaca's `input` may be empty
        prompt, answer = "\n\n".join(filter(None, texts)), check_text(row[columns[-1]], columns[-1]) if needs_answer else ""
        if not template:
            if extra:
                raise UnusableRow(f"its column {min(extra)} has content, which needs a chat template (--chat_template)")
            return Pair(prompt, answer)
        before, after = [], [*_read_history(extra.pop("history", [])), ("user", prompt), *[("assistant", answer)] * needs_answer]
        after = [{"role": role, "content": text} for role, text in after]
    elif not template:
        raise UnusableRow(
            f"its {columns[0]} or {columns[-1]} is a list of messages, which needs a chat template (--chat_template)"
        )
    if "history" in extra:
        raise UnusableRow("its column history has content, which belongs to a prompt and an answer that are texts")
    before, after = (_read_messages(part, role, template) for part, role in ((before, "user"), (after, "assistant")))
    if [message for message, _ in after[: len(before)]] == [message for message, _ in before]:
        after = after[len(before) :]  # an answer that is a whole chat, which begins with the prompt
    messages, weights = [message for message, _ in before + after], [0] * len(before) + [weight for _, weight in after]
    for name in [name for name in SYSTEM_COLUMNS if name in extra]:
        system = check_text(extra.pop(name), name, may_be_empty=True)
        if not messages or messages[0]["role"] != "system":
            messages, weights = [{"role": "system", "content": system}, *messages], [0, *weights]
        elif messages[0]["content"] != system:
            raise UnusableRow(f"it has a system prompt in the column {name} and another one in its messages")
    return _make_chat(messages, weights, extra, needs_answer)


def _make_chat(messages: list[dict[str, Any]], weights: list[int], extra: dict[str, Any], needs_answer: bool) -> Chat:
    is_answer = [message["role"] == "assistant" for message in messages]
    if not messages or (needs_answer and not any(is_answer)):
        raise UnusableRow("no message has the role assistant" if messages else "it has no messages")
    # Nothing asks for an answer at the beginning of a chat. It is context for the next ones.
    leading = [*is_answer, False].index(False)
    trained = tuple(bool(answer and weight and i >= leading) for i, (answer, weight) in enumerate(zip(is_answer, weights)))
    if needs_answer and not any(trained):
        raise UnusableRow("it has only answers" if all(is_answer) else "none of its answers has the weight 1")
    found = {name: read_json(without_none(extra[name]), f"the column {name}") for name in TEMPLATE_COLUMNS if name in extra}
    options = found.pop("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise UnusableRow("the column chat_template_kwargs is not an object")
    tools = [tool for name in ("tools", "functions") for tool in read_tools(extra.get(name, []), name)]
    return Chat(messages, tools or None, {**options, **found}, trained)


def leave_out_first(chat: Chat) -> Chat:
    """Return the chat without answers before the first question, for templates that reject them."""
    first = next((i for i, message in enumerate(chat.messages) if message["role"] not in ("system", "developer", "assistant")), 0)
    kept = [i for i, message in enumerate(chat.messages) if i >= first or message["role"] != "assistant"]
    messages, trained = [chat.messages[i] for i in kept], tuple(chat.trained[i] for i in kept)
    return chat._replace(messages=messages, trained=trained, left_out=len(chat.messages) - len(kept)) if any(trained) else chat


def _read_history(history: Any) -> list[tuple[str, str]]:
    turns = read_json(history, "the column history")
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise UnusableRow("the column history is not a list of pairs of a prompt and an answer")
    roles = ("user", "assistant")
    return [(role, check_text(text, "history")) for turn in turns for role, text in zip(roles, turn)]


def _read_messages(given: Any, role: str, template: str) -> list[tuple[dict[str, Any], int]]:
    """Return messages with their weights. A text is one message of this role."""
    messages = (
        [{"role": role, "content": given}] if isinstance(given, str | None) else given if isinstance(given, list) else [given]
    )
    done = []
    for number, message in enumerate(messages, start=1):
        try:
            done.append(_read_message(message, template))
        except UnusableRow as error:
            reason, _, detail = str(error).partition("\t")
            raise UnusableRow(f"{reason}\tmessage {number}{detail and ', '}{detail}") from None
    return done


def _read_message(given: Any, template: str) -> tuple[dict[str, Any], int]:
    """Return the message with `role`, `content` as one text, and its other keys, which the chat template may use; and its weight."""
    if not isinstance(given, dict):
        raise UnusableRow("a message has no role and content")
    message = {key: value for key, value in without_none(given).items() if value not in EMPTY}
    role, content = (message.get(a) or message.get(b) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(role, str):
        raise UnusableRow(f"a message has no role (its keys are {', '.join(given)})")
    message = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    if role in CALL_ROLES:
        calls = read_json(content, "a tool call")
        role, content, message["tool_calls"] = "assistant", None, calls if isinstance(calls, list) else [calls]
    role = _usual_role(role)
    if role not in ROLES and not _mentions(template, role):  # a template may define further roles
        near = nearest(role.lower(), (*ROLES, *OTHER_ROLES), cutoff=0.6)
        hint = f"did you mean {near!r}?" if near else f"the chat template does not name it; usual ones are {', '.join(ROLES[:4])}"
        raise UnusableRow(f"a message has the role {role!r} ({hint})")
    weights = [message.pop(key) for key in WEIGHTS if key in message]
    if wrong := [weight for weight in weights if weight not in (0, 1)]:
        raise UnusableRow(f"the weight of a message is {wrong[0]!r:.40}, and not 0 or 1")
    found = [read_json(message.pop(key), key) for key in ("tool_calls", "function_call") if message.get(key)]
    if calls := [call for one in found for call in (one if isinstance(one, list) else [one])]:
        message["tool_calls"] = [_read_call(call, number) for number, call in enumerate(calls, start=1)]
    if thoughts := {check_text(message.pop(key), key, may_be_empty=True) for key in REASONING if message.get(key)}:
        if len(thoughts) > 1:
            raise UnusableRow(f"a message has different texts in {', '.join(REASONING)}")
        message["reasoning_content"] = message["thinking"] = thoughts.pop()  # templates read one of them
    for key in message:
        if key not in KEYS and not _mentions(template, key):
            near = nearest(key.lower(), KEYS, cutoff=0.7)
            hint = f"did you mean {near!r}?" if near else "remove it"
            raise UnusableRow(f"a message has the key {key!r}, which the chat template does not use ({hint})")
    text = _join_parts(content)
    if role == "user" and not text:
        raise UnusableRow("a message of the user is empty")
    if role == "assistant" and not (text.strip() or message.get("tool_calls") or message.get("reasoning_content")):
        raise UnusableRow("an answer is empty")
    return {**message, "role": role, "content": text}, int(all(weights))


def role_of(message: Any) -> str:
    role = message.get("role") or message.get("from") if isinstance(message, dict) else ""
    return _usual_role(role) if isinstance(role, str) else ""


def _usual_role(role: str) -> str:
    return OTHER_ROLES.get(role.lower(), role.lower() if role.lower() in ROLES else role)


def text_of(message: Any) -> Any:
    return message.get("content") or message.get("value") if isinstance(message, dict) else message


def _mentions(template: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", template) is not None


def _join_parts(content: Any) -> str:
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise UnusableRow(f"the content of a message is not text\t{content!r:.40}")
        return content or ""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if found := next((word for word in ("image", "audio", "video", "file") if word in str(kind)), ""):
            raise UnusableRow(f"only text can be used, and a message has {'an' if found[0] in 'ai' else 'a'} {found}")
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise UnusableRow(f"a message has a part of the type {kind!r}, and only texts can be learned")
    return "".join(part["text"] for part in content)


def _read_call(given: Any, number: int) -> dict[str, Any]:
    call = dict(given) if isinstance(given, dict) else {}
    function = call.get("function") or {key: call.pop(key) for key in ("name", "arguments") if key in call}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(f"a tool call has no function with a name\tcall {number}")
    try:
        arguments = read_json(function.get("arguments") or {}, "the arguments of a tool call")
    except UnusableRow as error:
        raise UnusableRow(str(error).replace("\t", f"\tcall {number}: ")) from None
    if not isinstance(arguments, dict):
        raise UnusableRow(f"the arguments of a tool call are not a JSON object\tcall {number}: {arguments!r:.40}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def read_tools(given: Any, column: str) -> list[dict[str, Any]]:
    """Return descriptions of tools in OpenAI's form. A table often has them as JSON, because each has another schema."""
    tools = read_json(without_none(given), f"the column {column}")
    return [_read_tool(tool, f"a tool of the column {column}") for tool in (tools if isinstance(tools, list) else [tools])]


def _read_tool(given: Any, what: str) -> dict[str, Any]:
    tool = read_json(given, what)
    if isinstance(tool, dict) and "function" not in tool:
        if "name" not in tool and isinstance(tool.get("type"), str) and tool["type"] != "function":
            return tool  # of the server, such as {"type": "web_search"}
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = read_json(tool["function"], what) if isinstance(tool, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(f"{what} is not an object with a name\t{given!r:.40}")
    if "parameters" in function:
        function = {**function, "parameters": read_json(function["parameters"], f"the parameters of {what}")}
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
        raise UnusableRow(f"the parameters of {what} are not a JSON schema\t{schema!r:.40}")
    return {**tool, "function": function}


def read_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise UnusableRow(f"{what} cannot be read as JSON\t{value!r:.40}") from None


def check_text(value: Any, column: str, may_be_empty: bool = False) -> str:
    if value is not None and not isinstance(value, str):
        raise UnusableRow(f"its {column} is not text\t{value!r:.40}")
    if not (value or "").strip() and not may_be_empty:
        raise UnusableRow(f"its {column} is empty")
    return value or ""


def without_none(value: Any) -> Any:
    """Return the value without the keys whose value is None, which a table adds if other rows have these keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
