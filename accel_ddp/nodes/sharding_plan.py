"""How the variables of `accelerate launch` ask for a model to be sharded. The launcher reads them too, without torch."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.text import counted

# With these variables Accelerate and transformers would shard or load the model themselves, which a run does itself.
TAKEN = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_PARALLELISM_CONFIG")
CONFIG = "accelerate_configs/fsdp.yaml"
ONE_PER_NODE = 0  # the number of replicas until the nodes are known

_OTHER_SIZES = {"TP": "tensor", "CP": "context", "SP": "sequence"}
_LIBRARIES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
# The names of FSDP1 -> whether weights are freed after the forward pass, and whether each node has a copy of the model.
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_YES, _NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")
_RENAMED = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}  # variables with other names than the setting


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is spread over ranks. The fields have the names and meanings of Accelerate's FSDP2 plugin."""

    replicas: int = 1  # copies of the model, each of which is sharded over num_ranks / replicas ranks (HSDP)
    reshard_after_forward: bool = True  # frees the weights of a layer between its forward and its backward pass
    cpu_offload: bool = False  # keeps shards, gradients and optimizer in host memory
    activation_checkpointing: bool = False
    layer_classes: tuple[str, ...] = ()  # of the modules that are gathered one at a time; empty: the layers of the model

    def on_nodes(self, counts: list[int]) -> "ShardingPlan":
        """Return the plan for nodes with these numbers of ranks. Raise UserError if the copies of the model do not fit them."""
        if self.replicas == ONE_PER_NODE and len(set(counts)) > 1:
            raise UserError(
                "The accelerate config has fsdp_sharding_strategy: HYBRID_SHARD, one copy of the model on each node, but the nodes "
                f"have different numbers of ranks ({', '.join(map(str, counts))}). Start the same number on each node, or remove it."
            )
        if self.replicas == ONE_PER_NODE:
            return replace(self, replicas=len(counts))
        if sum(counts) % self.replicas:
            raise UserError(_wrong_sizes(self.replicas, 0, sum(counts), len(counts)))
        return self

    def keeps(self, asked: str) -> str:
        return asked if asked in ("weights", "gradients") else "none" if self.reshard_after_forward else "weights"

    def describe(self, num_ranks: int, device: str) -> str:
        shards = num_ranks // self.replicas
        where = f"sharded over {counted(shards, device)}"
        text = f"The model is {where}" if self.replicas == 1 else f"There are {self.replicas} copies of the model, each {where}"
        return f"{text} (FSDP2{''.join(f'; {one}' for one in self._unusual())})."

    def summarize(self, num_ranks: int) -> str:
        copies = f", {self.replicas} copies of the model" if self.replicas > 1 else ""
        return "; ".join([f"FSDP2 over {num_ranks} ranks{copies}", *self._unusual()])

    def _flags(self) -> dict[str, str]:
        flags = {
            "fsdp_reshard_after_forward": self.reshard_after_forward, "fsdp_offload_params": self.cpu_offload,
            "fsdp_activation_checkpointing": self.activation_checkpointing,
        }  # fmt: skip
        return {name: str(value).lower() for name, value in flags.items()}

    def _unusual(self) -> list[str]:
        return [": ".join(flag) for flag in self._flags().items() if flag not in ShardingPlan()._flags().items()]

    def settings(self) -> dict[str, str]:
        copies = "one per node" if self.replicas == ONE_PER_NODE else str(self.replicas)
        classes = ",".join(self.layer_classes) or "none"
        return {"copies of the model": copies, **self._flags(), "fsdp_transformer_layer_cls_to_wrap": classes}

    def facts(self, num_ranks: int) -> dict[str, Any]:
        shards = {"text": self.summarize(num_ranks), "shards": num_ranks // self.replicas}
        return {**shards, **asdict(self), "layer_classes": list(self.layer_classes)}


def take_plan(num_ranks: int) -> ShardingPlan | None:
    plan = read_plan(os.environ, num_ranks)
    for name in TAKEN:
        os.environ.pop(name, None)
    return plan


def read_plan(variables: Mapping[str, str], num_ranks: int = 0, config_file: str = "") -> ShardingPlan | None:
    """Return the plan, or None for DDP and one rank (0: not known yet). UserError names `config_file` if it is unsupported."""
    for name, library in _LIBRARIES.items():
        if _is_on(variables, f"ACCELERATE_USE_{name}"):
            raise UserError(
                f"The accelerate config asks for {library}, which is not supported. FSDP2 shards weights, gradients and optimizer in "
                f"the same way as ZeRO stage 3 of DeepSpeed: use --config_file {CONFIG}."
            )
    asks = _is_on(variables, "ACCELERATE_USE_FSDP")
    if asks and variables.get("FSDP_VERSION", "1") != "2":
        file = config_file or "CONFIG.yaml"
        strategy = variables.get("FSDP_SHARDING_STRATEGY", "")
        dropped = f" This drops fsdp_sharding_strategy: {strategy}. Write the line again." if "HYBRID" in strategy.upper() else ""
        raise UserError(
            "The accelerate config asks for FSDP1 (fsdp_version: 1), which is not supported. Convert it to FSDP2: accelerate to-fsdp2 "
            f"--config_file {file} --overwrite.{dropped} Or use --config_file {CONFIG}."
        )
    replicas = None
    if _is_on(variables, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        replicas = _read_replicas(variables, num_ranks)
        if not asks and (shards := _size(variables, "DP_SHARD_SIZE")) > 1:
            raise UserError(
                f"The accelerate config has parallelism_config_dp_shard_size: {shards} without FSDP. Use --config_file {CONFIG}, or "
                "write `distributed_type: FSDP` and `fsdp_version: 2` into your config."
            )
    plan = _read_fsdp(variables, replicas) if asks else None
    if plan and plan.cpu_offload and num_ranks == 1:
        raise UserError("The accelerate config has fsdp_offload_params: true, which needs at least two ranks. Set it to false.")
    return None if num_ranks == 1 else plan


def require_ddp(config: Mapping[str, Any], command: str) -> None:
    variables = {**variables_of(config), **os.environ}
    if _is_on(variables, "ACCELERATE_USE_FSDP"):
        raise UserError(
            f"The accelerate config asks for FSDP, but {command} measures and explains the communication of DDP. Use --config_file "
            "accelerate_configs/1node.yaml, or 2node.yaml for several nodes."
        )
    read_plan(variables)  # raises UserError for DeepSpeed and others


def variables_of(config: Mapping[str, Any]) -> dict[str, str]:
    kind = str(config.get("distributed_type", ""))
    found = {f"ACCELERATE_USE_{name}": "true" for name in ("FSDP", *_LIBRARIES) if kind == name}
    if kind == "FSDP":
        for name, value in (config.get("fsdp_config") or {}).items():
            key = name.upper() if name.startswith("fsdp") else f"FSDP_{name.upper()}"
            found[_RENAMED.get(key, key)] = str(value)
    if sizes := config.get("parallelism_config"):
        found |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **{name.upper(): str(value) for name, value in sizes.items()}}
    return found


def _read_fsdp(variables: Mapping[str, str], replicas: int | None) -> ShardingPlan:
    if variables.get("FSDP_IGNORED_MODULES", "None") not in ("", "None"):
        raise UserError("The accelerate config has fsdp_ignored_modules, which is not supported. Remove this line.")
    policy = variables.get("FSDP_AUTO_WRAP_POLICY", "")
    if policy.upper() not in ("", "NONE", "TRANSFORMER_BASED_WRAP"):
        raise UserError(
            f"The accelerate config has fsdp_auto_wrap_policy: {policy}, which is not supported. Use TRANSFORMER_BASED_WRAP: each "
            "layer is then gathered alone, which needs the least memory."
        )
    if _is_on(variables, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
        raise UserError(
            "The accelerate config has fsdp_activation_checkpointing_offload: true, which is not supported. Remove this line, and keep "
            "fsdp_activation_checkpointing: true."
        )
    classes = variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    names = () if classes in ("", "None") else tuple(name.strip() for name in classes.split(",") if name.strip())
    reshards, is_hybrid = _read_strategy(variables)
    return ShardingPlan(
        replicas=replicas or (ONE_PER_NODE if is_hybrid else 1),
        reshard_after_forward=reshards,
        cpu_offload=_is_on(variables, "FSDP_OFFLOAD_PARAMS"),
        activation_checkpointing=_is_on(variables, "FSDP_ACTIVATION_CHECKPOINTING"),
        layer_classes=names,
    )


def _read_strategy(variables: Mapping[str, str]) -> tuple[bool, bool]:
    is_freed, has_copies = True, False
    # Accelerate ignores the strategy for FSDP2. It is the only way to ask for one copy per node that fits every number of nodes.
    for name, default in (("fsdp_sharding_strategy", "FULL_SHARD"), ("fsdp_reshard_after_forward", "true")):
        value = variables.get(name.upper(), default)
        if value.upper() in _STRATEGIES:
            freed, copies = _STRATEGIES[value.upper()]
        elif name.endswith("forward") and value.lower() in (*_YES, *_NO):
            freed, copies = value.lower() in _YES, False
        else:
            raise UserError(
                f"The accelerate config has {name}: {value}, which is not supported with FSDP2. Use `fsdp_reshard_after_forward: "
                "true`, or accelerate_configs/1node.yaml for DDP."
            )
        is_freed, has_copies = is_freed and freed, has_copies or copies
    return is_freed, has_copies


def _read_replicas(variables: Mapping[str, str], num_ranks: int) -> int:
    for name, what in _OTHER_SIZES.items():
        if (size := _size(variables, f"{name}_SIZE")) > 1:
            raise UserError(
                f"The accelerate config has parallelism_config_{name.lower()}_size: {size}, but {what} parallelism is not supported. "
                "Set it to 1."
            )
    replicas, shards = _size(variables, "DP_REPLICATE_SIZE"), _size(variables, "DP_SHARD_SIZE")
    # Without a shard size (its default is 1), the copies are sharded over all ranks that there are.
    if num_ranks and (num_ranks % replicas if shards == 1 else replicas * shards != num_ranks):
        num_nodes = variables.get("GROUP_WORLD_SIZE", "")
        raise UserError(_wrong_sizes(replicas, shards, num_ranks, int(num_nodes) if num_nodes.isdigit() else 1))
    return replicas


def _wrong_sizes(replicas: int, shards: int, num_ranks: int, num_nodes: int) -> str:
    sizes = f"parallelism_config_dp_replicate_size: {replicas}"
    if shards > 1:
        sizes += f" and parallelism_config_dp_shard_size: {shards}"
    copies = num_nodes if num_ranks % num_nodes == 0 else 1
    what = "one copy of the model on each node" if copies > 1 else "a single copy of the model"
    return (
        f"The accelerate config has {sizes}, but there are {num_ranks} ranks. Use sizes whose product is {num_ranks}. For {what} use "
        f"--parallelism_config_dp_replicate_size {copies} --parallelism_config_dp_shard_size {num_ranks // copies}."
    )


def _size(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(f"PARALLELISM_CONFIG_{name}", "1")
    if not value.isdigit() or int(value) < 1:
        raise UserError(
            f"The accelerate config has parallelism_config_{name.lower()}: {value}. It must be a whole number of at least 1."
        )
    return int(value)


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in _YES
