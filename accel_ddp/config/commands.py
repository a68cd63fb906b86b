"""The commands of `accel-ddp`, as commands.yaml declares them."""

import argparse
from pathlib import Path
from typing import Any

from accel_ddp.text import read_table

TABLE: dict[str, dict[str, Any]] = read_table(Path(__file__).with_suffix(".yaml"))
COMMANDS: dict[str, dict[str, Any]] = TABLE["commands"]


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command. The type of an argument is that of its default."""
    command = COMMANDS[name]
    text = command.get("description", f"{command['does'].capitalize()}.")
    parser = argparse.ArgumentParser(prog=f"accel-ddp {name}", usage=command.get("usage"), description=text)
    for word, options in {**TABLE["shared"].get(command.get("shared", ""), {}), **command.get("arguments", {})}.items():
        kind: dict[str, Any] = {"type": type(options["default"])} if isinstance(options.get("default"), int | float) else {}
        parser.add_argument(word, **kind, **options)
    return parser
