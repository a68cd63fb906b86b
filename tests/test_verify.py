"""Tests of `accel-ddp verify` on a recipe that keeps the promises, and on one that does not."""

import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from accel_ddp.errors import UserError
from accel_ddp.records.run_log import LogWriter
from accel_ddp.saving import checkpoint_format, pieces
from accel_ddp.saving.pieces import is_identical, largest_difference
from accel_ddp.verify import RECORDED, VerifiedRun, _compare_scales
from accel_ddp.verify import verify as run_verify
from tests.conftest import BIN, PROGRAMS, ROOT, clean_environment, free_port, run_all, two_node_commands

TRAINS = PROGRAMS / "trains.py"
SFT = ROOT / "recipes" / "sft.py"


def verify(*arguments: object) -> list:
    """Return the command."""
    return [BIN / "accel-ddp", "verify", *arguments]


@pytest.mark.slow  # in CI, tests/test_docs.py runs `verify` on a correct recipe
def test_verify_fails_on_a_wrong_recipe_and_prints_the_reason():
    """A loss that is the mean of each micro-batch, instead of the sum, depends on the micro-batch size."""
    environment = clean_environment(OMP_NUM_THREADS="1")
    wrong = run_all([verify(TRAINS, "--wrong", "mean", "--allow_inexact")], [environment])
    assert wrong.codes == [1]
    assert wrong.text.count("PASS") == 2, "another number of ranks and a resume after a kill give the same result"
    assert "48 of 48 the same" in wrong.text
    assert "FAIL: micro-batch 1 and 2: " in wrong.text
    assert wrong.text.count("FAIL: ") == 1, "the assignment of micro-batches to ranks does not change the result"
    count = run_all([verify(TRAINS, "--wrong", "count", "--allow_inexact")], [environment])
    assert count.codes == [1]
    assert "FAIL: micro-batch 1 and 2: `count` adds up to 8 and 4 items in step 1." in count.text
    assert count.text.count("PASS") == 2
    commands = [verify(TRAINS, "--lr", "much"), verify("nowhere.py"), verify(), verify(TRAINS, "--wrong", "mean")]
    broken = run_all(commands, [environment] * 4)
    assert broken.codes == [2, 2, 2, 2]
    assert "the run 'killed' exited with code 2, 2: there is no checkpoint" in broken.texts[0]
    assert "no such file" in broken.texts[1]
    assert "needs a recipe" in broken.texts[2]
    assert "it is the mean of theirs. Return the sum" in broken.texts[3]
    assert "Traceback" not in broken.text


def test_a_recorded_recipe_runs_as_if_it_was_started_itself(tmp_path):
    """Items are recorded as soon as the recipe reads them from the stream, also in data workers. A trial batch is not recorded."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("""
import pathlib, sys
if __name__ == "__main__":
    assert "torch" not in sys.modules, "the recorder has imported torch before the recipe"
    import torch
    from accel_ddp.training.stream import TrainBatches, _SeededItems
    assert __file__ == sys.argv[0] and sys.argv[1:] == ["--lr", "1"], sys.argv
    assert sys.path[0] == str(pathlib.Path(__file__).parent), sys.path
    batches = TrainBatches([10, 20, 30, 40], list)
    _SeededItems(batches.dataset, 0).__getitems__([(0, 3)])
    keys, workers = [[(0, 1), (1, 3)], [(2, 0)]], {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert list(torch.utils.data.DataLoader(batches.items(0), batch_sampler=keys, collate_fn=list, **workers)) == [[20, 40], [10]]
""")
    record = tmp_path / "record"
    record.mkdir()
    subprocess.run([sys.executable, RECORDED, record, recipe, "--lr", "1"], env=clean_environment(RANK="1"), check=True)
    (file,) = record.iterdir()
    assert file.name.startswith("1-")
    assert file.read_text() == "0 1\n1 3\n2 0\n"


def test_a_weight_that_is_not_a_number_is_the_largest_difference(tmp_path):
    for name, values in (("a", [1.0, 2.0, 3.0]), ("b", [1.5, float("nan"), 3.0])):
        (tmp_path / name).mkdir()
        save_file({str(i): torch.tensor([value]) for i, value in enumerate(values)}, tmp_path / name / checkpoint_format.MODEL)
    difference, name = largest_difference(tmp_path / "a", tmp_path / "b")
    assert (math.isnan(difference), name) == (True, "1")


def test_a_sharded_checkpoint_is_compared_with_a_whole_one(tmp_path):
    whole = {"weight": torch.arange(6.0).reshape(3, 2), "scale": torch.tensor(2.0)}
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / checkpoint_format.MODEL)
    for name, last in (("same", 0.0), ("other", 0.5)):
        folder = tmp_path / name / checkpoint_format.PIECES[checkpoint_format.MODEL]
        folder.mkdir(parents=True)
        parts = [{"weight": whole["weight"][:2], "scale": whole["scale"]}, {"weight": whole["weight"][2:] + last}]
        for rank, part in enumerate(parts):
            offsets = {key: [2 * rank, 0] if key == "weight" else [] for key in part}
            pieces.write_file(folder / pieces.file_name(rank), part, pieces.describe(offsets))
    same, other = tmp_path / "same", tmp_path / "other"
    assert largest_difference(tmp_path / "whole", same)[0] == 0
    assert largest_difference(same, other) == (0.5, "weight")
    assert is_identical(tmp_path / "whole", same, checkpoint_format.MODEL)
    assert not is_identical(same, other, checkpoint_format.MODEL)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"loss": 2.0001}, ""),
        ({"items": 16}, "`count` adds up to 16 and 8 items in step 1"),
        ({"loss": 4.0}, "the mean loss of step 1 is 4 and 2"),
        ({"grad_norm": 15.0}, "the gradient norm before clipping of step 1 is 15 and 30"),
    ],
)
def test_a_wrong_scale_is_found_although_gradients_are_clipped(tmp_path, other, words):
    runs = []
    for name, changed in (("one", {}), ("other", other)):
        log = LogWriter(tmp_path / f"{name}.jsonl")
        log.write("update", 1, **{"loss": 2.0, "grad_norm": 30.0, "items": 8, **changed})
        log.write("update", 2, loss=1.0, grad_norm=20.0 if name == "one" else 22.0, items=8)
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.jsonl").rename(tmp_path / name / "log.jsonl")
        runs.append(VerifiedRun(tmp_path / name / "step_00000002", {"precision": "no"}, {}))
    found = _compare_scales(*runs)
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_verify_refuses_fsdp_beside_a_config():
    with pytest.raises(UserError, match=r"Leave --fsdp out, and use --config_file accelerate_configs/fsdp.yaml"):
        run_verify(["--config_file", "2node.yaml", str(TRAINS)], 6, "", True)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "allowed"), [("no", "1e-05"), ("bf16", "2e-04")])
def test_verify_compares_sharded_models(precision, allowed):
    """Many CPUs are slow in bfloat16, and so there are few tokens."""
    few = ["--global_batch_size", 4, "--max_length", 16, "--max_train_items", 64, "--max_eval_items", 4]
    command = verify("--fsdp", "--steps", 4, SFT, *few, "--mixed_precision", precision)
    ended = run_all([command], [clean_environment()], timeout=1200)
    assert ended.codes == [0], ended.text
    rows = [line for line in ended.text.splitlines() if line.endswith("PASS")]
    for row, beginning in zip(
        rows,
        ["2 ranks and 1 rank", "FSDP on 2 ranks and 1 rank", "2 copies (HSDP) on 4 ranks and 1 rank", "FSDP until step 2, then DDP",
         "DDP until step 2, then FSDP", "another text in a row", "FSDP, killed at step "],
        strict=True,
    ):  # fmt: skip
        assert row.startswith(beginning), row
    assert f"Weights may differ by at most {allowed}" in ended.text


@pytest.mark.slow
def test_verify_uses_the_accelerate_config_of_fsdp():
    command = verify(
        "--config_file", "accelerate_configs/fsdp.yaml", "--num_processes", 2, "--main_process_port", free_port(), SFT
    )
    ended = run_all([command], [clean_environment()], timeout=900)
    assert ended.codes == [0], ended.text
    assert "FSDP on 2 ranks and 1 rank" in ended.text
    assert "FSDP, killed at step" in ended.text


@pytest.mark.slow
def test_verify_prints_in_one_line_that_a_recipe_cannot_be_sharded():
    ended = run_all([verify("--fsdp", ROOT / "recipes" / "images.py")], [clean_environment()])
    assert ended.codes == [2]
    (line,) = [line for line in ended.text.splitlines() if not line.startswith("running: ")]
    assert "--model mini-resnet: the accelerate config asks for FSDP" in line
    assert "1node.yaml" in line


@pytest.mark.slow
def test_verify_on_two_nodes():
    """Both commands differ only in --machine_rank, as with `accelerate launch`. The nodes do not share a folder."""
    commands, environments = two_node_commands(TRAINS)
    ended = run_all([verify(*command) for command in commands], environments)
    assert ended.codes == [0, 0], ended.text
    assert ended.texts[0].count("PASS") == 3, ended.texts[0]
    assert "The table is printed on node 0" in ended.texts[1]
