"""Detects ranks that failed or died, on every other rank, within seconds.

A rank that fails stores its failure, and a listener thread of every other rank reads it. A rank that is killed stores nothing;
the rank before it in a ring keeps a receive from it open over gloo. When a process dies, the kernel closes its connections, so that
this receive fails at once.
"""

import contextlib
import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

from accel_ddp.ranks.failures import Failure
from accel_ddp.ranks.process import process
from accel_ddp.seeds import mixed

GRACE_SECONDS = 1.5  # a rank whose connection broke may still store its failure within this time
EXIT_SECONDS = 8  # a rank that can end by itself has ended this long after another rank failed
_LAST_MESSAGE_TAG = 83


class Watch:
    """Two threads: one listens to the store for failures and stop requests, one waits for the last message of the next rank."""

    def __init__(self) -> None:
        """Every rank must construct it at the same point, directly after the process group was opened."""
        self._buffer = torch.zeros(1)
        next_rank = (process.rank + 1) % process.num_ranks
        self._last_message = dist.irecv(self._buffer, src=next_rank, group=process.slow_group, tag=_LAST_MESSAGE_TAG)
        self._listener = threading.Thread(target=_listen, daemon=True)
        self._watcher = threading.Thread(target=self._watch_next_rank, daemon=True)
        self._listener.start()
        self._watcher.start()

    def close(self) -> bool:
        """Stop both threads. All ranks call it together, before the interpreter shuts down.

        A thread that is inside the store or gloo at that moment would abort the process. Returns False if the thread that
        waits for the next rank did not end.
        """
        process.is_leaving.set()
        with contextlib.suppress(Exception):
            before = (process.rank - 1) % process.num_ranks
            # Not `dist.send`, which refuses groups after `destroy_process_group`, which `Accelerator.end_training` calls.
            process.slow_group.send([torch.zeros(1)], before, _LAST_MESSAGE_TAG).wait()
        self._watcher.join(5)
        self._listener.join()
        return not self._watcher.is_alive()

    def _watch_next_rank(self) -> None:
        """Report the next rank as dead when its connection breaks before its last message.

        A collective only reports that some connection broke, and a rank inside of NCCL notices nothing at all.
        """
        dead = (process.rank + 1) % process.num_ranks
        try:
            self._last_message.wait()
            return
        except Exception:
            deadline = time.monotonic() + GRACE_SECONDS
        with contextlib.suppress(Exception):  # the store may be lost with its host
            # NCCL may abort more ranks soon after the first one died. The rank that is stored first is reported.
            dead = int(process.store.compare_set("first_dead", "", str(dead)))
            while time.monotonic() < deadline:
                if process.is_leaving.wait(0.05) or process.store.check(["failed"]) or process.store.add("leaving", 0):
                    return
                # The rank has ended normally, or this program has closed the process group itself.
                if process.store.check([f"finished/{dead}"]) or not dist.is_initialized():
                    return
            info = json.loads(process.store.get(f"rank/{dead}"))
            failure = store_failure(
                Failure(
                    "died",
                    f"rank {dead} ({info['host']}, pid {info['pid']}) died without an error message. It was probably killed by the "
                    f"kernel for using too much memory (check `dmesg -T | grep -i kill` on {info['host']}), or its node is down. "
                    "Continue from the last checkpoint with --resume.",
                )
            )
            if is_first_on_node(str(failure)):
                print(failure, file=sys.stderr, flush=True)


def _listen() -> None:
    """End this rank after another one has failed, and receive stop requests.

    A rank inside a NCCL collective does not notice that another rank is gone before the timeout, and is then aborted without
    an error message of ours. Ranks that can end by themselves have done so within EXIT_SECONDS.
    """
    while not process.is_leaving.wait(1):
        try:
            if not process.stop.reason_of_others and process.store.check(["stop"]):
                process.stop.reason_of_others = process.store.get("stop").decode()
            if not process.store.check(["failed"]):
                continue
            failure = Failure.decode(process.store.get("failed"))
        except Exception:
            return  # the store is lost with its host
        if not failure.is_signal:  # at once: NCCL may end this process before we do, and a save may take long
            is_first = process.is_local_main
            with contextlib.suppress(Exception):  # the store may be lost with its host
                is_first = is_first_on_node(str(failure))
            if is_first:
                print(failure, file=sys.stderr, flush=True)
        process.failure = failure
        if process.is_leaving.wait(EXIT_SECONDS):
            return  # this rank ends by itself
        if failure.is_signal and process.is_local_main:
            print(failure, file=sys.stderr, flush=True)
        process.complete_save()  # after the message, because the disk may hang
        os._exit(failure.exit_code)


def store_failure(failure: Failure) -> Failure:
    """Store `failure` for all ranks, unless another rank was first. Return the first failure.

    A rank that fails because another rank died then reports the failure of the other rank.
    """
    with contextlib.suppress(Exception):  # the store may be lost with its host
        if process.store and not process.failure:
            return Failure.decode(process.store.compare_set("failed", "", failure.encode()))
    return process.failure or failure


def end_job(failure: Failure) -> None:
    """Store that the run was stopped on request, so that ranks which torchrun starts again end with the same message."""
    with contextlib.suppress(Exception):  # the store may be lost with its host
        if process.job_store:
            process.job_store.set("stopped", failure.encode())


def find_dead_rank(seconds: float = 3 * GRACE_SECONDS) -> Failure | None:
    """Wait after a broken connection until the rank that watches the dead one reports it. None: nothing was reported."""
    deadline = time.monotonic() + seconds
    while process.store and time.monotonic() < deadline:
        try:
            if process.store.check(["failed"]):
                return Failure.decode(process.store.get("failed"))
        except Exception:
            return Failure(
                "died",
                f"the main node {os.environ['MASTER_ADDR']} is lost: a rank or the launcher was killed there (see its output), or "
                "the node is down. Continue from the last checkpoint with --resume.",
            )
        time.sleep(0.05)
    return None


def is_first_on_node(text: str) -> bool:
    """Return whether no other rank of this node has printed this text."""
    if process.store is None:
        return process.is_local_main
    return process.store.add(f"printed/{process.host}/{os.getppid()}/{mixed(0, text)}", 1) == 1


def ask_all_to_stop(reason: str) -> None:
    with contextlib.suppress(Exception):  # the store may be lost with its host; the next all-reduce carries the request too
        if process.store:
            process.store.set("stop", reason)
