"""A rank's part of a global batch, cut into the parts that it computes one after the other, with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..mesh import World
from . import batch as _batch
from ._cut import Cutter
from ._shares import Share


@dataclass(frozen=True, slots=True)
class Part:
    """What goes through the model at once.

    Attributes:
        inputs: of the model, in order.
        target: of the loss.
        samples: how many samples count: none where one was given so that the rank keeps step with others.
        total: samples of the global batch.
    """

    inputs: tuple[Any, ...]
    target: Any
    samples: int
    total: int

    def weight(self, reduction: Literal["mean", "sum"]) -> float:
        """By what the part's loss counts in the batch's."""
        if reduction == "sum":
            return 1.0 if self.samples else 0.0
        return self.samples / self.total


class Splitter:
    """Cuts batches for one rank.

    Args:
        world: the data-parallel ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._cutter = Cutter(None)

    def parts(self, batch: Any, count: int) -> list[Part]:
        """This rank's part of a batch, in `count` parts.

        A batch that a loader of `Trainer.batches` has yielded is this rank's part already; any other is taken for the
        global batch, the same on every rank.

        Raises:
            TypeError: the batch is no tuple or list of inputs and a target.
        """
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise TypeError(
                f"a batch is a tuple or list of the model's inputs and then the target, not {type(batch).__name__}"
                + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
            )
        values = tuple(batch)
        size = self._cutter.size(values)
        note = _batch.current(values)
        share = None if note is None else note.share
        if self._world.size == 1:
            share = Share(0, size, size, 1)
        elif share is None or share.world != self._world.size or max(1, share.samples) != size:
            share = Share.of(size, self._world.size, self._world.rank)
            values = self._cutter.cut(values, *_range(share.begin, share.end))
        return [self._part(values, share, count, i) for i in range(count)]

    def _part(self, values: Sequence[Any], share: Share, count: int, i: int) -> Part:
        mine = Share.of(share.samples, count, i)
        if count > 1:
            values = self._cutter.cut(values, *_range(mine.begin, mine.end))
        *inputs, target = values
        return Part(tuple(inputs), target, mine.samples, share.total)


def _range(begin: int, end: int) -> tuple[int, int]:
    """The range, or one sample to keep step where there is none."""
    return (begin, end) if begin < end else (0, 1)
