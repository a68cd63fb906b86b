"""Fine-tune an encoder to label texts, or pairs of texts, with one label or several.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py \
        --model FacebookAI/roberta-base --train_file train.csv --eval_file dev.csv --text_column review --lr 2e-5

Your own data or model: change `build_data`, `build_model`. Your own loop: recipes/own_loop.py has it written out.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config import TrainConfig, run


@dataclass(kw_only=True)
class Config(TrainConfig):
    model: str = "embedded:all-MiniLM-L6-v2"  # hub name, folder, or embedded
    dataset: str = "embedded:rotten_tomatoes_small"  # hub name or embedded; --train_file overrides it
    train_file: str = ""  # .csv .tsv .json .jsonl .parquet
    eval_file: str = ""  # default: a tenth of the training rows
    train_split: str = "train"  # of --dataset
    eval_split: str = ""  # of --dataset; default: validation, dev or test
    text_column: str = "text"  # what is labelled
    text_pair_column: str = ""  # the second text of a pair
    label_column: str = "label"  # names or numbers; a list where several are right at once
    max_length: int = 128  # tokens; longer texts are cut
    eval_batch_size: int = 64  # items per rank
    global_batch_size: int = 16  # items per update, over all ranks: the result depends on it
    micro_batch_size: int = 8  # items a rank holds in memory at once: only dropout's masks depend on it
    lr: float = 1e-4  # the highest learning rate of the run
    best_metric: Literal["accuracy", "macro_f1", "loss"] = "accuracy"  # what early stopping looks at


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg.model, cfg.max_length)
            train_rows, self.eval_rows, self.labels = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer, self.labels)
            fingerprint = accel_ddp.data.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.data.fingerprint(self.eval_rows)
        collate = accel_ddp.data.padded(self.tokenizer, accelerator)
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.metrics.EvalBatches(self.eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)
        self.loss_of = accel_ddp.losses.of_classes(several=self.labels.several)

    def loss_sum(self, model, batch):
        return self.loss_of(logits(model, batch), batch["labels"])

    def count(self, batch):
        return len(batch["labels"])

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        scores = logits(model, batch)
        losses = self.loss_of(scores, batch["labels"], reduction="none")
        answers = (scores > 0).long() if self.labels.several else scores.argmax(-1)
        return {"loss": losses, "predictions": answers, "references": batch["labels"]}

    def summarize(self, rows):
        """On the main rank, over all items."""
        answers = {"predictions": rows["predictions"], "references": rows["references"]}
        self.table = accel_ddp.metrics.table_of_classes(**answers, names=self.labels.names)
        scores = {name: accel_ddp.metrics.load(name).compute(**answers)[name] for name in ("accuracy", "f1")}
        return {"accuracy": scores["accuracy"], "macro_f1": scores["f1"], "loss": float(rows["loss"].mean())}


def logits(model, batch):
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits


def build_data(cfg: Config, tokenizer):
    """Rows with `input_ids`, `attention_mask` and `labels`, and the names of the labels."""
    train, test = accel_ddp.data.load_rows(
        cfg.dataset, cfg.train_file, cfg.eval_file, train_split=cfg.train_split, eval_split=cfg.eval_split, seed=cfg.seed
    )
    needed = {"text_column": cfg.text_column, "text_pair_column": cfg.text_pair_column, "label_column": cfg.label_column}
    accel_ddp.data.require_columns(needed, train, test)
    labels = accel_ddp.labels.Labels.of(train, test, cfg.label_column, of_both=bool(cfg.train_file and not cfg.eval_file))
    columns = [cfg.text_column, *([cfg.text_pair_column] if cfg.text_pair_column else [])]

    def encode(rows):
        texts = [accel_ddp.data.texts(rows, column) for column in columns]
        return {**tokenizer(*texts, truncation=True, max_length=cfg.max_length), "labels": labels.encode(rows)}

    depends_on = [accel_ddp.models.identity(tokenizer), columns, cfg.max_length, cfg.label_column, labels.names, labels.several]
    return (*(accel_ddp.data.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in (train, test)), labels)


def build_model(cfg: Config, accelerator, tokenizer, labels):
    from transformers import AutoModelForSequenceClassification

    model = accel_ddp.models.load(
        AutoModelForSequenceClassification,
        cfg.model,
        num_labels=len(labels.names),
        id2label=dict(enumerate(labels.names)),
        label2id={name: i for i, name in enumerate(labels.names)},
        problem_type="multi_label_classification" if labels.several else "single_label_classification",
        pad_token_id=tokenizer.pad_token_id,
        ignore_mismatched_sizes=True,  # a head for other labels is replaced
    )
    return accel_ddp.models.ready(model, cfg, accelerator)


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    metrics = accel_ddp.fit(
        accelerator,
        cfg,
        model=task.model,
        optimizer=accel_ddp.optim.build(task.model, cfg),
        train=task.train,
        loss_sum=task.loss_sum,
        count=task.count,
        evaluate=task.evaluate,
        hooks=accel_ddp.hooks.standard(accelerator, cfg),
        files=accel_ddp.export.files_of(task.model, task.tokenizer),
    )
    with accel_ddp.together("export the model"):
        if accelerator.is_main_process:
            report(task, metrics, accel_ddp.export.at_the_end(task.model, task.tokenizer, cfg, metrics))


def report(task, metrics, folder) -> None:
    print(
        f"{task.table}\n"
        f"accuracy {metrics['accuracy']:.4f}  macro F1 {metrics['macro_f1']:.4f}  on {len(task.eval_rows):,} items\n"
        f"model saved in {folder}\n"
        'try:  python -c "from transformers import pipeline; '
        f"print(pipeline('text-classification', '{folder}')('What a film!'))\"\n"
        "next: your own data with --train_file my.csv --text_column ... --label_column ...; all options with --help"
    )


if __name__ == "__main__":
    run(Config, main)
