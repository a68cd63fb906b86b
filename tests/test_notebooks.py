"""Runs in the process of a notebook, and in processes that it forks. docs/notebooks.md describes them."""

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, clean_environment, free_port, run_all, run_ranks

FORKS = """
import sys
sys.path.insert(0, {programs!r})
import accel_ddp, trains
from accelerate import notebook_launcher
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
try:
    trains.main(accel_ddp.parse_config(trains.Config, ["--output_dir", trains.__file__]))
except accel_ddp.UserError as error:
    print("first:", error, flush=True)
for options in ("--stop_after 6", "--resume"):
    cfg = accel_ddp.parse_config(trains.Config, [*options.split(), "--output_dir", {folder!r}])
    try:
        notebook_launcher(trains.main, (cfg,), num_processes=2, use_port={port!r})
    except ChildFailedError as error:
        print("failed:", error, flush=True)
"""
INTERRUPTED = """
import os, pathlib, signal, threading, time
def interrupt():
    while not [*pathlib.Path("long").glob("step_*")]:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
%run {trains} --steps 100000 --output_dir long
"""


def same_weights(one: Path, other: Path) -> bool:
    return (one / "step_00000012/model.safetensors").read_bytes() == (other / "step_00000012/model.safetensors").read_bytes()


@pytest.mark.slow
def test_notebook_launcher_has_the_result_of_a_launcher(tmp_path):
    """The parent has tried a run alone before it forks the ranks, and starts two more. It need not be a notebook."""
    code = FORKS.format(programs=str(PROGRAMS), folder=str(tmp_path / "run"), port=str(free_port()))
    ended = run_all([[sys.executable, "-c", code]], [clean_environment()], fresh=True).well()
    assert "RANK_" not in ended.text
    assert "first: --output_dir" in ended.text
    assert "stopped: requested by --stop_after. Step 6 of 12 is saved." in ended.text
    assert re.search(r"exitcode +: 75", ended.text)
    run_ranks(2, PROGRAMS / "trains.py", "--output_dir", tmp_path / "usual").well()
    assert same_weights(tmp_path / "run", tmp_path / "usual")


@pytest.mark.slow
def test_a_kernel_outlives_its_runs(tmp_path):
    """Needs `pip install ipykernel nbclient`."""
    nbclient, nbformat = (pytest.importorskip(name, reason="pip install ipykernel nbclient") for name in ("nbclient", "nbformat"))
    trains = PROGRAMS / "trains.py"
    cells = [
        f"%run {trains} --stepz 3", f"%run {trains} --stop_after 6 --output_dir run", f"%run {trains} --output_dir run",
        f"%run {trains} --resume --output_dir run", INTERRUPTED.format(trains=trains),
        f"%run {trains} --resume --output_dir long --stop_after 9",
    ]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": tmp_path}}).execute()
    texts = ["".join(out.get("text") or f"{out.ename}: {out.evalue}" for out in cell.outputs) for cell in notebook.cells]
    expected = [
        r"error: --stepz: there is no such option.*SystemExit: 2", r"stopped: .* Step 6 of 12 is saved.*SystemExit: 75",
        r"error: --output_dir run holds another run.*SystemExit: 2", r"resumed at step 6",
        r"stopped: requested by an interrupt of the notebook. Step \d+ of 100000 is saved.*SystemExit: 75", r"resumed at step \d+",
    ]  # fmt: skip
    for text, pattern in zip(texts, expected, strict=True):
        assert re.search(pattern, text, re.DOTALL), text
    run_ranks(1, trains, "--output_dir", tmp_path / "usual").well()
    assert same_weights(tmp_path / "run", tmp_path / "usual")
