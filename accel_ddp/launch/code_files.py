"""The code in a folder: which files belong to it, what describes it, and how it differs between nodes."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_ddp.doctor.facts import code_versions
from accel_ddp.errors import UserError
from accel_ddp.text import listed

_NEVER_COPIED = frozenset({".git", ".hg", ".svn", ".venv", "__pycache__", ".env", ".accel_ddp", ".DS_Store"})
_CODE = (".py", ".toml")
_MOST_NAMES = 2000  # of files in a message between machines


def list_files(folder: Path, left_out: Iterable[str] = (), seconds: float | None = None) -> list[str]:
    """Return the files below a folder that git does not ignore, relative to the folder and sorted.

    Files that never belong to the code are left out: repositories, virtual environments, caches, and the paths `left_out`. Raises
    TimeoutError after `seconds`.
    """
    paths = [os.path.normpath(path) for path in left_out if path]
    deadline = None if seconds is None else time.monotonic() + seconds
    found = []
    for name in _list_withgit_output(folder, deadline) if shutil.which("git") else _walk(folder, deadline):
        is_left_out = any(name == path or name.startswith(f"{path}/") for path in paths)
        if not is_left_out and not _NEVER_COPIED.intersection(name.split("/")):
            found.append(name)
    environments = tuple(name.removesuffix("pyvenv.cfg") for name in found if name.endswith("/pyvenv.cfg"))
    return sorted(name for name in found if not name.startswith(environments))


def _list_withgit_output(folder: Path, deadline: float | None) -> Iterable[str]:
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
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _list_withgit_output(path, deadline))
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
    """Return what `compare_code` compares: git's commit, and hashes of the package accel_ddp and of the code in a folder.

    It takes at most some seconds. `files` is empty if there are too many files.
    """
    versions = code_versions(script)
    found: dict[str, Any] = {"package": versions["code"], "commit": git_output(folder, "rev-parse", "--short=12", "HEAD").strip()}
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
    return {**found, "total": total, "files": hashes if len(hashes) <= _MOST_NAMES else {}}


def compare_code(facts: dict[str, dict[str, Any]]) -> str | None:
    """Return one message that states which hosts have other code than the rest, or None. `facts` is from `describe_code`.

    A file that only some hosts have is a difference in folders without git. In a repository it is a file that is not committed.
    """
    advice = "Update the code there, for example with `git pull`, or write copy: rsync or copy: git in the description."
    usual_commit = _most_frequent([one.get("commit") for one in facts.values()])
    candidates = [one for one in facts.values() if not usual_commit or one.get("commit") == usual_commit]
    usual_total = _most_frequent([one.get("total") for one in candidates])
    usual = next((one for one in candidates if one.get("total") == usual_total), {})
    parts = []
    for host, one in facts.items():
        is_other_commit = one.get("commit") and usual_commit and one["commit"] != usual_commit
        place = f"commit {one['commit']} instead of {usual_commit}" if is_other_commit else ""
        if found := [text for text in (listed(_differences(one, usual)), place) if text]:
            parts.append(f"{host} has {' in '.join(found)}")
    if parts:
        return f"the code differs: {'; '.join(parts[:5])}. {advice}"
    usual_package = _most_frequent([one.get("package") for one in facts.values()])
    if others := [host for host, one in facts.items() if one.get("package") and one["package"] != usual_package]:
        return f"the package accel_ddp of {listed(others)} differs from that of the other nodes. Install the same version there."
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
    """Return the most frequent value that is not empty, or the first of several."""
    return next((value for value, _ in Counter(filter(None, values)).most_common(1)), None)


def program_environment(**more: str) -> dict[str, str]:
    """Return the environment of a program. Git sets variables for its hooks, from which the command may be started."""
    hidden = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, "GIT_OPTIONAL_LOCKS": "0", **more}


def git_output(folder: Path, *words: str) -> str:
    """Return what git prints, or an empty text if it fails."""
    try:
        ended = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=60, env=program_environment())
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout if ended.returncode == 0 else ""
