"""Copies the code of the launching machine to the nodes, with rsync or git over ssh."""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from accel_ddp.errors import UserError
from accel_ddp.launch.code_files import git_output, list_files, program_environment
from accel_ddp.launch.connection import explain
from accel_ddp.launch.description import Cluster, Node
from accel_ddp.launch.job_commands import shell_path
from accel_ddp.text import format_bytes, listed

_REF = "refs/accel_ddp/launch"  # where HEAD is stored in the repositories of the nodes; no branch is changed
_MUCH = 500 << 20  # bytes; code is smaller
_MARK = b"accel_ddp:"  # before what our remote scripts print; a login shell may print something first
_NOT_MADE, _NOT_WRITABLE, _NO_PROGRAM, _IS_HOME, _CHANGED = range(64, 69)  # exit codes of the remote scripts


def find_source(script: str, copy: str) -> Path:
    """Return the folder that `copy: rsync` or `copy: git` copies: the current folder, so that all paths of the command line fit.

    The script must be below this folder. With git, it must be the top folder of the repository. `copy` is also the name of the
    program that is needed.
    """
    source = Path.cwd()
    if not shutil.which(copy):
        other = "git" if copy == "rsync" else "rsync"
        raise UserError(f"copy: {copy}: the program {copy} is not installed on this machine. Install it, or write copy: {other}.")
    inside = not Path(script).is_absolute() and ".." not in Path(script).parts
    if not inside or not Path(script).is_file():
        raise UserError(
            f"copy: {copy}: the folder in which you type the command is copied to the nodes, but {source} does not contain {script}. "
            "Change to the folder of your code, or write copy: none."
        )
    if source in (Path("/"), Path.home()):
        raise UserError(
            f"copy: {copy}: the folder {source} is not copied, because it contains more than code. Make a folder for it."
        )
    if copy == "git":
        top = git_output(source, "rev-parse", "--show-toplevel").strip()
        if not top:
            raise UserError(
                f"copy: git: {source} is not a git repository. Run `git init` and commit your code, or write copy: rsync."
            )
        if Path(top).resolve() != source.resolve():
            raise UserError(f"copy: git: {source} is not the top folder of its repository. Type the command in {top}.")
    return source


async def copy_code(
    cluster: Cluster, source: Path, ssh_words: Callable[[Node], list[str]], note: Callable[[str], None] = print
) -> None:
    """Copy the code in `source` to the code folder of every node, as `cluster.copy` requests, on all nodes at the same time.

    `ssh_words` returns the ssh command for a node, which ends with the host. `note` prints a message. Raises UserError with the
    reason of each node.
    """
    if cluster.copy == "none":
        return
    copier = (_Rsync if cluster.copy == "rsync" else _Git)(cluster, source, ssh_words)
    if text := copier.warning():
        note(text)
    failures = [text for text in await asyncio.gather(*map(copier.attempt, cluster.nodes)) if text]
    if failures:
        raise UserError(failures[0] if len(failures) == 1 else "\n  ".join(["the code was not copied:", *failures]))


class _Failed(Exception):
    """The reason why a node has not received the code."""


class _Copier:
    """What both ways to copy have in common."""

    program = ""

    def __init__(self, cluster: Cluster, source: Path, ssh_words: Callable[[Node], list[str]]):
        self.cluster, self.source, self.ssh_words = cluster, source, ssh_words

    async def attempt(self, node: Node) -> str:
        """Copy the code to a node. Return why that has failed, or an empty text."""
        try:
            if not node.folder:
                raise _Failed(f"copy: {self.program} needs a folder for the code. Write for example folder: ~/work")
            await self.copy(node)
        except _Failed as error:
            return f"{node.host}: {error}"
        return ""

    async def copy(self, node: Node) -> None:
        raise NotImplementedError

    def warning(self) -> str:
        return ""

    async def run(self, words: list[str], given: bytes = b"", **env: str) -> tuple[int, bytes, str]:
        """Run a program on this machine. Return its exit code, its output and its error messages."""
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, a program does not receive the Ctrl-C of the terminal. It is ended below instead.
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=self.source, env=program_environment(**env), start_new_session=True
        )
        try:
            out, errors = await process.communicate(given)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
                await process.wait()
        return process.returncode or 0, out, errors.decode(errors="replace")

    async def run_on(self, node: Node, script: str, given: bytes = b"") -> list[str]:
        """Run a shell script on a node. Return the texts that it prints after _MARK, each of which ends with NUL."""
        code, out, errors = await self.run([*self.ssh_words(node), f"exec sh -c {shlex.quote(script)}"], given)
        if code:
            raise _Failed(self.explain(node, code, errors))
        return [text.decode(errors="surrogateescape") for text in out.rpartition(_MARK)[2].split(b"\0")[:-1]]

    def prepare(self, node: Node) -> str:
        """Return a script that makes the code folder of a node and checks that code can be copied to it.

        Folders above it are made in the home directory only: a missing one elsewhere is probably a disk that is not mounted.
        """
        folder = shell_path(node.folder)
        make = "mkdir -p" if node.folder.startswith("~") or not node.folder.startswith("/") else "mkdir"
        lines = [
            f"[ -d {folder} ] || {make} -- {folder} || exit {_NOT_MADE}",
            f"cd -- {folder} || exit {_NOT_MADE}",
            f'case "$(pwd -P)" in /|"$(cd && pwd -P)") exit {_IS_HOME};; esac',
            f"[ -w . ] || exit {_NOT_WRITABLE}",
            f"command -v {self.program} >/dev/null || exit {_NO_PROGRAM}",
        ]
        return "; ".join(lines)  # in csh, a quoted text must not contain the end of a line

    def explain(self, node: Node, code: int, errors: str) -> str:
        folder, text = f"folder {node.folder}", "; ".join(line.strip() for line in errors.splitlines() if line.strip())[-600:]
        if code == _IS_HOME:
            return f"{folder}: is the home directory or the root on this node, which contain more than code. Write for example ~/work"
        if code == _NO_PROGRAM:
            other = "git" if self.program == "rsync" else "rsync"
            return f"copy: {self.program}: {self.program} is not installed on this node. Install it there, or write copy: {other}"
        if code == _CHANGED:
            return (
                f"copy: git: {folder} has changes on this node that are not committed: {text}. Commit or discard them there, or write "
                "copy: rsync, which overwrites them"
            )
        if code == 255 and "rsync" not in errors.partition(":")[0]:
            return explain(self.cluster, node, code, errors).removeprefix(f"{node.host}: ")
        for sign, advice in (
            ("No space left on device", "Free some space there, or change `folder`"),
            ("Disk quota exceeded", "Free some space there, or change `folder`"),
            ("Read-only file system", "Change `folder`"),
            ("Permission denied", "Let your user write there, or change `folder`"),
        ):
            if sign in errors or (sign == "Permission denied" and code == _NOT_WRITABLE):
                return f"{folder}: the code cannot be written on this node: {sign}. {advice}"
        if code == _NOT_MADE:
            return f"{folder}: does not exist on this node and cannot be made: {text}. Correct `folder`, or make the folder there"
        return f"copy: {self.program}: the code was not copied to {folder} (exit code {code}): {text}"


class _Rsync(_Copier):
    """Copies the files that git would not ignore, as they are now.

    Files of the node are deleted only if an earlier copy has brought them. `.accel_ddp/copied` in the code folder lists these.
    """

    program = "rsync"

    def __init__(self, cluster: Cluster, source: Path, ssh_words: Callable[[Node], list[str]]):
        super().__init__(cluster, source, ssh_words)
        # These files may have secrets, which are sent to the ranks and are not stored on the nodes.
        secret = [os.path.relpath(file, source) for file in (*cluster.env_files, cluster.file)]
        left_out = [cluster.output, *(node.venv for node in cluster.nodes), *secret]
        self.names = list_files(source, left_out)
        if not self.names:
            raise UserError(f"copy: rsync: there is no file to copy in {source}.")

    async def copy(self, node: Node) -> None:
        # From rsync 3.5 on, a link that leads out of the code folder, for example from `data` to a disk, is followed only with this
        # option. The protection is against users who can write into the folder. They could as well change the code that is run.
        find_option = '"$(rsync --help | grep -q -e --insecure-links && echo --insecure-links)"'
        ready = f"printf '%s%s\\0%s\\0' {_MARK.decode()} \"$(pwd -P)\" {find_option}; cat .accel_ddp/copied 2>/dev/null || true"
        folder, option, *copied_before = await self.run_on(node, f"{self.prepare(node)}; {ready}")
        there = f"cd -- {shlex.quote(folder)} || exit {_NOT_MADE}"
        if gone := [name for name in set(copied_before) - set(self.names) if self._is_gone(name)]:
            await self.run_on(node, f"{there}; xargs -0 rm -f -- || exit 1", _joined(gone))
        # -K: a link to a folder stays. Without implied folders, their permissions stay too.
        # -s: the folder may contain spaces.
        words = ["rsync", "-lptKs", "--no-implied-dirs", "--timeout=300", "--from0", "--files-from=-"]
        words += [f"--rsync-path=rsync {option}"]
        words += ["-e", " ".join(map(_quote_for_rsync, self.ssh_words(node)[:-1])), "./", f"{_address(node.host)}:{folder}/"]
        code, _, errors = await self.run(words, _joined(self.names))
        if code:
            raise _Failed(self.explain(node, code, errors))
        store = "mkdir -p .accel_ddp && echo '*' >.accel_ddp/.gitignore && cat >.accel_ddp/copied.$$ && "
        await self.run_on(node, f"{there}; {store}mv .accel_ddp/copied.$$ .accel_ddp/copied || exit 1", _joined(self.names))

    def warning(self) -> str:
        """Return a message if there is much to copy: probably data that was forgotten in .gitignore."""
        sizes: Counter[str] = Counter()
        for name in self.names:
            with contextlib.suppress(OSError):
                sizes[name.split("/")[0]] += (self.source / name).lstat().st_size
        if (total := sizes.total()) < _MUCH:
            return ""
        largest, size = sizes.most_common(1)[0]
        return (
            f"copy: rsync: {len(self.names)} files with {format_bytes(total)} are copied to each node, if the nodes do not have them "
            f"already. {largest} has {format_bytes(size)} of them. What .gitignore contains is not copied."
        )

    def _is_gone(self, name: str) -> bool:
        """Return whether a file that was copied before is deleted here. One that git ignores now stays on the node."""
        path = Path(name)
        return bool(name) and not path.is_absolute() and ".." not in path.parts and not os.path.lexists(self.source / path)


class _Git(_Copier):
    """Pushes HEAD into a repository in the code folder of each node and checks it out there. No server is needed."""

    program = "git"

    def __init__(self, cluster: Cluster, source: Path, ssh_words: Callable[[Node], list[str]]):
        super().__init__(cluster, source, ssh_words)
        self.commit = git_output(source, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
        if not self.commit:
            raise UserError(f"copy: git: the repository {source} has no commit. Commit your code, or write copy: rsync.")
        lines = git_output(source, "status", "--porcelain", "--untracked-files=all").splitlines()
        changed = [line[3:] for line in lines if not line.startswith("??") or line.rstrip('"').endswith((".py", ".toml"))]
        if changed:
            raise UserError(
                f"copy: git: these files are not committed, so that the nodes would not receive them: {listed(changed)}. "
                "Commit them, or write copy: rsync, which copies the files as they are."
            )
        if any(line.startswith("160000 ") for line in git_output(source, "ls-files", "--stage").splitlines()):
            raise UserError("copy: git: the repository has submodules, which are not pushed. Write copy: rsync.")

    async def copy(self, node: Node) -> None:
        # Files of the node that are not committed stay: git refuses to overwrite them.
        ready = [
            "[ -e .git ] || git init --quiet . || exit 1",
            'changed=$(git status --porcelain --untracked-files=no) || exit 1; [ -z "$changed" ] || '
            f'{{ printf "%s\\n" "$changed" >&2; exit {_CHANGED}; }}',
            f"printf '%s%s\\0' {_MARK.decode()} \"$(pwd -P)\"",
        ]
        (folder,) = await self.run_on(node, "; ".join([self.prepare(node), *ready]))
        words = ["git", "push", "--quiet", "--no-verify", "--receive-pack=git -c receive.shallowUpdate=true receive-pack"]
        words += ["--", f"{_address(node.host)}:{folder}", f"+{self.commit}:{_REF}"]
        code, _, errors = await self.run(words, GIT_SSH_COMMAND=shlex.join(self.ssh_words(node)[:-1]), GIT_SSH_VARIANT="ssh")
        if code:
            raise _Failed(self.explain(node, code, errors))
        check_out = f"git -c core.hooksPath=/dev/null -c advice.detachedHead=false checkout --quiet --detach {self.commit}"
        await self.run_on(node, f"cd -- {shlex.quote(folder)} && {check_out} || exit 1")


def _address(host: str) -> str:
    """Return a host as rsync and git need it before a colon. An IPv6 address is in brackets."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name and not name.startswith("[") else host


def _joined(names: list[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def _quote_for_rsync(word: str) -> str:
    """Return a word for `rsync -e`, which has its own rules: a quote inside of quotes is doubled."""
    return "'" + word.replace("'", "''") + "'"
