"""Options: precedence, words for mistakes, and the arithmetic of batches."""

import dataclasses
import inspect
from dataclasses import dataclass

import pytest

from accel_ddp.config import RecipeConfig, TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.parsing import parse_config


@dataclass(kw_only=True)
class Config(TrainConfig):
    name: str = "x"  # a field of the recipe


def parsed(*argv: str) -> Config:
    return parse_config(Config, list(argv))


def test_the_command_line_beats_the_file_and_the_file_beats_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "lr: 3e-4\nsteps: 7\ntf32: false\nfreeze: [embeddings, layer.0]\nmixed_precision: no\npacking: off\ncompile: on\nname:\n"
    )
    cfg = parsed("--config", str(file), "--steps", "9")
    assert (cfg.lr, cfg.steps, cfg.tf32, cfg.freeze, cfg.mixed_precision) == (3e-4, 9, False, ("embeddings", "layer.0"), "no")
    assert (cfg.packing, cfg.compile) == ("off", "on"), "which YAML reads as false and true"
    assert parsed("--steps", "9", f"--config={file}").steps == 9, "wherever the file stands"
    assert parsed().lr == TrainConfig().lr


def test_every_option_says_what_it_is():
    """A comment that the formatter has moved to another line is not in the help."""
    for cls in (TrainConfig, RecipeConfig):
        lines = inspect.getsource(cls).splitlines()
        for name in set(cls.__annotations__) & {field.name for field in dataclasses.fields(cls)}:
            (line,) = [line for line in lines if line.startswith(f"    {name}: ")]
            assert "  # " in line, line


def test_switches_can_be_written_as_people_write_them():
    assert parsed("--tf32", "false").tf32 is parsed("--no_tf32").tf32 is False
    assert (
        parsed("--gradient_checkpointing").gradient_checkpointing
        is parsed("--gradient-checkpointing", "True").gradient_checkpointing
        is True
    )
    assert parsed("--broadcast_buffers", "true").broadcast_buffers is True
    assert parsed("--resume").resume == parsed("--resume", "--steps", "3").resume == "auto"
    assert parsed("--resume", "runs/a/step_00000003").resume == "runs/a/step_00000003"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("learning_rat: 3", "unknown option 'learning_rat'"),
        ("stepz: 3", "Did you mean 'steps'"),
        ("tf32: maybe", "should be true or false"),
        ("lr: [1, 2]", "is a list"),
        ("lr: {a: 1}", "has lines below it"),
        ("- a", "must be lines of `option: value`"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, line, words):
    file = tmp_path / "run.yaml"
    file.write_text(line)
    with pytest.raises(UserError, match=words):
        parsed("--config", str(file))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "nowhere.yaml"], "no such file"),
        (["--config"], "needs a file"),
        (["--global_batch_size", "0"], "must be 1 or more"),
        (["--lr", "nan"], "must be 0 or more"),
        (["--epochs", "0"], "more than 0"),
        (["--epochs", "inf"], "more than 0"),
        (["--warmup_ratio", "3"], "from 0 to 1"),
    ],
)
def test_a_value_that_cannot_be_is_named(argv, words):
    with pytest.raises(UserError, match=words):
        parsed(*argv)


@pytest.mark.parametrize("argv", [["--stepz", "3"], ["--steps", "many"], ["--optimizer", "adam"]])
def test_the_parser_ends_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(*argv)
    assert end.value.code == 2
    assert {"--stepz": "--steps", "--steps": "many", "--optimizer": "adamw"}[argv[0]] in "".join(capsys.readouterr())


def test_batches_are_split_or_the_nearest_sizes_are_named():
    assert Config(global_batch_size=128, micro_batch_size=8).split(8) == (8, 2)
    assert Config(global_batch_size=16, micro_batch_size=16).split(4) == (4, 1), "the batch is smaller than what fits"
    with pytest.raises(UserError, match="96 or 104"):
        Config(global_batch_size=100, micro_batch_size=4).split(8)
    with pytest.raises(UserError, match="micro_batch_size 4 or 6"):
        Config(global_batch_size=24, micro_batch_size=5).split(2)


def test_epochs_become_steps_and_no_item_is_dropped():
    assert Config(epochs=3, global_batch_size=32).total_steps(101) == 10  # 303 items in 9.5 batches
    assert Config(epochs=0.5, global_batch_size=10).total_steps(100) == 5
    assert Config(epochs=1, steps=7).total_steps(10**6) == 7


def test_learning_rates_are_functions_of_the_step():
    from accel_ddp.training.optim import lr_at

    def rates(**options):
        return [lr_at(step, Config(lr=1.0, **options), 10) for step in range(10)]

    assert rates(lr_schedule="constant") == [1.0] * 10
    assert rates(lr_schedule="linear") == pytest.approx([1 - s / 10 for s in range(10)])
    assert rates(lr_schedule="linear", warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates(warmup_ratio=0.4) == rates(warmup_steps=4)
    cosine = rates(lr_schedule="cosine")
    assert cosine[0] == 1
    assert cosine[5] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
