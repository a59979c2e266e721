"""What counting alone can do: how well a byte is predicted without, and from, the one before it."""

import numpy as np

from hocket.workloads.language_model.data import Text

_BYTES = 256


def unigram_nats(training: Text, held_out: Text) -> float:
    """Mean -ln p of the bytes of ``held_out`` but the first, where p is a byte's share of ``training``, plus one each.

    The first byte is left out so that all predictors are judged on the same bytes.
    """
    counts = np.bincount(training, minlength=_BYTES) + 1.0
    return float(-np.log(counts / counts.sum())[held_out[1:]].mean())


def bigram_nats(training: Text, held_out: Text) -> float:
    """Mean -ln p of the bytes of ``held_out`` but the first, where p is how often a byte follows the one before it.

    As much weight as one observation has goes to the byte's share of the whole text, for pairs never seen.
    """
    share = np.bincount(training, minlength=_BYTES) + 1.0
    share /= share.sum()
    pairs = np.zeros((_BYTES, _BYTES))
    np.add.at(pairs, (training[:-1], training[1:]), 1.0)
    likely = (pairs + share) / (pairs.sum(axis=1, keepdims=True) + 1.0)
    return float(-np.log(likely)[held_out[:-1], held_out[1:]].mean())
