"""Opens the process group over exactly the ranks that were launched.

Accelerate (1.15) does not: it starts N separate trainings with exit code 0 when launcher, environment and hardware do not match,
it drops some timeouts, and it has no way to wait for a slow rank without a timeout.
"""

import json
import logging
import os
import secrets
import socket
import tempfile
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accel_ddp.config import TrainConfig, options_that_must_match
from accel_ddp.environment.launcher import cpu_is_wanted
from accel_ddp.errors import INTERRUPTED, UNSAVED, USER_ERROR, UserError
from accel_ddp.ranks.agreement import REPORT_EVERY, print_on_main
from accel_ddp.ranks.failures import Failure, Stopped
from accel_ddp.ranks.liveness import link_to_monitor, start_monitor_of_node
from accel_ddp.ranks.process import process
from accel_ddp.watch.link import MonitorAddress
from accel_ddp.watch.outcome import IS_RESTART, LAUNCHER, current_round, launcher_pid, read_outcome, read_run, why_not_restarted

log = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 10  # for a rank that has just announced itself; it looks at the store every 0.2 s


def connect(cfg: TrainConfig, precision: str) -> bool:
    """Open the process group and return whether this run trains on GPUs. The answer or error is the same on every rank."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"WORLD_SIZE is {process.num_ranks}, but {name} is not set. Start with `accelerate launch` or torchrun, which set both."
            )
    timeout = timedelta(seconds=cfg.ddp_timeout_seconds)
    _end_if_stopped()
    root = _open_store(cfg, timeout)
    mine = {
        "host": process.host, "pid": os.getpid(), "gpus": 0 if cpu_is_wanted() else torch.cuda.device_count(),
        "local": process.local_ranks, "rank": process.rank, "nonce": secrets.token_hex(8), "run": _read_earlier_run(),
        "node": process.node, "monitor": _start_monitor(cfg) if process.is_local_main else None, "token": secrets.token_hex(16),
        "options": {**options_that_must_match(cfg), "mixed_precision": precision}, "torch": torch.__version__,
    }  # fmt: skip
    try:
        attempt, ranks = _join_attempt(root, mine, cfg)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Stopped(Failure("died", f"the store of the main node {where} was lost before all ranks had connected.")) from error
    process.store = dist.PrefixStore("accel_ddp", attempt)
    _join_monitors(ranks)
    process.earlier_run = _newest_run([rank["run"] for rank in ranks])
    _check_options(ranks)
    use_gpu = _check_gpus(ranks)
    if use_gpu:
        torch.cuda.set_device(process.local_rank)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo",
        store=dist.PrefixStore("group", attempt),
        rank=process.rank,
        world_size=process.num_ranks,
        timeout=timeout,
        device_id=torch.device("cuda", process.local_rank) if use_gpu else None,
    )
    process.slow_group = dist.new_group(backend="gloo", timeout=timedelta(days=3650))  # its receives last as long as the run
    return use_gpu


def _start_monitor(cfg: TrainConfig) -> MonitorAddress | None:
    """Start the monitor of this node. It listens on the address that leads to the main node."""
    main = _main_ip()
    with socket.socket(socket.AF_INET6 if ":" in main else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((main, 9))  # chooses the interface; nothing is sent
        ip = probe.getsockname()[0]
    # On the main node, the address may belong to a router that forwards to it.
    return start_monitor_of_node(cfg, ("::" if ":" in main else "0.0.0.0") if process.node == 0 else ip)


def _main_ip() -> str:
    return socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][4][0]


def _join_monitors(ranks: list[dict]) -> None:
    """Connect this rank to the monitor of its node, and the monitors of all nodes to each other."""
    monitors = {rank["node"]: MonitorAddress(*rank["monitor"]) for rank in ranks if rank["monitor"]}
    if process.node not in monitors:
        return
    link_to_monitor(monitors[process.node])
    if process.is_local_main:
        hosts = {rank["node"]: rank["host"] for rank in ranks}
        # Each node reaches the main node under the address that it has resolved itself.
        roster = [
            {"node": node, "host": hosts[node], "address": _main_ip() if node == 0 else monitor.ip, "port": monitor.port}
            for node, monitor in monitors.items()
        ]
        places = [{name: rank[name] for name in ("rank", "node", "host", "pid")} for rank in ranks]
        process.link.send({"roster": roster, "ranks": places, "token": ranks[0]["token"]})


def watch_single_rank(cfg: TrainConfig) -> None:
    """Start a monitor for a run of one rank. Its data and its disk may hang too."""
    monitor = start_monitor_of_node(cfg, "127.0.0.1") if process.link is None else None  # `start` may be called twice
    if monitor is None:
        return
    link_to_monitor(monitor)
    place = {"rank": 0, "node": 0, "host": process.host}
    process.link.send({"roster": [place], "ranks": [{**place, "pid": os.getpid()}], "token": ""})


def connect_to_launcher() -> None:
    """Set what the launcher of a single rank has stored about earlier attempts."""
    _end_if_stopped()
    process.earlier_run = _newest_run([_read_earlier_run()])


def _end_if_stopped() -> None:
    """Raise `Stopped` if an earlier attempt on this node was asked to stop.

    `doctor.at_launch` lets the launcher end in this case. It is not loaded if the launched script does not mention this package.
    """
    outcome = read_outcome(launcher_pid(), current_round() - 1)
    if outcome and why_not_restarted(outcome, []):
        kind = {USER_ERROR: "error", UNSAVED: "unsaved", INTERRUPTED: "interrupted"}.get(outcome["exit_code"], "stopped")
        raise Stopped(Failure(kind, outcome["text"].removeprefix(f"{kind}: ")))


def _is_restart() -> bool:
    """Return whether the launcher of any node has already started ranks of this job before. A program may use a launcher twice."""
    return current_round() > 0 or os.environ.get(IS_RESTART) == "1"


def _read_earlier_run() -> dict[str, Any]:
    """Return what is stored on this node about the run, if this process continues an earlier attempt."""
    if not _is_restart():
        return {}
    run = read_run(launcher_pid())
    is_lost = not run and LAUNCHER in os.environ  # `doctor.restarts` has written it when the launcher started
    return {**run, "is_lost": is_lost, "failure": read_outcome(launcher_pid(), current_round() - 1)}


def _newest_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what any node has stored about the run, with the failure that was reported last. Every rank returns the same."""
    known = [run for run in runs if run.get("output_dir")]
    if not known and any(run.get("is_lost") for run in runs):
        raise UserError(
            f"This is a restart, but the files about the run in {tempfile.gettempdir()} were removed or could not be written, so that "
            "its folder is not known. A restart would begin at step 0. Type the same command with --resume --output_dir FOLDER."
        )
    failures = [run["failure"] for run in runs if run.get("failure")]
    found = dict(known[0]) if known else {}
    if failures:  # a failure with a step comes from a node that has received the diagnosis
        found["failure"] = max(failures, key=lambda failure: (failure.get("step") is not None, failure.get("time") or 0))
    return found


def _join_attempt(root: dist.Store, mine: dict[str, Any], cfg: TrainConfig) -> tuple[dist.Store, list[dict[str, Any]]]:
    """Return a store for exactly the processes that are alive now, and what each of them has announced.

    The store of a launcher keeps the keys of earlier attempts, which must not be read. TORCHELASTIC_RESTART_COUNT cannot tell
    attempts apart: it differs between nodes when a launcher is started again. Therefore the process of rank 0 chooses a random
    id, the others announce themselves under this id, and rank 0 confirms them. A process that has read the id of a dead attempt
    is never confirmed, and reads the next id. A rank that dies before it has acknowledged the confirmation is replaced: rank 0
    then begins again with another id.
    """
    waiting = _Waiting(cfg)
    attempt = ""
    while True:
        if process.is_main:
            attempt = secrets.token_hex(8)
            root.set("attempt", attempt)
        else:
            before = attempt
            while not root.check(["attempt"]) or (attempt := root.get("attempt").decode()) == before:
                waiting.sleep([0])
        store = dist.PrefixStore(f"attempt/{attempt}", root)
        store.set(f"rank/{process.rank}", json.dumps(mine))
        if ranks := _gather(store, waiting) if process.is_main else _follow(root, attempt, store, mine, waiting):
            return store, ranks


def _gather(store: dist.Store, waiting: "_Waiting") -> list[dict[str, Any]]:
    """Wait for all ranks and confirm them. Return what they announced, or [] if one of them is gone. Runs on rank 0."""
    missing = list(range(process.num_ranks))
    while missing := [rank for rank in missing if not store.check([f"rank/{rank}"])]:
        waiting.sleep(missing)
    ranks = [json.loads(store.get(f"rank/{rank}")) for rank in range(process.num_ranks)]
    store.set("members", json.dumps(ranks))
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    missing = list(range(1, process.num_ranks))
    while missing := [rank for rank in missing if not store.check([f"member/{rank}/{ranks[rank]['nonce']}"])]:
        if time.monotonic() > deadline:
            return []
        waiting.sleep(missing)
    store.set("complete", "")
    # This process may have the store, and may end at once because of an option that differs.
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    while not all(store.check([f"seen/{rank}"]) for rank in range(1, process.num_ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ranks


def _follow(root: dist.Store, attempt: str, store: dist.Store, mine: dict[str, Any], waiting: "_Waiting") -> list[dict[str, Any]]:
    """Wait until rank 0 has confirmed this process. Return what all ranks announced, or [] if rank 0 has chosen another id."""
    ranks: list[dict[str, Any]] = []
    while True:
        if not ranks and store.check(["members"]):
            ranks = json.loads(store.get("members"))
            if ranks[process.rank]["nonce"] != mine["nonce"]:
                return []  # this id belongs to an attempt of an earlier process of this rank
            store.set(f"member/{process.rank}/{mine['nonce']}", "")
        if ranks and store.check(["complete"]):
            store.set(f"seen/{process.rank}", "")
            return ranks
        if root.get("attempt").decode() != attempt:
            return []
        waiting.sleep([rank for rank in range(process.num_ranks) if not store.check([f"rank/{rank}"])] if waiting.is_due else [0])


class _Waiting:
    """Sleeps between looks at the store, reports which ranks are missing, and ends the wait after a limit.

    At a restart a node may be missing because it was lost. It is waited for as long as a main node that was lost, and its absence
    is a failure, which may be followed by another restart.
    """

    def __init__(self, cfg: TrainConfig):
        self.option = "preflight_wait" if _is_restart() else "ddp_timeout_seconds"
        self.limit, self.began = getattr(cfg, self.option), time.monotonic()
        self.reported = self.began

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self.reported > REPORT_EVERY

    def sleep(self, missing: list[int]) -> None:
        seconds = time.monotonic() - self.began
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:16]))}{' ...' * (len(missing) > 16)}"
        if seconds > self.limit:
            _raise_missing(
                "NODE_LOST",
                f"{process.host}: {names} of {process.num_ranks} did not start within --{self.option} {self.limit:.0f}. Look at the "
                "output of that node.",
            )
        if self.is_due and process.is_local_main and missing:
            self.reported = time.monotonic()
            log.warning("waiting for %s of %d to start (%.0f s)", names, process.num_ranks, seconds)
        time.sleep(0.02 if seconds < 5 else 0.2)


def _raise_missing(kind: str, text: str, cause: Exception | None = None) -> NoReturn:
    """Raise the error for a node that is missing: a mistake of the user, or at a restart a failure."""
    raise (Stopped(Failure("died", f"{kind}: {text}")) if _is_restart() else UserError(text)) from cause


def _check_options(ranks: list[dict]) -> None:
    first = ranks[0]
    for rank in ranks:
        for name, value in first["options"].items():
            if rank["options"].get(name) != value:
                raise UserError(
                    f"--{name} differs: {value!r} on rank 0 ({first['host']}), {rank['options'].get(name)!r} on rank "
                    f"{rank['rank']} ({rank['host']}). Start every node with the same options."
                )
        if rank["torch"] != first["torch"]:  # a node that joins at a restart has had no preflight
            raise UserError(
                f"torch {first['torch']} is installed on {first['host']}, but {rank['torch']} on {rank['host']}. Install the same "
                "version on every node."
            )


def _check_gpus(ranks: list[dict]) -> bool:
    without = [rank for rank in ranks if rank["gpus"] == 0]
    if 0 < len(without) < len(ranks):
        names = ", ".join(f"rank {rank['rank']} on {rank['host']}" for rank in without)
        raise UserError(
            f"These ranks have no GPU, but the others have one: {names}. Check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build "
            "there, or set ACCELERATE_USE_CPU=true on every node to train on CPUs."
        )
    crowded = [rank for rank in ranks if 0 < rank["gpus"] < rank["local"]]
    if crowded:
        rank = crowded[0]
        raise UserError(
            f"{rank['host']} has {rank['gpus']} GPU{'s' * (rank['gpus'] > 1)} for {rank['local']} ranks. num_processes is the total "
            "over all nodes: use the number of nodes times the GPUs of one node."
        )
    if without and not cpu_is_wanted():
        print_on_main(f"No rank of {len(ranks)} has a GPU. Training on CPUs over gloo.")
    return not without


def _open_store(cfg: TrainConfig, timeout: timedelta) -> dist.Store:
    """Connect to the store of torchrun or `accelerate launch`. Rank 0 opens one if RANK and the others were set by hand."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = process.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began = reported = time.monotonic()
    limit = cfg.preflight_wait if _is_restart() else cfg.ddp_timeout_seconds
    while not is_server:
        try:
            socket.create_connection((address, port), timeout=2).close()
            break
        except OSError as error:
            now = time.monotonic()
            if now - began > limit:
                _raise_missing(
                    "MAIN_NODE_LOST",
                    f"{process.host}: the main node {address}:{port} cannot be reached: {error}. Check --main_process_ip and the "
                    "firewall, or run `accel-ddp doctor`.",
                    error,
                )
            if now - reported > REPORT_EVERY and process.is_local_main:
                reported = now
                log.warning("waiting for the main node %s:%s (%.0f s): %s", address, port, now - began, error)
            time.sleep(0.1)
    return dist.TCPStore(
        address, port, process.num_ranks, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )
