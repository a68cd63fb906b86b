"""cluster.yaml: what is read from it, and what a mistake in it leads to. The commands of the nodes follow from it."""

import os
import re
import shlex

import pytest
import yaml

from accel_ddp.errors import UserError
from accel_ddp.launch import kubernetes, slurm
from accel_ddp.launch.description import read_description
from accel_ddp.launch.job_commands import (
    Shell,
    config_word,
    launcher_words,
    make_job,
    node_environment,
    replace_home,
    to_shell,
    used_config,
    uses_torchrun,
)
from accel_ddp.launch.launch_command import launch
from accel_ddp.launch.session import render as dry_run

TWO_NODES = {"backend": "ssh", "nodes": ["node-a", "node-b"], "gpus_per_node": 8}
SECRET = "wandb-0123456789"


def read(place, /, *changes: str, **keys):
    (place / "cluster.yaml").write_text(yaml.safe_dump({**TWO_NODES, **keys}))
    return read_description(place / "cluster.yaml", changes)


def test_every_key_of_a_complete_description_is_read(tmp_path):
    (tmp_path / "common.env").write_text(
        "# comment\nexport A=common\nB='two words'\n\nC=1 # a number\nD=a#b\nF=\"it's\" # quoted\n"
    )
    (tmp_path / "b.env").write_text("A=of node b\r\n")
    cluster = read(
        tmp_path, "main_port=29600", "ssh.connect_seconds=3", name="classify",
        nodes=[{"host": "node-a", "gpus": 4, "env": {"B": "own"}}, {"host": "me@node-b", "env_file": "b.env", "interface": "ib0"}],
        main_address="10.0.0.1", interface="eth0", folder="~/work", copy="rsync", venv=".venv", env_file="common.env",
        env={"E": 5}, output="/data/runs", restarts=2, time_limit="1-12:00:00", accelerate_config="my.yaml", doctor="full",
        ssh={"options": ["-F", "my config"]},
    )  # fmt: skip
    first, second = cluster.nodes
    assert (cluster.name, cluster.main_address, cluster.main_port, cluster.copy) == ("classify", "10.0.0.1", 29600, "rsync")
    assert (cluster.output, cluster.restarts, cluster.time_limit, cluster.doctor) == ("/data/runs", 2, 36 * 3600, "full")
    assert cluster.ssh == {"options": ["-F", "my config"], "connect_seconds": 3}
    assert (first.gpus, first.processes, second.gpus, second.processes) == (4, 4, 8, 8)
    assert (first.interface, second.interface, second.host) == ("eth0", "ib0", "me@node-b")
    assert first.env == {"A": "common", "B": "own", "C": "1", "D": "a#b", "E": "5", "F": "it's"}
    assert second.env == {"A": "of node b", "B": "two words", "C": "1", "D": "a#b", "E": "5", "F": "it's"}
    assert cluster.num_processes == 12
    assert not cluster.has_equal_nodes


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"gpu_per_node": 8}, "gpu_per_node 8: is not a key. Did you mean gpus_per_node?"),
        ({"hosts": ["a"]}, "is not a key. Did you mean nodes?"),
        ({"ssh": {"option": []}}, "ssh.option []: is not a key. Did you mean options?"),
        ({"nodes": [{"hots": "a"}]}, "nodes[0].hots 'a': is not a key. Did you mean host?"),
        ({"nodes": [{"gpus": 2}]}, "nodes[0]: the key host is missing"),
        ({"nodes": ["a", 7]}, "nodes[1] 7: must be a host"),
        ({"nodes": 2}, "nodes 2: must be a list of hosts with backend: ssh"),
        ({"nodes": []}, "nodes []: must be a list of hosts"),
        ({"nodes": ["a", "b", "a"]}, "nodes 'a': is listed twice"),
        ({"nodes": ["-oProxyCommand=evil"]}, "nodes[0].host '-oProxyCommand=evil': must be a host as in `ssh HOST`"),
        ({"nodes": ["a;reboot"]}, "must be a host as in `ssh HOST`"),
        ({"nodes": [{"host": "a", "gpus": 0}, "b"]}, "some nodes have GPUs and some have none"),
        ({"backend": "shh"}, "backend 'shh': must be one of: ssh, slurm, kubernetes, local. Did you mean ssh?"),
        ({"backend": ["ssh"]}, "backend ['ssh']: must be one of"),
        ({"backend": None}, "backend None: must be one of"),
        ({"backend": "slurm"}, "must be the number of nodes with backend: slurm"),
        ({"image": "a:b"}, "image 'a:b': has no effect with backend: ssh. Remove it"),
        ({"gpus_per_node": "8"}, "gpus_per_node '8': must be a whole number"),
        ({"gpus_per_node": True}, "gpus_per_node True: must be a whole number"),
        ({"processes_per_node": 9}, "processes_per_node 9: is more than the 8 GPUs"),
        ({"main_port": 80}, "main_port 80: must be a whole number of at least 1024 and at most 65535"),
        ({"time_limit": "12h"}, "time_limit '12h': must be HH:MM:SS"),
        ({"time_limit": "0:00:00"}, "must be longer than 0 s"),
        ({"name": "my job"}, "name 'my job': must consist of at most 63 letters"),
        ({"name": "../up"}, "name '../up': must consist of"),
        ({"copy": "rsnyc"}, "copy 'rsnyc': must be one of: none, rsync. Did you mean rsync?"),
        ({"copy": "git"}, "copy 'git': must be one of: none, rsync."),
        ({"ssh": ["-v"]}, "ssh ['-v']: must contain lines of KEY: value"),
        ({"ssh": {"options": [True]}}, "ssh.options [True]: must be a list of words"),
        ({"env": {"A": True}}, 'env: the value of A must be a text; write it in quotes, for example A: "true"'),
        ({"env": {"A B": "x"}}, "'A B' is not the name of a variable"),
        ({"env_file": "absent.env"}, "env_file absent.env: cannot be read: No such file"),
        ({"folder": "a\nb"}, "must be one line"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_file_the_key_and_the_nearest_key(tmp_path, keys, expected):
    with pytest.raises(UserError) as caught:
        read(tmp_path, **keys)
    assert str(caught.value).startswith(f"{tmp_path / 'cluster.yaml'}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must consist of lines of KEY: value"),
        ("nodes: [a]\n", "the key backend is missing. Write one of: backend: ssh"),
        ("backend: ssh\n", "the key nodes is missing"),
        ("backend: ssh\nnodes: [a]\n", "gpus_per_node is missing"),
        ("backend: ssh\nnodes: [a]\ngpus_per_node: 1\nnodes: [b]\n", "the key nodes is given twice, the second time in line 4"),
        ("backend: [ssh\n", "the file cannot be read as YAML: line 2: "),
    ],
)
def test_an_incomplete_file_is_refused(tmp_path, text, expected):
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        read_description(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    "keys",
    [
        {"env": {"KEY": [SECRET]}},
        {"emv": {"KEY": SECRET}},
        {"nodes": [{"env": {"KEY": SECRET}}]},
        {"nodes": [{"host": "a", "emv": {"KEY": SECRET}}]},
        {"backend": "slurm", "nodes": [{"host": "a", "env": {"KEY": SECRET}}]},
        {"nodes": {"a": {"env": {"KEY": SECRET}}}},
        {"env_file": "secret.env"},
    ],
)
def test_no_error_contains_the_value_of_a_variable(tmp_path, keys):
    (tmp_path / "secret.env").write_text(f"export KEY {SECRET}\n")
    with pytest.raises(UserError) as caught:
        read(tmp_path, **keys)
    assert SECRET not in str(caught.value)


def test_a_missing_file_and_a_wrong_change_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        read_description(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="must be KEY=VALUE"):
        read(tmp_path, "main_port")
    with pytest.raises(UserError, match="Did you mean main_port"):
        read(tmp_path, "main_prot=5")
    with pytest.raises(
        UserError, match=r"cluster.yaml: accelerate_config 2nodes.yaml: there is no such file.*2node.yaml.*\./2nodes"
    ):
        config_word(read(tmp_path, accelerate_config="2nodes.yaml"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["recipes/own_model.py", "FILE"],
            "the cluster file comes before the recipe: accel-ddp launch FILE recipes/own_model.py",
        ),
        (
            ["FILE", "recipes/own_model.py", "--dry_run"],
            "--dry_run: is an option of accel-ddp launch. Put it before the cluster file",
        ),
        (["FILE", "recipes/own_model.py", "--stepps", "4"], "--stepps: there is no such option. Did you mean --steps"),
        (["--nmae", "x", "FILE", "recipes/own_model.py"], "--nmae: accel-ddp launch has no such option. Did you mean '--name'"),
    ],
)
def test_words_in_the_wrong_place_are_refused_with_what_to_type(tmp_path, words, expected):
    read(tmp_path)
    file = str(tmp_path / "cluster.yaml")
    with pytest.raises(UserError) as caught:
        launch([file if word == "FILE" else word for word in words])
    assert expected.replace("FILE", file) in str(caught.value)


def test_the_command_of_a_node_is_that_of_a_user_and_keeps_every_argument(tmp_path):
    cluster = read(tmp_path, main_port=29600)
    odd = ["--text", "two words", "it's", '$HOME `id` \\ "', "line\nline", "ü", ""]
    job = make_job(cluster, "classify", ["--lr", "1e-5", *odd])
    words = launcher_words(cluster, job, node_rank=1, address="10.0.0.1", port=29600)
    expected = (
        "accelerate launch --config_file accelerate_configs/2node.yaml --num_machines 2 --num_processes 16 --machine_rank 1"
    )
    assert shlex.join(words).startswith(f"{expected} --main_process_ip 10.0.0.1 --main_process_port 29600 recipes/classify.py")
    assert words[-len(odd) - 4 :] == ["--lr", "1e-5", *odd, "--output_dir", "runs/classify"]
    assert shlex.split(to_shell(words)) == words
    assert to_shell([Shell("$A"), "$A"]) == "$A '$A'"


def test_a_path_below_the_home_directory_is_that_of_the_node(tmp_path, monkeypatch):
    """Without a shell, `~/runs` would be a folder with the name `~`."""
    monkeypatch.setenv("HOME", "/home/me")
    keys = {"gpus_per_node": 0, "output": "~/runs", "accelerate_config": "~/my configs/wizard.yaml", "folder": "~/my code"}
    cluster = read(tmp_path, venv="~/venv", **keys)
    job = make_job(cluster, "recipes/own_model.py", ["--lr", "~/x"])
    commands = dry_run(cluster, job)
    for text in (
        "cd ~/'my code'\n. ~/venv/bin/activate\n",
        "--config_file ~/'my configs/wizard.yaml' ",
        "--lr '~/x' --output_dir ~/runs/own_model\n",
    ):
        assert text in commands, commands
    assert replace_home(["a", "~", "~/runs/job", "--output_dir=~/runs/job", "~/runs/jobs"], ["~/runs/job"], os.path.expanduser) == [
        "a", "~", "/home/me/runs/job", "--output_dir=/home/me/runs/job", "~/runs/jobs",
    ]  # fmt: skip
    cluster = read(tmp_path, backend="slurm", nodes=2, **keys)
    script = slurm.render(cluster, make_job(cluster, "recipes/own_model.py", []))
    assert "--config_file '/home/me/my configs/wizard.yaml' " in script
    assert "--output_dir /home/me/runs/own_model " in script
    script = slurm.render(cluster, make_job(cluster, "recipes/own_model.py", ["--output_dir=~/runs/a"]))
    assert "--output_dir=/home/me/runs/a" in script
    cluster = read(
        tmp_path,
        backend="kubernetes",
        nodes=2,
        image="image",
        kubernetes={"volume_claim": "runs"},
        gpus_per_node=0,
        output="~/runs",
    )
    with pytest.raises(UserError, match="the output folder ~/runs/own_model is not on the volume"):
        kubernetes.render(cluster, make_job(cluster, "recipes/own_model.py", []))


def test_nodes_with_different_numbers_of_processes_use_torchrun(tmp_path):
    cluster = read(tmp_path, nodes=["a", {"host": "b", "gpus": 2}, {"host": "c", "processes": 1}])
    job = make_job(cluster, "recipes/sft.py", ["--output_dir=elsewhere/sft"], name="sft")
    assert (job.run_folder, job.options) == ("elsewhere/sft", ("--output_dir=elsewhere/sft",))
    words = [shlex.join(launcher_words(cluster, job, node_rank=rank, address="a", port=29500)) for rank in range(3)]
    assert [word.split(" --master_addr")[0] for word in words] == [
        "torchrun --nnodes 3 --nproc_per_node 8 --node_rank 0",
        "torchrun --nnodes 3 --nproc_per_node 2 --node_rank 1",
        "torchrun --nnodes 3 --nproc_per_node 1 --node_rank 2",
    ]
    assert node_environment(cluster, cluster.nodes[2])["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("backend", ["ssh", "slurm", "kubernetes"])
def test_the_config_reaches_the_ranks_where_torchrun_starts_them(tmp_path, backend):
    """torchrun reads no accelerate config, so that a model would not be sharded although the config asks for it."""
    unequal = {"nodes": ["a", {"host": "b", "processes": 1}]} if backend == "ssh" else {"nodes": 1, "processes_per_node": 1}
    more = {"image": "image", "kubernetes": {"volume_claim": "runs"}} if backend == "kubernetes" else {}
    cluster = read(tmp_path, backend=backend, accelerate_config="fsdp.yaml", **unequal, **more)
    job = make_job(cluster, "recipes/own_model.py", [])
    assert uses_torchrun(cluster)
    render = {"ssh": dry_run, "slurm": slurm.render, "kubernetes": kubernetes.render}[backend]
    text = render(cluster, job)
    assert re.search(r"ACCEL_DDP_CONFIG_FILE(=|\n *value: )accelerate_configs/fsdp.yaml", text), text
    assert used_config(read(tmp_path, nodes=["a"], gpus_per_node=1)) == "", "one process needs no config"


def test_a_node_without_gpus_trains_on_cpus_and_uses_its_interface(tmp_path):
    cluster = read(tmp_path, gpus_per_node=0, processes_per_node=2, interface="eth1", env={"GLOO_SOCKET_IFNAME": "eth2"})
    env = node_environment(cluster, cluster.nodes[0])
    assert env == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth2", "ACCELERATE_USE_CPU": "true"}
    assert cluster.num_processes == 4
