"""Fine-tune an encoder to label texts, or pairs of texts: with one label, with several, or with a number.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py \
        --model FacebookAI/roberta-base --train_file train.csv --eval_file dev.csv --text_column review --lr 2e-5

Your own data or model: change `build_data`, `build_model`. Your own loop: recipes/own_loop.py has it written out.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config import RecipeConfig, run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "embedded:all-MiniLM-L6-v2"  # hub name, folder, or embedded
    dataset: str = "embedded:rotten_tomatoes_small"  # hub name (name:configuration) or embedded; --train_file overrides it
    text_column: str = "text"  # what is labelled
    text_pair_column: str = ""  # the second text of a pair
    label_column: str = "label"  # names or numbers; a list where several are right at once
    num_labels: int = 0  # 1: the label is a number to be predicted (regression); 0: as many classes as the data have
    class_weights: Literal["none", "balanced"] = "none"  # balanced: rare classes have the same say as common ones
    max_length: int = 128  # tokens; longer texts are cut
    global_batch_size: int = 16  # items per update, over all ranks: the result depends on it
    lr: float = 1e-4  # the highest learning rate of the run
    best_metric: str = "accuracy"  # what early stopping looks at: accuracy, macro_f1, loss; mse, pearson, spearman


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            train_rows, self.eval_rows, self.labels = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer, self.labels)
            fingerprint = accel_ddp.data.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.data.fingerprint(self.eval_rows)
        collate = accel_ddp.data.padded(self.tokenizer, accelerator)
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.metrics.EvalBatches(self.eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)
        self.weights = None
        if cfg.class_weights == "balanced":
            self.weights = self.labels.balanced_weights(train_rows["labels"][:], accelerator.device)

    def loss_sum(self, model, batch):
        kind = self.labels.problem_type
        return accel_ddp.losses.of_classes(logits(model, batch), batch["labels"], kind, weights=self.weights)

    def count(self, batch):
        return len(batch["labels"])

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        scores = logits(model, batch)
        losses = accel_ddp.losses.of_classes(scores, batch["labels"], self.labels.problem_type, reduction="none")
        answers = (
            scores.squeeze(-1) if self.labels.is_value else (scores > 0).long() if self.labels.several else scores.argmax(-1)
        )
        return {"loss": losses, "predictions": answers, "references": batch["labels"]}

    def summarize(self, rows):
        """On the main rank, over all items."""
        answers = {"predictions": rows["predictions"], "references": rows["references"]}
        if self.labels.is_value:
            return {**accel_ddp.metrics.of_values(**answers), "loss": float(rows["loss"].mean())}
        self.table = accel_ddp.metrics.table_of_classes(**answers, names=self.labels.names)
        scores = {name: accel_ddp.metrics.load(name).compute(**answers)[name] for name in ("accuracy", "f1")}
        return {"accuracy": scores["accuracy"], "macro_f1": scores["f1"], "loss": float(rows["loss"].mean())}


def logits(model, batch):
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits


def build_data(cfg: Config, tokenizer):
    """Rows with `input_ids`, `attention_mask` and `labels`, and the names of the labels."""
    train, test = accel_ddp.data.load_rows(cfg)
    needed = {"text_column": cfg.text_column, "text_pair_column": cfg.text_pair_column, "label_column": cfg.label_column}
    accel_ddp.data.require_columns(needed, train, test)
    train, test = accel_ddp.data.with_labels([train, test], cfg.label_column, cfg)
    labels = accel_ddp.labels.Labels.for_task(train, test, cfg)
    columns = [cfg.text_column, *([cfg.text_pair_column] if cfg.text_pair_column else [])]

    def encode(rows):
        texts = [accel_ddp.data.texts(rows, column) for column in columns]
        tokens = tokenizer(*texts, truncation=True, max_length=cfg.max_length)
        return {**tokens, "labels": labels.encode(rows), "problem": accel_ddp.data.empty(columns, texts)}

    depends_on = [accel_ddp.models.identity(tokenizer), columns, cfg.max_length, labels.identity]
    encoded = [accel_ddp.data.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in (train, test)]
    return (*accel_ddp.data.say_what_is_cut(accel_ddp.data.without_broken(encoded, cfg), cfg.max_length), labels)


def build_model(cfg: Config, accelerator, tokenizer, labels):
    from transformers import AutoModelForSequenceClassification

    model = accel_ddp.models.load(
        AutoModelForSequenceClassification,
        cfg,
        tokenizer,
        **labels.for_model(),
        pad_token_id=tokenizer.pad_token_id,
        ignore_mismatched_sizes=True,  # a head for other labels is replaced
    )
    return accel_ddp.models.ready(model, cfg, accelerator, lora_task="SEQ_CLS")


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    files = accel_ddp.export.files_of(task.model, task.tokenizer)
    metrics = accel_ddp.fit(
        accelerator, cfg, model=task.model, optimizer=accel_ddp.optim.build(task.model, cfg), train=task.train,
        loss_sum=task.loss_sum, count=task.count, evaluate=task.evaluate,
        hooks=accel_ddp.hooks.standard(accelerator, cfg), files=files,
    )  # fmt: skip
    if accelerator.is_main_process and not task.labels.is_value:
        print(task.table)
    try_it = "from transformers import pipeline; print(pipeline('text-classification', '{folder}')('What a film!'))"
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, try_it)


if __name__ == "__main__":
    run(Config, main)
