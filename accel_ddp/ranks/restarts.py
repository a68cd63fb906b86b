"""Attempts of a job: a launcher with `--max_restarts` restarts its ranks, and the new ranks must find each other and the run."""

import json
import logging
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import INTERRUPTED, UNSAVED, USER_ERROR, UserError
from accel_ddp.nodes.launcher import find_launcher_command
from accel_ddp.ranks.agreement import REPORT_EVERY
from accel_ddp.ranks.failures import Failure, Stopped
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.records.redaction import HIDDEN, redact_command
from accel_ddp.text import ranks_text
from accel_ddp.watch import restart_files
from accel_ddp.watch.restart_files import current_round, launcher_pid, read_outcome
from accel_ddp.words import find_options, without

log = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 10  # for a rank that has just announced itself; it looks at the store every 0.2 s


def end_if_stopped() -> None:
    """Raise `Stopped` if an earlier attempt on this node was asked to stop.

    `doctor.at_launch` lets the launcher end in this case. It is not loaded if the launched script does not mention this package.
    """
    outcome = read_outcome(launcher_pid(), current_round() - 1)
    if outcome and restart_files.why_not_restarted(outcome, []):
        kind = {USER_ERROR: "error", UNSAVED: "unsaved", INTERRUPTED: "interrupted"}.get(outcome["exit_code"], "stopped")
        raise Stopped(Failure(kind, outcome["text"].removeprefix(f"{kind}: ")))


def is_restart() -> bool:
    """Return whether the launcher of any node has already started ranks of this job before. A program may use a launcher twice."""
    return current_round() > 0 or os.environ.get(restart_files.IS_RESTART) == "1"


def read_earlier_run() -> dict[str, Any]:
    """Return what is stored on this node about the run, if this process continues an earlier attempt."""
    if not is_restart():
        return {}
    run = restart_files.read_run(launcher_pid())
    # `doctor.launcher_restarts` has written it when the launcher started.
    is_lost = not run and restart_files.LAUNCHER in os.environ
    return {**run, "is_lost": is_lost, "failure": read_outcome(launcher_pid(), current_round() - 1)}


def newest_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what any node has stored about the run, with the failure that was reported last. Every rank returns the same."""
    known = [run for run in runs if run.get("output_dir")]
    if not known and any(run.get("is_lost") for run in runs):
        raise UserError(
            f"This is a restart, but the files about the run in {tempfile.gettempdir()} were removed or could not be written, so "
            "its folder is not known. A restart would begin at step 0. Run the same command with --resume --output_dir FOLDER."
        )
    failures = [run["failure"] for run in runs if run.get("failure")]
    found = dict(known[0]) if known else {}
    if failures:  # a failure with a step comes from a node that has received the diagnosis
        found["failure"] = max(failures, key=lambda failure: (failure.get("step") is not None, failure.get("time") or 0))
    return found


def how_to_resume(folder: str) -> str:
    """Return what the user does to continue the run in `folder`: "run: COMMAND" if it is known, and is the only one."""
    words, options = redact_command(find_launcher_command()), ["--resume", "--output_dir", folder]
    if not words or len(links.nodes) > 1 or any(HIDDEN in word for word in words):
        where = " on every node" if words and len(links.nodes) > 1 else ""  # without words, one command may start all nodes
        return f"run the same command with {shlex.join(options)}{where}"
    words = without(words, find_options(words, ["output_dir"]))
    given = find_options(words, ["resume"])  # may have no value
    words = without(words, [one._replace(end=one.at + 1) if (one.value or "").startswith("-") else one for one in given])
    return f"run: {shlex.join([*words, *options])}"


def join_attempt(root: dist.Store, mine: dict[str, Any], cfg: TrainConfig) -> tuple[dist.Store, list[dict[str, Any]]]:
    """Return a store for exactly the processes that are alive now, and what each of them has announced.

    The store of a launcher keeps the keys of earlier attempts, which must not be read. TORCHELASTIC_RESTART_COUNT cannot tell
    attempts apart: it differs between nodes when a launcher is restarted. Therefore the process of rank 0 chooses a random
    id, the others announce themselves under this id, and rank 0 confirms them. A process that has read the id of a dead attempt
    is never confirmed, and reads the next id. A rank that dies before it has acknowledged the confirmation is replaced: rank 0
    then begins again with another id.
    """
    waiting = _Waiting(cfg)
    attempt = ""
    while True:
        if this_rank.is_main:
            attempt = secrets.token_hex(8)
            root.set("attempt", attempt)
        else:
            before = attempt
            while not root.check(["attempt"]) or (attempt := root.get("attempt").decode()) == before:
                waiting.sleep(lambda: [0])
        store = dist.PrefixStore(f"attempt/{attempt}", root)
        store.set(f"rank/{this_rank.rank}", json.dumps(mine))
        if ranks := _gather(store, waiting) if this_rank.is_main else _follow(root, attempt, store, mine, waiting):
            return store, ranks


def _gather(store: dist.Store, waiting: "_Waiting") -> list[dict[str, Any]]:
    """Wait for all ranks and confirm them. Return what they announced, or [] if one of them is gone. Runs on rank 0."""
    missing = list(range(this_rank.num_ranks))
    while missing := [rank for rank in missing if not store.check([f"rank/{rank}"])]:
        waiting.sleep(lambda: missing)
    ranks = [json.loads(store.get(f"rank/{rank}")) for rank in range(this_rank.num_ranks)]
    store.set("members", json.dumps(ranks))
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    missing = list(range(1, this_rank.num_ranks))
    while missing := [rank for rank in missing if not store.check([f"member/{rank}/{ranks[rank]['nonce']}"])]:
        if time.monotonic() > deadline:
            return []
        waiting.sleep(lambda: missing)
    store.set("complete", "")
    # This process may have the store, and may end at once because of an option that differs.
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    while not all(store.check([f"seen/{rank}"]) for rank in range(1, this_rank.num_ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ranks


def _follow(root: dist.Store, attempt: str, store: dist.Store, mine: dict[str, Any], waiting: "_Waiting") -> list[dict[str, Any]]:
    """Wait until rank 0 has confirmed this process. Return what all ranks announced, or [] if rank 0 has chosen another id."""
    ranks: list[dict[str, Any]] = []
    while True:
        if not ranks and store.check(["members"]):
            ranks = json.loads(store.get("members"))
            if ranks[this_rank.rank]["nonce"] != mine["nonce"]:
                return []  # this id belongs to an attempt of an earlier process of this rank
            store.set(f"member/{this_rank.rank}/{mine['nonce']}", "")
        if ranks and store.check(["complete"]):
            store.set(f"seen/{this_rank.rank}", "")
            return ranks
        if root.get("attempt").decode() != attempt:
            return []
        waiting.sleep(lambda: [rank for rank in range(this_rank.num_ranks) if not store.check([f"rank/{rank}"])])


class _Waiting:
    """Sleeps between looks at the store, reports which ranks are missing, and ends the wait after a limit.

    At a restart a node may be missing because it was lost. It is waited for as long as a main node that was lost, and its absence
    is a failure, which may be followed by another restart.
    """

    def __init__(self, cfg: TrainConfig):
        self.option = "preflight_wait" if is_restart() else "ddp_timeout_seconds"
        self.limit, self.began = getattr(cfg, self.option), time.monotonic()
        self.reported = self.began

    def sleep(self, find_missing: Callable[[], list[int]]) -> None:
        """`find_missing` may ask the store about every rank, so it is called only before a report."""
        now = time.monotonic()
        seconds = now - self.began
        if seconds > self.limit:
            raise_missing(
                "NODE_LOST",
                f"{this_rank.host}: {ranks_text(find_missing() or [0], 16)} of {this_rank.num_ranks} did not start within "
                f"--{self.option} {self.limit:.0f}. Look at the output of that node.",
            )
        if this_rank.is_local_main and now - self.reported > REPORT_EVERY:
            self.reported = now
            if missing := find_missing():
                log.warning("waiting for %s of %d to start (%.0f s)", ranks_text(missing, 16), this_rank.num_ranks, seconds)
        time.sleep(0.02 if seconds < 5 else 0.2)


def raise_missing(kind: str, text: str, cause: Exception | None = None) -> NoReturn:
    """Raise the error for a node that is missing: a mistake of the user, or at a restart a failure."""
    how = restart_files.how_to_continue(1, 0, links.by_hand)
    raise (Stopped(Failure("died", f"{kind}: {text} {how}")) if is_restart() else UserError(text)) from cause
