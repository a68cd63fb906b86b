"""Reads from the environment how `accelerate launch` asks for a model to be sharded. It does not import torch."""

import os
from dataclasses import dataclass

from accel_ddp.errors import UserError

# With these variables Accelerate and transformers would shard or load the model themselves. See `sharding.apply` why they do not.
TAKEN = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_PARALLELISM_CONFIG")
OTHER_SIZES = {"TP": "tensor", "CP": "context", "SP": "sequence"}
CONFIG = "accelerate_configs/fsdp.yaml"


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is spread over ranks. The fields have the names and meanings of Accelerate's FSDP2 plugin."""

    replicas: int = 1  # copies of the model, each of which is sharded over num_ranks / replicas ranks (HSDP)
    reshard_after_forward: bool = True  # frees the weights of a layer between its forward and its backward pass
    cpu_offload: bool = False  # keeps shards, gradients and optimizer in host memory
    activation_checkpointing: bool = False
    layer_classes: tuple[str, ...] = ()  # of the modules that are gathered one at a time; empty: the layers of the model


def take_plan(num_ranks: int) -> ShardingPlan | None:
    """Return the plan that the accelerate config asks for, or None for DDP, and remove it from the environment.

    Raise UserError for FSDP1, for DeepSpeed, and for what is not supported.
    """
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise UserError(
            f"The accelerate config asks for DeepSpeed, which is not supported. {CONFIG} shards weights, gradients and optimizer like "
            f"its ZeRO stage 3: accelerate launch --config_file {CONFIG} ..."
        )
    asks = _is_on("ACCELERATE_USE_FSDP")
    if asks and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "The accelerate config asks for FSDP1 (fsdp_version: 1), which is not supported. Convert it to FSDP2: accelerate to-fsdp2 "
            f"--config_file CONFIG.yaml --output_file NEW.yaml. Or use {CONFIG}."
        )
    replicas = _replicas(num_ranks) if _is_on("ACCELERATE_USE_PARALLELISM_CONFIG") else 1
    plan = _plan(replicas) if asks else None
    for name in TAKEN:
        os.environ.pop(name, None)
    return plan


def _plan(replicas: int) -> ShardingPlan:
    if os.environ.get("FSDP_IGNORED_MODULES", "None") not in ("", "None"):
        raise UserError("The accelerate config has fsdp_ignored_modules, which is not supported. Remove this line.")
    classes = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    names = () if classes in ("", "None") else tuple(name.strip() for name in classes.split(",") if name.strip())
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "SIZE_BASED_WRAP":
        raise UserError(
            "The accelerate config has fsdp_auto_wrap_policy: SIZE_BASED_WRAP, which is not supported. Use TRANSFORMER_BASED_WRAP."
        )
    return ShardingPlan(
        replicas=replicas,
        # FULL_SHARD is the name of FSDP1 for the same, which Accelerate accepts too.
        reshard_after_forward=os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("1", "true", "full_shard"),
        cpu_offload=_is_on("FSDP_OFFLOAD_PARAMS"),
        activation_checkpointing=_is_on("FSDP_ACTIVATION_CHECKPOINTING"),
        layer_classes=names,
    )


def _replicas(num_ranks: int) -> int:
    """Return how many copies of the model there are. Raise UserError if they do not fit the number of ranks."""
    for name, what in OTHER_SIZES.items():
        if _size(f"{name}_SIZE") > 1:
            raise UserError(
                f"The accelerate config has parallelism_config_{name.lower()}_size: {_size(f'{name}_SIZE')}, but {what} parallelism is "
                "not supported. Set it to 1."
            )
    replicas, shards = _size("DP_REPLICATE_SIZE"), _size("DP_SHARD_SIZE")
    if replicas * shards != num_ranks:
        raise UserError(
            f"The accelerate config has parallelism_config_dp_replicate_size: {replicas} and parallelism_config_dp_shard_size: "
            f"{shards}, but there are {num_ranks} ranks. Their product must be {num_ranks}, for example the number of nodes times the "
            "GPUs per node."
        )
    return replicas


def _size(name: str) -> int:
    value = os.environ.get(f"PARALLELISM_CONFIG_{name}", "1")
    return int(value) if value.lstrip("-").isdigit() else 1


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
