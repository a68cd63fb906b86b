"""Calls a tracker in a thread, so that a tracker that is slow, hangs or fails neither stops nor slows training."""

import atexit
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accel_ddp.observe.tracker_kinds import Tracker
from accel_ddp.ranks.process import ending
from accel_ddp.ranks.reporting import record
from accel_ddp.records.redaction import redact

MOST_CALLS = 5_000  # that wait; of rows with 100 numbers, this is about 50 MB
IMPORT_SECONDS = 60.0  # for the import of a package, if data workers are about to be forked
EXIT_SECONDS = 5.0  # for what a tracker does when the interpreter exits
QUIET_SECONDS = 2.0  # a wait that is shorter is not reported


class Call(NamedTuple):
    """One call of a tracker that waits in the queue."""

    what: str  # for messages
    function: Callable[..., Any] | None  # None ends the thread
    arguments: tuple[Any, ...] = ()
    is_row: bool = False  # rows may be dropped
    is_vital: bool = True  # if the call fails, the tracker is not called again


class TrackerThread:
    """The thread and the queue of one tracker."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.name = tracker, tracker.name
        self.calls: deque[Call] = deque()
        self.has_calls = threading.Condition()
        self.is_loaded, self.is_done = threading.Event(), threading.Event()
        self.doing = "start"
        self.rows_dropped = 0
        self.works = True
        threading.Thread(target=self._call_again_and_again, name=f"tracker {self.name}", daemon=True).start()

    def put(self, call: Call) -> None:
        """Append a call. If the queue is full, the oldest row is dropped, and this is printed once."""
        with self.has_calls:
            if not self.works:
                return
            is_full = len(self.calls) >= MOST_CALLS
            if is_full:
                self._drop_oldest_row()
            self.calls.append(call)
            self.has_calls.notify()
        if is_full and self.rows_dropped == 1:
            self._report(
                f"{self.name} is slower than the run, or hangs ({self.doing}): its oldest rows are dropped, because {MOST_CALLS:,} "
                "wait. Training continues, and log.jsonl contains everything."
            )

    def _drop_oldest_row(self) -> None:
        for number, call in enumerate(self.calls):
            if call.is_row:
                del self.calls[number]
                self.rows_dropped += 1
                return

    def _call_again_and_again(self) -> None:
        # The processes that a tracker starts inherit this. They must outlive a signal that asks the run to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, ending.stop.handled_signals)
        while True:
            with self.has_calls:
                while not self.calls:
                    self.has_calls.wait()
                call = self.calls.popleft()
            if call.function is None:
                break
            self.doing = call.what
            try:
                call.function(*call.arguments)
            except BaseException as error:  # a tracker may call sys.exit, which would end only this thread, silently
                self._report(
                    f"{self.name}: tracking has failed ({call.what}): {type(error).__name__}: {error}. Training continues, and "
                    "log.jsonl contains everything."
                )
                if call.is_vital:
                    break
            self.is_loaded.set()  # the import is the first call
        self.is_loaded.set()
        with self.has_calls:
            self.works = False
            self.calls.clear()
        self.is_done.set()

    def _report(self, text: str) -> None:
        text = redact(text)
        print(text, file=sys.stderr, flush=True)
        record(text, "TRACKER")


def wait_for_imports(threads: Sequence[TrackerThread], seconds: float) -> None:
    """Wait until the packages of the trackers are imported, or have failed to be, at most `seconds`.

    A data worker that is forked during an import would wait forever for the lock of that module, if it imports the module too.
    """
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.is_loaded.wait(max(0.0, deadline - time.monotonic()))


def close_all(threads: Sequence[TrackerThread], seconds: float) -> None:
    """Finish the trackers, and wait for them at most `seconds`. Print what is waited for, and how to upload what is left."""
    for thread in threads:
        thread.put(Call("finish", thread.tracker.finish))
        thread.put(Call("end", None))
    began = time.monotonic()
    is_reported = False
    for thread in threads:
        while not thread.is_done.wait(max(0.0, min(QUIET_SECONDS, began + seconds - time.monotonic()))):
            if time.monotonic() - began >= seconds:
                break
            if not is_reported:
                names = " and ".join(one.name for one in threads if not one.is_done.is_set())
                left = sum(len(one.calls) for one in threads)
                rows = f", with {left:,} calls in the queue" if left > 2 else ""
                print(f"waiting up to {seconds:.0f} s for {names} to store the last numbers{rows}", flush=True)
                is_reported = True
    for thread in threads:
        if not thread.is_done.is_set():
            text = f"{thread.name} has not ended within {seconds:.0f} s ({thread.doing}). log.jsonl contains everything."
            thread._report(f"{text} {thread.tracker.how_to_upload_later()}".rstrip())
        if thread.rows_dropped:
            print(f"{thread.name}: {thread.rows_dropped:,} rows were dropped in total.", file=sys.stderr, flush=True)
    hangs = not all(thread.is_done.is_set() for thread in threads)
    main_thread = threading.main_thread()
    if hangs or not main_thread.is_alive():
        wait, seconds = main_thread.join, 0.5 if hangs else EXIT_SECONDS
    else:  # threads of the program, for which the interpreter waits before it calls its handlers, may take longer
        is_exiting = threading.Event()
        atexit.register(is_exiting.set)
        wait, seconds = is_exiting.wait, EXIT_SECONDS
    threading.Thread(target=_exit_after, args=(wait, seconds), daemon=True).start()


def _exit_after(wait: Callable[[], Any], seconds: float) -> None:
    """Exit if the interpreter does not, because handlers that a tracker has registered for its exit hang.

    Daemon threads continue while these handlers run. A program that `run` has called exits before if its exit code is not 0.
    """
    wait()
    time.sleep(seconds)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)
