"""The state of this process as a rank.

There is one object, `process`. Signals and the process group belong to a process and not to a call, so that passing this state
through every function would only hide that it is shared. No other module of the library has mutable globals.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from accel_ddp.nodes.launcher import adopt_mpi_world, is_started_by_accelerate
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.nodes.topology import estimate_node
from accel_ddp.ranks.failures import Failure
from accel_ddp.records.incidents import IncidentWriter

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch.distributed as dist

    from accel_ddp.watch.link import Link


class StopRequest:
    """Whether this rank was asked to stop, by whom, and what all ranks have agreed on. See `signals`."""

    def __init__(self) -> None:
        self.reason = ""  # why this rank was asked to stop; empty: it was not
        self.reason_of_others = ""  # why another rank was asked to stop, as the monitor has sent it
        self.is_agreed = False  # every rank has reached the stop and saves
        self.can_save = False  # true only while `fit` runs; otherwise a signal ends the rank at once
        self.file: Path | None = None  # OUTPUT_DIR/STOP
        self.file_checked_at = 0.0
        self.handled_signals: list[signal.Signals] = []
        self.pid = 0  # the process that handles signals; a data worker compares its parent with it
        # Becomes readable when this process exits. Unlike a file descriptor, it can be passed to a process that is not forked.
        self.exit_pipe: tuple[Connection, Connection] | None = None


class Process:
    """This rank, its place among the others, and its connections to them."""

    def __init__(self) -> None:
        adopt_mpi_world()
        env = os.environ
        self.host = socket.gethostname()
        self.rank, self.num_ranks = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.local_rank, self.local_ranks = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
        self.node = estimate_node(self.rank, self.local_rank, self.local_ranks)  # `group.connect` sets the right one
        self.nodes = [(self.host, self.num_ranks)]  # host and number of ranks of each node, set by `group.connect`
        self.restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))  # of torchrun --max_restarts
        # The pid of `accelerate launch` or torchrun, whose death ends this rank too. 0: the parent is a shell or another program.
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in env or is_started_by_accelerate() else 0

        # Set by `group.connect`. With one rank they keep these values.
        self.store: dist.Store | None = None  # messages between ranks outside of any collective
        self.earlier_run: dict[str, Any] = {}  # of earlier attempts of a launcher that restarts its ranks; see `watch.outcome`
        self.slow_group: dist.ProcessGroup | None = None  # gloo without a timeout, for waits of unknown length
        self.sharding: ShardingPlan | None = None  # how the model is spread over ranks; None: every rank has the whole model
        self.memory: dict[str, int] = {}  # the estimate of GPU memory in bytes, if there is one; see `memory.at_start`
        self.num_waits = 0  # numbers the waits of `agreement`, in the same order on every rank

        self.link: Link | None = None  # to the monitor of this node
        self.incidents = IncidentWriter()  # used only if there is no monitor; see `ranks.incidents`
        self.failure: Failure | None = None  # the first failure of any rank, once received
        self.has_failed = threading.Event()  # set together with `failure`
        self.is_leaving = threading.Event()  # set when this rank begins to exit; the end of other ranks is then no failure
        self.unsaved = ""  # why a run that is complete has no checkpoint of its last step; set by `fit`
        self.complete_save: Callable[[], None] = lambda: None  # waits for the checkpoint that is being written, with a limit
        self.close_trackers: Callable[..., None] = lambda **_: None  # waits for trackers, with a limit; see `observing.trackers`
        self.wait_for_imports: Callable[[], None] = lambda: None  # of trackers, with a limit; to be called before a fork
        self.display: Any = None  # the live panel of the main rank, if it has a terminal; see `observing.display`
        self.is_supervised = False  # `supervise` turns the end of this process into a message and an exit code
        self.run_folder_lock: IO[str] | None = None  # a lock on the output folder lasts as long as the process
        self.stop = StopRequest()

    def close_display(self, seconds: float = 2.0) -> None:
        """Remove the live panel before the last messages, and wait at most `seconds` for a terminal that is stopped."""
        display, self.display = self.display, None
        if display:
            with contextlib.suppress(Exception):  # this process is about to end, with an exit code that matters more
                display.close(seconds)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0


process = Process()
