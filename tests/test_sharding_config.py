"""Tests of the accelerate configs that ask for FSDP: what they mean, and which are refused, by whom and with which message."""

import dataclasses
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from accel_ddp import accelerator, cli
from accel_ddp.config.choices import choose
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.doctor import launcher_restarts
from accel_ddp.doctor.compare_nodes import compare_facts
from accel_ddp.doctor.facts import accelerate_facts
from accel_ddp.errors import UserError
from accel_ddp.nodes.launcher import find_config_file
from accel_ddp.nodes.sharding_plan import ShardingPlan, read_plan, variables_of
from accel_ddp.ranks.process import this_rank
from tests.conftest import BIN, PROGRAMS, ROOT, clean_environment, free_port, run_all

CONFIGS = ROOT / "accelerate_configs"
SMALL_RUN = PROGRAMS / "goes_wrong.py"
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
PREFIX = "PARALLELISM_CONFIG_"


def hsdp(replicas: int, shards: int = 1, **more: int) -> dict[str, str]:
    sizes = {"DP_REPLICATE_SIZE": replicas, "DP_SHARD_SIZE": shards, **more}
    return {
        **FSDP2,
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"{PREFIX}{name}": str(value) for name, value in sizes.items()},
    }


@pytest.mark.parametrize(
    ("variables", "num_ranks", "plan"),
    [
        ({}, 4, None),
        (FSDP2, 4, ShardingPlan()),
        (FSDP2, 1, None),
        (hsdp(2, 4), 8, ShardingPlan(replicas=2)),
        (hsdp(2), 8, ShardingPlan(replicas=2)),
        (hsdp(1, 1), 8, ShardingPlan()),
        ({**FSDP2, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, 8, ShardingPlan(replicas=0)),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "hybrid_shard_zero2"}, 8, ShardingPlan(replicas=0, reshard_after_forward=False)),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, 2, ShardingPlan(reshard_after_forward=False)),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "full_shard"}, 2, ShardingPlan()),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, 2, ShardingPlan(reshard_after_forward=False)),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "True"}, 2, ShardingPlan(cpu_offload=True)),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, 2, ShardingPlan(activation_checkpointing=True)),
        ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, 2, ShardingPlan()),
        ({**FSDP2, "FSDP_AUTO_WRAP_POLICY": "transformer_based_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer, T5Block"}, 2,
         ShardingPlan(layer_classes=("BertLayer", "T5Block"))),
    ],
)  # fmt: skip
def test_the_variables_of_accelerate_become_a_plan(variables, num_ranks, plan):
    assert read_plan(variables, num_ranks) == plan


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "accelerate to-fsdp2 --config_file old.yaml --overwrite"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP1"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed, which is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM, which is not supported"),
        (hsdp(1, 4, TP_SIZE=2), "parallelism_config_tp_size: 2, but tensor parallelism"),
        (hsdp(1, 4, CP_SIZE=2), "context parallelism"),
        (hsdp(1, 4, SP_SIZE=2), "sequence parallelism"),
        (hsdp(2, 2), "--parallelism_config_dp_replicate_size 4 --parallelism_config_dp_shard_size 2"),
        (hsdp(3), "parallelism_config_dp_replicate_size: 3, but there are 8 ranks"),
        (hsdp(0, 8), "parallelism_config_dp_replicate_size: 0. It must be a whole number"),
        ({**hsdp(1, 8), "ACCELERATE_USE_FSDP": "false"}, "dp_shard_size: 8 without FSDP"),
        ({**FSDP2, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy: SIZE_BASED_WRAP"),
        ({**FSDP2, "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "Use TRANSFORMER_BASED_WRAP"),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "no_shard"}, "fsdp_reshard_after_forward: no_shard"),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "8"}, "fsdp_reshard_after_forward: 8"),
        ({**FSDP2, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "fsdp_sharding_strategy: NO_SHARD"),
        ({**FSDP2, "FSDP_IGNORED_MODULES": "lm_head"}, "fsdp_ignored_modules"),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "fsdp_activation_checkpointing_offload"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_what_to_type(variables, words):
    with pytest.raises(UserError) as error:
        read_plan({**variables, "GROUP_WORLD_SIZE": "4"}, 8, "old.yaml")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_offload_needs_two_ranks():
    with pytest.raises(UserError, match="fsdp_offload_params: true, which needs at least two ranks"):
        read_plan({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, 1)


def test_one_copy_per_node_needs_nodes_of_the_same_size():
    plan = read_plan(variables_of(yaml.safe_load((CONFIGS / "2node_fsdp.yaml").read_text())))
    assert plan.on_nodes([8, 8, 8]).replicas == 3
    assert plan.on_nodes([8]) == ShardingPlan(), "on one node this is plain FSDP"
    with pytest.raises(UserError, match=r"different numbers of ranks \(8, 4\)"):
        plan.on_nodes([8, 4])
    assert ShardingPlan(replicas=3).on_nodes([8, 4]).replicas == 3, "copies of an explicit number may extend over nodes"
    assert ShardingPlan(replicas=2).describe(16, "GPU") == (
        "There are 2 copies of the model, each sharded over 8 GPUs (FSDP2)."
    )  # fmt: skip
    assert ShardingPlan(replicas=2, cpu_offload=True).summarize(4) == (
        "FSDP2 over 4 ranks, 2 copies of the model; fsdp_offload_params: true"
    )  # fmt: skip
    assert ShardingPlan(cpu_offload=True).describe(8, "GPU") == (
        "The model is sharded over 8 GPUs (FSDP2; fsdp_offload_params: true)."
    )  # fmt: skip


def test_nodes_that_shard_in_different_ways_are_named():
    """The config of a command and the variables of a launcher are compared by their meaning."""
    config = yaml.safe_load((CONFIGS / "2node_fsdp.yaml").read_text())
    ddp = yaml.safe_load((CONFIGS / "2node.yaml").read_text())

    def compared(*nodes: dict[str, str]) -> list[str]:
        base = {"local_rank": 0, "ip": "", "pid": 1, "clock": 0.0, "ranks": 2, "nodes": 2, "node_ranks": 0}
        members = [{**base, "node": i, "host": "ab"[i], "facts": {"accelerate": one}} for i, one in enumerate(nodes)]
        return [finding.saw for finding in compare_facts(members)[0]]

    fsdp = accelerate_facts(config, {})
    assert compared(fsdp, accelerate_facts(ddp, {})) == [
        "accelerate sharding differs: FSDP2 on a (machine_rank 0), DDP on b (machine_rank 1)"
    ]
    assert compared(accelerate_facts({}, FSDP2), accelerate_facts({}, {})), "torchrun has no config"
    assert compared(fsdp, accelerate_facts(config, {"FSDP_RESHARD_AFTER_FORWARD": "false"})) == [
        "accelerate fsdp_reshard_after_forward differs: true on a (machine_rank 0), false on b (machine_rank 1)"
    ]
    assert compared(fsdp, accelerate_facts(config, {"FSDP_SHARDING_STRATEGY": "FULL_SHARD"})) == [
        "accelerate copies of the model differs: one per node on a (machine_rank 0), 1 on b (machine_rank 1)"
    ]
    config["fsdp_config"]["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    assert not compared(fsdp, accelerate_facts(config, {})), "a setting without an effect may differ"


def test_torchrun_gets_the_variables_of_a_config(tmp_path, monkeypatch, capsys):
    """`accel-ddp launch` names the config in a variable where it starts ranks with torchrun."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "orig_argv", ["torchrun", "--nnodes", "2", "recipes/sft.py"])
    file = config_file(tmp_path, mixed_precision="bf16")
    os.environ |= {"ACCEL_DDP_CONFIG_FILE": str(file), "FSDP_RESHARD_AFTER_FORWARD": "false"}
    launcher_restarts.adopt_config()
    assert read_plan(os.environ, 3) == ShardingPlan(reshard_after_forward=False), "a variable of the user replaces a setting"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert find_config_file(sys.orig_argv) == str(file)
    os.environ["ACCEL_DDP_CONFIG_FILE"] = "nowhere.yaml"
    with pytest.raises(SystemExit, match="2"):
        launcher_restarts.adopt_config()
    assert "error: ACCEL_DDP_CONFIG_FILE nowhere.yaml: there is no such file" in capsys.readouterr().err


def test_commands_that_measure_ddp_refuse_a_config_of_fsdp(tmp_path, capsys):
    fsdp = str(CONFIGS / "fsdp.yaml")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("backend: local\nnodes: [a, b]\ngpus_per_node: 0\naccelerate_config: 2node_fsdp.yaml\n")
    recipe = str(ROOT / "recipes" / "own_model.py")
    for words in (
        ["tune", "--config_file", fsdp, "--num_processes", "2"],
        ["scaling", "--config_file", fsdp, recipe],
        ["scaling", "--use_fsdp", recipe],
        ["scaling", "--cluster", str(cluster), recipe],
    ):
        assert cli.main(words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert "asks for FSDP, but accel-ddp" in line, line


@pytest.mark.slow
def test_each_node_prints_within_seconds_that_the_other_has_another_config(tmp_path):
    fsdp, ddp = (["--config_file", CONFIGS / name] for name in ("2node_fsdp.yaml", "2node.yaml"))
    cases = {
        "ddp": ([fsdp, ddp], ["accelerate sharding differs: FSDP2 on"] * 2),
        "settings": (
            [fsdp, [*fsdp, "--fsdp_reshard_after_forward", "false", "--fsdp_offload_params", "true"]],
            ["fsdp_reshard_after_forward differs: true on"] * 2,
        ),
        "refused": (
            [[*fsdp, "--fsdp_version", "1"], ddp],
            ["asks for FSDP1", "machine_rank 0] The accelerate config asks for FSDP1"],
        ),
        "deepspeed": (
            [ddp, [*ddp, "--use_deepspeed", "--zero_stage", "2"]],
            ["machine_rank 1] The accelerate config asks for DeepSpeed", "error: The accelerate config asks for DeepSpeed"],
        ),
    }
    for case, (configs, words) in cases.items():
        port = free_port()
        common = ["--num_machines", 2, "--num_processes", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        commands = [
            [BIN / "accelerate-launch", *config, *common, "--machine_rank", node, SMALL_RUN, "--output_dir", tmp_path / "run"]
            for node, config in enumerate(configs)
        ]
        ended = run_all(commands, [clean_environment(GLOO_SOCKET_IFNAME="lo")] * 2)
        assert ended.codes == [2, 2], (case, ended.text)
        for text, expected in zip(ended.texts, words):
            assert expected in text, text
        assert "Traceback" not in ended.text, ended.text
        assert not (tmp_path / "run").exists()


def config_file(folder, **changes):
    """Write fsdp.yaml with changes. A value in `fsdp_config` that is None removes the line."""
    values = yaml.safe_load((CONFIGS / "fsdp.yaml").read_text())
    values |= {"num_processes": 2, "main_process_port": free_port(), **changes}
    values["fsdp_config"] = {name: value for name, value in values["fsdp_config"].items() if value is not None}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": False,
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "chosen", [["fsdp1", "deepspeed"], pytest.param(["sizes", "option", "megatron"], marks=pytest.mark.slow)], ids=" ".join
)
def test_a_launcher_refuses_a_config_before_it_starts_a_rank(chosen, tmp_path):
    """DeepSpeed is not installed. `accelerate launch` would end with a traceback that asks the user to install it."""
    hybrid = {"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}}
    cases = {
        "fsdp1": ({"fsdp_config": FSDP1}, [], "Convert it to FSDP2: accelerate to-fsdp2 --config_file "),
        "deepspeed": (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "fsdp_config": {}},
            [],
            "asks for DeepSpeed, which is not supported",
        ),
        "option": ({"distributed_type": "MULTI_GPU"}, ["--use_deepspeed", "--zero_stage", "2"], "asks for DeepSpeed"),
        "megatron": ({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}}, [], "Megatron-LM"),
        "sizes": (hybrid, [], "--parallelism_config_dp_replicate_size 1 --parallelism_config_dp_shard_size 2."),
    }  # fmt: skip

    def launch(case):
        changes, options, _ = cases[case]
        (tmp_path / case).mkdir()
        file = config_file(tmp_path / case, **changes)
        command = [BIN / "accelerate-launch", "--config_file", file, *options, SMALL_RUN, "--output_dir", tmp_path / case / "run"]
        return run_all([command], [clean_environment()])

    with ThreadPoolExecutor(2) as pool:
        for case, ended in zip(chosen, pool.map(launch, chosen)):
            assert ended.codes == [2], (case, ended.text)
            (line,) = [line for line in ended.text.splitlines() if line.startswith("error:")]
            assert cases[case][2] in line, line
            assert "Traceback" not in ended.text, ended.text
            assert not (tmp_path / case / "run").exists()
    if "fsdp1" in chosen:  # the command in the message works, and its result is a config of FSDP2
        file = tmp_path / "fsdp1" / "config.yaml"
        run_all([[BIN / "accelerate", "to-fsdp2", "--config_file", file, "--overwrite"]], [clean_environment()]).well()
        assert read_plan(variables_of(yaml.safe_load(file.read_text())), 2) == ShardingPlan()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"static_graph": True}, "--static_graph True: is an option of DDP"),
        ({"bucket_cap_mb": 50}, "--bucket_cap_mb 50: is an option of DDP"),
        ({"comm_hook": "powersgd"}, "Use --comm_hook bf16"),
        ({"mixed_precision": "fp16"}, "Use --mixed_precision bf16"),
        ({"quantize": "4bit", "lora_r": 2}, "--quantize 4bit: quantized weights cannot be sharded"),
    ],
)
def test_options_that_only_ddp_has_are_refused(values, words):
    RecipeConfig(comm_hook="bf16").validate_sharded()
    RecipeConfig(bucket_cap_mb=25).validate_sharded()  # what `auto` has become at the start
    cfg = RecipeConfig()
    choose(cfg, "bucket_cap_mb", 50, "found by `accel-ddp tune`")
    cfg.validate_sharded()
    with pytest.raises(UserError, match=words):
        RecipeConfig(**values).validate_sharded()


def test_an_option_of_fsdp_is_refused_with_ddp(monkeypatch):
    monkeypatch.setattr(accelerator, "this_rank", dataclasses.replace(this_rank, num_ranks=2))
    with pytest.raises(UserError, match="--keep_gathered weights: is an option of FSDP, but this run uses DDP"):
        accelerator._check_options(RecipeConfig(keep_gathered="weights"))
