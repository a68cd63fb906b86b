"""accel-ddp doctor | tune | export | verify: what is done beside a training."""

import argparse
import sys

from accel_ddp.errors import UserError


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="accel-ddp", description="Tools beside a training. Each has a --help.")
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("doctor", help="name whatever is wrong with the cluster, on every node, within seconds", add_help=False)
    commands.add_parser("tune", help="find the NCCL settings, bucket size and hook that are fastest here", add_help=False)

    export = commands.add_parser("export", help="make an ordinary transformers folder of a checkpoint")
    export.add_argument("checkpoint", help="runs/.../step_00000012, or a run's folder: its best one, or else its newest")
    export.add_argument("out", help="the folder to make")
    export.add_argument("--merge", action="store_true", help="of adapters: the whole model with the adapters merged into it")
    export.add_argument("--push_to_hub", default="", metavar="NAME", help="upload it too, for example to me/my-model")

    verify = commands.add_parser(
        "verify",
        help="show on this machine or cluster, with your model and data, that the promises hold",
        usage="accel-ddp verify [--steps N] [options of accelerate launch] RECIPE [options of the recipe]",
        description="Runs a few steps of a recipe straight, with other micro-batches, on other numbers of ranks, and killed and "
        "resumed; compares samples and weights. Options of `accelerate launch` (--config_file, --num_machines, --machine_rank, "
        "--main_process_ip ...) make it do so on several nodes: type the same on each, with its own --machine_rank.",
    )
    verify.add_argument("--steps", type=int, default=6, help="steps of each run (default 6)")
    verify.add_argument("--folder", default="", help="keep the runs in this folder; default: a temporary one")

    # What follows the recipe is the recipe's; what is before it and not ours is of `accelerate launch`.
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["doctor"]:
        from accel_ddp.doctor.command import main as doctor

        return doctor(words[1:])
    if words[:1] == ["tune"]:
        from accel_ddp.tune.command import main as tune

        return tune(words[1:])
    recipe = next((i for i, word in enumerate(words) if word.endswith(".py") and words[0] == "verify"), len(words))
    given, launch = parser.parse_known_args(words[:recipe])
    if launch and given.command != "verify":
        parser.error(f"unrecognized arguments: {' '.join(launch)}")
    try:
        if given.command == "export":
            from accel_ddp.export import from_checkpoint

            print(f"model saved in {from_checkpoint(given.checkpoint, given.out, given.push_to_hub, given.merge)}")
            return 0
        from accel_ddp.verify import verify as run

        return run([*launch, *words[recipe:]], given.steps, given.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
