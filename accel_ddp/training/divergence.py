"""Ranks whose trained parameters are no longer equal, and steps whose loss or gradient norm is not finite.

DDP gives every rank the same gradients, so all ranks do the same updates and their parameters stay equal bit by bit. A rank with
another learning rate, a skipped step or defective memory breaks this without an error, and every later step is then wrong.
`ParameterCheck` compares a checksum of the parameters, which costs little and is read late.

Buffers that are saved are compared too, except the running statistics of batch norm, which may differ between ranks. A buffer that
each rank updates with its own items is not an error, but the result then depends on the number of ranks, so there is a warning.

A rank of a sharded model has a part of each parameter. It is compared with the same part in the other copies of the model. If there is
one copy only, there is nothing to compare.
"""

import contextlib
import math
import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_numbers import Numbers, Pace
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main
from accel_ddp.ranks.failures import Diverged, Failure
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.ranks.shards import class_name, is_sharded, local
from accel_ddp.saving.checkpoints import Checkpoints, Metrics
from accel_ddp.text import counted, shorten
from accel_ddp.training.sharding import plan_of

LONGEST_VECTOR = 2**16  # a longer one is summed like the row of a matrix, because each factor takes 8 bytes
MOST_RANKS = 8  # that a message lists


class ParameterCheck:
    """Compares the trained parameters of all ranks. With one rank or `--check_every 0` it does nothing.

    The bits of each row of a matrix are summed as integers. Each of these sums, and each element of a vector, is multiplied by a
    random odd factor of its own. The sum of all products, modulo 2**64, is the digest of a rank. One changed bit always changes
    it. Ranks exchange only the digest, which has 8 bytes. The products of each parameter are compared if the digests differ.
    """

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, model: nn.Module):
        self.cfg, self.device, self.accelerator, ranks = cfg, accelerator.device, accelerator, accelerator.num_processes
        self.passed: int | None = None  # the step of the last check that passed
        self._last: int | None = None  # the step of the last check
        self._waiting: deque[tuple[int, Tensor, Tensor, Tensor, Any]] = deque()
        ignored = compat.ignored_by_ddp(model)  # DDP does not keep these equal
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
        self._trained = {name: p for name, p in trained.items() if name not in ignored}
        self._copies = find_copies(ranks, plan_of(accelerator).replicas if is_sharded(model) else ranks)
        named = {name: p for name, p in self._trained.items() if local(p).numel()}
        self._vectors = {name: p for name, p in named.items() if p.dim() < 2 and local(p).numel() <= LONGEST_VECTOR}
        self._matrices = {name: p for name, p in named.items() if name not in self._vectors}
        saved = {name for name, buffer in model.named_buffers() if buffer.numel()} & model.state_dict().keys()
        norms = {name for name, one in model.named_modules() if compat.has_batch_norm(one) and not any(one.children())}
        self._module, self._buffers = model, sorted(name for name in saved - ignored if name.rpartition(".")[0] not in norms)
        is_copied = len(self._copies[0]) > 1 and bool(self._trained)
        self.is_on = cfg.check_every > 0 and ranks > 1 and (is_copied or bool(self._buffers))
        if self.is_on:
            bits = [bits_of(p) for p in (*self._vectors.values(), *self._matrices.values())]
            self._sizes = [one.numel() if number < len(self._vectors) else len(one) for number, one in enumerate(bits)]
            random = torch.Generator().manual_seed(0)  # equal on every rank, and not the generator of dropout
            factors = torch.randint(-(2**63), 2**63 - 1, (sum(self._sizes),), generator=random, dtype=torch.int64) | 1
            self._factors = factors.to(bits[0].device if bits else self.device)  # shards may be offloaded to host memory

    def begin(self, step: int, is_needed: bool = False, before: int | None = None) -> None:
        """Start the check of `step` if it is needed, or due since step `before`. Every rank must call it.

        The host does not wait for a GPU.
        """
        every, before = max(1, self.cfg.check_every), step - 1 if before is None else before
        if not self.is_on or step == self._last or not (is_needed or step // every > before // every):
            return
        self._last = step
        vectors, matrices = [bits_of(p) for p in self._vectors.values()], [bits_of(p).sum(-1) for p in self._matrices.values()]
        parts = [torch.cat(some).to(torch.int64) for some in (vectors, matrices) if some]
        products = (torch.cat(parts) if parts else self._factors) * self._factors
        now = dict(self._module.named_buffers()) if self._buffers else {}  # a forward pass may have replaced them
        buffers = [now.get(name, self._factors[:1]) for name in self._buffers]
        sums = torch.stack([products.sum().to(self.device), *(bits_of(buffer).sum().to(self.device) for buffer in buffers)])
        digests, copied = torch.zeros(2, self.accelerator.num_processes, dtype=torch.int64, device=self.device), None
        digests[0, self.accelerator.process_index] = sums[0]
        digests[1, self.accelerator.process_index] = (sums[1:] * (2 * torch.arange(len(buffers), device=self.device) + 1)).sum()
        dist.all_reduce(digests)  # not an all-gather, whose name differs between versions of torch
        if self.device.type == "cuda":
            digests = torch.empty(digests.shape, dtype=torch.int64, pin_memory=True).copy_(digests, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append((step, products, sums, digests, copied))

    def read(self, step: int, wait_for_all: bool = False) -> None:
        """Read the checks that are complete, on a GPU those before `step`. Raise `Diverged` on every rank if one has failed."""
        while self._waiting and (self._waiting[0][0] < step or wait_for_all or self.device.type != "cuda"):
            checked, products, sums, digests, copied = self._waiting.popleft()
            if copied:
                copied.synchronize()
            found, of_buffers = digests.tolist()
            if any(len({found[rank] for rank in ranks}) > 1 for ranks in self._copies):  # every rank has the same digests
                raise Diverged(self._failure(checked, products))
            self.passed = checked
            if len(set(of_buffers)) > 1 and self._buffers:
                self._warn_of_buffers(checked, sums)

    def require(self, step: int) -> None:
        """Return when the parameters after `step` have passed a check. Every checkpoint must have passed one."""
        self.begin(step, is_needed=True)
        self.read(step, wait_for_all=True)

    def _failure(self, step: int, products: Tensor) -> Failure:
        """Return the failure, which is the same on every rank. This is a collective."""
        sums = dict(zip((*self._vectors, *self._matrices), (part.sum().item() for part in products.cpu().split(self._sizes))))
        own = [sums.get(name, 0) for name in self._trained]
        places, checksums = zip(*gather_everywhere((f"{socket.gethostname()}, pid {os.getpid()}", own)))
        bad = next(ranks for ranks in self._copies if len({tuple(checksums[rank]) for rank in ranks}) > 1)
        names = [name for i, name in enumerate(self._trained) if len({checksums[rank][i] for rank in bad}) > 1]
        largest = self._largest_difference({**self._vectors, **self._matrices}.get(names[0]), bad)
        before = "It is the first check of this process." if self.passed is None else f"The check at step {self.passed} passed."
        others = f" and {len(names) - 1} more of {len(self._trained)} differ" if names[1:] else " differs"
        text = (
            f"DIVERGED: at step {step} the weights of {_name_ranks(places, checksums, bad)}. {before} "
            f"The parameter {names[0]}{others}; the largest difference in {names[0]} is {largest:.3g}. Possible causes: "
            "another learning rate or optimizer state on one rank, an update that one rank skipped, code that changes "
            "weights on some ranks only, defective memory. Checkpoints are not affected: "
            "each has passed this check before it was written. If the same host is named again, test its memory. If nodes have "
            "different processors or GPUs, which may round differently, use --check_every 0."
        )
        return Failure("failed", text, step)

    def _warn_of_buffers(self, step: int, sums: Tensor) -> None:
        """Name the buffers that differ between ranks, once. This is a collective."""
        everyone = gather_everywhere(sums[1:].tolist())
        names = [name for name, values in zip(self._buffers, zip(*everyone)) if len(set(values)) > 1]
        self._buffers = []
        warn_on_main(
            f"at step {step} the ranks have different values in {counted(len(names), 'buffer')}: {shorten(', '.join(names), 150)}. "
            "Each rank updates and evaluates its own copy, so the result may depend on the number of ranks. Checkpoints and exports "
            "contain the copy of rank 0. To avoid this, use the same values on all ranks, for example with an all-reduce.",
            "INEXACT",
            step,
        )

    def _largest_difference(self, values: Tensor | None, ranks: Sequence[int]) -> float:
        """Return the largest difference between two of these ranks in one element. This is a collective of all ranks."""
        largest = 0.0
        group = dist.new_group([*ranks]) if len(ranks) < self.accelerator.num_processes else None
        if self.accelerator.process_index in ranks:
            high = local(values.detach()).to(self.device, torch.float64, copy=True)
            low = high.clone()
            dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
            largest = (high - low).max().item()
        return max(gather_everywhere(largest))


def find_copies(num_ranks: int, copies: int) -> list[range]:
    """Return which ranks hold the same, if there are so many copies of a model and each is spread over consecutive ranks."""
    shards = num_ranks // copies
    return [range(first, num_ranks, shards) for first in range(shards)]


def _name_ranks(places: Sequence[str], checksums: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    """Return which of these ranks differ from the majority, or from each other if there is none."""
    named = {rank: f"rank {rank} ({places[rank]})" for rank in ranks}
    most, count = Counter(tuple(checksums[rank]) for rank in ranks).most_common(1)[0]
    if 2 * count <= len(named):
        return f"{_join([*named.values()])} differ from each other"
    others = f"of the other {count} ranks" + (" with the same part of the weights" if len(ranks) < len(places) else "")
    return f"{_join([name for rank, name in named.items() if tuple(checksums[rank]) != most])} differ from those {others}"


def _join(names: list[str]) -> str:
    if len(names) > MOST_RANKS:
        return f"{', '.join(names[:MOST_RANKS])} and {len(names) - MOST_RANKS} more ranks"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def bits_of(parameter: Tensor) -> Tensor:
    """Return the bits of a parameter as integers of at most 4 bytes: a vector, or a matrix with the same number of rows.

    Sums of 8-byte integers would overflow, and two changed signs in one row would then cancel each other.
    """
    values = local(parameter.detach()).contiguous()
    if values.dim() > 1 or values.numel() > LONGEST_VECTOR:
        values = values.reshape(len(values) if values.dim() > 1 else 1, -1)
    else:
        values = values.reshape(-1)
    bytes_of = lambda count: count * values.element_size()
    for kind, width in ((torch.int32, 4), (torch.int16, 2)):
        if bytes_of(values.shape[-1]) % width == 0 and bytes_of(values.storage_offset()) % width == 0:
            return values.view(kind)
    return values.view(torch.uint8)


@contextlib.contextmanager
def weights_kept(model: nn.Module, what: str) -> Iterator[dict[str, int]]:
    """Raise UserError on every rank if the block, forward passes in eval mode, changes a weight or a persistent buffer.

    Checkpoints and exports before and after such a pass would differ. It reads all weights twice and copies none: 8B parameters in
    16 bits take 2 x 8 ms on an H200, and 2 x 0.2 s on 16 CPU cores. Every rank must call it. It yields the
    checksums of the weights, and nothing on ranks that have the same weights as rank 0.
    """
    # Without shards, rank 0 computes all that others compute, and only its buffers stay as they are: the others get copies of them.
    is_compared = this_rank.is_main or is_sharded(model)
    before = _checksums(model) if is_compared else {}
    yield before
    after = _checksums(model) if is_compared else {}
    changed = next(
        filter(None, gather_everywhere([name for name in before if after.get(name, before[name]) != before[name]])), []
    )
    if changed:
        raise UserError(
            f"{what} changed {counted(len(changed), 'tensor')} of {class_name(model)}: {shorten(', '.join(changed), 150)}. Forward "
            "passes in eval mode must leave weights and persistent buffers as they are: what is saved and exported would otherwise "
            "depend on when. Change this in `forward` (for RWKV of transformers set config.rescale_every = 0)."
        )


def report_untrained(model: nn.Module, before: dict[str, int], step: int) -> None:
    """Warn if all weights are as `weights_kept` has found them when the model was loaded. This is a collective."""
    if all(gather_everywhere(before == (_checksums(model) if before else {}))):
        why = "the run stopped before its first step" if not step else "check --lr, --freeze and the loss"
        warn_on_main(
            f"warning: UNTRAINED: no weight has changed since --model was loaded, so its export is the same model: {why}.",
            "UNTRAINED",
            step,
        )


def _checksums(model: nn.Module) -> dict[str, int]:
    """Return the sum of the bits of each tensor that is saved, of a sharded one the part of this rank."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor) and local(value).numel()}
    return {name: int(_in_8_bytes(bits_of(tensor).flatten()).sum()) for name, tensor in state.items()}


def _in_8_bytes(bits: Tensor) -> Tensor:
    """Return integers of 8 bytes if the size allows it. torch sums them 20 times as fast on a CPU, and 3 times on a GPU."""
    is_whole = all(number * bits.element_size() % 8 == 0 for number in (bits.numel(), bits.storage_offset()))
    return bits.view(torch.int64) if is_whole else bits


# ---- --on_nonfinite

ADVICE = "Try a lower --lr, --warmup_steps, --max_grad_norm 1, bf16 instead of fp16, or inspect the data of this step."


class NonfiniteSteps(Hook):
    """Counts skipped steps, and raises UserError where `--on_nonfinite` and `--max_nonfinite` ask for it.

    `train_step` never steps the optimizer with numbers that are not finite. They arrive here late. Every rank has the same loss and
    gradient norm, so every rank counts and raises the same.
    """

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, saved: Checkpoints):
        self.has_scaler, self.cfg, self.saved = accelerator.scaler is not None, cfg, saved
        self.skipped = 0  # by this process; `saved.skipped_in_a_row` includes steps before a resume
        self.last = ""  # what was not finite in the last skipped step, or "" if the fp16 scaler is the reason

    def on_update(self, numbers: Numbers, pace: Pace | None = None) -> None:
        """Count the step if its update was skipped. This is a collective if the loss is not finite."""
        if numbers.items < 0 or (numbers.items == 0 and self.cfg.on_nonfinite == "stop"):
            raise UserError(
                f"step {numbers.step}: `count` returned {numbers.items:g} items for the global batch, so its loss has no mean. "
                "`count(batch)` must return how many items the loss is of, for example len(batch) or the number of labels. If "
                "some steps have no labels, --on_nonfinite skip leaves these out."
            )
        if math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm):
            self.saved.skipped_in_a_row = 0
            return
        # The scaler finds its factor with such steps, so they are not reported one by one.
        is_expected = self.has_scaler and math.isfinite(numbers.loss)
        self.last = "" if is_expected else _what(numbers, self.cfg.local_workers if self.cfg.sync_every else 1)
        if self.last and self.cfg.on_nonfinite == "stop":
            raise UserError(
                f"step {numbers.step}: {self.last}. The run stops. Earlier checkpoints are not affected. {ADVICE} "
                "With --resume --on_nonfinite skip the run continues without such steps."
            )
        self.skipped += 1
        self.saved.skipped_in_a_row += 1
        in_a_row, limit = self.saved.skipped_in_a_row, self.cfg.max_nonfinite
        if in_a_row >= limit:
            self.refuse(numbers.step)
        if self.last:
            who = "by the workers of these ranks" if self.cfg.sync_every else "on every rank"
            text = f"warning: step {numbers.step}: {self.last}. This update is skipped {who}, and the run continues."
            warn_on_main(
                f"{text} {in_a_row} skipped in a row; --max_nonfinite {limit} stops the run.", "SKIPPED_STEP", numbers.step
            )

    def refuse(self, step: int) -> NoReturn:
        """Raise UserError, because the last steps were all skipped."""
        in_a_row = self.saved.skipped_in_a_row
        if self.has_scaler and not self.last:
            raise UserError(
                f"step {step}: the fp16 scaler has skipped the last {in_a_row} steps, because their gradients were not finite, so "
                "nothing was learned in these steps. The run stops. Use --mixed_precision bf16 or no. If gradients are not finite "
                "there either, look for a square root, a logarithm or a division of 0 in the loss, or use a lower --lr."
            )
        raise UserError(
            f"step {step}: the last {in_a_row} steps were skipped, because their loss or gradients were not finite, so nothing "
            f"was learned in these steps.{f' In the last one, {self.last}.' if self.last else ''} The run stops (--on_nonfinite skip "
            f"--max_nonfinite {self.cfg.max_nonfinite}). Earlier checkpoints are not affected. {ADVICE}"
        )

    def on_start(self, step: int, total_steps: int, evaluations: dict[int, Metrics]) -> None:
        self.first = step

    def summarize(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped}

    def on_end(self, step: int, summary: dict[str, Any]) -> None:
        """Print how many steps of this process were skipped, if there were any."""
        steps = f"{self.skipped} of {step - self.first} steps"
        if self.skipped and self.has_scaler:
            print_on_main(f"The fp16 scaler skipped {steps}, because gradients overflowed.")
        elif self.skipped:
            print_on_main(f"{steps} were skipped, because their loss or gradients were not finite.")


def _what(numbers: Numbers, num_workers: int) -> str:
    """Return what is not finite, with the ranks whose loss it is. This is a collective if it is the loss."""
    if math.isfinite(numbers.loss):
        return f"the gradient norm is {numbers.grad_norm}, although the loss is {numbers.loss:.4g}"
    losses = gather_everywhere((socket.gethostname(), numbers.local_loss))
    culprits = [f"rank {rank} on {host}" for rank, (host, loss) in enumerate(losses) if not math.isfinite(loss)]
    if not culprits:
        whose = "a worker" if num_workers > 1 else "this step"
        return f"the loss is {numbers.loss}, because {whose} had no trained items (a larger --global_batch_size avoids this)"
    return f"the loss is {numbers.loss} on {', '.join(culprits)}"
