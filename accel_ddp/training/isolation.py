"""Whether a model that gets several texts in one row computes each of them as if it were alone, or is refused.

A tolerance hides a leak between texts behind the largest hidden value, and short texts hide a window or a block. So there are three
tests. An attention refuses arguments that it does not know. Another text of the same length must not change one bit of the others.
And each channel of the hidden states is compared with padding by its own scale.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Gets the tokens of each text, and returns the hidden states of each: [tokens, channels].
Forward = Callable[[list[Tensor]], list[Tensor]]

# Arguments of an attention that do not change its result, or that the layers have used before they call it.
HARMLESS = frozenset((
    "cache_position", "deterministic", "head_mask", "layer_idx", "max_length_k", "max_length_q", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "use_cache",
))  # fmt: skip
LIMITS = re.compile(r"((window|chunk|block)(_size)?|local_attention)$")  # names in a config: a model changes at this length
LONGEST_MADE = 1024  # tokens of a text that is made to cross a limit, so that the test takes less than a step
TIMES_ROUNDING = 4.0  # as large as the error of padding in half precision may the error without padding be
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LEAKS = "a text in a row changes the result of the others"


def unknown_arguments(module: nn.Module, mask: Any, given: dict[str, Any]) -> str:
    """Return why an attention over a row must not ignore what it is `given`, or "".

    In a row, layers get no mask. One that arrives was computed by the layer (Doge), and its values and gradient would be lost.
    """
    names = [name for name, value in given.items() if value is not None and name not in HARMLESS]
    names += ["attention_mask"] * (mask is not None)
    if not names:
        return ""
    number = getattr(module, "layer_idx", None)
    place = f"{type(module).__name__}{'' if number is None else f' of layer {number}'}"
    return f"{place} passes {', '.join(names)} to its attention, which would be ignored"


def limits_of(config: Any) -> set[int]:
    """Return the windows, chunks, and blocks in a config, or in a config inside it: a longer text may be computed in another way."""
    parts = [config.to_dict()] if hasattr(config, "to_dict") else []
    for part in parts:  # the list grows
        parts += [value for value in part.values() if isinstance(value, dict)]
    return {
        value for part in parts for name, value in part.items() if type(value) is int and value > 1 and LIMITS.search(str(name))
    }


def other_text(text: Tensor, config: Any) -> Tensor:
    """Return another text of the same length, or another image. Special tokens stay in their places, and equal tokens equal."""
    if text.is_floating_point():
        return -text
    known = config.to_dict() if hasattr(config, "to_dict") else {}
    special = [value for name, value in known.items() if re.search("token_(id|index)$", str(name))]
    special = [
        number for value in special for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)
    ]
    usual = torch.tensor(sorted(set(range(vocabulary_of(config))) - set(special)), device=text.device)
    places = torch.searchsorted(usual, text).clamp(max=len(usual) - 1)
    return torch.where(usual[places] == text, usual[(places + 1 + len(usual) // 3) % len(usual)], text)


def made_texts(config: Any, longest: int) -> list[Tensor]:
    """Return texts of random tokens: a short one, one as long as the longest, and one of medium length."""
    drawn = torch.Generator().manual_seed(0)
    lengths = (5, longest, max(3, longest // 2))
    return [torch.randint(vocabulary_of(config), (length,), generator=drawn) for length in lengths]


def vocabulary_of(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def isolation_problem(forward: Forward, texts: list[Tensor], config: Any, model: nn.Module | None = None) -> str:
    """Return "" if no bit of a result changes with the tokens of another text in the row, or else a sentence.

    The longest text but the last is replaced. With `model`, no input of a linear layer may change either, and the sentence names the
    first module whose result for the others changes though its inputs do not. The choice of experts is held, because the number of
    tokens of an expert chooses its kernel. Two passes, the same on all ranks. A kernel that is tuned in its first call needs one
    before them.
    """
    at = max(range(len(texts) - 1), key=lambda i: len(texts[i]), default=0)
    others = [*texts[:at], other_text(texts[at], config), *texts[at + 1 :]]
    start = sum(map(len, texts[:at]))
    behind = start + len(texts[at])
    choices, seen = _Choices(), []
    for some in (texts, others):
        with choices, _Checksums(model, start, behind, sum(map(len, texts))) as sums:
            seen.append((forward(some), sums.found))
    (before, calls), (after, again) = seen
    same = [a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(before, after, strict=True)]
    pairs = [(a, b) for a, b in zip(calls, again) if a.name == b.name]
    mixing = [a.name for a, b in pairs if torch.equal(a.given, b.given) and not torch.equal(a.made, b.made)]
    # A projection that is still 0 hides what it gets.
    hidden = [a.name for a, b in pairs if a.is_linear and not torch.equal(a.given, b.given)]
    if not all(same[:at] + same[at + 1 :]) or hidden:
        return LEAKS + "".join(f" in {name}" for name in (mixing or hidden)[:1])
    is_deaf = torch.equal(before[at], after[at]) and not torch.equal(texts[at], others[at])
    return "the result of a text does not depend on its tokens" if is_deaf else ""


class _Call(NamedTuple):
    """The sums of the bits of what a module got and returned for all texts but one."""

    name: str
    is_linear: bool
    given: Tensor
    made: Tensor


class _Choices(TorchFunctionMode):
    """Holds what `topk` has chosen: the first pass inside it is recorded, and each later one gets the same choices."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.number = self.passes = 0

    def __enter__(self) -> "_Choices":
        self.number, self.passes = 0, self.passes + 1
        super().__enter__()
        return self

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        if self.passes == 1:
            self.made.append(found.indices)
            return found
        given = dict(zip(("input", "k", "dim"), args)) | (kwargs or {})
        held, self.number = self.made[self.number], self.number + 1
        return torch.return_types.topk((given["input"].gather(given.get("dim", -1), held), held))


class _Checksums:
    """Records the calls of modules on a row of texts."""

    def __init__(self, model: nn.Module | None, start: int, behind: int, tokens: int):
        self.modules = dict(model.named_modules()) if model is not None else {}
        self.start, self.behind, self.tokens = start, behind, tokens
        self.found: list[_Call] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> "_Checksums":
        for name, module in self.modules.items():
            self.hooks.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            given, made = self._sums((*args, *kwargs.values())), self._sums(output if isinstance(output, tuple) else (output,))
            if len(given) and len(made):
                self.found.append(_Call(name, isinstance(module, nn.Linear), given, made))

        return record

    def _sums(self, values: Iterable[Any]) -> Tensor:
        rows = [v for v in values if isinstance(v, Tensor) and v.ndim > 2 and len(v) == 1 and v.shape[1] >= self.tokens]
        kept = [torch.cat([row[0, : self.start], row[0, self.behind : self.tokens]]) for row in rows if row.is_floating_point()]
        bits = [part.contiguous().view(_BITS[part.element_size()]) for part in kept]
        return torch.stack([part.sum(dtype=torch.long) for part in bits]) if bits else torch.empty(0)


def channel_distance(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest difference of a channel as a fraction of the largest value of this channel. NaN if there is one."""
    a, b = _rows(before), _rows(after)
    return float(((a - b).abs().amax(0) / _scales(a.abs().amax(0))).max())


def rounding_distance(exact: list[Tensor], padded: list[Tensor], after: list[Tensor], has_experts: bool) -> float:
    """Return how many times the error of padding in half precision the error without padding is, in the worst channel.

    What rounding explains is measured and not guessed. It sends a few tokens to other experts, whose results differ.
    """
    wide, errors = _rows(exact), []
    for found in (padded, after):
        apart = (_rows(found) - wide).abs()
        errors.append(apart.quantile(0.9, 0) if has_experts else apart.square().mean(0).sqrt())
    scales = _scales(wide.square().mean(0).sqrt())
    of_padding, without = (error / scales for error in errors)
    return float((without / of_padding.clamp(min=of_padding.median()).clamp(min=1e-4)).max())


def _rows(texts: list[Tensor]) -> Tensor:
    return torch.cat([text.flatten(0, -2) for text in texts]).double()


def _scales(of_channels: Tensor) -> Tensor:
    """Return the scales without those that are almost 0: rounding is all that such a channel holds."""
    return of_channels.clamp(min=max(float(of_channels.median()) / 100, 1e-12))
