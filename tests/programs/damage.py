"""Resume runs from damaged checkpoints and with changed options, all in one process. Write the results to OUT as JSON."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import base

import accel_ddp
from accel_ddp.entry import run
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import Exit, Moment, ending


@dataclass(kw_only=True)
class Config(base.Config):
    save_every: int = 2
    keep_last: int = 3
    eval_every: int = 2
    global_batch_size: int = 4
    micro_batch_size: int = 2
    lr: float = 0.01


class Bomb:
    """An object whose pickle creates a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (Bomb.folder,)


def main(cfg: Config) -> None:
    import numpy as np
    import torch
    from torch import nn

    accelerator = accel_ddp.start(cfg)
    root = Path(cfg.output_dir)
    scores = {2: 0.5, 4: 0.9, 6: 0.7}

    def fit(folder: Path, width: int = 4, fails: bool = False, items: int = 40, fingerprint: str = "f", measure=None, **changes):
        """Train, and return the first and the last step, a hash of the weights, the output, the error and the folder's files."""
        config = dataclasses.replace(cfg, output_dir=str(folder), **changes)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        seen = []
        hook = accel_ddp.hooks.Hook()
        hook.on_update = lambda numbers, rate: seen.append(numbers.step)
        hooks = [hook, *([accel_ddp.hooks.EarlyStopping(config)] if config.early_stopping_patience else [])]
        torch.manual_seed(5)
        rows = list(torch.randn(items, 3))
        output, error = io.StringIO(), ""

        def evaluate(model):
            if fails:
                raise UserError("this evaluation fails")
            value = scores.get(seen[-1], 0.0) if seen else 0.0
            return measure(value) if measure else {"accuracy": value}

        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                base.fit(
                    accelerator, config, model, rows, train=accel_ddp.TrainBatches(rows, torch.stack, fingerprint), hooks=hooks,
                    test=evaluate, files={"note.txt": b"of the user"},
                )  # fmt: skip
            except (UserError, accel_ddp.ranks.failures.Stopped) as problem:
                error = str(problem)
                ending.run(Moment.SAVE, Exit.FAILED)  # as at the end of a process that failed
        left = sorted(p.name for p in folder.iterdir())
        end = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        return {
            "from": seen[0] - 1 if seen else None,
            "to": seen[-1] if seen else None,
            "end": end,
            "said": output.getvalue(),
            "error": error,
            "left": left,
        }

    results = {"straight": fit(root / "straight", keep_best=True, best_metric="accuracy:max")}
    complete_run = root / "straight"

    def resume_after(name: str, change, **changes):
        """Copy the complete run, apply `change` to the checkpoint of step 6, resume, and store the result."""
        folder = root / name.replace("/", "_").replace(" ", "_")
        shutil.copytree(complete_run, folder)
        change(folder / "step_00000006")
        results[name] = fit(folder, **{"resume": "auto", **changes})

    resume_after("undamaged", lambda path: None)
    files = ["model.safetensors", "optimizer.safetensors", "run.json", "manifest.json", "files/note.txt"]
    for file in files:
        size = (complete_run / "step_00000006" / file).stat().st_size

        def flip(path, file=file, size=size):
            content = bytearray((path / file).read_bytes())
            bit = random.randrange(size * 8)
            content[bit // 8] ^= 1 << bit % 8
            (path / file).write_bytes(content)

        for i in range(5):
            resume_after(f"flip {file} {i}", flip)
        resume_after(f"truncate {file}", lambda path, file=file, size=size: os.truncate(path / file, size // 2))
        resume_after(f"empty {file}", lambda path, file=file: os.truncate(path / file, 0))
        resume_after(f"remove {file}", lambda path, file=file: (path / file).unlink())
    resume_after("empty folder", lambda path: (shutil.rmtree(path), path.mkdir()))
    resume_after("half written", lambda path: path.rename(path.with_name(f".{path.name}.partial")))

    def truncate_all(path):
        for one in path.parent.glob("step_*"):
            os.truncate(one / "model.safetensors", 10)

    resume_after("all damaged", truncate_all)
    resume_after("two damaged", lambda path: [os.truncate(path.parent / n / "run.json", 9) for n in (path.name, "step_00000004")])

    def reverse_times(path):
        """Give later checkpoints earlier modification times."""
        for i, one in enumerate(sorted(path.parent.glob("step_*"), reverse=True)):
            os.utime(one, (time.time() + (i - 1) * 1e7,) * 2)

    resume_after("clocks", reverse_times)

    def write_and_sign(path, name: str, content: bytes):
        """Write a file and update the manifest, so that the changed checkpoint passes all checks."""
        (path / name).write_bytes(content)
        manifest = json.loads((path / "manifest.json").read_text())
        if name in manifest["files"]:
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        del manifest["sha256"]
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))

    Bomb.folder = str(root / "exploded")
    for file in ("model.safetensors", "optimizer.safetensors", "run.json"):
        resume_after(f"pickle {file}", lambda path, file=file: write_and_sign(path, file, pickle.dumps(Bomb())))
    results["exploded"] = (root / "exploded").exists()

    def set_newer_format(path):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["format"] = 3
        (path / "manifest.json").write_text(json.dumps(manifest))
        write_and_sign(path, "none", b"")

    resume_after("newer", set_newer_format)
    resume_after("another model", lambda path: None, width=5)
    remove_last = lambda path: shutil.rmtree(path)  # the run resumes at step 4
    for name, changes in {
        "lr": {"lr": 0.02}, "seed": {"seed": 1}, "batch": {"global_batch_size": 8}, "steps": {"steps": 5},
        "data": {"fingerprint": "g"}, "fewer data": {"items": 39}, "log_every": {"log_every": 1},
        "micro": {"micro_batch_size": 4},
    }.items():  # fmt: skip
        resume_after(f"changed {name}", remove_last, **changes)
    resume_after("allowed lr", remove_last, lr=0.02, allow_config_change=True)
    # Without --steps, 40 items in steps of 4 items are 10 steps per epoch.
    for name, changes in {
        "longer": {"steps": 8}, "longer in epochs": {"steps": 0, "epochs": 0.8}, "longer in two parts": {"steps": 8, "stop_after": 7},
    }.items():  # fmt: skip
        resume_after(name, lambda path: None, **changes)
    folder = root / "longer_in_two_parts"
    results["longer, second part"] = fit(folder, resume="auto", steps=8)
    results["longer, then the old command"] = fit(folder, resume="auto")
    results["longer from step 4"] = fit(root / "longer_from_4", resume=str(complete_run / "step_00000004"), steps=8)
    results["path of a run"] = fit(root / "elsewhere", resume=str(complete_run)) if (root / "elsewhere").mkdir() is None else None
    results["no path"] = fit(root / "elsewhere", resume=str(root / "nowhere"))
    results["damaged path"] = fit(root / "elsewhere", resume=str(root / "truncate_run.json" / "damaged_step_00000006"))
    resume_after("back to 2", lambda path: None, resume=str(root / "back_to_2" / "step_00000002"))
    (root / "patience").mkdir()
    patience = {"early_stopping_patience": 2, "best_metric": "accuracy:max", "steps": 12, "eval_every": 2}
    # Values rise again after step 4, so the resumed run stops at step 6 only if it restores the best value, that of step 2.
    scores.update({2: 0.9, 4: 0.5, 6: 0.6, 8: 0.7, 10: 0.8})
    fit(root / "patience", stop_after=4, **patience)
    results["patience"] = fit(root / "patience", resume="auto", **patience)
    scores.update({2: 0.5, 4: 0.9, 6: 0.7})
    for name in ("first", "again"):  # the same command twice, as in a requeued job
        (root / "twice").mkdir(exist_ok=True)
        results[f"path {name}"] = fit(
            root / "twice", resume=str(complete_run / "step_00000002"), stop_after={"first": 4}.get(name, 0)
        )
    resume_after("allowed optimizer", remove_last, optimizer="sgd", allow_config_change=True)
    (root / "fails").mkdir()
    # The evaluation after step 2 fails while 60 MB are being written.
    results["evaluation fails"] = fit(root / "fails", width=1_000_000, fails=True, eval_first=False)
    (root / "nan").mkdir()
    scores.update({2: float("nan")})
    fit(root / "nan", keep_best=True, best_metric="accuracy:max")
    results["best beside nan"] = json.loads((root / "nan" / "best.json").read_text())
    scores.update({2: 0.5})
    (root / "pruned").mkdir()
    results["pruned"] = fit(
        root / "pruned", keep_last=2, save_every=1, eval_every=1, keep_best=True, best_metric="accuracy:max", steps=6
    )
    results["best"] = json.loads((root / "pruned" / "best.json").read_text())
    (root / "best_elsewhere").mkdir()
    other = {"keep_best": True, "best_metric": "accuracy:max", "resume": str(root / "pruned" / "step_00000005")}
    results["best is elsewhere"] = fit(root / "best_elsewhere", steps=6, **other)

    def best_of(name: str, metric: str, measure, values=(0.5, 0.9, 0.7), **changes):
        """Run with --keep_best in a folder of its own. Store the result and best.json."""
        (root / name).mkdir(exist_ok=True)
        scores.update(zip((2, 4, 6), values))
        results[name] = fit(root / name, keep_best=True, best_metric=metric, measure=measure, **changes)
        file = root / name / "best.json"
        results[name]["best"] = json.loads(file.read_text()) if file.exists() else None

    number = lambda kind: lambda value: {"brier": kind(value)}
    best_of("lower is better", "brier:min", number(np.float32))
    best_of("tensor", "brier:max", number(torch.tensor))
    best_of("whole number", "brier:min", number(lambda value: np.int64(10 * value)))
    best_of("truth", "brier:max", number(lambda value: np.bool_(value > 0.8)))
    best_of("equal", "brier:max", number(float), (0.7, 0.9, 0.9))
    best_of("never a number", "brier:min", number(float), (float("nan"),) * 3)
    best_of("misspelt", "brierr:min", number(float))
    best_of("no direction", "brier", number(float))
    for value in ([0.1, 0.2], "0.5", None, 1j, {"a": 1}):
        best_of(f"refused {value}", "brier:min", lambda _, value=value: {"loss": 0.5, "brier": value})
    best_of("refused dictionary", "brier:min", lambda value: value)
    best_of("refused name", "brier:min", lambda value: {"brier": value, "step": 3})
    # Evaluations before the resume have no brier, and run.json has a metric as --keep_best, as older versions wrote it.
    (root / "older").mkdir()
    fit(root / "older", stop_after=4)
    run = json.loads((root / "older" / "step_00000004" / "run.json").read_text())
    run["config"] |= {"keep_best": "accuracy", "best_metric": "loss"}
    write_and_sign(root / "older" / "step_00000004", "run.json", json.dumps(run).encode())
    best_of("older", "brier:min", lambda value: {"accuracy": 0.0, "brier": value}, resume="auto")
    Path(cfg.out).write_text(json.dumps(results))


if __name__ == "__main__":
    run(Config, main)
