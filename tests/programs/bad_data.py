"""Build the task of classify from the bad inputs in CASES (JSON), one after the other, and write what each rank was told."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import classify

import accel_ddp
from accel_ddp.config import UserError, run


@dataclass(kw_only=True)
class Config(classify.Config):
    cases: str = ""


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    told = {}
    for name, options in json.loads(Path(cfg.cases).read_text()).items():
        try:
            classify.Task(dataclasses.replace(cfg, **options), accelerator)
            told[name] = "no error"
        except UserError as error:
            told[name] = str(error)
    Path(f"{cfg.cases}.{accelerator.process_index}").write_text(json.dumps(told))


if __name__ == "__main__":
    run(Config, main)
