"""Local steps (`--sync_every H`, DiLoCo): workers train on their own and exchange weights rarely, for slow links between nodes.

Each of W workers takes H steps with its own weights and optimizer state, on its own part of every global batch. Then all continue from
new global weights:

    d = mean over workers of (global weights - weights of the worker)
    m = outer_momentum * m + d
    global weights = global weights - outer_lr * (d + outer_momentum * m)

With `--sync_dtype bfloat16` each difference, and then d, is rounded to bfloat16. The sum has the order of the workers, so d has the
same bits however the workers are spread over ranks. Floating-point buffers, as of batch norm, become the mean over workers.

A worker is a team of ranks, which use DDP, or one rank computes several workers in turn. Between two synchronizations nothing is sent
between teams: the numbers of these steps, and votes to stop, travel at the next one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.phases import SYNC, phase
from accel_ddp.ranks.agreement import is_any
from accel_ddp.ranks.process import Team, links, this_rank
from accel_ddp.seeds import mixed
from accel_ddp.training.update import UpdateStats

MOST_AT_ONCE = (
    2**22
)  # elements that are exchanged at once. The monitor sees progress after each, on a link of 100 Mbit/s after 3 s
SUMMED = 6  # the first fields of UpdateStats, up to `flops`


class _Held(NamedTuple):
    """The numbers of a local step of this rank, until they are exchanged."""

    step: int
    lr: float
    numbers: Tensor  # SUMMED fields, then `means` without NaN, and then which of them are not NaN
    local_loss: Tensor
    names: tuple[str, ...]
    sample: Sequence[float]


class Workers:
    """The workers that this rank computes. Without `--sync_every` all ranks are one worker, and this does nothing."""

    def __init__(self, cfg: TrainConfig, total_steps: int):
        """Form the teams. This is a collective."""
        self.cfg, self.every, self.total_steps = cfg, 0 if cfg.evaluate_only else cfg.sync_every, total_steps
        ranks, total = this_rank.num_ranks, max(1, cfg.local_workers) if self.every else 1
        size, each = max(1, ranks // total), max(1, total // ranks)  # ranks of a worker, workers of a rank
        row, column = divmod(this_rank.rank, size)
        teams = [range(first, first + size) for first in range(0, ranks, size)]
        self._across: dist.ProcessGroup | None = None  # the ranks at the same place of all teams; None: all ranks
        team = None
        if 1 < size < ranks:
            limit = timedelta(seconds=cfg.ddp_timeout_seconds)
            team = [dist.new_group([*some], timeout=limit) for some in teams][row]
            self._across = [dist.new_group([*some], timeout=limit) for some in zip(*teams)][column]
        links.team = Team(size, column, team, range(row * each, (row + 1) * each), total)
        self.total, self.own, self._num_teams = total, links.team.workers, len(teams)
        self._held: list[_Held] = []
        self._place = 0  # of the worker whose weights the model has

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Take the model without DDP and its optimizer. Return the momentum of each trained parameter, which is saved."""
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self.momentum: dict[str, Tensor] = {}
        if self.every:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            self.momentum = {name: torch.zeros_like(p, dtype=_wide(p.dtype)).contiguous() for name, p in trained.items()}
            self._states: list[Any] = [self.optimizer.state, *(defaultdict(dict) for _ in self.own[1:])]
        return self.momentum

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights that the model has on rank 0. Call it when they are loaded."""
        if not self.every:
            return
        for tensor in self._tensors().values() if this_rank.num_ranks > 1 else ():
            sent = tensor.contiguous()
            dist.broadcast(_bytes(sent), 0)  # not the frozen ones, as DDP does, which may be large and come from files
            if sent is not tensor:
                tensor.copy_(sent)
        saved = self.model.state_dict()
        buffers = [name for name, buffer in self.model.named_buffers() if name in saved and buffer.is_floating_point()]
        self._global = {name: saved[name].clone(memory_format=torch.contiguous_format) for name in (*self.momentum, *buffers)}
        self._copies = [self._tensors(copy=True) for _ in self.own] if len(self.own) > 1 else []

    def _tensors(self, copy: bool = False) -> dict[str, Tensor]:
        """Return what a worker changes: trained parameters and buffers."""
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        found = {**trained, **dict(self.model.named_buffers())}
        return {name: tensor.clone() for name, tensor in found.items()} if copy else found

    # ---- steps

    def of_step(self, step: int) -> Iterator[int]:
        """Let the model be each worker of this rank in turn, and yield the seed of its update."""
        if not self.every:
            yield mixed(self.cfg.seed, "step", step)
            return
        for place, worker in enumerate(self.own):
            self._become(place)
            phases.HERE.advance(step)  # an update counts itself
            yield mixed(self.cfg.seed, "step", step, worker)

    @torch.no_grad()
    def _become(self, place: int) -> None:
        """Store the weights of the current worker, and load those of another one with its optimizer state."""
        if not self._copies or place == self._place:
            return
        _copy(self._tensors(), self._copies[self._place])
        _copy(self._copies[place], self._tensors())
        self._place, self.optimizer.state = place, self._states[place]

    def syncs(self, step: int) -> bool:
        """Return whether all workers have the same weights after a step."""
        return not self.every or step % self.every == 0 or step == self.total_steps

    def before(self, step: int) -> int:
        """Return the last synchronization before a step."""
        return (step - 1) // max(1, self.every) * max(1, self.every)

    def complete(
        self, step: int, lr: float, stats: list[UpdateStats], sample: Sequence[float]
    ) -> list[tuple[int, float, UpdateStats]]:
        """Synchronize after a step if it is time. Return step, learning rate and numbers of the steps whose numbers all ranks know.

        The numbers are over all workers: loss and gradient norm are means of those of the workers.
        """
        if not self.every:
            return [(step, lr, stats[0])]
        self._held.append(self._hold(step, lr, stats, sample))
        if not self.syncs(step):
            return []
        with phase(SYNC):
            is_any(False)  # without a timeout, because a slower worker may need long for its steps
            self._synchronize()
            return self._exchange_numbers()

    def _hold(self, step: int, lr: float, stats: list[UpdateStats], sample: Sequence[float]) -> _Held:
        like = stats[0].loss
        on_device = lambda value: value.to(like) if isinstance(value, Tensor) else torch.full_like(like, value)
        rows = []
        for one in stats:
            means = one.means if isinstance(one.means, Tensor) else like.new_zeros(0)
            loss, norm, *sums = map(on_device, one[:SUMMED])
            numbers = torch.stack([loss / self.total, norm / self.total, *sums])
            rows.append(torch.cat([numbers, means.nan_to_num(0.0), (means == means).to(like)]))
        local_loss = torch.stack([one.local_loss for one in stats]).sum()
        return _Held(step, lr, torch.stack(rows).sum(0), local_loss, stats[0].names, sample)

    def _exchange_numbers(self) -> list[tuple[int, float, UpdateStats]]:
        """Return the numbers of the steps since the last synchronization, over all workers."""
        held, self._held, parts = self._held, [], []
        for one in held:
            places = torch.zeros(this_rank.num_ranks, len(one.sample), dtype=one.numbers.dtype)
            places[this_rank.rank] = torch.tensor(one.sample, dtype=places.dtype)
            of_team = one.numbers if links.team.rank == 0 else torch.zeros_like(one.numbers)  # all of its ranks have them
            parts += [of_team, places.flatten().to(of_team.device)]
        flat = torch.cat(parts)
        if this_rank.num_ranks > 1:
            dist.all_reduce(flat)
        found, values = [], iter(flat.split([len(part) for part in parts]))
        for one in held:
            numbers, samples = next(values), next(values)
            above, below = numbers[SUMMED:].view(2, len(one.names))
            more = (samples if len(one.sample) else (), one.names, above / below)
            found.append((one.step, one.lr, UpdateStats(*numbers[:SUMMED].unbind(), one.local_loss, *more)))
        return found

    # ---- the synchronization

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Step the global weights, and let every worker continue from them."""
        live = self._tensors()
        if self._copies:
            _copy(live, self._copies[self._place])
        lr, momentum = self.cfg.outer_lr, self.cfg.outer_momentum
        for pieces in _buckets(self._global):
            weights = [[_part(tensors, piece) for piece in pieces] for tensors in self._copies or [live]]
            anchors = [_part(self._global, piece) for piece in pieces]
            wide = _wide(*{anchor.dtype for anchor in anchors})
            differences = [torch.cat([a.to(wide) - w.to(wide) for a, w in zip(anchors, own)]) for own in weights]
            mean = self._mean(differences, torch.bfloat16 if self.cfg.sync_dtype == "bfloat16" else wide).to(wide)
            for piece, anchor, change in zip(pieces, anchors, mean.split([len(anchor) for anchor in anchors])):
                if piece[0] in self.momentum:
                    moved = _part(self.momentum, piece).mul_(momentum).add_(change)
                    change = lr * (change + momentum * moved)
                anchor.copy_(anchor - change)
            if mean.is_cuda:
                torch.cuda.synchronize()  # the monitor shall see how far the exchange is, and not what is queued
            phases.HERE.beat()
        for tensors in (live, *self._copies):
            _copy(self._global, tensors)

    def _mean(self, own: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the mean of the vectors of all workers, of which this rank has its own. What is sent has `dtype`.

        The rank at place r of each team averages slice r, of which each of these ranks sums a part. A link between two nodes thus
        transports each value twice, however many ranks the nodes have.
        """
        team, teams, size = links.team, self._num_teams, len(own[0])
        part = -(-size // (team.size * teams))
        sent = torch.zeros(len(own), team.size * teams * part, dtype=dtype, device=own[0].device)
        sent[:, :size] = torch.stack(own)
        sent = sent.view(len(own), team.size, teams, part)[:, team.rank].transpose(0, 1).contiguous()
        received = torch.empty_like(sent) if teams > 1 else sent
        if teams > 1:
            dist.all_to_all_single(_bytes(received), _bytes(sent), group=self._across)
        first, *others = received.view(self.total, part).to(own[0].dtype)
        for other in others:  # `sum` may add in another order
            first = first + other
        mean = _gather((first / self.total).to(dtype), teams, self._across)
        return _gather(mean, team.size, team.group)[:size]

    # ---- checkpoints

    def states(self) -> Iterator[str]:
        """Let the optimizer have the state of each worker of this rank in turn. Yield what the names of its tensors end with."""
        if not self.every:
            yield ""
            return
        for place, worker in enumerate(self.own):
            self.optimizer.state = self._states[place]
            yield f"@{worker}"
            self._states[place] = self.optimizer.state  # loading replaces it
        self.optimizer.state = self._states[self._place]


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type in which weights of these types are averaged: float32, or float64 if one has it."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _part(tensors: dict[str, Tensor], piece: tuple[str, int, int]) -> Tensor:
    name, begin, end = piece
    return tensors[name].reshape(-1)[begin:end]


def _buckets(tensors: dict[str, Tensor]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield lists of pieces (name, begin, end) with at most MOST_AT_ONCE elements in all."""
    bucket: list[tuple[str, int, int]] = []
    size = 0
    for name, tensor in tensors.items():
        for begin in range(0, tensor.numel(), MOST_AT_ONCE):
            end = min(tensor.numel(), begin + MOST_AT_ONCE)
            if bucket and size + end - begin > MOST_AT_ONCE:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, begin, end))
            size += end - begin
    if bucket:
        yield bucket


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Copy tensors to those of the same name. A forward pass may have replaced a cache by a larger one, which is left as it is."""
    for name, tensor in source.items():
        if name in target and target[name].shape == tensor.shape:
            target[name].copy_(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor. It is sent as bytes, because gloo lacks some types."""
    return tensor.view(-1).view(torch.uint8)


def _gather(part: Tensor, number: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the parts of a group of `number` ranks, one after the other."""
    if number == 1:
        return part
    whole = torch.empty(number * len(part), dtype=part.dtype, device=part.device)
    dist.all_gather([_bytes(one) for one in whole.split(len(part))], _bytes(part), group=group)
    return whole
