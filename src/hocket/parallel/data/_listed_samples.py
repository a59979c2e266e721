"""Sees where a loop puts a batch together that its loader yields as a list of samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._kept import written

_TOGETHER = (torch.ops.aten.stack, torch.ops.aten.cat)


class ListedSamples:
    """Knows of which sample of a list a tensor is computed, until there is a tensor with a row for each, in order.

    The order is that in which the program first puts all samples together, as sorted by length. Rows in another order
    than that are left alone: nothing shows which are put back into it later.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._order: list[int] | None = None  # in which samples were put together
        self._numbers: Any = WeakTensorKeyDictionary()  # of samples, by tensors that are of one
        self._filled: Any = WeakTensorKeyDictionary()  # whose rows have been written, by what they are rows of

    def begin(self, tensors: Sequence[torch.Tensor], samples: int) -> None:
        """Begin a batch of these tensors, as many for each sample, unless one of them has a row for each."""
        self.__init__()  # type: ignore[misc]
        if samples > 1 and len(tensors) % samples == 0 and all(samples not in one.shape[:1] for one in tensors):
            self._samples = samples
            for i, one in enumerate(tensors):
                self._numbers[one] = i * samples // len(tensors)

    def read(
        self, func: Any, given: Any, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Take notice of what an operator has computed; return what has a row for each sample now."""
        numbers = [self._numbers[one] for one in tensors if one in self._numbers] if self._samples else []
        if func.overloadpacket in _TOGETHER and len(tensors) == len(numbers) and self._is_batch(numbers):
            return [one for one in results if one.shape[:1] == (self._samples,)]
        if len(set(numbers)) != 1:
            return ()
        found = []
        for one in written(func, given):
            whole = one._base
            if whole is not None and whole.shape[:1] == (self._samples,) and whole.stride(0):
                rows = self._filled.setdefault(whole, [])
                at = one.storage_offset() - whole.storage_offset()
                rows += numbers[:1] if at // whole.stride(0) == len(rows) else []
                found += [whole] if self._is_batch(rows) else []
        for one in results:
            self._numbers[one] = numbers[0]
        return found

    def _is_batch(self, numbers: list[int]) -> bool:
        """Return whether these are all samples, in the order in which they were put together first."""
        if sorted(numbers) != list(range(self._samples)):
            return False
        self._order = self._order or list(numbers)
        return numbers == self._order
