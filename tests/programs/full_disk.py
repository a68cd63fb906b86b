"""Save checkpoints to disks that are full or become full during a save. Write the results to OUT as JSON.

This program needs its own mount namespace, because it mounts small disks.
"""

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import base

import accel_ddp
from accel_ddp.entry import run
from accel_ddp.saving import checkpoint_format


@dataclass(kw_only=True)
class Config(base.Config):
    steps: int = 8
    save_every: int = 2
    global_batch_size: int = 4


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    accelerator = accel_ddp.start(cfg)
    root = Path(cfg.output_dir)

    def mount(name: str, options: str) -> Path:
        """Mount a new tmpfs and return its folder."""
        folder = root / name
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
        return folder

    def fit(folder: Path, at_step=lambda step: None, standard: bool = False, evaluated=lambda text: None, **options):
        """Train, and return the output, the problem of each checkpoint, the partial checkpoints and what is unsaved."""
        config = dataclasses.replace(cfg, output_dir=str(folder), **options)
        torch.manual_seed(0)
        model = nn.Linear(500, 500)  # 3 MB with the optimizer
        hook = accel_ddp.hooks.Hook()
        hook.on_update = lambda numbers, rate: (at_step(numbers.step), time.sleep(0.05))
        hooks = [hook, *(accel_ddp.hooks.standard(accelerator, config) if standard else [])]
        output = io.StringIO()
        hook.on_evaluate = lambda step, metrics: evaluated(output.getvalue) if step else None
        evaluate = (lambda model: {"loss": 1.0}) if options else None
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            outcome = base.fit(accelerator, config, model, list(torch.randn(40, 500)), hooks=hooks, test=evaluate)
        problems = {path.name: checkpoint_format.find_problem(path) for path in checkpoint_format.list_checkpoints(folder)}
        partial = sorted(path.name for path in folder.iterdir() if path.name.startswith(".step"))
        return {"said": output.getvalue(), "whole": problems, "left": partial, "unsaved": outcome.unsaved}

    results = {}
    results["too small"] = fit(mount("too_small", "size=2m"))
    results["room for two"] = fit(mount("two", "size=8m"))

    freed = mount("freed", "size=12m")
    (freed / "filler").write_bytes(bytes(10 << 20))
    results["freed"] = fit(freed, at_step=lambda step: (freed / "filler").unlink() if step == 5 else None)

    def free_when_it_has_failed(said) -> None:
        while "the checkpoint of step 8 could not be written" not in said():
            time.sleep(0.01)
        (late / "filler").unlink()

    late = mount("late", "size=12m")
    (late / "filler").write_bytes(bytes(10 << 20))
    results["freed at the end"] = fit(late, evaluated=free_when_it_has_failed, keep_best=True, best_metric="loss", eval_every=100)
    results["freed at the end"]["best"] = json.loads((late / "best.json").read_text())

    for inodes in range(2, 9):  # one for the folder, and one for each file or folder of a checkpoint
        results[f"inodes {inodes}"] = fit(mount(f"inodes_{inodes}", f"size=100m,nr_inodes={inodes}"))

    filling = mount("filling", "size=10m")
    (filling / "here_before").write_bytes(bytes(3 << 20))
    filler = bytes(4 << 20)

    def fill() -> None:
        """Fill the disk, as another program could, while any checkpoint after the first is being written."""
        while True:
            if list(filling.glob(".step_*.partial")) and (filling / "step_00000002").exists():
                with contextlib.suppress(OSError):
                    (filling / "filler").write_bytes(filler)
                while list(filling.glob(".step_*.partial")):
                    time.sleep(0.0002)
                (filling / "filler").unlink()
            time.sleep(0.0002)

    threading.Thread(target=fill, daemon=True).start()
    results["filling"] = fit(filling)

    full_log = root / "full_log"
    full_log.mkdir()
    (full_log / "log.jsonl").symlink_to("/dev/full")
    results["log on a full disk"] = fit(full_log, standard=True)

    trains = str(Path(__file__).with_name("trains.py"))
    results["exit"] = {}
    read_only = mount("read_only", "size=10m")
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    started = {
        name: subprocess.Popen(
            [sys.executable, trains, "--output_dir", folder / "run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, folder in (("exit code", mount("exit_code", "size=80k")), ("read only", read_only))
    }
    for name, process in started.items():
        text = process.communicate()[0]
        results["exit"][name] = [process.returncode, text]
    Path(cfg.out).write_text(json.dumps(results))


if __name__ == "__main__":
    run(Config, main)
