"""Metrics of classification and regression, from scikit-learn and the `evaluate` package, without access to the Hub."""

from typing import Any

import numpy as np


def load(name: str) -> Any:
    """Return a metric of the `evaluate` package. Those below are defined here, because `evaluate.load` downloads code.

    Importing `evaluate` takes seconds, because it imports every pipeline of transformers. Call it on the main rank only.
    """
    import datasets
    import evaluate as library
    from sklearn import metrics as sklearn

    functions = {
        "accuracy": lambda p, r: sklearn.accuracy_score(r, p),
        "f1": lambda p, r: sklearn.f1_score(r, p, average="macro", zero_division=0),
    }
    if name not in functions:
        return library.load(name)

    class Offline(library.Metric):
        def _info(self) -> Any:
            label = datasets.Value("int64")
            one = {"predictions": label, "references": label}
            several = {key: datasets.Sequence(label) for key in one}
            return library.MetricInfo(
                description=f"{name}, with a macro average over classes",
                citation="",
                features=[datasets.Features(one), datasets.Features(several)],
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {name: float(functions[name](np.array(predictions), np.array(references)))}

    return Offline(keep_in_memory=True)


def regression_metrics(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Return mean squared error and correlations. A correlation is 0 if all predictions are the same."""
    from scipy.stats import pearsonr, spearmanr

    scores = {"mse": float(((predictions - references) ** 2).mean())}
    for name, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        varies = len(predictions) > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
        scores[name] = float(function(predictions, references)[0]) if varies else 0.0
    return scores


def class_table(predictions: np.ndarray, references: np.ndarray, names: list[str]) -> str:
    """Return a table with precision, recall, F1 and number of items of each class."""
    from sklearn.metrics import classification_report

    return classification_report(references, predictions, labels=range(len(names)), target_names=names, digits=3, zero_division=0)
