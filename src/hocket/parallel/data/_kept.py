"""Sees that what a loop keeps from batch to batch, and its loss depends on, is the same on all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.comm import torch_adapter

Size = tuple[tuple[int, ...], float]
"""The shape of a tensor, and the sum of its absolute values."""

_TOLERANCE = 1e-5  # of that sum: hosts of different processors round the last place differently
_REPLACING = {torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.normal_}


class KeptTensors:
    """Follows what was computed from samples of one batch into the loss of the next: a center, a queue, a bank.

    One device computes it from all samples. What has a place for each sample (a recurrent state) is left alone, as is
    what has a gradient, which back-propagation comes to.
    """

    def __init__(self) -> None:
        self._written: Any = WeakTensorKeyDictionary()  # what samples were written to, a part at a time
        self._sizes: list[Size] = []  # of what is kept
        self._from: Any = WeakTensorKeyDictionary()  # which of these a tensor is computed from

    def wrote(self, func: Any, given: Any) -> None:
        """Take notice that an operator has written what depends on samples."""
        if func._schema.is_mutable:
            for one in _targets(func, given):
                self._written[one if one._base is None else one._base] = True

    def keep(self, computed: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]], samples: int) -> None:
        """Begin a batch with what is left of those before.

        Args:
            computed: What was computed from samples, and what others would have given.
            samples: How many this rank has now.
        """
        left = [one for one, others in computed if any(_unlike(one, other) for other in others)]
        self._sizes, self._from = [], WeakTensorKeyDictionary()
        for one in (*left, *self._written.keys()):
            plain = one.layout is torch.strided and not (one.is_meta or one.is_complex())
            if plain and not one.requires_grad and samples not in one.shape and one not in self._from:
                self._from[one] = frozenset([len(self._sizes)])
                self._sizes.append((tuple(one.shape), float(one.double().abs().sum())))

    def forget(self) -> None:
        """Forget what is kept: ranks talk to each other, perhaps about it."""
        self._sizes, self._from = [], WeakTensorKeyDictionary()

    def read(self, func: Any, given: Any, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Take notice of what an operator has computed from what is kept."""
        if not self._sizes:
            return
        new = _targets(func, given) if func.overloadpacket in _REPLACING else []
        used = [self._from[one] for one in tensors if one in self._from and all(one is not other for other in new)]
        for one in results:
            if used:
                self._from[one] = frozenset().union(*used)
            elif new:
                self._from.pop(one, None)

    def of(self, loss: torch.Tensor) -> list[Size]:
        """Return the sizes of what is kept and a loss depends on."""
        return [self._sizes[i] for i in sorted(self._from.get(loss, ()))]


def unlike(everyone: Sequence[Sequence[Size]]) -> str:
    """Return how ranks differ in what they keep; nothing where they do not, or cannot be compared."""
    for sizes in zip(*everyone, strict=False) if len(set(map(len, everyone))) == 1 else ():
        shapes, sums = zip(*sizes, strict=True)
        if any(one != one for one in sums):
            continue
        if len(set(shapes)) > 1 or max(sums) - min(sums) > _TOLERANCE * max(sums):
            return f"shape {list(shapes[0])}, sums of absolute values {', '.join(f'{one:.6g}' for one in sums)}"
    return ""


def _targets(func: Any, given: Any) -> list[torch.Tensor]:
    args, kwargs = given
    found = []
    for i, said in enumerate(func._schema.arguments):
        one = kwargs.get(said.name, args[i] if i < len(args) else None)
        if said.is_write and isinstance(one, torch.Tensor):
            found.append(one)
    return found


def _unlike(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch_adapter.unsaved():
        return one.shape != other.shape or not torch.equal(one.detach(), other.detach())
