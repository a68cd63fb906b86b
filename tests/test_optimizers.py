"""Optimizers, schedules, learning rates of parameters, and the average of the weights."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from safetensors.numpy import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_ddp.config.optimizer_options import OPTIMIZERS, ema_bytes
from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import RecipeConfig, TrainConfig, as_plain_dict
from accel_ddp.engine import scaler
from accel_ddp.engine.step import train_step
from accel_ddp.engine.step_sums import UpdateStats
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.exporting.export import files_of, from_checkpoint
from accel_ddp.saving import checkpoint_format
from accel_ddp.saving.state_tensors import to_save, versions
from accel_ddp.training import ema as ema_module
from accel_ddp.training import optim
from accel_ddp.training.ema import Ema
from accel_ddp.training.optim import hidden_matrices, lr_at, orthogonalize, set_lr
from tests.conftest import PROGRAMS, ROOT, clean_environment, run_all, run_ranks
from tests.programs.base import Task


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict]:
    """Return the results of tests/programs/optimizers.py on one rank and on two."""
    folder, loaded = tmp_path_factory.mktemp("optimizers"), {}
    for ranks in (1, 2):
        options = ["--out", folder / f"{ranks}.pt", "--output_dir", folder / str(ranks), "--optimizers", *OPTIMIZERS]
        run_ranks(ranks, PROGRAMS / "optimizers.py", *options).well()
        loaded[ranks] = torch.load(folder / f"{ranks}.pt", weights_only=False)
    return loaded


def distance(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_learn_what_one_learns_with_every_optimizer(results, name):
    one, two = results[1][name], results[2][name]
    # A moment that is rounded to another one of 256 values changes a weight by some hundredths of a step, which is 0.01 here.
    limit = 1e-3 if name == "adamw8bit" else 1e-10
    assert distance(one["weights"], two["weights"]) < limit
    assert distance(one["averages"], two["averages"]) < limit
    assert one["skipped"] == two["skipped"]
    assert len(one["skipped"]) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_same_weights_averages_and_optimizer_state(results, name):
    for ranks in (1, 2):
        whole, resumed = results[ranks][name], results[ranks][f"{name}, resumed"]
        for kind in ("model", "weights", "averages", "optimizer"):
            assert whole[kind].keys() == resumed[kind].keys()
            assert all(torch.equal(whole[kind][key], resumed[kind][key]) for key in whole[kind]), kind


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_sharded_model_learns_what_one_rank_learns(results, name):
    one, sharded = results[1][name], results[2][f"{name}, sharded"]
    assert distance(one["weights"], sharded["weights"]) < 1e-10
    assert distance(one["averages"], sharded["averages"]) < 1e-10


def test_the_average_is_evaluated_and_exported_and_training_continues_with_the_weights(results):
    for name in OPTIMIZERS:
        found = results[1][name]
        weights, averages, model = found["weights"], found["averages"], found["model"]
        assert weights.keys() == averages.keys()
        assert len([key for key in weights if "embed" in key or "head" in key]) == 1, "tied weights have one average"
        assert distance(averages, found["plain"]) < (1e-6 if name == "adamw8bit" else 1e-13)
        assert found["metrics"]["sum"] == pytest.approx(found["sums"][6], rel=1e-5 if name == "adamw8bit" else 1e-10)
        assert distance(weights, averages) > 1e-4
        assert all(torch.equal(model[key], averages[key]) for key in averages), (
            "the model of `fit` contains the averages at the end"
        )
        assert torch.equal(model["head.weight"], model["embed.weight"])


def test_a_skipped_step_changes_neither_weights_nor_optimizer_nor_average_on_the_device(monkeypatch):
    """The step of Muon reads `found_inf`, as the fused kernels of torch do. Only the choice between the two ways is replaced."""
    choose = scaler.can_skip_on_device
    monkeypatch.setattr(scaler, "can_skip_on_device", lambda optimizer, _: choose(optimizer, torch.device("cuda")))
    for name in ("muon", "adamw", "adafactor"):
        found = []
        for bad in ((2, 3), ()):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            cfg = TrainConfig(optimizer=name, lr=0.1, max_grad_norm=0.0)
            optimizer, ema = optim.build(model, cfg), Ema(model, 0.5)
            for step in range(5):
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                if step in bad:
                    batch[0, 0] = float("inf")
                if bad or step not in (2, 3):
                    stats = train_step(Accelerator(cpu=True), cfg, Terms(model, Task()), optimizer, [batch])
                    ema.update(step + 1, stats)
            state = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
            found.append([*model.state_dict().values(), *ema.averages.values(), *state])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name
        assert choose(optimizer, torch.device("cuda")) == (name != "adafactor"), "Adafactor has no `found_inf`: the host decides"


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_gradients_that_the_optimizer_clips_itself_give_the_same_steps(monkeypatch, name):
    """On a GPU the optimizer divides by a number that it reads on the device. Only the choice between the two ways is replaced."""
    choose, found = scaler.can_skip_on_device, []
    for where in ("cuda", "cpu"):
        device = torch.device(where)
        monkeypatch.setattr(scaler, "can_skip_on_device", lambda optimizer, _, device=device: choose(optimizer, device))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        cfg = TrainConfig(optimizer=name, lr=0.1, max_grad_norm=0.5)
        optimizer, norms = optim.build(model, cfg), []
        for step in range(5):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            scale = 0.01 if step == 3 else 1.0  # step 3 clips nothing
            terms = Terms(model, Task(lambda model, x, scale=scale: scale * model(x).pow(2).sum(1)))
            norms.append(float(train_step(Accelerator(cpu=True), cfg, terms, optimizer, [batch]).grad_norm))
        found.append(([*model.state_dict().values()], norms))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert min(found[0][1]) < 0.5 < max(found[0][1])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(found[0][0], found[1][0], strict=True))


def test_an_average_of_16_bit_weights_has_32_bits_and_leaves_them_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    ema = Ema(model, 0.999)
    before = [p.clone() for p in model.state_dict().values()]
    for average in ema.averages.values():
        average.add_(1e-5)
    with ema.applied():
        assert {average.dtype for average in ema.averages.values()} == {torch.float32}
        assert "1.running_mean" in ema.averages
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))
    assert not Ema(model, 0.0).averages


def test_the_averages_of_many_parameters_need_few_calls_of_torch(monkeypatch):
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    stats = UpdateStats(torch.tensor(1.0), torch.tensor(1.0), 1, 0, 0, 0, torch.tensor(1.0))
    found = []
    for number in (2, 40):
        torch.manual_seed(0)
        model, names = nn.Sequential(*(nn.Linear(3, 3) for _ in range(number))), []
        ema = Ema(model, 0.9)
        expected = [average.lerp(average + 1, 0.1) for average in ema.averages.values()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        if found:
            monkeypatch.setattr(ema_module, "MOST_AT_ONCE", 40 * 12 // 2)  # half of the parameters at once
        with Calls():
            ema.update(1000, stats)
        found.append(len([name for name in names if "detach" not in name]))  # which computes nothing
        torch.testing.assert_close([*ema.averages.values()], expected)
    skipped = stats._replace(loss=torch.tensor(float("nan")))
    expected = [average.lerp(average + 0.9, 1 - 0.9**2) for average in ema.averages.values()]
    ema.update(1000, skipped, skipped)
    ema.update(1000, stats, skipped)
    torch.testing.assert_close([*ema.averages.values()], expected, msg="one of two local steps was finite")
    before = [average.clone() for average in ema.averages.values()]
    ema.num_workers = 2
    ema.update(1000, skipped)
    assert not any(map(torch.equal, before, ema.averages.values())), "one of two workers may have stepped"
    assert found[1] - found[0] == 3, "three more calls for the second half"


def test_schedules_are_functions_of_the_step_and_end_at_their_minimum():
    def rates(**options):
        return [lr_at(step, TrainConfig(lr=2.0, **options), 10) for step in range(10)]

    cosine, plain = rates(lr_schedule="cosine", min_lr_ratio=0.25), rates(lr_schedule="cosine")
    assert cosine == pytest.approx([0.5 + 0.75 * rate for rate in plain])
    assert rates(min_lr_ratio=0.5) == pytest.approx([2 - 0.1 * step for step in range(10)])
    assert rates(lr_schedule="wsd", decay_ratio=0.4) == pytest.approx([2.0] * 7 + [1.5, 1.0, 0.5])
    assert rates(lr_schedule="wsd", decay_ratio=0.4, min_lr_ratio=0.5)[7:] == pytest.approx([1.75, 1.5, 1.25])
    assert rates(lr_schedule="wsd", warmup_steps=4)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates(lr_schedule="wsd") == pytest.approx([2.0] * 10), "the decay takes one step, in which it begins"
    longer = [lr_at(step, TrainConfig(lr=2.0, lr_schedule="wsd"), 20) for step in range(9)]
    assert longer == rates(lr_schedule="wsd")[:9], "a longer run has the same learning rates before the decay"
    assert lr_at(12, TrainConfig(lr=2.0, lr_schedule="wsd", min_lr_ratio=0.1), 10) == pytest.approx(0.2)


def test_learning_rates_of_parameters_follow_the_schedule():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "classifier": nn.Linear(4, 2)})
    cfg = TrainConfig(lr=1e-4, lr_of=("encoder=1e-5", "encoder.bias=0", "classifier=1e-3"))
    optimizer = optim.build(model, cfg)
    set_lr(optimizer, cfg.lr / 2)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay for name, (_, decay) in found.items()} == {name: 0.01 * ("weight" in name) for name in found}
    expected = {"encoder.weight": 5e-6, "encoder.bias": 0, "classifier.weight": 5e-4, "classifier.bias": 5e-4}
    assert {name: rate for name, (rate, _) in found.items()} == pytest.approx(expected)
    with pytest.raises(UserError, match=r"--lr_of head=0.001: no parameter has this in its name. There are: classifier.bias, "):
        optim.build(model, dataclasses.replace(cfg, lr_of=("head=1e-3",)))
    with pytest.raises(UserError, match=r"--lr_of encoder=0.001: these parameters are not trained"):
        optim.build(model, dataclasses.replace(cfg, freeze=("encoder",), lr_of=("encoder=1e-3",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizer sgd --beta1 0.8", "--beta1 0.8: --optimizer sgd does not use it. .* use --optimizer adamw or adamw8bit or muon"),
        ("--optimizer adafactor --eps 1e-6", "--eps 1e-06: --optimizer adafactor does not use it"),
        ("--momentum 0.5", "--momentum 0.5: --optimizer adamw does not use it. .* use --optimizer muon or sgd"),
        ("--beta2 1", r"--beta2 1.0: must be a fraction, from 0 to below 1"),
        ("--ema_decay 1", r"--ema_decay 1.0: must be a fraction"),
        ("--eps 0", "--eps 0.0: must be above 0"),
        ("--min_lr_ratio 1.5", "--min_lr_ratio 1.5: must be a fraction of --lr"),
        ("--lr_schedule constant --min_lr_ratio 0.1", "--min_lr_ratio 0.1: the learning rate of --lr_schedule constant never falls"),
        ("--decay_ratio 0.3", "--decay_ratio 0.3: needs --lr_schedule wsd, and it is linear"),
        ("--lr_schedule wsd --decay_ratio 0", "--decay_ratio 0.0: must be a fraction of all steps, above 0"),
        ("--lr_schedule wsd --decay_ratio 0.6 --warmup_ratio 0.5", "warm-up and decay together take more than all steps"),
        ("--lr_of classifier", "--lr_of classifier: must be a part of parameter names, = and a learning rate"),
        ("--lr_of =1", "--lr_of =1: must be a part of parameter names"),
        ("--lr_of a=-1", "--lr_of a=-1: must be"),
        ("--lr 0 --lr_of a=1", "--lr 0 --lr_of: .* must be above 0"),
        ("--adam_beta1 0.8", r"--adam_beta1: there is no such option. Did you mean --beta1"),
        ("--min_lr 1e-6", "Did you mean --min_lr_ratio"),
    ],
)  # fmt: skip
def test_options_that_are_wrong_or_would_be_ignored_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        parse_config(TrainConfig, options.split())


def test_optimizers_that_cannot_step_shards_are_refused_with_fsdp(monkeypatch):
    for name in ("adamw8bit", "adafactor"):
        with pytest.raises(
            UserError, match=f"--optimizer {name} cannot be used with FSDP, because .* Use --optimizer adamw, muon"
        ):
            TrainConfig(optimizer=name).check_installed(is_sharded=True)
    for name in ("adamw", "sgd", "muon"):
        TrainConfig(optimizer=name).check_installed(is_sharded=True)
    monkeypatch.setattr("accel_ddp.config.optimizer_options.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--optimizer adamw8bit: needs torchao. Install it: pip install torchao"):
        TrainConfig(optimizer="adamw8bit").check_installed(is_sharded=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_predicted_bytes_are_those_of_the_state(name):
    cfg = TrainConfig(optimizer=name, lr=0.01, ema_decay=0.9)
    model = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    optimizer = optim.build(model, cfg)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    to_plain = getattr(optimizer, "to_plain", dict)
    state = [value for one in optimizer.state.values() for key, value in to_plain(one).items() if key != "step"]
    assert sum(tensor.nbytes for tensor in state) == optim.state_bytes(model, cfg) == optim.state_bytes(model.to("meta"), cfg)
    assert ema_bytes(cfg, (3, 5), itemsize=2) == 60


def test_muon_steps_hidden_matrices_by_orthogonal_ones_of_the_size_of_adamw_steps():
    matrix = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert (values.min() > 0.6, values.max() < 1.3) == (True, True)
    assert torch.equal(orthogonalize(torch.zeros(2, 3)), torch.zeros(2, 3))
    own = torch.optim.Muon([nn.Parameter(matrix.clone())], lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    model = nn.Linear(4, 6, bias=False).double()
    model.weight.data.copy_(matrix)
    ours = optim.build(model, TrainConfig(optimizer="muon", lr=0.1, weight_decay=0.1))
    for step in range(3):
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for optimizer in (own, ours):
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
            optimizer.step()
    # torch multiplies in bfloat16, which has 8 bits.
    assert (model.weight - own.param_groups[0]["params"][0]).abs().max() < 0.02


def test_muon_leaves_embeddings_and_heads_to_adamw():
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
    for model in (BertForSequenceClassification(BertConfig(**small)), LlamaForCausalLM(LlamaConfig(**small))):
        hidden = hidden_matrices(model)
        names = [name for name, p in model.named_parameters() if p in hidden]
        assert len(names) == 7, names  # of the layer; the layer of BERT has 6 matrices, and its pooler has one
        assert not [name for name in names if "embed" in name or "classifier" in name or "lm_head" in name]
    with pytest.raises(UserError, match=r"--optimizer muon: no matrix of a hidden layer is trained. Use --optimizer adamw"):
        optim.build(nn.Embedding(3, 3), TrainConfig(optimizer="muon"))


def test_the_averages_and_the_weights_of_a_checkpoint_can_be_exported(tmp_path, tiny_model):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    weights = to_save(model)
    averages = {f"{name}/ema": weight + 1 for name, weight in weights.items()}
    facts = {
        "recipe": "classify.py",
        "config": as_plain_dict(RecipeConfig(model=tiny_model)),
        "versions": versions(),
        "num_ranks": 1,
    }
    facts |= {"run": "1", "values": {}, "evaluations": {}}
    for number, tensors in enumerate((averages, {})):
        path = tmp_path / f"step_0000000{number}"
        checkpoint_format.write(
            path,
            {checkpoint_format.MODEL: weights, checkpoint_format.OPTIMIZER: tensors},
            {**facts, "step": number},
            files_of(model, tokenizer),
        )
    first, name = tmp_path / "step_00000000", "classifier.weight"
    for choice, expected in (("auto", 1), ("ema", 1), ("raw", 0)):
        folder = from_checkpoint(str(first), str(tmp_path / choice), weights=choice)
        exported = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
        assert torch.equal(exported[name], weights[name] + expected)
    with pytest.raises(UserError, match=r"--weights ema: .*step_00000001 has no average of weights"):
        from_checkpoint(str(tmp_path / "step_00000001"), str(tmp_path / "none"), weights="ema")


def test_every_optimizer_has_a_row_in_the_docs():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    rows = {line.split("`")[1]: line.split(" | ") for line in page.splitlines() if line.startswith("| `")}
    for name, entry in OPTIMIZERS.items():
        *_, options, shards, _ = rows[name]
        named = options.replace("those of `adamw`", "`--beta1` `--beta2` `--eps`")
        assert [f"--{option}" for option in entry.uses] == named.replace("and ", "").replace("`", "").replace("none", "").split()
        assert (shards == "refused") == bool(entry.not_sharded)


def test_an_import_of_torchao_prints_nothing():
    """PEFT imports it if it is installed. On some machines it warns of files that are not used."""
    code = "from accel_ddp.ranks import reporting; reporting.configure(); import torchao.optim"
    ended = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def test_parameters_are_frozen_by_their_names_if_the_optimizer_is_the_users_own(tmp_path):
    recipe = (ROOT / "recipes" / "own_model.py").read_text()
    script, own = tmp_path / "own.py", "torch.optim.SGD(model.parameters(), lr=0.05)"
    script.write_text(recipe.replace("accel_ddp.optim.build(model, cfg)", own))
    options = ["--steps", "3", "--save_every", "1", "--keep_last", "5", "--freeze", "2.bias", "--output_dir", tmp_path / "run"]
    run_all([[sys.executable, script, *options]], [clean_environment()]).well()
    first, last = (load_file(tmp_path / "run" / f"step_{step:08d}" / "model.safetensors") for step in (1, 3))
    assert {name for name in first if not (first[name] == last[name]).all()} == {"0.weight", "0.bias", "2.weight"}
