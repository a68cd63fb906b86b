"""What models predict: labels, numbers, tags, filled masks, vectors and texts. As a program it is a process of `accel-ddp predict`."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.exporting import trained_model
from accel_ddp.exporting.predict_rows import InputRows
from accel_ddp.exporting.trained_model import TrainedModel
from accel_ddp.nodes.launcher import cpu_is_wanted
from accel_ddp.seeds import mixed
from accel_ddp.sources import models
from accel_ddp.sources.data import place_of
from accel_ddp.tasks import chat, contrastive
from accel_ddp.tasks.chat_rows import Chat, UnusableRow
from accel_ddp.tasks.chat_template import TEMPLATES, Template, encode_marked, set_template

LARGEST = {"cuda": (256, 32_768), "cpu": (32, 4096)}  # rows and tokens of a batch; memory may allow fewer
MOST_NEW = 256  # tokens of an answer


class Encoded(NamedTuple):
    inputs: Any
    length: int = 1
    places: list[int] = []  # of the first token of each word, or of the masks
    room: int = 0  # tokens that may be generated


class Predictor:
    """A model with what it needs to read rows. `encode` reads one row, `predict` computes a batch of them."""

    def __init__(self, found: TrainedModel, options: dict[str, Any]):
        self.options, self.kind, trained = options, found.kind, found.option("max_length")
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu_is_wanted() else "cpu")
        self.compute: Callable[..., list[Any]] = getattr(self, f"_{self.kind}")
        if self.kind == "images":
            from transformers import AutoImageProcessor

            self.tokenizer, self.processor = None, AutoImageProcessor.from_pretrained(found.place)
        else:
            self.tokenizer = models.load_tokenizer(RecipeConfig(model=found.place))
            self.tokenizer.padding_side = "left" if self.kind == "answers" else "right"
        if self.kind in ("answers", "rewards"):
            self.prompts = Prompts(self.tokenizer, found, options["chat_template"])
        elif self.kind == "tags":
            from accel_ddp.tasks.tagging import prepare_for_words

            prepare_for_words(self.tokenizer, found.name)
        elif self.kind == "vectors":
            self.pooling, self.normalize, trained = read_modules(found)
        self.model = trained_model.load(found, options["dtype"], self.device)
        self.limit = context_length(self.model, self.tokenizer)
        self.max_length = options["max_length"] or min(self.limit, trained if isinstance(trained, int) else self.limit)
        if self.kind in ("answers", "texts"):
            self.generation = generation_config(self.model, self.tokenizer, options)
        elif self.kind in ("labels", "scores", "rewards") and self.model.config.get_text_config().pad_token_id is None:
            self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def encode(self, item: Any) -> Encoded:
        if self.kind == "images":
            from accel_ddp.tasks import vision

            try:
                picture = vision.decode(vision.read_content(item)).convert(vision.image_mode(self.model))
            except Exception as error:  # many types, which depend on the format
                raise UnusableRow(f"its image cannot be read\t{error}") from error
            return Encoded(self.processor(picture, return_tensors="pt")["pixel_values"])
        if self.kind in ("answers", "rewards"):
            ids, is_whole = self.prompts.ids(item, self.kind == "rewards"), self.kind == "rewards"
            if len(ids) - is_whole >= self.limit:
                raise UnusableRow(f"it has {len(ids):,} tokens, and the model accepts {self.limit:,}")
            room = 0 if is_whole else min(self.generation.max_new_tokens, self.limit - len(ids))
            return Encoded({"input_ids": ids, "attention_mask": [1] * len(ids)}, len(ids), room=room)
        texts, more = ([item], {"is_split_into_words": True}) if self.kind == "tags" else (item, {})
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.max_length, **more)
        ids, places = encoded["input_ids"], []
        if self.kind == "tags":
            words = encoded.word_ids()
            places = [words.index(i) if i in words else -1 for i in range(len(item))]
        elif self.kind == "masks":
            places = [i for i, token in enumerate(ids) if token == self.tokenizer.mask_token_id]
            if not places:
                raise UnusableRow(f"it has no {self.tokenizer.mask_token} in its first {self.max_length:,} tokens")
        return Encoded(dict(encoded), len(ids), places)

    def batches(self, rows: dict[int, Encoded]) -> list[list[int]]:
        most, tokens = (self.options["batch_size"], 1 << 60) if self.options["batch_size"] else LARGEST[self.device.type]
        made: list[list[int]] = []
        for number in sorted(rows, key=lambda i: (-rows[i].length, i)):
            first = rows[made[-1][0]] if made else None
            is_full = not first or len(made[-1]) >= most or (first.length + first.room) * (len(made[-1]) + 1) > tokens
            if is_full or first.room != rows[number].room:
                made.append([])
            made[-1].append(number)
        return made

    @torch.inference_mode()
    def predict(self, batch: list[Encoded], numbers: list[int]) -> list[Any]:
        """Return a prediction for each input. Without enough memory the batch is halved."""
        try:
            if self.kind == "images":
                inputs = {"pixel_values": torch.cat([one.inputs for one in batch]).to(self.device, self.model.dtype)}
            else:
                inputs = self.tokenizer.pad([one.inputs for one in batch], return_tensors="pt").to(self.device)
            return self.compute(inputs, batch, numbers)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(batch) // 2
        return self.predict(batch[:half], numbers[:half]) + self.predict(batch[half:], numbers[half:])

    def _best(self, scores: Tensor, name: Callable[[int], str]) -> tuple[Any, Any]:
        """Return the best classes and their probabilities, `--top_k` of them or one."""
        values, indices = scores.topk(min(max(self.options["top_k"], 1), len(scores)))
        names = [name(i) for i in indices.tolist()]
        return (names, values.tolist()) if self.options["top_k"] > 1 else (names[0], values.item())

    def _label(self, i: int) -> str:
        return str(self.model.config.id2label[i])

    def _labels(self, inputs: Any, batch: list[Encoded], numbers: list[int]) -> list[Any]:
        scores, config = self.model(**inputs).logits.float(), self.model.config
        if scores.shape[-1] == 1:  # CrossEncoder of sentence-transformers reads there what to apply
            activation = str((getattr(config, "sentence_transformers", None) or {}).get("activation_fn", ""))
            scores = scores.sigmoid() if activation.endswith("Sigmoid") else scores
            return [{"prediction": score} for score in scores.squeeze(-1).tolist()]
        if config.problem_type == "multi_label_classification":
            found = [[(self._label(i), score) for i, score in enumerate(row) if score > 0.5] for row in scores.sigmoid().tolist()]
            return [{"prediction": [name for name, _ in row], "score": [score for _, score in row]} for row in found]
        return [dict(zip(("prediction", "score"), self._best(row, self._label))) for row in scores.softmax(-1)]

    _images = _rewards = _scores = _labels

    def _tags(self, inputs: Any, batch: list[Encoded], numbers: list[int]) -> list[Any]:
        scores, tags = (values.tolist() for values in self.model(**inputs).logits.float().softmax(-1).max(-1))
        outside = "O" if "O" in self.model.config.label2id else None  # of words that were truncated
        names = [[outside if at < 0 else self._label(row[at]) for at in one.places] for one, row in zip(batch, tags)]
        values = [[None if at < 0 else row[at] for at in one.places] for one, row in zip(batch, scores)]
        return [{"prediction": a, "score": b} for a, b in zip(names, values)]

    def _masks(self, inputs: Any, batch: list[Encoded], numbers: list[int]) -> list[Any]:
        word, found = lambda i: self.tokenizer.decode([i]), []
        for one, row in zip(batch, self.model(**inputs).logits):
            best = [self._best(row[at].float().softmax(-1), word) for at in one.places]
            found.append({"prediction": [names for names, _ in best], "score": [values for _, values in best]})
        return found

    def _vectors(self, inputs: Any, batch: list[Encoded], numbers: list[int]) -> list[Any]:
        pooled = contrastive.pool(self.model(**inputs).last_hidden_state, inputs["attention_mask"], self.pooling)
        return list((F.normalize(pooled, dim=-1) if self.normalize else pooled).float().cpu().numpy())

    def _texts(self, inputs: Any, batch: list[Encoded], numbers: list[int]) -> list[Any]:
        generation, more = copy.deepcopy(self.generation), sampling(self.options, numbers, self.device)
        generation.max_new_tokens = batch[0].room or generation.max_new_tokens
        made = self.model.generate(**inputs, generation_config=generation, **more)
        made = made[:, inputs["input_ids"].shape[1] :] if self.kind == "answers" else made
        return [{"prediction": text} for text in self.tokenizer.batch_decode(made, skip_special_tokens=True)]

    _answers = _texts


class Prompts:
    def __init__(self, tokenizer: Any, found: TrainedModel, template: str = ""):
        date = found.option("template_date", "auto")
        cfg = SimpleNamespace(chat_template=template, model=found.name, template_date=date)
        set_template(tokenizer, cfg)
        self.tokenizer, self.template = tokenizer, Template(tokenizer, cfg) if tokenizer.chat_template else None
        self.first_ids, _ = chat.tokens_around(tokenizer)

    def ids(self, item: Chat | str, is_whole: bool = False) -> list[int]:
        if isinstance(item, str):
            return chat.prompt_ids(self.tokenizer, self.first_ids, item + (self.tokenizer.eos_token or "") * is_whole)
        if self.template is None:
            raise UnusableRow(f"it is a chat, and the model has no template (--chat_template {', '.join(TEMPLATES)} or a file)")
        marked = self.template.mark(self.template.convert(item))  # control tokens in texts stay texts, as in training
        return encode_marked(self.tokenizer, self.template.render(marked, prompt=not is_whole)[0])


def context_length(model: Any, tokenizer: Any) -> int:
    config = model.config.get_text_config()
    known = (getattr(tokenizer, "model_max_length", 0), getattr(config, "max_position_embeddings", 0))
    return min((number for number in known if number and 0 < number < 1e9), default=1 << 30)


def generation_config(model: Any, tokenizer: Any, options: dict[str, Any]) -> Any:
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.temperature, config.top_p, config.top_k, config.max_length = False, None, None, None, None
    config.max_new_tokens = options["max_new_tokens"] or config.max_new_tokens or MOST_NEW
    config.num_beams = 1 if options["temperature"] else config.num_beams
    config.pad_token_id = tokenizer.pad_token_id if config.pad_token_id is None else config.pad_token_id
    return config


def sampling(options: dict[str, Any], numbers: list[int], device: torch.device) -> dict[str, Any]:
    """Return options with which a greedy search samples: Gumbel noise, which depends on the seed and the row number only."""
    if not options["temperature"]:
        return {}
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    generators = [torch.Generator(device).manual_seed(mixed(options["seed"], "answer", number)) for number in numbers]

    def add_noise(input_ids: Any, scores: Tensor) -> Tensor:
        noise = [torch.empty_like(scores[0], dtype=torch.float32).exponential_(generator=one) for one in generators]
        return scores.float() - torch.stack(noise).log()

    top_p = [TopPLogitsWarper(options["top_p"])] if options["top_p"] < 1 else []
    return {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(options["temperature"]), *top_p, add_noise])}


def read_modules(found: TrainedModel) -> tuple[str, bool, int | None]:
    """Return pooling, whether vectors are normalized, and the most tokens of a text, from the files of sentence-transformers."""
    read = lambda file: trained_model.read(found.place, file) or {}
    kinds = {str(module["type"]).rpartition(".")[2]: module["path"] for module in read("modules.json")}
    config = read(f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else {"pooling_mode": "mean"}
    modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    chosen = [name for name, mode in modes.items() if config.get(f"pooling_mode_{mode}") or config.get("pooling_mode") == name]
    if {*kinds} - {"Transformer", "Pooling", "Normalize"} or len(chosen) != 1:
        reason = f"its modules ({', '.join(kinds)}) are not supported"
        raise UserError(f"{found.name}: {reason}. Use `encode` of sentence-transformers.")
    return chosen[0], "Normalize" in kinds, read("sentence_bert_config.json").get("max_seq_length")


class Worker:
    """Writes shards of the predictions. It reads the same rows as the process that has started it."""

    def __init__(self, partial: Path):
        self.partial, self.options = partial, json.loads((partial / "job.json").read_text())
        found = trained_model.find(self.options["model"], partial)
        self.rows, self.predictor = InputRows(found, self.options), Predictor(found, self.options)

    def write(self, shard: int) -> None:
        numbers, encoded = self.rows.shard(shard), {}
        for number, item, problem in zip(numbers, *self.rows.read(numbers)):
            try:
                if not problem:
                    encoded[number] = self.predictor.encode(item)
            except UnusableRow as error:
                problem = str(error)
            if problem and not self.options["skip_broken"]:
                raise UserError(self.rows.describe({number: problem}))
        found: dict[int, Any] = {}
        for batch in self.predictor.batches(encoded):
            try:
                found |= zip(batch, self.predictor.predict([encoded[number] for number in batch], batch))
            except Exception as error:
                raise RuntimeError(f"a batch of {len(batch)}, the first is {place_of(self.rows.files, batch[0])}") from error
        path = self.rows.path(self.partial, shard)
        with path.with_suffix(".tmp").open("wb") as file:
            if self.rows.kind == "vectors":
                nothing = np.full(self.predictor.model.config.hidden_size, np.nan, np.float32)
                np.save(file, np.stack([found.get(number, nothing) for number in numbers]))
            else:
                file.write(json.dumps([found.get(number) for number in numbers]).encode())
        path.with_suffix(".tmp").rename(path)


def main(partial: Path, first: int, step: int) -> int:
    """Write the shards `first`, `first + step`, ... that do not exist. Return the exit code."""
    try:
        worker = Worker(partial)
        for shard in range(first, worker.rows.num_shards, step):
            if not worker.rows.path(partial, shard).is_file():
                worker.write(shard)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
