"""`accel-ddp scaling`: which settings are measured, what is computed from them, and real runs on CPU ranks and on two nodes."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from accel_ddp import cli
from accel_ddp.errors import UserError
from accel_ddp.measure import scaling_analysis, scaling_plan
from accel_ddp.measure.scaling_analysis import Comparison, Result
from accel_ddp.measure.scaling_output import Summary, as_json, format_summary
from accel_ddp.measure.scaling_plan import Placement, Setting
from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, run_all

LINK = str(PROGRAMS / "slow_link.py")


def scaling(*words: object) -> list:
    return [BIN / "accel-ddp", "scaling", *words]


def step_of(number: int, **parts: list[float]) -> dict:
    """Return a line of the log for one step. Parts that are not given take no time."""
    zero = [0.0] * len(next(iter(parts.values())))
    return {"event": "ranks", "first_step": number, "last_step": number, **dict.fromkeys(scaling_analysis.PARTS, zero), **parts}


def result_of(
    ranks: int, batch: int, micro: int = 4, modes: tuple = ("strong",), nodes: int = 1, size: int = 0, **parts: list[float]
) -> Result:
    """Return a result whose steps are all the same. A single number of a part is that of every rank."""
    wide = {part: values * (ranks if len(values) == 1 else 1) for part, values in parts.items()}
    facts = {"micro": micro, "accumulation": batch // ranks // micro, "gradient_bytes": size, "tokens": 100.0}
    facts["ranks"] = [{"rank": rank, "host": f"host{rank}", "device": "<b>CPU"} for rank in range(ranks)]
    measured = scaling_analysis.summarize([step_of(1, **wide), step_of(2, **wide)], **facts)
    return Result(Setting(Placement(nodes, ranks), batch, micro, modes), measured)


# ---- which settings are measured


def test_the_default_is_powers_of_two_up_to_the_gpus_and_nodes_are_used_as_a_whole():
    assert [place.ranks for place in scaling_plan.local_places([], 6, 6)] == [1, 2, 4]
    assert scaling_plan.cluster_places([4, 4, 4, 4, 4], []) == [
        Placement(1, 1),
        Placement(1, 4),
        Placement(2, 8),
        Placement(4, 16),
        Placement(5, 20),
    ]
    assert scaling_plan.cluster_places([1, 1], []) == [Placement(1, 1), Placement(2, 2)]
    assert scaling_plan.cluster_places([2, 1, 1], [1, 2, 4]) == [Placement(1, 1), Placement(1, 2), Placement(3, 4)]
    with pytest.raises(UserError, match=r"--ranks 6: 6 ranks are not .* Use some of: 1, 2, 3, 4, 8"):
        scaling_plan.cluster_places([4, 4], [6])


def test_the_batch_stays_in_strong_scaling_and_grows_in_weak_scaling():
    settings, left_out = scaling_plan.make_plan([Placement(1, 1), Placement(1, 2), Placement(1, 3)], 32, 8, ("strong", "weak"))
    found = [(one.ranks, one.batch, one.micro, one.modes) for one in settings]
    assert found == [
        (1, 32, 8, ("strong", "weak")),  # measured once
        (2, 32, 8, ("strong",)),
        (2, 64, 8, ("weak",)),
        (3, 96, 8, ("weak",)),
    ]
    assert len(left_out) == 1
    assert "--global_batch_size 32 cannot be split over 3 ranks" in left_out[0]
    assert "30 or 33" in left_out[0]


def test_a_micro_batch_that_does_not_divide_or_fit_becomes_smaller():
    (setting,), _ = scaling_plan.make_plan([Placement(1, 2)], 24, 8, ("strong",))
    assert (setting.micro, setting.note) == (6, "--micro_batch_size 8 does not divide 12 items per rank, so 6 is used")
    less = scaling_plan.smaller(setting, 6)
    assert less
    assert less.micro == 3
    assert "6 does not fit in memory" in less.note
    assert scaling_plan.smaller(setting, 1) is None
    (auto,), _ = scaling_plan.make_plan([Placement(1, 2)], 24, None, ("strong",))
    assert auto.micro is None, "the run finds it"


# ---- what a log contains


def test_a_log_becomes_medians_that_add_up_without_the_warm_up():
    log = [{"event": "start", "batch": {"micro": 4, "accumulation": 2}, "total_steps": 9, "model": {"gradient_bytes": 40}}]
    log += [step_of(1, forward=[9.0, 9.0], communication=[9.0, 9.0])]
    log += [step_of(n, forward=[0.1, 0.2], communication=[0.3, 0.2]) for n in range(2, 8)]
    log += [step_of(8, forward=[5.0, 5.0], communication=[1.0, 1.0])]  # one slow step
    log += [step_of(9, forward=["nan", 0.1], communication=[0.1, 0.1])]
    log += [{"event": "update", "step": 2, "tokens": 10}, {"event": "update", "step": 3, "tokens": 30}]
    found = scaling_analysis.measure(log, warmup=1)
    assert found
    assert found.seconds == pytest.approx(0.4)
    assert sum(found.mean(part) for part in scaling_analysis.PARTS) == pytest.approx(found.seconds)
    assert (found.exposed, found.waiting) == (pytest.approx(0.2), pytest.approx(0.05))
    assert (found.tokens, found.micro, found.accumulation, found.gradient_bytes) == (20, 4, 2, 40)
    assert scaling_analysis.slowest_rank(found) == (1, pytest.approx(1.0))
    assert scaling_analysis.measure(log, warmup=20) is None
    twice = scaling_analysis.measure(log + log, warmup=1)
    assert twice
    assert (twice.seconds, twice.tokens) == (pytest.approx(found.seconds), found.tokens), "a run that is repeated"


# ---- what is computed


def test_efficiency_and_losses_in_strong_and_weak_scaling():
    base = result_of(1, 8, modes=("strong", "weak"), forward=[0.08], optimizer=[0.01], data=[0.01])
    strong = result_of(2, 8, forward=[0.05], optimizer=[0.01], data=[0.005], communication=[0.03, 0.02])
    weak = result_of(2, 16, modes=("weak",), forward=[0.08], optimizer=[0.01], data=[0.01], communication=[0.01])
    one = scaling_analysis.compare([base, strong, weak], "strong")[-1]
    assert one.result is strong
    assert (one.speedup, one.ideal_speedup) == (pytest.approx(0.1 / 0.09), 2)
    losses = one.losses()
    assert sum(losses.values()) == pytest.approx(0.09 - 0.05)
    assert losses == pytest.approx(
        {"communication": 0.02, "waiting": 0.005, "data": 0, "compute": 0.01, "optimizer": 0.005, "other": 0}
    )
    two = scaling_analysis.compare([base, strong, weak], "weak")[-1]
    assert two.efficiency == pytest.approx(10 / 11)
    assert two.losses()["communication"] == pytest.approx(0.01)


def test_the_base_may_have_several_ranks():
    base, more = (result_of(ranks, 8, 1, forward=[0.08 / ranks]) for ranks in (2, 4))
    one = Comparison(base, more)
    assert (one.ideal_speedup, one.efficiency) == (2, pytest.approx(1))


@pytest.mark.parametrize(
    ("ranks", "parts", "expected"),
    [
        (2, {"forward": [0.04], "communication": [0.03]}, "communication: the all-reduce"),
        (2, {"forward": [0.04], "data": [0.03]}, "--num_workers"),
        (2, {"forward": [0.04], "optimizer": [0.02]}, "Every rank updates all parameters"),
        (2, {"forward": [0.06]}, "shared cores: an item takes 1.50 times as long"),
        (4, {"forward": [0.04]}, "a rank computes 2 items at once instead of 4. An item takes 2.00 times as long"),
        (4, {"forward": [0.02, 0.02, 0.05, 0.02], "communication": [0.03, 0.03, 0.0, 0.03]}, "rank 2 (host2) is 150% slower"),
    ],
)  # fmt: skip
def test_the_largest_limit_is_named_first_with_its_numbers(ranks, parts, expected):
    base = result_of(1, 8, forward=[0.08])
    one = Comparison(base, result_of(ranks, 8, min(4, 8 // ranks), **parts))
    texts = scaling_analysis.find_limits(one, "strong", on_gpu=False)
    assert expected in texts[0], texts
    assert re.search(r"[\d.]+ ms of each step \(\d+%\)", texts[0])
    assert not scaling_analysis.find_limits(Comparison(base, base), "strong", on_gpu=False)


def test_the_summary_has_tables_and_limits():
    results = [
        result_of(1, 8, modes=("strong", "weak"), size=10**8, forward=[0.08]),
        result_of(2, 8, modes=("strong",), size=10**8, forward=[0.04], communication=[0.03]),
        result_of(2, 16, modes=("weak",), size=10**8, forward=[0.08], communication=[0.03]),
        Result(Setting(Placement(1, 4), 8, 2, ("strong",)), None, "failed with exit code 1: <script>"),
    ]
    summary = Summary(
        recipe="a<b>.py", modes=("strong", "weak"), results=results,
        left_out=[], on_gpu=False, threads=1,
        steps=5, warmup=1, is_complete=True,
    )  # fmt: skip
    text = format_summary(summary)
    assert re.search(r"^ +2 +1 +8 +4 x 1 +70 ms +0% +114.3 +1,429 +1.14 of 2 +57%", text, flags=re.MULTILINE), text
    assert "4 ranks, global batch 8: failed with exit code 1: <script>." in text
    assert "what limits strong scaling on 2 ranks, 57% efficient:\n  communication: the all-reduce of 100 MB of gradients" in text
    assert "1.14 of 2\n" in text
    found = json.loads(as_json(summary))
    assert [row["efficiency"] for row in found["tables"]["strong"]["rows"]] == [1.0, pytest.approx(0.571, abs=1e-3)]


# ---- mistakes, before anything runs


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "needs a recipe"),
        (["nowhere.py"], "there is no such file"),
        (["--ranks", "3,x", LINK], "--ranks 3,x: must be numbers of ranks"),
        (["--ranks", "0,1", LINK], "--ranks 0,1: must be numbers of ranks"),
        (["--steps", "1", LINK], "--steps 1: must be 2 or more"),
        (["--machine_rank", "1", LINK], "--machine_rank: accel-ddp scaling starts the runs on several nodes itself"),
        (["--num_processes", "many", LINK], "--num_processes many: must be a whole number"),
        (["--gpu_ids", "1", LINK], "--gpu_ids 1: is one GPU"),
        (["--rank", "1,2", LINK], "--rank: there is no such option. Did you mean --ranks?"),
        ([LINK, "--ranks", "1,2"], "--ranks: options of accel-ddp scaling stand before the recipe"),
        ([LINK, "--itme_seconds", "1"], "Did you mean --item_seconds"),
        ([LINK, "--resume"], "Leave --resume out"),
        (["--ranks", "3", "--mode", "strong", LINK], "--global_batch_size 8 cannot be split over 3 ranks"),
        (["--cluster", "nowhere.yaml", LINK], "nowhere.yaml: there is no such file"),
        (["--cluster", "c.yaml", "--mixed_precision", "bf16", LINK], "options of accelerate launch belong into c.yaml"),
        (["--folder", str(ROOT / "docs"), LINK], "is not an empty folder"),
        (["--folder", "/proc/nowhere", LINK], "--folder /proc/nowhere: cannot be written"),
        ([str(PROGRAMS / "launched.py")], "does not use accel_ddp"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_before_the_first_run(words, expected, capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["scaling", *words]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err
    assert "[1/" not in captured.out


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(UserError, match=r"--ranks 1,8: 8 ranks need 8 GPUs, and this machine has 4 GPUs. Use --ranks 1,2,4"):
        scaling_plan.local_places([1, 8], 4, 4)
    assert scaling_plan.local_places([1, 8], 2, 0), "CPU ranks may share cores"


# ---- real runs


@pytest.mark.slow
def test_a_slow_link_on_two_ranks_is_measured(tmp_path):
    """Computing is a pause of 40 ms for each micro-batch, and an all-reduce takes 60 ms, so that busy cores change little."""
    words = ["--steps", 5, "--warmup", 1, "--ranks", "1,2", "--mode", "strong", "--json"]
    words += ["--folder", tmp_path / "runs", LINK, "--item_seconds", 0.01, "--link_seconds", 0.06]
    ended = run_all([scaling(*words)], [clean_environment(TMPDIR=str(tmp_path))]).well()
    found = json.loads(next(line for line in ended.text.splitlines() if line.startswith('{"recipe"')))
    one, two = found["results"]
    assert (one["micro_batch"], one["accumulation"]) == (4, 2)
    assert (two["micro_batch"], two["accumulation"]) == (4, 1)
    assert two["gradient_bytes"] == 36
    assert one["step_seconds"] >= 0.08
    assert two["step_seconds"] >= 0.1
    row = found["tables"]["strong"]["rows"][1]
    assert row["efficiency"] == pytest.approx(one["step_seconds"] / (2 * two["step_seconds"]), rel=0.01)
    assert max(two["seconds"]["communication"]) >= 0.03, "a rank that busy cores delay waits for less than the 60 ms"
    assert "2 runs of 8 steps" in ended.text
    kept = sorted(str(path.relative_to(tmp_path / "runs")) for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert [name for name in kept if not name.endswith((".txt", "/log.jsonl"))] == [], "checkpoints are deleted"
    once = {name for name in kept if "_micro4_2" not in name}  # a run that busy cores have delayed is measured again
    assert len(once) == 4


def processes_of(folder: Path) -> list[str]:
    """Return the commands of processes whose words contain the folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        found += [words] if str(folder) in words and process.pid != os.getpid() else []
    return found


@pytest.mark.slow
def test_interrupted_runs_end_and_what_was_measured_is_printed(tmp_path):
    words = ["--steps", 5, "--warmup", 1, "--ranks", "1,2", "--mode", "strong"]
    running = Running([scaling(*words, LINK, "--item_seconds", 0.01)], [clean_environment(TMPDIR=str(tmp_path))])
    running.until("[2/2]")
    deadline = time.monotonic() + 180
    while not any("slow_link.py" in words and "accelerate" not in words for words in processes_of(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(running.processes[0].pid, signal.SIGINT)
    ended = running.ended()
    assert ended.codes == [130], ended.text
    assert "interrupted: the runs were stopped." in ended.text
    assert "1.00 of 1" in ended.text
    assert "Some settings were not measured." in ended.text
    deadline = time.monotonic() + 90
    while left := processes_of(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_a_recipe_that_fails_is_shown_once_and_one_that_does_not_fit_gets_smaller_micro_batches(tmp_path):
    common = ["--steps", 4, "--warmup", 1, "--mode", "strong"]
    commands = [
        scaling(*common, "--ranks", "1,2", PROGRAMS / "trains.py", "--fails_at", 2),
        scaling(*common, "--ranks", 1, LINK, "--most_items", 2, "--rows", 16),
        scaling(*common, "--ranks", 1, "--run_seconds", 1, LINK),
    ]
    ended = run_all(commands, [clean_environment(TMPDIR=str(tmp_path))] * 3)
    failed, fits, late = ended.texts
    assert ended.codes == [1, 0, 1], ended.text
    assert failed.count("a bug in this step") >= 1
    assert "[2/2]" not in failed, "without the first run there is nothing to compare with"
    assert "a micro-batch of 4 does not fit in memory, so 2 is used." in fits
    assert re.search(r"^ +1 +1 +8 +2 x 4 ", fits, flags=re.MULTILINE), fits
    assert "--epochs gives only 2 steps with this batch. The run is repeated with --steps." in fits
    assert "the run did not finish within 1 s (--run_seconds)" in late
    assert list(tmp_path.glob("accel_ddp_scaling_*")) == [], "temporary folders are removed"


@pytest.mark.slow
def test_scaling_on_two_nodes_with_one_command(machines):
    """The nodes are machines with sshd and disks of their own. The command is typed on a laptop."""
    file = machines.describe()
    words = ["--cluster", file, "--steps", 4, "--warmup", 1, "--json", "tests/programs/slow_link.py", "--item_seconds", 0.01]
    ended = machines.laptop.run(*scaling(*words), timeout=400).well()
    found = json.loads(next(line for line in ended.text.splitlines() if line.startswith('{"recipe"')))
    places = [(one["nodes"], one["ranks"], one["global_batch"], one["modes"]) for one in found["results"]]
    assert places == [(1, 1, 8, ["strong", "weak"]), (2, 2, 8, ["strong"]), (2, 2, 16, ["weak"])]
    assert not any(one["problem"] for one in found["results"])
    for machine in machines.nodes:
        assert list((machine.work / "runs").glob("scaling-*")) == [], "nothing is left on the nodes"
    assert machines.left() == []


@pytest.mark.slow
def test_no_process_is_left_on_the_nodes_after_ctrl_c_and_a_lost_node_does_not_hang_the_command(machines):
    file = machines.describe()
    words = scaling("--cluster", file, "--steps", 4, "--warmup", 1, "--mode", "weak")
    words += ["tests/programs/slow_link.py", "--item_seconds", 0.05]

    def started() -> Running:
        """Return the command when the ranks of its run on two nodes exist."""
        running = machines.laptop.start_command(words)
        running.until("[2/2]")
        is_rank = lambda line: line.startswith("node1 ") and "slow_link.py" in line and "accelerate" not in line
        machines.until(lambda: any(map(is_rank, machines.processes())), 90, "a rank on node1")
        return running

    running = started()
    os.kill(running.processes[0].pid, signal.SIGINT)
    ended = running.ended(120)
    assert ended.codes == [130], ended.text
    assert "1.00 of 1" in ended.text
    assert machines.left(30) == []

    running = started()
    machines.nodes[1].die()
    ended = running.ended(180)
    assert ended.codes == [1], ended.text
    assert "2 ranks on 2 nodes, global batch 16: failed with exit code" in ended.text
    assert "1.00 of 1" in ended.text
    assert machines.left(30) == []
