"""The table of axes. A new axis is a file here, a line in the table, and a folder of `parallel` that carries it out."""

import functools
import math
from typing import TYPE_CHECKING, Final

from ._axis import Axis
from ._data import DATA
from ._pipeline import PIPELINE
from ._spatial import SPATIAL
from ._tensor import TENSOR

if TYPE_CHECKING:
    from ..plan import Plan

AXES: Final[tuple[Axis, ...]] = (PIPELINE, DATA, TENSOR, SPATIAL)
"""In the order of ranks, the slowest first: rank = ((p * data + d) * tensor + t) * spatial + s."""


def axis(name: str) -> Axis:
    """Return the axis of that name."""
    return next(one for one in AXES if one.name == name)


def others(*names: str) -> tuple[Axis, ...]:
    """Return all axes but some."""
    return tuple(one for one in AXES if one.name not in names)


def inner() -> tuple[Axis, ...]:
    """Return all axes but that of the data, in the order in which plans name them: what divides layers comes last."""
    return tuple(sorted(others("data"), key=lambda one: one.divides == "layers"))


def product(plan: "Plan", *axes: Axis) -> int:
    """Return how many ranks there are along some axes together."""
    return math.prod(one.degree(plan) for one in axes)


@functools.lru_cache(maxsize=4096)  # a search asks some twenty times for each plan
def replicas(plan: "Plan") -> tuple[int, int]:
    """Return how many ranks hold the same parameters, and how many ranks are from each to the next."""
    mine = [one for one in AXES if one.replicates]
    last = max((AXES.index(one) for one in mine if one.degree(plan) > 1), default=AXES.index(axis("data")))
    return product(plan, *mine), product(plan, *AXES[last + 1 :])


def shard_group(plan: "Plan") -> tuple[int, int]:
    """Return among how many of those ranks their state is sharded, and how many ranks are from each to the next.

    All of them, but for a plan with a `shard_degree`; where nothing is sharded it is of no meaning.
    """
    size, stride = replicas(plan)
    return plan.shard_degree or size, stride


def copy_group(plan: "Plan") -> tuple[int, int]:
    """Return how many ranks hold the same shard, and how many ranks are from each to the next."""
    size, stride = shard_group(plan)
    return replicas(plan)[0] // size, size * stride


def sharing(plan: "Plan") -> tuple[str, int]:
    """Return the axis whose ranks do parts of every layer, as its shares say, and how many; ("tensor", 1) for none."""
    found = [(one.name, one.degree(plan)) for one in AXES if one.priced_by_shares and one.degree(plan) > 1]
    return found[0] if found else ("tensor", 1)
