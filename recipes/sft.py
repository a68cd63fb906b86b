"""Fine-tune a causal language model on instructions, chats or plain text; all weights, or adapters (LoRA).

    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/sft.py \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file chats.jsonl --lora_r 16 --lr 2e-4 --max_length 1024

Rows are chats (`messages`: role and content, spelled by the tokenizer's chat template), prompts and answers, or texts.
Only the answers are learned, and the loss is a mean over their tokens, however these lie on ranks and micro-batches.
"""

import math
from dataclasses import dataclass

import accel_ddp
from accel_ddp.config import RecipeConfig, run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    harmless = (*RecipeConfig.harmless, "samples", "max_new_tokens")
    model: str = "embedded:tiny-llama"  # hub name, folder, or embedded (real: embedded:SmolLM2-135M-Instruct)
    dataset: str = "embedded:questions"  # hub name (name:configuration) or embedded; --train_file overrides it
    messages_column: str = ""  # chats; default: messages or conversations
    prompt_column: str = ""  # default: prompt, instruction (with input) or question
    answer_column: str = ""  # default: answer, output, completion or response
    text_column: str = ""  # plain text; default: text, where there is none of the others
    train_on_prompts: bool = False  # learn the prompts too, not only the answers
    max_length: int = 128  # tokens; of longer rows the end is cut, longer plain texts become several rows
    samples: int = 3  # evaluation prompts that are answered before and after, to look at
    max_new_tokens: int = 40  # of such an answer
    epochs: float = 4.0  # passes over the training items; --steps overrides it
    global_batch_size: int = 16  # items per update, over all ranks: the result depends on it
    lr: float = 2e-3  # the highest learning rate of the run; for pretrained models 1e-5 to 5e-5, for adapters 1e-4 to 1e-3
    eval_batch_size: int = 16  # items per rank


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            self.tokenizer.padding_side = "right"
            train_rows, eval_rows, self.samples = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer)
            fingerprint = accel_ddp.data.fingerprint(train_rows)
            facts["the data"] = fingerprint + accel_ddp.data.fingerprint(eval_rows)
        collate = accel_ddp.data.padded(self.tokenizer, accelerator, per_token=("labels",))
        self.train = accel_ddp.TrainBatches(train_rows, collate, fingerprint)
        self.eval_batches = accel_ddp.metrics.EvalBatches(eval_rows, collate, cfg.eval_batch_size, accelerator, cfg)
        self.head = accel_ddp.heads.OutputHead(self.model)  # the loss without a table of all words for all tokens
        self.said: list[list[str]] = []  # answers to the samples, before training and at each evaluation

    def loss_sum(self, model, batch):
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        return self.head.loss_sum(model, inputs, accel_ddp.losses.next_tokens(batch["labels"]), batch)

    def count(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()  # the first token of a row has nothing before it

    def evaluate(self, model):
        self.module = self.accelerator.unwrap_model(model)
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row per item; `evaluate` puts the rows of all ranks in order."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        losses = accel_ddp.losses.of_tokens(logits[:, :-1], batch["labels"][:, 1:], "rows")
        return {"loss": losses, "tokens": (batch["labels"][:, 1:] != -100).sum(-1)}

    def summarize(self, rows):
        """On the main rank, over all items: a mean over tokens, not over rows or batches."""
        prompts = [prompt for prompt, _ in self.samples]
        self.said.append(accel_ddp.chat.generated(self.module, self.tokenizer, prompts, self.cfg.max_new_tokens))
        loss = float(rows["loss"].sum(dtype="float64") / rows["tokens"].sum())
        return {"loss": loss, "perplexity": math.exp(min(loss, 700))}


def build_data(cfg: Config, tokenizer):
    """Rows with `input_ids`, `attention_mask` and `labels`; and some (prompt, answer) to look at."""
    tables = accel_ddp.data.load_rows(cfg)
    form = accel_ddp.chat.Format(tables[0], tokenizer, cfg)
    accel_ddp.data.require_columns({f"{form.kind}' column": column for column in form.columns}, *tables)

    def encode(rows):
        return form.encode(rows)

    depends_on = [accel_ddp.models.identity(tokenizer), form.identity]
    encoded = [accel_ddp.data.map_once(rows, encode, depends_on=depends_on, cfg=cfg) for rows in tables]
    sound = accel_ddp.chat.without_cut_off(accel_ddp.data.without_broken(encoded, cfg), cfg.max_length)
    return (*sound, form.samples(tables[1], cfg.samples, max_tokens=cfg.max_length))


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModelForCausalLM

    model = accel_ddp.models.load(AutoModelForCausalLM, cfg, tokenizer)
    return accel_ddp.models.ready(model, cfg, accelerator, lora_task="CAUSAL_LM")


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    files = accel_ddp.export.files_of(task.model, task.tokenizer)
    metrics = accel_ddp.fit(
        accelerator, cfg, model=task.model, optimizer=accel_ddp.optim.build(task.model, cfg), train=task.train,
        loss_sum=task.loss_sum, count=task.count, evaluate=task.evaluate,
        hooks=accel_ddp.hooks.standard(accelerator, cfg), files=files,
    )  # fmt: skip
    if accelerator.is_main_process and task.said:
        before = task.said[0] if cfg.eval_first and not cfg.resume and len(task.said) > 1 else None
        print(accel_ddp.chat.table_of_samples(task.samples, before, task.said[-1]))
    try_it = (
        "from transformers import pipeline; print(pipeline('text-generation', '{folder}')([dict(role='user', content='Hi')]))"
    )
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, try_it)


if __name__ == "__main__":
    run(Config, main)
