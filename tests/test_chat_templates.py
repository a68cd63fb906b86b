"""Proof of the trained tokens of chats, for templates of many families: our own ones, and the files that TRL ships.

What is expected is computed here from the specification, without the code of `accel_ddp`: the input is what `apply_chat_template`
returns. Trained is the template's own mask where it has `{% generation %}` tags, elsewhere what stands between the role of the
assistant and the end of its turn, found by a regular expression in the rendered text and by the character offsets of the tokens.
"""
# ruff: noqa: RUF001  (control tokens of DeepSeek)

import contextlib
import functools
import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from accel_ddp.sources.tokenization import SOURCE
from accel_ddp.tasks import chat
from tests.conftest import ROOT

OWN = {path.stem: path for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
_package = importlib.util.find_spec("trl")  # finds the folder without an import
TRL = {path.stem: path for path in sorted((Path(_package.origin).parent / "chat_templates").glob("*.jinja"))} if _package else {}

# What a model writes, from the role of the assistant through the end of its turn. The first one whose beginning occurs in a
# template is used.
ANSWERS = {
    "<end_of_utterance>": r"Assistant:(.*?<end_of_utterance>)",
    "<|im_start|>": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
    "<|start_header_id|>": r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    "<start_of_turn>": r"<start_of_turn>model\n(.*?<end_of_turn>)",
    "<|turn>": r"<\|turn>model\n(.*?<turn\|>)",
    "<|eom|>": r"<\|start\|>assistant(.*?(?:<\|eot\|>|<\|eom\|>(?!<\|start\|>assistant)))",
    "<|channel|>": r"<\|start\|>assistant(.*?(?:<\|return\|>|<\|call\|>|<\|end\|>(?!<\|start\|>assistant)))",
    "<｜Assistant｜>": r"(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)(.*?<｜end▁of▁sentence｜>)",
    "[gMASK]": r"<\|assistant\|>(.*?(?:<\|user\|>|<\|observation\|>|<\|assistant\|>|$))",  # the next role ends an answer
    "<|assistant|>": r"<\|assistant\|>\n(.*?<\|end\|>)",
    "<|CHATBOT_TOKEN|>": r"<\|CHATBOT_TOKEN\|>(.*?<\|END_OF_TURN_TOKEN\|>)",
    "[INST]": r"(?:\[/INST\]|\[/TOOL_RESULTS\])(.*?</s>)",
}
NAMES = {  # the special tokens that templates write by name
    "<｜Assistant｜>": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "<|assistant|>": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "<start_of_turn>": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "<|turn>": {"bos_token": "<bos>", "eos_token": "<eos>"},
}
CONTROL = re.compile(r"<[|｜][^<>\s']{2,40}[|｜]>|</?(?:start|end)_of_turn>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{4,}\]|<sop>")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(*names: str) -> list[dict[str, Any]]:
    made = zip(names, ("call00001", "call00002"), ("Bergen", "Narvik"))
    return [{"id": id, "type": "function", "function": {"name": name, "arguments": {"town": town}}} for name, id, town in made]


def result(text: str, name: str, id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": id, "content": text}


def tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string", "description": "umbra"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "ventus", "parameters": schema}}


SYSTEM = {"role": "system", "content": "Respond like Zacharias."}
TOOLS = [tool("forecast", "town"), tool("convert", "town")]
QUESTION, WORLD, WARM = user("What is the sky made of?"), user("naïve café 👍🏽?"), user("Is it warm in Oslo?")
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([QUESTION, answer("Mostly nitrogen.")], None),
    "three turns": (
        [QUESTION, answer("Mostly nitrogen."), WORLD, answer("Très bien."), user("Bye"), answer("x = 1\n\n  return x")], None,
    ),
    "system": ([SYSTEM, QUESTION, answer("Mostly nitrogen."), WORLD, answer("Très bien.")], None),
    "open": ([QUESTION, answer("Mostly nitrogen."), WORLD], None),
    "tools unused": ([QUESTION, answer("Mostly nitrogen.")], TOOLS),
    "tools": ([WARM, answer("", tool_calls=calls("forecast")), result("minus", "forecast"), answer("It freezes.")], TOOLS),
    "calls alone": ([WARM, answer("", tool_calls=calls("forecast")), result("minus", "forecast"), answer("It freezes.")], None),
    "two calls": (
        [SYSTEM, WARM, answer("", tool_calls=calls("forecast", "convert")), result("minus", "forecast"),
         result("kelvin", "convert", "call00002"), answer("It freezes."), user("Bye"), answer("Farewell.")], TOOLS,
    ),
    "words and a call": (
        [WARM, answer("Let me look.", tool_calls=calls("forecast")), result("minus", "forecast"), answer("It freezes.")],
        TOOLS,
    ),
    "reasoning": ([QUESTION, answer("Mostly nitrogen.", reasoning_content="They mean air.")], None),
    "two thoughts": (
        [QUESTION, answer("Mostly nitrogen.", reasoning_content="They mean air."), WORLD,
         answer("Très bien.", reasoning_content="A riddle.")], None,
    ),
    "thoughts and a call": (
        [WARM, answer("", tool_calls=calls("forecast"), reasoning_content="They mean air."), result("minus", "forecast"),
         answer("It freezes.", reasoning_content="A riddle.")], TOOLS,
    ),
}  # fmt: skip
# What must appear in the text of a chat: words of each field, which stand nowhere else.
FIELDS = {
    "system": ["Zacharias"],
    "tools": ["ventus", "umbra"],
    "tool_calls": ["Bergen", "Narvik"],
    "tool": ["minus", "kelvin"],  # the role of results
    "reasoning_content": ["They mean air.", "A riddle."],
    "content": ["sky made of", "Mostly nitrogen.", "naïve café 👍🏽?", "Très bien.", "return x", "freezes", "Let me", "Farewell."],
}  # fmt: skip


@functools.cache
def trained_backend(joins_lines: bool = False) -> str:
    """Return a byte-level BPE tokenizer with a few merges, as JSON. Two line breaks can be one token, as in Qwen."""
    backend = Tokenizer(models.BPE())
    lines = [pre_tokenizers.Split(Regex(r"\n+"), "isolated")] * joins_lines
    backend.pre_tokenizer = pre_tokenizers.Sequence([*lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    options = {"vocab_size": 480, "show_progress": False, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    texts = [json.dumps(chat, ensure_ascii=False) for chat in CHATS.values()]
    backend.train_from_iterator(
        [*texts, "user\n\nassistant\nsystem\n<think>\n\n</think>\n\n" * (1 + 9 * joins_lines)] * 3, trainers.BpeTrainer(**options)
    )
    return backend.to_str()


def family_of(template: str) -> str:
    return next(start for start in ANSWERS if start in template)


@functools.cache
def make_tokenizer(template: str, *added: str) -> Any:
    """Return a tokenizer with the control tokens of this template, and with further tokens that are not special."""
    from transformers import PreTrainedTokenizerFast

    names = NAMES.get(family_of(template), {"bos_token": "<s>", "eos_token": "</s>"})
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained_backend(bool(added))), **names, pad_token="<pad>")
    written = [*CONTROL.findall(template), "<|user|>", "<|system|>", "<|assistant|>"]  # Phi writes them in two parts
    made.add_tokens(sorted(set(written)), special_tokens=True)
    made.add_tokens(list(added))
    made.chat_template = template
    return made


@functools.cache
def recipe_config() -> Any:
    spec = importlib.util.spec_from_file_location("sft_recipe", ROOT / "recipes" / "sft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Config


def encode(tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> list[list[tuple[list[int], list[int], str]]]:
    """Return for each row the examples that are trained: ids, labels and the problem."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = {column: [row.get(column) for row in rows] for column in columns}
    given = datasets.Dataset.from_dict({column: [json.dumps(value) for value in values] for column, values in table.items()})
    form = chat.Format(given, tokenizer, recipe_config()(max_length=100_000, **options))
    done = form.encode(table)
    examples: list[list[tuple[list[int], list[int], str]]] = [[] for _ in rows]
    for source, *example in zip(done[SOURCE], done["input_ids"], done["labels"], done["problem"]):
        examples[source].append(tuple(example))
    return examples


def apply(tokenizer: Any, messages: list[dict], tools: list[dict] | None, **more: Any) -> Any:
    """Return what the template makes of this chat, in the form that the template needs."""
    return tokenizer.apply_chat_template(form_for(tokenizer.chat_template)(messages), tools=tools, **more)


@functools.cache
def form_for(template: str) -> Callable[[list[dict]], list[dict]]:
    """Return a function that gives messages the form in which the template writes texts and tool calls.

    Content is a text or a list of parts. Arguments of tool calls are dicts or JSON, and empty content beside a call is a text, None
    or missing. The first form is used that appears in the text, neither as a printed dict nor as JSON inside JSON.
    """
    tokenizer = make_tokenizer(template)

    def change(messages: list[dict], in_parts: bool, as_json: bool, empty: dict[str, Any]) -> list[dict]:
        done = json.loads(json.dumps(messages))
        for message in done:
            for call in message.get("tool_calls", []) if as_json else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            if message.get("tool_calls") and not message["content"]:
                del message["content"]
                message.update(empty)
            if in_parts:
                message["content"] = [{"type": "text", "text": message.get("content") or ""}]
        return done

    for in_parts, as_json, empty in itertools.product((False, True), (False, True), ({"content": ""}, {"content": None}, {})):
        changed = functools.partial(change, in_parts=in_parts, as_json=as_json, empty=empty)
        with contextlib.suppress(Exception):
            text = tokenizer.apply_chat_template(changed(CHATS["tools"][0]), tools=TOOLS, tokenize=False)
            if "Bergen" in text and not re.search(r"'town'|\\\"town|None", text):
                return changed
    for in_parts in (False, True):
        changed = functools.partial(change, in_parts=in_parts, as_json=False, empty={"content": ""})
        with contextlib.suppress(Exception):
            if "nitrogen" in tokenizer.apply_chat_template(changed(CHATS["one turn"][0]), tokenize=False):
                return changed
    raise AssertionError("the template writes no answers")


def render(tokenizer: Any, messages: list[dict], tools: list[dict] | None, **more: Any) -> str:
    return apply(tokenizer, messages, tools, tokenize=False, **more)


def mask_of(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> tuple[list[int], list[bool | None]]:
    """Return the ids of a chat, and for each token whether an answer contains it. None: the template does not decide it.

    A template whose generation prompt is no beginning of the chat does not say where an answer begins, behind the role or behind
    what it has in common with the generation prompt.
    """
    encoded = apply(tokenizer, messages, tools, return_dict=True)
    if has_tags(tokenizer.chat_template):
        return encoded["input_ids"], [bool(bit) for bit in apply(
            tokenizer, messages, tools, return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]]  # fmt: skip
    text = render(tokenizer, messages, tools)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert places["input_ids"] == encoded["input_ids"]
    spans = [found.span(1) for found in re.finditer(ANSWERS[family_of(tokenizer.chat_template)], text, flags=re.DOTALL)]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    is_called = any(message.get("tool_calls") for message in messages)
    if is_called and ("<|turn>" in text or "<｜tool▁calls▁begin｜>" in text):
        # In Gemma 4 and DeepSeek-R1 calls, results and the answer share one turn. Only what may not be trained is checked.
        return encoded["input_ids"], [None] * len(encoded["input_ids"])
    assert len(spans) == len(answers), text
    bits: list[bool | None] = [False] * len(places["input_ids"])
    for (start, end), i in zip(spans, answers):
        prompt = render(tokenizer, messages[:i], tools, add_generation_prompt=True)
        common = next((place for place, (a, b) in enumerate(zip(prompt, text)) if a != b), len(prompt))
        if text.startswith(prompt):
            start = max(start, common)
        for number, (_, last) in enumerate(places["offset_mapping"]):
            if start < last and last <= end:  # also a token that contains the end of the prompt
                bits[number] = None if last <= common else True
    return encoded["input_ids"], bits


def has_tags(template: str) -> bool:
    return re.search(r"{%-?\s*generation\b", template) is not None


def expected(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> list[tuple[list[int], list[bool | None]]]:
    """Return the examples of a chat: the whole chat, or, if the template rewrites earlier turns, one for each answer."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = render(tokenizer, messages, tools)
    if all(whole.startswith(render(tokenizer, messages[: i + 1], tools)) for i in answers):
        return [mask_of(tokenizer, messages, tools)]
    examples = []
    for i in answers:
        ids, bits = mask_of(tokenizer, messages[: i + 1], tools)
        end = max((number for number, bit in enumerate(bits) if bit is not False), default=0)
        start = next((number for number in range(end, -1, -1) if bits[number] is False), -1)
        examples.append((ids, [bit if number > start else False for number, bit in enumerate(bits)]))
    return examples


def reason_against(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> str:
    """Return why the template rejects this chat, or ""."""
    try:
        render(tokenizer, messages, tools)
    except Exception as error:  # a template is a program that can fail in many ways
        return str(error)
    return ""


def lost_fields(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> set[str]:
    """Return the fields with words that the template writes into no example of this chat."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [render(tokenizer, messages[: i + 1], tools) for i in [*answers, len(messages) - 1]]
    given = json.dumps([messages, tools], ensure_ascii=False)
    escaped = lambda word: json.dumps(word, ensure_ascii=False)[1:-1]
    return {
        field for field, words in FIELDS.items() for word in words
        if escaped(word) in given and not any(word in text for text in texts)
    }  # fmt: skip


SIMILAR = re.compile(r"_v\d|_vl|super|ultra|lightning|nothink|qwen3_6|phi3_5|smolvlm|cohere2|diffusion")  # to others of TRL
NAMES_OF_TRL = [pytest.param(f"trl/{name}", marks=[pytest.mark.slow] if SIMILAR.search(name) else []) for name in TRL]


@pytest.mark.parametrize("name", [*OWN, *NAMES_OF_TRL])
def test_the_trained_tokens_of_a_chat_are_those_of_its_template(name):
    """Compare ids and labels of chats with tools and thoughts with what the template gives. What it leaves out is refused."""
    template = (TRL[name.removeprefix("trl/")] if "/" in name else OWN[name]).read_text()
    compare_with_template(make_tokenizer(template), CHATS)


INNER = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
THOUGHT, CALLED = "<think>\nThey mean air.\n</think>\n\n", '<tool_call>\n{"name": "forecast"}\n</tool_call>'
IN_CONTENT: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "thoughts in content": ([QUESTION, answer(f"{THOUGHT}Mostly nitrogen.")], None),
    "two thoughts in content": ([QUESTION, answer(f"{THOUGHT}Mostly nitrogen."), WORLD, answer(f"{THOUGHT}Très bien.")], None),
    "thoughts, then none": ([QUESTION, answer(f"{THOUGHT}Mostly nitrogen."), WORLD, answer("Très bien.")], None),
    "thoughts and a call in content": ([user("Use <think> and <tool_call>"), answer(THOUGHT + CALLED)], None),
    "line breaks": ([QUESTION, answer("\n\nMostly nitrogen."), WORLD, answer("\nTrès bien.")], None),
}


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "glm4", *(f"trl/{name}" for name in ("qwen3_5_think", "qwen3_6", "glm4moe") if name in TRL)]
)
def test_thoughts_and_calls_of_answers_are_trained_as_their_tokens(name):
    """As in the tokenizers of Qwen and GLM, <think> is a token that is not special, and two line breaks are one token."""
    template = (TRL[name.removeprefix("trl/")] if "/" in name else OWN[name]).read_text()
    tokenizer = make_tokenizer(template, *INNER)
    assert [len(tokenizer.encode(text)) for text in ("<think>\n", "<think>\n\n</think>")] == [2, 3]
    chosen = ("three turns", "tools", "two thoughts")
    compare_with_template(tokenizer, IN_CONTENT | {title: CHATS[title] for title in chosen})
    ((example,),) = encode(tokenizer, [{"messages": IN_CONTENT["thoughts and a call in content"][0]}])
    tokens = [label for label in example[1] if label != -100]
    assert {tokenizer.convert_tokens_to_ids(token) for token in ("</think>", "<tool_call>", "</tool_call>")} <= {*tokens}


@pytest.mark.parametrize("name", OWN)
def test_special_tokens_that_the_template_does_not_write_stay_text_in_answers(name):
    tokenizer = make_tokenizer(OWN[name].read_text(), *INNER)
    chats = [[QUESTION, answer(f"It is {word}, {word}.")] for word in (tokenizer.pad_token, tokenizer.eos_token, "it")]
    found = [examples[0] for examples in encode(tokenizer, [{"messages": messages} for messages in chats])]
    special = [sorted(id for id in ids if id in tokenizer.all_special_ids) for ids, _, _ in found]
    assert special[0] == special[1] == special[2]
    assert f"It is {tokenizer.eos_token}, " in kept(found[1], tokenizer)


def compare_with_template(tokenizer: Any, chats: dict[str, tuple[list[dict], list[dict] | None]]) -> None:
    rows = [{"messages": messages} | ({"tools": tools} if tools else {}) for messages, tools in chats.values()]
    found = encode(tokenizer, rows)
    for (title, (messages, tools)), examples in zip(chats.items(), found):
        problems = {problem for _, _, problem in examples} - {""}
        error = reason_against(tokenizer, messages, tools)
        assert error[:30] in "".join(problems), (title, problems)
        lost = set() if error else lost_fields(tokenizer, messages, tools)
        assert bool(problems) == bool(error or lost), (title, lost, problems)
        if error:
            continue
        if lost:
            assert any(field in "".join(problems) for field in lost), (title, lost, problems)
            continue
        wanted = expected(tokenizer, messages, tools)
        assert [ids for ids, _, _ in examples] == [ids for ids, _ in wanted], title
        for (ids, labels, _), (_, bits) in zip(examples, wanted):
            trained = [label != -100 for label in labels]
            assert [label for label in labels if label != -100] == [id for id, bit in zip(ids, trained) if bit], title
            shown = tokenizer.decode([id for id, bit in zip(ids, trained) if bit])
            assert [bit if bits[i] is None else bits[i] for i, bit in enumerate(trained)] == trained, (title, shown)
            for word in ("sky made of", "naïve", "warm in", "Bye", *FIELDS["system"], *FIELDS["tools"], *FIELDS["tool"]):
                assert word not in shown, (title, shown)


def kept(example: tuple[list[int], list[int], str], tokenizer: Any) -> str:
    """Return the trained tokens of an example as text."""
    ids, labels, problem = example
    assert not problem
    return tokenizer.decode([id for id, label in zip(ids, labels) if label != -100])


@pytest.mark.parametrize("name", OWN)
def test_control_tokens_in_a_text_stay_text(name):
    """A user who writes an end-of-turn token ends no turn: it has the tokens of its characters, and the chat reads the same."""
    tokenizer = make_tokenizer(OWN[name].read_text())
    control = {token.content for token in tokenizer.added_tokens_decoder.values()}
    text = render(tokenizer, CHATS["one turn"][0], None)
    end = re.search(ANSWERS[family_of(tokenizer.chat_template)], text, flags=re.DOTALL)[1]
    written = next((token for token in control if end.endswith(token)), "<|user|>")
    chats = [[user(f"Is {text} a token?"), answer(f"Yes, {text} is one.")] for text in (written, "it")]
    (tricky,), (plain,) = encode(tokenizer, [{"messages": messages} for messages in chats])
    number = [sum(id in tokenizer.added_tokens_decoder for id in example[0]) for example in (tricky, plain)]
    assert number[0] == number[1], "a text has made a control token"
    wanted = tokenizer.decode(plain[0]).replace("Is it", f"Is {written}").replace("s, it", f"s, {written}")
    assert tokenizer.decode(tricky[0]) == wanted
    assert kept(tricky, tokenizer) == kept(plain, tokenizer).replace("it", written, 1)


def test_the_same_chat_has_the_same_tokens_in_every_format():
    tokenizer = make_tokenizer(OWN["qwen2_5"].read_text())
    messages = [SYSTEM, QUESTION, answer("Mostly nitrogen."), WORLD, answer("Très bien.")]
    sharegpt = [{"from": name, "value": message["content"]} for name, message in zip(["system", *["human", "gpt"] * 2], messages)]
    system, ask, first, more, last = (message["content"] for message in messages)
    alpaca = {"instruction": more, "input": "", "output": last, "system": system, "history": [[ask, first]]}
    rows = [{"messages": messages}, {"conversations": sharegpt}, {"conversations": sharegpt[1:], "system": system}, alpaca]
    found = [encode(tokenizer, [row])[0] for row in rows]
    assert [len(examples) for examples in found] == [1] * len(rows)
    assert kept(found[0][0], tokenizer) == f"{first}<|im_end|>{last}<|im_end|>"
    assert all(examples == found[0] for examples in found)
    halves = [{"prompt": messages[:-1], "completion": messages[-1:]}, {"prompt": messages[:4], "completion": messages}]
    for row in halves:
        (example,) = encode(tokenizer, [row])[0]
        assert example[0] == found[0][0][0]
        assert kept(example, tokenizer) == f"{last}<|im_end|>", "the answers of the prompt are context"
    texts = {"prompt": ask, "completion": first}
    assert encode(tokenizer, [texts]) == encode(tokenizer, [{"messages": messages[1:3]}])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "chatml_generation"])
def test_the_trained_answers_are_those_that_were_chosen(name):
    """Compare `weight` and `--train_on` with all answers. The other answers are context, with the same tokens."""
    tokenizer = make_tokenizer(OWN[name].read_text())
    messages, _ = CHATS["three turns"]
    texts = lambda row, **options: [kept(example, tokenizer) for example in encode(tokenizer, [row], **options)[0]]
    end = lambda text: text + "<|im_end|>"
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    every = [empty + end(message["content"]) for message in messages if message["role"] == "assistant"]
    joined = lambda parts: parts if name == "qwen3" else ["".join(parts)]
    assert texts({"messages": messages}) == joined(every)
    weighted = [message | {"weight": int(i == 3)} for i, message in enumerate(messages)]
    assert texts({"messages": weighted}) == joined(every[1:2])
    assert texts({"messages": messages}, train_on="all") == joined(every)
    assert texts({"messages": messages}, train_on="last") == joined(every[2:])
    assert texts({"messages": messages}, train_on=2) == joined(every[1:])
