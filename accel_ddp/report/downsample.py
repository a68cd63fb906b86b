"""Chooses the points of a long curve that are drawn, so that a page with a million logged steps opens at once."""

import numpy as np


def downsample(x: np.ndarray, *columns: np.ndarray, most: int) -> np.ndarray:
    """Return the indices, in order, of at most `most` points that look like all points.

    The first and the last point are kept. The points are divided into bins of equal size, and of each bin the smallest and the
    largest value of each column are kept, so that spikes stay visible. One value that is not finite is kept too, so that a curve
    has a gap there. A point whose `x` is not finite is left out.
    """
    usable = np.flatnonzero(np.isfinite(x))
    if len(usable) <= most or most < 1:
        return usable[: max(most, 0)]
    ends = usable[[0, -1]][:most]
    values = [np.asarray(column, float)[usable] for column in columns]
    has_gaps = not all(np.isfinite(column).all() for column in values)
    bins = (most - 2) // (max(1, len(values)) * (3 if has_gaps else 2))
    if bins < 1 or not values:
        return np.unique(usable[np.linspace(0, len(usable) - 1, most).astype(int)]) if most > 1 else ends
    size = -(-len(usable) // bins)
    starts = np.arange(0, len(usable), size)
    kept = [ends]
    for column in values:
        padded = np.full(len(starts) * size, np.nan)
        padded[: len(column)] = column
        table = padded.reshape(-1, size)
        is_finite = np.isfinite(table)
        some = is_finite.any(axis=1)
        for filled in (np.where(is_finite, table, np.inf).argmin(axis=1), np.where(is_finite, table, -np.inf).argmax(axis=1)):
            kept.append(usable[(starts + filled)[some]])
        if has_gaps:
            is_finite.reshape(-1)[len(column) :] = True  # the padding is no gap
            gaps = ~is_finite.all(axis=1)
            kept.append(usable[(starts + is_finite.argmin(axis=1))[gaps]])
    indices: np.ndarray = np.unique(np.concatenate(kept))
    return indices
