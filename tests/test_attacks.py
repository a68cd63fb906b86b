"""A stranger in the network can read the store, connect and record, but cannot end, stop or change a run. SECURITY.md has the table."""

import asyncio
import contextlib
import json
import os
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from accel_ddp.doctor.collective_launch import WorkerProcesses
from accel_ddp.errors import UserError
from accel_ddp.nodes.run_secret import NodeKeys, read_secret
from accel_ddp.saving.checkpoint_format import list_checkpoints
from accel_ddp.watch.link import Peers
from accel_ddp.watch.monitor import Monitor
from accel_ddp.watch.slowness import STRAGGLER
from tests.conftest import PROGRAMS, clean_environment
from tests.jobs import Job, Jobs
from tests.nodes import Node, Nodes, tool

STRANGER = PROGRAMS / "stranger.py"


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """Jobs on nodes 0 and 1. Node 2 is the stranger."""
    with Nodes(3) as cluster:
        made = Jobs(cluster)
        yield made
        made.close()


def stranger(node: Node, *words: object) -> subprocess.Popen:
    command = node.command([sys.executable, STRANGER, *words])
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=clean_environment(), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def listening(node: Node) -> list[str]:
    """Return ADDRESS:PORT of everything that listens in a node, as `ss` shows it."""
    done = subprocess.run(node.command([tool("ss"), "-Htln"]), capture_output=True, text=True, check=True)
    return [line.split()[3] for line in done.stdout.splitlines()]


def attacked(jobs: Jobs, job: Job, recorder: subprocess.Popen, num_idle: int, folder: Path) -> dict:
    """Attack a job, then stop it. Return what the stranger has found out."""
    first, second, other = jobs.cluster.nodes
    job.until_step(3)
    recorded, _ = recorder.communicate("end\n", timeout=120)
    ports = {node.address: listening(node) for node in (first, second)}
    print("LISTENING", ports)
    # Only torch's store listens on all addresses, and only on the main node.
    everywhere = [place for place in ports[first.address] if re.match(r"\*|0\.0\.0\.0|\[::\]", place)]
    assert len(everywhere) == 1, ports
    assert all(place.startswith(second.address) for place in ports[second.address]), ports
    targets = [place.replace("*", first.address) for places in ports.values() for place in places]
    holder = stranger(other, "hold", num_idle, *targets)
    attack = stranger(other, first.address, everywhere[0].rpartition(":")[2])
    found, _ = attack.communicate(recorded, timeout=180)
    assert holder.stdout.readline().startswith("holds "), holder.communicate("")
    other.link(False)  # the connections of the holder are half-open from now on
    holder.kill()
    holder.communicate()
    job.until_step(job.last_step() + 3)  # it continues
    (folder / "STOP").touch()
    assert job.codes() == [75, 75], job.all_output()
    assert "stopped: requested by the file" in job.text()
    other.link(True)
    return {**json.loads(found.splitlines()[-1]), "ports": ports}


@pytest.mark.parametrize("secret", ["", pytest.param("a secret of the run", marks=pytest.mark.slow)])
def test_a_stranger_cannot_end_stop_or_change_a_run(jobs, tmp_path, secret):
    jobs.cluster.require("addresses of their own")
    for number in (0, 1):  # ranks inherit the limit of the server that forks them
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(jobs.server(number).process.pid, resource.RLIMIT_NOFILE, (512, limits[1]))
    options = ["--steps", 5000, "--save_every", 0]  # until the test stops it
    start = lambda *more: jobs.ranks([0, 1], *options, "--output_dir", *more, ACCEL_DDP_TOKEN=secret)
    recorder = stranger(jobs.cluster.nodes[0], "record")
    assert recorder.stdout.readline() == "records\n"
    with start(tmp_path / "attacked") as job:
        limit = resource.prlimit(job.rank_pid(0), resource.RLIMIT_NOFILE)
        assert limit[0] == min(limit[1], 1 << 20) > 512, "the soft limit of open files is raised"
        found = attacked(jobs, job, recorder, 100 if secret else 5, tmp_path / "attacked")
        assert ("security: the nodes trust the keys" in job.text(0)) == (not secret), job.text(0)
        assert found["accepted"] == []
        assert found["learned"] <= 16, "a process without the key receives nothing but a random number"
        assert found["has_replayed"] > 200, "the handshake and a heartbeat"
        assert [d for d in job.diagnoses() if d.kind != STRAGGLER] == []  # other processes may slow one of the ranks
        assert "planted" not in job.text()
        if secret:
            assert secret not in json.dumps(found)
            assert not [
                file for file in (tmp_path / "attacked").rglob("*") if file.is_file() and secret.encode() in file.read_bytes()
            ]
    if not secret:  # a second run would take too long for a test that is not slow
        return
    stopped = int(list_checkpoints(tmp_path / "attacked")[-1].name[5:])
    with start(tmp_path / "reference", "--step_seconds", 0, "--stop_after", stopped) as job:
        assert job.codes() == [75, 75]
    assert weights(tmp_path / "attacked") == weights(tmp_path / "reference")


def weights(folder) -> bytes:
    return (list_checkpoints(folder)[-1] / "model.safetensors").read_bytes()


# ---- the connections of monitors, in this process


@contextlib.asynccontextmanager
async def two_peers(handle: Callable, keys: tuple[NodeKeys, NodeKeys]) -> AsyncIterator[tuple[Peers, Peers, Callable[[], Peers]]]:
    """Yield the peers of node 0 and node 1, which are connected, and a function that makes another node 1."""
    server = await asyncio.start_server(lambda *streams: first.accept(*streams), "127.0.0.1", 0)
    place = {"address": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}

    def make(own: int) -> Peers:
        shared = [keys[own].shared_with(keys[node].public, "test", (own, node)).hex() for node in range(2)]
        roster = [{"node": node, "host": f"node{node}", "key": shared[node], **place} for node in range(2)]
        return Peers(own, roster, handle if own == 0 else lambda *_: None)

    first, second = make(0), make(1)
    second.start()
    while not (second.peers[0].stream and first.peers[1].stream):
        await asyncio.sleep(0.01)
    yield first, second, lambda: make(1)
    await second.close()
    await first.close()
    server.close()


def keys_of(secret: str) -> tuple[NodeKeys, NodeKeys]:
    return NodeKeys(secret), NodeKeys(secret)


async def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("secret", ["", "secret"])
def test_a_second_connection_of_a_node_replaces_the_first_one_only_if_that_is_silent(secret):
    """Even one that has the key, for example because the secret has leaked."""

    async def attack() -> None:
        received: list[dict] = []
        async with two_peers(lambda node, message: received.append(message), keys_of(secret)) as (first, second, make):
            beating = asyncio.ensure_future(beat(second))
            working = first.peers[1].stream
            other = make()
            other.start()
            assert await until(lambda: other.peers[0].stream)
            other.send(0, {"from": "other"})
            await asyncio.sleep(2)
            assert first.peers[1].stream is working
            assert {"from": "other"} not in received
            beating.cancel()  # the first one is silent
            assert await until(lambda: first.peers[1].stream not in (working, None))
            assert await until(lambda: {"from": "other"} in received)
            await other.close()

    async def beat(peers: Peers) -> None:
        while True:
            peers.send(0, {"beat": 1})
            await asyncio.sleep(0.1)

    asyncio.run(attack())


def test_recorded_messages_are_of_no_use():
    """Repeated in the same connection, in another one, and as a datagram. A changed message is rejected too."""

    async def attack() -> None:
        received: list[dict] = []
        async with two_peers(lambda node, message: received.append(message), keys_of("")) as (first, second, _):
            sent = []
            write = second.peers[0].stream.writer.write
            second.peers[0].stream.writer.write = lambda data: (sent.append(data), write(data))
            second.send(0, {"stop": "once"})
            assert await until(lambda: received == [{"stop": "once"}])
            stream = first.peers[1].stream
            write(sent[0])
            assert await until(lambda: first.peers[1].stream is not stream), "the connection with the repeated message ends"
            assert await until(lambda: first.peers[1].stream and second.peers[0].stream), "and the node connects again"
            second.peers[0].stream.writer.write(sent[0].replace(b"once", b"more"))
            await asyncio.sleep(0.2)
            assert received == [{"stop": "once"}]
            ping = second.make_ping(1, 0, 5)
            from accel_ddp.watch.link import _Pings

            pings = _Pings(first)
            pings.datagram_received(ping, None)
            assert first.peers[1].pinged_at
            first.peers[1].pinged_at = 0
            for data in (ping, b"", b"x", second.make_ping(0, 0, 9), struct.pack(">IQ", 1, 9) + ping[12:]):
                pings.datagram_received(data, None)
            assert not first.peers[1].pinged_at

    asyncio.run(attack())


def test_malformed_messages_of_a_node_change_nothing_and_are_reported_once(capfd):
    place = {"rank": 1, "host": "x", "step": 1}
    bad = [
        {"ranks": 5}, {"ranks": [[1, 2]]}, {"ranks": [{}]}, {"failure": 5}, {"failure": {"kind": "died"}}, {"failed": []},
        {"failed": {"line": 1}}, {"stop": 7}, {"event": {"severity": "error"}}, {"incident": [1]}, {"want_stack": "x"},
        {"stack": [1, [2], ""]}, {"measure": []}, {"rate": 3}, {"event": {"severity": 1, "kind": "", "text": "", **place}},
    ]  # fmt: skip

    async def attack() -> None:
        monitor = Monitor(node=0, host="node0", launcher=0, parent=os.getpid(), report_after=5, abort_after=30)
        async with two_peers(monitor.receive, keys_of("secret")) as (first, second, _):
            stream = first.peers[1].stream
            for message in bad * 2:
                second.send(0, message)
            second.send(0, {"stop": "a real one"})
            assert await until(lambda: monitor.stop_reason)
            assert monitor.stop_reason == "a real one"
            assert monitor.failure is None
            assert monitor.tasks == set()
            assert first.peers[1].stream is stream, "the connection is open"

    asyncio.run(attack())
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert 1 <= printed.count("a message of the monitor of node1 cannot be handled") <= 3, printed


def test_the_log_of_nccl_is_in_a_private_folder(tmp_path):
    """The doctor names the file, and NCCL, which may run as root, writes it."""
    code = "import json, os\nname = os.path.dirname(os.environ['NCCL_DEBUG_FILE'])\nmode = os.stat(name).st_mode & 0o777\n"
    (tmp_path / "shows.py").write_text(f"{code}print(json.dumps({{'name': name, 'mode': mode}}))\n")
    events: list[dict] = []

    async def run() -> None:
        workers = WorkerProcesses("shows", 0, [1], "127.0.0.1", {**os.environ, "PYTHONPATH": str(tmp_path)})
        for _ in range(2):
            workers.start(0, 1, {}, {"nccl_debug": "INFO"}, events.append)
            await workers.running

    asyncio.run(run())
    reports = [event["report"] for event in events if event["event"] == "worker_report"]
    assert [report["mode"] for report in reports] == [0o700] * 2, events
    assert reports[0]["name"] != reports[1]["name"]


# ---- the secret


def test_a_file_with_the_secret_must_be_private(tmp_path, monkeypatch):
    file = tmp_path / "token"
    monkeypatch.setenv("ACCEL_DDP_TOKEN_FILE", str(file))
    monkeypatch.delenv("ACCEL_DDP_TOKEN", raising=False)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_secret()
    file.write_text("")
    file.chmod(0o600)
    with pytest.raises(UserError, match="is empty"):
        read_secret()
    file.write_text("from a file\n")
    assert read_secret() == "from a file"
    for mode in (0o640, 0o604, 0o622):
        file.chmod(mode)
        with pytest.raises(UserError, match=rf"other users may read or change it \(mode {mode:04o}\). Run: chmod 600"):
            read_secret()
    monkeypatch.setenv("ACCEL_DDP_TOKEN", "from the environment")
    assert read_secret() == "from the environment"


@pytest.mark.slow  # imports torch
def test_nodes_of_which_only_one_has_a_secret_are_told_so():
    from accel_ddp.ranks import group

    ranks = [{"host": f"node{node}", "key": key} for node, key in enumerate(["", NodeKeys("").public])]
    with pytest.raises(UserError, match="is set on node0, but not on node1"):
        group._check_keys(ranks)


@pytest.mark.slow
def test_a_rank_that_dies_of_too_many_connections_names_the_cause(jobs, tmp_path):
    """A stranger connects to gloo's ports, which ask for no key, until the rank may open no more files. gloo then ends the process."""
    first, _, other = jobs.cluster.nodes
    with jobs.ranks([0, 1], "--output_dir", tmp_path / "run", "--step_seconds", 1) as job:
        job.until_step(2)
        pid = job.rank_pid(0)
        most = len(os.listdir(f"/proc/{pid}/fd")) + 150
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        targets = [place for place in listening(first) if place.startswith(first.address)]
        holder = stranger(other, "hold", 150, *targets)
        found = job.until_diagnosis("RANK_DIED|RANK_FAILED", "error", 60)
        holder.kill()
        assert re.search(rf"files and connections open, and may have {most}|too many open files", found.text), found.text
        assert found.number("rank") == 0
