"""The commands of `accel-ddp`, from their argument parsers and help texts."""

import argparse
import contextlib
import importlib
import io
import re
from unittest import mock

from accel_ddp.config.commands import COMMANDS
from reference import mark, notice, table, wrap

# The guide of each command, and an example.
GUIDES = {
    "recipes": ("examples.md", "accel-ddp recipes"),
    "run": ("quick_start.md", ""),
    "launch": ("launch.md", ""),
    "status": ("launch.md", "accel-ddp status cluster.yaml"),
    "logs": ("launch.md", "accel-ddp logs -f cluster.yaml --name classify"),
    "stop": ("launch.md", "accel-ddp stop cluster.yaml --name classify"),
    "report": ("report.md", ""),
    "copy": ("own_recipe.md", "accel-ddp copy classify --to my_project"),
    "doctor": (
        "troubleshooting.md#the-doctor",
        "accel-ddp doctor\naccel-ddp doctor --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 recipes/classify.py",
    ),
    "tune": (
        "several_nodes.md#faster-between-nodes",
        "accel-ddp tune --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 recipes/classify.py",
    ),
    "verify": ("exactness.md", "accel-ddp verify recipes/own_model.py"),
    "scaling": ("scaling.md", "accel-ddp scaling --ranks 1,2 recipes/classify.py"),
    "estimate": ("memory.md", "accel-ddp estimate --gpus 1 8 sft --model my_model --lora_r 16"),
    "convert": ("from_axolotl.md", "accel-ddp convert axolotl.yaml --gpus 8 --out my_run.yaml"),
    "profile": ("profile.md", "accel-ddp profile runs/my_run"),
    "evaluate": ("after_training.md", ""),
    "predict": ("after_training.md", "accel-ddp predict runs/classify/1 --input new.csv --output predictions.csv"),
    "chat": ("after_training.md", "accel-ddp chat runs/sft/1"),
    "export": ("resume.md#export", "accel-ddp export runs/sft/1 my_model --merge"),
}


class _Found(Exception):
    """Carries the parser of a command out of its function."""


def page() -> str:
    """Return the page of all commands."""
    rows = [(f"[{name}](#accel-ddp-{name})", mark(one["does"])) for name, one in COMMANDS.items()]
    parts = [
        "# Commands",
        notice("the argument parsers of the commands"),
        "All subcommands of `accel-ddp` with their options. The [quick start](quick_start.md) shows the first of them.\n"
        "`accel-ddp COMMAND --help` prints the same texts, and [exit codes](codes.md#exit-codes) are on their own page.\n",
        table(("command", "what it does"), rows),
    ]
    return "\n".join([*parts, *(_section(name) for name in COMMANDS)])


def _section(name: str) -> str:
    guide, example = GUIDES.get(name, ("quick_start.md", ""))
    found = _help_of(name)
    usage, text, examples, groups = _from_parser(found) if isinstance(found, argparse.ArgumentParser) else _from_text(found)
    if examples or example:
        text = f"{text}\n\n```bash parsed\n{examples or example}\n```"
    parts = [f"## accel-ddp {name}\n", f"```text\n{usage}\n```\n", f"{text}\n"]
    for title, rows in groups:
        parts += [f"{title}:\n"] * bool(title) + [table(("option" if title != "Arguments" else "argument", "meaning"), rows)]
    return "\n".join([*parts, f"See the [guide]({guide}).\n"])


def _help_of(name: str) -> argparse.ArgumentParser | str:
    """Return the parser of a command, or the text that it prints for `--help` if it has no parser."""
    module, _, name = COMMANDS[name]["call"].partition(":")
    function = getattr(importlib.import_module(f"accel_ddp.{module}"), name)

    def found(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Found(parser)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(_Found):
        parsers = {"parse_args": found, "parse_known_args": found}
        with mock.patch.multiple(argparse.ArgumentParser, **parsers):
            try:
                function(["--help"])
            except _Found as caught:
                return caught.args[0]
    return printed.getvalue()


def _from_parser(parser: argparse.ArgumentParser) -> tuple[str, str, str, list]:
    """Return (usage, description, examples, groups of options) of a parser."""
    with mock.patch.dict("os.environ", COLUMNS="120"):
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
    usage = re.sub(r"\n +", "\n    ", usage)
    text = "\n\n".join(map(wrap, mark(parser.description or "").strip().split("\n\n")))
    examples = "\n".join(re.findall(r"^  (accel-ddp .*?)(?:  +\S.*)?$", parser.epilog or "", flags=re.MULTILINE))
    groups = []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS and action.dest != "help"]
        if not shown:
            continue
        plain = {"positional arguments": "Arguments", "options": "Options"}
        title = plain.get(group.title, group.title[0].upper() + group.title[1:])
        groups.append((title, [(_name(action), mark(_meaning(action))) for action in shown]))
    return usage, text, examples, groups


def _name(action: argparse.Action) -> str:
    """Return an argument with its value: `--steps N`."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    names = dict.fromkeys(re.sub(r"(?<=\w)-", "_", name) for name in action.option_strings)  # each has a spelling with hyphens
    value = ""
    if action.nargs != 0:
        value = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.metavar or ""
        value = value or ("N" if action.type in (int, float) else action.dest.upper())
        value = {"+": f" {value} ...", "*": f" [{value} ...]", "?": f" [{value}]"}.get(action.nargs, f" {value}")
    return ", ".join(f"`{name}{value}`" for name in names)


def _meaning(action: argparse.Action) -> str:
    """Return the help text, with the default unless the text states one."""
    default = action.default
    shown = (
        ""
        if default in (None, "", False, 0, argparse.SUPPRESS) or default == []
        else f"{default:g}"
        if type(default) is float
        else default
    )
    is_stated = "default" in action.help or f"({shown}" in action.help
    return f"{action.help} (default: {shown})" if shown and action.option_strings and not is_stated else action.help


def _from_text(text: str) -> tuple[str, str, str, list]:
    """Return the same parts of a help text: paragraphs, lines of examples, and lines of options."""
    usage, _, rest = text.removeprefix("usage: ").partition("\n")
    examples, options, prose = [], [], []
    for line in rest.strip().splitlines():
        if found := re.fullmatch(r"  (accel-ddp .*?)(?:  +(\S.*))?", line):
            examples.append(found[1] + (f"  # {found[2]}" if found[2] else ""))
        elif found := re.fullmatch(r"  (--\w+(?: [A-Z=]+)?)  +(\S.*)", line):
            options.append((f"`{found[1]}`", mark(found[2])))
        elif line != "options:":
            prose.append(line)
    paragraphs = [wrap(part) for part in mark("\n".join(prose)).split("\n\n") if part.strip()]
    return usage, "\n\n".join(paragraphs), "\n".join(examples), [("Options", options)] if options else []
