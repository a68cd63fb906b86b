"""Connects this rank to the monitor of its node: failures and stop requests of all ranks travel through the monitors.

The monitor reports ranks that die or hang, chooses the first failure of the run, prints it once per node, and sends it to
every rank. See `watch`.
"""

import contextlib
import os
import sys
import threading
from typing import Any

from accel_ddp import compat, phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.phases import step_of
from accel_ddp.ranks.failures import Failure
from accel_ddp.ranks.process import process
from accel_ddp.ranks.reporting import record
from accel_ddp.watch.link import Link, MonitorAddress, remove_folder, start_monitor

ANSWER_SECONDS = 6.0  # the monitors have chosen the first failure of a run within this time
LEAVE_SECONDS = 1.0  # a rank that can end by itself has begun to do so this long after the failure arrived
STOP_SECONDS = 8.0  # the same for an agreed stop, at which ranks close their trackers


def start_monitor_of_node(cfg: TrainConfig, ip: str) -> MonitorAddress | None:
    """Start the monitor of this node. Only the first rank of a node calls it. None: there is no folder for its files."""
    # Nobody waits for a single rank that a user has started by hand, for example in a notebook or a debugger.
    is_alone = process.num_ranks == 1 and not process.launcher
    try:
        return start_monitor(
            node=process.node, has_other_nodes=process.num_ranks > process.local_ranks, host=process.host, ip=ip,
            launcher=process.launcher, report_after=cfg.hang_report_seconds, abort_after=0 if is_alone else cfg.hang_abort_seconds,
        )  # fmt: skip
    except OSError as error:
        text = f"warning: the monitor of {process.host} cannot be started: {error}. Faults are not reported."
        print(text, file=sys.stderr, flush=True)
        record(text, "MONITOR_LOST")
        return None


def link_to_monitor(address: MonitorAddress) -> None:
    """Connect this rank to the monitor of its node."""
    process.link = Link(address, process.rank, phases.HERE, _receive, lambda: _lose_monitor(address))


def close_link() -> None:
    """Report that the program of this rank is complete. The monitor then does not take its end for a failure."""
    process.is_leaving.set()
    link, process.link = process.link, None
    if link:
        link.close()


def _receive(message: dict[str, Any]) -> None:
    """Handle a message of the monitor. Runs in the thread of the link."""
    if "stop" in message and not process.stop.reason_of_others:
        process.stop.reason_of_others = message["stop"]
    if "want_collective" in message and process.link:
        process.link.send({"collective": _last_collective()})
    if "failure" in message and not process.failure:
        process.failure = Failure.from_message(message["failure"])
        process.has_failed.set()
        threading.Thread(target=_leave_late, args=(process.failure,), daemon=True).start()


def _last_collective() -> str:
    """Return the last collective that this rank has started, for example "all_reduce number 45 of [[768, 768]]"."""
    with contextlib.suppress(Exception):  # a private function of torch
        ours = [entry for entry in compat.recorded_collectives() if entry["process_group"][1] == "default_pg"]
        last = max(ours, key=lambda entry: entry["collective_seq_id"])
        name = last["profiling_name"].rpartition(":")[2]
        return f"{name} number {last['collective_seq_id']}" + (f" of {last['input_sizes']}" if last["input_sizes"] else "")
    return ""


def _leave_late(failure: Failure) -> None:
    """End this rank if it does not end by itself.

    A rank inside of a collective does not notice that another rank is gone before the timeout of the process group.
    """
    if process.is_leaving.wait(STOP_SECONDS if failure.is_signal or failure.kind == "unsaved" else LEAVE_SECONDS):
        return
    process.is_leaving.set()
    process.complete_save()  # after the message, because the disk may hang
    process.close_display()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(failure.exit_code)


def _lose_monitor(address: MonitorAddress) -> None:
    process.link = None
    if process.is_leaving.is_set() or process.failure:
        return
    if process.is_local_main:
        text = (
            f"warning: the monitor process of {process.host} (pid {address.pid}) was killed. Training continues, but faults of this "
            "node are no longer reported within seconds."
        )
        print(text, file=sys.stderr, flush=True)
        record(text, "MONITOR_LOST")
        remove_folder(address)


def report_failure(failure: Failure, seconds: float = ANSWER_SECONDS, is_secondary: bool = False) -> Failure:
    """Report a failure of this rank to all ranks, and return the first failure of the run, which may be that of another rank.

    `is_secondary`: it may follow from the failure of another rank, which is then preferred.
    """
    if process.failure:
        return process.failure
    link = process.link
    if link is None:
        return failure
    place = failure._replace(
        rank=process.rank if failure.rank < 0 else failure.rank, host=failure.host or process.host,
        step=step_of(phases.HERE.step, phases.HERE.phase) if failure.step < 0 else failure.step,
    )  # fmt: skip
    link.send({"failed": {**place.as_message(), "is_secondary": is_secondary}})
    process.has_failed.wait(seconds)
    return process.failure or failure


def wait_for_failure(seconds: float) -> Failure | None:
    """Wait until the monitors report the failure of a rank. None: they have not within this time."""
    if process.link or process.failure:
        process.has_failed.wait(seconds)
    return process.failure


def ask_all_to_stop(reason: str) -> None:
    link = process.link
    if link:
        link.send({"stop": reason})  # the next all-reduce carries the request too


def report_output_dir(output_dir: str) -> None:
    """Let messages of the monitors name the output folder, and let the monitor of the main node watch it."""
    if process.link:
        process.link.send({"output_dir": os.path.abspath(output_dir), "is_watched": process.is_main})


def report_claimed() -> None:
    """Let the monitor of the main node write incidents.jsonl. Before, the folder may belong to another run."""
    if process.link and process.is_main:
        process.link.send({"is_claimed": True})
