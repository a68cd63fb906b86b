"""Checkpoints that were damaged, and options that were changed: what a resumed run says and does. One process for all."""

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

import accel_ddp
from accel_ddp.config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.errors import UserError


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    steps: int = 6
    save_every: int = 2
    keep_last: int = 3
    eval_every: int = 2
    global_batch_size: int = 4
    micro_batch_size: int = 2
    lr: float = 0.01


class Bomb:
    def __reduce__(self):
        return os.mkdir, (Bomb.place,)


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    accelerator = accel_ddp.start(cfg)
    root = Path(cfg.output_dir)
    scores = {2: 0.5, 4: 0.9, 6: 0.7}

    def fit(folder: Path, width: int = 4, fails: bool = False, items: int = 40, fingerprint: str = "f", **changes):
        """(step it went on from, where it ended, what was said, error)"""
        config = dataclasses.replace(cfg, output_dir=str(folder), **changes)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        seen = []
        hook = accel_ddp.hooks.Hook()
        hook.on_update = lambda numbers, rate: seen.append(numbers.step)
        hooks = [hook, *([accel_ddp.hooks.EarlyStopping(config)] if config.early_stopping_patience else [])]
        torch.manual_seed(5)
        rows = list(torch.randn(items, 3))
        said, error = io.StringIO(), ""

        def at(model):
            if fails:
                raise UserError("this evaluation fails")
            return {"accuracy": scores.get(seen[-1], 0.0) if seen else 0.0}

        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                accel_ddp.fit(
                    accelerator, config, model=model, optimizer=accel_ddp.optim.build(model, config), count=len, evaluate=at,
                    train=accel_ddp.TrainBatches(rows, torch.stack, fingerprint), hooks=hooks,
                    loss_sum=lambda model, batch: model(batch).square().sum(), files={"note.txt": b"of the user"},
                )  # fmt: skip
            except (UserError, accel_ddp.ranks.failures.Stopped) as problem:
                error = str(problem)
        left = sorted(p.name for p in folder.iterdir())
        end = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        return {
            "from": seen[0] - 1 if seen else None,
            "to": seen[-1] if seen else None,
            "end": end,
            "said": said.getvalue(),
            "error": error,
            "left": left,
        }

    results = {"straight": fit(root / "straight", keep_best="accuracy")}
    whole = root / "straight"

    def damaged(name: str, change, **changes):
        folder = root / name.replace("/", "_").replace(" ", "_")
        shutil.copytree(whole, folder)
        change(folder / "step_00000006")
        results[name] = fit(folder, **{"resume": "auto", **changes})

    damaged("undamaged", lambda path: None)
    files = ["model.safetensors", "optimizer.safetensors", "run.json", "manifest.json", "files/note.txt"]
    for file in files:
        size = (whole / "step_00000006" / file).stat().st_size

        def flip(path, file=file, size=size):
            content = bytearray((path / file).read_bytes())
            bit = random.randrange(size * 8)
            content[bit // 8] ^= 1 << bit % 8
            (path / file).write_bytes(content)

        for i in range(5):
            damaged(f"flip {file} {i}", flip)
        damaged(f"truncate {file}", lambda path, file=file, size=size: os.truncate(path / file, size // 2))
        damaged(f"empty {file}", lambda path, file=file: os.truncate(path / file, 0))
        damaged(f"remove {file}", lambda path, file=file: (path / file).unlink())
    damaged("empty folder", lambda path: (shutil.rmtree(path), path.mkdir()))
    damaged("half written", lambda path: path.rename(path.with_name(f".{path.name}.partial")))

    def all_of_them(path):
        for one in path.parent.glob("step_*"):
            os.truncate(one / "model.safetensors", 10)

    damaged("all damaged", all_of_them)
    damaged("two damaged", lambda path: [os.truncate(path.parent / n / "run.json", 9) for n in (path.name, "step_00000004")])

    def clocks(path):
        for i, one in enumerate(sorted(path.parent.glob("step_*"), reverse=True)):
            os.utime(one, (time.time() + (i - 1) * 1e7,) * 2)

    damaged("clocks", clocks)

    def signed_anew(path, name: str, content: bytes):
        """As someone would who wants a changed file to be taken for whole."""
        (path / name).write_bytes(content)
        manifest = json.loads((path / "manifest.json").read_text())
        if name in manifest["files"]:
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        del manifest["sha256"]
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))

    Bomb.place = str(root / "exploded")
    for file in ("model.safetensors", "optimizer.safetensors", "run.json"):
        damaged(f"pickle {file}", lambda path, file=file: signed_anew(path, file, pickle.dumps(Bomb())))
    results["exploded"] = (root / "exploded").exists()

    def newer(path):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["format"] = 2
        (path / "manifest.json").write_text(json.dumps(manifest))
        signed_anew(path, "none", b"")

    damaged("newer", newer)
    damaged("another model", lambda path: None, width=5)
    unchanged = lambda path: shutil.rmtree(path)  # at step 4
    for name, changes in {
        "lr": {"lr": 0.02}, "seed": {"seed": 1}, "batch": {"global_batch_size": 8}, "steps": {"steps": 8},
        "data": {"fingerprint": "g"}, "fewer data": {"items": 39}, "log_every": {"log_every": 1},
        "micro": {"micro_batch_size": 4},
    }.items():  # fmt: skip
        damaged(f"changed {name}", unchanged, **changes)
    damaged("allowed lr", unchanged, lr=0.02, allow_config_change=True)
    results["path of a run"] = fit(root / "elsewhere", resume=str(whole)) if (root / "elsewhere").mkdir() is None else None
    results["no path"] = fit(root / "elsewhere", resume=str(root / "nowhere"))
    results["damaged path"] = fit(root / "elsewhere", resume=str(root / "truncate_run.json" / "damaged_step_00000006"))
    damaged("back to 2", lambda path: None, resume=str(root / "back_to_2" / "step_00000002"))
    (root / "patience").mkdir()
    patience = {"early_stopping_patience": 2, "best_metric": "accuracy", "steps": 12, "eval_every": 2}
    scores.update({2: 0.9, 4: 0.5, 6: 0.6, 8: 0.7, 10: 0.8})  # worse than at step 2 twice after step 6, whoever remembers it
    fit(root / "patience", stop_after=4, **patience)
    results["patience"] = fit(root / "patience", resume="auto", **patience)
    scores.update({2: 0.5, 4: 0.9, 6: 0.7})
    for name in ("first", "again"):  # the same command twice, as a requeued job gives it
        (root / "twice").mkdir(exist_ok=True)
        results[f"path {name}"] = fit(root / "twice", resume=str(whole / "step_00000002"), stop_after={"first": 4}.get(name, 0))
    damaged("allowed optimizer", unchanged, optimizer="sgd", allow_config_change=True)
    (root / "fails").mkdir()
    # That after step 2, while 60 MB are written, which takes a moment.
    results["evaluation fails"] = fit(root / "fails", width=1_000_000, fails=True, eval_first=False)
    (root / "nan").mkdir()
    scores.update({2: float("nan")})
    fit(root / "nan", keep_best="accuracy")
    results["best beside nan"] = json.loads((root / "nan" / "best.json").read_text())
    scores.update({2: 0.5})
    (root / "pruned").mkdir()
    results["pruned"] = fit(root / "pruned", keep_last=2, save_every=1, eval_every=1, keep_best="accuracy", steps=6)
    results["best"] = json.loads((root / "pruned" / "best.json").read_text())
    Path(cfg.out).write_text(json.dumps(results))


if __name__ == "__main__":
    run(Config, main)
