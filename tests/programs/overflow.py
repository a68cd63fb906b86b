"""Train with a loss so steep that float16 gradients overflow until the scaler has reduced its factor."""

import accel_ddp
from accel_ddp.config import TrainConfig
from accel_ddp.entry import run


def main(cfg: TrainConfig) -> None:
    import torch

    accelerator = accel_ddp.start(cfg)
    model = torch.nn.Linear(8, 8)
    accel_ddp.fit(
        accelerator,
        cfg,
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(list(torch.randn(64, 8)), torch.stack),
        loss_sum=lambda model, batch: 100 * model(batch).square().sum(),
        count=len,
    )
    if accelerator.is_main_process:
        print("weights are finite" if all(p.isfinite().all() for p in model.parameters()) else "weights are not finite")


if __name__ == "__main__":
    run(TrainConfig, main)
