"""Runs `accelerate launch` and waits for its rank after a Ctrl-C: `python -m ... accelerate.commands.launch OPTIONS RECIPE`.

Without this, `accelerate launch` of a single process ends with a traceback at Ctrl-C. The traceback overwrites the panel of the
rank, and the prompt of the shell returns below a rank that is still saving. The launcher of several ranks replaces the handler.
"""

import runpy
import signal
import sys
from types import FrameType

from accel_ddp.errors import INTERRUPTED


def _wait_for_the_rank(number: int, frame: FrameType | None) -> None:
    import psutil

    if not psutil.Process().children():  # the rank gets the Ctrl-C too, and ends by itself
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background of a shell ignores Ctrl-C
        signal.signal(signal.SIGINT, _wait_for_the_rank)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
