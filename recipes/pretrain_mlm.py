r"""Train a masked language model on raw text: from scratch, or continue a pretrained one on texts of your own domain.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/pretrain_mlm.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/pretrain_mlm.py \
        --model FacebookAI/roberta-base --train_file 'corpus/*.txt' --streaming --max_length 512 --lr 5e-5

Whole words are masked, and different ones each time a text is seen. The loss is the mean over their tokens, however they are
spread over ranks and micro-batches. With --streaming, large text files are read as needed instead of being tokenized first.
"""

import math
from dataclasses import dataclass

import accel_ddp
from accel_ddp.config.options import column, option
from accel_ddp.config.train_config import TABLE_FILES, TEXT_FILES, RecipeConfig
from accel_ddp.entry import run
from accel_ddp.errors import UserError


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = option("builtin:tiny-bert", "Hub name, folder, or built-in; a pretrained model is trained further")
    dataset: str = "builtin:docstring_text"
    file_endings = TEXT_FILES
    train_file: tuple[str, ...] = option((), f"files, folders or patterns: .txt (one text per line); {TABLE_FILES}")
    eval_file: tuple[str, ...] = option(
        (), "default: the last tenth of a .txt (--streaming: hundredth), a tenth of other rows; at most 2,000"
    )
    text_column: str = column("text", "column of the text, in --dataset and in files with columns")
    streaming: bool = option(False, "tokenize .txt files during training, without holding them in memory", group="data")
    mask_share: float = option(0.15, "fraction of words to mask", group="training", also=("mlm_probability",))
    max_length: int = option(128, "tokens per block; texts are concatenated and cut into blocks", group="data", at_least=1)
    epochs: float = 4.0
    global_batch_size: int = option(16, "blocks per optimizer step, over all ranks; the result depends on it")
    lr: float = option(1e-3, "peak learning rate; to continue a pretrained model 5e-5 to 1e-4")
    warmup_ratio: float = 0.1

    def metric_directions(self):
        return {"loss": "min", "perplexity": "min", "accuracy": "max"}

    def validate(self) -> None:
        super().validate()
        if not 0 < self.mask_share < 1:
            raise UserError(f"--mask_share {self.mask_share}: must be a fraction between 0 and 1.")


class Task(accel_ddp.Task):
    model_class = "AutoModelForMaskedLM"  # for the estimate of memory, before the model is loaded

    def __init__(self, cfg: Config, accelerator):
        super().__init__(cfg, accelerator)
        with accel_ddp.together("load the model and the data") as facts:
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, "AutoModelForMaskedLM")
            train_blocks, self.eval_blocks, self.fingerprints = build_data(cfg, self.processor)
            self.model = build_model(cfg, accelerator, self.processor)
            facts["the data"] = "".join(self.fingerprints)
        masked = lambda blocks, seed: accel_ddp.masking.MaskedBlocks(blocks, self.processor, cfg.mask_share, seed)
        self.eval_masked = masked(self.eval_blocks, cfg.seed)
        self.use(
            masked(train_blocks, None), self.eval_masked, self.pad(per_token=("labels",), kind=accel_ddp.masking.MaskedCollate)
        )

    def outputs(self, model, batch):
        return accel_ddp.masking.masked_logits(model, batch)[0]

    def terms(self, model, batch, team):
        return {"loss": accel_ddp.losses.cross_entropy(*accel_ddp.masking.masked_logits(model, batch), reduction="none")}

    def count(self, batch):
        return len(batch["masked_positions"])

    def generate(self, model):
        self.guesses = accel_ddp.masking.format_guesses(model, self.processor, self.eval_blocks)

    def measure(self, model, batch):
        scores, answers = accel_ddp.masking.masked_logits(model, batch)
        losses = accel_ddp.losses.cross_entropy(scores, answers, reduction="none")
        rows = {"loss": losses, "right": scores.argmax(-1) == answers, "tokens": answers >= 0}
        sums = {name: accel_ddp.masking.sum_by_row(values, batch) for name, values in rows.items()}
        return sums | (accel_ddp.masking.first_guesses(scores, losses, batch) if self.cfg.log_predictions else {})

    def metrics(self, rows):
        self.rows = rows  # for `tables`
        tokens = max(1, rows["tokens"].sum())
        loss = float(rows["loss"].sum(dtype="float64") / tokens)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": float(rows["right"].sum() / tokens)}

    def tables(self):
        return accel_ddp.masking.make_tables(self.cfg.log_predictions, self.rows, self.eval_masked, self.processor)

    def report(self):
        return self.guesses

    @property
    def example(self):
        text = accel_ddp.examples.literal(accel_ddp.masking.masked_text(self.processor, self.eval_blocks))
        return f'from transformers import pipeline; print(*pipeline("fill-mask", {{model}})({text}), sep="\\n")'


def build_data(cfg: Config, tokenizer):
    """Return training and evaluation blocks of `input_ids` and `words`, and their fingerprints."""
    block_tokenizer = accel_ddp.text_blocks.BlockTokenizer(tokenizer, cfg.model, cfg.max_length)
    if cfg.streaming:
        return accel_ddp.text_blocks.stream_blocks(cfg, block_tokenizer)
    tables = accel_ddp.text_blocks.load_texts(cfg)
    accel_ddp.data.require_texts({"text_column": cfg.text_column}, *tables)
    tables = accel_ddp.text_blocks.drop_other_values(tables, cfg)
    blocks = [accel_ddp.text_blocks.cut_into_blocks(rows, cfg.text_column, block_tokenizer, cfg) for rows in tables]
    return (*blocks, [accel_ddp.tokenization.fingerprint(part, cfg.cache_dir) for part in blocks])


def build_model(cfg: Config, accelerator, tokenizer):
    from transformers import AutoModelForMaskedLM

    model = accel_ddp.models.load(AutoModelForMaskedLM, cfg, tokenizer)
    has_head = any(word in name for name in model.config.architectures or [] for word in ("MaskedLM", "PreTraining"))
    if cfg.lora_r and not has_head:
        reason = f"{cfg.model} has no masked language model head, and adapters do not train a new one"
        raise UserError(f"--lora_r {cfg.lora_r}: {reason}. Leave --lora_r out.")
    model = accel_ddp.masking.compute_masked_logits_only(model)
    return accel_ddp.models.prepare(model, cfg, accelerator, lora_task="FEATURE_EXTRACTION")


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
