"""Train local workers on this number of ranks, and write the results to OUT. Tests compare numbers of ranks."""

import copy
import dataclasses
from pathlib import Path

import core
import torch

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.entry import run
from accel_ddp.ranks.agreement import broadcast_object
from accel_ddp.saving.checkpoint_format import MODEL, OPTIMIZER
from accel_ddp.saving.pieces import Pieces
from accel_ddp.training import optim
from accel_ddp.training.stream import Shuffle

LOCAL = {"sync_every": 3, "local_workers": 4}


@dataclasses.dataclass(kw_only=True)
class Config(core.Config):
    saved: str = option("", "folder of a run of 6 steps on another number of ranks", affects_result=False)


def train(accelerator, cfg, name, **changes):
    """Return what `core.train` returns, and the tensors of the last checkpoint."""
    cfg = dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}_{name}")
    result = core.train(accelerator, cfg, **{**LOCAL, **changes})
    broadcast_object(None)  # all ranks wait until the main rank has written the checkpoint
    paths = sorted(Path(cfg.output_dir).glob("step_*"))
    groups = [Pieces(paths[-1], group) for group in (MODEL, OPTIMIZER)]
    tensors = {name: pieces.read(name) for pieces in groups for name in pieces.tensors}
    return {**result, "tensors": tensors, "saved": [path.name for path in paths]}


def by_hand(cfg) -> dict[str, torch.Tensor]:
    """Return the weights of the same training with torch's optimizers: a model and AdamW per worker, and SGD for the global weights."""
    cfg = dataclasses.replace(cfg, **LOCAL)
    whole, items, number = core.new_model(torch.float64), core.rows(), LOCAL["local_workers"]
    outer = torch.optim.SGD(whole.parameters(), lr=cfg.outer_lr, momentum=cfg.outer_momentum, nesterov=True)
    models = [copy.deepcopy(whole) for _ in range(number)]
    inner = [optim.build(model, cfg) for model in models]
    order = Shuffle(len(items), cfg.seed).items(0, cfg.steps * cfg.global_batch_size)
    share = cfg.global_batch_size // number
    for step in range(cfg.steps):
        for worker, (model, optimizer) in enumerate(zip(models, inner)):
            first = step * cfg.global_batch_size + worker * share
            batch = core.collate([items[place] for place in order[first : first + share]])
            loss, count = core.Task().terms(model, batch, None)["loss"]
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % LOCAL["sync_every"] == 0 or step + 1 == cfg.steps:
            for parameter, *own in zip(whole.parameters(), *(model.parameters() for model in models)):
                parameter.grad = parameter.detach() - sum(p.detach() for p in own) / number
            outer.step()
            for model in models:
                model.load_state_dict(whole.state_dict())
    return whole.state_dict()


class BadItem(core.Task):
    """A loss that is NaN if the batch has the item 7, which is seen once per epoch, and so by one worker of a step."""

    def terms(self, model, batch, team):
        found, bad = super().terms(model, batch, team), core.rows()[7][0]
        has_bad = any(len(row) >= len(bad) and torch.equal(row[: len(bad)], bad) for row in batch["ids"])
        return found | {"loss": (found["loss"][0] * (float("nan") if has_bad else 1), found["loss"][1])}


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    results = {"by hand": {"weights": by_hand(dataclasses.replace(cfg, steps=8))}} if accelerator.num_processes == 1 else {}
    results["plain"] = train(accelerator, cfg, "plain", steps=8, save_every=2, keep_last=9)
    common = {"dropout": 0.3, "dtype": torch.float32, "micro_batch_size": 2, "sync_dtype": "bfloat16", "ema_decay": 0.5}
    results["straight"] = train(accelerator, cfg, "straight", **common)
    results["stopped"] = train(accelerator, cfg, "resumed", **common, steps=6)
    results["resumed"] = train(accelerator, cfg, "resumed", **common, resume="auto")
    more = {"resume": f"{cfg.output_dir}_resumed/step_00000006", "local_workers": 8, "allow_config_change": True}
    results["more workers"] = train(accelerator, cfg, "more", **common, **more)
    if cfg.saved:
        results["continued"] = train(accelerator, cfg, "continued", **common, resume=f"{cfg.saved}_resumed/step_00000006")
    results["skipped"] = train(accelerator, cfg, "skipped", task=BadItem(), on_nonfinite="skip", steps=7)
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


if __name__ == "__main__":
    run(Config, main)
