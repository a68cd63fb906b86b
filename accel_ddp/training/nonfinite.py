"""Steps whose loss or gradient norm is not finite: `--on_nonfinite`.

`update` never steps the optimizer with such numbers. `NonfiniteSteps` receives the numbers late, and ends the run or counts.
"""

import math
from typing import NoReturn

from accelerate import Accelerator

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main
from accel_ddp.ranks.incidents import warn_on_main
from accel_ddp.ranks.process import process
from accel_ddp.saving.checkpoints import Checkpoints
from accel_ddp.training.late_reader import Numbers

ADVICE = "Try a lower --lr, --warmup_steps, --max_grad_norm 1, bf16 instead of fp16, or inspect the data of this step."


class NonfiniteSteps:
    """Counts skipped steps, and raises UserError where `--on_nonfinite` and `--max_nonfinite` ask for it.

    Every rank has the same loss and gradient norm, so that every rank counts and raises the same.
    """

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, saved: Checkpoints):
        self.has_scaler, self.cfg, self.saved = accelerator.scaler is not None, cfg, saved
        self.skipped = 0  # by this process; `saved.skipped_in_a_row` includes steps before a resume
        self.last = ""  # what was not finite in the last skipped step, or "" if the fp16 scaler is the reason

    def check(self, numbers: Numbers) -> None:
        """Count the step if its update was skipped. This is a collective if the loss is not finite."""
        if math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm):
            self.saved.skipped_in_a_row = 0
            return
        # The scaler finds its factor with such steps, so that they are not reported one by one.
        is_expected = self.has_scaler and math.isfinite(numbers.loss)
        self.last = "" if is_expected else _what(numbers)
        if self.last and self.cfg.on_nonfinite == "stop":
            raise UserError(
                f"step {numbers.step}: {self.last}. The run ends. Earlier checkpoints are not affected. {ADVICE} "
                "With --resume --on_nonfinite skip the run continues without such steps."
            )
        self.skipped += 1
        self.saved.skipped_in_a_row += 1
        in_a_row, limit = self.saved.skipped_in_a_row, self.cfg.max_nonfinite
        if in_a_row >= limit:
            self.refuse(numbers.step)
        if self.last:
            text = (
                f"warning: step {numbers.step}: {self.last}. This update is skipped on every rank, and the run continues. {in_a_row} "
                f"skipped in a row; --max_nonfinite {limit} ends the run."
            )
            warn_on_main(text, "SKIPPED_STEP", numbers.step)

    def refuse(self, step: int) -> NoReturn:
        """Raise UserError, because the last steps were all skipped."""
        in_a_row = self.saved.skipped_in_a_row
        if self.has_scaler and not self.last:
            raise UserError(
                f"step {step}: the fp16 scaler has skipped the last {in_a_row} steps, because their gradients were not finite, so "
                "that nothing was learned in these steps. The run ends. Use --mixed_precision bf16 or no. If gradients are not finite "
                "there either, look for a square root, a logarithm or a division of 0 in the loss, or use a lower --lr."
            )
        raise UserError(
            f"step {step}: the last {in_a_row} steps were skipped, because their loss or gradients were not finite, so that nothing "
            f"was learned in these steps.{f' In the last one, {self.last}.' if self.last else ''} The run ends (--on_nonfinite skip "
            f"--max_nonfinite {self.cfg.max_nonfinite}). Earlier checkpoints are not affected. {ADVICE}"
        )

    def print_summary(self, num_steps: int) -> None:
        """Print how many of the `num_steps` steps of this process were skipped, if there were any."""
        if self.skipped and self.has_scaler:
            print_on_main(f"The fp16 scaler skipped {self.skipped} of {num_steps} steps, because gradients overflowed.")
        elif self.skipped:
            print_on_main(f"{self.skipped} of {num_steps} steps were skipped, because their loss or gradients were not finite.")


def _what(numbers: Numbers) -> str:
    """Return what is not finite, with the ranks whose loss it is. This is a collective if it is the loss."""
    if math.isfinite(numbers.loss):
        return f"the gradient norm is {numbers.grad_norm}, although the loss is {numbers.loss:.4g}"
    losses = gather_everywhere((process.host, numbers.local_loss))
    culprits = [f"rank {rank} on {host}" for rank, (host, loss) in enumerate(losses) if not math.isfinite(loss)]
    return f"the loss is {numbers.loss} on {', '.join(culprits)}"
