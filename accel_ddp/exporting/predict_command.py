"""The command `accel-ddp predict`: a model applied to all rows of files, on all GPUs of the machine, complete or absent.

Processes write shards of the result into OUTPUT.partial. There is no process group, so none of them waits for another one. After a
kill the same command continues with the shards that are missing, and writes the same output.
"""

import argparse
import csv
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from accel_ddp.config.option_values import check_template
from accel_ddp.doctor.facts import count_visible
from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.exporting import trained_model
from accel_ddp.exporting.predict_rows import COLUMNS, InputRows
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.nodes.spawn import clean_environment, die_with_parent
from accel_ddp.records.files import replace_file, sync
from accel_ddp.text import counted, format_clock

ENDINGS = (".jsonl", ".csv", ".parquet", ".npy")
LINE_SECONDS = 10.0  # between lines of progress in a log; a terminal shows each shard
NO_EFFECT = ("output", "columns", "num_processes")  # options on which the predictions do not depend
Types = dict[str, tuple[str, int]]  # of the columns of predictions: the type, and how many lists are around it


def main(words: list[str]) -> int:
    """Run `accel-ddp predict` and return its exit code."""
    given = build_parser().parse_args(words)
    output = Path(given.output)
    if output.suffix not in ENDINGS:
        raise UserError(f"--output {output}: must end with {', '.join(ENDINGS[:-1])}, or for vectors with .npy.")
    if os.path.lexists(output):
        raise UserError(f"--output {output}: exists already. Move it away, or give another name.")
    check_template(given.chat_template)
    partial = output.with_name(f"{output.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--output {output}: another accel-ddp predict is writing it.") from error
        try:
            return _predict(given, output, partial)
        finally:
            if {path.name for path in partial.glob("*")} <= {"lock", "model"}:  # there are no predictions yet
                shutil.rmtree(partial, ignore_errors=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(prog="accel-ddp predict", description=__doc__.partition(":")[2].partition("\n")[0])
    add = parser.add_argument
    add_model_options(parser)
    add("--input", nargs="+", required=True, metavar="FILE", help="files with the rows, as for --train_file")
    add("--output", required=True, metavar="FILE", help="a new file: .jsonl .csv .parquet, or .npy for vectors")
    for name in dict.fromkeys(name for names in COLUMNS.values() for name in names):
        add(f"--{name}", default="", metavar="NAME", help="default: as in training, or the usual name")
    add("--columns", nargs="*", metavar="NAME", help="columns of the input to keep in the output; default: all")
    add("--prefix", help="text before each input; default: as in training")
    add("--max_length", type=_number(int), default=0, help="tokens of a text, which is truncated; default: as in training")
    add("--top_k", type=_number(int), default=1, help="labels, or tokens of a mask, to return for each row")
    add("--batch_size", type=lambda word: 0 if word == "auto" else _number(int)(word), default=0, help="rows; auto: by length")
    add("--num_processes", type=_number(int), default=0, help="default: one for each GPU, or one on CPUs")
    add("--skip_broken", action="store_true", help="rows that cannot be used get no prediction (null)")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `predict` and `chat` share."""
    add = parser.add_argument
    add(
        "model", metavar="MODEL", help="an exported folder, adapters, a run, a checkpoint, or any transformers folder or Hub name"
    )
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto: as stored; float32 on CPUs")
    add("--chat_template", default="", help="for models without one: plain, chatml, llama3, gemma, mistral or a .jinja file")
    add("--max_new_tokens", type=_number(int), default=0, help="tokens of an answer; default: what the model states, or 256")
    add("--temperature", type=_number(float), default=0.0, help="0: the most probable answer; above 0: sample")
    add("--top_p", type=_number(float), default=1.0, help="sample from the most probable tokens with this probability together")
    add("--seed", type=int, default=0, help="of sampled answers, which depend on it and on the number of the row")


def _number(kind: type) -> Any:
    def read(word: str) -> Any:
        if kind(word) < (kind is int):
            raise argparse.ArgumentTypeError(f"must be {'1' if kind is int else '0'} or more, and not {word}")
        return kind(word)

    read.__name__ = kind.__name__  # argparse names it in its messages
    return read


def _predict(given: argparse.Namespace, output: Path, partial: Path) -> int:
    options = {name: value for name, value in vars(given).items() if name not in NO_EFFECT}
    found = trained_model.find(given.model, partial)
    if output.suffix == ".npy" and found.kind != "vectors":
        raise UserError(f"--output {output}: only vectors are written as .npy, and {given.model} predicts {found.kind}.")
    rows = InputRows(found, options)
    there, types = rows.files.column_names, _types(found, given.top_k)
    columns = there if given.columns is None else given.columns
    for name in columns:
        if name not in there:
            raise UserError(f"--columns {name}: there is no such column. The data have: {', '.join(there)}.")
        if name in types and output.suffix != ".npy":
            raise UserError(f"--input: has a column {name!r}, which the output needs. Name the columns to keep with --columns.")
    rows.check(given.skip_broken)
    store_job(partial, options, found, rows)
    missing = [i for i in range(rows.num_shards) if not rows.path(partial, i).is_file()]
    inputs = ", ".join(rows.columns.values()) + (f" with the prefix {rows.prefix!r}" if rows.prefix else "")
    done = rows.num_shards - len(missing)
    inputs += f"; continuing, {done:,} of {rows.num_shards:,} parts exist" if done else ""
    print(f"{given.model}: {found.kind} of {counted(len(rows.table), 'row')} ({inputs})", flush=True)
    if missing and (code := Workers(given, partial, rows, missing).run()):
        return code
    draft = partial / f"joined{output.suffix}"
    join(rows, partial, draft, columns, types)
    sync(draft)
    draft.rename(output)
    shutil.rmtree(partial, ignore_errors=True)
    print(f"predictions saved in {output}")
    return 0


def _types(found: trained_model.TrainedModel, top_k: int) -> Types:
    if found.kind == "vectors":
        return {"embedding": ("float32", 1)}
    if found.kind in ("answers", "texts"):
        return {"prediction": ("string", 0)}
    if found.kind == "rewards" or (found.kind == "labels" and len(found.config.get("id2label") or "two") == 1):
        return {"prediction": ("float64", 0)}
    is_multi = found.config.get("problem_type") == "multi_label_classification"
    depth = (found.kind in ("tags", "masks") or is_multi) + (top_k > 1 and found.kind != "tags" and not is_multi)
    return {"prediction": ("string", depth), "score": ("float64", depth)}


def store_job(partial: Path, options: dict[str, Any], found: trained_model.TrainedModel, rows: InputRows) -> None:
    """Store what the shards depend on. Raise UserError if those that exist depend on something else."""

    def identity(path: Path) -> list[Any]:
        files = [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]
        return [str(path), *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]

    files = {
        "the files of --input": [*map(identity, map(Path, rows.files.files.paths))],
        "the model": identity(Path(found.place)),
    }
    job, path = json.loads(json.dumps({**options, **files, "rows": len(rows.table)})), partial / "job.json"
    before = json.loads(path.read_text()) if path.is_file() else job
    if changed := [name if " " in name else f"--{name}" for name in job if before.get(name) != job[name]]:
        what = f"has results of another command: {', '.join(changed)} changed"
        raise UserError(f"{partial}: {what}. Delete this folder to start again, or repeat the command that it is from.")
    replace_file(path, json.dumps(job))


class Workers:
    """The processes that predict. A thread for each of them gives it shards; the main thread shows the progress."""

    def __init__(self, given: argparse.Namespace, partial: Path, rows: InputRows, missing: list[int]):
        self.partial, self.rows, self.missing, self.shards = partial, rows, missing, iter(missing)
        self.lock, self.num_done, self.began = threading.Lock(), 0, time.monotonic()
        self.failures: list[tuple[int, str]] = []
        gpus, visible = count_visible(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        number = min(given.num_processes or max(gpus, 1), len(missing))
        shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // number))}
        self.processes: list[subprocess.Popen[str]] = []
        for i in range(number):
            env = clean_environment() | shared | ({"CUDA_VISIBLE_DEVICES": names[i % gpus]} if gpus else {})
            command = [sys.executable, "-m", "accel_ddp.exporting.predictors", str(partial)]
            with self.log(i).open("wb") as log:  # a session of its own: Ctrl-C is for this process only
                self.processes.append(subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env,
                    start_new_session=True, preexec_fn=die_with_parent,
                ))  # fmt: skip

    def log(self, i: int) -> Path:
        return self.partial / f"process-{i}.log"

    def run(self) -> int:
        """Return 0 when all shards are written, or the exit code of the first failure, which is printed."""
        threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(len(self.processes))]
        shown = (-LINE_SECONDS, -1)
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not self.failures:
                time.sleep(0.05)
                shown = self._show(*shown)
        except KeyboardInterrupt:
            print(f"\nstopped. The same command continues; what is done is in {self.partial}.", file=sys.stderr)
            raise
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        self._show(-LINE_SECONDS, -1)
        for code, text in self.failures[:1]:
            print(f"\nerror: {text}", file=sys.stderr)
            return code
        return 0

    def _serve(self, i: int) -> None:
        """Give shards to a process until none is left, or until it fails."""
        process, answer = self.processes[i], {}
        where = "while it loaded the model"
        try:
            while not (answer := json.loads(process.stdout.readline())):
                with self.lock:
                    self.num_done += "rows" in where
                    shard = next(self.shards, None)
                if shard is None:
                    return
                where = f"in rows {self.rows.shard(shard).start + 1:,} to {self.rows.shard(shard).stop:,}"
                process.stdin.write(f"{shard}\n")
                process.stdin.flush()
        except (OSError, ValueError):  # its pipes are closed
            pass
        code, last = process.wait(), "\n".join(self.log(i).read_text(errors="replace").splitlines()[-15:])
        reason = answer.get("error") or f"process {i} failed {where} (exit code {code}). The same command continues.\n{last}"
        with self.lock:
            self.failures.append((USER_ERROR if answer else 1, reason))

    def _show(self, last: float, shown: int) -> tuple[float, int]:
        """Print the progress if it is time. Return when and what was printed."""
        now, is_terminal = time.monotonic(), sys.stdout.isatty()
        if now - last < (0.2 if is_terminal else LINE_SECONDS) or (is_terminal and shown == self.num_done):
            return last, shown
        total = len(self.rows.table)
        left = min(total, (len(self.missing) - self.num_done) * self.rows.shard_rows)
        rate = self.num_done * self.rows.shard_rows / (now - self.began)
        more = f"  {rate:,.1f} rows/s" + f"  {format_clock(left / rate)} left" * (left > 0) if rate else "  (loading the model)"
        text = f"{total - left:,} of {total:,} rows{more}"
        print(f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal and left else "\n", flush=True)
        return now, self.num_done


def join(rows: InputRows, partial: Path, path: Path, columns: list[str], types: Types) -> None:
    """Write all shards and the columns of the input as one file."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    plain = lambda value: None if isinstance(value, bytes) else str(value)  # bytes are those of an image
    dumps = lambda value: json.dumps(value, ensure_ascii=False, default=plain)
    nested = lambda kind, depth: pa.list_(nested(kind, depth - 1)) if depth else getattr(pa, kind)()
    kept, writer = rows.files.select_columns(columns), None
    with path.open("w", encoding="utf-8", newline="") as file:  # arrays and .parquet are written by their libraries
        for where, shard in ((rows.shard(i), rows.path(partial, i)) for i in range(rows.num_shards)):
            if path.suffix == ".npy":
                part = np.load(shard)
                writer = (
                    np.lib.format.open_memmap(path, "w+", part.dtype, (len(kept), part.shape[1])) if writer is None else writer
                )
                writer[where.start : where.stop] = part
                continue
            found = json.loads(shard.read_text()) if shard.suffix == ".json" else [
                None if np.isnan(row[0]) else {"embedding": row.tolist()} for row in np.load(shard)
            ]  # fmt: skip
            predicted = {name: [row and row[name] for row in found] for name in types}
            if path.suffix == ".parquet":
                table = kept.with_format("arrow")[where.start : where.stop]
                for name, values in predicted.items():
                    table = table.append_column(name, pa.array(values, nested(*types[name])))
                writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
                writer.write_table(table)
                continue
            values = {**(kept[where.start : where.stop] if columns else {}), **predicted}
            if path.suffix == ".csv":
                writer = writer or csv.writer(file)
                cells = lambda row: [value if isinstance(value, str | None) else dumps(value) for value in row]
                writer.writerows([list(values)] * (where.start == 0) + [cells(row) for row in zip(*values.values())])
            else:
                file.writelines(dumps(dict(zip(values, row))) + "\n" for row in zip(*values.values()))
    if path.suffix in (".parquet", ".npy"):
        writer.close() if path.suffix == ".parquet" else writer.flush()
