"""Tests of sharded models that need a GPU: `pytest -m gpu tests/test_gpu_sharding.py`.

Two NCCL ranks share one GPU as two nodes. Each has its own NCCL_HOSTID, so that NCCL connects them over TCP.
"""

import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import ROOT, Ended, Running, node_environments, rank_environments, run_all

pytestmark = pytest.mark.gpu
SFT = ROOT / "recipes" / "sft.py"
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
# Without TF32 and with SGD: AdamW enlarges rounding errors where a gradient consists of them.
EXACT = [
    "--no_tf32", "--mixed_precision", "no", "--optimizer", "sgd", "--lr", "0.05", "--steps", "8", "--no_dropout", "--samples", "0",
    "--global_batch_size", "16", "--micro_batch_size", "4", "--max_eval_items", "20", "--no_eval_first",
]  # fmt: skip


def ranks(number: int, *options: object, **more: str) -> tuple[list[list], list[dict[str, str]]]:
    """Return the commands and environments of ranks that share the GPU."""
    environments = node_environments(number, NCCL_SOCKET_IFNAME="lo", **more) if number > 1 else rank_environments(1, **more)
    for rank, env in enumerate(environments):
        del env["CUDA_VISIBLE_DEVICES"]
        env["NCCL_HOSTID"] = f"node{rank}"
    return [[sys.executable, SFT, *options]] * number, environments


def train(number: int, folder: Path, *options: object, **more: str) -> Ended:
    return run_all(*ranks(number, *options, "--output_dir", folder, **more)).well()


def difference(some: Path, others: Path) -> float:
    """Return the largest difference of the weights of two exported models."""
    pairs = [load_file(next((folder / "model").glob("*.safetensors"))) for folder in (some, others)]
    assert pairs[0].keys() == pairs[1].keys()
    return max(np.abs(pairs[0][name] - pairs[1][name]).max() for name in pairs[0])


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """Return the folder of a run of one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(1, folder, *EXACT)
    return folder


def test_two_sharded_nccl_ranks_learn_what_ddp_and_one_rank_learn(tmp_path, one):
    train(2, tmp_path / "ddp", *EXACT)
    ended = train(2, tmp_path / "fsdp", *EXACT, **FSDP)
    assert "layers are not captured as CUDA graphs" in ended.texts[0]
    assert re.search(r"^memory per GPU: \d.* GiB estimated with FSDP", ended.texts[0], flags=re.MULTILINE)
    assert re.search(r"^peak of GPU memory: [\d.]+ GiB, and [\d.]+ GiB were estimated\.$", ended.texts[0], flags=re.MULTILINE)
    assert difference(one, tmp_path / "fsdp") < 1e-5
    assert difference(tmp_path / "ddp", tmp_path / "fsdp") < 1e-5


def test_offloaded_and_checkpointed_layers_learn_the_same(tmp_path, one):
    train(2, tmp_path / "run", *EXACT, **FSDP, FSDP_OFFLOAD_PARAMS="true", FSDP_ACTIVATION_CHECKPOINTING="true")
    assert difference(one, tmp_path / "run") < 1e-5


def test_compiled_layers_of_a_sharded_model_learn_the_same(tmp_path, one):
    ended = train(2, tmp_path / "run", *EXACT, "--compile", "on", **FSDP)
    assert "compiling the layers" in ended.texts[0]
    assert "run without compilation" not in ended.texts[0]
    assert difference(one, tmp_path / "run") < 1e-4


def test_fused_adamw_in_bf16_on_a_sharded_model_is_close_to_ddp(tmp_path):
    options = [*EXACT, "--optimizer", "adamw", "--lr", "1e-3", "--mixed_precision", "bf16", "--micro_batch_size", "auto"]
    train(2, tmp_path / "ddp", *options)
    train(2, tmp_path / "fsdp", *options, **FSDP)
    assert difference(tmp_path / "ddp", tmp_path / "fsdp") < 2e-2  # twice the sum of the 8 learning rates: AdamW steps by signs


def test_adapters_of_a_sharded_model_learn_the_same(tmp_path):
    options = [*EXACT, "--lora_r", "4", "--lr", "0.5"]
    train(1, tmp_path / "one", *options)
    train(2, tmp_path / "fsdp", *options, **FSDP)
    assert difference(tmp_path / "one", tmp_path / "fsdp") < 1e-5


def test_a_sharded_run_that_was_killed_continues_with_the_same_weights(tmp_path, one):
    options = [*EXACT, "--save_every", "2", "--output_dir", tmp_path / "run"]
    running = Running(*ranks(2, *options, "--log_every", "1", **FSDP))
    running.until("5/8")
    running.processes[1].send_signal(signal.SIGKILL)
    assert 0 not in running.ended().codes
    run_all(*ranks(2, *options, "--resume", **FSDP)).well()
    assert difference(one, tmp_path / "run") < 1e-5
