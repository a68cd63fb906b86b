"""log.jsonl and incidents.jsonl can be read while they are written, continue after a crash, and count every step once."""

import ast
import json
import re
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from accel_ddp.records import files, run_log
from accel_ddp.records.incidents import FILE, MOST_WAITING, Incident, IncidentWriter, read_incidents
from accel_ddp.records.run_log import LogWriter, last_step_of, last_step_of_attempt, read_log
from tests.conftest import ROOT
from tests.log_schema import CODES_PAGE, EVENTS, INCIDENT, PAGE, fields_of, require_fields


def attempt(path: Path, first: int, last: int, ends: bool = False) -> None:
    """Write what a run logs that continues from step `first` and is killed after step `last`."""
    writer = LogWriter(path)
    writer.write("start", first)
    for step in range(first + 1, last + 1):
        writer.write("update", step, loss=1.0 / step)
    if ends:
        writer.write("end", last)
    writer.close()


def test_steps_that_were_repeated_are_marked_and_counted_once(tmp_path):
    path = tmp_path / "log.jsonl"
    attempt(path, 0, 10)
    attempt(path, 4, 6)
    attempt(path, 5, 12, ends=True)  # steps 7 to 10 were logged by the first attempt only, and are repeated too
    marked = [(event["step"], event.get("repeated", False)) for event in files.read_objects(path) if event["event"] == "update"]
    assert marked == [(step, False) for step in range(1, 11)] + [(5, True), (6, True)] + [
        (step, step <= 10) for step in range(6, 13)
    ]
    events = read_log(path)
    assert [event["step"] for event in events if event["event"] == "update"] == list(range(1, 13))
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 4, 5]
    assert last_step_of(path) == 12
    assert last_step_of_attempt(path) == 12


@pytest.mark.parametrize("ending", ['{"event": "update", "step": 11, "lo', '{"event": "update", "step": 10}', '{"eve\xc3'])
def test_a_log_that_was_cut_in_the_middle_of_a_line_is_continued(tmp_path, ending):
    path = tmp_path / "log.jsonl"
    attempt(path, 0, 9)
    with path.open("ab") as file:
        file.write(ending.encode("latin-1"))
    is_complete = ending.endswith("}")
    assert last_step_of(path) == (10 if is_complete else 9)
    attempt(path, 8, 12)
    assert [event["step"] for event in read_log(path) if event["event"] == "update"] == list(range(1, 13))
    raw = path.read_bytes().splitlines()
    assert sum(files.parse(line) is None for line in raw) == (0 if is_complete else 1), "only the cut line cannot be read"


def test_evaluations_between_logged_steps_are_marked_as_repeated_too(tmp_path):
    path = tmp_path / "log.jsonl"
    for last in (8, 4, 12):
        writer = LogWriter(path)
        writer.write("start", 0)
        for step in range(0, last + 1, 4):
            writer.write("evaluate", step, loss=1.0)
        writer.close()
    assert last_step_of(path) == 12
    marked = [event["step"] for event in files.read_objects(path) if event.get("repeated")]
    assert marked == [4, 4, 8]


def test_an_event_after_one_that_a_full_disk_has_cut_is_complete(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = LogWriter(path)
    writer.write("update", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10_000, before[1]))  # bytes; the next event is cut there
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match=r"space left|too large"):
                writer.write("ranks", step, data=[0.5] * 5_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.write("update", 4)
    writer.write("update", 5)
    writer.close()
    assert [event["step"] for event in read_log(path)] == [1, 4, 5]


def test_the_end_of_a_log_of_2_gb_is_found_without_reading_the_log(tmp_path):
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # a sparse file, which takes no space
        file.seek(0, 2)
        file.write(b"\n")
        wide = {"event": "ranks", "step": 4000, "data": [0.123456] * 100_000}  # 1 MB, as with 7,000 ranks
        for event in ({"event": "update", "step": 4000}, wide, {"event": "update", "step": 3990, "repeated": True}, wide):
            file.write(json.dumps(event).encode() + b"\n")
    tracemalloc.start()
    began = time.process_time()
    assert last_step_of(path) == 4000
    assert last_step_of_attempt(path) == 4000
    assert time.process_time() - began < 2
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 3, 7, 64, 10_000])
def test_a_file_is_read_backwards_whatever_the_size_of_its_lines(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "CHUNK_BYTES", size)
    path = tmp_path / "log.jsonl"
    for ending in ("\n", "", "\n\n\n", '\n{"cut": '):
        path.write_text("\n".join(json.dumps({"n": n, "text": "é" * n}) for n in range(12)) + ending)
        assert list(files.read_objects_backwards(path)) == list(files.read_objects(path))[::-1]
    assert list(files.read_objects_backwards(tmp_path / "missing")) == []


def test_numbers_that_are_not_finite_are_strings_in_strict_json(tmp_path):
    writer = LogWriter(tmp_path / "log.jsonl")
    writer.write("update", 1, loss=float("nan"), grad_norm=float("inf"), ranks=[1.0, float("-inf")])
    writer.close()
    (event,) = read_log(tmp_path / "log.jsonl")
    assert (event["loss"], event["grad_norm"], event["ranks"]) == ("nan", "inf", [1.0, "-inf"])


def test_incidents_are_complete_lines_without_secrets_and_are_appended(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "swordfish-4711")
    (tmp_path / FILE).write_text('{"time": 1.5, "level": "info", "kind": "OLD", "text": "before", "new": 1}\n{"time": 2, "lev')
    writer = IncidentWriter()
    writer.write(Incident("error", "RANK_DIED", "key swordfish-4711\n  at https://me:secret@host/", 3, "node1", 7))
    assert len((tmp_path / FILE).read_text().splitlines()) == 2, "the folder is not known yet"
    writer.open(tmp_path)
    writer.write(Incident.parse("warning: LOSS_SPIKE: the loss is 9", step=8))
    writer.write(Incident.parse("Texts are padded", "FALLBACK"))
    writer.close()
    old, died, spike, fallback = read_incidents(tmp_path)
    assert (old.kind, old.time, old.rank, old.step) == ("OLD", 1.5, -1, -1)
    assert died[:6] == ("error", "RANK_DIED", "key ***\n  at https://***@host/", 3, "node1", 7)
    assert time.time() - 60 < died.time <= spike.time <= round(time.time(), 3)
    assert spike[:6] == ("warning", "LOSS_SPIKE", "the loss is 9", -1, "", 8)
    assert fallback[:3] == ("warning", "FALLBACK", "Texts are padded")
    assert "rank" not in json.loads((tmp_path / FILE).read_text().splitlines()[-1])


def test_incidents_are_written_when_a_removed_folder_exists_again(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_ddp.records.incidents.RETRY_SECONDS", 0.05)
    folder = tmp_path / "run"
    writer = IncidentWriter()
    writer.open(folder)
    for number in range(3):
        writer.write(Incident("warning", "OUTPUT_REMOVED", str(number)))
    time.sleep(0.2)
    folder.mkdir()
    deadline = time.monotonic() + 90
    while len(read_incidents(folder)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [incident.text for incident in read_incidents(folder)] == ["0", "1", "2"]


def test_a_queue_of_a_run_without_a_folder_does_not_grow():
    writer = IncidentWriter()
    for number in range(2 * MOST_WAITING):
        writer.write(Incident("warning", "A", str(number)))
    assert [incident.text for incident in writer.writer.waiting] == [
        str(number) for number in range(MOST_WAITING, 2 * MOST_WAITING)
    ]
    writer.close()


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "state.json"
    files.replace_file(path, "old", syncs=True)
    (tmp_path / ".state.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="space left"):
        files.replace_file(path, "new", syncs=True)
    with pytest.raises(FileExistsError):
        files.replace_file(path, "new", has_rivals=True, replaces=False)
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"], "a draft is left"
    assert path.read_text() == "old"
    files.replace_file(tmp_path / "first.json", b"new", has_rivals=True, replaces=False)
    files.replace_file(path, "ü", has_rivals=True)
    assert {one.name: one.read_text("utf-8") for one in tmp_path.iterdir()} == {"state.json": "ü", "first.json": "new"}


def test_a_background_writer_neither_waits_for_its_target_nor_ends_with_its_errors():
    answers, written = threading.Event(), []

    def write(item: object) -> None:
        answers.wait(60)
        if item == "broken pipe":
            raise BrokenPipeError
        written.append(item)

    writer = files.BackgroundWriter(write, "test", most=3)
    writer.start()
    writer.put("first")
    while writer.waiting:
        time.sleep(0.01)
    for item in ("dropped", 1, "broken pipe", 2):
        writer.put(item)
    assert writer.num_unwritten == 4
    assert not writer.close(0.01)
    answers.set()
    assert writer.close(60)
    assert written == ["first", 1, 2]
    assert isinstance(writer.failure, BrokenPipeError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_background_writer_that_has_failed():
    writer = files.BackgroundWriter(int, "test")
    writer.start()
    writer.put("not a number")
    assert writer.is_done.wait(60)
    writer.put("1")
    assert writer.num_unwritten == 0
    assert writer.close(60)


def test_the_page_describes_each_event_with_an_example():
    examples = [json.loads(line) for line in PAGE.read_text().split("## Example lines")[1].splitlines() if line.startswith("{")]
    for example in examples:
        require_fields(example, fields_of(example["event"]) if "event" in example else INCIDENT)
    events = {example.get("event", "incident") for example in examples}
    assert events == {*EVENTS, "incident"}
    assert events >= {*run_log.OF_STEPS, "start", "warm_up", "restart", "save", "end"}


def test_a_reader_that_follows_a_log_sees_complete_events_only_also_after_a_crash(tmp_path):
    """The function of docs/log.md reads while processes write, of which the first is killed in the middle."""
    code = re.search(r"^```python\n(import json, time\n.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    exec(code, scope := {})
    path = tmp_path / "log.jsonl"
    path.touch()
    write = """
import random, sys
from pathlib import Path
from accel_ddp.records.run_log import LogWriter
writer, first, last = LogWriter(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
writer.write("start", first)
for step in range(first + 1, last + 1):
    writer.write("update", step, values=[0.5] * random.choice([1, 100, 2000, 30_000]))
writer.write("end", last)
"""
    start = lambda first, last: subprocess.Popen([sys.executable, "-c", write, str(path), str(first), str(last)], cwd=ROOT)
    is_over = threading.Event()
    seen = []
    reader = threading.Thread(target=lambda: seen.extend(scope["follow"](path, is_over.is_set)), daemon=True)
    reader.start()
    killed = start(0, 100_000)
    while path.stat().st_size < 5e6:
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    reached = last_step_of(path)
    with path.open("ab") as file:
        file.write(b'{"event": "start", "step": 999, "batch": {"global": 8}')  # as a machine without power leaves it
    assert start(reached - 5, reached + 5).wait() == 0
    while last_step_of(path) < reached + 5 or len(seen) < sum(1 for _ in files.read_objects(path)):
        time.sleep(0.05)
    is_over.set()
    reader.join(60)
    assert seen == list(files.read_objects(path))
    assert [event["step"] for event in read_log(path) if event["event"] == "update"] == list(range(1, reached + 6))
    assert sum(event.get("repeated", False) for event in seen) == 5


def test_every_kind_of_incident_in_the_code_is_documented():
    kinds, page = set(), CODES_PAGE.read_text()
    for path in (ROOT / "accel_ddp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("record", "warn", "warn_on_main", "Event")
            ):
                values = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                kinds |= {value for value in values if re.fullmatch("[A-Z][A-Z_]+", value)}
    kinds |= set(re.findall(r'"([A-Z]+_[A-Z]+|[A-Z]{6,})"', (ROOT / "accel_ddp" / "watch" / "diagnosis.py").read_text()))
    assert kinds >= {"SKIPPED_STEP", "SAVE_FAILED", "OUTPUT_REMOVED", "RANK_HUNG", "DEADLOCK", "FALLBACK"}
    assert {kind for kind in kinds if f"`{kind}`" not in page} == set()
