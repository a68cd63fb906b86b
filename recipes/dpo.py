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
from accel_ddp import UserError, option, run
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
            raise UserError(f"--reference {self.reference}: --loss {self.loss} has no reference. Leave it out.")
        if self.evaluate_only == self.model and self.has_reference:
            raise UserError(
                f"--loss {self.loss}: compares a model with its state before training, which {self.model} does not contain. Evaluate "
                "the run or a checkpoint of it, or add --loss simpo, which needs no reference."
            )
        if self.reference == "adapters" and not self.lora_r:
            raise UserError("--reference adapters: needs new adapters (--lora_r 16). Use --reference stored or copy.")

    def check_columns(self, *tables):
        accel_ddp.chat_rows.choose_preference_columns(tables[0], self)

    def metric_directions(self):
        return {"loss": "min", "reward_accuracy": "max", "reward_margin": "max"}


class Task(accel_ddp.ChatTask):
    model_class = "AutoModelForCausalLM"
    per_token = ("labels",)

    def format(self, rows):
        return accel_ddp.preferences.Preferences(rows, self.processor, self.cfg, self.today)

    def encode(self, tables):
        made = super().encode(tables)
        if self.cfg.has_reference:
            accel_ddp.reference.choose_reference(self.cfg, len(made[0]))
        return made

    def collate(self):
        return self.make_rows(self.per_token, accel_ddp.preferences.ItemCollate, is_causal=True, shares=True)

    def batches(self):
        logps, reference = accel_ddp.preferences.TextLogps(accel_ddp.linear_cross_entropy.OutputHead(self.model)), None
        if self.cfg.has_reference:
            given = (self.rows, self.fingerprints, self.collate(), logps)
            reference = accel_ddp.reference.Reference(self.cfg, self.accelerator, self.model, *given)
            self.rows = reference.rows
        self.loss = accel_ddp.preferences.build_loss(self.cfg, logps, reference)
        return super().batches()

    def prepare(self, model, batches, team, seeded):
        self.loss.prepare(model, batches, team, seeded)

    def outputs(self, model, batch):
        return self.loss.logps(model, batch)

    def terms(self, model, batch, team):
        return self.loss.terms(model, batch)

    def measure(self, model, batch):
        return self.loss.measure(model, batch)

    def metrics(self, table):
        self.table = table  # for `tables`
        return self.loss.metrics(table)

    def tables(self):
        return accel_ddp.preferences.make_tables(self.table, self.cfg.log_predictions, self.decode)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
