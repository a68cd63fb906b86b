"""Words and tags: files, alignment and metrics; and metrics of generated texts."""

import datasets
import numpy as np
import pytest

from accel_ddp.errors import UserError
from accel_ddp.tasks.generation_metrics import build_generation_config, decode, find_truncated, text_metrics
from accel_ddp.tasks.tagging import (
    Tags,
    align,
    example,
    find_problem,
    load_words,
    predicted_tags,
    prepare_for_words,
    reference_tags,
    score_entities,
)

NAMES = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer that splits "merkel" into two tokens and makes no token from a no-break space."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "angela", "mer", "##kel", "in", "paris"]
    vocabulary = {word: i for i, word in enumerate(words)}
    whole = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    whole.normalizer, whole.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    whole.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64)


def table(tokens, tags):
    return datasets.Dataset.from_dict({"tokens": tokens, "tags": tags})


def tags_of(rows, test=None, **options):
    return Tags.from_rows(rows, rows if test is None else test, "tags", **options)


def written(tmp_path, text, name="a.conll"):
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return str(tmp_path / name)


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["conll", "iob", "bio", "txt"])
def test_a_word_is_the_first_column_and_its_tag_the_last(tmp_path, ending):
    text = "\ufeff-DOCSTART- -X- O O\r\n\r\nEU NNP B-NP I-ORG\r\nrejects VBZ B-VP O\r\n\r\n\r\nPeter NNP B-NP I-PER"
    rows = load_words("--train_file", written(tmp_path, text, f"a.{ending}"))
    assert rows["tokens"][:] == [["EU", "rejects"], ["Peter"]]
    assert rows["tags"][:] == [["I-ORG", "O"], ["I-PER"]]


def test_between_tabs_a_word_may_contain_spaces_and_a_no_break_space_is_a_word(tmp_path):
    rows = load_words("--train_file", written(tmp_path, "New York\tB-LOC\n\u00a0\tO\nmid\u2028dle\tO\n"))
    assert rows["tokens"][:] == [["New York", "\u00a0", "mid\u2028dle"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EU I-ORG\nrejects\n", "line 2 has one column: 'rejects'"),
        ("New York\tB-LOC\nNew York\t\n", "line 2 has one column: 'New York'"),
        ("EU NNP I-ORG\n\nrejects VBZ\n", "line 3 has 2 columns, but the lines before it have 3"),
        ("\n-DOCSTART- O\n\n", "has no rows"),
        (b"caf\xe9 O\n", "not UTF-8"),
    ],
)
def test_a_conll_file_that_cannot_be_used_is_named_with_its_line(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=message) as error:
        load_words("--eval_file", path)
    assert f"--eval_file {path}" in str(error.value)


def test_files_that_do_not_exist_or_have_another_format_are_rejected(tmp_path):
    for name in ("none.conll", "none.jsonl"):
        with pytest.raises(UserError, match="there is no such file"):
            load_words("--train_file", str(tmp_path / name))
    with pytest.raises(UserError, match=r"files ending with '.xlsx' cannot be read. Use \.conll"):
        load_words("--train_file", written(tmp_path, "EU O", "a.xlsx"))


# ----------------------------------------------------------------------------------------------- tags


def test_tags_are_those_of_the_training_rows():
    train, test = table([["a", "b"]], [["O", "B-X"]]), table([["a"]], [["B-Y"]])
    assert tags_of(train).names == ["B-X", "O"]
    assert tags_of(train, test).names == ["B-X", "O"], "a row with another tag is reported with its number"
    assert tags_of(train, test, use_both=True).names == ["B-X", "B-Y", "O"]
    with pytest.raises(UserError, match="nothing to learn"):
        tags_of(table([["a"]], [["O"]]))


def test_numbers_have_the_names_that_the_dataset_declares():
    feature = datasets.Features({"tokens": datasets.List(datasets.Value("string")),
                                 "tags": datasets.List(datasets.ClassLabel(names=["O", "B-X", "I-X"]))})  # fmt: skip
    rows = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "tags": [[0, 1]]}, features=feature)
    assert tags_of(rows).names == ["O", "B-X", "I-X"]
    assert tags_of(rows).model_config()["id2label"] == {0: "O", 1: "B-X", 2: "I-X"}
    assert tags_of(table([["a", "b", "c"]], [[7, 10, 9]])).tag_ids == {7: 0, 9: 1, 10: 2}


def test_a_warning_tells_that_tags_without_a_prefix_are_entities_of_one_word(caplog):
    tags_of(table([["a", "b"]], [["O", "B-X"]]))
    assert not caplog.records
    tags_of(table([["a", "b"]], [["O", "NOUN"]]))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NOUN" in caplog.text


# ------------------------------------------------------------------------------------------ alignment


def test_the_first_token_of_a_word_has_the_label_of_the_word(tokenizer):
    rows = table([["Angela", "Merkel", "in", "Paris"]], [["B-PER", "I-PER", "O", "B-LOC"]])
    done = align(rows[:], "tokens", tags_of(rows), tokenizer, max_length=64)
    assert done["labels"] == [[-100, 1, 2, -100, 3, 0, -100]]  # [CLS] angela mer ##kel in paris [SEP]
    assert done["first"] == [[1, 2, 4, 5]]
    assert done["problem"] == [""]


def test_words_that_are_truncated_or_have_no_tokens_have_no_first_token(tokenizer):
    rows = table([["Angela", "\u00a0", "Merkel", "in"], ["in"]], [["B-PER", "O", "I-PER", "O"], ["O"]])
    done = align(rows[:], "tokens", tags_of(rows), tokenizer, max_length=4)
    assert done["first"] == [[1, -1, 2, -1], [1]]  # [CLS] angela mer [SEP]
    assert done["labels"] == [[-100, 0, 1, -100], [-100, 2, -100]]
    assert done["tags"] == [[0, 2, 1, 2], [2]]


@pytest.mark.parametrize(
    ("tokens", "tags", "message"),
    [
        (["a", "b"], ["O"], "2 tokens but 1 tags"),
        (["a", "b"], ["O", "B-Y"], "it has a tag that does not occur in the training data (O)\t'B-Y'"),
        ([], [], "it has no tokens"),
        (None, ["O"], "not a list of words"),
        ("a b", ["O", "O"], "not a list of words"),
        (["a"], None, "its tags are not a list\tNone"),
        (["a", None], ["O", "O"], "token 2 is None"),
        (["a", "b"], ["O", None], "tag 2 is None"),
        (["a"], [0.5], "tag 1 is 0.5"),
    ],
)
def test_the_problem_of_a_row_is_reported(tokenizer, tokens, tags, message):
    known = Tags("tags", ["O"], {"O": 0})
    assert message in find_problem(tokens, tags, known)
    rows = {"tokens": [["in"], tokens], "tags": [["O"], tags]}
    done = align(rows, "tokens", known, tokenizer, max_length=64)
    assert done["problem"] == ["", find_problem(tokens, tags, known)]
    assert done["first"] == [[1], []]


def test_words_of_a_byte_level_tokenizer_keep_the_space_before_them(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.train_from_iterator(["in Paris in Paris"], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    done = prepare_for_words(PreTrainedTokenizerFast(tokenizer_object=whole), "a")
    done.save_pretrained(tmp_path)
    for each in (done, AutoTokenizer.from_pretrained(tmp_path)):
        ids = each([["Paris", "Paris"]], is_split_into_words=True)["input_ids"][0]
        assert each.convert_ids_to_tokens(ids) == ["ĠParis", "ĠParis"]


def test_a_tokenizer_without_word_ids_is_rejected():
    from transformers import ByT5Tokenizer

    with pytest.raises(UserError, match="--model a: its tokenizer"):
        prepare_for_words(ByT5Tokenizer(), "a")


# --------------------------------------------------------------------------------------------- metrics


def scored(answers, references, names=NAMES):
    numbers = {name: i for i, name in enumerate(names)}
    width = max(map(len, answers))
    predictions = np.array([[numbers[tag] for tag in row] + [-100] * (width - len(row)) for row in answers])
    first = [[place if place < len(answer) else -1 for place in range(len(row))] for answer, row in zip(answers, references)]
    right = reference_tags([[numbers[tag] for tag in row] for row in references], names)
    return score_entities(predicted_tags(predictions, first, names), right)[0]


def test_an_entity_is_right_as_a_whole_or_not_at_all():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "B-LOC"]]  # 4 entities
    answers = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "I-LOC"]]  # 3 entities, one of which is right
    scores = scored(answers, references)
    assert scores == pytest.approx({"precision": 1 / 3, "recall": 1 / 4, "f1": 2 / 7, "accuracy": 4 / 6})
    assert scored(references, references) == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "accuracy": 1.0}


def test_words_without_a_prediction_count_as_outside():
    references = [["B-PER", "O", "B-LOC", "O"]]
    assert scored([["B-PER", "O"]], references) == pytest.approx({"precision": 1, "recall": 0.5, "f1": 2 / 3, "accuracy": 0.75})


def test_without_entities_the_scores_are_0():
    assert scored([["O", "O"]], [["O", "O"]]) == {"precision": 0, "recall": 0, "f1": 0, "accuracy": 1}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("names", "references", "answers", "right", "found", "there"),
    [
        (["I-PER", "O"], "I-PER I-PER O I-PER", "I-PER I-PER O O", 1, 1, 2),  # as in wikigold
        (["B-PER", "I-PER", "L-PER", "O", "U-PER"], "U-PER U-PER B-PER L-PER", "U-PER O B-PER L-PER", 2, 2, 3),
        (["B-P", "E-P", "I-P", "O", "S-P"], "B-P I-P E-P S-P", "B-P I-P E-P S-P", 2, 2, 2),
        (["FUNC", "O"], "FUNC FUNC O", "FUNC O O", 1, 1, 2),  # one word each
        (["BIG", "INTJ", "SMALL"], "BIG INTJ SMALL", "BIG INTJ BIG", 2, 3, 3),  # B, I and S are no prefixes here
        (["B", "I", "O"], "B I O B", "B I O O", 1, 1, 2),
    ],
)
def test_other_schemes_of_tags(names, references, answers, right, found, there):
    scores = scored([answers.split()], [references.split()], names)
    assert (scores["precision"], scores["recall"]) == pytest.approx((right / found, right / there))


def test_metrics_of_generated_texts():
    scores = text_metrics(["the cat sat on the mat", "two "], ["the cat sat on the mat", "two"])
    assert scores == pytest.approx({"exact_match": 100, "bleu": 100, "chrf": 100, "rouge_l": 100})
    scores = text_metrics(["the dog", ""], ["the cat", "two"])
    assert scores["exact_match"] == 0
    assert scores["rouge_l"] == pytest.approx(25)  # one word of two is right in one text of two


def test_a_text_counts_as_truncated_only_if_tokens_are_missing():
    from transformers import ByT5Tokenizer

    tokenizer, texts = ByT5Tokenizer(), ["abc", "abcd", "abcde"]  # one token for each byte, and an end token
    rows = tokenizer(texts, truncation=True, max_length=5)["input_ids"]
    assert find_truncated(tokenizer, texts, rows, 5) == [False, False, True]
    assert decode(np.array([[0, *rows[0], -100, -100]]), tokenizer) == ["abc"]


def test_search_settings_of_an_earlier_task_are_not_kept(tmp_path):
    from transformers import GenerationConfig

    known = GenerationConfig(num_beams=4, early_stopping=True, length_penalty=2.0, min_length=56, max_length=142, eos_token_id=2)
    config = build_generation_config(known, max_new_tokens=30, num_beams=1)
    assert (config.max_new_tokens, config.num_beams, config.eos_token_id) == (30, 1, 2)
    assert config.to_dict().get("min_length") in (None, 0)
    config.save_pretrained(tmp_path)  # raises an error for settings that contradict each other


def test_the_text_to_try_comes_from_the_first_row_that_can_be_used():
    """Rows with a token that is not a word are left out with --skip_broken, and must not end the run."""
    rows = table([["x", None], [], ["Angela", "Merkel"]], [["O", "O"], [], ["B-PER", "I-PER"]])
    tags = Tags.from_rows(rows, rows, "tags")
    assert 'use("Angela Merkel")' in example(rows, "tokens", tags)
    assert 'use("YOUR TEXT")' in example(rows.select([0, 1]), "tokens", tags)
