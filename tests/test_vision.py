"""Images: files, damaged images, augmentation, and the model mini-resnet."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import seed_host
from accel_ddp.tasks import vision
from accel_ddp.tasks.labels import Labels
from accel_ddp.training.stream import _SeededItems


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "mini-resnet"
    image_column: str = "image"
    label_column: str = "label"
    image_size: int = 0
    pixel_mean: float | str = "auto"
    pixel_std: float | str = "auto"


def picture(number: int, shape: tuple[int, ...] = (8, 8, 3)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with two classes of three images. One class is called train."""
    for i in range(6):
        file = tmp_path / "photos" / ("train", "boat")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(i)).save(file)
    (tmp_path / "photos" / "boat" / "notes.txt").write_text("not an image")
    return tmp_path / "photos"


def small_model(norm: str = "batch") -> vision.MiniResNetForImageClassification:
    torch.manual_seed(0)
    return vision.MiniResNetForImageClassification(vision.MiniResNetConfig(widths=(8, 16), norm=norm, num_labels=2))


def loaded(cfg: Config) -> tuple[list[vision.CheckedImages], Labels]:
    tables = vision.load_images(cfg)
    labels = Labels.from_rows(*tables, cfg.label_column, use_both=not cfg.eval_file)
    return vision.check_images(tables, labels, cfg), labels


def pixels(images: vision.Images) -> dict[str, list]:
    """Return the inputs of the model as bytes, sorted, by label."""
    found = [images[i] for i in range(len(images))]
    return {label: sorted(x["pixel_values"].numpy().tobytes() for x in found if x["labels"] == label) for label in (0, 1)}


def test_a_folder_arrays_and_a_table_give_the_same_images(tmp_path, folder, cache):
    import datasets

    files = sorted(folder.glob("*/*.png"))
    np.savez(
        tmp_path / "both.npz",
        x_train=np.stack([np.asarray(Image.open(file)) for file in files]),
        y_train=np.array([[file.parent.name] for file in files]),
        x_test=np.stack([picture(7, (8, 8)), picture(8, (8, 8))]),
        y_test=np.array(["boat", "train"]),
    )
    content = {"picture": [file.read_bytes() for file in files], "kind": [file.parent.name for file in files]}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "table.parquet")

    both = {"eval_file": str(folder), "train_file": str(folder)}
    configs = [
        Config(**both, cache_dir=cache),
        Config(train_file=str(tmp_path / "both.npz"), cache_dir=cache),
        Config(
            train_file=str(tmp_path / "table.parquet"), eval_file=str(tmp_path / "table.parquet"), cache_dir=cache,
            image_column="picture", label_column="kind",
        ),
    ]  # fmt: skip
    seen, model = [], small_model()
    for cfg in configs:
        (train, test), labels = loaded(cfg)
        assert labels.names == ["boat", "train"]
        processor = vision.load_processor(cfg, model, train)
        seen.append((pixels(vision.Images(train, processor, model)), train.fingerprint, test))
    assert seen[0][0] == seen[1][0] == seen[2][0]
    assert seen[0][1] == seen[2][1], "the same files, wherever they are stored"
    test = seen[1][2]
    assert len(test.properties) == 2, "without --eval_file, x_test is the evaluation data"
    assert np.asarray(vision.decode(test.rows[0]["image"]["bytes"])).tolist() == picture(7, (8, 8)).tolist()


def test_broken_images_are_named_or_dropped_and_a_corrected_one_is_checked_again(folder, tmp_path, cache, caplog):
    broken = folder / "boat" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    cfg = Config(train_file=str(folder), eval_file=str(folder), cache_dir=cache)
    with pytest.raises(
        UserError, match=rf"1 of 6 rows of {folder} cannot be used:\n  its image cannot be read: {broken}: .*runcated"
    ):
        loaded(cfg)
    cfg.skip_broken = True
    (train, _), _ = loaded(cfg)
    assert f"--skip_broken: 1 of 6 rows of {folder} cannot be used" in caplog.text
    images = vision.Images(train, vision.load_processor(cfg, small_model(), train), small_model())
    assert len(images) == 5
    assert [images[i]["labels"] for i in range(5)] == [0, 0, 1, 1, 1], "an image keeps its own label"
    cfg.skip_broken = False
    broken.write_bytes(whole)
    assert len(loaded(cfg)[0][0].properties) == 6


def test_a_broken_row_is_named_by_its_number_in_the_file(tmp_path, cache):
    import datasets

    images = [b"junk" if i == 12 else vision.encode_png(picture(i)) for i in range(20)]
    Image.fromarray(np.full((8, 8), 1000, dtype=np.uint16)).save(tmp_path / "deep.png")
    images[17] = (tmp_path / "deep.png").read_bytes()
    datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 10}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError) as error:
        loaded(Config(train_file=str(tmp_path / "x.parquet"), cache_dir=cache))
    assert "its image is not one that Pillow can read: row 13" in str(error.value)
    assert "its image has more than 8 bits per channel: row 18" in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((4, 8, 8)), "labels": np.arange(4)}, "images has the type float64 and the shape"),
        ({"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(3)}, "4 images, but labels has the shape"),
        ({"pictures": np.zeros(4)}, "has the arrays pictures. It needs x_train and y_train, or"),
        ({"images": np.array([{}] * 4), "labels": np.arange(4)}, "cannot be read as .npz"),
    ],
)
def test_arrays_that_are_not_images_are_rejected(tmp_path, arrays, words):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=words):
        vision.read_images("--train_file", str(tmp_path / "x.npz"))


def test_folders_without_a_subfolder_per_class_are_rejected(folder, tmp_path):
    with pytest.raises(UserError, match=r"FOLDER/CLASS/IMAGE, but photos/boat/1.png is not"):
        vision.read_images("--train_file", str(tmp_path))
    with pytest.raises(UserError, match=r"FOLDER/CLASS/IMAGE, but 1.png is not"):
        vision.read_images("--train_file", str(folder / "boat"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there are none"):
        vision.read_images("--train_file", str(tmp_path / "empty"))


def test_images_of_several_sizes_need_the_option_image_size(folder, cache):
    Image.fromarray(picture(9, (10, 12, 3))).save(folder / "boat" / "9.png")
    cfg = Config(train_file=str(folder), eval_file=str(folder), cache_dir=cache)
    (train, _), _ = loaded(cfg)
    with pytest.raises(UserError, match=r"2 sizes, from 8 x 8 to 12 x 10\. Give one size: --image_size 12"):
        vision.load_processor(cfg, small_model(), train)
    cfg.image_size = 6
    assert vision.Images(train, vision.load_processor(cfg, small_model(), train), small_model())[0]["pixel_values"].shape == (
        3,
        6,
        6,
    )
    cfg.pixel_std = 0.25
    processor = vision.load_processor(cfg, small_model(), train)
    white = processor(Image.new("RGB", (8, 8), "white"), return_tensors="pt")["pixel_values"]
    assert white.unique().item() == pytest.approx(2)  # (1 - 0.5) / 0.25


def test_augmentation_depends_on_the_position_in_the_stream_only(folder, cache):
    cfg = Config(train_file=str(folder), eval_file=str(folder), cache_dir=cache)
    (train, _), _ = loaded(cfg)
    model = small_model()
    images = vision.Images(train, vision.load_processor(cfg, model, train), model, "crop_flip")
    at = lambda position: _SeededItems(images, seed=0)[position, 2]["pixel_values"]
    draws = [at(position) for position in range(20)]
    seed_host(99)
    assert all(torch.equal(at(position), draws[position]) for position in reversed(range(20)))
    distinct = {draw.numpy().tobytes() for draw in draws}
    assert 8 < len(distinct) <= 18, "9 shifts by -1, 0 or 1, each mirrored or not"
    flat = vision.Images(train, images.processor, model)
    assert torch.equal(flat[2]["pixel_values"], flat[2]["pixel_values"]), "nothing is drawn in an evaluation"
    assert flat[2]["pixel_values"].numpy().tobytes() in distinct


def test_group_norm_does_not_depend_on_the_other_images_of_a_batch():
    batch = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    apart = {}
    for norm in ("group", "batch"):
        model = small_model(norm).train()
        together = model(batch).logits
        apart[norm] = (together - torch.cat([model(half).logits for half in batch.split(4)])).abs().max().item()
    assert apart["group"] < 1e-6
    assert apart["batch"] > 1e-4


@pytest.mark.parametrize("side", [1, 8, 28, 33])
def test_the_model_accepts_images_of_any_size_and_number_of_channels(side):
    model = vision.MiniResNetForImageClassification(vision.MiniResNetConfig(num_channels=2, num_labels=3))
    assert model(torch.zeros(2, 2, side, side)).logits.shape == (2, 3)


WITHOUT_ACCEL_DDP = """
import sys, numpy, torch
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline
folder = sys.argv[1]
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
image = Image.fromarray(numpy.load(folder + "/pixels.npy"))
scores = {one["label"]: one["score"] for one in pipeline("image-classification", folder, trust_remote_code=True)(image)}
assert "accel_ddp.tasks.vision" not in sys.modules  # torch imports the doctor's entry point for torchrun
numpy.save(folder + "/scores.npy", [scores["boat"], scores["train"]])
numpy.save(folder + "/logits.npy", model(torch.ones(1, 3, 8, 8)).logits.detach())
"""


def test_a_saved_model_is_the_same_with_and_without_accel_ddp(tmp_path, folder, cache):
    from transformers import AutoModelForImageClassification

    from accel_ddp.exporting import export

    cfg = Config(train_file=str(folder), eval_file=str(folder), cache_dir=cache)
    (train, _), labels = loaded(cfg)
    torch.manual_seed(0)
    model = vision.MiniResNetForImageClassification(vision.MiniResNetConfig(widths=(8, 16), **labels.model_config()))
    model.train()(torch.randn(4, 3, 8, 8))  # changes the running statistics of batch norm
    processor = vision.load_processor(cfg, model.eval(), train)
    place = tmp_path / "model"
    model.save_pretrained(place)
    for name, content in export.files_of(model, processor).items():
        (place / name).write_bytes(content)

    ours = AutoModelForImageClassification.from_pretrained(place)
    assert type(ours) is vision.MiniResNetForImageClassification
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in model.state_dict().items())

    np.save(place / "pixels.npy", picture(3))
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_ACCEL_DDP, place], check=True, cwd=tmp_path, env=env)
    with torch.no_grad():
        np.testing.assert_allclose(np.load(place / "logits.npy"), model(torch.ones(1, 3, 8, 8)).logits, atol=1e-6)
        pixel_values = processor(Image.fromarray(picture(3)), return_tensors="pt")["pixel_values"]
        np.testing.assert_allclose(np.load(place / "scores.npy"), model(pixel_values).logits.softmax(-1)[0], atol=1e-6)
