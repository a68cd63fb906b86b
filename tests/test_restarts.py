"""Ranks that a launcher with --max_restarts starts again continue by themselves, with the result of an uninterrupted run."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from accel_ddp.errors import UserError
from accel_ddp.records.incidents import read_incidents
from accel_ddp.records.run_log import read_log
from accel_ddp.saving.checkpoint_format import MANIFEST
from accel_ddp.watch import restart_files
from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, free_port, rank_environments, run_all
from tests.log_schema import require_documented
from tests.test_stop import last_checkpoint, wait_for

TRAINS = PROGRAMS / "trains.py"


class Job:
    """Launchers of one job, one for each node. A launcher may be killed and started again."""

    def __init__(self, nodes, backend: str, folder: Path, *arguments: object, max_restarts: int = 9):
        self.nodes, self.folder = nodes.nodes[:2], folder
        endpoint = f"{self.nodes[0].address}:{free_port()}"
        common = ["--nnodes", 2, "--nproc_per_node", 1, "--max_restarts", max_restarts]
        if backend == "c10d":
            common += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "job"]
        else:
            common += ["--master_addr", self.nodes[0].address, "--master_port", endpoint.rpartition(":")[2]]
        self.commands = [
            [BIN / "torchrun", *common, *(["--node_rank", node] if backend == "static" else []), TRAINS, *arguments,
             "--output_dir", folder.name]
            for node in (0, 1)
        ]  # fmt: skip
        self.working_directory = folder.parent
        self.launchers: list[psutil.Popen] = [None, None]
        self.texts, self.changed, self.readers = ["", ""], threading.Condition(), []
        self.start(0), self.start(1)

    def start(self, node: int) -> None:
        env = clean_environment(OMP_NUM_THREADS="1")
        command = self.nodes[node].command(self.commands[node])
        process = Running([command], [env], cwd=self.working_directory).processes[0]
        self.launchers[node] = process
        self.readers.append(threading.Thread(target=self._read, args=(node, process), daemon=True))
        self.readers[-1].start()

    def _read(self, node: int, process) -> None:
        for line in process.stdout:
            with self.changed:
                self.texts[node] += line
                self.changed.notify_all()

    def until(self, expected: str, node: int = 0, after: int = 0, timeout: float = 300) -> int:
        """Wait until the node prints `expected` at or after the position `after` of its output. Return the position behind it."""
        with self.changed:
            found = self.changed.wait_for(lambda: self.texts[node].find(expected, after) >= 0, timeout)
            assert found, f"{expected!r} was not printed:\n{self.texts[0][-5000:]}\n--- node 1\n{self.texts[1][-5000:]}"
            return self.texts[node].find(expected, after) + len(expected)

    def rank(self, node: int) -> psutil.Process:
        children = psutil.Process(self.launchers[node].pid).children()
        return next(child for child in children if "trains.py" in " ".join(child.cmdline()))

    def kill_node(self, node: int) -> None:
        for pid in self.nodes[node].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launchers[node].wait()

    def end(self, timeout: float = 300) -> list[int]:
        codes = [launcher.wait(timeout) for launcher in self.launchers]
        for reader in self.readers:
            reader.join(60)
        return codes

    @property
    def text(self) -> str:
        return f"{self.texts[0]}\n--- node 1\n{self.texts[1]}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    """Return the last checkpoint of an uninterrupted run on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_all([[sys.executable, TRAINS, "--output_dir", folder]] * 2, rank_environments(2)).well()
    return last_checkpoint(folder)


def restarts_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]
    return [line for line in lines if "restart" in line]


def inject(job: Job, fault: str) -> None:
    """Inject a fault. A launcher or a node that was killed is started again."""
    what, _, where = fault.partition(" ")
    node = int(where)
    if what == "rank":
        job.rank(node).kill()
    elif what == "stop":
        job.rank(node).send_signal(signal.SIGSTOP)
    elif what == "link":
        before = [len(text) for text in job.texts]
        job.nodes[node].link(False)
        for other, at in enumerate(before):
            job.until("error: ", other, at)
        job.nodes[node].link(True)
    elif what == "launcher":
        job.launchers[node].kill()
        job.launchers[node].wait()
        job.start(node)
    elif what == "node":
        at = len(job.texts[1])
        job.kill_node(node)
        if node == 0:
            job.until("waiting for the main node", 1, at)
            job.working_directory = ROOT  # the relative --output_dir still means the folder of the run
        job.start(node)


def check_faults(nodes, backend: str, folder: Path, uninterrupted: dict[str, bytes], faults: list[str]) -> Job:
    """Inject the faults one after another, each in the second step after the last restart. Check the result and the restarts."""
    nodes.require("links")
    job = Job(nodes, backend, folder, "--step_seconds", 0.4, "--save_every", 2)
    job.until("step  3/12")  # its work is lost
    wait_for(folder, 2)
    for number, fault in enumerate(faults, 1):
        at, began = len(job.texts[0]), time.monotonic()
        inject(job, fault)
        at = job.until(f"restart {number} of 9: ", after=at)
        print(f"{backend}, {fault}: training continues after {time.monotonic() - began:.1f} s")
        if number < len(faults):
            at = job.until("Training continues at step ", after=at)
            job.until(f"step {min(12, int(job.texts[0][at:].split('.')[0]) + 2):2}/12", after=at)
    assert job.end() == [0, 0], job.text
    assert last_checkpoint(folder) == uninterrupted
    assert len(restarts_of(folder)) == len(faults), "each failure uses one restart"
    assert "goodput: " in job.texts[0]
    # At the end the launcher of the main node, which has torch's store, may exit before the other one has left torch's barrier.
    if "Error waiting on exit barrier" not in job.text:
        assert "Traceback" not in job.text, job.text
        assert backend == "c10d" or "frame #" not in job.text, "torch's store has printed pages of C++ frames"
    return job


@pytest.mark.parametrize("faults", [["node 0"], pytest.param(["rank 1", "node 0"], marks=pytest.mark.slow)], ids=" then ".join)
def test_static_nodes_continue_after_a_killed_rank_and_after_the_loss_of_the_main_node(nodes, tmp_path, uninterrupted, faults):
    """The main launcher, which has the store, is started again. The other launcher waits for it and takes part in its preflight."""
    folder = tmp_path / "run"
    check_faults(nodes, "static", folder, uninterrupted, faults)
    *first, last = restarts_of(folder)
    assert all("RANK_DIED: rank 1 (node1, pid " in restart["text"] for restart in first)
    assert last["lost_steps"] <= 4, "a save waits for the one before it, so at most two intervals are lost"
    assert last["lost_seconds"] > 0
    assert f"The launcher restarts the ranks from the last checkpoint (restart {len(faults)} of 9)." in last["text"]
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [event["restart"] for event in events if event["event"] == "restart"] == [1, 2][: len(faults)]
    assert "restart" in require_documented(folder)
    counted = [event["step"] for event in read_log(folder / "log.jsonl") if event["event"] == "update"]
    assert counted == sorted(set(counted)), "repeated steps are counted once"
    for restart in (event for event in events if event["event"] == "restart"):  # exactly what was logged after the checkpoint
        before, after = events[: events.index(restart)], events[events.index(restart) :]
        logged = max(event["step"] for event in before if event["event"] == "update")
        first_time = next(event["step"] for event in after if event["event"] == "update" and not event.get("repeated"))
        assert first_time == max(logged, restart["step"]) + 1, "a step that was logged before is marked as repeated"
    assert not first or "RANK_DIED" in [incident.kind for incident in read_incidents(folder)]
    assert 0 < events[-1]["goodput"] < 1


@pytest.mark.slow
def test_c10d_nodes_continue_after_a_killed_launcher_and_a_killed_main_rank(nodes, tmp_path, uninterrupted):
    """The launcher that is started again joins the running job, of which it finds the rendezvous."""
    job = check_faults(nodes, "c10d", tmp_path / "run", uninterrupted, ["launcher 1", "rank 0"])
    assert "the job is already running" in job.texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize(
    "faults", [["rank 0", "launcher 1", "node 1"], ["node 0", "rank 1", "launcher 0"], ["stop 1", "link 1"]], ids=" then ".join
)
def test_nodes_continue_after_every_fault(nodes, tmp_path, uninterrupted, backend, faults):
    check_faults(nodes, backend, tmp_path / "run", uninterrupted, faults)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_replacement_with_another_option_is_refused_by_name_and_the_job_waits_for_another_one(nodes, tmp_path, backend):
    job = Job(nodes, backend, tmp_path / "run", "--steps", 12, "--step_seconds", 0.5, "--save_every", 2)
    job.until(" 3/12 ", timeout=90)
    job.kill_node(1)
    right, at = job.commands[1], len(job.texts[1])
    job.commands[1] = [*right, "--lr", "0.5"]
    began = time.monotonic()
    job.start(1)
    assert job.launchers[1].wait(60) == 2
    seconds = time.monotonic() - began
    job.until("because its options differ: --lr is not given there and 0.5 here.", 1, at, timeout=5)
    print(f"refused after {seconds:.1f} s")
    job.commands[1] = right
    job.start(1)
    assert job.end() == [0, 0], job.text


def start_two_ranks(launcher: list, cwd: Path, *arguments: object, program: tuple = (TRAINS,)) -> Running:
    """Start two ranks of one node, which are restarted 5 times at most."""
    command = [*launcher, "--max_restarts", 5, *program, *arguments]
    environment = clean_environment(OMP_NUM_THREADS="1", SLURM_JOB_ID=None, KUBERNETES_SERVICE_HOST=None)  # a user has typed it
    return Running([command], [environment], cwd=cwd)


def torchrun() -> list:
    return [BIN / "torchrun", "--nproc_per_node", 2, "--master_port", free_port()]


# A resumed run with wandb is in tests/test_trackers.py.
@pytest.mark.parametrize("tracker", ["none", pytest.param("wandb", marks=pytest.mark.slow)])
def test_a_killed_rank_is_restarted_in_the_same_folder_and_a_stop_is_not_undone(tmp_path, tracker):
    """`accelerate launch` of two ranks without --output_dir. The stop is requested while the ranks are restarted."""
    config = [
        "--config_file",
        ROOT / "accelerate_configs" / "1node.yaml",
        "--num_processes",
        2,
        "--main_process_port",
        free_port(),
    ]
    options = ["--step_seconds", 0.1, "--steps", 2000, "--save_every", 2]
    options += ["--report_to", tracker] if tracker == "wandb" else []
    running = start_two_ranks([BIN / "accelerate-launch", *config], tmp_path, *options)
    running.until("step    3/2000")
    (folder,) = (tmp_path / "runs" / "trains").iterdir()
    deadline = time.monotonic() + 180
    while tracker == "wandb" and not list(folder.glob("wandb/offline-run-*")):  # wandb starts in a thread
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wandb_id = (folder / "wandb_id.txt").read_text().strip() if tracker == "wandb" else ""
    ranks = [p for p in psutil.Process(running.processes[0].pid).children() if "trains.py" in " ".join(p.cmdline())]
    next(rank for rank in ranks if rank.environ()["RANK"] == "1").kill()
    running.until("error: RANK_DIED: rank 1")
    (folder / "STOP").touch()
    ended = running.ended()
    assert ended.codes == [75], ended.text
    assert "restart 1 of 5: RANK_DIED: rank 1 " in ended.text
    died = r"error: RANK_DIED: rank 1 .*\. The launcher restarts the ranks from the last checkpoint \(restart 1 of 5\)\.\n"
    assert re.search(died, ended.text), ended.text
    assert "stopped: requested by the file" in ended.text
    command = json.loads((folder / "log.jsonl").read_text().splitlines()[0])["launcher"]
    assert command[:2] == ["accelerate-launch", "--config_file"]
    assert command[-len(options) :] == [str(word) for word in options]
    assert f"To continue, run: {shlex.join(command)} --resume --output_dir {folder}\n" in ended.text
    assert len(restarts_of(folder)) == 1, "the stop was taken for a failure"
    assert list((tmp_path / "runs" / "trains").iterdir()) == [folder]
    ids = {path.name.rsplit("-", 1)[1] for path in (folder / "wandb").glob("offline-run-*")}
    assert ids == ({wandb_id} if wandb_id else set()), "the restart continues the same run of wandb"


@pytest.mark.slow
def test_a_step_that_fails_three_times_ends_the_job(tmp_path):
    """A shell script runs between the launcher and each rank."""
    folder, script = tmp_path / "run", tmp_path / "wrapper.sh"
    script.write_text(f'{sys.executable} "$@"\n')
    ended = start_two_ranks(
        [*torchrun(), "--no_python"], tmp_path, "--output_dir", folder, "--fails_at", 3, "--save_every", 2,
        program=("sh", script, TRAINS),
    ).ended()  # fmt: skip
    assert ended.codes == [1], ended.text
    assert ended.text.count("ValueError: a bug in this step\n") >= 3
    assert [line["restart"] for line in restarts_of(folder)] == [1, 2], "the third failure is not restarted"
    assert "the ranks are not restarted, because step 3 has failed 3 times" in ended.text


def test_mistakes_of_a_program_without_run_are_not_restarted(tmp_path):
    """Its argparse ends every rank before `start`."""
    program = tmp_path / "program.py"
    program.write_text("import argparse\nargparse.ArgumentParser().parse_args()\nimport accel_ddp\n")
    ended = start_two_ranks(torchrun(), tmp_path, "--lr", "x", program=(program,)).ended()
    assert ended.codes == [2], ended.text
    assert 1 <= ended.text.count("unrecognized arguments") <= 2, "torchrun may terminate a rank before it has printed its message"
    assert "restart 1 of" not in ended.text


def test_a_user_error_is_not_restarted(tmp_path):
    ended = start_two_ranks(torchrun(), tmp_path, "--output_dir", tmp_path / "run", "--steps", -3).ended()
    assert ended.codes == [2], ended.text
    assert ended.text.count("--steps") <= 3, ended.text
    assert "the ranks are not restarted" in ended.text


def test_an_attempt_consists_of_exactly_the_processes_that_are_alive(tmp_path):
    """The store of a launcher has the keys of a dead attempt, and a process of rank 1 that announced itself has died."""
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    dead = {"nonce": "dead", "run": {}, "options": {}}
    store.set("attempt", "dead")
    for key, value in {"members": json.dumps([dead, dead]), "complete": "", "rank/0": json.dumps(dead)}.items():
        store.set(f"attempt/dead/{key}", value)
    environments = [
        {**env, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"} for env in rank_environments(2)
    ]
    command = [sys.executable, TRAINS, "--output_dir", tmp_path / "run", "--steps", 2]
    lost = Running([command], environments[1:])
    while not store.check(["attempt/dead/rank/1"]):
        time.sleep(0.05)
    lost.processes[0].kill()
    lost.ended()
    first = Running([command], environments[:1])
    while store.get("attempt") == b"dead":
        time.sleep(0.05)
    assert not store.check([f"attempt/{store.get('attempt').decode()}/members"])
    second = Running([command], environments[1:])
    assert first.ended().well()
    assert second.ended().well()


def test_an_outcome_belongs_to_one_launcher_and_one_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(restart_files.ROUND, "1")
    assert restart_files.write_outcome(os.getpid(), {"kind": "died", "exit_code": 1, "step": 3})
    assert not restart_files.write_outcome(
        os.getpid(), {"kind": "stopped", "exit_code": 75, "step": None}
    )  # follows from the first one
    restart_files.store_run(os.getpid(), output_dir="runs/a")
    restart_files.store_run(os.getpid(), failed_steps=[3])
    assert restart_files.read_outcome(os.getpid(), 1) == {"kind": "died", "exit_code": 1, "step": 3}
    assert restart_files.read_outcome(os.getpid(), 0) is None
    assert restart_files.read_run(os.getpid()) == {"output_dir": "runs/a", "failed_steps": [3]}
    assert restart_files.read_run(os.getppid()) == {}
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o77 == 0, "other users can read it"
    assert folder.name.endswith(f"-{os.stat('/proc/self/ns/pid').st_ino}"), "another container can remove it"
    (folder / "999999999-1.run.json").write_text("{}")
    (folder / ".999999999-1.run.json.5.tmp").write_text("{")
    os.utime(folder / next(folder.glob("*.run.json")), (0, 0))
    restart_files.touch(os.getpid())
    restart_files.remove(os.getppid())
    assert all(path.stat().st_mtime > 1e9 for path in folder.iterdir()), "the system would remove old files"
    assert sorted(path.name.split(".")[1] for path in folder.iterdir()) == ["outcome1", "run"], (
        "files of a dead launcher are left"
    )
    restart_files.remove(os.getpid())
    assert list(folder.iterdir()) == []
    restart_files.write_outcome(0, {})  # a rank without a launcher
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "step", "failed_steps", "reason"),
    [
        (1, 5, [], ""), (1, 5, [5], ""), (1, 5, [5, 5], "step 5 has failed 3 times"), (1, 5, [5, 3, 5], ""), (1, 7, [5, 5], ""),
        (1, 5, [5, 6], "steps 5 and 6 have failed 3 times"), (1, 6, [4, 5], ""),
        (1, None, [None, None], ""), (75, 5, [], "a stop was requested"), (130, 5, [], "a stop was requested"),
        (74, 5, [], "a stop was requested"), (2, None, [], "the same command would fail again"), (None, None, [5, 5], ""),
    ],
)  # fmt: skip
def test_an_attempt_is_restarted_only_if_that_can_help(code, step, failed_steps, reason):
    ended = None if code is None else {"exit_code": code, "step": step}
    assert restart_files.why_not_restarted(ended, failed_steps).startswith(reason)
    assert bool(restart_files.why_not_restarted(ended, failed_steps)) == bool(reason)


def test_a_failure_advises_resume_only_if_the_launcher_does_not_restart_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    by_hand = "To continue from the last checkpoint, run: accel-ddp run x"
    restarts = "The launcher restarts the ranks from the last checkpoint (restart 2 of 2)."

    def advice(used, code=1, step=5, **more):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(used))
        return restart_files.how_to_continue(code, step, "run: accel-ddp run x", **more)

    assert advice(0) == by_hand
    variables = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2", restart_files.LAUNCHER: str(os.getpid())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert advice(1) == advice(1, is_node_lost=True) == restarts
    with monkeypatch.context() as launched:
        launched.setenv("ACCEL_DDP_GUARD", "1")
        assert advice(1, is_node_lost=True) == by_hand, "`accel-ddp launch` stops the other nodes"
    assert advice(1, code=2) == by_hand
    assert advice(2) == f"No restart of --max_restarts 2 is left. {by_hand}"
    restart_files.store_run(os.getpid(), failed_steps=[5, 5])
    assert (advice(1), advice(1, step=8)) == (by_hand, restarts)


def test_attempts_that_all_fail_before_their_first_step_end_the_job():
    from accel_ddp.saving.restart_record import _why_no_progress

    start, failure, training = {"event": "start"}, {"event": "failure", "step": None}, {"event": "training"}
    assert _why_no_progress([start, training, failure, failure]) == ""
    assert _why_no_progress([start, failure, failure, training, failure]) == ""
    assert (
        _why_no_progress([start, training, failure, failure, failure]) == "the run has failed 3 times without a step in between"
    )
    at = lambda step: {"event": "failure", "step": step}
    assert _why_no_progress([start, training, at(3), training, at(5), training, at(5)]) == ""
    assert _why_no_progress([start, training, at(5), training, at(5), training, at(5)]) == "step 5 has failed 3 times"


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_launcher_joins_only_a_running_job_with_the_same_command(tmp_path, monkeypatch, backend):
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import _create_c10d_handler, _create_static_handler

    from accel_ddp.doctor.launcher_restarts import RestartingRendezvous

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    endpoint, create = f"127.0.0.1:{free_port()}", {"static": _create_static_handler, "c10d": _create_c10d_handler}[backend]
    finds = []

    def launch(node: int, *arguments: str, max_restarts: int = 3) -> RestartingRendezvous:
        rank = {"rank": node} if backend == "static" else {}
        params = RendezvousParameters(backend, endpoint, "job", 1, 1, **rank)
        check = lambda is_running: finds.append(is_running()) if node else False
        return RestartingRendezvous(params, backend, create, check, ["train.py", *arguments], 1.0, max_restarts)

    running = launch(0, "--lr", "1", "--hub_token", "hf_0123456789abcdef")
    running.next_rendezvous()
    launch(1, "--lr", "1", "--hub_token", "hf_0123456789abcdef")
    launch(1, "--hub_token", "hf_0123456789abcdef", "--lr=1")
    assert finds == [True, True]
    with pytest.raises(
        UserError, match=f"a job runs at {endpoint}, .* differ: --lr is 1 there and 2 here; --save_every is not"
    ) as one:
        launch(1, "--lr", "2", "--hub_token", "hf_0123456789abcdef", "--save_every", "3")
    assert "hf_" not in str(one.value)
    with pytest.raises(UserError, match="--max_restarts is 3 there and 0 here"):
        launch(1, "--lr", "1", "--hub_token", "hf_0123456789abcdef", max_restarts=0)


def test_a_restart_goes_back_to_resume_path_only_if_the_job_has_no_newer_checkpoint(tmp_path):
    from accel_ddp.config.train_config import TrainConfig
    from accel_ddp.saving import restart_record

    resumed = lambda path: restart_record.resume_of_restart(TrainConfig(resume=path), str(tmp_path))
    assert restart_record.resume_of_restart(TrainConfig(resume="other/step_00000004"), "") == "other/step_00000004", "no restart"
    assert resumed("") == "auto"
    (tmp_path / "step_00000002").mkdir()  # of an earlier job
    (tmp_path / "step_00000002" / MANIFEST).write_text("{}")
    assert resumed("other/step_00000004") == "other/step_00000004", "the attempt failed before its first step"
    (tmp_path / restart_record.FILE).write_text('{"event": "start"}\n{"event": "training", "step": 4}\n')
    assert resumed("other/step_00000004") == "other/step_00000004", "the attempt has saved nothing"
    (tmp_path / "step_00000006").mkdir()
    (tmp_path / "step_00000006" / MANIFEST).write_text("{}")
    assert resumed("other/step_00000004") == "auto"


def test_the_folder_of_a_restart_is_that_of_the_attempt_before(tmp_path, monkeypatch):
    from accel_ddp.accelerator import _find_earlier_folder
    from accel_ddp.ranks.process import links

    monkeypatch.chdir(tmp_path)
    assert _find_earlier_folder("runs/a") == "", "no restart"
    absolute = str(tmp_path / "runs" / "a")
    monkeypatch.setattr(links, "earlier_run", {"output_dir": "runs/a", "absolute": absolute})
    assert _find_earlier_folder("") == _find_earlier_folder("runs/a") == "runs/a"
    assert _find_earlier_folder(absolute) == absolute
    assert _find_earlier_folder("runs/b") == "", "the user has typed another folder"
    monkeypatch.chdir("/")
    assert _find_earlier_folder("") == _find_earlier_folder("runs/a") == _find_earlier_folder(absolute) == absolute


def test_a_restart_whose_files_were_removed_is_an_error(tmp_path, monkeypatch):
    from accel_ddp.ranks import restarts

    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        restart_files.LAUNCHER: str(os.getpid()),
        restart_files.ROUND: "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match="were removed or could not be written"):
        restarts.newest_run([restarts.read_earlier_run()])
    other_node = {"output_dir": "runs/a"}
    assert restarts.newest_run([restarts.read_earlier_run(), other_node]) == other_node
    restart_files.store_run(os.getpid(), started=1.0)  # the launcher; the attempt before has failed before it had a folder
    assert restarts.newest_run([restarts.read_earlier_run()]) == {}


def test_a_node_that_is_missing_at_a_restart_is_not_a_mistake_of_the_user(monkeypatch):
    from accel_ddp.config.train_config import TrainConfig
    from accel_ddp.ranks import restarts
    from accel_ddp.ranks.failures import Stopped

    cfg = TrainConfig(ddp_timeout_seconds=1, preflight_wait=2)
    waiting = restarts._Waiting(cfg)
    waiting.began -= 3
    with pytest.raises(UserError, match="--ddp_timeout_seconds 1"):
        waiting.sleep(lambda: [1])
    monkeypatch.setenv(restart_files.ROUND, "1")
    waiting = restarts._Waiting(cfg)
    waiting.began -= 3
    with pytest.raises(Stopped, match=r"NODE_LOST: .* --preflight_wait 2\. .* --resume") as stopped:
        waiting.sleep(lambda: [1])
    assert stopped.value.failure.exit_code == 1, "it may be restarted"


def test_only_the_first_rank_of_a_node_asks_which_ranks_are_missing(monkeypatch):
    """Each question is one request per rank of the job, to one store."""
    from accel_ddp.config.train_config import TrainConfig
    from accel_ddp.ranks import restarts

    for local_rank, expected in ((1, 0), (0, 1)):
        monkeypatch.setattr(restarts, "this_rank", dataclasses.replace(restarts.this_rank, local_rank=local_rank))
        waiting, asked = restarts._Waiting(TrainConfig()), []
        waiting.reported -= restarts.REPORT_EVERY + 1
        for _ in range(3):
            waiting.sleep(lambda asked=asked: asked.append(1) or [1])
        assert len(asked) == expected


def test_a_stop_is_printed_with_one_prefix_at_a_restart(tmp_path, monkeypatch):
    from accel_ddp.ranks import restarts
    from accel_ddp.ranks.failures import Failure, Stopped

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv(restart_files.LAUNCHER, str(os.getpid()))
    restart_files.write_outcome(os.getpid(), Failure("stopped", "requested by a test").as_outcome())
    monkeypatch.setenv(restart_files.ROUND, "1")
    with pytest.raises(Stopped, match=r"^stopped: requested by a test$"):
        restarts.end_if_stopped()


def test_goodput_is_the_part_of_the_time_that_was_spent_on_steps_that_count(tmp_path, monkeypatch):
    from accel_ddp.config.train_config import TrainConfig
    from accel_ddp.saving import restart_record

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(restart_record.time, "time", lambda: 1100.0)
    lines = [
        {"event": "start", "time": 1000.0},
        {"event": "training", "time": 1010.0, "step": 0},  # counts until 1030, when the checkpoint of step 4 was complete
        {"event": "failure", "time": 1040.0, "step": 6, "text": ""},
        {"event": "training", "time": 1050.0, "step": 4, "restart": 1, "committed": 1030.0},  # no checkpoint: nothing counts
        {"event": "failure", "time": 1055.0, "step": 5, "text": ""},
        {"event": "training", "time": 1070.0, "step": 4, "restart": 2, "committed": 1030.0},  # counts until now
    ]
    (tmp_path / restart_record.FILE).write_text("\n".join(map(json.dumps, lines)))
    assert restart_record.goodput(TrainConfig(output_dir=str(tmp_path))) == 0.5
    (tmp_path / restart_record.FILE).write_text("\n".join(map(json.dumps, lines[:2])))
    assert restart_record.goodput(TrainConfig(output_dir=str(tmp_path))) is None, "there was no restart"
