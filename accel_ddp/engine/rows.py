"""The micro-batch of texts: one behind the other in one row, without padding, counted on the host.

A data worker makes it, so no code reads a size from the device. An item has one or several texts: the pair of a preference, or the
documents of a packed row. If a text begins with the prompt of the text before it, the row has this prompt once.

On a GPU the row is filled up, so that there are few different lengths, because each is captured as a CUDA graph. The filler is a text
without item and label.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MicroBatch = Any  # `Rows`, or what another collate function makes
IGNORED = -100  # a label that losses ignore
GIVEN = ("input_ids", "token_type_ids")  # columns that a model reads; tasks read the others
DOCUMENTS = "document_lengths"  # a column of items that consist of several texts
PLACES = (
    "starts",
    "positions",
    "shared",
    "key_tokens",
    "key_starts",
    "key_places",
    "first_texts",
    "labelled",
    "answers",
)  # columns
INSTALLED = "_rows_call"  # the attribute of a model with what serves it


def rounded_up(number: int) -> int:
    """Round up by a fiftieth on average, to one of few different numbers."""
    grain = grain_of(number)
    return max(1, -(-number // grain)) * grain


def grain_of(number: int) -> int:
    """Return the difference between neighboring rounded numbers."""
    return max(64, 1 << max(0, (number // 16).bit_length() - 1))


class Grid(NamedTuple):
    """Where the tokens of a row are in a padded batch, which has each text in a line of its own."""

    mask: Tensor  # bool [texts, width]: whether a text is so long
    slots: Tensor  # for each position of the batch: its token in the row (0 for padding)
    places: Tensor  # for each token in the row: its position in the batch (0 for the filler)
    real: Tensor  # bool, for each token in the row: whether it is not of the filler
    own: Tensor | None = None  # bool: `mask` without the tokens that the text before shares; None: nothing is shared
    second: Tensor | None = None  # for each token in the row: the second position of a shared one, or -1


class Move(torch.autograd.Function):
    """Moves rows: [1, from, ...] -> [1, to, ...]. The gradient is an indexing, not a sum, so that it is deterministic.

    A row may be moved to two places. `second` is the other one, or -1.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, there: Tensor, back: Tensor, has_gradient: Tensor, second: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(back, has_gradient, second)
        return rows.index_select(1, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        back, has_gradient, second = ctx.saved_tensors
        rows = gradient.index_select(1, back)
        wide = lambda flags: flags.view(1, -1, *[1] * (rows.ndim - 2))
        rows.mul_(wide(has_gradient))
        if second is not None:
            rows += gradient.index_select(1, second.clamp(min=0)).mul_(wide(second >= 0))
        return rows, None, None, None, None


def pack(padded: Tensor, at: Grid) -> Tensor:
    """[texts, width, ...] -> [1, tokens, ...]"""
    if padded.shape[0] == 1 and at.mask.shape[0] > 1:  # positions, which are the same for every text
        padded = padded.expand(at.mask.shape[0], *padded.shape[1:])
    # The result is not a view, because compiled code is specialized on whether a tensor is a view.
    rows = padded.flatten(0, 1)[None]
    if not rows.requires_grad:  # positions; the host needs half the time
        return rows.index_select(1, at.places)
    return Move.apply(rows, at.places, at.slots, (at.mask if at.own is None else at.own).flatten())


def unpack(row: Tensor, at: Grid) -> Tensor:
    """[1, tokens, ...] -> [texts, width, ...]. Padding gets arbitrary finite values."""
    # Not `[0]`: its backward pass copies the gradient into a tensor of zeros.
    return Move.apply(row, at.slots, at.places, at.real, at.second).squeeze(0).unflatten(0, at.mask.shape)


@dataclass(eq=False)
class Rows:
    """Texts one behind the other. Columns have a value per token, per text, or per item, or are `Rows` themselves.

    Numbers are known on the host. `rows["labels"]` is a column.
    """

    columns: dict[str, Any]
    items: int
    texts: int
    used: int  # tokens of the texts; those behind them are the filler
    whole: int  # the same, with shared tokens counted twice
    squares: int  # the sum of the squared lengths, which is proportional to the cost of attention
    width: int  # tokens of the longest text
    longest: int  # at least that, and at least the tokens of the filler
    targets: int  # labels that are not ignored, if each token has a label; otherwise 0
    is_causal: bool = False  # whether the label of a token is that of the next token

    @classmethod
    def join(
        cls, per_token: Mapping[str, Tensor], lengths: Tensor, more: Mapping[str, Any] | None = None, shared: Tensor | None = None,
        first_texts: Tensor | None = None, multiple: int = 0, items: int = 0,
    ) -> "Rows":  # fmt: skip
        """Make rows of columns `per_token`, which are joined already, and `more` columns per text or item.

        `lengths` are those of the texts without the tokens that they share with the text before them: `shared`, which is 0 for at least
        every second text. `first_texts` of the items and the number of texts are given if items have different numbers of them, and
        otherwise `items`, if an item has several. Labels have the name "labels": `labelled` becomes the tokens that have one, and
        `answers` those labels. With a `multiple`, which GPUs prefer, sizes are rounded up.
        """
        texts, whole = len(lengths), lengths if shared is None else lengths + shared
        used, width, total, squares = int(lengths.sum()), max(whole.tolist(), default=0), int(whole.sum()), int((whole**2).sum())
        tokens, longest, more_texts = used, width, 0
        if multiple:
            tokens, width = rounded_up(used), -(-width // multiple) * multiple
            # The filler is computed like a text, so it must not be longer than the longest. It is shorter than the grain.
            longest = max(1 << max(0, width - 1).bit_length(), grain_of(tokens))
            more_texts = 1 if first_texts is None else 1 + rounded_up(texts) - texts
            lengths = F.pad(lengths, (0, more_texts))
            lengths[texts] = tokens - used
        columns = {**(more or {})}
        for name, values in per_token.items():
            around = [0, 0] * (values.ndim - 1)
            columns[name] = F.pad(values, (*around, 0, tokens - used), value=IGNORED if name == "labels" else 0)
        starts = F.pad(lengths.cumsum(0), (1, 0))
        before = torch.zeros_like(lengths) if shared is None else F.pad(shared, (0, more_texts))
        of_token = torch.repeat_interleave(lengths)
        positions = torch.arange(used) - (starts[:-1] - before)[of_token[:used]]
        columns |= {"starts": starts.int(), "positions": F.pad(positions, (0, tokens - used))}  # few models know many positions
        if shared is not None:
            # Few different numbers of keys on a GPU; a surplus costs nothing.
            room = -(-2 * (total + tokens - used) // tokens) * (tokens // 2) if multiple else 0
            columns |= _keys(starts, lengths, before, of_token, room) | {"shared": shared}
        if first_texts is not None:
            columns["first_texts"], items = first_texts, len(first_texts) - 1
        targets = columns["target"].targets if "target" in columns else 0
        if "labels" in per_token:
            places = (per_token["labels"] != IGNORED).nonzero().flatten()
            targets = len(places)
            room = rounded_up(targets) if multiple else max(1, targets)
            columns["labelled"] = F.pad(places, (0, room - targets))
            columns["answers"] = F.pad(per_token["labels"][places], (0, room - targets), value=IGNORED)
        return cls(columns, items or texts, texts, used, total, squares, width, longest, targets)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.columns[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def get(self, name: str, default: Any = None) -> Any:
        return self.columns.get(name, default)

    @property
    def tokens(self) -> Tensor:
        return self.columns["input_ids"]

    @property
    def starts(self) -> Tensor:
        """The first token of each text and of the filler, and the end of the row: int32."""
        return self.columns["starts"]

    @property
    def is_shared(self) -> bool:
        return "key_tokens" in self.columns

    def _with(self, columns: dict[str, Any], **numbers: int) -> "Rows":
        return dataclasses.replace(self, columns=columns, **numbers)

    def __copy__(self) -> "Rows":
        return self._with({**self.columns})

    def tensors(self) -> dict[str, Tensor]:
        """Return all columns, those of inner rows too."""
        found = {name: value for name, value in self.columns.items() if isinstance(value, Tensor)}
        inner = [(name, value.tensors()) for name, value in self.columns.items() if isinstance(value, Rows)]
        return found | {f"{name}/{column}": value for name, some in inner for column, value in some.items()}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Rows":
        """Return the rows with other tensors, which have the same sizes."""
        found = {n: function(v) if isinstance(v, Tensor) else v.map(function) if isinstance(v, Rows) else v
                 for n, v in self.columns.items()}  # fmt: skip
        return self._with(found)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Rows":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Rows":
        return self.map(Tensor.pin_memory)

    def replaced(self, **columns: Any) -> "Rows":
        """Return the same rows with other columns."""
        return self._with(self.columns | columns)

    def apart(self) -> "Rows":
        """Return rows whose texts share nothing. `result.columns["own"]` has the place of each token of these rows among theirs."""
        if not self.is_shared:
            return self
        keys, end = self["key_tokens"], self.whole + len(self.tokens) - self.used
        found = {name: self[name][keys[:end]] for name in (*GIVEN, "positions") if name in self}
        return self._with(found | {"starts": self["key_starts"], "own": self["key_places"][0]}, used=self.whole)

    @functools.cached_property
    def grid(self) -> Grid:
        """Where the tokens are in a padded batch of the shape (texts, width)."""
        return self.grid_of_size(self.width, len(self["positions"]))

    def grid_of_size(self, width: int, tokens: int) -> Grid:
        """Return `grid` for another width, and for a row with another number of tokens."""
        lengths, columns = self.starts[: self.texts + 1].diff(), torch.arange(width, device=self.starts.device)
        starts = self["key_starts"] if self.is_shared else self.starts
        starts = starts[: self.texts + 1].long()
        mask = columns < starts.diff()[:, None]
        slots = torch.where(mask, starts[:-1, None] + columns, 0).flatten()
        of_token = torch.repeat_interleave(lengths, output_size=self.used)
        places = F.pad(of_token * width + self["positions"][: self.used], (0, tokens - self.used))
        real = torch.arange(tokens, device=mask.device) < self.used
        if not self.is_shared:
            return Grid(mask, slots, places, real)
        own = mask & (columns >= self["shared"][:, None])
        second = torch.where(self["key_places"][1] < 0, -1, places + width)
        return Grid(mask, torch.where(mask.flatten(), self["key_tokens"][slots], 0), places, real, own, second)

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """[tokens, ...] -> [texts, width, ...]"""
        wide = self.grid.mask.view(*self.grid.mask.shape, *[1] * (values.ndim - 1))
        return unpack(values[None], self.grid).masked_fill(~wide, fill)

    def unpad(self, padded: Tensor) -> Tensor:
        """[texts, width, ...] -> [tokens, ...]"""
        return pack(padded, self.grid).squeeze(0)

    def take(self, row: Tensor) -> Tensor:
        """Return what tokens with a label have, and the unused end of `labelled`: [1, tokens, ...] -> [labelled, ...]"""
        learned = self["labels"] != IGNORED
        return Move.apply(row, self["labelled"], _numbers(learned), learned).squeeze(0)

    def spread(self, values: Tensor) -> Tensor:
        """Return values of tokens with a label as values of all tokens, which are 0 for the others."""
        learned = self["labels"] != IGNORED
        found = Move.apply(values[None], _numbers(learned), self["labelled"], self["answers"] != IGNORED).squeeze(0)
        return torch.where(learned, found, 0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the tokens of each item: [tokens] -> [items]. It does not depend on other items."""
        starts = self.starts[: self.texts + 1].long()
        starts = starts[self["first_texts"]] if "first_texts" in self else starts
        wide = values if values.is_floating_point() else values.float()
        return torch.segment_reduce(wide[: self.used], "sum", lengths=starts.diff(), unsafe=True).to(values.dtype)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The tokens of each text of rows that share nothing. It reads the device."""
        return self.starts[: self.texts + 1].diff().tolist()


def _numbers(learned: Tensor) -> Tensor:
    """Return for each token with a label its number among them."""
    return (learned.cumsum(0) - 1).clamp(min=0)


class Collate:
    """Makes `Rows` of tokenized items. It holds no function, so data workers can unpickle it.

    The columns `per_token` have a value for each token. An item has one text, a list of texts, or several that DOCUMENTS divides. With
    `is_causal`, the label of a token becomes that of the token before it. With `shares`, an item has two texts, whose common prompt
    is stored once. `target` is the column with the texts of a decoder. With a `multiple`, which GPUs prefer, sizes are rounded up.
    """

    def __init__(
        self, per_token: tuple[str, ...] = (), multiple: int = 0, is_causal: bool = False, shares: bool = False, target: str = ""
    ):
        self.per_token, self.multiple, self.is_causal, self.shares, self.target = per_token, multiple, is_causal, shares, target

    def __call__(self, items: list[dict[str, Any]]) -> Rows:
        items = [{name: value.tolist() if isinstance(value, Tensor) else value for name, value in item.items()} for item in items]
        names = [name for name in (*GIVEN, *self.per_token) if name in items[0]]
        texts = [dict(zip(names, text)) for item in items for text in zip(*(_texts_of(item, name) for name in names))]
        for text in texts if self.is_causal else ():
            text["labels"] = [*text["labels"][1:], IGNORED]
        shared, first_texts = None, None
        if self.shares:
            some = [number for one, other in zip(texts[::2], texts[1::2]) for number in (0, _common(one, other))]
            texts, shared = [{n: v[k:] for n, v in text.items()} for text, k in zip(texts, some)], torch.tensor(some)
        if DOCUMENTS in items[0]:
            first_texts = F.pad(torch.tensor([len(item[DOCUMENTS]) for item in items]).cumsum(0), (1, 0))
        done = (*names, self.target, DOCUMENTS, "attention_mask")
        more = {name: _column([item[name] for item in items]) for name in items[0] if name not in done}
        if self.target:
            ends = [max((i + 1 for i, label in enumerate(item[self.target]) if label != IGNORED), default=0) for item in items]
            labels = {"labels": _joined([item[self.target][:end] for item, end in zip(items, ends)])}
            more["target"] = Rows.join(labels, torch.tensor(ends), multiple=self.multiple)
        per_token = {name: _joined([text[name] for text in texts]) for name in names}
        lengths = torch.tensor([len(text["input_ids"]) for text in texts])
        rows = Rows.join(per_token, lengths, more, shared, first_texts, self.multiple, len(items))
        rows.is_causal = self.is_causal
        return rows


def _texts_of(item: dict[str, Any], name: str) -> list[Any]:
    values = item[name]
    if DOCUMENTS in item:
        ends = [*itertools.accumulate(item[DOCUMENTS], initial=0)]
        return [values[start:end] for start, end in itertools.pairwise(ends)]
    return values if len(values) and isinstance(values[0], list) else [values]


def _common(one: dict[str, list], other: dict[str, list]) -> int:
    """Return how many tokens two texts share before the first label of either. The second one keeps a token of its own."""
    same = zip(one["input_ids"], other["input_ids"][:-1], one["labels"], other["labels"])
    return sum(1 for _ in itertools.takewhile(lambda at: at[0] == at[1] and at[2] == at[3] == IGNORED, same))


def _joined(parts: list[list]) -> Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=torch.long)


def _column(values: list[Any]) -> Tensor:
    """Return values per item. Lists of different lengths are filled with NaN."""
    if isinstance(values[0], list) and len({len(some) for some in values}) > 1:
        most = max(map(len, values))
        values = [[*some, *[float("nan")] * (most - len(some))] for some in values]
    return torch.tensor(values)


def _keys(starts: Tensor, lengths: Tensor, shared: Tensor, of_token: Tensor, room: int) -> dict[str, Tensor]:
    """Return the keys that texts attend to: `key_tokens` are those of the whole texts one after the other.

    `key_starts` (int32) has the first key of each text, and `key_places` for each token its place among the keys, and the second
    place of a shared one or -1.
    """
    whole = lengths + shared
    first = F.pad(whole.cumsum(0), (1, 0))
    text = torch.repeat_interleave(whole)
    place = torch.arange(len(text)) - first[text]
    keys = torch.where(place < shared[text], starts[text - 1], starts[text] - shared[text]) + place
    offset = torch.arange(len(of_token)) - starts[of_token]
    places = first[of_token] + shared[of_token] + offset
    again = torch.where(offset < F.pad(shared[1:], (0, 1))[of_token], first[of_token + 1] + offset, -1)
    return {
        "key_tokens": F.pad(keys, (0, max(0, room - len(keys)))),
        "key_starts": first.int(),
        "key_places": torch.stack([places, again]),
    }


def shared_tokens(ids: Tensor, mask: Tensor) -> Tensor:
    """Return for each text of a batch that is padded at its end how many of its first tokens are those of the text before it.

    Every second text shares tokens, and the others share none.
    """
    same = ((ids[0::2] == ids[1::2]) & (mask[0::2] * mask[1::2]).bool()).long().cumprod(1).sum(1)
    return torch.stack([torch.zeros_like(same), same], 1).flatten()


class RowsCall:
    """Lets a model of transformers be called with `Rows`. It gets padded texts.

    Results per token are [1, tokens, ...], and results per text [texts, ...].
    """

    rows: Rows | None = None  # of the call that runs

    def __init__(self, model: nn.Module, owner: Any):
        """`owner` is the model of transformers in `model`, which may have adapters around it."""
        self.called, self.owner, self.hooks = hook_target(model, owner), owner, []
        self.names = [*inspect.signature(type(owner).forward).parameters]

    def install(self) -> None:
        if earlier := vars(self.owner).get(INSTALLED):
            earlier.remove()
        self.hooks += [
            self.called.register_forward_pre_hook(self._open, with_kwargs=True),
            self.called.register_forward_hook(self._close, always_call=True),
        ]

        setattr(self.owner, INSTALLED, self)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        vars(self.owner).pop(INSTALLED, None)

    def computed(self, rows: Rows) -> Rows:
        """Return the rows that the model computes for these."""
        return rows

    def inputs_of(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the model."""
        fill = getattr(self.owner.config.get_text_config(), "pad_token_id", None) or 0
        found = {name: rows.pad(rows[name], fill if name == "input_ids" else 0) for name in GIVEN if name in rows}
        found["attention_mask"] = rows.grid.mask.long()
        if "target" in rows:  # the model does not need the labels, and computes no loss itself
            labels = rows["target"].pad(rows["target"]["labels"], IGNORED)
            found["decoder_input_ids"] = self.owner.prepare_decoder_input_ids_from_labels(labels=labels)
        return {name: value for name, value in (found | {"use_cache": False}).items() if name in self.names}

    def _open(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.rows, name = None, self.owner.main_input_name  # the wrapper of adapters passes it by its name
        rows = args[0] if args else kwargs.get(name)
        if not isinstance(rows, Rows):
            return None
        self.rows = self.computed(rows)
        more = {other: value for other, value in kwargs.items() if value is not None and other != name}
        return (), self.inputs_of(self.rows) | more

    def _close(self, module: nn.Module, args: tuple, output: Any) -> Any:
        rows, self.rows = self.rows, None
        if rows is None or output is None:  # None: the model has raised an error
            return None
        at, own = rows.get("target", rows).grid, rows.get("own")

        def flat(x: Tensor) -> Tensor:
            if x.ndim > 2 and x.shape[:2] == at.mask.shape:
                x = pack(x, at)
            return x if own is None or x.shape[:2] != (1, len(at.places)) else x[:, own]

        return map_tensors(output, flat)


def accept_rows(model: nn.Module) -> None:
    """Let a model of transformers, or the one in `model`, be called with `Rows`. Nothing happens to one that computes them already."""
    owner = next((m for m in model.modules() if hasattr(type(m), "main_input_name")), None)
    if owner is not None and INSTALLED not in vars(owner):
        RowsCall(model, owner).install()


def hook_target(model: nn.Module, owner: nn.Module) -> nn.Module:
    """Return the module whose hooks run when `owner` runs: adapters call `forward` of the model that they wrap, past its hooks."""
    around = [m for m in model.modules() if m is not owner and getattr(m, "model", None) is owner]
    return next((m for m in around if type(m).__module__.startswith("peft.")), owner)


def map_tensors(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to each tensor of two or more dimensions in the output of a module, which is changed if it is a mapping."""
    if isinstance(output, Tensor):
        return function(output) if output.ndim > 1 else output
    if isinstance(output, Mapping):
        for name, value in output.items():
            output[name] = map_tensors(value, function)
        return output
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return type(output)(map_tensors(value, function) for value in output)
    return output
