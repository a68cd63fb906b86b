"""Raw text as blocks, and the words that are masked in them."""

import pickle
import random
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.engine.losses import cross_entropy
from accel_ddp.engine.rows import Collate, accept_rows
from accel_ddp.errors import UserError
from accel_ddp.seeds import seed_host
from accel_ddp.speed.linear_cross_entropy import OutputHead
from accel_ddp.tasks import masking, text_blocks
from accel_ddp.training.stream import _SeededItems

TEXT = "the unbelievable tokenizer splits extraordinarily long words, and [MASK] is text like any other: naïve 東京 ok"
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """WordPiece with few whole words, so that most words have several tokens."""
    from transformers import BertTokenizerFast

    letters = sorted(set("".join(WORDS).lower()) | set("abcdefghijklmnopqrstuvwxyz0123456789"))
    pieces = ["the", "and", "is", "ok", "un", "##able", "##er", "##ly", "token", "word", "##s"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *pieces]
    file = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    file.write_text("\n".join(dict.fromkeys(vocabulary)))
    return BertTokenizerFast(str(file), model_max_length=512)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return text_blocks.BlockTokenizer(tokenizer, "a model", 32)


def some_texts(number: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(0, 20))) for _ in range(number)]


@pytest.fixture(scope="module")
def blocks(tokens, tmp_path_factory):
    import datasets

    cfg = RecipeConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))
    return text_blocks.cut_into_blocks(datasets.Dataset.from_dict({"text": some_texts(2500)}), "text", tokens, cfg)


def masked_in_training(blocks, tokenizer, keys, seed=0):
    """Return items as `TrainBatches` fetches them. `keys` are (position in the stream, index)."""
    items = _SeededItems(masking.MaskedBlocks(blocks, tokenizer, 0.15), seed)
    return [items[key] for key in keys]


def test_every_token_is_in_exactly_one_block_and_blocks_are_full(tokenizer, tokens, blocks):
    inside = [token for block in blocks for token, word in zip(block["input_ids"], block["words"]) if word != text_blocks.SPECIAL]
    texts = [text for text in some_texts(2500) if text]
    expected = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert inside == [token for text in expected for token in text]
    assert tokenizer.mask_token_id not in inside
    for block in blocks:
        assert (block["input_ids"][0], block["input_ids"][-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert set(np.diff(block["words"][1:-1], prepend=0)) <= {0, 1}, "words are numbered from 0, in their order"
    short = [len(block["input_ids"]) for block in blocks if len(block["input_ids"]) < 32]
    assert len(short) <= 3, "one for each thousand rows"


def test_words_of_a_block_are_the_words_of_the_text(tokens):
    block = tokens.make_block(*tokens.tokenize(["unbelievable, the words", "", "ok"]))
    names = tokens.tokenizer.convert_ids_to_tokens(block["input_ids"])
    together = {}
    for name, word in zip(names, block["words"]):
        together[word] = together.get(word, "") + name.removeprefix("##")
    assert together == {-1: "[CLS][SEP]", 0: "unbelievable", 1: ",", 2: "the", 3: "words", 4: "ok"}


def test_masks_depend_on_the_seed_and_the_position_only(tokenizer, blocks):
    keys = [(position, position % len(blocks)) for position in range(40)]
    there = masked_in_training(blocks, tokenizer, keys)
    seed_host(99)
    assert masked_in_training(blocks, tokenizer, keys[::-1])[::-1] == there, "independent of the order and of earlier draws"
    items = _SeededItems(masking.MaskedBlocks(blocks, tokenizer, 0.15), 0)
    in_workers = DataLoader(items, batch_sampler=[keys[:7], keys[7:20], keys[20:]], collate_fn=list, num_workers=2)
    assert [item for batch in in_workers for item in batch] == there
    later = masked_in_training(blocks, tokenizer, [(position + len(blocks), index) for position, index in keys])
    assert sum(a == b for a, b in zip(there, later)) < 4, "other masks in the next epoch"
    assert sum(a == b for a, b in zip(there, masked_in_training(blocks, tokenizer, keys, seed=1))) < 4


def test_evaluations_always_use_the_same_masks(tokenizer, blocks):
    first = masking.MaskedBlocks(blocks, tokenizer, 0.15, seed=3)
    seen = [first[i] for i in range(30)]
    seed_host(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    again = masking.MaskedBlocks(blocks, tokenizer, 0.15, seed=3)
    assert [again[i] for i in reversed(range(30))][::-1] == seen
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after, "the generators of the training are not used"
    other = masking.MaskedBlocks(blocks, tokenizer, 0.15, seed=4)
    assert [other[i] for i in range(30)] != seen


def test_whole_words_are_masked_in_the_right_shares(tokenizer):
    """15 % of the words are chosen. 80 % of these become mask tokens, 10 % random tokens, 10 % stay, each word as a whole."""
    tokens = text_blocks.BlockTokenizer(tokenizer, "a model", 128)
    blocks = [tokens.make_block(*(part[: tokens.room] for part in tokens.tokenize(some_texts(30, seed)))) for seed in range(50)]
    items = masked_in_training(blocks, tokenizer, [(i, i % 50) for i in range(800)])
    kinds, lengths, at_random = {"left": 0, "mask": 0, "same": 0, "other": 0}, {"left": [], "masked": []}, set()
    for i, item in enumerate(items):
        old, words = np.array(blocks[i % 50]["input_ids"]), np.array(blocks[i % 50]["words"])
        new, labels = np.array(item["input_ids"]), np.array(item["labels"])
        is_masked = labels != -100
        assert (labels[is_masked] == old[is_masked]).all()
        assert (new[~is_masked] == old[~is_masked]).all()
        assert not is_masked[words == text_blocks.SPECIAL].any()
        assert is_masked.any()
        for word in range(words.max() + 1):
            now, was, hidden = new[words == word], old[words == word], is_masked[words == word]
            assert hidden.all() or not hidden.any()
            is_mask = now == tokenizer.mask_token_id
            assert is_mask.all() or not is_mask.any()
            kind = "left" if not hidden[0] else "mask" if is_mask[0] else "same" if (now == was).all() else "other"
            kinds[kind] += 1
            lengths["masked" if hidden[0] else "left"].append(len(now))
            at_random |= set(now.tolist()) if kind == "other" else set()
    num_masked = len(lengths["masked"])
    within = lambda found, expected, number: abs(found / number - expected) < 4 * (expected * (1 - expected) / number) ** 0.5
    assert within(num_masked, 0.15, num_masked + kinds["left"])
    assert np.mean(lengths["masked"]) == pytest.approx(np.mean(lengths["left"]), rel=0.1), (
        "long words are chosen as often as short ones"
    )
    for kind, expected in (("mask", 0.8), ("other", 0.1), ("same", 0.1)):
        assert within(kinds[kind], expected, num_masked), kinds
    assert not at_random & set(tokenizer.all_special_ids)
    assert len(at_random) > 0.9 * (len(tokenizer) - 5)


def test_a_block_without_words_has_nothing_to_learn(tokenizer, tokens):
    item = masking.MaskedBlocks([tokens.make_block(*tokens.tokenize([" \n"]))], tokenizer, 0.15)[0]
    assert item == {"input_ids": [2, 3], "attention_mask": [1, 1], "labels": [-100, -100]}


def test_logits_of_masked_tokens_are_the_same_as_among_all_logits(tokenizer, blocks):
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **shape)).eval()
    items = masking.MaskedBlocks(blocks, tokenizer, 0.15, seed=0)
    rows = Collate(("labels",))([items[i] for i in (0, len(blocks) - 1, 1)])
    accept_rows(model)
    learned = rows["labels"] != -100
    whole = model(rows).logits[0]
    found = masking.measure(OutputHead(model).logits(model, rows), rows, 1)
    torch.testing.assert_close(found["loss"], rows.sum(cross_entropy(whole, rows["labels"], "none")))
    assert found["tokens"].tolist() == rows.sum(learned.long()).tolist()
    assert found["right"].tolist() == rows.sum((whole.argmax(-1) == rows["labels"]).long()).tolist()
    texts = [text[0] for text in (learned.nonzero()[:, :1].split(found["tokens"].tolist()))]
    assert found["position"].tolist() == [int(rows["positions"][first]) for first in texts]


AWKWARD = {
    "plain": ["one line of words here\n" * 400],
    "no newline at the end": ["one line of words here\n" * 400 + "the last"],
    "very long lines": ["word and " * 900 + "\n" + "short\n" + "longwordwithoutanyblank" * 300],
    "empty lines": ["\n\n\nfirst\n\n" * 300 + "\n" * 3000 + "last\n"],
    "windows": ["a line of windows\r\n" * 300],
    "multi-byte": ["東京都は日本の首都" * 300 + "é" * 999 + "😀" * 501 + "\n" + "naïve words and 😀 more\n" * 100],
    "several": ["the first file\n" * 90, "no newline at its end" * 40, "x", "a fourth one\n" * 200],
    "smaller than a block": ["only this"],
}


@pytest.mark.parametrize("case", AWKWARD)
def test_all_blocks_together_are_the_files_byte_for_byte(tokens, tmp_path, case):
    for number, text in enumerate(AWKWARD[case]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    stream = text_blocks.StreamedBlocks("--train_file", str(tmp_path), tokens)
    expected = b"".join(text.encode() for text in AWKWARD[case])
    for block_bytes in {stream.block_bytes, 4, 5, 17, 100}:
        stream.block_bytes = block_bytes
        pieces = [stream.pieces(i) for i in range(len(stream))]
        assert "".join(piece for item in pieces for piece in item).encode() == expected
        assert max(len("".join(item).encode()) for item in pieces) <= block_bytes + max(4, block_bytes // 4)
        some = random.Random(0).sample(range(len(stream)), min(50, len(stream)))
        assert [stream.pieces(i) for i in some] == [pieces[i] for i in some], "in any order"


def test_blocks_begin_with_lines_and_little_is_cut(tokens, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in some_texts(2000) if text))
    small = text_blocks.BlockTokenizer(tokens.tokenizer, "a model", 256)
    stream = text_blocks.StreamedBlocks("--train_file", str(tmp_path / "a.txt"), small)
    lines = (tmp_path / "a.txt").read_text().splitlines()
    starts = [stream.text(i).split("\n")[0] for i in range(len(stream))]
    assert sum(start in lines for start in starts) > 0.7 * len(starts)
    lengths = np.array([len(small.tokenize([stream.text(i)])[0]) for i in range(len(stream))])
    assert np.maximum(lengths - small.room, 0).sum() < 0.04 * lengths.sum()
    assert max(len(stream[i]["input_ids"]) for i in range(len(stream))) <= 256
    assert "are not used" in stream.summary


def test_a_stream_is_the_same_in_workers_and_in_other_processes(tokenizer, tokens, tmp_path):
    for number in range(70):  # more files than are kept open
        (tmp_path / f"{number:02}.txt").write_text("\n".join(some_texts(30, seed=number)))
    cfg = RecipeConfig(train_file=str(tmp_path / "*.txt"), max_eval_items=3)
    fingerprints = lambda: [part.fingerprint for part in text_blocks.stream_blocks(cfg, tokens)]
    train, test = text_blocks.stream_blocks(cfg, tokens)
    assert len(test) == 3
    assert (before := fingerprints()) == [train.fingerprint, test.fingerprint]
    items = _SeededItems(masking.MaskedBlocks(train, tokenizer, 0.15), 0)
    keys = [(position, random.Random(position).randrange(len(train))) for position in range(60)]
    here = [items[key] for key in keys]
    loader = DataLoader(items, batch_sampler=[keys[:30], keys[30:]], collate_fn=list, num_workers=2)
    assert [item for batch in loader for item in batch] == here
    assert [pickle.loads(pickle.dumps(items))[key] for key in keys] == here, "as a spawned worker receives it"
    (tmp_path / "00.txt").write_text((tmp_path / "00.txt").read_text()[::-1])
    assert fingerprints() != before


def test_memory_does_not_grow_with_the_file(tokens, tmp_path):
    paragraph = ("\n".join(some_texts(1000)) + "\n").encode()
    with (tmp_path / "large.txt").open("wb") as file:
        while file.tell() < 200_000_000:
            file.write(paragraph * 10)
    tracemalloc.start()
    stream = text_blocks.StreamedBlocks("--train_file", str(tmp_path / "large.txt"), tokens)
    for i in range(0, len(stream), len(stream) // 200):
        stream[i]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(stream) * stream.block_bytes >= 200_000_000
    assert peak < 2_000_000, peak


def test_errors_name_the_file_that_cannot_be_used(tokens, tmp_path):
    good = "naïve words\n".encode()

    def file(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    def stream(place):
        blocks = text_blocks.StreamedBlocks("--train_file", place, tokens)
        return [blocks[i] for i in range(len(blocks))]

    def whole(place):
        cfg = RecipeConfig(train_file=place, cache_dir=str(tmp_path / "cache"))
        return text_blocks.cut_into_blocks(text_blocks.load_texts(cfg)[0], "text", tokens, cfg)

    bad = good * 200_000 + b"caf\xe9 " + good  # longer than the pieces in which a file is read
    cases = [
        (file("latin1.txt", bad), f"latin1.txt: the file is not UTF-8: .* at byte {bad.index(0xE9)} "),
        (file("cut.txt", good * 90 + "é".encode()[:1]), f"cut.txt: the file is not UTF-8: .* at byte {len(good) * 90} "),
        (file("empty.txt", b""), "empty.txt: the file is empty"),
        (file("blank.txt", b" \n\t\n" * 500), "text"),
        (str(tmp_path / "nowhere.txt"), "no such file"),
        (str(tmp_path / "no*thing.txt"), "no file matches this pattern"),
        (file("data.xlsx", b"x"), "data.xlsx: "),
    ]
    for place, words in cases:
        for read in (stream, whole):
            with pytest.raises(UserError, match=words):
                read(place)
    with pytest.raises(UserError, match=r"--streaming: reads \.txt files only"):
        text_blocks.stream_blocks(RecipeConfig(train_file=file("a.jsonl", b"{}")), tokens)
    shrinking = text_blocks.StreamedBlocks("--train_file", file("shrinking.txt", good * 100), tokens)
    file("shrinking.txt", good)
    with pytest.raises(UserError, match="was truncated while it was read"):
        shrinking[len(shrinking) - 1]


def test_the_last_tenth_of_the_lines_is_set_aside_in_their_order(tmp_path):
    for number in (0, 1):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} line {i}\n" for i in range(50)))
    lines = [f"{number} line {i}" for number in (0, 1) for i in range(50)]
    train, test = text_blocks.load_texts(RecipeConfig(train_file=str(tmp_path)))
    assert (train["text"][:], test["text"][:]) == (lines[:90], lines[90:])
    train, test = text_blocks.load_texts(
        RecipeConfig(train_file=str(tmp_path), eval_file=str(tmp_path / "0.txt"), max_eval_items=7)
    )
    assert train["text"][:] == lines
    first = lines.index(test["text"][0])
    assert test["text"][:] == lines[first : first + 7], "a sample of lines that belong together"
