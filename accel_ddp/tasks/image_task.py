"""What a task of images does beside learning: it reads and checks images, and builds the model and its processor.

Importing this module is fast, as it is for `task`.
"""

from dataclasses import dataclass
from typing import Any

from accel_ddp.config.train_config import IMAGE_FILES, ScoredConfig
from accel_ddp.errors import UserError
from accel_ddp.tasks.text_task import ClassTask


@dataclass(kw_only=True)
class ImageConfig(ScoredConfig):
    """Options of images. What mini-resnet, which is no model of transformers, cannot do is refused."""

    file_endings = IMAGE_FILES

    def validate(self) -> None:
        super().validate()
        if self.model == "mini-resnet" and (self.gradient_checkpointing is True or self.dtype not in ("auto", "float32")):
            raise UserError("--gradient_checkpointing and --dtype: do not work with --model mini-resnet. Leave them out.")

    def validate_sharded(self) -> None:
        super().validate_sharded()
        if self.model == "mini-resnet":
            why = "the accelerate config asks for FSDP, which needs a transformers model with a list of layers"
            instead = "Use accelerate_configs/1node.yaml or 2node.yaml, or --model google/vit-base-patch16-224"
            raise UserError(f"--model mini-resnet: {why}. {instead}.")


class ImageTask(ClassTask):
    """A task whose items are images with one label each. `batches` of a recipe makes them `vision.Images`."""

    model_class = "AutoModelForImageClassification"

    def load_tokenizer(self) -> None:
        return None  # `build` loads the image processor

    def read(self) -> Any:
        from accel_ddp.tasks.labels import Labels, may_lack_classes
        from accel_ddp.tasks.vision import load_images

        tables = load_images(self.cfg)
        use_both = may_lack_classes(self.cfg, tables[0])
        self.use_labels(Labels.from_rows(*tables, self.cfg.label_column, use_both=use_both))
        if self.labels.is_multi_label:
            raise UserError(f"--label_column {self.cfg.label_column}: contains lists, but each image must have one label.")
        return tables

    def encode(self, tables: Any) -> Any:
        from accel_ddp.tasks.vision import check_images

        made = check_images(tables, self.labels, self.cfg)
        self.check_labels([images.properties for images in made])
        return made

    def build(self) -> Any:
        from accel_ddp.tasks.vision import build_model

        model, self.processor = build_model(self.cfg, self.accelerator, self.labels, self.rows[0])
        return model

    def collate(self) -> Any:
        from torch.utils.data import default_collate

        return default_collate

    def describe(self, items: list[int]) -> dict[str, list]:
        from accel_ddp.tasks.vision import describe

        return describe(self.rows[1], items)

    @property
    def example(self) -> str:
        from accel_ddp.tasks.vision import loading_code

        remote = ", trust_remote_code=True" if self.cfg.model == "mini-resnet" else ""
        use = f'from transformers import pipeline; use = pipeline("image-classification", {{folder}}{remote})'
        return f"{loading_code(self.cfg, self.rows[1])}; {use}; print(use(image))"
