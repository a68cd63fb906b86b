"""Fine-tune an encoder-decoder (T5, BART) to write a text for a text: translations, summaries, answers.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/seq2seq.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/seq2seq.py \
        --model google-t5/t5-small --train_file train.jsonl --source_column translation.en --target_column translation.de \
        --prefix "translate English to German: " --lr 3e-4 --epochs 3

The loss is a mean over target tokens, however these lie on ranks and micro-batches. Each evaluation also writes texts.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config import RecipeConfig, run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    harmless = (*RecipeConfig.harmless, "max_new_tokens", "num_beams")

    model: str = "embedded:tiny-t5"  # hub name, folder, or embedded
    dataset: str = "embedded:number_words"  # hub name (name:configuration) or embedded; --train_file overrides it
    source_column: str = "source"  # what is read; translation.en is the entry `en` of a column of dictionaries
    target_column: str = "target"  # what is to be written
    prefix: str = ""  # text put before each source
    max_length: int = 128  # tokens of a source; longer ones are cut
    max_target_length: int = 128  # tokens of a target that is learned; longer ones are cut
    max_new_tokens: int = 64  # of a text that is written, in evaluations and by the exported model
    num_beams: int = 1  # of the search for such a text; 1: greedy
    epochs: float = 7.0  # passes over the training items; --steps overrides it
    micro_batch_size: int | Literal["auto"] = 32  # items a rank holds in memory at once
    lr: float = 4e-3  # the highest learning rate of the run; for pretrained models 5e-5 to 5e-4
    warmup_ratio: float = 0.05  # updates until --lr is reached, as a share of all, where --warmup_steps is 0
    eval_every: int = 300  # updates; 0: at the end of every epoch
    best_metric: str = "loss"  # what early stopping looks at: loss, exact_match, bleu, chrf, rouge_l


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        from transformers import DataCollatorForSeq2Seq

        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            self.tokenizer.padding_side = "right"
            train_rows, self.eval_rows = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer)
            fingerprint = accel_ddp.data.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.data.fingerprint(self.eval_rows)
        multiple = 8 if accelerator.device.type == "cuda" else None
        # Gives the decoder its inputs, so that the model computes no loss of its own.
        collate = DataCollatorForSeq2Seq(self.tokenizer, self.model, pad_to_multiple_of=multiple)
        train_rows, eval_rows = (rows.remove_columns(["source", "target"]) for rows in (train_rows, self.eval_rows))
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.metrics.EvalBatches(eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)

    def loss_sum(self, model, batch, reduction="sum"):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return accel_ddp.losses.of_tokens(model(**inputs, use_cache=False).logits, batch["labels"], reduction)

    def count(self, batch):
        return (batch["labels"] != -100).sum()

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        written = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return {"loss": self.loss_sum(model, batch, "rows"), "tokens": (batch["labels"] != -100).sum(-1), "written": written}

    def summarize(self, rows):
        """On the main rank, over all items: a mean over tokens, and scores of the texts against whole targets."""
        outputs = accel_ddp.textscores.decoded(rows["written"], self.tokenizer)
        sources, targets = self.eval_rows["source"][:], self.eval_rows["target"][:]
        self.samples = accel_ddp.textscores.table_of_samples(sources, targets, outputs)
        loss = float(rows["loss"].sum(dtype="float64") / rows["tokens"].sum())
        return {"loss": loss, **accel_ddp.textscores.of_texts(outputs, targets)}


def build_data(cfg: Config, tokenizer):
    """Rows with `input_ids`, `attention_mask` and `labels`, and the texts `source` and `target` as they were."""
    train, test = (rows.flatten() for rows in accel_ddp.data.load_rows(cfg))  # entries of dictionaries become columns
    columns = {"source_column": cfg.source_column, "target_column": cfg.target_column}
    accel_ddp.data.require_columns(columns, train, test)

    def encode(rows):
        sources, targets = texts = [accel_ddp.data.texts(rows, column) for column in columns.values()]
        prefixed = [cfg.prefix + source for source in sources]
        inputs = tokenizer(prefixed, truncation=True, max_length=cfg.max_length)
        labels = tokenizer(text_target=targets, truncation=True, max_length=cfg.max_target_length)["input_ids"]
        return {
            **{"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels},
            **{"source": sources, "target": targets, "problem": accel_ddp.data.empty(list(columns.values()), texts)},
            "max_length": accel_ddp.textscores.are_cut(tokenizer, prefixed, inputs["input_ids"], cfg.max_length),
            "max_target_length": accel_ddp.textscores.are_cut(tokenizer, targets, labels, cfg.max_target_length),
        }

    depends_on = [accel_ddp.models.identity(tokenizer), columns, cfg.prefix, cfg.max_length, cfg.max_target_length]
    encoded = [accel_ddp.data.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in (train, test)]
    return accel_ddp.textscores.say_what_is_cut(accel_ddp.data.without_broken(encoded, cfg), cfg)


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModelForSeq2SeqLM

    model = accel_ddp.models.load(AutoModelForSeq2SeqLM, cfg, tokenizer)
    accel_ddp.textscores.require_decoder(model, cfg)
    model.generation_config = accel_ddp.textscores.generation_config(model.generation_config, cfg.max_new_tokens, cfg.num_beams)
    return accel_ddp.models.ready(model, cfg, accelerator, lora_task="SEQ_2_SEQ_LM")


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
        print(task.samples)
    try_it = (
        "from transformers import AutoModelForSeq2SeqLM as M, AutoTokenizer as T; t = T.from_pretrained('{folder}'); "
        "print(t.decode(M.from_pretrained('{folder}').generate(**t('1984', return_tensors='pt'))[0], skip_special_tokens=True))"
    )
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, try_it)


if __name__ == "__main__":
    run(Config, main)
