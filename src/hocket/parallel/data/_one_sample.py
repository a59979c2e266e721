"""Other choices of a rank's samples where it has one: that beside the one of the batch before."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from ._choices import choices

_VIEWING: Final = (torch.ops.aten.view, torch.ops.aten._unsafe_view)
_ORDER: Final = (0, 3, 1, 2, 3)  # of two samples as they are, and of their `choices`, the first of which is the last


class OneSample:
    """Puts tensors of a rank's only sample beside those of the batch before, which are taken in the same order.

    Attributes:
        joined: Whether all of this batch's have been.
    """

    def __init__(self) -> None:
        self.joined = True
        self._now, self._before = list[torch.Tensor](), list[torch.Tensor]()

    def next(self, *, follows: bool) -> None:
        """Begin a batch; `follows` says whether this one and that before it are of one sample."""
        self._before, self._now, self.joined = self._now if follows else [], [], True

    def choices(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return both samples as they are, and all but the first of their choices; without another the same rows."""
        self._now.append(rows)
        before = self._before[len(self._now) - 1] if len(self._now) <= len(self._before) else None
        if before is None or any(getattr(before, of) != getattr(rows, of) for of in ("shape", "dtype", "device")):
            self.joined = False
            return choices(rows, 1)
        both = torch.cat([rows, before])
        return [both, *choices(both, 2)[1:]]

    @staticmethod
    def ordered(others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what was computed of these choices, as of two samples and their choices."""
        return [others[i] for i in _ORDER]

    @staticmethod
    def fitted(func: Any, args: Sequence[Any], one: Sequence[Any]) -> list[Any]:
        """Return arguments in which sizes and places of one sample are those of two; `one` were the program's."""
        first, *rest = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) and args[1] else (None,)
        if func.overloadpacket in _VIEWING and args[0].numel() == 2 * one[0].numel() and first > 0:
            return [args[0], [2 * first, *rest], *args[2:]]  # `x.view(len(x), -1)`
        places = func is torch.ops.aten.index.Tensor and first is not None and first is one[1][0]
        if places and first.dtype == torch.int64 and first.tolist() == [0] and len(args[0]) == 2:
            return [args[0], [torch.arange(2, device=first.device), *rest], *args[2:]]  # `x[torch.arange(len(x)), y]`
        return [*args]
