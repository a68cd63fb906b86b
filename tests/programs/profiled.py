"""Train with and without --profile, and write what torch.profiler itself has measured to OUT."""

import dataclasses
import json
import os
import resource
import time
from dataclasses import dataclass

import base
import torch
from torch import nn

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.observe import recorder
from accel_ddp.ranks.process import this_rank


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = option("", affects_result=False)
    cases: tuple[str, ...] = option(("plain", "profiled"), affects_result=False)
    shift: float = option(0.0, "seconds by which the clock of rank 1 is ahead, as on a host without NTP", affects_result=False)
    steps: int = 8
    save_every: int = 100
    eval_every: int = 100
    global_batch_size: int = 16
    micro_batch_size: int = 4
    log_every: int = 1
    width: int = 96
    layers: int = 4
    rows: int = option(1, "how often each item is repeated, so that a GPU has work")


def observe_torch(found: dict, shift: int) -> None:
    """Store torch.profiler's own sums of collectives before each export. Shift the trace of rank 1 like its clock."""
    export = torch.profiler.profile.export_chrome_trace

    def observed(self, path, *args, **kwargs):
        averages = self.key_averages()
        collectives = [a for a in averages if a.key.startswith(("gloo:", "ncclDevKernel", "ncclKernel", "ncclSym"))]
        seconds = sum(a.self_device_time_total or a.cpu_time_total for a in collectives) / 1e6
        names = sorted({a.key for a in averages})
        found["torch"].append({"seconds": seconds, "collectives": sum(a.count for a in collectives), "names": names})
        export(self, path, *args, **kwargs)
        if shift and this_rank.rank == 1:
            with open(path) as file:
                trace = json.load(file)
            trace["baseTimeNanoseconds"] += shift
            with open(path, "w") as file:
                json.dump(trace, file)

    torch.profiler.profile.export_chrome_trace = observed


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    found: dict = {"torch": []}
    shift = int(cfg.shift * 1e9)
    observe_torch(found, shift)
    if shift:
        recorder.kernel_id = lambda: f"kernel of rank {this_rank.rank}"
        if this_rank.rank == 1:
            true_time = time.time_ns
            time.time_ns = lambda: true_time() + shift
    root, generator = cfg.output_dir, torch.Generator().manual_seed(0)
    rows = list(torch.randn(400, 1, cfg.width, generator=generator))

    def fit(name: str, hooks=(), **changes):
        config = dataclasses.replace(cfg, output_dir=f"{root}/{name}", **changes)
        os.makedirs(config.output_dir, exist_ok=True)
        torch.manual_seed(0)
        layers = [nn.Linear(cfg.width, cfg.width) for _ in range(cfg.layers)]
        model = nn.Sequential(*layers, nn.Dropout(0.1))
        losses = lambda model, batch: model(batch.repeat(1, cfg.rows, 1)).square().mean(dim=(1, 2))
        accel_ddp.fit(
            accelerator, config, task=base.Task(losses), model=model, optimizer=accel_ddp.optim.build(model, config),
            train=accel_ddp.TrainBatches(rows, torch.stack),
            hooks=[*accel_ddp.hooks.standard(accelerator, config), *hooks],
        )  # fmt: skip
        found.setdefault(name, {key: value.double().sum().item().hex() for key, value in model.state_dict().items()})

    class SmallDisk(accel_ddp.hooks.Hook):
        """Files of the main rank cannot become larger than 2 kB while the profile is stored."""

        def on_update(self, numbers, pace):
            limit = 2048 if numbers.step == 3 and this_rank.is_main else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    for case in cfg.cases:
        if case == "plain":
            fit(case, profile="off", profile_ranks="auto")
        elif case == "profiled":
            fit(case, log_every=1)
        elif case == "resumed":  # continues after the last step of "plain", and rank 1 records
            fit("plain", steps=14, profile="auto", profile_ranks="1", resume="auto")
        elif case == "full":
            fit(case, hooks=[SmallDisk()], profile="1-3")  # from the first step, without a warm-up of torch.profiler
    if cfg.out:
        with open(f"{cfg.out}_{this_rank.rank}.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    run(Config, main)
