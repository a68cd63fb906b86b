"""`accel-ddp tune` on two nodes over gloo: one table on both, files that can be used, and an end in seconds whatever dies."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accel_ddp.config import TrainConfig, parse_config
from accel_ddp.tune import course, results, search, shapes
from tests.conftest import Running, clean_environment, free_port, run_all

TUNE = [sys.executable, "-m", "accel_ddp.cli", "tune"]
SMALL = ["--minutes", "1", "--trial_seconds", "4"]


def commands(*words: object, out: list[Path] | None = None) -> tuple[list[list], list[dict[str, str]]]:
    common = ["--config_file", "accelerate_configs/2node.yaml", "--main_process_port", free_port(), *SMALL]
    outs = [["--out", folder] if out else [] for folder in out or (None, None)]
    nodes = [[*TUNE, *common, *outs[node], "--machine_rank", node, *words] for node in (0, 1)]
    return nodes, [clean_environment(OMP_NUM_THREADS="1") for _ in nodes]


def ranks_of(parent: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "accel_ddp.tune.rank" in words and words[-1] == str(parent):
            found.append(process)
    return found


def assert_no_rank_is_left(parents: list[int]) -> None:
    """One whose interpreter was just starting needs a moment to see that its parent is gone."""
    deadline = time.monotonic() + 3
    while any(map(ranks_of, parents)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(ranks_of, parents))


def test_settings_are_quoted_for_the_shell(tmp_path):
    (tmp_path / "tuned.env").write_text(results.env_text([], search.TREE))
    name, value = next((name, value) for name, value in search.TREE.items() if ";" in value)
    command = f"set -a; . {tmp_path}/tuned.env; set +a; printenv {name}"
    assert subprocess.run(["sh", "-ec", command], capture_output=True, text=True, check=True).stdout.strip() == value


@pytest.mark.slow  # CI has the README's own `tune`
def test_two_nodes_print_one_table_and_write_files_that_can_be_used(tmp_path, tiny_model):
    """With a variable that works, one that does not, and a file that was there before."""
    outs = [tmp_path / "0", tmp_path / "1"]
    outs[0].mkdir()
    (outs[0] / "tuned.env").write_text("NCCL_BUFFSIZE=1\n")
    tries = ["--try", "GLOO_SOCKET_IFNAME=lo NCCL_BUFFSIZE=8388608", "--try", "GLOO_SOCKET_IFNAME=nowhere0"]
    ended = run_all(*commands(*tries, "--model", tiny_model, out=outs), timeout=150).well()
    tables = [text[text.index("tuning 2 ranks on 2 nodes") :] for text in ended.texts]
    assert tables[0].split("use it")[0] == tables[1].split("use it")[0], "every node prints the same"
    for folder, text in zip(outs, tables):
        assert f"set -a; . {folder}/tuned.env; set +a" in text.split("use it")[1], "but for where its own files are"
        assert f" --config {folder}/tuned.yaml" in text.split("use it")[1]
    table = tables[0]
    assert "NCCL's settings are not tried: without GPUs it is gloo" in table
    assert "1.00  default\n" in table
    (fails,) = [line for line in table.splitlines() if "nowhere0" in line]
    assert " failed " in fails
    assert any("GLOO_SOCKET_IFNAME=lo NCCL_BUFFSIZE=8388608" in line and "failed" not in line for line in table.splitlines())
    for words in ("  25  none       true", "  fp16       true", "  none       false"):
        assert words in table, table
    assert "bf16" not in table, "gloo cannot"
    assert "powersgd" not in table, "over gloo it hangs"
    assert f"what was there is now {outs[0] / 'tuned.env.before'}" in table
    for folder in outs:
        cfg = parse_config(TrainConfig, ["--config", str(folder / "tuned.yaml")])
        assert cfg.comm_hook in ("none", "fp16"), "powersgd is never chosen by itself"
        assert cfg.bucket_cap_mb in (5, 25)
        assert cfg.gradient_as_bucket_view
        script = f"set -a; . {folder / 'tuned.env'}; set +a; env"
        subprocess.run(["sh", "-euc", script], check=True, capture_output=True)
        assert "2 nodes" in (folder / "tuned.env").read_text()


@pytest.mark.slow
def test_a_trial_that_hangs_is_ended_and_named_and_the_tuning_goes_on():
    """One rank of node 1 stands still, as one does whose packets are lost."""
    running = Running(*commands("--try", "HANGS=1", "--model_bytes", "400000", "--out", "runs/tune_test"))
    running.until("  default\n", of=1)
    deadline, parent = time.monotonic() + 30, running.processes[1].pid
    while not (there := ranks_of(parent)) and time.monotonic() < deadline:
        time.sleep(0.02)
    there[0].suspend()
    ended = running.ended(100).well()
    for text in ended.texts:
        (hung,) = [line for line in text.splitlines() if "HANGS=1" in line]
        assert " failed " in hung
        assert "no answer for" in hung
        assert "best for the model: bucket_cap_mb" in text
    assert_no_rank_is_left([parent])


@pytest.mark.parametrize(
    ("node", "how", "codes", "words"),
    [
        (1, signal.SIGKILL, [1, -9], "machine_rank 1 ({host}) is gone"),
        (1, signal.SIGINT, [1, 130], "machine_rank 1 ({host}) was ended by Ctrl-C"),
        (0, signal.SIGKILL, [-9, 1], "is gone: its tune was ended, or its network failed"),
        (0, signal.SIGTERM, [130, 1], "machine_rank 0 ({host}) was ended by SIGTERM"),
    ],
)
def test_a_node_that_ends_is_named_on_the_other_within_seconds(node, how, codes, words):
    running = Running(*commands("--out", "runs/tune_test"))
    running.until("tuning 2 ranks", of=1)
    deadline, parents = time.monotonic() + 20, [process.pid for process in running.processes]
    while not all(map(ranks_of, parents)) and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    os.kill(parents[node], how)
    ended = running.ended(30)
    assert ended.codes == codes, ended.text
    assert time.monotonic() - began < 6
    assert words.format(host=os.uname().nodename) in ended.texts[1 - node]
    assert "Traceback" not in ended.text
    assert_no_rank_is_left(parents)


def test_wrong_words_end_at_once_with_what_to_do():
    wrong = {
        "--minuts": ["--minuts", "3"],
        "Did you mean --minutes?": ["--minuts", "3"],
        "one rank alone has nothing to tune": ["--num_processes", "1"],
        "--try 'x': must be variables": ["--num_processes", "2", "--try", "x"],
        "--minutes 0.0: must be": ["--num_processes", "2", "--minutes", "0"],
        "give one of them": ["--num_processes", "2", "--model", "x", "--model_bytes", "3"],
        "there is no such script": ["--num_processes", "2", "nowhere.py"],
    }
    ended = run_all([[*TUNE, *words] for words in wrong.values()], [clean_environment()] * len(wrong))
    assert ended.codes == [2] * len(wrong), ended.text
    for text, said in zip(wrong, ended.texts):
        assert text in said
    assert "Traceback" not in ended.text
    unwritable = run_all([[*TUNE, "--num_processes", "2", "--out", "/dev/null/here"]], [clean_environment()])
    assert unwritable.codes == [1]
    assert "--out /dev/null/here: /dev/null is a file, not a folder" in unwritable.text


def test_the_walk_finds_what_is_fastest_in_few_trials():
    """On figures of the kind that were measured: buffers help, and channels with Ring and Simple help more."""

    def milliseconds(settings: dict[str, str]) -> float:
        ms = 50.0 / (2.5 if settings.get(search.BUFFER) == "16777216" else 1)
        ms /= 1.5 if settings.get(search.CHANNELS) == "8" else 1
        return ms / (1.3 if settings.get(search.PROTOCOL) == "Simple" else 1)

    for nodes in (2, 8):
        walk, answer, seen = search.walk(nodes, milliseconds({})), None, []
        while True:
            try:
                seen.append(walk.send(answer))
            except StopIteration:
                break
            answer = None if len(seen) == 2 else milliseconds(seen[-1])  # one fails
        assert len(seen) <= 12
        assert len({tuple(sorted(one.items())) for one in seen}) == len(seen), "nothing twice"
        best = min(seen, key=milliseconds)
        assert (best[search.BUFFER], best[search.CHANNELS], best[search.PROTOCOL]) == ("16777216", "8", "Simple")
    assert all(int(one.get(search.THREADS, 1)) * int(one.get(search.SOCKETS, 1)) <= 64 for one in seen), "NCCL's limit"
    assert not any("LL128" in value for one in seen for value in one.values())


def test_settings_that_were_only_lucky_are_not_chosen():
    """Scores of first trials, and what each gets when it is measured again."""

    class Scripted(course.Course):
        def __init__(self, again: dict[str, float], lasted: float):
            self.again, self.deadline, self.trials = again, time.monotonic() + 60, SimpleNamespace(lasted=lasted)

        async def reduce_trial(self, trial, default=None, best=None):
            trial.score = self.again.pop(trial.settings.get("X", ""))
            trial.failed = "it failed" if trial.score == math.inf else ""
            return trial

    def chosen(first: dict[str, float], again: dict[str, float], lasted: float = 1.0) -> tuple[str, set[str]]:
        trials = [results.Trial(0, {"X": name} if name else {}, score=score) for name, score in first.items()]
        default, *measured = trials
        best = min(trials, key=lambda trial: trial.score)
        scripted = Scripted(dict(again), lasted)
        found = asyncio.run(scripted.confirmed(default, best, measured, ends=time.monotonic() + 60))
        return found.settings.get("X", ""), set(again) - set(scripted.again)

    first = {"": 50.0, "lucky": 16.0, "steady": 17.0, "slow": 30.0}
    again = {"": 50.0, "lucky": 21.0, "steady": 17.1, "slow": 30.0}
    assert chosen(first, again) == ("steady", {"", "lucky", "steady"})
    assert chosen(first, {**again, "lucky": 16.2}) == ("lucky", {"", "lucky"})
    assert chosen(first, {**again, "lucky": math.inf}) == ("steady", {"", "lucky", "steady"})
    assert chosen(first, {"": 16.0}) == ("", {""}), "the default was unlucky"
    assert chosen(first, {name: 60.0 for name in first}) == ("", set(first))
    assert chosen(first, {}, lasted=100.0) == ("lucky", set()), "no time to measure again"


def test_what_is_compared_and_what_is_chosen():
    mib = search.MIB
    assert search.score({mib: 1.0, 25 * mib: 4.0, 256 * mib: 9.0}) == pytest.approx(6.0)
    assert search.score({mib: 1.0, 4 * mib: 2.0, 25 * mib: 4.0}, gradient_bytes=4 * mib) == 2.0
    assert search.score({}) == math.inf
    assert search.buckets_to_try(500 * mib) == [25, 5, 10, 50, 100, 200]
    assert search.buckets_to_try(30 * mib) == [25, 5, 10, 50]
    assert search.buckets_to_try(2 * mib) == [25, 5]
    default = {search.DEFAULT: 10.0}
    assert search.best_choice({**default, (5, "none"): 9.9}) == search.DEFAULT, "noise"
    assert search.best_choice({**default, (100, "none"): 8.0}) == (100, "none")
    assert search.best_choice({**default, (25, "bf16"): 9.5, (25, "powersgd"): 1.0}) == search.DEFAULT
    assert search.best_choice({**default, (100, "none"): 8.0, (100, "bf16"): 7.9}) == (100, "none"), "rounding for nothing"
    assert search.best_choice({**default, (25, "bf16"): 8.0, (25, "fp16"): 7.9}) == (25, "bf16"), "float32's range"
    assert search.best_choice({**default, (25, "fp16"): 7.9}) == (25, "fp16")
    assert search.best_choice({**default, (25, "bf16"): 9.5, (100, "bf16"): 6.5}) == (100, "bf16"), "together only"
    assert search.best_choice({**default, (50, "bf16"): 6.6, (100, "bf16"): 6.21, (200, "bf16"): 6.2}) == (100, "bf16")
    lucky = {search.DEFAULT: [11.0, 10.0], (100, "none"): [8.0, 9.9], (100, "bf16"): [6.5, 8.0], (50, "bf16"): [7.0]}
    assert search.confirmed_choice(lucky) == ((100, "bf16"), 1.25)
    assert search.confirmed_choice({**lucky, (100, "bf16"): [6.5, 9.5]}) == (search.DEFAULT, 1.0)
    one, other = {"eth0": "10.0.0.0/24", "eth1": "10.1.0.0/24"}, {"ens5": "10.1.0.0/24", "ens6": "10.0.0.0/24"}
    assert search.interface_choices([one, other]) == [["eth0", "ens6"], ["eth1", "ens5"]]
    assert search.interface_choices([one, {"eth0": "10.0.0.0/24"}]) == []


def test_the_shapes_of_a_model_are_those_of_its_weights(tiny_model):
    from transformers import AutoModelForSequenceClassification

    from accel_ddp import gradient_shapes
    from accel_ddp.config import RecipeConfig

    weights = list(AutoModelForSequenceClassification.from_pretrained(tiny_model).parameters())
    entries = gradient_shapes.parameter_shapes(RecipeConfig(model=tiny_model))
    assert [shape for _, shape, _ in entries] == [list(weight.shape) for weight in weights]
    assert shapes.unpacked(shapes.packed(entries)) == entries
    assert shapes.count(entries) == sum(weight.numel() for weight in weights)
    adapters = gradient_shapes.parameter_shapes(RecipeConfig(model=tiny_model, lora_r=2))
    assert 0 < shapes.count(adapters) < shapes.count(entries) / 10, "only what is trained travels"
    assert shapes.count(shapes.of_bytes(40_000_000)) * 4 == pytest.approx(40_000_000, rel=1e-3)
