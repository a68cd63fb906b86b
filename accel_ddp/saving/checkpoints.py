"""What of a run is saved, when, and how it comes back: weights, optimizer, scaler and the step, nothing else.

Everything else (order of the data, learning rate, dropout) is a function of the step and the seed.
"""

import contextlib
import math
import re
import sys
import uuid
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from accel_ddp.ranks import world
from accel_ddp.saving import format
from accel_ddp.config import TrainConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.saving.format import MODEL, OPTIMIZER
from accel_ddp.saving.tensors import described, frozen, kept, put_back, refuse_another_model, taken, versions

Metrics = dict[str, float]


class Checkpoints:
    """The checkpoints of a run. Every rank has one; only the main rank writes, behind the back of training.

    A save copies the state into host memory, which is all that training waits for, and a thread writes it
    from there. That memory is about as large as the state; it is kept from save to save, on a GPU pinned.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        cfg: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        data: dict[str, Any] | None = None,
        total_steps: int = 0,
        files: dict[str, bytes] | None = None,
    ):
        self.accelerator, self.cfg, self.data, self.total_steps, self.files = accelerator, cfg, data, total_steps, files or {}
        self.model = accelerator.unwrap_model(model)
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper adds nothing that is saved
        self.folder = Path(cfg.output_dir)
        self.frozen = frozen(self.model)
        self.run_id = uuid.uuid4().hex
        self.evaluations: dict[int, Metrics] = {}  # of the whole run, also of its earlier lives
        self.ranking: list[int] = []  # steps by the metric of `--keep_best`, the best first
        self.newest: int | None = None  # the last step that was handed to the writer, or restored
        self.failed = ""  # why the newest state is not on the disk
        self._writer = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[futures.Future] = []
        self._host: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        self._committed: list[tuple[int, Path]] = []
        self._last: tuple[Any, ...] = ()  # what the writer was given last

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        """Also a run that fails does not end before the save that is in flight is whole."""
        if error is not None:
            with contextlib.suppress(Exception):
                self.wait()

    # ---- saving: on the main rank, no collectives, so that it may be called wherever one rank is alone

    def save(self, step: int, is_last: bool = False) -> None:
        """Hand the state after `step` updates to the writer. A save that fails is reported and does not end the run."""
        if self.newest == step and not self.failed:
            return
        if not self.accelerator.is_main_process:
            self.newest = step
            return
        # At most one in flight: its host memory is used again. The other ranks wait in the next reduction, which has a
        # timeout; after the last step they wait without one.
        if not self.wait(None if is_last else self.cfg.ddp_timeout_seconds / 2):
            print(f"the checkpoint before is still being written: that of step {step} is left out.", file=sys.stderr)
            return
        self.newest = step
        weights, optimizer, values = taken(self.model, self.optimizer)
        copied = self._to_host({MODEL: weights, OPTIMIZER: optimizer})
        scaler = self.accelerator.scaler
        run = {
            "recipe": Path(sys.argv[0]).name, "run": self.run_id, "step": step, "total_steps": self.total_steps,
            "data": self.data, "frozen": self.frozen,
            "num_ranks": self.accelerator.num_processes, "precision": self.accelerator.mixed_precision,
            "config": as_plain_dict(self.cfg), "versions": versions(), "host": world.HOST,
            "optimizer": type(self.optimizer).__name__, "values": values,
            "on_host": [name for name, tensor in optimizer.items() if tensor.device.type == "cpu"],
            "scaler": scaler.state_dict() if scaler else None,
            "evaluations": {str(at): metrics for at, metrics in self.evaluations.items()},
        }  # fmt: skip
        self.failed = ""
        self._last = (self.folder / f"step_{step:08d}", run, self._host, copied)
        self._pending.append(self._writer.submit(self._write, *self._last))

    def _to_host(self, groups: dict[str, dict[str, Tensor]]) -> Any:
        on_gpu = self.accelerator.device.type == "cuda"
        for group, tensors in groups.items():
            host = {}
            for name, tensor in tensors.items():
                there = self._host[group].get(name)
                if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
                    there = _host_memory(tensor, pinned=on_gpu and tensor.is_cuda)
                # On a GPU the copies stand in its queue between this update and the next; the host does not wait for them.
                host[name] = there.copy_(tensor.detach(), non_blocking=True)
            self._host[group] = host
        if not on_gpu:
            return None
        copied = torch.cuda.Event()
        copied.record()
        return copied

    def _write(self, path: Path, run: dict[str, Any], tensors: dict[str, dict[str, Tensor]], copied: Any) -> None:
        """In the writer's thread."""
        world.is_writing = True  # a rank that ends because another failed waits for it
        try:
            if copied is not None:
                copied.synchronize()
            format.write(path, tensors, run, self.files)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self.failed = f"the checkpoint of step {run['step']} could not be written on {world.HOST}: {error.strerror}{where}"
            there = ", ".join(p.name for p in format.all_of(self.folder)) or "none"
            print(f"{self.failed}. Training goes on; checkpoints that are there: {there}.", file=sys.stderr, flush=True)
            return
        finally:
            world.is_writing = False
        self.failed = ""
        self._committed.append((run["step"], path))
        with contextlib.suppress(OSError):  # what cannot be removed now is removed after the next save
            format.prune(self.folder, self.cfg.keep_last, self.best())

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Remember the metrics of a step; with `--keep_best`, save and mark that step if no other was better."""
        self.evaluations[step] = metrics
        self.rank()
        if self.ranking[:1] == [step]:
            self.save(step)
        if self.accelerator.is_main_process:
            self._pending.append(self._writer.submit(self._write_evaluations, dict(self.evaluations)))

    def best(self) -> int | None:
        """The best step that has a checkpoint on this disk: the save of a better one may have failed."""
        return next((step for step in self.ranking if (self.folder / f"step_{step:08d}").is_dir()), None)

    def rank(self) -> None:
        if self.cfg.keep_best:
            for step, metrics in self.evaluations.items():
                if self.cfg.keep_best not in metrics:
                    raise UserError(f"--keep_best {self.cfg.keep_best}: step {step} measured {', '.join(metrics)}.")
            sign = -1 if higher_is_better(self.cfg.keep_best) else 1
            values = {step: sign * metrics[self.cfg.keep_best] for step, metrics in self.evaluations.items() if step}
            self.ranking = sorted(values, key=lambda step: (math.isnan(values[step]), values[step], step))

    def _write_evaluations(self, evaluations: dict[int, Metrics]) -> None:
        """In the writer's thread, after the save of the same step."""
        best = self.best()
        try:
            format.write_json(self.folder / "evaluations.json", evaluations)
            if best in evaluations:
                what = {"step": best, "metric": self.cfg.keep_best, "value": evaluations[best][self.cfg.keep_best]}
                format.write_json(self.folder / "best.json", {**what, "checkpoint": f"step_{best:08d}"})
        except OSError as error:
            print(f"evaluations.json could not be written on {world.HOST}: {error.strerror}.", file=sys.stderr, flush=True)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the writer has nothing left to do; False if that takes longer."""
        _, late = futures.wait(self._pending, timeout)
        if late:
            return False
        while self._pending:
            self._pending.pop(0).result()
        return True

    def committed(self) -> list[tuple[int, Path]]:
        """(step, folder) of checkpoints that have come to exist since this was asked last; on the main rank only."""
        return [self._committed.pop(0) for _ in range(len(self._committed))]  # the writer may add one meanwhile

    def close(self) -> str:
        """Wait for the last save on every rank; what went wrong with it, or nothing. A collective."""
        self.wait()
        if self.failed:  # the state is still in host memory, and someone may have made room
            self._write(*self._last)
        self._writer.shutdown()
        return world.agreed(self.failed, what="write the last checkpoint")

    # ---- restoring: every rank together

    def restore(self) -> int:
        """Load what `--resume` names; the step to go on from, 0 where there is nothing.

        Rank 0 decides and every rank follows. One rank that holds the files reads them and sends the state to all: disks
        of nodes need not be shared, and no two ranks can go on from different states.
        """
        if not self.cfg.resume:
            return 0
        chosen = self._choose()
        if chosen is None:
            world.say(f"--resume: there is no checkpoint in {self.folder} yet; the run starts at step 0.")
            return 0
        source, path = chosen
        with world.together("read the checkpoint"):
            run = format.run_of(path) if source == world.RANK else None
        run = world.agreed(run, source)
        evaluations = format.read_json(path.parent / "evaluations.json") if source == world.RANK else None
        evaluations = world.agreed(evaluations, source) or {}
        refuse_changed_options(self.cfg, run, data=self.data, precision=self.accelerator.mixed_precision)
        if self.cfg.micro_batch_size == "auto" and run["num_ranks"] == self.accelerator.num_processes:
            found = run["config"]["micro_batch_size"]  # what was found then: the same to the last bit
            if found != "auto" and self.cfg.split(run["num_ranks"])[0] % found == 0:
                self.cfg.micro_batch_size = found
                world.say(f"--micro_batch_size auto: {found}, as before")
        self._load(path, run, source)
        self.run_id = run["run"]
        if source == 0 and path.parent.resolve() == self.folder.resolve():
            self.newest = run["step"]  # elsewhere: a stop right after it saves it in the run's own folder
        known = {int(at): metrics for at, metrics in {**evaluations, **run["evaluations"]}.items()}
        self.evaluations = {at: known[at] for at in sorted(known) if at <= run["step"]}
        self.rank()
        if world.LOCAL_RANK == 0:
            for later in format.all_of(self.folder):
                if format.step_of(later) > run["step"]:  # the newest must be the one that was gone on from
                    self._set_aside(later, "later")
        self._say_what_is_new(path, run, source)
        return run["step"]

    def _choose(self) -> tuple[int, Path] | None:
        """(rank that reads it, its path): the newest whole checkpoint on any disk. Ranks agree on each word of it."""
        mine = []
        if world.LOCAL_RANK == 0:  # one look per node
            for path in format.candidates(self.cfg):
                run = format.run_of(path)
                mine.append((format.step_of(path) if format.is_step(path) else run.get("step", 0), str(path), run.get("run")))
        shares = [(host, share) for host, share in world.gathered((world.HOST, mine)) or []]
        holders = [(host, {run for *_, run in share if run}) for host, share in shares]
        holders = [(host, runs) for host, runs in holders if runs]
        strangers = [host for host, runs in holders if not runs & holders[0][1]]
        if world.agreed(strangers):
            strangers = world.agreed([holders[0][0], *strangers] if holders else None)
            raise UserError(
                f"--resume: the nodes {' and '.join(strangers)} have checkpoints of different runs in {self.folder}. Give the "
                "path of the right one, --resume PATH, or remove those of the other run."
            )
        options = [(step, rank, place) for rank, (_, share) in enumerate(shares) for step, place, _ in share]
        options = world.agreed(sorted(options, key=lambda o: (-o[0], o[1])))
        if not options and self.cfg.resume != "auto":
            raise UserError(f"--resume {self.cfg.resume}: no node has a checkpoint there.")
        damage = []
        for _step, rank, place in options:
            with world.together("check the checkpoint"):
                problem = format.problem(Path(place)) if rank == world.RANK else ""
            problem = world.agreed(problem, rank)
            if not problem:
                for of, damaged, why in damage:
                    # Not where another node finds the same path whole, and not because a disk could not be read for once.
                    if of == world.RANK and damaged != place and "cannot be read" not in why:
                        self._set_aside(Path(damaged), "damaged")
                return rank, Path(place)
            damage.append((rank, place, problem))
            host = world.agreed(world.HOST, rank)
            world.say(f"--resume: {place} on {host} cannot be used: {problem}.")
        if damage:
            raise UserError(
                f"--resume: no whole checkpoint is left; {damage[0][1]}: {damage[0][2]}. Copy a whole one there, or start anew "
                "in another --output_dir."
            )
        return None

    def _set_aside(self, path: Path, why: str) -> None:
        """Only in the run's own folder, which is locked; what lies elsewhere is left as it is."""
        if path.parent.resolve() == self.folder.resolve():
            with contextlib.suppress(OSError):  # another node shares the disk and was faster; or nothing can be renamed there
                print(f"{world.HOST}: {path.name} is set aside as {format.set_aside(path, why).name}.", flush=True)

    def _load(self, path: Path, run: dict[str, Any], source: int) -> None:
        reads = source == world.RANK
        weights = kept(self.model)
        files = {name: safe_open(path / name, framework="pt") if reads else None for name in (MODEL, OPTIMIZER)}
        there = {
            file: {name: described(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
            for file, opened in files.items() if opened
        }  # fmt: skip
        there = world.agreed(there, source)
        refuse_another_model({name: ([*t.shape], t.dtype) for name, t in weights.items()}, there[MODEL], path)

        if run.get("frozen", "") != self.frozen:
            raise UserError(
                f"--resume: the adapters in {path} were trained on other weights than --model has now. Give the model of the "
                f"run: {run['config'].get('model')}."
            )
        device = self.accelerator.device

        def received(file: str, name: str) -> Tensor:
            shape, dtype = there[file][name]
            tensor = files[file].get_tensor(name).to(device) if reads else torch.empty(shape, dtype=dtype, device=device)
            if world.NUM_RANKS > 1:
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source)  # as bytes: gloo does not know every type
            return tensor

        with torch.no_grad():
            for name in sorted(weights):
                weights[name].copy_(received(MODEL, name))
        if run["optimizer"] != type(self.optimizer).__name__:  # with --allow_config_change
            world.say(f"  the optimizer starts anew: it was {run['optimizer']}, and is {type(self.optimizer).__name__}")
            return
        state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in run["values"].items()}
        on_host = set(run["on_host"])
        for full in sorted(there[OPTIMIZER]):
            name, _, key = full.rpartition("/")
            tensor = received(OPTIMIZER, full)
            state.setdefault(name, {})[key] = tensor.cpu() if full in on_host else tensor
        put_back(self.optimizer, self.model, state)
        if self.accelerator.scaler and run["scaler"]:
            self.accelerator.scaler.load_state_dict(run["scaler"])

    def _say_what_is_new(self, path: Path, run: dict[str, Any], source: int) -> None:
        world.say(f"resumed at step {run['step']} from {path}" + (f" of rank {source}" if source else ""))
        then, now = run["num_ranks"], self.accelerator.num_processes
        if then != now:
            world.say(
                f"  saved on {then} ranks, now {now}: the same batches in the same order; weights as before within rounding"
            )
        if run["config"]["micro_batch_size"] != self.cfg.micro_batch_size:
            world.say("  another --micro_batch_size: the same result within rounding, but for what dropout draws")
        for name in ("packing", "compile"):
            if run["config"].get(name, "off") != getattr(self.cfg, name):
                world.say(f"  another --{name}: the same result within rounding, but for what dropout draws")
        if self.cfg.comm_hook == "powersgd":
            world.say("  --comm_hook powersgd: its memory of errors starts anew, so this is not bit-identical to going on")
        newer = [f"{n} {run['versions'].get(n)} then, {v} now" for n, v in versions().items() if run["versions"].get(n) != v]
        if newer:
            world.say(f"  not bit-identical where it matters: {'; '.join(newer)}")


def refuse_changed_options(
    cfg: TrainConfig, run: dict[str, Any], data: dict[str, Any] | None = None, precision: str = ""
) -> None:
    """A UserError that names what differs from the run that was saved and would change the result.

    Without `data`, which are not loaded when a run starts, the options that name them are not compared yet.
    """
    then, now = run.get("config", {}), as_plain_dict(cfg)
    free = {*cfg.harmless, "mixed_precision"}
    if cfg.lr_schedule == "constant" and not cfg.warmup_ratio:
        free |= {"steps", "epochs"}  # the learning rate does not depend on the end
    before = run.get("data") or {}
    if data is None or (data["fingerprint"] and data["fingerprint"] == before.get("fingerprint")):
        free |= {"dataset", "train_file", "train_split"}  # places: what lies there is compared, where it can be
    changed = [
        f"--{name}: {then[name]!r} then, {value!r} now"
        for name, value in now.items() if name in then and name not in free and then[name] != value
    ]  # fmt: skip
    if precision and precision != run.get("precision"):
        changed.append(f"--mixed_precision: {run.get('precision')!r} then, {precision!r} now")
    if data and before and data != before:
        changed.append(f"the training data: {before['items']:,} items then, {data['items']:,} now, or of other content")
    if not changed:
        return
    if cfg.allow_config_change:
        world.say(f"--allow_config_change: going on with {'; '.join(changed)}")
        return
    raise UserError(
        f"--resume: the run was saved with other options, and these change its result: {'; '.join(changed)}. Use the old ones "
        "again, or add --allow_config_change to go on with the new ones."
    )


def _host_memory(like: Tensor, pinned: bool) -> Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
    except RuntimeError:  # a limit on locked memory: slower, but a save all the same
        return torch.empty(like.shape, dtype=like.dtype)


def higher_is_better(metric: str) -> bool:
    lower = {"loss", "perplexity", "ppl", "error", "wer", "cer", "ter", "mse", "rmse", "mae", "nll", "fid", "distance"}
    return not lower & set(re.split("[^a-z]+", metric.lower()))
