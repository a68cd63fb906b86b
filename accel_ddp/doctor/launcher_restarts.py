"""Inside `accelerate launch` and torchrun: the preflight before their ranks start, their exit code, and restarts (`--max_restarts`).

By themselves the launchers return 1 for every failure. With the code of the ranks, a scheduler can tell a user's mistake (2), which
must not be restarted, from a stop with a checkpoint (75), which can be continued. After both, the launchers' lines for each rank and
their report FAILED are left out, because the ranks have printed why they end.

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

import asyncio
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
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn

from accel_ddp import compat
from accel_ddp.doctor import cluster, host
from accel_ddp.doctor.check_options import CheckOptions, runs_preflight, wait_of
from accel_ddp.doctor.cluster import print_progress
from accel_ddp.doctor.host import HOST, call_with_timeout, limit_name_lookups
from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR, UserError
from accel_ddp.nodes import launcher
from accel_ddp.nodes.sharding_plan import read_plan, variables_of
from accel_ddp.nodes.spawn import raise_file_limit
from accel_ddp.nodes.topology import Topology, find_topology
from accel_ddp.records.redaction import redact_command
from accel_ddp.text import first_line
from accel_ddp.watch import restart_files
from accel_ddp.words import differences, value_of

IMPATIENCE_SECONDS = 60.0  # a node that waits longer for the next round has lost its ranks without a diagnosis on the others
DECIDE_SECONDS = 2.0  # for the monitors to find out which rank has died
PROBE_SECONDS = 3.0  # for the store of a running job to answer
TOUCH_SECONDS = 3600.0
_JOB, _FLAG, _AGREED = "accel_ddp/job", "accel_ddp/is_restart", "accel_ddp/agreed"
EXPLAINED = (USER_ERROR, STOPPED, INTERRUPTED)
_NOT_LOGGED = (
    *(f"failed (exitcode: {code})" for code in (*EXPLAINED, -signal.SIGTERM)),
    "no error file defined for parent",  # for launchers inside launchers
    "closing signal",
    "death signal, shutting down",
)


def prepare_launcher(argv: list[str]) -> None:
    """Prepare a launcher of a script with its arguments. Exit with code 2 for DeepSpeed, which Accelerate would want installed."""
    raise_file_limit()  # the ranks inherit it
    limit_name_lookups()
    return_exit_code_of_ranks()
    adopt_config()
    request = launcher.parse_accelerate_command(sys.orig_argv) or {}
    if request.get("distributed_type") == "DEEPSPEED":
        names = ("machine_rank", "num_machines", "num_processes", "main_process_ip", "main_process_port", "rdzv_backend")
        given = {name: request.get(name) for name in names}
        find = lambda: find_topology(given, launcher.find_config_file(sys.orig_argv))
        _check_sharding(variables_of({"distributed_type": "DEEPSPEED"}), 0, find if runs_preflight(argv) else None, argv[0])
    num_nodes = request.get("num_machines")
    if runs_preflight(argv) and isinstance(num_nodes, int) and num_nodes > 1:
        # If another program has the main port, Accelerate fails on node 0 alone. The preflight tells every node.
        compat.skip_port_check()


def adopt_config() -> None:
    """Set the variables that `accelerate launch` would set for a config, if torchrun has one and they are not set already."""
    file = os.path.expanduser(os.environ.get(launcher.CONFIG_FILE, ""))
    if not file or launcher.parse_accelerate_command(sys.orig_argv) is not None:
        return
    try:
        config = launcher.read_accelerate_config(file)
    except UserError as error:
        _exit_with(str(error).replace("--config_file", launcher.CONFIG_FILE))
    precision = {"ACCELERATE_MIXED_PRECISION": stated} if (stated := launcher.stated_precision(config)) else {}
    for name, value in {**variables_of(config), **precision}.items():
        os.environ.setdefault(name, value)


def _exit_with(reason: str, find: Callable[[], Topology] | None = None, script: str = "") -> NoReturn:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    if find:
        cluster.report_to_other_nodes(reason, find(), script)
    sys.exit(USER_ERROR)


def _check_sharding(variables: Mapping[str, str], num_ranks: int, find: Callable[[], Topology] | None, script: str) -> None:
    """Exit with code 2 before all ranks report it. `find` gives the nodes that would wait, because their config differs."""
    try:
        read_plan(variables, num_ranks, launcher.find_config_file(sys.orig_argv))
    except UserError as error:
        _exit_with(str(error), find, script)


def create_after_preflight(params: Any, backend: str, create: Callable[[Any], Any], argv: list[str]) -> "RestartingRendezvous":
    """Run the preflight, then return a wrapped rendezvous handler of `create`. Exits with code 2 if there are errors."""
    is_on = params.max_nodes > 1 and params.min_nodes == params.max_nodes and runs_preflight(argv)
    request = launcher.parse_accelerate_command(sys.orig_argv)  # None: this is torchrun
    num_ranks = (request or {}).get("num_processes")
    num_ranks = max(0, num_ranks) if isinstance(num_ranks, int) else 0

    def find() -> Topology:
        address, port = _endpoint_of(params, backend)
        number = value_of(sys.argv, "nproc_per_node") or os.environ.get("PET_NPROC_PER_NODE", "1")  # or a word such as `gpu`
        return Topology(
            node_rank=int(params.config["rank"]) if "rank" in params.config else None, num_nodes=params.max_nodes,
            num_ranks=num_ranks, num_node_ranks=int(number) if request is None and number.isdigit() else 0,
            main_address=address, main_port=port, accelerate_config=request or {}, is_launched=True,
        )  # fmt: skip

    def check(is_running: Callable[[], bool]) -> bool:
        try:
            return is_on and _run_preflight(find(), argv, is_running)
        except UserError as error:
            _exit_with(str(error))
        except KeyboardInterrupt:
            sys.exit(130)

    variables = {**os.environ, "GROUP_WORLD_SIZE": str(params.max_nodes)}
    _check_sharding(variables, num_ranks, find if is_on else None, argv[0])
    max_restarts = _find_in_frames(traceback.walk_stack(sys._getframe()), "config", lambda one: getattr(one, "max_restarts", 0))
    return RestartingRendezvous(params, backend, create, check, argv, wait_of(argv), max_restarts or 0)


def _endpoint_of(params: Any, backend: str) -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    return parse_rendezvous_endpoint(params.endpoint.strip(), 29400 if backend == "c10d" else 29500)


def _run_preflight(topology: Topology, argv: list[str], is_running: Callable[[], bool]) -> bool:
    """Check all nodes. Return True instead if the launchers of the other nodes have already been checked and `is_running()`."""
    options = CheckOptions(
        script=argv[0], measures_bandwidth=False, sets_interface=True, no_answer_seconds=host.PREFLIGHT_NO_ANSWER,
        wait_seconds=wait_of(argv), may_join_rendezvous=topology.node_rank != 0,  # the launcher of node 0 opens the store itself
    )  # fmt: skip
    outcome = asyncio.run(cluster.check_cluster(topology, options, print_progress))
    if any(finding.code == "I_RENDEZVOUS" for finding in outcome.findings):  # a store is open at the main port
        cluster.raise_on_errors(outcome)  # of this node alone
        if is_running():
            return True
        options.may_join_rendezvous = False
        outcome = asyncio.run(cluster.check_cluster(topology, options, print_progress))
    cluster.raise_on_errors(outcome)
    # The preflight of the ranks prints the other findings.
    cluster.print_findings([finding for finding in outcome.findings if finding.code == "I_HOST_NAME"])
    return False


def return_exit_code_of_ranks() -> None:
    """Let this launcher end with the exit code of its ranks. An excepthook is enough: torch's own handling stays as it is."""
    hook_before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        codes = []
        if isinstance(error, ChildFailedError):
            codes = [one.exitcode for one in sorted(error.failures.values(), key=lambda failure: failure.timestamp)]
        elif isinstance(error, SignalException):  # sent to the launcher, which has forwarded it and waited for its ranks
            codes = _find_in_frames(traceback.walk_tb(trace), "agent", compat.exit_codes_of) or []
            if codes and {*codes} <= {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}:  # the ranks did not handle signals yet
                print_progress(f"stopped: the launcher received {error.sigval.name}, and its ranks exited before they could save")
                codes = [INTERRUPTED if error.sigval == signal.SIGINT else STOPPED]
        if not (code := choose_exit_code(codes)):
            return hook_before(kind, error, trace)
        # The output of some ranks is not shown with `--redirects` or `--local_ranks_filter` of torchrun.
        specs = _find_in_frames(traceback.walk_tb(trace), "config", lambda config: getattr(config, "logs_specs", None))
        if not (is_explained(error, code) or names_killed_ranks(error)) or compat.hides_output(specs):
            # This is torch's report. The traceback of the launcher, which would hide it, is left out.
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(code)  # the interpreter uses the code of a SystemExit that an excepthook raises

    sys.excepthook = end
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        is_logged = lambda record: not any(part in record.getMessage() for part in _NOT_LOGGED)
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(is_logged)


def choose_exit_code(codes: Iterable[int | None]) -> int:
    return next((code for code in codes if code is not None and code > 0), 0)


def is_explained(error: BaseException, code: int) -> bool:
    """Return whether the first rank of this node has printed why the ranks end, and no rank has ended for another reason."""
    failures = list(getattr(error, "failures", {}).values())
    if code not in EXPLAINED or any(one.exitcode not in (*EXPLAINED, -signal.SIGTERM) for one in failures):
        return False
    # Without failures it is a SignalException, and the ranks have reported the stop. A rank prints first, then writes its error file.
    return not failures or any(one.local_rank == 0 and os.path.isfile(one.error_file) for one in failures)


def names_killed_ranks(error: BaseException) -> bool:
    """Return whether this is `accel-ddp run`, and a rank has printed which ranks were killed. Other launchers keep torch's report."""
    failures = list(getattr(error, "failures", {}).values())
    texts = [text for one in failures if "RANK_DIED" in (text := str(one.message))]
    is_named = lambda one: "RANK_DIED" in str(one.message) or any(f"pid {one.pid})" in text for text in texts)
    return (
        os.environ.get(launcher.TYPED, "").partition(" ")[0] == str(os.getpid()) and bool(texts) and all(map(is_named, failures))
    )


def _find_in_frames(frames: Iterable[tuple[FrameType, int]], name: str, read: Callable[[Any], Any]) -> Any:
    return next((found for frame, _ in frames if (found := read(frame.f_locals.get(name)))), None)


class RestartingRendezvous:
    """A rendezvous handler of torch whose second and later rounds are restarts. It has the methods of torch's class."""

    handler: Any = None

    def __init__(
        self, params: Any, backend: str, create: Callable[[Any], Any], check: Callable[..., bool], argv: list[str], wait: float,
        max_restarts: int,
    ):  # fmt: skip
        """`check(is_running)` is the preflight; True: none, the job runs. `wait`: seconds for the main node at a restart."""
        self.params, self.backend, self.create, self.check, self.wait_seconds = params, backend, create, check, wait
        self.max_restarts = max_restarts
        self.command = [os.path.basename(argv[0]), *argv[1:], "--max_restarts", str(max_restarts)]
        self.any_job_key = f"{_JOB}/{params.run_id}"
        self.job_key = f"{self.any_job_key}/{hashlib.sha256(json.dumps(self.command).encode()).hexdigest()}"
        self.is_elastic = params.min_nodes != params.max_nodes  # a user who asks for a changing number of nodes gets torch's own
        self.num_rounds, self.is_store_lost, self.joins_running_job = 0, False, False
        self.waiting_since: float | None = None
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
        self.is_waiting = True  # no ranks run
        threading.Thread(target=self._exit_if_stopped, daemon=True).start()
        restart_files.store_run(self.pid, started=time.time())  # without it, ranks of a restart report that the files are lost
        if max_restarts and not restart_files.read_run(self.pid):
            print_progress(
                f"warning: --max_restarts {max_restarts}: no file can be written in {tempfile.gettempdir()}. A restart cannot find the "
                "checkpoints of this run then, so the run stops after a failure. Make space there, or set TMPDIR to another folder."
            )
        self._open()

    def _open(self) -> None:
        self.joins_running_job = self.check(self._finds_running_job)
        if self.joins_running_job:
            print_progress(f"the job is already running at {self.params.endpoint}: this node joins it")
        self.handler = self.create(self.params)
        self._announce_job()
        if self.connection:
            self.connection.close()
        self.is_store_lost, self.connection = False, None

    # ---- torch's interface

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)

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
        self.waiting_since = (self.waiting_since or time.monotonic()) if waiting else None
        if waiting and not self.is_elastic and time.monotonic() - self.waiting_since < IMPATIENCE_SECONDS:
            return 0
        self.is_forced = waiting > 0
        return waiting

    def next_rendezvous(self) -> Any:
        if self.num_rounds:
            self._end_after_last_attempt()
        os.environ[restart_files.ROUND] = str(self.num_rounds)
        self.num_rounds += 1
        self.waiting_since, self.is_forced, self.is_waiting = None, False, True
        deadline = time.monotonic() + self.wait_seconds
        while (info := self._try_rendezvous(deadline)) is None:
            pass
        self.is_waiting = False
        return info

    def _exit_if_stopped(self) -> None:
        """Exit at a stop signal without ranks; new ranks see it themselves. A Slurm script blocks it, so it stays pending."""
        signals = {signal.SIGUSR1, signal.SIGUSR2}
        while not (signals & signal.sigpending() and self.is_waiting):
            time.sleep(0.2)
        print_progress(f"stopped: received {min(signals & signal.sigpending()).name} before the ranks have started.")
        restart_files.remove(self.pid)
        os._exit(STOPPED)

    # ---- whether to restart

    def _end_after_last_attempt(self) -> None:
        last, failed_steps = self.num_rounds - 1, restart_files.read_run(self.pid).get("failed_steps", [])
        if self.is_forced:  # the ranks were healthy, and stopped because of the agent's SIGTERM
            text = "another node has joined"
            print_progress(f"{text}. The ranks restart from their checkpoint.")
            joined = {"kind": "joined", "text": text, "exit_code": 1, "step": None, "host": HOST, "time": time.time()}
            restart_files.write_outcome(self.pid, joined, replaced=last)
            return
        # The monitor may still write the outcome of a killed rank. It matters if this step has already failed twice.
        deadline = time.monotonic() + (DECIDE_SECONDS if len(failed_steps) >= restart_files.MOST_FAILURES_OF_A_STEP - 1 else 0)
        while (ended := restart_files.read_outcome(self.pid, last)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if ended and (reason := restart_files.why_not_restarted(ended, failed_steps)):
            print_progress(f"the ranks are not restarted, because {reason}")
            sys.exit(ended["exit_code"] or 1)
        # Without `accel_ddp.start` there is no outcome. Ranks that the launcher ends may return the code of a stop.
        codes = set(_find_in_frames(traceback.walk_stack(sys._getframe()), "self", compat.exit_codes_of) or []) - {0, None}
        codes = {USER_ERROR} if USER_ERROR in codes else codes
        if ended is None and len(codes) == 1 and codes <= {USER_ERROR, STOPPED, UNSAVED, INTERRUPTED}:
            print_progress(f"the ranks are not restarted, because of their exit code {min(codes)}")
            sys.exit(min(codes))

    # ---- the rendezvous

    def _try_rendezvous(self, deadline: float) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

        if self.num_rounds > 1 and self.params.max_nodes > 1 and not self._store_answers():
            self._open_again(deadline)
        try:
            info = self.handler.next_rendezvous()
            self._announce_job()
            self._agree_on_restart(info)
            if self.connection is None and self.params.max_nodes > 1:
                # One more connection shows whether the store is closed. Using a lost store prints a page of C++ frames.
                with contextlib.suppress(OSError):
                    self.connection = socket.create_connection(_endpoint_of(self.params, self.backend), timeout=2)
                    self.connection.setblocking(False)
            return info
        except RendezvousClosedError:
            print_progress("the job stopped on another node")
            sys.exit(1)
        except (RendezvousError, RuntimeError, ValueError) as error:
            if self.is_elastic or time.monotonic() > deadline or (self.num_rounds == 1 and not self.joins_running_job):
                raise
            print_progress(f"the rendezvous failed ({first_line(error)[:200]}). Trying again.")
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
        if self._is_store_closed() or not host.port_answers(*_endpoint_of(self.params, self.backend)):
            return False
        return call_with_timeout(lambda: store.check(["any"]) is not None, 2 * PROBE_SECONDS, False)

    def _is_store_closed(self) -> bool:
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
        address, port = _endpoint_of(self.params, self.backend)
        began = printed_at = time.monotonic()
        while not host.port_answers(address, port):
            now = time.monotonic()
            if now > deadline:
                print_progress(
                    f"error: the main node {address}:{port} did not come back within --preflight_wait {self.wait_seconds:.0f} s. Start "
                    "it again with the same command and --resume on every node."
                )
                sys.exit(1)
            if now - printed_at > 10 or began == printed_at:
                printed_at = now
                print_progress(
                    f"waiting for the main node {address}:{port} ({now - began:.0f} of {self.wait_seconds:.0f} s). Start its launcher "
                    "again with the same command, or restore the network between the nodes."
                )
            time.sleep(0.3)
        self.handler = None
        self._open()

    def _announce_job(self) -> None:
        store = compat.store_of_handler(self.handler)  # of the launchers; the static handler opens it in its first round
        if store is not None and self.max_restarts:
            with contextlib.suppress(RuntimeError):  # the store is lost; the next round finds this out
                store.set(self.any_job_key, json.dumps(redact_command(self.command)))  # anybody can read it
                store.set(self.job_key, "")

    def _finds_running_job(self) -> bool:
        from torch.distributed import TCPStore

        if self.params.config.get("rank") in (0, "0"):
            return False  # the main launcher opens the store itself; another one at its port belongs to another job
        address, port = _endpoint_of(self.params, self.backend)
        limits = {"timeout": timedelta(seconds=PROBE_SECONDS), "wait_for_workers": False}

        def find() -> list[str]:
            store = TCPStore(address, port, is_master=False, **limits)
            if store.check([self.job_key]):
                return self.command
            return json.loads(store.get(self.any_job_key)) if store.check([self.any_job_key]) else []

        found = call_with_timeout(find, 2 * PROBE_SECONDS, [])
        if found and (different := differences(redact_command(found), redact_command(self.command))):
            raise UserError(
                f"a job runs at {address}:{port}, and this node cannot join it, because its options differ: {'; '.join(different)}. "
                f"Start {HOST} with the same command as the other nodes, or use another port for another job."
            )
        return bool(found)
