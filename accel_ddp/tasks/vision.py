"""Images: from folders, arrays and tables, each decoded once before a run; augmented, and made what the model takes."""

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
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import process
from accel_ddp.sources import data, models, tokenisation
from accel_ddp.tasks.labels import Labels
from accel_ddp.tasks.mini_resnet import MiniResNetConfig, MiniResNetForImageClassification

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import datasets

AutoConfig.register("mini-resnet", MiniResNetConfig)
AutoModelForImageClassification.register(MiniResNetConfig, MiniResNetForImageClassification)
MiniResNetConfig.register_for_auto_class()  # its source is saved with it, for where accel_ddp is not installed


# ---------------------------------------------------------------------------------------------- rows


def load_rows(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """As `data.load_rows`, also of a folder or an .npz, whose test images are the evaluation data unless others are named.

    Images are not decoded: they are {"bytes", "path"}, of which one is None.
    """
    import datasets

    if cfg.train_file.endswith(".npz") and not cfg.eval_file:
        with _opened("--train_file", cfg.train_file) as arrays:
            if "x_test" in arrays:
                cfg = dataclasses.replace(cfg, eval_file=cfg.train_file)
    tables = data.load_rows(cfg, images_reader)
    data.require_columns({"image_column": cfg.image_column, "label_column": cfg.label_column}, *tables)
    try:
        return tuple(rows.cast_column(cfg.image_column, datasets.Image(decode=False)) for rows in tables)
    except Exception as error:  # of pyarrow and of datasets, by what the column holds
        held = tables[0].features[cfg.image_column]
        raise UserError(f"--image_column {cfg.image_column}: holds no images but {held}.") from error


def images_reader(option: str, path: str) -> "datasets.Dataset":
    """Columns `image`, `label` of a folder or an .npz; those that a table has."""
    if Path(path).is_dir():
        return _read_folder(option, path)
    return _read_arrays(option, path) if path.endswith(".npz") else data.load_file(option, path)


def _read_folder(option: str, path: str) -> "datasets.Dataset":
    """Labels are names: numbers that `datasets` gives to the subfolders are others where a class is not in both folders.

    It also takes classes that are called train or test for splits.
    """
    import datasets

    Image.init()
    paths = (found for depth in ("*", "*/*", "*/*/*") for found in sorted(Path(path).glob(depth)))
    is_shown = lambda found: not any(part.startswith(".") for part in found.relative_to(path).parts)
    files = [found for found in paths if found.suffix.lower() in Image.EXTENSION and is_shown(found) and found.is_file()]
    stray = [file for file in files if file.parent.parent != Path(path)]
    if stray or not files:
        why = f"{stray[0].relative_to(path)} does not" if stray else "there are none"
        raise UserError(f"{option} {path}: images must lie in the folder of their class, FOLDER/CLASS/IMAGE; {why}.")
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("string")})
    images = [{"bytes": None, "path": str(file)} for file in files]
    return datasets.Dataset.from_dict({"image": images, "label": [file.parent.name for file in files]}, features=features)


def _opened(option: str, path: str) -> Any:
    if not Path(path).is_file():
        raise UserError(f"{option} {path}: there is no such file (looked in {Path.cwd()}).")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{option} {path}: is no .npz as numpy.savez writes it.")
    return np.load(path, allow_pickle=False)  # pickled objects could run code


def _read_arrays(option: str, path: str) -> "datasets.Dataset":
    """Each image as an uncompressed .png, at every start: 60,000 of 28 x 28 take 5 s."""
    import datasets

    pairs = [("x_train", "y_train"), ("images", "labels")]
    if option == "--eval_file":
        pairs.insert(0, ("x_test", "y_test"))
    with _opened(option, path) as arrays:
        pair = next((pair for pair in pairs if set(pair) <= set(arrays)), None)
        if pair is None:
            raise UserError(f"{option} {path}: has {', '.join(arrays)}, but neither x_train and y_train nor images and labels.")
        try:
            pixels, labels = arrays[pair[0]], arrays[pair[1]]
        except Exception as error:  # of numpy, zipfile and zlib
            raise UserError(f"{option} {path}: cannot be read as .npz: {error}") from error
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[3:] not in ((), (1,), (3,)):
        raise UserError(
            f"{option} {path}: {pair[0]} is {pixels.dtype} of the shape {pixels.shape}. Images are uint8, of the shape "
            "(images, height, width) or (images, height, width, 1 or 3 channels)."
        )
    if labels.size != len(pixels):
        raise UserError(f"{option} {path}: {len(pixels):,} images have labels of the shape {labels.shape}: one each is needed.")
    images = [{"bytes": _png(one), "path": None} for one in (pixels[..., 0] if pixels.shape[3:] == (1,) else pixels)]
    return datasets.Dataset.from_dict({"image": images, "label": labels.reshape(-1).tolist()})


def _png(pixels: np.ndarray) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "png", compress_level=0)
    return file.getvalue()


# ---------------------------------------------------------------------------------------------- checked once


class Checked(NamedTuple):
    """Rows all of whose images can be decoded."""

    rows: "datasets.Dataset"
    column: str
    facts: "datasets.Dataset"  # of each image: its place in `rows`, `labels`, height, width, and a digest of its bytes

    @property
    def fingerprint(self) -> str:
        """Of the images and labels, wherever they are stored."""
        return tokenisation.fingerprint(self.facts.select_columns(["digest", "labels"]))


def checked(tables: tuple["datasets.Dataset", ...], labels: Labels, cfg: RecipeConfig) -> list[Checked]:
    """Training and evaluation images without those that cannot be decoded: a UserError, or with `--skip_broken` left out.

    Every image is decoded once, in threads, before the first run rather than in the middle of one; what was found is kept
    on disk. An image of 28 x 28 costs 0.06 ms of a core, a photo of 500 x 375 about 2 ms.
    """
    column = cfg.image_column

    def check(rows: dict[str, list]) -> dict[str, list]:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(_facts, rows[column]))
        return {"labels": labels.encode(rows), **{name: [facts[name] for facts in found] for name in found[0]}}

    facts = []
    for rows in tables:
        depends_on = [column, labels.identity, _age_of_files(rows, column), PIL.__version__]
        done = tokenisation.map_once(rows, check, depends_on=depends_on, cfg=cfg)
        facts.append(data.at_places(done.add_column("place", np.arange(len(done))), data.places(done)))
    return [Checked(rows, column, good) for rows, good in zip(tables, data.without_broken(facts, cfg))]


def _facts(image: dict[str, Any] | None) -> dict[str, Any]:
    name = (image or {}).get("path") or "it"
    facts = {"height": 0, "width": 0, "digest": "", "problem": ""}
    if image is None:
        return {**facts, "problem": f"{name} has no image"}
    try:
        picture = decoded(content := _content(image))
        if picture.mode.startswith(("I", "F")):  # Pillow would make all that is brighter than 255 white
            return {**facts, "problem": f"{name} has more than 8 bits per channel"}
        picture.convert("RGB")
    except UnidentifiedImageError:
        return {**facts, "problem": f"{name} is no image that Pillow can read"}
    except Exception as error:  # of many kinds, by format: OSError, SyntaxError, ValueError, struct.error
        return {**facts, "problem": f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"}
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return {**facts, "height": picture.height, "width": picture.width, "digest": digest}


def _content(image: dict[str, Any]) -> bytes:
    return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()


def decoded(content: bytes) -> Image.Image:
    """The whole image, turned as its camera says."""
    picture = Image.open(io.BytesIO(content))
    picture.load()
    return ImageOps.exif_transpose(picture)


def _age_of_files(rows: "datasets.Dataset", column: str) -> str:
    """Of the images that are files, sizes and times of change, also of rights: what was mended is checked again."""
    digest = hashlib.blake2b(digest_size=16)
    for table in rows.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        images = table[column].combine_chunks()
        for path in images.field("path").filter(images.field("bytes").is_null()).to_pylist():
            found = os.stat(path) if path and os.path.exists(path) else None
            digest.update(f"{found.st_size} {found.st_ctime_ns},".encode() if found else b"not there,")
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- what the model takes


class Images(Dataset):
    """`pixel_values` as the model's own processor makes them, and `labels`.

    Augmentation is drawn from Python's generator, which is seeded by the place in the stream: it is the same on any rank
    and in any worker. "crop" shifts an image by up to an eighth of its sides; "crop_flip" also mirrors every second one.
    """

    def __init__(self, images: Checked, processor: Any, model: nn.Module, augment: str = "none"):
        self.rows, self.column = images.rows.select_columns([images.column]), images.column
        self.places, self.labels = (np.array(images.facts[name][:]) for name in ("place", "labels"))
        self.processor, self.mode, self.augment = processor, _mode(model), augment

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> dict[str, Any]:
        picture = decoded(_content(self.rows[int(self.places[i])][self.column])).convert(self.mode)
        if self.augment != "none":
            picture = augmented(picture, flip=self.augment == "crop_flip")
        return {"pixel_values": self.processor(picture, return_tensors="pt")["pixel_values"][0], "labels": self.labels[i]}


def augmented(picture: Image.Image, flip: bool) -> Image.Image:
    left, top = (random.randint(-most, most) for most in (max(1, side // 8) for side in picture.size))
    shifted = picture.crop((left, top, left + picture.width, top + picture.height))  # outside of the image it is black
    return ImageOps.mirror(shifted) if flip and random.random() < 0.5 else shifted


def _mode(model: nn.Module) -> str:
    """Grey or coloured, as the model takes it."""
    channels = getattr(model.config, "num_channels", 3)
    if channels not in (1, 3):
        raise UserError(f"the model takes images of {channels} channels; here are those of 1 (grey) and 3 (red, green, blue).")
    return "L" if channels == 1 else "RGB"


def load_processor(cfg: RecipeConfig, model: nn.Module, train: Checked) -> Any:
    """Resizes, scales and normalises: the pretrained model's own, or one made of the options and the images.

    A UserError, before anything is trained, where the model cannot take what it makes.
    """
    place = "" if cfg.model == "mini-resnet" else models.locate(cfg.model, cfg.cache_dir)
    files = ("preprocessor_config.json", "processor_config.json")
    channels = 1 if _mode(model) == "L" else 3
    if place and (not Path(place).is_dir() or any((Path(place) / name).is_file() for name in files)):
        processor = models.from_pretrained(AutoImageProcessor, cfg.model, place)
    else:
        # What transformers 4 has under this name needs no torchvision; in transformers 5 that is another one.
        kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
        side = cfg.image_size or getattr(model.config, "image_size", None) or _size(train)
        height, width = (side, side) if isinstance(side, int) else side
        size = {"height": height, "width": width}
        processor = kind(size=size, image_mean=[0.5] * channels, image_std=[0.5] * channels, do_convert_rgb=channels == 3)
        if place:
            log.info(f"--model {cfg.model}: the folder has no {files[0]}; images become {height} x {width}")
    if cfg.image_size:
        square = {"height": cfg.image_size, "width": cfg.image_size}
        processor.size = {"shortest_edge": cfg.image_size} if "shortest_edge" in processor.size else square
        if getattr(processor, "crop_size", None):
            processor.crop_size = square
    for option, name in (("pixel_mean", "image_mean"), ("pixel_std", "image_std")):
        if getattr(cfg, option) != "auto":
            setattr(processor, name, [getattr(cfg, option)] * channels)
    _require_fit(model, processor, cfg)
    return processor


def _size(train: Checked) -> tuple[int, int]:
    sizes = sorted(set(zip(train.facts["height"][:], train.facts["width"][:])))
    if len(sizes) > 1:
        shown = " to ".join(f"{height} x {width}" for height, width in (sizes[0], sizes[-1]))
        raise UserError(f"The training images have {len(sizes):,} sizes, from {shown}. Give them one: --image_size 64.")
    return sizes[0]


@torch.no_grad()
def _require_fit(model: nn.Module, processor: Any, cfg: RecipeConfig) -> None:
    pictures = [Image.new(_mode(model), size) for size in ((32, 40), (40, 32))]
    try:
        pixels = torch.cat([processor(picture, return_tensors="pt")["pixel_values"] for picture in pictures])
        pixels, was_training = pixels.to(model.device, model.dtype), model.training
        model.eval()(pixel_values=pixels)  # batch norm learns nothing of it
        model.train(was_training)
    except Exception as error:  # of the model or the processor, in their own words
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--model {cfg.model} --image_size {cfg.image_size}: the model cannot take such images: {said}"
        ) from error


def tell_of_batch_norm(model: nn.Module, cfg: RecipeConfig) -> None:
    """Where there is batch norm, what its statistics are over."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        micro = cfg.split(process.num_ranks)[0]
        whose = f"{process.num_ranks} x {micro} images of all ranks" if cfg.sync_batchnorm else f"{micro} images of one rank"
        instead = "--norm group" if cfg.model == "mini-resnet" else "a model without it"
        log.info(f"batch norm: over {whose}, so that the result depends on this split; that of {instead} does not")
