"""Load models on sharded ranks, and compare every tensor with the same model on one rank: `sharded_loading.py FOLDER`.

FOLDER contains the models that tests/test_sharded_loading.py makes. Each rank prints the differences, and a list in JSON.
"""

import json
import re
import sys
from pathlib import Path

import torch
import transformers

from accel_ddp.accelerator import start
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.shards import full, is_sharded, local
from accel_ddp.sources import models
from accel_ddp.training import optim

FOLDER = Path(sys.argv[1])
HEAD = {"num_labels": 5, "ignore_mismatched_sizes": True}
MORE_TOKENS = "builtin:all-MiniLM-L6-v2"  # its tokenizer has 30,522 tokens
# The name of the model, the class, options of the recipe, options of `load`, the task of adapters.
CASES = {
    "tied, several files of bf16": ("llama", "CausalLM", {}, {}, ""),
    "16 bits": ("llama", "CausalLM", {"dtype": "bfloat16"}, {}, ""),
    "new adapters": ("llama", "CausalLM", {"lora_r": 4, "gradient_checkpointing": True}, {}, "CAUSAL_LM"),
    "frozen": ("llama", "CausalLM", {"freeze": ("layers.0.", "embed")}, {}, ""),
    "tied, but two different tables in the file": ("untied", "CausalLM", {}, {}, ""),
    "more tokens": ("llama", "CausalLM", {}, {"tokenizer": MORE_TOKENS}, ""),
    "more tokens, tied biases": ("bert-mlm", "MaskedLM", {}, {"tokenizer": MORE_TOKENS}, ""),
    "tied biases": ("bert-mlm", "MaskedLM", {}, {}, ""),
    "new head": ("bert", "SequenceClassification", {}, HEAD, ""),
    "new head and adapters": ("bert", "SequenceClassification", {"lora_r": 2}, HEAD, "SEQ_CLS"),
    "given head and adapters": ("bert-head", "SequenceClassification", {"lora_r": 2}, {}, "SEQ_CLS"),
    "adapters of a folder": ("adapters", "SequenceClassification", {}, {}, "SEQ_CLS"),
    "adapters of a folder, other labels": ("adapters", "SequenceClassification", {}, HEAD, "SEQ_CLS"),
    "encoder and decoder": ("t5", "Seq2SeqLM", {}, {}, ""),
    "experts": ("mixtral", "CausalLM", {}, {}, ""),
    "other labels": ("vit", "ImageClassification", {}, HEAD, ""),
    "no safetensors": ("gpt2-bin", "CausalLM", {}, {}, ""),
    "all weights are new": ("new", "CausalLM", {}, {}, ""),
}


def build(case: str, accelerator, plan) -> torch.nn.Module:
    name, kind, options, more, task = CASES[case]
    cfg = RecipeConfig(model=str(FOLDER / name), **options)
    if "tokenizer" in more:
        more = {"tokenizer": models.load_tokenizer(RecipeConfig(model=more["tokenizer"]))}
    accelerator.sharding_plan = plan
    torch.manual_seed(1)
    model = models.load(getattr(transformers, f"AutoModelFor{kind}"), cfg, plan=plan, **more)
    return models.prepare(model, cfg, accelerator, task)


def outputs(model: torch.nn.Module, case: str) -> torch.Tensor:
    tokens = torch.arange(12).view(2, 6)
    inputs = (
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)} if case == "other labels" else {"input_ids": tokens}
    )
    if case == "encoder and decoder":
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model.eval()(**inputs).logits.float()


def differences(case: str, accelerator, plan) -> list[str]:
    """Return what is different between the model on this rank and the sharded model."""
    found = build(case, accelerator, plan)
    after = torch.get_rng_state()
    expected = build(case, accelerator, None)
    lines = [] if torch.equal(after, torch.get_rng_state()) else ["the state of the generator"]
    lines += [] if is_sharded(found) else ["it is not sharded"]
    all_of = lambda model: dict(model.named_parameters(remove_duplicate=False))
    ours, theirs = all_of(found), all_of(expected)
    shared = lambda tensors: sorted(sorted(n for n, q in tensors.items() if q is p) for p in set(tensors.values()))
    lines += [] if shared(ours) == shared(theirs) else ["other tied weights"]
    for name, tensor in theirs.items():
        if ours[name].requires_grad != tensor.requires_grad or ours[name].dtype != tensor.dtype:
            lines.append(f"{name} is {ours[name].dtype}, trained: {ours[name].requires_grad}")
        if not torch.equal(full(ours[name].detach()), tensor):
            lines.append(f"the values of {name}")
        if local(ours[name]).untyped_storage().nbytes() > 0.6 * tensor.nbytes and len(tensor) > 1:
            lines.append(f"the memory of {name}")
    ours, theirs = dict(found.named_buffers()), dict(expected.named_buffers())
    lines += [f"the buffer {name}" for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    optim.build(found, RecipeConfig(freeze=CASES[case][2].get("freeze", ())))
    if not torch.allclose(outputs(found, case), outputs(expected, case), atol=1e-5):
        lines.append("the outputs")
    return lines


def memory(field: str) -> float:
    """Return a number of /proc/self/status in MB."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3


def growth(accelerator, plan) -> float:
    """Return by how many MB the memory of this rank grew at most while a model was loaded and sharded."""
    accelerator.sharding_plan = plan
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    model = models.load(transformers.AutoModelForCausalLM, RecipeConfig(model=str(FOLDER / "big")), plan=plan)
    models.prepare(model, RecipeConfig(), accelerator)
    return memory("VmHWM") - before


def refusals(plan) -> list[str]:
    """Return the messages for models that cannot be loaded, each after all ranks have agreed on it."""
    messages = []
    for kind, options in (
        ("CausalLM", {"model": str(FOLDER / ("damaged" if this_rank.rank else "llama"))}),
        ("SequenceClassification", {"model": str(FOLDER / "pissa")}),
    ):
        try:
            models.load(getattr(transformers, f"AutoModelFor{kind}"), RecipeConfig(**options), plan=plan)
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    accelerator = start(RecipeConfig(output_dir=str(FOLDER / "run")))
    plan = accelerator.sharding_plan
    first, *others = CASES
    result = {first: differences(first, accelerator, plan)}  # this imports what the first model needs
    peak = growth(accelerator, plan)
    result |= {case: differences(case, accelerator, plan) for case in others}
    differing = {case: lines for case, lines in result.items() if lines}
    print("RESULT " + json.dumps({"differences": differing, "peak": peak, "errors": refusals(plan)}), flush=True)
