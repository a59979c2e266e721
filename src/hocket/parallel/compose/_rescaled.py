"""Sees that a loop has rescaled its part of a batch by numbers that other ranks do not have, also past torch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hocket.comm.torch_adapter import version_of

from ..mesh import World

_COLUMNS = 64  # features that are looked at
_LEAST = 3  # values of a feature: any two lie on a line
_UNLIKE = 1e-4  # of the range of a feature: more than rounding

Fit = tuple[list[int], torch.Tensor, torch.Tensor]


class RescaledColumns:
    """Compares by what line each feature of a batch was mapped between the loader and a step.

    Numpy's operators cannot be run again with other samples, as torch's are. But normalising maps all samples of a
    feature by one line (a factor and a shift), which is the same on all ranks if it comes from the whole data set, and
    not if it comes from a rank's part.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._handed: list[tuple[torch.Size, torch.Tensor]] = []
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep some features of what a loader has yielded."""
        rows = [one for one in tensors if _is_rows(one)]
        self._handed = [(one.shape, _columns(one)) for one in rows]
        self._versions = [(weakref.ref(one), version_of(one)) for one in rows]

    def written(self) -> bool:
        """Return whether something, numpy say, has written to what was noted, and torch has not counted it."""
        there = zip(self._versions, self._handed, strict=True)
        return any(
            (one := held()) is not None and version_of(one) == version and not _same(before, _columns(one))
            for (held, version), (_, before) in there
        )

    def differ(self, given: Sequence[torch.Tensor]) -> bool:
        """Return whether lines differ from rank to rank; a collective operation. What was noted is forgotten."""
        handed, self._handed, self._versions = self._handed, [], []
        pairs = []
        for i, (shape, before) in enumerate(handed):
            same = [one for one in given if one.shape == shape and one.dtype in (torch.float32, torch.float64)]
            fits = [(_fit(before, after := _columns(one), one.dtype), after) for one in same]
            pairs += [(i, before, after, fit) for fit, after in fits[:1] if fit is not None]
        everyone = self._world.from_all({i: fit for i, _, _, fit in pairs})
        mine = any(
            _unlike(before, after, fit, one[i]) for i, before, after, fit in pairs for one in everyone if i in one
        )
        return any(self._world.from_all(mine))


def _is_rows(one: Any) -> bool:
    return (
        one.layout is torch.strided
        and not one.is_complex()
        and not one.is_meta
        and one.dim() > 1
        and len(one) >= _LEAST
        and one.numel() > 0
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _columns(one: torch.Tensor) -> torch.Tensor:
    flat = one.detach().reshape(len(one), -1)
    places = torch.linspace(0, flat.shape[1] - 1, min(_COLUMNS, flat.shape[1])).long()
    return flat[:, places.to(flat.device)].cpu().to(torch.float64, copy=True)


def _fit(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> Fit | None:
    """Return columns, and the factors and shifts that map them; None if one is not mapped by a line."""
    places = [i for i in range(before.shape[1]) if len(set(before[:, i].tolist())) >= _LEAST]
    x, y = before[:, places], after[:, places]
    if not places or not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return None
    x_mean, y_mean = x.mean(0), y.mean(0)
    factor = ((x - x_mean) * (y - y_mean)).sum(0) / ((x - x_mean) ** 2).sum(0)
    shift = y_mean - factor * x_mean
    relative = x.abs().amax(0) / _range(x) + y.abs().amax(0) / _range(y)
    near = (factor * x + shift - y).abs().amax(0) <= 64 * torch.finfo(dtype).eps * relative * _range(y)
    return (places, factor, shift) if bool(near.all() and (_range(y) > 0).all()) else None


def _unlike(before: torch.Tensor, after: torch.Tensor, mine: Fit, other: Fit) -> bool:
    """Return whether another rank's lines would have made something else of this rank's samples."""
    places, factor, shift = other
    both = [i for i, place in enumerate(places) if place in mine[0]]
    if not both:
        return False
    x, y = before[:, [places[i] for i in both]], after[:, [places[i] for i in both]]
    least = _UNLIKE * (_range(y) + y.abs().amax(0))
    return bool(((factor[both] * x + shift[both] - y).abs().amax(0) > least).any())


def _range(rows: torch.Tensor) -> torch.Tensor:
    return rows.amax(0) - rows.amin(0)
