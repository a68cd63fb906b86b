"""The command `accel-ddp predict`: a model applied to all rows of files, on all GPUs of the machine, complete or absent.

Worker processes write shards of the result into OUTPUT.partial. There is no process group, so no process waits for another one. If
the command is killed, the same command continues with the shards that are missing, and its output is the same.
"""

import argparse
import csv
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_ddp.doctor.facts import count_visible
from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.exporting import trained_model
from accel_ddp.exporting.predict_rows import COLUMNS, InputRows
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.nodes.spawn import clean_environment, die_with_parent
from accel_ddp.records.files import replace_file
from accel_ddp.text import counted, format_clock

ENDINGS = (".jsonl", ".csv", ".parquet", ".npy")
LINE_SECONDS = 10.0  # between lines of progress in a log; a terminal shows each shard


def main(words: list[str]) -> int:
    """Run `accel-ddp predict` and return its exit code."""
    given = _parse(words)
    output, options = Path(given.output), {**vars(given)}
    if output.suffix.lower() not in ENDINGS:
        raise UserError(f"--output {output}: must end with {', '.join(ENDINGS[:-1])}, or for vectors with .npy.")
    if os.path.lexists(output):
        raise UserError(f"--output {output}: exists already. Move it away, or give another name.")
    partial = output.with_name(f"{output.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        with (partial / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"--output {output}: another accel-ddp predict is writing it.") from error
            return _predict(given, options, output, partial)
    finally:
        if {path.name for path in partial.glob("*")} <= {"lock", "model"}:  # nothing is done yet
            shutil.rmtree(partial, ignore_errors=True)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accel-ddp predict", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "model", metavar="MODEL", help="an exported folder, adapters, a run, a checkpoint, or any transformers folder or Hub name"
    )
    add("--input", nargs="+", required=True, metavar="FILE", help="files with the rows, as for --train_file")
    add("--output", required=True, metavar="FILE", help="a new file: .jsonl .csv .parquet, or .npy for vectors")
    for name in dict.fromkeys(name for names in COLUMNS.values() for name in names):
        add(f"--{name}", default="", metavar="NAME", help="default: as in training, or the usual name")
    add("--columns", nargs="*", metavar="NAME", help="columns of the input to keep in the output; default: all")
    add("--prefix", help="text before each input; default: as in training")
    add("--max_length", type=_whole, default=0, help="tokens of a text; longer ones are truncated; default: as in training")
    add_generation_options(parser)
    add("--top_k", type=_whole, default=1, help="labels, or tokens of a mask, to return for each row")
    add("--batch_size", type=lambda word: 0 if word == "auto" else _whole(word), default=0, help="rows; auto: by their length")
    add("--num_processes", type=_whole, default=0, help="default: one for each GPU, or one on CPUs")
    add("--skip_broken", action="store_true", help="rows that cannot be used get no prediction (null)")
    return parser.parse_args(words)


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `predict` and `chat` share."""
    add = parser.add_argument
    add("--chat_template", default="", help="for models without one: plain, chatml, llama3, gemma, mistral or a .jinja file")
    add("--max_new_tokens", type=_whole, default=0, help="tokens of an answer; default: 256, or what the model states")
    add("--temperature", type=_positive, default=0.0, help="0: the most probable answer; above 0: sample")
    add("--top_p", type=_positive, default=1.0, help="sample from the most probable tokens that have this probability together")
    add("--seed", type=int, default=0, help="of sampled answers, which depend on it and on the number of the row")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto: as stored; float32 on CPUs")


def _whole(word: str) -> int:
    if not (word.isdecimal() and int(word) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, and not {word!r}")
    return int(word)


def _positive(word: str) -> float:
    if not 0 <= float(word) < 100:
        raise argparse.ArgumentTypeError(f"must be 0 or more, and not {word}")
    return float(word)


def _predict(given: argparse.Namespace, options: dict[str, Any], output: Path, partial: Path) -> int:
    found = trained_model.find(given.model, partial)
    is_vectors = found.kind == "vectors"
    if output.suffix == ".npy" and not is_vectors:
        raise UserError(f"--output {output}: only vectors are written as .npy, and {given.model} predicts {found.kind}.")
    rows = InputRows(found, options)
    columns = rows.files.column_names if given.columns is None else given.columns
    types = _types(found, given.top_k)
    for name in columns:
        if name not in rows.files.column_names:
            raise UserError(f"--columns {name}: there is no such column. The data have: {', '.join(rows.files.column_names)}.")
        if name in types and output.suffix != ".npy":
            raise UserError(f"--input: has a column {name!r}, which the output needs. Name the columns to keep: --columns ...")
    rows.check(given.skip_broken)
    options = {name: value for name, value in options.items() if name not in ("output", "columns", "num_processes")}
    _continue(partial, options, {"input": _identity(given.input), "model": _identity([found.place]), "rows": len(rows.table)})
    missing = [i for i in range(rows.num_shards) if not rows.path(partial, i).is_file()]
    if len(missing) < rows.num_shards:
        print(f"continuing: {rows.num_shards - len(missing):,} of {rows.num_shards:,} parts are there")
    inputs = ", ".join(rows.columns.values()) + (f" with the prefix {rows.prefix!r}" if rows.prefix else "")
    print(f"{given.model}: {found.kind} of {counted(len(rows.table), 'row')} ({inputs})")
    if missing and (code := Workers(given, partial, rows, missing).run()):
        return code
    draft = partial / f"joined{output.suffix}"
    _join(rows, partial, draft, list(columns), types)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(output)
    shutil.rmtree(partial, ignore_errors=True)
    print(f"predictions saved in {output}")
    return 0


def _types(found: trained_model.TrainedModel, top_k: int) -> dict[str, tuple[str, int]]:
    """Return the columns of the output: type, and depth of lists."""
    if found.kind == "vectors":
        return {"embedding": ("float32", 1)}
    if found.kind in ("answers", "texts"):
        return {"prediction": ("string", 0)}
    labels = found.config.get("id2label") or {0: "", 1: ""}
    if found.kind == "labels" and len(labels) == 1:
        return {"prediction": ("float64", 0)}
    is_multi = found.config.get("problem_type") == "multi_label_classification"
    depth = (found.kind in ("tags", "masks") or is_multi) + (top_k > 1 and found.kind != "tags" and not is_multi)
    return {"prediction": ("string", depth), "score": ("float64", depth)}


def _identity(paths: list[str]) -> list[Any]:
    """Return names, sizes and times of files, or of the files of a folder."""
    files = [file for path in map(Path, paths) for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()] or paths


def _continue(partial: Path, options: dict[str, Any], identity: dict[str, Any]) -> None:
    """Store what the shards depend on. Raise UserError if those that exist depend on something else."""
    job, path = {**options, "identity": identity}, partial / "job.json"
    if path.is_file():
        before = json.loads(path.read_text())
        now = json.loads(json.dumps(job))
        changed = [name for name in now if name != "identity" and before.get(name) != now[name]]
        changed += [f"the {name}" for name in identity if before["identity"].get(name) != now["identity"][name]]
        if changed:
            what = f"has results of another command: {', '.join(changed)} changed"
            raise UserError(f"{partial}: {what}. Delete this folder to start again, or repeat the command that it is from.")
    replace_file(path, json.dumps(job))


class Workers:
    """The worker processes. A thread for each of them gives it shards; the main thread shows the progress."""

    def __init__(self, given: argparse.Namespace, partial: Path, rows: InputRows, missing: list[int]):
        self.partial, self.rows, self.missing, self.shards = partial, rows, missing, iter(missing)
        gpus, visible = count_visible(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        number = min(given.num_processes or max(gpus, 1), len(missing))
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // number))
        self.logs = [partial / f"process-{i}.log" for i in range(number)]
        self.lock, self.num_done, self.failures, self.began = threading.Lock(), 0, [], time.monotonic()
        command = [sys.executable, "-m", "accel_ddp.exporting.predictors", str(partial)]
        self.processes = []
        for i, log in enumerate(self.logs):
            env = clean_environment() | {"OMP_NUM_THREADS": threads}
            env |= {"CUDA_VISIBLE_DEVICES": names[i % gpus]} if gpus else {}
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=env,
                    start_new_session=True, preexec_fn=lambda: die_with_parent(signal.SIGKILL),
                )  # fmt: skip
            self.processes.append(process)

    def run(self) -> int:
        """Return 0 when all shards are written, or the exit code of the first failure, which is printed."""
        threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(len(self.processes))]
        try:
            for thread in threads:
                thread.start()
            shown = (-1.0, -1)
            while any(thread.is_alive() for thread in threads) and not self.failures:
                threads[0].join(0.1) if threads[0].is_alive() else time.sleep(0.1)
                shown = self._show(*shown)
            self._show(-1.0, -1)
        except KeyboardInterrupt:
            print(f"\nstopped. The same command continues; what is done is in {self.partial}.", file=sys.stderr)
            raise
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        if not self.failures:
            return 0
        code, text = self.failures[0]
        print(f"\nerror: {text}", file=sys.stderr)
        return code

    def _serve(self, i: int) -> None:
        """Give shards to a process until none is left, or until one fails."""
        process, shard, answer = self.processes[i], None, None
        try:
            while (answer := json.loads(process.stdout.readline())) == {}:
                with self.lock:
                    self.num_done += shard is not None
                    shard = next(self.shards, None)
                if shard is None:
                    return
                process.stdin.write(f"{shard}\n")
                process.stdin.flush()
        except (OSError, ValueError):  # its pipes are closed
            pass
        code = process.wait() if answer is None or answer == {} else USER_ERROR
        last = "\n".join(self.logs[i].read_text(errors="replace").splitlines()[-15:])
        rows = (
            f"rows {self.rows.shard(shard).start + 1:,} to {self.rows.shard(shard).stop:,}" if shard is not None else "its model"
        )
        reason = answer["error"] if code == USER_ERROR and answer else f"process {i} failed at {rows} (exit code {code}):\n{last}"
        with self.lock:
            self.failures.append((code if code == USER_ERROR else 1, reason))

    def _show(self, last: float, shown: int) -> tuple[float, int]:
        """Print the progress if it is time. Return when and what was printed."""
        now, is_terminal = time.monotonic(), sys.stdout.isatty()
        if now - last < (0.2 if is_terminal else LINE_SECONDS) or (is_terminal and shown == self.num_done):
            return last, shown
        total, done = len(self.rows.table), len(self.missing) - self.num_done
        left, seconds = min(total, done * self.rows.shard_rows), now - self.began
        rate = self.num_done * self.rows.shard_rows / seconds
        more = f"  {rate:,.1f} rows/s  {format_clock(left / rate)} left" if rate and left else ""
        text = f"{total - left:,} of {total:,} rows{more}" if self.num_done or left < total else "loading the model"
        print(f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal and left else "\n", flush=True)
        return now, self.num_done


def _join(rows: InputRows, partial: Path, path: Path, columns: list[str], types: dict[str, tuple[str, int]]) -> None:
    """Write all shards and the columns of the input as one file."""
    parts = ((rows.shard(i), rows.path(partial, i)) for i in range(rows.num_shards))
    if path.suffix == ".npy":
        _join_vectors(parts, path, len(rows.table))
    elif path.suffix == ".parquet":
        _join_parquet(rows, parts, path, columns, types)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            if path.suffix == ".csv":
                table.writerow([*columns, *types])
            for where, shard in parts:
                kept = rows.files.select_columns(columns)[where.start : where.stop] if columns else {}
                predicted = _read(shard, types)
                for i in range(len(where)):
                    row = {name: values[i] for name, values in itertools.chain(kept.items(), predicted.items())}
                    if path.suffix == ".csv":
                        table.writerow([value if isinstance(value, str | None) else _json(value) for value in row.values()])
                    else:
                        file.write(_json(row) + "\n")


def _read(shard: Path, types: dict[str, tuple[str, int]]) -> dict[str, list[Any]]:
    """Return the columns of a shard. A row that cannot be used has None."""
    if shard.suffix == ".json":
        rows = json.loads(shard.read_text())
        return {name: [row and row[name] for row in rows] for name in types}
    import numpy as np

    return {name: [None if np.isnan(row[0]) else row.tolist() for row in np.load(shard)] for name in types}


def _json(value: Any) -> str:
    plain = lambda value: None if isinstance(value, bytes) else str(value)  # the bytes of an image
    return json.dumps(value, ensure_ascii=False, default=plain)


def _join_vectors(parts: Iterator[tuple[range, Path]], path: Path, number: int) -> None:
    import numpy as np

    joined = None
    for where, shard in parts:
        part = np.load(shard)
        if joined is None:
            joined = np.lib.format.open_memmap(path, "w+", part.dtype, (number, part.shape[1]))
        joined[where.start : where.stop] = part
    joined.flush()


def _join_parquet(rows: InputRows, parts: Iterator[tuple[range, Path]], path: Path, columns: list[str], types: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    def arrow(kind: str, depth: int) -> Any:
        return pa.list_(arrow(kind, depth - 1)) if depth else getattr(pa, kind)()

    writer = None
    for where, shard in parts:
        table = rows.files.with_format("arrow")[where.start : where.stop].select(columns)
        for name, values in _read(shard, types).items():
            table = table.append_column(name, pa.array(values, arrow(*types[name])))
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()
