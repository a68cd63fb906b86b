"""Words and their tags: read from files, aligned with sub-words, scored by entity."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.errors import UserError
from accel_ddp.sources.data import FILE_FORMATS, load_file

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import datasets
    import numpy as np

CONLL = (".conll", ".iob", ".bio", ".txt")
OF_WORDS = ["first", "tags"]  # columns of `aligned` that are for the evaluation, not for the model


# ---------------------------------------------------------------------------------------------- files


def load_words(option: str, path: str) -> "datasets.Dataset":
    """Columns `tokens` and `tags` of a CoNLL file, or the columns of another file."""
    file = Path(path)
    if file.suffix in CONLL:
        return _load_conll(option, file)
    if file.is_file() and file.suffix not in FILE_FORMATS:
        raise UserError(f"{option} {path}: its ending is none of {', '.join([*CONLL, '.json', '.jsonl', '.parquet'])}.")
    return load_file(option, path)


def _load_conll(option: str, file: Path) -> "datasets.Dataset":
    """A word and its tag are the first and the last column of a line; an empty line ends a sentence."""
    import datasets

    if not file.is_file():
        raise UserError(f"{option} {file}: there is no such file (looked in {Path.cwd()}).")
    sentences, width = [[]], 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                # Between tabs a word may hold blanks. Other white space (a no-break space) is part of a word.
                columns = [part.strip(" ") for part in line.rstrip("\n").split("\t" if "\t" in line else " ")]
                columns = [part for part in columns if part]
                if not columns or columns[0] == "-DOCSTART-":
                    sentences += [[]] if sentences[-1] else []
                    continue
                width = width or len(columns)
                if len(columns) == 1:
                    raise UserError(f"{option} {file}: line {number} has one column: {columns[0]!r}. It needs a word and a tag.")
                if len(columns) != width:  # else its last column may be something else than a tag
                    raise UserError(f"{option} {file}: line {number} has {len(columns)} columns, the lines before it {width}.")
                sentences[-1].append((columns[0], columns[-1]))
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {file}: is not UTF-8 text: {error}") from error
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise UserError(f"{option} {file}: has no rows.")
    return datasets.Dataset.from_dict({
        "tokens": [[word for word, _ in sentence] for sentence in sentences],
        "tags": [[tag for _, tag in sentence] for sentence in sentences],
    })  # fmt: skip


# ----------------------------------------------------------------------------------------------- tags


@dataclass
class Tags:
    """Their names, and the number of each value that the data hold."""

    column: str
    names: list[str]
    values: dict[str | int, int]

    @classmethod
    def of(cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str, of_both: bool = False) -> "Tags":
        """Of the training rows. A tag of `test` that is not among them is a UserError, unless they are `of_both`.

        Values that are no tags are left to `problem`, which knows their rows.
        """
        found = {
            name: {tag for row in rows[column][:] if isinstance(row, list) for tag in row if isinstance(tag, str | int)}
            for name, rows in (("training", train), ("evaluation", test))
        }
        names = getattr(getattr(train.features[column], "feature", None), "names", None)  # the dataset knows its tags
        values = (
            list(range(len(names)))
            if names
            else sorted(found["training"] | (found["evaluation"] if of_both else set()), key=_order)
        )
        for name, those in found.items():
            unknown = sorted(those - set(values), key=_order)
            if unknown:
                known = "the dataset does not declare" if names else "the training data lack"
                raise UserError(
                    f"--tags_column {column}: the {name} data have tags that {known}: {', '.join(map(str, unknown[:10]))}. "
                    f"Known are: {', '.join(map(str, (names or values)[:20]))}."
                )
        names = names or [str(value) for value in values]
        if len(names) == 1:
            raise UserError(f"--tags_column {column}: all words have the tag {names[0]}; there is nothing to learn.")
        if plain := [name for name in names if _for_seqeval(name) == f"S-{name}"]:
            log.info(
                f"tags without B- or I- ({', '.join(plain[:3])}): each word that has one is scored as an entity of its own. For "
                "scores of whole entities name tags like B-PER, I-PER, O."
            )
        return cls(column, names, {value: number for number, value in enumerate(values)})

    def for_model(self) -> dict[str, Any]:
        """What the config of a model with these tags holds."""
        return {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}


def _order(value: str | int) -> tuple[bool, str | int]:
    return isinstance(value, str), value


def problem(tokens: Any, tags: Any) -> str:
    """Why this row cannot be used; nothing where it can."""
    if not isinstance(tokens, list):
        return f"its tokens are {tokens!r}, which is no list of words"
    if not tokens:
        return "it has no tokens"
    if not isinstance(tags, list):
        return f"its tags are {tags!r}, which is no list"
    if len(tokens) != len(tags):
        return f"it has {len(tokens)} tokens but {len(tags)} tags"
    for what, values, kinds in (("token", tokens, str), ("tag", tags, str | int)):
        for place, value in enumerate(values):
            if not isinstance(value, kinds):
                return f"its {what} {place} is {value!r}, which is no {'word' if what == 'token' else 'name or whole number'}"
    return ""


# ------------------------------------------------------------------------------------------ alignment


def for_words(tokenizer: Any, model: str) -> Any:
    """The tokenizer, made to take lists of words: where a blank belongs to the word after it, the first word gets one too.

    RoBERTa's kind would otherwise read the words as if there were no blanks between them.
    """
    from tokenizers import pre_tokenizers

    if not tokenizer.is_fast:
        raise UserError(f"--model {model}: its tokenizer does not say which token is of which word. Use another model.")
    part = tokenizer.backend_tokenizer.pre_tokenizer
    for step in part if isinstance(part, pre_tokenizers.Sequence) else [part]:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True
    return tokenizer


def aligned(rows: dict[str, list], tokens_column: str, tags: Tags, tokenizer: Any, max_length: int) -> dict[str, list]:
    """Tokenised rows; the first sub-word of a word has its tag's number in `labels`, all other tokens have -100.

    `first`: where in the row that sub-word is, for each word; -1 for a word that is cut off, or nothing to the
    tokenizer. `tags`: the number of each word's tag. `problem`: as above; such a row holds no words.
    """
    pairs = list(zip(rows[tokens_column], rows[tags.column]))
    problems = [problem(*pair) for pair in pairs]
    words = [[] if problems[i] else tokens for i, (tokens, _) in enumerate(pairs)]
    numbers = [[] if problems[i] else [tags.values[tag] for tag in row] for i, (_, row) in enumerate(pairs)]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    first = [[-1] * len(row) for row in words]
    labels = [[-100] * len(row) for row in encoded["input_ids"]]
    for i, row in enumerate(numbers):
        for place, word in enumerate(encoded.word_ids(i)):
            if word is not None and first[i][word] == -1:
                first[i][word], labels[i][place] = place, row[word]
    return {**encoded, "labels": labels, "first": first, "tags": numbers, "problem": problems}


def say_what_is_cut(train: "datasets.Dataset", test: "datasets.Dataset", max_length: int) -> None:
    effects = {"training": "are not learned", "evaluation": "count as O"}
    for (what, effect), rows in zip(effects.items(), (train, test)):
        unseen = [row.count(-1) for row in rows["first"][:]]
        if any(unseen):
            log.info(
                f"--max_length {max_length}: {sum(map(bool, unseen)):,} of {len(rows):,} {what} texts are longer; "
                f"their {sum(unseen):,} last words {effect}."
            )


# --------------------------------------------------------------------------------------------- scores


def entity_scores(
    predictions: "np.ndarray", first: list[list[int]], tags: list[list[int]], names: list[str]
) -> tuple[dict[str, float], str]:
    """Precision, recall and F1 over whole entities, the share of right words; and a table of the kinds of entities.

    `predictions`: a row of tags' numbers for each text, one for each token. A word without a prediction (its `first`
    is -1) counts as O. An entity is right if its words and its kind are, as in conlleval; it may be tagged IOB1, IOB2,
    IO, IOBES or BILOU. Tags without such a prefix are entities of one word each.
    """
    from seqeval.metrics import classification_report

    of_seqeval = [_for_seqeval(name) for name in names]
    references = [[of_seqeval[tag] for tag in row] for row in tags]
    answers = [["O" if at == -1 else of_seqeval[row[at]] for at in places] for row, places in zip(predictions, first)]
    right = sum(a == b for answer, reference in zip(answers, references) for a, b in zip(answer, reference))
    scores = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": right / sum(map(len, tags))}
    if all(tag == "O" for rows in (references, answers) for row in rows for tag in row):
        return scores, "There are no entities, and none were predicted."
    whole = classification_report(references, answers, output_dict=True, zero_division=0)["micro avg"]
    scores |= {"precision": float(whole["precision"]), "recall": float(whole["recall"]), "f1": float(whole["f1-score"])}
    return scores, classification_report(references, answers, digits=3, zero_division=0)


def _for_seqeval(name: str) -> str:
    """It takes the first letter for the prefix, whatever it is, and does not know those of BILOU."""
    if name == "O" or re.match("[BIES](-|$)", name):
        return name
    if re.match("[LU](-|$)", name):
        return {"L": "E", "U": "S"}[name[0]] + name[1:]
    return f"S-{name}"
