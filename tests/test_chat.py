"""Tests of the tokens of `sft`: a chat has the tokens of `apply_chat_template`, and what cannot be included is refused."""

import dataclasses
import datetime
import functools
import json
import re
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from accel_ddp.config.option_values import CHAT_TEMPLATES
from accel_ddp.errors import UserError
from accel_ddp.memory import fake_model
from accel_ddp.memory.estimate_command import load_recipe
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.sources import models as source_models
from accel_ddp.sources.data import with_row_numbers
from accel_ddp.sources.table_files import ColumnNames
from accel_ddp.sources.tokenization import SOURCE, pack_documents
from accel_ddp.speed.linear_cross_entropy import OutputHead
from accel_ddp.tasks import chat, chat_template
from accel_ddp.tasks.chat_rows import USUAL_COLUMNS, Chat, UnusableRow, choose_columns, read_row
from accel_ddp.training.optim import hidden_matrices
from tests.conftest import ROOT

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
LLAMA = (  # bos in the template, and an end token in the middle of a chat
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{% if m.name %}{{ m.name }} {% endif %}{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
TEMPLATES = {"llama": LLAMA, "chatml": CHATML, "plain": PLAIN}

TEXTS = [
    "Hello",
    "How are you today?",
    "naïve café",
    "日本語です",
    "a\n\nb",
    "x = 1\n    return x",
    "👍🏽 ok",
    "end. ",
    "</s> in text",
    "I'm",
]


def user(text: str, **more: object) -> dict:
    return {"role": "user", "content": text, **more}


def answer(text: str | None, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def make_chats() -> list[list[dict]]:
    chats = []
    for i, text in enumerate(TEXTS):
        turns = [user(text), answer(TEXTS[i - 1])]
        chats += [turns, [user(" "), *turns[1:]], [{"role": "system", "content": TEXTS[i - 2]}, *turns]]
        chats += [turns + [user(TEXTS[i - 3]), answer(text)] * 3, [*turns, user("and then?")]]
    return chats


def make_tokenizer(kind: str):
    """Return a tokenizer that treats the beginning of a text in its own way."""
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    if kind == "slow":
        slow = ByT5Tokenizer(bos_token="<s>")
        slow.add_tokens(["<s>", "<|im_start|>", "<|im_end|>"], special_tokens=True)
        return slow
    model = models.WordPiece(unk_token="<unk>") if kind == "word piece" else models.BPE(unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    alphabet: list[str] = []
    if kind == "prepend":  # Llama 2
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind.startswith("metaspace"):  # Mistral
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.split()[1], split=False)
    elif kind == "word piece":
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:  # GPT-2, and RoBERTa with a space before each text
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte level with a space")
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 600, "special_tokens": SPECIAL, "show_progress": False, "initial_alphabet": alphabet}
    trainer = trainers.WordPieceTrainer if kind == "word piece" else trainers.BpeTrainer
    backend.train_from_iterator([*TEXTS * 3, "user assistant system [INST] [/INST] <<SYS>> \n\n \n"], trainer(**options))
    if kind != "word piece":
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


KINDS = ["byte level", "byte level with a space", "prepend", "metaspace first", "metaspace always", "word piece", "slow"]


@functools.cache
def recipe_config() -> type:
    return load_recipe(ROOT / "recipes" / "sft.py").Config


def form_of(tokenizer, column: str = "messages", max_length: int = 1000, **more: object):
    cfg = recipe_config()(model="tiny", max_length=max_length, **more)
    return chat.Format(datasets.Dataset.from_dict({name: [""] for name in column.split()}), tokenizer, cfg)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return make_tokenizer(request.param)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokens_of_a_chat_are_those_of_apply_chat_template(tokenizer, template):
    """Compare the ids of whole chats, and what precedes each answer with the prompt that a model is given in use."""
    tokenizer.chat_template = TEMPLATES[template]
    apply = lambda messages, **more: tokenizer.apply_chat_template(messages, return_dict=False, **more)
    chats = [messages for messages in make_chats() if "</s>" not in str(messages)]
    done = form_of(tokenizer).encode({"messages": chats})
    assert not any(done["problem"])
    for messages, ids, labels in zip(chats, done["input_ids"], done["labels"]):
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        whole, prompts = apply(messages), [apply(messages[:i], add_generation_prompt=True) for i in answers]
        assert ids == whole
        learned = [i for i, label in enumerate(labels) if label != -100]
        assert all(labels[i] == ids[i] for i in learned)
        assert [ids[:i] for i in learned if labels[i - 1] == -100] == prompts
        ends = [ids[: i + 1] for i in learned if [*labels, -100][i + 1] == -100]
        for end, last in zip(ends, answers):
            until = apply(messages[: last + 1])
            if template == "chatml":  # without the line break behind the end token
                until = until[: len(until) - until[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))]
            assert end == until or (until != whole[: len(until)] and end == until[: len(end)])


def test_an_answer_that_begins_inside_a_token_is_trained_from_this_token():
    tokenizer = make_tokenizer("byte level")
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    rows = [[*TALK, user("Hi"), answer("\nHello")], TALK]
    done = form_of(tokenizer).encode({"messages": rows})
    assert done["problem"] == ["", ""]
    assert [notes & chat_template.NO_PREFIX > 0 for notes in done["notes"]] == [True, False]
    assert done["input_ids"][0] == tokenizer.apply_chat_template(rows[0], return_dict=False)
    trained = [tokenizer.decode([label for label in labels if label != -100]) for labels in done["labels"]]
    assert trained == ["Hello<|im_end|>\n\nHello<|im_end|>", "Hello<|im_end|>"]


def test_control_tokens_in_texts_without_a_template_are_those_of_the_tokenizer(tokenizer):
    """A text may be a formatted chat. Its rows are reported, and a text that ends with the end token has it once."""
    tokenizer.chat_template = None
    end = tokenizer.eos_token
    for columns in (("text",), ("prompt", "answer")):
        texts = [f" Hello {end} you", " Hello you", " Hello you"]
        rows = {name: [*texts[:2], texts[2] + end * (name != "prompt")] for name in columns}
        done = form_of(tokenizer, " ".join(columns)).encode(rows)
        number = [ids.count(tokenizer.eos_token_id) for ids in done["input_ids"]]
        assert (done["problem"], done["notes"]) == ([""] * 3, [chat_template.CONTROL, 0, 0])
        assert number == [len(columns) + 1, 1, 1]
        assert done["input_ids"][1] == done["input_ids"][2]


def test_prompts_and_texts_without_a_template_have_the_tokens_that_are_used_for_generation(tokenizer):
    """A tokenizer puts its first token before each text, and no token between a prompt and its answer."""
    texts = [text for text in TEXTS if "</s>" not in text]
    tokenizer.chat_template = None
    bare = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    first = [] if "ByT5" in type(tokenizer).__name__ else tokenizer("a")["input_ids"][: -len(bare("a"))]
    rows = {"prompt": texts, "answer": [text.strip() for text in texts[::-1]]}
    for separator in ("", r"\n"):
        form = form_of(tokenizer, "prompt answer", separator=separator)
        done, number = form.encode(rows), 0
        for prompt, wanted, ids, labels, problem in zip(*rows.values(), done["input_ids"], done["labels"], done["problem"]):
            if not problem:  # only the separator is put between them, and the prompt has the tokens that it has alone
                number += 1
                before = prompt + "\n" * bool(separator)
                start = next(i for i, label in enumerate(labels) if label != -100)
                alone, whole = (first + bare(text) for text in (before, f"{before}{wanted}</s>"))
                assert ids[:start] == alone
                assert ids == whole or alone != whole[:start]
                assert tokenizer.decode(ids) == tokenizer.decode(whole)
        assert number >= len(texts) - 3, done["problem"]
    done = form_of(tokenizer, "text").encode({"text": texts})
    assert done["input_ids"] == [first + bare(f"{text}</s>") for text in texts]
    samples = form.select_samples(datasets.Dataset.from_dict(rows), 3, max_tokens=1000)
    assert [sample.ids for sample in samples] == [first + bare(f"{prompt}\n") for prompt in texts[:3]]


def test_samples_are_generated_from_the_tokens_of_the_chat_template():
    """The continuation of a model depends on every token of its prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer("prepend")
    tokenizer.chat_template = LLAMA
    chats = [[user("Hello"), answer("How are you"), user("I'm ok"), answer("end.")]]
    (sample,) = form_of(tokenizer).select_samples(datasets.Dataset.from_dict({"messages": chats}), 1, max_tokens=100)
    assert sample.ids == tokenizer.apply_chat_template(chats[0][:3], return_dict=False, add_generation_prompt=True)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, initializer_range=0.5, eos_token_id=None))
    wanted = model.generate(input_ids=torch.tensor([sample.ids]), max_new_tokens=5, do_sample=False)[0, len(sample.ids) :]
    assert chat.generate(model, tokenizer, [sample.ids], 5) == [tokenizer.decode(wanted, skip_special_tokens=True)]


def test_messages_that_cannot_be_used_are_named_and_keys_that_the_template_uses_reach_it():
    tokenizer = make_tokenizer("byte level")
    tokenizer.chat_template = CHATML
    parts = [{"type": "text", "text": "Hi", "image": None}, {"type": "text", "text": " there", "image": None}]
    bad = {
        "the arguments of a tool call cannot be read as JSON\tmessage 2, call 1: '{x'": [
            user("Hi"), answer(None, tool_calls=[{"function": {"name": "add", "arguments": "{x"}}])
        ],
        "the arguments of a tool call are not a JSON object\tmessage 2, call 1: [1]": [
            user("Hi"), answer("", function_call={"name": "add", "arguments": "[1]"})
        ],
        "a tool call has no function with a name\tmessage 2, call 1": [user("Hi"), answer("", tool_calls=5)],
        "tool_calls cannot be read as JSON\tmessage 2, 'add'": [user("Hi"), answer("", tool_calls="add")],
        "a tool call has no function with a name\tmessage 2, call": [user("Hi"), answer("", tool_calls=[{"type": "function"}])],
        "a tool call cannot be read as JSON\tmessage 2, 'add(1)'": [user("Hi"), {"from": "function_call", "value": "add(1)"}],
        "different texts in reasoning_content, thinking": [user("Hi"), answer("Hello", thinking="a", reasoning="b")],
        "the weight of a message is 0.5": [user("Hi"), answer("Hello", weight=0.5)],
        "none of its answers has the weight 1": [user("Hi"), answer("Hello", weight=0)],
        "it has only answers": [answer("Hello"), answer("Hello")],
        "no message has the role assistant": [user("Hi")],
        "it has no messages": [],
        "an answer is empty\tmessage 2": [user("Hi"), answer(" ")],
        "a message has no role (its keys are content)": [{"content": "Hi"}, answer("Hello")],
        "a message has no role and content": ["Hi", answer("Hello")],
        "a message has the role 'asistant' (did you mean 'assistant'?)": [user("Hi"), {"role": "asistant", "content": "Hello"}],
        "a message has the role 'gtp' (did you mean 'gpt'?)": [user("Hi"), answer("Hello"), {"from": "gtp", "value": "Hello"}],
        "a message has the role 'critic' (the chat template does not name it": [*TALK, {"role": "critic", "content": "Hm"}],
        "the key 'tool_cals', which the chat template does not use (did you mean": [user("Hi", tool_cals=1), answer("a")],
        "the key 'colour', which the chat template does not use (remove it)": [user("Hi", colour="red"), answer("Hello")],
        "the content of a message is not text\tmessage 1, 7": [user(7), answer("Hello")],
        "a message of the user is empty": [user(None), answer("Hello")],
        "only text can be used, and a message has an image\tmessage 1": [user([{"type": "image_url"}, *parts]), answer("Hello")],
        "a part of the type 'tool_result'": [user([{"type": "tool_result"}]), answer("Hello")],
    }  # fmt: skip
    done = form_of(tokenizer).encode({"messages": list(bad.values())})
    for reason, problem in zip(bad, done["problem"]):
        assert reason in problem
    good = [user("Hi", name="Ann", tool_calls=None), answer("Hello", tool_calls=[], reasoning_content=None, weight=1)]
    done = form_of(tokenizer).encode({"messages": [good], "tools": ["[]"], "system": [None]})
    assert done["problem"] == [""]
    assert done["input_ids"] == [tokenizer.apply_chat_template(good, return_dict=False)]
    assert "Ann" in tokenizer.decode(done["input_ids"][0])
    rows = [[user(parts), answer("Hello")], [user("Hi there"), answer("Hello")]]
    done = form_of(tokenizer).encode({"messages": rows})
    assert done["problem"] == ["", ""]
    assert done["input_ids"][0] == done["input_ids"][1]


TALK = [user("Hi"), answer("Hello")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": None}}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}
IN_JSON = {"function": {"name": "add", "arguments": '{"x": 1, "y": null}'}}
OTHER = {"function": {"name": "add", "arguments": {"x": 1, "z": None}}}  # Arrow adds z, which other rows have


def said(role: str, text: str) -> dict:
    return {"from": role, "value": text}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [*TALK, user("So?"), answer("Yes", weight=0), answer("No", train=True)]}, "uau-a"),
        ({"messages": json.dumps(TALK), "system": "Be brief."}, "sua"),
        ({"conversations": [said("system", "Be brief."), said("human", "Hi"), said("chatgpt", "Hello")]}, "sua"),
        ({"messages": [*TALK, user("So?"), {"role": "model", "content": "Yes"}]}, "uaua"),
        ({"conversations": [said("gpt", "Welcome"), said("Human", "Hi"), said("GPT", "Hello")]}, "-ua"),
        ({"instruction": "Hi", "input": "", "output": "Hello", "history": [["A", "B"]], "system": "Be brief."}, "suaua"),
        ({"prompt": "Hi", "completion": "Hello"}, "ua"),
        ({"system_prompt": "Be brief.", "question": "Hi", "response": "Hello"}, "sua"),  # OpenOrca
        ({"system_prompt": "", "instruction": "Hi", "context": "", "response": "Hello"}, "ua"),
        ({"prompt": [user("A"), answer("B"), user("Hi")], "completion": TALK[1:]}, "u-ua"),
        ({"prompt": TALK[:1], "completion": "Hello"}, "ua"),
        ({"prompt": "Hi", "completion": TALK}, "ua"),  # the answer is a whole chat
    ],
)
def test_rows_of_usual_formats_become_chats(row, wanted):
    """`wanted` has a letter for each message: the role, or - for an answer that is not trained."""
    kind, columns = choose_columns(datasets.Dataset.from_list([row]), dict.fromkeys(USUAL_COLUMNS, ""))
    chat = read_row(kind, columns, row, CHATML)
    letters = [
        m["role"][0] if m["role"] != "assistant" or is_trained else "-" for m, is_trained in zip(chat.messages, chat.trained)
    ]
    assert "".join(letters) == wanted
    assert {"role": "user", "content": "Hi"} in chat.messages
    assert not any(m.keys() - {"role", "content"} for m in chat.messages)


def test_one_row_of_another_format_does_not_choose_the_column(tmp_path):
    rows = datasets.Dataset.from_list([{"conversations": TALK}, {"messages": TALK}, {"conversations": TALK}])
    assert choose_columns(rows, dict.fromkeys(USUAL_COLUMNS, "")) == ("chats", ("conversations",))
    lacks_one = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": ["a", None, "c"], "response": ["x"] * 3})
    assert choose_columns(lacks_one, dict.fromkeys(USUAL_COLUMNS, "")) == ("instructions", ("prompt", "answer"))
    rows.to_json(tmp_path / "rows.jsonl")
    names = ColumnNames(str(tmp_path / "rows.jsonl"))  # what is known before ranks start, without reading the file
    assert choose_columns(names, dict.fromkeys(USUAL_COLUMNS, ""))[0] == "chats"
    with pytest.raises(UserError, match=r"conversation: there is no such column\..* Did you mean conversations\?"):
        choose_columns(rows, {**dict.fromkeys(USUAL_COLUMNS, ""), "messages_column": "conversation"})


def test_what_an_instruction_is_about_is_a_part_of_its_prompt():
    row = {"instruction": "Hi", "context": "A", "input": "B", "output": "C"}
    kind, columns = choose_columns(datasets.Dataset.from_list([row]), dict.fromkeys(USUAL_COLUMNS, ""))
    assert read_row(kind, columns, row) == ("Hi\n\nB\n\nA", "C")


def test_tools_calls_and_thoughts_have_one_form():
    """Compare OpenAI's form, its older one and LLaMA-Factory's, also in a table, which fills keys that other rows have."""
    openai = {
        "messages": [user("1"), answer(None, tool_calls=[IN_JSON]), {"role": "tool", "content": "2"}, answer("2", thinking="a")]
    }
    older = [
        user("1"),
        answer("", function_call=IN_JSON["function"]),
        {"role": "function", "content": "2"},
        answer("2", reasoning="a"),
    ]
    factory = [said("human", "1"), said("function_call", IN_JSON["function"]), said("observation", "2"), said("gpt", "2")]
    factory[1]["value"] = json.dumps({"name": "add", "arguments": {"x": 1, "y": None}})
    factory[3]["reasoning_content"] = "a"
    rows = [
        {**openai, "tools": [{"type": "function", "function": {**ADD, "strict": None}}], "documents": "[]"},
        {"messages": older, "functions": [ADD]},
        {"messages": factory, "tools": json.dumps([ADD]), "chat_template_kwargs": {}},
    ]
    chats = [read_row("chats", ("messages",), row, CHATML) for row in rows]
    assert chats[0] == chats[1] == chats[2]
    whole = {"type": "function", "function": {**ADD, "parameters": json.dumps(ADD["parameters"])}}
    calls = [[IN_JSON], json.dumps([IN_JSON]), IN_JSON]
    other = [{"messages": [user("1"), answer(None, tool_calls=one), *openai["messages"][2:]], "tools": whole} for one in calls]
    assert all(read_row("chats", ("messages",), row, CHATML) == chats[0] for row in other)
    messages, tools, options, trained, _ = chats[0]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}, "a null that JSON states is kept"
    assert messages[3] == {"role": "assistant", "content": "2", "reasoning_content": "a", "thinking": "a"}
    assert (tools, options, trained) == ([{"type": "function", "function": ADD}], {}, (False, True, False, True))
    table = [
        {"messages": [*TALK[:1], answer("", tool_calls=[call])]}
        for call in (OTHER, {"function": {"name": "b", "arguments": {"z": 1}}})
    ]
    table = datasets.Dataset.from_list(table)
    assert read_row("chats", ("messages",), table[0], CHATML).messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    options = {"documents": [{"text": "a", "title": None}], "chat_template_kwargs": '{"enable_thinking": false}'}
    chat = read_row("chats", ("messages",), {"messages": TALK, **options}, CHATML)
    assert chat.template_options == {"documents": [{"text": "a"}], "enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": TALK, "tools": "[add"}, "the column tools cannot be read as JSON\t'[add'"),
        ({"messages": TALK, "tools": [{"x": 1}]}, "a tool of the column tools is not an object with a name\t{'x': 1}"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "a tool of the column tools is not an object with a name"),
        ({"messages": TALK, "tools": "5"}, "a tool of the column tools is not an object with a name"),
        (
            {"messages": TALK, "tools": [{"type": "function", "function": "add"}]},
            "a tool of the column tools cannot be read as JSON",
        ),
        (
            {"messages": TALK, "tools": [{**ADD, "parameters": "[1]"}]},
            "the parameters of a tool of the column tools are not a JSON",
        ),
        ({"messages": TALK, "tools": [{**ADD, "parameters": {"properties": ["x"]}}]}, "are not a JSON schema"),
        ({"messages": TALK, "images": ["a.png"]}, "only text can be used, and its column images has content"),
        ({"messages": TALK, "image": "a.png"}, "only text can be used, and its column image has content"),
        ({"messages": TALK, "history": [["a", "b"]]}, "its column history has content"),
        ({"messages": [{"role": "system", "content": "A"}, *TALK], "system": "B"}, "another one in its messages"),
        ({"messages": TALK, "system": "A", "system_prompt": "B"}, "in the column system_prompt and another one"),
        ({"messages": TALK, "chat_template_kwargs": "[1]"}, "chat_template_kwargs is not an object"),
        ({"prompt": "Hi", "answer": "Hello", "history": "[[1]]"}, "the column history is not a list of pairs"),
        ({"prompt": "Hi", "answer": None}, "its answer is empty"),
        ({"prompt": 3, "answer": "Hello"}, "its prompt is not text\t3"),
        ({"prompt": 3, "answer": TALK}, "message 1"),
        ({"text": " "}, "its text is empty"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row, reason):
    kind, columns = choose_columns(datasets.Dataset.from_list([row]), dict.fromkeys(USUAL_COLUMNS, ""))
    with pytest.raises(UnusableRow, match=re.escape(reason)):
        read_row(kind, columns, row, CHATML)


def test_prompts_that_need_a_template_are_refused_without_one():
    assert read_row("instructions", ("prompt", "answer"), {"prompt": "Hi", "answer": "Hello"}) == ("Hi", "Hello")
    for row in ({"prompt": "Hi", "answer": "Hello", "system": "A"}, {"prompt": TALK[:1], "answer": "Hello"}):
        with pytest.raises(UnusableRow, match="needs a chat template"):
            read_row("instructions", ("prompt", "answer"), row)


def test_preferences_and_labeled_answers_are_refused_unless_columns_are_named():
    given = dict.fromkeys(USUAL_COLUMNS, "")
    refused = {
        "--prompt_column prompt --answer_column chosen.": {"prompt": "Hi", "chosen": "Hello", "rejected": "Bye"},
        "--messages_column chosen.": {"prompt": "Hi", "messages": TALK, "chosen": TALK, "rejected": TALK},  # UltraFeedback
        "--prompt_column conversations --answer_column chosen.": {
            "conversations": [said("human", "Hi")], "chosen": said("gpt", "Hello"), "rejected": said("gpt", "Bye")
        },
        "--prompt_column messages --answer_column chosen.": {"messages": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]},
        "--text_column chosen.": {"chosen": "Human: Hi", "rejected": "Human: Bye"},
    }  # fmt: skip
    for reason, row in refused.items():
        rows = datasets.Dataset.from_list([row])
        with pytest.raises(UserError, match=f"`accel-ddp run dpo` .*{re.escape(reason)}"):
            choose_columns(rows, given)
        words = reason.rstrip(".").replace("--", "").split()
        kind, columns = choose_columns(rows, given | dict(zip(words[::2], words[1::2])))
        found = read_row(kind, columns, row, CHATML)
        assert found == (row["chosen"] if "text" in reason else Chat(TALK, trained=(False, True))), "the advice works"
    labels = {"label": [[False], [True, False, None], [1, 0], [1.0, 0.0, None]], "kto_tag": [["true", "false"]]}
    for name, values in ((name, one) for name, columns in labels.items() for one in columns):
        rows = {"prompt": ["Hi"] * len(values), "completion": ["Hello"] * len(values), name: values}
        with pytest.raises(UserError, match=rf"column {name}\).* whose {name} is (false|0|0.0) too. .*run dpo --loss kto"):
            choose_columns(datasets.Dataset.from_dict(rows), given)
    for values in ([True, True], [2, 0], [[0], [1]]):  # nothing is bad, or it means something else
        rows = {"prompt": ["Hi"] * 2, "completion": ["Hello"] * 2, "label": values}
        assert choose_columns(datasets.Dataset.from_dict(rows), given) == ("instructions", ("prompt", "completion"))
    assert choose_columns(datasets.Dataset.from_list([{"text": "a", "label": True}]), given) == ("texts", ("text",))


def test_every_token_of_a_text_is_trained_once():
    """Long texts are split, and their parts and short texts share rows. Compare with the tokens of the texts."""
    tokenizer = make_tokenizer("byte level")
    texts = [" ".join(TEXTS[i:] * i).replace("</s>", "") + "</s>" * (i == 3) for i in range(10)][1:]
    form = form_of(tokenizer, "text")
    done = form._cut(form.encode({"text": texts}), 16)
    packed = pack_documents({name: done[name] for name in ("input_ids", "attention_mask", "labels")}, 16)
    assert max(map(len, packed["input_ids"])) == 16
    assert sum(map(len, packed["input_ids"])) > 0.95 * 16 * (len(packed["input_ids"]) - 1), "rows are filled"
    trained: list = [[] for _ in texts]
    for source, ids, labels in zip(done[SOURCE], done["input_ids"], done["labels"]):
        assert labels[0] == -100
        assert ids[1:] == labels[1:]
        if trained[source]:
            assert ids[0] == trained[source][-1], "a part begins with the last token of the part before it"
        trained[source] += labels[1:]
    assert trained == [tokenizer(text.removesuffix("</s>") + "</s>", add_special_tokens=False)["input_ids"] for text in texts]
    count = lambda labels: Counter(label for row in labels for label in row)
    assert count(packed["labels"]) == count(done["labels"])


def tokenizer_with(template: str, *controls: str):
    tokenizer = make_tokenizer("byte level")
    tokenizer.add_tokens(list(controls), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def own_template(name: str) -> str:
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def finish(form, rows: list, tiny_model: str, tmp_path: Path, **more: object):
    """Return the configuration and the rows for training and evaluation."""
    cfg = recipe_config()(model=tiny_model, cache_dir=str(tmp_path), dataset="chats", **more)
    made = form.encode({"messages": rows})
    numbers = np.array(made.pop(SOURCE))
    tables = [with_row_numbers(datasets.Dataset.from_dict(made), numbers) for _ in range(2)]
    return cfg, form.finish(tables, cfg)


def test_a_field_that_the_template_does_not_write_is_named():
    """Llama 3 templates of the tests and Phi's leave out fields. What is only written in another way is no reason to refuse."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 'a "b"\n', "y": [1.5, True]}}}
    tool = {"type": "function", "function": {"name": "add", "description": "Adds\ttwo  words", "parameters": {}}}
    result = {"role": "tool", "content": '{"a": "b\\n"}', "name": "add"}
    called = [user("Hi "), answer("", tool_calls=[call]), result, answer(" Hello\n\n")]
    rows = {
        "": ({"messages": called, "tools": [tool]}, "qwen2_5"),
        "tool_calls": ({"messages": called}, "phi3"),
        "tools": ({"messages": TALK, "tools": [tool]}, "phi3"),
        "reasoning_content": ({"messages": [user("Hi"), answer("Hello", reasoning_content="H")]}, "phi3"),
        "content of a assistant message with tool_calls": (
            {"messages": [user("Hi"), answer("Look", tool_calls=[call])]},
            "llama3_1",
        ),
        "<think> in content": ({"messages": [user("Hi"), answer("<think>Mm</think>Hello")]}, "deepseek_r1"),
        "documents": ({"messages": TALK, "documents": [{"text": "a page"}]}, "qwen2_5"),
        "name": ({"messages": [user("Hi", name="Zoe"), answer("Hello")]}, "qwen2_5"),
        "enable_thinking": ({"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}, "phi3"),
    }
    for field, (row, name) in rows.items():
        form = form_of(tokenizer_with(own_template(name)), " ".join(row))
        (problem,) = form.encode({column: [value] for column, value in row.items()})["problem"]
        assert bool(problem) == bool(field), problem
        assert re.search(f"^the chat template of tiny does not (write|use) `{field}` .remove it", problem) or not field


def test_options_of_a_template_do_not_replace_columns():
    form = form_of(tokenizer_with(CHATML), "messages chat_template_kwargs")
    for name, value in {"tools": [1], "messages": "", "colour": "", "shape": []}.items():
        (problem,) = form.encode({"messages": [TALK], "chat_template_kwargs": [{name: value}]})["problem"]
        assert re.search(
            f"contain `{name}`, which is no option" if name in ("tools", "messages") else f"not use `{name}`", problem
        )


def test_one_of_several_templates_may_mark_answers():
    marking = CHATML.replace("{{ m.content }}<|im_end|>", (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    ))  # fmt: skip
    with_tools = marking.replace("{% for", "{{ tools }}{% for", 1)
    tokenizer = tokenizer_with({"default": CHATML, "tool_use": with_tools})
    done = form_of(tokenizer, "messages tools").encode({"messages": [TALK, TALK], "tools": [None, [ADD]]})
    trained = [tokenizer.decode([label for label in labels if label != -100]) for labels in done["labels"]]
    assert (done["problem"], trained) == (["", ""], ["Hello<|im_end|>", "Hello"])


def test_a_date_of_the_template_is_fixed_and_known(capsys):
    tokenizer = tokenizer_with(
        own_template("gpt_oss"), "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|channel|>", "<|call|>"
    )
    texts = []
    for given in ("auto", "2020-02-03"):
        form = form_of(tokenizer, template_date=given)
        texts.append(tokenizer.decode(form.encode({"messages": [TALK]})["input_ids"][0]))
        assert form.date in form.identity
    printed = capsys.readouterr().out
    assert f"template_date {datetime.date.today()}: the chat template writes the date" in printed
    assert len(printed.splitlines()) == 1
    assert str(datetime.date.today()) in texts[0]
    assert "2020-02-03" in texts[1]
    with pytest.raises(UserError, match="--template_date today: is not a date"):
        form_of(tokenizer, template_date="today")


def test_a_model_without_a_template_gets_one(tmp_path):
    """Built-in templates that suit the vocabulary train answers up to their end token, and are saved with the tokenizer."""
    controls = {
        "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "gemma": ["<start_of_turn>", "<end_of_turn>"],
    }
    ends = {"plain": " Hello</s>", "mistral": " Hello</s>", "chatml": "Hello<|im_end|>", "llama3": "Hello<|eot_id|>"}
    chats = [{"role": "system", "content": "Be brief."}, *TALK, user("I'm"), answer("Hello")]
    for name, end in (ends | {"gemma": "Hello<end_of_turn>"}).items():
        tokenizer = tokenizer_with(None, *controls.get(name, []))
        done = form_of(tokenizer, chat_template=name).encode({"messages": [chats]})
        assert (done["problem"], done["notes"]) == ([""], [0]), name
        assert tokenizer.decode([id for id in done["labels"][0] if id != -100]) == end * 2
        assert done["input_ids"][0] == tokenizer.apply_chat_template(chats, return_dict=False)
    tool = {"type": "function", "function": ADD | {"description": "Adds"}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    called = [
        chats[0],
        user("Hi"),
        answer("", tool_calls=[call], reasoning_content="They add."),
        {"role": "tool", "content": "3"},
    ]
    rows = {"messages": [[*called, answer("It is 3")], [*called[1:], answer("It is 3")]], "tools": [[tool]] * 2}
    tokenizer = tokenizer_with(None)
    done = form_of(tokenizer, "messages tools", chat_template="chatml").encode(rows)
    assert (done["problem"], done["notes"]) == (["", ""], [0, 0])
    written = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    for messages, ids, labels in zip(rows["messages"], done["input_ids"], done["labels"]):
        trained = tokenizer.decode([label for label in labels if label != -100])
        assert trained == f"<think>\nThey add.\n</think>\n\n{written}It is 3<|im_end|>"
        assert ids == tokenizer.apply_chat_template(messages, tools=[tool], return_dict=False)
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == tokenizer.chat_template
    (tmp_path / "own.jinja").write_text(CHATML)
    (tmp_path / "latin.jinja").write_bytes((CHATML + "é").encode("latin-1"))
    for given in (str(tmp_path / "own.jinja"), CHATML):
        form_of(tokenizer, chat_template=given)
        assert tokenizer.chat_template == CHATML
    for given, reason in {
        "chatmll": "no such file or built-in template. Did you mean chatml?",
        "{% for m in messages %}{{ m.content }}": "cannot be used for chats: Unexpected end of template",
        "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}": "does not write the messages of the assistant",
        str(tmp_path / "latin.jinja"): "is no text in UTF-8",
        "{{ raise_exception('no') }}": "cannot be used for chats: no. Give another one",
    }.items():
        with pytest.raises(UserError, match=re.escape(reason)):
            form_of(tokenizer_with(None), chat_template=given)
    lacks = "lacks one of its tokens: <|start_header_id|> <|end_header_id|> <|eot_id|>. Use one of: plain, chatml, mistral"
    with pytest.raises(UserError, match=re.escape(lacks)):  # `accel-ddp predict`, which trains nothing
        chat_template.set_template(tokenizer_with(None), recipe_config()(model="tiny", chat_template="llama3"))
    assert tuple(chat_template.TEMPLATES) == CHAT_TEMPLATES
    recipe_config()(chat_template="chatml").validate()
    with pytest.raises(
        UserError, match=r"--chat_template chatm: there is no such file or built-in template. Did you mean chatml\?"
    ):
        recipe_config()(chat_template="chatm").validate()
    tokenizer = tokenizer_with(None)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    assert form_of(tokenizer, chat_template="plain").template.end == tokenizer.eos_token
    with pytest.raises(UserError, match=r"no chat template, which chats need.* --chat_template plain"):
        form_of(tokenizer_with(None))


@pytest.mark.parametrize(("is_tied", "room"), [(False, 0), (True, 0), (False, 9)])
def test_adapters_train_the_embeddings_of_new_tokens(is_tied, room, tmp_path, monkeypatch):
    """They compute what peft's own layers compute. `room` embeddings of the base model belong to no token."""
    import torch
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer_with(None)
    size = {"vocab_size": len(tokenizer) + room, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": is_tied, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**size, **ends)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    form_of(tokenizer, chat_template="llama3")
    new = tokenizer.new_token_ids
    assert [tokenizer.eos_token, *new] == ["<|eot_id|>", *range(len(tokenizer))[-3:]]
    cfg = recipe_config()(model=str(tmp_path), lora_r=2, mixed_precision="no", max_length=9, chat_template="llama3")
    model = source_models.adapt(source_models.load(AutoModelForCausalLM, cfg, tokenizer), cfg, "CAUSAL_LM")
    rows = {name: p for name, p in model.named_parameters() if "tokens_delta" in name}
    assert [p.requires_grad for p in rows.values()] == [True] * (1 if is_tied else 2)
    assert not hidden_matrices(model) & {*rows.values()}
    estimated = fake_model.build(cfg, "AutoModelForCausalLM").model
    assert [p.shape for p in estimated.parameters() if p.requires_grad] == [
        p.shape for p in model.parameters() if p.requires_grad
    ]
    assert None not in (OutputHead(estimated).head, OutputHead(model).head), "the loss is computed in chunks"
    found = []
    for layers in ([], [layer for layer in model.modules() if isinstance(layer, TrainableTokensLayer)]):
        for layer in layers:
            del layer.forward  # ours
        model.zero_grad()
        output = model(input_ids=torch.tensor([[3, new[0], 5, new[2]]]), labels=torch.tensor([[3, new[0], 5, new[2]]]))
        output.loss.backward()
        found.append([output.logits.detach(), *(p.grad for p in rows.values())])
    assert len(layers) == 2
    assert all(value.abs().sum() > 0 for value in found[0])
    torch.testing.assert_close(*found)
    load = source_models.from_pretrained

    def load_quantized(*args, **options):
        found = load(*args, **options)
        if "output_loading_info" in options:
            found[0].config.quantization_config = {}
        return found

    monkeypatch.setattr(source_models, "_quantization_options", lambda _: {})
    monkeypatch.setattr(source_models, "from_pretrained", load_quantized)
    quantized = source_models.load(AutoModelForCausalLM, dataclasses.replace(cfg, quantize="4bit"), tokenizer)
    assert quantized._original_config.vocab_size == len(tokenizer) + max(0, room - 3), "as the exported adapters need it"
    with pytest.raises(UserError, match=r"--chat_template llama3 --lora_r 2: adds tokens.*FSDP.*Use --chat_template plain"):
        source_models.load(AutoModelForCausalLM, cfg, tokenizer, plan=ShardingPlan())


def test_max_length_is_chosen_by_the_data_up_to_the_limit_of_the_model(tiny_model, tmp_path, capsys, caplog):
    form = form_of(tokenizer_with(CHATML))
    rows = [[user("Hi " * (i % 3 + 1)), answer("Hello " * 10)] for i in range(1, 41)]
    cfg, (train, _) = finish(form, rows, tiny_model, tmp_path)
    longest = max(map(len, train["input_ids"]))
    assert cfg.max_length == -(-longest // 64) * 64
    assert (
        f"max_length {cfg.max_length}: the longest row has {longest} tokens (--max_length changes it)" in capsys.readouterr().out
    )
    rows[0] = [user("Hi"), answer("Hello " * 600)]
    cfg, (train, _) = finish(form, rows, tiny_model, tmp_path)
    assert (cfg.max_length, max(map(len, train["input_ids"]))) == (512, 512), "the limit of the model"
    assert "1 of 40 training rows are longer and lose the end of their answer" in caplog.text
    assert train.features["labels"] == datasets.Dataset.from_dict({"labels": [[1]]}).features["labels"]
    with pytest.raises(
        UserError, match="accepts at most 512 tokens, and 40 of 40 training rows would lose a part of their answer"
    ):
        finish(form, rows[:1] * 40, tiny_model, tmp_path)
    _, (train, _) = finish(form, rows[:1] * 40, tiny_model, tmp_path, max_length=512)
    assert len(train) == 40, "the user has set it"
    broken = [user("Hi " * 600), answer("Hello", reasoning_content="A thought")]
    capsys.readouterr()
    cfg, (train, _) = finish(form, [*rows[1:], broken], tiny_model, tmp_path, skip_broken=True)
    assert (cfg.max_length, len(train)) == (-(-longest // 64) * 64, 39), "a row that is not used needs no place"
    assert f"the longest row has {longest} tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="No training rows are left"):
        finish(form, [broken], tiny_model, tmp_path, skip_broken=True)
    assert "max_length" not in capsys.readouterr().out
    rows[5] = [user("Hi " * 600), answer("Hello")]
    words = r"1 of 40 rows .*:\n  its prompt fills --max_length 512.* \(the longest prompt has [\d,]+ tokens\): row 6\n"
    with pytest.raises(UserError, match=words):
        finish(form, rows, tiny_model, tmp_path)
    longest = next(i for i, label in enumerate(form.encode({"messages": rows[1:2]})["labels"][0]) if label != -100)
    words = f"longest prompt has {longest} tokens; leave --max_length out to fit the data): row 1\nNo training rows are left."
    with pytest.raises(UserError, match=re.escape(words)):
        finish(form, rows[1:2], tiny_model, tmp_path, max_length=4)


def test_what_is_special_to_rows_is_stated_once(tiny_model, tmp_path, caplog):
    thoughts = [answer("Hello", reasoning_content=text) for text in ("They greet.", "They sleep.")]
    cases = {
        "qwen3": (
            [user("Hi"), thoughts[0], user("I'm"), thoughts[1]],
            "4 chats become 8 examples, one per answer",
            "4 examples begin without",
        ),
        "deepseek_r1": (TALK, "the generation prompt is not the beginning of 4 chats", ""),
        "glm4": (TALK, "In 4 rows no token that ends the answer is trained", ""),
        "chatml": ([user("</s> a"), answer("Hello")], "in the texts of 2 training rows (1, 2) and 2 eval", ""),
    }
    caplog.set_level("INFO")
    for name, (row, *words) in cases.items():
        caplog.clear()
        tokenizer = tokenizer_with(own_template(name), "<|user|>", "<|assistant|>")
        finish(form_of(tokenizer), [row, row], tiny_model, tmp_path)
        assert all(word in caplog.text for word in words), caplog.text


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_of_long_chats_are_found_without_a_rendering_for_each(name):
    """A control token that stands in an answer does not end it."""
    tokenizer = tokenizer_with(TEMPLATES[name])
    form = form_of(tokenizer)
    template, ends = form.template, [" <|im_end|> </s>" * (i in (2, 5)) for i in range(9)]
    row = [turn for i in range(9) for turn in (user(TEXTS[i % 8]), answer(f"{TEXTS[-i % 8]}{ends[i]} {i}"))]
    given, number = Chat(row, trained=(False, True) * 9), 0
    render, find = template.render, template._find

    def counted(*args: object, **more: object):
        nonlocal number
        number += 1
        return render(*args, **more)

    template.render = counted
    for train_on in ("all", 4):
        number = 0
        fast = template.examples(given, train_on)
        assert number <= 7 or name == "plain", "no control token separates its turns"
        template._find = lambda *args: {}
        assert fast == template.examples(given, train_on)
        template._find = find
    (labels,), end = form.encode({"messages": [row]})["labels"], {"llama": "</s>", "chatml": "<|im_end|>", "plain": "\n"}[name]
    wanted = "".join(" " * (name == "llama") + message["content"] + end for message in row[1::2])
    assert tokenizer.decode([label for label in labels if label != -100]) == wanted


def test_an_answer_at_the_beginning_is_context_or_left_out():
    """A template that rejects it gets the rest of the chat, also in samples. A system prompt stays."""
    tokenizer = make_tokenizer("byte level")
    rows = [[answer("I'm"), *TALK], [{"role": "system", "content": "end."}, answer("I'm"), *TALK], TALK]
    system = [rows[1][0], *TALK]
    tokenizer.chat_template = CHATML
    done = form_of(tokenizer).encode({"messages": rows})
    trained = [tokenizer.decode([label for label in labels if label != -100]) for labels in done["labels"]]
    assert trained == ["Hello<|im_end|>", "I'm<|im_end|>Hello<|im_end|>", "Hello<|im_end|>"]
    assert done["input_ids"][0] == tokenizer.apply_chat_template(rows[0], return_dict=False)
    tokenizer.chat_template = CHATML.replace("{% for m in messages %}", (
        "{% set talk = messages | rejectattr('role', 'equalto', 'system') | list %}"
        "{% if talk[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}{% for m in messages %}"
    ))  # fmt: skip
    form = form_of(tokenizer)
    done = form.encode({"messages": rows})
    assert done["problem"] == ["", "", ""]
    wanted = [tokenizer.apply_chat_template(messages, return_dict=False) for messages in (TALK, system, TALK)]
    assert done["input_ids"] == wanted
    assert [notes & chat_template.LEFT_OUT > 0 for notes in done["notes"]] == [True, True, False]
    assert form.first_prompt(datasets.Dataset.from_dict({"messages": rows})) == TALK[:1]
