"""Reads and validates cluster.yaml, the description of a cluster and of how jobs run there."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError

BACKENDS = ("ssh", "slurm", "kubernetes", "local")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a cluster. Every value is complete: defaults of the cluster are filled in."""

    host: str  # as in `ssh HOST`
    rank: int
    gpus: int
    processes: int
    env: dict[str, str] = field(default_factory=dict, repr=False)  # may contain secrets
    folder: str = ""
    venv: str = ""
    interface: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster description. The comment of each field is the documentation of the key with the same name."""

    file: Path
    name: str = ""  # of the job; the default is the name of the recipe
    backend: str
    nodes: tuple[Node, ...]
    main_address: str = ""  # empty: the address of the first node
    main_port: int = 29500
    has_main_port: bool = False  # the description gives main_port
    copy: str = "none"
    image: str = ""
    output: str = "runs"
    restarts: int = 0
    time_limit: int | None = None  # seconds
    accelerate_config: str = "2node.yaml"
    doctor: str = "quick"
    spot: str = "none"
    ssh: dict[str, Any] = field(default_factory=dict)
    slurm: dict[str, Any] = field(default_factory=dict)
    kubernetes: dict[str, Any] = field(default_factory=dict)
    env_files: tuple[str, ...] = ()  # paths of the files that are part of the environment of nodes

    @property
    def num_processes(self) -> int:
        return sum(node.processes for node in self.nodes)

    @property
    def has_equal_nodes(self) -> bool:
        return len({node.processes for node in self.nodes}) == 1

    @property
    def uses_gpus(self) -> bool:
        return any(node.gpus for node in self.nodes)


class _Wrong(Exception):
    """The reason why a value is not accepted."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Wrong("must be a text that is not empty")
    if "\n" in value or "\0" in value:
        raise _Wrong("must be one line")
    return value


def _name(value: Any) -> str:
    if not NAME.fullmatch(_text(value)):
        raise _Wrong("must consist of at most 63 letters, digits, '.', '_' and '-', because it is the name of a folder")
    return value


def _host(value: Any) -> str:
    if _text(value).startswith("-") or re.search(r"[\s'\"`$;|&<>\\/]", value):
        raise _Wrong("must be a host as in `ssh HOST`: a name of your ssh configuration, an address, or user@address")
    return value


def _number(at_least: int, at_most: int = 1 << 31) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            limit = f" and at most {at_most}" if at_most < 1 << 31 else ""
            raise _Wrong(f"must be a whole number of at least {at_least}{limit}")
        return value

    return check


def _choice(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        value = "off" if value is False and "off" in names else value  # YAML reads an unquoted off as false
        if value not in names:
            raise _Wrong(f"must be one of: {', '.join(names)}.{_nearest(value, names)}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("must be true or false")
    return value


def _words(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(type(word) in (str, int) for word in value):  # YAML reads an unquoted yes as true
        raise _Wrong("must be a list of words, for example [-F, my_ssh_config]")
    return [str(word) for word in value]


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and NAME.fullmatch(name) for name in value):
        raise _Wrong("must be a list of names, for example [wandb]")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _Wrong("must be lines of KEY: value")
    return value


def _labels(value: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in _table(value).values()):
        raise _Wrong("must be lines of NAME: text")
    return value


def _variables(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _Wrong("must be lines of NAME: value")
    found = {}
    for name, content in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise _Wrong(f"{name!r} is not the name of a variable")
        if isinstance(content, bool) or not isinstance(content, (str, int, float)):
            raise _Wrong(f'the value of {name} must be a text; write it in quotes, for example {name}: "true"')
        found[name] = str(content)
    return found


def _seconds(value: Any) -> int:
    """Return the seconds of HH:MM:SS, D-HH:MM:SS or a number of seconds. YAML reads an unquoted 12:00:00 as a number."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", str(value))
    if not found:
        raise _Wrong('must be HH:MM:SS or D-HH:MM:SS, for example "12:00:00"')
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    if not (total := ((days * 24 + hours) * 60 + minutes) * 60 + seconds):
        raise _Wrong("must be longer than 0 s")
    return total


Check = Callable[[Any], Any]
_NODE_KEYS: dict[str, Check] = {
    "host": _host, "gpus": _number(0, 64), "processes": _number(1, 1024), "env": _variables, "env_file": _text,
    "folder": _text, "venv": _text, "interface": _text,
}  # fmt: skip
_TABLES: dict[str, dict[str, Check]] = {
    "ssh": {"options": _words, "connect_seconds": _number(1, 600)},
    "slurm": {
        "partition": _text, "account": _text, "qos": _text, "gres": _text, "signal_seconds": _number(10, 65535),
        "requeue": _flag, "options": _words,
    },
    "kubernetes": {
        "context": _text, "namespace": _name, "kind": _choice("TrainJob", "Job"), "volume_claim": _name, "mount": _text,
        "shared_memory": _text, "grace_seconds": _number(1), "secrets": _names, "cpu": _number(1), "memory": _text,
        "labels": _labels, "pod": _table,
    },
}  # fmt: skip
_KEYS: dict[str, Check] = {
    "name": _name, "backend": _choice(*BACKENDS), "nodes": lambda value: value, "gpus_per_node": _number(0, 64),
    "processes_per_node": _number(1, 1024), "main_address": _host, "main_port": _number(1024, 65535), "interface": _text,
    "folder": _text, "copy": _choice("none", "rsync", "git"), "venv": _text, "image": _text, "env_file": _text,
    "env": _variables, "output": _text, "restarts": _number(0), "time_limit": _seconds, "accelerate_config": _text,
    "doctor": _choice("quick", "full", "off"), "spot": _choice("none", "aws"), **dict.fromkeys(_TABLES, lambda value: value),
}  # fmt: skip
# Keys that have no meaning for a backend. Such a key is a mistake: the user expects an effect that it does not have.
_NOT_FOR = {
    "ssh": ("image", "slurm", "kubernetes"),
    "local": ("image", "copy", "spot", "ssh", "slurm", "kubernetes"),
    "slurm": ("image", "copy", "spot", "doctor", "ssh", "kubernetes"),
    "kubernetes": ("copy", "spot", "doctor", "interface", "venv", "ssh", "slurm", "main_address"),
}


def read_description(file: str | Path, changes: Iterable[str] = ()) -> Cluster:
    """Return the cluster that a file describes. `changes` are texts KEY=VALUE or TABLE.KEY=VALUE, which replace keys of the file.

    Raises UserError with the file, the key, its value and the reason.
    """
    file = Path(file)
    values = _load(file)
    for change in changes:
        _apply(values, change)
    fail = lambda key, value, reason: _fail(file, key, value, reason)
    if "backend" not in values:
        raise UserError(
            f"{file}: the key backend is missing. Write one of: {', '.join(f'backend: {name}' for name in BACKENDS)}."
        )
    _check_keys(values, _KEYS, "", fail)
    for table, checks in _TABLES.items():
        if table in values:
            if not isinstance(values[table], dict):
                fail(table, values[table], f"must contain lines of KEY: value. Its keys are: {', '.join(checks)}")
            values[table] = _check_keys(values[table], checks, f"{table}.", fail)
    backend = values["backend"]
    for key in _NOT_FOR[backend]:
        if key in values:
            fail(key, values[key], f"has no effect with backend: {backend}. Remove it")
    if "nodes" not in values:
        raise UserError(f"{file}: the key nodes is missing. Write the hosts, or the number of nodes for slurm and kubernetes.")
    nodes, env_files = _read_nodes(file, values, fail)
    names = {one.name for one in fields(Cluster)} - {"file", "nodes", "env_files", "has_main_port"}
    given = {name: value for name, value in values.items() if name in names}
    return Cluster(file=file, nodes=nodes, env_files=env_files, has_main_port="main_port" in values, **given)


def _load(file: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_unique_keys())
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file. Give the path of a cluster description (cluster.yaml).") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file}: the file cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: the file must consist of lines of KEY: value, for example backend: ssh.")
    return values


def _unique_keys() -> type:
    """Return a YAML loader that refuses a key that is given twice. The usual one silently uses the last value."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    line = node.value[at][0].start_mark.line + 1
                    raise yaml.YAMLError(f"the key {key} is given twice, the second time in line {line}. Remove one of them.")
            return super().construct_mapping(node, deep)

    return Loader


def _apply(values: dict[str, Any], change: str) -> None:
    import yaml

    key, equals, text = change.partition("=")
    if not equals or not key:
        raise UserError(f"--set {change}: must be KEY=VALUE, for example --set main_port=29600.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {change}: the value cannot be read: {error}") from None
    table, dot, inner = key.partition(".")
    if not dot:
        values[key] = value
    elif isinstance(values.setdefault(table, {}), dict):
        values[table][inner] = value
    else:
        raise UserError(f"--set {change}: {table} is not a table of keys in the description.")


def _fail(file: Path, key: str, value: Any, reason: str) -> None:
    may_be_secret = "env" in key.split(".")[-1] or "{" in repr(value)  # variables, or a table that may contain them
    shown = "" if may_be_secret else f" {value!r}"
    raise UserError(f"{file}: {key}{shown[:120]}: {reason}{'' if reason[-1] in '.?' else '.'}")


def _check_keys(values: dict[str, Any], checks: dict[str, Check], prefix: str, fail: Callable) -> dict[str, Any]:
    for key, value in values.items():
        if key not in checks:
            near = _nearest(str(key), checks)
            fail(f"{prefix}{key}", value, f"is not a key.{near} The keys are: {', '.join(checks)}")
        try:
            values[key] = checks[key](value)
        except _Wrong as error:
            fail(f"{prefix}{key}", value, str(error))
    return values


def _nearest(word: Any, known: Iterable[str]) -> str:
    # A user who writes hosts or gpu means nodes or gpus_per_node, which are not similar as texts.
    other = {"hosts": "nodes", "gpus": "gpus_per_node", "gpu": "gpus_per_node", "port": "main_port", "address": "main_address",
             "master_addr": "main_address", "master_port": "main_port", "num_nodes": "nodes", "output_dir": "output",
             "max_restarts": "restarts", "time": "time_limit", "environment": "env", "code": "folder"}  # fmt: skip
    known = list(known)
    found = [other[str(word)]] if other.get(str(word)) in known else difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {found[0]}?" if found else ""


def _read_nodes(file: Path, values: dict[str, Any], fail: Callable) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    backend, listed = values["backend"], values["nodes"]
    if isinstance(listed, int) and not isinstance(listed, bool):
        if backend == "ssh":
            fail("nodes", listed, "must be a list of hosts with backend: ssh, for example nodes: [node-a, node-b]")
        if not 1 <= listed <= 4096:
            fail("nodes", listed, "must be a whole number from 1 to 4096")
        listed = [{"host": f"node{number}"} for number in range(listed)]
    elif not isinstance(listed, list) or not listed:
        fail("nodes", listed, "must be a list of hosts, for example nodes: [node-a, node-b]")
    elif backend in ("slurm", "kubernetes"):
        fail("nodes", listed, f"must be the number of nodes with backend: {backend}, which chooses the nodes itself")
    env_files: list[str] = []

    def read_env(where: dict[str, Any], prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        if "env_file" in where:
            path = file.parent / Path(where["env_file"]).expanduser()
            env_files.append(str(path))
            found = read_env_file(path, f"{file}: {prefix}env_file {where['env_file']}")
        return {**found, **where.get("env", {})}

    common = read_env(values, "")
    nodes = []
    for rank, one in enumerate(listed):
        prefix = f"nodes[{rank}]."
        one = {"host": one} if isinstance(one, str) else one
        if not isinstance(one, dict):
            fail(f"nodes[{rank}]", one, "must be a host, or a table with the key host")
        one = _check_keys(dict(one), _NODE_KEYS, prefix, fail)
        if "host" not in one:
            fail(f"nodes[{rank}]", one, "the key host is missing")
        gpus = one.get("gpus", values.get("gpus_per_node"))
        processes = one.get("processes", values.get("processes_per_node") if "gpus" not in one else None)
        if gpus is None:
            raise UserError(f"{file}: gpus_per_node is missing. Write the number of GPUs of each node, or 0 to train on CPUs.")
        processes = processes or gpus or 1
        if gpus and processes > gpus:
            fail(f"{prefix}processes" if "processes" in one else "processes_per_node", processes, f"is more than the {gpus} GPUs of "
                 "the node. Each process uses one GPU")  # fmt: skip
        env = {**common, **read_env(one, prefix)}
        values_of_node = {key: one.get(key, values.get(key, "")) for key in ("folder", "venv", "interface")}
        nodes.append(Node(host=one["host"], rank=rank, gpus=gpus, processes=processes, env=env, **values_of_node))
    hosts = [node.host for node in nodes]
    for host in hosts:
        if backend == "ssh" and hosts.count(host) > 1:
            fail("nodes", host, "is listed twice. Each host is one node; use processes for several processes on it")
    if len({bool(node.gpus) for node in nodes}) > 1:
        fail("nodes", [f"{node.host}: {node.gpus} GPUs" for node in nodes], "some nodes have GPUs and some have none")
    return tuple(nodes), tuple(env_files)


def read_env_file(path: Path, name: str) -> dict[str, str]:
    """Return the variables of a file with lines of NAME=VALUE. Values are never part of an error, because they may be secrets."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or 'it is not a text file'}.") from None
    found = {}
    for number, line in enumerate(lines, 1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        variable, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise UserError(f"{name}: line {number} is not NAME=VALUE.")
        value = value.strip()
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[variable] = value[1:-1] if is_quoted else re.sub(r"\s+#.*", "", value)
    return found


SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASS|CREDENTIAL|AUTH|_PW$", re.IGNORECASE)


def shown_value(name: str, value: str) -> str:
    """Return the value of a variable for output, or *** if its name looks like that of a secret."""
    return "***" if SECRET.search(name) or re.search(r"://[^/]*:[^/]*@", value) else value
