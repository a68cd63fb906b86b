"""Tests of the code on the nodes: copied with the real rsync over a real sshd, or compared."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_ddp.launch.code_files import compare_code, describe_code, list_files
from tests.ssh_nodes import Machine, Machines

COPY = """
import asyncio, os, sys
from accel_ddp.errors import UserError
from accel_ddp.launch.code_files import copy_code, find_source
from accel_ddp.launch.description import read_description
from accel_ddp.launch.connection import ssh_words
cluster = read_description("cluster.yaml")
try: asyncio.run(copy_code(cluster, find_source(sys.argv[1]), lambda node: ssh_words(cluster, node)))
except UserError as error: sys.exit(f"error: {error}")
"""
ODD = ["two words.py", "it's.py", 'a"b.py', "ü漢.py", "line\nline.py", "-n.py", "$(id).py", "[x]*.py", ":a.py"]
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "protocol.file.allow=always"]


def copy(machines: Machines, *, folder="~/my code", script="train.py", expected=0, env=None, where="src", **keys) -> str:
    """Copy the project of the laptop to node0 and node1. Return what is printed."""
    nodes = keys.pop("nodes", ["node0", "node1"])
    keys = {"backend": "ssh", "nodes": nodes, "gpus_per_node": 0, "copy": "rsync", "folder": folder, **keys}
    machines.write(machines.laptop, f"{where}/cluster.yaml", yaml.safe_dump(keys))
    words = machines.laptop.command([sys.executable, "-c", COPY, script], folder=f"{machines.home}/{where}")
    environment = machines.laptop.environment(**(env or {}))
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == expected, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout + ended.stderr


def on(machine: Machine, *words: str, folder: str = "src") -> str:
    """Run a command of the user in a folder of the home directory and return its output."""
    command = machine.command(list(words), folder=f"{machine.machines.home}/{folder}")
    return subprocess.run(command, env=machine.environment(), check=True, capture_output=True, text=True).stdout


def files(machine: Machine, folder: str = "my code") -> dict[str, str]:
    """Return the files and links below a folder of the home directory, without repositories."""
    found = {}
    for path in sorted((machine.home / folder).rglob("*")):
        name = str(path.relative_to(machine.home / folder))
        if (path.is_symlink() or path.is_file()) and ".git/" not in name and not name.startswith(".accel_ddp/"):
            found[name] = f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
    return found


@pytest.fixture
def project(machines):
    """A repository on the laptop with committed, changed, new and ignored files."""
    laptop = machines.laptop
    for name in ["train.py", "package/old.py", "package/gone.py", "tool.sh", "data/small.csv", "deleted.py", *ODD]:
        machines.write(laptop, f"src/{name}", f"{name} 1")
    machines.write(laptop, "src/.gitignore", "ignored/\n*.big\n")
    on(laptop, "chmod", "755", "tool.sh")
    on(laptop, "ln", "-s", "package/old.py", "link.py")
    on(laptop, "sh", "-c", f"{shlex.join(GIT)} init -q && {shlex.join(GIT)} add -A && {shlex.join(GIT)} commit -qm one")
    return machines


def committed(*more: str) -> dict[str, str]:
    names = ["train.py", "package/old.py", "package/gone.py", "tool.sh", "data/small.csv", *ODD, *more]
    return {**{name: f"{name} 1" for name in names}, ".gitignore": "ignored/\n*.big\n", "link.py": "-> package/old.py"}


def test_rsync_copies_what_git_does_not_ignore_and_deletes_only_what_it_has_copied(project):
    machines, laptop, (node0, node1) = project, project.laptop, project.nodes[:2]
    not_code = ["ignored/a", "x.big", "runs/old/log", ".venv/bin/python", "env39/pyvenv.cfg", "env39/bin/python", "inner/x.tmp"]
    for name in [*not_code, "package/__pycache__/old.pyc", "new.py", "inner/inside.py"]:
        machines.write(laptop, f"src/{name}", f"{name} 1")
    for name, text in {".env": "TOKEN=1", "secrets.env": "TOKEN=2", "inner/.gitignore": "*.tmp"}.items():
        machines.write(laptop, f"src/{name}", text)
    on(laptop, "git", "init", "-q", folder="src/inner")
    machines.write(laptop, "module/code.py", "module 1")
    on(
        laptop,
        "sh",
        "-c",
        f"{shlex.join(GIT)} init -q && {shlex.join(GIT)} add -A && {shlex.join(GIT)} commit -qm one",
        folder="module",
    )
    on(laptop, *GIT, "submodule", "--quiet", "add", f"{machines.home}/module", "./module")
    modules = (laptop.home / "src/.gitmodules").read_text()
    on(laptop, "rm", "deleted.py")
    own = {"runs/job/checkpoint": "kept", ".venv/bin/python": "kept", "notes.txt": "kept", "package/own.py": "kept"}
    for name, text in own.items():
        machines.write(node0, f"my code/{name}", text)
    machines.write(node0, "disk/large", "kept")
    on(node0, "ln", "-s", "../disk", "data", folder="my code")
    keys = {"env_file": "secrets.env", "ssh": {"options": ["-o", 'SetEnv=ODD="it\'s two  words"', "-o", "Compression=yes"]}}
    copy(machines, **keys)
    on(laptop, "truncate", "--size", "600M", "x.big")
    assert copy(machines, **keys) == "", "files that are not copied do not count"
    sent = {**committed("new.py", "inner/inside.py"), "inner/.gitignore": "*.tmp"}
    sent |= {".gitmodules": modules, "module/code.py": "module 1"}
    assert files(node1) == sent
    linked = {name: text for name, text in sent.items() if not name.startswith("data/")}
    assert files(node0) == {**linked, **own, "data": "-> ../disk"}, "a link to another disk stays"
    assert (node0.home / "disk/small.csv").read_text() == "data/small.csv 1"
    assert os.access(node1.home / "my code/tool.sh", os.X_OK)

    on(laptop, "sh", "-c", "rm -r package/gone.py inner; mkdir now.d; mv new.py now.d/; echo changed >train.py")
    machines.write(laptop, "src/.gitignore", "ignored/\n*.big\n/tool.sh\n")
    on(laptop, "git", "rm", "-q", "--cached", "tool.sh")
    machines.write(node1, "my code/.accel_ddp/copied.1", "left by a copy that was interrupted")
    copy(machines, **keys)
    for name in ("package/gone.py", "new.py", "inner/inside.py", "inner/.gitignore"):
        del sent[name]
    sent |= {"train.py": "changed\n", "now.d/new.py": "new.py 1", ".gitignore": "ignored/\n*.big\n/tool.sh\n"}
    assert files(node1) == sent, "a file that git ignores now stays on the nodes"
    linked = {name: text for name, text in sent.items() if not name.startswith("data/")}
    assert files(node0) == {**linked, **own, "data": "-> ../disk"}
    on(node1, "git", "init", "-q", folder="my code")
    assert ".accel_ddp" not in on(node1, "git", "status", "--short", "-uall", folder="my code"), (
        "the list is not part of the code"
    )
    assert machines.left() == []


def test_each_reason_why_a_node_does_not_receive_the_code_is_one_message(project):
    machines, laptop, node1 = project, project.laptop, project.nodes[1]
    one = ["node1"]
    assert "the folder in which you run the command is copied" in copy(machines, script="../train.py", expected=1)
    assert "does not contain missing.py" in copy(machines, script="missing.py", expected=1)
    text = copy(machines, folder="~", expected=1)
    assert "node0: folder ~: is the home directory or the root on this node" in text
    assert "node1: folder ~: is the home directory or the root on this node" in text
    text = copy(machines, folder="/mnt_missing/disk/work", nodes=one, expected=1)
    assert "node1: folder /mnt_missing/disk/work: does not exist on this node and cannot be made: mkdir:" in text
    text = copy(machines, folder="/etc", nodes=one, expected=1)
    assert "node1: folder /etc: the code cannot be written on this node: Permission denied." in text
    machines.write(node1, "a_file", "")
    assert "node1: folder ~/a_file: does not exist on this node and cannot be made" in copy(
        machines, folder="~/a_file", expected=1
    )
    node1.fill_disk()
    text = copy(machines, folder="~/small/rsync", expected=1)
    assert "node1: folder ~/small/rsync: the code cannot be written on this node: No space left on device. Free" in text
    assert "node0" not in text
    copy(machines, folder="~/locked")
    os.chown(node1.home / "locked/package", 0, 0)
    on(laptop, "sh", "-c", "echo 2 >>package/old.py")
    text = copy(machines, folder="~/locked", expected=1)
    assert "node1: folder ~/locked: the code cannot be written on this node: Permission denied. Let your user" in text
    assert "node9: the name of the host cannot be resolved" in copy(machines, nodes=["node0", "node9"], expected=1)
    # The programs are missing: on a node, whose login also prints something, and on the laptop.
    on(node1, "sh", "-c", "mkdir ../bin; for name in sh mkdir cat mv; do ln -s $(command -v $name) ../bin/; done", folder="tmp")
    machines.write(node1, ".bashrc", f"echo accel_ddp: welcome; PATH={machines.home}/bin\n")
    on(laptop, "sh", "-c", "mkdir ../only; ln -s $(command -v env) ../only/")
    text = copy(machines, expected=1)
    assert "node1: copy: rsync: rsync is not installed on this node. Install it there, or write copy: none" in text
    text = copy(machines, env={"PATH": f"{machines.home}/only"}, expected=1)
    assert "copy: rsync: the program rsync is not installed on this machine. Install it, or write copy: none." in text
    assert machines.left() == []


def test_nodes_that_share_the_folder_are_copied_at_the_same_time(project):
    """Both nodes are the same machine here, so that both copies write to one folder, as on a shared disk."""
    machines, laptop = project, project.laptop
    nodes = ["node0", "same-as-node0"]
    copy(machines, nodes=nodes)
    on(laptop, "sh", "-c", "rm package/*.py deleted.py")
    copy(machines, nodes=nodes)
    sent = committed()
    assert files(machines.nodes[0]) == {name: text for name, text in sent.items() if not name.startswith("package/")}


def test_a_copy_of_much_data_is_announced_and_can_be_interrupted_without_a_process_that_is_left(project):
    machines = project
    on(machines.laptop, "mkdir", "videos")
    on(machines.laptop, "truncate", "--size", "600M", "videos/large.bin")
    machines.nodes[1].node.firewall("tcp dport 22 meta length gt 1400 drop")  # the transfer stalls
    keys = {"backend": "ssh", "nodes": ["node0", "node1"], "gpus_per_node": 0, "copy": "rsync", "folder": "~/my code"}
    machines.write(machines.laptop, "src/cluster.yaml", yaml.safe_dump(keys))
    words = machines.laptop.command([sys.executable, "-c", COPY, "train.py"], folder=f"{machines.home}/src")
    running = subprocess.Popen(words, env=machines.laptop.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    machines.until(lambda: any(one.startswith("rsync ") for one in machines.laptop.processes().values()), 90, "rsync")
    running.send_signal(2)
    out, errors = running.communicate(timeout=90)
    assert b"files with 600 MiB are copied to each node" in out, (out, errors)
    assert b"videos has " in out
    machines.nodes[1].node.firewall()
    assert [one for one in machines.left() if one.startswith(machines.laptop.name)] == []


def git_folder(path: Path, **names: str) -> Path:
    path.mkdir()
    for name, text in names.items():
        (path / f"{name}.py").write_text(text)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        env = {**os.environ, "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
        subprocess.run([*GIT, *words], cwd=path, check=True, env=env)
    return path


def test_code_that_differs_between_nodes_is_reported_with_the_names_of_the_files(tmp_path):
    """Three repositories with the same commit, and three plain folders."""
    facts = lambda: {f"node-{one.name}": describe_code(one) for one in folders}
    folders = [git_folder(tmp_path / name, train="1", model="2") for name in "abc"]
    assert compare_code(facts()) is None
    (folders[0] / "scratch.py").write_text("a file that is not committed on a node")
    (folders[1] / "data.csv").write_text("1")
    assert compare_code(facts()) is None
    (folders[1] / "model.py").write_text("3")
    text = compare_code(facts())
    assert text.startswith("the code differs: node-b has another model.py. Update the code there, for example with `git pull`")
    subprocess.run([*GIT, "commit", "-qam", "two"], cwd=folders[1], check=True)
    assert "node-b has another model.py in commit " in compare_code(facts())
    (folders[1] / "model.py").write_text("2")
    subprocess.run([*GIT, "commit", "-qam", "three"], cwd=folders[1], check=True)
    assert "node-b has commit " in compare_code(facts())
    assert compare_code({**facts(), "node-b": {**facts()["node-a"], "package": "older"}}).startswith(
        "the package accel_ddp of node-b"
    )
    assert compare_code({"node-a": facts()["node-a"], "laptop": {}}) is None

    for folder in folders:
        subprocess.run(["rm", "-r", folder / ".git"], check=True)
    (folders[2] / "train.py").unlink()
    (folders[0] / "scratch.py").unlink()
    assert compare_code(facts()).startswith("the code differs: node-c has no train.py. ")


def test_the_files_of_a_folder_without_git_are_listed_with_its_gitignore(tmp_path, monkeypatch):
    for name in [
        "a.py",
        ".gitignore",
        "x.tmp",
        "sub/b.py",
        "sub/x.tmp",
        "env/pyvenv.cfg",
        "env/c.py",
        "runs/d.py",
        "sub/runs/e.py",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("*.tmp\n")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").symlink_to("sub")
    expected = [".gitignore", "a.py", "dangling", "folder", "sub/b.py", "sub/runs/e.py"]
    assert list_files(tmp_path, ["runs/"]) == expected
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_files(tmp_path, ["runs/"]) == sorted([*expected, "sub/x.tmp", "x.tmp"]), "without git, .gitignore is not read"
