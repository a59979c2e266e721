"""Torus: a ring along each dimension, one after the other, on what is left of the vector."""

from collections.abc import Sequence
from fractions import Fraction
from math import isqrt, prod

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._ring import ring
from ._steps import placed, side_by_side


def _dims(world: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    """Return the dimensions; by default the squarest two."""
    if dims is not None:
        return tuple(dims)
    rows = max(a for a in range(1, isqrt(world) + 1) if world % a == 0)
    return rows, world // rows


def _form(collective: Collective, *, dims: Sequence[int] | None, at_once: bool) -> ClosedForm:
    p, kind = collective.world, collective.kind
    around = sum(size - 1 for size in _dims(p, dims))
    part, phases = Fraction(p - 1, p), 2 if kind == "all_reduce" else 1
    lanes = sum(size > 1 for size in _dims(p, dims)) if at_once else 1
    return ClosedForm(
        phases * around,
        phases * part,
        phases * part,
        part * (kind != "all_gather"),
        messages=phases * around * lanes,  # fewer where parts meet along one dimension
    )


def _limit(collective: Collective, *, dims: Sequence[int] | None, at_once: bool) -> str | None:
    sizes = _dims(collective.world, dims)
    if min(sizes, default=0) < 1 or prod(sizes) != collective.world:
        return f"dims={sizes}: their product must be the world's size, {collective.world}"
    if at_once and collective.kind != "all_reduce":
        return f"at_once: only all_reduce can use all dimensions at once, not {collective.kind}"
    return None


def _phase(sizes: tuple[int, ...], kind: str) -> list[Step]:
    """Return the reduce_scatter or all_gather of a torus, rank r with chunk r, in row-major order.

    After the ring along dimension j a rank has the chunks of all ranks whose first j + 1 coordinates are its own.
    """
    world = prod(sizes)
    grid, steps = np.arange(world).reshape(sizes), []
    axes = [j for j, size in enumerate(sizes) if size > 1]
    for j in axes if kind == "reduce_scatter" else reversed(axes):
        scale = prod(sizes[j + 1 :])
        lines = np.moveaxis(grid, j, -1).reshape(-1, sizes[j])
        window = lines[:, 0] // (sizes[j] * scale) * (sizes[j] * scale)
        small = ring(Collective(kind, sizes[j]))
        steps += placed(small.steps, lines, window, scale=scale, chunks=small.chunks)
    return steps


@algorithm(
    title="Torus",
    source="Mikami et al., ImageNet/ResNet-50 training in 224 seconds (2D-torus all-reduce), 2018; Ying et al., 2018",
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_form,
    limit=_limit,
    planned=(),
)
def torus(collective: Collective, *, dims: Sequence[int] | None = None, at_once: bool = False) -> Schedule:
    """Build reduce_scatter along each dimension and all_gather back; ranks are in row-major order.

    Args:
        collective: An all_reduce, reduce_scatter or all_gather of any world.
        dims: Sizes of the dimensions, two, three or more; their product is the world's size. By default the squarest
            two, which for a prime number of ranks is a ring.
        at_once: Cuts the vector of all_reduce in as many parts as there are dimensions; each starts along another
            one, so that all links work all the time.
    """
    sizes = _dims(collective.world, dims)
    if collective.kind != "all_reduce":
        return Schedule("torus", collective, collective.world, tuple(_phase(sizes, collective.kind)))
    grid, lanes = np.arange(collective.world).reshape(sizes), []
    for lane in range(len(sizes) if at_once else 1):
        axes = [(lane + j) % len(sizes) for j in range(len(sizes))]
        turned = tuple(sizes[axis] for axis in axes)
        steps = [*_phase(turned, "reduce_scatter"), *_phase(turned, "all_gather")]
        lanes.append(placed(steps, grid.transpose(axes).ravel(), lane * collective.world))
    return Schedule("torus", collective, len(lanes) * collective.world, tuple(side_by_side(*lanes)))
