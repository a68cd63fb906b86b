"""The gradient of a model's embedding table, of which only the rows are sent that a step has looked up (`--send_rows`).

It has a row for each token of the vocabulary: 94 of the 438 MB of BERT-base. It is complete when the backward pass ends, so nothing
hides its all-reduce, although all but a few thousand rows are 0. DDP leaves the table out, and `EmbeddingRows` sums its rows. The
sums are the same.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ddp import compat, phases
from accel_ddp.ranks.process import this_rank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of --comm_hook


def take_table(model: nn.Module) -> nn.Embedding | None:
    """Return the largest trained table, and let DDP leave it out. Call it before DDP wraps the model, on every rank."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}  # a weight that is also an output head has a gradient in every row
    for module in model.modules():
        for parameter in compat.own_parameters(module).values():
            owners.setdefault(parameter, []).append(module)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tables = {name: owners[p][0] for name, p in trained.items() if [type(one) for one in owners[p]] == [nn.Embedding]}
    if not tables or this_rank.num_ranks == 1 or len(trained) == 1:  # DDP needs a parameter
        return None
    name = max(tables, key=lambda name: trained[name].numel())
    compat.leave_out_of_ddp(model, [name])
    model._summed_by_rows = {name}
    return tables[name]


class EmbeddingRows:
    """Sums the gradient of the table over all ranks. `update` calls it."""

    def __init__(self, table: nn.Embedding, hook: str):
        self.weight, self._dtype = table.weight, DTYPES.get(hook)
        self._used = torch.zeros(len(table.weight), dtype=torch.uint8, device=table.weight.device)
        self._work: Any = None  # the exchange of `_used`
        self._is_open = False  # between the beginning of a step and its last backward pass
        self._is_sparse: bool | None = None  # whether rows that were not looked up have no gradient; None before the first step
        on_gpu = self._used.is_cuda
        self._stream = torch.cuda.Stream(self._used.device) if on_gpu else None  # on which the host waits for the exchange
        dist.broadcast(table.weight.detach(), 0)  # as DDP does with other parameters
        table.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, table: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if self._is_open:
            self._used.index_fill_(0, (args[0] if args else kwargs["input"]).reshape(-1), 1)

    def begin_step(self) -> None:
        self._is_open = True
        self._used.zero_()

    def send_places(self) -> None:
        """Let all ranks know which rows they need, during the last backward pass."""
        self._is_open = False
        self._work = dist.all_reduce(self._used, dist.ReduceOp.MAX, async_op=True)

    def sum_gradient(self) -> Tensor | None:
        """Return the gradient of all ranks after the last backward pass. None: no rank has used the table.

        The host waits for the exchange of places, and not for that pass.
        """
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            self._work.wait()
            rows = self._used.nonzero().squeeze(1)
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)
            rows.record_stream(torch.cuda.current_stream())
        gradient = torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad
        if self._is_sparse is None:
            self._is_sparse = self._check(gradient)
        is_dense = not self._is_sparse or 2 * len(rows) > len(self.weight)
        if not is_dense and not len(rows):
            return None  # as on one rank: the optimizer leaves it as it is
        sent = gradient if is_dense else gradient.index_select(0, rows)
        sent = sent.to(self._dtype or sent.dtype).div_(this_rank.num_ranks)
        with phases.phase(phases.SYNC):
            dist.all_reduce(sent)
        sent = sent.to(gradient.dtype)
        return sent if is_dense else gradient.index_copy_(0, rows, sent)

    def _check(self, gradient: Tensor) -> bool:
        """Return whether no rank has a gradient in a row that was not looked up. Code of a model may read the weight itself.

        This is a collective, and the host waits. It runs in the first step of a process only.
        """
        others = (gradient.ne(0).any(1) & self._used.eq(0)).any().to(torch.uint8)
        dist.all_reduce(others, dist.ReduceOp.MAX)
        return not others.item()
