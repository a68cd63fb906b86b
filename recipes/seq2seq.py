r"""Fine-tune an encoder-decoder model (T5, BART) to generate a text from a text: translations, summaries, answers.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/seq2seq.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/seq2seq.py \
        --model google-t5/t5-small --train_file train.jsonl --source_column translation.en --target_column translation.de \
        --prefix "translate English to German: " --lr 3e-4 --epochs 3

The loss is the mean over target tokens, however they are spread over ranks and micro-batches. Each evaluation also generates texts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import accel_ddp
from accel_ddp.config.options import column, option
from accel_ddp.config.train_config import ScoredConfig
from accel_ddp.entry import run


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


class Task(accel_ddp.Task):
    model_class = "AutoModelForSeq2SeqLM"  # for the estimate of memory, before the model is loaded

    def __init__(self, cfg: Config, accelerator):
        from transformers import DataCollatorForSeq2Seq

        super().__init__(cfg, accelerator)
        with accel_ddp.together("load the model and the data") as facts:
            self.more_metrics = accel_ddp.metrics.MoreMetrics(cfg, "texts")
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, "AutoModelForSeq2SeqLM")
            self.processor.padding_side = "right"
            train_rows, self.eval_rows = build_data(cfg, self.processor)
            self.more_metrics.try_out(self.eval_rows["target"][:], sources=self.eval_rows["source"][:])
            self.model = build_model(cfg, accelerator, self.processor)
            facts["the data"] = self.identify(train_rows, self.eval_rows)
        multiple = 8 if accelerator.device.type == "cuda" else None
        collate = DataCollatorForSeq2Seq(self.processor, pad_to_multiple_of=multiple)  # without the model, for data workers
        train_rows, eval_rows = (rows.remove_columns(["source", "target"]) for rows in (train_rows, self.eval_rows))
        lengths = partial(accel_ddp.stream.count_tokens, columns=("input_ids", "labels"))  # of sources and targets
        self.use(train_rows, eval_rows, collate, lengths)

    def outputs(self, model, batch):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        # With the inputs of its decoder, the model does not need the labels and computes no loss itself.
        inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return model(**inputs, use_cache=False).logits

    def terms(self, model, batch, team):
        return {"loss": (accel_ddp.losses.of_tokens(self.outputs(model, batch), batch["labels"]), self.count(batch))}

    def count(self, batch):
        return (batch["labels"] != -100).sum()

    def measure(self, model, batch):
        generated = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        losses = accel_ddp.losses.of_tokens(self.outputs(model, batch), batch["labels"], "rows")
        return {"loss": losses, "tokens": (batch["labels"] != -100).sum(-1), "generated": generated}

    def metrics(self, rows):
        generated = accel_ddp.generation_metrics.decode(rows["generated"], self.processor)
        sources, targets = self.eval_rows["source"][:], self.eval_rows["target"][:]
        self.rows, self.generated = rows, generated  # for `tables`
        loss = rows["loss"].sum(dtype="float64") / rows["tokens"].sum()
        metrics = {"loss": loss, **accel_ddp.generation_metrics.text_metrics(generated, targets)}
        return self.more_metrics.add_to(metrics, predictions=generated, references=targets, sources=sources)

    def tables(self):
        sources, targets = self.eval_rows["source"][:], self.eval_rows["target"][:]
        losses = self.rows["loss"] / self.rows["tokens"].clip(min=1)
        shown = (self.cfg.log_predictions, sources, targets, self.generated, losses, self.cfg.samples)
        return accel_ddp.generation_metrics.make_tables(*shown)

    @property
    def example(self):
        source = accel_ddp.examples.literal(self.cfg.prefix + accel_ddp.examples.shorten(self.eval_rows[0]["source"]))
        # Adapters have no generation config.
        options = f"max_new_tokens={self.cfg.max_new_tokens}, num_beams={self.cfg.num_beams}"
        return (
            "from transformers import AutoModelForSeq2SeqLM as M, AutoTokenizer as T; t = T.from_pretrained({folder}); "
            f'ids = M.from_pretrained({{folder}}).generate(**t({source}, return_tensors="pt"), {options}); '
            "print(t.decode(ids[0], skip_special_tokens=True))"
        )


def build_data(cfg: Config, tokenizer):
    """Return rows with `input_ids`, `attention_mask` and `labels`, and the texts `source` and `target`."""
    train, test = (rows.flatten() for rows in accel_ddp.data.load_rows(cfg))  # keys of dictionaries become columns
    columns = {"source_column": cfg.source_column, "target_column": cfg.target_column}
    accel_ddp.data.require_texts(columns, train, test)

    def encode(rows):
        sources, targets = (accel_ddp.data.read_texts(rows, column) for column in columns.values())
        prefixed = [cfg.prefix + source for source in sources]
        inputs = tokenizer(prefixed, truncation=True, max_length=cfg.max_length)
        labels = tokenizer(text_target=targets, truncation=True, max_length=cfg.max_target_length)["input_ids"]
        return {
            **{"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels},
            **{"source": sources, "target": targets, "problem": accel_ddp.data.find_text_problems(rows, list(columns.values()))},
            "max_length": accel_ddp.generation_metrics.find_truncated(tokenizer, prefixed, inputs["input_ids"], cfg.max_length),
            "max_target_length": accel_ddp.generation_metrics.find_truncated(tokenizer, targets, labels, cfg.max_target_length),
        }

    depends_on = [columns, cfg.prefix, cfg.max_length, cfg.max_target_length]
    usable = accel_ddp.tokenization.encode_tables((train, test), encode, tokenizer, depends_on, cfg)
    return accel_ddp.generation_metrics.report_truncated(usable, cfg)


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModelForSeq2SeqLM

    model = accel_ddp.models.load(AutoModelForSeq2SeqLM, cfg, tokenizer)
    accel_ddp.generation_metrics.require_decoder(model, cfg)
    options = (model.generation_config, cfg.max_new_tokens, cfg.num_beams)
    model.generation_config = accel_ddp.generation_metrics.build_generation_config(*options)
    return accel_ddp.models.prepare(model, cfg, accelerator, lora_task="SEQ_2_SEQ_LM")


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
