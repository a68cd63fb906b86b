"""Gradients of embedding tables, of which only the rows are sent that a step has looked up.

The gradient of a table has a row for each token of the vocabulary: 94 of the 438 MB of BERT-base. It is complete when the backward
pass ends, so nothing hides its all-reduce, although all but a few thousand rows are 0. DDP leaves these tables out, and
`EmbeddingRows` sums their rows. The sums are the same.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_ddp import compat, phases
from accel_ddp.config.choices import choose
from accel_ddp.phases import SYNC
from accel_ddp.ranks.process import links, this_rank

if TYPE_CHECKING:
    from accel_ddp.config.train_config import TrainConfig

LARGE = 4 << 20  # numbers of a table; smaller ones take less time than the two collectives that replace them
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of --comm_hook


def take_tables(cfg: "TrainConfig", model: nn.Module) -> dict[str, nn.Embedding]:
    """Return the tables whose rows are sent, by the names of their weights, and let DDP leave them out.

    Call it before DDP wraps the model. The answer is the same on every rank.
    """
    if this_rank.num_ranks == 1 or cfg.comm_hook == "powersgd" or cfg.send_rows == "off":
        return {}
    owners: dict[nn.Parameter, list[nn.Module]] = {}  # a weight that is also an output head has a gradient in every row
    for module in model.modules():
        for parameter in compat.own_parameters(module).values():
            owners.setdefault(parameter, []).append(module)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {
        name: owners[p][0] for name, p in trained.items()
        if len(owners[p]) == 1 and type(owners[p][0]) is nn.Embedding and (cfg.send_rows == "on" or p.numel() >= LARGE)
    }  # fmt: skip
    found = found if len(found) < len(trained) else {}  # DDP needs a parameter
    if found and cfg.send_rows == "auto":
        several = len(links.nodes) > 1
        choose(cfg, "send_rows", "on" if several else "off", "the network between nodes is slow" if several else "one node")
    if cfg.send_rows != "on":
        return {}
    compat.leave_out_of_ddp(model, [*found])
    model._summed_by_rows = set(found)
    return found


class EmbeddingRows:
    """Sums the gradients of tables over all ranks. `update` calls it."""

    def __init__(self, tables: dict[str, nn.Embedding], hook: str):
        self._tables, self._dtype = list(tables.values()), DTYPES.get(hook)
        self._used = [torch.zeros(len(table.weight), dtype=torch.uint8, device=table.weight.device) for table in self._tables]
        self._is_open = False  # between the beginning of a step and its last backward pass
        self._are_sparse: list[bool] = []  # of each table: whether rows that were not looked up have no gradient
        self._works: list[Any] = []
        device = self._used[0].device
        self._stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None
        )  # on which the host waits for the numbers of rows
        for table, used in zip(self._tables, self._used):
            dist.broadcast(table.weight.detach(), 0)  # as DDP does with other parameters
            note = lambda _, args, kwargs, used=used: self._note(used, args[0] if args else kwargs["input"])
            table.register_forward_pre_hook(note, with_kwargs=True)

    def _note(self, used: Tensor, ids: Tensor) -> None:
        if self._is_open:
            used[ids] = 1

    def begin_step(self) -> None:
        self._is_open = True
        for used in self._used:
            used.zero_()

    def send_places(self) -> None:
        """Let all ranks know which rows they need, during the last backward pass."""
        self._is_open = False
        self._works = [dist.all_reduce(used, dist.ReduceOp.MAX, async_op=True) for used in self._used]

    def sums(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield each weight and its gradient after the last backward pass. None: no rank has used the table.

        The host waits for the exchange of places, and not for that pass.
        """
        for number, (table, used, work) in enumerate(zip(self._tables, self._used, self._works)):
            with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                work.wait()
                rows = used.nonzero().squeeze(1)
            if self._stream:
                torch.cuda.current_stream().wait_stream(self._stream)
                rows.record_stream(torch.cuda.current_stream())
            weight = table.weight
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if number == len(self._are_sparse):
                self._are_sparse.append(_is_sparse(gradient, used))
            is_dense = not self._are_sparse[number] or 2 * len(rows) > len(weight)
            if not is_dense and not len(rows):
                yield weight, None  # as on one rank: the optimizer leaves it as it is
                continue
            sent = gradient if is_dense else gradient.index_select(0, rows)
            sent = sent.to(self._dtype or sent.dtype).div_(this_rank.num_ranks)
            with phases.phase(SYNC):
                dist.all_reduce(sent)
            sent = sent.to(gradient.dtype)
            yield weight, sent if is_dense else gradient.index_copy_(0, rows, sent)


def _is_sparse(gradient: Tensor, used: Tensor) -> bool:
    """Return whether no rank has a gradient in a row that was not looked up, because code of the model reads the weight itself.

    This is a collective, and the host waits. It runs in the first step of a process only.
    """
    others = (gradient.ne(0).any(1) & used.eq(0)).any().to(torch.uint8)
    dist.all_reduce(others, dist.ReduceOp.MAX)
    return not others.item()


def attach_rows(model: nn.Module, tables: dict[str, nn.Embedding], hook: str) -> None:
    """Let `update` sum the tables of a model that DDP wraps. Call it on every rank."""
    if tables and isinstance(model, DistributedDataParallel):
        model._embedding_rows = EmbeddingRows(tables, hook)
