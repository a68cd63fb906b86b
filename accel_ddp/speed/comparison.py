"""The test that a model computes without padding what it computes with it, and that no text changes another one."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.engine.rows import Rows
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.speed import padding_free
from accel_ddp.speed.padding_free import NeedsPadding
from accel_ddp.text import first_line
from accel_ddp.training import isolation
from accel_ddp.training.padding_check import without_tf32

Loss = Callable[[Any], Any]


class Compared:
    """A model that computes a batch with padding or, if it `is_enabled`, without."""

    is_fixed = False  # items have no mask, because all of them have one length
    is_single = True  # hidden states of a text belong to its own tokens, and not to those of a decoder
    longest = 1 << 30  # a batch with longer texts is padded
    windows: set[int] = set()  # of its attention
    model: nn.Module
    owner: Any
    expert_configs: list[Any]
    is_enabled = True
    outputs: list[Any] | None = None  # what is compared, while `check` runs: hidden states of a row, or of items of fixed length
    compared: Rows | None = None  # whose texts the outputs have
    apart = math.inf  # the difference that the last `check` has found
    of_padding: list[Tensor] = []  # hidden states of the last `check`

    def forget_pass(self) -> None:
        """Free what the last forward pass has left."""

    def check(self, loss: Loss, batch: Any, allowed: float = 1e-4, exact: list[Tensor] | None = None) -> str:
        """Return "" if a row gives each text the result that it has with padding, and no text changes another one, or else why not.

        `allowed` is a fraction of the largest value of each channel. With `exact`, the hidden states in float32, the difference may be
        that of padding in the precision of this pass. It costs four forward passes, and four over texts that are made if the batch
        does not reach a window or a block of the config. An out-of-memory error is raised.
        """
        was_training, longest, seen = self.model.training, self.longest, set[int]()
        self.model.eval()
        self.longest, self.compared, self.apart, self.of_padding = 1 << 30, None, math.inf, []
        token = padding_free.windows_seen.set(seen)
        try:
            with torch.no_grad(), without_tf32():
                if reason := self._problem(loss, batch, allowed, exact):
                    return reason
                reason, longest = self._check_limits(allowed, exact, seen)
            return reason
        except torch.OutOfMemoryError:
            raise
        except NeedsPadding as error:
            return str(error)
        except Exception as error:  # of many kinds: layers with other outputs, indices out of range
            return f"its layers cannot compute without padding ({type(error).__name__}: {first_line(error)})"[:200]
        finally:
            padding_free.windows_seen.reset(token)
            self.is_enabled, self.outputs, self.longest = True, None, longest
            self.forget_pass()
            self.model.train(was_training)

    def _check_limits(self, allowed: float, exact: list[Tensor] | None, seen: set[int]) -> tuple[str, int]:
        """Compare texts that are longer than the windows and blocks of the config. Return a problem, and the longest text allowed."""
        config = self.owner.config
        reached = self.compared.width if not self.is_fixed else 1 << 30
        # Windows that layers pass on, which the attention computes: their size, one more, or one more than a half of it.
        limits = isolation.limits_of(config) | self.windows
        limits = {w for w in limits if w >= reached and not {w, w + 1, w // 2 + 1} & seen}
        positions = getattr(config, "max_position_embeddings", None) or 1 << 30
        makes = self.is_single and not is_sharded(self.model)  # the root of a sharded model must be called
        if made := max((w for w in limits if makes and w < min(positions, isolation.LONGEST_MADE)), default=0):
            self.compared = None
            some = isolation.made_texts(config, min(positions, made + made // 4 + 2))
            texts = Rows.join({"input_ids": torch.cat(some)}, torch.tensor([*map(len, some)])).to(self.owner.device)
            keeps = "logits_to_keep" in inspect.signature(type(self.owner).forward).parameters
            more = {"logits_to_keep": 1} if keeps else {}

            def call(some: Any) -> float:
                self.model(some, **more)
                return 0.0  # only hidden states count

            if reason := self._problem(call, texts, allowed, None if exact is None else []):
                return f"{reason}, in texts of {texts.width} tokens", 1 << 30
            limits -= {w for w in limits if w <= made}
        return "", min((w // 2 if w < positions else positions for w in limits), default=1 << 30)

    def _problem(self, loss: Loss, batch: Any, allowed: float, exact: list[Tensor] | None) -> str:
        """Return why a batch has another result without padding, or "". A leak between its texts is the first of two reasons.

        With an empty `exact`, only leaks are looked for.
        """
        (padded, before), (packed, after) = [self._pass(loss, batch, is_packed) for is_packed in (False, True)]
        if self.compared is None and not self.is_fixed:
            return "the loss does not call it with the rows of the batch"
        self.of_padding, texts, unit = self._texts(before), self._texts(after), "of the largest value of a channel"
        self.apart, losses = 0.0, f"a loss of {packed:.6g} instead of {padded:.6g}"
        if exact is None:
            self.apart = isolation.channel_distance(self.of_padding, texts)
        elif exact:
            allowed, unit = isolation.TIMES_ROUNDING, "times the rounding of padding"
            self.apart = isolation.rounding_distance(exact, self.of_padding, texts, bool(self.expert_configs))
        is_near = self.apart <= allowed and abs(padded - packed) <= 10 * min(allowed, 0.05) * max(abs(padded), 1e-3)
        differs = (
            "" if is_near or exact == [] else f"its result differs without padding: by {self.apart:.1e} {unit}, with {losses}"
        )
        name, is_rows = self.owner.main_input_name, isinstance(batch, Rows)
        if not is_rows and not isinstance(batch.get(name) if isinstance(batch, Mapping) else None, Tensor):
            return f"its batches have no {name}, in which another text could be put"

        def forward(some: list[Tensor]) -> list[Tensor]:
            if is_rows:
                other = batch.replaced(input_ids=torch.cat([*some, batch.tokens[batch.used :]]))
            else:
                other = copy.copy(batch)
                other[name] = torch.stack(some)
            return self._texts(self._pass(loss, other, True)[1])

        texts = self._split(batch.tokens[None], batch) if is_rows else list(batch[name])
        # The positions of tokens in a row are known if there is one stack, and no text shares its beginning.
        named = self.owner if is_rows and self.is_single and not batch.is_shared else None
        return isolation.isolation_problem(forward, texts, self.owner.config, named) or differs

    def _pass(self, loss: Loss, batch: Any, is_packed: bool) -> tuple[float, Tensor]:
        """Return the loss and what is compared."""
        self.is_enabled, self.outputs = is_packed, []
        value = float(loss(batch))
        if not self.outputs:
            raise NeedsPadding("its last layer is not called")
        last = self.outputs[-1]
        return value, last[0] if isinstance(last, tuple) else last

    def _texts(self, output: Tensor) -> list[Tensor]:
        """Return the output of each text. A decoder has other tokens than its encoder."""
        return list(output) if self.is_fixed else self._split(output, self.compared)

    def _split(self, row: Tensor, rows: Rows) -> list[Tensor]:
        """Return the tokens of each text. Two texts that share tokens count as one."""
        lengths = rows.lengths
        lengths = [a + b for a, b in zip(lengths[::2], lengths[1::2])] if rows.is_shared or "own" in rows else lengths
        return list(row[0, : rows.used].split(lengths))
