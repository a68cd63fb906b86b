"""Image classification: checks all images once, augments them, and converts them to the model's inputs."""

import hashlib
import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import PIL
import torch
import transformers
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import process
from accel_ddp.records.tables import IMAGE
from accel_ddp.sharding.apply import autocast, gathered
from accel_ddp.sources import builtin, data, models, tokenisation
from accel_ddp.tasks.examples import literal
from accel_ddp.tasks.image_files import decode, read_content, thumbnail
from accel_ddp.tasks.labels import Labels
from accel_ddp.tasks.mini_resnet import MiniResNetConfig, MiniResNetForImageClassification

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import datasets

AutoConfig.register("mini-resnet", MiniResNetConfig)
AutoModelForImageClassification.register(MiniResNetConfig, MiniResNetForImageClassification)
MiniResNetConfig.register_for_auto_class()  # saves mini_resnet.py with the model, for machines without accel_ddp


# ---------------------------------------------------------------------------------------------- checked once


class CheckedImages(NamedTuple):
    """Rows, and the properties of those whose images can be decoded."""

    rows: "datasets.Dataset"
    column: str
    properties: (
        "datasets.Dataset"  # for each image its `index` in `rows`, `labels`, `height`, `width`, and a `digest` of its bytes
    )

    @property
    def fingerprint(self) -> str:
        """A digest of the images and labels, wherever they are stored."""
        return tokenisation.fingerprint(self.properties.select_columns(["digest", "labels"]))


def check_images(tables: tuple["datasets.Dataset", ...], labels: Labels, cfg: RecipeConfig) -> list[CheckedImages]:
    """Return training and evaluation images. Images that cannot be decoded are handled as in `data.drop_broken`.

    Every image is decoded once, in threads, so that a damaged one stops a run at its start and not in the middle. The result is
    cached on disk. An image of 28 x 28 costs 0.06 ms of a core, and a photo of 500 x 375 about 2 ms.
    """
    column = cfg.image_column

    def check(rows: dict[str, list]) -> dict[str, list]:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(_inspect, rows[column]))
        problems = data.merge_problems([one["problem"] for one in found], labels.find_problems(rows))
        properties = {name: [one[name] for one in found] for name in found[0]}
        return {**properties, "labels": labels.encode(rows), "problem": problems}

    properties = []
    for rows in tables:
        depends_on = [column, labels.identity, _digest_of_stats(rows, column), PIL.__version__]
        done = tokenisation.map_once(rows, check, depends_on=depends_on, cfg=cfg)
        properties.append(data.with_row_numbers(done.add_column("index", np.arange(len(done))), data.row_numbers(done)))
    return [CheckedImages(rows, column, usable) for rows, usable in zip(tables, data.drop_broken(properties, cfg))]


def _inspect(image: dict[str, Any] | None) -> dict[str, Any]:
    """Return height, width and digest of an image, or its `problem`."""
    name = (image or {}).get("path") or ""
    found = {"height": 0, "width": 0, "digest": "", "problem": ""}
    broken = lambda kind, reason="": {
        **found,
        "problem": "\t".join(filter(None, (kind, ": ".join(filter(None, (name, reason)))))),
    }
    if image is None or (image["bytes"] is None and not name):
        return broken("it has no image")
    try:
        picture = decode(content := read_content(image))
        if picture.mode.startswith(("I", "F")):  # Pillow would turn every value above 255 into white
            return broken("its image has more than 8 bits per channel")
        picture.convert("RGB")
    except UnidentifiedImageError:
        return broken("its image is not one that Pillow can read")
    except Exception as error:  # many types, which depend on the format: OSError, SyntaxError, ValueError, struct.error
        return broken("its image cannot be read", str(getattr(error, "strerror", None) or error))
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return {**found, "height": picture.height, "width": picture.width, "digest": digest}


def _digest_of_stats(rows: "datasets.Dataset", column: str) -> str:
    """Return a digest of size and change time of the image files, so that a corrected file is checked again."""
    digest = hashlib.blake2b(digest_size=16)
    for table in rows.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        images = table[column].combine_chunks()
        for path in images.field("path").filter(images.field("bytes").is_null()).to_pylist():
            found = os.stat(path) if path and os.path.exists(path) else None
            # st_ctime also changes with the permissions.
            digest.update(f"{found.st_size} {found.st_ctime_ns},".encode() if found else b"not there,")
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- inputs of the model


class Images(Dataset):
    """Items with `pixel_values` from the model's image processor, and `labels`.

    Augmentation draws from Python's generator. `TrainBatches` seeds it by the position in the stream, so that it is the same on any
    rank and in any worker. "crop" shifts an image by up to an eighth of its sides, and "crop_flip" also mirrors half of the images.
    """

    def __init__(self, images: CheckedImages, processor: Any, model: nn.Module, augment: str = "none"):
        self.rows, self.column = images.rows.select_columns([images.column]), images.column
        self.indices, self.labels = (np.array(images.properties[name][:]) for name in ("index", "labels"))
        self.processor, self.mode, self.augment = processor, _image_mode(model), augment

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        picture = decode(read_content(self.rows[int(self.indices[i])][self.column])).convert(self.mode)
        if self.augment != "none":
            picture = augment_image(picture, flip=self.augment == "crop_flip")
        return {"pixel_values": self.processor(picture, return_tensors="pt")["pixel_values"][0], "labels": self.labels[i]}


def describe(images: CheckedImages, items: list[int]) -> dict[str, list]:
    """Return the names and thumbnails of some images, for `tables.of_predictions`. The name is CLASS/FILE, or the row in the table."""
    indices, numbers = images.properties["index"][:], data.row_numbers(images.properties)
    contents = [images.rows[int(indices[i])][images.column] for i in items]
    name = lambda i, path: "/".join(Path(path).parts[-2:]) if path else f"row {numbers[i] + 1}"
    return {
        "file": [name(i, content["path"]) for i, content in zip(items, contents)],
        IMAGE: [thumbnail(content) for content in contents],
    }


def augment_image(picture: Image.Image, flip: bool) -> Image.Image:
    """Return the image shifted at random, with `flip` also mirrored with probability 0.5. New pixels at the edges are black."""
    left, top = (random.randint(-most, most) for most in (max(1, side // 8) for side in picture.size))
    shifted = picture.crop((left, top, left + picture.width, top + picture.height))
    return ImageOps.mirror(shifted) if flip and random.random() < 0.5 else shifted


def _image_mode(model: nn.Module) -> str:
    """Return Pillow's mode for the channels of the model: grayscale or RGB."""
    channels = getattr(model.config, "num_channels", 3)
    if channels not in (1, 3):
        raise UserError(
            f"--model: this model expects images with {channels} channels. Use a model with 1 (grayscale) or 3 (RGB)."
        )
    return "L" if channels == 1 else "RGB"


def loading_code(cfg: RecipeConfig, images: CheckedImages) -> str:
    """Return Python code that sets `image` to an image of the data: the path of the first of `images`, or row 0 of its table."""
    path, column = images.rows[int(images.properties["index"][0])][images.column]["path"], literal(images.column)
    if path and Path(path).is_file():
        return f"image = {literal(path)}"
    if cfg.train_file:
        place = f"{literal(cfg.eval_file or cfg.train_file)}, {column}"
        return f"from accel_ddp import image_files; image = image_files.load_first({place})"
    if cfg.dataset.startswith(builtin.PREFIX):
        return f'from accel_ddp import builtin; image = builtin.load_dataset({literal(cfg.dataset)})["validation"][0][{column}]'
    place = f"{', '.join(map(literal, cfg.dataset.split(':', 1)))}, split={literal(cfg.train_split)}"
    return f"from datasets import load_dataset; image = load_dataset({place})[0][{column}]"


def load_processor(cfg: RecipeConfig, model: nn.Module, train: CheckedImages) -> Any:
    """Return the image processor, which resizes, scales and normalises.

    It is that of the pretrained model, or made from the options and the sizes of the images. Raise UserError if the model does not
    accept its output.
    """
    place = "" if cfg.model == "mini-resnet" else models.locate(cfg.model, cfg.cache_dir)
    files = ("preprocessor_config.json", "processor_config.json")
    channels = 1 if _image_mode(model) == "L" else 3
    if place and (not Path(place).is_dir() or any((Path(place) / name).is_file() for name in files)):
        processor = models.from_pretrained(AutoImageProcessor, cfg.model, place)
    else:
        # ViTImageProcessor needs torchvision since transformers 5, where ViTImageProcessorPil replaces it.
        kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
        side = cfg.image_size or getattr(model.config, "image_size", None) or _common_size(train)
        height, width = (side, side) if isinstance(side, int) else side
        size = {"height": height, "width": width}
        processor = kind(size=size, image_mean=[0.5] * channels, image_std=[0.5] * channels, do_convert_rgb=channels == 3)
        if place:
            log.info(f"--model {cfg.model}: the folder has no {files[0]}, so that images are resized to {height} x {width}")
    if cfg.image_size:
        square = {"height": cfg.image_size, "width": cfg.image_size}
        processor.size = {"shortest_edge": cfg.image_size} if "shortest_edge" in processor.size else square
        if getattr(processor, "crop_size", None):
            processor.crop_size = square
    for option, name in (("pixel_mean", "image_mean"), ("pixel_std", "image_std")):
        if getattr(cfg, option) != "auto":
            setattr(processor, name, [getattr(cfg, option)] * channels)
    _check_processor(model, processor, cfg)
    return processor


def _common_size(train: CheckedImages) -> tuple[int, int]:
    sizes = sorted(set(zip(train.properties["height"][:], train.properties["width"][:])))
    if len(sizes) > 1:
        shown = " to ".join(f"{width} x {height}" for height, width in (sizes[0], sizes[-1]))
        largest = max(side for size in sizes for side in size)
        raise UserError(f"The training images have {len(sizes):,} sizes, from {shown}. Give one size: --image_size {largest}.")
    return sizes[0]


@torch.no_grad()
def _check_processor(model: nn.Module, processor: Any, cfg: RecipeConfig) -> None:
    pictures = [Image.new(_image_mode(model), size) for size in ((32, 40), (40, 32))]
    try:
        pixels = torch.cat([processor(picture, return_tensors="pt")["pixel_values"] for picture in pictures])
        pixels, was_training = pixels.to(model.device, model.dtype), model.training
        with gathered(model), autocast(model, pixels.device):
            model.eval()(pixel_values=pixels)  # in eval mode the statistics of batch norm do not change
        model.train(was_training)
    except Exception as error:  # many types of the model and the processor
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--model {cfg.model} --image_size {cfg.image_size}: the model does not accept images of this size: {reason}"
        ) from error


def report_batch_norm(model: nn.Module, cfg: RecipeConfig) -> None:
    """Log over which images batch norm computes its statistics, if the model has batch norm."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        micro = cfg.split(process.num_ranks)[0]
        images = f"{process.num_ranks} x {micro} images of all ranks" if cfg.sync_batchnorm else f"{micro} images of one rank"
        instead = "--norm group" if cfg.model == "mini-resnet" else "a model without batch norm"
        log.info(f"batch norm uses {images}, so that the result depends on the micro-batches; with {instead} it does not")
