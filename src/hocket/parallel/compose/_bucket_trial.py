"""Confirms the size of buckets of an automatic plan: a few sizes near the solved one have some steps each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from hocket.planner import BucketSizes

from ..data import Replicated
from ..mesh import World
from ._composition import Composition

STEPS = 20
_WORTH = 0.98  # of the solved size's step: what another must beat, since steps vary


class BucketTrial:
    """Watches the first steps of a run and lets each size of bucket have some of them.

    The solved size is tried first; one with the same number of buckets as another is not tried. Gradients are averaged
    all the same, so the losses are those of any size, up to the order of sums.

    Args:
        solved: bytes of a bucket that the planner has found; None if it found the default as good.
        default: bytes that the gradients' form takes by itself.
        total: bytes of all gradients that are averaged.
        resize: makes buckets of so many bytes, from the next step on.
        world: the ranks; all take the same steps.
    """

    def __init__(
        self, solved: int | None, default: int, total: int, resize: Callable[[int], None], world: World
    ) -> None:
        first = solved or default
        tried: dict[int, int] = {}
        for size in (first, max(1, first // 2), 2 * first, default):
            tried.setdefault(-(-total // size), size)
        self.sizes = list(tried.values())
        self._resize = resize
        self._world = world
        self._each = STEPS // len(self.sizes)
        self._seconds: list[list[float]] = [[] for _ in self.sizes]
        self._made = 0
        self.chosen: int | None = None if len(self.sizes) > 1 else self.sizes[0]
        self.medians: list[float] = []
        if self.chosen is None:
            resize(self.sizes[0])

    @classmethod
    def of(cls, composition: Composition) -> BucketTrial | None:
        """Return a trial where gradients are averaged in buckets; None where they are not, or wait for a pipeline."""
        form, mesh = composition.form, composition.mesh
        if not isinstance(form, Replicated) or mesh["data"].size == 1 or mesh["pipeline"].size > 1:
            return None
        total = sum(item.leaf.numel() * item.leaf.element_size() for item in form.owned)
        default = BucketSizes.choose(total).most
        return cls(composition.plan.bucket_bytes, default, total, form.resize, mesh.whole)

    def step(self, seconds: float) -> None:
        """Note that a step was made, and took so long; a collective operation at the end of the trial."""
        if self.chosen is not None:
            return
        turn, number = divmod(self._made, self._each)
        self._made += 1
        if number:  # the first one of each lays out the buckets
            self._seconds[turn].append(seconds)
        if number < self._each - 1:
            return
        if turn + 1 < len(self.sizes):
            self._resize(self.sizes[turn + 1])
            return
        mine = [statistics.median(each) for each in self._seconds]
        self.medians = [max(column) for column in zip(*self._world.from_all(mine), strict=True)]
        best = min(range(len(self.sizes)), key=self.medians.__getitem__)
        self.chosen = self.sizes[best if self.medians[best] < _WORTH * self.medians[0] else 0]
        self._resize(self.chosen)

    def to_json(self) -> dict[str, Any]:
        """Return what was tried and chosen; nothing is chosen before `STEPS` steps."""
        found = [{"bucket_bytes": size} for size in self.sizes]
        for row, median in zip(found, self.medians, strict=False):
            row["step_s"] = median  # type: ignore[assignment]
        return {"tried": found, "chosen": self.chosen}
