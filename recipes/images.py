r"""Train or fine-tune a model to classify images.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/images.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/images.py \
        --model microsoft/resnet-18 --train_file photos/train --eval_file photos/test --augment crop_flip --lr 1e-4

Batch norm uses the statistics of a micro-batch: of one rank, or of all ranks with --sync_batchnorm (GPUs). The result therefore
depends on the micro-batch. It equals the result of one rank with the whole batch only with --sync_batchnorm and ranks x micro-batch
= --global_batch_size. With --norm group, or with a model without batch norm, it is exact for every split. Evaluations and
checkpoints use the running statistics of rank 0.

For other data or another model, change `Task`. recipes/own_loop.py contains the loop written out.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import ImageConfig, UserError, column, option, run


@dataclass(kw_only=True)
class Config(ImageConfig):
    model: str = option(
        "mini-resnet", "mini-resnet (small, from scratch), or Hub name or folder of an image classification model"
    )
    dataset: str = "builtin:digits"
    train_file: tuple[str, ...] = option(
        (), "folders with a subfolder per class, .npz (x_train, y_train or images, labels), .parquet .arrow, or patterns of them"
    )
    eval_file: tuple[str, ...] = option((), "default: x_test of the .npz, or a tenth of the training images, at most 2,000")
    image_column: str = column("image", "column with encoded images (.png, .jpg ...) or with names of image files", kind="image")
    label_column: str = column("label", "column with names or numbers of classes", kind="label")
    image_size: int = option(0, "pixels per side; 0: from the model's processor, or as the images are", group="data", at_least=0)
    pixel_mean: float | Literal["auto"] = option(
        "auto", "mean to subtract from pixels (0 to 1); auto: from the model's processor, or 0.5", group="data"
    )
    pixel_std: float | Literal["auto"] = option(
        "auto", "standard deviation to divide pixels by; auto: the same", group="data", above=0
    )
    norm: Literal["batch", "group"] = option(
        "batch", "normalization of mini-resnet; group: independent of the other images in the batch", group="model"
    )
    augment: Literal["none", "crop", "crop_flip"] = option(
        "crop", "crop: shift training images; crop_flip: also mirror them", group="training"
    )
    epochs: float = 10.0
    micro_batch_size: int | Literal["auto"] = option(32, "images that a rank computes at once; batch norm uses their statistics")
    lr: float = 3e-3
    best_metric: str = option("", "metric for --keep_best and early stopping; default: accuracy")

    def metric_directions(self):
        return {"accuracy": "max", "macro_f1": "max", "loss": "min", **accel_ddp.metrics.directions(self.metrics, "classes")}

    def validate(self):
        super().validate()
        if self.model == "mini-resnet" and (self.gradient_checkpointing is True or self.dtype not in ("auto", "float32")):
            raise UserError("--gradient_checkpointing and --dtype: do not work with --model mini-resnet. Leave them out.")
        if self.norm == "group" and self.model != "mini-resnet" and not self.evaluate_only:
            raise UserError(f"--norm group: works with --model mini-resnet only. Leave it out for --model {self.model}.")


class Task(accel_ddp.ImageTask):
    def batches(self):
        train = accel_ddp.vision.Images(self.rows[0], self.processor, self.model, self.cfg.augment)
        return self.use(train, accel_ddp.vision.Images(self.rows[1], self.processor, self.model), self.collate())

    def outputs(self, model, batch):
        pixels = batch["pixel_values"].to(next(model.parameters()).dtype)  # another type only with --dtype
        return model(pixel_values=pixels).logits.float()

    def terms(self, model, batch, team):
        return {"loss": self.losses(self.outputs(model, batch), batch["labels"])}


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
