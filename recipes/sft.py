r"""Fine-tune a causal language model on instructions, chats or plain text: all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file chats.jsonl --lora_r 16

Rows are chats (`messages` with role and content, formatted by the tokenizer's chat template), prompts and answers, or texts.
Only the answers are learned, through their end token (--train_on chooses them). The loss is the mean over their tokens, however they
are spread over ranks and micro-batches.
"""

import math
from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config.chat_options import ChatConfig
from accel_ddp.config.option_values import check_streaming
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TABLE_FILES
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(ChatConfig):
    dataset: str = "builtin:questions"
    train_file: tuple[str, ...] = option(
        (), f"files, folders or patterns: {TABLE_FILES}, or .txt with a text per line; a mixture: PATH:WEIGHT"
    )
    text_column: str = option("", "column of plain texts; default: text, if none of the others exists", group="data")
    train_on_prompts: bool = option(False, "also train on the prompts", group="training")
    max_length: int | Literal["auto"] = option(
        "auto", "tokens per row; longer rows are truncated, longer plain texts become several rows; auto: from the data, up to the "
        "model's limit", legacy=128
    )  # fmt: skip
    train_on: int | Literal["all", "last"] = option(
        "all", "which answers of a chat to train on; N: the last N", group="training", at_least=1
    )
    packing: Literal["auto", "on", "off"] = option(
        "auto", "short plain texts share rows of at most --max_length tokens and do not see each other; auto: if the model allows it",
        group="data", legacy="off",
    )  # fmt: skip
    streaming: bool = option(
        False, "read rows in order and tokenize them during training, instead of storing all tokens first; needs --steps and "
        "--max_length", group="data",
    )  # fmt: skip
    shuffle_block: int = option(10_000, "with --streaming: shuffle within this many consecutive rows", group="data", at_least=1)
    samples: int = option(
        3, "answers to generate and print at each evaluation; its table has them too, and they contain your data",
        group="evaluation", affects_result=False, at_least=0,
    )  # fmt: skip
    log_predictions: int = option(0, "answers to generate for the table of each evaluation, if more than --samples")
    max_new_tokens: int = option(40, "tokens of a generated answer", group="evaluation", affects_result=False, at_least=1)
    epochs: float = 4.0
    global_batch_size: int = 16
    lr: float | Literal["auto"] = option("auto", "peak learning rate; auto: by the size of the model and --lora_r", legacy=2e-3)

    def validate(self):
        super().validate()
        if self.streaming:
            check_streaming(self)

    def check_columns(self, *tables):
        given = {option: getattr(self, option) for option in accel_ddp.chat_rows.USUAL_COLUMNS}
        accel_ddp.chat_rows.choose_columns(tables[0], given)

    def metric_directions(self):
        return {"loss": "min", "perplexity": "min"}


class Task(accel_ddp.Task):
    model_class = "AutoModelForCausalLM"  # for the estimate of memory, before the model is loaded
    fits_memory = True  # it calls `fit_memory` itself, when the length of the rows is known

    def __init__(self, cfg: Config, accelerator):
        super().__init__(cfg, accelerator)
        today = accel_ddp.chat.agree_on_today()
        with accel_ddp.together("load the data") as facts:
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, "AutoModelForCausalLM")
            self.processor.padding_side = "right"
            rows, self.samples, self.prompt, form, source = build_data(cfg, self.processor, today)
            facts["the data"] = self.identify(*rows)
        share_rows = form.kind == "texts" and not cfg.streaming
        accel_ddp.fit_memory(cfg, accelerator, self.model_class, () if share_rows or cfg.streaming else rows)
        with accel_ddp.together("load the model") as facts:
            self.model = accel_ddp.models.build(self.model_class, cfg, accelerator, self.processor)
            accel_ddp.generation_metrics.add_end_tokens(self.model, self.processor, rows[0])
            if share_rows:
                rows = accel_ddp.text_blocks.share_rows(rows, cfg, self.model, self.processor, accelerator.device)
                facts["--packing"] = cfg.packing
        collate = self.pad(per_token=("labels",))
        self.use(*rows, collate)
        if cfg.streaming:
            self.train = accel_ddp.row_stream.RowStream(*source, rows[0], form, collate, cfg)
        self.head = accel_ddp.linear_cross_entropy.OutputHead(self.model)  # computes the loss without all logits

    def outputs(self, model, batch):
        return model(**inputs_of(batch)).logits

    def terms(self, model, batch, team):
        labels = accel_ddp.losses.next_tokens(batch["labels"])
        return {"loss": (self.head.loss_sum(model, inputs_of(batch), labels, batch), self.count(batch))}

    def count(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()  # nothing predicts the first token of a row

    def generate(self, model):
        prompts = [sample.ids for sample in self.samples]
        self.answers = accel_ddp.chat.generate(model, self.processor, prompts, self.cfg.max_new_tokens)

    def measure(self, model, batch):
        losses = self.head.row_losses(model, inputs_of(batch), accel_ddp.losses.next_tokens(batch["labels"]), batch)
        return {"loss": losses, "tokens": (batch["labels"][:, 1:] != -100).sum(-1)}

    def metrics(self, table):
        loss = float(table["loss"].sum(dtype="float64") / table["tokens"].sum())  # over the tokens of all rows
        return {"loss": loss, "perplexity": math.exp(min(loss, 700))}

    def tables(self):
        return accel_ddp.generation_metrics.make_answer_tables(self.samples, self.answers, self.processor)

    @property
    def example(self):
        options = f"{accel_ddp.examples.literal(self.prompt)}, max_new_tokens={self.cfg.max_new_tokens}, do_sample=False"
        return f'from transformers import pipeline; print(pipeline("text-generation", {{model}})({options})[0]["generated_text"])'


def build_data(cfg: Config, tokenizer, today):
    """Return rows with `input_ids`, `attention_mask` and `labels`, some prompts with their answers to print, and a prompt.

    Return also the format of the rows, and with --streaming where they come from.
    """
    tables, *source = accel_ddp.row_stream.open_rows(cfg) if cfg.streaming else (accel_ddp.data.load_rows(cfg),)
    form = accel_ddp.chat.Format(tables[0], tokenizer, cfg, today)
    usable = form.finish(form.encode_tables(tables, cfg), cfg)
    samples = form.select_samples(tables[1], max(cfg.samples, cfg.log_predictions), max_tokens=cfg.max_length)
    return usable, samples, form.first_prompt(tables[1]), form, source


def inputs_of(batch):
    """Return what the model is given. The documents of packed rows are found by their positions, if there is no mask."""
    where = "position_ids" if "position_ids" in batch else "attention_mask"
    return {"input_ids": batch["input_ids"], where: batch[where], "use_cache": False}


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
