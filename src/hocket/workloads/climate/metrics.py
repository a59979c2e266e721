"""Intersection over union, the usual measure of segmentation."""

import numpy as np
import numpy.typing as npt


def confusion(truth: npt.NDArray[np.int64], told: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.int64]:
    """Return the counts of pixels by class (rows) and by what was said of them (columns)."""
    flat = truth.reshape(-1) * classes + told.reshape(-1)
    return np.bincount(flat, minlength=classes**2).reshape(classes, classes)


def intersection_over_union(table: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """For each class the pixels that are of it and said to be, by those that are or are said to be; NaN where none is.

    `table` is the sum of `confusion` over all maps.
    """
    both = np.diag(table).astype(np.float64)
    either = table.sum(0) + table.sum(1) - both
    found: npt.NDArray[np.float64] = np.full(len(both), np.nan)
    np.divide(both, either, out=found, where=either > 0)
    return found
