"""Sums over samples whose terms cancel: the first loss of a policy gradient, of advantages that have a mean of 0.

Such a sum is rounding, and what other choices of samples make of it says nothing. Their terms do: sums of fourth powers
are sums of one term for each sample, too, if no term depends on other samples, and never cancel.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from hocket.comm import torch_adapter

from ..batches import Cancelling, fourths
from ._choices import off

_REDUCING: Final = (torch.ops.aten.sum, torch.ops.aten.mean)


class CancelledSums:
    """Notes sums and means of what samples give that cancel.

    Attributes:
        rounding: What rounding may have left of them: values do not tell of a loss that is smaller.
    """

    def __init__(self) -> None:
        self.rounding = 0.0
        # They, and how far fourth powers of their terms are from such a sum.
        self._found: list[tuple[torch.Tensor, float]] = []

    def note(self, func: Any, some: Sequence[torch.Tensor], result: torch.Tensor, first: torch.Tensor) -> None:
        """Note what an operator makes of terms: a result, and of the first of some choices of samples the `first`."""
        terms = some[0]
        if func.overloadpacket not in _REDUCING or terms.numel() < 2 or not terms.is_floating_point():
            return
        with torch_adapter.unsaved():
            one = Cancelling.of(terms, first, mean=func.overloadpacket is torch.ops.aten.mean)
            if one.rounding:
                self.rounding = max(self.rounding, one.rounding)
                self._found.append((result, off([*map(fourths, some[:4])])))

    def off(self, loss: torch.Tensor) -> float:
        """Return how far the terms of such sums in a loss are from depending on one sample each, relative."""
        made = ((one.grad_fn, far) for one, far in self._found)
        known = {node._sequence_nr(): far for node, far in made if node is not None}
        return max((known[place] for place in torch_adapter.met([loss], set(known))), default=0.0)
