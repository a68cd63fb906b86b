"""Multiply matrices as a run does, and print how many threads of this process have worked on it."""

import psutil

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


def main(cfg: TrainConfig) -> None:
    accelerator = accel_ddp.start(cfg)
    import torch

    matrix, before = torch.ones(1500, 1500), {thread.id: thread.user_time for thread in psutil.Process().threads()}
    for _ in range(10):
        matrix @ matrix
    busy = [thread for thread in psutil.Process().threads() if thread.user_time > before.get(thread.id, 0) + 0.05]
    print(f"{len(busy)} threads of {torch.get_num_threads()} have multiplied: {accelerator.distributed_type}", flush=True)


if __name__ == "__main__":
    run(TrainConfig, main)
