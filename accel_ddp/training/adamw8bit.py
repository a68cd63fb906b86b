"""AdamW whose moments have 8 bits, from torchao.

torchao is used and not bitsandbytes, which waits for the GPU after every parameter.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor


def build(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer. Its state is stored in checkpoints as plain tensors: `to_plain` and `from_plain` convert it."""
    from torchao.optim import AdamW8bit as Original
    from torchao.optim.subclass_8bit import OptimState8bit

    class AdamW8bit(Original):
        def step(self, closure: None = None) -> None:
            # A compiler for CPUs may be missing, and the compilation takes longer than it saves.
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
                super().step()

        def to_plain(self, state: dict[str, Any]) -> dict[str, Any]:
            """Return the state of a parameter without tensor subclasses."""
            plain = {}
            for key, value in state.items():
                if isinstance(value, OptimState8bit):
                    plain |= {f"{key}.codes": value.codes, f"{key}.scale": value.scale, f"{key}.qmap": value.qmap}
                else:
                    plain[key] = value
            return plain

        def from_plain(self, plain: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
            """Return the state of a parameter from what `to_plain` has returned."""
            state = {}
            for key, value in plain.items():
                name, _, part = key.partition(".")
                if part == "codes":
                    scale, table = plain[f"{name}.scale"], plain[f"{name}.qmap"]
                    state[name] = OptimState8bit(value, scale, table, signed=name == "exp_avg", dtype=parameter.dtype)
                elif not part:
                    state[key] = value
            return state

    return AdamW8bit(groups, **options)
