"""Tests of the command `accel-ddp`: its subcommands, and how it starts a recipe."""

import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from accel_ddp import __version__, cli
from accel_ddp.errors import UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import launch_options
from accel_ddp.words import name_of
from tests.conftest import BIN, PROGRAMS, ROOT, SINGLE, Running, clean_environment, free_port, run_all

ACCEL_DDP = BIN / "accel-ddp"
CONFIGS = ROOT / "accelerate_configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Run the commands in a folder without recipes and configs."""
    monkeypatch.chdir(tmp_path)


def test_without_a_command_the_commands_are_listed(capsys):
    assert cli.main([]) == 2
    listed = capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == listed
    for name in ("recipes", "run", "copy", "doctor", "tune", "verify", "export"):
        assert f"\n  {name} " in listed


def test_the_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel-ddp {__version__}\n"


def test_launch_on_this_machine_checks_files_before_it_starts(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["launch", "accelerate_configs/clusters/local.yaml", "sft", "--train_file", "no.jsonl"]) == 2
    assert "error: --train_file no.jsonl: there is no such file (looked in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["doctr"], "Did you mean 'doctor'?"),
        (["unknown"], "The commands are: recipes, run,"),
        (["trian", "sft", "--steps", "2"], "Did you mean `accel-ddp run sft --steps 2`?"),
        (["sft", "--steps", "2"], "Did you mean `accel-ddp run sft --steps 2`?"),
        (["run", "clasify", "--steps", "2"], "Did you mean 'classify'?"),
        (["run", "--num_processes", "2", "clasify"], "Did you mean 'classify'?"),
        (["run", "--num_processes", "2"], "needs a recipe"),
        (["run", "unknown"], "'unknown' is not a recipe. The recipes are: classify,"),
        (["run", "kto"], "'kto' is not a recipe. Preferences are learned by `accel-ddp run dpo --loss kto`."),
        (["run", "--steps"], "needs a recipe"),
        (["run", "recipes/classify.py"], "there is no such file. To run the recipe that comes with accel_ddp, use `classify`."),
        (["run", "classify", "--num_processes"], "--num_processes needs a value"),
        (["run", "classify", "--num_processes", "two"], "--num_processes two: must be a whole number, 1 or more"),
        (["run", "--num-processes=0", "classify"], "--num_processes 0: must be a whole number, 1 or more"),
        (
            ["run", "classify", "--config_file", "3node"],
            "1node.yaml, 2node.yaml, 2node_fsdp.yaml, fsdp.yaml, local.yaml",
        ),
        (
            ["run", "--debug", "--resume", "--lr", "1e-4", "sft", "--steps", "2"],
            "--resume: options before the recipe are those of `accelerate launch`. "
            "Run: accel-ddp run --debug sft --steps 2 --resume --lr 1e-4\n",
        ),
        (["run", "--messages_column", "chat", "sft"], "Run: accel-ddp run sft --messages_column chat\n"),
        (
            ["run", "--max_restart", "3", "sft"],
            "--max_restart: `accelerate launch` has no such option. Did you mean --max_restarts?\n",
        ),
        (["copy", "clasify"], "Did you mean 'classify'?"),
    ],
)
def test_a_mistyped_argument_is_refused_with_a_suggestion(arguments, suggestion, capsys, monkeypatch):
    monkeypatch.setattr("os.execv", lambda *given: pytest.fail(f"started {given}"))
    assert cli.main(arguments) == 2
    assert suggestion in capsys.readouterr().err


def test_recipes_are_listed_with_the_first_line_of_their_docstrings(capsys):
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sys.path.insert(0, str(ROOT / "recipes"))
    for name in recipe_files.recipe_names():
        first_line = importlib.import_module(name).__doc__.splitlines()[0]
        assert any(line.startswith(f"{name} ") and line.endswith(f"  {first_line}") for line in lines)
    assert len(recipe_files.recipe_names()) >= 8


def test_a_reader_that_ends_early_causes_no_traceback(tmp_path):
    """The pipe is closed before the command writes, as `| head -0` may do."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "accel_ddp.cli", "recipes"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=clean_environment(), cwd=ROOT, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


LOCAL, ONE_NODE, TWO_NODES = (["--config_file", str(CONFIGS / f"{name}.yaml")] for name in ("local", "1node", "2node"))


@pytest.mark.parametrize(
    ("command_line", "launch", "options"),
    [
        ("classify", LOCAL, ""),
        ("classify --lr 1e-5 --mixed_precision bf16", LOCAL, "--lr 1e-5 --mixed_precision bf16"),
        ("classify --num_processes 2 --lr 1e-5", [*ONE_NODE, "--num_processes", "2"], "--lr 1e-5"),
        ("--num-processes=2 classify --lr 1e-5", [*ONE_NODE, "--num-processes=2"], "--lr 1e-5"),
        ("--debug classify --machine_rank 1 --steps 2", [*TWO_NODES, "--debug", "--machine_rank", "1"], "--steps 2"),
        ("classify --config_file 2node --steps 2", TWO_NODES, "--steps 2"),
        ("classify --config_file=2node.yaml", TWO_NODES, ""),
        ("classify --debug -- --steps 2 --gpu_ids 0", [*LOCAL, "--debug"], "--steps 2 --gpu_ids 0"),
    ],
)
def test_options_reach_the_launcher_or_the_recipe(command_line, launch, options):
    found, recipe, rest = cli.split_run(command_line.split())
    assert (cli.with_config(found), recipe, rest) == (launch, "classify", options.split())


@pytest.mark.parametrize("given", [["--gpu_ids", "1"], ["--gpu-ids=1"]])
def test_one_gpu_is_selected_without_accelerate_which_refuses_it(given, monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cli.main(["run", *given, "classify", "--steps", "2"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert not any("gpu" in word for word in started[0]), started
    cli.main(["run", "--gpu_ids", "0,1", "--num_processes", "2", "classify"])
    assert "0,1" in started[1]


def test_a_config_in_the_current_folder_takes_precedence_over_ours(tmp_path):
    (tmp_path / "local.yaml").write_text("num_processes: 1\n")
    assert cli.with_config(["--config_file", "local.yaml"]) == ["--config_file", "local.yaml"]


def test_recipes_have_no_option_that_describes_nodes():
    """`accel-ddp run` passes options that describe nodes to the launcher, also when they follow the recipe."""
    from accelerate.commands.launch import launch_command_parser

    sys.path.insert(0, str(ROOT / "recipes"))
    of_launcher = {name for action in launch_command_parser()._actions for name in action.option_strings if action.nargs is None}
    assert {f"--{name}" for name in cli.NODE_OPTIONS} <= of_launcher
    every = {name_of(name) for action in launch_command_parser()._actions for name in action.option_strings}
    assert every - {""} <= launch_options()
    for name in recipe_files.recipe_names():
        of_recipe = {field.name for field in dataclasses.fields(importlib.import_module(name).Config)}
        assert not of_recipe & set(cli.NODE_OPTIONS), name


def test_a_copy_contains_the_recipe_its_imports_and_the_configs(tmp_path, capsys):
    assert cli.main(["copy", "own_loop", "--to", "mine"]) == 0
    for name in ("recipes/own_loop.py", "recipes/classify.py", "accelerate_configs/2node.yaml", "accelerate_configs/node.env"):
        assert (tmp_path / "mine" / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (tmp_path / "mine" / "recipes" / "tag.py").exists()
    assert (
        "cd mine && accelerate launch --config_file accelerate_configs/local.yaml recipes/own_loop.py" in capsys.readouterr().out
    )


def test_a_copy_never_overwrites(tmp_path, capsys):
    edited = tmp_path / "recipes" / "classify.py"
    edited.parent.mkdir()
    edited.write_text("# mine\n")
    assert cli.main(["copy", "classify"]) == 2
    assert "recipes/classify.py exists and differs" in capsys.readouterr().err
    assert edited.read_text() == "# mine\n"
    assert not (tmp_path / "accelerate_configs").exists(), "a refused copy changes nothing"
    assert cli.main(["copy", "tag"]) == 0
    assert cli.main(["copy", "tag"]) == 0
    assert "unchanged: recipes/tag.py" in capsys.readouterr().out


def test_a_run_of_a_recipe_warns_of_an_edited_copy(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda program, arguments: started.append(arguments))
    cli.main(["copy", "classify"])
    cli.main(["run", "classify"])
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "recipes" / "classify.py").write_text("# mine\n")
    cli.main(["run", "classify"])
    assert "accel-ddp run recipes/classify.py" in capsys.readouterr().err
    cli.main(["run", "recipes/classify.py"])
    assert "warning" not in capsys.readouterr().err
    assert [str(ROOT / "recipes" / "classify.py") in arguments for arguments in started] == [True, True, False]


def test_the_help_of_a_recipe_does_not_import_torch():
    environment = clean_environment(PYTHONPROFILEIMPORTTIME="1")
    ended = run_all([[ACCEL_DDP, "run", "classify", "--help"]], [environment]).well()
    assert "--global_batch_size" in ended.text
    assert re.search(r"\| +accel_ddp.config.parsing\n", ended.text)
    assert not re.search(r"\| +(torch|accelerate|transformers)\n", ended.text)


def test_mistakes_are_reported_before_ranks_start_and_torch_is_imported(tmp_path):
    """The options, files and columns of a recipe are checked by `accel-ddp run` itself, and by each rank before it imports torch."""
    for name in ("torch", "accelerate", "transformers"):  # a real package that cannot be imported
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text("raise SystemExit('imported too early')")
    (tmp_path / "rows.csv").write_text("title,label\nA,1\nB,0\n")
    (tmp_path / "chats.jsonl").write_text('{"dialog": []}\n{"dialog": []}\n')
    (tmp_path / "runs" / "mine" / "model").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text("base_model: me/model\nsequence_len: 4096\n")
    launched = [sys.executable, ROOT / "recipes" / "classify.py", "--train_file", "rows.csv"]
    mistakes = {
        "classify --lr high": "--lr high: must be a number. For example: --lr 0.0001.",
        "sft --config run.yaml": "run.yaml: 2 lines have to change.",
        "sft --train_file chats.json": "--train_file chats.json: there is no such file (looked in",
        "sft --train_file chats.jsonl --model ./mine": "--model ./mine: there is no such folder.",
        "sft --model runs/mine/modle": "--model runs/mine/modle: there is no such folder. Did you mean runs/mine/model?",
        "sft --model builtin:tiny-lama": "--model builtin:tiny-lama: there is no such built-in model. Did you mean builtin:tiny-llama?",
        "sft --train_file chats.jsonl": "The data need a column of chats (--messages_column)",
    }
    commands = [[ACCEL_DDP, "run", *words.split()] for words in mistakes]
    environment = clean_environment(PYTHONPATH=str(tmp_path / "broken"))
    ended = run_all([*commands, launched], [environment] * 8, cwd=tmp_path, fresh=True)
    assert ended.codes == [2] * 8, ended.text
    of_rank = "--text_column text: there is no such column. The data have: title, label."
    for text, message in zip(ended.texts, [*mistakes.values(), of_rank], strict=True):
        assert text.startswith(f"error: {message}"), text


def fake_driver(folder: Path, number: int, more: str = "") -> str:
    """Return PATH with a program that prints what nvidia-smi prints for so many GPUs."""
    gpus = "".join(f"<gpu><uuid>GPU-{letter}</uuid>{more}</gpu>" for letter in "abcdefgh"[:number])
    (folder / "smi").mkdir(exist_ok=True)
    program = folder / "smi" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '<nvidia_smi_log>{gpus}</nvidia_smi_log>'\n")
    program.chmod(0o755)
    return f"{folder / 'smi'}{os.pathsep}{os.environ['PATH']}"


ALL = "using 8 GPUs; --num_processes uses fewer\n"
SIX = "using 6 of 8 GPUs, because --global_batch_size 18 cannot be split over 8; --global_batch_size 24 uses all\n"


@pytest.mark.parametrize(
    ("command_line", "visible", "launch", "printed"),
    [
        ("classify", None, "1node.yaml --num_processes 8 --main_process_port 0", ALL),
        ("--debug classify --main_process_port 5", None, "1node.yaml --debug --main_process_port 5 --num_processes 8", ALL),
        ("classify --global_batch_size 18", None, "1node.yaml --num_processes 6 --main_process_port 0", SIX),
        ("classify", "0,2", "1node.yaml --num_processes 2 --main_process_port 0", "using 2 GPUs; --num_processes uses fewer\n"),
        (
            "classify",
            "GPU-b,GPU-d",
            "1node.yaml --num_processes 2 --main_process_port 0",
            "using 2 GPUs; --num_processes uses fewer\n",
        ),
        ("classify", "3", "local.yaml", ""),
        ("classify", "", "local.yaml", ""),
        ("classify", "-1", "local.yaml", ""),
        ("classify", "MIG-x,MIG-y", "local.yaml", ""),
        ("classify --num_processes 3", None, "1node.yaml --num_processes 3", ""),
        ("classify --gpu_ids 1", None, "local.yaml", ""),
        ("--cpu classify", None, "local.yaml --cpu", ""),
        ("classify --config_file fsdp.yaml", None, "fsdp.yaml", ""),
        ("classify --num_machines 2 --lr high", None, "2node.yaml --num_machines 2", ""),  # its ranks report it to the other node
    ],
)
def test_a_run_uses_the_gpus_that_can_share_a_batch(command_line, visible, launch, printed, tmp_path, monkeypatch, capsys):
    assert started_command(command_line, visible, fake_driver(tmp_path, 8), monkeypatch) == launch
    assert capsys.readouterr().out == printed


def started_command(command_line: str, visible: str | None, path: str, monkeypatch, cuda: str = "13.0") -> str:
    """Return the options of `accelerate launch` that `accel-ddp run` starts, without the folder of the config."""
    started: list[list[str]] = []
    monkeypatch.setattr("accel_ddp.doctor.facts.read_torch_build", lambda: {"cuda": cuda} if cuda else {})
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cli.main(["run", *command_line.split()]) == 0
    words = started[0][started[0].index("--config_file") + 1 :]
    end = next(at for at, word in enumerate(words) if word.endswith(".py"))
    return " ".join([Path(words[0]).name, *words[1:end]])


def test_a_gpu_that_is_divided_and_a_script_without_options_use_one_process(tmp_path, monkeypatch, capsys):
    """The script of another toolkit is not imported, which could start its training. One that fails is left to its rank."""
    divided = "<mig_mode><current_mig>Enabled</current_mig></mig_mode>"
    assert started_command("classify", None, fake_driver(tmp_path, 2, divided), monkeypatch) == "local.yaml"
    assert capsys.readouterr().out == ""
    (tmp_path / "plain.py").write_text("import accel_ddp\nopen('was_run', 'w')\n")
    (tmp_path / "fails.py").write_text("import accel_ddp, no_such_package\nif __name__ == '__main__':\n    pass\n")
    for name in ("plain.py", "fails.py"):
        assert started_command(name, None, fake_driver(tmp_path, 2), monkeypatch) == "local.yaml"
        assert f"using 1 of 2 GPUs, because only a rank can read the options of {name}; --num" in capsys.readouterr().out
    assert not (tmp_path / "was_run").exists()


def test_gpus_that_torch_cannot_use_are_not_counted(tmp_path, monkeypatch):
    assert started_command("classify", None, fake_driver(tmp_path, 8), monkeypatch, cuda="") == "local.yaml"


def test_a_resumed_run_uses_as_many_gpus_as_before(tmp_path, monkeypatch, capsys):
    from accel_ddp.saving import checkpoint_format

    checkpoint_format.write(tmp_path / "run" / "step_00000004", {"model.safetensors": {}}, {"step": 4, "num_ranks": 2}, {})
    checkpoint_format.write(tmp_path / "run" / "step_00000005", {"model.safetensors": {}}, {"step": 5, "num_ranks": 4}, {})
    (tmp_path / "run" / "step_00000005" / "run.json").write_text("damaged")
    for place in ("auto --output_dir run", "run", "run/step_00000004"):
        launch = started_command(f"classify --resume {place}", None, fake_driver(tmp_path, 8), monkeypatch)
        assert launch == "1node.yaml --num_processes 2 --main_process_port 0"
        expected = "using 2 of 8 GPUs, because --resume continues a run of 2 ranks; --num_processes 8 uses all\n"
        assert capsys.readouterr().out == expected
    for words in ("--resume --output_dir other", "--resume --output_dir run --micro_batch_size 16 --num_processes 1"):
        started_command(f"classify {words}", None, fake_driver(tmp_path, 8), monkeypatch)
        assert "continues a run" not in capsys.readouterr().out


SEVERAL = """
import os, sys
from dataclasses import dataclass
import accel_ddp
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
os.environ["SET_BY_IMPORT"] = "1"
@dataclass(kw_only=True)
class Config(RecipeConfig):
    depth: int = 3
@dataclass(kw_only=True)
class Other(TrainConfig):
    other: int = 3
if __name__ == "__main__":
    accel_ddp.run(Config, print)
"""


def test_options_of_own_scripts_are_refused_only_if_their_ranks_would_refuse_them(tmp_path, monkeypatch, capsys):
    path = fake_driver(tmp_path, 1)
    (tmp_path / "several.py").write_text(SEVERAL)
    assert started_command("several.py --depth 4", None, path, monkeypatch) == "local.yaml"
    assert "SET_BY_IMPORT" not in os.environ, "the launcher would inherit it"
    assert cli.main(["run", "several.py", "--other", "4"]) == 2
    assert "--other: there is no such option" in capsys.readouterr().err
    (tmp_path / "unclear.py").write_text(SEVERAL.replace("run(Config", "run({}.get(0, Config)"))
    (tmp_path / "changes.py").write_text(SEVERAL.replace("    accel", "    sys.argv[1:] = []\n    accel"))
    for name in ("unclear.py", "changes.py"):
        assert started_command(f"{name} --mine 4", None, path, monkeypatch) == "local.yaml"


@pytest.mark.parametrize(
    ("words", "launch"),
    [
        ("--num_processes 2 classify", "1node.yaml --num_processes 2 --mixed_precision no"),
        ("--num_processes 2 --mixed_precision bf16 classify", "1node.yaml --num_processes 2 --mixed_precision bf16"),
    ],
)
def test_a_precision_in_the_environment_reaches_the_ranks(words, launch, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert started_command(words, None, fake_driver(tmp_path, 1), monkeypatch) == launch


@pytest.mark.slow  # the command is checked above
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks would use the GPUs of this machine, of which there may be one")
def test_ranks_are_started_for_each_gpu(tmp_path):
    environment = clean_environment(PATH=fake_driver(tmp_path, 2), CUDA_VISIBLE_DEVICES=None)
    trains = [PROGRAMS / "trains.py", "--steps", "2", "--output_dir", tmp_path / "run"]
    code = "from accel_ddp import cli; from accel_ddp.doctor import facts; facts.read_torch_build = lambda: {'cuda': '13'}; cli.main()"
    ended = run_all([[sys.executable, "-c", code, "run", *trains]], [environment], cwd=tmp_path).well()
    assert "using 2 GPUs; --num_processes uses fewer" in ended.text
    assert "8 items per step = 1 node x 2 ranks x 2 per micro-batch" in ended.text


@pytest.mark.slow  # in CI, tests/test_launch.py terminates a launcher
def test_run_replaces_its_own_process_by_the_launcher(tmp_path):
    """A signal therefore reaches the launcher and has the same effect as with a plain `accelerate launch`."""
    trains = [PROGRAMS / "trains.py", "--step_seconds", "0.5", "--save_every", "100", "--output_dir", tmp_path / "run"]
    running = Running([[ACCEL_DDP, "run", *trains]], [clean_environment()], cwd=tmp_path)
    running.until("step  2/12")
    launcher = psutil.Process(running.processes[0].pid)
    assert launcher.cmdline()[3:5] == ["accelerate.commands.launch", "-q"]
    (rank,) = launcher.children()
    launcher.send_signal(signal.SIGTERM)
    assert psutil.wait_procs([rank], timeout=180)[1] == []
    assert running.ended().codes == [75]
    assert len(list((tmp_path / "run").glob("step_*"))) == 1


def test_run_waits_for_its_rank_after_ctrl_c(tmp_path):
    """A traceback of the launcher would overwrite the panel, and the prompt would return while the rank is still saving."""
    trains = [PROGRAMS / "trains.py", "--step_seconds", "0.5", "--save_every", "100", "--output_dir", tmp_path / "run"]
    (tmp_path / "single.yaml").write_text(SINGLE)
    command = [ACCEL_DDP, "run", "--config_file", "single.yaml", *trains]
    environment = clean_environment(SLURM_JOB_ID=None, KUBERNETES_SERVICE_HOST=None)  # a user has typed it
    running = Running([command], [environment], cwd=tmp_path)
    running.until("step  2/12")
    launcher = psutil.Process(running.processes[0].pid)
    (rank,) = launcher.children()
    for process in (launcher, rank):  # a terminal sends Ctrl-C to both
        process.send_signal(signal.SIGINT)
    ended = running.ended()
    assert not rank.is_running()
    assert ended.codes == [1], "accelerate launch returns 1 for every failure of a single process"
    assert "Traceback" not in ended.text
    assert len(list((tmp_path / "run").glob("step_*"))) == 1
    again = f"accel-ddp run --config_file single.yaml {PROGRAMS / 'trains.py'} --step_seconds 0.5 --save_every 100"
    assert f"To continue, run: {again} --resume --output_dir {tmp_path / 'run'}\n" in ended.text


def test_launchers_of_several_ranks_print_one_line_for_a_wrong_option_and_a_report_after_a_failure(tmp_path):
    torchrun = lambda *words: [BIN / "torchrun", "--nproc_per_node", "2", "--master_port", free_port(), *words]
    wrong, to_files = [PROGRAMS / "trains.py", "--lr", "high"], ["--redirects", "3", "--log_dir", tmp_path]
    fails = [PROGRAMS / "endings.py", "--uses_run", "--how", "raise", "--output_dir", tmp_path / "run"]
    commands = [torchrun(*wrong), torchrun(*to_files, *wrong), torchrun(*fails)]
    ended = run_all(commands, [clean_environment(OMP_NUM_THREADS="1")] * 3)
    assert ended.codes == [2, 2, 1], ended.text
    message = "error: --lr high: must be a number. For example: --lr 0.01."
    one, hidden, failed = ended.texts
    assert one.count(message) == 1
    assert not re.search("FAILED|exitcode|signal|Traceback|error file", one), one
    for text, reason in ((hidden, message), (failed, "error: RANK_FAILED: rank 1")):
        assert "FAILED\n---" in text
        assert f"traceback : {reason}" in text


@pytest.mark.usefixtures("default_port")
def test_ranks_read_the_options_of_the_launcher(tmp_path):
    """Ranks read the requested number of processes from the launcher's command line, and refuse to start if theirs differs."""
    (tmp_path / "single.yaml").write_text(SINGLE)
    small_run = [PROGRAMS / "goes_wrong.py", "--output_dir", tmp_path / "run"]
    command = [ACCEL_DDP, "run", "--config_file", "single.yaml", "--num_processes", "2", *small_run]
    ended = run_all([command], [clean_environment()], cwd=tmp_path)
    assert ended.codes == [1], ended.text
    assert "asked for 2 processes but started 1" in ended.text
    assert "Traceback" not in ended.text


def test_verify_takes_the_name_of_a_recipe(monkeypatch, capsys):
    given = []
    monkeypatch.setattr("accel_ddp.verify.verify", lambda *arguments: given.append(arguments) or 0)
    assert cli.main(["verify", "--steps", "8", "--num_machines", "2", "classify", "--lr", "1"]) == 0
    recipe = str(ROOT / "recipes" / "classify.py")
    assert given == [(["--num_machines", "2", recipe, "--lr", "1"], 8, "", False)]


def test_an_incomplete_installation_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_files, "_PACKAGE", tmp_path / "accel_ddp")
    with pytest.raises(UserError, match="incomplete"):
        recipe_files.recipe_names()
