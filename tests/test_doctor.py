"""Faults that prevent a cluster from starting, reproduced between nodes in network namespaces.

Each fault is reported with its code, host and rank, with the same text on every node. A fault that can be seen at once is tested
with --wait 300, which is longer than the time limit of a test: the doctor must not wait for it. Every node ends with an exit code,
and no process remains.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, run_all
from tests.nodes import Nodes

DOCTOR = [sys.executable, "-m", "accel_ddp.doctor", "--no_deep"]
MAIN = "10.77.0.1"
RECIPE = ROOT / "recipes" / "classify.py"


class DoctorRun:
    """Runs commands on several nodes until all of them have ended, and holds their exit codes and output."""

    def __init__(self, nodes: Nodes, commands: dict[int, list], environments: dict[int, dict[str, str]], timeout: float = 240):
        order = sorted(commands)
        words = [nodes.nodes[n].command(commands[n]) for n in order]
        envs = [clean_environment(**environments.get(n, {})) for n in order]
        ended = Running(words, envs, fresh=True).ended(timeout)
        self.seconds = ended.seconds
        self.codes = dict(zip(order, ended.codes))
        self.texts = dict(zip(order, ended.texts))
        deadline = time.monotonic() + 30
        while left := [pid for n in order for pid in nodes.nodes[n].pids()]:
            assert time.monotonic() < deadline, f"these processes are still running: {left}"
            time.sleep(0.02)

    def verdict(self, node: int) -> str:
        """Return the output from the first finding on, which must be the same on every node."""
        found = re.search(r"^[EWI]_.*|^verdict.*", self.texts[node], re.MULTILINE | re.DOTALL)
        assert found, self.texts[node]
        return found[0]

    def errors(self, node: int) -> set[str]:
        return set(re.findall(r"^(E_\w+)", self.texts[node], re.MULTILINE))

    def reports(self, code: str, *words: str, exit_code: int = 1) -> "DoctorRun":
        """Assert that all nodes report this error with these words and the same text, and end with this exit code."""
        shown = "\n".join(f"--- node {n}, exit code {self.codes[n]}\n{text}" for n, text in self.texts.items())
        for node in self.texts:
            assert code in self.errors(node), shown
            for word in words:
                assert word in self.verdict(node), f"{word!r} is not printed on node {node}\n{shown}"
        assert set(self.codes.values()) == {exit_code}, shown
        assert "Traceback" not in shown
        assert len({self.verdict(node) for node in self.texts}) == 1, shown
        return self


def srun_variables(rank: int) -> dict[str, str]:
    """Return what an srun script sets for one of two ranks, each on its own node."""
    values = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**values, "MASTER_ADDR": MAIN, "MASTER_PORT": "29500"}


def run_doctor(
    nodes: Nodes, *options: object, each: dict[int, list] | None = None, of: int = 2, only: int | None = None,
    wait: float = 300, script: list | None = None, env: dict[int, dict[str, str]] | None = None,
) -> DoctorRun:  # fmt: skip
    """Run the doctor on `of` nodes. `each` has further options for single nodes; a later option overrides an earlier one."""
    commands = {}
    for n in range(of) if only is None else [only]:
        usual = ["--machine_rank", n, "--num_machines", of, "--num_processes", of, "--main_process_ip", MAIN]
        commands[n] = [*DOCTOR, *usual, "--wait", wait, *options, *(each or {}).get(n, []), *(script or [])]
    return DoctorRun(nodes, commands, env or {})


def test_a_healthy_cluster_is_reported_as_healthy_on_every_node(nodes, tmp_path):
    nodes.require("host names")
    ended = run_doctor(nodes, "--output_dir", tmp_path / "runs", of=3)
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.texts
    assert "3 of 3 are connected: 0 node0 (10.77.0.1), 1 node1 (10.77.0.2), 2 node2 (10.77.0.3)" in ended.texts[2]
    assert "6 of 6 directions work" in ended.texts[1]
    assert "is shared by all nodes" in ended.texts[0]
    assert ended.verdict(0) == ended.verdict(1) == ended.verdict(2)
    # On busy cores one of the virtual links may be measured as slow.
    assert ended.verdict(0) == "verdict: healthy\n" or re.findall(r"^[EW]_\w+", ended.verdict(0), re.MULTILINE) == ["W_PATH_SLOW"]
    assert list(tmp_path.iterdir()) == [], "no marker file is left there"


def test_output_folders_need_not_be_shared_but_must_be_writable(nodes, tmp_path):
    nodes.require("host names")
    for n in (0, 1):
        (tmp_path / str(n)).mkdir()
    separate = run_doctor(nodes, each={n: ["--output_dir", tmp_path / str(n)] for n in (0, 1)})
    assert separate.codes == {0: 0, 1: 0}
    assert f"{tmp_path / '0'} is not shared: checkpoints are written on node0" in separate.texts[1]
    run_doctor(nodes, each={n: ["--output_dir", "/proc/1" if n == 0 else tmp_path] for n in (0, 1)}).reports(
        "E_OUTPUT_DIR", "[node0, machine_rank 0] /proc/1 cannot be written"
    )


# ---- 1: a node is missing


def test_1a_a_node_that_does_not_start_is_reported_before_the_wait_ends(nodes):
    nodes.require("host names")
    command = nodes.nodes[0].command([*DOCTOR, "--num_machines", 2, "--main_process_ip", MAIN, "--wait", 300])
    running = Running([command], [clean_environment()], fresh=True)
    running.until("waiting for machine_rank 1 (1 of 2 nodes are connected: 0 node0)")
    running.kill()


def test_1a_every_connected_node_prints_which_node_is_missing(nodes):
    nodes.require("host names")
    commands = {n: [*DOCTOR, "--num_machines", 3, "--machine_rank", n, "--main_process_ip", MAIN, "--wait", 6] for n in (0, 2)}
    ended = DoctorRun(nodes, commands, {})
    missing = "machine_rank 1 did not connect within 6 s; connected: 0 node0"
    ended.reports("E_MISSING", missing, "TCP to 10.77.0.1:29500 must be open")
    waiting = "waiting for machine_rank 1 (2 of 3 nodes are connected: 0 node0, 2 node2)"
    assert all(waiting in text for text in ended.texts.values())


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_1b_1d_without_the_main_node_the_others_report_that_nothing_listens(nodes, backend):
    nodes.require("host names")
    ended = run_doctor(nodes, "--rdzv_backend", backend, only=1, wait=4)
    assert ended.codes == {1: 1}
    assert "10.77.0.1:29500 is up, but nothing listens there (refused)" in ended.verdict(1)
    assert "start node 0" in ended.verdict(1)
    assert re.search(r"node1: waiting for the main node \([234] of 4 s\)", ended.texts[1])


def test_1c_c10d_needs_no_machine_rank_and_reports_missing_nodes(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, "--rdzv_backend", "c10d", only=0, wait=3)
    assert ended.codes == {0: 1}
    assert "machine_rank 1 did not connect within 3 s" in ended.verdict(0)
    same_rank_everywhere = run_doctor(nodes, "--rdzv_backend", "c10d", each={1: ["--machine_rank", 0]})
    assert same_rank_everywhere.codes == {0: 0, 1: 0}, same_rank_everywhere.texts


def test_1e_ranks_started_by_srun_report_the_missing_one_before_torch_is_imported(nodes):
    nodes.require("host names")
    ended = DoctorRun(nodes, {0: [sys.executable, "-X", "importtime", RECIPE, "--preflight_wait", 3]}, {0: srun_variables(0)})
    assert ended.codes == {0: 2}
    assert "error: preflight: 1 error\nE_MISSING  rank 1 did not connect within 3 s" in ended.texts[0]
    assert "import time" in ended.texts[0]
    assert not re.search(r"\| *torch$", ended.texts[0], re.MULTILINE)


# ---- 2: the connection to the main node, and the paths between the nodes


@pytest.mark.parametrize("address", ["10.77.0.9", "10.77.0.3"], ids=["no host has it", "another host has it"])
def test_2a_a_wrong_main_address_on_both_nodes_is_reported_by_both(nodes, address):
    """Node 0 finds it out by itself. Node 1 finds node 0 by a broadcast, instead of waiting for an address that is not node 0's."""
    nodes.require("host names")
    run_doctor(nodes, "--main_process_ip", address).reports(
        "E_MAIN_ELSEWHERE", "[node0, machine_rank 0]", "use --main_process_ip 10.77.0.1 on every node",
        f"{address} (--main_process_ip) is not an address of this host (10.77.0.1)",
    )  # fmt: skip


def test_2a_without_a_main_node_an_address_that_no_host_has_is_given_up(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, "--main_process_ip", "10.77.0.9", only=1, wait=4)
    assert ended.codes == {1: 1}
    assert ended.errors(1) in ({"E_UNREACHABLE"}, {"E_DROPPED"})  # before or after the timeout of the kernel's ARP requests
    assert "[node1, machine_rank 1] 10.77.0.9:29500" in ended.verdict(1)


def test_2a_a_wrong_main_address_on_one_node_is_questioned_on_both(nodes):
    """The nodes may belong to two runs of the same script, so that neither ends the other one."""
    nodes.require("host names")
    ended = run_doctor(nodes, each={1: ["--main_process_ip", "10.77.0.3"]}, wait=6)
    assert ended.codes == {0: 1, 1: 1}
    assert "E_REFUSED  [node1, machine_rank 1] 10.77.0.3:29500 is up, but nothing listens there (refused)" in ended.verdict(1)
    assert "A main node for the same script and port is at 10.77.0.1\n" in ended.verdict(1)
    assert "fix: use --main_process_ip 10.77.0.1 if that is node 0 of this run" in ended.verdict(1)
    assert "The host 10.77.0.3 may also be another machine than node 0" in ended.verdict(1)
    looks = "The host 10.77.0.2 runs the same script, but looks for the main node at 10.77.0.3"
    assert looks in ended.verdict(0)
    assert ended.texts[0].index(looks) < ended.texts[0].index("E_MISSING  machine_rank 1 did not connect within 6 s")


def test_2a_a_public_address_instead_of_the_private_one(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, "--main_process_ip", "54.1.2.3", only=0, wait=3)
    assert "E_MAIN_PUBLIC" in ended.errors(0)
    assert "use --main_process_ip 10.77.0.1" in ended.verdict(0)


def test_2b_a_different_main_port_on_one_node(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, each={1: ["--main_process_port", 29501]}, wait=4)
    assert ended.codes == {0: 1, 1: 1}
    assert "10.77.0.1:29501 is up, but nothing listens there (refused)" in ended.verdict(1)
    assert "correct main_process_port 29501 (--main_process_port)" in ended.verdict(1)
    assert "machine_rank 1 did not connect" in ended.verdict(0)


def test_2c_a_name_that_does_not_resolve(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, "--main_process_ip", "nodeX", only=1)
    assert ended.codes == {1: 1}
    assert "E_NAME  [node1, machine_rank 1] main_process_ip nodeX (--main_process_ip) cannot be resolved" in ended.verdict(1)
    assert "waiting for" not in ended.texts[1]
    for n in (0, 1):  # the other node, which can resolve the name, reports it too
        nodes.nodes[n].hosts({"main": MAIN})
        ended = run_doctor(nodes, "--main_process_ip", "main")
        ended.reports(
            "E_NAME", f"[node{1 - n}, machine_rank {1 - n}] main_process_ip main (--main_process_ip) cannot be resolved"
        )
        nodes.nodes[n].hosts({})


@pytest.mark.parametrize(("rule", "how"), [("drop", "drops packets"), ("reject with tcp reset", "rejects connections")])
def test_2d_a_closed_main_port_is_reported_on_both_nodes(nodes, rule, how):
    nodes.require("a firewall")
    nodes.nodes[0].firewall(f"tcp dport 29500 {rule}")
    run_doctor(nodes).reports("E_PORT_BLOCKED", f"[node1, machine_rank 1] a firewall {how} to 10.77.0.1:29500: port 26503 of")


def test_2d_a_closed_port_of_the_main_node(nodes):
    nodes.require("a firewall")
    nodes.nodes[0].firewall("tcp dport 29500 drop")
    command = nodes.nodes[1].command(
        [*DOCTOR, "--num_machines", 2, "--machine_rank", 1, "--main_process_ip", MAIN]
    )  # without --wait, whose default is 300 s
    ended = Running([command], [clean_environment(SLURM_JOB_ID="7")], fresh=True).ended(180)
    assert ended.codes == [1]
    assert re.search(r"^E_DROPPED  \[node1, machine_rank 1\] 10.77.0.1:29500 does not answer at all", ended.text, re.MULTILINE)
    assert "Slurm: the nodes of a job must reach each other on all TCP ports" in ended.text
    assert re.search(r"waiting for the main node \([2-8] of 8 s\): 10.77.0.1:29500 does not answer at all", ended.text)


def test_2e_only_the_main_port_is_open(nodes):
    nodes.require("a firewall")
    security_group = ("ct state established,related accept", "tcp dport 29500 accept", "drop")
    nodes.nodes[0].firewall(*security_group)
    env = {n: {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} for n in (0, 1)}
    run_doctor(nodes, env=env).reports(
        "E_PATH_ONE_WAY", "node1 (machine_rank 1) -> node0 (machine_rank 0), 10.77.0.1:", "The other direction works.",
        "a NetworkPolicy must allow all TCP between the pods",
    )  # fmt: skip
    nodes.nodes[1].firewall(*security_group)
    run_doctor(nodes).reports("E_PATH_DROPPED", "node0 (machine_rank 0) -> node1 (machine_rank 1)", "allow all TCP")


def test_2e_one_of_three_links_is_rejected(nodes):
    nodes.require("a firewall")
    rule = "ip saddr 10.77.0.3 tcp flags & (syn | ack) == syn reject with tcp reset"
    nodes.nodes[1].firewall(rule)
    ended = run_doctor(nodes, of=3)
    ended.reports("E_PATH_ONE_WAY", "node2 (machine_rank 2) -> node1 (machine_rank 1), 10.77.0.2:", "a firewall rejects it")
    assert ended.verdict(0).count("E_PATH") == 1


def test_2f_a_host_name_that_resolves_to_loopback_is_reported(nodes):
    """This is Debian's default."""
    nodes.require("host names")
    for node in nodes.nodes[:2]:
        node.hosts({node.name: "127.0.1.1"})
    ended = run_doctor(nodes)
    assert ended.codes == {0: 0, 1: 0}
    assert "W_HOST_NAME  [node0, machine_rank 0] the host name node0 resolves to 127.0.1.1" in ended.verdict(1)
    assert "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in ended.verdict(0)


@pytest.mark.slow
def test_2f_a_host_name_that_resolves_to_loopback_is_corrected_for_the_run(nodes, tmp_path):
    """Both nodes train over the interface that the preflight chose."""
    nodes.require("host names")
    for node in nodes.nodes[:2]:
        node.hosts({node.name: "127.0.1.1"})
    launch = [BIN / "accelerate-launch", "--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", MAIN]
    script = [PROGRAMS / "goes_wrong.py", "--output_dir", tmp_path / "run"]
    ended = DoctorRun(nodes, {n: [*launch, "--machine_rank", n, *script] for n in (0, 1)}, {})
    assert ended.codes == {0: 0, 1: 0}, ended.texts
    assert "2 nodes x 1 rank" in ended.texts[0]
    assert "set GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0 for this run" in ended.texts[1]
    seconds = float(re.search(r"2 nodes match and reach each other over eth0 \(([\d.]+) s\)", ended.texts[0])[1])
    assert seconds < ended.seconds / 2, "a preflight takes less time than the imports of a rank"


def test_2f_a_main_address_that_resolves_to_loopback_on_the_main_node(nodes):
    nodes.require("host names")
    nodes.nodes[0].hosts({"node0": "127.0.1.1"})
    ended = run_doctor(nodes, "--main_process_ip", "node0")
    assert ended.codes == {0: 0, 1: 0}, ended.texts
    assert "2 of 2 are connected: 0 node0 (10.77.0.1), 1 node1 (10.77.0.2)" in ended.texts[0]


def test_2g_an_interface_that_does_not_exist(nodes):
    nodes.require("host names")
    run_doctor(nodes, env={1: {"GLOO_SOCKET_IFNAME": "ens5"}}).reports(
        "E_IFNAME",
        "[node1, machine_rank 1] GLOO_SOCKET_IFNAME=ens5",
        "eth0 (10.77.0.2)",
        "export GLOO_SOCKET_IFNAME=eth0",
    )


def test_an_error_of_the_main_node_is_also_reported_on_a_node_that_starts_later(nodes):
    nodes.require("host names")
    words = [*DOCTOR, "--num_machines", 2, "--main_process_ip", MAIN, "--wait", 300, "--machine_rank"]
    env = clean_environment(GLOO_SOCKET_IFNAME="ens5")
    main = Running([nodes.nodes[0].command([*words, 0])], [env], fresh=True)
    main.until("E_IFNAME: waiting up to 15 s for machine_rank 1, so that every node prints the error.")
    time.sleep(1)
    late = Running([nodes.nodes[1].command([*words, 1])], [clean_environment()], fresh=True).ended()
    ended = main.ended()
    assert ended.codes == late.codes == [1]
    for text in (ended.text, late.text):
        assert "E_IFNAME  [node0, machine_rank 0] GLOO_SOCKET_IFNAME=ens5" in text


def test_2h_large_packets_are_dropped(nodes):
    nodes.require("a firewall")
    nodes.nodes[1].firewall("meta length gt 1400 drop")
    path = "node0 (machine_rank 0) -> node1 (machine_rank 1)"
    run_doctor(nodes).reports("E_PATH_MTU", path, "large packets are dropped", "mtu 1400")


# ---- 3, 4: ranks and counts


def test_3a_two_nodes_are_machine_rank_0(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, each={1: ["--machine_rank", 0]})
    ended.reports("E_MAIN_ELSEWHERE", "[node1, machine_rank 0]")
    ended.reports("E_DUPLICATE", "machine_rank 0 is used by node0 (10.77.0.1, pid", "and node1 (10.77.0.2, pid", 
                "--machine_rank 1")  # fmt: skip


def test_3b_two_nodes_are_machine_rank_1(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, each={0: ["--machine_rank", 1]})
    ended.reports("E_DUPLICATE", "machine_rank 1 is used by", "node0 (10.77.0.1, pid", "node1 (10.77.0.2, pid")
    ended.reports("E_MAIN_IS_HERE", "[node0, machine_rank 1]", "the main node must have machine_rank 0")


def test_3c_srun_starts_rank_0_twice(nodes):
    nodes.require("host names")
    ended = DoctorRun(nodes, {n: [sys.executable, RECIPE] for n in (0, 1)}, {0: srun_variables(0), 1: srun_variables(0)})
    ended.reports("E_DUPLICATE", "rank 0 is used by node0", "set another RANK for each process", exit_code=2)


def test_4_counts_that_differ(nodes):
    nodes.require("host names")
    processes = run_doctor(nodes, "--num_processes", 2, each={1: ["--num_processes", 4]})  # 4a
    processes.reports("E_COUNTS", "num_processes differs: 2 on node0 (machine_rank 0), 4 on node1 (machine_rank 1)")
    machines = run_doctor(nodes, each={1: ["--num_machines", 3, "--num_processes", 3]})  # 4c
    machines.reports("E_COUNTS", "num_machines differs: 2 on node0 (machine_rank 0), 3 on node1 (machine_rank 1)")
    alone = run_doctor(nodes, each={1: ["--num_machines", 1, "--num_processes", 1]})  # 4d
    alone.reports("E_COUNTS", "num_machines differs: 2 on node0")
    alone.reports("E_MACHINE_RANK", "[node1, machine_rank 1]")
    odd = run_doctor(nodes, "--num_processes", 3)  # 4b
    odd.reports("E_PROCESSES", "is not a multiple of num_machines 2", "use num_processes 2 or 4", "torchrun")
    cpu = run_doctor(nodes, "--cpu")  # 4e
    cpu.reports("E_TRAINS_ALONE", "--cpu with num_machines 2", "MULTI_GPU")


def test_4e_accelerate_launch_with_cpu_is_refused_by_the_recipe(tmp_path):
    command = [BIN / "accelerate-launch", "--cpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", "1"]
    command += ["--main_process_ip", MAIN, "--main_process_port", "29500"]
    ended = Running([[*command, RECIPE]], [clean_environment()], fresh=True).ended()
    assert ended.codes == [1]  # accelerate's own; the script's is 2
    assert "accelerate was asked for 2 processes but started 1" in ended.text


# ---- 7: nodes that would train different models


def test_7_options_that_differ_are_reported_by_the_doctor_and_by_the_preflight(nodes):
    """7d, 7e, 7f: learning rate, batch size and seed."""
    nodes.require("host names")
    options = {0: [RECIPE], 1: [RECIPE, "--lr", "1e-3", "--global_batch_size", 64, "--seed", 7]}
    ended = DoctorRun(
        nodes,
        {n: [*DOCTOR, "--machine_rank", n, "--num_machines", 2, "--main_process_ip", MAIN, *options[n]] for n in (0, 1)},
        {},
    )
    ended.reports("E_OPTIONS", "--lr differs: 0.0001 on node0 (machine_rank 0), 0.001 on node1 (machine_rank 1)",
                "--global_batch_size differs: 16 on node0", "--seed differs: 0 on node0")  # fmt: skip
    assert re.search(r"^--lr +0.0001 +0.001 +error", ended.texts[1], re.MULTILINE), ended.texts[1]
    envs = {n: srun_variables(n) for n in (0, 1)}
    ended = DoctorRun(nodes, {n: [sys.executable, *options[n]] for n in (0, 1)}, envs)
    ended.reports("E_OPTIONS", "--lr differs: 0.0001 on node0 (machine_rank 0)", exit_code=2)


def test_7_files_models_code_and_versions_that_differ(nodes, tmp_path):
    """7a: a model of another size; 7b, 7c: fewer rows, or another order of rows; 7g: another version of a library."""
    nodes.require("host names")
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(200)]
    sizes = {0: 32, 1: 16}
    for n, (train, test) in {0: (rows, rows[:9]), 1: (rows[:160], rows[8::-1])}.items():
        folder = tmp_path / str(n)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps({"hidden_size": sizes[n]}))
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, train)))
        (folder / "test.jsonl").write_text("\n".join(map(json.dumps, test)))
        other = folder / "packages" / "transformers-9.9.9.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    script = {
        n: [RECIPE, "--model", tmp_path / str(n) / "model", "--train_file", tmp_path / str(n) / "train.jsonl", "--eval_file",
            tmp_path / str(n) / "test.jsonl"]
        for n in (0, 1)
    }  # fmt: skip
    commands = {n: [*DOCTOR, "--machine_rank", n, "--num_machines", 2, "--main_process_ip", MAIN, *script[n]] for n in (0, 1)}
    ended = DoctorRun(nodes, commands, {1: {"PYTHONPATH": str(tmp_path / "1" / "packages"), "NCCL_ALGO": "Ring"}})
    ended.reports("E_VERSIONS", "transformers differs:", "9.9.9 on node1 (machine_rank 1)")
    ended.reports("E_FILES", "content of --model differs", "content of --train_file differs", "content of --eval_file differs")
    assert "W_ENVIRONMENT  NCCL_ALGO differs: - on node0 (machine_rank 0), Ring on node1" in ended.verdict(0)


def test_7_a_script_that_does_not_use_this_package_is_compared_by_its_arguments_and_content(nodes, tmp_path):
    nodes.require("host names")
    for n in (0, 1):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "train.py").write_text(f"print({n})\n")
    commands = {
        n: [
            *DOCTOR,
            "--machine_rank",
            n,
            "--num_machines",
            2,
            "--main_process_ip",
            MAIN,
            tmp_path / str(n) / "train.py",
            "--x",
            n,
        ]
        for n in (0, 1)
    }
    ended = DoctorRun(nodes, commands, {})
    ended.reports("E_CODE", "code differs")
    ended.reports("E_OPTIONS", "arguments of the script differs: --x 0 on node0")


def test_a_mistyped_option_on_one_node_is_reported_on_the_other(nodes):
    nodes.require("host names")
    envs = {n: srun_variables(n) for n in (0, 1)}
    ended = DoctorRun(nodes, {0: [sys.executable, RECIPE], 1: [sys.executable, RECIPE, "--stpes", 3]}, envs)
    assert ended.codes == {0: 2, 1: 2}
    assert "E_OPTIONS  [node1, machine_rank 1] --stpes: there is no such option. Did you mean --steps " in ended.texts[0]
    assert "preflight: 1 error\n" in ended.texts[0], "options of a node that could not be read are not compared"
    assert "--stpes" in ended.texts[1]
    assert "Traceback" not in ended.texts[0] + ended.texts[1]


# ---- launchers, output formats, access


def test_a_missing_node_is_reported_inside_accelerate_launch(nodes, tmp_path):
    """Without the preflight, it waits 900 s for the other node before it starts a rank, and prints nothing."""
    nodes.require("host names")
    launch = [BIN / "accelerate-launch", "--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", MAIN]
    ended = DoctorRun(nodes, {0: [*launch, "--machine_rank", 0, RECIPE, "--preflight_wait", 4]}, {})
    assert ended.codes == {0: 2}
    waiting = r"node0: waiting for machine_rank 1 \(1 of 2 nodes are connected: 0 node0\), [234] of 4 s"
    assert re.search(waiting, ended.texts[0]), ended.texts[0]
    assert "E_MISSING  machine_rank 1 did not connect within 4 s" in ended.texts[0]
    assert "Traceback" not in ended.texts[0]
    both_0 = DoctorRun(nodes, {n: [*launch, "--machine_rank", 0, RECIPE] for n in (0, 1)}, {})
    both_0.reports("E_DUPLICATE", "machine_rank 0 is used by node0 (10.77.0.1", exit_code=2)
    other = tmp_path / "other.py"  # a script that does not use this package is not affected
    other.write_text("print('runs')\n")
    torchrun = [BIN / "torchrun", "--nnodes", "2", "--rdzv_conf", "timeout=2", "--master_addr", MAIN, "--node_rank", "0", other]
    unaffected = DoctorRun(nodes, {0: torchrun}, {}).texts[0]
    assert "E_MISSING" not in unaffected
    assert "DistStoreError" in unaffected, "the error of torchrun itself"


@pytest.mark.slow
def test_the_doctor_runs_under_torchrun(nodes):
    """Two ranks on one node and one on the other: one rank per node prints, and every rank has an exit code."""
    nodes.require("host names")
    torchrun = [BIN / "torchrun", "--nnodes", "2", "--master_addr", MAIN, "--master_port", "29500"]
    own = {0: ["--nproc_per_node", 2, "--node_rank", 0], 1: ["--nproc-per-node=1", "--node-rank", 1]}
    ended = DoctorRun(nodes, {n: [*torchrun, *own[n], "-m", "accel_ddp.doctor"] for n in (0, 1)}, {})
    assert ended.codes == {0: 0, 1: 0}, ended.texts
    for text in ended.texts.values():
        assert text.count("verdict: healthy") == 1
        assert "gloo: 3 ranks on 2 nodes (node0, node1)" in text
        assert "DDP: gradients are the average of all ranks'" in text


@pytest.mark.slow
def test_the_doctor_runs_under_accelerate_launch(nodes):
    nodes.require("host names")
    launch = [BIN / "accelerate-launch", "--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", MAIN]
    ended = DoctorRun(nodes, {n: [*launch, "--machine_rank", n, "-m", "accel_ddp.doctor"] for n in (0, 1)}, {})
    assert ended.codes == {0: 0, 1: 0}, ended.texts
    for text in ended.texts.values():
        assert "gloo: 2 ranks on 2 nodes (node0, node1)" in text
        assert "DDP: gradients are the average of all ranks'" in text
        assert re.search(r"bandwidth: 8 MB in .* bus [\d.]+ [GMk]B/s\n", text)
    assert ended.verdict(0) == ended.verdict(1) == "verdict: healthy\n"


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("c10d", marks=pytest.mark.slow)])
def test_launchers_return_the_exit_code_of_their_ranks(nodes, launcher):
    nodes.require("host names")
    launch = [BIN / "accelerate-launch", "--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", MAIN]
    c10d = [BIN / "torchrun", "--nnodes", 2, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{MAIN}:29500", "--rdzv_id", "job"]
    lr = {0: [], 1: ["--lr", "1e-3"]}
    words = {n: c10d if launcher == "c10d" else [*launch, "--machine_rank", n] for n in (0, 1)}
    ended = DoctorRun(nodes, {n: [*words[n], RECIPE, *lr[n]] for n in (0, 1)}, {})
    assert ended.codes == {0: 2, 1: 2}, ended.texts
    for text in ended.texts.values():
        assert "E_OPTIONS  --lr differs: 0.0001 on node0 (machine_rank 0), 0.001 on node1 (machine_rank 1)" in text
        assert "Traceback" not in text
        assert f"{RECIPE} FAILED" not in text, "the report of torch would hide the message"


def test_json_output_has_the_findings_and_nodes(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, "--json", each={1: ["--num_processes", 4]})
    reports = [json.loads(text) for text in ended.texts.values()]
    assert reports[0]["findings"] == reports[1]["findings"]
    assert {"code": "E_COUNTS", "severity": "error"}.items() <= reports[0]["findings"][0].items()
    assert [node["host"] for node in reports[0]["nodes"]] == ["node0", "node1"]
    assert ended.codes == {0: 1, 1: 1}


def test_a_node_with_another_token_is_rejected(nodes):
    nodes.require("host names")
    ended = run_doctor(nodes, "--token", "ours", each={1: ["--token", "theirs"]}, wait=5)
    assert ended.codes == {0: 1, 1: 1}
    assert "is answered by something that is not the doctor of this run (it refused our token)" in ended.verdict(1)
    assert "connections without the token were rejected" in ended.verdict(0)


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("c10d", marks=pytest.mark.slow)])
def test_a_port_that_another_program_uses_is_reported_on_both_nodes(nodes, launcher):
    """Accelerate would raise an exception on node 0 before any check begins. Torch would wait for a c10d store in any program."""
    nodes.require("host names")
    server = "import socket, time; s = socket.create_server(('', 29500)); print('listening', flush=True); time.sleep(300)"
    other = Running([nodes.nodes[0].command([sys.executable, "-c", server])], [clean_environment()], fresh=True)
    other.until("listening")
    script = [RECIPE, "--preflight_wait", 60]
    accelerate = [BIN / "accelerate-launch", "--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", MAIN]
    c10d = [BIN / "torchrun", "--nnodes", 2, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{MAIN}:29500", "--rdzv_id", "job"]
    words = {n: [*(c10d if launcher == "c10d" else [*accelerate, "--machine_rank", n]), *script] for n in (0, 1)}
    try:
        running = [Running([nodes.nodes[n].command(words[n])], [clean_environment()], fresh=True) for n in (0, 1)]
        ended = [one.ended() for one in running]
        assert [one.codes for one in ended] == [[2], [2]], [one.text for one in ended]
        found = [re.search(r"^E_PORT_BUSY.*", one.text, re.MULTILINE | re.DOTALL)[0] for one in ended]
        assert found[0] == found[1]
        assert "port 29500 of this host is in use by pid " in found[0]
        assert "create_server" in found[0], "the command line of the program"
        assert "Traceback" not in ended[0].text + ended[1].text
    finally:
        other.kill()


def start_one_of_three(nodes: Nodes, n: int) -> Running:
    words = [*DOCTOR, "--num_machines", 3, "--machine_rank", n, "--main_process_ip", MAIN, "--wait", 120]
    return Running([nodes.nodes[n].command(words)], [clean_environment()], fresh=True)


def test_a_killed_node_may_connect_again_and_a_killed_main_node_is_reported(nodes):
    nodes.require("host names")
    main = start_one_of_three(nodes, 0)
    first = start_one_of_three(nodes, 1)
    main.until("2 of 3 nodes are connected")
    first.kill()
    main.until("node1 (machine_rank 1) has closed its connection.")
    again = start_one_of_three(nodes, 1)
    third = start_one_of_three(nodes, 2)
    assert [r.ended().codes for r in (main, again, third)] == [[0], [0], [0]]

    main, other = start_one_of_three(nodes, 0), start_one_of_three(nodes, 1)
    main.until("2 of 3 nodes are connected")
    main.kill()
    ended = other.ended()
    assert ended.codes == [1]
    assert "E_MAIN_LOST  [node1, machine_rank 1] the connection to the main node 10.77.0.1:29500 was lost" in ended.text


@pytest.mark.slow
def test_a_node_that_hangs_is_reported(nodes):
    """It is reported 15 s after it was sent a request."""
    nodes.require("host names")
    main, stopped = start_one_of_three(nodes, 0), start_one_of_three(nodes, 1)
    main.until("2 of 3 nodes are connected")
    os.kill(stopped.processes[0].pid, signal.SIGSTOP)
    third = start_one_of_three(nodes, 2)
    ended = [main.ended(90), third.ended(90)]
    stopped.kill()
    assert [one.codes for one in ended] == [[1], [1]]
    for one in ended:
        assert re.search(r"^E_SILENT  node1 \(machine_rank 1\) did not answer within", one.text, re.MULTILINE)


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_a_healthy_cluster_passes_every_time_while_two_other_processes_use_the_cpus(nodes, times):
    nodes.require("host names")
    busy = [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(times):
            ended = run_doctor(nodes)
            assert ended.codes == {0: 0, 1: 0}, ended.texts
    finally:
        for loop in busy:
            loop.kill()
            loop.wait()


ASKS = """
import os, socket, sys
from accel_ddp.doctor.host import limit_name_lookups
if "silent" in sys.argv:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.53", 53))  # it never answers
asks = socket.getfqdn
limit_name_lookups()
print(os.environ.get("RES_OPTIONS"), socket.getfqdn is asks, socket.getfqdn() == socket.gethostname())
"""


def test_lookups_are_limited_if_no_name_server_answers(nodes):
    """Without a name server, a connection to its port is refused at once, and nothing has to be limited."""
    nodes.require("a hosts file")
    files = {"resolv.conf": "nameserver 127.0.0.53\n", "nsswitch.conf": "hosts: files dns\n"}
    before = {name: (nodes.nodes[0].space.files / name).read_text() for name in files}
    try:
        for name, text in files.items():
            (nodes.nodes[0].space.files / name).write_text(text)
        found = [run_all([nodes.nodes[0].command([sys.executable, "-c", ASKS, how])], [clean_environment()]).well().text
                 for how in ("silent", "refused")]  # fmt: skip
    finally:
        for name, text in before.items():
            (nodes.nodes[0].space.files / name).write_text(text)
    assert [text.split() for text in found] == [["timeout:1", "attempts:2", "False", "True"], ["None", "True", "True"]]


def test_the_nodes_of_this_file_have_their_own_networks(nodes):
    """Without network namespaces, most tests of this file are skipped. CI runs as root and must have them."""
    assert nodes.kind == "root" or os.geteuid() != 0 or "CI" not in os.environ


def test_the_doctor_leaves_no_files():
    """Files of a doctor that another worker runs at this moment are removed soon."""
    there, deadline = list(Path(ROOT).glob(".accel_ddp_doctor_*")), time.monotonic() + 180
    while there := [path for path in there if path.exists()]:
        assert time.monotonic() < deadline, there
        time.sleep(0.1)
