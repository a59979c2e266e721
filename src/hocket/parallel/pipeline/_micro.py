"""Cuts a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batches import cut_fields, samples_in
from . import _values

Tensor = torch.Tensor


@dataclass(frozen=True)
class Micro:
    """One micro-batch."""

    inputs: Any  # the model's positional inputs, or a dict of keywords
    target: Any  # for the loss; None in an evaluation without one
    samples: int  # how many it has
    share: float  # its part of the batch's samples
    key: bytes  # equal for micro-batches of equal shapes


def samples_of(inputs: Any, target: Any) -> int:
    """Return how many samples a batch has: the length of its first tensor, the target's first.

    No tensor with a first axis, or an empty batch, is a ValueError.
    """
    samples = samples_in([target, inputs])
    if not samples and any(one.dim() for one in _values.tensors_of([target, inputs])):
        raise ValueError("a batch without samples cannot be trained on; drop it, on every rank")
    if not samples:
        raise ValueError("found no tensor with a first axis in the batch: it cannot be cut into micro-batches")
    return samples


def positional(inputs: Any) -> Any:
    """Return the inputs as a model is called with them: a tensor alone is its only one, and no tuple of its rows."""
    return (inputs,) if isinstance(inputs, Tensor) else inputs


def outline(value: Any) -> Any:
    """Return what a model's code can see of inputs without looking into tensors: which there are, which are None."""
    if isinstance(value, Mapping):
        return {key: outline(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple | list):
        return [outline(item) for item in value]
    if isinstance(value, int | float):
        return "a number"
    return value if value is None or isinstance(value, str) else type(value).__name__


def check_sizes(inputs: Any, known: Sequence[tuple[int, int, int]]) -> None:
    """Raise ValueError unless inputs have the sizes by which the stages hold: see `Stage.unseen`."""
    tensors = _values.tensors_of(inputs) if known else []
    for at, dim, size in known:
        shape = tuple(tensors[at].shape) if at < len(tensors) else ()
        if shape[dim : dim + 1] != (size,):
            raise ValueError(
                f"tensor {at} of the inputs is {shape}, and has {size} in dim {dim} in the sample that the model was "
                "split with: its code uses that number where following it once does not see it (in an index of a list "
                "made in the forward, a name, a function in C), and the stages would go on with the sample's. Pad "
                "batches to its sizes, keep such a list in an attribute, compute with math and torch "
                "(math.prod(x.shape[1:]), torch.tensor([n])), or say pipeline_parallel_degree = 1"
            )


def sizes(samples: int, count: int, fewest: int = 1) -> list[int]:
    """Return samples of each micro-batch: as equal as they can be, none below `fewest`, so fewer for a short batch.

    Raises:
        ValueError: all samples are fewer than that.
    """
    if samples < fewest:
        raise ValueError(
            f"a batch of {samples} sample takes another branch through the model than the sample that it was split "
            f"with, and gives other results. Drop it on every rank (drop_last=True), or join it to another one"
        )
    count = min(count, samples // fewest)
    return [samples // count + (i < samples % count) for i in range(count)]


def first(inputs: Any, samples: int, size: int) -> Any:
    """Return the first `size` of a batch's `samples`."""
    part, _ = cut_fields(inputs, None, 0, size, samples)
    return part


def cut(inputs: Any, target: Any, count: int, fewest: int = 1) -> list[Micro]:
    """Make at most `count` micro-batches; a tensor whose first axis is not the batch's belongs whole to each of them.

    Args:
        inputs: the model's positional inputs, or a dict of keywords.
        target: for the loss.
        count: how many.
        fewest: samples that each has at the least.
    """
    samples = samples_of(inputs, target)
    micros = []
    begin = 0
    for size in sizes(samples, count, fewest):
        part, goal = cut_fields(inputs, target, begin, begin + size, samples)
        key = _values.fingerprint([part, size])
        micros.append(Micro(part, goal, size, size / samples, key))
        begin += size
    return micros
