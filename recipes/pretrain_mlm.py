"""Train a masked language model on raw text: from scratch, or on with a pretrained one in the words of your own field.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/pretrain_mlm.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/pretrain_mlm.py \
        --model FacebookAI/roberta-base --train_file 'corpus/*.txt' --streaming --max_length 512 --lr 5e-5

Whole words are hidden, other ones each time a text is seen; the loss is a mean over their tokens, however these lie on
ranks and micro-batches. Text files that are too large to tokenise first are read as they are needed with --streaming.
"""

import math
from dataclasses import dataclass

import accel_ddp
from accel_ddp.config import RecipeConfig, run
from accel_ddp.errors import UserError


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "embedded:tiny-bert"  # hub name, folder, or embedded; a pretrained one goes on from what it knows
    dataset: str = "embedded:docstring_text"  # hub name (name:configuration) or embedded; --train_file overrides it
    train_file: str = ""  # .txt (a text per line), a folder or 'pattern*' of them; .csv .tsv .json .jsonl .parquet
    eval_file: str = ""  # default: the last tenth of a .txt (--streaming: hundredth), a tenth of other rows; at most 2,000
    text_column: str = "text"  # of --dataset and of files with columns
    streaming: bool = False  # read .txt files as they are needed: nothing is tokenised before, memory stays the same
    mask_share: float = 0.15  # of the words
    max_length: int = 128  # tokens of a block; texts are put one after the other and cut into blocks
    epochs: float = 4.0  # passes over the training items; --steps overrides it
    global_batch_size: int = 16  # blocks per update, over all ranks: the result depends on it
    lr: float = 1e-3  # the highest learning rate of the run; to go on with a pretrained model 5e-5 to 1e-4
    warmup_ratio: float = 0.1  # share of all updates until --lr is reached, where --warmup_steps is 0

    def validate(self) -> None:
        super().validate()
        if not 0 < self.mask_share < 1:
            raise UserError(f"--mask_share {self.mask_share}: is a share, between 0 and 1.")


class Task:
    """What is learned: the model, the data, the summed loss, what it is counted in, and how it is measured."""

    def __init__(self, cfg: Config, accelerator):
        self.cfg, self.accelerator = cfg, accelerator
        with accel_ddp.together("load the model and the data") as facts:
            self.tokenizer = accel_ddp.models.load_tokenizer(cfg, cfg.max_length)
            train_blocks, self.eval_blocks, fingerprints = build_data(cfg, self.tokenizer)
            self.model = build_model(cfg, accelerator, self.tokenizer)
            facts["the data"] = "".join(fingerprints)
        collate = accel_ddp.masking.padded(self.tokenizer, accelerator)
        masked = lambda blocks, seed: accel_ddp.masking.Masked(blocks, self.tokenizer, cfg.mask_share, seed)
        self.train = accel_ddp.TrainBatches(masked(train_blocks, None), collate, fingerprints[0])
        self.eval_batches = accel_ddp.metrics.EvalBatches(
            masked(self.eval_blocks, cfg.seed), collate, cfg.eval_batch_size, accelerator, cfg
        )

    def loss_sum(self, model, batch):
        return accel_ddp.losses.cross_entropy(*accel_ddp.masking.scores_and_answers(model, batch))

    def count(self, batch):
        return len(batch["places"])

    def evaluate(self, model):
        return accel_ddp.metrics.evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)

    def measure(self, model, batch):
        """One row of sums per block; `evaluate` puts the rows of all ranks in order."""
        scores, answers = accel_ddp.masking.scores_and_answers(model, batch)
        losses = accel_ddp.losses.cross_entropy(scores, answers, reduction="none")
        rows = {"loss": losses, "right": scores.argmax(-1) == answers, "tokens": answers >= 0}
        return {name: accel_ddp.masking.by_row(values, batch) for name, values in rows.items()}

    def summarize(self, rows):
        """On the main rank, over all blocks: a mean over hidden tokens, not over blocks or batches."""
        tokens = max(1, rows["tokens"].sum())
        loss = float(rows["loss"].sum(dtype="float64") / tokens)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": float(rows["right"].sum() / tokens)}


def build_data(cfg: Config, tokenizer):
    """Blocks of `input_ids` and `words` to train and to evaluate on, and a fingerprint of each."""
    tokens = accel_ddp.masking.Tokens(tokenizer, cfg.model, cfg.max_length)
    if cfg.streaming:
        return accel_ddp.masking.streamed(cfg, tokens)
    tables = accel_ddp.masking.load_texts(cfg)
    accel_ddp.data.require_columns({"text_column": cfg.text_column}, *tables)
    blocks = [accel_ddp.masking.chunks(rows, cfg.text_column, tokens, cfg) for rows in tables]
    return (*blocks, [accel_ddp.data.fingerprint(part) for part in blocks])


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModelForMaskedLM

    model = accel_ddp.models.load(AutoModelForMaskedLM, cfg, tokenizer)
    has_head = any(word in name for name in model.config.architectures or [] for word in ("MaskedLM", "PreTraining"))
    if cfg.lora_r and not has_head:
        raise UserError(
            f"--lora_r {cfg.lora_r}: {cfg.model} has no head that names words; under adapters a new one learns nothing."
        )
    model = accel_ddp.masking.score_places_only(model)
    return accel_ddp.models.ready(model, cfg, accelerator, lora_task="FEATURE_EXTRACTION")


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
        print(accel_ddp.masking.guesses(task.model, task.tokenizer, task.eval_blocks))
    sentence = f"Returns a {task.tokenizer.mask_token} of names."
    try_it = f"from transformers import pipeline; print(pipeline('fill-mask', '{{folder}}')('{sentence}'))"
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics, try_it)


if __name__ == "__main__":
    run(Config, main)
