"""The speed package changes how long a step takes and not its result: both ways of computing are compared."""

import itertools
import json
import math
import sys

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import nn

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.parsing import parse_config
from accel_ddp.speed import attach, autobatch, cuda_graphs, flops, linear_cross_entropy, padding_free
from accel_ddp.speed.cuda_graphs import GraphedLayers
from accel_ddp.speed.padding_free_model import PaddingFree, _SmallTable
from accel_ddp.training import losses
from accel_ddp.training.current_batch import CurrentBatch
from accel_ddp.training.stream import Batch, CountingCollate, Shuffle, TrainBatches, _GlobalMicroBatches, _spread, with_sizes
from tests.conftest import PROGRAMS, ROOT, clean_environment, rank_environments, run_all, run_ranks
from tests.cpu_graphs import GIGABYTE, replace_cuda

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
LENGTHS = [3, 17, 9, 30, 1]
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4, "vocab_size": 100}
POSITIONS = {"max_position_embeddings": 64}
KINDS = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE, **POSITIONS)),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SHAPE, max_position_embeddings=80, pad_token_id=1)
    ),
    "distilbert": lambda: transformers.DistilBertForTokenClassification(
        transformers.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=100)
    ),
    "bert masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE, **POSITIONS)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **POSITIONS, num_key_value_heads=2)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, **POSITIONS, num_key_value_heads=2)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=100, n_positions=64)
    ),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SHAPE, **POSITIONS)),
    "mistral, short texts": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, **POSITIONS, num_key_value_heads=2, sliding_window=64)
    ),
}


def a_batch(side="right", lengths=LENGTHS, seed=0) -> Batch:
    drawn, width = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(5, 100, (len(lengths), width), generator=drawn)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    rows = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
    return with_sizes(CountingCollate(lambda _: rows)([]))


def loss_of(model, batch):
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    if scores.ndim == 2:
        return losses.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[1])
    labels = batch["labels"]
    return losses.of_tokens(scores, torch.where(labels < 0, -100, labels % scores.shape[-1]))


def compute(model, batch, loss=loss_of):
    """Return the loss and the gradient of each parameter."""
    model.zero_grad()
    with CurrentBatch(batch):
        value = loss(model, batch)
    value.backward()
    return value.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(a, b):
    """Return the largest difference of the loss and of each gradient, as a fraction of its largest value."""
    assert all(bool(gradient.isfinite().all()) for _, gradients in (a, b) for gradient in gradients.values())
    sizes = {name: max(float(gradient.abs().max()), 1e-3) for name, gradient in a[1].items()}
    return max(abs(a[0] - b[0]) / abs(a[0]), *(float((a[1][n] - b[1][n]).abs().max()) / sizes[n] for n in a[1]))


def tokens_per_layer(layers, model, batch):
    """Return how many tokens each layer gets in one pass."""
    seen, calls = [], layers.calls
    layers.run = lambda number, hidden, args, kwargs: seen.append(hidden.shape[1]) or calls[number](hidden, *args, **kwargs)
    compute(model, batch)
    layers.run = None
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_padding_free_layers_give_the_same_loss_and_gradients_as_padding(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()  # without dropout, which draws a number for each position of the padded batch
    batch = a_batch()
    padded = compute(model, batch)
    layers = PaddingFree(model)
    layers.install()
    assert layers.check(lambda batch: loss_of(model, batch), batch, 1e-4) == ""
    found = compute(model, batch)
    assert tokens_per_layer(layers, model, batch) == [sum(LENGTHS)] * 3, "the layers got padding"
    assert difference(padded, found) < 1e-5
    other = a_batch(seed=1)
    assert difference(padded, compute(model, other)) > 1e-2, "the comparison finds no difference at all"
    layers.remove()
    assert difference(padded, compute(model, batch)) == 0


def test_texts_in_one_row_do_not_attend_to_each_other():
    """The scores of a text stay the same to the bit when the other texts change. A comparison of sums could miss it."""
    model = KINDS["llama"]().eval()
    layers = PaddingFree(model)
    layers.install()
    first, second = a_batch(seed=0), a_batch(seed=1)
    second["input_ids"][1] = first["input_ids"][1]
    with torch.no_grad():
        scores = []
        for batch in (first, second):
            with CurrentBatch(batch):
                scores.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
    assert torch.equal(scores[0][1, :17], scores[1][1, :17])
    assert not torch.equal(scores[0][3], scores[1][3])


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_gets_the_output_of_the_layer_before_it(kind):
    """Otherwise several layers could not be captured as one CUDA graph."""
    model = KINDS[kind]()
    layers, given = PaddingFree(model), []

    def run(number, hidden, args, kwargs):
        out = layers.calls[number](hidden, *args, **kwargs)
        given.append((hidden, out))
        return out

    layers.install()
    layers.run = run
    batch = a_batch()
    with CurrentBatch(batch):
        loss_of(model, batch)
    assert len(given) == 3
    assert all(after[0] is before[1] for before, after in itertools.pairwise(given))


def test_a_model_that_needs_padding_is_refused_with_the_reason():
    t5 = transformers.T5Config(d_model=32, num_layers=2, num_heads=4, d_ff=64, vocab_size=100, d_kv=8)
    for model, why in (
        (transformers.T5ForConditionalGeneration(t5), "2 stacks"),
        (nn.Linear(2, 2), "not a transformers model"),
        (transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, layerdrop=0.5)), "layerdrop"),
        (KINDS["bert"]().to(torch.float32), ""),
    ):
        if isinstance(model, transformers.BertForSequenceClassification):
            model.set_attn_implementation("eager")
            why = "eager"
        with pytest.raises(padding_free.NeedsPadding, match=why):
            PaddingFree(model)
    # With a window that is shorter than the texts, the model is computed with padding.
    config = transformers.MistralConfig(**SHAPE, **POSITIONS, num_key_value_heads=2, sliding_window=8)
    model = transformers.MistralForCausalLM(config).eval()
    batch = a_batch()
    padded = compute(model, batch)
    PaddingFree(model).install()
    assert difference(padded, compute(model, batch)) == 0
    # The classifier reads the first token. If that is padding, its hidden state is arbitrary, and differs without padding.
    model = KINDS["bert"]().eval()
    layers = PaddingFree(model)
    layers.install()
    assert "differs without padding" in layers.check(lambda batch: loss_of(model, batch), a_batch("left"), 1e-4)


def test_a_model_whose_layers_drop_arguments_needs_padding():
    """Its texts would attend to each other, which hardly changes the loss of an untrained model."""
    config = transformers.StableLmConfig(**SHAPE, **POSITIONS, num_key_value_heads=2)
    model = transformers.StableLmForCausalLM(config).eval()
    layers = PaddingFree(model)
    layers.install()
    assert "do not pass their arguments on" in layers.check(lambda batch: loss_of(model, batch), a_batch(), 1e-4)


def test_the_check_compares_hidden_states_and_not_only_the_loss(monkeypatch):
    """Here texts attend to each other, and the loss of the batch is the same."""
    model = KINDS["bert"]().eval()
    layers = PaddingFree(model)
    layers.install()

    def attend_to_all(module, query, key, value, *_, **__):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, padding_free.NAME, attend_to_all)
    assert "differs without padding" in layers.check(lambda batch: loss_of(model, batch).detach() * 0 + 1, a_batch(), 1e-4)


def test_layers_get_no_cache_and_generation_uses_padding():
    """Decoders pass a cache to their layers by default. It must not become part of a CUDA graph."""
    config = transformers.Qwen2Config(**SHAPE, **POSITIONS, num_key_value_heads=2, num_labels=3, pad_token_id=0)
    model = transformers.Qwen2ForSequenceClassification(config).train()
    layers = PaddingFree(model)
    layers.install()
    given = []
    layers.run = lambda number, hidden, args, kwargs: given.append(kwargs) or layers.calls[number](hidden, *args, **kwargs)
    compute(model, a_batch())
    assert given
    assert all(kwargs["past_key_values"] is None for kwargs in given)
    model = KINDS["llama"]().eval()
    PaddingFree(model).install()
    compute(model, a_batch())
    assert model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_adapters_and_copies_of_a_padding_free_model():
    import copy

    import peft

    torch.manual_seed(0)
    base = KINDS["llama"]()
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    model.eval()
    batch = a_batch()
    padded = compute(model, batch)
    layers = PaddingFree(model)
    layers.install()
    assert difference(padded, compute(model, batch)) < 1e-5
    assert tokens_per_layer(layers, model, batch) == [sum(LENGTHS)] * 3
    assert model.generate(input_ids=torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert copy.deepcopy(model).merge_and_unload() is not None
    counter = flops.FlopCounter(model)
    frozen = [m for name, m in model.named_modules() if type(m) is nn.Linear and ".layers." in name]
    assert counter.per_token == sum((6 if m.weight.requires_grad else 4) * m.weight.numel() for m in frozen)


def test_a_call_with_another_mask_than_the_current_batch_uses_padding():
    model = KINDS["bert"]().eval()
    layers = PaddingFree(model)
    layers.install()
    with CurrentBatch(a_batch()):
        other = a_batch(lengths=[30, 30, 30, 30, 30])  # more tokens than the row of the current batch
        layers.run = lambda *_: pytest.fail("the layers got no padding")
        loss_of(model, other)


def test_gradient_checkpointing_without_padding_gives_the_same_result():
    model = KINDS["llama"]().train()
    batch = a_batch()
    layers = PaddingFree(model)
    layers.install()
    stored = compute(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert difference(stored, compute(model, batch)) < 1e-6
    assert tokens_per_layer(layers, model, batch) == [sum(LENGTHS)] * 6, "the backward pass runs each layer once more"
    with pytest.raises(RuntimeError, match="--padding_free off"):
        compute(model, batch, lambda model, batch: loss_of(model, batch) + loss_of(model, batch))


def test_a_small_table_has_the_same_gradient_as_an_embedding():
    table, places = torch.randn(3, 8, dtype=torch.double, requires_grad=True), torch.randint(0, 3, (4, 5))
    weight = torch.randn(4, 5, 8, dtype=torch.double)
    (ours,) = torch.autograd.grad((_SmallTable.apply(places, table) * weight).sum(), table)
    (theirs,) = torch.autograd.grad((F.embedding(places, table) * weight).sum(), table)
    assert torch.allclose(ours, theirs, atol=1e-12)


# ------------------------------------------------------------------------------------- layers as CUDA graphs


def capture(layers: PaddingFree, group_bytes: float = math.inf) -> GraphedLayers:
    """Let the layers be captured as CUDA graphs, as `Speed` does."""
    graphs = GraphedLayers(layers.layers, layers.calls, torch.device("cpu"), False, group_bytes)
    layers.run, layers.on_new_batch = graphs.call, graphs.discard_pending
    return graphs


def padding_free_bert() -> tuple[nn.Module, PaddingFree]:
    torch.manual_seed(0)
    model = KINDS["bert"]().eval()
    layers = PaddingFree(model)
    layers.install()
    return model, layers


def compute_all(model, batches):
    """Return the loss and the gradients of each micro-batch."""
    results = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)  # of dropout
        results.append(compute(model, batch))
    return results


def assert_same_bits(some, others):
    for (loss, gradients), (other_loss, other_gradients) in zip(some, others, strict=True):
        assert loss == other_loss
        assert gradients.keys() == other_gradients.keys()
        assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_layers_give_the_same_bits_as_plain_ones(monkeypatch, kind, dropout):
    """All layers are one CUDA graph, or each layer is its own. Two shapes alternate, and the second pass of each captures it."""
    replace_cuda(monkeypatch)
    torch.manual_seed(0)
    model = KINDS[kind]().train(dropout)
    layers = PaddingFree(model)
    layers.install()
    # The texts of a shape have the same lengths in another order, so that their boundaries differ.
    batches = [a_batch(seed=seed, lengths=some[seed:] + some[:seed]) for seed in range(3) for some in (LENGTHS, [5, 2, 8])]
    plain = compute_all(model, batches)
    for group_bytes, num_groups in ((math.inf, 1), (0, 3)):
        graphs = capture(layers, group_bytes)
        assert_same_bits(plain, compute_all(model, batches))
        assert not graphs.disabled_reason
        assert [len(groups) for groups in graphs.captured.values()] == [num_groups] * 2
        for group in itertools.chain(*graphs.captured.values()):
            assert group.forward.replays == group.backward.replays == 2, "one pass was not replayed"


def test_captured_layers_accumulate_gradients(monkeypatch):
    """Every replay writes gradients to the same memory. Those of earlier micro-batches are moved away before."""
    replace_cuda(monkeypatch)
    model, layers = padding_free_bert()

    def accumulated():
        model.zero_grad()
        for seed in range(3):
            with CurrentBatch(a_batch(seed=seed)) as current:
                loss_of(model, current.batch).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = accumulated()
    graphs = capture(layers)
    for _ in range(3):
        assert all(map(torch.equal, plain, accumulated()))
    assert graphs.captured


def test_a_second_forward_pass_before_the_backward_pass_runs_without_cuda_graphs(monkeypatch):
    """The backward pass of the first one needs the memory that a replay would overwrite."""
    replace_cuda(monkeypatch)
    model, layers = padding_free_bert()
    twice = lambda model, batch: loss_of(model, batch) + loss_of(model, batch)
    plain = compute(model, a_batch(), twice)
    graphs = capture(layers)
    for _ in range(3):
        assert_same_bits([plain], [compute(model, a_batch(), twice)])
    assert graphs.captured


def test_layers_are_captured_again_when_other_parameters_are_trained(monkeypatch):
    replace_cuda(monkeypatch)
    model, layers = padding_free_bert()
    graphs = capture(layers, group_bytes=0)
    compute_all(model, [a_batch()] * 2)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    layers.run = None
    plain = compute_all(model, [a_batch()] * 3)
    layers.run = graphs.call
    assert_same_bits(plain, compute_all(model, [a_batch()] * 3))
    (groups,) = graphs.captured.values()
    assert [group.backward is None for group in groups] == [True, False, False]


def test_without_free_memory_layers_are_not_captured(monkeypatch):
    device = replace_cuda(monkeypatch, free=GIGABYTE)
    monkeypatch.setattr(cuda_graphs, "RETRY_AFTER", 3)
    model, layers = padding_free_bert()
    plain = compute_all(model, [a_batch()] * 6)
    graphs = capture(layers)
    assert_same_bits(plain[:4], compute_all(model, [a_batch()] * 4))
    assert not graphs.captured
    assert not graphs.disabled_reason
    device.free = 1000 * GIGABYTE
    assert_same_bits(plain, compute_all(model, [a_batch()] * 6))
    assert graphs.captured, "free memory was not checked again"


def test_layers_that_cannot_be_captured_run_without_cuda_graphs(monkeypatch, caplog):
    replace_cuda(monkeypatch)
    model, layers = padding_free_bert()
    first = layers.calls[0]
    layers.calls[0] = lambda hidden, *args, **kwargs: first(hidden * float(hidden.isfinite().all()), *args, **kwargs)
    plain = compute_all(model, [a_batch()] * 3)
    graphs = capture(layers)
    assert_same_bits(plain, compute_all(model, [a_batch()] * 3))
    assert "the host waits for the device" in graphs.disabled_reason
    assert "cannot be captured as CUDA graphs" in caplog.text


def test_a_loss_that_captured_layers_do_not_support_is_an_error(monkeypatch):
    """Its gradients would be wrong."""
    replace_cuda(monkeypatch)
    model, layers = padding_free_bert()
    capture(layers)
    batch = a_batch()
    compute_all(model, [batch] * 2)
    with CurrentBatch(batch):
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="--compile off"):
            loss.backward()  # a second time

    second, outputs = model.bert.encoder.layer[1], []
    forward = second.forward
    second.forward = lambda hidden, *args, **kwargs: outputs.append(hidden) or forward(hidden, *args, **kwargs)
    with CurrentBatch(batch):
        loss = loss_of(model, batch) + outputs[0].sum()  # of the first layer
        with pytest.raises(RuntimeError, match="--compile off"):
            loss.backward()

    second.forward = lambda hidden, *args, **kwargs: forward(hidden + 1, *args, **kwargs)
    with CurrentBatch(batch), pytest.raises(RuntimeError, match="--compile off"):
        loss_of(model, batch)
    second.forward = lambda hidden, *args, **kwargs: forward(hidden, *args, **kwargs, another=1)
    with CurrentBatch(batch), pytest.raises(RuntimeError, match="--compile off"):
        loss_of(model, batch)


# ------------------------------------------------------------------------------- the loss over a large vocabulary


@pytest.mark.parametrize("softmax", [linear_cross_entropy.plain_softmax, linear_cross_entropy.fused_softmax])
def test_a_loss_in_chunks_equals_the_loss_over_all_logits(monkeypatch, softmax):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 300 * 130)
    torch.manual_seed(0)
    values = [torch.randn(*size, dtype=torch.double, requires_grad=True) for size in ((700, 32), (130, 32), (130,))]
    labels = torch.where(torch.arange(700) % 5 == 0, -100, torch.randint(0, 130, (700,)))
    whole = F.cross_entropy(values[0] @ values[1].T + values[2], labels, reduction="sum")
    in_chunks = linear_cross_entropy.linear_cross_entropy(*values, labels, softmax)
    assert abs(whole.item() - in_chunks.item()) < 1e-9
    with torch.no_grad():
        assert linear_cross_entropy.linear_cross_entropy(*values, labels, softmax).item() == in_chunks.item()
    for a, b in zip(torch.autograd.grad(whole * 0.3, values), torch.autograd.grad(in_chunks * 0.3, values)):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_micro_batch_without_labels_has_a_loss_of_zero():
    model = KINDS["llama"]().eval()
    batch = a_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    batch = with_sizes(CountingCollate(lambda _: {**inputs, "labels": torch.full_like(batch["labels"], -100)})([]))
    head = linear_cross_entropy.OutputHead(model)
    value, gradients = compute(model, batch, lambda model, batch: head.loss_sum(model, inputs, batch["labels"], batch))
    assert value == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["llama", "bert masked"])
def test_skipping_the_output_head_gives_the_same_loss_and_gradients(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    batch = a_batch()
    labels = losses.next_tokens(batch["labels"])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    whole = compute(model, batch, lambda model, batch: losses.of_tokens(model(**inputs).logits, labels))
    head = linear_cross_entropy.OutputHead(model)
    skipped = compute(model, batch, lambda model, batch: head.loss_sum(model, inputs, labels, batch))
    assert head.is_last
    assert difference(whole, skipped) < 1e-5


def test_an_output_head_whose_logits_are_changed_afterwards_is_not_skipped():
    config = transformers.Gemma2Config(**SHAPE, **POSITIONS, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    batch = a_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    head = linear_cross_entropy.OutputHead(model)
    labels = losses.next_tokens(batch["labels"])
    assert torch.equal(head.loss_sum(model, inputs, labels, batch), losses.of_tokens(model(**inputs).logits, labels))
    assert head.is_last is False


# ------------------------------------------------------------------------------------------- the data stream


@pytest.mark.parametrize(("micro", "count", "ranks"), [(4, 2, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_a_step_has_the_same_items_for_every_way_to_spread_them(micro, count, ranks):
    lengths = np.random.default_rng(0).integers(1, 500, 100)
    stream = iter(_GlobalMicroBatches(Shuffle(100, 0), 3, micro, count, ranks, lengths))
    for step in range(3, 12):
        items = [item for _ in range(count) for item in next(stream)]
        assert sorted(items) == list(enumerate(Shuffle(100, 0).items(step * 8, 8), start=step * 8))


def test_micro_batches_of_a_step_have_about_the_same_number_of_tokens():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.6, 4096), 8, 512).astype(int)
    items = [(i, i) for i in range(256)]
    sums = lambda some: np.array([lengths[[i for _, i in some[start : start + 32]]].sum() for start in range(0, 256, 32)])
    assert np.ptp(sums(_spread(items, lengths, 8))) < 0.1 * np.ptp(sums(items))


def test_rounding_gives_few_different_lengths_and_adds_little():
    rows = {number: padding_free.rounded_up(number) for number in range(1, 20_000)}
    assert all(row - number >= 0 for number, row in rows.items())
    assert all(row - number < number / 4 for number, row in rows.items() if number > 512)
    assert len(set(rows.values())) < 90


def test_the_lengths_of_rows_of_a_table_are_known():
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in LENGTHS]})
    assert TrainBatches(rows, lambda rows: rows).lengths.tolist() == LENGTHS
    assert TrainBatches(rows.select([3, 0]), lambda rows: rows).lengths.tolist() == [30, 3]
    assert TrainBatches([1, 2], lambda rows: rows).lengths is None


# ---------------------------------------------------------------------------------- counting tokens and FLOPs


def a_speed(model=None, cfg=None, train=None) -> attach.Speed:
    return attach.Speed(Accelerator(cpu=True), cfg or TrainConfig(), model or nn.Linear(1, 1), train, loss_of)


def test_whether_layers_are_compiled_depends_on_the_tokens_of_the_run():
    """They are computed from the lengths of all rows, or from a sample if the lengths are not known."""
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n} for n in (10, 20, 30, 40)] * 20

    def collate(rows):
        return {
            name: nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
            for name in ("input_ids", "attention_mask")
        }

    cfg, needed = TrainConfig(global_batch_size=32), attach.TOKENS_WORTH_COMPILING / (32 * 25 * 12)
    for data, is_known in ((datasets.Dataset.from_list(rows), True), (rows, False)):
        train = TrainBatches(data, collate)
        assert (train.lengths is not None) == is_known
        assert not a_speed(cfg=cfg, train=train)._is_worth_compiling(12, math.floor(needed))
        assert a_speed(cfg=cfg, train=train)._is_worth_compiling(12, math.ceil(needed))


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
    assert flops.peak("Some GPU", torch.bfloat16) is None


# -------------------------------------------------------------------------------------------------- in a run


def test_a_run_logs_its_speed_and_chooses_its_micro_batch_size(tmp_path):
    """Two ranks with `auto` and one rank with a number learn the same. The log counts the tokens of the data, not padding."""
    options = ["--steps", "3", "--max_train_items", "60", "--max_eval_items", "8", "--no_dropout", "--log_every", "1"]
    options += ["--model", "builtin:tiny-llama", "--global_batch_size", "12"]
    sft = ROOT / "recipes" / "sft.py"
    auto = run_ranks(2, sft, *options, "--micro_batch_size", "auto", "--output_dir", tmp_path / "auto").well()
    assert "--micro_batch_size auto: 6 x 1 micro-batch per rank" in auto.text
    one = run_ranks(1, sft, *options, "--micro_batch_size", "4", "--padding_free", "off", "--output_dir", tmp_path / "one").well()
    assert "speed: no padding inside of the layers" in auto.text
    assert "no padding inside of the layers" not in one.text
    logs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").open()] for name in ("auto", "one")]
    updates = [[event for event in log if event["event"] == "update"] for log in logs]
    for a, b in zip(*updates):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["tokens"] == b["tokens"] > a["items"] == b["items"]
        assert a["tflops"] > 0
    assert "tokens/s" in auto.text


def test_a_rehearsal_does_not_disturb_ddp():
    """With --static_graph DDP counts gradients. After one that it does not expect, it never synchronises gradients again."""
    ended = run_all([[sys.executable, PROGRAMS / "rehearses.py"]] * 2, rank_environments(2)).well()
    assert ended.text.count("the gradients are equal") == 2


def test_the_largest_size_that_fits_is_found_by_doubling_and_bisection():
    """`room` replaces the memory of a GPU: the number of items that fit."""

    class Trial:
        module, cfg = nn.Linear(1, 1), TrainConfig()

        def __init__(self, room):
            self.room, self.tried = room, []

        def fits(self, size):
            self.tried.append(size)
            return size <= self.room

    for per_rank in (1, 7, 12, 96, 1000):
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        for room in range(per_rank + 2):
            trial = Trial(room)
            assert autobatch._largest(sizes, trial) == max((size for size in sizes if size <= room), default=0)
            assert len(trial.tried) == len(set(trial.tried))


def test_an_option_that_is_not_possible_is_reported_with_the_reason(tmp_path):
    options = ["--steps", "1", "--max_train_items", "20", "--max_eval_items", "4", "--no_eval_first"]
    command = [sys.executable, ROOT / "recipes" / "seq2seq.py", *options, "--padding_free", "on", "--compile", "on"]
    text = run_all([[*command, "--output_dir", tmp_path / "run"]], [clean_environment()]).well().text
    assert "--padding_free on is not possible: the model has 2 stacks of layers. Texts are padded." in text
    assert "--compile on is not possible: there is no GPU. The layers run without compilation." in text


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
    fast = fast[2:]  # `attach` compares a sample with and without padding first
    assert len(plain) == len(fast)
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
        attach.attach(accelerator, cfg, task.model, task.train, task.loss_sum, total_steps=1)
        positions = []
        linear = next(m for name, m in task.model.named_modules() if name.endswith("layer.1.intermediate.dense"))
        linear.register_forward_hook(lambda module, inputs, output, seen=positions: seen.append(output.shape[:-1].numel()))
        results[padding_free_option] = task.evaluate(task.model), positions
        lengths = [len(ids) for ids in task.eval_rows["input_ids"]]
    batches = [lengths[start : start + 16] for start in range(0, 50, 16)]
    assert results["on"][1] == [sum(batch) for batch in batches]
    assert results["off"][1] == [len(batch) * max(batch) for batch in batches]
    assert results["on"][0] == pytest.approx(results["off"][0], rel=1e-5)
