"""Compiled layers: the cache file, the process that compiles, and the step from which on layers are compiled."""

import functools
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.engine.rows import Rows
from accel_ddp.records.run_log import read_log
from accel_ddp.speed import compilation, padding_free
from accel_ddp.speed.compilation import COMPILE_SECONDS, Compilation, choose_step, read_code, write_code
from accel_ddp.speed.row_model import RowModel
from tests.conftest import ROOT, clean_environment, run_all, run_ranks
from tests.test_padding_free import KINDS, a_batch, compute

CPU = torch.device("cpu")


# ---- the cache file


def test_a_cache_file_is_used_only_if_it_is_whole_and_its_user_alone_can_write_it(tmp_path):
    path, code = tmp_path / "compiled" / "key.bin", os.urandom(1000)
    assert read_code(path) == (None, "")
    old = os.umask(0o002)  # new files can be written by a group
    try:
        assert write_code(path, code) == ""
    finally:
        os.umask(old)
    assert read_code(path) == (code, "")
    for place, mode in ((path, 0o620), (path, 0o602), (path.parent, 0o770)):
        usual = place.stat().st_mode
        place.chmod(mode)
        found, reason = read_code(path)
        assert found is None
        assert reason.endswith(f"Run: chmod go-w {place}")
        place.chmod(usual)
    path.parent.chmod(0o770)
    assert "chmod go-w" in write_code(path, b"other")
    assert "chmod go-w" in Compilation(str(tmp_path), CPU, nn.Linear(1, 1)).unsent, "another process could not write it either"
    path.parent.chmod(0o700)
    assert not Compilation(str(tmp_path), CPU, nn.Linear(1, 1)).unsent
    assert read_code(path) == (code, "")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert read_code(path) == (None, f"{path} is damaged. The layers are compiled again.")
    if os.geteuid() == 0:  # only root can give files to others
        path.write_bytes(whole)
        os.chown(path, 12345, -1)
        assert read_code(path) == (
            None,
            f"{path} belongs to another user, and its content would be executed. Choose another --cache_dir.",
        )


class Layer(nn.Linear):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


def recorded(folder: Path, layer: nn.Module, *args, **kwargs) -> Compilation:
    found = Compilation(str(folder), CPU, layer)
    found.recording(layer, layer.forward)(*args, **kwargs)
    return found


def test_the_key_depends_on_the_layer_its_arguments_and_the_settings(tmp_path):
    x = torch.ones(2, 4)
    frozen = Layer(4, 4)
    frozen.bias.requires_grad_(False)
    kinds = [
        (Layer(4, 4), x), (Layer(4, 8), x), (Layer(4, 4).bfloat16(), x.bfloat16()), (frozen, x), (Layer(4, 4).eval(), x),
        (Layer(4, 4), torch.ones(3, 4)), (Layer(4, 4), x.clone().requires_grad_()), (Layer(4, 4), x, 2.0),
    ]  # fmt: skip
    paths = [recorded(tmp_path, *kind).path for kind in kinds]
    with torch.autocast("cpu", torch.bfloat16):
        paths.append(recorded(tmp_path, Layer(4, 4), x).path)
    torch.set_float32_matmul_precision("high")
    paths.append(recorded(tmp_path, Layer(4, 4), x).path)
    torch.set_float32_matmul_precision("highest")
    assert len(set(paths)) == len(kinds) + 2
    assert recorded(tmp_path, Layer(4, 4), torch.zeros(2, 4)).path == paths[0], "values do not matter"


def test_another_process_gets_a_layer_without_the_values_of_its_weights():
    """It computes the same gradients as the layer, up to these values: a forward and a backward pass without an error."""
    batch = a_batch()
    model = KINDS["llama"]()
    layers, found = RowModel(model), Compilation("unused", CPU, model)
    layers.install()
    layers.calls = [found.recording(layer, call) for layer, call in zip(layers.layers, layers.calls)]
    compute(model, batch)
    (data,) = found.calls.values()  # all layers are called in the same way
    assert not found.unsent
    assert len(data) < 20_000, "no weights"
    with torch.compiler.set_stance("force_eager"):
        compilation.compile_call(data, CPU)


# ---- the step


def test_compiling_begins_when_it_saves_time():
    assert choose_step(1000, 0.2, is_cached=True) == 0
    assert choose_step(10, 0.2, is_cached=True) is None
    assert choose_step(1000, 0.2, is_cached=False) == COMPILE_SECONDS / 0.2
    assert choose_step(int(COMPILE_SECONDS / 0.2) + 5, 0.2, is_cached=False) is None, "too few steps are left"


# ---- the process


def test_the_process_that_compiles_is_killed_with_its_parent(tmp_path):
    """`start` runs in a fork of this process, which is then killed with SIGKILL."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            found = recorded(tmp_path, Layer(4, 4), torch.ones(2, 4))
            found.start()
            os.write(writer, f"{found.process.pid} {found._private_folder()}\n".encode())
            time.sleep(60)
        finally:
            os._exit(1)
    pid, work = os.read(reader, 1000).decode().split()
    assert Path(f"/proc/{pid}").exists()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}/exe").exists()
    assert Path(work).exists()
    found = recorded(tmp_path, Layer(4, 4), torch.ones(2, 4))
    assert found._private_folder().stat().st_mode & 0o077 == 0
    assert not Path(work).exists(), "the next process removes what a killed one has left"


FIVE_STEPS = ["--model", "builtin:tiny-llama", "--steps", 5, "--max_train_items", 40, "--max_eval_items", 4, "--no_eval_first"]
FIVE_STEPS += ["--global_batch_size", 6, "--micro_batch_size", 1, "--log_every", 1, "--save_every", 100]


@pytest.mark.slow
def test_three_ranks_that_are_resumed_after_their_switch_sum_gradients_in_the_same_order(tmp_path):
    """On a CPU, with g++. DDP orders its buckets by the first backward pass of a process."""
    options = [*FIVE_STEPS, "--bucket_cap_mb", 1, "--compile", 2, "--cache_dir", tmp_path / "cache", "--output_dir"]
    start = lambda *words: run_ranks(3, ROOT / "recipes" / "sft.py", *options, *words)
    start(tmp_path / "whole").well()
    start(tmp_path / "resumed", "--stop_after", 3)
    start(tmp_path / "resumed", "--resume").well()
    names = ("model.safetensors", "optimizer.safetensors")
    states = [[(tmp_path / run / "step_00000005" / name).read_bytes() for name in names] for run in ("whole", "resumed")]
    assert states[0] == states[1]


@pytest.mark.slow
def test_a_run_that_is_resumed_before_its_switch_is_bit_identical(tmp_path):
    """On a CPU, with g++. The resumed run leaves --compile out and follows the stored step, with the code of the first run."""
    sft = [sys.executable, ROOT / "recipes" / "sft.py", *FIVE_STEPS, "--cache_dir", tmp_path / "cache", "--output_dir"]
    start = lambda *words: run_all([[*sft, *words]], [clean_environment()])
    start(tmp_path / "whole", "--compile", "3").well()
    (file,) = (tmp_path / "cache" / "compiled").glob("*.bin")
    written = file.stat().st_mtime_ns
    start(tmp_path / "resumed", "--compile", "3", "--stop_after", "2")
    text = start(tmp_path / "resumed", "--resume").well().text
    assert re.search(r"as in the saved run: .*\bcompile 3\b", text)
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        assert [event["step"] for event in read_log(folder / "log.jsonl") if event["event"] == "warm_up"] == [3]
    names = ("model.safetensors", "optimizer.safetensors")
    states = [[(tmp_path / run / "step_00000005" / name).read_bytes() for name in names] for run in ("whole", "resumed")]
    assert states[0] == states[1]
    assert [path.stat().st_mtime_ns for path in file.parent.glob("*.bin")] == [written], "nothing was compiled again"


def test_layers_are_compiled_once_for_rows_and_texts_of_all_lengths():
    """A row may have as many tokens as a layer has channels, and texts may be shorter or longer than a sliding window."""
    from torch._dynamo.testing import CompileCounter

    compat.compile_options()
    layer, counter = nn.Linear(64, 64), CompileCounter()
    call = torch.compile(lambda x, y: layer(x) + y, dynamic=True, backend=counter)
    for tokens in (64, 128, 192):
        call(torch.ones(1, tokens, 64), torch.ones(1, tokens, 64))
    assert counter.frame_count == 1

    def attend(longest: int) -> tuple[Tensor, None]:
        at = padding_free.segments_of(Rows.join({}, torch.tensor([4, 4])), is_flash=False)._replace(longest=longest)
        return call(SimpleNamespace(is_causal=True), *[torch.ones(1, 2, 8, 4)] * 3, None, segments=at, sliding_window=3)

    counter = CompileCounter()
    call = torch.compile(functools.partial(padding_free.attention, None), dynamic=True, backend=counter)
    for longest in (2, 4, 8):
        attend(longest)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_second_compilation_is_reported_and_other_sizes_need_none():
    reports = []
    call = compilation.compiled(lambda x: (x * 7.5).sin(), lambda: reports.append(1))
    counts = []
    for rows, dtype in ((4, torch.float32), (9, torch.float32), (4, torch.float64), (9, torch.float64), (9, torch.float32)):
        call(torch.ones(rows, 3, dtype=dtype))
        counts.append(len(reports))
    assert counts == [1, 1, 2, 2, 2]
