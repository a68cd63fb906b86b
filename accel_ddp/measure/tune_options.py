"""The options of `accel-ddp tune`: the parser, and what they mean for the tuning."""

import argparse
import shlex
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.config.train_config import RecipeConfig, TrainConfig, as_plain_dict
from accel_ddp.doctor.doctor_command import add_shared_options
from accel_ddp.errors import UserError
from accel_ddp.nodes.launcher import stated_precision
from accel_ddp.nodes.topology import Topology
from accel_ddp.words import find_options, name_of

DESCRIPTION = """Find the fastest communication settings for a cluster in a few minutes.
Run the same command on every node, each with its own --machine_rank.

The doctor's preflight checks run first. Then all-reduce is timed with different socket settings of NCCL, each in new processes
on every node. Then a DDP step of your model is timed with the best of these settings and different bucket sizes and
communication hooks. Every node prints the same table. Later runs on these nodes use the fastest settings and bucket size
automatically (--tuned off ignores them). A hook changes the result, so it is only suggested. The best values are also written to
OUT/tuned.env (environment variables; use it with `set -a; . OUT/tuned.env; set +a` on every node) and OUT/tuned.yaml (for --config
of the recipes). The number of nodes and the address of the main node come from the same options and environment variables as for
`accel-ddp doctor`."""

DEFAULT_OUT = "accelerate_configs"
OWN_RANKS = "$NUMBER_OF_RANKS"  # in the printed command, for the number of ranks of each node
_LAUNCH_OPTIONS = ("config_file", "num_machines", "num_processes", "main_process_ip", "main_process_port", "mixed_precision",
                   "rdzv_backend")  # fmt: skip
_TORCHRUN_OPTIONS = ("nnodes", "nproc_per_node", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
                     "max_restarts", "monitor_interval")  # fmt: skip


@dataclass(kw_only=True)
class TuneOptions:
    """What is tuned. Only `out` and `cache_dir` may differ between the nodes."""

    minutes: float
    trial_seconds: float
    backend: str
    tries: list[dict[str, str]] = field(default_factory=list)  # environment variables of each --try
    model: dict[str, Any] = field(default_factory=dict)  # options of a recipe; empty: no model
    model_bytes: int = 0
    tokens: int = 0  # per rank and step; 0: chosen by device
    autocast: str = ""  # dtype of mixed precision; empty: off; auto: bfloat16 on GPUs that have it
    launch: str = "accelerate launch"  # the user's launch command, for the printed instructions
    out: str = DEFAULT_OUT
    cache_dir: str = TrainConfig.cache_dir  # where later runs look for the result


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-ddp tune", usage="accel-ddp tune [options] [RECIPE.py [its options]]", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add_shared_options(parser)
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument("--model", default="", metavar="NAME",
                        help="Hub name or folder of the model, or builtin:NAME; default: the recipe's model")  # fmt: skip
    tuning.add_argument("--model_bytes", type=int, default=0, metavar="BYTES",
                        help="size of the gradients in float32, instead of a model")  # fmt: skip
    tuning.add_argument("--tokens", type=int, default=0, metavar="N",
                        help="tokens per rank and step; default: the recipe's micro_batch_size x max_length, with max_length at "
                        "most 128; without a recipe 1024, on CPUs 128")  # fmt: skip
    tuning.add_argument("--minutes", type=float, default=5.0, help="approximate time limit for the whole tuning (default 5)")
    tuning.add_argument("--trial_seconds", type=float, default=20.0, metavar="SECONDS",
                        help="a trial that hangs is killed after this time, not counting its start (default 20)")  # fmt: skip
    tuning.add_argument("--try", action="append", default=[], dest="tries", metavar="'NAME=VALUE ...'",
                        help="also try these environment variables; the option can be repeated")  # fmt: skip
    tuning.add_argument("--out", default=DEFAULT_OUT, metavar="FOLDER",
                        help=f"folder for tuned.env and tuned.yaml (default {DEFAULT_OUT})")  # fmt: skip
    return parser


def options_from(
    given: argparse.Namespace, cfg: TrainConfig | None, topology: Topology, own_words: list[str], script_words: list[str]
) -> TuneOptions:
    """Return the options of the tuning. `own_words` are those before the script. Raises UserError for values without a meaning."""
    for name, minimum in {"minutes": 0.05, "trial_seconds": 1.0, "model_bytes": 0, "tokens": 0}.items():
        if not getattr(given, name) >= minimum:
            raise UserError(f"--{name} {getattr(given, name)}: must be at least {minimum}.")
    if given.model and given.model_bytes:
        raise UserError(f"--model {given.model} and --model_bytes {given.model_bytes}: both describe the model. Give only one.")
    model: dict[str, Any] = {}  # the recipe's options, in which --model replaces the recipe's model
    if isinstance(cfg, RecipeConfig) and not given.model_bytes:
        model = {**as_plain_dict(cfg), "lora_targets": list(cfg.lora_targets), "freeze": list(cfg.freeze)}
    model |= {"model": given.model} if given.model else {}
    tokens = 0
    if cfg is not None:
        items = 8 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size  # only a training run can find the value of auto
        length = getattr(cfg, "max_length", 128)
        tokens = cfg.micro_batch_tokens or items * min(128, 128 if length == "auto" else length)
    precision = getattr(cfg, "mixed_precision", "auto")
    precision = (stated_precision(topology.accelerate_config) or "auto") if precision == "auto" else precision
    return TuneOptions(
        minutes=given.minutes, trial_seconds=given.trial_seconds, backend=given.backend, out=given.out,
        tries=[_parse_try(text) for text in given.tries], model=model if model.get("model") else {},
        model_bytes=given.model_bytes, tokens=given.tokens or tokens,
        autocast={"bf16": "bfloat16", "fp16": "float16", "auto": "auto"}.get(precision, ""),
        launch=_launch_command(topology.num_nodes, own_words, script_words), cache_dir=(cfg or TrainConfig).cache_dir,
    )  # fmt: skip


def _parse_try(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(text)]
    if not pairs or not all(name and equals for name, equals, _ in pairs):
        example = "--try 'NCCL_BUFFSIZE=8388608 NCCL_PROTO=Simple'"
        raise UserError(f"--try {text!r}: must be environment variables with values, for example {example}.")
    return {name: value for name, _, value in pairs}


def _launch_command(nodes: int, own_words: list[str], script_words: list[str]) -> str:
    """Return the command of the user's run: torchrun if there is one of its own options, and otherwise `accelerate launch`."""
    names = {name_of(word) for word in own_words}
    is_torchrun = bool(names & {*_TORCHRUN_OPTIONS} - {*_LAUNCH_OPTIONS})
    known = {*(_TORCHRUN_OPTIONS if is_torchrun else _LAUNCH_OPTIONS)} - {"nproc_per_node"}
    options = [word for option in find_options(own_words, known) for word in own_words[option.at : option.end]]
    rank = f"{'--node_rank' if is_torchrun else '--machine_rank'} $NODE_RANK" if nodes > 1 else ""
    launcher = f"torchrun --nproc_per_node {OWN_RANKS}" if is_torchrun else "accelerate launch"
    script = shlex.join(script_words) or "recipes/classify.py"
    return " ".join(filter(None, [launcher, shlex.join(options), rank, script]))
