r"""Fine-tune an encoder to classify texts or pairs of texts: one label, several labels, or a number.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/classify.py \
        --model FacebookAI/roberta-base --train_file train.csv --eval_file dev.csv --text_column review --lr 2e-5

For other data or another model, change `Task`. recipes/own_loop.py contains the loop written out.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import ScoredConfig, column, option, run


@dataclass(kw_only=True)
class Config(ScoredConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:rotten_tomatoes_small"
    text_column: str = column("text", "column of the text")
    text_pair_column: str = column("", "column of the second text of a pair")
    label_column: str = column("label", "column of the label: names or numbers, or lists of several labels", kind="label")
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

    def metric_directions(self):
        of_kind = {
            "classes": {"accuracy": "max", "macro_f1": "max"},
            "numbers": {"mse": "min", "pearson": "max", "spearman": "max"},
        }
        return {**of_kind[self.kind], "loss": "min", **accel_ddp.metrics.directions(self.metrics, self.kind)}


class Task(accel_ddp.ClassTask):
    """What is learned. A task needs `items` (its tokens and columns) and `terms` (the loss of each item); ClassTask has the rest."""

    model_class = "AutoModelForSequenceClassification"

    def read(self):
        tables = super().read()
        self.use_labels(accel_ddp.labels.Labels.for_task(*tables, self.cfg))
        return tables

    def items(self, rows):
        return {**self.tokens(rows), "labels": self.labels.encode(rows), "problem": self.labels.find_problems(rows)}

    def outputs(self, model, batch):
        return model(batch).logits

    def terms(self, model, batch, team):
        return {"loss": self.losses(self.outputs(model, batch), batch["labels"], self.weights)}

    @property
    def example(self):
        texts, several = self.first_texts(), ", top_k=None" if self.labels.is_multi_label else ""
        row = accel_ddp.examples.literal(texts if self.cfg.text_pair_column else texts["text"])
        return f'from transformers import pipeline; print(pipeline("text-classification", {{model}})({row}{several}))'


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens and labels of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
