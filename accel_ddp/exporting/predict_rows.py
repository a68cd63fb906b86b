"""The rows that `accel-ddp predict` reads: which columns a model needs, and why a row cannot be used. This needs no torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.config.train_config import IMAGE_FILES, TABLE_FILES, RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.exporting.trained_model import KINDS, TrainedModel
from accel_ddp.sources import data
from accel_ddp.sources.places import Progress
from accel_ddp.sources.table_files import SENTENCE_FILES, load_file
from accel_ddp.tasks.chat_rows import INPUT_COLUMNS, USUAL_COLUMNS, Pair, UnusableRow, read_row
from accel_ddp.text import counted, listed

if TYPE_CHECKING:
    import datasets

GUESSED = ("images", "tags", "answers", "rewards")  # their data may have no columns, or columns that describe themselves
PREFIXES = {"source_column": "prefix", "anchor_column": "anchor_prefix", "positive_column": "positive_prefix"}
CORRECT = "Correct them, or give --skip_broken: they get no prediction."


class InputRows:
    def __init__(self, found: TrainedModel, options: dict[str, Any]):
        self.found, self.kind, self.prefix = found, found.kind, options["prefix"] or ""
        self.files = self.table = self._load(options["input"])
        self.separator = found.option("separator", "").replace(r"\n", "\n").replace(r"\t", "\t")
        self.columns: dict[str, str] = {}
        groups = KINDS[self.kind]["columns"]
        given = {option for group in groups for option in group if options[option]}
        for group in [group for group in groups if given & {*group}] or groups:
            self.columns = {option: name for option in group if (name := self._find(option, group[option], options))}
            if self.columns:
                break
        optional = {"prompt_column", "" if self.kind == "scores" or found.option("text_pair_column") else "text_pair_column"}
        for option in [option for option in group if option not in {*self.columns} | optional]:
            trained = [name for own in (option, *group[option]) if (name := found.option(own))]
            which = f"which column has the {option.removesuffix('_column').replace('_', ' ')}?"
            which += f" The model was trained with: {', '.join(trained)}." if trained else ""
            raise UserError(f"--{option}: {which} {data.describe_columns(self.table, {'': (*trained, 'text')[0]})}")
        for option in given - {*self.columns}:
            used = next(iter(self.columns))
            raise UserError(f"--{option} {options[option]}: would be ignored next to --{used}. Give one of them.")
        if self.kind == "images":
            import datasets

            self.table = self.table.cast_column(self.columns["image_column"], datasets.Image(decode=False))
        # The result of a row depends a little on the rows it is padded with, so shards do not depend on the number of processes.
        self.shard_rows = min(KINDS[self.kind].get("shard_rows", 1000), max(32, -(-len(self.table) // 64)))
        self.num_shards = -(-len(self.table) // self.shard_rows)

    def _load(self, paths: list[str]) -> "datasets.Dataset":
        load, endings = load_file, RecipeConfig.file_endings
        if self.kind == "images":
            from accel_ddp.tasks.vision import Image

            load, endings = _read_images, (*IMAGE_FILES, " ".join(Image.registered_extensions()))
        elif self.kind == "tags":
            from accel_ddp.tasks.tagging import load_words as load

            endings = (f"{TABLE_FILES} {' '.join(SENTENCE_FILES)}", ".txt")
        return data.read_all("--input", paths, load, endings, RecipeConfig.cache_dir)

    def _find(self, option: str, names: tuple[str, ...], options: dict[str, Any]) -> str:
        """Return the column of an option: the given one, the one of the training, or a usual one if that is not known."""
        stored = {name: own for own in (option, *names) if (name := self.found.option(own))}
        if any("." in name for name in (options[option], *stored)):
            self.table = self.table.flatten()  # translation.en is the key `en` of a column
        data.require_columns({option: options[option]}, self.table)
        usual = [*(name.removesuffix("_column") for name in names), *USUAL_COLUMNS.get(option, ())]
        tried = [*stored, *(usual if not stored or self.kind in GUESSED else ())]
        column = options[option] or next((name for name in tried if name in self.table.column_names), "")
        if options["prefix"] is None and stored.get(column) in PREFIXES:
            self.prefix = self.found.option(PREFIXES[stored[column]], "")
        return column

    def shard(self, number: int) -> range:
        return range(number * self.shard_rows, min((number + 1) * self.shard_rows, len(self.table)))

    def path(self, partial: Path, number: int) -> Path:
        return partial / f"shard-{number:06d}.{'npy' if self.kind == 'vectors' else 'json'}"

    def read(self, rows: range) -> tuple[list[Any], list[str]]:
        """Return what the model is given of these rows, and why a row cannot be used, or ""."""
        part, names = self.table[rows.start : rows.stop], list(self.columns.values())
        if self.kind in ("images", "tags"):
            values = [value.split() if isinstance(value, str) else value for value in part[names[0]]]
            is_broken = lambda value: not value or (self.kind == "tags" and not all(isinstance(word, str) for word in value))
            return values, [f"its {names[0]} is empty, or not what the model reads" * is_broken(value) for value in values]
        if self.kind not in ("answers", "rewards"):
            first = [self.prefix + text if isinstance(text, str) else text for text in part[names[0]]]
            return list(zip(first, *(part[name] for name in names[1:]))), data.find_text_problems(part, names)
        items, problems = [None] * len(rows), [""] * len(rows)
        for i in range(len(rows)):
            try:
                items[i] = self._read_prompt({name: values[i] for name, values in part.items()})
            except UnusableRow as error:
                problems[i] = str(error)
        return items, problems

    def _read_prompt(self, row: dict[str, Any]) -> Any:
        """Return a chat or a text, without the answer that is predicted (its last answers are left out), or with it for rewards."""
        (option, name), is_whole = next(iter(self.columns.items())), self.kind == "rewards"
        kind = {"text_column": "texts", "prompt_column": "instructions"}.get(option, "chats")
        more = [one for one in INPUT_COLUMNS.get(name, ()) if one in row and kind == "instructions"]
        columns = (name, *more, *[*self.columns.values()][1:])
        found = read_row(kind, columns, row, self.found.chat_template, needs_answer=is_whole)
        return f"{found.prompt}{self.separator}{found.answer}" if isinstance(found, Pair) else found

    def describe(self, broken: dict[int, str]) -> str:
        head = f"{len(broken):,} of {counted(len(self.files), 'row')} of {listed(self.files.files.paths)} cannot be used:"
        return "\n".join([head, *(f"  {kind}" for kind in data.describe_kinds(broken, self.files.files)), CORRECT])

    def check(self, skips: bool) -> None:
        broken: dict[int, str] = {}
        with Progress("checking", len(self.table)) as progress:
            for shard in map(self.shard, range(self.num_shards if self.kind != "images" else 0)):
                broken |= {number: problem for number, problem in zip(shard, self.read(shard)[1]) if problem}
                progress.add(len(shard))
        if broken and not skips:
            raise UserError(self.describe(broken))
        if broken:
            print(f"--skip_broken: {counted(len(broken), 'row')} cannot be used and get no prediction.", file=sys.stderr)


def _read_images(option: str, path: str) -> "datasets.Dataset":
    import datasets

    from accel_ddp.tasks import vision

    endings, place = vision.Image.registered_extensions(), Path(path)
    files = [one for one in (sorted(place.rglob("*")) if place.is_dir() else [place]) if one.suffix.lower() in endings]
    paths = [str(one) for one in files if one.is_file()]
    return datasets.Dataset.from_dict({"image": paths}) if paths else vision.read_images(option, path)
