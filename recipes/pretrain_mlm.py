r"""Train a masked language model on raw text: from scratch, or continue a pretrained one on texts of your own domain.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/pretrain_mlm.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/pretrain_mlm.py \
        --model FacebookAI/roberta-base --train_file 'corpus/*.txt' --streaming --max_length 512 --lr 5e-5

Whole words are masked, and different ones each time a text is seen. The loss is the mean over their tokens, however they are
spread over ranks and micro-batches. With --streaming, large text files are read as needed instead of being tokenized first.
"""

from dataclasses import dataclass

import accel_ddp
from accel_ddp import RecipeConfig, column, option, run
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
    mask_share: float = option(0.15, "fraction of words to mask", group="training", above=0, below=1, also=("mlm_probability",))
    max_length: int = option(128, "tokens per block; texts are concatenated and cut into blocks", group="data", at_least=1)
    epochs: float = 4.0
    global_batch_size: int = option(16, "blocks per optimizer step, over all ranks; the result depends on it")
    lr: float = option(1e-3, "peak learning rate; to continue a pretrained model 5e-5 to 1e-4")
    warmup_ratio: float = 0.1

    def metric_directions(self):
        return {"loss": "min", "perplexity": "min", "accuracy": "max"}


class Task(accel_ddp.MaskedTask):
    def read(self):
        return None if self.cfg.streaming else accel_ddp.text_blocks.load_texts(self.cfg)

    def encode(self, tables):
        return accel_ddp.text_blocks.make_blocks(self.cfg, self.processor, tables)

    def batches(self):
        self.output_head = accel_ddp.linear_cross_entropy.OutputHead(self.model)  # computes the loss of masked tokens only
        masked = lambda blocks, seed: accel_ddp.masking.MaskedBlocks(blocks, self.processor, self.cfg.mask_share, seed)
        self.eval_masked = masked(self.rows[1], self.cfg.seed)
        return self.use(masked(self.rows[0], None), self.eval_masked, self.collate())

    def outputs(self, model, batch):
        return self.output_head.logits(model, batch)  # of each masked token

    def terms(self, model, batch, team):
        return {"loss": (self.output_head.loss_sum(model, batch), batch.targets)}

    def measure(self, model, batch):
        return accel_ddp.masking.measure(self.outputs(model, batch), batch, self.cfg.log_predictions)

    def metrics(self, table):
        self.table = table  # for `tables`
        accuracy = float(table["right"].sum() / max(1, table["tokens"].sum()))
        return {**accel_ddp.metrics.with_perplexity(accel_ddp.metrics.token_loss(table)), "accuracy": accuracy}

    def generate(self, model):
        self.guesses = accel_ddp.masking.format_guesses(model, self.processor, self.rows[1])

    def tables(self):
        return accel_ddp.masking.make_tables(self.cfg.log_predictions, self.table, self.eval_masked, self.processor)

    @property
    def example(self):
        return accel_ddp.masking.example(self.processor, self.rows[1])


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
