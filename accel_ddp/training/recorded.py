"""A recipe whose data loaders record which items they read: `python recorded.py FOLDER RECIPE OPTIONS`, for `accel-ddp verify`.

The recipe runs as if it was started itself. Each process that reads items of the training stream appends to its own file in FOLDER
one line per item: its position in the stream and its index in the dataset. A rank that trains alone compares texts in a row with
padding once more at the end, and writes what it finds to `rows`.
"""

import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_STREAM, _SPEED = "accel_ddp.training.stream", "accel_ddp.speed.attach"


class RecordedItems:
    """The items of the training stream, recorded before they are read."""

    def __init__(self, items: Any, folder: str):
        self.items, self.folder = items, folder

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        with open(f"{self.folder}/{os.environ.get('RANK', '0')}-{os.getpid()}.txt", "a") as file:
            file.write("".join(f"{position} {index}\n" for position, index in keys))
        return self.items.__getitems__(keys)


class RecordOnImport:
    """Lets TrainBatches record, and the layers be compared, as soon as the recipe imports them.

    An import here would be earlier than in other runs: before the preflight, and before the number of CPU threads is set.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.changes = {_STREAM: self._record, _SPEED: self._compare}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        change = self.changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change
        return spec

    def _record(self, module: Any) -> None:
        items_of = module.TrainBatches.items
        module.TrainBatches.items = lambda batches, seed: RecordedItems(items_of(batches, seed), self.folder)

    def _compare(self, module: Any) -> None:
        close = module.Speed.close

        def compare_and_close(speed: Any) -> None:
            if speed.padding_free and speed.accelerator.num_processes == 1 and not speed.padding_free.is_fixed:
                Path(self.folder, "rows").write_text(speed.problem_of_rows())
            close(speed)

        module.Speed.close = compare_and_close


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[2]))  # as `python RECIPE` sets it, instead of the folder of this file
    from accel_ddp.training import recorded  # data workers find its classes by this name

    sys.meta_path.insert(0, recorded.RecordOnImport(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
