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
from accel_ddp import ScoredConfig, UserError, column, option, run
from accel_ddp.config.train_config import IMAGE_FILES


@dataclass(kw_only=True)
class Config(ScoredConfig):
    model: str = option(
        "mini-resnet", "mini-resnet (small, from scratch), or Hub name or folder of an image classification model"
    )
    dataset: str = "builtin:digits"
    file_endings = IMAGE_FILES
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
    pixel_std: float | Literal["auto"] = option("auto", "standard deviation to divide pixels by; auto: the same", group="data")
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

    def validate(self) -> None:
        super().validate()
        if self.pixel_std != "auto" and self.pixel_std <= 0:
            raise UserError(f"--pixel_std {self.pixel_std}: must be above 0.")
        if self.norm == "group" and self.model != "mini-resnet" and not self.evaluate_only:
            raise UserError(f"--norm group: works with --model mini-resnet only. Leave it out for --model {self.model}.")
        if self.model == "mini-resnet" and (self.gradient_checkpointing is True or self.dtype not in ("auto", "float32")):
            raise UserError("--gradient_checkpointing and --dtype: do not work with --model mini-resnet. Leave them out.")

    def validate_sharded(self) -> None:
        super().validate_sharded()
        if self.model == "mini-resnet":
            why = "the accelerate config asks for FSDP, which needs a transformers model with a list of layers"
            instead = "Use accelerate_configs/1node.yaml or 2node.yaml, or --model google/vit-base-patch16-224"
            raise UserError(f"--model mini-resnet: {why}. {instead}.")


class Task(accel_ddp.ClassTask):
    model_class = "AutoModelForImageClassification"

    def load_tokenizer(self):
        return None  # `build` loads the image processor

    def read(self):
        tables = accel_ddp.vision.load_images(self.cfg)
        use_both = accel_ddp.labels.may_lack_classes(self.cfg, tables[0])
        self.use_labels(accel_ddp.labels.Labels.from_rows(*tables, self.cfg.label_column, use_both=use_both))
        if self.labels.is_multi_label:
            raise UserError(f"--label_column {self.cfg.label_column}: contains lists, but each image must have one label.")
        return tables

    def encode(self, tables):
        made = accel_ddp.vision.check_images(tables, self.labels, self.cfg)
        self.check_labels([images.properties for images in made])
        return made

    def build(self):
        model, self.processor = accel_ddp.vision.build_model(self.cfg, self.accelerator, self.labels, self.rows[0])
        return model

    def batches(self):
        from torch.utils.data import default_collate

        train = accel_ddp.vision.Images(self.rows[0], self.processor, self.model, self.cfg.augment)
        return self.use(train, accel_ddp.vision.Images(self.rows[1], self.processor, self.model), default_collate)

    def outputs(self, model, batch):
        pixels = batch["pixel_values"].to(next(model.parameters()).dtype)  # another type only with --dtype
        return model(pixel_values=pixels).logits.float()

    def describe(self, items):
        return accel_ddp.vision.describe(self.rows[1], items)

    @property
    def example(self):
        remote = ", trust_remote_code=True" if self.cfg.model == "mini-resnet" else ""
        use = f'from transformers import pipeline; use = pipeline("image-classification", {{folder}}{remote})'
        return f"{accel_ddp.vision.loading_code(self.cfg, self.rows[1])}; {use}; print(use(image))"


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
