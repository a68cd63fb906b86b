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
from accel_ddp import RecipeConfig, UserError, column, option, run
from accel_ddp.config.train_config import TABLE_FILES, TEXT_FILES


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


class Task(accel_ddp.TextTask):
    model_class = "AutoModelForMaskedLM"
    per_token = ("labels",)

    def read(self):
        return None if self.cfg.streaming else accel_ddp.text_blocks.load_texts(self.cfg)

    def encode(self, tables):
        cutter = accel_ddp.text_blocks.BlockTokenizer(self.processor, self.cfg.model, self.cfg.max_length)
        return accel_ddp.text_blocks.make_blocks(self.cfg, cutter, tables)

    def adjust(self, model):
        has_head = any(word in name for name in model.config.architectures or [] for word in ("MaskedLM", "PreTraining"))
        if self.cfg.lora_r and not has_head:
            reason = f"{self.cfg.model} has no masked language model head, and adapters do not train a new one"
            raise UserError(f"--lora_r {self.cfg.lora_r}: {reason}. Leave --lora_r out.")

    def build(self):
        model = super().build()
        self.output_head = accel_ddp.linear_cross_entropy.OutputHead(model)  # computes the loss of masked tokens only
        return model

    def batches(self):
        masked = lambda blocks, seed: accel_ddp.masking.MaskedBlocks(blocks, self.processor, self.cfg.mask_share, seed)
        self.eval_masked = masked(self.rows[1], self.cfg.seed)
        return self.use(masked(self.rows[0], None), self.eval_masked, self.collate())

    def outputs(self, model, batch):
        return self.output_head.logits(model, batch)  # of each masked token

    def terms(self, model, batch, team):
        return {"loss": (self.output_head.loss_sum(model, batch), batch.targets)}

    def count(self, batch):
        return batch.targets  # masked tokens

    def measure(self, model, batch):
        return accel_ddp.masking.measure(self.outputs(model, batch), batch, self.cfg.log_predictions)

    def metrics(self, table):
        self.table, tokens = table, max(1, table["tokens"].sum())
        loss = float(table["loss"].sum(dtype="float64") / tokens)  # over the masked tokens of all blocks
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": float(table["right"].sum() / tokens)}

    def generate(self, model):
        self.guesses = accel_ddp.masking.format_guesses(model, self.processor, self.rows[1])

    def tables(self):
        return accel_ddp.masking.make_tables(self.cfg.log_predictions, self.table, self.eval_masked, self.processor)

    def report(self):
        return self.guesses

    @property
    def example(self):
        text = accel_ddp.examples.literal(accel_ddp.masking.masked_text(self.processor, self.rows[1]))
        return f'from transformers import pipeline; print(*pipeline("fill-mask", {{model}})({text}), sep="\\n")'


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
