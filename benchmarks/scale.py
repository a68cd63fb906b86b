"""Time and memory of `sft` from the command to the first step, for files of many chats, and of `datasets.map` with the same tokenizer.

    python benchmarks/scale.py --work DIR                            # 100,000 and 1,000,000 rows
    python benchmarks/scale.py --work DIR --rows 1000000 --out table.jsonl
    python benchmarks/scale.py --work DIR --table table.jsonl        # print the rows that were written

DIR gets the files of chats (0.5 KB and about 210 tokens a row) and the caches, about 4 KB a row. Memory is the highest sum over the
processes of the run, sampled twice per second: anonymous memory, and all resident memory, in which mapped files count too. Shared pages
count once. CPU seconds are more reliable than seconds if other programs use the cores.
"""

import argparse
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
PARTS = {  # in the order of a run: functions of accel_ddp whose calls are timed
    "read": "sources.data.load_rows",
    "hash": "sources.tokenization._compute_fingerprint",
    "tokenize": "sources.tokenization.write_shards",
    "model": "sources.models.load",
}
SAMPLE = 2_000  # rows for the time of rendering, tokenizing and writing


def write_chats(file: Path, number: int) -> None:
    """Write chats of one to three turns in invented words, whose frequencies follow Zipf's law."""
    rng = random.Random(0)
    syllables = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s", "t")]
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 1, 2, 2, 3)))) for _ in range(4000)]
    heights = list(itertools.accumulate(1 / (i + 10) for i in range(4000)))
    draft = file.with_suffix(".draft")
    with draft.open("w") as out:
        for _ in range(number):
            messages = [
                {"role": role, "content": " ".join(rng.choices(words, cum_weights=heights, k=rng.randint(*most)))}
                for _ in range(rng.choice((1, 1, 2, 3)))
                for role, most in (("user", (5, 18)), ("assistant", (12, 34)))
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    draft.rename(file)


def main(work: Path, sizes: list[int], out: Path | None, cores: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    made = []
    for number in sizes:
        file = work / f"chats-{number}.jsonl"
        if not file.exists():
            write_chats(file, number)
        for folder in ("cache", "hub", "run"):
            shutil.rmtree(work / folder, ignore_errors=True)
        first, again = launch(work, file), launch(work, file)
        made.append({
            "rows": number, "MB": file.stat().st_size / 1e6, "cores": cores, **first, "again_s": again["total_s"],
            "again_parts": {name: again[f"{name}_s"] for name in PARTS}, **sample(work, file), "peers": peers(work, file, cores),
        })  # fmt: skip
        if out:
            with out.open("a") as lines:
                lines.write(json.dumps(made[-1]) + "\n")
    print_tables(made)


def launch(work: Path, file: Path) -> dict:
    """Run the recipe until its first step, and return seconds by part, CPU seconds and the highest memory."""
    shutil.rmtree(work / "run", ignore_errors=True)
    parts = work / "parts.jsonl"
    parts.unlink(missing_ok=True)
    options = [
        "--train_file",
        file,
        "--steps",
        1,
        "--cache_dir",
        work / "cache",
        "--output_dir",
        work / "run",
        "--save_every",
        1000,
    ]
    options += ["--eval_every", 1000, "--max_eval_items", 16, "--samples", 0]
    env = {**os.environ, "HF_HOME": str(work / "hub"), "CUDA_VISIBLE_DEVICES": ""}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    log = (work / "log.txt").open("a")
    process = subprocess.Popen(
        [sys.executable, __file__, "--parts_file", parts, *map(str, options)], env=env, stdout=log, stderr=log
    )
    most = {"anonymous_MB": 0.0, "resident_MB": 0.0}
    first_step = 0.0
    while process.poll() is None:
        most = {name: max(value, most[name]) for name, value in memory_of(process.pid).items()}
        first_step = first_step or find_first_step(work / "run" / "log.jsonl")
        time.sleep(0.5)
    if process.returncode:
        sys.exit(f"the recipe exited with code {process.returncode}; see {work / 'log.txt'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [json.loads(line) for line in parts.read_text().splitlines()]
    seconds = {
        f"{name}_{kind}": sum(one[kind] for one in found if one["part"] == name) for name in PARTS for kind in ("s", "cpu_s")
    }
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    total = (first_step or find_first_step(work / "run" / "log.jsonl")) - began
    return {**seconds, "total_s": total, "total_cpu_s": cpu, **most}


def find_first_step(log: Path) -> float:
    events = (json.loads(line) for line in log.read_text().splitlines()) if log.exists() else ()
    return next((event["time"] for event in events if event["event"] == "update"), 0.0)


def memory_of(pid: int) -> dict[str, float]:
    """Return the memory of a process and everything it has started, in MB. A page that several of them share counts once."""
    found, waiting = {"Pss": 0, "Pss_Anon": 0}, [pid]
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        try:
            waiting += map(int, (place / "task" / place.name / "children").read_text().split())
            for name, value in re.findall(r"^(Pss|Pss_Anon):\s+(\d+)", (place / "smaps_rollup").read_text(), re.MULTILINE):
                found[name] += int(value)
        except OSError:  # it has ended
            pass
    return {"anonymous_MB": found["Pss_Anon"] / 1024, "resident_MB": found["Pss"] / 1024}


def run_with_parts(parts: Path, recipe_options: list[str]) -> None:
    """Run the recipe in this process, and write how long the functions of PARTS take."""
    sys.path.insert(0, str(RECIPES))
    sys.argv = [str(RECIPES / "sft.py"), *recipe_options]
    import sft

    import accel_ddp

    cpu = lambda: sum(os.times()[:4])  # also of workers that have ended

    def main(cfg) -> None:
        from importlib import import_module

        for part, name in PARTS.items():
            module, _, name = name.rpartition(".")
            owner = import_module(f"accel_ddp.{module}")
            setattr(owner, name, timed(part, getattr(owner, name)))
        sft.main(cfg)

    def timed(part: str, function):
        @functools.wraps(function)
        def call(*args, **options):
            began, used = time.monotonic(), cpu()
            result = function(*args, **options)
            with parts.open("a") as out:
                out.write(json.dumps({"part": part, "s": time.monotonic() - began, "cpu_s": cpu() - used}) + "\n")
            return result

        return call

    accel_ddp.run(sft.Config, main)


def load(work: Path, file: Path):
    """Return the first rows, their format and the tokenizer, as `sft` reads them."""
    os.environ["HF_HOME"], os.environ["CUDA_VISIBLE_DEVICES"] = str(work / "hub"), ""
    sys.path.insert(0, str(RECIPES))
    import sft

    from accel_ddp.sources import models, table_files
    from accel_ddp.tasks import chat

    cfg = sft.Config(train_file=(str(file),), cache_dir=str(work / "cache"))
    tokenizer = models.load_tokenizer(cfg, 0, "AutoModelForCausalLM")
    rows = table_files.load_file("--train_file", str(file))
    return rows, chat.Format(rows, tokenizer, cfg), tokenizer


def sample(work: Path, file: Path) -> dict:
    """Return the CPU milliseconds per row of rendering, tokenizing and writing, on one core with some rows."""
    rows, form, tokenizer = load(work, file)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    times = [time.process_time()]
    mark = lambda: times.append(time.process_time())
    some = [rows[start : start + 1000] for start in range(0, SAMPLE, 1000)]
    mark()
    rendered = [one for batch in some for i in range(1000) for one in form._render(batch, i)]
    mark()
    tokenizer([one.text for one in rendered], add_special_tokens=False)
    mark()
    encoded = [form.encode(batch) for batch in some]
    mark()
    import datasets

    for batch in encoded:
        datasets.Dataset.from_dict({name: values for name, values in batch.items() if name != "source row"})
    mark()
    read, render, tokenize, both, write = (1000 * (b - a) / SAMPLE for a, b in itertools.pairwise(times))
    return {"ms": {"read": read, "render": render, "tokenize": tokenize, "labels": both - render - tokenize, "write": write}}


def peers(work: Path, file: Path, cores: int) -> dict[str, float]:
    """Return the rows/s per core of `datasets.map` in as many processes as cores."""
    rows, _, tokenizer = load(work, file)
    rows = rows.select(range(min(len(rows), 10_000)))
    import datasets

    datasets.disable_progress_bars()
    marked = tokenizer.chat_template.replace(
        "{{ message['content'] }}<|im_end|>",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message['content'] }}<|im_end|>{% endif %}",
    )
    assert marked != tokenizer.chat_template

    def ids(row):
        return tokenizer.apply_chat_template(row["messages"], return_dict=True)

    def ids_and_mask(row):
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": marked}
        return tokenizer.apply_chat_template(row["messages"], **options)

    found = {}
    for name, function in (("ids", ids), ("ids and mask", ids_and_mask)):
        before, began = sum(os.times()[2:4]), time.monotonic()
        rows.map(function, num_proc=cores, load_from_cache_file=False, remove_columns=rows.column_names)
        seconds, cpu = time.monotonic() - began, sum(os.times()[2:4]) - before
        found |= {name: len(rows) / seconds / cores, f"{name}, per CPU s": len(rows) / cpu}
    return found


def print_tables(made: list[dict]) -> None:
    print("| rows | MB | read, s | hash | tokenize | model | first step | CPU s | again, s | anonymous, MB | resident, MB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for one in made:
        seconds = [one[f"{name}_s"] for name in PARTS] + [one["total_s"], one["total_cpu_s"], one["again_s"]]
        cells = [f"{one['rows']:,}", f"{one['MB']:.0f}", *(f"{value:.1f}" for value in seconds)]
        print(f"| {' | '.join(cells)} | {one['anonymous_MB']:.0f} | {one['resident_MB']:.0f} |")
    print("\n| rows | rows/s per core | rows per CPU s | `datasets.map`, ids | per CPU s | with mask | per CPU s |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for one in made:
        ours = one["rows"] / one["tokenize_s"] / one["cores"], one["rows"] / one["tokenize_cpu_s"]
        cells = [f"{value:,.0f}" for value in (one["rows"], *ours, *one["peers"].values())]
        print(f"| {' | '.join(cells)} |")
    for one in made:
        print(f"{one['rows']:,} rows, CPU ms per row:", ", ".join(f"{name} {value:.3f}" for name, value in one["ms"].items()))
        print("  the second run:", ", ".join(f"{name} {value:.1f} s" for name, value in one["again_parts"].items()))
    last = made[-1]
    if last["rows"] < 10_000_000:
        factor = 10_000_000 / last["rows"]
        hours = factor * sum(last[f"{name}_cpu_s"] for name in ("read", "hash", "tokenize")) / last["cores"] / 3600
        size = f"{factor * last['MB'] / 1000:.1f} GB"
        print(f"extrapolated, not measured: 10,000,000 rows ({size}) need {hours:.1f} h on {last['cores']} free cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("scale"))
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--out", type=Path, help="append a line of JSON for each size")
    parser.add_argument("--table", type=Path, help="print the tables of such a file, without running")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--parts_file", type=Path, help=argparse.SUPPRESS)  # in the process of `launch`
    given, rest = parser.parse_known_args()
    if given.parts_file:
        run_with_parts(given.parts_file, rest)
    elif given.table:
        print_tables([json.loads(line) for line in given.table.read_text().splitlines()])
    else:
        main(given.work.absolute(), given.rows, given.out, given.cores)
