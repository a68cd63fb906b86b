"""Packed and padded are two ways to one result; so are a loss with and without a table of scores."""

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
from accel_ddp.speed import attach, autobatch, flops, linear_cross_entropy, padding_free
from accel_ddp.speed import padding_free_model as packs
from accel_ddp.training import losses
from accel_ddp.training.stream import Batch, Counted, Shuffle, TrainBatches, _dealt_out, _GlobalMicroBatches, _rounded, sized
from tests.conftest import PROGRAMS, ROOT, clean_environment, rank_environments, run_all, run_ranks

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
    return sized(Counted(lambda _: rows)([]), torch.device("cpu"))


def loss_of(model, batch):
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    if scores.ndim == 2:
        return losses.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[1])
    labels = batch["labels"]
    return losses.of_tokens(scores, torch.where(labels < 0, -100, labels % scores.shape[-1]))


def computed(model, batch, loss=loss_of):
    model.zero_grad()
    with padding_free.using(batch):
        value = loss(model, batch)
    value.backward()
    return value.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(a, b):
    """Of losses per item and of gradients, the largest difference as a share of the largest value of each."""
    assert all(bool(gradient.isfinite().all()) for _, gradients in (a, b) for gradient in gradients.values())
    sizes = {name: max(float(gradient.abs().max()), 1e-3) for name, gradient in a[1].items()}
    return max(abs(a[0] - b[0]) / abs(a[0]), *(float((a[1][n] - b[1][n]).abs().max()) / sizes[n] for n in a[1]))


def rows_of(packed, model, batch):
    """How many tokens each layer is given in one pass."""
    seen, calls = [], packed.calls
    packed.run = lambda number, hidden, args, kwargs: seen.append(hidden.shape[1]) or calls[number](hidden, *args, **kwargs)
    computed(model, batch)
    packed.run = None
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_give_the_same_loss_and_gradients(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()  # without dropout, which draws for other places
    batch = a_batch()
    padded = computed(model, batch)
    packed = packs.Packed(model)
    packed.install()
    assert packed.holds_for(lambda batch: loss_of(model, batch), batch, 1e-4) == ""
    found = computed(model, batch)
    assert rows_of(packed, model, batch) == [sum(LENGTHS)] * 3, "it was not packed"
    assert apart(padded, found) < 1e-5
    other = a_batch(seed=1)
    assert apart(padded, computed(model, other)) > 1e-2, "the measure sees no difference at all"
    packed.remove()
    assert apart(padded, computed(model, batch)) == 0


def test_texts_of_a_row_do_not_see_each_other():
    """Not by a comparison of sums: the scores of a text do not change when its neighbours do."""
    model = KINDS["llama"]().eval()
    packed = packs.Packed(model)
    packed.install()
    first, second = a_batch(seed=0), a_batch(seed=1)
    second["input_ids"][1] = first["input_ids"][1]
    with torch.no_grad():
        scores = []
        for batch in (first, second):
            with padding_free.using(batch):
                scores.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
    assert torch.equal(scores[0][1, :17], scores[1][1, :17])
    assert not torch.equal(scores[0][3], scores[1][3])


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_given_what_the_one_before_gave(kind):
    """Else their kernels could not be recorded together."""
    model = KINDS[kind]()
    packed, given = packs.Packed(model), []

    def run(number, hidden, args, kwargs):
        out = packed.calls[number](hidden, *args, **kwargs)
        given.append((hidden, out))
        return out

    packed.install()
    packed.run = run
    batch = a_batch()
    with padding_free.using(batch):
        loss_of(model, batch)
    assert len(given) == 3
    assert all(after[0] is before[1] for before, after in itertools.pairwise(given))


def test_what_cannot_be_packed_is_padded_and_says_why():
    t5 = transformers.T5Config(d_model=32, num_layers=2, num_heads=4, d_ff=64, vocab_size=100, d_kv=8)
    for model, why in (
        (transformers.T5ForConditionalGeneration(t5), "2 stacks"),
        (nn.Linear(2, 2), "no model of transformers"),
        (transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, layerdrop=0.5)), "layerdrop"),
        (KINDS["bert"]().to(torch.float32), ""),
    ):
        if isinstance(model, transformers.BertForSequenceClassification):
            model.set_attn_implementation("eager")
            why = "eager"
        with pytest.raises(padding_free.Unpackable, match=why):
            packs.Packed(model)
    # A window that is shorter than the texts: computed with padding, and right.
    config = transformers.MistralConfig(**SHAPE, **POSITIONS, num_key_value_heads=2, sliding_window=8)
    model = transformers.MistralForCausalLM(config).eval()
    batch = a_batch()
    padded = computed(model, batch)
    packs.Packed(model).install()
    assert apart(padded, computed(model, batch)) == 0
    # A first token that is padding: what a classifier reads there is nothing, and not the same nothing.
    model = KINDS["bert"]().eval()
    packed = packs.Packed(model)
    packed.install()
    assert "something else" in packed.holds_for(lambda batch: loss_of(model, batch), a_batch("left"), 1e-4)


def test_a_model_that_loses_what_its_layers_are_given_is_not_packed():
    """Texts would see each other, which the loss of a new model hardly shows."""
    config = transformers.StableLmConfig(**SHAPE, **POSITIONS, num_key_value_heads=2)
    model = transformers.StableLmForCausalLM(config).eval()
    packed = packs.Packed(model)
    packed.install()
    assert "does not hand on" in packed.holds_for(lambda batch: loss_of(model, batch), a_batch(), 1e-4)


def test_what_hidden_states_show_is_not_hidden_by_a_loss(monkeypatch):
    """Attention that sees its neighbours, in a model whose loss of one batch is nearly the same."""
    model = KINDS["bert"]().eval()
    packed = packs.Packed(model)
    packed.install()

    def leaks(module, query, key, value, *_, **__):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, padding_free.NAME, leaks)
    assert "something else" in packed.holds_for(lambda batch: loss_of(model, batch).detach() * 0 + 1, a_batch(), 1e-4)


def test_a_cache_is_left_out_and_generating_is_not_packed():
    """Decoders hand a cache to their layers unless they are told not to; a recording must not meet it."""
    config = transformers.Qwen2Config(**SHAPE, **POSITIONS, num_key_value_heads=2, num_labels=3, pad_token_id=0)
    model = transformers.Qwen2ForSequenceClassification(config).train()
    packed = packs.Packed(model)
    packed.install()
    given = []
    packed.run = lambda number, hidden, args, kwargs: given.append(kwargs) or packed.calls[number](hidden, *args, **kwargs)
    computed(model, a_batch())
    assert given
    assert all(kwargs["past_key_values"] is None for kwargs in given)
    model = KINDS["llama"]().eval()
    packs.Packed(model).install()
    computed(model, a_batch())
    assert model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_adapters_and_copies_of_a_packed_model():
    import copy

    import peft

    torch.manual_seed(0)
    base = KINDS["llama"]()
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    model.eval()
    batch = a_batch()
    padded = computed(model, batch)
    packed = packs.Packed(model)
    packed.install()
    assert apart(padded, computed(model, batch)) < 1e-5
    assert rows_of(packed, model, batch) == [sum(LENGTHS)] * 3
    assert model.generate(input_ids=torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert copy.deepcopy(model).merge_and_unload() is not None
    work = flops.Work(model)
    frozen = [m for name, m in model.named_modules() if type(m) is nn.Linear and ".layers." in name]
    assert work.per_token == sum((6 if m.weight.requires_grad else 4) * m.weight.numel() for m in frozen)


def test_a_call_with_another_mask_than_the_batch_has_is_not_packed():
    model = KINDS["bert"]().eval()
    packed = packs.Packed(model)
    packed.install()
    with padding_free.using(a_batch()):
        other = a_batch(lengths=[30, 30, 30, 30, 30])  # more tokens than the row has room for
        packed.run = lambda *_: pytest.fail("it was packed")
        loss_of(model, other)


def test_gradient_checkpointing_computes_the_same_packed():
    model = KINDS["llama"]().train()
    batch = a_batch()
    packed = packs.Packed(model)
    packed.install()
    straight = computed(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert apart(straight, computed(model, batch)) < 1e-6
    assert rows_of(packed, model, batch) == [sum(LENGTHS)] * 6, "each layer once more in the backward pass"
    with pytest.raises(RuntimeError, match="--padding_free off"):
        computed(model, batch, lambda model, batch: loss_of(model, batch) + loss_of(model, batch))


def test_a_small_table_has_the_gradient_of_an_embedding():
    table, places = torch.randn(3, 8, dtype=torch.double, requires_grad=True), torch.randint(0, 3, (4, 5))
    weight = torch.randn(4, 5, 8, dtype=torch.double)
    (ours,) = torch.autograd.grad((packs._SmallTable.apply(places, table) * weight).sum(), table)
    (theirs,) = torch.autograd.grad((F.embedding(places, table) * weight).sum(), table)
    assert torch.allclose(ours, theirs, atol=1e-12)


# ----------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize("softmax", [linear_cross_entropy.plain_softmax, linear_cross_entropy.fused_softmax])
def test_a_loss_in_pieces_is_that_of_the_whole_table(monkeypatch, softmax):
    monkeypatch.setattr(heads, "PIECE", 300 * 130)
    monkeypatch.setattr(heads, "softmax", softmax)
    torch.manual_seed(0)
    values = [torch.randn(*size, dtype=torch.double, requires_grad=True) for size in ((700, 32), (130, 32), (130,))]
    labels = torch.where(torch.arange(700) % 5 == 0, -100, torch.randint(0, 130, (700,)))
    whole = F.cross_entropy(values[0] @ values[1].T + values[2], labels, reduction="sum")
    pieces = linear_cross_entropy.linear_cross_entropy(*values, labels)
    assert abs(whole.item() - pieces.item()) < 1e-9
    with torch.no_grad():
        assert linear_cross_entropy.linear_cross_entropy(*values, labels).item() == pieces.item()
    for a, b in zip(torch.autograd.grad(whole * 0.3, values), torch.autograd.grad(pieces * 0.3, values)):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_micro_batch_without_labels_has_a_loss_of_nothing():
    model = KINDS["llama"]().eval()
    batch = a_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    batch = sized(Counted(lambda _: {**inputs, "labels": torch.full_like(batch["labels"], -100)})([]), torch.device("cpu"))
    head = linear_cross_entropy.OutputHead(model)
    value, gradients = computed(model, batch, lambda model, batch: head.loss_sum(model, inputs, batch["labels"], batch))
    assert value == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["llama", "bert masked"])
def test_a_head_that_is_left_out_gives_the_same_loss_and_gradients(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    batch = a_batch()
    labels = losses.next_tokens(batch["labels"])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    whole = computed(model, batch, lambda model, batch: losses.of_tokens(model(**inputs).logits, labels))
    head = linear_cross_entropy.OutputHead(model)
    left_out = computed(model, batch, lambda model, batch: head.loss_sum(model, inputs, labels, batch))
    assert head.is_all
    assert apart(whole, left_out) < 1e-5


def test_a_head_with_something_after_it_is_not_left_out():
    config = transformers.Gemma2Config(**SHAPE, **POSITIONS, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    batch = a_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    head = linear_cross_entropy.OutputHead(model)
    labels = losses.next_tokens(batch["labels"])
    assert torch.equal(head.loss_sum(model, inputs, labels, batch), losses.of_tokens(model(**inputs).logits, labels))
    assert head.is_all is False


# --------------------------------------------------------------------------------------- the stream


@pytest.mark.parametrize(("micro", "count", "ranks"), [(4, 2, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_a_step_has_the_same_items_however_they_are_dealt_out(micro, count, ranks):
    lengths = np.random.default_rng(0).integers(1, 500, 100)
    stream = iter(_GlobalMicroBatches(Shuffle(100, 0), 3, micro, count, ranks, lengths))
    for step in range(3, 12):
        items = [item for _ in range(count) for item in next(stream)]
        assert sorted(items) == list(enumerate(Shuffle(100, 0).items(step * 8, 8), start=step * 8))


def test_micro_batches_of_a_step_have_about_as_many_tokens():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.6, 4096), 8, 512).astype(int)
    items = [(i, i) for i in range(256)]
    sums = lambda dealt: np.array([lengths[[i for _, i in dealt[start : start + 32]]].sum() for start in range(0, 256, 32)])
    assert np.ptp(sums(_dealt_out(items, lengths, 8))) < 0.1 * np.ptp(sums(items))


def test_there_are_few_lengths_of_rows_and_little_is_added():
    rows = {number: _rounded(number) for number in range(1, 20_000)}
    assert all(row - number >= 0 for number, row in rows.items())
    assert all(row - number < number / 4 for number, row in rows.items() if number > 512)
    assert len(set(rows.values())) < 90


def test_lengths_are_known_where_rows_are_of_a_table():
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in LENGTHS]})
    assert TrainBatches(rows, lambda rows: rows).lengths.tolist() == LENGTHS
    assert TrainBatches(rows.select([3, 0]), lambda rows: rows).lengths.tolist() == [30, 3]
    assert TrainBatches([1, 2], lambda rows: rows).lengths is None


# ------------------------------------------------------------------------------------- how much it is


def test_whether_compiling_pays_is_a_matter_of_tokens():
    """Of a whole run: of lengths that are known, and of a sample where they are not."""
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n} for n in (10, 20, 30, 40)] * 20

    def collate(rows):
        return {
            name: nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
            for name in ("input_ids", "attention_mask")
        }

    accelerator, cfg, needed = Accelerator(cpu=True), TrainConfig(global_batch_size=32), attach.TOKENS_THAT_PAY / (32 * 25 * 12)
    for data, is_known in ((datasets.Dataset.from_list(rows), True), (rows, False)):
        train = TrainBatches(data, collate)
        assert (train.lengths is not None) == is_known
        assert not attach._pays(accelerator, cfg, train, 12, math.floor(needed))
        assert attach._pays(accelerator, cfg, train, 12, math.ceil(needed))


def test_tokens_of_a_model_with_two_stacks_are_those_of_both():
    t5 = transformers.T5Config(d_model=32, num_layers=2, num_heads=4, d_ff=64, vocab_size=100, d_kv=8)
    batch = a_batch()
    for model, tokens in ((KINDS["bert"](), sum(LENGTHS)), (transformers.T5ForConditionalGeneration(t5), 2 * sum(LENGTHS))):
        assert attach.Speed(model, TrainConfig()).work_of([batch])[0] == tokens


def test_operations_are_counted_as_by_hand():
    """BERT-base and a 135M decoder: by hand, and by torch's own counter on what is computed."""
    with torch.device("meta"):
        bert = transformers.BertForSequenceClassification(transformers.BertConfig())
        shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=1536, vocab_size=49152))
    layer = 4 * 768 * 768 + 2 * 768 * 3072
    assert flops.Work(bert).of(tokens=512, squares=512**2, targets=0, texts=1) == (
        6 * 12 * layer * 512 + 3 * 12 * 2 * 2 * 512**2 * 768 + 6 * (768 * 768 + 768 * 2)
    )
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    attention = 3 * 30 * 2 * 2 * 9 * 64 * (100**2 + 20**2) / 2  # half of a square is above the diagonal
    assert flops.Work(llama).of(tokens=120, squares=100**2 + 20**2, targets=118, texts=2) == pytest.approx(
        6 * (30 * layer * 120 + 576 * 49152 * 118) + attention
    )


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_operations_are_those_that_torch_counts(kind):
    from torch.utils.flop_counter import FlopCounterMode

    model = KINDS[kind]().eval()
    batch = a_batch(lengths=[20, 20, 20])  # nothing is padded
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        computed(model, batch)
    work = flops.Work(model)
    ours = work.of(60, 3 * 20**2, 60, 3)
    if kind == "llama":
        ours += work.per_square * 3 * 20**2  # torch counts what lies above the diagonal too
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_peak_of_a_gpu_is_known_by_its_name():
    assert flops.peak("NVIDIA H200", torch.bfloat16) == 989e12
    assert flops.peak("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert flops.peak("NVIDIA L4", torch.float16) == 121e12
    assert flops.peak("Some GPU", torch.bfloat16) is None


# --------------------------------------------------------------------------------------- as options


def test_a_run_says_how_fast_it_is_and_finds_its_micro_batch(tmp_path):
    """Two ranks with `auto` and one with a number learn the same; tokens in the log are those of the data."""
    options = ["--steps", "3", "--max_train_items", "60", "--max_eval_items", "8", "--no_dropout", "--log_every", "1"]
    options += ["--model", "builtin:tiny-llama", "--global_batch_size", "12"]
    sft = ROOT / "recipes" / "sft.py"
    auto = run_ranks(2, sft, *options, "--micro_batch_size", "auto", "--output_dir", tmp_path / "auto").well()
    assert "--micro_batch_size auto: 6 x 1 micro-batch per rank" in auto.text
    one = run_ranks(1, sft, *options, "--micro_batch_size", "4", "--padding_free", "off", "--output_dir", tmp_path / "one").well()
    assert "texts are packed" in auto.text
    assert "texts are packed" not in one.text
    logs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").open()] for name in ("auto", "one")]
    updates = [[event for event in log if event["event"] == "update"] for log in logs]
    for a, b in zip(*updates):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["tokens"] == b["tokens"] > a["items"] == b["items"]
        assert a["tflops"] > 0
    assert "tokens/s" in auto.text


def test_a_rehearsal_does_not_disturb_ddp():
    """With --static_graph DDP counts gradients; one that it did not expect, and it never sends any again."""
    ended = run_all([[sys.executable, PROGRAMS / "rehearses.py"]] * 2, rank_environments(2)).well()
    assert ended.text.count("alike") == 2


def test_the_largest_size_is_found_by_doubling_and_halving():
    """With a GPU that is told to hold so many items."""

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


def test_what_was_asked_for_and_is_not_possible_is_said(tmp_path):
    options = ["--steps", "1", "--max_train_items", "20", "--max_eval_items", "4", "--no_eval_first"]
    command = [sys.executable, ROOT / "recipes" / "seq2seq.py", *options, "--padding_free", "on", "--compile", "on"]
    text = run_all([[*command, "--output_dir", tmp_path / "run"]], [clean_environment()]).well().text
    assert "--padding_free on: not possible: the model has 2 stacks of layers. Texts are padded." in text
    assert "--compile on: not possible: there is no GPU." in text


def test_a_micro_batch_is_a_number_or_auto():
    assert parse_config(TrainConfig, ["--micro_batch_size", "auto"]).split(2) == (16, 1)
    assert parse_config(TrainConfig, ["--micro_batch_size", "4"]).split(2) == (4, 4)
    with pytest.raises(UserError, match="micro_batch_size 0"):
        parse_config(TrainConfig, ["--micro_batch_size", "0"])
