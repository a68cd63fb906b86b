"""Reads images from folders with a subfolder per class, from .npz arrays, and from tables."""

import base64
import dataclasses
import io
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import data
from accel_ddp.sources.files import load_file, require_file

if TYPE_CHECKING:
    import datasets

THUMBNAIL = 64
MOST_PNG_BYTES = 4096


def load_images(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows like `data.load_rows`, also from a folder or an .npz.

    Without `--eval_file`, the arrays x_test and y_test of an .npz are the evaluation data. Images are not decoded: each one is a
    dictionary with `bytes` and `path`, one of which is None.
    """
    import datasets

    if cfg.train_file.endswith(".npz") and not cfg.eval_file:
        with _open_npz("--train_file", cfg.train_file) as arrays:
            if "x_test" in arrays:
                cfg = dataclasses.replace(cfg, eval_file=cfg.train_file)
    tables = data.load_rows(cfg, read_images)
    data.require_columns({"image_column": cfg.image_column, "label_column": cfg.label_column}, *tables)
    try:
        return tuple(rows.cast_column(cfg.image_column, datasets.Image(decode=False)) for rows in tables)
    except Exception as error:  # types of pyarrow and of datasets, which depend on the content of the column
        content = tables[0].features[cfg.image_column]
        raise UserError(f"--image_column {cfg.image_column}: contains {content}, and not images.") from error


def read_images(option: str, path: str) -> "datasets.Dataset":
    """Return the columns `image` and `label` of a folder or an .npz, or the columns of a table."""
    if Path(path).is_dir():
        return _read_folder(option, path)
    if Path(path).suffix.lower() in Image.registered_extensions():
        raise UserError(f"{option} {path}: is one image. Give a folder with a subfolder for each class: FOLDER/CLASS/IMAGE.")
    return _read_npz(option, path) if path.endswith(".npz") else load_file(option, path)


def load_first(path: str, column: str) -> Image.Image:
    """Return the first image of an .npz, of its test images if there are any, or of a table."""
    import datasets

    return decode(read_content(read_images("--eval_file", path).cast_column(column, datasets.Image(decode=False))[0][column]))


def read_content(image: dict[str, Any]) -> bytes:
    """Return the encoded image."""
    return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()


def decode(content: bytes) -> Image.Image:
    """Return the complete image, rotated according to its EXIF orientation."""
    picture = Image.open(io.BytesIO(content))
    picture.load()
    return ImageOps.exif_transpose(picture)


def thumbnail(image: dict[str, Any]) -> str | None:
    """Return a data URI of the image with at most THUMBNAIL pixels per side, or None if its file is no longer there.

    It has at most a few kilobytes: .png, or .jpg for images with many colours.
    """
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


def encode_png(pixels: np.ndarray) -> bytes:
    """Return the pixels as an uncompressed .png."""
    Image.fromarray(pixels).save(file := io.BytesIO(), "png", compress_level=0)
    return file.getvalue()


def _read_folder(option: str, path: str) -> "datasets.Dataset":
    """Read FOLDER/CLASS/IMAGE. Labels are the names of the subfolders.

    The loader of `datasets` is not used: it numbers the subfolders, so that the numbers differ between training and evaluation
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

    pairs = [("x_train", "y_train"), ("images", "labels")]
    if option == "--eval_file":
        pairs.insert(0, ("x_test", "y_test"))
    with _open_npz(option, path) as arrays:
        pair = next((pair for pair in pairs if set(pair) <= set(arrays)), None)
        if pair is None:
            raise UserError(
                f"{option} {path}: has the arrays {', '.join(arrays)}. It needs x_train and y_train, or images and labels."
            )
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
        raise UserError(
            f"{option} {path}: there are {len(pixels):,} images, but {pair[1]} has the shape {labels.shape}. Give one label for "
            "each image."
        )
    images = [{"bytes": encode_png(one), "path": None} for one in (pixels[..., 0] if pixels.shape[3:] == (1,) else pixels)]
    return datasets.Dataset.from_dict({"image": images, "label": labels.reshape(-1).tolist()})
