"""Tests of the source distribution, of the wheel that is built from it, and of an editable install."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from accel_ddp import __version__
from tests.conftest import ROOT, Ended, clean_environment, run_all

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def files(folder: Path, *patterns: str) -> set[str]:
    return {str(path.relative_to(folder)) for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}


def new_environment(folder: Path, *packages: object) -> Path:
    """Create a virtual environment with these packages and with those of the current environment. Return its bin/."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    # Python does not read the .pth files in folders that a .pth file lists, so editable installs there have no effect.
    (site / "ours.pth").write_text("\n".join(ours) + "\n")
    install = [*PIP, "--python", folder / "bin" / "python", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, *packages], check=True, timeout=300)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return the wheel that a user gets. It is built from the source distribution, not from this clone."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True, timeout=300)
    (sdist,) = folder.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    subprocess.run([*PIP, "wheel", *options, sdist], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return bin/ of a virtual environment with the wheel."""
    return new_environment(tmp_path_factory.mktemp("wheel") / "venv", wheel)


def run_installed(bin_folder: Path, folder: Path, *arguments: str, program: str = "accel-ddp", **more: str) -> Ended:
    """Run a command outside of the repository, without environment variables that point to the repository."""
    environment = clean_environment(**more)
    environment.pop("PYTHONPATH", None)
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    return run_all([[bin_folder / program, *arguments]], [environment], cwd=folder)


def test_the_wheel_has_all_modules_recipes_and_configs_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = ("*.py", "*.css", "*.jinja", "*.js", "*.sh", "*.yaml", "py.typed")
    expected = {f"accel_ddp/{name}" for name in files(ROOT / "accel_ddp", *kinds)}
    expected |= {f"accel_ddp/recipes/{name}" for name in files(ROOT / "recipes", "*.py", "*.md", "*.yaml")}
    configs = files(ROOT / "accelerate_configs", "*")
    expected |= {f"accel_ddp/accelerate_configs/{name}" for name in configs if not name.startswith("tuned.")}
    assert {"accel_ddp/recipes/classify.py", "accel_ddp/accelerate_configs/local.yaml", "accel_ddp/doctor/__init__.py"} <= names
    assert {name for name in names if ".dist-info/" not in name} == expected
    entry_points = zipfile.ZipFile(wheel).read(f"accel_ddp-{__version__}.dist-info/entry_points.txt").decode()
    assert "accel-ddp = accel_ddp.cli:main" in entry_points
    assert "[torchrun.handlers]" in entry_points, "the launchers start the preflight through this entry point"


def test_the_version_is_written_in_one_place(wheel, installed, tmp_path):
    assert wheel.name.startswith(f"accel_ddp-{__version__}-")
    assert f"\nVersion: {__version__}\n" in zipfile.ZipFile(wheel).read(f"accel_ddp-{__version__}.dist-info/METADATA").decode()
    assert run_installed(installed, tmp_path, "--version").well().text == f"accel-ddp {__version__}\n"


def test_another_copy_builds_the_same_bytes(wheel, tmp_path, monkeypatch):
    """The copy has other times and permissions, and files that do not belong to the package."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (copy,) = tmp_path.iterdir()
    (copy / "PKG-INFO").unlink()  # a clone has none
    for path in copy.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1e9, 1e9))
    (copy / "accel_ddp" / "__pycache__").mkdir()
    (copy / "accel_ddp" / "__pycache__" / "loop.pyc").write_text("of another machine")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist"], cwd=copy, check=True, timeout=300)
    assert (tmp_path / "dist" / sdist.name).read_bytes() == sdist.read_bytes()
    assert (tmp_path / "dist" / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_metadata_is_complete_and_true(wheel):
    names = zipfile.ZipFile(wheel)
    metadata = message_from_bytes(names.read(f"accel_ddp-{__version__}.dist-info/METADATA"))
    assert names.read(f"accel_ddp-{__version__}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Author"] == "accel_ddp contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert not re.findall(r"\]\((?!https://).*?\)|<img.*?>", metadata.get_payload()), "PyPI has no files of the repository"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == metadata["License-Expression"]
    assert [author["name"] for author in citation["authors"]] == [metadata["Author"]]


@pytest.mark.slow
def test_twine_accepts_the_distributions(wheel):
    pytest.importorskip("twine", reason="pip install twine")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *wheel.parent.iterdir()], check=True, timeout=300)


def test_an_installed_recipe_runs_in_any_folder(installed, tmp_path, cache):
    """The run uses an example and the default config, which are in the wheel too. tests/test_cli.py starts two ranks."""
    listed = run_installed(installed, tmp_path, "recipes").well()
    assert "classify  " in listed.text
    (tmp_path / "rows.csv").write_text("text,label\nlovely,yes\nawful,no\n" * 16)
    small = ["--steps", "2", "--model", "builtin:all-MiniLM-L6-v2", "--no_eval_first", "--train_file", "rows.csv", "--eval_file"]
    ended = run_installed(installed, tmp_path, "run", "modernbert-classify", *small, "rows.csv", ACCEL_DDP_CACHE=cache).well()
    assert "1 node x 1 rank " in ended.text
    (model,) = (tmp_path / "runs" / "classify").glob("*/model")
    assert "classify.py" in (model / "README.md").read_text()
    where = run_installed(installed, tmp_path, "-c", "import accel_ddp; print(accel_ddp.__file__)", program="python").well()
    assert Path(where.text.strip()).is_relative_to(installed.parent)


def test_an_editable_install_uses_the_repository(tmp_path):
    bin_folder = new_environment(tmp_path / "venv", "-e", ROOT)
    assert "classify  " in run_installed(bin_folder, tmp_path, "recipes").well().text
    code = "import accel_ddp.nodes.recipe_files as files; print(*map(files.folder, ('recipes', 'accelerate_configs')))"
    found = run_installed(bin_folder, tmp_path, "-c", code, program="python").well()
    assert found.text.split() == [str(ROOT / "recipes"), str(ROOT / "accelerate_configs")]


def test_importing_the_package_imports_nothing_else():
    """`--help`, a mistyped option and the doctor must not wait for torch. importlib.metadata would cost 20 ms."""
    code = "import sys; before = set(sys.modules); import accel_ddp; print(sorted(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "accelerate", "transformers", "numpy", "yaml", "importlib.metadata", "argparse"}
    assert not heavy & set(eval(found.stdout))


def test_every_public_name_exists():
    import accel_ddp

    for name in accel_ddp.__all__:
        assert getattr(accel_ddp, name) is not None
