"""The rows that `accel-ddp predict` reads: which columns a model needs, and why a row cannot be used. This needs no torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.config.train_config import IMAGE_FILES, TABLE_FILES, RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.exporting.trained_model import TrainedModel
from accel_ddp.sources import data
from accel_ddp.sources.table_files import SENTENCE_FILES, load_file
from accel_ddp.tasks.chat_rows import INPUT_COLUMNS, USUAL_COLUMNS, UnusableRow, read_json, read_row
from accel_ddp.text import counted, listed

if TYPE_CHECKING:
    import datasets

# For what a model predicts: the options of `predict` that name its columns, each with the options of recipes that mean the same.
COLUMNS = {
    "labels": {"text_column": ("query_column",), "text_pair_column": ("candidate_column",)},
    "tags": {"text_column": ("tokens_column",)}, "images": {"image_column": ("image_column",)},
    "masks": {"text_column": ()}, "texts": {"text_column": ("source_column",)},
    "vectors": {"text_column": ("anchor_column", "positive_column")},
    "answers": {"messages_column": (), "prompt_column": (), "text_column": ()},
    "rewards": {"messages_column": (), "prompt_column": (), "answer_column": ("chosen_column",)},
}  # fmt: skip
PREFIXES = {"source_column": "prefix", "anchor_column": "anchor_prefix", "positive_column": "positive_prefix"}
SHARD_ROWS = {"answers": 256, "texts": 256, "images": 256}  # the most; others have 1,000
CORRECT = "Correct them, or give --skip_broken: they get no prediction."
ANSWER = "\0answer"  # a column that stands for the answer that is predicted


class InputRows:
    """The rows of `--input`, and what the model is given of each of them."""

    def __init__(self, found: TrainedModel, options: dict[str, Any]):
        self.found, self.kind, self.prefix = found, found.kind, options["prefix"] or ""
        self.files = self.table = self._load(options["input"])
        self.separator = found.option("separator", "").replace(r"\n", "\n").replace(r"\t", "\t")
        self.columns: dict[str, str] = {}
        known, is_chat = COLUMNS[self.kind], self.kind in ("answers", "rewards")
        wanted = next(iter(known))
        for option in [option for option in known if is_chat and options[option]] or known:
            if not is_chat or not self.columns or "prompt_column" in self.columns:  # the first kind of columns that exists
                self._choose(option, known[option], options)
        if not self.columns or (wanted not in self.columns and not is_chat):
            raise UserError(f"--{wanted}: which column has the inputs? {data.describe_columns(self.table, {'': 'text'})}")
        if self.kind == "images":
            import datasets

            self.table = self.table.cast_column(self.columns[wanted], datasets.Image(decode=False))
        # The result of a row depends a little on the rows it is padded with, so shards do not depend on the number of processes.
        self.shard_rows = min(SHARD_ROWS.get(self.kind, 1000), max(32, -(-len(self.table) // 64)))
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

    def _choose(self, option: str, names: tuple[str, ...], options: dict[str, Any]) -> None:
        """Choose the column of an option: the given one, the one of the training, or a usual one."""
        given, usual = options[option], USUAL_COLUMNS.get(option, ())
        known = {self.found.option(name) or name.removesuffix("_column"): name for name in names}
        if any("." in name for name in (given, *known)):
            self.table = self.table.flatten()  # translation.en is the key `en` of a column
        there = self.table.column_names
        if given and given not in there:
            raise UserError(f"--{option} {given}: there is no such column. {data.describe_columns(self.table, {option: given})}")
        for name in [given] if given else [name for name in (self.found.option(option, ""), *known, *usual) if name in there][:1]:
            self.columns[option] = name
            if options["prefix"] is None and known.get(name) in PREFIXES:
                self.prefix = self.found.option(PREFIXES[known[name]], "")

    def shard(self, number: int) -> range:
        """Return the rows of a shard."""
        return range(number * self.shard_rows, min((number + 1) * self.shard_rows, len(self.table)))

    def path(self, partial: Path, number: int) -> Path:
        """Return the file of a shard."""
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
        """Return a chat without the answer that is predicted (its last answers are left out), with it for rewards, or a text."""
        (option, name), template, is_whole = next(iter(self.columns.items())), self.found.chat_template, self.kind == "rewards"
        if option == "text_column":
            return read_row("texts", (name,), row)
        if option == "prompt_column":
            more, answer = [one for one in INPUT_COLUMNS.get(name, ()) if one in row], self.columns.get("answer_column", ANSWER)
            found = read_row("instructions", (name, *more, answer), {ANSWER: "-", **row}, template)
        else:
            messages = read_json(row[name], f"the column {name}")
            is_answer = lambda one: isinstance(one, dict) and (one.get("role") or one.get("from")) in ("assistant", "gpt")
            while isinstance(messages, list) and messages and is_answer(messages[-1]) and not is_whole:
                messages = messages[:-1]
            answer = [{"role": "assistant", "content": "-"}] if messages and not is_whole else []
            found = read_row(
                "chats", (name,), {**row, name: messages + answer if isinstance(messages, list) else messages}, template
            )
        if hasattr(found, "messages"):
            return found if is_whole else found._replace(messages=found.messages[:-1])
        return f"{found.prompt}{self.separator}{found.answer if is_whole else ''}"

    def describe(self, broken: dict[int, str]) -> str:
        """Return the reasons why rows cannot be used, with the first rows of each."""
        head = f"{len(broken):,} of {counted(len(self.files), 'row')} of {listed(self.files.files.paths)} cannot be used:"
        return "\n".join([head, *(f"  {kind}" for kind in data.describe_kinds(broken, self.files.files)), CORRECT])

    def check(self, skips: bool) -> None:
        """Raise UserError if rows cannot be used, or print them if they are skipped. Images are decoded later."""
        read = ((shard, self.read(shard)[1]) for shard in map(self.shard, range(self.num_shards)) if self.kind != "images")
        broken = {number: problem for shard, problems in read for number, problem in zip(shard, problems) if problem}
        if broken and not skips:
            raise UserError(self.describe(broken))
        if broken:
            print(f"--skip_broken: {counted(len(broken), 'row')} cannot be used and get no prediction.", file=sys.stderr)


def _read_images(option: str, path: str) -> "datasets.Dataset":
    """Return images of a table, of a folder with or without classes, or one image."""
    import datasets

    from accel_ddp.tasks import vision

    endings, place = vision.Image.registered_extensions(), Path(path)
    files = [one for one in (sorted(place.rglob("*")) if place.is_dir() else [place]) if one.suffix.lower() in endings]
    paths = [str(one) for one in files if one.is_file()]
    return datasets.Dataset.from_dict({"image": paths}) if paths else vision.read_images(option, path)
