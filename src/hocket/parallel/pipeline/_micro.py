"""Cuts a batch into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..batches import trees as _trees
from . import _values

Tensor = torch.Tensor


@dataclass(frozen=True)
class Micro:
    """One micro-batch.

    Attributes:
        inputs: the model's positional inputs.
        target: for the loss; None in an evaluation without one.
        share: its part of the batch's samples.
        key: equal for micro-batches of equal shapes.
    """

    inputs: tuple[Any, ...]
    target: Any
    share: float
    key: bytes


def samples_of(inputs: tuple[Any, ...], target: Any) -> int:
    """How many samples a batch has: the length of its first tensor, the target's first.

    Raises:
        ValueError: there is no tensor with a first axis, or an empty batch.
    """
    for tensor in _values.tensors_of([target, list(inputs)]):
        if tensor.dim():
            if not tensor.shape[0]:
                raise ValueError("a batch without samples cannot be trained on; drop it, on every rank")
            return int(tensor.shape[0])
    raise ValueError("found no tensor with a first axis in the batch: it cannot be cut into micro-batches")


def sizes(samples: int, count: int) -> list[int]:
    """Samples of each micro-batch: as equal as they can be, none empty, so fewer than `count` for a short batch."""
    count = min(count, samples)
    return [samples // count + (i < samples % count) for i in range(count)]


def cut(inputs: tuple[Any, ...], target: Any, count: int) -> list[Micro]:
    """At most `count` micro-batches; a tensor whose first axis is not the batch's belongs whole to each of them.

    Args:
        inputs: the model's positional inputs.
        target: for the loss.
        count: how many.
    """
    samples = samples_of(inputs, target)
    micros = []
    begin = 0
    for size in sizes(samples, count):
        part, goal = _part(inputs, samples, begin, size), _part(target, samples, begin, size)
        key = _values.fingerprint([list(part), size])
        micros.append(Micro(tuple(part), goal, size / samples, key))
        begin += size
    return micros


def _part(value: Any, samples: int, begin: int, size: int) -> Any:
    def narrow(tensor: Tensor) -> Tensor:
        return tensor.narrow(0, begin, size) if tensor.dim() and tensor.shape[0] == samples else tensor

    return _trees.mapped(value, narrow)
