"""`accel-ddp convert`: read a file of axolotl or LLaMA-Factory, and write the options of a recipe."""

import argparse
import sys
from pathlib import Path
from typing import Any

from accel_ddp.doctor.facts import count_visible
from accel_ddp.errors import UserError
from accel_ddp.launch.conversion import TITLES, Conversion, read_yaml
from accel_ddp.text import counted


def detect(file: Path, values: dict[str, Any]) -> str:
    if "base_model" in values:
        return "axolotl"
    if "model_name_or_path" in values:
        return "llama_factory"
    if "distributed_type" in values or "compute_environment" in values:
        raise UserError(f"{file}: is a config of accelerate. Use it as it is: accel-ddp run RECIPE --config_file {file}.")
    if "model" in values or "train_file" in values:
        recipe = values.get("recipe", "RECIPE")
        raise UserError(f"{file}: is already a file of accel_ddp. Run it: accel-ddp run {recipe} --config {file}.")
    raise UserError(
        f"{file}: is neither a file of axolotl (it has no base_model) nor of LLaMA-Factory (it has no model_name_or_path). If it "
        "is, add --from axolotl or --from llama_factory."
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-ddp convert",
        description="Write the options of a recipe that do what a YAML file of axolotl or LLaMA-Factory does. What has no "
        "equivalent is listed in the file and on stderr.",
    )
    parser.add_argument("file", help="the YAML file of the other toolkit")
    parser.add_argument("--out", default="", metavar="FILE", help="the file to write (default: stdout); it must not exist")
    parser.add_argument("--from", dest="toolkit", choices=tuple(TITLES), help="its toolkit (default: found out)")
    help = "GPUs that the file ran on; with its batch per GPU they give --global_batch_size (default: this machine's, or 1)"
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help=help)
    help = "dataset_info.json of LLaMA-Factory (default: in dataset_dir below this folder, next to the file or above it)"
    parser.add_argument("--dataset_info", default="", metavar="FILE", help=help)
    return parser


def main(words: list[str]) -> int:
    given = build_parser().parse_args(words)
    file, gpus = Path(given.file), given.gpus or count_visible() or 1
    if gpus < 1:
        raise UserError(f"--gpus {gpus}: must be a whole number, 1 or more.")
    values = read_yaml(file)
    try:
        done = Conversion(given.toolkit or detect(file, values), values, gpus, file, given.dataset_info)
    except (TypeError, AttributeError) as error:
        raise UserError(f"{file}: a value has a wrong type: {error}") from error
    text = done.text(given.out)
    if given.out:
        try:
            with Path(given.out).open("x") as out:
                out.write(text)
        except OSError as error:
            raise UserError(f"--out {given.out}: cannot be written: {error.strerror}. Choose another name.") from error
    else:
        print(text, end="")
    told = "" if given.gpus else f" ({'the GPUs of this machine' if gpus > 1 else 'the default'}; --gpus N for another number)"
    lines = [*done.differences(), f"for {counted(gpus, 'GPU')}{told}", f"run it: {done.command(given.out)}"]
    lines += [f"on several machines: {done.launch_command(given.out)}"] * (gpus > 1)
    print(*lines, sep="\n", file=sys.stderr)
    return 0
