r"""Fine-tune an encoder to tag the words of texts: names of people and places, slots of a request, parts of speech.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/tag.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/tag.py \
        --model FacebookAI/roberta-base --train_file train.conll --eval_file dev.conll --max_length 256 --lr 5e-5 --epochs 3

Rows are lists of words and lists of their tags, or lines of a CoNLL file (.conll .iob .bio .txt: word first, tag last). The first
token of a word predicts its tag. Metrics count whole entities. Words beyond --max_length count as O, and so as missed.
"""

from dataclasses import dataclass

import accel_ddp
from accel_ddp import ScoredConfig, column, option, run


@dataclass(kw_only=True)
class Config(ScoredConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:code_roles"
    file_endings = (f"{ScoredConfig.file_endings[0]} .conll .iob .bio", ".txt")
    train_file: tuple[str, ...] = option(
        (), "files, folders or patterns: .json .jsonl .parquet .arrow with lists, or CoNLL: .conll .iob .bio .txt"
    )
    tokens_column: str = column("tokens", "column with lists of words", kind="words")
    tags_column: str = column(
        "tags", "column with lists of tags: names (B-PER I-PER O, or another prefix scheme) or numbers", kind="tags"
    )
    max_length: int = option(128, "tokens per text; longer texts are truncated", group="data", at_least=1)
    global_batch_size: int = 16
    lr: float = 3e-4
    best_metric: str = option("", "metric for --keep_best and early stopping; default: f1")

    def metric_directions(self):
        own = {"f1": "max", "precision": "max", "recall": "max", "accuracy": "max", "loss": "min"}
        return {**own, **accel_ddp.metrics.directions(self.metrics, "tags")}


class Task(accel_ddp.TokenTask):
    model_class = "AutoModelForTokenClassification"
    evaluated = ("first", "tags")

    def load_tokenizer(self):
        return accel_ddp.tagging.prepare_for_words(super().load_tokenizer(), self.cfg.model)

    def read(self):
        tables = accel_ddp.data.load_columns(self.cfg, accel_ddp.tagging.load_words)
        self.use_labels(accel_ddp.tagging.Tags.for_task(*tables, self.cfg))
        return tables

    def items(self, rows):
        return accel_ddp.tagging.align(rows, self.cfg.tokens_column, self.labels, self.processor, self.cfg.max_length)

    def report_truncated(self, tables):
        accel_ddp.tagging.report_truncated(*tables, self.cfg.max_length)

    def measure(self, model, batch):
        return accel_ddp.tagging.measure(self.outputs(model, batch), batch, self.cfg.log_predictions)

    def metrics(self, table):
        self.table = table  # for `tables`
        answers = accel_ddp.tagging.predicted_tags(table["predictions"], self.rows[1]["first"][:], self.labels.names)
        words = ([tag for row in rows for tag in row] for rows in (answers, self.references))
        self.report_same(*words, lambda tag: repr(str(tag)))
        scores, self.scores = accel_ddp.tagging.score_entities(answers, self.references)
        scores["loss"] = accel_ddp.metrics.token_loss(table, "words")
        return self.more_metrics.add_to(scores, predictions=answers, references=self.references)

    def tables(self):
        words = lambda items: self.eval_texts[items][self.cfg.tokens_column]
        made = accel_ddp.tagging.make_tables(self.labels, self.table, self.rows[1], self.cfg.log_predictions, words)
        return {"classes": self.scores.as_table(), **made}

    def report(self):
        return self.scores.report(self.cfg.output_dir)

    @property
    def example(self):
        return accel_ddp.tagging.example(self.eval_texts, self.cfg.tokens_column, self.labels)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens and tags of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
