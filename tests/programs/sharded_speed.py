"""Train small Llamas sharded, with DDP and in a plain loop of one rank. Rank 0 writes the differences as JSON to OUT."""

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import base  # in this folder
import sharded_branches
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine import losses
from accel_ddp.engine.rehearsal import rehearse
from accel_ddp.engine.rows import Collate, accept_rows
from accel_ddp.engine.step import train_step
from accel_ddp.engine.terms import Terms
from accel_ddp.entry import run
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.ranks.shards import full
from accel_ddp.speed import linear_cross_entropy
from accel_ddp.training import optim, sharding
from accel_ddp.training.sharding import prepare, sharding_options

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
STEPS, MICRO_BATCHES = 3, 2


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    compiled: bool = False  # also with compiled layers
    optimizer: str = "sgd"  # AdamW enlarges rounding errors where a gradient consists of them
    lr: float = 0.3
    momentum: float = 0.9
    max_grad_norm: float = 1.0


PLAIN = ShardingPlan()


@dataclass
class Case:
    tied: bool = False
    lora: tuple[str, ...] = ()  # names of the layers that get adapters
    in_fit: bool = False  # sharded when its optimizer exists already, as a model that is not of transformers
    checkpointing: bool = False
    compiled: bool = False
    broken_compiler: bool = False  # of the last rank, in its second layer
    plan: ShardingPlan | None = PLAIN  # None: DDP
    precision: str = "no"
    keep: str = "auto"  # --keep_gathered
    of_rows: bool = False  # the loss is computed from the log-probabilities of rows


CASES = {
    "sharded": Case(),
    "weights kept": Case(keep="weights"),
    "gradients kept": Case(keep="gradients"),
    "ddp": Case(plan=None),
    "tied": Case(tied=True, plan=ShardingPlan(reshard_after_forward=False), of_rows=True),
    "checkpointed": Case(tied=True, checkpointing=True),
    "lora": Case(lora=("q_proj", "down_proj"), of_rows=True),
    "lora on the head": Case(lora=("v_proj", "lm_head")),
    "in fit": Case(in_fit=True, plan=ShardingPlan(activation_checkpointing=True)),
    "offloaded": Case(plan=ShardingPlan(cpu_offload=True), of_rows=True),
    "broken compiler": Case(broken_compiler=True),
    "bf16": Case(precision="bf16", keep="gradients"),
    "bf16 ddp": Case(plan=None, precision="bf16"),
    "compiled": Case(compiled=True),
}


class Rows(torch.utils.data.Dataset):
    """Texts of very different lengths, of which a part is learned. The ranks have different numbers of learned tokens."""

    def __init__(self):
        drawn = torch.Generator().manual_seed(1)
        lengths = [3, 17, 30, 5, 9, 2, 26, 11, 4, 21, 8, 13]
        self.rows = [torch.randint(0, 90, (length,), generator=drawn) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(texts):
    labels = [torch.where(torch.arange(len(ids)) < len(ids) // 3, -100, ids) for ids in texts]
    make = Collate(("labels",), is_causal=True)
    return make([{"input_ids": ids, "labels": of_text} for ids, of_text in zip(texts, labels)])


def indices(step: int, rank: int, number: int) -> list[int]:
    first = ((step * 2 + rank) * MICRO_BATCHES + number) * 3
    return [i % 12 for i in range(first, first + 2 + rank)]  # rank 1 has more texts


def count(batch) -> int:
    return batch.targets


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, vocab_size=90, tie_word_embeddings=case.tied, initializer_range=0.2, attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(case.lora)))
    return model


def train_alone(case: Case, cfg: Config, train, accelerator) -> dict[str, torch.Tensor]:
    """Train in float32 on all micro-batches of all ranks, with padding, and with all logits."""
    model = build(dataclasses.replace(case, checkpointing=False))
    optimizer = optim.build(model, cfg)
    accept_rows(model)
    for step in range(STEPS):
        places = [indices(step, rank, number) for rank in range(this_rank.num_ranks) for number in range(MICRO_BATCHES)]
        batches = [train.batch_of(some, accelerator, cfg) for some in places]
        sums = [losses.cross_entropy(model(b).logits[0], b["labels"]) for b in batches]
        (sum(sums) / sum(map(count, batches))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def train_together(case: Case, cfg: Config, train, accelerator) -> tuple[dict[str, torch.Tensor], dict]:
    """Train as `fit` does. Return the trained weights, and what was found on the way."""
    links.sharding = accelerator.sharding_plan = case.plan
    facts = {}
    cfg = dataclasses.replace(cfg, gradient_checkpointing=case.checkpointing, keep_gathered=case.keep)
    model = build(case)
    if case.plan and not case.in_fit:
        sharding.shard(model, case.plan, *sharding_options(accelerator, cfg))
    head = linear_cross_entropy.OutputHead(model)

    def compute(model, batch):
        total = -head.text_logps(model, batch).sum() if case.of_rows else head.loss_sum(model, batch)
        return {"loss": (total, count(batch))}

    task = base.Task(compute, count=count)
    alone = Terms(model, task)

    optimizer = optim.build(model, cfg)
    speed = accel_ddp.attach(accelerator, cfg, alone, train, STEPS)
    facts["padding-free"] = speed.padding_free is not None
    facts["flops"] = speed._flops.count(100, 1000, 50, 4)
    if case.compiled:
        # Inductor needs a compiler, and minutes. The graph breaks and the guards are those of the other backend too.
        layers = speed.padding_free
        layers.calls = [torch.compile(call, dynamic=True, backend="aot_eager", fullgraph=True) for call in layers.calls]
    terms, optimizer = prepare(accelerator, cfg, task, model, optimizer)
    if case.broken_compiler:
        facts["warm-up"] = warm_up_with_broken_compiler(speed)
    model.train()
    sample = train.batch_of(indices(0, this_rank.rank, 0), accelerator, cfg)
    if case.plan:
        rehearse(alone, sample)
        with torch.no_grad():  # an evaluation
            facts["loss"] = float(alone(sample)["loss"][0])
        facts["failed"] = fails(alone, sample)
        sharding.reshard(model)
        facts["is sharded"] = all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    for step in range(STEPS):
        own = [train.batch_of(indices(step, this_rank.rank, number), accelerator, cfg) for number in range(MICRO_BATCHES)]
        with collectives_counted() as facts["sent"]:
            stats = train_step(accelerator, cfg, terms, optimizer, own, seed=step)
    facts["grad norm"] = float(stats.grad_norm)
    sharding.reshard(model)
    return {name: full(p.detach()) for name, p in model.named_parameters() if p.requires_grad}, facts


@contextlib.contextmanager
def collectives_counted():
    """Count how often a sharded model gathers weights and sums gradients inside the block."""
    is_new = hasattr(dist, "all_gather_single")  # torch 2.13 uses new names
    names = ("all_gather_single", "reduce_scatter_single") if is_new else ("all_gather_into_tensor", "reduce_scatter_tensor")
    found = dict.fromkeys(names, 0)
    before = {name: getattr(dist, name) for name in found}

    def counting(name):
        def call(*args, **kwargs):
            found[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in found:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def warm_up_with_broken_compiler(speed) -> list[bool]:
    """Do the warm-up while the compiler of one rank raises an error. Return for each rank whether its layers are compiled."""

    def install() -> None:  # inductor would take minutes
        layers = speed.padding_free
        speed.plain_calls, layers.calls = layers.calls, list(layers.calls)
        if this_rank.rank == this_rank.num_ranks - 1:
            layers.calls[1] = lambda *args, **kwargs: 1 / 0

    speed._install_compiled_layers, speed.cfg = install, dataclasses.replace(speed.cfg, compile="on")
    speed.choose_compilation(0)
    speed.compile_layers()
    return gather_everywhere(speed.describe()["compiled"])


def fails(terms, batch) -> bool:
    """Let a forward pass raise an error in its second layer, and make the model usable again. Return whether it did."""
    layer = next(module for module in terms.modules() if isinstance(module, nn.ModuleList))[1]
    hook = layer.mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        terms(batch)
    except ZeroDivisionError:
        sharding.recover(terms.model)
        return True
    finally:
        hook.remove()
    return False


def difference(some: dict, others: dict) -> float:
    assert some.keys() == others.keys()
    return max(float((value - others[name]).abs().max()) for name, value in some.items())


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    train = accel_ddp.TrainBatches(Rows(), collate)
    found, weights = {}, {}
    for name, case in CASES.items():
        if case.compiled and not cfg.compiled:
            continue
        if case.precision != accelerator.mixed_precision:
            AcceleratorState._reset_state()
            accelerator = Accelerator(mixed_precision=case.precision, cpu=True)
        weights[name], found[name] = train_together(case, cfg, train, accelerator)
        if name == "bf16 ddp":
            found["bf16"]["to ddp"] = difference(weights["bf16"], weights[name])
        else:
            found[name]["to one rank"] = difference(weights[name], train_alone(case, cfg, train, accelerator))
    start = {name: p.detach() for name, p in build(Case()).named_parameters()}
    found["learned"] = difference(start, weights["sharded"])
    found["to ddp"] = difference(weights["sharded"], weights["ddp"])
    found["to weights kept"] = difference(weights["sharded"], weights["weights kept"])
    found["branches"] = sharded_branches.compare(accelerator)
    if this_rank.is_main:
        Path(cfg.out).write_text(json.dumps(found))


if __name__ == "__main__":
    run(Config, main)
