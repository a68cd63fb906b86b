"""What `accel-ddp tune` has found for a set of nodes: a file in `--cache_dir` of each node, which later runs on these nodes use."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_ddp.config import choices
from accel_ddp.config.option_values import is_setting
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.records.files import parse

NETWORK = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET")  # settings are for one network
DEFAULT_BUCKET = 25  # DDP's default
FOLDER, MOST_FILES = "tuned", 200
_TYPES = {"date": str, "device": str, "version": str, "network": dict, "settings": dict, "model": str, "bucket_cap_mb": int,
          "comm_hook": str}  # fmt: skip

Nodes = Sequence[tuple[str, int]]  # host and number of ranks of each node


def file_name(nodes: Nodes) -> str:
    """Return the name of the file for these nodes, in any order."""
    return hashlib.blake2b(json.dumps(sorted(map(list, nodes))).encode(), digest_size=12).hexdigest() + ".json"


def make_file(nodes: Nodes, device: str, settings: dict[str, str], **facts: Any) -> dict[str, str]:
    """Return the name and the content of the file. The `comm_hook` in it is only suggested, because it changes the result."""
    facts |= {"date": time.strftime("%Y-%m-%d %H:%M"), "device": device.partition(",")[0], "settings": _allowed(settings)}
    return {file_name(nodes): json.dumps(facts, indent=1) + "\n"}


def model_key(options: dict[str, Any]) -> str:
    """Return what decides how large the gradients of a model are. The size of buckets is measured for one model."""
    values = [options.get(name) or "-" for name in ("model", "lora_r", "freeze")]
    return " ".join(" ".join(value) if isinstance(value, list) else str(value) for value in values)


def network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in NETWORK if environment.get(name)}


def announce(cfg: TrainConfig, saved: dict[str, Any], device: str, version: str, reads: bool) -> dict[str, Any]:
    """Return what a rank tells the others about settings. `saved` has its node's newest checkpoint of the run that continues."""
    variables = {name: value for name, value in os.environ.items() if is_setting(name, "any")}
    return {
        "files": _read_files(cfg.cache_dir) if reads and cfg.tuned == "auto" else {}, "saved": saved, "device": device,
        "version": version, "network": network_variables(os.environ), "given": variables, "model": model_key(as_plain_dict(cfg)),
    }  # fmt: skip


def _read_files(cache_dir: str) -> dict[str, dict[str, Any]]:
    """Return the newest files of a node by their names. A damaged one is empty."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):  # no folder, or a disk that fails: the run has the default settings
        paths = Path(cache_dir).expanduser().joinpath(FOLDER).glob("*.json")
        for path in sorted(paths, key=lambda path: -path.stat().st_mtime)[:MOST_FILES]:
            facts = parse(path.read_bytes()) or {}
            is_valid = all(isinstance(facts.get(name), kind) for name, kind in _TYPES.items()) and facts["bucket_cap_mb"] >= 1
            found[path.name] = facts if is_valid and _allowed(facts["settings"]) == facts["settings"] else {}
    return found


def _allowed(settings: dict[Any, Any]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if is_setting(name, value)}


def find(announced: list[dict[str, Any]], nodes: Nodes) -> tuple[dict[str, Any], str]:
    """Return what was found for these nodes or {}, and why it is not used or "". Every rank has the same arguments and result."""
    name, first = file_name(nodes), announced[0]
    found = [rank["files"][name] for rank in announced if name in rank["files"]]
    newest = max(found, key=lambda facts: facts.get("date", ""), default=None)
    if not newest:
        return {}, f"the file {name} is damaged" if found else ""
    for what in ("device", "version", "network"):
        if newest[what] != first[what]:
            then, now = (x if isinstance(x, str) else shown(x) or "no such variable" for x in (newest[what], first[what]))
            return {}, f"they were measured with {then} on {newest['date']}, and this run has {now}"
    if given := _given(announced, newest["settings"]):
        return {**newest, "settings": {}}, f"{' and '.join(given)} is set in the environment"
    return newest, ""


def _given(announced: list[dict[str, Any]], settings: dict[str, str]) -> list[str]:
    """Return the settings that the environment of a rank has with another value."""
    return sorted({name for rank in announced for name, value in rank["given"].items() if settings.get(name, value) != value})


def apply(cfg: TrainConfig, announced: list[dict[str, Any]], nodes: Nodes, use_gpu: bool) -> list[str]:
    """Set the options `tuned` and `bucket_cap_mb`, and the variables of NCCL before its first use. Return lines to print.

    `announced` is empty for a single rank. Settings and buckets decide the order in which gradients are summed, so a resumed run
    keeps what it had on as many ranks.
    """
    saved = max((rank["saved"] for rank in announced), key=lambda one: one.get("step", -1), default={})
    lines: list[str] = []
    for name in ("tuned", "bucket_cap_mb"):
        if saved and getattr(cfg, name) == "auto":
            choices.keep(cfg, name, saved[name], saved)
            lines += [f"--resume: {choices.KEPT}: {name} {saved[name]}"] if saved[name] not in ("off", DEFAULT_BUCKET) else []
            if name == "tuned" and (given := _given(announced, settings := _parse(cfg.tuned))):
                cfg.tuned = shown({key: value for key, value in settings.items() if key not in given}) or "off"
                lines.append(f"--resume: {' and '.join(given)} keeps the value of the environment: weights agree up to rounding")
    found, reason = find(announced, nodes) if announced and cfg.tuned == "auto" else ({}, "")
    if reason:
        what, verb = ("The NCCL settings that", "are") if found else ("What", "is")
        lines.append(
            f"{what} `accel-ddp tune` found for these nodes {verb} not used: {reason}. Run it again, or use --tuned off."
        )
    if cfg.tuned == "auto":
        settings, cfg.tuned = found.get("settings") if use_gpu else {}, "off"
        why = f"found by `accel-ddp tune` on {found.get('date')} for these nodes"
        if settings:
            choices.choose(cfg, "tuned", shown(settings), f"NCCL settings {why}, off: ignore them")
        elif found and not reason:
            choices.reasons(cfg)["tuned"] = f"nothing else was faster, {why}"
        if cfg.bucket_cap_mb == "auto" and found and found["model"] == announced[0]["model"]:
            if found["bucket_cap_mb"] != DEFAULT_BUCKET:
                choices.choose(cfg, "bucket_cap_mb", found["bucket_cap_mb"], f"for this model {why}")
            if found["comm_hook"] != cfg.comm_hook == "none":
                lines.append(f"--comm_hook {found['comm_hook']} was faster still. It rounds gradients, so it is only suggested.")
    if cfg.bucket_cap_mb == "auto":
        cfg.bucket_cap_mb = DEFAULT_BUCKET
    if use_gpu and cfg.tuned != "off":
        os.environ.update(_parse(cfg.tuned))
    return lines


def _parse(text: str) -> dict[str, str]:
    return _allowed(dict(word.split("=", 1) for word in text.split() if "=" in word))


def shown(settings: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
