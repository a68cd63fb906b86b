"""Save and resume runs whose model is sharded, whole or both, all in one launch. Write the results of --part to OUT as JSON."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import base

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.errors import UserError
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.process import ending, links, this_rank
from accel_ddp.saving import checkpoint_format
from accel_ddp.saving.pieces import file_name


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = option("", "file for the results", affects_result=False)
    part: str = option("two", "which runs: two (ranks), four, one or blocked", affects_result=False)
    blocked_by: str = option("", "FIFO at which the last rank waits in its second save", affects_result=False)
    steps: int = 4
    save_every: int = 2
    keep_last: int = 3
    global_batch_size: int = 8
    micro_batch_size: int = 2
    keep_gathered: str = "gradients"
    lr: float = 0.01
    check_every: int = 0  # the weights of ranks are not compared


FSDP, HSDP, DDP = ShardingPlan(), ShardingPlan(replicas=2), None


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    from accel_ddp.ranks.shards import full
    from accel_ddp.saving import pieces as parts
    from accel_ddp.saving import run_folder, state_tensors
    from accel_ddp.training import sharding

    accelerator = accel_ddp.start(cfg)
    root = Path(cfg.output_dir)

    class Layers(nn.Module):
        """A model with tied weights, a weight of one row, which one rank has not, numbers of rows that are not even, and a buffer."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
            self.tied = nn.Linear(3, 5, bias=False)
            self.tied.weight = self.first.weight
            self.last = nn.Linear(5, 1)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, x):
            y = self.first(x) + self.tied(x)
            for layer in self.layers:
                y = y + layer(y)
            return self.last(y) * self.scale

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Layers().double()

    def fit(folder: Path, plan: ShardingPlan | None, at_step=lambda step: None, **changes) -> dict:
        """Train, and return the first and the last step, the weights, the output, the error and the folder's files."""
        links.sharding = accelerator.sharding_plan = plan
        config = dataclasses.replace(cfg, output_dir=str(folder), **changes)
        model = build()
        seen: list[int] = []
        hook = accel_ddp.hooks.Hook()
        hook.on_update = lambda numbers, pace: (seen.append(numbers.step), at_step(numbers.step))
        torch.manual_seed(5)
        rows = list(torch.randn(40, 3, dtype=torch.float64))
        output, error, unsaved = io.StringIO(), "", ""
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                outcome = accel_ddp.fit(
                    accelerator, config, task=base.Task(), model=model, optimizer=accel_ddp.optim.build(model, config), hooks=[hook],
                    train=accel_ddp.TrainBatches(rows, torch.stack, "f"), files={"note.txt": b"of the user"},
                )  # fmt: skip
                unsaved = outcome.unsaved
            except UserError as problem:
                error = str(problem)
        ending.unsaved = ""
        weights = [full(p.detach()).reshape(-1) for p in model.parameters()]
        return {
            "from": seen[0] - 1 if seen else None, "to": seen[-1] if seen else None, "weights": torch.cat(weights).tolist(),
            "said": output.getvalue(), "error": error, "unsaved": unsaved,
            "left": sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [],
        }  # fmt: skip

    def copied(source: Path, name: str, change=lambda folder: None) -> Path:
        """Return a copy of a run to which the main rank has applied a change."""
        with accel_ddp.together("copy a run"):
            if this_rank.is_main:
                shutil.copytree(source, root / name)
                change(root / name)
        return root / name

    def until_step_2(folder: Path) -> None:
        shutil.rmtree(folder / "step_00000004")

    def digests_of_frozen() -> list[str]:
        """Return the digest of the weights below adapters of a whole and of a sharded model."""
        found = []
        for plan in (None, HSDP if cfg.part == "four" else FSDP):
            model = build().requires_grad_(False)
            model.peft_config = {}
            model.last.requires_grad_(True)
            if plan:
                sharding.shard(model, plan, accelerator.device)
            found.append(state_tensors.digest_of_frozen(model))
            found.append(",".join(state_tensors.to_save(model)))
        return found

    results: dict = {}
    if cfg.part == "two":
        results["straight"] = fit(root / "straight", FSDP)
        results["resumed"] = fit(copied(root / "straight", "resumed", until_step_2), FSDP, resume="auto")
        results["as DDP"] = fit(copied(root / "straight", "ddp", until_step_2), DDP, resume="auto")
        results["straight DDP"] = fit(root / "straight_ddp", DDP)
        results["DDP as FSDP"] = fit(copied(root / "straight_ddp", "fsdp", until_step_2), FSDP, resume="auto")
        results["frozen"] = digests_of_frozen()

        # Only the main rank sees the checkpoint: the folder is relative, and the other rank has another working directory.
        folder, before = copied(root / "straight", "seen_by_one", until_step_2), Path.cwd()
        elsewhere = root / f"rank_{this_rank.rank}"
        elsewhere.mkdir()
        os.chdir(folder if this_rank.is_main else elsewhere)
        parts.MAX_DELAY_OF_DISK = 0.5
        results["seen by one"] = fit(Path("."), FSDP, resume="auto")
        results["not shared"] = {"error": refusal(run_folder.require_shared, dataclasses.replace(cfg, output_dir="."), 1)}
        results["shared by the writers"] = {
            "error": refusal(run_folder.require_shared, dataclasses.replace(cfg, output_dir="."), 2)
        }
        os.chdir(before)

        results["other"] = fit(root / "other", FSDP, save_every=4, seed=1)
        part = file_name(1)
        changes = {
            "removed": lambda one: (one / "model" / part).unlink(),
            "truncated": lambda one: os.truncate(one / "optimizer" / part, 200),
            "flipped": lambda one: flip(one / "model" / part),
            "another run": lambda one: shutil.copy(root / "other" / "step_00000004" / "model" / part, one / "model" / part),
            "another step": lambda one: shutil.copy(
                one.parent / "step_00000002" / "optimizer" / part, one / "optimizer" / part
            ),
            "no manifest": lambda one: (one / "manifest.json").unlink(),
            "newer": newer,
        }  # fmt: skip
        for name, change in changes.items():
            folder = copied(
                root / "straight", name.replace(" ", "_"), lambda folder, change=change: change(folder / "step_00000004")
            )
            results[name] = fit(folder, FSDP, resume="auto")
        only = lambda folder: (shutil.rmtree(folder / "step_00000002"), flip(folder / "step_00000004" / "model" / part))
        folder = copied(root / "straight", "only", only)
        results["only damaged"] = fit(folder, FSDP, resume="auto")
        results["full disk"] = fit_with_full_disk(fit, root / "full")
        if this_rank.is_main:
            results["torch"] = read_with_torch(root / "straight" / "step_00000004", root / "consolidated")
    elif cfg.part == "four":
        straight = root.parent / "two" / "straight"
        results["as HSDP"] = fit(copied(straight, "hsdp", until_step_2), HSDP, resume="auto", micro_batch_size=1)
        results["again"] = fit(copied(root / "hsdp", "again", until_step_2), HSDP, resume="auto", micro_batch_size=1)
        results["on 4"] = fit(copied(straight, "fsdp", until_step_2), FSDP, resume="auto")
        results["frozen"] = digests_of_frozen()
    elif cfg.part == "one":
        straight = root.parent / "two" / "straight"
        results["as one"] = fit(copied(straight, "one", until_step_2), DDP, resume="auto")
    elif cfg.part == "blocked":
        if this_rank.rank == this_rank.num_ranks - 1:
            block_save(cfg.blocked_by, "step_00000004")
        fit(root, FSDP, at_step=lambda step: print(f"did step {step}", file=sys.__stdout__, flush=True), steps=6)
    everyone = [None] * this_rank.num_ranks
    if this_rank.num_ranks > 1:
        torch.distributed.all_gather_object(
            everyone, {name: one.get("error") for name, one in results.items() if isinstance(one, dict)}
        )
        results["errors"] = everyone
    if this_rank.is_main and cfg.out:
        Path(cfg.out).write_text(json.dumps(results))


def refusal(function, *arguments) -> str:
    """Return the message of the UserError that a call raises, or ""."""
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return ""


def flip(path: Path) -> None:
    values = bytearray(path.read_bytes())
    values[-5] ^= 1
    path.write_bytes(values)


def newer(one: Path) -> None:
    manifest = json.loads((one / "manifest.json").read_text())
    manifest["format"] = 3
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (one / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))


def fit_with_full_disk(fit, folder: Path) -> dict:
    """Train while the disk of the last rank is full, in its first and in its last save, until that is repeated."""
    left = [1, 1]

    def on_event(event: str, arguments: tuple) -> None:
        path = str(arguments[0]) if event == "open" else ""
        if str(folder) in path and path.endswith(file_name(1)) and this_rank.rank == 1 and "model/" in path:
            step = 0 if "step_00000002" in path else 1
            if left[step]:
                left[step] -= 1
                raise OSError(errno.ENOSPC, "No space left on device", path)

    sys.addaudithook(on_event)
    return fit(folder, ShardingPlan())


def block_save(fifo: str, name: str) -> None:
    """Let the thread that writes checkpoints wait at the FIFO before it opens a file of the checkpoint."""
    waits = [fifo]

    def on_event(event: str, arguments: tuple) -> None:
        if event == "open" and name in str(arguments[0]) and threading.current_thread().name.startswith("checkpoint"):
            while waits:
                print("blocked", file=sys.__stdout__, flush=True)
                os.close(os.open(waits.pop(), os.O_RDONLY))

    sys.addaudithook(on_event)


def read_with_torch(checkpoint: Path, out: Path) -> dict:
    """Return the weights as torch reads them: with the reader of torch.distributed.checkpoint, and consolidated into one file."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    from accel_ddp.saving.pieces import Pieces

    pieces = Pieces(checkpoint, checkpoint_format.MODEL)
    ours = {name: pieces.read(name) for name in pieces.tensors}
    theirs = {name: torch.full_like(tensor, -1) for name, tensor in ours.items()}
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(checkpoint / "model")), no_dist=True)
    out.mkdir()
    weights = {name: 1 for name, tensor in ours.items() if tensor.dim()}  # torch 2.13 consolidates scalars as zeros
    consolidate_safetensors_files(str(checkpoint / "model"), str(out), weights)
    whole = load_file(next(out.glob("*.safetensors")))
    return {
        "names": sorted(ours), "read": all(torch.equal(ours[name], theirs[name]) for name in ours),
        "consolidated": all(torch.equal(ours[name], whole[name]) for name in weights),
        "files": sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()),
    }  # fmt: skip


if __name__ == "__main__":
    run(Config, main)
