"""`accel-ddp launch` on machines with a real sshd, as an unprivileged user. No process is left on any machine after any test."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from tests.conftest import BIN, Ended, Running, free_port
from tests.ssh_nodes import Machine, Machines

SCRIPT = "tests/programs/launched.py"
TRAINS = "tests/programs/trains.py"
ODD = [
    "two words",
    "it's",
    '"quoted"',
    "$HOME `id` $(id) \\ \\n",
    "line\nline",
    "ü 漢",
    "",
    "*",
    "--x=a b",
    "-",
    "{}",
    "~",
    "a;b&c|d",
]
SECRET = "wandb-0123456789abcdef"
# Nodes with different numbers of processes are started by torchrun, which is twice as fast as Accelerate.
UNEQUAL = [{"host": "node0", "processes": 2}, "node1"]


def accel_ddp(*words: object) -> list:
    return [BIN / "accel-ddp", *words]


def start(machines: Machines, *words: object, **env: str) -> Running:
    """Start `accel-ddp launch` on the laptop."""
    return machines.laptop.start_command(accel_ddp("launch", *words), **env)


def launch(machines: Machines, *words: object, timeout: float = 300, **env: str) -> Ended:
    return start(machines, *words, **env).ended(timeout)


def in_terminal(machines: Machines, *words: object) -> pexpect.spawn:
    """Start `accel-ddp launch` in a terminal on the laptop."""
    command = [str(word) for word in machines.laptop.command(accel_ddp("launch", *words))]
    env = machines.laptop.environment(TERM="xterm-256color", CI="")
    return pexpect.spawn(
        command[0], command[1:], env=env, encoding="utf-8", timeout=300, dimensions=(40, 200), codec_errors="replace",
    )  # fmt: skip


def ranks_of(machines: Machines) -> list[int]:
    """Return the pids of the ranks that run SCRIPT or TRAINS on any machine, without launchers and guards."""
    is_rank = re.compile(r"python\S* (-u )?\S*tests/programs/\w+\.py")
    found = {pid: words for processes in machines.all_processes().values() for pid, words in processes.items()}
    return [
        pid for pid, words in found.items() if is_rank.search(words) and not re.search("torchrun|accelerate|accel-ddp", words)
    ]


def received(text: str) -> list[dict]:
    """Return what the ranks of SCRIPT have printed, ordered by rank. Two ranks of one node may print into one line."""
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(text, match.start())[0] for match in re.finditer(r'\{"argv"', text)]
    return sorted(found, key=lambda one: int(one["world"][0]))


def nothing_left(machines: Machines, seconds: float = 30) -> None:
    left = machines.left(seconds)
    assert left == [], "these processes are left:\n" + "\n".join(left)


@contextlib.contextmanager
def watched(machines: Machines) -> Iterator[set[str]]:
    """Collect every command line that any process of any machine has meanwhile."""
    seen, is_over = set(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            seen.update(line.split(" ", 2)[2] for line in machines.processes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def logs(machines: Machines, job: str, output: str = "work/runs") -> dict[str, str]:
    """Return the text of the log of each node that has one, by the name of the file, without the folders of other nodes."""
    found = {}
    for machine in machines.nodes:
        for path in (machine.home / output / job / "launch").glob("*.log"):
            found[f"{machine.name}/{path.name}"] = path.read_text()
    return found


# -- before the start ------------------------------------------------------------------------------------------------------------


def block_port(machines: Machines, keys: dict) -> None:
    node = machines.nodes[0]
    code = (
        f"import socket, time; s = socket.create_server(('', {keys['main_port']})); print('ready', flush=True); time.sleep(600)"
    )
    machines.listener = node.start_command([sys.executable, "-c", code])
    machines.listener.until("ready")


def other_package(machines: Machines, keys: dict) -> None:
    machines.write(machines.nodes[1], "work/accelerate-1.0.0.dist-info/METADATA", "Name: accelerate\nVersion: 1.0.0\n")


def other_python(machines: Machines, keys: dict) -> None:
    """Give node1 a virtual environment whose Python reports another version, because most machines have only one."""
    node, library = machines.nodes[1], f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    lines = f"{packages}\nimport platform; platform.python_version = lambda: '3.9.18'\n"
    machines.write(node, "other/pyvenv.cfg", f"home = {sys.base_prefix}/bin\n")
    machines.write(node, f"other/lib/{library}/site-packages/packages.pth", lines)
    machines.write(node, "other/bin/accelerate", "#!/bin/sh\n").chmod(0o755)
    (node.home / "other/bin/python").symlink_to(f"{sys.base_prefix}/bin/python3")
    keys["nodes"] = ["node0", {"host": "node1", "venv": "~/other"}]


def other_commit(machines: Machines, keys: dict) -> None:
    node = machines.nodes[1]
    machines.write(node, f"work/{SCRIPT}", (node.work / SCRIPT).read_text() + "\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    node.run(*git, "commit", "-qam", "Another state.").well()


def full_disk(machines: Machines, keys: dict) -> None:
    machines.nodes[1].fill_disk()


def missing_script(machines: Machines, keys: dict) -> None:
    (machines.nodes[1].work / SCRIPT).unlink()


def block_node1(machines: Machines, keys: dict) -> None:
    machines.nodes[0].block_from(machines.nodes[1], ports=str(keys["main_port"]))


def second_address(machines: Machines, keys: dict) -> None:
    """Give node0 an address that exists only there, as a bridge of docker has."""
    words = ["ip", "address", "replace", "172.17.0.1/16", "dev", "lo"]
    subprocess.run(machines.nodes[0].command(words, user=False), check=True)


def cut_node1(machines: Machines, keys: dict) -> None:
    machines.nodes[1].node.link(False)


def stop_sshd(machines: Machines, keys: dict) -> None:
    machines.nodes[1].sshd.terminate()
    machines.nodes[1].sshd.wait()


# name: (changes of the description, what is done before, words of the message)
MISTAKES: dict[str, tuple[dict, Callable[[Machines, dict], object] | None, list[str]]] = {
    "unreachable host": ({"ssh": {"connect_seconds": 2}}, cut_node1, ["node1", "time"]),
    "no sshd": ({}, stop_sshd, ["node1", "Connection refused"]),
    "unknown name": ({"nodes": ["node0", "node9"]}, None, ["node9", "resolve"]),
    "wrong key": ({"ssh": {"options": ["-F", "~/.ssh/config_wrong_key"]}}, None, ["node0", "Permission denied"]),
    "unknown host key": ({"ssh": {"options": ["-F", "~/.ssh/config_unknown_host"]}}, None, ["node1", "[Hh]ost key"]),
    "changed host key": ({"ssh": {"options": ["-F", "~/.ssh/config_changed_host"]}}, None, ["node1", "host key has changed"]),
    "other Python": ({}, other_python, ["node1", "python differs", r"3\.9\.18"]),
    "other package": ({}, other_package, ["node1", "accelerate", r"1\.0\.0"]),
    "other commit": ({}, other_commit, ["node1", "commit|code"]),
    "missing folder": ({"nodes": ["node0", {"host": "node1", "folder": "~/absent"}]}, None, ["node1", "absent"]),
    "missing venv": ({"nodes": ["node0", {"host": "node1", "venv": "~/absent"}]}, None, ["node1", "absent"]),
    "missing script": ({}, missing_script, ["node1", SCRIPT]),
    "full disk": ({"output": "~/small"}, full_disk, ["node1", "small", "No space left"]),
    "port in use": ({}, block_port, ["node0", "port", "in use"]),
    "the same machine twice": ({"nodes": ["node0", "same-as-node0"]}, None, ["node0", "same-as-node0", "same machine"]),
    "an address that node1 cannot reach": ({}, block_node1, ["node1", r"10\.77\.0\.1"]),
    "an address of node0 alone": ({"main_address": "172.17.0.1"}, second_address, ["node1", r"172\.17\.0\.1"]),
    "an address of another node": ({"main_address": "10.77.0.2"}, None, ["node0", r"10\.77\.0\.2"]),
    "fewer GPUs": ({"gpus_per_node": 8}, None, ["node0|node1", "8", "GPU"]),
    "typo": ({"main_prot": 1}, None, ["main_prot", "main_port", "cluster.yaml"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_before_anything_starts(machines, name):
    changes, prepare, expected = MISTAKES[name]
    keys = {"main_port": free_port(), **{key: value for key, value in changes.items()}}
    if "-F" in str(keys.get("ssh")):
        keys["ssh"] = {"options": ["-F", keys["ssh"]["options"][1].replace("~", str(machines.home))]}
    if prepare:
        prepare(machines, keys)
    folder = machines.laptop.home / ".ssh"
    known_hosts = {path.name: path.read_bytes() for path in folder.glob("known_hosts*")}
    with watched(machines) as commands:
        ended = launch(machines, machines.describe(**keys), SCRIPT, "end", timeout=120)
    if name == "port in use":
        machines.listener.kill()
        machines.listener.ended()
    assert re.findall(r"^error:", ended.text, re.MULTILINE) == ["error:"], ended.text
    assert ended.codes == [2], ended.text
    for word in expected:
        assert re.search(word, ended.text), f"{word!r} is missing in: {ended.text}"
    assert "Traceback" not in ended.text
    assert not [words for words in commands if re.search(r"bin/(torchrun|accelerate) ", words)]
    assert {path.name: path.read_bytes() for path in folder.glob("known_hosts*")} == known_hosts
    nothing_left(machines)


# -- jobs that end by themselves -------------------------------------------------------------------------------------------------


def test_arguments_variables_and_output_arrive_unchanged_and_no_secret_is_visible(machines):
    """Use Accelerate, a jump host, code that exists only on the laptop before rsync copies it."""
    machines.write(machines.laptop, "work/secret.env", f"WANDB_API_KEY={SECRET}\nTEST_COMMON='of all nodes'\n")
    machines.write(machines.laptop, "work/my scripts/new.py", (machines.laptop.work / SCRIPT).read_text())
    nodes = [{"host": "node0", "env": {"TEST_OWN": "it's $HOME"}}, {"host": "behind", "env_file": "own.env"}]
    machines.write(machines.laptop, "work/own.env", "TEST_COMMON=of node1\n")
    file = machines.describe(nodes, env_file="secret.env", copy="rsync", name="cluster.yaml")
    with watched(machines) as commands:
        ended = launch(machines, "--name", "odd", file, "my scripts/new.py", "end", *ODD).well()
    first, second = received(ended.text)
    assert first["argv"] == second["argv"] == ODD
    assert (first["world"], second["world"]) == (["0", "0", "2", "1"], ["1", "0", "2", "1"])
    assert first["variables"] == {"TEST_COMMON": "of all nodes", "TEST_OWN": "it's $HOME"}
    assert second["variables"] == {"TEST_COMMON": "of node1"}
    assert first["secret"] == second["secret"] == len(SECRET)
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()[:20]
    assert first["token"] == second["token"] != digest(""), "every node has the secret of the run"
    assert {first["user"], second["user"]} == {machines.uid}
    assert first["folder"] == str(machines.home / "work")
    assert "\n[behind] rank 1 prints an error\n" in ended.text
    written = logs(machines, "odd")
    assert set(written) == {"node0/node0.log", "node1/behind.log"}
    assert [len(received(text)) for text in written.values()] == [1, 1], "the log of a node has the output of its own ranks"
    assert "rank 1 prints an error" in written["node1/behind.log"]
    assert not [words for words in commands if SECRET in words]
    files = [path for machine in machines.nodes for path in (machine.work / "runs").rglob("*") if path.is_file()]
    visible = "\n".join([ended.text, *commands, *written.values(), *(path.read_text(errors="replace") for path in files)])
    assert SECRET not in visible
    assert first["token"] not in map(digest, re.findall(r"[0-9a-f]{64}", visible))
    nothing_left(machines)


def test_a_dry_run_prints_the_commands_and_starts_nothing(machines):
    machines.write(machines.laptop, "work/secret.env", f"WANDB_API_KEY={SECRET}\n")
    file = machines.describe(main_port=29777, env_file="secret.env")
    with watched(machines) as commands:
        ended = launch(machines, "--dry_run", file, SCRIPT, "end", *ODD).well()
    for rank in (0, 1):
        assert re.search(
            rf"accelerate launch .*--machine_rank {rank} --main_process_ip \S+ --main_process_port 29777", ended.text
        )
    assert shlex.join(["end", *ODD]) in ended.text
    assert SECRET not in ended.text
    assert not [words for words in commands if words.startswith("ssh ")]
    nothing_left(machines)


def test_if_one_node_fails_all_are_stopped_and_the_cause_is_printed_last(machines):
    """Three nodes with 2, 1 and 1 processes. The last rank fails, and the others would wait for ten minutes.

    The login script of node0 prints text, which is no part of the output.
    """
    machines.write(machines.nodes[0], ".bashrc", "echo Welcome.; echo '{}'; echo [1, 2]; echo to stderr >&2\n")
    nodes = [{"host": "node0", "processes": 2}, "node1", "node2"]
    running = start(machines, machines.describe(nodes), SCRIPT, "fail")
    while len(received(running.read[0])) < 4:
        running.until('{"argv"')
    machines.write(machines.nodes[2], "work/fail now", "")
    ended = running.ended()
    assert "Welcome" not in ended.text
    assert [one["world"] for one in received(ended.text)] == [
        ["0", "0", "4", "2"], ["1", "1", "4", "2"], ["2", "0", "4", "1"], ["3", "0", "4", "1"],
    ]  # fmt: skip
    *_, cause, last = ended.text.strip().splitlines()
    assert cause == "accel-ddp: the first cause: [node2] ValueError: this rank has failed", ended.text
    assert ended.text.count("the first cause") == 1
    assert last.startswith("accel-ddp: job 'launched' failed after"), ended.text
    assert "exit code 7" in last
    assert ended.codes == [7]
    nothing_left(machines)


# -- stops -----------------------------------------------------------------------------------------------------------------------


def test_ctrl_c_saves_a_checkpoint_and_ends_all_nodes_with_75(machines):
    words = [machines.describe(), TRAINS, "--step_seconds", "0.2", "--steps", "400", "--save_every", "1000", "--eval_every", "0"]
    terminal = in_terminal(machines, *words)
    terminal.expect(r"[1-9]\d*/400\b")  # the panel of the main rank
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 75, terminal.before
    nothing_left(machines)
    (checkpoint,) = (machines.nodes[0].work / "runs" / "trains").glob("step_*")
    assert f"Step {int(checkpoint.name[5:])} of 400 is saved" in "".join(logs(machines, "trains").values())
    assert {name: json.loads(path.read_text())["state"] for name, path in states(machines, "trains").items()} == {
        "node0": "ended", "node1": "ended",
    }  # fmt: skip


def states(machines: Machines, job: str) -> dict[str, Path]:
    return {machine.name: path for machine in machines.nodes for path in (machine.work / "runs" / job / "launch").glob("*.json")}


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_job_at_once_that_ignores_the_first(machines):
    terminal = in_terminal(machines, machines.describe(UNEQUAL), SCRIPT, "ignore")
    machines.until(lambda: len(ranks_of(machines)) == 3, 180, "three ranks")
    time.sleep(1)
    terminal.sendintr()
    time.sleep(3)
    assert len(ranks_of(machines)) == 3
    began = time.monotonic()
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130, terminal.before
    nothing_left(machines, 5)
    assert time.monotonic() - began < 10


def kill_launcher(machines: Machines, terminal: pexpect.spawn) -> None:
    terminal.kill(signal.SIGKILL)


def close_terminal(machines: Machines, terminal: pexpect.spawn) -> None:
    os.close(terminal.child_fd)


def stop_launcher(machines: Machines, terminal: pexpect.spawn) -> None:
    """Stop every process of the laptop, as if it slept."""
    for pid in machines.laptop.processes():
        os.kill(pid, signal.SIGSTOP)


def stop_only_launcher(machines: Machines, terminal: pexpect.spawn) -> None:
    """Stop the launcher and leave ssh running, which still answers the keepalive messages of ssh."""
    terminal.kill(signal.SIGSTOP)


def cut_links(machines: Machines, terminal: pexpect.spawn) -> None:
    machines.laptop.node.link(False)


def cut_one_link(machines: Machines, terminal: pexpect.spawn) -> None:
    machines.nodes[1].block_from(machines.laptop)
    machines.laptop.block_from(machines.nodes[1])


WAYS = [kill_launcher, close_terminal, stop_launcher, stop_only_launcher, cut_links, cut_one_link]
DEFAULT_WAYS = [kill_launcher]


@pytest.mark.parametrize("way", [way if way in DEFAULT_WAYS else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_a_job_ends_on_every_node_within_30_s_after_its_launcher_is_gone(machines, way):
    """The ranks ignore SIGINT and SIGTERM, and have started processes that have left their session."""
    terminal = in_terminal(machines, machines.describe(UNEQUAL), SCRIPT, "ignore")
    machines.until(lambda: len(ranks_of(machines)) == 3, 180, "three ranks")
    sleeping = lambda: [line for line in machines.processes() if line.endswith("sleep 600")]
    machines.until(lambda: len(sleeping()) == 3, 60, "the processes that the ranks have started")
    began = time.monotonic()
    way(machines, terminal)
    shown = lambda line: not line.startswith("node3") and ("sshd" not in line or way in (cut_links, stop_only_launcher))
    machines.until(lambda: not [*filter(shown, machines.processes())], 30, "the end of all processes on the nodes")
    assert time.monotonic() - began < 30
    machines.laptop.node.link(True)
    for machine in machines.all:
        machine.node.firewall()
    for pid in machines.laptop.processes():
        os.kill(pid, signal.SIGCONT)
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed
        terminal.expect(pexpect.EOF, timeout=60)
    nothing_left(machines, 60)  # sshd closes a connection that was cut when it sends the next packet
    terminal.wait()
    assert terminal.exitstatus != 0


# -- detached jobs ---------------------------------------------------------------------------------------------------------------


def test_a_detached_job_continues_and_is_found_from_another_machine(machines):
    file = machines.describe(UNEQUAL)
    launch(machines, "--detach", "--name", "long", file, SCRIPT, "wait").well()
    machines.until(lambda: len(ranks_of(machines)) == 3, 180, "three ranks")
    assert not machines.laptop.processes()

    elsewhere = machines.nodes[2]
    machines.write(elsewhere, f"work/{file}", (machines.laptop.work / file).read_text())
    status = elsewhere.run(*accel_ddp("status", file)).well().text
    for word in ("long", "node0", "node1", "running"):
        assert word in status
    following = elsewhere.start_command(accel_ddp("logs", "-f", file, "--name", "long"))
    following.until("rank 2 prints an error")
    given_up = elsewhere.start_command(accel_ddp("logs", "-f", file, "--name", "long"))
    given_up.until("rank 2 prints an error")
    guards = lambda: len([line for line in machines.processes() if line.endswith("accel_ddp.launch.guard")])
    machines.until(lambda: guards() == 4, 60, "the guards of two `logs -f`")
    given_up.processes[0].kill()
    machines.until(lambda: guards() == 2, 60, "the end of the guards of `logs -f`")

    again = launch(machines, "--name", "long", file, SCRIPT, "end")
    assert again.codes != [0]
    assert re.search(
        r"error: .*\n  node0: a job named 'long' is running since.* `accel-ddp stop cluster.yaml --name long`", again.text
    )
    assert len(ranks_of(machines)) == 3, "the job that runs is not disturbed"

    stopped = elsewhere.run(*accel_ddp("stop", file, "--name", "long"))
    assert stopped.codes == [0], stopped.text
    followed = following.ended()
    assert {line for line in followed.text.splitlines() if "prints an error" in line}, followed.text
    nothing_left(machines)
    status = machines.laptop.run(*accel_ddp("status", file)).text
    assert "exited" in status
    assert "running" not in status
    nothing_left(machines)


# -- long tests ------------------------------------------------------------------------------------------------------------------

SLOW_STEPS = ["--step_seconds", "0.2", "--steps", "400", "--save_every", "1000", "--eval_every", "0"]


def weights(machine: Machine, folder: str, step: int) -> dict[str, str]:
    """Return the hash of each file of tensors of a checkpoint."""
    (checkpoint,) = (machine.work / folder).glob(f"step_*{step}")
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.rglob("*.safetensors")}
    assert found
    return found


@pytest.mark.slow
def test_a_stopped_and_resumed_launch_equals_the_printed_commands_typed_by_hand(machines):
    printed = launch(
        machines, "--dry_run", machines.describe(main_address="10.77.0.1"), TRAINS, "--output_dir", "runs/hand"
    ).well()
    texts = re.split(r"^# node \d.*$", printed.text, flags=re.MULTILINE)[1:]
    commands = [
        node.command(["bash", "-c", text], folder=str(machines.home)) for node, text in zip(machines.nodes, texts, strict=False)
    ]
    Running(commands, [node.environment() for node in machines.nodes[:2]]).ended(180).well()

    file = machines.describe()
    running = start(machines, file, TRAINS, "--step_seconds", "0.5")
    running.until("step  2/12")
    running.processes[0].send_signal(signal.SIGINT)  # as Ctrl-C
    assert running.ended().codes == [75], running.read
    nothing_left(machines)
    launch(machines, file, TRAINS, "--resume").well()
    assert weights(machines.nodes[0], "runs/trains", 12) == weights(machines.nodes[0], "runs/hand", 12)
    nothing_left(machines)


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_node_and_its_error_is_the_cause(machines):
    nodes = [{"host": "node0", "processes": 2}, "node1", "node2"]
    ended = launch(machines, machines.describe(nodes), "tests/programs/goes_wrong.py", "--how", "exception", timeout=180)
    assert ended.codes == [1], ended.text
    assert re.search(r"^\[node2 rank 3\] .*ValueError: a bug in the user's loss", ended.text, re.MULTILINE), ended.text
    end = ended.text[ended.text.index("accel-ddp: the first cause: ") :]
    assert "a bug in the user's loss" in end or "RANK_FAILED" in end
    assert "rank 3" in end or "node2" in end
    assert "4 items per step = 4 ranks (2 on node0, 1 on node1, 1 on node2)" in ended.text
    nothing_left(machines)


@pytest.mark.slow
def test_a_host_that_dies_ends_the_job_on_the_other_nodes(machines):
    running = start(machines, machines.describe(), TRAINS, *SLOW_STEPS)
    running.until("step   3/400")
    machines.nodes[1].die()
    began = time.monotonic()
    ended = running.ended(90)
    assert time.monotonic() - began < 60
    assert ended.codes[0] not in (0, 75), ended.text
    assert re.search(r"accel-ddp: the first cause: .*node1", ended.text), ended.text
    nothing_left(machines, 30)


@pytest.mark.slow
def test_the_ranks_save_if_the_link_to_the_laptop_is_cut(machines):
    running = start(machines, machines.describe(), TRAINS, *SLOW_STEPS)
    running.until("step   3/400")
    machines.laptop.node.link(False)
    machines.until(lambda: not ranks_of(machines), 90, "the end of the ranks")
    machines.laptop.node.link(True)
    assert running.ended(60).codes[0] != 0
    assert len(list((machines.nodes[0].work / "runs" / "trains").glob("step_*"))) == 1
    nothing_left(machines, 60)


@pytest.mark.slow
def test_a_disk_that_fills_during_a_run_ends_neither_the_job_nor_its_guards(machines):
    """The log and the state of node1 cannot be written any more. The job runs on, and a stop ends it everywhere."""
    file = machines.describe(UNEQUAL, output="~/small")
    running = start(machines, file, SCRIPT, "wait")
    running.until("rank 2 prints an error")
    machines.until(lambda: len(ranks_of(machines)) == 3, 180, "three ranks")
    machines.nodes[1].fill_disk()
    time.sleep(3)
    assert len(ranks_of(machines)) == 3
    machines.laptop.run(*accel_ddp("stop", file, "--name", "launched"))
    ended = running.ended(60)
    assert ended.codes == [130], "a script that does not use the package has not saved a checkpoint"
    assert "cause" not in ended.text
    assert "running" not in machines.laptop.run(*accel_ddp("status", file)).well().text
    nothing_left(machines)


@pytest.mark.slow
def test_the_ranks_save_if_the_terminal_is_closed_and_sighup_comes_twice(machines):
    """The shell of a terminal that is closed sends SIGHUP to its jobs, and the kernel to the foreground process group."""
    running = start(machines, machines.describe(), TRAINS, *SLOW_STEPS)
    running.until("step   3/400")
    for _ in range(2):
        running.processes[0].send_signal(signal.SIGHUP)
        time.sleep(0.1)
    ended = running.ended(60)
    assert ended.codes == [75], ended.text
    assert len(list((machines.nodes[0].work / "runs" / "trains").glob("step_*"))) == 1
    nothing_left(machines)


@pytest.mark.slow
def test_a_guard_that_is_killed_ends_the_job_on_all_nodes(machines):
    running = start(machines, machines.describe(), TRAINS, *SLOW_STEPS)
    running.until("step   3/400")
    (guard,) = [pid for pid, words in machines.nodes[1].processes().items() if words.endswith("accel_ddp.launch.guard")]
    os.kill(guard, signal.SIGKILL)
    ended = running.ended(60)
    assert ended.codes[0] != 0, ended.text
    assert "node1" in ended.text[ended.text.index("the first cause") :]
    nothing_left(machines, 30)


@pytest.mark.slow
def test_a_guard_that_is_stopped_ends_before_the_launch_returns(machines):
    running = start(machines, machines.describe(UNEQUAL), SCRIPT, "ignore")
    machines.until(lambda: len(ranks_of(machines)) == 3, 180, "three ranks")
    (guard,) = [pid for pid, words in machines.nodes[1].processes().items() if words.endswith("accel_ddp.launch.guard")]
    os.kill(guard, signal.SIGSTOP)
    ended = running.ended(60)
    assert ended.codes[0] != 0, ended.text
    assert "node1: no message for 12 s" in ended.text
    nothing_left(machines, 5)


@pytest.mark.slow
def test_a_time_limit_saves_and_stops_with_75(machines):
    ended = launch(machines, machines.describe(time_limit="0:00:25"), TRAINS, *SLOW_STEPS)
    assert ended.codes == [75], ended.text
    assert "time limit" in ended.text
    assert len(list((machines.nodes[0].work / "runs" / "trains").glob("step_*"))) == 1
    nothing_left(machines)


@pytest.mark.slow
def test_the_full_doctor_runs_on_all_nodes_before_the_job(machines):
    ended = launch(machines, machines.describe(doctor="full"), TRAINS, "--steps", "1", timeout=240).well()
    assert re.search(r"all-reduce|bandwidth|GB/s|MB/s", ended.text), ended.text
    nothing_left(machines)
