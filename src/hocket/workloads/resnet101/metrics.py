"""Mean average precision, the usual measure of multi-label classification."""

import math

import numpy as np
import numpy.typing as npt


def average_precision(scores: npt.NDArray[np.float64], occurs: npt.NDArray[np.bool_]) -> float:
    """Mean, over the images where a label occurs, of the precision among the images ranked not below.

    Args:
        scores: One per image, (n,); images of equal score are ranked together.
        occurs: Whether the label occurs, (n,).

    Returns:
        In (0, 1]; NaN where the label occurs nowhere.
    """
    if not occurs.any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    ranked, found = scores[order], np.cumsum(occurs[order])
    last_of_equals = np.searchsorted(-ranked, -ranked, side="right") - 1
    precision = found[last_of_equals] / (last_of_equals + 1)
    return float(precision[occurs[order]].mean())
