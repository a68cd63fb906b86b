"""Tests of the ways to start a run: a config of the wizard, 1node.yaml, and the environment variables of a node."""

import os
import signal

import pexpect
import psutil
import pytest
import yaml

from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, free_port, run_all

SMALL_RUN = PROGRAMS / "goes_wrong.py"  # without --how, no rank fails


@pytest.mark.slow
def test_a_config_of_the_accelerate_wizard_works(tmp_path):
    """Answer the wizard's questions for two machines with one GPU each. Both nodes use the file that the wizard writes."""
    file, port = tmp_path / "wizard.yaml", free_port()
    wizard = pexpect.spawn(
        str(BIN / "accelerate"), ["config", "--config_file", str(file)], env=clean_environment(), encoding="utf-8", timeout=180
    )
    for question, answer in [
        ("In which compute environment", ""), ("Which type of machine", "4"), ("How many different machines", "2"),
        ("rank of this machine", "0"), ("IP address", "127.0.0.1"), ("port", str(port)), ("same local network", "yes"),
        ("running for errors", "no"), ("optimize your script", "no"), ("use DeepSpeed", "no"),
        ("use FullyShardedDataParallel", "no"),
        ("use Megatron", "no"), ("How many GPU", "2"), ("What GPU", "all"), ("NUMA|numa", "no"), ("mixed precision", "0"),
    ]:  # fmt: skip
        wizard.expect(question)
        wizard.send(f"{answer}\r")
    wizard.expect(pexpect.EOF)
    assert yaml.safe_load(file.read_text())["distributed_type"] == "MULTI_GPU"
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
    config = ROOT / "accelerate_configs" / "local.yaml"
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
