"""The entry point of this package in `accelerate launch` and torchrun.

Launchers wait for the other nodes before they start any process, up to 30 minutes and without output. What goes wrong in this
time can only be reported from inside the launcher.

torch loads this module through the entry point `torchrun.handlers` (pyproject.toml), by which packages add rendezvous
backends. If the launched script uses this package, `launcher_restarts` wraps the usual backends. Other scripts are not affected.
"""

import os
import sys

from accel_ddp import compat


def add_to_torchrun():
    """Wrap torch's rendezvous backends. torch calls this at a launcher's start, and registers the static one it returns."""
    creators = compat.rendezvous_creators()
    usual = {name: creators[name] for name in ("static", "c10d") if name in creators}
    if argv := find_script(sys.argv[1:]):
        from accel_ddp.doctor import launcher_restarts  # other scripts do not wait for this import

        launcher_restarts.prepare_launcher(argv)
        wrap = launcher_restarts.create_after_preflight
        for name, create in usual.items():
            creators[name] = lambda params, name=name, create=create: wrap(params, name, create, argv)
    return usual["static"]


def find_script(argv: list[str]) -> list[str]:
    for at, argument in enumerate(argv):
        if argument in ("-m", "--module"):
            return argv[at + 1 :] if _uses_package(_file_of_module(argv[at + 1 : at + 2])) else []
        if argument.endswith(".py"):
            return argv[at:] if _uses_package(argument) else []
    return []


def _file_of_module(module: list[str]) -> str:
    from importlib.util import find_spec

    inside = os.path.join(*module[0].split(".")) if module and module[0] else ""
    for file in (f"{inside}.py", os.path.join(inside, "__main__.py")):
        if inside and os.path.isfile(file):  # the working directory is on sys.path of `python -m`, but not of a launcher
            return file
    try:
        return find_spec(module[0]).origin or ""
    except (ImportError, AttributeError, ValueError, IndexError):
        return ""  # the launcher reports it


def _uses_package(file: str) -> bool:
    try:
        with open(file, errors="replace") as text:
            return "accel_ddp" in text.read()
    except OSError:
        return False
