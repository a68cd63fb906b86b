"""Image classification: images are checked once, augmented, and converted to the model's inputs."""

import base64
import dataclasses
import hashlib
import io
import logging
import os
import random
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import PIL
import torch
import transformers
from accelerate import Accelerator
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from accel_ddp import compat
from accel_ddp.config.train_config import IMAGE_FILES, RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.records.eval_tables import IMAGE
from accel_ddp.sources import builtin, data, models, tokenization
from accel_ddp.sources.builtin_data import encode_png
from accel_ddp.sources.table_files import is_saved, load_file, require_file
from accel_ddp.tasks.examples import literal
from accel_ddp.tasks.labels import Labels
from accel_ddp.tasks.mini_resnet import MiniResNetConfig, MiniResNetForImageClassification
from accel_ddp.text import first_line
from accel_ddp.training.sharding import autocast, gathered, plan_of

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)

THUMBNAIL = 64
MOST_PNG_BYTES = 4096


def load_images(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows like `data.load_rows`, also from a folder or an .npz.

    Without `--eval_file`, the arrays x_test and y_test of an .npz are the evaluation data. Images are not decoded: each one is a
    dictionary with `bytes` and `path`, one of which is None.
    """
    import datasets

    if len(cfg.train_file) == 1 and cfg.train_file[0].endswith(".npz") and not cfg.eval_file:
        with _open_npz("--train_file", cfg.train_file[0]) as arrays:
            if "x_test" in arrays:
                cfg = dataclasses.replace(cfg, eval_file=cfg.train_file)
    tables = data.load_rows(cfg, read_images, IMAGE_FILES)
    data.check_columns(cfg, *tables)
    try:
        return tuple(rows.cast_column(cfg.image_column, datasets.Image(decode=False)) for rows in tables)
    except Exception as error:  # types of pyarrow and of datasets, which depend on the content of the column
        content = tables[0].features[cfg.image_column]
        raise UserError(f"--image_column {cfg.image_column}: contains {content}, and not images.") from error


def read_images(option: str, path: str) -> "datasets.Dataset":
    """Return the columns `image` and `label` of a folder or an .npz, or the columns of a table."""
    if Path(path).is_dir() and not is_saved(Path(path)):
        return _read_folder(option, path)
    if Path(path).suffix.lower() in Image.registered_extensions():
        raise UserError(f"{option} {path}: is one image. Give a folder with a subfolder for each class: FOLDER/CLASS/IMAGE.")
    return _read_npz(option, path) if path.endswith(".npz") else load_file(option, path)


def load_first(path: str, column: str) -> Image.Image:
    """Return the first image of an .npz, of its test images if there are any, or of a table."""
    import datasets

    return decode(read_content(read_images("--eval_file", path).cast_column(column, datasets.Image(decode=False))[0][column]))


def read_content(image: dict[str, Any]) -> bytes:
    return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()


def decode(content: bytes) -> Image.Image:
    """Return the complete image, rotated according to its EXIF orientation."""
    picture = Image.open(io.BytesIO(content))
    picture.load()
    return ImageOps.exif_transpose(picture)


def thumbnail(image: dict[str, Any]) -> str | None:
    """Return a data URI of the image with at most THUMBNAIL pixels per side, or None if its file is no longer there."""
    try:
        picture = decode(read_content(image))
    except Exception:  # types of Pillow and of the disk; every image was decoded once before training
        return None
    picture = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file := io.BytesIO(), kind := "png")
    if file.tell() > MOST_PNG_BYTES:
        picture.save(file := io.BytesIO(), kind := "jpeg", quality=80)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _read_folder(option: str, path: str) -> "datasets.Dataset":
    """Read FOLDER/CLASS/IMAGE. Labels are the names of the subfolders.

    The loader of `datasets` is not used: it numbers the subfolders, so the numbers differ between training and evaluation
    folders if one of them lacks a class, and it takes classes that are called train or test for splits.
    """
    import datasets

    Image.init()
    paths = (found for depth in ("*", "*/*", "*/*/*") for found in sorted(Path(path).glob(depth)))
    is_visible = lambda found: not any(part.startswith(".") for part in found.relative_to(path).parts)
    files = [found for found in paths if found.suffix.lower() in Image.EXTENSION and is_visible(found) and found.is_file()]
    misplaced = [file for file in files if file.parent.parent != Path(path)]
    if misplaced or not files:
        reason = f"{misplaced[0].relative_to(path)} is not" if misplaced else "there are none"
        raise UserError(f"{option} {path}: images must be in a subfolder for each class, FOLDER/CLASS/IMAGE, but {reason}.")
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("string")})
    images = [{"bytes": None, "path": str(file)} for file in files]
    return datasets.Dataset.from_dict({"image": images, "label": [file.parent.name for file in files]}, features=features)


def _open_npz(option: str, path: str) -> Any:
    if not Path(path).is_file():
        require_file(option, path)
    if not zipfile.is_zipfile(path):
        raise UserError(f"{option} {path}: is not an .npz file. Write it with numpy.savez.")
    return np.load(path, allow_pickle=False)  # pickled objects could run code


def _read_npz(option: str, path: str) -> "datasets.Dataset":
    """Encode each image as an uncompressed .png. This is repeated at every start: 60,000 images of 28 x 28 take 5 s."""
    import datasets

    pairs = [("x_test", "y_test")] * (option == "--eval_file") + [("x_train", "y_train"), ("images", "labels")]
    with _open_npz(option, path) as arrays:
        pair = next((pair for pair in pairs if set(pair) <= set(arrays)), None)
        if pair is None:
            reason = f"has the arrays {', '.join(arrays)}"
            raise UserError(f"{option} {path}: {reason}. It needs x_train and y_train, or images and labels.")
        try:
            pixels, labels = arrays[pair[0]], arrays[pair[1]]
        except Exception as error:  # types of numpy, zipfile and zlib
            raise UserError(f"{option} {path}: the file cannot be read as .npz: {error}") from error
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[3:] not in ((), (1,), (3,)):
        raise UserError(
            f"{option} {path}: {pair[0]} has the type {pixels.dtype} and the shape {pixels.shape}. Images must be uint8 with the "
            "shape (images, height, width) or (images, height, width, 1 or 3 channels)."
        )
    if labels.size != len(pixels):
        reason = f"there are {len(pixels):,} images, but {pair[1]} has the shape {labels.shape}"
        raise UserError(f"{option} {path}: {reason}. Give one label for each image.")
    images = [{"bytes": encode_png(one), "path": None} for one in (pixels[..., 0] if pixels.shape[3:] == (1,) else pixels)]
    return datasets.Dataset.from_dict({"image": images, "label": labels.reshape(-1).tolist()})


AutoConfig.register("mini-resnet", MiniResNetConfig)
AutoModelForImageClassification.register(MiniResNetConfig, MiniResNetForImageClassification)
MiniResNetConfig.register_for_auto_class()  # saves mini_resnet.py with the model, for machines without accel_ddp


class CheckedImages(NamedTuple):
    """Rows, and the properties of those whose images can be decoded."""

    rows: "datasets.Dataset"
    column: str
    # For each image its `index` in `rows`, `labels`, `height`, `width`, and a `digest` of its bytes.
    properties: "datasets.Dataset"

    @property
    def fingerprint(self) -> str:
        """A digest of the images and labels, wherever they are stored."""
        return tokenization.fingerprint(self.properties.select_columns(["digest", "labels"]))


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
        done = tokenization.map_once(rows, check, depends_on=depends_on, cfg=cfg, doing="checking images")
        properties.append(data.with_row_numbers(done.add_column("index", np.arange(len(done))), data.row_numbers(done)))
    return [CheckedImages(rows, column, usable) for rows, usable in zip(tables, data.drop_broken(properties, cfg))]


def _inspect(image: dict[str, Any] | None) -> dict[str, Any]:
    """Return height, width and digest of an image, or its `problem`."""
    name = (image or {}).get("path") or ""
    found = {"height": 0, "width": 0, "digest": "", "problem": ""}
    detail = lambda reason: ": ".join(filter(None, (name, reason)))
    broken = lambda kind, reason="": {**found, "problem": "\t".join(filter(None, (kind, detail(reason))))}
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


class Images(Dataset):
    """Items with `pixel_values` from the model's image processor, and `labels`.

    Augmentation draws from Python's generator. `TrainBatches` seeds it by the position in the stream, so it is the same on any
    rank and in any worker. "crop" shifts an image by up to an eighth of its sides, and "crop_flip" also mirrors half of the images.
    """

    def __init__(self, images: CheckedImages, processor: Any, model: nn.Module, augment: str = "none"):
        self.rows, self.column = images.rows.select_columns([images.column]), images.column
        self.indices, self.labels = (np.array(images.properties[name][:]) for name in ("index", "labels"))
        self.processor, self.mode, self.augment = processor, image_mode(model), augment
        self.mixture = getattr(images.properties, "mixture", None)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        picture = decode(read_content(self.rows[int(self.indices[i])][self.column])).convert(self.mode)
        if self.augment != "none":
            left, top = (random.randint(-most, most) for most in (max(1, side // 8) for side in picture.size))
            picture = picture.crop((left, top, left + picture.width, top + picture.height))  # new pixels at the edges are black
            if self.augment == "crop_flip" and random.random() < 0.5:
                picture = ImageOps.mirror(picture)
        return {"pixel_values": self.processor(picture, return_tensors="pt")["pixel_values"][0], "labels": self.labels[i]}


def describe(images: CheckedImages, items: list[int]) -> dict[str, list]:
    """Return the names and thumbnails of some images, for `tables.of_predictions`. The name is CLASS/FILE, or the row in the table."""
    indices, numbers = images.properties["index"][:], data.row_numbers(images.properties)
    contents = [images.rows[int(indices[i])][images.column] for i in items]
    name = lambda i, path: "/".join(Path(path).parts[-2:]) if path else f"row {numbers[i] + 1}"
    names = [name(i, content["path"]) for i, content in zip(items, contents)]
    return {"file": names, IMAGE: [thumbnail(content) for content in contents]}


def image_mode(model: nn.Module) -> str:
    channels = getattr(model.config, "num_channels", 3)
    if channels not in (1, 3):
        raise UserError(f"--model: this model expects images with {channels} channels. Use one with 1 (grayscale) or 3 (RGB).")
    return "L" if channels == 1 else "RGB"


def loading_code(cfg: RecipeConfig, images: CheckedImages) -> str:
    """Return Python code that sets `image` to an image of the data: the path of the first of `images`, or row 0 of its table."""
    path, column = images.rows[int(images.properties["index"][0])][images.column]["path"], literal(images.column)
    if path and Path(path).is_file():
        return f"image = {literal(path)}"
    if cfg.train_file:
        place = f"{literal(images.rows.files.plain[0])}, {column}"
        return f"from accel_ddp import vision; image = vision.load_first({place})"
    if cfg.dataset.startswith(builtin.PREFIX):
        return f'from accel_ddp.sources import builtin; image = builtin.load_dataset({literal(cfg.dataset)})["validation"][0][{column}]'
    place = f"{', '.join(map(literal, cfg.dataset.split(':', 1)))}, split={literal(cfg.train_split)}"
    return f"from datasets import load_dataset; image = load_dataset({place})[0][{column}]"


def build_model(cfg: Any, accelerator: Accelerator, labels: Labels, train: CheckedImages) -> tuple[nn.Module, Any]:
    """Return the model and its image processor."""
    if cfg.model == "mini-resnet":
        model: Any = MiniResNetForImageClassification(MiniResNetConfig(norm=cfg.norm, **labels.model_config()))
    else:  # a head for other labels is replaced
        auto = AutoModelForImageClassification
        model = models.load(auto, cfg, plan=plan_of(accelerator), **labels.model_config(), ignore_mismatched_sizes=True)
    processor = load_processor(cfg, model, train)
    report_batch_norm(model, cfg, accelerator.num_processes)
    return models.prepare(model, cfg, accelerator), processor


def load_processor(cfg: RecipeConfig, model: nn.Module, train: CheckedImages) -> Any:
    """Return the image processor, which resizes, scales and normalizes.

    It comes from the pretrained model, or is made from the options and the sizes of the images. Raise UserError if the model does not
    accept its output.
    """
    place = "" if cfg.model == "mini-resnet" else models.locate(cfg.model, cfg.cache_dir)
    files = ("preprocessor_config.json", "processor_config.json")
    channels = 1 if image_mode(model) == "L" else 3
    if place and (not Path(place).is_dir() or any((Path(place) / name).is_file() for name in files)):
        processor = models.from_pretrained(AutoImageProcessor, cfg.model, place)
    else:
        # ViTImageProcessor needs torchvision since transformers 5, where ViTImageProcessorPil replaces it.
        kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
        side = cfg.image_size or getattr(model.config, "image_size", None)
        if not side:
            sizes = sorted(set(zip(train.properties["height"][:], train.properties["width"][:])))
            if len(sizes) > 1:
                shown = " to ".join(f"{width} x {height}" for height, width in (sizes[0], sizes[-1]))
                size = f"Give one size: --image_size {max(map(max, sizes))}"
                raise UserError(f"The training images have {len(sizes):,} sizes, from {shown}. {size}.")
            side = sizes[0]
        height, width = (side, side) if isinstance(side, int) else side
        size = {"height": height, "width": width}
        processor = kind(size=size, image_mean=[0.5] * channels, image_std=[0.5] * channels, do_convert_rgb=channels == 3)
        if place:
            log.info(f"--model {cfg.model}: the folder has no {files[0]}, so images are resized to {height} x {width}")
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


@torch.no_grad()
def _check_processor(model: nn.Module, processor: Any, cfg: RecipeConfig) -> None:
    pictures = [Image.new(image_mode(model), size) for size in ((32, 40), (40, 32))]
    try:
        pixels = torch.cat([processor(picture, return_tensors="pt")["pixel_values"] for picture in pictures])
        pixels, was_training = pixels.to(model.device, model.dtype), model.training
        with gathered(model), autocast(model, pixels.device):
            model.eval()(pixel_values=pixels)  # in eval mode the statistics of batch norm do not change
        model.train(was_training)
    except Exception as error:  # many types of the model and the processor
        given = f"--model {cfg.model} --image_size {cfg.image_size}"
        raise UserError(f"{given}: the model does not accept images of this size: {first_line(error)}") from error


def report_batch_norm(model: nn.Module, cfg: RecipeConfig, ranks: int) -> None:
    """Log over which images batch norm computes its statistics, if the model has batch norm."""
    if compat.has_batch_norm(model):
        micro = cfg.split(ranks)[0]
        images = f"{ranks} x {micro} images of all ranks" if cfg.sync_batchnorm else f"{micro} images of one rank"
        instead = "--norm group" if cfg.model == "mini-resnet" else "a model without batch norm"
        log.info(f"batch norm uses {images}, so the result depends on the micro-batches; with {instead} it does not")
