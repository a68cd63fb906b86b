"""The doctor's parts: variables of launchers, files, GPUs as a driver reports them, and data from untrusted peers."""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_ddp.doctor import (
    at_launch,
    check_options,
    compare_nodes,
    facts,
    findings,
    host,
    launcher_restarts,
    node_client,
)
from accel_ddp.doctor import (
    doctor_command as command,
)
from accel_ddp.doctor.findings import FIXES
from accel_ddp.errors import UserError
from accel_ddp.nodes import messages
from accel_ddp.nodes.launcher import read_accelerate_config
from accel_ddp.nodes.topology import _VARIABLES, Topology, find_topology, topology_of_this_rank
from tests.conftest import ROOT, Running, clean_environment, free_port, run_all

DOCTOR = [sys.executable, "-m", "accel_ddp.doctor", "--no_deep"]
CONFIG = str(ROOT / "accelerate_configs" / "2node.yaml")


@pytest.fixture
def environment(monkeypatch):
    """Remove all variables of launchers. The value is a function that sets variables."""
    known = {name for names in _VARIABLES.values() for name in names} | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID"}
    for name in [*known, "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SKYPILOT_NODE_IPS", "KUBERNETES_SERVICE_HOST", "HF_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "1234", "NUMBER_OF_NODES": "3", "NUMBER_OF_GPUS": "8"},
         (1, 3, 24, "10.0.0.5", 1234)),
        ({"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "2",
          "SLURM_JOB_NODELIST": "r[1-2]gpu[07-09,12],x"},
         (1, 4, 8, "r1gpu07", 29500)),
        ({"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a1,b2"}, (0, 2, 2, "a1", 29500)),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
          "PET_MASTER_PORT": "29500"}, (1, 2, 8, "job-node-0-0.job", 29500)),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.1.0.1\n10.1.0.2", "SKYPILOT_NUM_NODES": "2",
          "SKYPILOT_NUM_GPUS_PER_NODE": "1"}, (1, 2, 2, "10.1.0.1", 29500)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "m", "MASTER_PORT": "1"}, (1, 2, 8, "m", 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pytorch-master-0"}, (1, 2, 2, "pytorch-master-0", 29500)),
        ({}, (0, 2, 2, "127.0.0.1", 29500)),
    ],
    ids=["node.env", "slurm", "slurm without GPUs", "kubeflow", "skypilot", "srun", "PyTorchJob", "the file alone"],
)  # fmt: skip
def test_the_topology_is_found_from_the_variables_of_each_launcher(environment, variables, expected):
    """The config file is the same on every node, and variables determine which node this is. Options override both."""
    environment(**variables)
    found = find_topology({}, CONFIG)
    assert (found.node_rank, found.num_nodes, found.num_ranks, found.main_address, found.main_port) == expected
    typed = find_topology({"machine_rank": 0, "main_process_ip": "10.9.9.9"}, CONFIG)
    assert (typed.node_rank, typed.main_address) == (0, "10.9.9.9")


def test_a_process_without_rank_variables_is_one_node(environment, monkeypatch, tmp_path):
    """The wizard's config and Slurm's variables do not matter. Options of the recipe are read from its --config file too."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_machines: 2\n")
    environment(HF_HOME=str(tmp_path), SLURM_NNODES="2", SLURM_NODEID="1", SLURM_JOB_ID="7")
    assert topology_of_this_rank().num_nodes == 1
    environment(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="m", MASTER_PORT="1")
    mine = topology_of_this_rank()
    assert (mine.node_rank, mine.num_nodes, mine.num_ranks, mine.local_rank, mine.num_local_processes) == (1, 2, 4, 1, 2)
    (tmp_path / "run.yaml").write_text("preflight: off\npreflight_wait: 7\n")
    words = ["recipe.py", "--config", str(tmp_path / "run.yaml")]
    assert check_options.read_recipe_option(words, "preflight", "on") == "False"
    assert check_options.read_recipe_option([*words, "--preflight=on"], "preflight", "on") == "on"
    assert check_options.read_recipe_option(words, "preflight_wait", "") == "7"


def test_a_module_of_the_working_directory_is_recognized(tmp_path, monkeypatch):
    """The launchers are console scripts, whose sys.path does not contain the working directory. Their ranks find the module."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "train.py").write_text("import accel_ddp")
    (tmp_path / "ours" / "__main__.py").write_text("import accel_ddp")
    (tmp_path / "theirs.py").write_text("import torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    assert at_launch.find_script(["--nnodes", "2", "-m", "ours.train", "--lr", "1"]) == ["ours.train", "--lr", "1"]
    assert at_launch.find_script(["-m", "ours"]) == ["ours"]
    assert at_launch.find_script(["-m", "theirs"]) == []
    assert at_launch.find_script(["-m", "missing.module"]) == at_launch.find_script(["-m"]) == []


def test_invalid_values_files_and_options_are_reported_without_a_traceback(environment, tmp_path):
    environment(NODE_RANK="one")
    with pytest.raises(UserError, match=r"machine_rank 'one' \(NODE_RANK\): must be a whole number"):
        find_topology({}, CONFIG)
    (tmp_path / "bad.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="is not an accelerate config"):
        read_accelerate_config(str(tmp_path / "bad.yaml"))
    commands = [[*DOCTOR, "--config_file", "none.yaml"], [*DOCTOR, "--machine_rnak", "1"], [*DOCTOR, "none.py"]]
    ended = run_all(commands, [clean_environment()] * 3)
    assert ended.codes == [2, 2, 2]
    assert "--config_file none.yaml: there is no such file" in ended.texts[0]
    assert "unrecognized arguments: --machine_rnak 1. Did you mean --machine_rank?" in ended.texts[1]
    assert "none.py: there is no such script" in ended.texts[2]
    assert "Traceback" not in ended.text


@pytest.mark.usefixtures("environment")
def test_configs_that_come_with_accel_ddp_are_found_by_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = command.add_options(argparse.ArgumentParser()).parse_args(["--config_file", "2node.yaml", "--machine_rank", "1"])
    topology, _ = command.read_options(given, [])
    assert (topology.node_rank, topology.num_nodes) == (1, 2)


def test_a_running_rendezvous_is_told_apart_from_other_programs():
    """A node of a c10d job joins a store of torch. The messages of the store are those of the installed torch."""
    from torch.distributed import TCPStore

    for use_libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        assert asyncio.run(node_client.is_torch_store("127.0.0.1", store.port))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not asyncio.run(node_client.is_torch_store("127.0.0.1", silent.getsockname()[1]))
    assert not asyncio.run(node_client.is_torch_store("127.0.0.1", free_port()))


def test_torch_reports_no_killed_rank_below_our_report_of_it(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    message = {"message": "error: RANK_DIED: rank 1 (a, pid 7) was killed by SIGKILL", "extraInfo": {"timestamp": "0"}}
    file.write_text(json.dumps({"message": message}))
    printed = ProcessFailure(local_rank=0, pid=6, exitcode=1, error_file=str(file))
    killed, other = (ProcessFailure(local_rank=1, pid=pid, exitcode=-9, error_file="") for pid in (7, 8))
    for typed, failures, expected in (
        (os.getpid(), [printed, killed], True),
        (os.getpid(), [printed, other], False),
        (os.getpid(), [killed], False),
        (1, [printed, killed], False),  # another launcher, such as `accelerate launch`
    ):
        monkeypatch.setenv("_ACCEL_DDP_TYPED", f"{typed} accel-ddp run sft")
        error = ChildFailedError("sft.py", dict(enumerate(failures)))
        assert launcher_restarts.names_killed_ranks(error) is expected


def test_a_launcher_returns_the_code_of_the_first_rank_that_ended_by_itself():
    assert launcher_restarts.choose_exit_code([-15, 75, 2]) == 75
    assert launcher_restarts.choose_exit_code([None, -9]) == 0, "torch reports a killed rank with the exit code 1"


@pytest.mark.parametrize(
    ("codes", "code", "is_explained"),
    [
        ({0: (2, True), 1: (-15, True)}, 2, True),
        ({0: (-15, True), 1: (75, True)}, 75, True),
        ({0: (-15, False), 1: (2, True)}, 2, False),  # the launcher has ended the first rank before that could print
        ({0: (2, True), 1: (-9, False)}, 2, False),
        ({0: (75, True), 1: (1, True)}, 75, False),
        ({0: (1, True)}, 1, False),
        ({0: (2, False)}, 2, False),  # by sys.exit(2) of a program
    ],
)
def test_the_report_of_a_launcher_is_left_out_if_the_first_rank_has_printed_why_all_end(codes, code, is_explained, tmp_path):
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {}
    for rank, (exit_code, has_file) in codes.items():
        if has_file:
            (tmp_path / str(rank)).write_text(json.dumps({"message": {"message": "", "extraInfo": {"timestamp": "1"}}}))
        failures[rank] = ProcessFailure(rank, rank + 100, exit_code, str(tmp_path / str(rank)))
    assert launcher_restarts.is_explained(ChildFailedError("recipe.py", failures), code) == is_explained
    assert launcher_restarts.is_explained(SignalException("the launcher was told to stop", signal.SIGTERM), 75)


def test_ctrl_c_ends_the_doctor_immediately_without_a_traceback():
    command = [*DOCTOR, "--num_machines", "2", "--main_process_port", str(free_port())]
    running = Running([command], [clean_environment()])
    running.until("waiting for machine_rank 1")
    running.processes[0].send_signal(2)
    ended = running.ended(5)
    assert ended.codes == [130]
    assert "Traceback" not in ended.text


def test_advice_about_firewalls_depends_on_the_platform(tmp_path, environment):
    vendor = tmp_path / "sys_vendor"
    for words, name in (("Amazon EC2\n", "ec2"), ("ACME", "")):
        vendor.write_text(words)
        assert host.detect_platform(vendor) == name
    assert host.detect_platform(tmp_path / "missing") == ""
    environment(SLURM_JOB_ID="1")
    assert host.detect_platform(vendor) == "slurm"
    environment(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert host.detect_platform(vendor) == "kubernetes"
    assert "a NetworkPolicy must allow all TCP between the pods" in host.firewall_advice()


def test_files_have_the_same_hash_if_and_only_if_they_are_the_same(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        (folder / "x").mkdir(parents=True)
        (folder / "x" / "1").write_bytes(bytes(1000))
        with (folder / "large").open("wb") as file:  # a sparse file, which needs no disk space
            file.truncate(300 << 20)
    assert facts.hash_files(a) == facts.hash_files(b)
    with (b / "large").open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"1")
    assert facts.hash_files(a) != facts.hash_files(b)
    assert facts.hash_files(a / "x" / "1") == facts.hash_files(b / "x" / "1")
    (b / "x" / "1").write_bytes(b"1" + bytes(999))
    assert facts.hash_files(a / "x" / "1") != facts.hash_files(b / "x" / "1")


def test_commit_and_uncommitted_changes_of_the_code_are_separate_facts(tmp_path):
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    git("init"), git("add", "."), git("commit", "-m", "one")
    clean = facts.code_versions(str(script))
    script.write_text("print(2)\n")
    changed = facts.code_versions(str(script))
    assert clean["git changes"] == "none" != changed["git changes"]
    assert clean["git commit"] == changed["git commit"]
    assert clean["code"] != changed["code"]


def driver(tmp_path: Path, text: str, exit_code: int = 0, seconds: float = 0) -> str:
    """Return a folder with a program that replaces nvidia-smi and prints `text`.

    Faults of a GPU cannot be produced on purpose. The format is that of a real driver (580).
    """
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "smi.xml").write_text(text)
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nsleep {seconds}\ncat {tmp_path}/smi.xml\nexit {exit_code}\n")
    program.chmod(0o755)
    return str(tmp_path / "bin")


SMI = """<?xml version="1.0" ?><nvidia_smi_log><driver_version>580.1</driver_version><cuda_version>13.0</cuda_version>
<gpu id="0"><product_name>NVIDIA H200</product_name><uuid>GPU-aa</uuid><fb_memory_usage><total>143771 MiB</total>
<used>0 MiB</used></fb_memory_usage>
<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity></volatile></ecc_errors></gpu>
<gpu id="1"><product_name>NVIDIA H200</product_name><uuid>GPU-bb</uuid><fb_memory_usage><total>143771 MiB</total>
<used>40000 MiB</used></fb_memory_usage><ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_uncorrectable>3</dram_uncorrectable></volatile></ecc_errors><processes><process_info><pid>77</pid><type>C</type>
<process_name>python</process_name><used_memory>39000 MiB</used_memory></process_info><process_info><pid>78</pid><type>C</type>
<process_name>nvidia-cuda-mps-server</process_name><used_memory>30 MiB</used_memory></process_info><process_info><pid>79</pid>
<type>M+C</type><process_name>other</process_name><used_memory>500 MiB</used_memory></process_info></processes></gpu>
</nvidia_smi_log>"""


def test_gpus_that_are_faulty_busy_or_missing_are_reported(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("PATH", f"{driver(tmp_path, SMI)}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    topology = Topology(node_rank=1, num_nodes=2, num_ranks=6, main_address="a", main_port=1)

    def codes(wanted: str | None = None) -> dict[str, str]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES") if wanted is None and "CUDA_VISIBLE_DEVICES" in os.environ else None
        if wanted is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        return {finding.code: finding.saw for finding in facts.check_gpus(topology, *facts.query_driver())[1]}

    found = codes()
    assert "GPU 1 (NVIDIA H200) has 3 uncorrectable memory errors" in found["E_GPU_ECC"]
    assert "python (pid 77, 39000 MiB)" in found["W_GPU_BUSY"]
    assert "other (pid 79, 500 MiB)" in found["W_GPU_BUSY"]
    assert "pid 78" not in found["W_GPU_BUSY"], "the server of MPS serves our ranks too"
    assert "3 ranks on this node (num_processes 6 is the total over 2 nodes), but 2 GPUs" in found["E_GPU_COUNT"]
    assert "but its torch is a CPU build" in found["E_GPU_DRIVER"]  # the tests run with a CPU build
    assert codes("0").keys() == {"E_GPU_COUNT", "E_GPU_DRIVER"}
    assert "there is no GPU 5; this host has 0 to 1" in codes("0,5")["E_CUDA_VISIBLE_DEVICES"]
    assert codes("GPU-bb").keys() >= {"E_GPU_ECC"}
    for none in ("", "-1", "NoDevFiles"):  # the user asks for training on the CPU
        assert codes(none) == {}
    driver(tmp_path, SMI, seconds=30)
    assert "does not answer within 1 s" in facts.query_driver(seconds=1)[2]
    driver(tmp_path, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", exit_code=9)
    assert "couldn't communicate with the NVIDIA driver" in facts.query_driver()[2]


def test_a_full_or_read_only_disk_and_a_wrong_clock_are_reported(tmp_path):
    def member(node: int, clock: float = 0.0) -> dict:
        hello = {"node": node, "host": f"node{node}", "ip": "10.0.0.1", "pid": 1, "local_rank": 0, "clock": clock, "facts": {}}
        return {**hello, "nodes": 2, "ranks": 2, "local_ranks": 1}

    both = [member(0), member(1, 83.0)]
    found, _ = compare_nodes.compare_facts(both)
    assert [finding.code for finding in found] == ["W_CLOCK"]
    assert "differs by +83 s" in found[0].saw
    seen = {0: {"folder": "/out", "error": "Permission denied", "free": 1 << 20, "sees": []}, 1: {"folder": "/out", "sees": []}}
    found, words = compare_nodes.check_storage(both, seen, needed=1 << 30)
    assert {finding.code for finding in found} == {"E_OUTPUT_DIR", "E_DISK"}
    assert "is not shared" in words
    readonly = tmp_path / "no"
    readonly.write_text("a file, not a folder")
    assert host.nearest_existing_folder(str(readonly / "below")) == tmp_path


def test_text_from_other_nodes_cannot_move_the_cursor():
    malicious = {"code": "E_X", "saw": "\x1b[2J\x07 gone", "fix": "a\nb", "host": "h", "node": 1}
    text = findings.format_findings([compare_nodes.clean_finding(malicious)])
    assert "\x1b" not in text
    assert "\x07" not in text
    for bad in ({"code": "X"}, [], {"code": "E_X", "saw": 1}, {"code": "E_X", "node": "0"}, {"code": "E_X", "rank": -1}):
        with pytest.raises(ValueError, match="not a"):
            compare_nodes.clean_finding(bad)


# ---- untrusted peers


def listening_ports(pid: int) -> list[int]:
    return sorted(c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN)


class Authenticated:
    """A connection after a successful handshake, on which a test sends any bytes as messages."""

    def __init__(self, port: int, token: bytes):
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        mine = bytes(4) + os.urandom(16)
        self.sock.sendall(messages.MAGIC + mine)
        theirs = self.sock.recv(16, socket.MSG_WAITALL)
        self.sock.sendall(messages.make_proof(token, b"client", mine, theirs))
        assert self.sock.recv(32, socket.MSG_WAITALL) == messages.make_proof(token, b"server", mine, theirs)
        self.key, self.number = messages.make_proof(messages.make_proof(token, b"session", mine, theirs), b"up"), 0

    def frame(self, data: bytes) -> bytes:
        """Return the bytes of the next message."""
        proof = messages.make_proof(self.key, struct.pack(">Q", self.number), data)
        self.number += 1
        return struct.pack(">I", len(data)) + data + proof

    def receive(self) -> dict:
        """Return the next message."""
        (size,) = struct.unpack(">I", self.sock.recv(4, socket.MSG_WAITALL))
        return json.loads(self.sock.recv(size + 32, socket.MSG_WAITALL)[:size])  # with its proof

    def __enter__(self) -> "Authenticated":
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()


def test_a_thousand_malformed_connections_break_nothing_and_learn_nothing():
    """Random and malformed bytes are sent to every open port, and malformed messages by a peer that has the token."""
    chance, port = random.Random(0), free_port()
    usual = [*DOCTOR, "--num_machines", "2", "--main_process_port", str(port), "--wait", "120"]
    main = Running([[*usual, "--machine_rank", "0"]], [clean_environment()])
    main.until("waiting for machine_rank 1")
    pid = main.processes[0].pid
    ports = listening_ports(pid)
    assert len(ports) == 3
    assert port in ports
    before = psutil.Process(pid).memory_info().rss
    token = messages.make_token(port, "", "")
    facts_message = {"time": 0, "gpus": [], "versions": {"python": "3"}}
    hello = {
        "node": 1,
        "nodes": 2,
        "ranks": 2,
        "local_rank": 0,
        "local_ranks": 1,
        "pid": 1,
        "ip": "127.0.0.1",
        "facts": {"time": 0},
    }
    bad_hellos = [
        b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"node": 1}', b"\xff\xfe", b'{"facts": ' * 5000,
        *(json.dumps({**hello, name: value}).encode() for name, value in [
            ("node", "1"), ("node", -1), ("nodes", None), ("nodes", 10**9), ("local_ranks", 10**6), ("ranks", 1e99),
            ("ip", "nowhere"),
            ("ip", None), ("ports", 7), ("ports", ["x"]), ("ports", [None, None]), ("findings", [{"code": 1}]), ("pid", [1]),
            ("host", {"a": 1}), ("findings", {"a": 1}), ("node", 10**30),
        ]),
    ]  # fmt: skip
    bad_facts = [
        b"[]", b"{", *(json.dumps({**facts_message, **value}).encode() for value in [
            {"time": "now"}, {"time": 10**400}, {"versions": []}, {"versions": {"a": 1}}, {"gpus": 7}, {"findings": [7]},
            {"recipe": {str(i): "0" for i in range(501)}},
        ]), b'{"time": 1e999}', b'{"time": NaN}',
    ]  # fmt: skip
    learned = 0
    for number in range(1000):
        to = ports[number % 3]
        kind = chance.randrange(6)
        if kind == 0:
            data = chance.randbytes(chance.randrange(5000))
        elif kind == 1:
            data = messages.MAGIC + chance.randbytes(chance.randrange(200))
        elif kind == 2:
            data = messages.MAGIC[: chance.randrange(len(messages.MAGIC))]
        elif kind == 3:
            data = chance.choice([b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x00" * 9000, b"\x16\x03\x01\x02"])
        elif kind == 4 and to == port:
            with Authenticated(port, token) as peer:
                good = peer.frame(chance.choice(bad_hellos))
                if chance.random() < 0.3:
                    peer.number = 0
                    good = peer.frame(json.dumps({**hello, "node": None}).encode()) + peer.frame(chance.choice(bad_facts))
                peer.sock.sendall(
                    chance.choice([good, struct.pack(">I", 1 << 31), good[: len(good) // 2], b"\x00\x00\x00\xff" + bytes(3)])
                )
            continue
        elif kind == 4:
            with Authenticated(to, token) as peer:  # an invalid size of the payload
                peer.sock.sendall(
                    peer.frame(chance.choice([b'{"bytes": 9999999999}', b'{"bytes": "x"}', b'{"bytes": -5}', b"{}"]) + b" " * 3)
                )
            continue
        else:
            data = b""
        try:
            with socket.create_connection(("127.0.0.1", to), timeout=30) as sock:
                sock.sendall(data)
                if chance.random() < 0.1:
                    sock.shutdown(socket.SHUT_WR)
                    learned = max(learned, len(sock.recv(4096)))
        except OSError:
            pass
    assert learned == 16, "a peer without the token receives nothing but a random number"
    grown = psutil.Process(pid).memory_info().rss - before
    assert grown < 32 << 20, f"{grown >> 20} MiB"
    held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(300)]  # more than are accepted at once
    second = Running([[*usual, "--machine_rank", "1"]], [clean_environment()])
    ended = [main.ended(), second.ended()]
    assert [one.codes for one in ended] == [[0], [0]], ended
    assert all("verdict: healthy" in one.text for one in ended)
    for sock in held:
        sock.close()


def test_a_node_that_connects_after_the_checks_receives_an_error():
    port = free_port()
    main = Running([[*DOCTOR, "--num_machines", "2", "--main_process_port", str(port), "--wait", "60"]], [clean_environment()])
    main.until("waiting for machine_rank 1")
    token = messages.make_token(port, "", "")
    hello = {"node": 1, "nodes": 2, "ranks": 0, "local_rank": 0, "local_ranks": 1, "pid": 1, "ip": "127.0.0.1", "ports": [1, 2]}
    with Authenticated(port, token) as first, Authenticated(port, token) as second:
        first.sock.sendall(first.frame(json.dumps({**hello, "host": "first"}).encode()) + first.frame(b'{"time": 0}'))
        while first.receive()["do"] != "probe":  # the coordinator then waits for the probes of the first
            pass
        second.sock.sendall(second.frame(json.dumps({**hello, "host": "second"}).encode()))
        answer = second.receive()
    main.kill()
    assert [finding["code"] for finding in answer["verdict"]] == ["E_LATE"]
    assert "second (machine_rank 1) connected after the nodes had been checked without it" in answer["verdict"][0]["saw"]


def test_findings_about_hundreds_of_nodes_are_short():
    """The node that differs is named, and the verdict fits into a message."""
    members = [
        {"node": n, "host": f"node{n}", "ip": "10.0.0.1", "pid": n, "local_rank": 0, "local_ranks": 1, "nodes": 256, "ranks": 256,
         "clock": 0.0, "facts": {"recipe": {"lr": "0.001" if n == 100 else "0.0001"}}, "ports": [1, 2],
         "interface": "eth0", "open": ""}
        for n in range(256)
    ]  # fmt: skip
    found, lines = compare_nodes.compare_facts(members)
    assert found[0].saw.startswith("--lr differs: 0.001 on node100 (machine_rank 100); 0.0001 on node0")
    assert len(found[0].saw) < 300
    assert "100 node100" in lines[0]
    blocked = [{"from": a, "to": b, "how": "dropped", "port": 1} for a in range(256) for b in range(256) if a != b]
    found = compare_nodes.check_paths(blocked, members)
    assert len(found) == 256
    assert len(json.dumps([one.as_dict() for one in found])) < messages.LARGEST_MESSAGE


def test_untrusted_peers_cannot_exhaust_the_memory_of_the_doctor():
    """Ten authenticated peers each send all but the last byte of the largest message; 200 others do not authenticate."""
    port = free_port()
    main = Running([[*DOCTOR, "--num_machines", "2", "--main_process_port", str(port), "--wait", "60"]], [clean_environment()])
    main.until("waiting for machine_rank 1")
    process, token = psutil.Process(main.processes[0].pid), messages.make_token(port, "", "")
    before = process.memory_info().rss
    held = [Authenticated(port, token).sock for _ in range(10)]
    for sock in held:
        sock.sendall(struct.pack(">I", messages.LARGEST_MESSAGE) + bytes(messages.LARGEST_MESSAGE - 1))
    held += [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(200)]
    for sock in held[10:]:
        sock.sendall(bytes(20))
    time.sleep(0.5)
    grown = process.memory_info().rss - before
    main.kill()
    assert grown < 64 << 20, f"{grown >> 20} MiB"


def test_the_doctor_listens_on_one_address_only():
    port = free_port()
    main = Running([[*DOCTOR, "--num_machines", "2", "--main_process_port", str(port), "--wait", "60"]], [clean_environment()])
    main.until("waiting for machine_rank 1")
    addresses = {
        c.laddr.ip for c in psutil.Process(main.processes[0].pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    main.kill()
    assert addresses == {"127.0.0.1"}


def test_help_lists_the_checks():
    ended = run_all([[sys.executable, "-m", "accel_ddp.cli", "doctor", "--help"]], [clean_environment()]).well()
    assert "this machine alone, the connection to the main node" in ended.text
    assert command.ABOUT.splitlines()[0] in ended.text


def test_the_table_of_codes_lists_exactly_the_codes_that_are_used():
    package = ROOT / "accel_ddp"
    sources = [path.read_text() for path in package.rglob("*.py")]
    used = {code for text in sources for code in re.findall(r"\"([EWI]_[A-Z]\w*)\"", text)}
    assert used == FIXES.keys()
    for code, fix in FIXES.items():
        assert fix, code
        assert not fix.endswith("."), f"{code}: the fix follows `fix:` in a line, without a full stop"
