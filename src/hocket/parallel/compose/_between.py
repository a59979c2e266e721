"""Looks at what a program makes of its part of a batch before `trainer.step`, and at what the loss function reads."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hocket._program import warn

from ..batches import batch as _batch
from ..batches import due, tensors_in
from ..data import ExchangedSamples
from ..mesh import World
from ._leftovers import values_in
from ._loss_function import modules_in
from ._rescaled import RescaledColumns

_DEPTH = 4
_MOST = 2**12  # elements of what is compared: more are data


class BetweenCalls:
    """Runs what a program computes of the first parts of batches besides with other choices of their samples.

    Args:
        world: The ranks.
        looks: In how many steps; 0 where ranks have all of a batch.
    """

    def __init__(self, world: World, looks: int) -> None:
        self._world, self._looks = world, looks
        self._exchanged, self._samples = ExchangedSamples(), 0
        self._rescaled = RescaledColumns(world)
        self._sizes: list[torch.Size] = []  # of what the loader has yielded, without the samples

    def follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield what a loader yields."""
        return self._followed(batches) if self._looks else batches

    def _followed(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batch in batches:
                note = _batch.trained()
                if self._looks and note is not None and note.share is not None:
                    self._exchanged.end()
                    self._exchanged.forget()
                    self._samples, self._sizes = note.share.samples, _sizes(batch)
                    self._exchanged.follow_batch(tensors_in(batch), self._samples)
                    self._rescaled.note(tensors_in(batch))
                    self._exchanged.begin()
                yield batch
        finally:
            self._exchanged.end()

    def pause(self) -> None:
        """Look no more at what is computed of this part."""
        self._exchanged.end()

    def check(self, given: Any, *, part: bool) -> None:
        """Refuse what depends on the other samples of a rank's part, or tell; a collective operation in first steps.

        Args:
            given: What a step is given.
            part: Whether it is a part of a batch, and not all of it.

        Raises:
            ValueError: samples were normalised, or chosen, by others; on every rank.
        """
        if not self._looks:
            return
        self._looks -= 1
        exchanged = self._exchanged
        exchanged.given(tensors_in(given), self._samples)
        followed = part and not self._rescaled.written()  # else what was followed is not what the loop had
        found = self._world.from_all((exchanged.given_off, exchanged.mixes) if followed else (0.0, False))
        before, after = self._world.from_all(self._sizes), self._world.from_all(_sizes(given))
        exchanged.forget()
        rescaled = self._rescaled.differ(tensors_in(given) if part else ())
        off, mixes = max(one for one, _ in found), any(one for _, one in found)
        if off and not mixes:
            raise ValueError(
                "trainer.step was given samples that depend on others of this rank's part of the batch (normalised by "
                f"its mean and deviation, weighted by how often it has a class): {off:.2g} off, relative, with some of "
                "them exchanged. One process computes that from the whole batch: loop over the loader itself, and give "
                "step that batch, which it divides; or do it in an object whose __iter__ gives batches, and give that "
                "to trainer.batches; or take a statistic of the whole data set"
            )
        cropped = part and after.count(after[0]) < len(after) and before.count(before[0]) == len(before)
        self._looks *= not (off or cropped or rescaled)
        if cropped and not off and self._world.rank == 0:
            other = next(one for one in after if one != after[0])
            warn(
                f"the loop gives trainer.step samples of sizes {_said(after[0])} on rank 0, {_said(other)} on another "
                "(cut to the longest of this rank's part, say): right if the model masks padding. If not, cut them to "
                "one length, or loop over the loader itself, and give trainer.step that batch, which it divides",
            )
        if rescaled and not off and self._world.rank == 0:
            warn(
                "the loop has multiplied or shifted samples of its part of the batch, between trainer.batches and "
                "trainer.step, by numbers that other ranks do not have: if they come from that part (its mean and "
                "deviation, by numpy or item()), one process takes them from the whole batch. Loop over the loader "
                "itself, and give trainer.step that batch, which it divides, or take a statistic of the whole data "
                "set. What is drawn at random may differ",
            )
        if off and self._world.rank == 0:
            warn(
                "the loop puts each sample beside another of its batch (mixup, say), which comes from the same rank's "
                "part of it, and not from all of it as in one process: loop over the loader itself, and give "
                "trainer.step that batch, which it divides",
            )


class LossReadings:
    """Compares the numbers and small tensors that a loss function reads and the program sets, in some of the steps.

    Those that calls of the loss function, or of the model, change are its own.

    Args:
        world: The ranks.
        loss_fn: The loss function.
    """

    def __init__(self, world: World, loss_fn: Any) -> None:
        self._world, self._loss_fn = world, loss_fn
        self._calls, self._own, self._told = 0, set[str](), False

    @contextmanager
    def reading(self, samples: int) -> Iterator[None]:
        """Open a block for a step with so many samples; a collective operation. Warn of what ranks have unlike."""
        self._calls += 1
        if self._world.size == 1 or self._told or not due(self._calls):
            yield
            return
        before = self._values(samples)
        everyone = self._world.from_all((before, self._own))
        own = set[str]().union(*(names for _, names in everyone))
        first = everyone[0][0]
        names = (name for name in sorted(first.keys() - own) if all(name in found for found, _ in everyone))
        unlike = ((name, i) for name in names for i, (found, _) in enumerate(everyone) if found[name] != first[name])
        if (found := next(unlike, None)) is not None:  # the same on all ranks
            name, rank = found
            self._tell(name, first[name], everyone[rank][0][name], rank)
        yield
        after = self._values(samples)
        self._own |= {name for name in before | after if before.get(name) != after.get(name)}

    def _tell(self, name: str, mine: str, theirs: str, rank: int) -> None:
        self._told = True
        if self._world.rank == 0:
            warn(
                f"the loss function reads {name}, which is {mine} on rank 0 and {theirs} on rank {rank}: if the "
                "program computes it from samples, one process does so from those of all ranks, and the loss is not "
                "that of one process. Give it hocket.average of the statistic. What is drawn at random may differ",
            )

    def _values(self, samples: int) -> dict[str, str]:
        """Return what the loss function reads, but for what has a place for each sample, or is kept in lists."""
        rows = [
            (name, place.read())
            for name, place in values_in(self._loss_fn, "", _DEPTH, set(), _is_value)
            if not isinstance(place.holder, list | deque)
        ]
        for module in modules_in(self._loss_fn):
            held = {**vars(module), **module._buffers}
            rows += [(f"{type(module).__name__}.{name}", one) for name, one in held.items() if _is_value(one)]
        return {name: _text(one) for name, one in rows if samples not in np.shape(one)}


def _sizes(batch: Any) -> list[torch.Size]:
    return [one.shape[1:] for one in tensors_in(batch)]


def _said(sizes: list[torch.Size]) -> str:
    return ", ".join(str(tuple(one)) for one in sizes)


def _is_value(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is torch.Tensor and not one.is_meta and one.layout is torch.strided and one.numel() <= _MOST
    return isinstance(one, float | complex | np.number) or (isinstance(one, np.ndarray) and one.size <= _MOST)


def _text(one: Any) -> str:
    """Return what ranks compare, and are told of."""
    values = np.asarray(one.detach().cpu() if isinstance(one, torch.Tensor) else one).reshape(-1)
    first = ", ".join(f"{v:.9g}" if isinstance(v, float) and math.isfinite(v) else str(v) for v in values[:3].tolist())
    return first if values.size == 1 else f"[{first}, ...] ({zlib.crc32(values.tobytes()):08x})"
