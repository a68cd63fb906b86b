"""How much faster the layers of model families are: samples/s with padding, without, captured as CUDA graphs, and compiled.

    python benchmarks/families.py                                  # on one GPU, in bf16, models of 12 layers of 768
    python benchmarks/families.py --kinds bart t5 --modes padded graphs
    python benchmarks/families.py --tiny                           # on a CPU, to try the program out

Weights are random and texts synthetic. A step is a forward and a backward pass of one micro-batch, without an optimizer.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as hf
from accelerate import Accelerator

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine import losses
from accel_ddp.engine.rows import Collate
from accel_ddp.engine.terms import Terms
from accel_ddp.speed.attach import attach
from accel_ddp.training.stream import TrainBatches

MODES = {"padded": ("off", "off"), "padding-free": ("on", "off"), "graphs": ("auto", "graphs"), "compiled": ("auto", "on")}
SEQ2SEQ, CLASSES = ("bart", "t5"), ("bert", "modernbert", "deberta", "vit")
VOCABULARY = 32_000


def shapes(tiny: bool) -> dict[str, Callable[[], Any]]:
    """Return a function for each kind that builds its model."""
    size, layers, heads, inner = (64, 2, 2, 128) if tiny else (768, 12, 12, 3072)
    shape = {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    text = {**shape, "vocab_size": VOCABULARY}
    half = {"num_key_value_heads": heads // 2, "head_dim": size // heads, "sliding_window": 128}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "vocab_size": VOCABULARY}
    parts = {"layers": layers // 2, "attention_heads": heads, "ffn_dim": inner}
    bart = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in parts.items()}
    t5 = {"num_layers": layers, "num_heads": heads, "d_kv": size // heads, "d_ff": inner}
    deberta = {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm",
               "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
    linear = {"linear_num_value_heads": heads, "linear_num_key_heads": heads, "linear_key_head_dim": size // heads}
    linear |= {"linear_value_head_dim": size // heads, "head_dim": size // heads, "num_key_value_heads": heads // 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": inner // 4}
    return {
        "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**text)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**text, num_key_value_heads=heads // 2, head_dim=size // heads)),
        "qwen3.5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**text, **linear)),
        "gpt-oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**text | half | experts)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**text, **half)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**text, **half)),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**{**text, "intermediate_size": inner // 4}, num_key_value_heads=heads // 2, num_local_experts=8)
        ),
        "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(d_model=size, **bart, **special, forced_eos_token_id=2)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(d_model=size, **t5, **special)),
        "modernbert": lambda: hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**text, pad_token_id=0)),
        "deberta": lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**text, **deberta)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**shape, image_size=32 if tiny else 224)),
    }


class Items(torch.utils.data.Dataset):
    def __init__(self, number: int, tiny: bool):
        drawn = np.random.default_rng(0)
        lengths = np.clip(drawn.lognormal(3 if tiny else 5, 0.6, number), 8, 32 if tiny else 512).astype(int)
        self.rows = [torch.from_numpy(drawn.integers(5, VOCABULARY, length)) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i]


def collate(kind: str, tiny: bool) -> Callable[[list[torch.Tensor]], Any]:
    def made(texts: list[torch.Tensor]) -> Any:
        if kind == "vit":
            side = 32 if tiny else 224
            return {
                "pixel_values": torch.randn(len(texts), 3, side, side),
                "labels": torch.tensor([len(ids) % 2 for ids in texts]),
            }
        labels = [len(ids) % 2 if kind in CLASSES else ids[: len(ids) // (4 if kind in SEQ2SEQ else 1)] for ids in texts]
        is_causal = kind not in (*CLASSES, *SEQ2SEQ)
        rows = Collate(("labels",) * is_causal, 0 if tiny else 8, is_causal, target="labels" * (kind in SEQ2SEQ))
        return rows([{"input_ids": ids, "labels": of_text} for ids, of_text in zip(texts, labels)])

    return made


def loss_sum(kind: str) -> Callable[[Any, Any], torch.Tensor]:
    def of_batch(model: Any, batch: Any) -> torch.Tensor:
        if kind == "vit":
            return losses.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])
        if kind in CLASSES:
            return losses.cross_entropy(model(batch).logits, batch["labels"])
        return losses.cross_entropy(model(batch).logits[0], batch.get("target", batch)["labels"])

    return of_batch


def measure(kind: str, mode: str, options: argparse.Namespace) -> tuple[float, float, str]:
    """Return samples/s (median of the steps), the peak of memory in GB, and what was done."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="no" if options.tiny else "bf16", cpu=options.tiny)
    padding_free, compile_option = MODES[mode]
    cfg = TrainConfig(padding_free=padding_free, compile=compile_option, num_workers=0)
    with accelerator.device:
        model, loss = shapes(options.tiny)[kind](), loss_sum(kind)
    train = TrainBatches(Items(options.batch * 4, options.tiny), collate(kind, options.tiny))
    task = SimpleNamespace(terms=lambda model, batch, team: {"loss": (loss(model, batch), 1)}, count=lambda batch: 1)
    speed = attach(accelerator, cfg, Terms(model.train(), task), train, total_steps=1)
    model = accelerator.prepare(model)
    if compile_option == "on":
        speed.choose_compilation(0)
        speed.compile_layers()
    firsts = range(0, 4 * options.batch, options.batch)
    batches = [train.batch_of([*range(first, first + options.batch)], accelerator, cfg) for first in firsts]
    seconds = []
    for step in range(4 * options.rounds):
        began = time.monotonic()
        batch = batches[step % 4]
        value = loss(model, batch)
        accelerator.backward(value)
        model.zero_grad()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    gb = torch.cuda.max_memory_allocated() / 1e9 if accelerator.device.type == "cuda" else 0.0
    last = seconds[-8:]  # the first rounds capture graphs or compile
    return options.batch / statistics.mean(last), gb, ", ".join(name for name, done in speed.describe().items() if done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=[*shapes(True)], choices=[*shapes(True)])
    parser.add_argument("--modes", nargs="+", default=["padded", "padding-free", "graphs"], choices=[*MODES])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="each of four micro-batches is computed so many times")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    for kind in options.kinds:
        first = None
        for mode in options.modes:
            try:
                rate, gb, done = measure(kind, mode, options)
            except Exception as error:  # the other models are measured all the same
                print(f"{kind:10} {mode:12} {type(error).__name__}: {error}"[:400], flush=True)
                continue
            first = first or rate
            print(f"{kind:10} {mode:12} {rate:8.1f} samples/s, {rate / first:5.2f} x, {gb:5.1f} GB ({done})", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
