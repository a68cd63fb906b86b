"""Train on ranks whose all-reduces take a given time, as on a slow network. Computing is a pause, so that busy cores do not matter."""

import time
from dataclasses import dataclass

import base

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    global_batch_size: int = 8
    micro_batch_size: int = 4
    item_seconds: float = 0.0  # per item of a micro-batch
    link_seconds: float = 0.0  # from the last gradient to the end of the all-reduce
    most_items: int = 0  # a larger micro-batch raises the error of a GPU without memory; 0: any fits
    rows: int = 1000


def main(cfg: Config) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    accelerator = accel_ddp.start(cfg)

    def delayed(state, bucket):
        """Average a bucket. The future is complete `link_seconds` later. Meanwhile the rank can compute."""
        future = dist.all_reduce(bucket.buffer().div_(accelerator.num_processes), async_op=True).get_future()

        def wait(done):
            time.sleep(cfg.link_seconds)
            return done.value()[0]

        return future.then(wait)

    if accelerator.ddp_handler:
        type(accelerator.ddp_handler).register_comm_hook = lambda handler, wrapped: wrapped.register_comm_hook(None, delayed)

    def losses(model, batch):
        if cfg.most_items and len(batch) > cfg.most_items:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate a batch of {len(batch)} items.")
        time.sleep(cfg.item_seconds * len(batch))
        return model(batch).square().sum(1)

    model = nn.Linear(8, 1)
    data = torch.utils.data.TensorDataset(torch.randn(cfg.rows, 8, generator=torch.Generator().manual_seed(0)))
    accel_ddp.fit(
        accelerator, cfg, task=base.Task(losses), model=model, optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(data, lambda rows: torch.stack([row[0] for row in rows])),
        hooks=accel_ddp.hooks.standard(accelerator, cfg),
    )  # fmt: skip


if __name__ == "__main__":
    run(Config, main)
