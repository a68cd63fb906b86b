"""Build the tasks of recipes from the bad inputs in CASES (JSON), and write the error or the log of each rank."""

import contextlib
import importlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.errors import UserError


@dataclass(kw_only=True)
class Config(TrainConfig):
    cases: str = ""


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    messages = {}
    for name, options in json.loads(Path(cfg.cases).read_text()).items():
        recipe = importlib.import_module(options.pop("recipe", "classify"))
        shared = {"cache_dir": cfg.cache_dir, "output_dir": cfg.output_dir}
        logged = io.StringIO()
        try:
            with contextlib.redirect_stderr(logged):
                recipe_cfg = recipe.Config(**shared, **options)
                recipe_cfg.validate()
                accel_ddp.load_model(recipe.Task(recipe_cfg, accelerator))
            messages[name] = f"no error\n{logged.getvalue()}"
        except UserError as error:
            messages[name] = str(error)
    Path(f"{cfg.cases}.{accelerator.process_index}").write_text(json.dumps(messages))


if __name__ == "__main__":
    run(Config, main)
