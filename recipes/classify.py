r"""Fine-tune an encoder to classify texts or pairs of texts: one label, several labels, or a number.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py \
        --model FacebookAI/roberta-base --train_file train.csv --eval_file dev.csv --text_column review --lr 2e-5

For other data or another model, change `build_data` or `Task`. recipes/own_loop.py contains the loop written out.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import ScoredConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(ScoredConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:rotten_tomatoes_small"
    text_column: str = option("text", "column of the text", group="data")
    text_pair_column: str = option("", "column of the second text of a pair", group="data")
    label_column: str = option("label", "column of the label: names or numbers, or lists of several labels", group="data")
    num_labels: int = option(0, "1: predict a number (regression); 0: as many classes as the data have", group="data")
    class_weights: Literal["none", "balanced"] = option(
        "none", "balanced: rare classes weigh as much as common ones", group="training"
    )
    max_length: int = option(128, "tokens per text; longer texts are truncated", group="data", at_least=1)
    global_batch_size: int = 16
    lr: float = 1e-4
    best_metric: str = option("", "metric for --keep_best and early stopping; default: accuracy, with --num_labels 1 mse")

    @property
    def kind(self):
        return "numbers" if self.num_labels == 1 else "classes"

    def texts(self):
        return {"text_column": self.text_column, "text_pair_column": self.text_pair_column}

    def check_columns(self, *tables):
        accel_ddp.data.require_columns({**self.texts(), "label_column": self.label_column}, *tables)

    def metric_directions(self):
        of_kind = {
            "classes": {"accuracy": "max", "macro_f1": "max"},
            "numbers": {"mse": "min", "pearson": "max", "spearman": "max"},
        }
        return {**of_kind[self.kind], "loss": "min", **accel_ddp.metrics.directions(self.metrics, self.kind)}


class Task(accel_ddp.ClassTask):
    model_class = "AutoModelForSequenceClassification"  # for the estimate of memory, before the model is loaded

    def __init__(self, cfg: Config, accelerator):
        super().__init__(cfg, accelerator)
        with accel_ddp.together("load the model and the data") as facts:
            self.more_metrics = accel_ddp.metrics.MoreMetrics(cfg, cfg.kind)
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, "AutoModelForSequenceClassification")
            train_rows, self.eval_rows, self.labels, self.eval_texts = build_data(cfg, self.processor)
            self.more_metrics.try_out(self.eval_rows["labels"][:], self.labels.names)
            head = self.labels.model_config()
            self.model = accel_ddp.models.build(self.model_class, cfg, accelerator, self.processor, **head)
            facts["the data"] = self.identify(train_rows, self.eval_rows)
        self.use(train_rows, self.eval_rows, self.pad())
        if cfg.class_weights == "balanced":
            self.weights = self.labels.balanced_weights(train_rows["labels"][:], accelerator.device)

    def outputs(self, model, batch):
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits

    def describe(self, items):
        rows = self.eval_texts[items]
        return {name: accel_ddp.data.read_texts(rows, column) for name, column in text_columns(self.cfg).items()}

    @property
    def example(self):
        columns = text_columns(self.cfg)
        texts = dict(zip(columns, accel_ddp.examples.first_texts(self.eval_texts, list(columns.values()))))
        row = accel_ddp.examples.literal(texts if self.cfg.text_pair_column else texts["text"])
        several = ", top_k=None" if self.labels.is_multi_label else ""
        return f'from transformers import pipeline; print(pipeline("text-classification", {{model}})({row}{several}))'


def text_columns(cfg: Config):
    columns = {"text": cfg.text_column, "text_pair": cfg.text_pair_column}
    return {name: column for name, column in columns.items() if column}


def build_data(cfg: Config, tokenizer):
    """Return training and evaluation rows with `input_ids`, `attention_mask` and `labels`, the labels, and the evaluation texts."""
    train, test = accel_ddp.data.load_rows(cfg)
    cfg.check_columns(train, test)
    accel_ddp.data.require_texts(cfg.texts(), train, test)
    labels = accel_ddp.labels.Labels.for_task(train, test, cfg)
    columns = list(text_columns(cfg).values())

    def encode(rows):
        texts = [accel_ddp.data.read_texts(rows, column) for column in columns]
        tokens = tokenizer(*texts, truncation=True, max_length=cfg.max_length)
        problems = accel_ddp.data.merge_problems(accel_ddp.data.find_text_problems(rows, columns), labels.find_problems(rows))
        return {**tokens, "labels": labels.encode(rows), "problem": problems}

    depends_on = [columns, cfg.max_length, labels.identity]
    usable = accel_ddp.tokenization.encode_tables((train, test), encode, tokenizer, depends_on, cfg)
    accel_ddp.tokenization.report_truncated(usable, cfg.max_length)
    labels.report_classes(usable)
    return (*usable, labels, accel_ddp.data.select_sources(test, usable[1]))


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
