"""Reads and validates cluster.yaml, the description of a cluster and of how jobs run there."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.launch.cluster_keys import BACKENDS, KEYS, NODE_KEYS, NOT_FOR, TABLES, Key, Wrong, nearest_key


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
    """A cluster description. `keys` documents the key that each field comes from."""

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
    _check_keys(values, KEYS, "", fail)
    for table, checks in TABLES.items():
        if table in values:
            if not isinstance(values[table], dict):
                fail(table, values[table], f"must contain lines of KEY: value. Its keys are: {', '.join(checks)}")
            values[table] = _check_keys(values[table], checks, f"{table}.", fail)
    backend = values["backend"]
    for key in NOT_FOR[backend]:
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
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{file}: the file cannot be read as YAML: {where}{error.problem}") from None
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


def _check_keys(values: dict[str, Any], checks: dict[str, Key], prefix: str, fail: Callable) -> dict[str, Any]:
    for key, value in values.items():
        if key not in checks:
            near = nearest_key(str(key), checks)
            fail(f"{prefix}{key}", value, f"is not a key.{near} The keys are: {', '.join(checks)}")
        try:
            values[key] = checks[key].check(value)
        except Wrong as error:
            fail(f"{prefix}{key}", value, str(error))
    return values


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
        one = _check_keys(dict(one), NODE_KEYS, prefix, fail)
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
        if backend in ("ssh", "local") and hosts.count(host) > 1:
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
