r"""Fine-tune an encoder to tag the words of texts: names of people and places, slots of a request, parts of speech.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/tag.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/tag.py \
        --model FacebookAI/roberta-base --train_file train.conll --eval_file dev.conll --max_length 256 --lr 5e-5 --epochs 3

Rows are lists of words and lists of their tags, or lines of a CoNLL file (.conll .iob .bio .txt: word first, tag last). The first
token of a word predicts its tag. Metrics count whole entities. Words beyond --max_length count as O, and so as missed.
"""

from dataclasses import dataclass

import accel_ddp
from accel_ddp.config.options import column, option
from accel_ddp.config.train_config import TABLE_FILES, ScoredConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(ScoredConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:code_roles"
    file_endings = (f"{TABLE_FILES} .conll .iob .bio", ".txt")
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


class Task(accel_ddp.Task):
    model_class = "AutoModelForTokenClassification"  # for the estimate of memory, before the model is loaded

    def __init__(self, cfg: Config, accelerator):
        super().__init__(cfg, accelerator)
        with accel_ddp.together("load the model and the data") as facts:
            self.more_metrics = accel_ddp.metrics.MoreMetrics(cfg, "tags")
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            self.processor = accel_ddp.tagging.prepare_for_words(self.processor, cfg.model)
            train_rows, self.eval_rows, self.tags, self.eval_words = build_data(cfg, self.processor)
            self.references = accel_ddp.tagging.reference_tags(self.eval_rows["tags"][:], self.tags.names)
            self.more_metrics.try_out(self.references)
            self.model = accel_ddp.models.build(self.model_class, cfg, accelerator, self.processor, **self.tags.model_config())
            facts["the data"] = self.identify(train_rows, self.eval_rows)
        rows = (rows.remove_columns(accel_ddp.tagging.WORD_COLUMNS) for rows in (train_rows, self.eval_rows))
        self.use(*rows, self.pad(per_token=("labels",)))

    def outputs(self, model, batch):
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits

    def terms(self, model, batch, team):
        return {"loss": (accel_ddp.losses.of_tokens(self.outputs(model, batch), batch["labels"]), self.count(batch))}

    def count(self, batch):
        return (batch["labels"] != -100).sum()

    def measure(self, model, batch):
        scores, labels = self.outputs(model, batch), batch["labels"]
        losses = accel_ddp.losses.of_tokens(scores, labels, "rows")
        rows = {"loss": losses, "words": (labels != -100).sum(-1), "predictions": scores.argmax(-1)}
        if self.cfg.log_predictions:
            rows["confidence"] = (accel_ddp.tables.confidence(scores) * (labels != -100)).sum(-1)  # over words
        return rows

    def metrics(self, table):
        self.rows = rows = table  # for `tables`
        answers = accel_ddp.tagging.predicted_tags(rows["predictions"], self.eval_rows["first"][:], self.tags.names)
        scores, self.table = accel_ddp.tagging.score_entities(answers, self.references)
        loss = rows["loss"].sum(dtype="float64") / max(rows["words"].sum(), 1)
        return self.more_metrics.add_to({**scores, "loss": loss}, predictions=answers, references=self.references)

    def tables(self):
        words = lambda items: self.eval_words[items][self.cfg.tokens_column]
        tables = accel_ddp.tagging.make_tables(self.tags, self.rows, self.eval_rows, self.cfg.log_predictions, words)
        return {"classes": self.table.as_table(), **tables}

    def report(self):
        return self.table.report(self.cfg.output_dir)

    @property
    def example(self):
        text = accel_ddp.tagging.first_text(self.eval_words, self.cfg.tokens_column, self.tags)
        use = 'use = pipeline("token-classification", {model}, aggregation_strategy="first")'
        row = accel_ddp.examples.literal(accel_ddp.examples.shorten(text))
        return f'from transformers import pipeline; {use}; print(*use({row}), sep="\\n")'


def build_data(cfg: Config, tokenizer):
    """Return rows with `input_ids`, `attention_mask`, `labels` and the words that the evaluation needs, the tags, and its words."""
    train, test = accel_ddp.data.load_rows(cfg, reader=accel_ddp.tagging.load_words)
    accel_ddp.data.check_columns(cfg, train, test)
    tags = accel_ddp.tagging.Tags.from_rows(train, test, cfg.tags_column, use_both=accel_ddp.labels.may_lack_classes(cfg, train))

    def encode(rows):
        return accel_ddp.tagging.align(rows, cfg.tokens_column, tags, tokenizer, cfg.max_length)

    of_tags = [tags.column, tags.names, sorted(map(repr, tags.tag_ids.items()))]
    depends_on = [cfg.tokens_column, cfg.max_length, *of_tags]
    usable = accel_ddp.tokenization.encode_tables((train, test), encode, tokenizer, depends_on, cfg)
    accel_ddp.tagging.report_truncated(*usable, cfg.max_length)
    tags.report_classes(usable)
    return (*usable, tags, accel_ddp.data.select_sources(test, usable[1]))


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
