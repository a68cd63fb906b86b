"""Waits of ranks for each other, and exchanges of values, where the work may be slow or may fail on one rank."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from accel_ddp import phases
from accel_ddp.errors import UserError
from accel_ddp.phases import WAIT
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.text import ranks_text

log = logging.getLogger(__name__)

REPORT_EVERY = 10  # seconds after which a waiting node prints which ranks it is waiting for
# A waiting rank asks the store whether another one has failed after a tenth of the time that it has waited, within these limits in
# seconds. A launcher has one store for thousands of ranks.
ASK_SOONEST, ASK_LATEST = 0.01, 1.0


def print_on_main(text: str) -> None:
    if this_rank.is_main:
        print(text, flush=True)


@contextlib.contextmanager
def together(what: str) -> Iterator[dict[str, str]]:
    """Do slow or fragile work (a download, tokenization) on every rank, each at its own pace. Use no collectives inside.

    No collective is pending meanwhile, so no timeout of the process group runs. Ranks that finish early print which ranks
    they are waiting for. If one rank fails, every rank raises its error. The yielded dictionary must have the same content
    on all ranks when the block ends, for example fingerprints of the data; otherwise every rank raises a UserError.
    """
    facts: dict[str, str] = {}
    key = _new_wait()
    try:
        yield facts
    except Exception as error:
        if links.store:
            text = str(error) if isinstance(error, UserError) else f"{what}: {type(error).__name__}: {error}"
            message = json.dumps({"text": text, "host": this_rank.host, "rank": this_rank.rank})
            with contextlib.suppress(dist.DistError):  # without the store, the error of this rank is still the reason
                links.store.compare_set(f"{key}/failed", "", message)
        raise
    with phases.phase(WAIT):
        _wait_for_all(key, what, facts)
    if links.store and _is_stored(f"{key}/facts"):  # of any rank; most waits have none, and reading all takes a request per rank
        all_facts = [json.loads(links.store.get(f"{key}/{rank}")) for rank in range(this_rank.num_ranks)]
        first = all_facts[0]
        names = dict.fromkeys(name for one in all_facts for name in one["facts"])
        for other in all_facts:
            for name in names:
                if other["facts"].get(name) != first["facts"].get(name):
                    raise UserError(
                        f"{name} on rank {other['rank']} ({other['host']}) differ from those on rank 0 ({first['host']}). "
                        "Copy the same files to every node."
                    )


def broadcast_object(value: Any, source: int = 0, what: str = "reach the same point") -> Any:
    """Return the value of rank `source` on every rank. `what` completes the message "waiting for rank 1 to ..."."""
    box = [value]
    if this_rank.num_ranks > 1:
        with phases.phase(WAIT):
            _wait_for_all(_new_wait(), what)
            dist.broadcast_object_list(box, src=source, group=links.slow_group)
    return box[0]


def gather_objects(value: Any) -> list[Any] | None:
    """Return the values of all ranks in the order of ranks on rank 0, and None elsewhere. They travel through host memory."""
    if this_rank.num_ranks == 1:
        return [value]
    values = [None] * this_rank.num_ranks if this_rank.is_main else None
    with phases.phase(WAIT):
        _wait_for_all(_new_wait(), "send its results")
        dist.gather_object(value, values, dst=0, group=links.slow_group)
    return values


def gather_everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks in the order of ranks, on every rank."""
    return broadcast_object(gather_objects(value))


def is_any(flag: bool) -> bool:
    """Return whether the flag is set on any rank. It takes less than a millisecond if all ranks are here, and has no timeout."""
    if this_rank.num_ranks == 1:
        return flag
    number = torch.tensor(int(flag))
    dist.all_reduce(number, group=links.slow_group)
    return bool(number)


def _new_wait() -> str:
    links.num_waits += 1
    return f"wait/{links.num_waits}"


def _wait_for_all(key: str, what: str, facts: dict[str, str] | None = None) -> None:
    """Wait without a timeout until every rank is here. Raise the error of a rank that failed; report long waits."""
    store = links.store
    if store is None:
        return
    # A store is lost with its launcher, and the ranks then stop. The barrier does not need it, but messages and facts do.
    with contextlib.nullcontext() if facts else contextlib.suppress(dist.DistError):
        mine = {"host": this_rank.host, "rank": this_rank.rank, "facts": facts or {}}
        store.set(f"{key}/{this_rank.rank}", json.dumps(mine))
        if facts:
            store.set(f"{key}/facts", "")
        # Every rank arrived at the last wait that this one passed, and has read the facts of those that passed before it. Of nested
        # waits the inner one passes first, although it has the higher number.
        while len(links.passed_waits) > 1:
            old = links.passed_waits.pop(0)
            store.delete_key(f"{old}/{this_rank.rank}")
            if this_rank.is_main:
                store.delete_key(f"{old}/facts")
    barrier = dist.barrier(group=links.slow_group, async_op=True)  # fails when a rank dies
    began = reported = asked = time.monotonic()
    while not barrier.is_completed():
        now = time.monotonic()
        if now - asked >= min(max((now - began) / 10, ASK_SOONEST), ASK_LATEST):
            asked = now
            _raise_failure_of_other(key)
        if now - reported > REPORT_EVERY and this_rank.is_local_main:
            reported = now
            missing = [rank for rank in range(this_rank.num_ranks) if not _is_stored(f"{key}/{rank}")]
            if 0 < len(missing) < this_rank.num_ranks:
                log.warning("waiting for %s to %s (%.0f s)", ranks_text(missing, 16), what, reported - began)
        time.sleep(0.01)
    try:
        barrier.wait()  # raises the error of the barrier, if there was one
    except RuntimeError:
        _raise_failure_of_other(key)  # this is the reason, if that rank ended before the store was asked again
        raise
    links.passed_waits.append(key)


def _raise_failure_of_other(key: str) -> None:
    """Raise the error of a rank that has failed during this wait, if there is one."""
    if _is_stored(f"{key}/failed"):
        error = json.loads(links.store.get(f"{key}/failed"))
        is_here = error["host"] == this_rank.host
        raise UserError(error["text"] if is_here else f"rank {error['rank']} on {error['host']}: {error['text']}")


def _is_stored(key: str) -> bool:
    try:
        return links.store.check([key])
    except dist.DistError:
        return False
