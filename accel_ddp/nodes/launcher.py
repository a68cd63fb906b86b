"""What `accelerate launch` or mpirun was asked to start, and whether that world is the one that is running.

torch does not read the variables of mpirun, and Accelerate reads them only on CPUs. `adopt_mpi_world` translates them: without it,
each rank would train alone on its GPU, and on CPUs Accelerate would create another world than `ranks.group`.

`python -m accel_ddp.nodes.launcher accelerate.commands.launch OPTIONS RECIPE` runs `accelerate launch` and waits for its rank after
a Ctrl-C. By itself, for one process, it ends with a traceback over the panel, while the rank is still saving.
"""

import argparse
import contextlib
import logging
import os
import re
import runpy
import shlex
import signal
import sys
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from accel_ddp.errors import INTERRUPTED, UserError
from accel_ddp.words import find_options, script_at

logger = logging.getLogger(__name__)

# Settings of an accelerate config that may differ between nodes. A difference in any other setting starts a different training.
PER_NODE_SETTINGS = frozenset({
    "machine_rank", "main_process_ip", "gpu_ids", "enable_cpu_affinity", "debug", "same_network", "downcast_bf16",
    "main_training_function", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "compute_environment", "num_cpu_threads_per_process",
})  # fmt: skip
# Options of `accelerate launch` that replace distributed_type of the config.
DISTRIBUTED_TYPES = {
    "multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM"
}  # fmt: skip
# The accelerate config of ranks that torchrun starts. `accel-ddp launch` sets it where Accelerate cannot start the ranks.
CONFIG_FILE = "ACCEL_DDP_CONFIG_FILE"
# `accel-ddp run` sets its pid, which becomes the launcher's, and its words, to which it adds options for the launcher.
TYPED = "_ACCEL_DDP_TYPED"
_OTHER_STARTERS = {"SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "ACCEL_DDP_GUARD"}  # the user has typed another command
# Names of the rank, the number of ranks, the local rank and the number of local ranks.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MVAPICH = tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # also Intel MPI
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MARK = "ACCEL_DDP_WORLD_OF_MPI"
MPI_VARIABLES = (*_OPEN_MPI, *_MVAPICH, *_MPICH, _MARK)


def adopt_mpi_world() -> None:
    """Translate mpirun's variables, unless a launcher has set ours. On several nodes only the user knows rank 0's address."""
    if any(name in os.environ for name in _TORCH[:2]):
        return
    for names in (_OPEN_MPI, _MVAPICH, _MPICH):
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdigit() for value in values) and int(values[1]) > 1:
            os.environ.update(zip(_TORCH, values))
            os.environ[_MARK] = "1"
            if values[1] == values[3]:
                os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
                # Two jobs on one machine have different names. This range is below the one from which systems assign ports.
                name = os.environ.get("PMIX_NAMESPACE", "")
                os.environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(name.encode()) % 12000 if name else 29500))
            os.environ.setdefault("MASTER_PORT", "29500")
            return


def is_world_of_mpi() -> bool:
    return os.environ.get(_MARK) == "1"


def cpu_is_wanted() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def read_accelerate_config(file: str) -> dict[str, Any]:
    """Return the settings of a config. "" means the file of the `accelerate config` wizard, or {} if there is none."""
    import yaml

    if file and not Path(file).is_file():
        raise UserError(f"--config_file {file}: there is no such file. Give the path of an accelerate config.")
    for path in [Path(file)] if file else _configs_of_wizard():
        try:
            values = yaml.safe_load(path.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            raise UserError(f"--config_file {path}: the file cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"--config_file {path}: the file is not an accelerate config. It must have lines of `name: value`.")
        return values
    return {}


def _configs_of_wizard() -> list[Path]:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    files = [Path(home).expanduser() / "accelerate" / f"default_config.{kind}" for kind in ("yaml", "json")]
    return [file for file in files if file.is_file()]


def find_config_file(argv: list[str]) -> str:
    """Return the config file that a launcher uses: --config_file, that of torchrun (CONFIG_FILE), that of the wizard, or ""."""
    if os.environ.get(CONFIG_FILE) and parse_accelerate_command(argv) is None:
        return os.environ[CONFIG_FILE]
    for option in find_options(argv, ["config_file"]):
        return option.value or ""
    return next((str(file) for file in _configs_of_wizard()), "")


def _read_parents() -> Iterator[tuple[str, list[str]]]:
    """Yield pid and command line of the two processes above. A shell script may run between a launcher and a rank."""
    import psutil

    for parent in psutil.Process().parents()[:2]:
        with contextlib.suppress(psutil.Error):
            yield str(parent.pid), parent.cmdline()


def find_accelerate_request() -> dict[str, Any] | None:
    return next((found for _, words in _read_parents() if (found := parse_accelerate_command(words)) is not None), None)


def find_launcher_command() -> list[str]:
    """Return the `accel-ddp run`, `accelerate launch` or torchrun that a user has typed to start this rank, or [] if none was."""
    run, _, typed = os.environ.get(TYPED, "").partition(" ")
    for pid, words in _read_parents() if not _OTHER_STARTERS & os.environ.keys() else ():
        names = [os.path.basename(word) for word in words[:4]]
        if pid == run:  # a launcher that a rank has started inherits the variable
            return shlex.split(typed)
        if {"torchrun", "torch.distributed.run"} & {*names} or parse_accelerate_command(words) is not None:
            return [*names[1:2], *words[2:]] if {"accelerate", "accelerate-launch", "torchrun"} & {*names[1:2]} else words
    return []


def parse_accelerate_command(argv: list[str]) -> dict[str, Any] | None:
    names = ("launch", "accelerate-launch", "accelerate.commands.launch")
    at = [i for i, argument in enumerate(argv) if Path(argument).name in names]
    at += [i for i, argument in enumerate(argv) if argument.endswith("accelerate/commands/launch.py")]
    if not at or not any("accelerate" in argument for argument in argv[: at[0] + 1]):
        return None
    argv = argv[at[0] + 1 :]
    script = script_at(argv, ("-m", "--module"))
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    for name in ("config_file", "main_process_ip", "mixed_precision", "rdzv_backend"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_port", "num_cpu_threads_per_process"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--cpu", action="store_const", const=True)
    for name, kind in DISTRIBUTED_TYPES.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest="distributed_type", action="store_const", const=kind)
    try:
        given = {name: value for name, value in vars(parser.parse_known_args(argv[:script])[0]).items() if value is not None}
    except argparse.ArgumentError:
        return {}
    try:
        base = read_accelerate_config(given.pop("config_file", ""))
    except UserError:  # accelerate reads the same file and reports the problem itself
        base = {}
    return {**base, **given}


def launch_options() -> set[str]:
    """Return the names of all options of `accelerate launch` (tested: 1.15), from its source, because its import takes seconds."""
    found = find_spec("accelerate")
    file = Path(found.origin if found and found.origin else "").parent / "commands" / "launch.py"
    return {name.replace("-", "_") for name in re.findall(r'"--([\w-]+)"', file.read_text())} if file.is_file() else set()


def stated_precision(config: dict[str, Any]) -> str:
    """Return no, bf16 ..., or "" if the recipe may choose. YAML reads an unquoted `no` as False."""
    value = config.get("mixed_precision")
    return "" if value in (None, "") else "no" if value is False else str(value).lower()


def find_stated_precision() -> str:
    """Return what the launcher was asked for, or "". `accelerate launch` sets `no` if nothing states a precision."""
    value = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    request = find_accelerate_request() if value == "no" else None
    return value if request is None else stated_precision(request)


def check_rank_variables() -> None:
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)
    ]
    if not num_ranks.isdigit() or int(num_ranks) < 2 or not missing:
        return
    if is_world_of_mpi():
        raise UserError(
            f"mpirun has started {num_ranks} ranks on several nodes, but {missing[0]} is not set, so they cannot find the node of "
            "rank 0. Run mpirun -x MASTER_ADDR=10.0.0.1 with the address of the first host."
        )
    raise UserError(
        f"WORLD_SIZE is {num_ranks}, but {missing[0]} is not set. Start with `accelerate launch` or torchrun, which set both."
    )


def check_requested_world() -> None:
    """Raise UserError if Accelerate has silently rounded num_processes down, or started one process (MULTI_CPU, --cpu)."""
    request, started = find_accelerate_request() or {}, int(os.environ.get("WORLD_SIZE", 1))
    processes, machines = request.get("num_processes"), request.get("num_machines") or 1
    if not isinstance(processes, int) or processes < 1:
        return
    below = processes // machines * machines
    if processes != below:
        raise UserError(
            f"num_processes {processes} (the total over all nodes) is not a multiple of num_machines {machines}: accelerate "
            f"has started {started} instead. Use num_processes {below or machines} or {below + machines}. For different numbers of "
            "ranks on the nodes, start torchrun with its own --nproc_per_node on each node, or use `accel-ddp launch`."
        )
    if processes != started and not (processes == 1 and is_world_of_mpi()):
        raise UserError(
            f"accelerate was asked for {processes} processes but started {started}: `--cpu`, use_cpu: true and distributed_type "
            "MULTI_CPU or NO start one process, which would train alone. Use --config_file accelerate_configs/1node.yaml "
            f"--num_processes {processes}, or write `distributed_type: MULTI_GPU` and `use_cpu: false` into your config. Without "
            "GPUs both train on the CPUs."
        )


def warn_about_independent_tasks() -> None:
    """srun does not set the variables that torch reads, so each of its tasks would train alone."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1 and os.environ.get("WORLD_SIZE", "1") == "1" and os.environ.get("SLURM_PROCID") == "0":
        logger.warning(
            "srun has started %s processes, and each of them trains alone, because RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set. To train together, run one `accelerate launch` per node.",
            tasks,
        )


def _wait_for_the_rank(number: int, frame: FrameType | None) -> None:
    import psutil

    if not psutil.Process().children():  # the rank gets the Ctrl-C too, and ends by itself
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background of a shell ignores Ctrl-C
        signal.signal(signal.SIGINT, _wait_for_the_rank)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
