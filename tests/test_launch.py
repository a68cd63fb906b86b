"""Tests of the ways to start a run: a config of the wizard, 1node.yaml, and the environment variables of a node."""

import os
import re
import signal
from pathlib import Path

import pexpect
import psutil
import pytest
import yaml

from tests.conftest import BIN, PROGRAMS, ROOT, SINGLE, Ended, Running, clean_environment, free_port, run_all

SMALL_RUN = PROGRAMS / "goes_wrong.py"  # without --how, no rank fails


def answer_wizard(file: Path, answers: list[tuple[str, str]]) -> dict:
    """Answer the questions of `accelerate config`. Return the config that it has written to the file."""
    wizard = pexpect.spawn(
        str(BIN / "accelerate"), ["config", "--config_file", str(file)], env=clean_environment(), encoding="utf-8", timeout=180
    )
    for question, answer in answers:
        wizard.expect(question)
        wizard.send(f"{answer}\r")
    wizard.expect(pexpect.EOF)
    return yaml.safe_load(file.read_text())


@pytest.mark.slow
def test_a_config_of_the_accelerate_wizard_works(tmp_path):
    """Answer the wizard's questions for two machines with one GPU each. Both nodes use the file that the wizard writes."""
    file, port = tmp_path / "wizard.yaml", free_port()
    written = answer_wizard(file, [
        ("In which compute environment", ""), ("Which type of machine", "4"), ("How many different machines", "2"),
        ("rank of this machine", "0"), ("IP address", "127.0.0.1"), ("port", str(port)), ("same local network", "yes"),
        ("running for errors", "no"), ("optimize your script", "no"), ("use DeepSpeed", "no"),
        ("use FullyShardedDataParallel", "no"),
        ("use Megatron", "no"), ("How many GPU", "2"), ("What GPU", "all"), ("NUMA|numa", "no"), ("mixed precision", "0"),
    ])  # fmt: skip
    assert written["distributed_type"] == "MULTI_GPU"
    commands = [
        [
            BIN / "accelerate-launch",
            "--config_file",
            file,
            "--machine_rank",
            str(node),
            SMALL_RUN,
            "--output_dir",
            tmp_path / "run",
        ]
        for node in (0, 1)
    ]
    ended = run_all(commands, [clean_environment(GLOO_SOCKET_IFNAME="lo")] * 2).well()
    assert "4 items per step = 2 nodes x 1 rank x 2 per micro-batch" in ended.texts[0]
    assert ended.texts[0].count("`accel-ddp tune` finds faster ones for this cluster") == 1


ONE_MACHINE = [
    ("In which compute environment", ""), ("Which type of machine", "4"), ("How many different machines", "1"),
    ("running for errors", "no"), ("optimize your script", "no"), ("use DeepSpeed", "no"), ("use FullyShardedDataParallel", "yes"),
]  # fmt: skip
TWO_GPUS = [("How many GPU", "2"), ("mixed precision", "0")]
FSDP1 = [
    ("FSDP version", "0"), ("sharding strategy", "0"), ("offload parameters", "no"), ("auto wrap policy", "0"),
    ("_no_split_modules", "yes"), ("backward prefetch", "0"), ("state dict type", "0"), ("forward prefetch", "no"),
    ("use_orig_params", "yes"), ("RAM efficient", "yes"), ("activation checkpointing", "no"),
]  # fmt: skip
FSDP2 = [
    ("FSDP version", "1"), ("resharding after forward", "no"), ("offload parameters", "no"), ("auto wrap policy", "0"),
    ("_no_split_modules", "no"), ("layer class names", "BertLayer"), ("state dict type", "0"), ("RAM efficient", "yes"),
    ("activation checkpointing", "no"), ("parallelism config", "yes"), ("replicate size", "1"), ("shard size", "2"),
    ("tensor parallelism size", "1"), ("context parallelism size", "1"),
]  # fmt: skip


@pytest.mark.slow
def test_a_config_of_the_wizard_that_asks_for_fsdp_works(tmp_path):
    """One of FSDP2 is used as it is. One of FSDP1 is refused with a command that converts it, and is then used."""
    new, old = tmp_path / "new.yaml", tmp_path / "old.yaml"
    assert answer_wizard(new, [*ONE_MACHINE, *FSDP2, *TWO_GPUS])["fsdp_config"]["fsdp_version"] == 2
    assert answer_wizard(old, [*ONE_MACHINE, *FSDP1, *TWO_GPUS])["fsdp_config"]["fsdp_version"] == 1

    def launch(file: Path, name: str) -> Ended:
        options = ["--main_process_port", free_port(), ROOT / "recipes" / "classify.py", "--steps", 2, "--no_eval_first"]
        command = [
            BIN / "accelerate-launch",
            "--config_file",
            file,
            *options,
            "--max_train_items",
            64,
            "--max_eval_items",
            8,
            "--output_dir",
            tmp_path / name,
        ]
        return run_all([command], [clean_environment()])

    text = launch(new, "new").well().text
    assert "The model is sharded over 2 ranks (FSDP2; fsdp_reshard_after_forward: false)." in text
    refused = launch(old, "refused")
    assert refused.codes == [2]
    assert refused.text.count("error:") == 1
    typed = re.search(r"accelerate (to-fsdp2 --config_file (\S+) --overwrite)\.", refused.text)
    assert typed[2] == str(old)
    run_all([[BIN / "accelerate", *typed[1].split()]], [clean_environment()]).well()
    assert "The model is sharded over 2 ranks (FSDP2)." in launch(old, "old").well().text


@pytest.mark.slow
def test_a_node_starts_with_the_variables_of_node_env(tmp_path):
    """Run the command in the comment of accelerate_configs/node.env. This machine is both nodes."""
    text = (ROOT / "accelerate_configs" / "node.env").read_text()
    command = (
        text[text.index("accelerate launch") :]
        .split("\n\n")[0]
        .replace("\n#", "\n")
        .replace("recipes/classify.py", str(SMALL_RUN))
    )
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NUMBER_OF_GPUS": "1", "DDP_TIMEOUT_SECONDS": "61"}
    environments = []
    for node in ("0", "1"):
        lines = [f"{name}={values.get(name, value)}" for name, value in
                 (line.split("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))]  # fmt: skip
        file = tmp_path / f"node{node}.env"
        file.write_text("\n".join(line.replace("NODE_RANK=0", f"NODE_RANK={node}") for line in lines) + "\n")
        environments.append(clean_environment(NODE_ENV=str(file), GLOO_SOCKET_IFNAME="lo", ACCEL_DDP_TUNED="1"))
    script = f'set -a; . "$NODE_ENV"; set +a; {command} --output_dir {tmp_path / "run"}'
    ended = run_all([["bash", "-c", script]] * 2, environments).well()
    assert "2 nodes x 1 rank" in ended.texts[0]
    assert "accel-ddp tune" not in ended.text, "ACCEL_DDP_TUNED=1 means that the cluster is tuned already"
    assert '"ddp_timeout_seconds": 61' in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.slow  # in CI, tests/test_docs.py starts two ranks with this config
@pytest.mark.usefixtures("default_port")
def test_one_node_without_gpus_starts_one_rank_per_core(tmp_path):
    """At most two cores are visible to the launcher, because each rank imports torch."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    launch = ["taskset", "-c", ",".join(map(str, cores)), BIN / "accelerate-launch"]
    command = [*launch, "--config_file", "accelerate_configs/1node.yaml", SMALL_RUN, "--global_batch_size", len(cores)]
    ended = run_all([[*command, "--output_dir", tmp_path / "run"]], [clean_environment()]).well()
    assert f"1 node x {len(cores)} rank" in ended.text


def test_a_rank_whose_launcher_is_terminated_saves_a_checkpoint_and_ends(tmp_path):
    """Accelerate's launcher of a single process does not forward SIGTERM to that process."""
    config = tmp_path / "single.yaml"
    config.write_text(SINGLE)
    trains = [PROGRAMS / "trains.py", "--step_seconds", "0.5", "--save_every", "100", "--output_dir", tmp_path / "run"]
    command = [BIN / "accelerate-launch", "--config_file", config, *trains]
    running = Running([command], [clean_environment()])
    running.until("step  2/12")
    (rank,) = psutil.Process(running.processes[0].pid).children()
    running.processes[0].terminate()
    ended = running.ended()  # the rank has the output open too
    assert ended.codes == [-signal.SIGTERM]
    assert psutil.wait_procs([rank], timeout=180)[1] == []
    (path,) = (tmp_path / "run").glob("step_*")
    assert 2 <= int(path.name[5:]) < 12
    assert ended.text.count(f"Step {int(path.name[5:])} of 12 is saved") == 1
