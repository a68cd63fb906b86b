"""Fine-tune an encoder to tag the words of texts: names of people and places, slots of a request, parts of speech.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/tag.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/tag.py \
        --model FacebookAI/roberta-base --train_file train.conll --eval_file dev.conll --max_length 256 --lr 5e-5 --epochs 3

Rows are lists of words and of their tags, or lines of a CoNLL file (.conll .iob .bio .txt: word first, tag last). Each
word is tagged by its first sub-word. Scores are of whole entities; words beyond --max_length count as O, so as missed.
"""

from dataclasses import dataclass

import accel_ddp
from accel_ddp.config import RecipeConfig, run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "embedded:all-MiniLM-L6-v2"  # hub name, folder, or embedded
    dataset: str = "embedded:code_roles"  # hub name (name:configuration) or embedded; --train_file overrides it
    train_file: str = ""  # .json .jsonl .parquet with lists, or CoNLL: .conll .iob .bio .txt
    tokens_column: str = "tokens"  # lists of words
    tags_column: str = "tags"  # as long lists of names or numbers: B-PER I-PER O, or any other scheme of such prefixes
    max_length: int = 128  # tokens; longer texts are cut
    global_batch_size: int = 16  # items per update, over all ranks: the result depends on it
    lr: float = 3e-4  # the highest learning rate of the run
    best_metric: str = "f1"  # what early stopping looks at: f1, precision, recall, accuracy, loss


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            self.tokenizer = accel_ddp.tagging.for_words(self.tokenizer, cfg.model)
            train_rows, self.eval_rows, self.tags = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer, self.tags)
            fingerprint = accel_ddp.data.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.data.fingerprint(self.eval_rows)
        collate = accel_ddp.data.padded(self.tokenizer, accelerator, per_token=("labels",))
        train_rows, eval_rows = (rows.remove_columns(accel_ddp.tagging.OF_WORDS) for rows in (train_rows, self.eval_rows))
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.metrics.EvalBatches(eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)

    def loss_sum(self, model, batch):
        return accel_ddp.losses.of_tokens(logits(model, batch), batch["labels"])

    def count(self, batch):
        return (batch["labels"] != -100).sum()

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        scores, labels = logits(model, batch), batch["labels"]
        losses = accel_ddp.losses.of_tokens(scores, labels, "rows")
        return {"loss": losses, "words": (labels != -100).sum(-1), "predictions": scores.argmax(-1)}

    def summarize(self, rows):
        """On the main rank, over all items."""
        words = {name: self.eval_rows[name][:] for name in accel_ddp.tagging.OF_WORDS}
        scores, self.table = accel_ddp.tagging.entity_scores(rows["predictions"], **words, names=self.tags.names)
        return {**scores, "loss": float(rows["loss"].sum(dtype="float64") / max(rows["words"].sum(), 1))}


def logits(model, batch):
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits


def build_data(cfg: Config, tokenizer):
    """Rows with `input_ids`, `attention_mask` and `labels`, and what the evaluation knows of words; and the tags."""
    train, test = accel_ddp.data.load_rows(cfg, reader=accel_ddp.tagging.load_words)
    accel_ddp.data.require_columns({"tokens_column": cfg.tokens_column, "tags_column": cfg.tags_column}, train, test)
    of_both = bool(cfg.train_file and not cfg.eval_file) or cfg.max_train_items > 0  # the first rows may lack a rare tag
    tags = accel_ddp.tagging.Tags.of(train, test, cfg.tags_column, of_both)

    def encode(rows):
        return accel_ddp.tagging.aligned(rows, cfg.tokens_column, tags, tokenizer, cfg.max_length)

    depends_on = [accel_ddp.models.identity(tokenizer), cfg.tokens_column, cfg.max_length, tags.column, tags.names]
    encoded = [accel_ddp.data.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in (train, test)]
    train, test = accel_ddp.data.without_broken(encoded, cfg)
    accel_ddp.tagging.say_what_is_cut(train, test, cfg.max_length)
    return train, test, tags


def build_model(cfg: Config, accelerator, tokenizer, tags):
    from transformers import AutoModelForTokenClassification

    model = accel_ddp.models.load(
        AutoModelForTokenClassification,
        cfg,
        tokenizer,
        **tags.for_model(),
        ignore_mismatched_sizes=True,  # a head for other tags is replaced
    )
    return accel_ddp.models.ready(model, cfg, accelerator, lora_task="TOKEN_CLS")


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    files = accel_ddp.export.files_of(task.model, task.tokenizer)
    metrics = accel_ddp.fit(
        accelerator, cfg, model=task.model, optimizer=accel_ddp.optim.build(task.model, cfg), train=task.train,
        loss_sum=task.loss_sum, count=task.count, evaluate=task.evaluate,
        hooks=accel_ddp.hooks.standard(accelerator, cfg), files=files,
    )  # fmt: skip
    if accelerator.is_main_process:
        print(task.table)
    try_it = (
        "from transformers import pipeline; tag = pipeline('token-classification', '{folder}', aggregation_strategy='first'); "
        "print(*tag('def area(width, height): return width * height'), sep='\\n')"
    )
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, try_it)


if __name__ == "__main__":
    run(Config, main)
