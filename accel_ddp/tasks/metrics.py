"""Metrics of classes, numbers, tags and texts: the ones of each recipe, and those that `--metrics` adds.

The built-in ones need no network. Everything else comes from the `evaluate` package. Importing this module is fast, because the
options of a recipe are checked with it.
"""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel_ddp.config.option_values import Direction
from accel_ddp.errors import UserError
from accel_ddp.sources.places import prepare_hub
from accel_ddp.text import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from accel_ddp.tasks.tables import ScoreTable

log = logging.getLogger(__name__)

Kind = Literal["classes", "numbers", "tags", "texts"]
# The built-in metrics of each kind of task, and whether a lower or a higher value is better.
BUILT_IN: dict[str, dict[str, Direction]] = {
    "classes": {
        "accuracy": "max", "macro_f1": "max", "macro_precision": "max", "macro_recall": "max", "micro_f1": "max",
        "weighted_f1": "max", "balanced_accuracy": "max", "matthews_correlation": "max", "cohen_kappa": "max", "roc_auc": "max",
        "brier_score": "min",
    },
    "numbers": {
        "mse": "min", "pearson": "max", "spearman": "max", "rmse": "min", "mae": "min", "mape": "min", "r2": "max",
    },
    "tags": {
        "f1": "max", "precision": "max", "recall": "max", "accuracy": "max", "macro_f1": "max", "weighted_f1": "max",
    },
    "texts": {
        "exact_match": "max", "bleu": "max", "chrf": "max", "rouge_l": "max", "rouge_1": "max", "rouge_2": "max", "ter": "min",
    },
}  # fmt: skip
# Other names of built-in metrics. The result has the longer name, because `f1` of scikit-learn covers one class.
SHORT = {
    "classes": {"f1": "macro_f1", "precision": "macro_precision", "recall": "macro_recall", "mcc": "matthews_correlation"},
    "numbers": {"pearsonr": "pearson", "spearmanr": "spearman", "r_squared": "r2"},
}
FROM_PROBABILITIES = ("roc_auc", "brier_score")


def directions(names: tuple[str, ...], kind: Kind) -> dict[str, Direction]:
    """Return the metrics that `--metrics NAMES` adds, and whether a lower or a higher value is better ("": not known).

    Raise UserError for a built-in metric of another kind of task.
    """
    found: dict[str, Direction] = {}
    for name in names:
        known = SHORT.get(kind, {}).get(name, name)
        kinds = [other for other, those in BUILT_IN.items() if name in those]
        if known not in BUILT_IN[kind] and kinds:
            reason = f"is a metric of {' and '.join(kinds)}, but this run predicts {kind}. {_hint(kind)}"
            raise UserError(f"--metrics {name}: {reason}")
        found[known if known in BUILT_IN[kind] else _stem(name)] = BUILT_IN[kind].get(known, "")
    return found


def _hint(kind: Kind) -> str:
    return f"Built-in metrics of {kind} are: {', '.join(BUILT_IN[kind])}."


def _stem(name: str) -> str:
    """Return the metric's own name: `my` for ./metrics/my, ./metrics/my/my.py and someone/my, and `glue` for glue:mrpc."""
    path = name if Path(name).exists() else name.partition(":")[0]
    return Path(path).name.removesuffix(".py")


def token_loss(table: dict[str, "np.ndarray"], number: str = "tokens") -> float:
    """Return the mean loss of the tokens of all rows, from their sums and the column with their numbers."""
    return float(table["loss"].sum(dtype="float64") / max(1, table[number].sum()))


def with_perplexity(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(min(loss, 700))}


def class_metrics(predictions: "np.ndarray", references: "np.ndarray", names: list[str]) -> tuple[dict[str, float], "ScoreTable"]:
    """Return accuracy and macro F1, and a table with the scores of each class.

    Averages are taken over the classes that occur in the references or in the predictions, as scikit-learn does by default.
    If items have several classes, `predictions` and `references` have a 0 or 1 for each class, and an item is accurate if all of
    its classes are right.
    """
    from sklearn.metrics import classification_report

    from accel_ddp.tasks.tables import Row, ScoreTable

    present = _present(predictions, references)
    right = predictions == references
    accuracy = float((right.all(-1) if right.ndim > 1 else right).mean())
    if not present:
        return {"accuracy": accuracy, "macro_f1": 0.0}, ScoreTable([Row(name) for name in names], [])
    found = classification_report(references, predictions, labels=present, output_dict=True, zero_division=0)
    rows = [Row.of_report(name, found[str(i)]) if str(i) in found else Row(name) for i, name in enumerate(names)]
    averages = [Row.of_report(name, found[name]) for name in ("micro avg", "macro avg", "weighted avg") if name in found]
    if right.ndim == 1:  # the micro average is the accuracy
        averages.insert(0, Row("accuracy", f1=accuracy, support=averages[0].support))
    return {"accuracy": accuracy, "macro_f1": averages[1].f1}, ScoreTable(rows, averages)


def _present(predictions: "np.ndarray", references: "np.ndarray") -> list[int]:
    import numpy as np

    if references.ndim > 1:
        return np.flatnonzero(predictions.any(0) | references.any(0)).tolist()
    return np.union1d(predictions, references).tolist()


def regression_metrics(predictions: "np.ndarray", references: "np.ndarray") -> dict[str, float]:
    """Return mean squared error and correlations. A correlation is 0 if all predictions are the same."""
    import numpy as np
    from scipy.stats import pearsonr, spearmanr

    scores = {"mse": float(((predictions - references) ** 2).mean())}
    for name, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        varies = len(predictions) > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
        scores[name] = float(function(predictions, references)[0]) if varies else 0.0
    return scores


class MoreMetrics:
    """The metrics of `--metrics`, computed on rank 0 from the items of all ranks in the order of the data.

    Create it inside `together`: rank 0 alone loads metrics of the `evaluate` package, and every rank raises its error.
    """

    def __init__(self, cfg: Any, kind: Kind, is_main: bool = True):
        self.cfg, self.kind, self.is_main = cfg, kind, is_main
        known = {name: SHORT.get(kind, {}).get(name, name) for name in cfg.metrics}
        self.built_in = list(dict.fromkeys(name for name in known.values() if name in BUILT_IN[kind]))
        others = [name for name, other in known.items() if other not in BUILT_IN[kind]]
        self.loaded = {name: _load(name, kind) for name in others} if is_main else {}
        self.needs_probabilities = any(name in FROM_PROBABILITIES for name in self.built_in)
        self.names: dict[str, list[str]] = {}  # of the values of each metric, from `try_out`

    def try_out(self, references: list, names: list[str] | None = None, **inputs: Any) -> None:
        """Compute the metrics for predictions that equal the references, before a model is loaded. `names` are the classes.

        Raise UserError for a metric that cannot be computed from these data, and for a `--best_metric` that is not measured.
        """
        import numpy as np

        if not self.is_main or not self.cfg.metrics:
            return
        if self.kind in ("classes", "numbers"):
            references = np.array(references)
        if self.needs_probabilities:
            inputs["probabilities"] = one_hot(references, len(names)) if references.ndim == 1 else references.astype("float32")
        measured = [name for name, direction in self.cfg.metric_directions().items() if direction]
        for name in [*self.built_in, *self.loaded]:
            try:
                values, left_out = self._values(name, predictions=references, references=references, **inputs)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                instead = f"Leave it out. {_hint(self.kind)}"
                raise UserError(f"--metrics {name}: cannot be computed for the evaluation data: {reason}. {instead}") from error
            if not values:
                raise UserError(f"--metrics {name}: returns no number ({', '.join(left_out)}). Leave it out.")
            if left_out:
                log.warning("--metrics %s: %s are not numbers and are left out.", name, ", ".join(left_out))
            if same := [value for value in values if name in self.loaded and value in measured]:
                raise UserError(f"--metrics {name}: there is another metric named {same[0]}. Rename the folder and the script.")
            if any(map(math.isnan, values.values())):
                log.warning("--metrics %s: is NaN even for perfect predictions. The evaluation data may lack a class.", name)
            self.names[name] = list(values)
            measured += values
        if self.loaded:
            self.cfg.best().require(dict.fromkeys(measured, 0.0))

    def add_to(self, metrics: dict[str, float], **inputs: Any) -> dict[str, float]:
        """Return the metrics of a recipe and of `--metrics`. One that fails is reported and NaN."""
        metrics = dict(metrics)
        for name in [*(name for name in self.built_in if name not in metrics), *self.loaded]:
            try:
                values, _ = self._values(name, **inputs)
            except Exception as error:  # a bug in a metric must not end a long run
                log.warning("--metrics %s: could not be computed: %s: %s. It is NaN.", name, type(error).__name__, error)
                values = {}
            metrics |= {value: values.get(value, math.nan) for value in self.names.get(name, values)}
        return metrics

    def _values(self, name: str, **inputs: Any) -> tuple[dict[str, float], list[str]]:
        """Return the values of a metric by their names, and the names of results that are not numbers."""
        from accel_ddp.training.evaluation import as_numbers

        if name in self.built_in:
            return {name: float(_compute(self.kind, name, **inputs))}, []
        metric = self.loaded[name]
        result = metric.compute(
            **{key: values if isinstance(values := inputs[key], list) else values.tolist() for key in metric._feature_names()}
        )
        values, left_out = {}, []
        for key, value in result.items() if isinstance(result, dict) else [(_stem(name), result)]:
            try:
                values |= as_numbers({_stem(name) if key == _stem(name) else f"{_stem(name)}_{key}": value})
            except UserError:
                left_out.append(str(key))
        return values, left_out


def _load(name: str, kind: Kind) -> Any:
    """Return a metric of the `evaluate` package. Raise UserError if it cannot be loaded, or if it does not fit the task.

    Importing `evaluate` takes seconds, because it imports every pipeline of transformers.
    """
    hint = f"{_hint(kind)} Or name a folder with a script of the same name: ./my_metric for ./my_metric/my_metric.py."
    place = Path(name).expanduser()
    script = place if name.endswith(".py") else place / f"{_stem(name)}.py"
    is_path = script.is_file() or name.startswith((".", "/", "~")) or name.endswith(".py") or ("/" in name and place.is_dir())
    if is_path and not script.is_file():
        raise UserError(f"--metrics {name}: there is no script {script}. {hint}")
    no_hub = "" if is_path else prepare_hub()
    import evaluate

    path, _, config = (str(script), "", "") if is_path else name.partition(":")
    try:
        metric = evaluate.load(path, config or None, keep_in_memory=True)
    except Exception as error:
        meant = did_you_mean(name, BUILT_IN[kind])
        reason = f"the Hub cannot be reached ({no_hub})" if no_hub else f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"--metrics {name}: cannot be loaded: {reason}.{meant} {hint}") from error
    needed, given = set(metric._feature_names()), {"predictions", "references", *(["sources"] if kind == "texts" else [])}
    if lacking := ", ".join(sorted(needed - given)):
        raise UserError(f"--metrics {name}: needs {lacking}, which this recipe does not have. {_hint(kind)}")
    forms = metric.features if isinstance(metric.features, list) else [metric.features]
    types = [str(getattr(getattr(form["predictions"], "feature", form["predictions"]), "dtype", "")) for form in forms]
    unfit = {"classes": "float", "numbers": "int"}.get(kind)
    if unfit and all(dtype.startswith(unfit) for dtype in types):  # it would compute something else from the numbers of classes
        raise UserError(f"--metrics {name}: expects predictions of type {types[0]}, but this run predicts {kind}. {_hint(kind)}")
    return metric


def _compute(kind: Kind, name: str, predictions: Any, references: Any, **more: Any) -> float:
    if kind == "classes":
        return _of_classes(name, predictions, references, **more)
    if kind == "numbers":
        from sklearn import metrics as sklearn

        functions = {"rmse": sklearn.root_mean_squared_error, "mae": sklearn.mean_absolute_error}
        functions |= {"mape": sklearn.mean_absolute_percentage_error, "r2": sklearn.r2_score}
        known = functions.get(name)
        return known(references, predictions) if known else regression_metrics(predictions, references)[name]
    if kind == "texts":
        from accel_ddp.tasks.generation_metrics import text_metric

        return text_metric(name, predictions, references)
    from accel_ddp.tasks.tagging import score_entities

    scores, table = score_entities(predictions, references)
    return scores.get(name, next((row.f1 for row in table.averages if row.name == name.replace("_f1", " avg")), 0.0))


def _of_classes(name: str, predictions: Any, references: Any, probabilities: Any = None) -> float:
    from sklearn import metrics as sklearn

    average, _, score = name.partition("_")
    if average in ("macro", "micro", "weighted"):
        function = {"f1": sklearn.f1_score, "precision": sklearn.precision_score, "recall": sklearn.recall_score}[score]
        present = _present(predictions, references)
        return function(references, predictions, labels=present, average=average, zero_division=0) if present else 0.0
    if name in FROM_PROBABILITIES:
        truth = references if references.ndim > 1 else one_hot(references, probabilities.shape[1])
        if name == "roc_auc":  # each class that occurs against the rest; of two classes both values are equal
            is_defined = truth.any(0) & ~truth.all(0)
            scores = [sklearn.roc_auc_score(truth[:, i], probabilities[:, i]) for i in is_defined.nonzero()[0]]
            return sum(scores) / len(scores) if scores else math.nan
        errors = (probabilities - truth) ** 2  # of two classes both columns are equal, and the score is that of one
        return errors.mean() if references.ndim > 1 or truth.shape[1] == 2 else errors.sum(-1).mean()
    function = {
        "accuracy": sklearn.accuracy_score, "balanced_accuracy": sklearn.balanced_accuracy_score,
        "matthews_correlation": sklearn.matthews_corrcoef, "cohen_kappa": sklearn.cohen_kappa_score,
    }[name]  # fmt: skip
    return function(references, predictions)


def one_hot(references: "np.ndarray", number: int) -> "np.ndarray":
    import numpy as np

    return np.eye(number, dtype="float32")[references]
