r"""Fine-tune a causal language model on instructions, chats or plain text: all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file chats.jsonl --lora_r 16

Rows are chats (`messages` with role and content, formatted by the tokenizer's chat template), prompts and answers, or texts.
Only the answers are learned, through their end token (--train_on chooses them). The loss is the mean over their tokens, however they
are spread over ranks and micro-batches.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import option, run
from accel_ddp.config.chat_options import ChatConfig
from accel_ddp.config.train_config import TABLE_FILES


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

    def check_columns(self, *tables):
        given = {option: getattr(self, option) for option in accel_ddp.chat_rows.USUAL_COLUMNS}
        accel_ddp.chat_rows.choose_columns(tables[0], given)

    def metric_directions(self):
        return {"loss": "min", "perplexity": "min"}


class Task(accel_ddp.ChatTask):
    model_class = "AutoModelForCausalLM"
    per_token = ("labels",)

    def format(self, rows):
        return accel_ddp.chat.Format(rows, self.processor, self.cfg, self.today)

    def read(self):
        tables, *self.source = accel_ddp.row_stream.open_rows(self.cfg) if self.cfg.streaming else (super().read(),)
        return tables

    def encode(self, tables):
        made, cfg = super().encode(tables), self.cfg
        self.samples = self.form.select_samples(tables[1], max(cfg.samples, cfg.log_predictions), max_tokens=cfg.max_length)
        self.shares_rows = self.form.kind == "texts" and not cfg.streaming
        return made

    def build(self):
        model = super().build()
        if self.shares_rows:
            self.rows = accel_ddp.text_blocks.share_rows(self.rows, self.cfg, model, self.processor, self.accelerator.device)
        self.output_head = accel_ddp.linear_cross_entropy.OutputHead(model)  # computes the loss without all logits
        return model

    def batches(self):
        _, test = super().batches()
        if self.cfg.streaming:
            self.train = accel_ddp.row_stream.RowStream(*self.source, self.rows[0], self.form, self.collate(), self.cfg)
        return self.train, test

    def collate(self):
        return self.make_rows(self.per_token, is_causal=True)  # nothing predicts the first token of a text

    def outputs(self, model, batch):
        return model(batch).logits[0]  # of each token

    def terms(self, model, batch, team):
        return {"loss": (self.output_head.loss_sum(model, batch), batch.targets)}

    def count(self, batch):
        return batch.targets  # tokens with a label

    def measure(self, model, batch):
        return {"loss": self.output_head.item_losses(model, batch), "tokens": batch.sum((batch["labels"] != -100).long())}

    def metrics(self, table):
        return accel_ddp.metrics.with_perplexity(accel_ddp.metrics.token_loss(table))

    def generate(self, model):
        prompts = [sample.ids for sample in self.samples]
        self.answers = accel_ddp.chat.generate(model, self.processor, prompts, self.cfg.max_new_tokens)

    def tables(self):
        return accel_ddp.generation_metrics.make_answer_tables(self.samples, self.answers, self.processor)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
