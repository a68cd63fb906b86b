"""What `accelerate launch` and torchrun do when their ranks end: the exit code that they return, and restarts with `--max_restarts`.

By themselves the launchers return 1 for every failure. A scheduler sees only this code. With the code of the ranks it can tell a user's
mistake (2), which must not be restarted, from a stop with a checkpoint (75), which can be continued. After both, the launchers also
print for each rank that they end it, and a report that the script has FAILED. These lines are left out, because the ranks have printed
in a line or two why they end.

torch's agents restart their ranks by a second call of `next_rendezvous`. What goes wrong there in torch 2.13, and what the handler of
this module does about it:

- A stop on request and a user error are failures for torch, and are restarted. The handler reads the outcome of the last attempt
  (`watch.restart_files`), and ends the launcher if the attempt must be the last one.
- c10d: all rounds share one store whose keys are stale after a restart, so one failure uses several restarts, and a node that is
  replaced never gets in again. TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives each round a store of its own.
- c10d: agents restart healthy ranks when another node waits for the next round. The ranks of all nodes end by themselves after
  every failure, with its diagnosis, which this would cut short. The handler therefore reports waiting nodes only after a long time.
- If the main node is lost, the agents of the other nodes end (c10d), or their ranks wait for a store that does not exist any more
  (static). The handler waits until the main launcher is restarted, and takes part in its preflight.
- A launcher that is restarted while the others run would wait for a preflight that does not happen. It finds the store of the
  running job and joins. The store contains a digest of the command, because the port may belong to another job.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from accel_ddp import compat
from accel_ddp.doctor.host import HOST, call_with_timeout
from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR
from accel_ddp.watch import restart_files

IMPATIENCE_SECONDS = 60.0  # a node that waits longer for the next round has lost its ranks without a diagnosis on the others
DECIDE_SECONDS = 2.0  # for the monitors to find out which rank has died
PROBE_SECONDS = 3.0  # for the store of a running job to answer
TOUCH_SECONDS = 3600.0
_JOB, _FLAG, _AGREED = "accel_ddp/job", "accel_ddp/is_restart", "accel_ddp/agreed"
EXPLAINED = (USER_ERROR, STOPPED, INTERRUPTED)
_NOT_LOGGED = (
    *(f"failed (exitcode: {code})" for code in (*EXPLAINED, -signal.SIGTERM)),
    "no error file defined for parent",  # for launchers inside of launchers
    "closing signal",
    "death signal, shutting down",
)


def return_exit_code_of_ranks() -> None:
    """Let this launcher end with the exit code of its ranks. An excepthook is enough: torch's own handling stays as it is."""
    hook_before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = _find_exit_code(error, trace)
        if not code:
            return hook_before(kind, error, trace)
        if not is_explained(error, code) or _hides_output(trace):
            # This is torch's report. The traceback of the launcher, which would hide it, is left out.
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(code)  # the interpreter uses the code of a SystemExit that an excepthook raises

    sys.excepthook = end
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(part in text for part in _NOT_LOGGED)


def _find_exit_code(error: BaseException, trace: TracebackType | None) -> int:
    """Return the exit code of the ranks if `error` was raised because they ended, and 0 otherwise or if a signal ended them."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return choose_exit_code(failure.exitcode for failure in failures)
    if isinstance(error, SignalException):  # sent to the launcher, which has forwarded the signal and waited for its ranks
        return choose_exit_code(_codes_of_ended_ranks(trace))
    return 0


def choose_exit_code(codes: Iterable[int | None]) -> int:
    """Return the first code of a rank that ended by itself. The launcher ends the remaining ranks with SIGTERM (-15)."""
    return next((code for code in codes if code is not None and code > 0), 0)


def is_explained(error: BaseException, code: int) -> bool:
    """Return whether the first rank of this node has printed why the ranks end, and no rank has ended for another reason."""
    failures = list(getattr(error, "failures", {}).values())
    if code not in EXPLAINED or any(one.exitcode not in (*EXPLAINED, -signal.SIGTERM) for one in failures):
        return False
    if not failures:  # a SignalException: the ranks have reported the stop
        return True
    return any(
        one.local_rank == 0 and os.path.isfile(one.error_file) for one in failures
    )  # it prints first, and then writes this


def _hides_output(trace: TracebackType | None) -> bool:
    """Return whether the output of some ranks is not shown, because of `--redirects` or `--local_ranks_filter` of torchrun."""
    while trace:
        if specs := getattr(trace.tb_frame.f_locals.get("config"), "logs_specs", None):
            return compat.hides_output(specs)
        trace = trace.tb_next
    return False


def _codes_of_ended_ranks(trace: TracebackType | None) -> list[int | None]:
    """Return the ranks' exit codes from torch's agent, found in the locals of the traceback's frames."""
    while trace:
        if codes := compat.exit_codes_of(trace.tb_frame.f_locals.get("agent")):
            return codes
        trace = trace.tb_next
    return []


def codes_of_agent() -> list[int | None]:
    """Return the exit codes of the ranks of the agent that calls this code."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if codes := compat.exit_codes_of(frame.f_locals.get("self")):
            return codes
    return []


def find_max_restarts() -> int:
    """Return `--max_restarts` of the launcher that calls this code, or 0. It may come from an environment variable too."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if isinstance(count := getattr(frame.f_locals.get("config"), "max_restarts", None), int):
            return count
    return 0


class RestartingRendezvous:
    """A rendezvous handler of torch whose second and later rounds are restarts. It has the methods of torch's class."""

    def __init__(
        self,
        params: Any,
        backend: str,
        create: Callable[[Any], Any],
        check: Callable[..., bool],
        argv: list[str],
        wait: float,
        max_restarts: int,
    ):
        """Run the preflight and create torch's handler with `create`.

        `check(is_running)` runs the preflight. It returns True if there is none, because `is_running()` finds that the job runs.
        `argv` is the script with its arguments. `wait` is the number of seconds to wait for the main node at a restart.
        """
        self.params, self.backend, self.create, self.check, self.wait_seconds = params, backend, create, check, wait
        self.max_restarts = max_restarts
        command = json.dumps([os.path.basename(argv[0]), *argv[1:], max_restarts])
        self.job_key = f"{_JOB}/{params.run_id}/{hashlib.sha256(command.encode()).hexdigest()}"
        self.is_elastic = params.min_nodes != params.max_nodes  # a user who asks for a changing number of nodes gets torch's own
        self.num_rounds = 0
        self.waiting_since: float | None = None
        self.is_store_lost = False
        self.connection: socket.socket | None = None
        self.is_forced = False  # the agent restarts healthy ranks, because another node waits
        self.touched_at = time.monotonic()
        self.pid = os.getpid()
        os.environ[restart_files.LAUNCHER] = str(self.pid)
        if backend == "c10d":
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
            params.config.setdefault("keep_alive_interval", 2)  # a node is gone after 3 of them; torch's 5 s delay its return
        restart_files.remove(self.pid)
        atexit.register(restart_files.remove, self.pid)
        restart_files.store_run(
            self.pid, started=time.time()
        )  # ranks of a restart that do not find it report that the files are lost
        if max_restarts and not restart_files.read_run(self.pid):
            _print(
                f"warning: --max_restarts {max_restarts}: no file can be written in {tempfile.gettempdir()}. A restart cannot find the "
                "checkpoints of this run then, so that the run ends after a failure. Make space there, or set TMPDIR to another folder."
            )
        self.handler: Any = None
        self.joins_running_job = False
        self._open()

    def _open(self) -> None:
        """Create torch's handler: after the preflight, or at once if a launcher of this job already has its store open."""
        self.joins_running_job = self.check(self._finds_running_job)
        if self.joins_running_job:
            _print(f"the job is already running at {self.params.endpoint}: this node joins it")
        self.handler = self.create(self.params)
        self._announce_job()
        if self.connection:
            self.connection.close()
        self.is_store_lost, self.connection = False, None

    # ---- torch's interface

    def get_backend(self) -> str:
        return self.handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self.handler.use_agent_store

    def get_run_id(self) -> str:
        return self.handler.get_run_id()

    def is_closed(self) -> bool:
        return self.handler.is_closed()

    def set_closed(self) -> None:
        self.handler.set_closed()

    def shutdown(self) -> bool:
        try:
            return self.handler.shutdown()
        except Exception:  # the store is lost with its host
            return False

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round. torch then restarts the ranks of this node."""
        from torch.distributed.elastic.rendezvous import RendezvousError

        if time.monotonic() - self.touched_at > TOUCH_SECONDS:
            self.touched_at = time.monotonic()
            restart_files.touch(self.pid)
        if self._is_store_closed():
            return 0
        try:
            waiting = self.handler.num_nodes_waiting()
        except (RendezvousError, RuntimeError):
            self.is_store_lost = True  # with its host; the ranks end with a diagnosis
            return 0
        if self.is_elastic or not waiting:
            self.waiting_since, self.is_forced = None, waiting > 0
            return waiting
        self.waiting_since = self.waiting_since or time.monotonic()
        if time.monotonic() - self.waiting_since < IMPATIENCE_SECONDS:
            return 0
        self.is_forced = True
        return waiting

    def next_rendezvous(self) -> Any:
        """Return where and with whom the ranks are started. Exit if the attempt before must be the last one."""
        if self.num_rounds:
            self._end_after_last_attempt()
        os.environ[restart_files.ROUND] = str(self.num_rounds)
        self.num_rounds += 1
        self.waiting_since, self.is_forced = None, False
        deadline = time.monotonic() + self.wait_seconds
        while True:
            info = self._try_rendezvous(deadline)
            if info is not None:
                return info

    # ---- whether to restart

    def _end_after_last_attempt(self) -> None:
        last, failed_steps = self.num_rounds - 1, restart_files.read_run(self.pid).get("failed_steps", [])
        if self.is_forced:  # the ranks were healthy, and stopped because of the agent's SIGTERM
            text = "another node has joined"
            _print(f"{text}. The ranks are started again from their checkpoint.")
            joined = {"kind": "joined", "text": text, "exit_code": 1, "step": None, "host": HOST, "time": time.time()}
            restart_files.write_outcome(self.pid, joined, replaced=last)
            return
        # A rank that stops or reports an error has written the outcome. If a rank was killed, the monitor may still be writing it,
        # which matters only if this step has already failed twice.
        deadline = time.monotonic() + (DECIDE_SECONDS if len(failed_steps) >= restart_files.MOST_FAILURES_OF_A_STEP - 1 else 0)
        while (ended := restart_files.read_outcome(self.pid, last)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if ended and (reason := restart_files.why_not_restarted(ended, failed_steps)):
            _print(f"the ranks are not started again, because {reason}")
            sys.exit(ended["exit_code"] or 1)
        if ended is None and (code := _final_exit_code()):
            _print(f"the ranks are not started again, because of their exit code {code}")
            sys.exit(code)

    # ---- the rendezvous

    def _try_rendezvous(self, deadline: float) -> Any:
        """Return the result of torch's handler, or None if it has failed and must be tried again."""
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

        if self.num_rounds > 1 and self.params.max_nodes > 1 and not self._store_answers():
            self._open_again(deadline)
        try:
            info = self.handler.next_rendezvous()
            self._announce_job()
            self._agree_on_restart(info)
            self._watch_store()
            return info
        except RendezvousClosedError:
            _print("the job has ended on another node")
            sys.exit(1)
        except (RendezvousError, RuntimeError, ValueError) as error:
            if self.is_elastic or time.monotonic() > deadline or (self.num_rounds == 1 and not self.joins_running_job):
                raise
            _print(f"the rendezvous failed ({str(error).splitlines()[0][:200]}). Trying again.")
            time.sleep(1)
            return None

    def _agree_on_restart(self, info: Any) -> None:
        """Set IS_RESTART for the ranks if any node of this round continues an earlier attempt. Every node sets the same.

        Ranks of a restart skip their preflight. If only some did, these would wait for the others. With the static backend, nodes
        do not wait for each other at a restart, and keep the store of the first round, so they agree only in the first round.
        """
        is_restart = self.num_rounds > 1 or self.joins_running_job
        store, rank, size = info.store, info.rank, info.world_size
        if size > 1:
            store.set(f"{_FLAG}/{rank}", "1" if is_restart else "0")
            has_new_store = self.backend == "c10d" or not store.check([_AGREED])
            if rank == 0 and has_new_store:
                flags = [store.get(f"{_FLAG}/{node}") for node in range(size)]
                store.set(_AGREED, "1" if b"1" in flags else "0")
            if self.backend == "c10d" or not is_restart:
                is_restart = store.get(_AGREED) == b"1"
        os.environ[restart_files.IS_RESTART] = "1" if is_restart else "0"

    def _store_answers(self) -> bool:
        """Return whether the store of torch's handler still works. A store whose host is unreachable would block for minutes."""
        store = compat.store_of_handler(self.handler)
        if store is None:  # the handler has just been created
            return True
        return (
            not self._is_store_closed()
            and self._port_answers()
            and call_with_timeout(lambda: store.check(["any"]) is not None, 2 * PROBE_SECONDS, False)
        )

    def _watch_store(self) -> None:
        """Open one more connection to the store, which shows whether the store is closed.

        A use of a lost store would show it too, but torch prints a page of C++ frames each time.
        """
        if self.connection is None and self.params.max_nodes > 1:
            with contextlib.suppress(OSError):
                self.connection = socket.create_connection(self._endpoint(), timeout=2)
                self.connection.setblocking(False)

    def _is_store_closed(self) -> bool:
        """Return whether the store was lost with the process that had it open."""
        if not self.is_store_lost and self.connection:
            with contextlib.suppress(BlockingIOError):  # it is open, and has sent nothing
                try:
                    self.is_store_lost = self.connection.recv(1) == b""
                except ConnectionError:
                    self.is_store_lost = True
        if self.is_store_lost:
            compat.stop_keep_alive(self.handler)
        return self.is_store_lost

    def _open_again(self, deadline: float) -> None:
        """Wait until the main launcher runs again or is reachable again, and create another handler."""
        address, port = self._endpoint()
        began = printed_at = time.monotonic()
        while not self._port_answers():
            now = time.monotonic()
            if now > deadline:
                _print(
                    f"error: the main node {address}:{port} did not come back within --preflight_wait {self.wait_seconds:.0f} s. Start "
                    "it again with the same command and --resume on every node."
                )
                sys.exit(1)
            if now - printed_at > 10 or began == printed_at:
                printed_at = now
                _print(
                    f"waiting for the main node {address}:{port} ({now - began:.0f} of {self.wait_seconds:.0f} s). Start its launcher "
                    "again with the same command, or restore the network between the nodes."
                )
            time.sleep(0.3)
        self.handler = None
        self._open()

    def _announce_job(self) -> None:
        """Store which command this node runs, for launchers that are restarted. Commands may differ in options of a node."""
        store = compat.store_of_handler(self.handler)  # of the launchers; the static handler opens it in its first round
        if store is not None and self.max_restarts:
            with contextlib.suppress(RuntimeError):  # the store is lost; the next round finds this out
                store.set(self.job_key, "")

    def _finds_running_job(self) -> bool:
        """Return whether a store of this job is open at the endpoint, that is, a node with the same command has joined."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        if self.params.config.get("rank") in (0, "0") or not self.max_restarts:
            return False  # the main launcher opens the store itself; another one at its port belongs to another job
        address, port = self._endpoint()

        def has_job() -> bool:
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PROBE_SECONDS), wait_for_workers=False)
            return store.check([self.job_key])

        return call_with_timeout(has_job, 2 * PROBE_SECONDS, False)

    def _endpoint(self) -> tuple[str, int]:
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        return parse_rendezvous_endpoint(self.params.endpoint.strip(), 29400 if self.backend == "c10d" else 29500)

    def _port_answers(self) -> bool:
        try:
            socket.create_connection(self._endpoint(), timeout=2).close()
            return True
        except OSError:
            return False


def _final_exit_code() -> int:
    """Return the exit code of ranks that must not be restarted and have stored no outcome, or 0.

    They are programs that end before `accel_ddp.start`, or without it. Their launcher answers SIGTERM to the remaining ranks, which
    may then return the code of a stop.
    """
    codes = {code for code in codes_of_agent() if code}
    if USER_ERROR in codes:
        return USER_ERROR
    return codes.pop() if len(codes) == 1 and codes <= {STOPPED, UNSAVED, INTERRUPTED} else 0


def _print(text: str) -> None:
    print(f"{HOST}: {text}", file=sys.stderr, flush=True)
