"""Train or fine-tune a model to say what is in an image.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/images.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/images.py \
        --model microsoft/resnet-18 --train_file photos/train --eval_file photos/test --augment crop_flip --lr 1e-4

Batch norm computes with the statistics of a micro-batch: of one rank, or of all ranks with --sync_batchnorm (GPUs). So the
result depends on the micro-batch, and is that of one rank with the whole batch only with --sync_batchnorm and ranks x
micro-batch = --global_batch_size. --norm group, or a model without batch norm, is exact for every split. Evaluations and
checkpoints have the running statistics of rank 0.

Your own data or model: change `build_data`, `build_model`. Your own loop: recipes/own_loop.py has it written out.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config import RecipeConfig, run
from accel_ddp.errors import UserError


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "mini-resnet"  # our own small one, from scratch; or hub name or folder of an image classification model
    dataset: str = "embedded:digits"  # hub name (name:configuration) or embedded; --train_file overrides it
    train_file: str = ""  # folder with a subfolder for each class, .npz (x_train, y_train or images, labels), .parquet
    eval_file: str = ""  # default: x_test of the .npz, or a tenth of the training images, at most 2,000
    image_column: str = "image"  # of a table: encoded images (.png, .jpg ...), or their files' names
    label_column: str = "label"  # names or numbers of classes
    image_size: int = 0  # pixels of each side; 0: as the model's own processor says, or as the images are
    pixel_mean: float | None = None  # taken off each pixel of 0 to 1; default: as the model's own processor says, or 0.5
    pixel_std: float | None = None  # then each is divided by it; default: the same
    norm: Literal["batch", "group"] = "batch"  # of mini-resnet; group: no image sees the others of its batch
    augment: Literal["none", "crop", "crop_flip"] = "crop"  # crop: training images are shifted; flip: and mirrored
    epochs: float = 10.0  # passes over the training items; --steps overrides it
    micro_batch_size: int | Literal["auto"] = 32  # images a rank holds at once: batch norm's statistics are over these
    lr: float = 3e-3  # the highest learning rate of the run
    best_metric: str = "accuracy"  # what early stopping looks at: accuracy, macro_f1, loss

    def validate(self) -> None:
        super().validate()
        if self.image_size < 0 or (self.pixel_std is not None and self.pixel_std <= 0):
            raise UserError(f"--image_size {self.image_size} --pixel_std {self.pixel_std}: must be more than 0.")
        if self.norm == "group" and self.model != "mini-resnet":
            raise UserError(f"--norm group: is for --model mini-resnet; {self.model} has its own.")
        if self.model == "mini-resnet" and (self.gradient_checkpointing or self.dtype != "float32"):
            raise UserError("--gradient_checkpointing, --dtype: are for other models than mini-resnet.")


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        from torch.utils.data import default_collate

        self.accelerator = accelerator
        with accel_ddp.together("load the model and the data") as facts:
            train, test, self.labels = build_data(cfg)
            self.model, self.processor = build_model(cfg, accelerator, self.labels, train)
            facts["the data"] = train.fingerprint + test.fingerprint
        images = accel_ddp.vision.Images(train, self.processor, self.model, cfg.augment)
        self.train = accel_ddp.TrainBatches(images, default_collate, train.fingerprint)
        images = accel_ddp.vision.Images(test, self.processor, self.model)
        self.eval_batches = accel_ddp.metrics.EvalBatches(images, default_collate, cfg.eval_batch_size, accelerator, cfg)

    def loss_sum(self, model, batch):
        return accel_ddp.losses.cross_entropy(logits(model, batch), batch["labels"])

    def count(self, batch):
        return len(batch["labels"])

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        scores = logits(model, batch)
        losses = accel_ddp.losses.cross_entropy(scores, batch["labels"], reduction="none")
        return {"loss": losses, "predictions": scores.argmax(-1), "references": batch["labels"]}

    def summarize(self, rows):
        """On the main rank, over all items."""
        answers = {"predictions": rows["predictions"], "references": rows["references"]}
        self.table = accel_ddp.metrics.table_of_classes(**answers, names=self.labels.names)
        scores = {name: accel_ddp.metrics.load(name).compute(**answers)[name] for name in ("accuracy", "f1")}
        return {"accuracy": scores["accuracy"], "macro_f1": scores["f1"], "loss": float(rows["loss"].mean())}


def logits(model, batch):
    pixels = batch["pixel_values"].to(next(model.parameters()).dtype)  # others only with --dtype
    return model(pixel_values=pixels).logits.float()


def build_data(cfg: Config):
    """Training and evaluation images, all of which can be decoded, and the names of the labels."""
    tables = accel_ddp.data.with_labels(accel_ddp.vision.load_rows(cfg), cfg.label_column, cfg)
    labels = accel_ddp.labels.Labels.of(
        *tables, cfg.label_column, of_both=bool((cfg.train_file and not cfg.eval_file) or cfg.max_train_items)
    )
    if labels.several:
        raise UserError(f"--label_column {cfg.label_column}: holds lists; here each image has one label.")
    return (*accel_ddp.vision.checked(tables, labels, cfg), labels)


def build_model(cfg: Config, accelerator, labels, train):
    """The model, and what makes images what it takes."""
    from transformers import AutoModelForImageClassification

    if cfg.model == "mini-resnet":
        config = accel_ddp.vision.MiniResNetConfig(norm=cfg.norm, **labels.for_model())
        model = accel_ddp.vision.MiniResNetForImageClassification(config)
    else:  # a head for other labels is replaced
        model = accel_ddp.models.load(AutoModelForImageClassification, cfg, **labels.for_model(), ignore_mismatched_sizes=True)
    processor = accel_ddp.vision.load_processor(cfg, model, train)
    accel_ddp.vision.tell_of_batch_norm(model, cfg)
    return accel_ddp.models.ready(model, cfg, accelerator), processor


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    files = accel_ddp.export.files_of(task.model, task.processor)
    metrics = accel_ddp.fit(
        accelerator, cfg, model=task.model, optimizer=accel_ddp.optim.build(task.model, cfg), train=task.train,
        loss_sum=task.loss_sum, count=task.count, evaluate=task.evaluate,
        hooks=accel_ddp.hooks.standard(accelerator, cfg), files=files,
    )  # fmt: skip
    if accelerator.is_main_process:
        print(task.table)
    ours = f"from accel_ddp import embedded; image = embedded.load_dataset('{cfg.dataset}')['validation'][0]['image']"
    image = ours if cfg.dataset.startswith("embedded:") and not cfg.train_file else "image = 'YOUR_IMAGE.png'"
    use = "from transformers import pipeline; use = pipeline('image-classification', '{folder}', trust_remote_code=True)"
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, f"{image}; {use}; print(use(image))")


if __name__ == "__main__":
    run(Config, main)
