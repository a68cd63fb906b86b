r"""Align a language model with preferences: DPO, IPO, ORPO, SimPO or KTO, with all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/dpo.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/dpo.py \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file pairs.jsonl --lora_r 16

Rows have a prompt and a chosen and a rejected answer, as texts or messages, or the answers are whole chats with a common beginning. KTO
also reads single answers with a label. The loss is the mean over pairs (KTO: over answers), however they are spread over ranks and
micro-batches. docs/preferences.md has the formulas, and where they differ from those of TRL.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config.chat_options import ChatConfig
from accel_ddp.config.choices import choose
from accel_ddp.config.options import option
from accel_ddp.entry import run
from accel_ddp.errors import UserError

REFERENCE_FREE = ("orpo", "simpo")
# By the loss: the usual beta, and the learning rate as a part of the one of `sft`.
BETAS = {"dpo": 0.1, "ipo": 0.1, "orpo": 0.1, "simpo": 2.0, "kto": 0.1}
LR_PARTS = {"dpo": 0.05, "ipo": 0.05, "orpo": 0.4, "simpo": 0.025, "kto": 0.05}


@dataclass(kw_only=True)
class Config(ChatConfig):
    dataset: str = "builtin:preferences"
    loss: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = option(
        "dpo", "orpo and simpo need no reference model; kto learns from single answers with a label", group="training",
        also=("loss_type", "pref_loss"),
    )  # fmt: skip
    beta: float | Literal["auto"] = option(
        "auto", "strength: how much rewards count (orpo: weight of the odds ratio); auto: 0.1, simpo 2", group="training",
        legacy="auto", also=("pref_beta", "orpo_alpha", "rl_beta"),
    )  # fmt: skip
    label_smoothing: float = option(
        0.0, "dpo: probability that a pair is labeled the wrong way round (cDPO)", group="training", at_least=0,
        also=("dpo_label_smoothing",),
    )  # fmt: skip
    gamma: float = option(0.5, "simpo: margin by which the chosen answer must win", group="training", also=("simpo_gamma",))
    sft_weight: float = option(
        0.0, "weight of an SFT loss on the chosen answers (mean per token); orpo includes it", group="training", at_least=0,
        also=("rpo_alpha", "pref_ftx", "cpo_alpha"),
    )  # fmt: skip
    desirable_weight: float = option(
        1.0, "kto: weight of desirable answers", group="training", also=("kto_desirable_weight", "kto_chosen_weight")
    )
    undesirable_weight: float = option(
        1.0, "kto: weight of undesirable answers", group="training", also=("kto_undesirable_weight", "kto_rejected_weight")
    )
    prompt_column: str = option(
        "", "column of prompts; default: prompt, instruction, question or conversations; chats may include their prompts"
    )
    chosen_column: str = option("chosen", "column of the better answers", group="data")
    rejected_column: str = option("rejected", "column of the worse answers", group="data")
    label_column: str = option("", "kto: column that is 1 or true for desirable answers; default: label or kto_tag", group="data")
    answer_column: str = option("", "kto: column of answers; default: answer, output, completion or response")
    messages_column: str = option("", "kto: column of chats, whose last answer has the label; default: messages or conversations")
    reference: Literal["auto", "stored", "adapters", "copy"] = option(
        "auto",
        "log-probabilities of the untrained model: stored (computed once before training, and cached), adapters (the model without "
        "its new adapters, in every step), copy (with a copy of the trained weights); auto: stored, if training reads all rows",
        group="training",
        legacy="auto",
        affects_result=False,
    )  # fmt: skip
    dropout: bool = option(False, "use dropout; off: the loss starts at its value for equal models")
    epochs: float = 1.0
    global_batch_size: int = option(32, "pairs (kto: answers) per optimizer step, over all ranks; the result depends on it")
    lr: float | Literal["auto"] = option(
        "auto", "peak learning rate; auto: by the size of the model, --lora_r and --loss", legacy="auto"
    )
    warmup_ratio: float = 0.1
    # What `sft` has as options.
    train_on_prompts, train_on, packing = False, "all", "off"
    texts_per_item = 2  # for the estimate of memory

    def validate(self):
        super().validate()
        only = {"label_smoothing": ("dpo",), "gamma": ("simpo",), "desirable_weight": ("kto",), "undesirable_weight": ("kto",)}
        only |= {"answer_column": ("kto",), "label_column": ("kto",)}
        for name, losses in {**only, "sft_weight": ("dpo", "ipo", "simpo", "kto")}.items():
            if (value := getattr(self, name)) != getattr(type(self), name) and self.loss not in losses:
                raise UserError(
                    f"--{name} {value}: is an option of --loss {' and '.join(losses)}, not of {self.loss}. Leave it out."
                )
        if self.beta != "auto" and not self.beta > 0:
            raise UserError(f"--beta {self.beta}: must be above 0. {BETAS[self.loss]} is usual.")
        if not self.label_smoothing < 0.5:
            reason = "must be below 0.5, at which both answers are equally good. 0.1 is usual"
            raise UserError(f"--label_smoothing {self.label_smoothing}: {reason}.")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} {getattr(self, name)}: must be above 0.")
        if self.reference != "auto" and self.loss in REFERENCE_FREE and not self.evaluate_only:
            raise UserError(f"--reference {self.reference}: --loss {self.loss} has no reference. Leave it out.")
        if self.evaluate_only == self.model and self.loss not in REFERENCE_FREE:
            raise UserError(
                f"--loss {self.loss}: compares a model with its state before training, which {self.model} does not contain. Evaluate "
                "the run or a checkpoint of it, or add --loss simpo, which needs no reference."
            )
        if self.reference == "adapters" and not self.lora_r:
            raise UserError("--reference adapters: needs new adapters (--lora_r 16). Use --reference stored or copy.")

    def lr_part(self):
        """Return the part of the learning rate of `sft` that this loss needs, and the reason."""
        return LR_PARTS[self.loss], f"--loss {self.loss}"

    def check_columns(self, *tables):
        accel_ddp.chat_rows.choose_preference_columns(tables[0], self)

    def metric_directions(self):
        return {"loss": "min", "reward_accuracy": "max", "reward_margin": "max"}


class Task:
    """What is learned: the model, the data, the summed loss, the pairs over which it is averaged, and the metrics."""

    model_class = "AutoModelForCausalLM"  # for the estimate of memory, before the model is loaded
    fits_memory = True  # it calls `fit_memory` itself, when the length of the rows is known

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator, self.eval_rows = cfg, accelerator, None
        if cfg.beta == "auto":
            choose(cfg, "beta", BETAS[cfg.loss], f"usual for --loss {cfg.loss}")
        today = accel_ddp.chat.agree_on_today()
        with accel_ddp.together("load the data") as facts:
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, "AutoModelForCausalLM")
            self.processor.padding_side = "right"
            rows, self.prompt = build_data(cfg, self.processor, today)
            fingerprints = [accel_ddp.tokenization.fingerprint(table, cfg.cache_dir) for table in rows]
            facts["the data"] = "".join(fingerprints)
            has_reference = cfg.loss not in REFERENCE_FREE
            if has_reference:
                accel_ddp.reference.choose_reference(cfg, len(rows[0]))
        accel_ddp.fit_memory(cfg, accelerator, self.model_class, rows)
        with accel_ddp.together("load the model"):
            self.model = build_model(cfg, accelerator, self.processor)
            accel_ddp.generation_metrics.add_end_tokens(self.model, self.processor, accel_ddp.preferences.first_texts(rows[0]))
        collate = accel_ddp.tokenization.pad_collate(
            self.processor, accelerator, per_token=("labels",), kind=accel_ddp.preferences.ItemCollate
        )
        self.logps = accel_ddp.preferences.TextLogps(accel_ddp.linear_cross_entropy.OutputHead(self.model))
        self.reference = None
        if has_reference:
            more = (fingerprints, collate, self.logps)
            self.reference = accel_ddp.reference.Reference(cfg, accelerator, self.model, rows, *more)
            rows, collate = self.reference.rows, self.reference.collate
        train_rows, self.eval_rows = rows
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprints[0])
        self.eval_batches = accel_ddp.EvalBatches(self.eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)
        if cfg.loss == "kto":
            self.loss_sum = accel_ddp.preferences.KtoLoss(cfg, self.logps, self.reference.logps)

    def loss_sum(self, model, batch):
        """Return the summed loss of pairs, and sums for the log. For KTO, `KtoLoss` replaces this method."""
        reference = self.reference.logps(model, batch) if self.reference else None
        policy, tokens = self.logps(model, batch), accel_ddp.preferences.answer_tokens(batch)
        losses, rewards = accel_ddp.preferences.pair_losses(self.cfg, policy, reference, tokens)
        numbers = accel_ddp.preferences.pair_numbers(policy, rewards)
        return losses.sum(), {name: values.sum() for name, values in numbers.items()}

    def count(self, batch):
        return len(batch["good"]) if "good" in batch else len(batch["input_ids"]) // 2

    def evaluate(self, model):
        return accel_ddp.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """Return one row per item. `evaluate` puts the rows of all ranks in order."""
        reference = self.reference.logps(model, batch) if self.reference else None
        policy, tokens = self.logps(model, batch), accel_ddp.preferences.answer_tokens(batch)
        if "good" in batch:
            return {"policy": policy, "reference": reference, "tokens": tokens, "good": batch["good"]}
        losses, rewards = accel_ddp.preferences.pair_losses(self.cfg, policy, reference, tokens)
        numbers = accel_ddp.preferences.pair_numbers(policy, rewards)
        return {"loss": losses, **{accel_ddp.preferences.METRICS[name]: values for name, values in numbers.items()}}

    def summarize(self, rows):
        """Return the means over all pairs, or the metrics of labeled answers. This runs on the main rank."""
        self.measured = rows  # for `tables`
        if "good" not in rows:
            return {name: float(values.mean(dtype="float64")) for name, values in rows.items()}
        metrics, self.measured["reward"] = accel_ddp.preferences.summarize_kto(self.cfg, rows)
        return metrics

    def tables(self):
        """Return the tables of the last evaluation. This runs on the main rank."""
        return accel_ddp.preferences.make_tables(self.measured, self.cfg.log_predictions, self.decode)

    def decode(self, items, text):
        """Return one of the texts of some evaluation items, with their prompts."""
        return [self.processor.decode(ids[text]) for ids in self.eval_rows[items]["input_ids"]]

    @property
    def example(self):
        """Python code that applies the exported {model} to the first evaluation row."""
        options = f"{accel_ddp.examples.literal(self.prompt)}, max_new_tokens=40, do_sample=False"
        return f'from transformers import pipeline; print(pipeline("text-generation", {{model}})({options})[0]["generated_text"])'


def build_data(cfg: Config, tokenizer, today):
    """Return rows with `input_ids` and `labels` of two texts each, and a prompt."""
    tables = accel_ddp.data.load_rows(cfg)
    form = accel_ddp.preferences.Preferences(tables[0], tokenizer, cfg, today)
    encoded = form.encode_tables(tables, cfg)
    return form.finish(encoded, cfg), form.first_prompt(tables[1])


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModelForCausalLM

    model = accel_ddp.models.load(AutoModelForCausalLM, cfg, tokenizer)
    model = accel_ddp.models.prepare(model, cfg, accelerator, lora_task="CAUSAL_LM")
    accel_ddp.model_kinds.require_causal(model, tokenizer, accelerator.device, cfg.model)
    return model


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
