"""The nodes of tests/nodes.py, on which other tests rely, are separate, and nothing remains of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Running, clean_environment, run_all
from tests.nodes import Node, Nodes, NotPossible, pids_in_network

LISTENING = """
import signal, socket, sys
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
signal.pause()
"""
PRINTS_ITSELF = "import json, os; print(json.dumps([os.getpid(), os.getcwd(), dict(os.environ)])); raise SystemExit(7)"
HANDLES_SIGNALS = """
import signal, sys, time
for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda number, frame: sys.exit(100 + number))
print("ready", flush=True)
time.sleep(60)
"""
LEAVES_A_PROCESS = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"


@pytest.fixture(scope="module", params=["root", "user"])
def shared(request):
    try:
        made = Nodes(2, request.param)
    except NotPossible as error:
        ends = pytest.fail if request.param == "root" and os.environ.get("CI") and os.geteuid() == 0 else pytest.skip
        ends(f"nodes of kind {request.param!r} are not tested: {error}")
    with made:
        yield made


@pytest.fixture
def pair(shared):
    shared.reset()
    return shared


def output_of(node: Node, *command: object) -> str:
    return subprocess.run(node.command(list(command)), capture_output=True, text=True, check=True).stdout.strip()


def connection_result(node: Node, host: str, port: int, patience: float = 10) -> str:
    """Return how a connection attempt ends. Every result except "silence" comes immediately, unless the machine is busy."""
    command = node.command(["timeout", patience, "bash", "-c", f"</dev/tcp/{host}/{port}"])
    done = subprocess.run(command, capture_output=True, text=True)
    known = {0: "open", 124: "silence"}
    return known.get(done.returncode) or ("refused" if "Connection refused" in done.stderr else done.stderr)


def address_of(name: str, node: Node) -> str:
    return output_of(node, "getent", "ahostsv4", name).split()[0]


def listening(node: Node, *ports: int) -> Running:
    running = Running([node.command([sys.executable, "-c", LISTENING, *ports])], [clean_environment()])
    running.until("listening")
    return running


def test_nodes_reach_each_other_by_name_and_address(pair):
    first, second = pair.nodes
    assert (second.number, second.name, second.address) == (1, "node1", "10.77.0.2")
    assert [output_of(node, "hostname") for node in pair.nodes] == ["node0", "node1"]
    server = listening(second, 29500)
    assert [connection_result(first, host, 29500) for host in ("node1", "10.77.0.2", "localhost")] == ["open", "open", "refused"]
    assert connection_result(second, "localhost", 29500) == "open"
    assert set(output_of(first, "ls", "/sys/class/net").split()) == {"eth0", "lo"}
    server.kill()


def test_a_firewall_blocks_incoming_packets_until_the_reset(pair):
    first, second = pair.nodes
    listening(second, 29500)
    second.firewall("ct state established,related accept", "meta length gt 1400 drop", "tcp dport 29500 drop")
    assert connection_result(first, "node1", 29500, patience=0.3) == "silence"
    assert connection_result(first, "node1", 29501) == "refused"
    assert connection_result(second, "node1", 29500) == "open"  # the node itself
    second.firewall("tcp dport 29501 drop")
    assert connection_result(first, "node1", 29500) == "open"
    second.firewall("tcp dport 29500 drop")
    pair.reset()
    listening(second, 29500)
    assert connection_result(first, "node1", 29500) == "open"
    with pytest.raises(NotPossible, match="syntax error"):
        second.firewall("no such rule")


def test_a_disconnected_node_loses_packets_without_an_error(pair):
    first, second = pair.nodes
    second.link(False)
    assert connection_result(second, "node0", 1, patience=0.3) == "silence"
    second.link(True)
    assert connection_result(first, "node1", 1) == "refused"
    second.link(False)
    pair.reset()
    assert connection_result(first, "node1", 1) == "refused"


def test_each_node_has_its_own_hosts_file(pair):
    second = pair.nodes[1]
    second.hosts({"node1": "127.0.1.1", "other": "10.77.0.9"})
    assert [address_of("node1", node) for node in pair.nodes] == ["10.77.0.2", "127.0.1.1"]
    assert [address_of(name, second) for name in ("node0", "other")] == ["10.77.0.1", "10.77.0.9"]
    assert "node1" not in Path("/etc/hosts").read_text()
    pair.reset()
    assert address_of("node1", second) == "10.77.0.2"
    assert subprocess.run(second.command(["getent", "ahostsv4", "other"])).returncode == 2


def test_a_command_starts_and_ends_as_it_does_outside_of_a_node(pair, tmp_path):
    environment = clean_environment(TEXT='a "word"\nand a second line')
    running = Running([pair.nodes[1].command([sys.executable, "-c", PRINTS_ITSELF])], [environment], tmp_path)
    ended = running.ended()
    assert ended.codes == [7]
    pid, folder, seen = json.loads(ended.text)
    assert (pid, folder) == (running.processes[0].pid, str(tmp_path))
    assert {name: seen.get(name) for name in environment.keys() - {"PWD", "_", "SHLVL"}}.items() <= environment.items()


def test_a_signal_reaches_the_command(pair):
    codes = {signal.SIGTERM: 115, signal.SIGINT: 102, signal.SIGKILL: -9}
    running = Running([pair.nodes[1].command([sys.executable, "-c", HANDLES_SIGNALS])] * 3, [clean_environment()] * 3)
    for index, number in enumerate(codes):
        running.until("ready", index)
        os.kill(running.processes[index].pid, number)
    assert running.ended().codes == list(codes.values())
    assert pair.nodes[1].pids() == []


def test_remaining_processes_are_listed_and_killed(pair):
    first, second = pair.nodes
    subprocess.run(second.command([sys.executable, "-c", LEAVES_A_PROCESS]), check=True)
    assert first.pids() == []
    assert [Path(f"/proc/{pid}/comm").read_text() for pid in second.pids()] == ["sleep\n"]
    pair.reset()
    assert second.pids() == []


def traces(spaces: list) -> list[str]:
    """Return the folders, names and processes that exist for these namespaces."""
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [
        *(str(space.files) for space in spaces if space.files.exists()),
        *(line for line in named.splitlines() if line.split()[0] in [space.handle for space in spaces]),
        *(f"process {pid}" for space in spaces for pid in pids_in_network(space.identity)),
    ]


def test_nothing_remains_after_close(pair):
    with Nodes(2, pair.kind) as made:
        spaces = list(made.spaces)
        subprocess.run(made.nodes[1].command([sys.executable, "-c", LEAVES_A_PROCESS]), check=True)
        assert len(traces(spaces)) == 3 + 3 + 1  # folders; names or holders; the process that remains
    assert traces(spaces) == []
    made.close()
    assert pair.nodes[0].pids() == []


# The interpreter is started as root, because only root may be able to read its folder.
IN_ANOTHER_SESSION = """
import os, subprocess, sys, time
from tests.nodes import Nodes, best_kind
if sys.argv[2:] == ["as nobody"]:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
made = Nodes(2, sys.argv[1] if sys.argv[1:] else None)
"""
WAITS = """
print(*(word for space in made.spaces for word in (space.handle, space.identity)), flush=True)
time.sleep(60)
"""
CHECKS_NODES = """
def output_of(node, *words):
    done = subprocess.run(node.command(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout

first, second = made.nodes
assert made.kind == "user" and best_kind() == ("user", "root: the user is not root"), best_kind()
assert output_of(second, "hostname") == (0, "node1\\n")
connect = ["bash", "-c", "</dev/tcp/node1/29500"]
assert "refused" in output_of(first, *connect)[1], output_of(first, *connect)
second.firewall("tcp dport 29500 drop")
assert output_of(first, "timeout", "0.3", *connect) == (124, "")
second.hosts({"node0": "10.77.0.9"})
assert output_of(second, "getent", "ahostsv4", "node0")[1].startswith("10.77.0.9 ")
left = subprocess.Popen(second.command(["sleep", "60"]))
while second.pids() != [left.pid]:
    pass
made.reset()
assert left.wait() == -9 and "refused" in output_of(first, *connect)[1]
"""


def test_a_session_removes_what_a_killed_session_has_left(pair):
    """Processes of the killed session end with it. The next session removes its names and folders."""
    running = Running([[sys.executable, "-c", IN_ANOTHER_SESSION + WAITS, pair.kind]], [clean_environment()])
    running.until("\n")
    fields = running.read[0].split()
    handles, identities = fields[::2], [int(identity) for identity in fields[1::2]]
    running.processes[0].kill()
    running.ended()
    Nodes(1, pair.kind).close()
    deadline = time.monotonic() + 180
    while any(pids_in_network(identity) for identity in identities):
        assert time.monotonic() < deadline
    assert len(handles) == 3
    assert not [path for handle in handles for path in (Path("/etc/netns", handle), Path("/run/netns", handle)) if path.exists()]


def test_nodes_of_an_unprivileged_user():
    if os.geteuid():
        pytest.skip("the other tests of this file already test this, because the user is not root")
    ended = run_all([[sys.executable, "-c", IN_ANOTHER_SESSION + CHECKS_NODES, "user", "as nobody"]], [clean_environment()])
    if "NotPossible" in ended.text:
        pytest.skip(f"nodes of an unprivileged user are not tested: {ended.text.splitlines()[-1]}")
    ended.well()


def test_tests_that_need_namespaces_are_skipped_on_loopback_but_fail_in_ci_as_root(monkeypatch):
    with Nodes(2, "loopback") as made:
        first, second = made.nodes
        assert (first.address, second.address) == ("127.0.0.2", "127.0.0.3")
        subprocess.run(second.command([sys.executable, "-c", LEAVES_A_PROCESS]), check=True)
        assert (len(first.pids()), len(second.pids())) == (0, 1)
        made.reset()
        assert second.pids() == []
        monkeypatch.delenv("CI", raising=False)
        for needs in (first.firewall, lambda: first.hosts({}), lambda: first.link(False), lambda: made.require("host names")):
            with pytest.raises(pytest.skip.Exception, match=r"not tested: .* needs root, or unprivileged user namespaces"):
                needs()
        monkeypatch.setenv("CI", "true")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        with pytest.raises(pytest.fail.Exception, match=r"not tested: .* a firewall"):
            first.firewall()


def test_the_nodes_of_the_session_are_in_their_initial_state(nodes, cluster):
    assert nodes is cluster
    assert [node.number for node in nodes.nodes] == [0, 1, 2]
    assert nodes.nodes[2].pids() == []
