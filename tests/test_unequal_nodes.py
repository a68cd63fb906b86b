"""Nodes may have different numbers of ranks, and mpirun may start them: the result is that of one rank, and faults are located."""

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accel_ddp.doctor import compare_nodes
from accel_ddp.errors import UserError
from accel_ddp.measure.tune_options import _launch_command
from accel_ddp.nodes.launcher import adopt_mpi_world
from accel_ddp.nodes.topology import describe_ranks, estimate_node, find_nodes, find_topology, topology_of_this_rank
from tests.conftest import ROOT, clean_environment, free_port, run_all
from tests.jobs import FAULTY, Jobs, kill
from tests.test_doctor import DoctorRun

OPTIONS = ["--global_batch_size", 6, "--micro_batch_size", 2, "--steps", 12]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Path:
    """Return the last checkpoint of a run on one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, FAULTY, *OPTIONS, "--step_seconds", 0, "--output_dir", folder]
    run_all([command], [clean_environment(OMP_NUM_THREADS="1")]).well()
    return folder / "step_00000012"


def difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference between the weights of two checkpoints."""
    a, b = (load_file(path / "model.safetensors") for path in (one, other))
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.slow  # in CI, three ranks start without a launcher
def test_two_ranks_on_a_node_and_one_on_another_give_the_result_of_one_rank(nodes, tmp_path, one_rank):
    nodes.require("host names")
    folder = tmp_path / "run"
    arguments = [*OPTIONS, "--output_dir", folder, "--step_seconds", 0]
    with Jobs(nodes).launched("torchrun", 2, *arguments, ranks=[2, 1]) as job:
        assert job.codes() == [0, 0], job.all_output()
        assert "preflight: 2 nodes match and reach each other" in job.text(0)
        assert "6 items per step = 3 ranks (2 on node0, 1 on node1) x 2 per micro-batch x 1 micro-batch " in job.text(0)
    assert difference(folder / "step_00000012", one_rank) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dies", "backend"),
    [([2, 1], 2, "static"), ([2, 1], 1, "static"), ([1, 2], 0, "static"), ([2, 1, 1], 3, "static"), ([2, 1], 1, "c10d")],
    ids=str,
)
def test_a_killed_rank_is_located_and_restarted(nodes, tmp_path, one_rank, ranks, dies, backend):
    nodes.require("host names")
    folder = tmp_path / "run"
    batch = 2 * sum(ranks)
    arguments = [*OPTIONS, "--global_batch_size", batch, "--output_dir", folder, "--save_every", 2, "--step_seconds", 0.2]
    with Jobs(nodes).launched("torchrun", len(ranks), *arguments, backend=backend, max_restarts=1, ranks=ranks) as job:
        job.until_step(3)
        places = {
            rank: job.until(rf"rank {rank} is pid ")[1] for rank in range(sum(ranks))
        }  # c10d may number the nodes otherwise
        kill(job.rank_pid(dies))
        assert job.codes() == [0] * len(ranks), job.all_output()
        expected = f"RANK_DIED: rank {dies} (node{places[dies]}, pid "
        for number in range(len(ranks)):
            assert job.text(number).count(f"error: {expected}") == 1, job.all_output()
        assert f"restart 1 of 1: {expected}" in job.text()
    if batch == 6:
        assert difference(folder / "step_00000012", one_rank) < 1e-12


def mpi_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def test_ranks_of_mpirun_train_as_one_world(tmp_path, one_rank):
    folder, port = tmp_path / "run", str(free_port())
    command = [sys.executable, FAULTY, *OPTIONS, "--step_seconds", 0, "--output_dir", folder]
    more = {"MASTER_PORT": port, "OMP_NUM_THREADS": None}
    ended = run_all([command] * 3, [clean_environment(**more, **mpi_variables(r, 3, r, 3)) for r in range(3)]).well()
    assert "6 items per step = 1 node x 3 ranks x 2 per micro-batch" in ended.text
    assert "OMP_NUM_THREADS" not in ended.text, "Accelerate does not replace the number of threads"
    assert difference(folder / "step_00000012", one_rank) < 1e-12
    several = run_all([command] * 2, [clean_environment(**mpi_variables(rank, 2, 0, 1)) for rank in range(2)])
    assert several.codes == [2, 2]
    for text in several.texts:
        assert text.startswith("error: mpirun has started 2 ranks on several nodes, but MASTER_ADDR is not set"), text
        assert "mpirun -x MASTER_ADDR=10.0.0.1" in text


def test_the_doctor_runs_as_ranks_of_mpirun_and_with_the_options_of_torchrun(nodes):
    """Two ranks on node 0 and one on node 1. A number that contradicts the others is reported on both nodes."""
    nodes.require("host names")
    doctor = [sys.executable, "-m", "accel_ddp.doctor", "--no_deep", "--wait", 300]
    torchrun = [*doctor, "--nnodes", 2, "--master-addr", "10.77.0.1", "--nproc_per_node"]
    ended = DoctorRun(nodes, {0: [*torchrun, 2, "--node_rank", 0], 1: [*torchrun, 1, "--node-rank", 1]}, {})
    assert ended.codes == {0: 0, 1: 0}, ended.texts
    assert all("            3 ranks (2 on node0, 1 on node1)\n" in text for text in ended.texts.values())
    accelerate = [*doctor, "--num_machines", 2, "--num_processes", 4, "--main_process_ip", "10.77.0.1"]
    ended = DoctorRun(nodes, {0: accelerate, 1: [*torchrun, 1, "--node_rank", 1]}, {})
    ended.reports("E_COUNTS", "the nodes start 3 ranks, but the total is 4: 2 ranks on node0 (machine_rank 0), 1 ranks on node1")
    ended.reports("E_COUNTS", "start torchrun with its own --nproc_per_node on each node, or use `accel-ddp launch`")
    main = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    places = [mpi_variables(0, 3, 0, 2), mpi_variables(1, 3, 1, 2), mpi_variables(2, 3, 0, 1)]
    commands = [nodes.nodes[node].command(doctor) for node in (0, 0, 1)]
    ranks = run_all(commands, [clean_environment(**place, **main) for place in places], fresh=True).well()
    for text in (ranks.texts[0], ranks.texts[2]):
        assert (
            "2 of 2 are connected: 0 node0 (10.77.0.1), 1 node1 (10.77.0.2)\n            3 ranks (2 on node0, 1 on node1)" in text
        )
    assert ranks.texts[1] == "", "one rank of each node prints"


# ---- without processes


def test_ranks_of_nodes_are_described_briefly():
    assert describe_ranks([("a", 8)]) == "1 node x 8 ranks"
    assert describe_ranks([("a", 1), ("b", 1)]) == "2 nodes x 1 rank"
    assert describe_ranks([("a", 2), ("b", 1)]) == "3 ranks (2 on a, 1 on b)"
    assert describe_ranks([("same", 2), ("same", 1)]) == "3 ranks (2 on node 0, 1 on node 1)"
    assert describe_ranks([("a", 8), ("b", 8), ("c", 8), ("d", 4)]) == "28 ranks (8 on 3 nodes, 4 on d)"


def test_nodes_are_found_from_the_hosts_and_local_ranks(monkeypatch):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert find_nodes([("a", 0, 2), ("a", 1, 2), ("b", 0, 1)]) == [0, 0, 1]
    assert find_nodes([("a", 0, 2), ("b", 0, 1), ("a", 1, 2)]) == [0, 1, 0], "distributed in turn"
    assert find_nodes([("a", 0, 1), ("a", 0, 2), ("a", 1, 2)]) == [0, 1, 1], "nodes with the same name"
    assert find_nodes([("a", 0, 2), ("a", 1, 2), ("a", 0, 2), ("a", 1, 2)]) == [0, 0, 1, 1]
    assert [estimate_node(*place) == 0 for place in ((0, 0, 1), (1, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 2))] == [
        True, True, False, False, False,
    ]  # fmt: skip


def member(node: int, ranks: int = 0, node_ranks: int = 0, **more: object) -> dict:
    place = {"node": node, "host": f"node{node}", "local_rank": 0, "local_ranks": 1, "ip": f"10.0.0.{node}", "pid": 1}
    return {**place, "nodes": 2, "ranks": ranks, "node_ranks": node_ranks, "rank": None, **more}


def test_only_numbers_that_contradict_each_other_are_errors():
    counts = lambda *members: [finding.saw for finding in compare_nodes.check_counts(list(members), is_complete=True)]
    assert counts(member(0, 0, 2), member(1, 0, 1)) == []  # the launchers of torchrun
    assert counts(member(0, 3, 2), member(1, 3, 1)) == []  # its ranks
    assert counts(member(0, 4), member(1, 4)) == []  # accelerate
    assert counts(member(0, 4), member(1, 2)) == [
        "num_processes differs: 4 on node0 (machine_rank 0), 2 on node1 (machine_rank 1)"
    ]
    assert "the nodes start 3 ranks, but the total is 4" in counts(member(0, 4, 2, rank=0), member(1, 4, 1, rank=2))[0]
    assert compare_nodes.check_counts([member(0, 3, 2)]) == [], "the other node has not connected yet"
    assert compare_nodes.count_ranks([member(0, 4), member(1, 4)]) == {0: 2, 1: 2}
    assert compare_nodes.count_ranks([member(0, 3, 2), member(1, 3, 1)]) == {0: 2, 1: 1}


def test_different_numbers_of_equal_gpus_are_no_warning_if_each_has_a_rank():
    facts = lambda *gpus: {"gpus": list(gpus), "versions": {}}
    pair = lambda first, second: [member(0, 3, 2, facts=first, clock=0.0), member(1, 3, 1, facts=second, clock=0.0)]
    assert compare_nodes.compare_facts(pair(facts("H200", "H200"), facts("H200")))[0] == []
    assert [one.code for one in compare_nodes.compare_facts(pair(facts("H200", "H200"), facts("A10")))[0]] == ["W_GPU_KINDS"]
    assert [one.code for one in compare_nodes.compare_facts(pair(facts("H200", "H200"), facts("H200", "H200")))[0]] == []
    assert [one.code for one in compare_nodes.compare_facts(pair(facts("H200"), facts("H200", "H200")))[0]] == ["W_GPU_KINDS"]


@pytest.fixture
def environment(monkeypatch):
    """Remove the variables of launchers, and restore the environment afterwards."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "MASTER_", "LOCAL_", "GROUP_", "SLURM_", "PET_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield monkeypatch
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def test_the_variables_of_mpirun_are_translated_unless_a_launcher_has_set_those_of_torch(environment):
    for name, value in mpi_variables(1, 2, 1, 2).items():
        environment.setenv(name, value)
    environment.setenv("PMIX_NAMESPACE", "job-1")
    adopt_mpi_world()
    found = topology_of_this_rank()
    assert (found.rank, found.num_ranks, found.local_rank, found.num_nodes, found.main_address) == (1, 2, 1, 1, "127.0.0.1")
    assert 20000 <= found.main_port < 32000
    environment.setenv("RANK", "0")
    environment.setenv("WORLD_SIZE", "1")
    adopt_mpi_world()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize(
    "names",
    [("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_SIZE",)],
    ids=["MPICH and Intel MPI", "srun --mpi=pmi2", "incomplete"],
)
def test_only_complete_variables_of_mpi_are_translated(environment, names):
    for name in names:
        environment.setenv(name, "1" if "RANK" in name.removesuffix("RANKS") else "2")
    adopt_mpi_world()
    assert os.environ.get("WORLD_SIZE") == ("2" if len(names) == 4 else None)


def test_torchrun_states_the_ranks_of_its_own_node(environment):
    found = find_topology(
        {"num_machines": "2", "nproc_per_node": "3", "machine_rank": 1}, str(ROOT / "accelerate_configs/2node.yaml")
    )
    assert (found.num_ranks, found.num_node_ranks, found.ranks_of_this_node) == (0, 3, 3)
    assert find_topology({"num_machines": 2, "nproc_per_node": "gpu"}).ranks_of_this_node == 0
    with pytest.raises(UserError, match=r"nproc_per_node 'three' \(--nproc_per_node\): must be a whole number"):
        find_topology({"nproc_per_node": "three"})


def test_tune_prints_the_launcher_of_the_user():
    own = ["--nnodes=2", "--nproc-per-node", "2", "--node_rank", "0", "--master_addr", "a", "--minutes", "1"]
    assert _launch_command(2, own, ["r.py"]) == (
        "torchrun --nproc_per_node $NUMBER_OF_RANKS --nnodes=2 --master_addr a --node_rank $NODE_RANK r.py"
    )
    own = ["--num_machines", "2", "--main-process-ip", "a", "--machine_rank", "0"]
    assert _launch_command(2, own, ["r.py"]) == (
        "accelerate launch --num_machines 2 --main-process-ip a --machine_rank $NODE_RANK r.py"
    )
