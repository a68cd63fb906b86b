"""Connects this rank to the monitor of its node: failures and stop requests of all ranks travel through the monitors.

The monitor reports ranks that die or hang, chooses the first failure of the run, prints it once per node, and sends it to
every rank. See `watch`.
"""

import contextlib
import json
import os
import sys
import threading
from typing import Any

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.phases import step_of
from accel_ddp.ranks.failures import Failure
from accel_ddp.ranks.process import Exit, Moment, ending, links, this_rank
from accel_ddp.ranks.reporting import record
from accel_ddp.watch.link import Link, MonitorAddress, remove_folder, start_monitor

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
        text = f"warning: the monitor of {this_rank.host} cannot be started: {error}. Faults are not reported."
        print(text, file=sys.stderr, flush=True)
        record(text, "MONITOR_LOST")
        return None


def link_to_monitor(address: MonitorAddress) -> None:
    """Connect this rank to the monitor of its node."""
    links.monitor = Link(address, this_rank.rank, phases.HERE, _receive, lambda: _lose_monitor(address))


def close_link() -> None:
    """Report that the program of this rank is complete. The monitor then does not take its end for a failure."""
    ending.is_leaving.set()
    link, links.monitor = links.monitor, None
    if link:
        link.close()


def _receive(message: dict[str, Any]) -> None:
    """Handle a message of the monitor. Runs in the thread of the link."""
    if "stop" in message and not ending.stop.reason_of_others:
        ending.stop.reason_of_others = message["stop"]
    if "want_collective" in message and links.monitor:
        links.monitor.send({"collective": _last_collective()})
    if "failure" in message and not ending.failure:
        ending.failure = Failure.from_message(message["failure"])
        ending.has_failed.set()
        threading.Thread(target=_leave_late, args=(ending.failure,), daemon=True).start()


def _last_collective() -> str:
    """Return the last collective that this rank has started, for example "all_reduce number 45 of [[768, 768]]"."""
    with contextlib.suppress(Exception):  # a private function of torch
        from torch._C._distributed_c10d import _dump_fr_trace_json  # the Flight Recorder, which is on by default

        entries = json.loads(_dump_fr_trace_json(True, False))["entries"]
        ours = [entry for entry in entries if entry["process_group"][1] == "default_pg"]
        last = max(ours, key=lambda entry: entry["collective_seq_id"])
        name = last["profiling_name"].rpartition(":")[2]
        return f"{name} number {last['collective_seq_id']}" + (f" of {last['input_sizes']}" if last["input_sizes"] else "")
    return ""


def _leave_late(failure: Failure) -> None:
    """End this rank if it does not end by itself.

    A rank inside of a collective does not notice that another rank is gone before the timeout of the process group.
    """
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
        text = (
            f"warning: the monitor process of {this_rank.host} (pid {address.pid}) was killed. Training continues, but faults of this "
            "node are no longer reported within seconds."
        )
        print(text, file=sys.stderr, flush=True)
        record(text, "MONITOR_LOST")
        remove_folder(address)


def report_failure(failure: Failure, seconds: float = ANSWER_SECONDS, is_secondary: bool = False) -> Failure:
    """Report a failure of this rank to all ranks, and return the first failure of the run, which may be that of another rank.

    `is_secondary`: it may follow from the failure of another rank, which is then preferred.
    """
    if ending.failure:
        return ending.failure
    link = links.monitor
    if link is None:
        return failure
    place = failure._replace(
        rank=this_rank.rank if failure.rank < 0 else failure.rank, host=failure.host or this_rank.host,
        step=step_of(phases.HERE.step, phases.HERE.phase) if failure.step < 0 else failure.step,
    )  # fmt: skip
    link.send({"failed": {**place.as_message(), "is_secondary": is_secondary}})
    ending.has_failed.wait(seconds)
    return ending.failure or failure


def wait_for_failure(seconds: float) -> Failure | None:
    """Wait until the monitors report the failure of a rank. None: they have not within this time."""
    if links.monitor or ending.failure:
        ending.has_failed.wait(seconds)
    return ending.failure


def ask_all_to_stop(reason: str) -> None:
    link = links.monitor
    if link:
        link.send({"stop": reason})  # the next all-reduce carries the request too


def report_output_dir(output_dir: str) -> None:
    """Let messages of the monitors name the output folder, and let the monitor of the main node watch it."""
    if links.monitor:
        links.monitor.send({"output_dir": os.path.abspath(output_dir), "is_watched": this_rank.is_main})


def report_claimed() -> None:
    """Let the monitor of the main node write incidents.jsonl. Before, the folder may belong to another run."""
    if links.monitor and this_rank.is_main:
        links.monitor.send({"is_claimed": True})
