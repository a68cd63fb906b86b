"""The start of the process group, over exactly the ranks that were launched.

Accelerate (1.15) does not: it starts N separate trainings with exit code 0 when launcher, environment and hardware do not match,
it drops some timeouts, and it has no way to wait for a slow rank without a timeout.
"""

import ipaddress
import logging
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_ddp.config.train_config import TrainConfig, options_that_must_match
from accel_ddp.doctor.host import external_addresses, is_local_address, route_to
from accel_ddp.errors import UserError
from accel_ddp.nodes.launcher import check_rank_variables, cpu_is_wanted
from accel_ddp.nodes.run_secret import TOKEN, TOKEN_FILE, NodeKeys, read_secret
from accel_ddp.nodes.topology import find_nodes
from accel_ddp.ranks.agreement import REPORT_EVERY, print_on_main
from accel_ddp.ranks.failures import Failure, Stopped
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.ranks.reporting import link_to_monitor, start_monitor_of_node
from accel_ddp.ranks.restarts import end_if_stopped, is_restart, join_attempt, newest_run, raise_missing, read_earlier_run
from accel_ddp.records import tuned_settings
from accel_ddp.text import counted
from accel_ddp.watch.link import MonitorAddress

log = logging.getLogger(__name__)


def connect(cfg: TrainConfig, saved: dict[str, Any]) -> bool:
    """Open the process group and return whether this run uses GPUs, the same everywhere. `saved`: see `resume.settings_of_run`."""
    check_rank_variables()
    timeout = timedelta(seconds=cfg.ddp_timeout_seconds)
    end_if_stopped()
    root = _open_store(cfg, timeout)
    has_other_nodes = this_rank.num_ranks > this_rank.local_ranks
    keys = NodeKeys(read_secret()) if this_rank.is_local_main and has_other_nodes else None  # of the monitor
    gpus = 0 if cpu_is_wanted() else torch.cuda.device_count()
    mine = {
        "host": this_rank.host, "pid": os.getpid(), "gpus": gpus,
        "rank": this_rank.rank, "node": links.node, "local_rank": this_rank.local_rank, "local": this_rank.local_ranks,
        "nonce": secrets.token_hex(8), "key": keys.public if keys else None, "run": read_earlier_run(),
        "monitor": _start_monitor(cfg) if this_rank.is_local_main else None,
        "options": options_that_must_match(cfg), "torch": torch.__version__,
        "sharding": links.sharding.settings() if links.sharding else {}, "tuned": _announce_settings(cfg, saved, gpus),
    }  # fmt: skip
    try:
        attempt, ranks = join_attempt(root, mine, cfg)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"the store of the main node {where} was lost before all ranks had connected. Look at the output of that node."
        raise Stopped(Failure("died", text)) from error
    links.store = dist.PrefixStore("accel_ddp", attempt)
    _check_keys(ranks)
    _join_nodes(ranks, keys)
    links.earlier_run = newest_run([rank["run"] for rank in ranks])
    _check_options(ranks)
    if links.sharding:
        links.sharding = links.sharding.on_nodes([number for _, number in links.nodes])
    use_gpu = _check_gpus(ranks)
    for line in tuned_settings.apply(cfg, [rank["tuned"] for rank in ranks], links.nodes, use_gpu):
        print_on_main(line)
    if use_gpu:
        torch.cuda.set_device(this_rank.local_rank)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo",
        store=dist.PrefixStore("group", attempt),
        rank=this_rank.rank,
        world_size=this_rank.num_ranks,
        timeout=timeout,
        device_id=torch.device("cuda", this_rank.local_rank) if use_gpu else None,
    )
    links.slow_group = dist.new_group(backend="gloo", timeout=timedelta(days=3650))  # its receives last as long as the run
    return use_gpu


def _announce_settings(cfg: TrainConfig, saved: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Return what this rank knows about settings of NCCL. One rank of each node reads its files."""
    device, version = "CPU", f"torch {torch.__version__}, gloo"
    if gpus > this_rank.local_rank:
        device = torch.cuda.get_device_name(this_rank.local_rank)
        version = f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return tuned_settings.announce(cfg, saved, device, version, this_rank.is_local_main)


def _start_monitor(cfg: TrainConfig) -> MonitorAddress | None:
    """Start the monitor of this node. It listens on the address that leads to the main node.

    On the main node this is the main address, or behind a router the address of the interface to which the router forwards. A name
    may have another address on other nodes: then the monitor listens on all addresses if this host has several.
    """
    main, name = _main_ip(), os.environ["MASTER_ADDR"]
    one, others = ipaddress.ip_address(main), external_addresses()
    ip = main if links.node == 0 and is_local_address(main) else route_to(main) or main
    if links.node == 0 and (one.is_unspecified or (name != main and (one.is_loopback or len(others) != 1))):
        ip = "::" if ":" in main else "0.0.0.0"
    return start_monitor_of_node(cfg, ip)


def _main_ip() -> str:
    return socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][4][0]


def _check_keys(ranks: list[dict]) -> None:
    """Raise UserError if only some nodes have a secret. Print once that there is none."""
    first = {bool(rank["key"]): rank for rank in reversed(ranks) if rank["key"] is not None}
    if len(first) > 1:
        raise UserError(
            f"{TOKEN} (or {TOKEN_FILE}) is set on {first[False]['host']}, but not on {first[True]['host']}. Set the same value on "
            "every node, or on none."
        )
    if True in first:
        instead = f"Set {TOKEN} to the same random text on every node to exclude strangers from the beginning (SECURITY.md)"
        print_on_main(f"security: the nodes trust the keys that they have exchanged at this start. {instead}.")


def _join_nodes(ranks: list[dict], keys: NodeKeys | None) -> None:
    """Set the nodes of all ranks. Connect this rank to the monitor of its node, and the monitors of all nodes to each other.

    Launchers number the nodes. Otherwise the numbers follow from the hosts and the local ranks.
    """
    if "GROUP_RANK" not in os.environ:
        for rank, node in zip(ranks, find_nodes([(rank["host"], rank["local_rank"], rank["local"]) for rank in ranks])):
            rank["node"] = node
    nodes: dict[int, list[str]] = {}
    for rank in ranks:
        nodes.setdefault(rank["node"], []).append(rank["host"])
    links.node, links.nodes = ranks[this_rank.rank]["node"], [(hosts[0], len(hosts)) for _, hosts in sorted(nodes.items())]
    monitors = {rank["node"]: MonitorAddress(*rank["monitor"]) for rank in ranks if rank["monitor"]}
    if links.node not in monitors:
        return
    link_to_monitor(monitors[links.node])
    if this_rank.is_local_main:
        hosts = {rank["node"]: rank["host"] for rank in ranks}
        public = {rank["node"]: rank["key"] for rank in ranks if rank["monitor"]}
        # Keys of other attempts and runs with the same secret are different.
        shared = lambda node: keys.shared_with(public[node], ranks[0]["nonce"], (links.node, node)).hex() if keys else ""
        # Each node reaches the main node under the address that it has resolved itself.
        roster = [
            {"node": node, "host": hosts[node], "address": _main_ip() if node == 0 else monitor.ip, "port": monitor.port,
             "key": shared(node)}
            for node, monitor in monitors.items()
        ]  # fmt: skip
        places = [{name: rank[name] for name in ("rank", "node", "host", "pid")} for rank in ranks]
        links.tell_monitor({"roster": roster, "ranks": places, "node": links.node})


def connect_single_rank(cfg: TrainConfig) -> None:
    """Set what the launcher of a single rank has stored, and start a monitor, because its data and its disk may hang too."""
    end_if_stopped()
    tuned_settings.apply(cfg, [], [], use_gpu=False)
    links.earlier_run = newest_run([read_earlier_run()])
    monitor = start_monitor_of_node(cfg, "127.0.0.1") if links.monitor is None else None  # `start` may be called twice
    if monitor is None:
        return
    link_to_monitor(monitor)
    place = {"rank": 0, "node": 0, "host": this_rank.host}
    links.tell_monitor({"roster": [place], "ranks": [{**place, "pid": os.getpid()}]})


def _check_options(ranks: list[dict]) -> None:
    first = ranks[0]
    for rank in ranks:
        for name, value in first["options"].items():
            if rank["options"].get(name) != value:
                raise UserError(
                    f"--{name} differs: {value!r} on rank 0 ({first['host']}), {rank['options'].get(name)!r} on rank "
                    f"{rank['rank']} ({rank['host']}). Start every node with the same options."
                )
        if rank["sharding"] != first["sharding"]:  # these ranks would wait for each other
            raise UserError(
                f"The accelerate config differs: it asks for {_difference(first['sharding'], rank['sharding'])} on {first['host']}, "
                f"but for {_difference(rank['sharding'], first['sharding'])} on {rank['host']}. Use the same config on every node."
            )
        if rank["torch"] != first["torch"]:  # a node that joins at a restart has had no preflight
            raise UserError(
                f"torch {first['torch']} is installed on {first['host']}, but {rank['torch']} on {rank['host']}. Install the same "
                "version on every node."
            )


def _difference(plan: dict, other: dict) -> str:
    if not plan:
        return "DDP"
    return ", ".join(["FSDP2", *(f"{name}: {value}" for name, value in plan.items() if other and other[name] != value)])


def _check_gpus(ranks: list[dict]) -> bool:
    without = [rank for rank in ranks if rank["gpus"] == 0]
    if 0 < len(without) < len(ranks):
        names = ", ".join(f"rank {rank['rank']} on {rank['host']}" for rank in without)
        raise UserError(
            f"These ranks have no GPU, but the others have one: {names}. Check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build "
            "there, or set ACCELERATE_USE_CPU=true on every node to train on CPUs."
        )
    for rank in (rank for rank in ranks if 0 < rank["gpus"] < rank["local"]):
        raise UserError(
            f"{rank['host']} has {counted(rank['gpus'], 'GPU')} for {rank['local']} ranks. num_processes of `accelerate "
            "launch` is the total over all nodes: use the number of nodes times the GPUs of one node. --nproc_per_node of torchrun is "
            "the number of GPUs of its own node."
        )
    if without and not cpu_is_wanted():
        print_on_main(f"No rank of {len(ranks)} has a GPU. Training on CPUs over gloo.")
    return not without


def _open_store(cfg: TrainConfig, timeout: timedelta) -> dist.Store:
    """Connect to the store of torchrun or `accelerate launch`. Rank 0 opens one if RANK and the others were set by hand."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = this_rank.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began = reported = time.monotonic()
    limit = cfg.preflight_wait if is_restart() else cfg.ddp_timeout_seconds
    while not is_server:
        try:
            socket.create_connection((address, port), timeout=2).close()
            break
        except OSError as error:
            now = time.monotonic()
            if now - began > limit:
                raise_missing(
                    "MAIN_NODE_LOST",
                    f"{this_rank.host}: the main node {address}:{port} cannot be reached: {error}. Check --main_process_ip and the "
                    "firewall, or run `accel-ddp doctor`.",
                    error,
                )
            if now - reported > REPORT_EVERY and this_rank.is_local_main:
                reported = now
                log.warning("waiting for the main node %s:%s (%.0f s): %s", address, port, now - began, error)
            time.sleep(0.1)
    return dist.TCPStore(
        address, port, this_rank.num_ranks, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )
