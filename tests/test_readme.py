"""Every command in the README, and in those of the folders that it sends to, runs as it is written there."""

import re

import pytest

from tests.conftest import ROOT, clean_environment, free_port, run_all

README = "\n".join((ROOT / name).read_text() for name in ("README.md", "recipes/README.md", "accelerate_configs/README.md"))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.alone  # it installs the package anew, which for a moment is not there
def test_the_first_command_sets_up_trains_and_says_what_next():
    """As pasted. In a clone that has its .venv, as CI's has, the set-up finds everything there."""
    command = blocks("bash")[0]
    assert "pip install -q -c constraints.txt -e" in command
    ended = run_all([["bash", "-ec", command]], [clean_environment()], timeout=600).well()
    before, accuracy = map(float, ended.text.split("\naccuracy ")[1].split()[:2])
    assert accuracy > 0.7, "far above chance, which is 0.5"
    assert accuracy > before + 0.1
    assert "model saved in runs/classify/" in ended.text
    tried = re.search(r"^try:  (.*)$", ended.text, flags=re.MULTILINE)[1]
    tried = run_all([["bash", "-ec", f". .venv/bin/activate && {tried}"]], [clean_environment()]).well()
    assert "'label': 'positive'" in tried.text


def test_the_test_command_is_what_ci_runs():
    assert blocks("bash")[1].strip() in (ROOT / ".ci" / "run").read_text()


@pytest.mark.usefixtures("default_port")
@pytest.mark.parametrize("command", blocks("bash")[2:])
def test_a_command_of_the_readme_runs(command, tmp_path):
    ended = run_all([["bash", "-ec", command.replace("runs/", f"{tmp_path}/")]], [clean_environment()], timeout=600)
    ended.well()


def test_the_two_node_commands_run(tmp_path):
    """With this machine as both nodes."""
    more = f"--main_process_port {free_port()} recipes/classify.py --steps 2 --max_eval_items 50 --output_dir {tmp_path}/run"
    scripts = [block.replace("10.0.0.1", "127.0.0.1").replace("recipes/classify.py", more) for block in blocks("bash node.")]
    assert len(scripts) == 2
    ended = run_all([["bash", "-ec", script] for script in scripts], [clean_environment(GLOO_SOCKET_IFNAME="lo")] * 2).well()
    assert "2 nodes x 1 rank" in ended.texts[0]


def test_commands_for_every_node_run_there(tmp_path):
    """`tune` for a smaller model and in less time; what it writes is used by the next."""
    ends = {"doctor": "verdict: healthy", "tune": "tuned.yaml", "launch": "model saved in"}
    found = blocks("bash every node")
    assert len(found) == len(ends)
    for command, (word, end) in zip(found, ends.items()):
        assert f" {word} " in command
        command = command.replace("10.0.0.1", "127.0.0.1").replace("accelerate_configs/tuned", f"{tmp_path}/tuned")
        options = f"--main_process_port {free_port()}"
        if word == "tune":
            options += f" --minutes 0.05 --trial_seconds 1 --out {tmp_path}"
        command = command.replace("recipes/classify.py", f"{options} recipes/{'classify' if word == 'doctor' else 'sft'}.py")
        if word == "launch":
            command = f"{command.rstrip()} --steps 2 --max_eval_items 8 --output_dir {tmp_path}/run"
        environments = [clean_environment(NODE_RANK=str(node)) for node in (0, 1)]
        ended = run_all([["bash", "-ec", command]] * 2, environments).well()
        assert end in ended.text


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"`((?:accel_ddp|recipes|tests|benchmarks|accelerate_configs)/[\w./]+\.\w+)`", README):
        assert (ROOT / name).is_file(), name
