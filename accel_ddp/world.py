"""The other ranks: who they are, whether they are the ones that were asked for, and words between them.

The process group is opened here and not by Accelerate (1.15), which starts N separate trainings with
exit code 0 when the launcher, the environment and the hardware do not fit, drops some timeouts, and has
no way to wait for a slow rank without a timeout.
"""

import contextlib
import ctypes
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_ddp.config import TrainConfig, must_be_the_same
from accel_ddp.environment.launcher import cpu_is_wanted
from accel_ddp.environment.topology import is_local_main
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed

HOST = socket.gethostname()
RANK, NUM_RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # of torchrun --max_restarts
LOCAL_RANK, LOCAL_RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))

GOODBYE = 83  # the tag of the message that ends the watch over a rank
GRACE = 1.5  # seconds in which a rank that is gone may turn out to have said why

store: dist.Store | None = None  # words between ranks outside of any collective; None with one rank
lasting: dist.Store | None = None  # the same for all attempts of a launcher that restarts its ranks
_patient: dist.ProcessGroup | None = None  # a gloo group without a timeout, for waits of unknown length
_listener: threading.Thread | None = None
_watcher: threading.Thread | None = None
_goodbye: dist.Work | None = None  # of the next rank, when it comes
_nothing = torch.zeros(1)  # what it says
_is_over = threading.Event()
_meetings = 0
is_writing = False  # a checkpoint, on this rank
unsaved = ""  # why a run that came to its end did not leave a checkpoint of it
failure_heard = ""  # what the first rank that failed said, as far as this one has heard
stop_heard = ""  # who asked all ranks to stop, as far as this one has heard

# How a process ends. 74 and 75 are EX_IOERR and EX_TEMPFAIL of sysexits.h.
USER_ERROR, UNSAVED, STOPPED, INTERRUPTED = 2, 74, 75, 130


class Stopped(Exception):
    """The run was asked to end before its last step, and did so on every rank, after a checkpoint."""


def say(text: str) -> None:
    """Print on the main rank."""
    if RANK == 0:
        print(text, flush=True)


@contextlib.contextmanager
def together(what: str) -> Iterator[dict[str, str]]:
    """Do something slow or fragile on every rank (download, tokenise), each at its own pace. No collectives inside.

    No collective waits meanwhile, so that no process-group timeout runs. While others work, the ranks
    that wait are told whom they wait for. If one rank fails, every rank raises what it said. What a rank
    puts into the dictionary must be the same on all: fingerprints of the data, for example.
    """
    facts: dict[str, str] = {}
    meeting = _new_meeting()
    try:
        yield facts
    except Exception as error:
        if store:
            said = str(error) if isinstance(error, UserError) else f"{what}: {type(error).__name__}: {error}"
            store.compare_set(f"{meeting}/failed", "", json.dumps({"said": said, "host": HOST, "rank": RANK}))
        raise
    _wait_for_all(meeting, what, facts)
    if store and facts:
        others = [json.loads(store.get(f"{meeting}/{rank}")) for rank in range(NUM_RANKS)]
        for other in others:
            for name, value in others[0]["facts"].items():
                if other["facts"].get(name) != value:
                    raise UserError(
                        f"{name} differ: rank {other['rank']} on {other['host']} has others than rank 0 on {others[0]['host']}. "
                        "Copy the same files to every node."
                    )


def _new_meeting() -> str:
    global _meetings
    _meetings += 1
    return f"meeting/{_meetings}"


def _wait_for_all(meeting: str, what: str, facts: dict[str, str] | None = None) -> None:
    """Until every rank is here, without a timeout but not in silence; raises what a rank that failed said."""
    if store is None:
        return
    store.set(f"{meeting}/{RANK}", json.dumps({"host": HOST, "rank": RANK, "facts": facts or {}}))
    arrival = dist.barrier(group=_patient, async_op=True)  # notices a rank that died without a word
    began = told = time.monotonic()
    while not arrival.is_completed():
        if store.check([f"{meeting}/failed"]):
            word = json.loads(store.get(f"{meeting}/failed"))
            raise UserError(word["said"] if word["host"] == HOST else f"rank {word['rank']} on {word['host']}: {word['said']}")
        if time.monotonic() - told > 10 and is_local_main():
            told = time.monotonic()
            missing = [rank for rank in range(NUM_RANKS) if not store.check([f"{meeting}/{rank}"])]
            print(f"{HOST}: waiting for rank {missing} to {what} ({told - began:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(0.01)
    arrival.wait()  # raises what went wrong, if anything did


def first_failure(text: str) -> str:
    """What the first rank that failed said. A rank that fails because another is gone has nothing of its own to say."""
    with contextlib.suppress(Exception):  # the store may be gone with its host
        if store and not failure_heard:
            return store.compare_set("failed", "", text).decode()
    return failure_heard or text


def who_is_gone(seconds: float = 3 * GRACE) -> str:
    """After a connection to another rank broke: which rank is lost, as the one that watches it says; or nothing."""
    deadline = time.monotonic() + seconds
    while store and time.monotonic() < deadline:
        try:
            if store.check(["failed"]):
                return store.get("failed").decode()
        except Exception:
            return (
                f"lost: the main node {os.environ['MASTER_ADDR']} is gone: a rank there was killed (its launcher says so), its "
                "launcher was, or it is down. --resume goes on from the last checkpoint."
            )
        time.sleep(0.05)
    return ""


def is_first_on_node(text: str) -> bool:
    """Whether no other rank of this node has said it."""
    return store.add(f"said/{HOST}/{os.getppid()}/{mixed(0, text)}", 1) == 1 if store else is_local_main()


def exit_code(text: str) -> int:
    """Of a rank that ends with these words, its own or those of the first rank that failed."""
    return {"error": USER_ERROR, "unsaved": UNSAVED, "stopped": STOPPED, "interrupted": INTERRUPTED}.get(text.split(":")[0], 1)


def ask_all_to_stop(reason: str) -> None:
    with contextlib.suppress(Exception):  # the store may be gone with its host; the next reduce carries the flag too
        if store:
            store.set("stop", reason)


def end_with_the_parent(number: int) -> None:
    """Linux sends this signal when the parent process ends, however it ends."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def agreed(value: Any, source: int = 0, what: str = "agree") -> Any:
    """The value of rank `source`, on every rank. `what` is said to those who wait long for it."""
    box = [value]
    if NUM_RANKS > 1:
        _wait_for_all(_new_meeting(), what)
        dist.broadcast_object_list(box, src=source, group=_patient)
    return box[0]


def gathered(value: Any) -> list[Any] | None:
    """The values of all ranks in their order, on rank 0; None elsewhere. Travels through host memory."""
    if NUM_RANKS == 1:
        return [value]
    _wait_for_all(_new_meeting(), "hand over its results")
    values = [None] * NUM_RANKS if RANK == 0 else None
    dist.gather_object(value, values, dst=0, group=_patient)
    return values


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def meet(cfg: TrainConfig, precision: str) -> bool:
    """Open the process group; return whether this world trains on GPUs. The same answer or error on every rank."""
    global store, lasting, _patient, _listener, _watcher, _goodbye
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"WORLD_SIZE is {NUM_RANKS} but {name} is not set. Start with accelerate launch or torchrun, which set both."
            )
    timeout = timedelta(seconds=cfg.ddp_timeout_seconds)
    lasting, root = _store_of_the_launcher(cfg, timeout)
    store = dist.PrefixStore("accel_ddp", root)
    if lasting.check(["stopped"]):  # the launcher takes an agreed stop for a failure, and starts the ranks again
        raise Stopped(lasting.get("stopped").decode())
    gpus = 0 if cpu_is_wanted() else torch.cuda.device_count()
    options = {**must_be_the_same(cfg), "mixed_precision": precision}
    mine = {"host": HOST, "gpus": gpus, "local": LOCAL_RANKS, "rank": RANK, "options": options}
    store.set(f"rank/{RANK}", json.dumps(mine))
    ranks = [json.loads(_wait_for(f"rank/{rank}", rank, cfg)) for rank in range(NUM_RANKS)]

    for r in ranks:
        for name, value in ranks[0]["options"].items():
            if r["options"].get(name) != value:
                raise UserError(
                    f"--{name} differs: {value!r} on rank 0 ({ranks[0]['host']}), {r['options'].get(name)!r} on rank "
                    f"{r['rank']} ({r['host']}). Start every node with the same options."
                )
    without = [r for r in ranks if r["gpus"] == 0]
    if 0 < len(without) < NUM_RANKS:
        names = ", ".join(f"rank {r['rank']} on {r['host']}" for r in without)
        raise UserError(
            f"Some ranks have no GPU: {names}; the others have. Check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build "
            "there, or set ACCELERATE_USE_CPU=true on every node to train on CPUs."
        )
    crowded = [r for r in ranks if 0 < r["gpus"] < r["local"]]
    if crowded:
        r = crowded[0]
        raise UserError(
            f"{r['host']} has {r['gpus']} GPU{'s' * (r['gpus'] > 1)} for {r['local']} ranks. num_processes is the total over "
            "all nodes: use the number of nodes times the GPUs of one node."
        )
    use_gpu = not without
    if not use_gpu and not cpu_is_wanted():
        say(f"No rank of {NUM_RANKS} has a GPU: training on CPUs, over gloo.")
    if use_gpu:
        torch.cuda.set_device(LOCAL_RANK)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo",
        store=dist.PrefixStore("group", root),
        rank=RANK,
        world_size=NUM_RANKS,
        timeout=timeout,
        device_id=torch.device("cuda", LOCAL_RANK) if use_gpu else None,
    )
    _patient = dist.new_group(backend="gloo", timeout=timedelta(days=3650))  # a watch lasts as long as the run
    _goodbye = dist.irecv(_nothing, src=(RANK + 1) % NUM_RANKS, group=_patient, tag=GOODBYE)  # before anything else, everywhere
    _listener = threading.Thread(target=_listen, daemon=True)
    _listener.start()
    _watcher = threading.Thread(target=_watch, daemon=True)
    _watcher.start()
    return use_gpu


def leave() -> None:
    """From now on it means nothing that another rank ends."""
    _is_over.set()


def stop_listening() -> bool:
    """Before the interpreter shuts down: a thread that is inside the store, or gloo, at that moment would abort the process.
    All ranks call it, together. False: one that should have said goodbye did not."""
    leave()
    if _watcher:
        with contextlib.suppress(Exception):
            dist.send(torch.zeros(1), dst=(RANK - 1) % NUM_RANKS, group=_patient, tag=GOODBYE)
        _watcher.join(5)
    if _listener:
        _listener.join()
    return not (_watcher and _watcher.is_alive())


def _watch() -> None:
    """Say which rank is gone when the next one ends without a word: killed, or its node is.

    Its kernel closes its connections, so that a goodbye which has not come yet fails at once, whatever this rank is busy
    with. A collective only knows that some connection broke, and its rank would take the blame; inside of NCCL a rank
    notices nothing at all.
    """
    other = (RANK + 1) % NUM_RANKS
    try:
        _goodbye.wait()
        return
    except Exception:
        deadline = time.monotonic() + GRACE
    with contextlib.suppress(Exception):  # the store may be gone too
        # The first that is gone: others may follow it soon, aborted by NCCL, and among them who watches it.
        other = int(store.compare_set("gone", "", str(other)))
        while time.monotonic() < deadline:  # has it said why, or are all on their way out?
            if _is_over.wait(0.05) or store.check(["failed"]) or store.add("leaving", 0):
                return
        host = json.loads(store.get(f"rank/{other}"))["host"]
        text = first_failure(
            f"lost: rank {other} on {host} is gone without a word: it was killed (for want of memory? there, `dmesg -T | grep -i "
            "kill` tells), or its node is down. --resume goes on from the last checkpoint."
        )
        if is_first_on_node(text):
            print(text, file=sys.stderr, flush=True)


def _listen() -> None:
    """End this rank when another has failed and said so; hear of a stop that another was asked for.

    A rank inside a NCCL collective does not notice that another is gone before the timeout, and then it is
    aborted without a word of ours. Those that can end by themselves have done so within these seconds.
    """
    global stop_heard, failure_heard
    while not _is_over.wait(1):
        try:
            if not stop_heard and store.check(["stop"]):
                stop_heard = store.get("stop").decode()
            if not store.check(["failed"]):
                continue
            text = failure_heard = store.get("failed").decode()
        except Exception:
            return  # the store is gone with its host, and so is what it knew
        is_said = False
        with contextlib.suppress(Exception):
            if text.startswith("lost:"):  # at once: NCCL may end the process before we do
                if is_first_on_node(text):
                    print(text, file=sys.stderr, flush=True)
                is_said = True
        time.sleep(8)
        while is_writing:
            time.sleep(0.1)
        if is_local_main() and not is_said:
            print(text, file=sys.stderr, flush=True)
        os._exit(exit_code(text))


def _store_of_the_launcher(cfg: TrainConfig, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """torchrun's and accelerate's store, of all attempts and of this one; without them (RANK and the rest set by hand)
    rank 0 opens one."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_it = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began = told = time.monotonic()
    while not hosts_it:
        try:
            socket.create_connection((address, port), timeout=2).close()
            break
        except OSError as error:
            now = time.monotonic()
            if now - began > cfg.ddp_timeout_seconds:
                raise UserError(f"{HOST}: the main node {address}:{port} cannot be reached: {error}.") from error
            if now - told > 10 and is_local_main():
                told = now
                print(
                    f"{HOST}: waiting for the main node {address}:{port} ({now - began:.0f} s): {error}",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.1)
    root = dist.TCPStore(address, port, NUM_RANKS, is_master=hosts_it, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    return dist.PrefixStore("accel_ddp_lasting", root), dist.PrefixStore(f"attempt/{RESTARTS}", root)


def _wait_for(key: str, rank: int, cfg: TrainConfig) -> bytes:
    began = told = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        if now - began > cfg.ddp_timeout_seconds:
            raise UserError(f"{HOST}: rank {rank} of {NUM_RANKS} did not come within {cfg.ddp_timeout_seconds} s.")
        if now - told > 10 and is_local_main():
            told = now
            print(f"{HOST}: waiting for rank {rank} of {NUM_RANKS} to start ({now - began:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(0.05)
    return store.get(key)
