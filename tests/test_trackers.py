"""Trackers: what they show, read back with their own readers; one run after a kill; and what a bad tracker or a secret may not do."""

import contextlib
import functools
import json
import math
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from accel_ddp.engine.step_numbers import SYSTEM, Numbers, Pace, RankSample
from accel_ddp.observe import trackers
from accel_ddp.observe.tracker_kinds import Tracker, as_markdown, as_rows, draw_matrix
from accel_ddp.ranks.process import Moment, ending
from accel_ddp.records import redaction
from accel_ddp.records.eval_tables import Table
from accel_ddp.records.run_log import last_step_of
from accel_ddp.training.workers import starting_workers
from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, rank_environments, run_ranks
from tests.log_schema import require_golden

TRAINS = PROGRAMS / "trains.py"
SECRETS = {
    "HF_TOKEN": "hf_PlantedTokenOfTheHub0123456789",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret0123456789",
    "MY_PASSWORD": "planted-password-of-a-variable",
}
IN_NETRC, IN_URL, IN_QUERY = "planted-password-in-netrc", "planted-password-in-url", "planted-token-in-query"


# ---- what the rows contain


def sample(step: float, own: float, communication: float, **system: float) -> RankSample:
    seconds = [0.1 * own * step, 0.3 * own * step, 0.4 * own * step, 0.1 * own * step, 0.1 * own * step, communication * step]
    return RankSample(step, *seconds, *[system.get(name, math.nan) for name in SYSTEM])


def row(ranks: int, per_node: int, own) -> dict[str, float]:
    before, now = ([sample(s, own(r), 0.1, gpu_utilisation=r / 100, cpu=1.5) for r in range(ranks)] for s in (10.0, 20.0))
    numbers = Numbers(20, 1e-3, 0.5, 1.25, 8, 0, 100, 1e12, 0.4, now)
    scale = trackers.Scale(80, 8, tuple(rank // per_node for rank in range(ranks)))
    return trackers.row_of_update(numbers, Pace(16.0, 200.0, 2e12, 0.25), before, scale)


def test_a_row_has_every_panel_and_the_slowest_rank_with_its_cost():
    values = row(4, 2, own=lambda rank: 1.5 if rank == 3 else 1.0)
    expected = {
        "train/loss": 0.5, "train/grad_norm": 1.25, "train/lr": 1e-3, "train/epoch": 2.0, "speed/samples_per_second": 16.0,
        "speed/tokens_per_second": 200.0, "speed/tflops": 2.0, "speed/mfu": 0.25, "speed/step_seconds": 0.5,
        "speed/slowest_rank": 3, "speed/slowest_rank_costs_seconds": 0.5, "speed/step_communication_seconds": 0.1,
        "speed/step_data_seconds": 0.1 * 4.5 / 4, "system/node1.rank3/gpu_utilisation": 0.03, "system/node0.rank0/cpu": 1.5,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert not any("gpu_power" in name for name in values), "values that are not known are left out"
    assert all(not math.isnan(value) for value in values.values())


def test_many_ranks_are_one_curve_for_each_node_and_many_nodes_are_one_curve():
    values = row(40, 8, own=lambda rank: 1.0)
    of_node = {name: value for name, value in values.items() if name.startswith("system/node4/gpu_utilisation")}
    assert of_node == pytest.approx({f"system/node4/gpu_utilisation_{kind}": v for kind, v in
                                     {"min": 0.32, "mean": 0.355, "max": 0.39}.items()})  # fmt: skip
    assert not any(".rank" in name for name in values)
    values = row(40, 1, own=lambda rank: 1.0)
    assert values["system/all/gpu_utilisation_max"] == pytest.approx(0.39)
    assert len(values) < 40


def test_the_best_value_of_each_metric_is_the_first_of_equal_ones_and_never_nan():
    evaluations = {4: {"loss": 2.0, "accuracy": 0.5}, 8: {"loss": math.nan, "accuracy": 0.9}, 12: {"loss": 1.0, "accuracy": 0.9}}
    best = trackers.best_of(evaluations, {"loss": "min", "accuracy": "max", "other": "max", "of_": ""})
    assert best == {"best/loss": 1.0, "best/loss_step": 12, "best/accuracy": 0.9, "best/accuracy_step": 8}


def test_a_confusion_matrix_is_an_image_and_with_many_classes_rows():
    matrix = Table(["true class", "a", "b"], [["a", 9, 1], ["b", 0, 10]], "matrix")
    image = draw_matrix(matrix)
    dark, light = [sum(image.getpixel((image.width - x, image.height - y))) for x, y in ((40, 40), (600, 40))]
    assert dark < light, "the diagonal is dark"
    assert as_rows(matrix) is matrix
    assert draw_matrix(Table(["class", "f1"], [["a", 1.0]])) is None
    names = [f"class {i}" for i in range(300)]
    large = Table(["true class", *names], [[name, *(7 * (i == j) for j in range(300))] for i, name in enumerate(names)], "matrix")
    assert draw_matrix(large).width < 2000
    assert as_rows(large).rows[1] == ["class 1", "class 1", 7]
    assert len(as_rows(large).rows) == 300
    assert as_markdown(Table(["a|b", "x"], [["1|2\n3", None], ["y", 0.123456]])).splitlines()[2:] == [
        "| 1\\|2 3 |  |",
        "| y | 0.1235 |",
    ]


def test_a_full_queue_drops_the_oldest_rows_and_reports_it_once(capsys, monkeypatch):
    monkeypatch.setattr(trackers, "MOST_CALLS", 50)
    goes_on, logged = threading.Event(), []

    class Slow(trackers.Tracker):
        def __init__(self):
            self.name = "slow"

        def finish(self):
            logged.append("finished")

    def log(number: int) -> None:
        goes_on.wait(120)
        logged.append(number)

    thread = trackers.TrackerThread(Slow())
    thread.put(trackers.Call("log", log, (0,), is_row=True))
    while thread.waiting:
        time.sleep(0.01)
    thread.put(trackers.Call("table", log, (-1,)))
    for number in range(1, 201):
        thread.put(trackers.Call("log", log, (number,), is_row=True))
    text = capsys.readouterr().err
    assert text.count("its oldest rows are dropped") == 1
    goes_on.set()
    thread.put(trackers.Call("finish", thread.tracker.finish))
    assert thread.close(120)
    assert logged[:2] == [0, -1], "only rows are dropped"
    assert logged[-2:] == [200, "finished"]
    assert logged[2:-1] == sorted(logged[2:-1])
    assert 45 <= len(logged) <= 53


# ---- secrets


ENDS_LATE = """
import threading, time
from accel_ddp.observe import trackers
trackers.EXIT_SECONDS = 0.2
trackers.close_all([], 1.0)
threading.Thread(target=lambda: (time.sleep(1.5), print("complete", flush=True))).start()
"""


def test_a_program_with_trackers_waits_for_its_own_threads():
    ended = subprocess.run([sys.executable, "-c", ENDS_LATE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "complete\n"), ended.stderr


class ImportsInWorker:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        import slow_package

        return slow_package.NUMBER


def test_a_data_worker_is_not_forked_while_a_tracker_is_imported(tmp_path, monkeypatch):
    from torch.utils.data import DataLoader

    (tmp_path / "slow_package.py").write_text("import time\ntime.sleep(1)\nNUMBER = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    tracker = Tracker.__new__(Tracker)
    tracker.name = "slow_package"
    thread = trackers.TrackerThread(tracker)
    thread.put(trackers.Call("import", tracker.load))
    while thread.waiting:
        time.sleep(0.01)
    monkeypatch.setattr(ending, "callbacks", [])
    ending.add(Moment.FORK, thread, lambda seconds: trackers.wait_for_imports([thread], seconds), (60, 60, 60))
    loader = DataLoader(ImportsInWorker(), num_workers=1, multiprocessing_context="fork", timeout=90)
    with starting_workers(loader):
        assert next(iter(loader)).item() == 7
    thread.close()


STARTS_AND_FORKS = """
import os, signal, subprocess, threading
from accel_ddp.nodes.spawn import keep_forks_apart_from_starts
keep_forks_apart_from_starts()
keep_forks_apart_from_starts()
is_done, children = threading.Event(), []
def start():
    for _ in range(20):
        subprocess.run(["true"], stdout=subprocess.PIPE)
    subprocess.run(["true"], preexec_fn=int)
    is_done.set()
threading.Thread(target=start, daemon=True).start()
while not is_done.is_set() and len(children) < 200:
    children.append(os.fork())
    if children[-1] == 0:
        if len(children) == 1:
            subprocess.run(["true"])  # the lock of the parent is not that of the child
        signal.pause()
print(is_done.wait(120), flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
os._exit(0)
"""


def test_a_tracker_that_starts_a_program_does_not_wait_for_data_workers_that_are_forked_meanwhile():
    ended = subprocess.run([sys.executable, "-c", STARTS_AND_FORKS], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.stdout == "True\n", ended.stderr


def test_secrets_are_found_by_their_names_formats_and_places(tmp_path):
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {IN_NETRC}\n")
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = AKIAABCDEFGHIJKLMNOP\naws_secret_access_key=planted/aws\n"
    )
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text("planted-hub-token\n")
    env = {
        **SECRETS,
        "HOME": str(home),
        "TOKENIZERS_PARALLELISM": "planted-word",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/a/planted/file",
    }
    redact = lambda text: redaction.redact(text, env)
    for secret in [*SECRETS.values(), IN_NETRC, "planted/aws", "planted-hub-token", "AKIAABCDEFGHIJKLMNOP", "ghp_" + "a1" * 18]:
        assert secret not in redact(f"key {secret}, and '{secret}'"), secret
    assert (
        redact(f"https://me:{IN_URL}@host/a?b=1&access_token={IN_QUERY}&c=2#d") == "https://***@host/a?b=1&access_token=***&c=2#d"
    )
    assert redact("s3://bucket/a?X-Amz-Signature=abcdef") == "s3://bucket/a?X-Amz-Signature=***"
    assert redact("Authorization: Bearer abcdefgh.ijk") == "Authorization: Bearer ***"
    same = "planted-word /a/planted/file a@b.org s3://bucket/key git@github.com:a/b 0123456789abcdef max_new_tokens=40"
    assert redact(same) == same
    typed = "x.py --hub_token abc --api-key=def --max_new_tokens 40 --pad_token <p> --lr 1 --password"
    redacted = "x.py --hub_token *** --api-key=*** --max_new_tokens 40 --pad_token <p> --lr 1 --password"
    assert " ".join(redaction.redact_command(typed.split(), env)) == redacted
    values = {"a": [f"x {IN_NETRC}"], "my_secret": "abc", "access_key_id": "", "tokens": 5, "deep": {"api_key": "k"}}
    assert redaction.redact_values(values, env) == {
        "a": ["x ***"], "my_secret": "***", "access_key_id": "", "tokens": 5, "deep": {"api_key": "***"},
    }  # fmt: skip


# ---- one run on two ranks that is killed and resumed


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """Return the folder of a run on two ranks with all trackers and planted secrets, which was killed and resumed."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    netrc = folder.parent / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {IN_NETRC}\n")
    env = {**SECRETS, "NETRC": str(netrc), "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder.parent / "trackio")}
    options = [
        "--steps", 60, "--save_every", 5, "--eval_every", 20, "--report_to", "wandb,tensorboard,trackio", "--run_name", "my run",
        "--run_group", f"https://me:{IN_URL}@host/a?token={IN_QUERY}", "--run_tags", "one", "two", "--output_dir", folder,
    ]  # fmt: skip
    command = [sys.executable, TRAINS, *options]
    limits = ["--hang_report_seconds", 300, "--hang_abort_seconds", 600]
    running = Running([[*command, "--step_seconds", 0.1, *limits]] * 2, rank_environments(2, **env))
    running.until("step 12/60")
    stop = lambda number, *ranks: [running.processes[rank].send_signal(number) for rank in ranks]
    deadline = time.monotonic() + 180
    while True:  # until steps after the last checkpoint will be repeated
        stop(signal.SIGSTOP, 1)  # rank 0 waits for it, while its trackers start and store what it has logged
        patience = time.monotonic() + 5
        while time.monotonic() < patience and not is_behind_its_checkpoint(folder) and has_steps_after_its_checkpoint(folder):
            time.sleep(0.05)
        stop(signal.SIGSTOP, 0)  # it cannot save meanwhile
        if is_behind_its_checkpoint(folder):
            break
        stop(signal.SIGCONT, 0, 1)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    services = psutil.Process(running.processes[0].pid).children(recursive=True)
    for process in running.processes:
        process.kill()
    killed = running.ended()
    assert not psutil.wait_procs(services, timeout=90)[1], "no process of a tracker outlives a killed rank"
    again = run_ranks(2, TRAINS, *options, "--resume", **env).well()
    (folder.parent / "output.txt").write_text(killed.text + again.text)
    wrong = run_ranks(1, TRAINS, "--output_dir", folder, "--resume", f"https://me:{IN_URL}@host/x", **env)
    assert wrong.codes == [2]
    assert "--resume https://***@host/x: " in wrong.text
    (folder.parent / "wrong.txt").write_text(wrong.text)
    return folder


def last_saved(folder: Path) -> int:
    return max([int(path.name[5:]) for path in folder.glob("step_*")], default=0)


def has_steps_after_its_checkpoint(folder: Path) -> bool:
    return last_step_of(folder / "log.jsonl") > last_saved(folder)


def is_behind_its_checkpoint(folder: Path) -> bool:
    """Return whether each tracker has stored a step after the newest checkpoint. Numbers that wait in a queue do not survive a kill.

    wandb's file has the name of a number in a row and in the summary.
    """
    saved = last_saved(folder)
    in_wandb = sum(path.read_bytes().count(b"train/loss") // 2 for path in folder.glob("wandb/*run-*/*.wandb"))
    return 0 < saved < min(in_wandb, last_step_in_trackio(folder.parent / "trackio"))


def last_step_in_trackio(folder: Path) -> int:
    for path in folder.glob("*.db"):
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute("SELECT max(step) FROM metrics").fetchone()[0] or 0
    return 0


def updates(folder: Path) -> list[dict]:
    return [event for event in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if event["event"] == "update"]


def last_logged(folder: Path) -> int:
    return updates(folder)[-1]["step"]


@functools.cache
def inspected(run: Path, *more: str) -> str:
    """Return what wandb's own reader prints about a run that has ended."""
    return subprocess.run(
        [BIN / "wandb", "leet", "inspect", *more, "--json", run], capture_output=True, text=True, check=True
    ).stdout


def history_of(run: Path) -> list[dict]:
    records = map(json.loads, inspected(run).splitlines())
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def test_a_killed_and_resumed_run_is_one_wandb_run_with_every_step(resumed):
    runs = sorted((resumed / "wandb").glob("offline-run-*"))
    assert len(runs) == 2, "each of the two processes has a folder"
    assert {run.name.rsplit("-", 1)[1] for run in runs} == {(resumed / "wandb_id.txt").read_text().strip()}
    rows = [history_of(run) for run in runs]
    assert rows[0][-1]["_step"] < rows[1][0]["_step"], "wandb would ignore the rows of the second process"
    losses = {row["step"]: row["train/loss"] for part in rows for row in part if "train/loss" in row}
    logged = {event["step"]: event["loss"] for event in updates(resumed)}
    assert losses == pytest.approx(logged), "every step is there"
    steps = [{row["step"] for row in part if "train/loss" in row} for part in rows]
    assert steps[0] & steps[1], "repeated steps are rows of their own"
    last = [row for row in rows[1] if "train/loss" in row][-1]
    assert {"train/lr", "train/grad_norm", "train/epoch", "speed/samples_per_second", "speed/step_seconds", "speed/slowest_rank",
            "speed/step_communication_seconds", "speed/slowest_rank_costs_seconds"} <= last.keys()  # fmt: skip
    described = json.loads(inspected(runs[1], "--summary"))
    require_golden("wandb", {"rows": sorted({name for row in rows[1] for name in row}), "summary": sorted(described["summary"])})
    assert [row["step"] for row in rows[1] if "eval/loss" in row][-2:] == [40, 60]
    assert [row["checkpoints/newest_step"] for row in rows[1] if "checkpoints/count" in row][-1] == 60

    assert described["name"] == "my run"
    assert described["config"]["global_batch_size"] == 8
    assert described["config"]["run"]["versions"]["torch"]
    assert len(described["config"]["run"]["ranks"]) == 2
    assert described["summary"]["best/loss"] == pytest.approx(min(row["eval/loss"] for row in rows[1] if "eval/loss" in row))
    assert described["summary"]["eval/loss"] == pytest.approx([row["eval/loss"] for row in rows[1] if "eval/loss" in row][-1])
    assert '"step_metric":"step"' in inspected(runs[1]).replace(" ", ""), "the x axis of every panel"
    record = inspected(runs[1]).splitlines()[1]
    assert json.loads(record)["run"]["tags"] == ["one", "two"]
    listed = subprocess.run([BIN / "wandb", "sync", "--dry-run", *runs], capture_output=True, text=True, check=True, cwd=resumed)
    assert "Would sync 2 run(s)" in listed.stdout + listed.stderr


def test_tensorboard_and_trackio_have_every_step_of_a_killed_and_resumed_run(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = {event["step"]: event["loss"] for event in updates(resumed)}
    (folder,) = {path.parent for path in resumed.rglob("*tfevents*") if path.parent.parent == resumed}
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    points = board.Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 61)), "each step once: repeated ones replace the earlier ones"
    assert {point.step: point.value for point in points} == pytest.approx(losses, rel=1e-5)
    assert {"train/lr", "speed/step_forward_seconds", "eval/loss", "checkpoints/count"} <= set(board.Tags()["scalars"])

    command = [BIN / "trackio", "get", "metric", "--project", "accel_ddp", "--run", "my run", "--metric", "train/loss", "--json"]
    env = clean_environment(TRACKIO_DIR=str(resumed.parent / "trackio"))
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert {point["step"]: point["value"] for point in json.loads(printed)["values"]} == pytest.approx(losses, rel=1e-6)


def test_planted_secrets_are_in_no_file_of_the_run_and_not_in_its_output(resumed):
    planted = [*SECRETS.values(), IN_NETRC, IN_URL, IN_QUERY]
    files = [path for path in resumed.parent.rglob("*") if path.is_file() and path.name != "netrc"]
    assert {".wandb", ".db", ".jsonl", ".json", ".txt"} <= {path.suffix for path in files}
    found = [(secret, path) for path in files for secret in planted if secret.encode() in path.read_bytes()]
    assert not found
    assert "https://***@host/a?token=***" in (resumed / "config.json").read_text()


# ---- bad trackers

PLANTED = {  # packages that Accelerate imports
    "trackio/__init__.py": "import time\ndef init(**_):\n    time.sleep(3600)\n",
    "mlflow/__init__.py": "",
    "dvclive/__init__.py": """
import time
class Live:
    def log_params(self, values): pass
    def log_metric(self, *_, **__): time.sleep(3600)
""",
    "dvclive/plots.py": "class Metric:\n    could_log = staticmethod(lambda value: True)\n",
    "swanlab/__init__.py": """
import atexit, threading, time
config = {}
class Run:
    def log(self, values, step, **_): print(f"swanlab has step {step}", flush=True)
    def finish(self):
        threading.Thread(target=time.sleep, args=(3600,)).start()
        time.sleep(3600)
def init(**_):
    atexit.register(time.sleep, 3600)
    return Run()
""",
}


@pytest.fixture
def planted(tmp_path) -> str:
    """Return a PYTHONPATH with packages of trackers that hang or fail."""
    for name, text in PLANTED.items():
        (tmp_path / "planted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "planted" / name).write_text(text)
    return f"{tmp_path / 'planted'}:{ROOT}"


@pytest.mark.slow
def test_a_stop_request_waits_at_most_ten_seconds_for_trackers_that_hang(planted, tmp_path):
    folder = tmp_path / "run"
    command = [
        sys.executable,
        TRAINS,
        "--steps",
        400,
        "--step_seconds",
        0.05,
        "--output_dir",
        folder,
        "--report_to",
        "trackio,dvclive",
    ]
    running = Running([command] * 2, rank_environments(2, PYTHONPATH=planted))
    running.until("step   3/400")
    running.processes[1].send_signal(signal.SIGTERM)
    ended = running.ended()
    assert ended.codes == [75, 75], ended.text
    assert "trackio did not finish within 10 s (start)" in ended.text
    assert ended.seconds < 25
    assert f"Step {last_logged(folder)} of 400 is saved" in ended.text


def test_trackers_that_hang_or_fail_neither_stop_a_run_nor_its_exit(planted, tmp_path):
    """trackio hangs at its start, mlflow fails, dvclive hangs in a row, swanlab hangs at its end, and wandb's server is silent."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=100)  # it accepts connections and never answers
    env = {
        "PYTHONPATH": planted, "WANDB_API_KEY": SECRETS["WANDB_API_KEY"], "WANDB_INIT_TIMEOUT": "2",
        "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
    }  # fmt: skip
    folder = tmp_path / "run"
    options = ["--steps", 40, "--step_seconds", 0.1, "--tracker_wait", 15, "--output_dir", folder]
    running = Running(
        [[sys.executable, TRAINS, *options, "--report_to", "trackio,mlflow,dvclive,swanlab,wandb"]], [clean_environment(**env)]
    )
    main = psutil.Process(running.processes[0].pid)
    running.until("step  1/40")
    started = {}
    while running.processes[0].poll() is None and not any("wandb" in command for command in started.values()):
        for process in main.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                started[process] = " ".join(process.cmdline())
        time.sleep(0.1)
    assert any("wandb" in command for command in started.values())
    ended = running.ended().well()
    silent.close()
    assert len(updates(folder)) == 40
    assert "mlflow: tracking has failed (start): AttributeError" in ended.text
    assert "waiting up to 15 s for trackio and dvclive and swanlab" in ended.text
    for name, doing in {"trackio": "start", "dvclive": "log", "swanlab": "finish"}.items():
        assert f"{name} did not finish within 15 s ({doing})" in ended.text
    assert "swanlab has step 40" in ended.text, "a tracker that hangs does not delay the others"
    assert "wandb cannot log to its server" in ended.text
    assert f"Upload it later with: wandb sync {folder}/wandb/*run-*-" in ended.text
    (run,) = (folder / "wandb").glob("offline-run-*")
    assert sum("train/loss" in row for row in history_of(run)) == 40, "nothing is lost while wandb waits for its server"
    assert "Traceback" not in ended.text
    _, alive = psutil.wait_procs(list(started), timeout=90)
    assert not alive, "no process of a tracker outlives the run"


@pytest.mark.parametrize("how", ["SIGUSR2", "SIGTERM"])
def test_wandb_has_all_steps_although_every_process_of_a_rank_receives_the_signal(tmp_path, how):
    """Slurm sends signals to every process.

    SIGTERM ends the service process of wandb, which installs its own handler. The log of wandb is then incomplete, the run reports
    this, and log.jsonl is complete.
    """
    folder = tmp_path / "run"
    options = ["--output_dir", folder, "--step_seconds", 0.1, "--steps", 5000, "--report_to", "wandb"]
    running = Running([[sys.executable, TRAINS, *options, "--num_workers", 2]], rank_environments(1))
    main = psutil.Process(running.processes[0].pid)
    running.until("step    2/5000")
    deadline = time.monotonic() + 180
    while not list(folder.glob("wandb/*run-*/*.wandb")):  # wandb starts in a thread
        assert time.monotonic() < deadline
        time.sleep(0.1)
    commands = {}
    for process in main.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that wandb has started for a moment
            commands[process] = " ".join(process.cmdline())
    assert any("wandb" in command for command in commands.values()), commands
    assert len(commands) >= 3, "wandb and two data workers"
    for process in [*commands, main]:  # main is last: it may end before the others receive the signal
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.Signals[how])
    ended = running.ended()
    assert ended.codes == [75], ended.text
    assert ("tracking has failed" in ended.text) == (how == "SIGTERM")
    stopped = last_logged(folder)
    assert len(updates(folder)) == stopped
    if how == "SIGUSR2":
        (run,) = (folder / "wandb").glob("offline-run-*")
        assert sum("train/loss" in row for row in history_of(run)) == stopped


# ---- tables, images and the exported model


def test_tables_images_and_the_model_are_in_the_trackers(tiny_model, cache, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = [f"{('a fine film', 'a dull film')[i % 2]} number {i},{('good', 'bad')[i % 2]}" for i in range(40)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    folder = tmp_path / "run"
    ended = run_ranks(
        1, ROOT / "recipes" / "classify.py", "--model", tiny_model, "--train_file", tmp_path / "train.csv", "--eval_file",
        tmp_path / "train.csv", "--steps", 4, "--eval_every", 2, "--log_every", 1, "--global_batch_size", 8, "--log_predictions", 2,
        "--output_dir", folder, "--report_to", "wandb,tensorboard,trackio", "--log_model",
        TRACKIO_DIR=str(tmp_path / "trackio"),
    ).well()  # fmt: skip
    assert "tracking has failed" not in ended.text
    (run,) = (folder / "wandb").glob("offline-run-*")
    with_tables = [item for item in history_of(run) if "tables/confusion._type" in item]
    assert [item["step"] for item in with_tables] == [0, 2, 4]
    last = with_tables[-1]
    assert last["tables/confusion._type"] == "table-file"
    stored = json.loads((run / "files" / last["tables/confusion.path"]).read_text())
    assert stored["columns"][1:] == ["bad", "good"]
    assert sum(sum(line[1:]) for line in stored["data"]) == 40, "the rows of the evaluation"
    assert (run / "files" / last["tables/confusion_image.path"]).read_bytes().startswith(b"\x89PNG")
    assert {"tables/classes._type", "tables/predictions._type"} <= last.keys()
    records = inspected(run)
    assert f"model-{(folder / 'wandb_id.txt').read_text().strip()}" in records, "the artifact"
    assert "model.safetensors" in records

    (logs,) = {path.parent for path in folder.rglob("*tfevents*") if path.parent.parent == folder}
    board = EventAccumulator(str(logs)).Reload()
    assert [event.step for event in board.Images("tables/confusion")] == [0, 2, 4]
    texts = [tensor.tensor_proto.string_val[0].decode() for tensor in board.Tensors("tables/classes/text_summary")]
    assert "| good |" in texts[-1]
    assert list((tmp_path / "trackio").rglob("*.png")), "trackio has the image"
