"""Tests of `accel-ddp tune`: two nodes over gloo as real processes, and the search as pure functions."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.measure import agent as processes
from accel_ddp.measure import tune_results, tuner
from accel_ddp.measure import tune_settings as settings
from accel_ddp.records import tuned_settings
from tests.conftest import PROGRAMS, Running, clean_environment, free_port, run_all, run_ranks

TUNE = [sys.executable, "-m", "accel_ddp.cli", "tune"]
SMALL = ["--minutes", "1", "--trial_seconds", "4"]
USAGE = "To use the result, run on every node:"


def commands(*arguments: object, out: list[Path] | None = None, cache: Path | None = None) -> tuple[list[list], list[dict]]:
    """Return the commands and the environments of two nodes."""
    common = ["--config_file", "accelerate_configs/2node.yaml", "--main_process_port", free_port(), *SMALL]
    outs = [["--out", folder] if out else [] for folder in out or (None, None)]
    nodes = [[*TUNE, *common, *outs[node], "--machine_rank", node, *arguments] for node in (0, 1)]
    folder = {"ACCEL_DDP_CACHE": str(cache)} if cache else {}
    return nodes, [clean_environment(OMP_NUM_THREADS="1", **folder) for _ in nodes]


def workers_of(agent: int) -> list[psutil.Process]:
    """Return the worker processes of the `accel-ddp tune` with this process id."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if processes.WORKER_MODULE in command and command[-1] == str(agent):
            found.append(process)
    return found


def assert_no_worker_is_left(agents: list[int]) -> None:
    """Wait, because a worker whose interpreter is just starting checks a moment later whether its agent is alive."""
    deadline = time.monotonic() + 90
    while any(map(workers_of, agents)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(workers_of, agents))


def test_settings_are_quoted_for_the_shell(tmp_path):
    (tmp_path / "tuned.env").write_text(tune_results.env_text([], tune_results.TREE))
    name, value = next((name, value) for name, value in tune_results.TREE.items() if ";" in value)
    command = f"set -a; . {tmp_path}/tuned.env; set +a; printenv {name}"
    assert subprocess.run(["sh", "-ec", command], capture_output=True, text=True, check=True).stdout.strip() == value


@pytest.mark.slow
def test_two_nodes_print_the_same_table_and_write_files_that_can_be_used(tmp_path, tiny_model):
    """One --try works and one fails, and on node 0 a tuned.env exists already."""
    outs = [tmp_path / "0", tmp_path / "1"]
    outs[0].mkdir()
    (outs[0] / "tuned.env").write_text("NCCL_BUFFSIZE=1\n")
    tries = ["--try", "GLOO_SOCKET_IFNAME=lo NCCL_BUFFSIZE=8388608", "--try", "GLOO_SOCKET_IFNAME=nowhere0"]
    arguments = ["--minutes", "3", *tries, "--model", tiny_model]  # enough time for every --try, also on a busy machine
    ended = run_all(*commands(*arguments, out=outs, cache=tmp_path), timeout=240).well()
    tables = [text[text.index("tuning 2 ranks on 2 nodes") :] for text in ended.texts]
    assert tables[0].split(USAGE)[0] == tables[1].split(USAGE)[0]
    for folder, text in zip(outs, tables):
        assert f"set -a; . {folder}/tuned.env; set +a" in text.split(USAGE)[1], "the instructions name the files of this node"
        assert f" --config {folder}/tuned.yaml" in text.split(USAGE)[1]
    table = tables[0]
    assert "NCCL settings are not tried: gloo is used" in table
    assert "1.00  default\n" in table
    (fails,) = [line for line in table.splitlines() if "nowhere0" in line]
    assert " failed " in fails
    assert any("GLOO_SOCKET_IFNAME=lo NCCL_BUFFSIZE=8388608" in line and "failed" not in line for line in table.splitlines())
    for row in ("  25  none       true", "  fp16       true", "  none       false"):
        assert row in table, table
    assert "bf16" not in table, "gloo cannot reduce bf16"
    assert "powersgd" not in table, "powersgd hangs over gloo"
    assert f"the previous file is now {outs[0] / 'tuned.env.before'}" in table
    for folder in outs:
        cfg = parse_config(TrainConfig, ["--config", str(folder / "tuned.yaml")])
        assert cfg.comm_hook in ("none", "fp16"), "powersgd is never chosen"
        assert cfg.bucket_cap_mb in (5, 25)
        assert cfg.gradient_as_bucket_view
        script = f"set -a; . {folder / 'tuned.env'}; set +a; env"
        subprocess.run(["sh", "-euc", script], check=True, capture_output=True)
        assert "2 nodes" in (folder / "tuned.env").read_text()
    host = os.uname().nodename
    cfg, facts = TrainConfig(cache_dir=str(tmp_path)), {"device": "CPU", "version": f"torch {version('torch')}, gloo"}
    own = {"model": f"{tiny_model} - -", "network": {"NCCL_SOCKET_IFNAME": "lo"}}  # as the preflight of a run sets it
    found, reason = tuned_settings.find([tuned_settings.announce(cfg, {}, **facts, reads=True) | own], [(host, 1), (host, 1)])
    assert not reason
    assert found["bucket_cap_mb"] in (5, 25)
    assert found["settings"].items() <= {"NCCL_BUFFSIZE": "8388608"}.items()


@pytest.mark.slow
def test_a_trial_that_hangs_is_killed_and_the_tuning_continues():
    """The worker on node 1 is suspended, so it behaves like one whose packets are lost."""
    running = Running(*commands("--try", "HANGS=1", "--model_bytes", "400000", "--out", "runs/tune_test"))
    running.until("  default\n", of=1)
    deadline, agent = time.monotonic() + 180, running.processes[1].pid
    while not (workers := workers_of(agent)) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers[0].suspend()
    ended = running.ended(300).well()
    for text in ended.texts:
        (row,) = [line for line in text.splitlines() if "HANGS=1" in line]
        assert " failed " in row
        assert "no progress for" in row
        assert "best DDP options: bucket_cap_mb" in text
    assert_no_worker_is_left([agent])


@pytest.mark.parametrize(
    ("node", "signal_number", "codes", "message"),
    [
        (1, signal.SIGKILL, [1, -9], "machine_rank 1 ({host}) has closed the connection"),
        (1, signal.SIGINT, [1, 130], "machine_rank 1 ({host}) was stopped by Ctrl-C"),
        (0, signal.SIGKILL, [-9, 1], "has closed the connection: `accel-ddp tune` exited there, or its network failed"),
        (0, signal.SIGTERM, [130, 1], "machine_rank 0 ({host}) was stopped by SIGTERM"),
    ],
)
def test_a_node_that_ends_is_named_on_the_other_node(node, signal_number, codes, message):
    running = Running(*commands("--out", "runs/tune_test"))
    running.until("tuning 2 ranks", of=1)
    deadline, agents = time.monotonic() + 180, [process.pid for process in running.processes]
    while not all(map(workers_of, agents)):
        assert time.monotonic() < deadline, "the signal must come while both nodes measure"
        time.sleep(0.02)
    os.kill(agents[node], signal_number)
    ended = running.ended()
    assert ended.codes == codes, ended.text
    assert "best settings:" not in ended.text, "the tuning was completed"
    assert message.format(host=os.uname().nodename) in ended.texts[1 - node]
    assert "Traceback" not in ended.text
    assert_no_worker_is_left(agents)


def test_wrong_options_are_refused_with_a_message_that_helps():
    wrong = {
        "--minuts": ["--minuts", "3"],
        "Did you mean --minutes?": ["--minuts", "3"],
        "There is only one rank, so there is no communication to tune": ["--num_processes", "1"],
        "--try 'x': must be environment variables": ["--num_processes", "2", "--try", "x"],
        "--minutes 0.0: must be at least 0.05": ["--num_processes", "2", "--minutes", "0"],
        "Give only one": ["--num_processes", "2", "--model", "x", "--model_bytes", "3"],
        "there is no such script": ["--num_processes", "2", "nowhere.py"],
    }
    ended = run_all([[*TUNE, *arguments] for arguments in wrong.values()], [clean_environment()] * len(wrong))
    assert ended.codes == [2] * len(wrong), ended.text
    for message, text in zip(wrong, ended.texts):
        assert message in text
    assert "Traceback" not in ended.text
    unwritable = run_all([[*TUNE, "--num_processes", "2", "--out", "/dev/null/here"]], [clean_environment()])
    assert unwritable.codes == [1]
    assert "--out /dev/null/here: /dev/null is a file, not a folder" in unwritable.text


def test_the_search_finds_the_fastest_settings_in_few_trials():
    """The times are like those measured on one H200: larger buffers help, and channels with Ring and Simple help more."""

    def milliseconds(settings: dict[str, str]) -> float:
        ms = 50.0 / (2.5 if settings.get(tune_results.BUFFER) == "16777216" else 1)
        ms /= 1.5 if settings.get(tune_results.CHANNELS) == "8" else 1
        return ms / (1.3 if settings.get(tune_results.PROTOCOL) == "Simple" else 1)

    for nodes in (2, 8):
        proposals, score, seen = tune_results.propose_settings(nodes, milliseconds({})), None, []
        while True:
            try:
                seen.append(proposals.send(score))
            except StopIteration:
                break
            score = None if len(seen) == 2 else milliseconds(seen[-1])  # the second trial fails
        assert len(seen) <= 12
        assert len({tuple(sorted(one.items())) for one in seen}) == len(seen), "no settings are tried twice"
        best = min(seen, key=milliseconds)
        assert (best[tune_results.BUFFER], best[tune_results.CHANNELS], best[tune_results.PROTOCOL]) == (
            "16777216",
            "8",
            "Simple",
        )
    assert all(int(one.get(tune_results.THREADS, 1)) * int(one.get(tune_results.SOCKETS, 1)) <= 64 for one in seen), (
        "NCCL allows at most 64"
    )
    assert not any("LL128" in value for one in seen for value in one.values())


def test_settings_that_were_fast_only_once_are_not_chosen():
    """`first` has the scores of the first trials, and `again` those of the repetitions."""

    class ScriptedTuner(settings.SettingsTuner):
        def __init__(self, again: dict[str, float], trial_seconds: float):
            self.again, self.runner = again, SimpleNamespace(usual_seconds=trial_seconds)
            self.deadline = self.settings_deadline = time.monotonic() + 60

        async def measure(self, trial, default):
            trial.score = self.again.pop(trial.settings.get("X", ""))
            trial.failure = "it failed" if trial.score == math.inf else ""
            return trial

    def chosen(first: dict[str, float], again: dict[str, float], trial_seconds: float = 1.0) -> tuple[str, set[str]]:
        """Return the chosen settings, and the settings that were measured again."""
        trials = [tune_results.Trial({"X": name} if name else {}, score=score) for name, score in first.items()]
        default, *measured = trials
        scripted = ScriptedTuner(dict(again), trial_seconds)
        found = asyncio.run(scripted.confirm(default, measured))
        return found.settings.get("X", ""), set(again) - set(scripted.again)

    first = {"": 50.0, "lucky": 16.0, "steady": 17.0, "slow": 30.0}
    again = {"": 50.0, "lucky": 21.0, "steady": 17.1, "slow": 30.0}
    assert chosen(first, again) == ("steady", {"", "lucky", "steady"})
    assert chosen(first, {**again, "lucky": 16.2}) == ("lucky", {"", "lucky"})
    assert chosen(first, {**again, "lucky": math.inf}) == ("steady", {"", "lucky", "steady"})
    assert chosen(first, {"": 16.0}) == ("", {""}), "the first measurement of the default was too slow by chance"
    assert chosen(first, {name: 60.0 for name in first}) == ("", set(first))
    assert chosen(first, {}, trial_seconds=100.0) == ("lucky", set()), "there is no time to measure again"


def test_scores_bucket_sizes_and_hooks_are_chosen_as_documented():
    mib = tune_results.MIB
    assert tune_results.score({mib: 1.0, 25 * mib: 4.0, 256 * mib: 9.0}) == pytest.approx(6.0)
    assert tune_results.score({mib: 1.0, 4 * mib: 2.0, 25 * mib: 4.0}, gradient_bytes=4 * mib) == 2.0
    assert tune_results.score({}) == math.inf
    assert tune_results.bucket_sizes(500 * mib) == [25, 5, 10, 50, 100, 200]
    assert tune_results.bucket_sizes(30 * mib) == [25, 5, 10, 50]
    assert tune_results.bucket_sizes(2 * mib) == [25, 5]
    default = {tune_results.DEFAULT: 10.0}
    assert tune_results.best_choice({**default, (5, "none"): 9.9}) == tune_results.DEFAULT, "a gain of 1% is noise"
    assert tune_results.best_choice({**default, (100, "none"): 8.0}) == (100, "none")
    assert tune_results.best_choice({**default, (25, "bf16"): 9.5, (25, "powersgd"): 1.0}) == tune_results.DEFAULT
    assert tune_results.best_choice({**default, (100, "none"): 8.0, (100, "bf16"): 7.9}) == (100, "none"), (
        "a gain of 1% is too small"
    )
    assert tune_results.best_choice({**default, (25, "bf16"): 8.0, (25, "fp16"): 7.9}) == (25, "bf16"), (
        "bf16 has the range of float32"
    )
    assert tune_results.best_choice({**default, (25, "fp16"): 7.9}) == (25, "fp16")
    assert tune_results.best_choice({**default, (25, "bf16"): 9.5, (100, "bf16"): 6.5}) == (100, "bf16"), (
        "only both together are fast"
    )
    assert tune_results.best_choice({**default, (50, "bf16"): 6.6, (100, "bf16"): 6.21, (200, "bf16"): 6.2}) == (100, "bf16")
    lucky = {tune_results.DEFAULT: [11.0, 10.0], (100, "none"): [8.0, 9.9], (100, "bf16"): [6.5, 8.0], (50, "bf16"): [7.0]}
    assert tune_results.confirmed_choice(lucky) == ((100, "bf16"), 1.25)
    assert tune_results.confirmed_choice({**lucky, (100, "bf16"): [6.5, 9.5]}) == (tune_results.DEFAULT, 1.0)


def test_the_parameter_shapes_of_a_model_are_those_of_its_weights(tiny_model):
    from transformers import AutoModelForSequenceClassification

    from accel_ddp.config.train_config import RecipeConfig
    from accel_ddp.memory import gradient_shapes

    weights = list(AutoModelForSequenceClassification.from_pretrained(tiny_model).parameters())
    assert gradient_shapes.__name__ == tuner.SHAPES_MODULE
    entries = gradient_shapes.parameter_shapes(RecipeConfig(model=tiny_model))
    assert [shape for _, shape, _ in entries] == [list(weight.shape) for weight in weights]
    assert tune_results.count_elements(entries) == sum(weight.numel() for weight in weights)
    adapters = gradient_shapes.parameter_shapes(RecipeConfig(model=tiny_model, lora_r=2))
    assert 0 < tune_results.count_elements(adapters) < tune_results.count_elements(entries) / 10, (
        "only trained parameters are counted"
    )
    assert tune_results.count_elements(tune_results.entries_of_size(40_000_000)) * 4 == pytest.approx(40_000_000, rel=1e-3)


NODES = [("a", 2), ("b", 2)]


def announced(folder: Path, **changes: object) -> list[dict]:
    """Return what four ranks on two nodes tell each other, of which one has the files."""
    cfg = TrainConfig(cache_dir=str(folder))
    facts = {"device": "H200", "version": "torch 2, NCCL 2"}
    ranks = [tuned_settings.announce(cfg, {}, **facts, reads=rank == 2) for rank in range(4)]
    ranks[0] |= changes
    return ranks


def store(folder: Path, nodes: list[tuple[str, int]], **changes: object) -> Path:
    facts = {"version": "torch 2, NCCL 2", "network": {}, "model": "- - -", "bucket_cap_mb": 50, "comm_hook": "bf16"}
    settings = {"NCCL_ALGO": "ring,tree;allreduce:tree", "NCCL_NET_PLUGIN": "/tmp/x.so", "LD_PRELOAD": "x"}
    ((name, text),) = tuned_settings.make_file(nodes, "H200", settings, **{**facts, **changes}).items()
    path = folder / tuned_settings.FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_later_runs_on_the_same_nodes_use_what_was_found(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_settings.os, "environ", dict(PATH="", RANK="1"))
    path, name = store(tmp_path, NODES), "NCCL_ALGO"
    cfg = TrainConfig()
    lines = tuned_settings.apply(cfg, announced(tmp_path), NODES[::-1], use_gpu=True)
    assert os.environ[name] == "ring,tree;allreduce:tree"
    assert not {"NCCL_NET_PLUGIN", "LD_PRELOAD"} & os.environ.keys(), "a file of settings must not load code"
    assert (cfg.tuned, cfg.bucket_cap_mb) == (f"{name}={os.environ.pop(name)}", 50)
    assert lines == ["--comm_hook bf16 was faster still. It rounds gradients, so it is only suggested."]

    def outcome(ranks: list[dict] | None = None, nodes: list = NODES, **options: object) -> tuple[str, int, str]:
        cfg = TrainConfig(**options)
        lines = tuned_settings.apply(cfg, announced(tmp_path) if ranks is None else ranks, nodes, use_gpu=True)
        os.environ.pop(name, None)
        return cfg.tuned, cfg.bucket_cap_mb, "\n".join(lines)

    assert outcome(tuned="off") == ("off", 25, ""), "--tuned off ignores all of it"
    assert outcome(bucket_cap_mb=25)[1] == 25, "a given option is kept"
    assert outcome(nodes=[("a", 2), ("c", 2)]) == outcome(nodes=[("a", 2)]) == ("off", 25, ""), "other nodes"
    assert outcome(announced(tmp_path, model="other - -"))[1] == 25, "the size of buckets is for one model"
    for change, words in (
        ({"device": "A100"}, "measured with H200"), ({"version": "torch 3"}, "this run has torch 3"),
        ({"network": {"NCCL_NET": "IB"}}, "this run has NCCL_NET=IB"), ({"given": {name: "Tree"}}, f"{name} is set in the environment"),
    ):  # fmt: skip
        tuned, _, text = outcome(announced(tmp_path, **change))
        assert tuned == "off"
        assert words in text
        assert ("The NCCL settings that" in text) == ("given" in change), "the size of buckets is used"
    saved = {"step": 3, "tuned": "NCCL_ALGO=Tree", "bucket_cap_mb": 5, "chosen": {}}
    assert outcome(announced(tmp_path, saved=saved))[:2] == ("NCCL_ALGO=Tree", 5), "a resumed run sums in the same order"
    saved["tuned"] += " NCCL_PROTO=LL"
    ranks = announced(tmp_path, saved=saved, given={"NCCL_PROTO": "Simple"})
    assert outcome(ranks)[0] == "NCCL_ALGO=Tree"
    assert "NCCL_PROTO" not in os.environ
    assert "--resume: NCCL_PROTO keeps the value of the environment" in outcome(ranks)[2]
    assert outcome(announced(tmp_path, saved=saved), bucket_cap_mb=25, tuned="off")[:2] == ("off", 25)
    for damaged in ("", "{", '{"date": 3}', path.read_text().replace("ring,tree;allreduce:tree", "a b")):
        path.write_text(damaged)
        assert "is damaged" in outcome()[2]
    assert outcome([]) == ("off", 25, ""), "a single rank"


@pytest.mark.slow
def test_a_resumed_run_keeps_the_bucket_size_that_was_found(tmp_path):
    import torch

    path = store(tmp_path, [(socket.gethostname(), 2)], version=f"torch {torch.__version__}, gloo")
    path.write_text(path.read_text().replace("H200", "CPU"))
    words = ["--output_dir", tmp_path / "run", "--stop_after"]
    run = lambda *words: run_ranks(2, PROGRAMS / "trains.py", *words, ACCEL_DDP_CACHE=str(tmp_path))
    first = run(*words, 4)
    assert first.codes == [75, 75], first.text
    assert first.text.count("bucket_cap_mb 50: for this model found by `accel-ddp tune` on") == 1
    path.unlink()
    assert "as in the saved run: bucket_cap_mb 50" in run(*words, 5, "--resume").text
