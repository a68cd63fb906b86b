"""Built-in datasets and models: the same rows and weights on every machine. (SmolLM2 is not installed for tests.)"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel_ddp.errors import UserError
from accel_ddp.sources import builtin, builtin_data, places, tokenization
from tests.conftest import ROOT, clean_environment

SHAPES = {  # columns, training rows, evaluation rows
    "builtin:rotten_tomatoes": (["text", "label"], 8000, 500),
    "builtin:rotten_tomatoes_small": (["text", "label"], 1200, 500),
    "builtin:imdb": (["text", "label"], 24000, 500),
    "builtin:questions": (["prompt", "answer"], None, 200),
    "builtin:preferences": (["prompt", "chosen", "rejected"], None, 132),
    "builtin:digits": (["image", "label"], 1500, 297),
    "builtin:docstrings": (["anchor", "positive"], 2000, 500),
    "builtin:docstrings_large": (["anchor", "positive"], None, 500),
    "builtin:rerank": (["query", "positives", "negatives"], 700, 120),
    "builtin:docstring_text": (["text"], 4000, 200),
    "builtin:code_roles": (["tokens", "tags"], 1500, 300),
    "builtin:number_words": (["source", "target"], 4000, 300),
}
MADE = ["builtin:tiny-llama", "builtin:tiny-t5", "builtin:tiny-bert"]

ELSEWHERE = """
import json, sys, transformers
from accel_ddp.sources import builtin, tokenization
shared, own = sys.argv[1:3]
input()
builtin.model_folder("builtin:tiny-t5", shared)
for name in sys.argv[3:]:
    builtin.model_folder(name, own)
print(json.dumps({name: [tokenization.fingerprint(part) for part in builtin.load_dataset(name).values()] for name in builtin.DATASETS}))
"""


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """Start another process with another hash seed. On request it makes all models and prints fingerprints of its rows."""
    folders = [tmp_path_factory.mktemp(name) for name in ("shared", "own")]
    environment = clean_environment(PYTHONHASHSEED="7", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", ELSEWHERE, *map(str, folders), *MADE]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.shared, process.own = folders
        yield process
        process.kill()


@pytest.fixture(scope="module")
def cache(tmp_path_factory, elsewhere) -> Path:
    """Return a folder with all models that are made. The other process makes the same, one of them in a shared folder."""
    import transformers  # noqa: F401 - before the start, so that both processes begin together

    elsewhere.stdin.write("now\n")
    elsewhere.stdin.flush()
    builtin.model_folder("builtin:tiny-t5", str(elsewhere.shared))
    folder = tmp_path_factory.mktemp("cache")
    for name in MADE:
        builtin.model_folder(name, str(folder))
    return folder


@pytest.fixture(scope="module")
def splits(cache) -> dict:
    return {name: builtin.load_dataset(name) for name in builtin.DATASETS}


def test_every_dataset_has_its_columns_and_rows(splits):
    assert list(splits) == list(SHAPES)
    for name, (columns, num_train, num_validation) in SHAPES.items():
        train, validation = splits[name]["train"], splits[name]["validation"]
        assert train.column_names == validation.column_names == columns, name
        assert train.features == validation.features, name
        assert (num_train or len(train), num_validation) == (len(train), len(validation)), name
        for rows in (train, validation):
            for column in columns:
                if column not in ("image", "label"):
                    assert all(value if isinstance(value, list) else value.strip() for value in rows[column]), (name, column)
    assert len(splits["builtin:questions"]["train"]) > 900
    assert len(splits["builtin:docstrings_large"]["train"]) > 2500


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("questions", ["prompt"]),
        ("preferences", ["prompt"]),
        ("rerank", ["query"]),
        ("docstrings", ["anchor", "positive"]),
        ("docstrings_large", ["anchor", "positive"]),
        ("docstring_text", ["text"]),
        ("code_roles", ["tokens"]),
        ("number_words", ["source", "target"]),
    ],
)
def test_no_evaluation_row_was_trained_on(splits, name, columns):
    train, validation = splits[f"builtin:{name}"].values()
    for column in columns:
        assert not {str(value).lower() for value in train[column]} & {str(value).lower() for value in validation[column]}


def test_rows_are_correct(splits):
    words = {row["source"]: row["target"] for part in splits["builtin:number_words"].values() for row in part}
    assert (words["0"], words["20"], words["317"]) == ("zero", "twenty", "three hundred seventeen")
    assert builtin_data.spell(40_015) == "forty thousand fifteen"
    first = splits["builtin:digits"]["train"][0]
    assert (first["image"].size, first["image"].mode, first["image"].getextrema()[1]) == ((8, 8), "L", 255)
    for part in splits["builtin:code_roles"].values():
        for row in part:
            assert len(row["tokens"]) == len(row["tags"]) >= 4
            for before, tag in zip(["O", *row["tags"]], row["tags"]):
                assert not tag.startswith("I-") or before[2:] == tag[2:], row
    line, roles = "async def run(self, *args):", {10: ("run", "FUNC"), 14: ("self", "ARG"), 21: ("args", "ARG")}
    assert builtin_data.tag_line(f"{line}  # now", roles)[1] == [
        "O",
        "O",
        "B-FUNC",
        "O",
        "B-ARG",
        "O",
        "O",
        "B-ARG",
        "O",
        "O",
    ]


def test_models_load_and_their_tokenizers_give_back_the_text(cache):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

    before = torch.get_rng_state()
    kinds = {MADE[0]: (AutoModelForCausalLM, 1e6), MADE[1]: (AutoModelForSeq2SeqLM, 2e5), MADE[2]: (AutoModelForMaskedLM, 9e5)}
    for name, (auto_class, least) in kinds.items():
        folder = builtin.model_folder(name, str(cache))
        tokenizer, model = AutoTokenizer.from_pretrained(folder), auto_class.from_pretrained(folder)
        assert least < sum(weight.numel() for weight in model.parameters()) < 1.5 * least, name
        assert len(tokenizer) == model.get_input_embeddings().num_embeddings, name
        assert tokenizer.model_max_length == 512, name
        assert tokenizer.pad_token_id == model.config.pad_token_id is not None, name
        text = "return the name of the file" if name == MADE[2] else "Wie geht's?  Gut,\n\n sagt 1 Öhr 😀 ."
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text, name
        if name != MADE[2]:
            assert model.generation_config.eos_token_id == tokenizer.eos_token_id, name
            batch = tokenizer(["hello", "hello you"], return_tensors="pt", padding=True)
            assert len(model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2)) == 2
    torch.set_rng_state(before)


def test_a_longer_conversation_begins_with_the_shorter_one(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin.model_folder("builtin:tiny-llama", str(cache)))
    messages = [
        {"role": role, "content": f"{n}\n"} for n, role in enumerate(["system", "user", "assistant", "user", "assistant"])
    ]
    for end in (2, 4):
        asked = tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
        answered = tokenizer.apply_chat_template(messages[: end + 1], tokenize=False)
        assert answered.startswith(asked)
        assert answered[len(asked) :] == f"{end}\n<|im_end|>\n"
        ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        assert tokenizer(answered, add_special_tokens=False)["input_ids"][: len(ids)] == ids


def test_making_a_model_depends_on_neither_the_generator_nor_the_device_of_the_caller(tmp_path, cache):
    import torch

    before = torch.get_rng_state()
    with torch.device("meta"):  # as in memory/fake_model.py
        folder = builtin.model_folder("builtin:tiny-t5", str(tmp_path))
    assert torch.equal(before, torch.get_rng_state())
    expected = builtin.model_folder("builtin:tiny-t5", str(cache))
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_another_process_has_the_same_rows_and_models(splits, cache, elsewhere):
    def digests(folder: Path) -> dict[str, str]:
        files = sorted(file for file in (folder / "models").rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    here = {name: [tokenization.fingerprint(part) for part in parts.values()] for name, parts in splits.items()}
    printed, _ = elsewhere.communicate(timeout=300)
    assert json.loads(printed.splitlines()[-1]) == here
    assert elsewhere.returncode == 0
    assert digests(cache) == digests(elsewhere.own)
    assert digests(elsewhere.shared).items() <= digests(cache).items()
    assert len(list((elsewhere.shared / "models").iterdir())) == 2  # a complete folder and its lock, and no partial folder


def test_unknown_names_and_a_cache_that_cannot_be_written_are_rejected(tmp_path):
    with pytest.raises(UserError, match=r"builtin:docstring: .*builtin:docstrings, .*builtin:number_words"):
        builtin.load_dataset("builtin:docstring")
    with pytest.raises(UserError, match=r"builtin:gpt: .*builtin:all-MiniLM-L6-v2, builtin:tiny-llama"):
        builtin.locate("builtin:gpt", str(tmp_path))
    with pytest.raises(UserError, match=r"'no_such_package'.*\.\[demo\].*your own --model"):
        places.path_in_package("--model", "builtin:x", "no_such_package", "model")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .*cannot be written"):
        builtin.model_folder("builtin:tiny-t5", str(tmp_path / "file"))
