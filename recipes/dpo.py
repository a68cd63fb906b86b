r"""Align a language model with preferences (DPO, SimPO, KTO, ...), with all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/dpo.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/dpo.py \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file pairs.jsonl --lora_r 16

Rows have a prompt and a chosen and a rejected answer, as texts or messages, or the answers are whole chats with a common beginning. KTO
also reads single answers with a label. The loss is the mean over pairs (KTO: over answers), however they are spread over ranks and
micro-batches. The losses are a table in accel_ddp/tasks/preference_losses.py. docs/preferences.md compares them with those of TRL.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.entry import run
from accel_ddp.tasks.preference_losses import LossConfig


@dataclass(kw_only=True)
class Config(LossConfig):
    messages_column: str = option("", "kto: column of chats, whose last answer has the label; default: messages or conversations")
    lr: float | Literal["auto"] = option(
        "auto", "peak learning rate; auto: by the size of the model, --lora_r and --loss", legacy="auto"
    )
    reference: Literal["auto", "stored", "adapters", "copy"] = option(
        "auto", "log-probabilities of the untrained model: stored (computed once before training, and cached), adapters (the model "
        "without its new adapters, in every step), copy (with a copy of the trained weights); auto: stored, if training reads all "
        "rows", group="training", legacy="auto", affects_result=False,
    )  # fmt: skip
    dropout: bool = option(False, "use dropout; off: the loss starts at its value for equal models")
    global_batch_size: int = option(32, "pairs (kto: answers) per optimizer step, over all ranks; the result depends on it")

    def validate(self):
        super().validate()
        if self.reference != "auto" and not self.has_reference and not self.evaluate_only:
            raise accel_ddp.UserError(f"--reference {self.reference}: --loss {self.loss} has no reference. Leave it out.")
        if self.evaluate_only == self.model and self.has_reference:
            raise accel_ddp.UserError(
                f"--loss {self.loss}: compares a model with its state before training, which {self.model} does not contain. Evaluate "
                "the run or a checkpoint of it, or add --loss simpo, which needs no reference."
            )
        if self.reference == "adapters" and not self.lora_r:
            raise accel_ddp.UserError("--reference adapters: needs new adapters (--lora_r 16). Use --reference stored or copy.")

    def check_columns(self, *tables):
        accel_ddp.chat_rows.choose_preference_columns(tables[0], self)

    def metric_directions(self):
        return {"loss": "min", "reward_accuracy": "max", "reward_margin": "max"}


class Task(accel_ddp.Task):
    model_class = "AutoModelForCausalLM"  # for the estimate of memory, before the model is loaded
    fits_memory = True  # it calls `fit_memory` itself, when the length of the rows is known

    def __init__(self, cfg: Config, accelerator):
        super().__init__(cfg, accelerator)
        today = accel_ddp.chat.agree_on_today()
        with accel_ddp.together("load the data") as facts:
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, self.model_class)
            rows, self.prompt = build_data(cfg, self.processor, today)
            facts["the data"] = self.identify(*rows)
            if cfg.has_reference:
                accel_ddp.reference.choose_reference(cfg, len(rows[0]))
        accel_ddp.fit_memory(cfg, accelerator, self.model_class, rows)
        with accel_ddp.together("load the model"):
            self.model = accel_ddp.models.build(self.model_class, cfg, accelerator, self.processor)
            accel_ddp.generation_metrics.add_end_tokens(self.model, self.processor, accel_ddp.preferences.first_texts(rows[0]))
        collate = self.pad(per_token=("labels",), kind=accel_ddp.preferences.ItemCollate)
        logps, reference = accel_ddp.preferences.TextLogps(accel_ddp.linear_cross_entropy.OutputHead(self.model)), None
        if cfg.has_reference:
            reference = accel_ddp.reference.Reference(cfg, accelerator, self.model, rows, self.fingerprints, collate, logps)
            rows = reference.rows
        self.loss = accel_ddp.preferences.build_loss(cfg, logps, reference)
        self.eval_rows = rows[1]
        self.use(*rows, collate)

    def prepare(self, model, batches, team, seeded):
        self.loss.prepare(model, batches, team, seeded)

    def outputs(self, model, batch):
        return self.loss.logps(model, batch)

    def terms(self, model, batch, team):
        return self.loss.terms(model, batch)

    def count(self, batch):
        return len(batch["good"]) if "good" in batch else len(batch["input_ids"]) // 2

    def measure(self, model, batch):
        return self.loss.measure(model, batch)

    def metrics(self, table):
        self.measured = table  # for `tables`
        return self.loss.metrics(table)

    def tables(self):
        return accel_ddp.preferences.make_tables(self.measured, self.cfg.log_predictions, self.decode)

    def decode(self, items, text):
        return [self.processor.decode(ids[text]) for ids in self.eval_rows[items]["input_ids"]]

    @property
    def example(self):
        options = f"{accel_ddp.examples.literal(self.prompt)}, max_new_tokens=40, do_sample=False"
        return f'from transformers import pipeline; print(pipeline("text-generation", {{model}})({options})[0]["generated_text"])'


def build_data(cfg: Config, tokenizer, today):
    """Return rows with `input_ids` and `labels` of two texts each, and a prompt."""
    tables = accel_ddp.data.load_rows(cfg)
    form = accel_ddp.preferences.Preferences(tables[0], tokenizer, cfg, today)
    return form.finish(form.encode_tables(tables, cfg), cfg), form.first_prompt(tables[1])


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
