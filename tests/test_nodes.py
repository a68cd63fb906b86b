"""What other tests rely on: the nodes of tests/nodes.py are as separate as they say, and nothing is left of them."""

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

LISTENS = """
import signal, socket, sys
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listens", flush=True)
signal.pause()
"""
SAYS_ALL = "import json, os; print(json.dumps([os.getpid(), os.getcwd(), dict(os.environ)])); raise SystemExit(7)"
HEARS = """
import signal, sys, time
for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda number, frame: sys.exit(100 + number))
print("hears", flush=True)
time.sleep(60)
"""
STAYS = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"


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


def said(node: Node, *words: object) -> str:
    return subprocess.run(node.command(list(words)), capture_output=True, text=True, check=True).stdout.strip()


def answer(node: Node, place: str, port: int, patience: float = 10) -> str:
    """Of who is there. All answers but "silence" come at once, unless the machine is busy."""
    command = node.command(["timeout", patience, "bash", "-c", f"</dev/tcp/{place}/{port}"])
    done = subprocess.run(command, capture_output=True, text=True)
    known = {0: "open", 124: "silence"}
    return known.get(done.returncode) or ("refused" if "Connection refused" in done.stderr else done.stderr)


def address_of(name: str, node: Node) -> str:
    return said(node, "getent", "ahostsv4", name).split()[0]


def listening(node: Node, *ports: int) -> Running:
    running = Running([node.command([sys.executable, "-c", LISTENS, *ports])], [clean_environment()])
    running.until("listens")
    return running


def test_nodes_see_each_other_by_name_and_address(pair):
    first, second = pair.nodes
    assert (second.number, second.name, second.address) == (1, "node1", "10.77.0.2")
    assert [said(node, "hostname") for node in pair.nodes] == ["node0", "node1"]
    server = listening(second, 29500)
    assert [answer(first, place, 29500) for place in ("node1", "10.77.0.2", "localhost")] == ["open", "open", "refused"]
    assert answer(second, "localhost", 29500) == "open"
    assert set(said(first, "ls", "/sys/class/net").split()) == {"eth0", "lo"}
    server.kill()


def test_a_firewall_closes_what_comes_in_until_the_reset(pair):
    first, second = pair.nodes
    listening(second, 29500)
    second.firewall("ct state established,related accept", "meta length gt 1400 drop", "tcp dport 29500 drop")
    assert answer(first, "node1", 29500, patience=0.3) == "silence"
    assert answer(first, "node1", 29501) == "refused"
    assert answer(second, "node1", 29500) == "open"  # the node itself
    second.firewall("tcp dport 29501 drop")
    assert answer(first, "node1", 29500) == "open"
    second.firewall("tcp dport 29500 drop")
    pair.reset()
    listening(second, 29500)
    assert answer(first, "node1", 29500) == "open"
    with pytest.raises(NotPossible, match="syntax error"):
        second.firewall("no such rule")


def test_a_link_that_is_down_loses_packets_in_silence(pair):
    first, second = pair.nodes
    second.link(False)
    assert answer(second, "node0", 1, patience=0.3) == "silence"
    second.link(True)
    assert answer(first, "node1", 1) == "refused"
    second.link(False)
    pair.reset()
    assert answer(first, "node1", 1) == "refused"


def test_a_hosts_file_is_of_one_node(pair):
    second = pair.nodes[1]
    second.hosts({"node1": "127.0.1.1", "other": "10.77.0.9"})
    assert [address_of("node1", node) for node in pair.nodes] == ["10.77.0.2", "127.0.1.1"]
    assert [address_of(name, second) for name in ("node0", "other")] == ["10.77.0.1", "10.77.0.9"]
    assert "node1" not in Path("/etc/hosts").read_text()
    pair.reset()
    assert address_of("node1", second) == "10.77.0.2"
    assert subprocess.run(second.command(["getent", "ahostsv4", "other"])).returncode == 2


def test_a_command_starts_and_ends_as_without_a_node(pair, tmp_path):
    environment = clean_environment(WORDS='a "word"\nof two lines')
    running = Running([pair.nodes[1].command([sys.executable, "-c", SAYS_ALL])], [environment], tmp_path)
    ended = running.ended()
    assert ended.codes == [7]
    pid, folder, seen = json.loads(ended.text)
    assert (pid, folder) == (running.processes[0].pid, str(tmp_path))
    assert {name: seen.get(name) for name in environment.keys() - {"PWD", "_", "SHLVL"}}.items() <= environment.items()


def test_a_signal_is_for_the_command(pair):
    codes = {signal.SIGTERM: 115, signal.SIGINT: 102, signal.SIGKILL: -9}
    running = Running([pair.nodes[1].command([sys.executable, "-c", HEARS])] * 3, [clean_environment()] * 3)
    for place, number in enumerate(codes):
        running.until("hears", place)
        os.kill(running.processes[place].pid, number)
    assert running.ended(10).codes == list(codes.values())
    assert pair.nodes[1].pids() == []


def test_processes_that_are_left_are_seen_and_ended(pair):
    first, second = pair.nodes
    subprocess.run(second.command([sys.executable, "-c", STAYS]), check=True)
    assert first.pids() == []
    assert [Path(f"/proc/{pid}/comm").read_text() for pid in second.pids()] == ["sleep\n"]
    pair.reset()
    assert second.pids() == []


def traces(spaces: list) -> list[str]:
    """What is there of them."""
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [
        *(str(space.files) for space in spaces if space.files.exists()),
        *(line for line in named.splitlines() if line.split()[0] in [space.handle for space in spaces]),
        *(f"process {pid}" for space in spaces for pid in pids_in_network(space.identity)),
    ]


def test_nothing_is_left_at_the_end(pair):
    with Nodes(2, pair.kind) as made:
        spaces = list(made.spaces)
        subprocess.run(made.nodes[1].command([sys.executable, "-c", STAYS]), check=True)
        assert len(traces(spaces)) == 3 + 3 + 1  # folders; names or holders; the process that stays
    assert traces(spaces) == []
    made.close()
    assert pair.nodes[0].pids() == []


# The interpreter is started as root, for it may lie where only root can read.
IN_ANOTHER_SESSION = """
import os, subprocess, sys, time
from tests.nodes import Nodes, best_kind
if sys.argv[2:] == ["as nobody"]:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
made = Nodes(2, sys.argv[1] if sys.argv[1:] else None)
"""
IS_KILLED = """
print(*(word for space in made.spaces for word in (space.handle, space.identity)), flush=True)
time.sleep(60)
"""
IS_NOBODY = """
def said(node, *words):
    done = subprocess.run(node.command(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout

first, second = made.nodes
assert made.kind == "user" and best_kind() == ("user", "root: this is not root"), best_kind()
assert said(second, "hostname") == (0, "node1\\n")
connect = ["bash", "-c", "</dev/tcp/node1/29500"]
assert "refused" in said(first, *connect)[1], said(first, *connect)
second.firewall("tcp dport 29500 drop")
assert said(first, "timeout", "0.3", *connect) == (124, "")
second.hosts({"node0": "10.77.0.9"})
assert said(second, "getent", "ahostsv4", "node0")[1].startswith("10.77.0.9 ")
left = subprocess.Popen(second.command(["sleep", "60"]))
while second.pids() != [left.pid]:
    pass
made.reset()
assert left.wait() == -9 and "refused" in said(first, *connect)[1]
"""


def test_what_a_killed_session_has_left_is_removed_by_the_next(pair):
    """Its holders end with it; of names and folders the next one takes care."""
    running = Running([[sys.executable, "-c", IN_ANOTHER_SESSION + IS_KILLED, pair.kind]], [clean_environment()])
    running.until("\n")
    words = running.read[0].split()
    handles, identities = words[::2], [int(identity) for identity in words[1::2]]
    running.processes[0].kill()
    running.ended(10)
    Nodes(1, pair.kind).close()
    deadline = time.monotonic() + 10
    while any(pids_in_network(identity) for identity in identities):
        assert time.monotonic() < deadline
    assert len(handles) == 3
    assert not [
        place for handle in handles for place in (Path("/etc/netns", handle), Path("/run/netns", handle)) if place.exists()
    ]


def test_nodes_of_an_unprivileged_user():
    if os.geteuid():
        pytest.skip("the other tests of this file have just tested it, for this is not root")
    ended = run_all([[sys.executable, "-c", IN_ANOTHER_SESSION + IS_NOBODY, "user", "as nobody"]], [clean_environment()])
    if "NotPossible" in ended.text:
        pytest.skip(f"nodes of an unprivileged user are not tested: {ended.text.splitlines()[-1]}")
    ended.well()


def test_on_loopback_what_needs_more_is_skipped_but_fails_on_the_ci_of_a_root(monkeypatch):
    with Nodes(2, "loopback") as made:
        first, second = made.nodes
        assert (first.address, second.address) == ("127.0.0.2", "127.0.0.3")
        subprocess.run(second.command([sys.executable, "-c", STAYS]), check=True)
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


def test_the_nodes_of_the_session_are_as_new(nodes, cluster):
    assert nodes is cluster
    assert [node.number for node in nodes.nodes] == [0, 1, 2]
    assert nodes.nodes[2].pids() == []
