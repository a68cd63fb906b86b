"""The options that all recipes share, and a page for each recipe."""

import dataclasses
import importlib
import inspect
import typing
from fractions import Fraction
from typing import Any, Literal

from accel_ddp.config.options import GROUPS, properties_of
from accel_ddp.config.parsing import own_options
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.nodes import recipe_files
from accel_ddp.tasks.preference_losses import LOSSES
from reference import mark, notice, table, wrap

CHANGES, MAY_DIFFER = "●", "◇"
SYMBOLS = f"""- {CHANGES} changes what is learned. `--resume` refuses another value unless you add `--allow_config_change`.
- {MAY_DIFFER} may differ between nodes. All other options must be the same on every node.
"""
# The guide of each recipe, and the options that most users of the recipe set.
GUIDES = {
    "classify": ("own_data.md#rows-and-columns-of-each-recipe", "--train_file reviews.csv"),
    "dpo": ("preferences.md", "--train_file preferences.jsonl --lora_r 16"),
    "embed": ("own_data.md", "--train_file pairs.jsonl"),
    "images": ("own_data.md#rows-and-columns-of-each-recipe", "--train_file photos/"),
    "own_loop": ("own_recipe.md#your-own-loop", "--steps 100"),
    "own_model": ("own_recipe.md", "--steps 100"),
    "pretrain_mlm": ("own_data.md#rows-and-columns-of-each-recipe", "--train_file texts.txt"),
    "rerank": ("own_data.md#rerank-queries-and-candidates", "--train_file queries.jsonl"),
    "reward": ("own_data.md#reward-pairs", "--train_file preferences.jsonl"),
    "seq2seq": ("own_data.md#rows-and-columns-of-each-recipe", "--train_file pairs.jsonl"),
    "sft": ("chats.md", "--model Qwen/Qwen3-8B --train_file chats.jsonl --lora_r 16"),
    "tag": ("own_data.md#rows-and-columns-of-each-recipe", "--train_file tags.jsonl"),
}


def page() -> str:
    """Return the page of the options that all recipes share."""
    properties = properties_of(RecipeConfig)
    recipes = [f"[{name}](options/{name}.md)" for name in recipe_files.recipe_names()]
    parts = [
        "# Options",
        notice("the help texts in `accel_ddp/config/` and `recipes/`"),
        "These options are shared by all recipes for pretrained models. Each recipe has a page with its own options and defaults:\n"
        + wrap(", ".join(recipes) + ".")
        + "\n",
        "`accel-ddp run sft --help` prints the same texts in the terminal. The [quick start](quick_start.md) shows the first run.\n",
        YAML,
        "## Symbols\n",
        SYMBOLS + "\nFiles and models may be in different places on each node, but their content must be the same.\n",
    ]
    for group, title in GROUPS.items():
        names = [name for name, found in properties.items() if found.group == group]
        parts += [f"## {group.capitalize()}\n", f"{title}\n", _options(RecipeConfig, names)]
    return "\n".join(parts)


YAML = """## Set options

Set an option on the command line, or in a YAML file that you pass with `--config`:

```yaml
# my_run.yaml
model: HuggingFaceTB/SmolLM2-135M-Instruct
train_file: [chats.jsonl, more_chats.jsonl]
lora_r: 16
lr: 2e-4
epochs: 2
gradient_checkpointing: true
output_dir: runs/my_chat_model
```

```bash parsed
accel-ddp run sft --config my_run.yaml --epochs 3
```

| option | value | meaning |
|---|---|---|
| `--config` | file or name | YAML file with `option: value` lines, or the name of an [example](examples.md); may be repeated |
| `--help` | | print all options of the recipe and exit |

- A value on the command line wins over the file, the file over the default. The run folder's `config.json` has the values used.
- Turn a flag on with `--gradient_checkpointing` and off with `--no_gradient_checkpointing`. In YAML, write `true` or `false`.
- A list takes several values: `--train_file a.jsonl b.jsonl`. In YAML, write `[a.jsonl, b.jsonl]`.
- `--config` sets the options of a run. `--config_file` names the config of `accelerate launch`: processes, nodes and FSDP.
- A name from another toolkit, such as `--learning_rate`, is refused with the option to use instead. There is a page for each:
  [HF Trainer](from_trainer.md), [TRL](from_trl.md), [axolotl](from_axolotl.md), [LLaMA-Factory](from_llama_factory.md).
"""


def recipe_page(recipe: str) -> str:
    """Return the page of one recipe: its own options, and the shared options whose default differs."""
    cls = importlib.import_module(recipe).Config
    base = RecipeConfig if issubclass(cls, RecipeConfig) else TrainConfig
    properties, inherited = properties_of(cls), properties_of(base)
    own = [name for name in properties if name in own_options(cls) or name not in inherited]
    described = [name for name in own if name not in inherited or properties[name].help != inherited[name].help]
    described.sort(key=lambda name: name in inherited)
    changed = [name for name in own if name not in described]
    guide, example = GUIDES[recipe]
    lacks = "" if base is RecipeConfig else ", without the groups Model and Data and without `--eval_batch_size`"
    parts = [
        f"# Options of {recipe}",
        notice(f"`recipes/{recipe}.py`"),
        wrap(f"{recipe_files.summary(recipe_files.recipe_path(recipe))} The [guide](../{guide}) explains how to use it.") + "\n",
        f"```bash parsed\naccel-ddp run {recipe} {example}\n```\n",
        wrap(f"The recipe also has the [options of all recipes](../options.md){lacks}.") + f"\n\n{SYMBOLS}",
    ]
    if cls.__module__ != recipe:
        parts.append(f"Its own options are those of [{cls.__module__}]({cls.__module__}.md).\n")
    if described:
        parts += ["## Own options\n", _options(cls, described)]
    if changed:
        defaults, usual = _defaults(cls), _defaults(base)
        rows = [
            (_name(name, properties[name]), _code(defaults[name]), _code(usual[name]), mark(properties[name].help))
            for name in changed
        ]
        parts += ["## Other defaults\n", table(("option", "default here", "elsewhere", "meaning"), rows)]
    return "\n".join(parts)


def losses() -> str:
    """Return the table of preference losses."""
    rows = [
        (f"`{name}`", one.formula, f"{one.beta:g}", str(Fraction(str(one.lr_part))), "yes" if one.has_reference else "no")
        for name, one in LOSSES.items()
    ]
    return table(("`--loss`", "formula", "`--beta auto`", "`--lr auto`", "reference"), rows)


def _options(cls: type, names: list[str]) -> str:
    types, properties, defaults = typing.get_type_hints(cls), properties_of(cls), _defaults(cls)
    rows = []
    for name in names:
        found = properties[name]
        limits = {"≥": found.at_least, ">": found.above, "<": found.below}
        value = _value(types[name]) + ",".join(f" {sign} {limit:g}" for sign, limit in limits.items() if limit is not None)
        rows.append((_name(name, properties[name]), value, _code(defaults[name]), mark(properties[name].help)))
    return table(("option", "value", "default", "meaning"), rows)


def _name(name: str, found: Any) -> str:
    return " ".join([f"`--{name}`", *[CHANGES] * found.affects_result, *[MAY_DIFFER] * found.per_node])


def _defaults(cls: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def _value(kind: Any) -> str:
    """Return what an option accepts, in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        inner = _value(typing.get_args(kind)[0])
        return "list of strings" if inner == "string" else f"list of {inner}"
    if inspect.isclass(kind):
        return {bool: "flag", int: "integer", float: "number", str: "string"}[kind]
    kinds = sorted(typing.get_args(kind), key=inspect.isclass)  # the number last, before its limit
    return " or ".join(_value(one) for one in kinds)


def _code(value: Any) -> str:
    """Return a default as a user writes it: `2e-5`, not `2e-05`."""
    if value in ("", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{' '.join(value)}`"
    return f"`{value:g}`".replace("e-0", "e-") if isinstance(value, float) else f"`{value}`"
