"""The words of a command line: `--name value`, `--name=value`, `--no_name`, and where the script begins.

Accelerate, torchrun and recipes accept `--num-processes` for `--num_processes`. Names here have underscores and no dashes before them.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    name: str
    value: str | None  # None: it is the last word, so its value is missing
    at: int  # its place
    end: int  # the place behind its value


def split_option(word: str) -> tuple[str, str | None]:
    """Return ("num_ranks", "2") for `--num-ranks=2`, ("num_ranks", None) for `--num_ranks`, and ("", None) for other words."""
    if not word.startswith("--"):
        return "", None
    name, equals, value = word[2:].partition("=")
    return name.replace("-", "_"), value if equals else None


def name_of(word: str) -> str:
    """Return the name of an option without its value: `num_ranks` for `--num-ranks=2`. Other words have none."""
    return split_option(word)[0]


def find_options(words: Sequence[str], names: Collection[str]) -> list[Option]:
    """Return the options of these names in the order of the words. Each takes one value, which may begin with dashes."""
    found: list[Option] = []
    at = 0
    while at < len(words):
        name, value = split_option(words[at])
        end = at + 1
        if name and name in names:
            if value is None and end < len(words):
                value, end = words[end], end + 1
            found.append(Option(name, value, at, end))
        at = end
    return found


def value_of(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option, "" if its value is missing, or None if it is not given. The last one wins, as in argparse."""
    return next((option.value or "" for option in reversed(find_options(words, [name]))), None)


def has_option(words: Sequence[str], name: str) -> bool:
    return any(name_of(word) in (name, f"no_{name}") for word in words)


def without(words: Sequence[str], options: Sequence[Option]) -> list[str]:
    left_out = {place for option in options for place in range(option.at, option.end)}
    return [word for place, word in enumerate(words) if place not in left_out]


def group_values(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with all words up to the next option. Words before the first option are left out."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        name, value = split_option(word)
        if word.startswith("--"):
            groups.append((name, [] if value is None else [value]))
        elif groups:
            groups[-1][1].append(word)
    return groups


def differences(there: Sequence[str], here: Sequence[str]) -> list[str]:
    one, other = (dict(group_values(["--", *words])) for words in (there, here))  # the script has no name
    shown = lambda values: "not given" if values is None else " ".join(values) or "given"
    different = [(f"--{name}" if name else "the script", name) for name in {**one, **other} if one.get(name) != other.get(name)]
    return [f"{title} is {shown(one.get(name))} there and {shown(other.get(name))} here" for title, name in different]


def script_at(words: Sequence[str], names: Collection[str] = ()) -> int:
    """Return the place of the first word that is a Python file or one of `names`, or the number of words."""
    return next((place for place, word in enumerate(words) if word.endswith(".py") or word in names), len(words))
