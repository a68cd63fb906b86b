"""The saves of a run in the background: weights, optimizer, loss scaler and the step.

Nothing else needs to be saved, because data order, learning rate and dropout are functions of the step and the seed.
"""

import contextlib
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.config.choices import KEPT, keep, reasons
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.phases import SAVE
from accel_ddp.ranks.agreement import REPORT_EVERY, broadcast_object, gather_everywhere, print_on_main, together
from accel_ddp.ranks.process import Moment, ending, this_rank
from accel_ddp.ranks.reporting import warn
from accel_ddp.ranks.shards import is_first_copy, is_sharded, local, region
from accel_ddp.ranks.team import Team
from accel_ddp.records.redaction import redact_values
from accel_ddp.saving import checkpoint_format, pieces, restart_record, resume
from accel_ddp.saving.checkpoint_format import MODEL, OPTIMIZER
from accel_ddp.saving.state_tensors import EMA, OUTER, capture, digest_of_frozen, options_of, own_pieces, to_save, versions

Metrics = dict[str, float]

MAX_WAIT_OF_FAILED = 20  # seconds


class Checkpoints:
    """The checkpoints of a run. Every rank has this object. Only rank 0 writes, or each rank its part of a sharded model.

    A save copies the state into host memory, which is all that training waits for. A thread writes it from there. The host
    memory is about as large as the state. It is reused by the next save, and pinned on a GPU.
    """

    def __init__(
        self, accelerator: Accelerator, cfg: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, *,
        data: dict[str, Any] | None = None, total_steps: int = 0, files: dict[str, bytes] | None = None,
        averages: Callable[[], dict[str, Tensor]] = dict, momentum: dict[str, Tensor] | None = None,
        states: Callable[[], Iterable[str]] = lambda: ("",), before_save: Callable[[int], None] = lambda step: None,
        team: Team | None = None,
    ):  # fmt: skip
        """`data` identifies the training data, and `files` are stored in every checkpoint for its export.

        `averages()` are the averages of weights by name, always in the same memory (see `training.ema`), and `momentum` belongs to the
        weights of local workers (see `engine.local_steps`). Both are saved and restored in place. `states` lets the optimizer have
        the state of each worker of this rank in turn, and yields what the names of its tensors end with.

        `before_save` is called on every rank with the step of each save. If it raises an error, nothing is saved. `team` are the ranks
        that compute a step; default: all.
        """
        self.accelerator, self.cfg, self.data, self.total_steps, self.files = accelerator, cfg, data, total_steps, files or {}
        self.model, self.team = model, team or Team.of(accelerator)  # without DDP
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no state of its own
        self.folder = Path(cfg.output_dir)
        self.built = options_of(self.optimizer)
        self.averages = averages
        self.kept = {f"{name}/{EMA}": average for name, average in averages().items()}
        self.kept |= {f"{name}/{OUTER}": one for name, one in (momentum or {}).items()}
        self.states = states
        self.more: Callable[[], dict[str, Any]] = dict  # for run.json: the place in data that are read in order, shares
        self.frozen = digest_of_frozen(self.model)
        self.run_id = uuid.uuid4().hex
        self.evaluations: dict[int, Metrics] = {}  # of the whole run, including those before it was resumed
        self.metric = cfg.best() if cfg.keep_best else None
        self.ranking: list[int] = []  # steps by this metric, the best first
        self.newest: int | None = None  # the last step that was passed to the writer, or restored
        self.resumed: dict[str, Any] = {}  # run.json of the checkpoint that was restored
        self.resumed_from: Path | None = None
        self.before_save = before_save
        self.failed = ""  # why the newest state is not on the disk
        self.skipped_in_a_row = 0  # the last steps that were not finite; counted by `NonfiniteSteps`
        self._writer = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[futures.Future] = []
        self._host: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        self._committed: list[tuple[int, Path]] = []
        self.is_sharded = is_sharded(self.model)
        self.in_parts = self.is_sharded or (bool(cfg.sync_every) and this_rank.num_ranks > 1)  # each rank writes a part
        self._writers = [(0, this_rank.host)]  # rank and host of the ranks that write
        self._partial = pieces.PartialSave("", 0, [], "", 0)  # if ranks write parts
        self._offsets: dict[str, dict[str, list[int]]] = {MODEL: {}, OPTIMIZER: {}}  # of the part of this rank in each tensor
        if self.in_parts:
            self.run_id, nonce = broadcast_object((self.run_id, secrets.token_hex(4)))
            stores = any(map(is_first_copy, self.model.parameters())) if self.is_sharded else self.team.rank == 0
            facts = gather_everywhere((this_rank.rank, this_rank.host, stores))
            self._writers = [(rank, host) for rank, host, is_writer in facts if is_writer or rank == 0]
            self._partial = pieces.PartialSave(nonce, 0, self._writers, "", 0)
        self._last: tuple[Any, ...] = ()  # the arguments of the last `_write`
        ending.run(Moment.SAVE)  # of an earlier run of this process, which has failed
        # The monitor ends a rank that writes longer, because a run that has failed must end on all nodes.
        limit = min(self.cfg.ddp_timeout_seconds, MAX_WAIT_OF_FAILED)
        ending.add(Moment.SAVE, self, self._complete_save, (limit, limit, limit))

    # ---- saving: on the ranks that write, and without collectives, except for `before_save` and `_is_due`

    @torch.no_grad()
    @phases.phase(SAVE)
    def save(self, step: int, is_last: bool = False) -> None:
        """Pass the state after `step` updates to the writer. A save that fails is reported and does not stop the run."""
        self.before_save(step)  # first, because it is a collective, and only the main rank stores in `failed` that a save failed
        # On every rank, because it refuses state that cannot be stored.
        captured = {suffix: capture(self.model, self.optimizer, self.built, suffix) for suffix in self.states()}
        self.averages()
        if not self._is_due(step, is_last):
            return
        self.newest = step
        groups = {MODEL: to_save(self.model), OPTIMIZER: dict(self.kept)}
        if self.in_parts:
            groups = {group: own_pieces(tensors) for group, tensors in groups.items()}
        values: dict[str, dict[str, Any]] = {}
        for suffix, (tensors, more) in captured.items():
            groups[OPTIMIZER] |= own_pieces(tensors) if self.is_sharded else tensors if self.team.rank == 0 or not suffix else {}
            values |= more
        for others in gather_everywhere(values) if self.in_parts and not self.is_sharded else ():
            values |= others
        if self.in_parts:
            for group, tensors in groups.items():
                known = self._offsets[group]
                self._offsets[group] = {name: known.get(name) or region(tensor)[0] for name, tensor in tensors.items()}
        copied = self._copy_to_host(groups)
        scaler = self.accelerator.scaler
        run = {
            "recipe": Path(sys.argv[0]).name, "run": self.run_id, "step": step, "total_steps": self.total_steps,
            "data": self.data, "frozen": self.frozen,
            "num_ranks": self.accelerator.num_processes, "precision": self.accelerator.mixed_precision,
            "config": redact_values(as_plain_dict(self.cfg)), "chosen": redact_values(reasons(self.cfg)),
            "versions": versions(), "host": this_rank.host,
            "optimizer": type(self.optimizer).__name__, "values": values,
            "on_host": [name for name, tensor in groups[OPTIMIZER].items() if tensor.device.type == "cpu"],
            "scaler": scaler.state_dict() if scaler else None, "skipped_in_a_row": self.skipped_in_a_row,
            "evaluations": {str(at): metrics for at, metrics in self.evaluations.items()},
            **({"shards": len(self._writers)} if self.is_sharded else {}), **self.more(),
        }  # fmt: skip
        self.failed = ""
        self._last = (self.folder / f"step_{step:08d}", run, self._host, copied)
        self._submit()

    def _is_due(self, step: int, is_last: bool) -> bool:
        """If ranks write parts, all return the same (collective). One save at a time, because all use the same host buffers."""
        if self.newest == step and not (broadcast_object(self.failed) if self.in_parts else self.failed):
            return False
        if not self.in_parts and not this_rank.is_main:
            self.newest = step
            return False
        # The other ranks wait in the next all-reduce, which has a timeout; after the last step they wait without one.
        seconds = None if is_last else self.cfg.ddp_timeout_seconds / 2
        hosts = [] if self.wait(seconds) else [this_rank.host]
        if self.in_parts:
            hosts = list(dict.fromkeys(host for some in gather_everywhere(hosts) for host in some))
        if hosts and this_rank.is_main:
            warn(
                f"The previous checkpoint is still being written on {' and '.join(hosts)}, also after {seconds:.0f} more seconds. The "
                f"checkpoint of step {step} is skipped. Training continues. If the disk is always that slow, use a higher "
                "--save_every.", "SAVE_SKIPPED", step,
            )  # fmt: skip
        return not hosts

    def _submit(self) -> None:
        path, run, *more = self._last
        if self.in_parts:
            self._partial = self._partial._replace(number=self._partial.number + 1, run=self.run_id, step=run["step"])
            if this_rank.rank not in [rank for rank, _ in self._writers]:
                return
        self._pending.append(self._writer.submit(self._write, path, run, *more, self._partial))

    def _copy_to_host(self, groups: dict[str, dict[str, Tensor]]) -> Any:
        """Start the copies to host memory. Return an event that is set when they are done, or None on a CPU."""
        on_gpu = self.accelerator.device.type == "cuda"
        for group, tensors in groups.items():
            host = {}
            for name, tensor in tensors.items():
                tensor = local(tensor)
                memory = self._host[group].get(name)
                if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                    try:
                        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu and tensor.is_cuda)
                    except RuntimeError:  # a limit on locked memory; saving works without pinned memory, but slower
                        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
                # On a GPU the copies are queued between this update and the next. The host does not wait for them.
                host[name] = memory.copy_(tensor.detach(), non_blocking=True)
            self._host[group] = host
        if not on_gpu:
            return None
        copied = torch.cuda.Event()
        copied.record()
        return copied

    def _write(
        self, path: Path, run: dict[str, Any], tensors: dict[str, dict[str, Tensor]], copied: Any, partial: pieces.PartialSave
    ) -> None:
        """Write a checkpoint, or the part of this rank, and remove old ones. Runs in the writer thread."""
        phases.HERE.report_writer(True)
        try:
            if copied is not None:
                copied.synchronize()
            if self.in_parts:
                pieces.write(path, tensors, self._offsets, run, self.files, partial)
            else:
                checkpoint_format.write(path, tensors, run, self.files)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            host = getattr(error, "host", this_rank.host)
            self.failed = f"the checkpoint of step {run['step']} could not be written on {host}: {error.strerror}{where}"
            there = ", ".join(p.name for p in checkpoint_format.list_checkpoints(self.folder)) or "none"
            warn(f"{self.failed}. Training continues. Existing checkpoints: {there}.", "SAVE_FAILED", run["step"])
            return
        finally:
            phases.HERE.report_writer(False)
        if not this_rank.is_main:
            return
        self.failed = ""
        self._committed.append((run["step"], path))
        with contextlib.suppress(OSError):  # the next save tries again to remove them
            checkpoint_format.prune(self.folder, self.cfg.keep_last, self.best())

    def evaluated(self, step: int, metrics: Metrics) -> None:
        if self.metric:
            self.metric.require(metrics)
        self.evaluations[step] = metrics
        self._rank_steps()
        if self.ranking[:1] == [step]:
            self.save(step)
        self._submit_evaluations()

    def best(self) -> int | None:
        """Return the best step that has a checkpoint on this disk. The save of a better one may have failed."""
        return next((step for step in self.ranking if (self.folder / f"step_{step:08d}").is_dir()), None)

    def _rank_steps(self) -> None:
        if self.metric:  # evaluations before a resume may lack it; step 0 has no checkpoint
            self.ranking = self.metric.rank({step: metrics for step, metrics in self.evaluations.items() if step})

    def _submit_evaluations(self) -> None:
        if self.accelerator.is_main_process and self.evaluations:
            self._pending.append(self._writer.submit(self._write_evaluations, dict(self.evaluations)))

    def _write_evaluations(self, evaluations: dict[int, Metrics]) -> None:
        """Write evaluations.json and best.json. Runs in the writer thread, after the save of the same step."""
        best = self.best()
        try:
            checkpoint_format.write_json(self.folder / "evaluations.json", evaluations)
            if self.metric and best in evaluations:
                value = evaluations[best][self.metric.name]
                facts = {"step": best, "metric": self.metric.name, "value": value, "checkpoint": f"step_{best:08d}"}
                checkpoint_format.write_json(self.folder / "best.json", facts)
        except OSError as error:
            warn(f"evaluations.json could not be written on {this_rank.host}: {error.strerror}.", "SAVE_FAILED")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the writer is idle. Return False if that takes longer than `timeout` seconds."""
        began, seconds = time.monotonic(), 0.0
        while futures.wait(self._pending, REPORT_EVERY if timeout is None else min(REPORT_EVERY, timeout - seconds)).not_done:
            seconds = time.monotonic() - began
            if timeout is not None and seconds >= timeout:
                return False
            print(f"{self._being_written()} ({seconds:.0f} s).", file=sys.stderr, flush=True)
        while self._pending:
            self._pending.pop(0).result()
        return True

    def _complete_save(self, limit: float) -> None:
        """Wait after a failure was printed and stored, which a hanging disk would hide. Several threads may call it."""
        pending = list(self._pending)
        if futures.wait(pending, 2).not_done:
            text = f"{self._being_written()}. This process exits when that is done, or after {limit} s."
            print(text, file=sys.stderr, flush=True)
            if futures.wait(pending, limit).not_done:
                text = f"The disk of {self.folder} did not answer within {limit} s. The file may be missing."
                print(text, file=sys.stderr, flush=True)

    def _being_written(self) -> str:
        what = f"The checkpoint of step {self.newest}" if self.newest else "evaluations.json"
        return f"{what} is still being written to {self.folder}"

    def take_committed(self) -> list[tuple[int, Path]]:
        return [self._committed.pop(0) for _ in range(len(self._committed))]  # the writer may add one meanwhile

    def close(self) -> str:
        """Wait for the last save on every rank. Return why it failed, or "". This is a collective."""
        with phases.phase(SAVE):
            self.wait()
            failed = broadcast_object(self.failed, what="write its part of the checkpoint") if self.in_parts else self.failed
            if failed:  # the state is still in host memory, and there may be free space by now
                self._submit()
                self._submit_evaluations()  # the best checkpoint may be the one that was not there before
                self.wait()
        self._writer.shutdown()
        ending.remove(self)
        return broadcast_object(self.failed, what="write the last checkpoint")

    # ---- restoring: on every rank together

    def restore(self, begins_training: bool = True) -> int:
        """Load the checkpoint that `--resume` means. Return the step to continue from, or 0 if there is none.

        At a restart this is printed and recorded, unless `begins_training` is False because the caller compiles the model first.
        """
        step = self._load()
        if begins_training:
            restart_record.begin_training(self.cfg, step, self.resumed_from)
        return step

    def _load(self) -> int:
        if not self.cfg.resume:
            return 0
        chosen = resume.choose(self.cfg)
        if chosen is None:
            print_on_main(f"--resume: {self.folder} contains no checkpoint yet. The run starts at step 0.")
            return 0
        source, path = chosen
        with together("read the checkpoint"):
            run = checkpoint_format.read_run(path) if source == this_rank.rank else None
        run = broadcast_object(run, source)
        evaluations = checkpoint_format.read_json(path.parent / "evaluations.json") if source == this_rank.rank else None
        evaluations = broadcast_object(evaluations, source) or {}
        resume.check_options(self.cfg, run, data=self.data, precision=self.accelerator.mixed_precision)
        if self.cfg.micro_batch_size == "auto" and run["num_ranks"] == self.accelerator.num_processes:
            # The size that was chosen then keeps the run bit-identical.
            found = run["micro_batch_sizes"][this_rank.rank] if "micro_batch_sizes" in run else run["config"]["micro_batch_size"]
            if found != "auto" and self.cfg.split(run["num_ranks"])[0] % found == 0:
                keep(self.cfg, "micro_batch_size", found, run)
                print_on_main(f"micro_batch_size {found}: {KEPT}")
        optimizer = None if self.cfg.evaluate_only else self.optimizer
        resume.load(self.accelerator, self.model, optimizer, self.kept, self.states, path, run, source, self.team.num_workers)
        self.run_id, self.resumed, self.resumed_from = run["run"], run, path
        self.skipped_in_a_row = run.get("skipped_in_a_row", 0)
        if source == 0 and path.parent.resolve() == self.folder.resolve():
            self.newest = run["step"]  # if it is elsewhere, a stop before the next step saves into this run's folder
        known = {int(at): metrics for at, metrics in {**evaluations, **run["evaluations"]}.items()}
        self.evaluations = {at: known[at] for at in sorted(known) if at <= run["step"]}
        self._rank_steps()
        if this_rank.is_local_main and not self.cfg.evaluate_only:
            for later in checkpoint_format.list_checkpoints(self.folder):  # the run must continue from the newest one
                if checkpoint_format.step_of(later) > run["step"]:
                    resume.set_aside(later, self.folder, "later")
        if not self.cfg.evaluate_only:
            print_on_main(f"resumed at step {run['step']} from {path}" + (f" of rank {source}" if source else ""))
            resume.report_differences(self.cfg, run, len(self._writers) if self.is_sharded else 0)
        phases.HERE.advance(run["step"])
        return run["step"]
