"""The architectures that tests train, from the tables of these tests, and the recipes that can load them."""

import ast
import importlib
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from accel_ddp.nodes import recipe_files
from reference import notice, table

ROOT = Path(__file__).parents[2]
KINDS = {  # of the tables in tests/programs/architectures.py: the heading, and recipes that refuse such models
    "DECODERS": ("Language models", {"pretrain_mlm"}),
    "RECENT": ("Language models of 2025 and 2026", {"pretrain_mlm"}),
    "ENCODERS": ("Encoders", {"sft", "dpo", "reward"}),
    "SEQ2SEQ": ("Encoder-decoder models", {"sft", "dpo", "reward", "pretrain_mlm", "embed"}),
    "IMAGES": ("Image models", set()),
}
HEADS = {"AutoModel": "MODEL", "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"}  # names of transformers' tables
# Well-known models of each architecture. Tests do not download them.
HUB = {
    "Albert": "albert/albert-base-v2",
    "Bamba": "ibm-ai-platform/Bamba-9B-v2",
    "Bart": "facebook/bart-base",
    "Bert": "google-bert/bert-base-uncased, BAAI/bge-base-en-v1.5",
    "BigBird": "google/bigbird-roberta-base",
    "Bloom": "bigscience/bloom-560m",
    "Camembert": "almanach/camembert-base",
    "CodeGen": "Salesforce/codegen-350M-mono",
    "Cohere": "CohereLabs/c4ai-command-r-v01",
    "ConvBert": "YituTech/conv-bert-base",
    "ConvNext": "facebook/convnext-tiny-224",
    "Data2VecText": "facebook/data2vec-text-base",
    "Deberta": "microsoft/deberta-base",
    "DebertaV2": "microsoft/deberta-v3-base",
    "DeepseekV3": "deepseek-ai/DeepSeek-V3",
    "DeiT": "facebook/deit-base-patch16-224",
    "DistilBert": "distilbert/distilbert-base-uncased",
    "Doge": "SmallDoge/Doge-160M",
    "Electra": "google/electra-base-discriminator",
    "Ernie": "nghuyong/ernie-2.0-base-en",
    "Exaone4": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "FNet": "google/fnet-base",
    "Falcon": "tiiuae/falcon-7b",
    "FalconH1": "tiiuae/Falcon-H1-0.5B-Instruct",
    "Funnel": "funnel-transformer/small",
    "GPT2": "openai-community/gpt2",
    "GPTJ": "EleutherAI/gpt-j-6b",
    "GPTNeoX": "EleutherAI/pythia-160m",
    "Gemma": "google/gemma-2b",
    "Gemma2": "google/gemma-2-2b-it",
    "Gemma3": "google/gemma-3-1b-it",
    "Glm4Moe": "zai-org/GLM-4.5-Air",
    "GptOss": "openai/gpt-oss-20b",
    "Granite": "ibm-granite/granite-3.1-2b-instruct",
    "GraniteMoe": "ibm-granite/granite-3.1-1b-a400m-instruct",
    "GraniteMoeHybrid": "ibm-granite/granite-4.0-h-tiny",
    "Jamba": "ai21labs/AI21-Jamba-Mini-1.7",
    "KimiLinear": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "Lfm2": "LiquidAI/LFM2-350M",
    "Llama": "meta-llama/Llama-3.1-8B-Instruct, HuggingFaceTB/SmolLM2-135M-Instruct",
    "Longformer": "allenai/longformer-base-4096",
    "MBart": "facebook/mbart-large-50",
    "MPNet": "sentence-transformers/all-mpnet-base-v2",
    "MT5": "google/mt5-small",
    "Mamba": "state-spaces/mamba-130m-hf",
    "Mamba2": "mistralai/Mamba-Codestral-7B-v0.1",
    "Marian": "Helsinki-NLP/opus-mt-en-de",
    "MiniMaxM3VL": "MiniMaxAI/MiniMax-M3",
    "Ministral3": "mistralai/Ministral-3-3B-Instruct-2512",
    "Mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "Mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "ModernBert": "answerdotai/ModernBERT-base",
    "Mpt": "mosaicml/mpt-7b",
    "Nystromformer": "uw-madison/nystromformer-512",
    "OPT": "facebook/opt-125m",
    "Olmo": "allenai/OLMo-1B-hf",
    "Olmo2": "allenai/OLMo-2-0425-1B",
    "Olmo3": "allenai/Olmo-3-7B-Instruct",
    "OlmoHybrid": "allenai/Olmo-Hybrid-7B",
    "Pegasus": "google/pegasus-xsum",
    "Phi": "microsoft/phi-2",
    "Phi3": "microsoft/phi-4, microsoft/Phi-3-mini-4k-instruct",
    "Qwen2": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen3": "Qwen/Qwen3-8B",
    "Qwen3Moe": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen3Next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen3_5": "Qwen/Qwen3.5-9B",
    "Qwen3_5Moe": "Qwen/Qwen3.5-35B-A3B",
    "RemBert": "google/rembert",
    "RoFormer": "junnyu/roformer_chinese_base",
    "Roberta": "FacebookAI/roberta-base",
    "SmolLM3": "HuggingFaceTB/SmolLM3-3B",
    "SqueezeBert": "squeezebert/squeezebert-uncased",
    "StableLm": "stabilityai/stablelm-2-1_6b",
    "Swin": "microsoft/swin-tiny-patch4-window7-224",
    "T5": "google-t5/t5-small, google/flan-t5-base",
    "ViT": "google/vit-base-patch16-224-in21k",
    "XLMRoberta": "FacebookAI/xlm-roberta-base, BAAI/bge-m3",
    "XLNet": "xlnet/xlnet-base-cased",
}
INTRODUCTION = """The model architectures that the tests train: {all} configurations of {architectures} architectures. {equal} of them
learn the same on one rank and on two, and {refused} are [refused](#refused-models) by default. Any other model that transformers can
load for a task works too if it passes the checks at the start of a run. [Your own data](own_data.md#models) shows how to choose a
model with `--model`.

```bash parsed
accel-ddp run sft --model Qwen/Qwen3-8B --train_file chats.jsonl --lora_r 16
```

- **What the test does** (`pytest -m "slow or not slow" tests/test_architectures.py`): it builds a small model of each architecture with
  random weights and makes two updates on texts of different lengths, with float32 on CPUs. The weights after a plain PyTorch loop on
  one process, on two ranks, and with micro-batches of one item agree to 1e-6. A resumed run has the same bits.
- **What it does not do**: it downloads no model. The Hub names are well-known models of the architecture, not what was trained.
- **recipes** can load the architecture: transformers {version} has the head, and the recipe accepts the kind of model.
- **padding-free**: layers compute no padding, except mixers and attentions of their own ([speed](speed.md)). On GPUs, texts need
  it for CUDA graphs.
- **FSDP**: two ranks with a sharded model learned the same ([FSDP](fsdp.md)).
"""


def page() -> str:
    """Return the page of all architectures."""
    tests = _constants("tests/test_architectures.py")
    programs = _constants("tests/programs/architectures.py")
    parts = ["# Supported models", notice("the tables of `tests/test_architectures.py`")]
    refused = dict(_dependent())
    number = sum(len(programs[kind]) for kind in KINDS)
    numbers = {"all": number + len(programs["SPECIAL"]), "architectures": number, "refused": len(refused)}
    numbers |= {"equal": numbers["all"] - len(refused), "version": version("transformers")}
    parts.append(INTRODUCTION.format(**numbers))
    for kind, (title, refusing) in KINDS.items():
        rows = [
            (
                f"{name} ([refused](#refused-models))" if name in refused else name,
                ", ".join(f"`{one}`" for one in HUB[name].split(", ")),
                ", ".join(_recipes(name, refusing)) or "none",
                "no padding" if kind == "IMAGES" else _yes(tests["PADDED"].get(name)),
                _yes(tests["UNSHARDED"].get(name)),
            )
            for name in programs[kind]
        ]
        parts += [f"## {title}\n", table(("architecture", "models on the Hub", "recipes", "padding-free", "FSDP"), rows)]
    parts += ["## Refused models\n", REFUSED, table(("model", "reason"), refused.items()), INSTEAD]
    return "\n".join(parts)


REFUSED = """The result of these models for one text depends on how far it is padded, so micro-batches and the number of ranks would
change what is learned. A check at the start of a run finds that and refuses the model. `--micro_batch_size 1 --eval_batch_size 1`
trains it without padding, and `--allow_inexact` trains it anyway.
"""
INSTEAD = """A recipe also refuses a model of the wrong kind before training and names one to use instead. For example, `sft` refuses
encoders, because a token would see the answer that it learns.
"""


def _yes(reason: str | None) -> str:
    return f"no ({reason})" if reason else "yes"


def _recipes(name: str, refusing: set[str]) -> list[str]:
    """Return the recipes that load this architecture: transformers lists a class with the recipe's head."""
    found = []
    for recipe in recipe_files.recipe_names():
        head = getattr(getattr(importlib.import_module(recipe), "Task", None), "model_class", "")
        if head and recipe not in refusing and not recipe.startswith("own_"):
            listed = _heads()[HEADS.get(head) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", head.removeprefix("Auto")).upper()]
            if any(re.fullmatch(rf"{name}(?:Text)?(?:For\w+|LMHeadModel|MTModel|Model)", one) for one in listed):
                found.append(recipe)
    return found


@cache
def _heads() -> dict[str, list[str]]:
    """Return the classes that transformers lists for each head, from its source, because the import takes seconds."""
    file = Path(find_spec("transformers").origin).parent / "models/auto/modeling_auto.py"
    found = {}
    for name, block in re.findall(
        r"^(\w+)_MAPPING_NAMES = OrderedDict\(\n(.*?)^\)$", file.read_text(), flags=re.MULTILINE | re.DOTALL
    ):
        found[name] = re.findall(r'"([A-Z]\w+)"', block)
    return found


def _constants(path: str) -> dict:
    """Return the tables of a file without importing it. Only the names of a table's keys are needed where values are expressions."""
    found = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            values = [ast.literal_eval(value) if isinstance(value, ast.Constant) else None for value in node.value.values]
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.value.keys]
            found[target.id] = dict(zip(keys, values))
    return found


def _dependent() -> list[tuple[str, str]]:
    """Return the models that depend on padding, with the reasons in the comments of the test."""
    text = (ROOT / "tests/test_architectures.py").read_text()
    block = text[text.index("DEPENDENT = {") : text.index("}\n", text.index("DEPENDENT = {"))]
    return re.findall(r'^    "(.*)",  # (.*)$', block, flags=re.MULTILINE)
