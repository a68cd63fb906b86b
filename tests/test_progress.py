"""What a user sees of a running job: one live panel in a terminal, and plain lines elsewhere."""

import asyncio
import codecs
import io
import json
import os
import re
import signal
import sys
import time
import tty
from pathlib import Path

import pytest
from rich.cells import cell_len

from accel_ddp.config.option_values import BestMetric
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.step_numbers import Numbers, Pace, RankSample
from accel_ddp.launch.node_output import Console, Lines
from accel_ddp.nodes.terminal import BEGIN_FRAME, END_FRAME, ERASE_BELOW, SharedStream, without_controls
from accel_ddp.observe import display
from accel_ddp.observe.display import Terminal, TerminalStream
from accel_ddp.observe.progress import Progress, Renderer, State
from accel_ddp.phases import Timing
from tests.conftest import PROGRAMS, ROOT, fork_server, rank_environments
from tests.programs.noisy import LONG
from tests.terminals import UserTerminal

PANEL = ["╭────────╮", "│ row 1  │", "│ row 2  │", "│ row 3  │", "╰────────╯"]
SHOWN = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "", "CI": "", "NO_COLOR": "", "COLORTERM": ""}


@pytest.fixture
def user():
    terminal = UserTerminal()
    yield terminal
    terminal.close()


@pytest.fixture
def terminal(user):
    opened = Terminal(user.descriptor)
    yield opened
    opened.close(0)


def start(user: UserTerminal, ranks: int, output: Path, *words: object, **env: str) -> list:
    """Start tests/programs/noisy.py in the terminal."""
    script = [str(PROGRAMS / "noisy.py"), "--output_dir", str(output), *map(str, words)]
    environments = rank_environments(ranks, **{**SHOWN, **env})
    assert fork_server().fits(environments[0])
    return [fork_server().fork(script, one, ROOT, True, terminal=user.descriptor) for one in environments]


def end(processes: list) -> list[int]:
    try:
        return [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()


def joined(text: str) -> str:
    """Return the text without spaces and without the ends of rows, at which a terminal breaks long lines."""
    return "".join(text.split())


# -- the terminal ----------------------------------------------------------------------------------------------------------------


def test_lines_of_other_processes_appear_above_the_panel_completely_and_once(user, terminal):
    shared = SharedStream(open(os.dup(user.descriptor), "w", buffering=1))
    foreign = lambda text: os.write(user.descriptor, text.encode())
    for number in range(40):  # more lines than the screen has
        terminal.draw(PANEL)
        foreign(f"foreign {number:02d}\n")
        terminal.draw(PANEL)
        print(f"own {number:02d}", file=TerminalStream(terminal, io.StringIO()))
        print(f"rank {number:02d}\nsecond {number:02d} {LONG}\nthird {number:02d}", file=shared)
        foreign(f"{ERASE_BELOW}monitor {number:02d} {LONG}\n")
    foreign("begins")
    for _ in range(3):
        terminal.draw(PANEL)
    foreign(" and ends\n")
    terminal.draw(PANEL)
    rows = user.settle().rows()
    assert rows[-7:] == ["begins and ends", "", *PANEL]
    assert user.text.count("row 1") == 1
    for number in range(40):
        n = f"{number:02d}"
        expected = f"foreign {n} own {n} rank {n} second {n} {LONG} third {n} monitor {n} {LONG}"
        assert joined(user.text).count(joined(expected)) == 1, user.text


def test_the_panel_follows_the_size_of_the_terminal(user, terminal):
    for columns, lines in ((100, 24), (40, 10), (90, 40), (20, 8), (100, 24)):
        user.resize(columns, lines)
        assert terminal.size() == (columns, lines)
        terminal.draw([f"{'x' * (columns - 1)}"] * 4)
        terminal.print(f"at {columns}\n")
        terminal.draw([f"{'y' * (columns - 1)}"] * 4)
        user.settle()
        assert [row for row in user.rows() if "x" in row] == []
        assert user.rows()[-4:] == ["y" * (columns - 1)] * 4
    terminal.draw([])
    assert user.settle().rows()[-2:] == ["at 20", "at 100"]  # the emulator itself forgets rows when it becomes smaller


def test_a_terminal_that_is_not_read_blocks_neither_frames_nor_prints(user, terminal):
    stream = TerminalStream(terminal, io.StringIO())
    user.reads.clear()
    user.emulates = False
    time.sleep(0.1)
    began = time.monotonic()
    for number in range(5_000):
        print(f"line {number} {LONG}", file=stream)
        if number % 100 == 0:
            terminal.draw(PANEL)
    assert not terminal.flush(0.1)
    assert time.monotonic() - began < 60
    user.reads.set()
    assert terminal.flush(120)
    user.settle().emulates = True
    print("the end", file=stream)
    terminal.draw(PANEL)
    assert user.settle().rows()[-7:] == ["the end", "", *PANEL]
    assert f"line 100 {LONG}" in user.past
    assert f"line 4999 {LONG}" in user.past
    assert "(some output is missing here, because the terminal did not take it in time)" in user.past


def test_a_stream_beside_the_panel_writes_no_secrets(user, terminal, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "planted-password")
    stream = TerminalStream(terminal, io.StringIO())
    print("it is", "planted-password", "at https://me:hidden@example.com", file=stream)
    assert user.settle().rows() == ["it is *** at https://***@example.com"]


def test_bars_of_libraries_become_a_part_of_the_panel(user, terminal):
    from tqdm import tqdm

    stream = TerminalStream(terminal, open(os.dup(user.descriptor), "w"))
    seen = []
    for _ in tqdm(range(3), desc="outer", file=stream, mininterval=0):
        for _ in tqdm(range(3), desc="inner", file=stream, mininterval=0, leave=False):
            seen.append(terminal.bar)
            terminal.draw([terminal.bar])
        tqdm.write("a line", file=stream)
    print("\rmine 1", end="", file=stream)
    print("\rmine 2", file=stream)
    terminal.draw(PANEL)
    assert any(bar.startswith("inner:  67%|") for bar in seen)
    assert terminal.bar == ""
    assert user.settle().rows() == ["a line"] * 3 + ["mine 2", "", *PANEL]


# -- what `accel-ddp launch` forwards ----------------------------------------------------------------------------------------------


def test_frames_that_arrive_in_parts_reach_neither_a_log_nor_the_lines_of_other_ranks(user):
    reader, writer = os.openpty()
    tty.setraw(writer)
    source = Terminal(writer)
    stream = TerminalStream(source, io.StringIO())
    for text in ("\x1b[31mfirst\x1b[0m", "second"):
        source.draw(PANEL)
        print(text, file=stream)
    source.draw(PANEL)
    data = b""
    while data.count(END_FRAME.encode()) < 5:  # the kernel may pass them on in parts
        data += os.read(reader, 1 << 16)
    source.close(0), os.close(reader), os.close(writer)
    assert data.count(BEGIN_FRAME.encode()) == 5
    console = Console(open(os.dup(user.descriptor), "w"))
    for size in (5, 64, len(data)):
        lines, found, decoder = Lines(), [], codecs.getincrementaldecoder("utf-8")()
        for at in range(0, len(data), size):
            new = lines.add(data[at : at + size])
            console.show_terminal("node0", decoder.decode(data[at : at + size]), new)
            console.show("node1", 1, [f"other {size} at {at}"])
            found += new
        assert found == ["first", "second"]
    asyncio.run(console.wait_until_printed())
    text = user.settle().text
    for size in (5, 64, len(data)):
        for at in range(0, len(data), size):
            assert user.rows().count(f"[node1 rank 1] other {size} at {at}") == 1
    assert "first" in user.rows()
    assert "second" in user.rows()
    assert text.count("row 1") <= 1


# -- runs --------------------------------------------------------------------------------------------------------------------------


def test_two_ranks_in_one_terminal_show_every_message_once_and_one_panel(user, tmp_path):
    processes = start(user, 2, tmp_path / "run")
    assert end(processes) == [0, 0], user.text
    past = user.settle().past
    for pattern in (
        r"load +elapsed 0:\d\d",
        r"evaluate \d+% \(\d of 4 batches\)",
        r"train +step \d+/20 +epoch \d\.\d\d +elapsed 0:\d\d +left 0:\d\d",
        r"loss \d\S+ +grad \d\S+ +lr \d\S+ +\d\S+ samples/s",
        r"evaluation +error \S+ at step 10 +best \S+ at step 10",
        r"time per step \S+ ms +data \d+% +compute \d+% +communication \d+% +other \d+%",
        r"a bar: +\d+%",
    ):
        assert re.search(pattern, past), pattern
    text = user.text
    messages = [
        "from print", "UserWarning: from warnings", "from an early logger", f"long: {LONG}", "from a child", "from C",
        "begins and ends", "from tqdm.write", f"other rank: {LONG}", "other rank, first line", "other rank, second line",
        "other rank, third line", "step 10  evaluation: error", "step 20  evaluation: error", "trained",
    ]  # fmt: skip
    for message in messages:
        assert joined(text).count(joined(message)) == 1, f"{message}\n{text}"
    assert len(re.findall("╭─", text)) == len(re.findall("╰─", text)) == 1
    assert re.search(r"│ done +step 20/20 +epoch 1\.25", text)
    assert "a bar" not in text
    assert user.rows()[-1] == "trained"
    assert user.screen.cursor.x == 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    assert sum(line["event"] == "update" for line in log) == 20


@pytest.mark.parametrize("how", ["error", "Ctrl-C", "killed"])
def test_the_message_of_a_run_that_fails_is_the_last_thing_on_the_screen(user, tmp_path, how):
    (process,) = start(user, 1, tmp_path / "run", "--steps", 400, "--fails_at", 12 if how == "error" else 0)
    if how != "error":
        user.until(r"train +step \d+/400 ")
        os.kill(process.pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
    (code,) = end([process])
    last = {"error": "ValueError: a bug in this step", "Ctrl-C": "--resume --output_dir", "killed": "error: RANK_DIED: rank 0"}[
        how
    ]
    user.until(re.escape(last))
    rows = user.settle().rows()
    assert code == {"error": 1, "Ctrl-C": 75, "killed": -9}[how]
    panels = len(re.findall("╭─", user.text))
    assert panels == (how == "Ctrl-C"), user.text  # a stopped run leaves its last state
    assert "│" not in "".join(rows[-3:])
    assert (user.screen.cursor.x, user.screen.cursor.hidden) == (0, False)
    assert b"\x1b[?25l" not in user.raw
    assert b"\x1b[?1049h" not in user.raw


def test_a_run_does_not_wait_for_a_terminal_that_is_stopped(user, tmp_path):
    (process,) = start(user, 1, tmp_path / "run", "--steps", 200, "--step_seconds", 0, "--eval_every", 1000, "--prints", 40)
    user.until(r"step \d+/200 ")
    user.reads.clear()
    user.emulates = False
    is_done = lambda: '"end"' in (tmp_path / "run" / "log.jsonl").read_text()
    deadline = time.monotonic() + 180
    while not is_done():
        assert time.monotonic() < deadline, "training waits for the terminal"
        time.sleep(0.1)
    user.reads.set()
    assert end([process]) == [0]
    assert user.settle().past.rstrip().endswith("trained")
    assert "(some output is missing here" in user.past


def test_a_terminal_without_cursor_movement_shows_plain_lines(user, tmp_path):
    assert end(start(user, 1, tmp_path / "run", "--steps", 3, "--eval_every", 0, TERM="dumb")) == [0]
    assert "step 3/3  loss" in user.settle().text
    assert b"\x1b" not in user.raw


class NotebookStream(SharedStream):
    """As in ipykernel: the descriptor is that of the terminal in which Jupyter was started, but the text goes to the page."""

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({"JPY_PARENT_PID": "1"}, False),
        ({"CI": "true"}, False),
        ({"CI": "false"}, True),
    ],
)
def test_whether_there_is_a_panel(user, monkeypatch, variables, expected):
    for name, value in {**SHOWN, **variables}.items():
        monkeypatch.setenv(name, value)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, open(os.dup(user.descriptor), "w"))
    assert display.is_wanted() == expected
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not display.is_wanted()
    monkeypatch.setattr(sys, "stdout", NotebookStream(open(os.dup(user.descriptor), "w")))
    assert not display.is_wanted()
    with open(os.devnull, "w") as file:  # `> file`
        monkeypatch.setattr(sys, "stdout", file)
        assert not display.is_wanted()


def example() -> State:
    now = time.monotonic()
    state = State("runs/a/folder/with/a/long/name/ä", total_steps=90, began=now - 50, updated=now, steps_per_epoch=30)
    state.numbers, state.pace = Numbers(40, 1e-4, 0.5, 0.6, 32, 0, 0, 0.0, 0.5), Pace(12345.6, 7.0, 0.0, 0.4)
    state.metric, state.evaluations = BestMetric("accuracy", "max"), {20: {"accuracy": 0.7}, 40: {"accuracy": 0.6}}
    before, after = Timing(10, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), Timing(20, 2.0, 4.0, 6.0, 5.0, 6.0, 9.0)
    state.samples = [RankSample.of(before)], [RankSample.of(after)]
    return state


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [1, 20, 40, 60, 80, 200])
def test_a_panel_fits_into_every_terminal(columns, encoding):
    renderer = Renderer(encoding)
    for lines in (1, 3, 8, 30):
        rows = [without_controls(row) for row in renderer.rows(example(), columns, lines)]
        assert 1 <= len(rows) <= lines
        assert max(map(cell_len, rows)) <= max(columns - 1, 1)
    text = "\n".join(rows)
    if columns >= 20:
        for part in ("step 40/90", "epoch 1.33", "left 1:0", "loss 0.5000", "lr 1.00e-04", "12345.6 samples/s", "MFU 40.0%"):
            assert part in text
    if columns >= 60:
        for part in ("accuracy 0.6000 at step 40", "best 0.7000 at step 20", "time per step 1.10 s", "data 9%", "compute 55%"):
            assert part in text
    if encoding == "ascii":
        assert text.replace("ä", "").isascii()


def test_the_time_left_after_a_warm_up_in_the_middle_of_a_run_is_that_of_the_steps_after_it(capsys):
    progress = Progress(TrainConfig(log_every=10))
    progress.on_start(0, 1000, {})
    progress.state.began -= 7000
    progress.on_warm_up(500, 5.0)
    progress.state.began -= 10
    for step in (500, 510):  # on a GPU the numbers of step 500 arrive after the warm-up
        progress.on_update(Numbers(step, 1e-4, 0.5, 0.6, 32, 0, 0, 0.0, 0.5), Pace(1.0, 1.0, 0.0, 0.4))
    assert capsys.readouterr().out.splitlines()[-1].endswith("8:10 left")


def test_frames_use_little_time(user, monkeypatch):
    """The budget is part of the design: the slower a frame, the fewer are drawn."""
    for name, value in SHOWN.items():
        monkeypatch.setenv(name, value)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, open(os.dup(user.descriptor), "w"))
    shown = display.Display(TrainConfig(output_dir="runs/x"))
    try:
        shown.state = example()
        clock = time.pthread_getcpuclockid(shown.thread.ident)
        time.sleep(1)
        for _ in range(3):  # beside other processes, a single frame may take several times as long
            before = time.clock_gettime(clock)
            time.sleep(3)
            used = (time.clock_gettime(clock) - before) / 3
            if used < 0.004:
                break
    finally:
        shown.close(1)
    assert used < 0.004, f"{used:.2%} of a core"
    assert sys.stdout.fileno() >= 0, "the streams are restored"
