"""Names whatever is wrong with the cluster, on every node, within seconds, before torch is imported.

    accel-ddp doctor --config_file accelerate_configs/2node.yaml --machine_rank 0 --main_process_ip 10.0.0.1

The same on every node, with its own --machine_rank; every recipe on more than one node does it by itself first. Standard
library (and psutil and yaml, which take 50 ms) for everything but `deep`.
"""

import os
import sys
import time
from typing import TYPE_CHECKING

# Every process that imports torch's launcher loads `at_launch`, and this file with it: what it needs it imports when it is used.
if TYPE_CHECKING:
    from accel_ddp.config import TrainConfig
    from accel_ddp.doctor.client import Outcome
    from accel_ddp.doctor.report import Finding


SILENT_SECONDS = 60.0  # in a preflight: the main node may still be booting


def preflight(cfg: "TrainConfig") -> None:
    """Return when all nodes are here, alike, and reach each other; UserError on every rank of every node where not."""
    import asyncio

    from accel_ddp.doctor import client as visit
    from accel_ddp.doctor import host as here
    from accel_ddp.environment import topology as place
    from accel_ddp.errors import UserError

    mine = place.of_this_rank()
    if cfg.preflight == "off" or mine.nodes <= 1:
        place.refuse_what_was_not_asked_for()
        place.warn_of_tasks_that_train_alone()
        return
    wanted = of_options(cfg, script=sys.argv[0])
    wanted.wait, wanted.silent = cfg.preflight_wait, SILENT_SECONDS
    wanted.measure, wanted.sets_interface = False, True
    try:
        place.refuse_what_was_not_asked_for()
    except UserError as error:  # told to all: a node that ended here alone would leave the others waiting
        wanted.already.append(here.finding(mine, "E_PROCESSES", str(error), ""))
    began = time.monotonic()
    outcome = asyncio.run(visit.examine(mine, wanted, say if mine.local_rank == 0 else lambda text: None))
    refuse(outcome)
    if mine.local_rank == 0:
        tell(outcome.findings)
    if mine.local_rank == 0 and outcome.node == 0:
        over = f" over {outcome.interface}" if outcome.interface else ""
        print(f"preflight: {len(outcome.roster)} nodes are alike and reach each other{over} ({time.monotonic() - began:.1f} s)")


def tell_the_others(text: str) -> None:
    """This node's options make no sense: the others hear that, instead of waiting for it. Takes 5 s at most."""
    import asyncio

    from accel_ddp.doctor import client as visit
    from accel_ddp.doctor import host as here
    from accel_ddp.environment import topology as place

    mine = place.of_this_rank()
    if mine.nodes <= 1 or mine.local_rank:
        return
    wrong = here.finding(mine, "E_OPTIONS", text, "see its screen")
    wanted = visit.Wanted(script=sys.argv[0], measure=False, already=[wrong], wait=5)
    asyncio.run(visit.examine(mine, wanted, lambda text: None))


def say(text: str) -> None:
    from accel_ddp.doctor.host import HOST

    print(f"{HOST}: {text}", file=sys.stderr, flush=True)


def refuse(outcome: "Outcome") -> None:
    from accel_ddp.doctor import report
    from accel_ddp.errors import UserError

    if outcome.is_bad:
        lines = [report.text_of(outcome.findings), *outcome.table, "Nothing was started. --preflight off starts all the same."]
        raise UserError(f"preflight: {report.summary(outcome.findings)}\n" + "\n".join(lines))


def tell(findings: list["Finding"]) -> None:
    from accel_ddp.doctor import report

    if findings:
        print(report.text_of(findings, report.has_colour(sys.stderr)), file=sys.stderr, flush=True)


def of_options(cfg: "TrainConfig", script: str):
    """What the doctor looks at for the run that these options describe."""
    from accel_ddp.config import must_be_the_same
    from accel_ddp.doctor.client import Wanted

    files = {}
    for name in ("train_file", "eval_file", "model", "dataset"):
        value = getattr(cfg, name, "")
        if value and os.path.exists(os.path.expanduser(value)):
            files[f"content of --{name}"] = value
        elif value and (name.endswith("_file") or value.startswith(("/", "./", "~"))):
            files[f"content of --{name}"] = value  # will be named as missing, on this node
    kept = cfg.keep_last + 1 + bool(cfg.keep_best)  # one more is written before an old one goes
    needed = (
        0 if getattr(cfg, "lora_r", 0) else 3 * size_of(getattr(cfg, "model", "")) * kept
    )  # weights and the two moments of AdamW
    return Wanted(
        recipe={name: str(value) for name, value in must_be_the_same(cfg).items()}, files=files, script=script,
        places={name: getattr(cfg, name, "") for name in ("model", "dataset")},
        output_dir=cfg.output_dir or "runs", needed=needed,
    )  # fmt: skip


def size_of(model: str) -> int:
    """Bytes of the weights in a model's folder; 0 where it is none."""
    folder = os.path.expanduser(model or "")
    files = [os.path.join(folder, name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    weights = [name for name in files if name.endswith(".safetensors")] or [name for name in files if name.endswith(".bin")]
    return sum(map(os.path.getsize, weights))
