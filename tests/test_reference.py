"""The log-probabilities of the model before training are the same, however they are obtained."""

from dataclasses import dataclass

import datasets
import pytest
import torch
import transformers
from accelerate import Accelerator

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.engine.rows import Collate
from accel_ddp.errors import UserError
from accel_ddp.sources import tokenization
from accel_ddp.sources.adapters import add_adapters
from accel_ddp.speed.linear_cross_entropy import OutputHead
from accel_ddp.tasks import reference
from accel_ddp.training.stream import TrainBatches

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}


@dataclass(kw_only=True)
class Config(RecipeConfig):
    reference: str = "auto"
    lora_r: int = 4
    lora_targets: tuple[str, ...] = ("q_proj", "down_proj")
    global_batch_size: int = 4
    eval_batch_size: int = 4


def make_rows(number: int) -> datasets.Dataset:
    drawn = torch.Generator().manual_seed(number)
    lengths = torch.randint(3, 30, (number, 2), generator=drawn).tolist()
    ids = [[torch.randint(5, 100, (length,), generator=drawn).tolist() for length in pair] for pair in lengths]
    labels = [[[-100, -100, *text[2:]] for text in pair] for pair in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})


collate = Collate(("labels",), is_causal=True)


class Setup:
    """A model with new adapters, as a recipe has it before training."""

    def __init__(self, folder, **options):
        self.cfg = Config(cache_dir=str(folder), model="builtin:tiny-llama", **options)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, num_key_value_heads=2)).eval()
        model._new_modules, model._adapters = [], None
        self.model = add_adapters(model, self.cfg, "CAUSAL_LM") if self.cfg.lora_r else model
        self.head, self.calls = OutputHead(self.model), 0
        self.rows = make_rows(21), make_rows(6)

    def logps(self, model, batch):
        self.calls += 1
        return self.head.text_logps(model, batch).view(-1, 2)

    def make(self) -> reference.Reference:
        fingerprints = [tokenization.fingerprint(rows) for rows in self.rows]
        return reference.Reference(self.cfg, self.accelerator, self.model, self.rows, fingerprints, collate, self.logps)

    def values(self, made: reference.Reference, part: int = 0) -> torch.Tensor:
        """Return the values of all rows after the model has been trained, and check that it is as before."""
        torch.manual_seed(1)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with torch.no_grad():
            for p in trained:
                p.add_(torch.randn_like(p))
        train = TrainBatches(made.rows[part], collate)
        batch = train.batch_of(list(range(len(made.rows[part]))), self.accelerator, self.cfg)
        with torch.no_grad():
            before = self.logps(self.model, batch)
            found = made(self.model, batch)
            assert torch.equal(self.logps(self.model, batch), before), "the trained model has changed"
        assert [p for p in self.model.parameters() if p.requires_grad] == trained
        assert float((found - before).abs().min()) > 1e-3
        return found


@pytest.mark.parametrize("part", [0, 1])
def test_stored_values_are_those_without_adapters_and_those_of_a_copy(tmp_path, part):
    found = {}
    for kind in ("stored", "adapters", "copy"):
        setup = Setup(tmp_path, reference=kind)
        found[kind] = setup.values(setup.make(), part)
    torch.testing.assert_close(found["stored"], found["adapters"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["copy"], found["adapters"], rtol=1e-6, atol=1e-6)
    setup = Setup(tmp_path, reference="stored")
    made = setup.make()
    assert setup.calls == 0, "the values were not in the cache"
    assert torch.equal(setup.values(made, part), found["stored"])


def test_stored_values_of_other_weights_or_rows_are_not_used(tmp_path):
    first, rows, weights = (Setup(tmp_path, reference="stored", lora_r=0) for _ in range(3))
    first.make()
    rows.rows = make_rows(20), rows.rows[1]
    rows.make()
    assert 0 < rows.calls < first.calls + 1
    weights.model.model.layers[0].mlp.up_proj.weight.data[3, 4] += 0.5
    weights.make()
    assert weights.calls >= first.calls > 0


def test_values_are_complete_or_absent_after_a_kill_and_are_not_computed_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "PART", 2)
    whole = Setup(tmp_path / "other", reference="stored")
    wanted = whole.values(whole.make())
    setup = Setup(tmp_path, reference="stored")
    plain = setup.logps

    def killed(model, batch):
        if setup.calls == 6:  # after two for the comparison of layers with and without padding
            raise KeyboardInterrupt
        return plain(model, batch)

    setup.logps = killed
    with pytest.raises(KeyboardInterrupt):
        setup.make()
    files = list((tmp_path / "reference").iterdir())
    assert files
    assert all(file.name.endswith(".part.npy") for file in files)
    setup = Setup(tmp_path, reference="stored")
    assert torch.equal(setup.values(setup.make()), wanted)
    assert setup.calls < whole.calls
    assert not list((tmp_path / "reference").glob("*.part.npy"))


def test_auto_stores_values_if_training_reads_all_rows(tmp_path, capsys):
    for options, wanted in (
        ({"epochs": 2}, "stored"),
        ({"epochs": 1, "lora_r": 0}, "stored"),
        ({"epochs": 1}, "adapters"),
        ({"steps": 1}, "adapters"),
        ({"steps": 1, "lora_r": 0}, "copy"),
    ):
        cfg = Config(cache_dir=str(tmp_path), model="builtin:tiny-llama", **options)
        reference.choose_reference(cfg, 20)
        assert cfg.reference == wanted
    assert "reference copy: training reads each row 0.2 times (--reference changes it)" in capsys.readouterr().out


def test_adapters_are_required_where_they_are_named(tmp_path):
    with pytest.raises(UserError, match=r"needs new adapters, and there are none\. Use --reference stored or copy"):
        Setup(tmp_path, reference="adapters", lora_r=0).make()
