"""All ranks end together: with or without `run`, by a hook of one rank, with a disk that hangs, and without finite gradients."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, free_port, rank_environments, run_all, run_ranks

ENDINGS = PROGRAMS / "endings.py"


def test_a_program_without_run_ends_normally_on_every_rank_and_a_hook_of_one_rank_ends_the_run_on_all(tmp_path):
    """Rank 0 ends 4 s after rank 1, which must not be taken for dead. Hooks and metrics exist on rank 0 only. Both close the group."""
    ended = run_ranks(2, ENDINGS, "--output_dir", tmp_path / "run").well()
    for rank, text in enumerate(ended.texts):
        assert f"rank {rank} ended its runs after the steps [0, 2, 6]" in text
        assert f"rank {rank} has 0 models in memory" in text, "the memory of a GPU is free for what follows"
        first, last = re.findall(r"there are (\d+) threads of gloo", text)
        assert int(first) > int(last) == 0, "threads may abort an interpreter that ends"
    assert "rank 0 ends" in ended.texts[0]
    assert "died" not in ended.text
    assert "error" not in ended.text
    assert "Traceback" not in ended.text


def test_an_exception_in_a_program_without_run_is_reported_to_the_other_ranks(tmp_path):
    ended = run_ranks(2, ENDINGS, "--how", "raise", "--output_dir", tmp_path / "run")
    assert ended.codes == [1, 1], ended.text
    assert "error: RANK_FAILED: rank 1 (" in ended.text
    assert "at step 4, in forward: ValueError: a bug in the user's loss" in ended.text
    assert ended.text.count("Traceback") == 1
    assert "died" not in ended.text
    ended = run_ranks(2, ENDINGS, "--how", "user error", "--output_dir", tmp_path / "run2")
    assert ended.codes == [2, 2], ended.text
    assert ended.text.count("error: a mistake of the user") == 1
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("uses_run", ["--uses_run", pytest.param("--no-uses_run", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_in_the_middle_with_code_0_is_reported_at_once(tmp_path, uses_run):
    ended = run_ranks(2, ENDINGS, "--how", "leave", uses_run, "--hang_report_seconds", 240, "--output_dir", tmp_path / "run")
    assert ended.codes == [1, 1], ended.text
    assert re.search(
        r"^error: RANK_FAILED: rank 1 \(\S+, pid \d+\) left at step 4, in forward, with code 0, before", ended.text, re.M
    )
    assert "DEADLOCK" not in ended.text
    assert ended.seconds < 240, "it has waited for the other rank"
    if uses_run == "--no-uses_run":  # all ranks may leave together
        run_ranks(2, ENDINGS, "--how", "all leave", "--output_dir", tmp_path / "all").well()


def test_an_interactive_session_continues_after_an_exception(tmp_path):
    lines = [
        "import accel_ddp",
        f"accelerator = accel_ddp.start(accel_ddp.TrainConfig(output_dir={str(tmp_path / 'run')!r}))",
        "misspelt",
        "print('continues', 'here')",
    ]
    ended = subprocess.run(
        [sys.executable, "-i"],
        input="\n".join(lines) + "\n",
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "NameError: name 'misspelt' is not defined" in ended.stderr
    assert "continues here" in ended.stdout, ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_a_failure_is_reported_before_the_process_waits_for_a_disk_that_hangs(tmp_path):
    """Rank 0 fails while its writer waits for the disk. The test lets the disk answer after both ranks know of the failure."""
    command = [sys.executable, ENDINGS, "--uses_run", "--how", "stuck disk", "--output_dir", tmp_path / "run"]
    running = Running([command] * 2, rank_environments(2))
    running.until("error: RANK_FAILED: rank 0 (")
    running.processes[1].wait(180)  # rank 1 ends although the disk hangs
    running.until("is still being written to")
    assert running.processes[0].poll() is None, "rank 0 still waits for its save"
    disk = os.open(tmp_path / "run" / "fails" / ".evaluations.json.tmp", os.O_RDWR)
    ended = running.ended()
    assert '"loss": 1.0' in os.read(disk, 1000).decode()
    os.close(disk)
    assert ended.codes == [1, 1], ended.text
    assert "did not answer" not in ended.text


@pytest.mark.parametrize("uses_run", [True, False])
def test_a_process_that_failed_does_not_wait_forever_for_a_disk_that_hangs(tmp_path, uses_run):
    arguments = ["--uses_run"] * uses_run + ["--how", "stuck disk", "--ddp_timeout_seconds", 1, "--output_dir", tmp_path / "run"]
    ended = run_ranks(1, ENDINGS, *arguments)
    assert ended.codes == [1], ended.text
    error, limit = (ended.text.index(words) for words in ("error: RANK_FAILED: rank 0 (", "did not answer within 1 s"))
    assert error < limit


def test_a_run_whose_gradients_are_never_finite_ends_with_an_error_on_every_rank(tmp_path):
    """25 skipped steps in a row end the run. The first 7 of them are from before the stop."""
    arguments = [PROGRAMS / "overflow.py", "--steps", 100, "--micro_batch_size", 16, "--output_dir", tmp_path / "run"]
    ended = run_ranks(2, *arguments, "--finite_steps", 30, "--stop_after", 37)
    assert ended.codes == [75, 75], ended.text
    ended = run_ranks(2, *arguments, "--finite_steps", 0, "--resume")
    assert ended.codes == [2, 2], ended.text
    assert "step 55: the fp16 scaler has skipped the last 25 steps" in ended.text
    short = run_ranks(1, PROGRAMS / "overflow.py", "--steps", 4, "--finite_steps", 0, "--output_dir", tmp_path / "short")
    assert short.codes == [2], "a short run without any update is not a success"
    assert "step 4: the fp16 scaler has skipped the last 4 steps" in short.text


def test_torchrun_does_not_undo_a_stop_of_a_single_rank(tmp_path):
    """torchrun treats the exit code of a stop as a failure. Its wrapped rendezvous handler ends it."""
    command = [BIN / "torchrun", "--nproc_per_node", 1, "--max_restarts", 1, "--master_port", free_port(), PROGRAMS / "trains.py"]
    running = Running([[*command, "--step_seconds", 0.3, "--save_every", 100]], [clean_environment()], cwd=tmp_path)
    running.until("step  2/12")
    (folder,) = (tmp_path / "runs" / "trains").iterdir()
    (folder / "STOP").touch()
    ended = running.ended()
    assert ended.codes == [75]
    assert ended.text.count("stopped: requested by the file") == 1, "the ranks were started again"
    assert "the ranks are not restarted, because a stop was requested" in ended.text
    assert "resumed at step" not in ended.text
    (checkpoint,) = folder.glob("step_*")
    assert int(checkpoint.name[5:]) < 12


@pytest.mark.parametrize(
    ("given", "variables", "ranks", "expected"),
    [
        (0, {}, 1, 8),
        (0, {"OMP_NUM_THREADS": "1"}, 1, 1),
        (0, {"OMP_NUM_THREADS": "4,2"}, 2, 4),
        (0, {"MKL_NUM_THREADS": "1"}, 1, 1),
        (0, {"OMP_NUM_THREADS": "many"}, 2, 4),
        (0, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 1, 1),
        (0, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 2, 4),
        (0, {"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, 2, 3),
        (5, {"OMP_NUM_THREADS": "1"}, 2, 5),
    ],
)
def test_the_users_number_of_threads_is_respected_unless_a_launcher_has_set_it(monkeypatch, given, variables, ranks, expected):
    from accel_ddp.nodes import cores as threads

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert threads.choose_num_threads(given, ranks) == expected


def test_a_run_without_a_launcher_uses_the_threads_that_the_user_has_set(tmp_path):
    arguments = [PROGRAMS / "goes_wrong.py", "--steps", 1, "--output_dir"]
    ended = run_ranks(1, *arguments, tmp_path / "one", "--mixed_precision", "bf16", OMP_NUM_THREADS="1").well()
    assert "(CPU, 1 thread;" in ended.text
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert ("bf16 is slow on this CPU" in ended.text) == (not flags & {"bf16", "avx512f", "avx512bw"})
    ended = run_ranks(1, *arguments, tmp_path / "two", "--num_threads", 2, OMP_NUM_THREADS="1").well()
    assert "(CPU, 2 threads;" in ended.text


@pytest.mark.parametrize(
    "more", [[], pytest.param(["--num_cpu_threads_per_process", "1"], marks=pytest.mark.slow)], ids=["all", "one"]
)
def test_matrix_products_use_every_core_unless_the_user_has_set_the_threads(tmp_path, more):
    """`accelerate launch` sets one thread if the user has not set a number. A single rank needs no process group."""
    command = [BIN / "accelerate", "launch", "--config_file", ROOT / "accelerate_configs" / "local.yaml", *more]
    command += [PROGRAMS / "multiplies.py", "--output_dir", tmp_path / "run"]
    text = run_all([command], [clean_environment(OMP_NUM_THREADS=None)]).well().text
    cores = "1" if more else str(len(os.sched_getaffinity(0)))
    assert re.search(r"(\d+) threads of (\d+) have multiplied: DistributedType.NO", text).groups() == (cores, cores)


WAITS = """
import os, time
import torch.distributed as dist
from accel_ddp.errors import UserError
from accel_ddp.ranks import agreement
from accel_ddp.ranks.process import links, this_rank

class Counted:
    def __init__(self, store):
        self.store, self.asked = store, 0

    def check(self, keys):
        self.asked += 1
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)

is_first = this_rank.is_main
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, is_master=is_first, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=this_rank.rank, world_size=2)
links.store, links.slow_group = Counted(dist.PrefixStore("messages", store)), dist.group.WORLD
for number in range(6):
    assert agreement.broadcast_object(number if is_first else None) == number
kept = [number for number in range(1, 7) if links.store.check([f"wait/{number}/{this_rank.rank}"])]
with agreement.together("compare") as facts:
    facts["files"] = "the same"
links.store.asked = 0
if not is_first:
    store.wait(["waits"])
    time.sleep(2)
began = time.monotonic()
if is_first:
    store.set("waits", "")
agreement.broadcast_object(None)
print(f"kept {kept}, asked {links.store.asked} times in {time.monotonic() - began:.1f} s")
try:
    with agreement.together("compare") as facts:
        facts |= {} if is_first else {"the labels": "of rank 1 only"}
except UserError as error:
    print(f"differ: {error}, left: {links.store.check(['wait/7/facts'])}")
with agreement.together("outer") as facts:
    facts["files"] = "the same"
    with agreement.together("inner"):
        pass
outer = f"wait/{links.num_waits - 1}/{this_rank.rank}"
agreement.broadcast_object(None)
print(f"facts of the last wait: {links.store.check([outer])}")  # the other rank may still read them
try:
    with agreement.together("load"):
        if not is_first:
            time.sleep(1)
            raise UserError("this file is damaged")
except UserError as error:
    print(f"raised: {error}", flush=True)
    os._exit(0)  # at once, so that the other rank loses its connection
"""


def test_waits_leave_no_keys_and_ask_the_store_rarely_and_an_error_of_one_rank_reaches_all(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    ended = run_ranks(2, tmp_path / "waits.py").well()
    for text in ended.texts:
        assert "kept [5, 6]," in text
        assert "facts of the last wait: True" in text
        assert text.count("raised: this file is damaged") == 1
        assert re.search(r"differ: the labels on rank 1 \(.*\) differ from those on rank 0 .*, left: False", text), text
    asked, seconds = re.search(r"asked (\d+) times in (\S+) s", ended.texts[0]).groups()
    assert float(seconds) > 1.9
    assert 1 <= int(asked) < 40 * float(seconds), "100 times per second, if it asks every 10 ms"
