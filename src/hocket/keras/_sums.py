"""Which losses and metrics are sums over samples, so that ranks can add up what each has found in its own."""

from __future__ import annotations

from typing import Any

import keras

from . import _private

_WHOLE_BATCH = frozenset({keras.losses.dice, keras.losses.tversky})
"""Functions of Keras' that return one number for the batch."""

_MEANS = frozenset({"sum_over_batch_size", "mean"})


def is_mean_over_samples(loss: Any) -> bool:
    """Whether a Keras loss (its reduction included) is the mean of terms of one sample each.

    A function of the user's may look at the batch as a whole, and a mean by the sum of the samples' weights has a
    denominator that one rank does not know. A loss class of one's own says that it is such a mean by an attribute
    `additive = True`.
    """
    if getattr(loss, "reduction", None) not in _MEANS:
        return False
    if getattr(loss, "additive", False):
        return True
    return _is_kerases(loss) and _is_kerases_function(getattr(loss, "fn", None))


def is_sum_over_samples(metric: Any) -> bool:
    """Whether what a metric keeps, from zero, is the sum of what each sample adds to it.

    That is so for all metrics of Keras itself (totals, counts, confusion matrices), but not for those around a function
    of the user's, which may return one number for the batch. A metric class of one's own says so by an attribute
    `additive = True`.
    """
    if getattr(metric, "additive", False):
        return True
    return _is_kerases(metric) and _is_kerases_function(getattr(metric, "_fn", None))


def _is_kerases(value: Any) -> bool:
    return type(value).__module__.startswith("keras.src.")


def _is_kerases_function(function: Any) -> bool:
    if function is None:
        return True
    return str(getattr(function, "__module__", "")).startswith("keras.src.") and function not in _WHOLE_BATCH


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics that were given to `compile`, each by itself."""
    return [m for metric in model.metrics if isinstance(metric, _private.CompileMetrics) for m in metric.metrics]


def other_metrics(model: Any) -> list[Any]:
    """The trackers of losses, and the metrics that the model or a layer of it keeps by itself."""
    return [metric for metric in model.metrics if not isinstance(metric, _private.CompileMetrics)]
