"""The chat template of a model: conversations as text and tokens, with the places of the answers."""

import json
import re
from bisect import bisect_right
from collections.abc import Container, Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp import compat
from accel_ddp.config.option_values import check_template
from accel_ddp.errors import UserError
from accel_ddp.tasks.chat_rows import Chat, UnusableRow
from accel_ddp.text import read_table

# Templates for base models, with the control tokens that they need.
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (one["template"], tuple(one["tokens"]))
    for name, one in read_table(Path(__file__).with_name("chat_templates.yaml")).items()
}
# What is special to a row, as bits of its column `notes`. `Format.finish` reports them once per run.
SPLIT, THOUGHTS, CONTROL, NO_PREFIX, NO_END, LEFT_OUT = 1, 2, 4, 8, 16, 32
THOUGHT_FIELDS = ("reasoning_content", "<think> in content")
# Characters of no language, around control tokens that stand literally in a text.
LEFT, RIGHT = "\U000f0000", "\U000f0001"
RESERVED = ("messages", "tools", "chat_template", "add_generation_prompt")  # no options of a template
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKED, _MARKS = re.compile(f"{LEFT}([^{LEFT}{RIGHT}]+){RIGHT}"), str.maketrans("", "", LEFT + RIGHT)


class Rendered(NamedTuple):
    text: str
    answers: list[tuple[int, int]]
    problem: str = ""
    spans: list[tuple[int, int]] | None = None  # the characters that the template marks as generated; None without its own marks
    prompt: str = ""  # the text that the model is given for the last answer, if it is not the one before the answer
    notes: int = 0


class Place(NamedTuple):
    """Where an answer begins and ends in the text of a chat, the chat until then, and the text that a model is given for it."""

    start: int
    stop: int
    whole: str
    prompt: str


def missing_tokens(tokenizer: Any, template: str) -> list[str]:
    needed = TEMPLATES[template][1] if template in TEMPLATES else ()
    return [token for token in needed if token != "eos_token" and token not in tokenizer.get_vocab()]


def set_template(tokenizer: Any, cfg: Any) -> None:
    given, known = cfg.chat_template, tokenizer.get_vocab()
    check_template(given)
    if given in TEMPLATES:
        usable = [name for name, (_, needed) in TEMPLATES.items() if all(getattr(tokenizer, t, t) in known for t in needed)]
        if given not in usable:
            reason = f"the tokenizer of {cfg.model} lacks one of its tokens: {' '.join(TEMPLATES[given][1])}"
            raise UserError(f"--chat_template {given}: {reason}. Use one of: {', '.join(usable)}, or a file.")
        tokenizer.chat_template = TEMPLATES[given][0]
    elif given:
        try:
            tokenizer.chat_template = given if "{%" in given or "{{" in given else Path(given).read_text("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"--chat_template {given}: is no text in UTF-8. Give the .jinja file of a chat template.") from None


class Template:
    """The chat template of a tokenizer. How it writes chats is found out with a few short ones."""

    def __init__(self, tokenizer: Any, cfg: Any):
        self.tokenizer = tokenizer
        self.name = f"--chat_template {cfg.chat_template:.40}" if cfg.chat_template else f"the chat template of {cfg.model}"
        given = tokenizer.chat_template
        sources = list(given.values()) if isinstance(given, dict) else [given]
        self.source, self.special = "\n".join(sources), dict(tokenizer.special_tokens_map)
        self.tagged = [source for source in sources if _TAGS.search(source) and tokenizer.is_fast]
        self.in_parts, self.arguments_as_text, self.empty_content = False, False, {"content": ""}
        for source in sources if cfg.template_date != "auto" else ():
            try:
                compat.set_template_date(source, date.fromisoformat(cfg.template_date))
            except ValueError:
                reason = "is not a date. Use YYYY-MM-DD, for example 2026-01-31."
                raise UserError(f"--template_date {cfg.template_date}: {reason}") from None
            except Exception:  # it cannot be compiled, which is reported below
                break
        self._look_at_turns()
        self._look_at_tools()

    def _look_at_turns(self) -> None:
        ask, reply = {"role": "user", "content": "Ask1"}, {"role": "assistant", "content": "Reply2"}
        text, reason = "", "it does not write the messages of the assistant"
        for self.in_parts in (False, True):
            try:
                text = self.render(Chat([ask, reply]))[0]
            except UnusableRow as error:
                reason = str(error).removeprefix("the chat template rejects it: ")
            if "Ask1" in text and "Reply2" in text:
                break
        else:
            raise UserError(f"{self.name}: cannot be used for chats: {reason}. Give another one: --chat_template NAME or FILE.")
        question, prompt, (opening, _, tail) = self._try([ask]), self._try([ask], prompt=True), text.partition("Reply2")
        added = [token for token in self.tokenizer.added_tokens_decoder.values() if token.content.strip()]
        written = [t.content for t in added if t.content in text + self.source or t.content in self.special.values()]
        self.controls, self.end_tokens = any_of(written), tuple(written)
        found = re.search(f"(?:{self.controls.pattern})+", tail)
        # What ends a turn: tokens, a text if the vocabulary has no such token, or nothing.
        self.end = found[0] if found else tail.strip()
        self.ends = sorted({*written, self.end} - {""}, key=len, reverse=True)
        self.lost_prompt = prompt[len(_common(prompt, text)) :]  # <think> in DeepSeek
        prompt_part = prompt.removesuffix(self.lost_prompt)
        self.header, self.opening = prompt_part.removeprefix(question), opening.removeprefix(prompt_part)
        # What precedes every answer of a plain chat, if the answers can be found by it. Mistral has no header.
        self.limit = (self.header or prompt.rpartition("Ask1")[2]) if found and not self.lost_prompt else ""
        special = special_tokens(self.tokenizer)
        turns = {token for token in written if token in question + tail or (token in special and token in text + prompt)}
        self.literals = any_of(turns | special)
        # An answer may contain the control tokens of calls and thoughts, which are special in some tokenizers.
        foreign = turns | {token for token in special if token not in self.source}
        self.foreign = any_of(token for token in foreign if not re.search("think|reason|tool", token, flags=re.IGNORECASE))
        system, thought = {"role": "system", "content": "Word3"}, {"reasoning_content": "Word3", "thinking": "Word3"}
        texts = {"system": self._try([system, ask, reply]), "reasoning_content": self._try([ask, reply | thought])}
        self.begins_with_user = self._try([reply, ask, reply]).count("Reply2") < 2
        self.unwritten = {field for field, text in texts.items() if text and "Word3" not in text}

    def _look_at_tools(self) -> None:
        """Find out which form of tool calls the template accepts, and whether it writes calls, results and tools."""
        schema = {"type": "object", "properties": {"key5": {"type": "string", "description": "Key5"}}, "required": ["key5"]}
        tools = [{"type": "function", "function": {"name": "name4", "description": "Word4", "parameters": schema}}]
        call = {"type": "function", "id": "abcdefgh1", "function": {"name": "name4", "arguments": {"key5": "value6"}}}
        result = {"role": "tool", "name": "name4", "tool_call_id": "abcdefgh1", "content": "Result7"}
        chat = [{"role": "user", "content": "Ask1"}, {"role": "assistant", "tool_calls": [call]}, result]
        chat += [{"role": "assistant", "content": "Reply2"}]
        contents: tuple[dict[str, Any], ...] = ({"content": ""}, {"content": None}, {})
        for self.arguments_as_text, self.empty_content in product((False, True), contents):
            text = self._try(chat, tools)
            # A dictionary that is printed has single quotes, and JSON that is written as JSON again has \".
            if "value6" in text and not re.search(r"'key5'|\\+\"key5|\bNone\b", text):
                break
        else:
            self.arguments_as_text, self.empty_content = False, contents[0]
            text = self._try(chat, tools)
        if text:  # otherwise the template rejects such chats
            words = {"tool_calls": "value6", "content of a tool message": "Result7", "tools": "Word4"}
            self.unwritten |= {field for field, word in words.items() if word not in text}

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: bool = False) -> str:
        """Return the text of a chat, or "" if the template rejects it."""
        try:
            return self.render(self.convert(Chat(messages, tools)), prompt=prompt)[0]
        except UnusableRow:
            return ""

    def _has_tags(self, chat: Chat) -> bool:
        return bool(self.tagged) and self.tokenizer.get_chat_template(None, chat.tools) in self.tagged

    def render(self, chat: Chat, number: int | None = None, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the first messages as text, and the characters that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages, template = chat.messages[:number], self.tokenizer.get_chat_template(None, chat.tools)
        if self.in_parts:
            messages = [{**one, "content": [{"type": "text", "text": one.get("content") or ""}]} for one in messages]
        try:
            texts, spans = render_jinja_template(
                [messages], tools=chat.tools, chat_template=template, add_generation_prompt=prompt,
                return_assistant_tokens_mask=template in self.tagged, **{**self.special, **chat.template_options},
            )  # fmt: skip
        except Exception as error:  # a template is a program and can fail in many ways
            raise UnusableRow(f"the chat template rejects it: {str(error) or type(error).__name__}") from error
        return texts[0], spans[0] if spans else []

    def convert(self, chat: Chat) -> Chat:
        """Return the chat with tool calls in the form that the template accepts."""
        messages = list(chat.messages)
        for i, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                text = lambda value: json.dumps(value, ensure_ascii=False) if self.arguments_as_text else value
                functions = [{**call["function"], "arguments": text(call["function"]["arguments"])} for call in calls]
                content = {"content": message["content"]} if message.get("content") else self.empty_content
                rest = {key: value for key, value in message.items() if key != "content"}
                messages[i] = {**rest, **content, "tool_calls": [{**call, "function": f} for call, f in zip(calls, functions)]}
        return chat._replace(messages=messages)

    def examples(self, given: Chat, train_on: int | str = "all") -> list[Rendered]:
        """Return the chat as text, or one text per answer if the template writes an answer differently once others follow."""
        if used := [name for name in RESERVED if name in given.template_options]:
            raise UnusableRow(f"its chat_template_kwargs contain `{used[0]}`, which is no option of a template (remove it)")
        plain = self.convert(given)
        chat = self.mark(plain)
        notes = CONTROL * (chat is not plain)
        text, spans = self.render(chat)
        if notes and unmarked(text) != self.render(plain)[0]:
            raise UnusableRow("a control token stands in its text, and the chat template does not keep it apart (remove it)")
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        number = {"all": len(answers), "last": 1}.get(str(train_on), train_on)
        chosen = [i for i in answers[-int(number) :] if chat.trained[i]]
        if not chosen:
            raise UnusableRow(f"--train_on {train_on} chooses none of its answers, because their weight is 0")
        places = self._find(text, chat, answers, chosen) or {i: self._place(chat, i, text) for i in chosen}
        if all(text.startswith(place.whole) for place in places.values()):
            return [self._finish(plain, text, spans, places, notes)]
        made = []
        for i, place in places.items():
            spans = self.render(chat, i + 1)[1] if self._has_tags(chat) else []
            place = place._replace(stop=min(place.stop, len(place.whole)))
            until = plain._replace(messages=plain.messages[: i + 1])
            made.append(self._finish(until, place.whole, spans, {i: place}, notes | SPLIT))
        return made

    def _place(self, chat: Chat, i: int, text: str) -> Place:
        prompt = self.render(chat, i, prompt=True)[0]
        whole = text if i == len(chat.messages) - 1 else self.render(chat, i + 1)[0]
        before = prompt if whole.startswith(prompt) else prompt.removesuffix(self.lost_prompt)
        if not whole.startswith(before):  # the answer changes the turns before it (gpt-oss): the last header begins it
            other = chat._replace(messages=[*chat.messages[:i], {"role": "assistant", "content": "Reply2"}])
            before = _common(self.render(other)[0], whole)
            head, header, rest = before.rpartition(self.header or "Reply2")
            before = head + header if self.opening.startswith(rest) else before
        return Place(len(before), self._find_end(len(before), whole, text), whole, prompt)

    def _find_end(self, start: int, whole: str, text: str) -> int:
        """Return where the answer at the end of `whole` ends: behind its end token, else the control token after it (GLM)."""
        at, found = len(whole), 0
        while self.end:
            at = start + len(whole[start:at].rstrip())
            if not (token := next((end for end in self.ends if whole.endswith(end, start, at)), "")):
                break
            found = at if token == self.end or not found else found
            at -= len(token)
        following = self.controls.match(text, len(whole)) if text.startswith(whole) else None
        return found or (following.end() if following else len(whole))

    def _find(self, text: str, chat: Chat, answers: list[int], chosen: list[int]) -> dict[int, Place]:
        """Return the places of the chosen answers without a rendering for each, or {} if that is not safe.

        A long chat would take a time that grows with its square. Nothing but the template writes what is before an answer, and the
        end token behind it. The first and the last answer are compared with the generation prompts.
        """
        is_safe = self.limit and len(chosen) > 2 and (chosen == answers or not self._has_tags(chat))
        others = (self.limit.strip(), "</think>")
        if not is_safe or any(set(m) - {"role", "content"} or any(one in m["content"] for one in others) for m in chat.messages):
            return {}
        turns, found, at, end = text.split(self.limit), {}, 0, re.compile(f"(?<!{LEFT}){re.escape(self.end)}")
        ends = [end.search(turn) for turn in turns[1:]]
        if len(ends) != len(answers) or not all(ends):
            return {}
        for i, turn, match in zip(answers, turns, ends):
            at += len(turn) + len(self.limit)
            found[i] = Place(at, at + match.end() if match else at, text, "")
        last = self._place(chat, chosen[-1], text)
        for i, place in ((chosen[0], self._place(chat, chosen[0], text)), (chosen[-1], last)):
            if place[:2] != found[i][:2] or not text.startswith(place.whole):
                return {}
        found[chosen[-1]] = last
        return {i: found[i] for i in chosen}

    def _finish(self, chat: Chat, text: str, spans: list[tuple[int, int]], places: dict[int, Place], notes: int) -> Rendered:
        """Return a text with its answers, after a comparison of all fields of the chat with it."""
        answers, kept = [(place.start, place.stop) for place in places.values()], None
        notes |= self._compare(chat, text, places, is_split=bool(notes & SPLIT))
        if self._has_tags(chat):  # marks of the answers that are not chosen are left out
            inside = lambda span: any(span[0] < len(one.whole) and span[1] > one.start for one in places.values())
            kept = [span for span in spans if inside(span)]
        for start, stop, _, prompt in places.values():
            is_marked = kept is None or any(first < stop <= last for first, last in kept)
            notes |= NO_END * (not (is_marked and text.endswith(self.end_tokens, start, stop)))
            notes |= NO_PREFIX * (len(prompt) > start)
        return Rendered(text, answers, "", kept, prompt, notes)

    def _compare(self, chat: Chat, text: str, chosen: Container[int], is_split: bool) -> int:
        """Raise UnusableRow if the text lacks a field of the chat. Thoughts of answers that are not learned here are noted."""
        text, notes, squeezed = unmarked(text), 0, ""
        for field, place, values in _fields(chat):
            is_missing = field in self.unwritten and not chat.template_options  # options may change what is written
            for value in values if not is_missing else ():
                if value.strip() not in text:
                    squeezed = squeezed or _squeeze(text)
                    is_missing = is_missing or not any(form in squeezed for form in _forms(value))
            # What is left out of an answer here is learned in the example of that answer.
            may_miss = field in THOUGHT_FIELDS or (is_split and chat.messages[place]["role"] == "assistant")
            if is_missing and not (may_miss and place not in chosen):
                raise UnusableRow(f"{self.name} does not write `{field}` (remove it, or give another --chat_template)")
            notes |= THOUGHTS * is_missing
        if ignored := [name for name in chat.template_options if not re.search(rf"\b{re.escape(name)}\b", self.source)]:
            raise UnusableRow(f"{self.name} does not use `{ignored[0]}` (remove it, or give another --chat_template)")
        return notes

    def mark(self, chat: Chat) -> Chat:
        patterns = [self.foreign if message["role"] == "assistant" else self.literals for message in chat.messages]
        messages = [{**mark(one, pattern), "role": one["role"]} for one, pattern in zip(chat.messages, patterns)]
        others = {"tools": mark(chat.tools, self.literals), "template_options": mark(chat.template_options, self.literals)}
        marked = chat._replace(messages=messages, **others)
        return chat if marked == chat else marked


def mark(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(f"{LEFT}\\g<0>{RIGHT}", unmarked(value)) if pattern.search(value) else value
    if isinstance(value, dict):
        return {key: mark(item, pattern) for key, item in value.items()}
    return [mark(item, pattern) for item in value] if isinstance(value, list) else value


def special_tokens(tokenizer: Any) -> set[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return {token for token in (*added, *tokenizer.all_special_tokens) if token.strip()}


def unmarked(text: str) -> str:
    return text.translate(_MARKS)


def any_of(words: Any) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or r"(?!)")


def _common(a: str, b: str) -> str:
    return next((a[:i] for i, (x, y) in enumerate(zip(a, b)) if x != y), a[: len(b)])


def _fields(chat: Chat) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the name of each field, the place of its message, and the texts that must appear."""
    for tool in chat.tools or ():
        function = tool.get("function", tool)
        keys = (function.get("parameters") or {}).get("properties") or {}
        yield "tools", -1, [*_texts([function.get("name"), function.get("description")]), *keys]
    if "documents" in chat.template_options:
        yield "documents", -1, _texts(chat.template_options["documents"])
    for place, message in enumerate(chat.messages):
        content, role = message.get("content") or "", message["role"]
        if role == "assistant" and "</think>" in content:
            thoughts, _, content = content.rpartition("</think>")
            yield "<think> in content", place, [thoughts.rpartition("<think>")[2]]
        with_call = " with tool_calls" if message.get("tool_calls") else ""
        yield "system" if role == "system" else f"content of a {role} message{with_call}", place, [content]
        if message.get("name") and role in ("user", "system"):
            yield "name", place, _texts(message["name"])
        if thoughts := message.get("reasoning_content"):
            yield "reasoning_content", place, [thoughts]
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            yield "tool_calls", place, [call["function"]["name"], *_texts(arguments)]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *_texts(item))]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [] if value is None else [value if isinstance(value, str) else json.dumps(value)]


def _squeeze(text: str) -> str:
    return "".join(text.split()).casefold()  # a template may trim and indent, and write `True` for JSON's `true`


def _forms(value: str) -> list[str]:
    """Return how a template may write a text: as it is, or inside JSON, which may be inside JSON."""
    inner = json.dumps(value, ensure_ascii=False)[1:-1]
    texts = [value, inner, json.dumps(value)[1:-1], json.dumps(inner, ensure_ascii=False)[1:-1]]
    return [_squeeze(text) for text in texts]


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text in which marked control tokens are ordinary text. Other text has its usual tokens."""
    encode = lambda text, **more: tokenizer.encode(text, add_special_tokens=False, verbose=False, **more)
    line, ids = encode("\n"), []
    for i, piece in enumerate(map(unmarked, _MARKED.split(text))):
        if not piece:
            continue
        # Behind a line break, because some tokenizers put a space before every text.
        more = encode("\n" * bool(ids) + piece, **({"split_special_tokens": True} if i % 2 else {}))
        more = more[len(line) :] if ids and more[: len(line)] == line else encode(piece) if ids else more
        if i % 2 and tokenizer.convert_tokens_to_ids(piece) in more:  # a tokenizer splits only special ones
            more = encode(piece[:1]) + encode(piece[1:])
        ids += more
    return ids


def tokenize(rows: list[Rendered], tokenizer: Any, learn_all: bool) -> list[tuple[list[int], list[int], bool]]:
    """Return token ids and labels of each row, and whether the tokens of a prompt change if the answer follows.

    Then the answer is learned from the first token that differs. With `learn_all` all tokens are learned. Parts of a text that are
    tokenized separately may have other tokens than the whole text. The whole text is therefore tokenized. Its beginnings are
    tokenized too, from their last special token on, to find the places of the answers.
    """
    # Tokenizers split a text at these tokens before anything else. A slow one has none.
    added = tokenizer.added_tokens_decoder.values() if tokenizer.is_fast else ()
    special = any_of(token.content for token in added if not (token.normalized or token.single_word or token.lstrip))
    special = re.compile(f"{_MARKED.pattern}|({special.pattern})")
    encoded = tokenizer(["" if LEFT in row.text else row.text for row in rows], add_special_tokens=False, verbose=False)
    every = list(encoded["input_ids"])
    tails: dict[tuple[int, int], tuple[int, str]] = {}  # for each end of a beginning: where its last part begins, and the part
    firsts: dict[tuple[int, int], int] = {}  # for each beginning of a part: the number of tokens before it
    for number, row in enumerate(rows):
        is_marked = LEFT in row.text
        spans = row.answers if row.spans is None else row.spans if is_marked else []
        places = [at for span in spans for at in span]
        found = [token.span() for token in special.finditer(row.text) if token[2]] if places else []
        for at in places:
            place = bisect_right(found, at, key=lambda span: span[1])
            start = found[place - 1][0] if place else 0
            tails[number, at] = start, row.text[start:at]
            firsts[number, start] = (encoded.char_to_token(number, start) or 0) if start and not is_marked else 0
        if is_marked:
            parts, every[number] = sorted({0, *(tails[number, at][0] for at in places)}), []
            for start, end in zip(parts, [*parts[1:], len(row.text)]):
                firsts[number, start] = len(every[number])
                every[number] += encode_marked(tokenizer, row.text[start:end])
    texts = list({text: 0 for _, text in tails.values() if LEFT not in text})
    tokens = dict(zip(texts, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])) if texts else {}

    def compare(number: int, at: int) -> tuple[int, int]:
        """Return how many tokens the beginning of a row has, and how many of these are the same in the whole row."""
        (start, text), ids = tails[number, at], every[number]
        place, tail = firsts[number, start], encode_marked(tokenizer, text) if LEFT in text else tokens[text]
        pairs = enumerate(zip(tail, ids[place : place + len(tail)]))
        same = next((i for i, (a, b) in pairs if a != b), min(len(tail), len(ids) - place))
        return place + len(tail), place + same

    done = []
    for number, row in enumerate(rows):
        ids, is_changed = every[number], False
        labels = list(ids) if learn_all else [-100] * len(ids)
        for first, last in row.spans or ():
            if LEFT in row.text:
                start, end = (compare(number, at)[0] for at in (first, last))
            else:  # as `return_assistant_tokens_mask` of transformers
                start, stop = (encoded.char_to_token(number, at) for at in (first, last - 1))
                end = len(ids) if stop is None else stop + 1
            if start is not None:
                labels[start:end] = ids[start:end]
        for before, until in row.answers if row.spans is None else ():
            length, start = compare(number, before)
            end = compare(number, until)[1]  # a token that also contains a part of the next turn is not learned
            is_changed, labels[start:end] = is_changed or start < length, ids[start:end]
        done.append((ids, labels, is_changed))
    return done
