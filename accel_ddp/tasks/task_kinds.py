"""What tasks do beside learning: they read rows of a kind, build the head of the model, and show results.

Importing this module is fast, as it is for `task`.
"""

from dataclasses import dataclass
from typing import Any

from accel_ddp.config.options import of_group, option
from accel_ddp.config.train_config import IMAGE_FILES, RecipeConfig, ScoredConfig
from accel_ddp.errors import UserError
from accel_ddp.tasks.text_task import ChatTask, ClassTask, TextTask


@dataclass(kw_only=True)
@of_group("training")
class MinedConfig(RecipeConfig):
    """Hard negatives of anchors, from a file or mined with the model. A recipe adds the columns of anchors, positives and scores."""

    negatives_file: str = option(
        "", "more hard negatives: rows of an anchor and negative (a text or a list), or a pool of texts from which --seed draws",
        group="data", per_node=True, excludes="score_column",
    )  # fmt: skip
    num_negatives: int = option(
        1, "texts of --negatives_file for each row: the first of its anchor", group="data", at_least=1, needs="negatives_file"
    )
    mine_negatives: int = option(
        0, "negatives to mine per anchor: the nearest positives of other rows, by the model", at_least=0, excludes="score_column"
    )
    mine_every: int = option(0, "steps between minings; 0: only before the first step", at_least=0, needs="mine_negatives")
    mine_margin: float = option(
        0.0, "skip mined texts whose cosine is above the positive's cosine minus this; they may be right", needs="mine_negatives"
    )

    def validate(self) -> None:
        super().validate()
        if self.sync_every and self.mine_every % self.sync_every:
            near = max(self.sync_every, self.mine_every - self.mine_every % self.sync_every)
            why = "negatives are mined when all workers have the same weights"
            instead = f"Use a multiple of --sync_every {self.sync_every}, for example {near}"
            raise UserError(f"--mine_every {self.mine_every}: {why}. {instead}.")


class EmbeddingTask(TextTask):
    """A task of anchors with their positives, whose embeddings are exported for sentence-transformers.

    `sizes` are the dimensions of `--matryoshka` and of the model, the largest first.
    """

    model_class = "AutoModel"
    checked_as = "embeddings"

    def read(self) -> Any:
        from accel_ddp.tasks.negatives import add_negatives

        tables = super().read()
        if self.cfg.negatives_file and not self.cfg.evaluate_only:
            tables[0] = add_negatives(tables[0], self.cfg)
        return tables

    def build(self) -> Any:
        from accel_ddp.sources.model_kinds import report_causal
        from accel_ddp.tasks.contrastive import sentence_transformers_files

        model, cfg = super().build(), self.cfg
        for name, parameter in model.named_parameters():
            if "pooler" in name:  # embeddings are pooled from the last layer, so that BERT's own pooler is not used
                parameter.requires_grad_(False)
        first_token = "--pooling cls" if cfg.pooling == "cls" else ""
        report_causal(model, self.processor, self.accelerator.device, cfg.model, first_token)
        dimension = model.config.hidden_size
        if any(size > dimension for size in cfg.matryoshka):
            raise UserError(f"--matryoshka {max(cfg.matryoshka)}: the model's embeddings have {dimension} dimensions.")
        self.sizes = tuple(sorted({*cfg.matryoshka, dimension}, reverse=True))
        prompts = {"query": cfg.anchor_prefix, "document": cfg.positive_prefix}
        self.more_files = sentence_transformers_files(dimension, cfg.pooling, cfg.max_length, prompts)
        return model

    def batches(self) -> tuple[Any, Any]:
        from accel_ddp.tasks.negatives import MinedBatches
        from accel_ddp.training.evaluation import EvalBatches

        _, test = super().batches()
        if self.cfg.mine_negatives:
            self.mined = EvalBatches(self.rows[0], self.collate(), self.cfg.eval_batch_size, self.accelerator, self.cfg)
            self.train = MinedBatches(self.rows[0], self.collate(), self.fingerprints[0], self.cfg, self.mine)
        return self.train, test

    def mine(self) -> Any:
        """Return the rows of the hardest negatives of each anchor, for the current weights."""
        from accel_ddp.tasks.negatives import mine

        keys, options = self.train.rows.with_format("numpy")["keys"][:], (self.cfg.mine_negatives, self.cfg.mine_margin)
        return mine(self.accelerator, self.model, self.mined, self.outputs, keys[:, :2], *options)

    def tables(self) -> dict[str, Any]:
        from accel_ddp.tasks.contrastive import make_tables

        table, self.table = self.table, {}  # the embeddings of all items are large
        return make_tables(table, self.cfg.log_predictions, self.describe)

    @property
    def example(self) -> str:
        from accel_ddp.tasks.examples import literal

        texts = self.first_texts()
        anchor, positive = literal(texts["anchor"]), literal(texts["positive"])
        return (
            "from sentence_transformers import SentenceTransformer; use = SentenceTransformer({folder}); "
            f'a, b = use.encode({anchor}, prompt_name="query"), use.encode({positive}, prompt_name="document"); '
            "print(use.similarity(a, b))"
        )


@dataclass(kw_only=True)
@of_group("data", at_least=0)
class QueryConfig(RecipeConfig):
    """How rows with a query and candidates are read."""

    query_column: str = option("", "column of the query; default: query, question or anchor")
    candidate_column: str = option("", "column of the candidate, or of lists of them; default: candidate, passage, document ...")
    label_column: str = option("", "column of 0 or 1, or of lists of these; default: label or labels")
    score_column: str = option("", "column of scores (graded relevance); default: score or scores, if there is no label")
    positive_columns: tuple[str, ...] = option(
        (), "columns of relevant texts, or of lists of them; default: positive or positives"
    )
    negative_columns: tuple[str, ...] = option(
        (), "columns of texts that are not relevant; default: negative, negatives, negative_1 ..."
    )
    max_candidates: int = option(16, "candidates of a query in training: a relevant one, and others that --seed draws; 0: all")
    texts_per_item = 1  # for the estimate of memory; the task sets it to the most candidates of a row

    def validate(self) -> None:
        super().validate()
        if self.max_candidates == 1:
            raise UserError("--max_candidates 1: there is nothing to compare. Use 2 or more, or 0 for all.")


class QueryTask(TextTask):
    """A task of queries with candidates. `form` says which columns have them, and `loss` is the loss that `--loss` means for them."""

    model_class = "AutoModelForSequenceClassification"
    predicts = "scores"

    def load_tokenizer(self) -> Any:
        tokenizer = super().load_tokenizer()
        tokenizer.model_max_length = self.cfg.max_length  # sentence-transformers truncates to it
        return tokenizer

    def read(self) -> Any:
        from accel_ddp.tasks.ranking import LIST_LOSSES, QueryFormat

        tables = super().read()
        self.form = QueryFormat(tables[0], self.cfg)
        self.loss = self.form.choose_loss(tables[0], self.cfg.loss)
        self.is_listwise = self.loss in LIST_LOSSES
        self.identity, self.predict_columns = [self.form.identity, self.loss], self.form.columns
        return tables

    def encode(self, tables: Any) -> Any:
        from accel_ddp.tasks.ranking import report_queries
        from accel_ddp.training.stream import count_tokens

        train, test = super().encode(tables)
        report_queries(test, None if self.cfg.evaluate_only else train)
        self.cfg.texts_per_item = int(count_tokens(train, ("relevance",)).max())
        self.memory_rows, self.places = (train, test), test["place"][:]
        return train, test

    def head(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "multi_label_classification" if self.loss == "binary" else "regression"}

    def adjust(self, model: Any) -> None:
        activation = f"torch.nn.{'Sigmoid' if self.loss == 'binary' else 'Identity'}"  # what CrossEncoder applies to the score
        model.config.sentence_transformers = {"activation_fn": activation}

    def describe(self, items: list[int]) -> dict[str, list]:
        queries = [self.form.read(self.eval_texts[item], self.loss) for item in items]
        found = [query.candidates[self.places[item]] for query, item in zip(queries, items)]
        return {"query": [query.text for query in queries], "candidate": found}

    @property
    def example(self) -> str:
        from accel_ddp.tasks.examples import literal, shorten

        query = self.form.read(self.eval_texts[0], self.loss)
        text, *some = (literal(shorten(text)) for text in (query.text, *query.candidates[:3]))
        use = f"CrossEncoder({{folder}}).rank({text}, [{', '.join(some)}], return_documents=True)"
        return f"from sentence_transformers import CrossEncoder; print({use})"


class RewardTask(ChatTask):
    """A task of pairs of a chosen and a rejected answer, for each of which the model has a score. `chosen` is the first chosen one."""

    model_class = "AutoModelForSequenceClassification"
    checked_as = predicts = "rewards"

    def head(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def adjust(self, model: Any) -> None:
        # The model finds the last token of a text by it. It is exported, so that others read the same score.
        model.config.get_text_config().pad_token_id = self.processor.pad_token_id

    @property
    def example(self) -> str:
        from accel_ddp.tasks.examples import literal

        chat, inputs = literal(self.chosen), 'return_tensors="pt"'
        of_text, of_chat = "t({}, add_special_tokens=False, {})", "t.apply_chat_template({}, return_dict=True, {})"
        inputs = (of_text if isinstance(self.chosen, str) else of_chat).format(chat, inputs)
        return (
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer; t = AutoTokenizer.from_pretrained({folder}); "
            "m = AutoModelForSequenceClassification.from_pretrained({folder}, num_labels=1, pad_token_id=t.pad_token_id); "
            f"print(m(**{inputs}).logits.item())"
        )


@dataclass(kw_only=True)
class ImageConfig(ScoredConfig):
    file_endings = IMAGE_FILES

    def validate_sharded(self) -> None:
        super().validate_sharded()
        if self.model == "mini-resnet":
            why = "the accelerate config asks for FSDP, which needs a transformers model with a list of layers"
            instead = "Use accelerate_configs/1node.yaml or 2node.yaml, or --model google/vit-base-patch16-224"
            raise UserError(f"--model mini-resnet: {why}. {instead}.")


class ImageTask(ClassTask):
    """A task whose items are images with one label each. `batches` of a recipe makes them `vision.Images`."""

    model_class = "AutoModelForImageClassification"

    def load_tokenizer(self) -> None:
        return None  # `build` loads the image processor

    def read(self) -> Any:
        from accel_ddp.sources.models import label_names
        from accel_ddp.tasks.labels import Labels, may_lack_classes
        from accel_ddp.tasks.vision import load_images

        tables = load_images(self.cfg)
        use_both = may_lack_classes(self.cfg, tables[0])
        self.use_labels(Labels.from_rows(*tables, self.cfg.label_column, use_both, label_names(self.cfg)))
        if self.labels.is_multi_label:
            raise UserError(f"--label_column {self.cfg.label_column}: contains lists, but each image must have one label.")
        return tables

    def encode(self, tables: Any) -> Any:
        from accel_ddp.tasks.vision import check_images

        made = check_images(tables, self.labels, self.cfg)
        self.check_labels([images.properties for images in made])
        return made

    def build(self) -> Any:
        from accel_ddp.tasks.vision import build_model

        model, self.processor = build_model(self.cfg, self.accelerator, self.labels, self.rows[0])
        return model

    def collate(self) -> Any:
        from torch.utils.data import default_collate

        return default_collate

    def describe(self, items: list[int]) -> dict[str, list]:
        from accel_ddp.tasks.vision import describe

        return describe(self.rows[1], items)

    @property
    def example(self) -> str:
        from accel_ddp.tasks.vision import loading_code

        remote = ", trust_remote_code=True" if self.cfg.model == "mini-resnet" else ""
        use = f'from transformers import pipeline; use = pipeline("image-classification", {{folder}}{remote})'
        return f"{loading_code(self.cfg, self.rows[1])}; {use}; print(use(image))"
