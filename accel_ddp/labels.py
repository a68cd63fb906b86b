"""Labels of rows: names or numbers, one for each row or several."""

from typing import TYPE_CHECKING, Any

from accel_ddp.config import UserError

if TYPE_CHECKING:
    import datasets


class Labels:
    """Label names and numbers of classes; `several` where each row has a list of them."""

    def __init__(self, column: str, names: list[str], values: dict[Any, int], several: bool):
        self.column, self.names, self.values, self.several = column, names, values, several

    @classmethod
    def of(cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str, of_both: bool = False) -> "Labels":
        """Of the training rows. A label of `test` that is not among them is a UserError, unless they are `of_both`."""
        feature = train.features[column]
        several = _is_list(feature)
        inner = feature.feature if several else feature
        if getattr(inner, "dtype", "") not in ("string", "large_string", "bool") and not str(
            getattr(inner, "dtype", "")
        ).startswith(("int", "uint")):
            raise UserError(f"--label_column {column}: holds {inner}; labels are names or whole numbers, or lists of them.")
        found = {name: _distinct(rows, column, several) for name, rows in (("training", train), ("evaluation", test))}
        for name, values in found.items():
            if None in values:
                raise UserError(f"--label_column {column}: a row of the {name} data has no label.")
        names = getattr(inner, "names", None)  # a dataset that knows its classes, also those nobody has
        values = list(range(len(names))) if names else sorted(found["training"] | (found["evaluation"] if of_both else set()))
        if several and set(values) == {0, 1} and len({len(row) for row in train[column][:]}) == 1:
            raise UserError(
                f"--label_column {column}: holds lists of 0 and 1 for each class. Give lists of the names of the right ones."
            )
        for name, those in found.items():
            unknown = sorted(those - set(values), key=str)
            if unknown:
                known = "the dataset does not declare" if names else "the training data lack"
                raise UserError(
                    f"--label_column {column}: the {name} data have labels that {known}: {', '.join(map(str, unknown[:10]))}. "
                    f"Known are: {', '.join(map(str, (names or values)[:20]))}."
                )
        if len(values) < 2 and not several:
            raise UserError(f"--label_column {column}: all rows have the label {values}; there is nothing to learn.")
        return cls(column, names or [str(value) for value in values], {value: i for i, value in enumerate(values)}, several)

    def encode(self, rows: dict[str, list]) -> list:
        """Class numbers; where several are right, a 0 or 1 for each class."""
        if not self.several:
            return [self.values[value] for value in rows[self.column]]
        return [[int(name in set(row)) for name in self.values] for row in rows[self.column]]


def _is_list(feature: Any) -> bool:
    import datasets

    return isinstance(feature, (datasets.Sequence, getattr(datasets, "List", datasets.Sequence)))


def _distinct(rows: "datasets.Dataset", column: str, several: bool) -> set:
    if not several:
        return set(rows.unique(column))
    return {value for row in rows[column][:] for value in (row if row is not None else [None])}
