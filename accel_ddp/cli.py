"""The command `accel-ddp`. Each subcommand imports what it needs when it runs: torch is imported only where it is used."""

import filecmp
import os
import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from accel_ddp import __version__
from accel_ddp.config.commands import COMMANDS, parser_of
from accel_ddp.config.options import properties_of
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.errors import INTERRUPTED, USER_ERROR, UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import TYPED, launch_options, parse_accelerate_command, stated_precision
from accel_ddp.nodes.spawn import MODULE
from accel_ddp.records.redaction import redact_command
from accel_ddp.tasks.preference_losses import LOSSES
from accel_ddp.text import counted, did_you_mean, nearest, table
from accel_ddp.words import find_options, name_of, script_at, without

# The options of `accelerate launch` that describe nodes and processes. Recipes have no options of these names, so
# `accel-ddp run` accepts them on both sides of the recipe. Each takes one value.
NODE_OPTIONS = (
    "config_file", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
    "rdzv_backend", "max_restarts",
)  # fmt: skip
VERBS = ("train", "finetune", "fine-tune", "fit")  # the commands of other toolkits that are `run` here
OF_NODES = {"num_machines", "machine_rank", "main_process_ip"}  # those that describe several nodes
# Of the options that are numbers.
SMALLEST = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "main_process_port": 0, "max_restarts": 0}


def main(words: list[str] | None = None) -> int:
    """Run the command in `words` (default: the command line) and return its exit code."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help", "help"):
        lines = [f"  {line}" for line in table((name, one["does"]) for name, one in COMMANDS.items())]
        text = ["usage: accel-ddp COMMAND [options]", "", *lines, "", "accel-ddp COMMAND --help shows the options of a command."]
        print(*text, sep="\n", file=sys.stdout if words else sys.stderr)
        # 2 and not 0: a script that calls accel-ddp with an empty variable has made a mistake and should stop.
        return 0 if words else USER_ERROR
    if words[0] == "--version":
        print(f"accel-ddp {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            is_verb = bool(nearest(words[0], VERBS, cutoff=0.8))
            if is_verb or words[0] in recipe_files.recipe_names():
                command = shlex.join(["accel-ddp", "run", *words[is_verb:]])
                raise UserError(f"{words[0]!r} is not a command. Did you mean `{command}`?")
            suggestion = did_you_mean(words[0], COMMANDS, "{!r}")
            raise UserError(f"{words[0]!r} is not a command.{suggestion} The commands are: {', '.join(COMMANDS)}.")
        module, _, function = COMMANDS[words[0]]["call"].partition(":")
        home = sys.modules[__name__] if module == "cli" else import_module(f"accel_ddp.{module}")
        if words[0] in ("run", "launch", "estimate", "verify", "scaling"):
            words = recipe_files.place_example(words)
        code = getattr(home, function)(words[1:]) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has ended, as in `accel-ddp recipes | head -2`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its end
        return 1


def _recipes(words: list[str]) -> int:
    parser_of("recipes").parse_args(words)
    rows = []
    for recipe in recipe_files.recipe_names():
        rows.append((recipe, recipe_files.summary(recipe_files.recipe_path(recipe))))
        rows += [(f"  {name}", one.summary) for name, one in recipe_files.examples().items() if one.recipe == recipe]
    print(*table(rows), sep="\n")
    print("\nRun one: accel-ddp run NAME. Its options: accel-ddp run NAME --help. A copy to edit: accel-ddp copy NAME.")
    print("Indented names are examples: files with options, whose comments state data, GPUs and memory.")
    return 0


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(COMMANDS["run"]["text"], file=sys.stdout if words else sys.stderr)
        return 0 if words else USER_ERROR
    launch, recipe, options = split_run(words)
    for name, value, *_ in find_options(launch, SMALLEST):  # accelerate prints 100 lines or a traceback
        if value is not None and not (value.isdecimal() and int(value) >= SMALLEST[name]):
            raise UserError(f"--{name} {value}: must be a whole number, {SMALLEST[name]} or more.")
    script = recipe_files.recipe_path(recipe)
    for copy in () if recipe.endswith(".py") else (Path("recipes") / script.name, Path(script.name)):
        if copy.is_file() and not filecmp.cmp(copy, script, shallow=False):
            warning = f"warning: running {script}, not your edited {copy}. To run yours: accel-ddp run {copy}"
            print(warning, file=sys.stderr)
    if {"-h", "--help"} & set(options):  # without the launcher, which would import torch first
        _replace_process([str(script), "--help"])
    request = parse_accelerate_command(["accelerate", "launch", *with_config(launch)]) or {}
    # On several nodes the ranks check the options: they report a mistake to the other nodes, which would wait.
    cfg = _check_recipe(script, options) if request.get("num_machines", 1) == 1 else None
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if precision and not stated_precision(request):  # the launcher would replace it by its default
        launch += ["--mixed_precision", precision]
    if not {name_of(word) for word in launch} & {*OF_NODES, "config_file", "num_processes", "gpu_ids", "cpu"}:
        launch += _use_gpus(launch, cfg, recipe)
    # -q: after an error of a single process the launcher prints no traceback of its own below the error message.
    launcher = [*MODULE, "accel_ddp.nodes.launcher", "accelerate.commands.launch", "-q"]
    for option in find_options(launch, ["gpu_ids"]):
        # Accelerate refuses one GPU for a config that starts processes with torchrun, as our configs do.
        if option.value and option.value.isdigit():
            launch = without(launch, [option])
            os.environ["CUDA_VISIBLE_DEVICES"] = option.value
    os.environ[TYPED] = f"{os.getpid()} {shlex.join(redact_command(['accel-ddp', 'run', *words]))}"
    _replace_process([*launcher, *with_config(launch), str(script), *options])


def _check_recipe(script: Path, options: list[str]) -> TrainConfig | None:
    """Return the recipe's config, or None if only a rank can read it. Raise UserError for wrong options, files and columns."""
    from accel_ddp.doctor.check_options import load_recipe_config

    if re.search("argv|argparse", script.read_text(errors="replace")):
        return None
    variables, folder = dict(os.environ), os.getcwd()
    try:
        cfg = load_recipe_config([str(script), *options])
    except UserError:
        raise
    except Exception:
        return None
    finally:  # the launcher gets what the user has set, not what an import has changed
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
    if cfg:
        _check_inputs(cfg)
    return cfg


def _check_inputs(cfg: TrainConfig) -> None:
    from accel_ddp.sources.data import check_inputs  # imports numpy

    check_inputs(cfg, quiet=True)


def _launch(words: list[str]) -> int:
    from accel_ddp.launch.launch_command import launch

    return launch(words, _check_inputs)


def _use_gpus(launch: list[str], cfg: TrainConfig | None, recipe: str) -> list[str]:
    """Return options of `accelerate launch` for as many GPUs of this machine as can split a batch, and print their number."""
    from accel_ddp.doctor.facts import count_visible

    if (limit := count_visible()) < 2:
        return []
    all_of_them = f"--num_processes {limit} uses all"
    number, reason = cfg.most_ranks(limit) if cfg else (1, f"only a rank can read the options of {recipe}; {all_of_them}")
    before = _saved_ranks(cfg) if cfg and cfg.resume and not cfg.evaluate_only else 0
    if cfg and 0 < before < limit and cfg.most_ranks(before)[0] == before:
        number, reason = before, f"--resume continues a run of {counted(before, 'rank')}; {all_of_them}"
    print(f"using {number} of {limit} GPUs, because {reason}" if reason else f"using {limit} GPUs; --num_processes uses fewer")
    if number == 1:
        return []
    # A free port: another run may use other GPUs of this machine.
    port = [] if find_options(launch, ["main_process_port"]) else ["--main_process_port", "0"]
    return ["--num_processes", str(number), *port]


def _saved_ranks(cfg: TrainConfig) -> int:
    """Return the number of ranks of the run that `--resume` continues, or 0. With the same number it continues bit-identically."""
    from accel_ddp.saving import checkpoint_format

    places = [place for place in (cfg.output_dir, cfg.resume) if place not in ("", "auto")]
    paths = next(filter(None, map(checkpoint_format.list_checkpoints, places)), [Path(cfg.resume)])
    runs = map(checkpoint_format.read_run, reversed(paths))
    return next((run["num_ranks"] for run in runs if "num_ranks" in run), 0)


def split_run(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return (options of `accelerate launch`, recipe, options of the recipe).

    Options before the recipe belong to `accelerate launch`. Options after the recipe belong to the recipe, except for
    NODE_OPTIONS. If the word `--` follows the recipe, it is the border between both.
    """
    names = recipe_files.recipe_names()
    at = script_at(words, names)
    if at == len(words):
        near = [word for word in words if not word.startswith("-") and nearest(word, names)]
        for word in [*near, *words[:1]]:
            loss = next((name for name, one in LOSSES.items() if word in (name, *one.also)), "")
            if loss or word in ("cpo", "prefer", "preferences", "rlhf"):
                more = f" --loss {loss}" if loss else ""
                raise UserError(f"{word!r} is not a recipe. Preferences are learned by `accel-ddp run dpo{more}`.")
            if not word.startswith("-"):
                recipe_files.recipe_path(word)  # raises UserError with the nearest name
        raise UserError(f"accel-ddp run needs a recipe, for example `accel-ddp run classify`. Recipes are: {', '.join(names)}.")
    launch, recipe, rest = words[:at], words[at], words[at + 1 :]
    _check_launch_options(launch, words[at:])
    if "--" in rest:
        border = rest.index("--")
        return launch + rest[:border], recipe, rest[border + 1 :]
    moved = find_options(rest, NODE_OPTIONS)
    for option in moved:
        if option.value is None:
            raise UserError(f"{rest[option.at]} needs a value.")
        launch += rest[option.at : option.end]
    return launch, recipe, without(rest, moved)


def _check_launch_options(launch: list[str], behind: list[str]) -> None:
    """Raise UserError for a word before the recipe that `accelerate launch` does not know. It would print its whole usage."""
    known, kept, moved = launch_options(), list[str](), list[str]()
    words = kept
    for word in launch:
        if word.startswith("-"):
            words = moved if known and (name := name_of(word)) and name not in known else kept
        words.append(word)
    for name in filter(None, map(name_of, moved)):
        if name not in properties_of(RecipeConfig) and (meant := did_you_mean(name, known, "--{}", cutoff=0.8)):
            raise UserError(f"--{name}: `accelerate launch` has no such option.{meant}")
        command = shlex.join(["accel-ddp", "run", *kept, *behind, *moved])
        raise UserError(f"--{name}: options before the recipe are those of `accelerate launch`. Run: {command}")


def with_config(launch: list[str]) -> list[str]:
    """Return options of `accelerate launch` with the path of a config: local.yaml, 1node.yaml or 2node.yaml if none is given."""
    given = {name_of(word) for word in launch}
    for option in find_options(launch, ["config_file"]):
        if option.value is None:
            raise UserError("--config_file needs a value, for example --config_file 2node.yaml.")
        path = str(recipe_files.config_path(option.value))
        return [*launch[: option.at], "--config_file", path, *launch[option.end :]]
    name = "2node.yaml" if given & OF_NODES else "1node.yaml" if "num_processes" in given else "local.yaml"
    return ["--config_file", str(recipe_files.config_path(name)), *launch]


def _replace_process(words: list[str]) -> NoReturn:
    """Replace this process by Python, which keeps its pid, terminal and parent: exit codes and signals are the launcher's."""
    sys.stdout.flush(), sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *words])


def _copy(words: list[str]) -> int:
    given = parser_of("copy").parse_args(words)
    target = Path(given.to)
    if example := recipe_files.examples().get(given.recipe):
        copies = {example.path: target / example.path.name}
        command = f"accel-ddp run {example.recipe} --config {example.path.name}"
    else:
        recipe = recipe_files.recipe_path(given.recipe)
        folder = recipe_files.folder("accelerate_configs")
        configs = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("tuned.")]
        copies = {path: target / "recipes" / path.name for path in (recipe, *recipe_files.imported_recipes(recipe))}
        copies |= {path: target / "accelerate_configs" / path.relative_to(folder) for path in configs}
        command = f"accelerate launch --config_file accelerate_configs/local.yaml recipes/{recipe.name}"
    # Every file is checked before the first one is copied: a refused copy changes nothing.
    for source, copy in copies.items():
        if copy.exists() and not (copy.is_file() and filecmp.cmp(source, copy, shallow=False)):
            raise UserError(f"{copy} exists and differs. Move it away, or choose another folder with --to FOLDER.")
    for source, copy in copies.items():
        if copy.exists():
            print(f"unchanged: {copy}")
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            print(f"copied: {copy}")
    place = "" if target == Path() else f"cd {shlex.quote(str(target))} && "
    print(f"\nRun it: {place}{command}")
    return 0


def _verify(words: list[str]) -> int:
    # Options after the recipe belong to the recipe. Options before the recipe that are not ours belong to `accelerate launch`.
    at = script_at(words, recipe_files.recipe_names())
    given, launch = parser_of("verify").parse_known_args(words[:at])
    recipe = [str(recipe_files.recipe_path(word)) for word in words[at : at + 1]]
    from accel_ddp.verify import verify

    return verify([*launch, *recipe, *words[at + 1 :]], given.steps, given.folder, given.fsdp)


def _export(words: list[str]) -> int:
    given = parser_of("export").parse_args(words)
    from accel_ddp.exporting.export import from_checkpoint

    from_checkpoint(given.checkpoint, given.out, given.push_to_hub, given.merge, given.weights, given.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
