"""A small ResNet for images of 8 x 8 pixels or more. It imports torch and transformers only.

This file is saved with every exported model. Without accel_ddp the model is loaded with
`AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)`.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput


class MiniResNetConfig(PretrainedConfig):
    """The config of a small ResNet, for trials without a download."""

    model_type = "mini-resnet"

    def __init__(
        self,
        num_channels: int = 3,
        widths: tuple[int, ...] = (16, 32, 64, 128),
        blocks_per_stage: int = 1,
        norm: str = "batch",
        **more: Any,
    ):
        """Each stage except the first halves the image. `norm` is "batch", or "group" for group norm with 8 groups."""
        self.num_channels, self.widths, self.blocks_per_stage, self.norm = num_channels, list(widths), blocks_per_stage, norm
        classes = {"AutoConfig": "MiniResNetConfig", "AutoModelForImageClassification": "MiniResNetForImageClassification"}
        more.setdefault("auto_map", {auto: f"mini_resnet.{name}" for auto, name in classes.items()})
        super().__init__(**more)


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "group":
        return nn.GroupNorm(8, width)
    if kind == "batch":
        return nn.BatchNorm2d(width)
    raise ValueError(f"norm {kind!r}: must be 'batch' or 'group'")


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)  # the following norm has a bias


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: str):
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, stride=stride), _norm(norm, outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs), _norm(norm, outputs)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), _norm(norm, outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(inner + self.shortcut(x))


class MiniResNetForImageClassification(PreTrainedModel):
    """A small ResNet with a head for image classes."""

    config_class = MiniResNetConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MiniResNetConfig):
        super().__init__(config)
        widths = config.widths
        self.stem = nn.Sequential(_conv(config.num_channels, widths[0]), _norm(config.norm, widths[0]), nn.ReLU())
        blocks, inputs = [], widths[0]
        for stage, width in enumerate(widths):
            for place in range(config.blocks_per_stage):
                blocks.append(Block(inputs, width, 2 if stage > 0 and place == 0 else 1, config.norm))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.zeros_(module.running_mean)
            nn.init.ones_(module.running_var)
            nn.init.zeros_(module.num_batches_tracked)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        pooled = self.blocks(self.stem(pixel_values)).mean((2, 3))
        return ImageClassifierOutput(logits=self.classifier(pooled))
