"""The options of ranks and nodes: how they are checked, how long they wait for each other, and what they send."""

import os
from dataclasses import dataclass
from typing import Literal

from accel_ddp.options import option

TIMEOUT_VARIABLE = os.environ.get("DDP_TIMEOUT_SECONDS") or "600"
_DDP_TIMEOUT = int(TIMEOUT_VARIABLE) if TIMEOUT_VARIABLE.isdigit() else 0  # `TrainConfig.validate` rejects 0


@dataclass(kw_only=True)
class MultiNodeConfig:
    """The options of several ranks and nodes."""

    preflight: Literal["on", "off"] = option(
        "on", "with several nodes, check the cluster first, as `accel-ddp doctor` does", group="multi-node", affects_result=False
    )
    preflight_wait: float = option(
        300,
        "seconds to wait in that check for nodes that have not started yet",
        group="multi-node",
        affects_result=False,
        per_node=True,
        at_least=1,
    )
    hang_report_seconds: float = option(
        5.0,
        "report a rank, a node or a link after this many seconds without progress beyond what is usual",
        group="multi-node",
        affects_result=False,
        at_least=0.5,
    )
    hang_abort_seconds: float = option(
        30.0,
        "end the run after this many seconds without progress, or after 5 times the usual duration if that is longer; 0: never",
        group="multi-node",
        affects_result=False,
        at_least=0,
    )
    ddp_timeout_seconds: int = option(
        _DDP_TIMEOUT,
        "seconds that a rank waits for another one; default: DDP_TIMEOUT_SECONDS or 600",
        group="multi-node",
        affects_result=False,
        at_least=1,
        also=("ddp_timeout",),
    )
    check_every: int = option(
        50,
        "updates between checks that the weights of all ranks are equal; every checkpoint is checked too; 0: never",
        group="multi-node",
        affects_result=False,
        at_least=0,
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none", "compress gradients for the network", group="multi-node", also=("ddp_comm_hook",)
    )
    bucket_cap_mb: int = option(
        25,
        "DDP: megabytes of gradients per all-reduce",
        group="multi-node",
        affects_result=False,
        at_least=1,
        also=("ddp_bucket_cap_mb",),
    )
    gradient_as_bucket_view: bool = option(
        True, "DDP: keep no second copy of the gradients", group="multi-node", affects_result=False
    )
    find_unused_parameters: bool = option(
        False,
        "DDP: for models whose forward pass skips parameters; slower",
        group="multi-node",
        affects_result=False,
        also=("ddp_find_unused_parameters",),
    )
    static_graph: bool = option(False, "DDP: every step uses the same parameters", group="multi-node", affects_result=False)
    broadcast_buffers: Literal["auto", "on", "off"] = option(
        "auto",
        "DDP: copy rank 0's buffers to all ranks; auto: for models with batch norm",
        group="multi-node",
        also=("ddp_broadcast_buffers",),
    )
    sync_batchnorm: bool = option(
        False, "compute batch norm over the micro-batches of all ranks (GPU only)", group="multi-node", also=("sync_bn",)
    )
