"""The mark by which pages of `accel-ddp report` and `accel-ddp scaling` are recognised, so that no other file is overwritten."""

import os
from pathlib import Path

from accel_ddp.errors import UserError


def generator(command: str) -> str:
    """Return the mark of the pages of a command, which is within their first 4096 bytes."""
    return f'<meta name="generator" content="accel-ddp {command}">'


def require_page(path: Path, given: str, option: str, command: str) -> None:
    """Raise UserError if a command cannot write its page: it is no HTML file, another program's file, or cannot be written.

    `given` is what the user has typed, and `option` is the option that chooses another path.
    """
    if path.is_dir():
        raise UserError(f"{given}: is a folder. Type: {option} {path / f'{command}.html'}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"{given}: a browser opens files that end with .html. Type: {option} {path.with_name(path.name + '.html')}"
        )
    try:
        with path.open("rb") as file:
            is_own = generator(command).encode() in file.read(4096)
    except FileNotFoundError:
        is_own = True
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}.") from error
    if not is_own:
        raise UserError(
            f"{given}: this file exists, and accel-ddp {command} has not written it. Move it away, or type another name: "
            f"{option} {path.with_name(f'accel_ddp_{command}.html')}"
        )
    parent = next(one for one in (path.absolute().parent, *path.absolute().parents) if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{given}: {parent} cannot be written. Type another path, for example {option} ~/{command}.html.")
