"""Tests of the tokens of `sft`: a chat has the tokens of `apply_chat_template`, and what cannot be included is refused."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import datasets
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from accel_ddp.errors import UserError
from accel_ddp.sources.tokenization import SOURCE, pack_documents
from accel_ddp.tasks import chat
from accel_ddp.tasks.chat_rows import USUAL_COLUMNS, Chat, UnusableRow, choose_columns, read_row

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


def form_of(tokenizer, column: str = "messages", max_length: int = 1000, **more: object):
    given = {"model": "tiny", "max_length": max_length, "train_on_prompts": False, "separator": "", "row_format": 2, **more}
    columns = {"messages_column": "", "prompt_column": "", "answer_column": "", "text_column": ""}
    return chat.Format(
        datasets.Dataset.from_dict({name: [""] for name in column.split()}), tokenizer, SimpleNamespace(**columns, **given)
    )


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return make_tokenizer(request.param)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokens_of_a_chat_are_those_of_apply_chat_template(tokenizer, template):
    """Compare the ids of whole chats, and what precedes each answer with the prompt that a model is given in use."""
    tokenizer.chat_template = TEMPLATES[template]
    apply = lambda messages, **more: tokenizer.apply_chat_template(messages, return_dict=False, **more)
    chats = make_chats()
    done = form_of(tokenizer).encode({"messages": chats})
    refused = 0
    for messages, ids, labels, problem in zip(chats, done["input_ids"], done["labels"], done["problem"]):
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        whole, prompts = apply(messages), [apply(messages[:i], add_generation_prompt=True) for i in answers]
        if problem:
            refused += 1
            assert "tokens of its prompt change" in problem
            assert any(whole[: len(prompt)] != prompt for prompt in prompts)
            continue
        assert ids == whole
        learned = [i for i, label in enumerate(labels) if label != -100]
        assert all(labels[i] == ids[i] for i in learned)
        assert [ids[:i] for i in learned if labels[i - 1] == -100] == prompts
        ends = [ids[: i + 1] for i in learned if [*labels, -100][i + 1] == -100]
        for end, last in zip(ends, answers):
            until = apply(messages[: last + 1])
            assert end == until or (until != whole[: len(until)] and end == until[: len(end)])
    assert refused < len(chats) / 4, done["problem"]


def test_a_prompt_whose_tokens_change_if_the_answer_follows_is_refused():
    tokenizer = make_tokenizer("byte level")
    rows = [[user("Hi"), answer("\nHello")], [user("Hi"), answer("Hello")]]
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    done = form_of(tokenizer).encode({"messages": rows})
    assert "tokens of its prompt change" in done["problem"][0]
    assert done["problem"][1] == ""


def test_prompts_and_texts_without_a_template_have_the_tokens_that_are_used_for_generation(tokenizer):
    """A tokenizer puts its first token before each text, and no token between a prompt and its answer."""
    tokenizer.chat_template = None
    bare = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    first = [] if "ByT5" in type(tokenizer).__name__ else tokenizer("a")["input_ids"][: -len(bare("a"))]
    rows = {"prompt": TEXTS, "answer": [text.strip() for text in TEXTS[::-1]]}
    whole = [f"{prompt}{wanted}" for prompt, wanted in zip(*rows.values())]
    done, number = form_of(tokenizer, "prompt answer").encode(rows), 0
    for prompt, text, ids, labels, problem in zip(TEXTS, whole, done["input_ids"], done["labels"], done["problem"]):
        if not problem:  # nothing is put between them, and the prompt has the tokens that it has alone
            number += 1
            start = next(i for i, label in enumerate(labels) if label != -100)
            assert ids[:start] == first + bare(prompt)
            assert tokenizer.decode(ids) == tokenizer.decode(first + bare(f"{text}</s>"))
    assert number >= len(TEXTS) - 3, done["problem"]
    form = form_of(tokenizer, "prompt answer", separator=r"\n")
    old = form_of(tokenizer, "prompt answer", row_format=1)  # inserts a line break
    new, done, number = form.encode(rows), old.encode(rows), 0
    assert all(problem or a == b for problem, a, b in zip(done["problem"], done["input_ids"], new["input_ids"]))
    for prompt, wanted, ids, labels, problem in zip(*rows.values(), done["input_ids"], done["labels"], done["problem"]):
        if not problem:
            number += 1
            start = next(i for i, label in enumerate(labels) if label != -100)
            assert ids == first + bare(f"{prompt}\n{wanted}</s>")
            assert ids[:start] == first + bare(f"{prompt}\n")
    assert number >= len(TEXTS) - 2, done["problem"]
    done = form_of(tokenizer, "text").encode({"text": TEXTS})
    assert done["input_ids"] == [first + bare(f"{text}</s>") for text in TEXTS]
    samples = form.select_samples(datasets.Dataset.from_dict(rows), 3, max_tokens=1000)
    assert [sample.ids for sample in samples] == [first + bare(f"{prompt}\n") for prompt in TEXTS[:3]]


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
        "a tool call has no function with a name\tmessage 2, call 1": [user("Hi"), answer("", tool_calls=[{"type": "function"}])],
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
        "the key 'tool_cals', which the chat template does not use (did you mean": [user("Hi", tool_cals=1), answer("a")],
        "the key 'colour', which the chat template does not use (remove it)": [user("Hi", colour="red"), answer("Hello")],
        "the content of a message is not text\tmessage 1, 7": [user(7), answer("Hello")],
        "a message of the user is empty": [user(None), answer("Hello")],
        "sft trains text only, and a message has an image\tmessage 1": [user([{"type": "image_url"}, *parts]), answer("Hello")],
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
        ({"conversations": [said("gpt", "Welcome"), said("human", "Hi"), said("gpt", "Hello")]}, "-ua"),
        ({"instruction": "Hi", "input": "", "output": "Hello", "history": [["A", "B"]], "system": "Be brief."}, "suaua"),
        ({"prompt": "Hi", "completion": "Hello"}, "ua"),
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
    messages, tools, options, trained = chats[0]
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
        ({"messages": TALK, "tools": [{"x": 1}]}, "the column tools is not a list of tools with names"),
        ({"messages": TALK, "images": ["a.png"]}, "sft trains text only, and its column images has content"),
        ({"messages": TALK, "history": [["a", "b"]]}, "its column history has content"),
        ({"messages": [{"role": "system", "content": "A"}, *TALK], "system": "B"}, "another one in its messages"),
        ({"messages": TALK, "chat_template_kwargs": "[1]"}, "chat_template_kwargs is not an object"),
        ({"prompt": "Hi", "answer": "Hello", "history": "[[1]]"}, "the column history is not a list of pairs"),
        ({"prompt": "Hi", "answer": None}, "its answer is empty"),
        ({"prompt": 3, "answer": "Hello"}, "message 1"),
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
        "--messages_column chosen.": {"chosen": TALK, "rejected": TALK},
        "--prompt_column conversations --answer_column chosen or": {
            "conversations": [said("human", "Hi")], "chosen": said("gpt", "Hello"), "rejected": said("gpt", "Bye")
        },
        "KTO: column label": {"prompt": "Hi", "completion": "Hello", "label": False},
        "KTO: column kto_tag": {"messages": TALK, "kto_tag": "true"},
    }  # fmt: skip
    for reason, row in refused.items():
        with pytest.raises(UserError, match=re.escape(reason)):
            choose_columns(datasets.Dataset.from_list([row]), given)
    pairs = [refused[reason] for reason in refused if "--prompt_column" in reason]
    for row, prompt in zip(pairs, ("prompt", "conversations")):
        named = given | {"prompt_column": prompt, "answer_column": "chosen"}
        kind, columns = choose_columns(datasets.Dataset.from_list([row]), named)
        assert read_row(kind, columns, row, CHATML) == Chat(TALK, trained=(False, True))
    assert choose_columns(datasets.Dataset.from_list([{"text": "a", "label": True}]), given) == ("texts", ("text",))


def test_every_token_of_a_text_is_trained_once():
    """Long texts are split, and their parts and short texts share rows. Compare with the tokens of the texts."""
    tokenizer = make_tokenizer("byte level")
    texts = [" ".join(TEXTS[i:] * i) + "</s>" * (i == 3) for i in range(10)][1:]
    done = form_of(tokenizer, "text", max_length=16).encode({"text": texts})
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
    old = form_of(tokenizer, "text", max_length=16, row_format=1).encode({"text": texts})
    assert len(old["input_ids"]) <= len(done["input_ids"])
    assert [old["input_ids"][i] for i in (0, 1)] == [done["input_ids"][0], done["input_ids"][1][1:] + old["input_ids"][1][-1:]]
