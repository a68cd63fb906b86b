"""On a GPU: `pytest -m gpu`. Two NCCL nodes on one GPU: another NCCL_HOSTID for each makes them two hosts that talk TCP."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import PROGRAMS, ROOT, Ended, clean_environment, free_port, rank_environments, run_all

pytestmark = pytest.mark.gpu
CLASSIFY = ROOT / "recipes" / "classify.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def on_gpu(**more: str) -> dict[str, str]:
    env = clean_environment(**more)
    del env["CUDA_VISIBLE_DEVICES"]
    return env


def one_node(*arguments: object) -> Ended:
    return run_all([[*LAUNCH, "--config_file", "accelerate_configs/local.yaml", CLASSIFY, *arguments]], [on_gpu()]).well()


def two_nodes(script: Path, *arguments: object) -> Ended:
    port = str(free_port())
    commands = [
        [*LAUNCH, "--config_file", "accelerate_configs/2node.yaml", "--main_process_port", port, "--machine_rank", str(node),
         script, *arguments]
        for node in (0, 1)
    ]  # fmt: skip
    return run_all(commands, [on_gpu(NCCL_HOSTID=f"node{node}", NCCL_SOCKET_IFNAME="lo") for node in (0, 1)])


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / "model.safetensors")


def test_classify_in_bf16_on_one_gpu(tmp_path):
    ended = one_node("--mixed_precision", "bf16", "--output_dir", tmp_path / "run")
    assert "mixed precision: bf16" in ended.text
    accuracy = float(ended.text.split("\naccuracy ")[1].split()[0])
    assert accuracy > 0.7


def test_two_nccl_nodes_learn_what_one_learns(tmp_path):
    """Without TF32, with SGD: AdamW blows up rounding where a gradient is zero but for rounding (biases of keys)."""
    exact = [
        "--no_tf32",
        "--mixed_precision",
        "no",
        "--optimizer",
        "sgd",
        "--lr",
        "0.01",
        "--steps",
        "20",
        "--micro_batch_size",
        "4",
    ]
    one_node(*exact, "--output_dir", tmp_path / "one")
    ended = two_nodes(CLASSIFY, *exact, "--output_dir", tmp_path / "two").well()
    assert "2 nodes x 1 rank x 4 per micro-batch x 2 micro-batches" in ended.texts[0]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max(np.abs(one[name] - two[name]).max() for name in one) < 1e-5


@pytest.mark.parametrize("hook", ["bf16", "powersgd"])
def test_compressed_gradients_over_nccl(tmp_path, hook):
    two_nodes(CLASSIFY, "--comm_hook", hook, "--steps", "20", "--output_dir", tmp_path / "run").well()


def test_steps_skipped_by_the_fp16_scaler_are_counted(tmp_path):
    ended = two_nodes(
        PROGRAMS / "overflow.py", "--mixed_precision", "fp16", "--steps", 30, "--output_dir", tmp_path / "run"
    ).well()
    assert "of 30 steps were skipped by the fp16 scaler" in ended.texts[0]
    assert "weights are finite" in ended.texts[0]


def test_more_ranks_than_gpus_and_a_mix_with_cpu_are_refused(tmp_path):
    import torch

    too_many = torch.cuda.device_count() + 1
    environments = rank_environments(too_many)
    for env in environments:
        del env["CUDA_VISIBLE_DEVICES"]
    command = [sys.executable, PROGRAMS / "goes_wrong.py", "--global_batch_size", too_many, "--output_dir", tmp_path / "run"]
    ended = run_all([command] * too_many, environments)
    assert ended.codes == [2] * too_many
    assert f"for {too_many} ranks" in ended.text

    environments = rank_environments(2)
    del environments[0]["CUDA_VISIBLE_DEVICES"]
    command = [sys.executable, PROGRAMS / "goes_wrong.py", "--output_dir", tmp_path / "run"]
    ended = run_all([command] * 2, environments)
    assert ended.codes == [2, 2]
    assert "Some ranks have no GPU: rank 1 on" in ended.text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan", "step 5: the loss is nan on rank 1 on"),
        ("exception", "a bug in the user's loss"),
        ("memory", "rank 1 on"),
    ],
)
def test_what_goes_wrong_on_one_node_is_said_on_both_within_seconds(tmp_path, how, words):
    """The other node waits inside NCCL, where it notices nothing by itself before the timeout of 600 s."""
    ended = two_nodes(PROGRAMS / "goes_wrong.py", "--how", how, "--output_dir", tmp_path / "run")
    assert 0 not in ended.codes
    assert ended.seconds < 60
    for text in ended.texts:
        assert words in text
