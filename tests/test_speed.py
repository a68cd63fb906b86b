"""The speed package changes how long a step takes and not its result: both ways of computing are compared."""

import functools
import itertools
import json
import math
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rehearsal import move_gradients
from accel_ddp.engine.rows import Collate, rounded_up
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.recipe import load_model
from accel_ddp.speed import attach, autobatch, flops, modules
from accel_ddp.training.evaluation import evaluate
from accel_ddp.training.step_plan import Cost, StepPlan, TokenSteps, spread
from accel_ddp.training.stream import MixedShuffle, Mixture, Shuffle, TrainBatches, count_tokens
from tests.conftest import PROGRAMS, ROOT, clean_environment, rank_environments, run_all, run_ranks
from tests.programs.base import Task
from tests.test_files import expand
from tests.test_padding_free import KINDS, LENGTHS, a_batch, compute

# ------------------------------------------------------------------------------------------- the data stream


@pytest.mark.parametrize(("micro", "count", "ranks"), [(4, 2, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_a_step_has_the_same_items_for_every_way_to_spread_them(micro, count, ranks):
    lengths = np.random.default_rng(0).integers(1, 500, (100, 1))
    plan = StepPlan(Shuffle(100, 0), TrainConfig(global_batch_size=8, micro_batch_size=micro), ranks, lengths)
    for step in range(3, 12):
        found = [of_rank(plan, step, rank) for rank in range(ranks)]
        assert [[len(batch) for batch in of_rank] for of_rank in found] == [[micro] * count] * ranks
        items = [item for of_rank in found for batch in of_rank for item in batch]
        assert sorted(items) == list(enumerate(Shuffle(100, 0).items(step * 8, 8), start=step * 8))


def test_micro_batches_of_a_step_have_about_the_same_number_of_tokens():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.6, 4096), 8, 512).astype(int)
    items = [(i, i) for i in range(256)]
    sums = lambda groups: np.array([lengths[[i for _, i in group]].sum() for group in groups])
    in_order = [items[first : first + 32] for first in range(0, 256, 32)]
    assert np.ptp(sums(spread(items, lengths[:256], 8))) < 0.1 * np.ptp(sums(in_order))


PACKED = Cost(3.0, 0.01, pads=False)


def of_rank(plan, step, rank, shares=None):
    return plan.deal(plan.items(step), rank, shares)


def a_plan(lengths, ranks=1, cost=PACKED, is_sharded=False, seed=0, **options):
    return StepPlan(Shuffle(len(lengths), seed), TrainConfig(**options), ranks, lengths, cost, is_sharded)


def costs_of(plan, batches) -> np.ndarray:
    return np.array([plan.cost.of(plan.parts[[index for _, index in batch]]).sum() for batch in batches])


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_deals_every_item_once_and_keeps_its_limits(seed):
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(4, 1, (300, int(draw.integers(1, 3)))), 1, 900).astype(np.int32)
    ranks, pads, is_sharded = int(draw.integers(1, 7)), bool(seed % 2), seed % 3 == 0
    shares = tuple(draw.dirichlet(np.ones(ranks))) if seed % 5 == 0 else None
    limit = int(draw.integers(200, 1000))
    options = {"global_batch_tokens": 12_000} if seed % 4 == 0 else {"global_batch_size": int(draw.integers(ranks, 60))}
    cost = Cost(1.0, 0.01, pads=pads)
    plan = a_plan(lengths, ranks, cost, is_sharded, seed, micro_batch_tokens=limit, **options)
    for step in (0, 31, 7):
        found = [of_rank(plan, step, rank, shares) for rank in range(ranks)]
        again = a_plan(lengths, ranks, cost, is_sharded, seed, micro_batch_tokens=limit, **options)
        assert found == [of_rank(again, step, rank, shares) for rank in range(ranks)], "it depends on the step only"
        assert sorted(item for rank in found for batch in rank for item in batch) == plan.items(step)
        assert all(found)
        assert all(batch == sorted(batch) for rank in found for batch in rank)
        assert not is_sharded or len({*map(len, found)}) == 1, "every rank gathers the weights as often"
        for batch in (batch for rank in found for batch in rank if len(batch) > 1):
            parts = lengths[[index for _, index in batch]]
            assert (len(batch) * parts.max(0).sum() if pads else parts.sum()) <= limit or (
                is_sharded and len(plan.items(step)) % ranks
            )


@pytest.mark.parametrize("seed", range(10))
def test_the_slowest_rank_is_within_a_third_of_the_optimum(seed):
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(4, 1, (9, 1)), 1, 900).astype(int)
    plan = a_plan(lengths, 2, seed=seed, global_batch_size=9, micro_batch_tokens=10**6)
    slowest = max(costs_of(plan, of_rank(plan, 0, rank)).sum() for rank in (0, 1))
    costs = plan.cost.of(lengths)
    best = min(max(sum(some), costs.sum() - sum(some)) for n in range(10) for some in itertools.combinations(costs, n))
    assert best <= slowest * (1 + 1e-12) <= best * (4 / 3 - 1 / 6) * (1 + 1e-9)


def test_ranks_and_micro_batches_of_varied_texts_are_balanced_by_cost():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.2, (4000, 1)), 16, 8192).astype(int)
    over = {}
    for name, options in (("items", {"micro_batch_size": 8}), ("tokens", {"micro_batch_tokens": 12_000})):
        plan = a_plan(lengths, 4, Cost(1.0, 3e-5, pads=False), global_batch_size=32, **options)
        loads = np.array([[costs_of(plan, of_rank(plan, step, rank)).sum() for rank in range(4)] for step in range(50)])
        over[name] = (loads.max(1) / loads.mean(1)).mean()
    assert over["items"] > 1.1
    assert over["tokens"] < 1.03
    shares = (0.1, 0.2, 0.3, 0.4)
    loads = np.array([[costs_of(plan, of_rank(plan, step, rank, shares)).sum() for rank in range(4)] for step in range(50)])
    assert loads.sum(0) / loads.sum() == pytest.approx(shares, abs=0.02)


@pytest.mark.parametrize("chunk", [7, 64, 1 << 16])
def test_steps_of_tokens_begin_where_a_sum_over_all_items_says(monkeypatch, chunk):
    monkeypatch.setattr(TokenSteps, "CHUNK", chunk)
    lengths = np.random.default_rng(1).integers(0, 40, 101)
    mixture = Mixture(("a", "b"), np.arange(101) % 2, (3.0, 1.0))
    for order in (Shuffle(101, 5), MixedShuffle(mixture, 5)):
        before = np.cumsum([0, *lengths[order.items(0, 2000)]])[:-1]
        expected = [int(np.argmax(before >= step * 130)) for step in range(200)]
        steps = TokenSteps(order, lengths, 130)
        assert [steps.first(step) for step in range(200)] == expected
        assert [TokenSteps(order, lengths, 130).first(step) for step in (150, 16, 0)] == [expected[step] for step in (150, 16, 0)]


def test_what_batches_of_tokens_need_from_the_data():
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in LENGTHS]})
    train, total = TrainBatches(rows, list), sum(LENGTHS)
    cfg = TrainConfig(global_batch_tokens=2 * max(LENGTHS), epochs=2)
    assert train.total_steps(cfg) == math.ceil(2 * total / cfg.global_batch_tokens)
    assert train.mean_items(cfg) == pytest.approx(cfg.global_batch_tokens / np.mean(LENGTHS))
    with pytest.raises(UserError, match=f"the longest item has {max(LENGTHS)} tokens.*Use at least {max(LENGTHS)}"):
        train.total_steps(TrainConfig(global_batch_tokens=max(LENGTHS) - 1))
    for name in ("micro_batch", "global_batch"):
        with pytest.raises(UserError, match=f"--{name}_tokens 500: the tokens of an item are not known.* Use --{name}_size."):
            TrainBatches([1, 2], list).total_steps(TrainConfig(**{f"{name}_tokens": 500}))
    mixed = rows.add_column("n", list(range(len(LENGTHS))))
    mixed.mixture = Mixture(("a", "b"), np.arange(len(LENGTHS)) % 2, (3.0, 1.0))
    expected = 0.75 * np.mean(LENGTHS[::2]) + 0.25 * np.mean(LENGTHS[1::2])
    assert TrainBatches(mixed, list).mean_items(cfg) == pytest.approx(cfg.global_batch_tokens / expected, rel=0.01)


def test_a_step_that_is_larger_than_the_data_is_refused_or_reported():
    train = TrainBatches(datasets.Dataset.from_dict({"input_ids": [[1] * n for n in (10, 30)]}), list)
    for options in ({"global_batch_size": 13}, {"global_batch_tokens": 260}):
        cfg = TrainConfig(epochs=3, **options)
        most = train.epoch_size(cfg)
        with pytest.raises(UserError, match=f"a step would be 6.5 epochs of 2 items, .*Use at most {most}, or"):
            train.total_steps(cfg)
        cfg.steps = 1
        text, warnings = train.describe(train.total_steps(cfg), cfg)
        assert text.startswith("1 step = 6.50 epochs of 2 items")
        assert f"so items are repeated within a step. Use at most {most}," in warnings[0]
    assert train.total_steps(TrainConfig(epochs=3)) == 1, "the default batch is only reported"
    assert train.total_steps(TrainConfig(epochs=0.1, global_batch_size=2)) == 1
    assert train.describe(3, TrainConfig(steps=3, global_batch_size=2)) == ("3 steps = 3.00 epochs of 2 items", [])


def test_rounding_gives_few_different_lengths_and_adds_little():
    rows = {number: rounded_up(number) for number in range(1, 20_000)}
    assert all(row - number >= 0 for number, row in rows.items())
    assert all(row - number < number / 4 for number, row in rows.items() if number > 512)
    assert len(set(rows.values())) < 90


def test_the_lengths_of_rows_of_a_table_are_known():
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in LENGTHS]})
    assert TrainBatches(rows, lambda rows: rows).lengths.tolist() == LENGTHS
    assert TrainBatches(rows.select([3, 0]), lambda rows: rows).lengths.tolist() == [30, 3]
    assert TrainBatches([1, 2], lambda rows: rows).lengths is None


def test_the_lengths_of_rows_with_several_texts_are_tokens():
    """Rows of `embed` have several texts, and rows of `seq2seq` have a source and a target."""
    texts = {"input_ids": [[[1] * a, [1] * b] for a, b in ((3, 4), (1, 9), (2, 1))]}
    pairs = {"input_ids": [[1] * 3, [1], [1] * 2], "labels": [[1] * 4, [1] * 9, [1]]}
    counts = {"texts": None, "pairs": functools.partial(count_tokens, columns=("input_ids", "labels"))}
    for rows, lengths in ((texts, counts["texts"]), (pairs, counts["pairs"])):
        train = TrainBatches(datasets.Dataset.from_dict(rows), lambda rows: rows, lengths=lengths)
        assert train.lengths.tolist() == [7, 10, 3]
        assert train.part_lengths.tolist() == [[3, 4], [1, 9], [2, 1]]
        selected = TrainBatches(datasets.Dataset.from_dict(rows).select([2, 0]), lambda rows: rows, lengths=lengths)
        assert selected.lengths.tolist() == [3, 7]
    uneven = datasets.Dataset.from_dict({"input_ids": [[[1] * 3, [1] * 4], [[1] * 2], []]})
    assert TrainBatches(uneven, lambda rows: rows).lengths.tolist() == [7, 2, 0]


def test_the_longest_items_include_the_longest_source_and_the_longest_target():
    """All sources of a micro-batch are padded to the longest one, and all targets too."""
    sizes = [(5, 5), (9, 1), (1, 8), (6, 6), (5, 6), (1, 1)]
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * a for a, _ in sizes], "labels": [[1] * b for _, b in sizes]})
    collate = lambda rows: {"sizes": torch.tensor([[len(row["input_ids"]), len(row["labels"])] for row in rows])}
    train = TrainBatches(rows, collate, lengths=functools.partial(count_tokens, columns=("input_ids", "labels")))
    found = {n: train.sample(n, Accelerator(cpu=True), TrainConfig(), longest=True)["sizes"].tolist() for n in (1, 2, 3, 4)}
    assert found == {1: [[6, 6]], 2: [[6, 6], [5, 6]], 3: [[9, 1], [1, 8], [6, 6]], 4: [[9, 1], [1, 8], [6, 6], [5, 6]]}


# ---------------------------------------------------------------------------------- counting tokens and FLOPs


def a_speed(model=None, cfg=None, train=None) -> attach.Speed:
    return attach.Speed(Accelerator(cpu=True), cfg or TrainConfig(), Terms(model or nn.Linear(1, 1), Task()), train)


def test_the_work_of_a_run_is_counted_in_tokens_and_layers():
    """They are computed from the lengths of all rows, or from a sample if the lengths are not known."""
    rows = [{"input_ids": [5] * n} for n in (10, 20, 30, 40)] * 20
    for data, is_known in ((datasets.Dataset.from_list(rows), True), (rows, False)):
        train = TrainBatches(data, Collate())
        assert (train.lengths is not None) == is_known
        speed = a_speed(cfg=TrainConfig(global_batch_size=32), train=train)
        speed.total_steps, speed.padding_free = 7, SimpleNamespace(calls=[None] * 12, is_fixed=False)
        assert speed._count_work() == pytest.approx(7 * 32 * 25 * 12, rel=0.01)


def test_tokens_of_an_encoder_and_of_its_decoder_are_added():
    t5 = transformers.T5Config(d_model=32, num_layers=2, num_heads=4, d_ff=64, vocab_size=100, d_kv=8)
    batch = a_batch()
    for model, tokens in ((KINDS["bert"](), sum(LENGTHS)), (transformers.T5ForConditionalGeneration(t5), 2 * sum(LENGTHS))):
        assert a_speed(model).work_of([batch])[0] == tokens


def test_flops_of_two_models_equal_a_calculation_by_hand():
    """The models are BERT-base and a decoder of 135 million parameters."""
    with torch.device("meta"):
        bert = transformers.BertForSequenceClassification(transformers.BertConfig())
        shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=1536, vocab_size=49152))
    layer = 4 * 768 * 768 + 2 * 768 * 3072
    assert flops.FlopCounter(bert).count(tokens=512, squares=512**2, targets=0, texts=1) == (
        6 * 12 * layer * 512 + 3 * 12 * 2 * 2 * 512**2 * 768 + 6 * (768 * 768 + 768 * 2)
    )
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    attention = 3 * 30 * 2 * 2 * 9 * 64 * (100**2 + 20**2) / 2  # causal: half of the square
    assert flops.FlopCounter(llama).count(tokens=120, squares=100**2 + 20**2, targets=118, texts=2) == pytest.approx(
        6 * (30 * layer * 120 + 576 * 49152 * 118) + attention
    )


def test_a_counter_of_flops_that_fails_is_reported_once(caplog):
    model = KINDS["bert"]()
    model.config.num_attention_heads = 0
    assert a_speed(model).work_of([a_batch()]) == (sum(LENGTHS), 0.0)
    (message,) = [record.getMessage() for record in caplog.records if record.name == attach.__name__]
    assert message.startswith("TFLOP/s and MFU are not measured, because FLOPs cannot be counted: ZeroDivisionError: ")


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_flops_equal_those_that_torch_counts(kind):
    from torch.utils.flop_counter import FlopCounterMode

    model = KINDS[kind]().eval()
    batch = a_batch(lengths=[20, 20, 20])  # no padding
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        compute(model, batch)
    ours = flops.FlopCounter(model)
    total = ours.count(60, 3 * 20**2, 60, 3)
    if kind == "llama":
        total += ours.per_square * 3 * 20**2  # torch also counts the half of the square that a causal mask removes
    assert total == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_peak_of_a_gpu_is_found_by_its_name():
    assert flops.peak("NVIDIA H200", torch.bfloat16) == 989e12
    assert flops.peak("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert flops.peak("NVIDIA L4", torch.float16) == 121e12
    assert flops.peak("NVIDIA GH200 480GB", torch.bfloat16) == 989e12
    assert flops.peak("Tesla V100S-PCIE-32GB", torch.float16) == 125e12
    assert flops.peak("Tesla T4", torch.float32) is None
    for name in ("Some GPU", "NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA T400 4GB"):
        assert flops.peak(name, torch.bfloat16) is None


# -------------------------------------------------------------------------------------------------- in a run


def test_a_run_logs_its_speed_and_chooses_its_micro_batch_size(tmp_path):
    """Two ranks with `auto` and one rank with a number learn the same. The log counts the tokens of the data, not padding."""
    options = ["--steps", "3", "--max_train_items", "60", "--max_eval_items", "8", "--no_dropout", "--log_every", "1"]
    options += ["--model", "builtin:tiny-llama", "--global_batch_size", "12"]
    sft = ROOT / "recipes" / "sft.py"
    auto = run_ranks(2, sft, *options, "--micro_batch_size", "auto", "--output_dir", tmp_path / "auto").well()
    assert "micro_batch_size 6: 1 micro-batch per rank and step, at most 8 on CPUs" in auto.text
    one = run_ranks(1, sft, *options, "--micro_batch_size", "4", "--padding_free", "off", "--output_dir", tmp_path / "one").well()
    assert "speed: padding-free" in auto.text
    assert "padding-free" not in one.text
    logs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").open()] for name in ("auto", "one")]
    updates = [[event for event in log if event["event"] == "update"] for log in logs]
    for a, b in zip(*updates):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["tokens"] == b["tokens"] > a["items"] == b["items"]
        assert a["tflops"] > 0
    assert "tokens/s" in auto.text
    recorded = [log[0]["eval_rows"] for log in logs]
    assert recorded[0] == recorded[1]
    assert recorded[0]["number"] == len(expand(recorded[0]["rows"])) == 8


def test_a_rehearsal_does_not_disturb_ddp():
    """With --static_graph DDP counts gradients. After one that it does not expect, it never synchronises gradients again."""
    ended = run_all([[sys.executable, PROGRAMS / "rehearses.py"]] * 2, rank_environments(2)).well()
    assert ended.text.count("the gradients are equal") == 2


def test_gradients_move_out_of_memory_that_is_overwritten():
    """Autograd stores a view of the memory of a CUDA graph as the gradient. The next replay overwrites this memory."""
    memory, other = torch.arange(12.0), torch.ones(2)
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4))]
    parameters[0].grad, parameters[1].grad = memory[4:10].view(2, 3), other
    move_gradients(parameters, memory)
    memory.zero_()
    assert parameters[0].grad.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert parameters[1].grad is other
    assert parameters[2].grad is None


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down, self.shared = nn.Linear(16, 24), nn.Linear(24, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        x = x + self.down(nn.functional.silu(self.gate(x)))
        return self.shared(x) + self.shared(x * x)  # one weight is used twice


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_linear_layers_have_the_gradients_of_autocast_and_write_them_where_they_are_needed():
    torch.manual_seed(0)
    layer, x = _Layer(), torch.randn(1, 40, 16, requires_grad=True)
    parameters = [*layer.parameters()]

    def gradients(targets):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        with modules.gradients_written_to(parameters, targets):
            return torch.autograd.grad(out.float().square().sum(), [x, *parameters])

    expected = gradients([torch.zeros_like(p) for p in parameters])
    modules.install([layer], is_sharded=False)
    targets = [torch.zeros_like(p) for p in parameters]
    found = gradients(targets)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 0.02 * b.abs().max()
    written = {name for (name, _), a, b in zip(layer.named_parameters(), found[1:], targets) if a.data_ptr() == b.data_ptr()}
    assert {"gate.weight", "down.weight"} <= written
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        with modules.converted_together([layer]):
            layer.down.weight.data.zero_()  # its copy is used
            again = layer(x)
        assert torch.equal(again, out)
        pairs = [torch.autograd.grad(one.float().square().sum(), [x, layer.gate.weight, layer.gate.bias]) for one in (out, again)]
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        assert not torch.equal(layer(x), out)
        out = layer(x)
        assert torch.equal(out, layer.requires_grad_(False)(x)), "frozen layers compute as before"


def test_compiled_dropout_repeats_with_its_seed_and_drops_the_same_numbers_in_the_backward_pass():
    layer, rows = nn.Sequential(nn.Dropout(0.1)), 2000
    modules.install([layer], is_sharded=True)
    assert type(layer[0]) is modules.HashedDropout
    call = torch.compile(layer.forward, backend="aot_eager", dynamic=True)  # what is compiled, without a compiler for CPUs

    def kept(seed):
        x = torch.ones(1, rows, 64, requires_grad=True)
        torch.manual_seed(seed)
        out = call(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, gradient)
        assert set(out.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.9))}
        return (out[0] != 0).double()

    first = kept(0)
    assert torch.equal(first, kept(0))
    assert abs(float((first * kept(1)).mean()) - 0.81) < 0.01, "other seeds drop other numbers"
    assert abs(float(first.mean()) - 0.9) < 0.005
    # The numbers that are kept in a row or in a column vary as those of independent draws do.
    for dim, number in ((0, rows), (1, 64)):
        assert 0.6 < float(first.mean(dim).var() / (0.09 / number)) < 1.5
    neighbors = torch.stack([first[1:, 1:], first[:-1, 1:], first[1:, :-1], first[:-1, :-1]]).flatten(1)
    assert float((neighbors.corrcoef() - torch.eye(4)).abs().max()) < 0.015
    assert torch.equal(layer.eval()(first), first)


def test_the_largest_size_that_fits_is_found_by_doubling_and_bisection():
    """`room` replaces the memory of a GPU: the number of items that fit."""

    for per_rank in (1, 7, 12, 96, 1000):
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        for room in range(per_rank + 2):
            tried = []
            load = lambda size, room=room, tried=tried: tried.append(size) or (1.0 if size <= room else 1.1)
            assert autobatch._largest(sizes, load) == max((size for size in sizes if size <= room), default=0)
            assert len(tried) == len(set(tried))
    assert autobatch.doubling([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]) == [1, 2, 4, 8, 16, 32, 96]
    assert autobatch.doubling([1]) == [1]


def test_an_option_that_is_not_possible_is_reported_with_the_reason(tmp_path):
    options = ["--steps", "1", "--max_train_items", "20", "--max_eval_items", "4", "--no_eval_first"]
    options += ["--padding_free", "on", "--compile", "on", "--attn_implementation", "eager"]
    command = [sys.executable, ROOT / "recipes" / "seq2seq.py", *options]
    text = run_all([[*command, "--output_dir", tmp_path / "run"]], [clean_environment()]).well().text
    assert "--padding_free on is not possible: its attention is eager, not sdpa. Texts are padded." in text
    assert (
        "--compile on is not possible: texts are padded, so every batch has a different shape. The layers run without compilation."
        in text
    )


def test_the_micro_batch_size_is_a_number_or_auto():
    assert parse_config(TrainConfig, ["--micro_batch_size", "auto"]).split(2) == (16, 1)
    assert parse_config(TrainConfig, ["--micro_batch_size", "4"]).split(2) == (4, 4)
    with pytest.raises(UserError, match="micro_batch_size 0"):
        parse_config(TrainConfig, ["--micro_batch_size", "0"])


# ---------------------------------------------------------------------------------- with and without the package


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[int, dict]:
    """The results of tests/programs/speedups.py with 1 and with 2 ranks."""
    folder = tmp_path_factory.mktemp("speedups")
    for ranks in (1, 2):
        options = ["--out", folder / f"{ranks}.pt", "--output_dir", folder / str(ranks)]
        run_ranks(ranks, PROGRAMS / "speedups.py", *options).well()
    return {ranks: torch.load(folder / f"{ranks}.pt") for ranks in (1, 2)}


def test_fit_without_speedups_learns_the_same_weights(trained):
    """In float32, for 1 and 2 ranks."""
    reference = trained[1]["plain"]
    assert max(float((reference["before"][n] - w).abs().max()) for n, w in reference["weights"].items()) > 0.01, "no training"
    for run in (trained[1]["fast"], trained[2]["plain"], trained[2]["fast"]):
        assert all(torch.equal(reference["before"][name], value) for name, value in run["before"].items())
        assert max(float((reference["weights"][n] - w).abs().max()) for n, w in run["weights"].items()) < 1e-5
        assert run["accuracy"] == reference["accuracy"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fit_without_speedups_computes_the_padding_too(trained, ranks):
    plain, fast = trained[ranks]["plain"]["positions"], trained[ranks]["fast"]["positions"]
    # First `fit` compares three texts alone and padded, and then `attach` compares a sample with and without padding.
    plain = plain[6:]
    fast = fast[-len(plain) :]
    assert all(a >= b for a, b in zip(plain, fast))
    assert sum(plain) > 1.2 * sum(fast)


def test_evaluation_of_a_recipe_is_padding_free(monkeypatch, cache, tiny_model):
    """The layers get only the tokens of the evaluation texts, although the recipe calls `accel_ddp.evaluate` itself."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    import classify

    results = {}
    for padding_free_option in ("on", "off"):
        options = ["--max_train_items", "16", "--max_eval_items", "50", "--eval_batch_size", "16", "--padding_free"]
        cfg = parse_config(classify.Config, ["--model", tiny_model, *options, padding_free_option])
        accelerator = Accelerator(cpu=True)
        task = classify.Task(cfg, accelerator)
        load_model(task)
        task.batches()
        terms = Terms(task.model, task)
        attach.attach(accelerator, cfg, terms, task.train, total_steps=1)
        positions = []
        linear = next(m for name, m in task.model.named_modules() if name.endswith("layer.1.intermediate.dense"))
        linear.register_forward_hook(lambda module, inputs, output, seen=positions: seen.append(output.shape[:-1].numel()))
        results[padding_free_option] = evaluate(accelerator, terms, task.eval_batches), positions
        lengths = [len(ids) for ids in task.rows[1]["input_ids"]]
    batches = [lengths[start : start + 16] for start in range(0, 50, 16)]
    assert results["on"][1] == [sum(batch) for batch in batches]
    assert results["off"][1] == [len(batch) * max(batch) for batch in batches]
    assert results["on"][0] == pytest.approx(results["off"][0], rel=1e-5)
