"""The keys of cluster.yaml, which describe a cluster and how jobs run there (docs/cluster.md), and their reader."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from accel_ddp.errors import UserError
from accel_ddp.text import did_you_mean, read_table

BACKENDS = ("ssh", "slurm", "kubernetes", "local")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FILE = read_table(Path(__file__).with_name("cluster_keys.yaml"))


def nearest_key(word: Any, known: Iterable[str]) -> str:
    known = list(known)
    other = _FILE["other_names"].get(str(word))
    return f" Did you mean {other}?" if other in known else did_you_mean(str(word), known)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    if "\n" in value or "\0" in value:
        raise ValueError("must be one line")
    return value


def _that(is_right: Callable[[Any], Any], reason: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(reason)
        return value

    return check


def _list_of(is_right: Callable[[Any], Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _number(at_least: int, at_most: int = 1 << 31) -> Callable[[Any], int]:
    limit = f" and at most {at_most}" if at_most < 1 << 31 else ""
    is_right = lambda value: type(value) is int and at_least <= value <= at_most
    return _that(is_right, f"must be a whole number of at least {at_least}{limit}")


def _choice(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        value = "off" if value is False and "off" in names else value  # YAML reads an unquoted off as false
        if value not in names:
            raise ValueError(f"must be one of: {', '.join(names)}.{nearest_key(value, names)}")
        return value

    return check


def _variables(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("must be lines of NAME: value")
    found = {}
    for name, content in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not the name of a variable")
        if isinstance(content, bool) or not isinstance(content, (str, int, float)):
            raise ValueError(f'the value of {name} must be a text; write it in quotes, for example {name}: "true"')
        found[name] = str(content)
    return found


def _seconds(value: Any) -> int:
    """Return the seconds of HH:MM:SS, D-HH:MM:SS or a number of seconds. YAML reads an unquoted 12:00:00 as a number."""
    if type(value) is int and value > 0:
        return value
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", str(value))
    if not found:
        raise ValueError('must be HH:MM:SS or D-HH:MM:SS, for example "12:00:00"')
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    if not (total := ((days * 24 + hours) * 60 + minutes) * 60 + seconds):
        raise ValueError("must be longer than 0 s")
    return total


class Key(NamedTuple):
    check: Callable[[Any], Any]
    help: str


_IS_NAME = lambda value: isinstance(value, str) and NAME.fullmatch(value)
_IS_HOST = lambda value: isinstance(value, str) and re.fullmatch(r"(?!-)[^\s'\"`$;|&<>\\/\0]+", value)
_IS_TABLE = lambda value: isinstance(value, dict) and all(type(key) is str for key in value)
_ARE_WORDS = _that(_list_of(lambda word: type(word) in (str, int)), "must be a list of words, for example [-F, my_ssh_config]")
_CHECKS = {
    "any": lambda value: value,  # the reader of the description checks it
    "text": _text, "variables": _variables, "seconds": _seconds,
    "name": _that(_IS_NAME, "must consist of at most 63 letters, digits, '.', '_' and '-', because it is the name of a folder"),
    "names": _that(_list_of(_IS_NAME), "must be a list of names, for example [wandb]"),
    "host": _that(_IS_HOST, "must be a host as in `ssh HOST`: a name of your ssh configuration, an address, or user@address"),
    "words": lambda value: [*map(str, _ARE_WORDS(value))],
    "table": _that(_IS_TABLE, "must be lines of KEY: value"),
    "flag": _that(lambda value: isinstance(value, bool), "must be true or false"),
    "labels": _that(lambda value: _IS_TABLE(value) and all(type(one) is str for one in value.values()), "must be lines of NAME: text"),
}  # fmt: skip


def _key(kind: str, help: str) -> Key:
    kind, *values = kind.split()
    return Key(_choice(*values) if kind == "choice" else _number(*map(int, values)) if kind == "number" else _CHECKS[kind], help)


_KEYS = {
    table: {name: _key(*row) for name, row in _FILE[table].items()} for table in ("cluster", "node", "ssh", "slurm", "kubernetes")
}
KEYS, NODE_KEYS, TABLES = _KEYS.pop("cluster"), _KEYS.pop("node"), _KEYS
NOT_FOR = _FILE["not_for"]


# ---- the reader


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
    ssh: dict[str, Any] = field(default_factory=dict)
    slurm: dict[str, Any] = field(default_factory=dict)
    kubernetes: dict[str, Any] = field(default_factory=dict)
    env_files: tuple[str, ...] = ()  # paths of the files that are part of the environment of nodes
    changes: tuple[str, ...] = ()  # the values of --set

    @property
    def num_processes(self) -> int:
        return sum(node.processes for node in self.nodes)

    @property
    def has_equal_nodes(self) -> bool:
        return len({node.processes for node in self.nodes}) == 1


def read_description(file: str | Path, changes: Iterable[str] = ()) -> Cluster:
    """Read a cluster file. `changes` are texts (TABLE.)KEY=VALUE. UserError has the file, the key, its value and the reason."""
    file, changes = Path(file), tuple(changes)
    values = _load(file)
    for change in changes:
        _apply(values, change)

    def fail(key: str, value: Any, reason: str) -> NoReturn:
        may_be_secret = "env" in key.split(".")[-1] or "{" in repr(value)  # variables, or a table that may contain them
        shown = "" if may_be_secret else f" {value!r}"
        raise UserError(f"{file}: {key}{shown[:120]}: {reason}{'' if reason[-1] in '.?' else '.'}")

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
    names = {one.name for one in fields(Cluster)} - {"file", "nodes", "env_files", "has_main_port", "changes"}
    given = {name: value for name, value in values.items() if name in names}
    has_port = "main_port" in values
    return Cluster(file=file, nodes=nodes, env_files=env_files, has_main_port=has_port, changes=changes, **given)


def _load(file: Path) -> dict[str, Any]:
    """Return the content of a file. A key that is given twice is refused, of which YAML would silently use the last value."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    line = node.value[at][0].start_mark.line + 1
                    raise yaml.YAMLError(f"the key {key} is given twice, the second time in line {line}. Remove one of them.")
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=Loader)
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file. Give the path of a cluster file (cluster.yaml).") from None
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{file}: the file cannot be read as YAML: {where}{error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file}: the file cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: the file must consist of lines of KEY: value, for example backend: ssh.")
    return values


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
        raise UserError(f"--set {change}: {table} is not a table of keys in the cluster file.")


def _check_keys(values: dict[str, Any], checks: dict[str, Key], prefix: str, fail: Callable) -> dict[str, Any]:
    for key, value in values.items():
        if key not in checks:
            near = nearest_key(str(key), checks)
            fail(f"{prefix}{key}", value, f"is not a key.{near} The keys are: {', '.join(checks)}")
        try:
            values[key] = checks[key].check(value)
        except ValueError as error:
            fail(f"{prefix}{key}", value, str(error))
    return values


def _read_nodes(file: Path, values: dict[str, Any], fail: Callable) -> tuple[tuple[Node, ...], tuple[str, ...]]:
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
    for rank, one in enumerate(_list_nodes(values, fail)):
        prefix = f"nodes[{rank}]."
        one = {"host": one} if isinstance(one, str) else one
        if not isinstance(one, dict):
            fail(f"nodes[{rank}]", one, "must be a host, or a table with the key host")
        one = _check_keys(dict(one), NODE_KEYS, prefix, fail)
        if "host" not in one:
            fail(f"nodes[{rank}]", one, "the key host is missing")
        gpus = one.get("gpus", values.get("gpus_per_node"))
        if gpus is None:
            raise UserError(f"{file}: gpus_per_node is missing. Write the number of GPUs of each node, or 0 to train on CPUs.")
        processes = one.get("processes", values.get("processes_per_node") if "gpus" not in one else None) or gpus or 1
        if gpus and processes > gpus:
            key = f"{prefix}processes" if "processes" in one else "processes_per_node"
            fail(key, processes, f"is more than the {gpus} GPUs of the node. Each process uses one GPU")
        env = {**common, **read_env(one, prefix)}
        values_of_node = {key: one.get(key, values.get(key, "")) for key in ("folder", "venv", "interface")}
        nodes.append(Node(host=one["host"], rank=rank, gpus=gpus, processes=processes, env=env, **values_of_node))
    hosts = [node.host for node in nodes]
    if values["backend"] in ("ssh", "local") and (twice := next((host for host in hosts if hosts.count(host) > 1), "")):
        fail("nodes", twice, "is listed twice. Each host is one node; use processes for several processes on it")
    if len({bool(node.gpus) for node in nodes}) > 1:
        fail("nodes", [f"{node.host}: {node.gpus} GPUs" for node in nodes], "some nodes have GPUs and some have none")
    return tuple(nodes), tuple(env_files)


def _list_nodes(values: dict[str, Any], fail: Callable) -> list[Any]:
    backend, listed = values["backend"], values["nodes"]
    if type(listed) is int:
        if backend == "ssh":
            fail("nodes", listed, "must be a list of hosts with backend: ssh, for example nodes: [node-a, node-b]")
        if not 1 <= listed <= 4096:
            fail("nodes", listed, "must be a whole number from 1 to 4096")
        return [{"host": f"node{number}"} for number in range(listed)]
    if not isinstance(listed, list) or not listed:
        fail("nodes", listed, "must be a list of hosts, for example nodes: [node-a, node-b]")
    if backend in ("slurm", "kubernetes"):
        fail("nodes", listed, f"must be the number of nodes with backend: {backend}, which chooses the nodes itself")
    return listed


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
        quoted = re.fullmatch(r"""(['"])(.*?)\1(\s+#.*)?""", value)
        found[variable] = quoted[2] if quoted else re.sub(r"\s+#.*", "", value)
    return found


SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASS|CREDENTIAL|AUTH|_PW$", re.IGNORECASE)


def shown_value(name: str, value: str) -> str:
    return "***" if SECRET.search(name) or re.search(r"://[^/]*:[^/]*@", value) else value
