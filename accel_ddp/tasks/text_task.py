"""What the tasks of recipes would repeat: rows become items, a model is loaded for them, and both are handed to `fit`.

Importing this module is fast, as it is for `task`.
"""

from typing import Any, ClassVar

from accel_ddp.config.options import columns_of
from accel_ddp.errors import UserError
from accel_ddp.tasks.task import Task


class TextTask(Task):
    """A task of texts. Making it reads the rows and makes items of them, on every rank the same ones.

    A recipe has `items(rows)`, which gets columns of some rows and returns columns, such as `{**self.tokens(rows), "labels": ...}`. The
    result is cached. `accel_ddp.load_model` loads the model, and `batches` returns what trains and evaluates it. Each method of this
    class is one step of that, which a recipe may replace.
    """

    checked_as: ClassVar[str] = ""  # what kind of model the tokenizer must belong to, if `model_class` does not say it
    per_token: ClassVar[tuple[str, ...]] = ()  # columns with a value for each token
    evaluated: ClassVar[tuple[str, ...]] = ()  # columns that evaluations read, and no micro-batch has
    labels: Any = None  # of `use_labels`
    lengths: Any = None  # a function of a dataset that counts its tokens, if not only `input_ids` count
    memory_rows: Any = ()  # from which the memory is estimated, if the longest of them decide
    rows: Any  # the items of training and of evaluation
    eval_texts: Any  # the rows from which the items of evaluation were made
    model: Any  # of `accel_ddp.load_model`

    def __init__(self, cfg: Any, accelerator: Any):
        from accel_ddp.ranks.agreement import together
        from accel_ddp.sources.data import describe_drawn

        super().__init__(cfg, accelerator)
        with together("load the data") as facts:
            self.processor = self.load_tokenizer()
            self.rows = self.encode(tables := self.read())
            self.eval_rows = describe_drawn((tables or self.rows)[1])
            facts["the data"] = self.identify(*self.rows)

    def load_tokenizer(self) -> Any:
        from accel_ddp.sources.models import load_tokenizer

        return load_tokenizer(self.cfg, self.cfg.max_length, self.checked_as or self.model_class)

    def read(self) -> Any:
        """Return training and evaluation rows with the columns of the options."""
        from accel_ddp.sources.data import load_columns

        return load_columns(self.cfg)

    def encode(self, tables: Any) -> Any:
        from accel_ddp.sources import data, tokenization

        made = tokenization.encode_items(self, tables)
        self.report_truncated(made)
        self.eval_texts = data.select_sources(tables[1], made[1])
        if self.labels:
            self.check_labels(made)
        return made

    def use_labels(self, labels: Any) -> None:
        """Learn these `Labels` or `Tags`. Wrong `--metrics` are refused here, before rows become items."""
        from accel_ddp.tasks.metrics import MoreMetrics

        self.labels, self.identity = labels, labels.identity
        self.more_metrics = MoreMetrics(self.cfg, labels.kind, self.accelerator.is_main_process)

    def check_labels(self, made: Any) -> None:
        """Warn about labels of the items that may be mistakes, and try `--metrics` on them."""
        if not self.cfg.evaluate_only:  # then nothing is learned
            self.labels.report_classes(made)
        self.references = self.labels.references(made[1])
        self.more_metrics.try_out(self.references, self.labels.names)

    def report_truncated(self, made: Any) -> None:
        from accel_ddp.sources.tokenization import report_truncated

        report_truncated(made, self.cfg.max_length)

    def tokens(self, rows: dict[str, list]) -> dict[str, list]:
        """Return the tokens of the texts of some rows, for which the model has inputs: one text for each row, or a pair."""
        from accel_ddp.sources.data import read_texts

        texts = [read_texts(rows, column) for _, column in columns_of(self.cfg, "text")]
        return dict(self.processor(*texts, truncation=True, max_length=self.cfg.max_length))

    def build(self) -> Any:
        from accel_ddp.sources import models

        return models.build(self.model_class, self.cfg, self.accelerator, self.processor, self.adjust, **self.head())

    def adjust(self, model: Any) -> None:
        """Change the loaded model, before it gets adapters."""

    def head(self) -> dict[str, Any]:
        """Return options of the model's config, such as its labels."""
        return self.labels.model_config() if self.labels else {}

    def collate(self) -> Any:
        return self.make_rows(self.per_token)

    def batches(self) -> tuple[Any, Any]:
        """Return what trains and what evaluates the model, which is loaded."""
        rows = (some.remove_columns([*self.evaluated]) if self.evaluated else some for some in self.rows)
        return self.use(*rows, self.collate(), self.lengths)

    def describe(self, items: list[int]) -> dict[str, list]:
        """Return the texts of some items of evaluation, for tables."""
        from accel_ddp.sources.data import read_texts

        rows = self.eval_texts[items]
        return {name: read_texts(rows, column) for name, column in self.text_columns().items()}

    def first_texts(self) -> dict[str, str]:
        """Return the texts of the first row, for `example`."""
        from accel_ddp.tasks.examples import first_texts

        columns = self.text_columns()
        return dict(zip(columns, first_texts(self.eval_texts, [*columns.values()])))

    def text_columns(self) -> dict[str, str]:
        columns = columns_of(self.cfg, "text")
        return {option.removesuffix("_column"): column for option, column in columns if option.endswith("_column")}


class ClassTask(TextTask):
    """A task whose items have labels: a class, several classes, or a number. `outputs` returns the logits of each item."""

    weights: Any = None  # of the classes

    def check_labels(self, made: Any) -> None:
        super().check_labels(made)
        if getattr(self.cfg, "class_weights", "none") == "balanced":
            self.weights = self.labels.balanced_weights(made[0]["labels"][:], self.accelerator.device)

    def terms(self, model: Any, batch: Any, team: Any) -> dict[str, Any]:
        return {"loss": self.losses(self.outputs(model, batch), batch["labels"], self.weights)}

    def losses(self, scores: Any, labels: Any, weights: Any = None) -> Any:
        """Return the loss of each item."""
        from accel_ddp.engine.losses import of_classes

        return of_classes(scores, labels, self.labels.problem_type, "none", weights)

    def measure(self, model: Any, batch: Any) -> dict[str, Any]:
        from accel_ddp.tasks import tables

        scores, labels = self.outputs(model, batch), self.labels
        is_multi = labels.is_multi_label
        answers = scores.squeeze(-1) if labels.is_regression else (scores > 0).long() if is_multi else scores.argmax(-1)
        rows = {"loss": self.losses(scores, batch["labels"]), "predictions": answers, "references": batch["labels"]}
        if self.cfg.log_predictions and not labels.is_regression:
            rows["confidence"] = tables.confidence(scores, is_multi)
        if self.more_metrics.needs_probabilities:
            rows["probabilities"] = scores.float().sigmoid() if is_multi else scores.float().softmax(-1)
        return rows

    def metrics(self, rows: dict[str, Any]) -> dict[str, float]:
        from accel_ddp.tasks.metrics import class_metrics, regression_metrics

        self.measured = {name: values for name, values in rows.items() if name != "probabilities"}  # for `tables`
        loss, self.table = rows.pop("loss").mean(), None
        rows.pop("confidence", None)
        if self.labels.is_regression:
            self.report_same(**rows)
            found = regression_metrics(**rows)
        else:
            show = lambda row: repr(self.labels.names[row]) if row.ndim == 0 else "the same classes"
            self.report_same(rows["predictions"], rows["references"], show)
            found, self.table = class_metrics(rows["predictions"], rows["references"], self.labels.names)
        return self.more_metrics.add_to({**found, "loss": loss}, **rows)

    def tables(self) -> dict[str, Any]:
        from accel_ddp.tasks.labels import make_tables

        return make_tables(self.labels, self.measured, self.table, self.cfg.log_predictions, self.describe)

    def report(self) -> str:
        return self.table.report(self.cfg.output_dir) if self.table else ""


class TokenTask(TextTask):
    """A task whose items are the tokens with a label. `metrics` gets a row for each text, with the sums of its tokens."""

    per_token = ("labels",)

    def outputs(self, model: Any, batch: Any) -> Any:
        return model(batch).logits[0]  # of each token; a decoder has those of its target

    def terms(self, model: Any, batch: Any, team: Any) -> dict[str, Any]:
        from accel_ddp.engine.losses import cross_entropy

        return {"loss": (cross_entropy(self.outputs(model, batch), batch.get("target", batch)["labels"]), batch.targets)}

    def count(self, batch: Any) -> Any:
        return batch.targets

    def measure(self, model: Any, batch: Any) -> dict[str, Any]:
        from accel_ddp.engine.losses import cross_entropy

        rows = batch.get("target", batch)
        losses = cross_entropy(self.outputs(model, batch), rows["labels"], "none")
        return {"loss": rows.sum(losses), "tokens": rows.sum((rows["labels"] != -100).long())}


class MaskedTask(TokenTask):
    """A task of blocks of tokens, of which some are masked. `generate` sets `guesses` of masked words, which it reports."""

    model_class = "AutoModelForMaskedLM"

    def adjust(self, model: Any) -> None:
        has_head = any(word in name for name in model.config.architectures or [] for word in ("MaskedLM", "PreTraining"))
        if self.cfg.lora_r and not has_head:  # they would leave a new head at random weights
            reason = f"{self.cfg.model} has no masked language model head, and adapters do not train a new one"
            raise UserError(f"--lora_r {self.cfg.lora_r}: {reason}. Leave --lora_r out.")

    def report(self) -> str:
        return self.guesses


class TargetTask(TokenTask):
    """A task of sources with the texts that an encoder-decoder generates from them."""

    model_class = "AutoModelForSeq2SeqLM"
    evaluated = ("source", "target", "max_length", "max_target_length")

    def read(self) -> Any:
        from accel_ddp.tasks.metrics import MoreMetrics

        self.more_metrics = MoreMetrics(self.cfg, "texts", self.accelerator.is_main_process)
        return super().read()

    def encode(self, tables: Any) -> Any:
        made = super().encode(tables)
        self.sources, self.targets = made[1]["source"][:], made[1]["target"][:]
        self.more_metrics.try_out(self.targets, sources=self.sources)
        return made

    def adjust(self, model: Any) -> None:
        from accel_ddp.tasks.generation_metrics import build_generation_config, require_decoder

        require_decoder(model, self.cfg)
        options = self.cfg.max_new_tokens, self.cfg.num_beams
        model.generation_config = build_generation_config(model.generation_config, *options)

    def collate(self) -> Any:
        return self.make_rows(target="labels")

    @property
    def example(self) -> str:
        from accel_ddp.tasks.examples import literal, shorten

        source = literal(self.cfg.prefix + shorten(self.sources[0]))
        # Adapters have no generation config.
        options = f"max_new_tokens={self.cfg.max_new_tokens}, num_beams={self.cfg.num_beams}"
        return (
            "from transformers import AutoModelForSeq2SeqLM as M, AutoTokenizer as T; t = T.from_pretrained({folder}); "
            f'ids = M.from_pretrained({{folder}}).generate(**t({source}, return_tensors="pt"), {options}); '
            "print(t.decode(ids[0], skip_special_tokens=True))"
        )


class ChatTask(TextTask):
    """A task of chats, prompts with answers, or texts. `format(rows)` returns how they become tokens."""

    shares_rows = False  # whether short texts share rows

    def __init__(self, cfg: Any, accelerator: Any):
        from accel_ddp.tasks.chat import agree_on_today

        self.today = agree_on_today()
        super().__init__(cfg, accelerator)

    def encode(self, tables: Any) -> Any:
        self.form = self.format(tables[0])
        made = self.form.finish(self.form.encode_tables(tables, self.cfg), self.cfg)
        self.prompt = self.form.first_prompt(tables[1])
        return made

    @property
    def memory_rows(self) -> Any:
        return () if self.shares_rows or getattr(self.cfg, "streaming", False) else self.rows

    def build(self) -> Any:
        from accel_ddp.tasks.generation_metrics import add_end_tokens

        model = super().build()
        if self.model_class == "AutoModelForCausalLM":
            add_end_tokens(model, self.processor, self.form.first_texts(self.rows[0]))
        return model

    def decode(self, items: list[int], text: int) -> list[str]:
        """Return the texts with this number of some items of evaluation, which have several."""
        return [self.processor.decode(ids[text]) for ids in self.rows[1][items]["input_ids"]]

    @property
    def example(self) -> str:
        from accel_ddp.tasks.examples import literal

        options = f"{literal(self.prompt)}, max_new_tokens={getattr(self.cfg, 'max_new_tokens', 40)}, do_sample=False"
        return f'from transformers import pipeline; print(pipeline("text-generation", {{model}})({options})[0]["generated_text"])'
