r"""Fine-tune a reranker (cross-encoder): a model that reads a query and a candidate together and returns how relevant it is.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/rerank.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/rerank.py --model microsoft/MiniLM-L12-H384-uncased \
        --train_file queries.jsonl --eval_file dev.jsonl --max_candidates 8 --lr 2e-5

A row is a query with a candidate and its label (0 or 1) or score, or a query with all of its candidates: lists `candidates` and
`labels` or `scores`, or columns `positives` and `negatives`. By default pairs are learned one by one (cross-entropy with labels,
squared error with scores), and lists with a softmax over the candidates of a query. Such a list is one item, so it is never split.
Evaluations group candidates by the text of their query, also if they are in several rows.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:rerank"
    query_column: str = option("", "column of the query; default: query, question or anchor", group="data")
    candidate_column: str = option(
        "", "column of the candidate, or of lists of them; default: candidate, passage, document ...", group="data"
    )
    label_column: str = option("", "column of 0 or 1, or of lists of these; default: label or labels", group="data")
    score_column: str = option(
        "", "column of scores (graded relevance); default: score or scores, if there is no label", group="data"
    )
    positive_columns: tuple[str, ...] = option(
        (), "columns of relevant texts, or of lists of them; default: positive or positives", group="data"
    )
    negative_columns: tuple[str, ...] = option(
        (), "columns of texts that are not relevant; default: negative, negatives, negative_1 ...", group="data"
    )
    max_candidates: int = option(
        16, "candidates of a query in training: a relevant one, and others that --seed draws; 0: all", group="data", at_least=0
    )
    loss: Literal["auto", "binary", "scored", "listwise", "softmax", "ranknet"] = option(
        "auto", "binary, scored: of each candidate; listwise (ListNet), softmax, ranknet: of a query's candidates; auto: by the data",
        group="training",
    )  # fmt: skip
    max_length: int = option(128, "tokens of a query with a candidate; the longer of both is truncated", group="data", at_least=1)
    epochs: float = 1.0
    global_batch_size: int = 8
    micro_batch_size: int | Literal["auto"] = 8
    lr: float = 2e-4
    warmup_ratio: float = 0.1
    best_metric: str = option("", "metric for --keep_best and early stopping; default: mrr, with --score_column ndcg_at_10")
    texts_per_item = 1  # for the estimate of memory; the task sets it to the most candidates of a row

    def check_columns(self, *tables):
        accel_ddp.data.require_columns(accel_ddp.ranking.QueryFormat(tables[0], self).needed, *tables)

    def metric_directions(self):
        names = ("ndcg_at_10", "spearman", "pearson", "mrr", "map") if self.score_column else ("mrr", "ndcg_at_10", "map")
        more = () if self.score_column else ("average_precision", "accuracy", "spearman", "pearson")
        return {name: "max" for name in (*names, *more)} | {"loss": "min"}

    def validate(self):
        super().validate()
        if self.max_candidates == 1:
            raise accel_ddp.UserError("--max_candidates 1: there is nothing to compare. Use 2 or more, or 0 for all.")


class Task(accel_ddp.Task):
    model_class = "AutoModelForSequenceClassification"  # for the estimate of memory, before the model is loaded
    fits_memory = True  # it calls `fit_memory` itself, when the number of candidates is known

    def __init__(self, cfg: Config, accelerator):
        super().__init__(cfg, accelerator)
        with accel_ddp.together("load the data") as facts:
            self.processor = accel_ddp.models.load_tokenizer(cfg, cfg.max_length, self.model_class)
            self.processor.model_max_length = cfg.max_length  # sentence-transformers truncates to it
            train_rows, eval_rows, self.eval_texts, self.form, self.loss = build_data(cfg, self.processor)
            facts["the data"] = self.identify(train_rows, eval_rows)
        cfg.texts_per_item = int(accel_ddp.stream.count_tokens(train_rows, ("relevance",)).max())
        accel_ddp.fit_memory(cfg, accelerator, self.model_class, (train_rows, eval_rows))
        with accel_ddp.together("load the model"):
            is_binary = self.loss == "binary"
            head = {"num_labels": 1, "problem_type": "multi_label_classification" if is_binary else "regression"}
            self.model = accel_ddp.models.build(self.model_class, cfg, accelerator, self.processor, **head)
            activation = f"torch.nn.{'Sigmoid' if is_binary else 'Identity'}"  # what CrossEncoder applies to the score
            self.model.config.sentence_transformers = {"activation_fn": activation}
        self.more_files = self.form.files
        self.is_listwise, self.places = self.loss in accel_ddp.ranking.LIST_LOSSES, eval_rows["place"][:]
        self.use(train_rows, eval_rows, self.pad(kind=accel_ddp.contrastive.ListCollate))

    def outputs(self, model, batch):
        return accel_ddp.ranking.score(model, batch)

    def terms(self, model, batch, team):
        losses = accel_ddp.ranking.list_losses if self.is_listwise else accel_ddp.ranking.pair_losses
        return {"loss": (losses(self.outputs(model, batch), batch["relevance"], self.loss).sum(), self.count(batch))}

    def count(self, batch):
        return len(batch["relevance"] if self.is_listwise else batch["input_ids"])  # queries, or candidates

    def measure(self, model, batch):
        scores, relevance = self.outputs(model, batch)[:, 0], batch["relevance"][:, 0]
        loss = {} if self.is_listwise else {"loss": accel_ddp.ranking.pair_losses(scores, relevance, self.loss)}
        return {"scores": scores, "relevance": relevance, "keys": batch["keys"], **loss}

    def metrics(self, rows):
        self.rows = rows  # for `tables`
        return accel_ddp.ranking.summarize(rows["scores"], rows["relevance"], rows["keys"], self.loss)

    def tables(self):
        return accel_ddp.ranking.make_tables(self.rows, self.cfg.log_predictions, self.describe)

    def describe(self, items):
        queries = [self.form.read(self.eval_texts[item], self.loss) for item in items]
        found = [query.candidates[self.places[item]] for query, item in zip(queries, items)]
        return {"query": [query.text for query in queries], "candidate": found}

    @property
    def example(self):
        query = self.form.read(self.eval_texts[0], self.loss)
        texts = [accel_ddp.examples.literal(accel_ddp.examples.shorten(text)) for text in (query.text, *query.candidates[:3])]
        return (
            "from sentence_transformers import CrossEncoder; "
            f"print(CrossEncoder({{folder}}).rank({texts[0]}, [{', '.join(texts[1:])}], return_documents=True))"
        )


def build_data(cfg: Config, tokenizer):
    """Return training rows with the tokens of a query's candidates, evaluation rows with one candidate each, and the texts of these."""
    tables = accel_ddp.data.load_rows(cfg)
    cfg.check_columns(*tables)
    form = accel_ddp.ranking.QueryFormat(tables[0], cfg)
    loss = form.choose_loss(tables[0], cfg.loss)

    def encode(rows):
        return accel_ddp.ranking.encode(rows, form, loss, tokenizer, cfg, is_trained=True)

    def encode_pairs(rows):
        return accel_ddp.ranking.encode(rows, form, loss, tokenizer, cfg, is_trained=False)

    depends_on = [accel_ddp.models.tokenizer_digest(tokenizer), form.identity, loss, cfg.max_length, cfg.max_candidates, cfg.seed]
    parts = zip(tables, (encode, encode_pairs))
    encoded = [accel_ddp.tokenization.map_once(rows, function, depends_on=depends_on, cfg=cfg) for rows, function in parts]
    usable = accel_ddp.tokenization.report_truncated(accel_ddp.data.drop_broken(encoded, cfg), cfg.max_length)
    accel_ddp.ranking.report_queries(usable[1], None if cfg.evaluate_only else usable[0])
    return (*usable, accel_ddp.data.select_sources(tables[1], usable[1]), form, loss)


def main(cfg: Config):
    return accel_ddp.train(cfg, Task)


if __name__ == "__main__":
    run(Config, main)
