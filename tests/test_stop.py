"""A stop request ends all ranks after the same step with one checkpoint. A killed run, resumed, has the same result."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_ddp.launch.slurm_script import _BLOCK
from tests.conftest import (
    BIN,
    PROGRAMS,
    Ended,
    Running,
    clean_environment,
    free_port,
    node_environments,
    rank_environments,
    run_all,
    run_ranks,
    two_node_commands,
)

TRAINS = PROGRAMS / "trains.py"
DIED = rf"error: RANK_DIED: rank 1 \({os.uname().nodename}, pid \d+\) was killed by SIGKILL at step \d+, in "
OPTIONS = ["--num_workers", "2"]  # options of every run whose result is compared


def start_ranks(number: int, *arguments: object, **env: str) -> Running:
    return Running([[sys.executable, TRAINS, *OPTIONS, *arguments]] * number, rank_environments(number, **env))


def start_nodes(*arguments: object) -> Running:
    """Start `accelerate launch` twice, as on two machines."""
    commands, environments = two_node_commands(TRAINS, *OPTIONS, *arguments)
    return Running([[BIN / "accelerate-launch", *command] for command in commands], environments)


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    """Return those files of the checkpoint of step 12 that must not depend on interruptions."""
    path = folder / "step_00000012"
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def wait_for(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while step not in steps_saved(folder):
        assert time.monotonic() < deadline, f"step {step} was not saved within 180 s"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    """Return the last checkpoint of an uninterrupted run on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    start_ranks(2, "--output_dir", folder).ended().well()
    assert steps_saved(folder) == [4, 8, 12]
    return last_checkpoint(folder)


def test_sigterm_to_one_nodes_launcher_stops_both_nodes_after_one_checkpoint(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    running = start_nodes("--output_dir", folder, "--step_seconds", 0.5, "--save_every", 100)
    running.until("step  3/12")
    running.processes[1].terminate()
    ended = running.ended()
    assert ended.codes == [75, 75], "both launchers return the exit code of the ranks"
    stopped = steps_saved(folder)
    assert len(stopped) == 1
    assert 3 <= stopped[0] < 12
    for text in ended.texts:
        assert f"stopped: requested by SIGTERM on rank 1 ({os.uname().nodename}). Step {stopped[0]} of 12 is saved" in text
    assert "FAILED" not in ended.text, "a stop is not reported as a failure"
    again = run_all([[sys.executable, TRAINS, *OPTIONS, "--output_dir", folder, "--resume"]] * 2, node_environments(2)).well()
    assert f"resumed at step {stopped[0]}" in again.texts[0]
    assert last_checkpoint(folder) == uninterrupted


def test_a_two_node_run_killed_at_a_random_step_resumes_with_the_same_result(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    command = [sys.executable, TRAINS, *OPTIONS, "--output_dir", folder]
    running = Running([[*command, "--step_seconds", 0.3]] * 2, node_environments(2))
    at = random.randrange(5, 10)
    running.until(f"step {at:2}/12")
    wait_for(folder, 4)
    victim = random.choice(running.processes)
    victim.send_signal(signal.SIGSTOP)  # so that it does not see that its data workers and its monitor are killed
    for process in psutil.Process(victim.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    victim.kill()
    ended = running.ended()
    is_main = victim is running.processes[0]
    assert ended.codes == ([-9, 1] if is_main else [1, -9]), ended.text
    found = re.search("error: MAIN_NODE_LOST: the main node " if is_main else "error: NODE_LOST: |" + DIED, ended.texts[is_main])
    assert found, "the remaining rank does not report the other one as lost"
    assert 4 in steps_saved(folder)
    run_all([[*command, "--resume"]] * 2, node_environments(2)).well()
    assert last_checkpoint(folder) == uninterrupted, f"killed at step {at}"


def test_a_killed_rank_is_named_once_on_its_node_and_ends_the_others(tmp_path):
    """The other ranks do not wait for the timeout of their collective, which is 600 s."""
    running = start_ranks(3, "--output_dir", tmp_path / "run", "--step_seconds", 0.5, "--global_batch_size", 6)
    running.until("step  2/12")
    running.processes[1].kill()
    ended = running.ended()
    assert ended.codes == [1, -9, 1], ended.text
    assert len(re.findall(DIED, ended.text)) == 1
    assert f"pid {running.processes[1].pid})" in ended.text
    assert "Traceback" not in ended.text


@pytest.mark.slow
def test_a_killed_rank_of_a_launcher_is_named_once(tmp_path):
    """The launcher immediately sends SIGTERM to the other ranks of the node."""
    command = [BIN / "torchrun", "--nproc_per_node", 3, "--master_port", free_port(), TRAINS, *OPTIONS, "--global_batch_size", 6]
    environment = clean_environment(SLURM_JOB_ID=None, KUBERNETES_SERVICE_HOST=None)  # a user has typed it
    running = Running([[*command, "--output_dir", tmp_path / "launched", "--step_seconds", 0.5]], [environment])
    running.until("step  2/12")
    launched = [p for p in psutil.Process(running.processes[0].pid).children() if "trains.py" in " ".join(p.cmdline())]
    next(process for process in launched if process.environ()["RANK"] == "1").kill()
    ended = running.ended()
    assert ended.codes == [1], ended.text
    assert len(re.findall(rf"^{DIED}", ended.text, re.MULTILINE)) == 1, ended.text
    assert "stopped:" not in ended.text
    again = shlex.join(["torchrun", *map(str, command[1:]), "--step_seconds", "0.5", "--resume"])
    assert f"To continue from the last checkpoint, run: {again} --output_dir {tmp_path / 'launched'}\n" in ended.text


def stopped_by(how: str, folder: Path) -> Ended:
    """Start a run on two ranks, and request a stop: with a file, or with a signal to rank 1 and all its data workers."""
    running = start_ranks(2, "--output_dir", folder, "--step_seconds", 0.3, "--save_every", 100)
    running.until("step  2/12")
    if how == "file":
        (folder / "STOP").touch()
    else:
        os.killpg(running.processes[1].pid, signal.Signals[how])
        if how == "SIGINT":  # under `timeout`, one Ctrl-C arrives twice
            time.sleep(0.05)
            os.killpg(running.processes[1].pid, signal.SIGINT)
    return running.ended()


# SIGUSR2 stops runs in tests/test_trackers.py too.
@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("SIGUSR2", marks=pytest.mark.slow), "SIGHUP", "SIGINT", "file"])
def test_a_stop_request_to_one_rank_stops_all_at_the_same_step(tmp_path, uninterrupted, how):
    """Rank 1 and all its data workers receive the signal, as from Slurm."""
    for attempt in range(3):
        folder = tmp_path / f"run{attempt}"
        ended = stopped_by(how, folder)
        if how != "SIGINT" or 130 not in ended.codes:  # 130: a process got no core for 0.2 s, and that was a second Ctrl-C
            break
    assert ended.codes == [75, 75], ended.text
    assert ended.text.count("stopped: requested by") == 1, "the message is printed once per node"
    assert "Traceback" not in ended.text
    assert not (folder / "STOP").exists()
    (stopped,) = steps_saved(folder)
    assert 2 <= stopped < 12
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert events[-1]["stopped"]
    assert "loss" not in events[-1], "an evaluation was made after the stop"
    assert [e["step"] for e in events if e["event"] == "save"] == [stopped]
    if how == "SIGTERM":
        start_ranks(2, "--output_dir", folder, "--resume").ended().well()
        assert last_checkpoint(folder) == uninterrupted


def test_a_stop_in_an_evaluation_does_not_wait_for_its_end(tmp_path, uninterrupted):
    """Rank 0 receives the signal in the evaluation after step 6."""
    folder = tmp_path / "run"
    running = start_ranks(2, "--output_dir", folder, "--eval_seconds", 60, "--no_eval_first")
    running.until("evaluating")
    running.processes[0].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert "evaluation:" not in ended.text, "the evaluation was completed"
    assert steps_saved(folder) == [4, 6]
    again = start_ranks(2, "--output_dir", folder, "--resume").ended().well()
    assert "step 6  evaluation:" in again.text, "the interrupted evaluation is not repeated"
    assert last_checkpoint(folder) == uninterrupted


def test_a_stop_in_the_evaluation_before_training_reports_that_there_is_nothing_to_save(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    running = start_ranks(2, "--output_dir", folder, "--eval_seconds", 60)
    running.until("evaluating")
    running.processes[1].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert "evaluation:" not in ended.text, "the evaluation was completed"
    assert ended.text.count("before the first step. There is nothing to save") == 1
    assert steps_saved(folder) == []
    start_ranks(2, "--output_dir", folder).ended().well()  # the same command again, without --resume
    assert last_checkpoint(folder) == uninterrupted


def test_a_stop_before_the_first_step_saves_nothing(tmp_path):
    """Rank 0 receives the signal while it waits for rank 1, which is busy before its first step. Both end immediately."""
    running = start_ranks(2, "--busy_seconds", 600, "--output_dir", tmp_path / "run")
    running.until("busy", of=1)
    running.processes[0].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert ended.text.count("stopped: received SIGTERM on") == 1
    assert steps_saved(tmp_path / "run") == []


def test_a_run_resumed_on_another_number_of_ranks_has_the_same_result(tmp_path):
    """The run has 1 rank, then 4, 2, 3 (refused) and 1 again. It uses float64, and only rounding may differ."""
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


def test_two_runs_never_share_a_folder_and_a_killed_run_does_not_block_it(tmp_path):
    folder = tmp_path / "run"
    running = start_ranks(1, "--output_dir", folder, "--step_seconds", 1.5, "--save_every", 1)
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
    assert "holds another run" in refused.text, "a run was resumed in the folder of another run"


@pytest.mark.slow  # in CI, tests/test_launch_ssh.py and test_cli.py press Ctrl-C
def test_ctrl_c_in_a_terminal_reaches_a_launcher_of_several_ranks(tmp_path):
    """torchrun starts each rank in a new session and forwards the signal."""
    folder = tmp_path / "run"
    command = [BIN / "torchrun", "--nproc_per_node", 2, "--master_port", free_port(), TRAINS, *OPTIONS, "--output_dir", folder,
               "--step_seconds", 0.5, "--save_every", 100]  # fmt: skip
    running = Running([command], [clean_environment(OMP_NUM_THREADS="1")])
    running.until("step  2/12")
    os.killpg(running.processes[0].pid, signal.SIGINT)
    ended = running.ended()
    assert ended.codes == [75], ended.text
    (stopped,) = steps_saved(folder)
    assert 2 <= stopped < 12
    assert len(re.findall(rf"^stopped: requested by Ctrl-C.* Step {stopped} of 12", ended.text, re.MULTILINE)) == 1


def test_a_data_worker_ends_if_its_rank_is_killed_before_the_worker_starts():
    """Otherwise the worker would never end and would keep the connections of its rank open, which hides the death of the rank."""
    code = """
import os, time
from accel_ddp.ranks import signals
from accel_ddp.ranks.process import ending
ending.stop.pid = os.getpid()
ignore = signals.IgnoreInWorker("fork")
if os.fork() == 0:
    while os.getppid() == ending.stop.pid: time.sleep(0.01)
    ignore()
    print("still running", flush=True)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    ended = run_all([[sys.executable, "-c", code]], [clean_environment()], fresh=True)
    assert ended.codes == [-9]
    assert ended.text == ""


FAILS_WHILE_A_WORKER_DIES = """
import os, time, torch, accel_ddp
from accel_ddp.entry import run
class Bad(Exception):
    def __str__(self):
        if not os.path.exists("describing"):
            open("describing", "w").close()
            time.sleep(1)
        return "the reason"
def collate(rows, calls=[]):
    calls += [rows] * bool(torch.utils.data.get_worker_info())
    if len(calls) > 1:
        while not os.path.exists("describing"): time.sleep(0.01)
        os._exit(5)
    return torch.zeros(1, 1)
class Task(accel_ddp.Task):
    def terms(self, model, batch, team):
        if torch.is_grad_enabled(): raise Bad  # not in the check before the first step
        return {"loss": model(batch)}
def main(cfg):
    model = torch.nn.Linear(1, 1)
    train = accel_ddp.TrainBatches(range(9), collate)
    accel_ddp.fit(accel_ddp.start(cfg), cfg, model=model, optimizer=torch.optim.SGD(model.parameters()), train=train, task=Task(),
                  speedups=None)
run(accel_ddp.TrainConfig, main)
"""


def test_a_data_worker_that_dies_while_an_error_is_described_does_not_hide_it(tmp_path):
    """torch raises an error in the main thread when a worker dies, wherever that thread is."""
    script = tmp_path / "script.py"
    script.write_text(FAILS_WHILE_A_WORKER_DIES)
    words = ["--num_workers", 1, "--global_batch_size", 1, "--micro_batch_size", 1, "--output_dir", "run"]
    ended = run_all([[sys.executable, script, *words]], [clean_environment()], cwd=tmp_path)
    assert ended.codes == [1]
    assert re.search(r"^error: RANK_FAILED: .*: Bad: the reason$", ended.text, re.MULTILINE), ended.text
    assert "RANK_DIED" not in ended.text


STARTS_SLOWLY = """
import os, time
print("importing", os.getpid(), flush=True)
while not os.path.exists("go"): time.sleep(0.05)
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
run(TrainConfig, lambda cfg: print("trains"))
"""


@pytest.mark.parametrize(
    ("receiver", "number", "code"),
    [
        ("launcher", signal.SIGUSR2, 75),
        pytest.param("rank", signal.SIGUSR2, 75, marks=pytest.mark.slow),
        pytest.param("launcher", signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param("launcher", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("waiting launcher", signal.SIGUSR2, 75, marks=pytest.mark.slow),
    ],
)
def test_a_stop_while_the_ranks_start_is_remembered(tmp_path, receiver, number, code):
    """The script of a Slurm job blocks USR2. The launcher gets it before the rank exists, and the rank before its imports end."""
    (tmp_path / "slow.py").write_text(STARTS_SLOWLY)
    nodes = ["--nnodes", 2, "--node_rank", 0] if receiver == "waiting launcher" else []
    launch = [BIN / "torchrun", *nodes, "--nproc_per_node", 1, "--master_port", free_port(), "slow.py"]
    running = Running([[sys.executable, "-ISc", _BLOCK, *launch]], [clean_environment()], cwd=tmp_path, fresh=True)
    running.until("waiting for" if nodes else "importing")
    pid = int(running.read[0].split()[-1]) if receiver == "rank" else running.processes[0].pid
    os.kill(pid, number)
    if number == signal.SIGUSR2:
        time.sleep(0.2)
        (tmp_path / "go").touch()
    ended = running.ended()
    assert ended.codes == [code], ended.text
    assert f"received {number.name}" in ended.text, ended.text
    assert "trains" not in ended.text
