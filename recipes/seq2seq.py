r"""Fine-tune an encoder-decoder model (T5, BART) to generate a text from a text: translations, summaries, answers.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/seq2seq.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/seq2seq.py \
        --model google-t5/t5-small --train_file train.jsonl --source_column translation.en --target_column translation.de \
        --prefix "translate English to German: " --lr 3e-4 --epochs 3

The loss is the mean over target tokens, however they are spread over ranks and micro-batches. Each evaluation also generates texts.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import ScoredConfig, column, option, run


@dataclass(kw_only=True)
class Config(ScoredConfig):
    model: str = "builtin:tiny-t5"
    dataset: str = "builtin:number_words"
    source_column: str = column("source", "column of the input; translation.en is the key `en` of a column of dictionaries")
    target_column: str = column("target", "column of the text to generate")
    prefix: str = option("", "text before each source", group="data", also=("source_prefix",))
    max_length: int = option(128, "tokens per source; longer ones are truncated", group="data", at_least=1)
    max_target_length: int = option(128, "tokens per target; longer ones are truncated", group="data", at_least=1)
    max_new_tokens: int = option(
        64, "tokens of a generated text, in evaluations and in the exported model", group="evaluation", affects_result=False,
        at_least=1, also=("generation_max_length",),
    )  # fmt: skip
    samples: int = option(
        3, "generated texts to print at each evaluation; its table has them too, and they contain your data", group="evaluation",
        affects_result=False, at_least=0,
    )  # fmt: skip
    num_beams: int = option(1, "beam search width; 1: greedy", group="evaluation", affects_result=False, at_least=1)
    epochs: float = 7.0
    micro_batch_size: int | Literal["auto"] = 32
    lr: float = option(4e-3, "peak learning rate; for pretrained models 5e-5 to 5e-4")
    warmup_ratio: float = 0.05
    eval_every: int = 300
    best_metric: str = option("", "metric for --keep_best and early stopping; default: loss")

    def metric_directions(self):
        own = {"loss": "min", "exact_match": "max", "bleu": "max", "chrf": "max", "rouge_l": "max"}
        return {**own, **accel_ddp.metrics.directions(self.metrics, "texts")}


class Task(accel_ddp.TargetTask):
    def items(self, rows):
        return accel_ddp.generation_metrics.encode(rows, self.processor, self.cfg)

    def report_truncated(self, tables):
        accel_ddp.generation_metrics.report_truncated(tables, self.cfg)

    def lengths(self, dataset):
        return accel_ddp.stream.count_tokens(dataset, ("input_ids", "labels"))

    def measure(self, model, batch):
        ids = batch.pad(batch.tokens, self.processor.pad_token_id)
        generated = model.generate(input_ids=ids, attention_mask=batch.grid.mask.long())
        return {**super().measure(model, batch), "generated": generated}

    def metrics(self, table):
        self.generated = accel_ddp.generation_metrics.decode(table["generated"], self.processor)
        self.losses = table["loss"] / table["tokens"].clip(min=1)  # for `tables`
        metrics = {"loss": accel_ddp.metrics.token_loss(table)}
        metrics |= accel_ddp.generation_metrics.text_metrics(self.generated, self.targets)
        return self.more_metrics.add_to(metrics, predictions=self.generated, references=self.targets, sources=self.sources)

    def tables(self):
        shown = (self.cfg.log_predictions, self.sources, self.targets, self.generated, self.losses, self.cfg.samples)
        return accel_ddp.generation_metrics.make_tables(*shown)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
