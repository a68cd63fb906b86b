"""The rows that `accel-ddp predict` reads: which columns a model needs, and why a row cannot be used. This needs no torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.errors import UserError
from accel_ddp.exporting.trained_model import TrainedModel
from accel_ddp.sources import data
from accel_ddp.sources.data import describe_columns, find_text_problems, place_of
from accel_ddp.sources.table_files import load_file
from accel_ddp.tasks.chat_rows import INPUT_COLUMNS, USUAL_COLUMNS, UnusableRow, read_json, read_row
from accel_ddp.text import counted, listed

if TYPE_CHECKING:
    import datasets

# Options that name a column, in the order in which they are tried: those of `predict`, and those of recipes that mean the same.
COLUMNS = {
    "labels": {"text_column": ("text_column",), "text_pair_column": ("text_pair_column",)},
    "tags": {"text_column": ("tokens_column",)},
    "images": {"image_column": ("image_column",)},
    "masks": {"text_column": ("text_column",)},
    "vectors": {"text_column": ("anchor_column", "positive_column")},
    "texts": {"text_column": ("source_column",)},
    "answers": {name: (name,) for name in ("messages_column", "prompt_column", "text_column")},
}
USUAL = {**USUAL_COLUMNS, "image_column": ("image",), "text_pair_column": ()}
ANSWER = "\0answer"  # a column that stands for the answer that is predicted
PREFIXES = {"source_column": "prefix", "anchor_column": "anchor_prefix", "positive_column": "positive_prefix"}
CORRECT = "Correct them, or give --skip_broken: such rows get no prediction."
SHARD_ROWS = {"answers": 256, "texts": 256, "images": 256}  # the most; others have 1,000


class InputRows:
    """The rows of `--input`, and what the model is given of each of them."""

    def __init__(self, found: TrainedModel, options: dict[str, Any]):
        self.found, self.kind, self.prefix = found, found.kind, options["prefix"] or ""
        self.table = self.files = self._load(options["input"])
        self.columns: dict[str, str] = {}
        for option, names in COLUMNS[self.kind].items():
            if options[option] or not (self.kind == "answers" and self.columns):
                self._choose(option, options[option] or "", names, options["prefix"])
        if not self.columns:
            wanted = " or ".join(f"--{name}" for name in COLUMNS[self.kind] if name != "text_pair_column")
            raise UserError(f"{wanted}: which column has the inputs? {describe_columns(self.table, {'text_column': 'text'})}")
        column = next(iter(self.columns.values()))
        self.chat_columns = (column,)
        if "prompt_column" in self.columns:
            more = [name for name in INPUT_COLUMNS.get(column, ()) if name in self.table.column_names]
            self.chat_columns = (column, *more, ANSWER)
        if self.kind == "images":
            import datasets

            self.table = self.table.cast_column(column, datasets.Image(decode=False))
        number, most = len(self.table), SHARD_ROWS.get(self.kind, 1000)
        # The result of a row depends a little on the rows it is padded with, so shards do not depend on the number of processes.
        self.shard_rows = min(most, max(32, -(-number // 64)))

    def _load(self, paths: list[str]) -> "datasets.Dataset":
        load: Any = load_file

        if self.kind == "tags":
            from accel_ddp.tasks.tagging import load_words as load
        elif self.kind == "images":
            load = _read_images
        return data._read_files("--input", tuple(paths), load)

    def _choose(self, option: str, given: str, names: tuple[str, ...], prefix: str | None) -> None:
        """Choose the column of an option: the given one, the one of the training, or a usual one."""
        there, usual = self.table.column_names, [(name, "") for name in USUAL[option]]
        known = [(self.found.option(name, ""), PREFIXES.get(name, "")) for name in names]
        if any("." in name for name, _ in [(given, ""), *known]) and given not in there:
            self.table = self.table.flatten()  # the key `en` of a column `translation` is translation.en
            there = self.table.column_names
        if given and given not in there:
            raise UserError(f"--{option} {given}: there is no such column. {describe_columns(self.table, {option: given})}")
        for name, prefix_option in [(given, dict(known).get(given, ""))] if given else [*known, *usual]:
            if name and name in there:
                self.columns[option] = name
                self.prefix = self.found.option(prefix_option, "") if prefix is None and prefix_option else self.prefix
                return

    @property
    def num_shards(self) -> int:
        return -(-len(self.table) // self.shard_rows)

    def shard(self, number: int) -> range:
        """Return the rows of a shard."""
        return range(number * self.shard_rows, min((number + 1) * self.shard_rows, len(self.table)))

    def path(self, partial: Path, number: int) -> Path:
        """Return the file of a shard."""
        return partial / f"shard-{number:06d}.{'npy' if self.kind == 'vectors' else 'json'}"

    def read(self, rows: range) -> tuple[list[Any], list[str]]:
        """Return what the model is given of these rows, and why a row cannot be used, or ""."""
        part = self.table[rows.start : rows.stop]
        names = list(self.columns.values())
        if self.kind in ("images", "tags"):
            values = [value.split() if isinstance(value, str) else value for value in part[names[0]]]
            is_broken = lambda value: not value or (self.kind == "tags" and not all(isinstance(word, str) for word in value))
            return values, [f"its {names[0]} is empty or no {self.kind[:-1]}" * bool(is_broken(value)) for value in values]
        if self.kind != "answers":
            first = [self.prefix + text if isinstance(text, str) else text for text in part[names[0]]]
            return list(zip(first, *(part[name] for name in names[1:]))), find_text_problems(part, names)
        items: list[Any] = []
        problems = []
        for i in range(len(rows)):
            try:
                items.append(self._read_prompt({name: values[i] for name, values in part.items()}))
                problems.append("")
            except UnusableRow as error:
                items.append(None)
                problems.append(str(error))
        return items, problems

    def _read_prompt(self, row: dict[str, Any]) -> Any:
        """Return a chat without the answer that is predicted, or a text. An answer at the end of a chat is left out."""
        template, name = self.found.chat_template, self.chat_columns[0]
        if "text_column" in self.columns:
            return read_row("texts", self.chat_columns, row)
        answer: Any = "-"
        if "messages_column" in self.columns:
            messages = read_json(row[name], f"the column {name}")
            if not isinstance(messages, list):
                raise UnusableRow(f"the column {name} is not a list of messages")
            while (
                messages
                and isinstance(messages[-1], dict)
                and messages[-1].get("role", messages[-1].get("from")) in ("assistant", "gpt")
            ):
                messages = messages[:-1]
            row = {**row, name: [*messages, {"role": "assistant", "content": answer}]}
        found = read_row(
            "chats" if len(self.chat_columns) == 1 else "instructions", self.chat_columns, {**row, ANSWER: answer}, template
        )
        return found._replace(messages=found.messages[:-1]) if hasattr(found, "messages") else found.prompt

    def place(self, number: int) -> str:
        """Return the file and the row of a row number, for messages."""
        return place_of(self.files, number)

    def describe(self, broken: dict[int, str]) -> str:
        """Return the reasons why rows cannot be used, with the first rows of each."""
        kinds: dict[str, list[str]] = {}
        for number, problem in list(broken.items())[:1000]:
            reason, _, detail = problem.partition("\n")[0].partition("\t")
            kinds.setdefault(reason, []).append(f"{self.place(number)}{detail and f' ({detail})'}")
        lines = [f"  {reason}: {listed(places, 5)}" for reason, places in kinds.items()]
        return "\n".join([f"{counted(len(broken), 'row')} of --input cannot be used:", *lines])

    def check(self, skips: bool) -> None:
        """Raise UserError if rows cannot be used, or print them if they are skipped."""
        broken: dict[int, str] = {}
        for shard in map(self.shard, range(self.num_shards)) if self.kind != "images" else ():  # images are decoded once, later
            broken |= {number: problem for number, problem in zip(shard, self.read(shard)[1]) if problem}
        if broken and not skips:
            raise UserError(f"{self.describe(broken)}\n{CORRECT}")
        if broken:
            print(f"--skip_broken: {self.describe(broken)}", file=sys.stderr)


def _read_images(option: str, path: str) -> "datasets.Dataset":
    """Return images of a table, of a folder with or without classes, or one image."""
    import datasets
    from PIL import Image

    from accel_ddp.tasks import vision

    endings, place = Image.registered_extensions(), Path(path)
    files = [one for one in (sorted(place.rglob("*")) if place.is_dir() else [place]) if one.suffix.lower() in endings]
    paths = [str(one) for one in files if one.is_file()]
    return datasets.Dataset.from_dict({"image": paths}) if paths else vision.read_images(option, path)
