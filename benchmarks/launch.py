"""The time from `accel-ddp launch` to the first step on two ssh nodes, compared with two `accelerate launch` commands typed by hand.

    python benchmarks/launch.py
    python benchmarks/launch.py --rounds 3 -- --model my_folder      # options after `--` are passed to the recipe

The nodes and the laptop are namespaces with a real sshd and an unprivileged user (tests/ssh_nodes.py), which needs root and
openssh-server. The commands typed by hand are started at the same moment on both nodes, without ssh. Both sides take turns and begin
in turn. Before them each side runs once, which fills the caches. The goal is a ratio of at most 1.15.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import BIN, free_port
from tests.ssh_nodes import Machines, missing

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
SIDES = ("accel-ddp launch", "by hand")


def main(rounds: int, recipe: str, recipe_options: list[str]) -> None:
    if reason := missing():
        sys.exit(f"this benchmark needs nodes with sshd: {reason}")
    machines = Machines(2)
    try:
        measure(machines, rounds, recipe, recipe_options)
    finally:
        machines.close()


def measure(machines: Machines, rounds: int, recipe: str, recipe_options: list[str]) -> None:
    starts = dict(zip(SIDES, (start_launch, start_by_hand)))
    # The evaluation before training is short, because its time on both sides would hide the difference.
    options = ["--steps", "1", "--log_every", "1", "--max_eval_items", "2", *recipe_options]
    for side in SIDES:
        seconds_to_first_step(machines, starts[side], recipe, options)
    print(f"{'seconds':12}{SIDES[0]:>20}{SIDES[1]:>12}{'ratio':>10}", flush=True)
    ratios = []
    for turn in range(rounds):
        order = SIDES if turn % 2 else SIDES[::-1]
        seconds = {side: seconds_to_first_step(machines, starts[side], recipe, options) for side in order}
        launched, by_hand = (seconds[side] for side in SIDES)
        ratios.append(launched / by_hand)
        print(f"{f'round {turn + 1}':12}{launched:20.2f}{by_hand:12.2f}{ratios[-1]:10.3f}", flush=True)
    print(f"median ratio over {rounds} rounds: {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


def start_launch(machines: Machines, port: int, recipe: str, options: list[str]) -> list[subprocess.Popen]:
    """Write the description and start `accel-ddp launch` on the laptop."""
    file = machines.describe(main_port=port, env=ENVIRONMENT)
    words = machines.laptop.command([BIN / "accel-ddp", "launch", file, recipe, *options])
    return [start(words, machines.laptop.environment(), machines)]


def start_by_hand(machines: Machines, port: int, recipe: str, options: list[str]) -> list[subprocess.Popen]:
    """Start `accelerate launch` on both nodes."""
    processes = []
    for number, node in enumerate(machines.nodes):
        words = [BIN / "accelerate", "launch", "--config_file", "accelerate_configs/2node.yaml", "--machine_rank", number]
        words += ["--main_process_ip", machines.nodes[0].address, "--main_process_port", port, recipe, *options]
        processes.append(start(node.command(words), node.environment(**ENVIRONMENT), machines))
    return processes


def start(words: list[str], env: dict[str, str], machines: Machines) -> subprocess.Popen:
    output = (machines.base / "output").open("w")
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def seconds_to_first_step(machines: Machines, begin: Callable, recipe: str, options: list[str]) -> float:
    """Return the seconds from the command to the end of the first step, which is read from log.jsonl. Then end everything."""
    machines.reset()
    log = machines.nodes[0].work / "runs" / "measured" / "log.jsonl"
    options = [*options, "--output_dir", "runs/measured"]
    port = free_port()
    launched = time.time()
    processes = begin(machines, port, recipe, options)
    try:
        while True:
            has_ended = any(process.poll() is not None for process in processes)
            with contextlib.suppress(FileNotFoundError):
                for event in map(json.loads, log.read_text().splitlines()):
                    if event["event"] == "update":
                        return event["time"] - launched
            if has_ended:
                sys.exit(f"the run ended before its first step:\n{(machines.base / 'output').read_text()}")
            time.sleep(0.05)
    finally:
        machines.kill()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="recipes/classify.py")
    options, recipe_options = parser.parse_known_args()
    main(options.rounds, options.recipe, [word for word in recipe_options if word != "--"])
