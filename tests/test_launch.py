"""Ways to start: the wizard's config, 1node.yaml, the variables of a node."""

import os
import subprocess

import pexpect
import psutil
import pytest
import yaml

from tests.conftest import BIN, PROGRAMS, ROOT, clean_environment, free_port, run_all

SAYS_WHO = PROGRAMS / "goes_wrong.py"  # with nothing that goes wrong


def test_a_config_of_the_accelerate_wizard_works(tmp_path):
    """The wizard's questions answered as for two machines with one GPU each; both nodes use the file it writes."""
    file, port = tmp_path / "wizard.yaml", free_port()
    wizard = pexpect.spawn(
        str(BIN / "accelerate"), ["config", "--config_file", str(file)], env=clean_environment(), encoding="utf-8", timeout=60
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
            SAYS_WHO,
            "--output_dir",
            tmp_path / "run",
        ]
        for node in (0, 1)
    ]
    ended = run_all(commands, [clean_environment(GLOO_SOCKET_IFNAME="lo")] * 2).well()
    assert "4 items per step = 2 nodes x 1 rank x 2 per micro-batch" in ended.texts[0]
    assert ended.texts[0].count("`accel-ddp tune` finds faster ones for this cluster") == 1


def test_the_variables_of_a_node_start_it(tmp_path):
    """accelerate_configs/node.env and the command in its comment, with this machine as both nodes."""
    text = (ROOT / "accelerate_configs" / "node.env").read_text()
    command = (
        text[text.index("accelerate launch") :]
        .split("\n\n")[0]
        .replace("\n#", "\n")
        .replace("recipes/classify.py", str(SAYS_WHO))
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
    assert "accel-ddp tune" not in ended.text, "it was"
    assert '"ddp_timeout_seconds": 61' in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.usefixtures("default_port")
def test_one_node_uses_all_there_is(tmp_path):
    command = [BIN / "accelerate-launch", "--config_file", "accelerate_configs/1node.yaml", SAYS_WHO, "--global_batch_size"]
    cores = os.cpu_count()
    ended = run_all([[*command, str(cores), "--output_dir", tmp_path / "run"]], [clean_environment()]).well()
    assert f"1 node x {cores} ranks" in ended.text


def test_a_launcher_that_is_ended_stops_its_process_with_a_checkpoint(tmp_path):
    """Accelerate's launcher of a single process does not pass SIGTERM on."""
    config = ROOT / "accelerate_configs" / "local.yaml"
    trains = [PROGRAMS / "trains.py", "--step_seconds", "0.1", "--save_every", "100", "--output_dir", tmp_path / "run"]
    command = [BIN / "accelerate-launch", "--config_file", config, *trains]
    launcher = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert any("step  2/12" in line for line in launcher.stdout)
    (child,) = psutil.Process(launcher.pid).children()
    launcher.terminate()
    assert psutil.wait_procs([child], timeout=10)[1] == []
    assert len(list((tmp_path / "run").glob("step_*"))) == 1
