"""The command line of ssh for a node, and what its errors mean."""

import shlex

from accel_ddp.launch.commands import shell_path
from accel_ddp.launch.description import Cluster, Node

FOLDER_MISSING, PYTHON_MISSING = 61, 62  # exit codes of the remote command
CONNECT_SECONDS = 10


def ssh_words(cluster: Cluster, node: Node) -> list[str]:
    """Return `ssh` with its options and the host. Options of the description come first, because ssh uses the first value of each."""
    connect = cluster.ssh.get("connect_seconds", CONNECT_SECONDS)
    options = ["BatchMode=yes", f"ConnectTimeout={connect}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    # An existing master is used. As a master itself, this ssh would end the user's other sessions when the job ends. Forwardings and
    # the command of an interactive session in the user's configuration would fail here.
    options += ["ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none"]
    words = ["ssh", *cluster.ssh.get("options", []), "-T"]
    for option in options:
        words += ["-o", option]
    return [*words, node.host]


def guard_command(node: Node) -> str:
    """Return the remote command that starts the guard. It works in every login shell, because `sh` runs it."""
    folder, venv = node.folder or "~", node.venv or ".venv"
    python = shell_path(f"{venv.rstrip('/')}/bin/python")
    lines = [f"cd {shell_path(folder)} || exit {FOLDER_MISSING}"]
    lines.append(f"p={python}")
    missing = f"exit {PYTHON_MISSING}" if node.venv else f"p=$(command -v python3) || exit {PYTHON_MISSING}"
    lines.append(f'[ -x "$p" ] || {missing}')
    lines.append('exec "$p" -m accel_ddp.launch.node.guard')
    return f"exec sh -c {shlex.quote('; '.join(lines))}"


def explain(cluster: Cluster, node: Node, code: int | None, text: str) -> str:
    """Return why the connection to a node or the start of its guard failed, and what to do. `text` is what ssh printed."""
    host, file = node.host, cluster.file
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "").rstrip(".")
    try_it = f"Try `{shlex.join([*ssh_words(cluster, node)[:-1], host])} true`."
    if code == FOLDER_MISSING:
        return f"{host}: the folder {node.folder or '~'} does not exist on this node. Correct `folder` in {file}, or write copy: rsync."
    if code == PYTHON_MISSING:
        what = f"{node.venv}/bin/python" if node.venv else "python3"
        return (
            f"{host}: {what} does not exist in {node.folder or '~'} on this node. Correct `venv` in {file}, or install it there."
        )
    if cluster.backend == "local":
        return f"{host}: the guard of this node has ended ({_exit(code)}): {last or 'it printed nothing'}."
    if "No module named" in text and "accel_ddp" in text:
        name = node.venv or "the Python of this node"
        venv = f"Correct `venv` in {file}" if node.venv else f"Write `venv` into {file}"
        return f"{host}: accel_ddp is missing or too old in {name}. {venv}, or run `pip install -c constraints.txt -e .` there."
    if code not in (None, 255):  # 255 is an error of ssh itself
        return f"{host}: the command on this node has ended ({_exit(code)}): {last or 'it printed nothing'}. {try_it}"
    if "Host key verification failed" in text:
        if "IDENTIFICATION HAS CHANGED" in text:
            return f"{host}: the host key has changed, so that this may be another machine. Check it, then run `ssh-keygen -R {host}`."
        return f"{host}: the host key is not known yet. Run `ssh {host}` once, compare the key, and accept it there."
    if "Permission denied" in text or "Too many authentication failures" in text:
        return f"{host}: ssh refused your keys ({last}). Passwords and passphrases cannot be typed here: use ssh-agent. {try_it}"
    if "Could not resolve" in text or "not known" in text:
        return f"{host}: the name of the host cannot be resolved. Correct `nodes` in {file}, or add the host to your ssh configuration."
    for sign in ("timed out", "No route to host", "Connection refused", "Network is unreachable", "Connection closed"):
        if sign.lower() in text.lower():
            return f"{host}: the host cannot be reached: {last}. Check that it runs and that its ssh port is open. {try_it}"
    return f"{host}: the connection failed ({_exit(code)}): {last or 'ssh printed nothing'}. {try_it}"


def _exit(code: int | None) -> str:
    return "no answer within the time limit" if code is None else f"exit code {code}"
