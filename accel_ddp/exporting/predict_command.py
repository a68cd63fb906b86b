"""The command `accel-ddp predict`: a model applied to all rows of files, on all GPUs of the machine, complete or absent.

Processes write shards of the result into OUTPUT.partial. There is no process group, so none of them waits for another one. After a
kill the same command continues with the shards that are missing, and writes the same output.
"""

import argparse
import csv
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from accel_ddp.config.commands import parser_of
from accel_ddp.config.option_values import check_template
from accel_ddp.doctor.facts import count_visible
from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.exporting import trained_model
from accel_ddp.exporting.predict_rows import InputRows
from accel_ddp.exporting.trained_model import KINDS
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.nodes.spawn import MODULE, clean_environment, die_with_parent
from accel_ddp.records.files import replace_file, sync
from accel_ddp.sources.places import Progress
from accel_ddp.text import counted

ENDINGS = (".jsonl", ".csv", ".parquet", ".npy")
NO_EFFECT = ("output", "columns", "num_processes")  # options on which the predictions do not depend
# The options that have an effect for some models only.
OPTIONS = [*dict.fromkeys(name for kind in KINDS for name in trained_model.options_of(kind))]
Types = dict[str, tuple[str, int]]  # of the columns of predictions: the type, and how many lists are around it


def main(words: list[str]) -> int:
    given = parser_of("predict").parse_args(words)
    check_options(given)
    output = Path(given.output)
    if output.suffix not in ENDINGS:
        raise UserError(f"--output {output}: must end with {', '.join(ENDINGS[:-1])}, or for vectors with .npy.")
    if os.path.lexists(output):
        raise UserError(f"--output {output}: exists already. Move it away, or give another name.")
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.mkdir(exist_ok=True)
        lock = (partial / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        what = "another accel-ddp predict is writing it. Wait for it, or give another --output"
        raise UserError(f"--output {output}: {what}.") from error
    except OSError as error:
        reason = "its folder does not exist" if isinstance(error, FileNotFoundError) else f"cannot be written: {error.strerror}"
        raise UserError(f"--output {output}: {reason}. Name a file in a folder that exists.") from error
    try:
        return _predict(given, output, partial)
    finally:
        if {path.name for path in partial.glob("*")} <= {"lock", "model"}:  # there are no predictions yet
            shutil.rmtree(partial, ignore_errors=True)
        lock.close()


def check_options(given: argparse.Namespace) -> None:
    check_template(given.chat_template)
    positive = {"top_p": "above 0 and at most 1", "top_k": "1 or more"}
    for name, value in vars(given).items():
        is_low = isinstance(value, int | float) and (value < 0 or (value == 0 and name in positive)) and name != "seed"
        if is_low or (name == "top_p" and value > 1):
            raise UserError(f"--{name} {value}: must be {positive.get(name, '0 or more')}.")
    if given.top_p < 1 and not given.temperature:
        raise UserError(f"--top_p {given.top_p:g}: has no effect without sampling. Add --temperature 1, or leave it out.")


def check_effect(given: argparse.Namespace, found: trained_model.TrainedModel) -> None:
    parser, has_rank = parser_of("predict"), _types(found, 2) != _types(found, 1)
    for name in [name for name in OPTIONS if getattr(given, name) != parser.get_default(name)]:
        if name not in trained_model.options_of(found.kind) or (name == "top_k" and not has_rank):
            what = f"would be ignored, because {given.model} predicts {found.kind}"
            raise UserError(f"--{name} {getattr(given, name)}: {what}. Leave it out.")


def _predict(given: argparse.Namespace, output: Path, partial: Path) -> int:
    options = {name: value for name, value in vars(given).items() if name not in NO_EFFECT}
    found = trained_model.find(given.model, partial)
    if output.suffix == ".npy" and found.kind != "vectors":
        raise UserError(f"--output {output}: only vectors are written as .npy, and {given.model} predicts {found.kind}.")
    check_effect(given, found)
    rows = InputRows(found, options)
    there, types = rows.files.column_names, _types(found, given.top_k)
    columns = there if given.columns is None else given.columns
    for name in columns:
        if name not in there:
            raise UserError(f"--columns {name}: there is no such column. The data have: {', '.join(there)}.")
        if name in types and output.suffix != ".npy":
            raise UserError(f"--input: has a column {name!r}, which the output needs. Name the columns to keep with --columns.")
    rows.check(given.skip_broken)
    found = trained_model.export(found, partial)
    store_job(partial, options, found, rows)
    missing = [i for i in range(rows.num_shards) if not rows.path(partial, i).is_file()]
    inputs = ", ".join(rows.columns.values()) + (f" with the prefix {rows.prefix!r}" if rows.prefix else "")
    done = rows.num_shards - len(missing)
    inputs += f"; continuing, {done:,} of {rows.num_shards:,} parts exist" if done else ""
    print(f"{given.model}: {found.kind} of {counted(len(rows.table), 'row')} ({inputs})", flush=True)
    if missing and (code := run_processes(given, partial, rows)):
        return code
    draft = partial / f"joined{output.suffix}"
    join(rows, partial, draft, columns, types)
    sync(draft)
    try:
        os.link(draft, output)  # a rename would replace a file
    except FileExistsError as error:
        raise UserError(f"--output {output}: exists now. Move it away and repeat the command: {partial} is kept.") from error
    except OSError:  # this disk has no links
        draft.rename(output)
    shutil.rmtree(partial, ignore_errors=True)
    print(f"predictions saved in {output}")
    return 0


def _types(found: trained_model.TrainedModel, top_k: int) -> Types:
    if found.kind == "vectors":
        return {"embedding": ("float32", 1)}
    if found.kind in ("answers", "texts"):
        return {"prediction": ("string", 0)}
    if found.kind in ("rewards", "scores") or (found.kind == "labels" and len(found.config.get("id2label") or "two") == 1):
        return {"prediction": ("float64", 0)}
    is_multi = found.config.get("problem_type") == "multi_label_classification"
    depth = (found.kind in ("tags", "masks") or is_multi) + (top_k > 1 and found.kind != "tags" and not is_multi)
    return {"prediction": ("string", depth), "score": ("float64", depth)}


def store_job(partial: Path, options: dict[str, Any], found: trained_model.TrainedModel, rows: InputRows) -> None:
    folders = {"files of --input": rows.files.files.paths, "model files": [found.place]}
    below = lambda path: sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = lambda file: [str(file), file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else str(file)
    files = {name: [facts(file) for path in paths for file in below(Path(path))] for name, paths in folders.items()}
    job, path = json.loads(json.dumps({**options, **files})), partial / "job.json"
    before = json.loads(path.read_text()) if path.is_file() else job
    if changed := [name if " " in name else f"--{name}" for name in job if before.get(name) != job[name]]:
        what = f"has results of another command: {', '.join(changed)} changed"
        raise UserError(f"{partial}: {what}. Delete this folder to start again, or repeat the command that it is from.")
    replace_file(path, json.dumps(job))


def run_processes(given: argparse.Namespace, partial: Path, rows: InputRows) -> int:
    """Write the missing shards. Return 0 when all exist, or the exit code of a process that failed; then the others are stopped."""
    gpus, visible = count_visible(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(gpus)]
    number = min(given.num_processes or max(gpus, 1), rows.num_shards)
    shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // number))}
    logs, processes = [partial / f"process-{i}.log" for i in range(number)], list[Any]()
    count = lambda: sum(len(rows.shard(i)) for i in range(rows.num_shards) if rows.path(partial, i).is_file())
    try:
        for i, path in enumerate(logs):
            env = clean_environment() | shared | ({"CUDA_VISIBLE_DEVICES": names[i % gpus]} if gpus else {})
            command = [sys.executable, *MODULE, "accel_ddp.exporting.predictors", str(partial), str(i), str(number)]
            with path.open("wb") as log:  # a session of its own: Ctrl-C is for this process only
                options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
                processes.append(subprocess.Popen(command, env=env, preexec_fn=die_with_parent, **options))
        codes: list[int | None] = [None]
        with Progress("predicting", len(rows.table), before=count()) as progress:
            while None in codes and not any(codes):
                time.sleep(0.2)
                codes = [process.poll() for process in processes]
                progress.show(count() - progress.before)
    except KeyboardInterrupt:
        print(f"\nstopped. The same command continues; what is done is in {partial}.", file=sys.stderr)
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for i, code in [(i, code) for i, code in enumerate(codes) if code][:1]:
        lines = logs[i].read_text(errors="replace").splitlines()
        if code == USER_ERROR:
            raise UserError("\n".join(["", *lines]).partition("\nerror: ")[2])
        shard = next((rows.shard(j) for j in range(i, rows.num_shards, number) if not rows.path(partial, j).is_file()), range(0))
        what = f"process {i} failed (exit code {code}), in rows {shard.start + 1:,} to {shard.stop:,} or before them"
        print(f"error: {what}. The same command continues.", *lines[-15:], sep="\n", file=sys.stderr)
        return 1
    return 0


def join(rows: InputRows, partial: Path, path: Path, columns: list[str], types: Types) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    kept, shards = rows.files.select_columns(columns), [rows.path(partial, i) for i in range(rows.num_shards)]
    if path.suffix == ".npy":
        parts = [np.load(shard, mmap_mode="r") for shard in shards]
        joined = np.lib.format.open_memmap(path, "w+", parts[0].dtype, (len(kept), parts[0].shape[1]))
        return np.concatenate(parts, out=joined).flush()
    plain = lambda value: None if isinstance(value, bytes) else str(value)  # bytes are those of an image
    dumps = lambda value: json.dumps(value, ensure_ascii=False, default=plain)
    nested = lambda kind, depth: pa.list_(nested(kind, depth - 1)) if depth else getattr(pa, kind)()
    vectors = lambda shard: [None if np.isnan(row[0]) else {"embedding": row.tolist()} for row in np.load(shard)]
    cells = lambda row: [value if isinstance(value, str | None) else dumps(value) for value in row.values()]
    with path.open("wb") as file:
        text, writer = io.TextIOWrapper(file, "utf-8", newline="", write_through=True), None
        for number, shard in enumerate(shards):
            found = json.loads(shard.read_text()) if shard.suffix == ".json" else vectors(shard)
            there = kept.with_format("arrow")[rows.shard(number).start : rows.shard(number).stop]
            predicted = {name: pa.array([row and row[name] for row in found], nested(*types[name])) for name in types}
            table = pa.table({**{name: there[name] for name in columns}, **predicted}, metadata=there.schema.metadata)
            if path.suffix == ".parquet":
                writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
                writer.write_table(table)
            elif path.suffix == ".csv":
                csv.writer(text).writerows([table.column_names] * (number == 0) + list(map(cells, table.to_pylist())))
            else:
                text.writelines(dumps(row) + "\n" for row in table.to_pylist())
        if writer:
            writer.close()
        text.flush()
