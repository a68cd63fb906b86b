"""The code of a job: which files belong to it, how it is copied to the nodes, and how it differs between them."""

import asyncio
import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accel_ddp.doctor.facts import code_versions
from accel_ddp.errors import UserError
from accel_ddp.launch.connection import Lost, explain, join_reasons
from accel_ddp.launch.description import Cluster, Node
from accel_ddp.launch.job_commands import REFUSALS, shell_path
from accel_ddp.text import format_bytes, listed

_NEVER_COPIED = frozenset({".git", ".hg", ".svn", ".venv", "__pycache__", ".env", ".accel_ddp", ".DS_Store"})
_CODE = (".py", ".toml")
_MOST_NAMES = 2000  # of files in a message between machines
_MUCH = 500 << 20  # bytes; code is smaller
_MARK = b"accel_ddp:"  # before what our remote scripts print; a login shell may print something first
_NOT_MADE, _NOT_WRITABLE, _NO_PROGRAM, _IS_HOME = range(64, 68)  # exit codes of the remote scripts


def list_files(folder: Path, left_out: Iterable[str] = (), seconds: float | None = None) -> list[str]:
    """Return the files below a folder, sorted, without those that git ignores or that are no code. Or TimeoutError."""
    paths = [os.path.normpath(path) for path in left_out if path]
    deadline = None if seconds is None else time.monotonic() + seconds
    found = []
    for name in _list_with_git(folder, deadline) if shutil.which("git") else _walk(folder, deadline):
        is_left_out = any(name == path or name.startswith(f"{path}/") for path in paths)
        if not is_left_out and not _NEVER_COPIED.intersection(name.split("/")):
            found.append(name)
    environments = tuple(name.removesuffix("pyvenv.cfg") for name in found if name.endswith("/pyvenv.cfg"))
    return sorted(name for name in found if not name.startswith(environments))


def _list_with_git(folder: Path, deadline: float | None) -> Iterable[str]:
    """Yield the files of a folder, which need not be a repository, and of the repositories inside."""
    with contextlib.ExitStack() as stack:
        where: list[str] = []
        if not git_output(folder, "rev-parse", "--is-inside-work-tree").strip():
            empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="accel_ddp_"))
            subprocess.run(["git", "init", "--quiet", "--bare", empty], check=True, env=program_environment())
            where = [f"--git-dir={empty}", "--work-tree=."]
        words = ["git", *where, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        left = None if deadline is None else max(0.1, deadline - time.monotonic())
        try:
            ended = subprocess.run(words, cwd=folder, capture_output=True, timeout=left, env=program_environment())
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        if ended.returncode:
            raise UserError(f"git cannot list the files of {folder}: {ended.stderr.decode(errors='replace').strip()}")
    for name in dict.fromkeys(os.fsdecode(ended.stdout).split("\0")):  # a file with a merge conflict is listed three times
        path = folder / name
        if name and path.is_dir() and not path.is_symlink():  # a repository of its own, also a submodule
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _list_with_git(path, deadline))
        elif name and os.path.lexists(path):  # otherwise deleted, but not committed
            yield name


def _walk(folder: Path, deadline: float | None) -> Iterable[str]:
    for where, folders, names in os.walk(folder):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        folders[:] = [name for name in folders if name not in _NEVER_COPIED and name not in links]
        yield from (os.path.relpath(os.path.join(where, name), folder) for name in names + links)


def describe_code(folder: Path, script: str = "", left_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return what `compare_code` compares, in some seconds at most: git's commit and hashes. No `files`: they are too many."""
    commit = git_output(folder, "rev-parse", "--short=12", "HEAD").strip()
    hashes = {}
    try:
        deadline = time.monotonic() + 3
        # The home directory, which is the default, contains much that is not the code of the job.
        for name in [] if folder == Path.home() else list_files(folder, left_out, seconds=3):
            if name.endswith(_CODE) and (folder / name).is_file():
                hashes[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()[:12]
            if time.monotonic() > deadline:
                raise TimeoutError
    except (OSError, UserError, subprocess.SubprocessError):
        hashes = {}
    total = hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12] if hashes else ""
    files = hashes if len(hashes) <= _MOST_NAMES else {}
    return {"package": code_versions(script)["code"], "commit": commit, "total": total, "files": files}


def compare_code(facts: dict[str, dict[str, Any]]) -> str | None:
    """Return which hosts have other code than the rest, or None. In a repository, a file that some lack is not committed."""
    advice = "Update the code there, for example with `git pull`, or write copy: rsync in the cluster file."
    usual_commit = _most_frequent([one.get("commit") for one in facts.values()])
    candidates = [one for one in facts.values() if not usual_commit or one.get("commit") == usual_commit]
    usual_total = _most_frequent([one.get("total") for one in candidates])
    usual = next((one for one in candidates if one.get("total") == usual_total), {})
    parts = []
    for host, one in facts.items():
        is_other_commit = one.get("commit") and usual_commit and one["commit"] != usual_commit
        commit = f"commit {one['commit']} instead of {usual_commit}" if is_other_commit else ""
        if text := " in ".join(filter(None, [listed(_differences(one, usual)), commit])):
            parts.append(f"{host} has {text}")
    if parts:
        return f"the code differs: {'; '.join(parts[:5])}. {advice}"
    usual_package = _most_frequent([one.get("package") for one in facts.values()])
    if others := [host for host, one in facts.items() if one.get("package") and one["package"] != usual_package]:
        return f"the package accel_ddp of {listed(others)} differs from the other nodes. Install the same version there."
    return None


def _differences(one: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    total, usual_total = one.get("total"), usual.get("total")
    if not total or not usual_total or total == usual_total:
        return []
    theirs, ours = one["files"], usual["files"]
    if not theirs or not ours:
        return [] if one["commit"] and usual["commit"] else ["other code"]
    found = [f"another {name}" for name in theirs if name in ours and ours[name] != theirs[name]]
    if not one["commit"] and not usual["commit"]:
        found += [f"no {name}" for name in ours if name not in theirs]
        found += [f"an additional {name}" for name in theirs if name not in ours]
    return found


def _most_frequent(values: list[Any]) -> Any:
    return next((value for value, _ in Counter(filter(None, values)).most_common(1)), None)


def program_environment() -> dict[str, str]:
    """Return the environment of a program. Git sets variables for its hooks, from which the command may be started."""
    hidden = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, "GIT_OPTIONAL_LOCKS": "0"}


def git_output(folder: Path, *words: str) -> str:
    try:
        ended = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=60, env=program_environment())
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


# ---- copying


def find_source(script: str) -> Path:
    """Return the folder that `copy: rsync` copies: the current one, so all paths of the command fit. The script is below it."""
    source = Path.cwd()
    if not shutil.which("rsync"):
        raise UserError("copy: rsync: the program rsync is not installed on this machine. Install it, or write copy: none.")
    inside = not Path(script).is_absolute() and ".." not in Path(script).parts
    if not inside or not Path(script).is_file():
        raise UserError(
            f"copy: rsync: the folder in which you run the command is copied to the nodes, but {source} does not contain {script}. "
            "Change to the folder of your code, or write copy: none."
        )
    if source in (Path("/"), Path.home()):
        raise UserError(
            f"copy: rsync: the folder {source} is not copied, because it contains more than code. Make a folder for it."
        )
    return source


async def copy_code(
    cluster: Cluster, source: Path, ssh_words: Callable[[Node], list[str]], note: Callable[[str], None] = print
) -> None:
    """Copy `source` to all nodes at once, by the ssh command of each, which ends with its host. UserError has all reasons."""
    copier = _Copier(cluster, source, ssh_words)
    copier.warn(note)
    results = await asyncio.gather(*map(copier.copy, cluster.nodes), return_exceptions=True)
    failures = [f"{node.host}: {result}" for node, result in zip(cluster.nodes, results) if isinstance(result, Lost)]
    if failures:
        raise UserError(join_reasons("the code was not copied:", failures))
    for result in results:
        if result:
            raise result


class _Copier:
    """Copies what git would not ignore. Deletes on a node only what an earlier copy has brought: `.accel_ddp/copied` lists it."""

    def __init__(self, cluster: Cluster, source: Path, ssh_words: Callable[[Node], list[str]]):
        self.cluster, self.source, self.ssh_words = cluster, source, ssh_words
        # These files may have secrets, which are sent to the ranks and are not stored on the nodes.
        secret = [os.path.relpath(file, source) for file in (*cluster.env_files, cluster.file)]
        left_out = [cluster.output, *(node.venv for node in cluster.nodes), *secret]
        self.names = list_files(source, left_out)
        if not self.names:
            raise UserError(f"copy: rsync: there is no file to copy in {source}.")

    async def copy(self, node: Node) -> None:
        """Copy the files to a node, after those were deleted there that are gone here. Raises Lost."""
        if not node.folder:
            raise Lost("copy: rsync needs a folder for the code. Write for example folder: ~/work")
        # From rsync 3.5 on, a link out of the folder, as to a disk, needs this. Who can write there can change the code too.
        find_option = '"$(rsync --help | grep -q -e --insecure-links && echo --insecure-links)"'
        ready = f"printf '%s%s\\0%s\\0' {_MARK.decode()} \"$(pwd -P)\" {find_option}; cat .accel_ddp/copied 2>/dev/null || true"
        folder, option, *copied_before = await self.run_on(node, f"{_prepare(node)}; {ready}")
        there = f"cd -- {shlex.quote(folder)} || exit {_NOT_MADE}"
        # Files that git ignores now are not deleted here, and stay on the node.
        is_inside = lambda name: name and not Path(name).is_absolute() and ".." not in Path(name).parts
        missing = filter(is_inside, set(copied_before) - set(self.names))
        if gone := [name for name in missing if not os.path.lexists(self.source / name)]:
            await self.run_on(node, f"{there}; xargs -0 rm -f -- || exit 1", _joined(gone))
        # -K: a link to a folder stays. Without implied folders, their permissions stay too. -s: spaces in the folder.
        words = ["rsync", "-lptKs", "--no-implied-dirs", "--timeout=300", "--from0", "--files-from=-"]
        words += [f"--rsync-path=rsync {option}"]
        # `rsync -e` has its own rules: a quote inside quotes is doubled.
        ssh = " ".join("'" + word.replace("'", "''") + "'" for word in self.ssh_words(node)[:-1])
        user, at, name = node.host.rpartition("@")
        host = f"{user}{at}[{name}]" if ":" in name and not name.startswith("[") else node.host  # an IPv6 address
        await self.run(node, [*words, "-e", ssh, "./", f"{host}:{folder}/"], _joined(self.names))
        store = "mkdir -p .accel_ddp && echo '*' >.accel_ddp/.gitignore && cat >.accel_ddp/copied.$$ && "
        await self.run_on(node, f"{there}; {store}mv .accel_ddp/copied.$$ .accel_ddp/copied || exit 1", _joined(self.names))

    async def run(self, node: Node, words: list[str], given: bytes = b"") -> bytes:
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, a program does not receive the Ctrl-C of the terminal. It is ended below instead.
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=self.source, env=program_environment(), start_new_session=True
        )
        try:
            out, errors = await process.communicate(given)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
                await process.wait()
        if process.returncode:
            raise Lost(self.explain(node, process.returncode, errors.decode(errors="replace")))
        return out

    async def run_on(self, node: Node, script: str, given: bytes = b"") -> list[str]:
        """Run a shell script on a node. Return the texts that it prints after _MARK, each of which ends with NUL."""
        out = await self.run(node, [*self.ssh_words(node), f"exec sh -c {shlex.quote(script)}"], given)
        return [text.decode(errors="surrogateescape") for text in out.rpartition(_MARK)[2].split(b"\0")[:-1]]

    def explain(self, node: Node, code: int, errors: str) -> str:
        folder, text = f"folder {node.folder}", "; ".join(line.strip() for line in errors.splitlines() if line.strip())[-600:]
        if code == _IS_HOME:
            return f"{folder}: is the home directory or the root on this node, which contain more than code. Write for example ~/work"
        if code == _NO_PROGRAM:
            return "copy: rsync: rsync is not installed on this node. Install it there, or write copy: none"
        if code == 255 and "rsync" not in errors.partition(":")[0]:
            return explain(self.cluster, node, code, errors).removeprefix(f"{node.host}: ")
        errors += "Permission denied" if code == _NOT_WRITABLE else ""
        for sign, advice in REFUSALS["rsync"].items():
            if sign in errors:
                return f"{folder}: the code cannot be written on this node: {sign}. {advice}"
        if code == _NOT_MADE:
            return f"{folder}: does not exist on this node and cannot be made: {text}. Correct `folder`, or make the folder there"
        return f"copy: rsync: the code was not copied to {folder} (exit code {code}): {text}"

    def warn(self, note: Callable[[str], None]) -> None:
        """Print a message if there is much to copy: probably data that was forgotten in .gitignore."""
        sizes: Counter[str] = Counter()
        for name in self.names:
            with contextlib.suppress(OSError):
                sizes[name.split("/")[0]] += (self.source / name).lstat().st_size
        if (total := sizes.total()) >= _MUCH:
            largest, size = sizes.most_common(1)[0]
            note(
                f"copy: rsync: {len(self.names)} files with {format_bytes(total)} are copied to each node, if the nodes do not have "
                f"them already. {largest} has {format_bytes(size)} of them. Files that .gitignore lists are not copied."
            )


def _prepare(node: Node) -> str:
    """Folders above the code folder are made in the home directory only: elsewhere a missing one is an unmounted disk."""
    folder = shell_path(node.folder)
    make = "mkdir -p" if node.folder.startswith("~") or not node.folder.startswith("/") else "mkdir"
    lines = [
        f"[ -d {folder} ] || {make} -- {folder} || exit {_NOT_MADE}",
        f"cd -- {folder} || exit {_NOT_MADE}",
        f'case "$(pwd -P)" in /|"$(cd && pwd -P)") exit {_IS_HOME};; esac',
        f"[ -w . ] || exit {_NOT_WRITABLE}",
        f"command -v rsync >/dev/null || exit {_NO_PROGRAM}",
    ]
    return "; ".join(lines)  # in csh, a quoted text must not contain the end of a line


def _joined(names: list[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)
