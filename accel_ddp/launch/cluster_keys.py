"""The keys of cluster.yaml: what each value must be, and what it means. docs/launch.md contains the same texts."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from accel_ddp.text import did_you_mean

BACKENDS = ("ssh", "slurm", "kubernetes", "local")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


# What users of other tools write, which is not similar as a text.
_OTHER_NAMES = {
    "hosts": "nodes", "num_nodes": "nodes", "gpus": "gpus_per_node", "gpu": "gpus_per_node", "port": "main_port",
    "master_port": "main_port", "address": "main_address", "master_addr": "main_address", "output_dir": "output",
    "max_restarts": "restarts", "time": "time_limit", "environment": "env", "code": "folder",
}  # fmt: skip


def nearest_key(word: Any, known: Iterable[str]) -> str:
    """Return a question that suggests the known word nearest to `word`, or ""."""
    known = list(known)
    other = _OTHER_NAMES.get(str(word))
    return f" Did you mean {other}?" if other in known else did_you_mean(str(word), known)


class Wrong(Exception):
    """The reason why a value is not accepted."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Wrong("must be a text that is not empty")
    if "\n" in value or "\0" in value:
        raise Wrong("must be one line")
    return value


def _name(value: Any) -> str:
    if not NAME.fullmatch(_text(value)):
        raise Wrong("must consist of at most 63 letters, digits, '.', '_' and '-', because it is the name of a folder")
    return value


def _host(value: Any) -> str:
    if _text(value).startswith("-") or re.search(r"[\s'\"`$;|&<>\\/]", value):
        raise Wrong("must be a host as in `ssh HOST`: a name of your ssh configuration, an address, or user@address")
    return value


def _number(at_least: int, at_most: int = 1 << 31) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            limit = f" and at most {at_most}" if at_most < 1 << 31 else ""
            raise Wrong(f"must be a whole number of at least {at_least}{limit}")
        return value

    return check


def _choice(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        value = "off" if value is False and "off" in names else value  # YAML reads an unquoted off as false
        if value not in names:
            raise Wrong(f"must be one of: {', '.join(names)}.{nearest_key(value, names)}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong("must be true or false")
    return value


def _words(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(type(word) in (str, int) for word in value):  # YAML reads an unquoted yes as true
        raise Wrong("must be a list of words, for example [-F, my_ssh_config]")
    return [str(word) for word in value]


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and NAME.fullmatch(name) for name in value):
        raise Wrong("must be a list of names, for example [wandb]")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Wrong("must be lines of KEY: value")
    return value


def _labels(value: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in _table(value).values()):
        raise Wrong("must be lines of NAME: text")
    return value


def _variables(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Wrong("must be lines of NAME: value")
    found = {}
    for name, content in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Wrong(f"{name!r} is not the name of a variable")
        if isinstance(content, bool) or not isinstance(content, (str, int, float)):
            raise Wrong(f'the value of {name} must be a text; write it in quotes, for example {name}: "true"')
        found[name] = str(content)
    return found


def _seconds(value: Any) -> int:
    """Return the seconds of HH:MM:SS, D-HH:MM:SS or a number of seconds. YAML reads an unquoted 12:00:00 as a number."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", str(value))
    if not found:
        raise Wrong('must be HH:MM:SS or D-HH:MM:SS, for example "12:00:00"')
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    if not (total := ((days * 24 + hours) * 60 + minutes) * 60 + seconds):
        raise Wrong("must be longer than 0 s")
    return total


class Key(NamedTuple):
    """A key of the description. `check` returns the value, or raises Wrong with the reason."""

    check: Callable[[Any], Any]
    help: str


def _any(value: Any) -> Any:
    """Return the value. The reader of the description checks it."""
    return value


KEYS = {
    "backend": Key(_choice(*BACKENDS), "`ssh`, `slurm`, `kubernetes`, or `local` (this machine)"),
    "nodes": Key(_any, "`ssh` and `local`: a list of hosts or of tables with the keys below; `slurm` and `kubernetes`: a number"),
    "gpus_per_node": Key(_number(0, 64), "GPUs of each node; 0 trains on CPUs"),
    "processes_per_node": Key(_number(1, 1024), "ranks of each node; the default is one for each GPU, and 1 without GPUs"),
    "name": Key(_name, "name of the job and of its folder; the default is the name of the recipe, and `--name` replaces it"),
    "folder": Key(_text, "the code folder on the nodes, where the command runs; the default is the home directory (`local`, `slurm`: "
                  "the current folder)"),
    "copy": Key(_choice("none", "rsync", "git"), "`none` compares the code of the nodes, `rsync` copies the current folder "
                "first, `git` sends the current commit"),
    "venv": Key(_text, "virtual environment, relative to `folder` or absolute; the default is `.venv` if it exists, else `python3`"),
    "image": Key(_text, "`kubernetes`: the container image"),
    "output": Key(_text, "folder of all runs, relative to `folder` or absolute; a job uses OUTPUT/NAME (default: runs)"),
    "env": Key(_variables, "variables of the ranks on every node"),
    "env_file": Key(_text, "a file with lines of NAME=VALUE, beside the description, for variables that are secret "
                    "(`kubernetes`: `secrets` instead)"),
    "main_address": Key(_host, "address of the first node, as the other nodes reach it; the default is the address at which ssh "
                        "reached it"),
    "main_port": Key(_number(1024, 65535), "port of the first node (29500; `slurm` derives it from the number of the job)"),
    "interface": Key(_text, "network interface of the ranks, for NCCL and gloo"),
    "accelerate_config": Key(_text, "one of our configs by name, or the path of a config on the nodes, for example of the "
                             "wizard (2node.yaml)"),
    "restarts": Key(_number(0), "how many times a failed attempt is followed by another one, `--max_restarts` (0)"),
    "time_limit": Key(_seconds, "HH:MM:SS, after which the job saves and stops (`slurm`: and is queued again)"),
    "doctor": Key(_choice("quick", "full", "off"), "`quick` checks the cluster inside the launchers, `full` measures bandwidth and "
                  "collectives first, `off` skips the preflight"),
    "spot": Key(_choice("none", "aws"), "`aws` turns the interruption notice of a spot instance into a stop with a checkpoint"),
    "ssh": Key(_any, "see below"),
    "slurm": Key(_any, "see below"),
    "kubernetes": Key(_any, "see below"),
}  # fmt: skip
NODE_KEYS = {
    "host": Key(_host, "as in `ssh HOST`: a name of your ssh configuration, an address, or user@address"),
    "gpus": Key(_number(0, 64), "GPUs of this node, instead of `gpus_per_node`"),
    "processes": Key(_number(1, 1024), "ranks of this node; nodes with different numbers are started with torchrun, which takes only "
                     "FSDP and mixed precision from the accelerate config"),
    "env": Key(_variables, "variables of this node, which replace those of all nodes"),
    "env_file": Key(_text, "a file with variables of this node"),
    "folder": Key(_text, "the code folder of this node"),
    "venv": Key(_text, "the virtual environment of this node"),
    "interface": Key(_text, "the network interface of this node"),
}  # fmt: skip
TABLES = {
    "ssh": {
        "options": Key(_words, "options of `ssh`, for example [-F, my_ssh_config]"),
        "connect_seconds": Key(_number(1, 600), "how long a connection may take (10)"),
    },
    "slurm": {
        "partition": Key(_text, "`--partition`"),
        "account": Key(_text, "`--account`"),
        "qos": Key(_text, "`--qos`"),
        "gres": Key(_text, "`--gres` instead of the number of GPUs, for example gpu:a100:8"),
        "cpu": Key(_number(1), "CPUs of each node, `--cpus-per-task`; without this key, most clusters give one"),
        "memory": Key(_text, "memory of each node, `--mem`, for example 128G"),
        "signal_seconds": Key(_number(10, 65535), "how long before the time limit the job is asked to save (120)"),
        "requeue": Key(_flag, "whether the job is queued again after a preemption or the time limit (true)"),
        "options": Key(_words, "further options of sbatch, for example [--exclusive]"),
    },
    "kubernetes": {
        "context": Key(_text, "the context of kubectl; the default is the current one"),
        "namespace": Key(_name, "the namespace of the objects (default)"),
        "kind": Key(_choice("TrainJob", "Job"), "`TrainJob` of Kubeflow Trainer v2 (the default), or an indexed `Job`"),
        "volume_claim": Key(_name, "a claim of a volume that all pods can write (ReadWriteMany), for the run folder"),
        "mount": Key(_text, "where the volume is mounted (/data)"),
        "shared_memory": Key(_text, "size of /dev/shm, which counts as memory of the pod (16Gi)"),
        "grace_seconds": Key(_number(1), "how long pods may save before they are killed, at least 30 (300)"),
        "secrets": Key(_names, "names of Secrets whose keys become variables"),
        "cpu": Key(_number(1), "CPUs of each pod"),
        "memory": Key(_text, "memory of each pod, for example 128Gi"),
        "resources": Key(_table, "further resources of each pod, for example {vpc.amazonaws.com/efa: 4}"),
        "labels": Key(_labels, "labels of the objects, for example the queue of Kueue"),
        "pod": Key(_table, "further fields of the pod: nodeSelector, tolerations, imagePullSecrets, ..."),
    },
}  # fmt: skip
# Keys that have no meaning for a backend. Such a key is a mistake: the user expects an effect that it does not have.
NOT_FOR = {
    "ssh": ("image", "slurm", "kubernetes"),
    "local": ("image", "copy", "spot", "ssh", "slurm", "kubernetes"),
    "slurm": ("image", "copy", "spot", "doctor", "ssh", "kubernetes"),
    "kubernetes": ("copy", "spot", "doctor", "interface", "venv", "ssh", "slurm", "main_address"),
}
