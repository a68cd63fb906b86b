"""The state of this process as a rank, in three parts: where it runs, its connections, and how it ends.

Signals and the process group belong to a process and not to a call, so passing this state through every function would only hide
that it is shared. Apart from the heartbeat in `accel_ddp.phases`, no other module of the library has mutable globals.
"""

import contextlib
import enum
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from accel_ddp.nodes.launcher import adopt_mpi_world, find_accelerate_request
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.nodes.topology import estimate_node
from accel_ddp.ranks.failures import Failure
from accel_ddp.records.incidents import IncidentWriter

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch.distributed as dist

    from accel_ddp.watch.link import Link


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, as the launcher has set it in the environment."""

    host: str
    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    restarts: int  # of torchrun --max_restarts
    launcher: int  # pid of `accelerate launch` or torchrun, whose death ends this rank too; 0: a shell or another program

    @classmethod
    def read(cls) -> "RankPlace":
        adopt_mpi_world()
        env = os.environ
        return cls(
            host=socket.gethostname(),
            rank=int(env.get("RANK", 0)),
            num_ranks=int(env.get("WORLD_SIZE", 1)),
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_ranks=int(env.get("LOCAL_WORLD_SIZE", 1)),
            restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            launcher=os.getppid() if "TORCHELASTIC_RUN_ID" in env or find_accelerate_request() is not None else 0,
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0


class Connections:
    """The connections of this rank, and what the ranks have found out over them. `group.connect` opens them."""

    def __init__(self, place: RankPlace) -> None:
        # With one rank these keep their values.
        self.store: dist.Store | None = None  # messages between ranks outside of any collective
        self.slow_group: dist.ProcessGroup | None = None  # gloo without a timeout, for waits of unknown length
        self.num_waits = 0  # numbers the waits of `agreement`, in the same order on every rank
        self.passed_waits: list[str] = []  # whose keys are still in the store, in the order in which they passed
        self.node = estimate_node(place.rank, place.local_rank, place.local_ranks)  # until the ranks have numbered their nodes
        self.nodes = [(place.host, place.num_ranks)]  # host and number of ranks of each node
        self.by_hand = "run the same command with --resume --output_dir FOLDER"  # how the user continues this run; see `restarts`
        self.earlier_run: dict[str, Any] = {}  # of earlier attempts of a launcher that restarts its ranks; see `restarts`

        self.monitor: Link | None = None  # of this node
        self.incidents = IncidentWriter()  # used only without a monitor; see `reporting`

        self.sharding: ShardingPlan | None = None  # how the model is spread over ranks; None: every rank has the whole model
        self.memory: dict[str, int] = {}  # the estimate of GPU memory in bytes, if there is one; see `memory.at_start`

    def tell_monitor(self, message: dict[str, Any]) -> bool:
        """Send a message to the monitor of this node. Return False if there is none."""
        monitor = self.monitor  # another thread may remove it
        if monitor:
            monitor.send(message)
        return monitor is not None


class StopRequest:
    """Whether this rank was asked to stop, by whom, and what all ranks have agreed on. See `signals`."""

    def __init__(self) -> None:
        self.reason = ""  # why this rank was asked to stop; empty: it was not
        self.when = "after this step"  # it takes effect, for messages
        self.reason_of_others = ""  # why another rank was asked to stop, as the monitor has sent it
        self.is_agreed = False  # every rank has reached the stop and saves
        self.can_save = False  # true only while `fit` runs; otherwise a signal ends the rank at once
        self.file: Path | None = None  # OUTPUT_DIR/STOP
        self.file_checked_at = 0.0
        self.handled_signals: list[signal.Signals] = []
        self.pid = 0  # the process that handles signals; a data worker compares its parent with it
        # Becomes readable when this process exits. Unlike a file descriptor, it can be passed to a process that is not forked.
        self.exit_pipe: tuple[Connection, Connection] | None = None

    def announce_exit(self) -> None:
        """Let SIGTERM end the data workers from here on."""
        if self.exit_pipe and self.pid == os.getpid():
            self.exit_pipe[1].send_bytes(b"x")


class Moment(enum.Enum):
    """When callbacks of other packages run."""

    FORK = "before data workers are forked"
    MESSAGES = "before the last messages of this process"
    SAVE = "after the last messages, because a disk may hang"
    TRACKERS = "after the last collective, so no other rank waits"


class Exit(enum.IntEnum):
    """How the run of this process ends."""

    FINISHED = 0
    STOPPED = 1
    FAILED = 2


class ExitCallback(NamedTuple):
    """What an object of another package does at a moment. It has a time limit, because the process must end."""

    moment: Moment
    owner: Any
    run: Callable[[float], object]  # takes the limit
    limits: tuple[float, float, float]  # seconds by `Exit`


class Ending:
    """How this process ends: what was asked for, what went wrong, and what must be completed before."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        self.failure: Failure | None = None  # the first failure of any rank, once received
        self.has_failed = threading.Event()  # set together with `failure`
        self.is_leaving = threading.Event()  # set when this rank begins to exit; the end of other ranks is then no failure
        self.unsaved = ""  # why a run that is complete has no checkpoint of its last step; set by `fit`
        self.early_exit: SystemExit | None = None  # the program has called sys.exit inside `fit`
        self.supervised_pid = 0  # `supervise` turns the end of this process into a message and an exit code
        self.run_folder_lock: IO[str] | None = None  # a lock on the run folder lasts as long as the process
        self.callbacks: list[ExitCallback] = []

    @property
    def is_supervised(self) -> bool:
        return self.supervised_pid == os.getpid()  # a forked process inherits the number

    def add(self, moment: Moment, owner: Any, run: Callable[[float], object], limits: tuple[float, float, float]) -> None:
        """Let `run(seconds)` be called at a moment, after the callbacks that were added before it."""
        self.callbacks.append(ExitCallback(moment, owner, run, limits))

    def remove(self, owner: Any) -> None:
        """Forget the callbacks of an object, which would keep it in memory."""
        self.callbacks[:] = [callback for callback in self.callbacks if callback.owner is not owner]

    def find(self, moment: Moment) -> Any:
        """Return the object that has added the newest callback of a moment, or None."""
        return next((callback.owner for callback in reversed(self.callbacks) if callback.moment == moment), None)

    def run(self, moment: Moment, end: Exit = Exit.FINISHED) -> None:
        """Run the callbacks of a moment. They run once, except for those before a fork. Several threads may call this."""
        for callback in [callback for callback in self.callbacks if callback.moment == moment]:
            # The panel must not hide the messages.
            with contextlib.suppress(Exception) if moment == Moment.MESSAGES else contextlib.nullcontext():
                callback.run(callback.limits[end])
            if moment != Moment.FORK:
                with contextlib.suppress(ValueError):  # another thread, or the callback, has removed it
                    self.callbacks.remove(callback)


def _keep_what_forks_inherit() -> None:
    """Let a forked process never destroy what it inherits.

    CUDA does not work in it, so the destructor of a pinned tensor or of a process group raises there, which aborts: "DataLoader worker
    is killed by signal: Aborted". The first collection after the fork would destroy what an earlier `fit` or a trial step has left in
    reference cycles, so none runs before these objects are frozen.
    """
    forking, was_enabled = threading.RLock(), [True]  # each thread may fork, one after the other

    def pause() -> None:
        forking.acquire()
        was_enabled[0] = gc.isenabled()
        gc.disable()

    def resume() -> None:
        if was_enabled[0]:
            gc.enable()
        forking.release()

    def freeze() -> None:
        gc.freeze()
        resume()

    os.register_at_fork(before=pause, after_in_parent=resume, after_in_child=freeze)


_keep_what_forks_inherit()
this_rank = RankPlace.read()
links = Connections(this_rank)
ending = Ending()


def begin_again() -> None:
    """Set the state of this process as at its import: for the next run in a notebook, or in a process that was forked after it."""
    vars(this_rank).update(vars(RankPlace.read()))
    vars(links).update(vars(Connections(this_rank)))
    vars(ending).update(vars(Ending()))
