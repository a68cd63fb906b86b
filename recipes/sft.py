r"""Fine-tune a causal language model on instructions, chats or plain text: all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file chats.jsonl --lora_r 16 --lr 2e-4 --max_length 1024

Rows are chats (`messages` with role and content, formatted by the tokenizer's chat template), prompts and answers, or texts.
Only the answers are learned. The loss is the mean over their tokens, however they are spread over ranks and micro-batches.
"""

import math
from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = option("builtin:tiny-llama", "Hub name, folder, or built-in (pretrained: builtin:SmolLM2-135M-Instruct)")
    dataset: str = "builtin:questions"
    train_file: str = option("", ".csv .tsv .json .jsonl .parquet, or .txt with one text per line")
    messages_column: str = option("", "column of chats; default: messages or conversations", group="data")
    prompt_column: str = option("", "column of prompts; default: prompt, instruction (with input) or question", group="data")
    answer_column: str = option("", "column of answers; default: answer, output, completion or response", group="data")
    text_column: str = option("", "column of plain texts; default: text, if none of the others exists", group="data")
    train_on_prompts: bool = option(False, "learn the prompts too, and not only the answers", group="training")
    max_length: int = option(
        128, "tokens per row; longer rows are truncated, longer plain texts become several rows", group="data", at_least=1
    )
    samples: int = option(
        3,
        "evaluation prompts whose answers are printed before and after training",
        group="evaluation",
        affects_result=False,
        at_least=0,
    )
    log_predictions: int = option(
        0, "answers in a table of each evaluation, which generates so many (--max_new_tokens); they contain your data"
    )
    max_new_tokens: int = option(40, "tokens of such an answer", group="evaluation", affects_result=False, at_least=1)
    epochs: float = 4.0
    global_batch_size: int = 16
    lr: float | Literal["auto"] = option(
        "auto", "highest learning rate; auto: by the size of the model and --lora_r", legacy=2e-3
    )
    lora_targets: tuple[str, ...] = option(("all-linear",), "names of layers that get adapters; all-linear: all except the head")
    micro_batch_size: int | Literal["auto"] = "auto"
    eval_batch_size: int | Literal["auto"] = option(
        "auto", "items per rank in evaluations; auto: by memory, on CPUs 16", legacy=16
    )
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto",
        "recompute activations: less memory, about a third more time; auto: if a step does not fit otherwise",
        legacy=False,
    )

    def metric_directions(self):
        return {"loss": "min", "perplexity": "min"}


class Task:
    """What is learned: the model, the data, the summed loss, the items over which it is averaged, and the metrics."""

    model_class = "AutoModelForCausalLM"  # for the estimate of memory, before the model is loaded
    fits_memory = True  # it calls `fit_memory` itself, when the length of the rows is known

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the data") as facts:
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, "AutoModelForCausalLM")
            self.processor.padding_side = "right"
            train_rows, eval_rows, self.samples, self.prompt = build_data(cfg, self.processor)
            fingerprint = accel_ddp.tokenization.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.tokenization.fingerprint(eval_rows)
        accel_ddp.fit_memory(cfg, accelerator, self.model_class)
        with accel_ddp.together("load the model"):
            self.model = build_model(cfg, accelerator, self.processor)
        collate = accel_ddp.tokenization.pad_collate(self.processor, accelerator, per_token=("labels",))
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.EvalBatches(eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)
        self.head = accel_ddp.linear_cross_entropy.OutputHead(self.model)  # computes the loss without all logits
        self.answers = []  # to the samples, before training and at each evaluation; on the main rank only

    def loss_sum(self, model, batch):
        return self.head.loss_sum(model, *self.split(batch), batch)

    def split(self, batch):
        """Return the inputs of the model, and the token that each position predicts."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        return inputs, accel_ddp.losses.next_tokens(batch["labels"])

    def count(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()  # nothing predicts the first token of a row

    def evaluate(self, model):
        metrics = accel_ddp.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)
        self.answers.append(accel_ddp.evaluation.compute_on_main(self.accelerator, model, self.answer))
        return metrics

    def answer(self, model):
        """Return the answers to the samples."""
        return accel_ddp.chat.generate(model, self.processor, [sample.ids for sample in self.samples], self.cfg.max_new_tokens)

    def measure(self, model, batch):
        """Return one row per item. `evaluate` puts the rows of all ranks in order."""
        losses = self.head.row_losses(model, *self.split(batch), batch)
        return {"loss": losses, "tokens": (batch["labels"][:, 1:] != -100).sum(-1)}

    def summarize(self, rows):
        """Return the mean over the tokens of all items, not over rows or batches. This runs on the main rank."""
        loss = float(rows["loss"].sum(dtype="float64") / rows["tokens"].sum())
        return {"loss": loss, "perplexity": math.exp(min(loss, 700))}

    def tables(self):
        """Return the tables of the last evaluation. This runs on the main rank."""
        return accel_ddp.generation_metrics.make_answer_tables(
            self.cfg.log_predictions, self.samples, self.answers[-1], self.processor
        )

    def report(self):
        """Return the answers to the samples, before and after training."""
        if not self.answers:
            return ""
        before = self.answers[0] if self.cfg.eval_first and not self.cfg.resume and len(self.answers) > 1 else None
        return accel_ddp.chat.format_samples(self.samples[: self.cfg.samples], before, self.answers[-1])

    @property
    def example(self):
        """Python code that applies the exported {model} to the first evaluation row."""
        options = f"{accel_ddp.examples.literal(self.prompt)}, max_new_tokens={self.cfg.max_new_tokens}, do_sample=False"
        return f'from transformers import pipeline; print(pipeline("text-generation", {{model}})({options})[0]["generated_text"])'


def build_data(cfg: Config, tokenizer):
    """Return rows with `input_ids`, `attention_mask` and `labels`, some prompts with their answers to print, and a prompt."""
    tables = accel_ddp.data.load_rows(cfg)
    form = accel_ddp.chat.Format(tables[0], tokenizer, cfg)
    form.require_columns(tables[1])

    def encode(rows):
        return form.encode(rows)

    depends_on = [accel_ddp.models.tokenizer_digest(tokenizer), form.identity]
    encoded = [accel_ddp.tokenization.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in tables]
    usable = accel_ddp.chat.drop_truncated(accel_ddp.data.drop_broken(encoded, cfg), cfg.max_length)
    samples = form.select_samples(tables[1], max(cfg.samples, cfg.log_predictions), max_tokens=cfg.max_length)
    return (*usable, samples, form.first_prompt(tables[1]))


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
