"""Words and their tags: files, the alignment of tags with sub-word tokens, and metrics of entities."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.records.eval_tables import Table
from accel_ddp.sources.data import iter_values
from accel_ddp.sources.models import label_names
from accel_ddp.sources.places import warn
from accel_ddp.sources.table_files import FILE_FORMATS, SENTENCE_FILES, load_file, require_file, require_utf8
from accel_ddp.tasks import tables
from accel_ddp.tasks.examples import literal, shorten
from accel_ddp.tasks.labels import classes_of_model, describe_unknown, may_lack_classes, report_classes
from accel_ddp.tasks.tables import Row, ScoreTable

if TYPE_CHECKING:
    import datasets
    from torch import Tensor

    from accel_ddp.engine.rows import Rows

CONLL_SUFFIXES = (*SENTENCE_FILES, ".txt")


def load_words(option: str, path: str) -> "datasets.Dataset":
    """Return the columns `tokens` and `tags` of a CoNLL file, or the columns of a file of another format.

    In a CoNLL file, a line has a word in its first column and the word's tag in its last. An empty line ends a sentence.
    """
    import datasets

    suffix = Path(path).suffix
    if suffix not in CONLL_SUFFIXES:
        if Path(path).is_file() and suffix.lower() not in FILE_FORMATS:
            known = ", ".join([*CONLL_SUFFIXES, ".json", ".jsonl", ".parquet"])
            raise UserError(f"{option} {path}: files ending with {suffix!r} cannot be read. Use {known}.")
        return load_file(option, path)
    file = require_file(option, path)
    require_utf8(option, file)
    sentences, width = [[]], 0
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            # Between tabs a word may contain spaces. Other white space, such as a no-break space, is part of a word.
            columns = [part.strip(" ") for part in line.rstrip("\n").split("\t" if "\t" in line else " ")]
            columns = [part for part in columns if part]
            if not columns or columns[0] == "-DOCSTART-":
                sentences += [[]] if sentences[-1] else []
                continue
            width, place = width or len(columns), f"{option} {file}: line {number}"
            if len(columns) == 1:
                raise UserError(f"{place} has one column: {columns[0]!r}. Each line needs a word and a tag.")
            if len(columns) != width:  # the last column of such a line may not be a tag
                raise UserError(f"{place} has {len(columns)} columns, but the lines before it have {width}.")
            sentences[-1].append((columns[0], columns[-1]))
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise UserError(f"{option} {file}: the file has no rows.")
    words, tags = ([[pair[i] for pair in sentence] for sentence in sentences] for i in (0, 1))
    return datasets.Dataset.from_dict({"tokens": words, "tags": tags})


@dataclass
class Tags:
    """The tags of a column. `tag_ids` maps the values in the data to numbers."""

    column: str
    names: list[str]
    tag_ids: dict[str | int, int]
    is_declared: bool = False  # whether the dataset declares the names
    kind = "tags"  # of `--metrics`

    @classmethod
    def for_task(cls, train: "datasets.Dataset", test: "datasets.Dataset", cfg: Any) -> "Tags":
        return cls.from_rows(train, test, cfg.tags_column, may_lack_classes(cfg, train), label_names(cfg))

    @classmethod
    def from_rows(
        cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str, use_both: bool = False, known: Sequence[str] = ()
    ) -> "Tags":
        """Return the tags of the training rows, or with `use_both` of both tables, or `known` ones, of `models.label_names`.

        Other tags of `test` and values that cannot be tags are ignored here: `find_problem` reports them with their rows.
        """
        tables = (train, test) if use_both or known else (train,)
        cells = (row for rows in tables for row in iter_values(rows, column) if isinstance(row, list))
        found = {tag for row in cells for tag in row if isinstance(tag, str | int)}
        declared = getattr(getattr(train.features[column], "feature", None), "names", None)  # by the dataset
        values = range(len(declared)) if declared else sorted(found, key=lambda value: (isinstance(value, str), value))
        names = declared or [str(value) for value in values]
        if known:
            return cls(column, [*known], classes_of_model(known, {tag: tag for tag in found}, declared))
        if len(names) == 1:
            raise UserError(f"--tags_column {column}: all words have the same tag {names[0]}, so there is nothing to learn.")
        if plain := [name for name in names if _for_seqeval(name) == f"S-{name}"]:
            warn(
                f"--tags_column {column}: tags without the prefix B- or I- ({', '.join(plain[:3])}): each word with such a tag is "
                "scored as an entity. To score entities of several words, use tags such as B-PER, I-PER, O."
            )
        return cls(column, names, {value: number for number, value in enumerate(values)}, bool(declared))

    def report_classes(self, tables: Iterable[dict[str, list]]) -> None:
        """Warn about tags that may be mistakes. The tables have the column `tags` of `align`."""
        count = lambda rows: np.bincount([tag for row in rows["tags"][:] for tag in row], minlength=len(self.names))
        report_classes(f"--tags_column {self.column}", "words", self.names, *map(count, tables))

    @property
    def identity(self) -> list[Any]:
        """What the encoded tags depend on, for the cache key of tokenized data."""
        return [self.column, self.names, sorted(map(repr, self.tag_ids.items()))]

    def references(self, rows: Any) -> list[list[str]]:
        return reference_tags(rows["tags"][:], self.names)

    def model_config(self) -> dict[str, Any]:
        return {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}


def find_problem(tokens: Any, row: Any, tags: Tags) -> str:
    """Return why this row cannot be used, or "". See `data.drop_broken`."""
    if not isinstance(tokens, list):
        return f"its tokens are not a list of words\t{tokens!r:.40}"
    if not tokens:
        return "it has no tokens"
    if not isinstance(row, list):
        return f"its tags are not a list\t{row!r:.40}"
    if len(tokens) != len(row):
        return f"it has another number of tags than of tokens\t{len(tokens)} tokens but {len(row)} tags"
    for name, values, kinds, expected in (("token", tokens, str, "word"), ("tag", row, str | int, "name or whole number")):
        for i, value in enumerate(values):
            if not isinstance(value, kinds):
                return f"one of its {name}s is not a {expected}\t{name} {i + 1} is {value!r:.40}"
    unknown = list(dict.fromkeys(tag for tag in row if tag not in tags.tag_ids))
    return describe_unknown("tag", unknown, tags.names, tags.is_declared) if unknown else ""


def example(rows: "datasets.Dataset", tokens_column: str, tags: Tags) -> str:
    """Return code that tags the words of the first row that can be used. At most 100 rows are read."""
    some = rows.select(range(min(len(rows), 100)))
    usable = (row[tokens_column] for row in some if not find_problem(row[tokens_column], row[tags.column], tags))
    row = literal(shorten(" ".join(next(usable, ["YOUR", "TEXT"]))))
    use = 'use = pipeline("token-classification", {model}, aggregation_strategy="first")'
    return f'from transformers import pipeline; {use}; print(*use({row}), sep="\\n")'


def prepare_for_words(tokenizer: Any, model: str) -> Any:
    """Return the tokenizer, changed so that it accepts lists of words. `model` is the value of `--model`, for error messages.

    A byte-level tokenizer, for example RoBERTa's, encodes the space before a word with the word. It is set to add a space
    before every word of a list, because it would otherwise read the words as one long word.
    """
    from tokenizers import pre_tokenizers

    if not tokenizer.is_fast:
        raise UserError(f"--model {model}: its tokenizer has no fast version, which maps tokens to words. Use another model.")
    part = tokenizer.backend_tokenizer.pre_tokenizer
    for step in part if isinstance(part, pre_tokenizers.Sequence) else [part]:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True
    return tokenizer


def align(rows: dict[str, list], tokens_column: str, tags: Tags, tokenizer: Any, max_length: int) -> dict[str, list]:
    """Return tokenized rows. In `labels` the first token of each word has the number of the word's tag, and others have -100.

    `first` has the index of that token for each word, or -1 for words that were truncated or have no tokens. `tags` has the
    number of each word's tag. `problem` is described at `find_problem`; a row with a problem has no words.
    """
    pairs = list(zip(rows[tokens_column], rows[tags.column]))
    problems = [find_problem(*pair, tags) for pair in pairs]
    words = [[] if problems[i] else tokens for i, (tokens, _) in enumerate(pairs)]
    numbers = [[] if problems[i] else [tags.tag_ids[tag] for tag in row] for i, (_, row) in enumerate(pairs)]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    first = [[-1] * len(row) for row in words]
    labels = [[-100] * len(row) for row in encoded["input_ids"]]
    for i, row in enumerate(numbers):
        for place, word in enumerate(encoded.word_ids(i)):
            if word is not None and first[i][word] == -1:
                first[i][word], labels[i][place] = place, row[word]
    return {**encoded, "labels": labels, "first": first, "tags": numbers, "problem": problems}


def report_truncated(train: "datasets.Dataset", test: "datasets.Dataset", max_length: int) -> None:
    """Warn if words were truncated, which are not learned or count as O."""
    effects = {"training": "are not learned", "evaluation": "count as O"}
    for (name, effect), rows in zip(effects.items(), (train, test)):
        unseen = [row.count(-1) for row in iter_values(rows, "first")]
        if any(unseen):
            warn(
                f"--max_length {max_length}: {sum(map(bool, unseen)):,} of {len(rows):,} {name} texts are longer; "
                f"their last {sum(unseen):,} words {effect}."
            )


def measure(scores: "Tensor", rows: "Rows", number: int) -> dict[str, "Tensor"]:
    """Return the loss, the number of words and the tags of each text, and to show `number` predictions also their confidence."""
    from accel_ddp.engine.losses import cross_entropy

    is_word = rows["labels"] != -100
    found = {"loss": rows.sum(cross_entropy(scores, rows["labels"], "none")), "words": rows.sum(is_word.long())}
    found["predictions"] = rows.pad(scores.argmax(-1))
    return found | ({"confidence": rows.sum(tables.confidence(scores) * is_word)} if number else {})


def predicted_tags(predictions: np.ndarray, first: list[list[int]], names: list[str]) -> list[list[str]]:
    """Return the tag of each word of each text, in the form of seqeval. A word without a prediction has O.

    `predictions` has a row for each text with a tag number for each token; `first` is described at `align`.
    """
    return reference_tags([[-1 if at == -1 else row[at] for at in indices] for row, indices in zip(predictions, first)], names)


def reference_tags(tags: list[list[int]], names: list[str]) -> list[list[str]]:
    """Return the tag of each word of each text, in the form of seqeval, from the numbers of tags. -1 is O."""
    names = [*map(_for_seqeval, names), "O"]
    return [[names[tag] for tag in row] for row in tags]


def score_entities(predictions: list[list[str]], references: list[list[str]]) -> tuple[dict[str, float], ScoreTable]:
    """Return precision, recall and F1 of whole entities and the accuracy of words, and a table with the types of entities.

    As in conlleval, an entity is correct if all its words and its type are correct, and precision, recall and F1 are those of all
    entities together (micro average). IOB1, IOB2, IO, IOBES and BILOU are supported. Words with other tags are entities of one
    word each.
    """
    from seqeval.metrics import classification_report

    right = sum(a == b for answer, reference in zip(predictions, references) for a, b in zip(answer, reference))
    scores = {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": right / sum(map(len, references))}
    if all(tag == "O" for rows in (references, predictions) for row in rows for tag in row):
        return scores, ScoreTable([], [], "entities")
    found = classification_report(references, predictions, output_dict=True, zero_division=0)
    rows = [Row.of_report(name, report) for name, report in found.items()]
    micro = rows[-3]  # micro, macro and weighted averages follow the types
    scores |= {"f1": micro.f1, "precision": micro.precision, "recall": micro.recall}
    return scores, ScoreTable(rows[:-3], rows[-3:], "types of entities")


def make_tables(
    tags: Tags, rows: dict[str, np.ndarray], words: "datasets.Dataset", number: int, texts: Callable[[list[int]], list[list[str]]]
) -> dict[str, Table]:
    """Return the confusion of the tags of words, and `number` predictions of each group of texts.

    `rows` has `predictions`, and if there are predictions to show `confidence`, `loss` and `words`, each summed over the words of a
    text. `words` has the columns `first` and `tags` of `align`, and `texts` returns the words of some texts.
    """
    first, truth = words["first"][:], words["tags"][:]
    has_outside = "O" in tags.names or not any(-1 in places for places in first)
    names = tags.names if has_outside else [*tags.names, "O"]  # words without a prediction count as O
    outside = names.index("O") if "O" in names else -1
    guess = [[outside if at == -1 else int(row[at]) for at in places] for row, places in zip(rows["predictions"], first)]
    flat = lambda lists: np.fromiter(chain.from_iterable(lists), dtype=np.int64)
    made = {"confusion": tables.confusion(flat(guess), flat(truth), names)}
    if number:
        described: dict[int, list[str]] = {}

        def describe(items: list[int]) -> dict[str, list]:
            described.update(zip(items, texts(items)))
            return {"text": [" ".join(described[i]) for i in items]}

        show = lambda numbers: lambda i: format_entities([names[tag] for tag in numbers[i]], described[i])
        per_word = lambda values: values / np.maximum(rows["words"], 1)
        confidence = per_word(rows["confidence"])
        columns = {"true": show(truth), "predicted": show(guess), "confidence": confidence, "loss": per_word(rows["loss"])}
        is_correct = np.array([a == b for a, b in zip(guess, truth)])
        made |= tables.of_predictions(number, describe, is_correct=is_correct, certainty=confidence, columns=columns)
    return made


def format_entities(tags: list[str], words: list[str]) -> str:
    """Return the entities of a text, for example "PER: Ada Lovelace; LOC: London"."""
    from seqeval.metrics.sequence_labeling import get_entities

    found = get_entities([_for_seqeval(tag) for tag in tags])
    return "; ".join(f"{kind}: {' '.join(words[first : last + 1])}" for kind, first, last in found)


def _for_seqeval(name: str) -> str:
    """Return the tag in a form that seqeval reads correctly.

    It takes the first letter of every tag for a prefix, and it does not support the prefixes of BILOU.
    """
    if re.match("[BIESLU](-|$)", name):
        return {"L": "E", "U": "S"}.get(name[0], name[0]) + name[1:]
    return name if name == "O" else f"S-{name}"
