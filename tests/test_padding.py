"""The check before training whether the result of a text depends on its padding."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rows import Collate, accept_rows
from accel_ddp.engine.terms import Terms
from accel_ddp.speed import attach
from accel_ddp.speed.row_model import RowModel
from accel_ddp.training import padding_check
from accel_ddp.training.stream import TrainBatches
from tests.conftest import clean_environment
from tests.programs.base import Task
from tests.test_padding_free import KINDS, LENGTHS, POSITIONS, SHAPE, a_batch, loss_of


def terms_of_tokens(model) -> Terms:
    return Terms(model, Task(lambda model, batch: {"loss": (loss_of(model, batch), 1)}))


def padding_difference(model, lengths=LENGTHS) -> str:
    """Return what the check before training finds for texts of these lengths."""
    tokens = a_batch(lengths=[max(lengths)]).tokens
    rows = [{"input_ids": tokens[:length], "labels": tokens[:length]} for length in lengths]
    collate = Collate(("labels",))
    return padding_check.difference(Accelerator(cpu=True), TrainConfig(), terms_of_tokens(model), TrainBatches(rows, collate))


class MixesPadding(nn.Module):
    """Adds a part of the mean over all positions, also of padding, to the hidden states of a model."""

    def __init__(self, model: nn.Module, part: float):
        super().__init__()
        self.model, self.part = model, part

    def forward(self, rows):
        out = self.model(rows)
        logits = rows.pad(out.logits[0])
        return type(out)(logits=rows.unpad(logits + self.part * logits.mean(1, keepdim=True))[None])


def test_a_dependence_on_padding_is_found_and_rounding_is_not():
    model = KINDS["distilbert"]()
    assert padding_difference(model) == ""
    assert "a text of 1 tokens if it is padded to the 30 tokens" in padding_difference(MixesPadding(model, 0.1))
    assert "a different result" in padding_difference(MixesPadding(model, 3e-5))
    assert "a different result" in padding_difference(MixesPadding(model, math.nan)), "NaN counts as a difference"
    assert padding_difference(MixesPadding(model, 0.1), lengths=[7, 7]) == "", "texts of equal length are not padded"
    assert model.training, "the check leaves the model as it was"
    # The next one rounds by 5e-3, so that the check computes in float32.
    wide = transformers.BertConfig(**{**SHAPE, "hidden_size": 64, "num_hidden_layers": 12, "initializer_range": 0.3})
    torch.manual_seed(0)
    assert padding_difference(transformers.BertForSequenceClassification(wide).half(), lengths=[5, 30]) == ""


def test_weights_of_16_bits_are_compared_in_float32_one_at_a_time():
    """A dependence below the rounding of 16 bits is found, and this rounding is no reason to pad texts."""
    torch.manual_seed(0)
    model, batch = KINDS["llama"]().bfloat16().eval(), a_batch()
    accept_rows(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        narrow = model(batch).logits
        with padding_check.in_float32(model):
            exact = model(batch).logits
        wide = copy.deepcopy(model).float()(batch).logits
    assert exact.dtype == torch.float32
    assert torch.allclose(exact, wide, rtol=1e-6, atol=1e-7)
    assert (narrow - wide).abs().max() > 1e-3 * wide.abs().max()
    assert padding_difference(model) == ""
    assert "a different result" in padding_difference(MixesPadding(model, 2e-3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    speed = attach.Speed(Accelerator(cpu=True), TrainConfig(), terms_of_tokens(model), None)
    layers = RowModel(model)
    layers.install()
    assert speed._compare(layers, batch) == ""
    original = layers.layers[1].forward
    layers.layers[1].forward = lambda hidden, *args, **kwargs: original(hidden * (1 + 1e-3 * layers.is_enabled), *args, **kwargs)
    assert "differs without padding" in speed._compare(layers, batch)


class DependsAt(MixesPadding):
    """Depends on padding in texts of one length only. Real models do so in all texts that are longer than a window."""

    def __init__(self, model: nn.Module, length: int, **config: object):
        super().__init__(model, 0.1)
        self.config, self.length = transformers.PretrainedConfig(**config), length

    def forward(self, rows):
        plain, mixed = self.model(rows), super().forward(rows)
        is_mixed = rows.unpad((rows.grid.mask.sum(1) == self.length)[:, None].expand(rows.grid.mask.shape))
        return type(plain)(logits=torch.where(is_mixed[:, None], mixed.logits, plain.logits))


def test_a_dependence_on_padding_of_texts_of_some_lengths_is_found():
    model, lengths = KINDS["distilbert"](), [3] * 6 + [7] * 12 + [8, 9, 15, 20, 30]
    found = lambda length, **config: (
        f"a text of {length} tokens" in padding_difference(DependsAt(model, length, **config), lengths=lengths)
    )
    assert [length for length in (3, 7, 8, 9, 15, 20, 30) if found(length)] == [3, 7, 20]
    assert [length for length in (8, 9, 15) if found(length, parts={"keep_window_size": 8})] == [8, 9], (
        "around a limit of the config"
    )
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**SHAPE, **POSITIONS, num_key_value_heads=2, keep_window_size=8))
    assert "a different result" in padding_difference(doge, lengths=[4, 9, 12, 14, 30])


def test_the_padding_check_restores_weights_to_the_bit():
    model = MixesPadding(KINDS["distilbert"](), 3e-5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [value.data_ptr() for value in model.state_dict().values()]
    assert "a different result" in padding_difference(model)
    after = model.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    assert [value.data_ptr() for value in after.values()] == places, "weights that move need memory, which may be full"


def test_the_checks_compute_without_tf32_and_accept_programs_that_use_the_newer_settings_of_torch():
    read = lambda: (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    before = read()
    torch.set_float32_matmul_precision("high")
    try:
        with padding_check.without_tf32():
            assert read() == ("highest", False)
        assert read() == ("high", before[1])
    finally:
        torch.set_float32_matmul_precision(before[0])
    code = """
import torch
from accel_ddp.training.padding_check import without_tf32
torch.backends.cuda.matmul.fp32_precision = "tf32"
with without_tf32():
    print("computed")
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9
        ended = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=300)
        assert ended.stdout == "computed\n", ended.stderr


def test_the_padding_check_does_not_use_more_memory_than_there_is():
    padding_check._require_memory(1, torch.device("cpu"))
    with pytest.raises(MemoryError):
        padding_check._require_memory(2**60, torch.device("cpu"))
