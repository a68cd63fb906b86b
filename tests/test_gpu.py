"""Tests that need a GPU: `make gpu`, which covers every promise once, and `make gpu-slow`: further cases and `accel-ddp tune`.

Two NCCL nodes share one GPU. Each has its own NCCL_HOSTID, so that NCCL treats them as two hosts and connects them over TCP. Several
tests share the GPU too, apart from those that measure it (`gpu_alone`).
"""

import contextlib
import json
import re
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
import yaml
from safetensors.numpy import load_file

from accel_ddp.records.incidents import read_incidents
from accel_ddp.records.run_log import read_log
from tests.conftest import (
    BIN,
    PROGRAMS,
    ROOT,
    Ended,
    Running,
    clean_environment,
    free_port,
    node_environments,
    rank_environments,
    run_all,
)
from tests.test_comm_hooks import COMPRESSED, assert_compressed

pytestmark = pytest.mark.gpu
CLASSIFY = ROOT / "recipes" / "classify.py"
IMAGES = ROOT / "recipes" / "images.py"
HOST = socket.gethostname()
# Without TF32 and with SGD: AdamW enlarges rounding errors where a gradient consists of them (biases of keys).
EXACT = ["--no_tf32", "--mixed_precision", "no", "--optimizer", "sgd", "--lr", "0.01", "--steps", "20", "--micro_batch_size", "4"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
OF_484 = ["--global_batch_size", "484", "--micro_batch_size", "484"]


def on_gpu(**more: str) -> dict[str, str]:
    """Return an environment in which all GPUs are visible. Ranks without `accelerate launch` compute in float32."""
    env = clean_environment(**{"ACCELERATE_MIXED_PRECISION": "no", **more})
    del env["CUDA_VISIBLE_DEVICES"]
    return env


def one_rank(script: Path, *arguments: object) -> Ended:
    """Run a script without a launcher, whose start would take 5 s."""
    return run_all([[sys.executable, script, *arguments]], [on_gpu()])


def two_ranks(script: Path, *arguments: object) -> tuple[list[list], list[dict[str, str]]]:
    """Return the commands and environments of two NCCL ranks on two nodes, without launchers."""
    environments = node_environments(2, NCCL_SOCKET_IFNAME="lo", ACCELERATE_MIXED_PRECISION="no")
    for rank, env in enumerate(environments):
        del env["CUDA_VISIBLE_DEVICES"]
        env["NCCL_HOSTID"] = f"node{rank}"
    return [[sys.executable, script, *arguments]] * 2, environments


def two_nodes(script: Path, *arguments: object) -> Ended:
    return run_all(*two_ranks(script, *arguments))


def nodes(script: Path, *arguments: object) -> tuple[list[list], list[dict[str, str]]]:
    """Return the commands and environments of `accelerate launch` on two NCCL nodes that share the GPU."""
    port = str(free_port())
    commands = [
        [*LAUNCH, "--config_file", "accelerate_configs/2node.yaml", "--main_process_port", port, "--machine_rank", str(node),
         "--mixed_precision", "no", script, *arguments]
        for node in (0, 1)
    ]  # fmt: skip
    return commands, [on_gpu(NCCL_HOSTID=f"node{node}", NCCL_SOCKET_IFNAME="lo") for node in (0, 1)]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / "model.safetensors")


# One process for each group, because each model is compiled for half a minute. The longest tests come first.
@pytest.mark.parametrize(
    "kinds",
    [
        ["bert", "dropout"], ["llama", "packed"], ["pairs", "vit"],
        *(pytest.param(kinds, marks=pytest.mark.gpu_slow) for kinds in (["deberta", "modernbert"], ["bart", "t5"])),
        *(pytest.param(kinds, marks=pytest.mark.gpu_slow) for kinds in (["window", "gemma3"], ["mixtral"])),
        ["quick", "window", "gemma3", "modernbert", "mixtral", "bart", "t5", "deberta"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_padding_free_captured_and_compiled_layers_give_the_same_result_as_plain_ones(kinds):
    """Results with and without padding differ by the rounding of bf16. Results with and without CUDA graphs are equal."""
    ended = one_rank(PROGRAMS / "fast_layers.py", *kinds).well()
    found = json.loads(ended.text.strip().splitlines()[-1])
    for kind in (kind for kind in found if kind != "dropout"):
        assert "error" not in found[kind], found[kind]
        is_equal = kind != "deberta"  # sums its position biases in another order each time, so it is not captured by default
        most = {"mixtral": 0.3, "t5": 0.1}.get(kind, 0.05)  # rounding changes experts; a position bias is a sum over all texts
        assert found[kind]["padding-free"] < most, found
        assert (found[kind]["captured"] == 0) == is_equal, found
        for other in ("accumulated", "smaller") if kind != "vit" else ():  # a smaller batch is captured when it occurs
            assert (found[kind][other] == 0) == is_equal, found
        assert found[kind]["default"] == ("graphs" if is_equal else "off"), found
        if "quick" not in kinds:
            assert found[kind]["compiled"] < most, found
            assert found[kind]["compiled again"] == 0 or not is_equal, found
    if "dropout" in kinds:
        assert found["dropout"] == {"captured": 0, "compiled": 0}, found


def test_classify_computes_in_bf16_by_default(tmp_path):
    """`accelerate launch` sets ACCELERATE_MIXED_PRECISION=no, although our config states no precision."""
    command = [*LAUNCH, "--config_file", "accelerate_configs/local.yaml", CLASSIFY, "--output_dir", tmp_path / "run"]
    ended = run_all([command], [on_gpu()]).well()
    assert "mixed_precision bf16: every GPU has it" in ended.text
    assert "mixed precision: bf16" in ended.text
    before, accuracy = map(float, ended.text.split("\naccuracy ")[1].split()[:2])
    assert accuracy > before
    assert accuracy > 0.7


def test_one_command_starts_two_nccl_nodes_and_stops_them_with_a_checkpoint(tmp_path):
    """`accel-ddp launch` counts the GPUs of each node, and learns what one node learns. Ctrl-C saves on both."""
    nodes = [{"host": f"node{node}", "env": {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo"}} for node in (0, 1)]
    keys = {"backend": "local", "nodes": nodes, "gpus_per_node": 1, "main_port": free_port(), "output": str(tmp_path)}
    description = tmp_path / "cluster.yaml"
    description.write_text(yaml.safe_dump(keys))
    launch = [BIN / "accel-ddp", "launch"]
    one_rank(CLASSIFY, *EXACT, "--output_dir", tmp_path / "one").well()
    ended = run_all([[*launch, "--name", "two", description, CLASSIFY, *EXACT]], [on_gpu()]).well()
    assert "2 nodes x 1 rank x 4 per micro-batch x 2 micro-batches" in ended.text
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max(np.abs(one[name] - two[name]).max() for name in one) < 1e-5
    running = Running([[*launch, "--name", "stopped", description, CLASSIFY, "--steps", "100000"]], [on_gpu()])
    running.until("10/100000")
    running.processes[0].send_signal(signal.SIGINT)
    ended = running.ended()
    assert ended.codes == [75], ended.text
    assert list((tmp_path / "stopped").glob("step_*"))
    keys["gpus_per_node"] = torch.cuda.device_count() + 1
    description.write_text(yaml.safe_dump(keys))
    ended = run_all([[*launch, "--name", "many", description, CLASSIFY]], [on_gpu()])
    assert ended.codes == [2]
    assert f"says {torch.cuda.device_count() + 1}" in ended.text


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("sft", []),
        ("embed", []),
        ("sft", ["--lora_r", "4", "--chat_template", "llama3"]),
        ("dpo", ["--lora_r", "4", "--gradient_checkpointing", "true"]),
    ],
    ids=["sft", "embed", "new-tokens", "dpo"],
)
def test_other_recipes_on_two_nccl_nodes_learn_what_one_learns(tmp_path, recipe, options):
    """sft averages over the tokens of uneven answers. embed gathers the negatives of all ranks over NCCL.

    LoRA with new tokens computes its loss in chunks, and dpo computes layers again in the backward pass.
    """
    exact = [
        "--no_tf32", "--mixed_precision", "no", "--optimizer", "sgd", "--lr", "0.05", "--steps", "8", "--no_dropout",
        "--global_batch_size", "16", "--micro_batch_size", "4", "--max_eval_items", "50", "--no_eval_first", *options,
    ]  # fmt: skip
    script = ROOT / "recipes" / f"{recipe}.py"
    one_rank(script, *exact, "--output_dir", tmp_path / "one").well()
    two_nodes(script, *exact, "--output_dir", tmp_path / "two").well()
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max(np.abs(one[name] - two[name]).max() for name in one) < 1e-5


def test_synchronised_batch_norm_of_two_ranks_equals_that_of_one_rank_with_the_whole_batch(tmp_path):
    """Compare weights and running statistics. A step has one micro-batch, because batch norm never covers more than one.

    There are three steps, because this net doubles rounding errors in each step. After ten steps, two runs on one H200
    differed by less than 1e-5 and by 3e-4.
    """
    exact = [
        "--no_tf32", "--mixed_precision", "no", "--optimizer", "sgd", "--lr", "0.05", "--steps", "3",
        "--global_batch_size", "16", "--eval_every", "100", "--no_eval_first",
    ]  # fmt: skip
    one_rank(IMAGES, *exact, "--micro_batch_size", "16", "--output_dir", tmp_path / "whole").well()
    difference = {}
    for name, more in (("synchronised", ["--sync_batchnorm"]), ("separate", [])):
        folder = tmp_path / name
        ended = two_nodes(IMAGES, *exact, *more, "--micro_batch_size", "8", "--output_dir", folder).well()
        assert "2 nodes x 1 rank x 8 per micro-batch x 1 micro-batch " in ended.texts[0]
        one, two = weights(tmp_path / "whole"), weights(folder)
        assert one.keys() == two.keys()
        assert any(key.endswith("running_var") for key in one)
        difference[name] = max(np.abs(one[key] - two[key]).max() for key in one)
    assert difference["synchronised"] < 1e-4
    assert difference["separate"] > 1e-2, "the comparison does not detect statistics of half of the batch"


def test_compressed_gradients_over_nccl_converge(tmp_path):
    """All four runs at the same time."""
    runs = {}
    for hook in ("none", "bf16", "fp16", "powersgd"):
        runs[hook] = Running(
            *two_ranks(COMPRESSED, "--comm_hook", hook, "--out", tmp_path / f"{hook}.pt", "--output_dir", tmp_path / hook)
        )
    for running in runs.values():
        running.ended().well()
    learned = {hook: torch.load(tmp_path / f"{hook}.pt") for hook in runs}
    for hook in ("bf16", "fp16", "powersgd"):
        assert_compressed(hook, learned[hook], learned["none"])


def test_a_recipe_trains_with_compressed_gradients_over_nccl(tmp_path):
    ended = two_nodes(CLASSIFY, "--comm_hook", "powersgd", "--steps", "60", "--output_dir", tmp_path / "run").well()
    before, accuracy = map(float, ended.texts[0].split("\naccuracy ")[1].split()[:2])
    assert accuracy > before


@pytest.mark.parametrize(("heads", "groups", "size", "causal"), [(12, 2, 128, True), (12, 12, 64, False), (3, 1, 32, True)])
def test_attention_kernels_give_what_torchs_flash_attention_gives_and_the_same_bits_every_time(heads, groups, size, causal):
    from accel_ddp import compat
    from accel_ddp.speed import attention_kernels

    lengths, drawn = [7, 700, 1, 0, 64, 129, 128], torch.Generator("cuda").manual_seed(0)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    new = lambda number: torch.randn(sum(lengths), number, size, device="cuda", dtype=torch.bfloat16, generator=drawn)
    q, k, v, gradient = new(heads), new(groups), new(groups), new(heads)
    out, lse, state = compat.flash_attention(q, k, v, starts, starts, 1024, 0.0, causal, None)
    expected = compat.flash_attention_gradients(gradient, q, k, v, out, lse, starts, starts, 1024, 0.0, causal, state, None)
    rest = torch.zeros(2, dtype=torch.long, device="cuda"), starts, 0.0, causal, None
    found = [attention_kernels.forward(q, k, v, *rest) for _ in range(2)]
    found = [(*pair, *attention_kernels.gradients(gradient, q, k, v, *pair, *rest)) for pair in found]
    for a, b, again in zip(found[0], (out, lse, *expected), found[1], strict=True):
        assert torch.equal(a, again)
        assert (a.float() - b.float()).abs().max() < 0.02 * b.float().abs().max()


@pytest.mark.parametrize(("size", "causal"), [(32, False), (64, False), (64, True), (128, True)])
def test_attention_kernels_with_dropout_drop_the_same_numbers_in_both_passes(size, causal):
    from accel_ddp.speed import attention_kernels

    lengths, heads, dropout = [40, 200, 17], 4, 0.25
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    torch.manual_seed(0)
    new = lambda number: torch.randn(sum(lengths), number, size, device="cuda", dtype=torch.bfloat16)
    q, k, v, gradient = new(heads), new(1), new(1), new(heads)
    rest = torch.tensor([3, 5], device="cuda"), starts, dropout, causal, None
    out, lse = attention_kernels.forward(q, k, v, *rest)
    found = attention_kernels.gradients(gradient, q, k, v, out, lse, *rest)
    other_seed = torch.tensor([4, 5], device="cuda")
    assert not torch.equal(out, attention_kernels.forward(q, k, v, other_seed, *rest[1:])[0])
    # If the values of a text are the rows of a unit matrix, here in slices, the output has the weights that dropout has kept.
    units = torch.cat([torch.eye(256, device="cuda", dtype=torch.bfloat16)[:n] for n in lengths])[:, None]
    slices = [attention_kernels.forward(q, k, some.contiguous(), *rest)[0] for some in units.split(size, -1)]
    weights = torch.cat(slices, -1)
    tensors, parts, kept, possible = [x.double().requires_grad_() for x in (q, k, v)], [], 0, 0
    for first, n in zip(starts.tolist(), lengths):
        some_q, some_k, some_v = (x[first : first + n].transpose(0, 1) for x in tensors)
        sees = torch.ones(n, n, dtype=torch.bool, device="cuda").tril(0 if causal else n)
        is_kept = weights[first : first + n, :, :n].transpose(0, 1) != 0
        kept, possible = kept + int((is_kept & sees).sum()), possible + heads * int(sees.sum())
        scores = (some_q @ some_k.mT * size**-0.5).masked_fill(~sees, -torch.inf)
        parts.append((scores.softmax(-1) * is_kept / (1 - dropout) @ some_v).transpose(0, 1))
    assert abs(kept / possible - (1 - dropout)) < 0.02
    torch.cat(parts).backward(gradient.double())
    for a, b in zip((out, *found), (torch.cat(parts), *(x.grad for x in tensors)), strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_the_kernel_of_adamw_steps_as_torch_does_and_leaves_a_skipped_step_out():
    from accel_ddp.training.optim import AdamW

    drawn, found = torch.Generator("cuda").manual_seed(0), []
    shapes, flat = [(7, 5), (3000,), (64, 128)], torch.randn(30000, device="cuda", generator=drawn)
    for kind in (AdamW, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(flat[: np.prod(shape)].view(shape).clone()) for shape in shapes]
        optimizer = kind([{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}], lr=0.1, fused=True)
        if kind is AdamW:
            optimizer.choose_kernel(flat.device)
            assert optimizer.kernel, "Triton is installed here"
        for step in range(6):
            for place, p in enumerate(parameters):
                gradient = flat[step + place :][: p.numel()].view(p.shape)
                # Some are not aligned. torch, which does the first step, writes to gradients.
                p.grad = gradient if kind is AdamW and step > 2 else gradient.clone()
            optimizer.grad_scale, optimizer.found_inf = torch.full((), 2.0).cuda(), torch.full((), float(step == 4)).cuda()
            optimizer.step()
        found.append([x for p in parameters for x in (p.detach(), *optimizer.state[p].values())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=5e-6)  # the rounding of six steps with lr 0.1


def test_steps_skipped_by_the_fp16_scaler_are_counted(tmp_path):
    ended = two_nodes(
        PROGRAMS / "overflow.py", "--mixed_precision", "fp16", "--steps", 30, "--output_dir", tmp_path / "run"
    ).well()
    assert re.search(r"The fp16 scaler skipped \d+ of 30 steps", ended.texts[0])
    assert "weights are finite" in ended.texts[0]


def test_a_run_whose_fp16_gradients_are_never_finite_ends_with_an_error(tmp_path):
    options = ["--mixed_precision", "fp16", "--steps", 200, "--finite_steps", 20, "--output_dir", tmp_path / "run"]
    ended = two_nodes(PROGRAMS / "overflow.py", *options)
    assert "the fp16 scaler has skipped the last 25 steps" in ended.texts[0]
    assert ended.codes == [2, 2]


def test_a_skipped_step_changes_nothing_on_a_gpu(tmp_path):
    """Compare with a loop that never computes these steps. A run that stops may have done one more step, with finite numbers."""
    script = PROGRAMS / "nonfinite.py"
    one = Running([[sys.executable, script, "--out", tmp_path / "1.pt", "--output_dir", tmp_path / "one"]], [on_gpu()])
    two_nodes(script, "--out", tmp_path / "2.pt", "--output_dir", tmp_path / "two").well()
    one.ended().well()
    for ranks in (1, 2):
        results = torch.load(tmp_path / f"{ranks}.pt", weights_only=False)
        for name, result in results.items():
            if name == "of ranks":
                continue
            for group, values in result["fit"].items():
                others = result["loop"][group]
                finite = [value for key, value in values.items() if "running" not in key or "stop" not in name]
                assert all(bool(value.isfinite().all()) for value in finite), (ranks, name, group)
                if "stop" in name:
                    assert "step 5: " in result["error"]
                else:
                    assert [key for key in others if not torch.equal(values[key], others[key])] == [], (ranks, name, group)


def test_more_ranks_than_gpus_and_a_mix_with_cpu_are_refused(tmp_path):
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
    assert "These ranks have no GPU, but the others have one: rank 1 on" in ended.text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", "step 5: the loss is nan on rank 1 on"),
        ("exception", "a bug in the user's loss"),
        ("memory", "error: rank 1 ("),
    ],
)
def test_a_failure_on_one_node_is_printed_on_both(tmp_path, how, message):
    """The other node waits inside NCCL, which does not detect the failure before the timeout of 600 s. The test has 300 s."""
    ended = two_nodes(PROGRAMS / "goes_wrong.py", "--how", how, "--output_dir", tmp_path / "run")
    assert ended.codes == ([1, 1] if how == "exception" else [2, 2])
    for text in ended.texts:
        assert message in text


def test_weights_that_differ_between_two_nccl_nodes_are_reported_on_both(tmp_path):
    """The result of a check is read one step late. The fault happens one step after --at, when the numbers of that step arrive."""
    for how, at, found, passed in (("bit", 1, 4, "It is the first check"), ("lr", 6, 8, "The check at step 6 passed")):
        options = ["--how", how, "--at", at, "--check_every", 4, "--save_every", 6, "--output_dir", tmp_path / how]
        ended = two_nodes(PROGRAMS / "diverges.py", *options)
        assert ended.codes == [1, 1]
        messages = [re.search(r"error: DIVERGED: .*", text)[0] for text in ended.texts]
        assert messages[0] == messages[1]
        assert re.search(rf"at step {found} the weights of rank 0 \(.*\) and rank 1 \(.*\) differ from each other", messages[0])
        assert passed in messages[0]
        assert [path.name for path in (tmp_path / how).glob("step_*")] == (["step_00000006"] if how == "lr" else [])


def test_a_killed_rank_of_nccl_is_reported_on_the_other_node(tmp_path):
    """The other rank waits inside NCCL, which does not detect it."""
    common = ["--mixed_precision", "bf16", "--steps", "9999", "--eval_every", "9999", "--log_every", "1"]
    running = Running(*nodes(CLASSIFY, *common, "--output_dir", tmp_path / "run"))
    running.until("step    5/9999")
    for process in psutil.Process(running.processes[1].pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a program that a library ran may have ended
            if "accel_ddp.watch.monitor" not in process.cmdline():
                process.kill()
    ended = running.ended(timeout=300)
    assert ended.codes == [1, 1]
    assert re.search(
        rf"error: RANK_DIED: rank 1 \({re.escape(HOST)}, pid \d+\) was killed by SIGKILL at step \d+", ended.texts[0]
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("stop", r"RANK_STOPPED: rank 1 \(.*, pid \d+\) has been stopped \(SIGSTOP\) for \d+ s at step \d+"),
        ("barrier", "DEADLOCK: no rank has progressed for .*, although all are alive: rank 0 .*rank 1"),
        ("hang", r"RANK_HUNG: rank 1 \(.*, pid \d+\) has not progressed for \d+ s .*at step \d+, in forward"),
    ],
)
def test_a_fault_of_one_nccl_node_is_reported_on_both_nodes_and_ends_them(tmp_path, fault, expected):
    """The limits are those of users: a warning within 10 s, and the end within 45 s."""
    faulty = [PROGRAMS / "faulty.py", "--fault", fault, "--output_dir", tmp_path / "run"]
    running = Running(*nodes(*faulty))
    running.until(f"injects {fault} at step 8", of=1)
    began = time.monotonic()
    running.until("warning: ", of=0)
    assert time.monotonic() - began < 10
    ended = running.ended()
    assert time.monotonic() - began < 45
    lines = [[line for line in text.splitlines() if re.match("(warning|error): [A-Z_]+: ", line)] for text in ended.texts]
    assert lines[0] == lines[1], "both nodes print the same"
    assert len(lines[0]) == 2
    assert all(re.search(expected, line) for line in lines[0]), ended.text
    assert set(ended.codes) == {1}


def saved(folder: Path, step: int) -> list[bytes]:
    return [(folder / f"step_{step:08d}" / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


@pytest.mark.parametrize(
    "options",
    [
        ["bf16"],
        ["bf16", "--compile", "on"],
        pytest.param(["bf16", "--compile", "on", *OF_484], marks=pytest.mark.gpu_slow),
        pytest.param(["bf16", "--compile", "12"], marks=pytest.mark.gpu_slow),
        ["fp16", "--deterministic"],
    ],
)
def test_a_resumed_run_is_bit_identical_on_one_gpu(tmp_path, options):
    """With AdamW, dropout, workers and the fp16 scaler. --deterministic is tested too, although this model does not need it.

    Steps of 484 texts are on both sides of a limit of torch's compiler, see `compat.compile_options`. Step 1 and step 8, which is the
    first one after the resume, are below it and have different shapes.
    """
    common = ["--mixed_precision", *options, "--num_workers", "2", "--eval_every", "100"]
    assert "compile layers again" not in resumed_and_uninterrupted(tmp_path, CLASSIFY, common)


def test_the_second_run_loads_compiled_layers_within_5_seconds(tmp_path):
    for name in ("first", "second"):
        options = ["--mixed_precision", "bf16", "--compile", "on", "--steps", "4", "--cache_dir", tmp_path / "cache"]
        one_rank(CLASSIFY, *options, "--output_dir", tmp_path / name).well()
    (seconds,) = [event["seconds"] for event in read_log(tmp_path / "second" / "log.jsonl") if event["event"] == "warm_up"]
    assert seconds < 5


def resumed_and_uninterrupted(tmp_path: Path, script: Path, options: list[object]) -> str:
    """Run a recipe for 20 steps, and at the same time again with a stop and a resume. Their checkpoints must be equal.

    Return the output of the first run.
    """
    command = [sys.executable, script, *options, "--steps", "20", "--output_dir"]
    whole = Running([[*command, tmp_path / "uninterrupted"]], [on_gpu()])
    assert "Step 7 of 20 is saved" in run_all([[*command, tmp_path / "resumed", "--stop_after", "7"]], [on_gpu()]).text
    assert "resumed at step 7" in run_all([[*command, tmp_path / "resumed", "--resume"]], [on_gpu()]).well().text
    text = whole.ended().well().text
    assert saved(tmp_path / "uninterrupted", 20) == saved(tmp_path / "resumed", 20)
    return text


def assert_learned(folder: Path) -> None:
    losses = [event["loss"] for event in read_log(folder / "log.jsonl") if event["event"] == "update"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.parametrize(
    "options",
    [
        ["adamw8bit", "--lr", "1e-4"],
        ["muon", "--lr", "1e-4", "--ema_decay", "0.9"],
        ["adafactor", "--lr", "1e-2", "--lr_schedule", "wsd", "--lr_of", "classifier=3e-2"],
    ],
    ids=lambda options: options[0],
)
def test_other_optimizers_learn_on_a_gpu_and_a_resumed_run_is_bit_identical(tmp_path, options):
    if options[0] == "adamw8bit":
        pytest.importorskip("torchao")
    common = ["--optimizer", *options, "--mixed_precision", "bf16", "--eval_every", "100", "--log_every", "1"]
    resumed_and_uninterrupted(tmp_path, CLASSIFY, common)
    if options[0] == "adafactor":  # so few steps of the others learn nothing, on CPUs too
        assert_learned(tmp_path / "uninterrupted")


@pytest.mark.parametrize("options", [[], ["--chat_template", "llama3"]], ids=["plain", "new-tokens"])
def test_adapters_above_4_bit_weights_learn_resume_and_are_exported(tmp_path, options):
    """The export command needs no quantisation: it merges the adapters into the weights as they were before."""
    pytest.importorskip("bitsandbytes")
    common = [
        "--quantize",
        "4bit",
        "--lora_r",
        "8",
        "--lr",
        "5e-3",
        "--mixed_precision",
        "bf16",
        "--log_every",
        "1",
        "--no_eval_first",
        *options,
    ]
    text = resumed_and_uninterrupted(tmp_path, ROOT / "recipes" / "sft.py", [*common, "--max_eval_items", "20"])
    assert "It contains only the adapters" in text
    assert_learned(tmp_path / "uninterrupted")
    config = json.loads((tmp_path / "uninterrupted" / "model" / "base" / "config.json").read_text())
    assert "quantization_config" not in config
    run_all(
        [[BIN / "accel-ddp", "export", tmp_path / "uninterrupted", tmp_path / "merged", "--merge", "on"]], [clean_environment()]
    ).well()
    merged = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")  # numpy has no bfloat16
    assert all(weight.isfinite().all() for weight in merged.values())


def test_sigterm_to_one_of_two_nccl_nodes(tmp_path):
    """Both stop after the same step with one checkpoint. The resumed run is bit-identical to an uninterrupted one."""
    common = ["--mixed_precision", "bf16", "--steps", "60", "--eval_every", "100", "--log_every", "1"]
    running = Running(*nodes(CLASSIFY, *common, "--save_every", "100", "--output_dir", tmp_path / "run"))
    running.until("step  5/60")
    running.processes[1].terminate()
    ended = running.ended(timeout=300)
    assert ended.codes == [75, 75], "the launchers return the exit code of the ranks"
    (path,) = (tmp_path / "run").glob("step_*")
    assert 5 <= int(path.name[5:]) < 60
    for text in ended.texts:
        assert f"stopped: requested by SIGTERM on rank 1 ({HOST}). Step {int(path.name[5:])} of 60 is saved" in text
    whole = Running(*two_ranks(CLASSIFY, *common, "--output_dir", tmp_path / "uninterrupted"))
    two_nodes(CLASSIFY, *common, "--resume", "--output_dir", tmp_path / "run").well()
    whole.ended().well()
    assert saved(tmp_path / "run", 60) == saved(tmp_path / "uninterrupted", 60)


def test_verify_on_one_gpu(tmp_path):
    command = [sys.executable, "-m", "accel_ddp.cli", "verify", CLASSIFY, "--mixed_precision", "bf16"]
    ended = run_all([command], [on_gpu()]).well()
    assert ended.text.count("PASS") == 3, ended.text
    assert "because there is only one GPU" in ended.text
    print(ended.text)


def doctors(*options: object) -> tuple[list[list], list[dict[str, str]]]:
    """Return the commands and environments of the doctor on two NCCL nodes that share the GPU."""
    common = ["--num_machines", "2", "--num_processes", "2", "--main_process_port", str(free_port()), *options]
    commands = [[sys.executable, "-m", "accel_ddp.doctor", *common, "--machine_rank", str(node)] for node in (0, 1)]
    return commands, [on_gpu(NCCL_HOSTID=f"node{node}", NCCL_SOCKET_IFNAME="lo") for node in (0, 1)]


@pytest.mark.gpu_alone
def test_the_doctor_reports_the_transport_and_the_speed_of_nccl():
    reports = [json.loads(text) for text in run_all(*doctors("--json")).well().texts]
    assert reports[0]["findings"] == reports[1]["findings"]
    assert {finding["code"] for finding in reports[0]["findings"]} == {"W_GPU_SHARED"}
    figures = reports[1]["collective"]
    assert figures["backend"] == "nccl"
    assert "NET/Socket" in figures["transport"]
    assert "lo" in figures["transport"]
    assert figures["bus_bytes_per_second"] > 1e8
    assert [row["bytes"] for row in figures["bandwidth"]] == [1_000_000, 8_000_000, 64_000_000]


def test_a_rank_that_is_stuck_in_nccl_is_reported_on_both_nodes():
    running = Running(*doctors("--deep_seconds", "40"))
    running.until("collective  importing torch", of=1)
    deadline, stopped = time.monotonic() + 60, None
    while not stopped and time.monotonic() < deadline:  # wait until the rank of node 1 has loaded CUDA and NCCL
        for child in psutil.Process(running.processes[1].pid).children():
            if any("libnccl" in one.path for one in child.memory_maps()) and child.cpu_times().user > 4:
                stopped = child
    assert stopped, "node 1 has started no rank"
    time.sleep(3)
    stopped.suspend()
    ended = running.ended(180)  # the doctor of node 1 ends the suspended rank
    assert ended.codes == [1, 1], ended.text
    for text in ended.texts:
        assert re.search(r"^E_COLLECTIVE_(STUCK|FAILED)  \[\S+, machine_rank 1, rank 1\] ", text, re.MULTILINE), text


@pytest.mark.gpu_alone
def test_a_gpu_that_another_process_uses_is_reported():
    hold = "import torch, time; x = torch.zeros(1 << 30, device='cuda'); print('held', flush=True); time.sleep(60)"
    other = Running([[sys.executable, "-c", hold]], [on_gpu()])
    other.until("held")
    ended = run_all([[sys.executable, "-m", "accel_ddp.doctor", "--no_deep"]], [on_gpu()]).well()
    wrong = run_all([[sys.executable, "-m", "accel_ddp.doctor", "--no_deep"]], [{**on_gpu(), "CUDA_VISIBLE_DEVICES": "7"}])
    many = run_all([[sys.executable, "-m", "accel_ddp.doctor", "--no_deep", "--num_processes", "64"]], [on_gpu()])
    other.kill()
    assert "W_GPU_BUSY" in ended.text
    assert "GPU 0 has" in ended.text
    assert "E_CUDA_VISIBLE_DEVICES" in wrong.text
    assert "64 ranks on this node" in many.text
    assert wrong.codes == many.codes == [1]


@pytest.mark.gpu_slow
def test_tuned_settings_are_faster_than_the_default_between_two_nccl_nodes(tmp_path):
    """Over TCP on the loopback interface, NCCL's default reaches 1.7 GiB/s, and more channels or larger buffers 5 GiB/s."""
    common = ["--config_file", "accelerate_configs/2node.yaml", "--main_process_port", free_port(), "--minutes", "4"]
    commands = [
        [sys.executable, "-m", "accel_ddp.cli", "tune", *common, "--machine_rank", node, "--out", tmp_path / str(node), CLASSIFY]
        for node in (0, 1)
    ]
    environments = [on_gpu(NCCL_HOSTID=f"node{node}", NCCL_SOCKET_IFNAME="lo") for node in (0, 1)]
    ended = run_all(commands, environments, timeout=420).well()
    print(ended.texts[0])
    tables = [text[text.index("tuning 2 ranks on 2 nodes") :].split("To use the result")[0] for text in ended.texts]
    assert tables[0] == tables[1]
    assert "NET/Socket" in tables[0]
    (faster,) = re.findall(r"^best settings: NCCL_.*, ([\d.]+) times the default's speed$", tables[0], re.MULTILINE)
    assert float(faster) >= 1.5
    assert re.search(r"^ +25  bf16       true ", tables[0], re.MULTILINE)
    for node in (0, 1):
        lines = (tmp_path / str(node) / "tuned.env").read_text().splitlines()
        settings = [line for line in lines if not line.startswith(("#", "ACCEL_DDP_TUNED="))]
        assert settings
        assert all(line.startswith("NCCL_") for line in settings)
        assert "comm_hook" in (tmp_path / str(node) / "tuned.yaml").read_text()


def test_a_step_does_not_wait_for_the_device_even_if_it_is_skipped():
    from accelerate import Accelerator

    from accel_ddp.config.train_config import TrainConfig
    from accel_ddp.engine.step import train_step
    from accel_ddp.engine.terms import Terms
    from accel_ddp.training import optim
    from tests.programs.base import Task

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).cuda()
    accelerator, cfg = Accelerator(), TrainConfig(lr=0.1, on_nonfinite="skip")
    optimizer, losses = optim.build(model, cfg), []
    for step in range(4):
        batches = [torch.full((4, 8), float("inf") if step == 2 else 0.5 + row, device="cuda") for row in range(2)]
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step makes the state of the optimizer
        try:
            stats = train_step(accelerator, cfg, Terms(model, Task()), optimizer, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(stats.loss)
    assert [bool(loss.isfinite()) for loss in losses] == [True, True, False, True]


@pytest.mark.gpu_alone
@pytest.mark.parametrize("seconds", [0.0, 0.06])
def test_the_own_time_of_a_rank_contains_work_of_the_gpu_and_waits_of_the_host(seconds):
    from accel_ddp import phases
    from accel_ddp.engine.step_times import measure_steps

    matrix = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    times = measure_steps(matrix.device, step=100)
    began = time.perf_counter()
    with phases.phase(phases.OTHER), phases.HERE.listening(times):
        for step in range(101, 141):
            with phases.phase(phases.DATA):
                time.sleep(seconds)
            with phases.phase(phases.FORWARD):
                for _ in range(20):
                    matrix @ matrix
            torch.cuda.synchronize()
            times.end_step(step)
    wall = time.perf_counter() - began
    timing = times.timing
    assert timing.step == 140 if seconds else 137 <= timing.step <= 140  # one of four short steps is measured
    assert 0.5 * wall < sum(timing[1:]) < 1.2 * wall
    assert timing.data > 40 * seconds
    assert (timing.forward > timing.data) == (not seconds)


@pytest.mark.gpu_alone
def test_the_values_of_the_gpu_are_those_of_this_gpu_and_reading_them_does_not_wait_for_it():
    from accel_ddp.engine.step_numbers import SYSTEM
    from accel_ddp.training.system_sample import SystemSample

    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    with SystemSample(device) as system:
        torch.cuda._sleep(10**10)  # some seconds of work
        began = time.perf_counter()
        found = dict(zip(SYSTEM, system._measure()))
        assert not torch.cuda.current_stream().query(), "the measurement has waited for the GPU"
        assert time.perf_counter() - began < 1
        torch.cuda.synchronize()
        time.sleep(0.2)
    free, total = torch.cuda.mem_get_info()
    assert found["gpu_memory"] == torch.cuda.max_memory_allocated() >= kept.numel()
    assert abs(found["gpu_memory_used"] - (total - free)) < 0.05 * total
    assert found["gpu_memory_used"] > kept.numel()
    assert 0 <= found["gpu_utilisation"] <= 1
    assert 10 < found["gpu_temperature"] < 110
    assert 10 < found["gpu_power"] < 2000
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    assert uuid in system.gpu.nvml.nvmlDeviceGetUUID(system.gpu.handle)


@pytest.mark.gpu_alone
def test_a_straggler_among_two_nccl_nodes_is_reported_with_its_host_and_what_it_costs(tmp_path):
    """The last rank sleeps 50 ms in every step from step 60 on. The truth is by how much a step takes longer.

    This is less than 50 ms, because the GPUs complete the step before meanwhile.
    """
    options = ["--slow", "loss", "--seconds", "0.05", "--micro_batch_size", "8", "--steps", "170", "--from_step", "60"]
    two_nodes(PROGRAMS / "slow_rank.py", *options, "--out", tmp_path, "--output_dir", tmp_path / "run").well()
    log = read_log(tmp_path / "run" / "log.jsonl")
    times = {event["step"]: event["time"] for event in log if event["event"] == "update"}
    truth = (times[165] - times[85]) / 80 - (times[55] - times[15]) / 40
    (incident,) = [one for one in read_incidents(tmp_path / "run") if one.kind == "STRAGGLER" and one.level == "warning"]
    text = re.match(
        rf"rank 1 \({re.escape(HOST)}\) is .* slower than the others, which wait (\d+) ms per step for it", incident.text
    )
    assert float(text[1]) / 1000 == pytest.approx(truth, rel=0.1)
    assert (log[-1]["breakdown"]["slowest_rank"], log[-1]["breakdown"]["slowest_host"]) == (1, HOST)


# ---- profile: `pytest -m gpu -k profile` runs these alone, in less than a minute


@pytest.fixture(scope="module")
def profile_of_two_nodes(tmp_path_factory) -> dict:
    """Train two NCCL nodes with and without a profile. Computation and communication take about the same time."""
    root = tmp_path_factory.mktemp("profile")
    options = [
        "--profile", "21-25", "--steps", "30", "--width", "1024", "--layers", "8", "--rows", "4096", "--global_batch_size", "64",
        "--micro_batch_size", "32", "--bucket_cap_mb", "8", "--out", root / "out", "--output_dir", root / "run",
    ]  # fmt: skip
    ended = two_nodes(PROGRAMS / "profiled.py", *options).well()
    print(ended.texts[0])
    run = root / "run" / "profiled"
    return {
        "run": run, "text": ended.texts[0], "summary": json.loads((run / "profile" / "summary.json").read_text()),
        "found": [json.loads((root / f"out_{rank}.json").read_text()) for rank in (0, 1)],
        "log": [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()],
    }  # fmt: skip


@pytest.mark.gpu_alone
def test_the_communication_share_of_a_profile_agrees_with_torch_profiler(profile_of_two_nodes):
    """torch.profiler adds up the kernels of NCCL itself, in `key_averages`."""
    assert profile_of_two_nodes["summary"]["overall"]["kind"] == "gpu"
    for rank, found in zip(profile_of_two_nodes["summary"]["ranks"], profile_of_two_nodes["found"]):
        (own,) = found["torch"]
        kernels = [name for name in own["names"] if name.startswith("nccl") and "AllReduce" in name]
        assert kernels, own["names"]
        assert rank["collectives"] * 5 == own["collectives"]
        share, expected = rank["communication_sum"] / rank["step_seconds"], own["seconds"] / 5 / rank["step_seconds"]
        assert share == pytest.approx(expected, rel=0.05)
        assert rank["communication"] == pytest.approx(rank["overlapped"] + rank["exposed"], rel=1e-3)
        assert 0 < rank["overlapped"] < rank["communication"] < rank["step_seconds"]


@pytest.mark.gpu_alone
def test_the_breakdown_in_the_log_agrees_with_a_profile(profile_of_two_nodes):
    """Within 5 % of a step: the communication that is not hidden, and the step as a whole."""
    lines = [e for e in profile_of_two_nodes["log"] if e["event"] == "ranks" and e["first_step"] >= 21 and e["last_step"] <= 25]
    assert sum(e["last_step"] - e["first_step"] + 1 for e in lines) == 5
    for number, rank in enumerate(profile_of_two_nodes["summary"]["ranks"]):
        within = 0.05 * rank["step_seconds"]
        logged = {
            part: sum(e[part][number] * (e["last_step"] - e["first_step"] + 1) for e in lines) / 5 for part in rank["breakdown"]
        }
        print(number, rank["step_seconds"], rank["exposed"], rank["breakdown"], logged)
        # The steps of a line of the log are those of rank 0. Another rank may have read its events one step earlier or later.
        for measured in (rank["breakdown"], *([logged] if number == 0 else [])):
            assert measured["communication"] == pytest.approx(rank["exposed"], abs=within)
            assert sum(measured.values()) == pytest.approx(rank["step_seconds"], abs=within)


@pytest.mark.gpu_alone
def test_a_profile_does_not_change_what_two_nccl_nodes_learn(profile_of_two_nodes):
    for found in profile_of_two_nodes["found"]:
        assert found["plain"] == found["profiled"]


@pytest.mark.gpu_alone
def test_the_merged_profile_of_two_nccl_nodes_has_their_all_reduces_at_the_same_time(profile_of_two_nodes):
    from accel_ddp.observe.traces import read_trace

    assert "largest kernels" in profile_of_two_nodes["text"]
    assert "largest gaps in which a GPU was idle" in profile_of_two_nodes["text"]
    merged = read_trace(profile_of_two_nodes["run"] / "profile" / "merged.json.gz")
    events = merged["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"rank 0 ({HOST})", f"rank 1 ({HOST})"}
    spans = [
        sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel" and e["pid"] == rank and "nccl" in e["name"]
        )
        for rank in (0, 1)
    ]
    assert len(spans[0]) == len(spans[1]) > 10
    slack = merged["clock_accuracy_us"] + 1000  # each process converts the clock of the GPU itself
    assert all(a[0] < b[1] + slack and b[0] < a[1] + slack for a, b in zip(*spans))


def test_a_profile_contains_the_kernels_of_cuda_graphs(tmp_path):
    """All texts are in one micro-batch, so that there is one shape, which is captured in the second step."""
    options = [
        "--mixed_precision", "bf16", "--steps", "30", "--profile", "20-24", "--global_batch_size", "20", "--micro_batch_size", "20",
        "--eval_every", "100", "--save_every", "100", "--no_eval_first", "--out", tmp_path / "out.pt", "--output_dir", tmp_path,
    ]  # fmt: skip
    ended = run_all([[sys.executable, PROGRAMS / "speedups.py", *options]], [on_gpu()]).well()
    assert "CUDA graphs" in ended.text
    from accel_ddp.observe.traces import read_trace

    calls = {}
    for name in ("plain", "fast"):
        made = json.loads((tmp_path / name / "profile" / "summary.json").read_text())
        (rank,) = made["ranks"]
        events = read_trace(tmp_path / name / "profile" / "rank_0.json.gz")["traceEvents"]
        calls[name] = {e["name"] for e in events if e.get("cat") == "cuda_runtime"}
        assert rank["kind"] == "gpu"
        assert rank["communication"] == 0
        assert 0 < rank["computation"] + rank["copies"]["seconds"] <= rank["step_seconds"]
        assert rank["idle"]["seconds"] + rank["computation"] <= 1.001 * rank["step_seconds"]
        assert made["run"].get("captured", False) == (name == "fast")
    assert "cudaGraphLaunch" in calls["fast"] - calls["plain"]
