"""Fine-tune a sentence encoder for retrieval: each anchor must find its positive among those of the whole batch.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/embed.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/embed.py --model BAAI/bge-small-en-v1.5 \
        --train_file pairs.jsonl --anchor_column query --positive_column passage --global_batch_size 1024 --lr 2e-5

The batch is part of the loss: negatives come from all ranks and all micro-batches, with gradient, so that the result is
that of one rank which holds the whole batch. A batch that does not fit is embedded piece by piece (GradCache), at the
cost of one more forward pass: --micro_batch_size says how many rows fit.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config import RecipeConfig, run
from accel_ddp.errors import UserError


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "embedded:all-MiniLM-L6-v2"  # hub name, folder, or embedded
    dataset: str = "embedded:docstrings"  # hub name (name:configuration) or embedded; --train_file overrides it
    anchor_column: str = "anchor"  # what is asked
    positive_column: str = "positive"  # what must be found
    negative_columns: tuple[str, ...] = ()  # texts that look right and are not (hard negatives), each a column
    anchor_prefix: str = ""  # put before each anchor, for example "query: "
    positive_prefix: str = ""  # put before each positive and negative, for example "passage: "
    pooling: Literal["mean", "cls"] = "mean"  # how the tokens' vectors become one
    scale: float = 20.0  # of the cosines in the softmax: 1 / temperature
    matryoshka: tuple[int, ...] = ()  # also train embeddings that are cut to so many dimensions, for example 256 128 64
    max_length: int = 64  # tokens; longer texts are cut
    global_batch_size: int = 64  # rows per update, over all ranks: each is a negative for all others
    micro_batch_size: int | Literal["auto"] = 64  # rows a rank holds in memory at once
    lr: float = 1e-4  # the highest learning rate of the run
    warmup_ratio: float = 0.1  # share of all updates until --lr is reached
    best_metric: str = "mrr"  # what early stopping looks at

    def validate(self) -> None:
        super().validate()
        if self.global_batch_size < 2 and not self.negative_columns:
            raise UserError(f"--global_batch_size {self.global_batch_size}: a row alone has no negatives. Use 32 or more.")
        if self.scale <= 0:
            raise UserError(f"--scale {self.scale}: must be more than 0; 20 is usual.")
        if any(size < 1 for size in self.matryoshka):
            raise UserError(f"--matryoshka {' '.join(map(str, self.matryoshka))}: are numbers of dimensions.")


class Task:
    """What is learned: the model, the data, the loss over a batch, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            train_rows, eval_rows = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer)
            fingerprint = accel_ddp.data.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.data.fingerprint(eval_rows)
            self.dimension = self.model.config.hidden_size
            if any(size > self.dimension for size in cfg.matryoshka):
                raise UserError(f"--matryoshka {max(cfg.matryoshka)}: the model's embeddings have {self.dimension} dimensions.")
        self.sizes = tuple(sorted({*cfg.matryoshka, self.dimension}, reverse=True))
        collate = accel_ddp.contrast.side_by_side(self.tokenizer, accelerator)
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.metrics.EvalBatches(eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)
        self.loss_sum = accel_ddp.update.WholeBatch(self.embed, lambda batch: batch["keys"], self.losses)

    def embed(self, model, batch):
        return accel_ddp.contrast.embeddings(model, batch, self.cfg.pooling)

    def losses(self, rows, keys):
        return accel_ddp.contrast.in_batch_losses(rows, keys, self.cfg.scale, self.sizes)

    def count(self, batch):
        return len(batch["keys"])

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        return {"embeddings": self.embed(model, batch)[:, :2].float(), "keys": batch["keys"][:, :2]}

    def summarize(self, rows):
        """On the main rank, over all items."""
        return accel_ddp.contrast.retrieval(rows["embeddings"], rows["keys"], self.sizes)


def build_data(cfg: Config, tokenizer):
    """Rows with the tokens of several texts each: anchor, positive, negatives."""
    tables = accel_ddp.data.load_rows(cfg)
    columns = [cfg.anchor_column, cfg.positive_column, *cfg.negative_columns]
    options = ["anchor_column", "positive_column", *["negative_columns"] * len(cfg.negative_columns)]
    for option, column in zip(options, columns):
        accel_ddp.data.require_columns({option: column}, *tables)
    prefixes = [cfg.anchor_prefix] + [cfg.positive_prefix] * (len(columns) - 1)

    def encode(rows):
        texts = [accel_ddp.data.texts(rows, column) for column in columns]
        tokens = [
            tokenizer([prefix + text for text in some], truncation=True, max_length=cfg.max_length)["input_ids"]
            for prefix, some in zip(prefixes, texts)
        ]
        ids = [list(row) for row in zip(*tokens)]
        return {"input_ids": ids, "keys": accel_ddp.contrast.keys_of(texts), "problem": accel_ddp.data.empty(columns, texts)}

    depends_on = [accel_ddp.models.identity(tokenizer), columns, prefixes, cfg.max_length]
    encoded = [accel_ddp.data.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in tables]
    return accel_ddp.data.say_what_is_cut(accel_ddp.data.without_broken(encoded, cfg), cfg.max_length)


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModel

    model = accel_ddp.models.load(AutoModel, cfg, tokenizer)
    model = accel_ddp.models.ready(model, cfg, accelerator, lora_task="FEATURE_EXTRACTION")
    for name, parameter in model.named_parameters():
        if "pooler" in name:  # BERT's own, which is for another task: embeddings are pooled from the last layer
            parameter.requires_grad_(False)
    return model


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    prompts = {"query": cfg.anchor_prefix, "document": cfg.positive_prefix}
    more = accel_ddp.contrast.sentence_transformers_files(task.dimension, cfg.pooling, cfg.max_length, prompts)
    files = accel_ddp.export.files_of(task.model, task.tokenizer, more)
    metrics = accel_ddp.fit(
        accelerator, cfg, model=task.model, optimizer=accel_ddp.optim.build(task.model, cfg), train=task.train,
        loss_sum=task.loss_sum, count=task.count, evaluate=task.evaluate,
        hooks=accel_ddp.hooks.standard(accelerator, cfg), files=files,
    )  # fmt: skip
    try_it = "from sentence_transformers import SentenceTransformer; print(SentenceTransformer('{folder}').encode(['Hi']).shape)"
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, try_it)


if __name__ == "__main__":
    run(Config, main)
