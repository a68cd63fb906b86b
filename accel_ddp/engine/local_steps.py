"""Local steps (`--sync_every H`, DiLoCo): workers train on their own and exchange weights rarely, for slow networks between nodes.

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

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.fit import CarryOf, Known, Run, Schedule, next_step
from accel_ddp.engine.scaler import averages_itself
from accel_ddp.engine.step_sums import Carry, UpdateStats
from accel_ddp.errors import UserError
from accel_ddp.phases import SYNC, phase
from accel_ddp.ranks.agreement import is_any
from accel_ddp.ranks.team import Team

MOST_AT_ONCE = 2**22  # numbers that are exchanged at once. The monitor sees progress after each: 3 s on a link of 100 Mbit/s
SUMMED = 6  # the first fields of UpdateStats, up to `flops`
# Of a local step of this rank, until it is exchanged: step, learning rate, numbers (the SUMMED fields, `means` without NaN, and which
# of them are not NaN), the loss of this rank, the names of the means, and a `RankSample` or nothing.
_Held = tuple[int, float, Tensor, Tensor, tuple[str, ...], Sequence[float]]


class Workers:
    """The workers that this rank computes, with the other ranks of its `team`. Without `--sync_every` all ranks are one worker."""

    def __init__(self, cfg: TrainConfig, schedule: Schedule, world: Team):
        """Form the teams from all ranks. This is a collective."""
        self.cfg, self.every, self.schedule = cfg, 0 if cfg.evaluate_only else cfg.sync_every, schedule
        self.world, ranks, total = world, world.size, max(1, cfg.local_workers) if self.every else 1
        size, each = max(1, ranks // total), max(1, total // ranks)  # ranks of a worker, workers of a rank
        row, column = divmod(world.rank, size)
        teams = [range(first, first + size) for first in range(0, ranks, size)]
        self._across: dist.ProcessGroup | None = None  # the ranks at the same place of all teams; None: all ranks
        group = None
        if 1 < size < ranks:
            limit = timedelta(seconds=cfg.ddp_timeout_seconds)
            group = [dist.new_group([*some], timeout=limit) for some in teams][row]
            self._across = [dist.new_group([*some], timeout=limit) for some in zip(*teams)][column]
        self.team = Team(size, column, group, range(row * each, (row + 1) * each), total)
        self.total, self.own, self._num_teams = total, self.team.workers, len(teams)
        self._held: list[_Held] = []
        self._place = 0  # of the worker whose weights the model has

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Take the model without DDP and its optimizer. Return the momentum of each trained parameter, which is saved."""
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        if not self.every:
            return {}
        if averages_itself(self.optimizer):
            raise UserError(
                f"--sync_every {self.every}: workers exchange their weights only, and the optimizer {type(self.optimizer).__name__} "
                "has averages of weights too. Use another optimizer, or leave --sync_every out."
            )
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        saved = model.state_dict()
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}
        self._sizes = {name: tensor.numel() for name, tensor in {**trained, **buffers}.items()}
        self._num_trained = sum(self._sizes[name] for name in trained)
        self._momentum = torch.zeros_like(self._flat(self._tensors()))
        groups = self.optimizer.param_groups  # an optimizer may count in them
        own = lambda group: {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        others = [(defaultdict(dict), [*map(own, groups)]) for _ in self.own[1:]]
        self._states: list[Any] = [(self.optimizer.state, groups), *others]
        parts = self._momentum.split([*self._sizes.values()])
        return {name: part.view(p.shape) for part, (name, p) in zip(parts, trained.items())}

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights that the model has on rank 0. Call it when they are loaded."""
        if self.every:
            self._global = self._flat(self._tensors())
            if self.world.size > 1:
                dist.broadcast(self._global, 0)  # without frozen weights, which may be large and come from files
            self._load(self._tensors())
            own = self.own if len(self.own) > 1 else ()  # a single worker needs no copy of its weights
            self._copies = [{name: tensor.clone() for name, tensor in self._tensors().items()} for _ in own]

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a worker changes: trained parameters and buffers."""
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return {**trained, **dict(self.model.named_buffers())}

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return what is averaged as one vector: trained parameters, then buffers. It has float32, or float64 if one of them has."""
        wide = torch.float64 if any(tensors[name].dtype == torch.float64 for name in self._sizes) else torch.float32
        return torch.cat([tensors[name].reshape(-1).to(wide) for name in self._sizes])

    def _load(self, tensors: dict[str, Tensor]) -> None:
        """Copy the global weights to those of a worker."""
        for name, part in zip(self._sizes, self._global.split([*self._sizes.values()])):
            tensors[name].copy_(part.view(tensors[name].shape))

    # ---- steps

    def take_step(self, run: Run, lr: float, batches: Iterator[list[Any]], carry: CarryOf) -> Known:
        """Take a step of each worker of this rank, and synchronize if it is time. Return the steps whose numbers all ranks know.

        These numbers are over all workers: loss and gradient norm are means of those of the workers.
        """
        stats, sample = [], []

        def without_sample(own: list[Any]) -> Carry:
            given = carry(own)
            sample[:] = given.sample  # it travels at the next synchronization
            return given._replace(sample=())

        for place, worker in enumerate(self.own):
            self._become(place)
            phases.HERE.advance(run.step)  # a step counts itself
            stats.append(next_step(run, batches, without_sample, worker))
        self._held.append(self._hold(run.step + 1, lr, stats, sample))
        if not self.schedule.syncs(run.step + 1):
            return []
        with phase(SYNC):
            is_any(False)  # without a timeout, because a slower worker may need long for its steps
            self._synchronize()
            return self._exchange_numbers()

    @torch.no_grad()
    def _become(self, place: int) -> None:
        """Store the weights of the current worker, and load those of another one with its optimizer state."""
        if not self._copies or place == self._place:
            return
        _copy(self._tensors(), self._copies[self._place])
        _copy(self._copies[place], self._tensors())
        self._place = place
        self._use_state(place)

    def _use_state(self, place: int) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.state, self.optimizer.param_groups = self._states[place]
        for group, lr in zip(self.optimizer.param_groups, rates):
            group["lr"] = lr

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
        return step, lr, torch.stack(rows).sum(0), local_loss, stats[0].names, sample

    def _exchange_numbers(self) -> Known:
        """Return the numbers of the steps since the last synchronization, over all workers."""
        held, self._held, parts = self._held, [], []
        for _, _, numbers, _, _, sample in held:
            places = torch.zeros(self.world.size, len(sample), dtype=numbers.dtype)
            places[self.world.rank] = torch.tensor(sample, dtype=places.dtype)
            of_team = numbers if self.team.rank == 0 else torch.zeros_like(numbers)  # all of its ranks have them
            parts += [of_team, places.flatten().to(of_team.device)]
        flat = torch.cat(parts)
        if self.world.size > 1:
            dist.all_reduce(flat)
        found, values = [], iter(flat.split([len(part) for part in parts]))
        for step, lr, _, local_loss, names, sample in held:
            numbers, samples = next(values), next(values)
            above, below = numbers[SUMMED:].view(2, len(names))
            more = (local_loss, samples if len(sample) else (), names, above / below)
            found.append((step, lr, UpdateStats(*numbers[:SUMMED].unbind(), *more)))
        return found

    # ---- the synchronization

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Step the global weights, and let every worker continue from them."""
        live = self._tensors()
        if self._copies:
            _copy(live, self._copies[self._place])
        own = [self._flat(tensors) for tensors in self._copies or [live]]
        dtype = torch.bfloat16 if self.cfg.sync_dtype == "bfloat16" else self._global.dtype
        of_parameters = (0, self._num_trained, self.cfg.outer_lr, self.cfg.outer_momentum)
        for first, last, lr, momentum in (of_parameters, (self._num_trained, len(self._global), 1.0, 0.0)):
            for begin in range(first, last, MOST_AT_ONCE):
                piece = slice(begin, min(last, begin + MOST_AT_ONCE))
                mean = self._mean([self._global[piece] - one[piece] for one in own], dtype)
                moved = self._momentum[piece].mul_(momentum).add_(mean)
                self._global[piece] -= lr * (mean + momentum * moved)
                if mean.is_cuda:
                    torch.cuda.synchronize()  # the monitor shall see how far the exchange is, and not what is queued
                phases.HERE.beat()
        for tensors in (live, *self._copies):
            self._load(tensors)
        self._global = self._flat(live)  # rounded, if the weights have 16 bits

    def _mean(self, own: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the mean of the vectors of all workers, of which this rank has its own. What is sent has `dtype`.

        The rank at place r of each team averages slice r, of which each of these ranks sums a part. A link between two nodes thus
        transports each value twice, however many ranks the nodes have.
        """
        team, teams, size = self.team, self._num_teams, len(own[0])
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
        return _gather(mean, team.size, team.group)[:size].to(own[0].dtype)

    # ---- checkpoints

    def states(self) -> Iterator[str]:
        """Let the optimizer have the state of each worker of this rank in turn. Yield what the names of its tensors end with."""
        if not self.every:
            yield ""
            return
        for place, worker in enumerate(self.own):
            self._use_state(place)
            yield f"@{worker}"
            self._states[place] = (self.optimizer.state, self.optimizer.param_groups)  # loading replaces both
        self._use_state(self._place)


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
