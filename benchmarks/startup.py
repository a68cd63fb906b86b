"""The time until a recipe has finished its first step, compared with a process that only imports the libraries.

    python benchmarks/startup.py
    python benchmarks/startup.py -- --model my_folder      # options after `--` are passed to the recipe

Both are timed from their launch and take turns. The tokenized data are in the cache, and nothing is evaluated before the first step.
CPU seconds depend less on other processes. The time of one more launch is shown by stages. The goal is a ratio of at most 1.1.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
IMPORTS = """
import accelerate, datasets, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification, BertTokenizerFast
"""


def main(rounds: int, recipe_options: list[str]) -> None:
    launch_recipe([str(RECIPES / "classify.py")], recipe_options)  # fills the cache of tokenised data and the page cache
    launch_imports()
    print(
        f"{'seconds':14}{'recipe':>10}{'imports':>10}{'ratio':>10}{'recipe, CPU':>14}{'imports, CPU':>14}{'ratio':>10}",
        flush=True,
    )
    ratios, of_cpu = [], []
    for turn in range(1, rounds + 1):
        times, (imports, imports_cpu) = launch_recipe([str(RECIPES / "classify.py")], recipe_options), launch_imports()
        recipe = times["step"] - times["launched"]
        ratios.append(recipe / imports)
        of_cpu.append(times["cpu"] / imports_cpu)
        row = f"{recipe:10.2f}{imports:10.2f}{ratios[-1]:10.3f}{times['cpu']:14.2f}{imports_cpu:14.2f}{of_cpu[-1]:10.3f}"
        print(f"{f'round {turn}':14}{row}", flush=True)
    for name, found in (("seconds", ratios), ("CPU seconds", of_cpu)):
        spread = f"from {min(found):.3f} to {max(found):.3f}"
        print(f"median of recipe / imports over {rounds} rounds, {name}: {statistics.median(found):.3f} ({spread})")
    print()

    print(f"{'stages of one launch':44}{'seconds':>10}")
    for stage, seconds in measure_stages(recipe_options):
        print(f"{stage:44}{seconds:10.2f}")


def measure_stages(recipe_options: list[str]) -> list[tuple[str, float]]:
    """Launch the recipe and return (stage, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stages.jsonl"
        recipe = launch_recipe([__file__, "--stages_file", str(file)], recipe_options)
        moments = [json.loads(line) for line in file.read_text().splitlines()]
    began = {moment["stage"]: moment["time"] for moment in moments if moment["event"] == "began"}
    ended = {moment["stage"]: moment["time"] for moment in moments if moment["event"] == "ended"}
    stages = [("interpreter, options, torch, accelerate", began["other imports"] - recipe["launched"])]
    stages += [(stage, ended[stage] - began[stage]) for stage in ended]
    stages += [("fit, before the first step", recipe["fit"] - began["fit"]), ("first step", recipe["step"] - recipe["fit"])]
    total = recipe["step"] - recipe["launched"]
    return [*stages, ("other", total - sum(seconds for _, seconds in stages)), ("total", total)]


def launch_recipe(command: list[str], recipe_options: list[str]) -> dict[str, float]:
    """Return the times of the launch, of the start of `fit` and of the end of the first step. Then kill the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "log.jsonl"
        options = ["--steps", "1", "--log_every", "1", "--no_eval_first", "--output_dir", str(log.parent), *recipe_options]
        launched = time.time()
        process = subprocess.Popen([sys.executable, *command, *options], stdout=subprocess.DEVNULL)
        try:
            while True:
                running = process.poll() is None
                events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
                times = {event["event"]: event["time"] for event in events}
                if "update" in times:
                    cpu = cpu_seconds(process.pid) if running else 0.0
                    return {"launched": launched, "fit": times["start"], "step": times["update"], "cpu": cpu}
                if not running:
                    sys.exit(f"the recipe ended before its first step, with exit code {process.returncode}")
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def launch_imports() -> tuple[float, float]:
    """Return the seconds and CPU seconds until everything is imported, without the exit, as for the recipe."""
    launched = time.time()
    command = [sys.executable, "-c", f"{IMPORTS}import time; print(time.time(), time.process_time())"]
    ended, cpu = map(float, subprocess.run(command, capture_output=True, check=True).stdout.split())
    return ended - launched, cpu


def run_with_stages(file: Path, recipe_options: list[str]) -> None:
    """Run the recipe in this process, and write to `file` when each of its stages began and ended.

    The libraries are imported first. Otherwise the stage that uses a library first would contain its import.
    """
    sys.path.insert(0, str(RECIPES))
    sys.argv = [str(RECIPES / "classify.py"), *recipe_options]
    import classify

    import accel_ddp

    def write(stage: str, event: str) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"stage": stage, "event": event, "time": time.time()}) + "\n")

    def time_calls(owner: object, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            write(stage, "began")
            result = function(*args, **kwargs)
            write(stage, "ended")
            return result

        setattr(owner, name, timed)

    def main(cfg) -> None:
        write("other imports", "began")
        exec(IMPORTS)
        import accel_ddp.recipe

        write("other imports", "ended")
        time_calls(accel_ddp, "start", "start")
        time_calls(accel_ddp.models, "load_tokenizer", "tokenizer")
        time_calls(classify.Task, "read", "rows")
        time_calls(classify.Task, "encode", "data")
        time_calls(accel_ddp.models, "build", "model")
        time_calls(accel_ddp.optim, "build", "optimizer")
        time_calls(accel_ddp.recipe, "fit", "fit")
        classify.main(cfg)

    accel_ddp.run(classify.Config, main)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages_file", type=Path, help=argparse.SUPPRESS)  # in the process of `measure_stages`
    options, recipe_options = parser.parse_known_args()
    recipe_options = [word for word in recipe_options if word != "--"]
    run_with_stages(options.stages_file, recipe_options) if options.stages_file else main(options.rounds, recipe_options)
