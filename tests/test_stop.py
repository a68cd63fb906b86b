"""Asked to stop, every rank ends after the same step with one checkpoint; killed, the run goes on as if it had not been."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import (
    BIN,
    PROGRAMS,
    Running,
    clean_environment,
    free_port,
    node_environments,
    rank_environments,
    run_all,
    run_ranks,
)

TRAINS = PROGRAMS / "trains.py"
DIED = rf"error: rank 1 \({os.uname().nodename}, pid \d+\) died without an error message"
WORDS = ["--num_workers", "2"]  # of every run, so that they can be compared


def ranks(number: int, *arguments: object, **env: str) -> Running:
    return Running([[sys.executable, TRAINS, *WORDS, *arguments]] * number, rank_environments(number, **env))


def nodes(*arguments: object) -> Running:
    """Two `accelerate launch`, as typed on two machines."""
    common = [
        "--config_file",
        "accelerate_configs/2node.yaml",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        free_port(),
    ]
    commands = [[BIN / "accelerate-launch", *common, "--machine_rank", node, TRAINS, *WORDS, *arguments] for node in (0, 1)]
    return Running(commands, [clean_environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")] * 2)


def last(folder: Path) -> dict[str, bytes]:
    """The files of the checkpoint after the last step that must not depend on the way to it."""
    path = folder / "step_00000012"
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def wait_for(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while step not in steps_saved(folder):
        assert time.monotonic() < deadline, f"step {step} was never saved"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, bytes]:
    """What a run on two ranks ends with that nobody disturbs."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    ranks(2, "--output_dir", folder).ended().well()
    assert steps_saved(folder) == [4, 8, 12]
    return last(folder)


def test_sigterm_to_one_nodes_launcher_stops_both_nodes_after_one_checkpoint(tmp_path, straight):
    folder = tmp_path / "run"
    running = nodes("--output_dir", folder, "--step_seconds", 0.2, "--save_every", 100)
    running.until("step  3/12")
    running.processes[1].terminate()
    ended = running.ended()
    assert ended.codes == [1, 1], "both launchers report an end that is not the end of the run"
    assert ended.seconds < 25
    stopped = steps_saved(folder)
    assert len(stopped) == 1
    assert 3 <= stopped[0] < 12
    for text in ended.texts:
        assert f"stopped: requested by SIGTERM on rank 1 ({os.uname().nodename}). Step {stopped[0]} of 12 is saved" in text
    assert "exitcode  : 75" in ended.texts[0], "torchrun's report has the code of the ranks"
    again = run_all([[sys.executable, TRAINS, *WORDS, "--output_dir", folder, "--resume"]] * 2, node_environments(2)).well()
    assert f"resumed at step {stopped[0]}" in again.texts[0]
    assert last(folder) == straight


def test_a_two_node_run_killed_at_a_random_step_goes_on_as_if_it_had_not_been(tmp_path, straight):
    folder = tmp_path / "run"
    running = nodes("--output_dir", folder, "--step_seconds", 0.3)
    at = random.randrange(5, 10)
    running.until(f"step {at:2}/12")
    wait_for(folder, 4)
    victim = random.choice(running.processes)
    for process in psutil.Process(victim.pid).children(recursive=True):
        process.send_signal(signal.SIGKILL)
    victim.kill()
    ended = running.ended()
    assert ended.codes.count(0) == 0
    is_main = victim is running.processes[0]
    found = re.search(r"error: the main node 127.0.0.1 is lost" if is_main else DIED, ended.texts[is_main])
    assert found, "the rank that is left does not blame itself"
    assert 4 in steps_saved(folder)
    run_all([[sys.executable, TRAINS, *WORDS, "--output_dir", folder, "--resume"]] * 2, node_environments(2)).well()
    assert last(folder) == straight, f"killed at step {at}"


def test_a_rank_that_is_killed_is_named_by_all_others(tmp_path):
    """Within seconds, and once on each node; they end with it."""
    running = ranks(3, "--output_dir", tmp_path / "run", "--step_seconds", 0.2, "--global_batch_size", 6)
    running.until("step  2/12")
    began = time.monotonic()
    running.processes[1].kill()
    ended = running.ended()
    assert time.monotonic() - began < 8
    assert ended.codes == [1, -9, 1], ended.text
    assert len(re.findall(DIED, ended.text)) == 1
    assert f"pid {running.processes[1].pid})" in ended.text
    assert "Traceback" not in ended.text

    # Under a launcher, which sends the others of the node SIGTERM at once.
    command = [BIN / "torchrun", "--nproc_per_node", 3, "--master_port", free_port(), TRAINS, *WORDS, "--global_batch_size", 6]
    running = Running([[*command, "--output_dir", tmp_path / "launched", "--step_seconds", 0.2]], [clean_environment()])
    running.until("step  2/12")
    launched = [p for p in psutil.Process(running.processes[0].pid).children() if "trains.py" in " ".join(p.cmdline())]
    next(process for process in launched if process.environ()["RANK"] == "1").kill()
    ended = running.ended()
    assert re.search(DIED, ended.text)
    assert "stopped:" not in ended.text


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR2", "SIGHUP", "SIGINT", "file"])
def test_one_rank_is_asked_and_all_stop_at_the_same_step(tmp_path, straight, how):
    """The signal goes to rank 1 and all its data workers, as Slurm sends it."""
    folder = tmp_path / "run"
    running = ranks(2, "--output_dir", folder, "--step_seconds", 0.2, "--save_every", 100)
    running.until("step  2/12")
    if how == "file":
        (folder / "STOP").touch()
    else:
        os.killpg(running.processes[1].pid, signal.Signals[how])
        if how == "SIGINT":  # as `timeout` hands it on: one Ctrl-C all the same
            time.sleep(0.05)
            os.killpg(running.processes[1].pid, signal.SIGINT)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert ended.text.count("stopped: requested by") == 1, "once per node"
    assert "Traceback" not in ended.text
    assert not (folder / "STOP").exists()
    (stopped,) = steps_saved(folder)
    assert 2 <= stopped < 12
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert events[-1]["stopped"]
    assert "loss" not in events[-1], "nothing was evaluated after this step"
    assert [e["step"] for e in events if e["event"] == "save"] == [stopped]
    if how == "SIGTERM":
        ranks(2, "--output_dir", folder, "--resume").ended().well()
        assert last(folder) == straight


def test_a_stop_in_an_evaluation_does_not_wait_for_its_end(tmp_path, straight):
    """Rank 0 is asked, in the evaluation after step 6, which would take long."""
    folder = tmp_path / "run"
    running = ranks(2, "--output_dir", folder, "--eval_seconds", 60, "--no_eval_first")
    running.until("evaluating")
    running.processes[0].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert ended.seconds < 20
    assert steps_saved(folder) == [4, 6]
    again = ranks(2, "--output_dir", folder, "--resume").ended().well()
    assert "step 6  evaluation:" in again.text, "what was cut short is made up for"
    assert last(folder) == straight


def test_a_stop_in_the_evaluation_before_training_says_that_nothing_was_saved(tmp_path, straight):
    folder = tmp_path / "run"
    running = ranks(2, "--output_dir", folder, "--eval_seconds", 60)
    running.until("evaluating")
    running.processes[1].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert ended.seconds < 20
    assert "before the first step. There is nothing to save" in ended.text
    assert steps_saved(folder) == []
    ranks(2, "--output_dir", folder, "--resume").ended().well()
    assert last(folder) == straight


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    """Rank 0 is asked while it waits for rank 1, which is busy before its first step: both end at once, and say why."""
    running = ranks(2, "--busy_seconds", 60, "--output_dir", tmp_path / "run")
    running.until("busy", of=1)
    running.processes[0].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes[0] == 75
    assert ended.codes[1] != 0
    assert ended.seconds < 20
    assert "stopped: received SIGTERM on" in ended.texts[0]
    assert steps_saved(tmp_path / "run") == []


@pytest.mark.parametrize("how", ["SIGUSR2", "SIGTERM"])
def test_every_process_of_a_rank_gets_the_signal_and_wandb_keeps_its_record(tmp_path, how):
    """As Slurm sends it. From SIGTERM nobody can keep wandb's own process, which installs a handler for it: then its record
    is lost, which is said, and log.jsonl has it all the same."""
    folder = tmp_path / "run"
    running = ranks(1, "--output_dir", folder, "--step_seconds", 0.1, "--steps", 40, "--report_to", "wandb")
    running.until("step  5/40")
    family = [psutil.Process(running.processes[0].pid), *psutil.Process(running.processes[0].pid).children(recursive=True)]
    assert any("wandb" in " ".join(process.cmdline()) for process in family), [process.cmdline() for process in family]
    assert len(family) >= 4, "with two data workers"
    for process in family:
        process.send_signal(signal.Signals[how])
    ended = running.ended()
    assert ended.codes == [75], ended.text
    assert ("Tracking has failed" in ended.text) == (how == "SIGTERM")
    stopped = steps_saved(folder)[-1]
    assert len([line for line in (folder / "log.jsonl").read_text().splitlines() if '"update"' in line]) == stopped
    if how == "SIGUSR2":
        (run,) = (folder / "wandb").glob("offline-run-*")
        command = [BIN / "wandb", "leet", "inspect", "--json", run]
        records = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len([r for r in records if '"type":"history"' in r.replace(" ", "") and "train/loss" in r]) == stopped
        more = ["--output_dir", folder, "--steps", 40, "--report_to", "wandb", "--resume", "--stop_after", stopped + 2]
        assert run_ranks(1, TRAINS, *WORDS, *more).codes == [75]
        runs = [path.name.rsplit("-", 1)[1] for path in (folder / "wandb").glob("offline-run-*")]
        assert len(runs) == 2, "two lives"
        assert len(set(runs)) == 1, "of one run of wandb's"


def test_the_step_to_stop_after_and_another_number_of_ranks(tmp_path):
    """1 rank, then 4, 2, 3, which cannot be, and 1 again; float64, so that rounding is all that may differ."""
    import torch
    from safetensors.torch import load_file

    def weights(folder: Path) -> torch.Tensor:
        return torch.cat([t.flatten() for t in load_file(folder / "step_00000012" / "model.safetensors").values()])

    one, changing = tmp_path / "one", tmp_path / "changing"
    run_ranks(1, TRAINS, "--no_dropout", "--output_dir", one).well()
    for number, end in ((1, 2), (4, 5), (2, 8)):
        ended = run_ranks(number, TRAINS, "--no_dropout", "--output_dir", changing, "--resume", "--stop_after", end)
        assert ended.codes == [75] * number, ended.text
        assert steps_saved(changing)[-1] == end
    refused = run_ranks(3, TRAINS, "--no_dropout", "--output_dir", changing, "--resume")
    assert refused.codes == [2, 2, 2]
    assert "one of these numbers of ranks, which keeps the result: 1, 2, 4, 8" in refused.text
    ended = run_ranks(1, TRAINS, "--no_dropout", "--output_dir", changing, "--resume").well()
    assert "saved on 2 ranks, now 1" in ended.text
    torch.testing.assert_close(weights(changing), weights(one), rtol=0, atol=1e-12)


def test_two_runs_never_share_a_folder_and_a_dead_one_does_not_block_it(tmp_path):
    folder = tmp_path / "run"
    running = ranks(1, "--output_dir", folder, "--step_seconds", 1.5, "--save_every", 1)
    running.until("step  1/12")
    refused = run_ranks(1, TRAINS, "--output_dir", folder, "--resume")
    assert refused.codes == [2]
    assert f"is in use by another run (pid {running.processes[0].pid} on " in refused.text
    running.processes[0].kill()
    run_ranks(1, TRAINS, "--output_dir", folder, "--resume").well()
    other = tmp_path / "other"
    run_ranks(1, TRAINS, "--output_dir", other, "--seed", 1, "--stop_after", 2)
    refused = run_ranks(1, TRAINS, "--output_dir", other, "--resume", folder / "step_00000004")
    assert refused.codes == [2]
    assert "holds another run" in refused.text, "a run is not gone on with inside another"


def test_ctrl_c_in_a_terminal_reaches_a_launcher_of_several_ranks(tmp_path):
    """torchrun gives its ranks sessions of their own and passes the signal on."""
    folder = tmp_path / "run"
    command = [BIN / "torchrun", "--nproc_per_node", 2, "--master_port", free_port(), TRAINS, *WORDS, "--output_dir", folder,
               "--step_seconds", 0.2, "--save_every", 100]  # fmt: skip
    running = Running([command], [clean_environment(OMP_NUM_THREADS="1")])
    running.until("step  2/12")
    os.killpg(running.processes[0].pid, signal.SIGINT)
    ended = running.ended()
    assert ended.codes != [0]
    assert len(steps_saved(folder)) == 1
    assert "stopped: requested by Ctrl-C" in ended.text


def restarting(folder: Path, step_seconds: float) -> Running:
    command = [BIN / "torchrun", "--nproc_per_node", 2, "--max_restarts", 1, "--master_port", free_port(), TRAINS, *WORDS]
    arguments = ["--output_dir", folder, "--step_seconds", step_seconds]
    return Running([[*command, *arguments]], [clean_environment(OMP_NUM_THREADS="1")])


@pytest.mark.slow
def test_a_launcher_that_restarts_its_ranks_goes_on_after_a_kill(tmp_path, straight):
    """Without --resume: the user has typed nothing new."""
    folder = tmp_path / "run"
    running = restarting(folder, step_seconds=0.1)
    running.until("step  6/12")
    wait_for(folder, 4)
    victims = [p for p in psutil.Process(running.processes[0].pid).children() if "trains.py" in " ".join(p.cmdline())]
    victims[1].kill()
    assert "resumed at step " in running.ended().well().text
    assert last(folder) == straight


def test_a_data_worker_whose_rank_is_killed_before_it_begins_ends_too():
    """Else it would live for ever, with the rank's connections open: the other ranks would not notice that it is gone."""
    code = """
import os, time
from accel_ddp.ranks import signals
from accel_ddp.ranks.process import process
process.stop.pid = os.getpid()
if os.fork() == 0:
    time.sleep(0.5)
    signals.ignore_in_worker()
    print("lives on", flush=True)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    ended = run_all([[sys.executable, "-c", code]], [clean_environment()], fresh=True)
    assert ended.codes == [-9]
    assert ended.text == ""


@pytest.mark.slow
def test_a_launcher_that_restarts_its_ranks_does_not_undo_a_stop(tmp_path):
    """torchrun takes it for a failure."""
    running = restarting(tmp_path / "run", step_seconds=0.2)
    running.until("step  2/12")
    (tmp_path / "run" / "STOP").touch()
    assert running.ended().codes == [1]
    assert max(steps_saved(tmp_path / "run")) < 12
