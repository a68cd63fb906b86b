"""What a rank tells the other ranks and the users: failures, stop requests, warnings and lines of the logger `accel_ddp`.

The first three travel through the monitor of the node (see `watch`), which reports ranks that die or hang, chooses the first
failure of the run, prints it once per node, sends it to every rank, and writes incidents.jsonl. Without a monitor, the run does.
"""

import contextlib
import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from accel_ddp import compat, phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.phases import step_of
from accel_ddp.ranks.failures import Failure
from accel_ddp.ranks.process import Exit, Moment, ending, links, this_rank
from accel_ddp.records.incidents import ERROR, Incident
from accel_ddp.watch.link import Link, MonitorAddress, start_monitor
from accel_ddp.watch.restart_files import how_to_continue

ANSWER_SECONDS = 6.0  # the monitors have chosen the first failure of a run within this time
LEAVE_SECONDS = 1.0  # a rank that can end by itself has begun to do so this long after the failure arrived
STOP_SECONDS = 8.0  # the same for an agreed stop, at which ranks close their trackers


def start_monitor_of_node(cfg: TrainConfig, ip: str) -> MonitorAddress | None:
    """Start the monitor of this node. Only the first rank of a node calls it. None: there is no folder for its files."""
    # Nobody waits for a single rank that a user has started by hand, for example in a notebook or a debugger.
    is_alone = this_rank.num_ranks == 1 and not this_rank.launcher
    try:
        return start_monitor(
            node=links.node, has_other_nodes=this_rank.num_ranks > this_rank.local_ranks, host=this_rank.host, ip=ip,
            launcher=this_rank.launcher, report_after=cfg.hang_report_seconds, abort_after=0 if is_alone else cfg.hang_abort_seconds,
        )  # fmt: skip
    except OSError as error:
        warn(f"warning: the monitor of {this_rank.host} cannot be started: {error}. Faults are not reported.", "MONITOR_LOST")
        return None


def link_to_monitor(address: MonitorAddress) -> None:
    links.monitor = Link(address, this_rank.rank, phases.HERE, _receive, lambda: _lose_monitor(address))


def _receive(message: dict[str, Any]) -> None:
    """Handle a message of the monitor. Runs in the thread of the link."""
    if "stop" in message:
        ending.stop.reason_of_others = ending.stop.reason_of_others or message["stop"]
    if "want_collective" in message:
        links.tell_monitor({"collective": _last_collective()})
    if "failure" in message and not ending.failure:
        failure = Failure(**{name: value for name, value in message["failure"].items() if name in Failure._fields})
        ending.failure = failure
        ending.has_failed.set()
        threading.Thread(target=_leave_late, args=(failure,), daemon=True).start()


def _last_collective() -> str:
    """Return the last collective that this rank has started, for example "all_reduce number 45 of [[768, 768]]"."""
    with contextlib.suppress(Exception):  # a private function of torch
        ours = [entry for entry in compat.recorded_collectives() if entry["process_group"][1] == "default_pg"]
        last = max(ours, key=lambda entry: entry["collective_seq_id"])
        name = last["profiling_name"].rpartition(":")[2]
        return f"{name} number {last['collective_seq_id']}" + (f" of {last['input_sizes']}" if last["input_sizes"] else "")
    return ""


def _leave_late(failure: Failure) -> None:
    """End this rank if it does not end by itself: inside a collective it does not notice that another rank is gone."""
    if ending.is_leaving.wait(STOP_SECONDS if failure.is_signal or failure.kind == "unsaved" else LEAVE_SECONDS):
        return
    ending.is_leaving.set()
    ending.run(Moment.SAVE, Exit.FAILED)
    ending.run(Moment.MESSAGES, Exit.FAILED)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(failure.exit_code)


def _lose_monitor(address: MonitorAddress) -> None:
    links.monitor = None
    if ending.is_leaving.is_set() or ending.failure:
        return
    if this_rank.is_local_main:
        warn(
            f"warning: the monitor process of {this_rank.host} (pid {address.pid}) was killed. Training continues, but faults of this "
            "node are no longer reported within seconds.",
            "MONITOR_LOST",
        )
        shutil.rmtree(address.folder, ignore_errors=True)


def report_failure(failure: Failure, seconds: float = ANSWER_SECONDS, is_secondary: bool = False) -> Failure:
    """Report a failure of this rank to all ranks, and return the first failure of the run, which may be another rank's.

    `is_secondary`: it may follow from the failure of another rank, which is then preferred.
    """
    if ending.failure:
        return ending.failure
    step = step_of(phases.HERE.step, phases.HERE.phase) if failure.step < 0 else failure.step
    if failure.kind in ("died", "failed") and phases.HERE.step and links.by_hand:  # later there may be a checkpoint
        space = "\n" if "\n" in failure.text else " "  # after a traceback
        failure = failure._replace(text=f"{failure.text}{space}{how_to_continue(failure.exit_code, step, links.by_hand)}")
    if links.monitor is None:
        return failure
    rank = this_rank.rank if failure.rank < 0 else failure.rank
    placed = failure._replace(rank=rank, host=failure.host or this_rank.host, step=step)
    links.tell_monitor({"failed": {**placed.as_message(), "is_secondary": is_secondary}})
    ending.has_failed.wait(seconds)
    return ending.failure or failure


def wait_for_failure(seconds: float) -> Failure | None:
    """Wait until the monitors report the failure of a rank. None: they have not within this time."""
    if links.monitor or ending.failure:
        ending.has_failed.wait(seconds)
    return ending.failure


def record(text: str, kind: str = "WARNING", level: str = "", step: int = -1) -> None:
    """Store an incident, without waiting for the disk. It may be called on every rank: equal texts are stored once.

    `text` may begin with a level and a kind, as in "warning: LOSS_SPIKE: the loss is ...". The level is otherwise "warning".
    """
    incident = Incident.parse(text.strip(), kind, level, rank=this_rank.rank, host=this_rank.host, step=step)
    if not links.tell_monitor({"incident": incident._asdict()}) and this_rank.is_main:
        links.incidents.write(incident)
        if ending.run_folder_lock:
            links.incidents.open(Path(ending.run_folder_lock.name).parent)


def warn(text: str, kind: str, step: int = -1) -> None:
    print(text, file=sys.stderr, flush=True)
    record(text, kind, step=step)


def warn_on_main(text: str, kind: str = "WARNING", step: int = -1) -> None:
    if this_rank.is_main:
        print(text, flush=True)
        record(text, kind, step=step)


class IncidentHandler(logging.Handler):
    """Stores the warnings of the library. Reports of long waits, which are repeated, are no incidents."""

    def emit(self, entry: logging.LogRecord) -> None:
        text = entry.getMessage()
        if not text.startswith("waiting for"):
            kind = "FALLBACK" if entry.name.startswith("accel_ddp.speed") else "WARNING"
            record(text, kind, ERROR if entry.levelno >= logging.ERROR else "")


def _filter(record: logging.LogRecord) -> bool:
    """Drop messages below WARNING on all ranks but the main one, because every rank logs the same ones."""
    is_warning = record.levelno >= logging.WARNING
    record.prefix = f"[{this_rank.host} rank {this_rank.rank}] " if this_rank.num_ranks > 1 else ""
    record.severity = f"{record.levelname.lower()}: " if is_warning else ""
    return this_rank.is_main or is_warning


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which may be replaced after the handler was made."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


def hide_torchao() -> None:
    """Hide warnings about classes of torchao and its kernels for some GPUs. PEFT imports it, and users cannot act on them."""
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)


def configure() -> None:
    """Send messages of the library to stderr. An application that has configured the logger keeps its own handlers."""
    hide_torchao()
    logger = logging.getLogger("accel_ddp")
    has_handlers = bool(logger.handlers)
    if not any(isinstance(handler, IncidentHandler) for handler in logger.handlers):
        logger.addHandler(IncidentHandler(logging.WARNING))
    if has_handlers:
        return
    handler = _StderrHandler()
    handler.addFilter(_filter)
    handler.setFormatter(logging.Formatter("%(prefix)s%(severity)s%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
