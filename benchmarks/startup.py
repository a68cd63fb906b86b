"""How long a recipe takes to its first finished step, beside a process that only imports the libraries it needs.

    python benchmarks/startup.py

Both are timed from their launch, in turns, with the tokenised data in the cache. Then one launch is taken apart into
stages. Aim: 1.3 or less. What follows `--` is handed to the recipe: python benchmarks/startup.py -- --model my_folder
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
IMPORTS = """
import accelerate, datasets, torch, tyro
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification, BertTokenizerFast
"""


def main(rounds: int, recipe_options: list[str]) -> None:
    launch_recipe([str(RECIPES / "classify.py")], recipe_options)  # fills the caches: of the data, and of the files' pages
    launch_imports()
    print(f"{'seconds':14}{'recipe':>10}{'imports':>10}{'recipe / imports':>20}", flush=True)
    ratios = []
    for turn in range(1, rounds + 1):
        times, imports = launch_recipe([str(RECIPES / "classify.py")], recipe_options), launch_imports()
        recipe = times["step"] - times["launched"]
        ratios.append(recipe / imports)
        print(f"{f'round {turn}':14}{recipe:10.2f}{imports:10.2f}{ratios[-1]:20.3f}", flush=True)
    spread = f"from {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"median recipe / imports over {rounds} rounds: {statistics.median(ratios):.3f} ({spread})\n")

    print(f"{'where one launch spends them':44}{'seconds':>10}")
    for stage, seconds in stages_of_a_launch(recipe_options):
        print(f"{stage:44}{seconds:10.2f}")


def stages_of_a_launch(recipe_options: list[str]) -> list[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stages.jsonl"
        recipe = launch_recipe([__file__, "--take_apart", str(file)], recipe_options)
        moments = [json.loads(line) for line in file.read_text().splitlines()]
    began = {moment["stage"]: moment["time"] for moment in moments if moment["event"] == "began"}
    ended = {moment["stage"]: moment["time"] for moment in moments if moment["event"] == "ended"}
    stages = [("interpreter, options, torch, accelerate", began["other imports"] - recipe["launched"])]
    stages += [(stage, ended[stage] - began[stage]) for stage in ended]
    stages += [("fit, before the first step", recipe["fit"] - began["fit"]), ("first step", recipe["step"] - recipe["fit"])]
    in_all = recipe["step"] - recipe["launched"]
    return [*stages, ("the rest", in_all - sum(seconds for _, seconds in stages)), ("in all", in_all)]


def launch_recipe(command: list[str], recipe_options: list[str]) -> dict[str, float]:
    """The times of its launch, of fit's start and of the end of the first step, after which it is ended."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "log.jsonl"
        options = ["--steps", "1", "--log_every", "1", "--output_dir", str(log.parent), *recipe_options]
        launched = time.time()
        process = subprocess.Popen([sys.executable, *command, *options], stdout=subprocess.DEVNULL)
        try:
            while True:
                running = process.poll() is None
                events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
                times = {event["event"]: event["time"] for event in events}
                if "update" in times:
                    return {"launched": launched, "fit": times["start"], "step": times["update"]}
                if not running:
                    sys.exit(f"the recipe ended before its first step, with exit code {process.returncode}")
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()


def launch_imports() -> float:
    """Without the end of the process: freeing what was imported takes a while, and the recipe's clock stops before."""
    launched = time.time()
    ended = subprocess.run([sys.executable, "-c", f"{IMPORTS}import time; print(time.time())"], capture_output=True, check=True)
    return float(ended.stdout) - launched


def take_apart(file: Path, recipe_options: list[str]) -> None:
    """Run the recipe in this process, and note when each of its stages began and ended.

    The libraries are imported first: otherwise each stage would pay for those that it is the first to use.
    """
    sys.path.insert(0, str(RECIPES))
    sys.argv = [str(RECIPES / "classify.py"), *recipe_options]
    import classify

    import accel_ddp

    def note(stage: str, event: str) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"stage": stage, "event": event, "time": time.time()}) + "\n")

    def watch(owner: object, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args, **kwargs):
            note(stage, "began")
            result = function(*args, **kwargs)
            note(stage, "ended")
            return result

        setattr(owner, name, watched)

    def main(cfg) -> None:
        note("other imports", "began")
        exec(IMPORTS)
        import accel_ddp.loop

        note("other imports", "ended")
        watch(accel_ddp.runtime, "start", "start")
        watch(accel_ddp.models, "load_tokenizer", "tokenizer")
        watch(classify, "build_data", "data")
        watch(classify, "build_model", "model")
        watch(accel_ddp.optim, "build", "optimizer")
        watch(accel_ddp.loop, "fit", "fit")
        classify.main(cfg)

    accel_ddp.run(classify.Config, main)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--take_apart", type=Path, help=argparse.SUPPRESS)
    options, recipe_options = parser.parse_known_args()
    recipe_options = [word for word in recipe_options if word != "--"]
    take_apart(options.take_apart, recipe_options) if options.take_apart else main(options.rounds, recipe_options)
