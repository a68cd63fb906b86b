r"""Train a reward model from pairs of answers: the chosen answer gets a higher score than the rejected one (Bradley-Terry).

    accelerate launch --config_file accelerate_configs/local.yaml recipes/reward.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/reward.py \
        --model Qwen/Qwen2.5-0.5B-Instruct --train_file pairs.jsonl --center_rewards 0.01 --lr 1e-5

Rows have a prompt and a chosen and a rejected answer, as texts or messages, and optionally a margin. The loss of a pair is
-log sigmoid(s_chosen - s_rejected - margin). A score is read at the last token that is not padding, behind the whole chat, so a chat
that is too long is refused and never cut.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import UserError, option, run
from accel_ddp.config.chat_options import PairConfig


@dataclass(kw_only=True)
class Config(PairConfig):
    margin_column: str = option("", "column of margins between the scores; default: margin, if there is one", group="data")
    max_length: int | Literal["auto"] = option(
        "auto", "tokens of a prompt with an answer; longer rows are refused, or left out with --skip_broken; auto: from the data"
    )
    center_rewards: float = option(
        0.0, "weight of (s_chosen + s_rejected)^2, which keeps scores around 0; 0.01 is usual", group="training", at_least=0,
        also=("center_rewards_coefficient",),
    )  # fmt: skip
    global_batch_size: int = option(8, "pairs per optimizer step, over all ranks; the result depends on it")
    best_metric: str = option("", "metric for --keep_best and early stopping; default: accuracy")
    loss, label_column = "reward", ""  # what `dpo` has as options

    def validate(self):
        super().validate()
        if self.answer_column:
            reason = "would be ignored, because answers are read from --chosen_column and --rejected_column. Leave it out."
            raise UserError(f"--answer_column {self.answer_column}: {reason}")

    def check_columns(self, *tables):
        for rows in tables:
            accel_ddp.ranking.margin_column(rows, self)
        accel_ddp.chat_rows.choose_preference_columns(tables[0], self)

    def metric_directions(self):
        return {"accuracy": "max", "margin": "max", "loss": "min"}


class Task(accel_ddp.RewardTask):
    def format(self, rows):
        return accel_ddp.ranking.RewardPairs(rows, self.processor, self.cfg, self.today)

    def encode(self, tables):
        made = super().encode(tables)
        self.chosen = self.form.first_chosen(accel_ddp.data.select_sources(tables[1], made[1]), made[1])
        return made

    def outputs(self, model, batch):
        return accel_ddp.ranking.score_texts(model, batch).view(-1, 2)

    def terms(self, model, batch, team):
        return accel_ddp.ranking.preference_numbers(self.outputs(model, batch), batch["margin"], self.cfg.center_rewards)

    def measure(self, model, batch):
        scores = self.outputs(model, batch)
        return {"scores": scores, **accel_ddp.ranking.preference_numbers(scores, batch["margin"], self.cfg.center_rewards)}

    def metrics(self, table):
        self.scores = table.pop("scores")  # for `tables`
        self.report_same(self.scores.reshape(-1), (self.scores * 0 + [1, 0]).reshape(-1))
        return super().metrics(table)

    def tables(self):
        chosen, rejected = self.scores.T
        rows = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": chosen - rejected}
        return accel_ddp.preferences.make_tables(rows, self.cfg.log_predictions, self.decode)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
