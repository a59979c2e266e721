"""Ring: every rank passes one part on to its neighbour in every step."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.schedule import Collective, Schedule, ScheduleError, Step

from ._algorithm import ClosedForm, algorithm


def _form(collective: Collective, *, rings: int, orders: ArrayLike | None) -> ClosedForm:
    p, kind = collective.world, collective.kind
    phase = Fraction(p - 1, p)
    phases = 2 if kind == "all_reduce" else 1
    distinct = len(_strides(p)) if orders is None else p - 1  # neighbours that rings can have
    around = rings if orders is None else len(np.atleast_2d(np.asarray(orders)))
    return ClosedForm(
        phases * (p - 1),
        phases * phase,
        phases * phase,
        phase * (kind != "all_gather"),
        messages=phases * (p - 1) * min(around, distinct),
    )


def _limit(collective: Collective, *, rings: int, **_: object) -> str | None:
    return None if rings >= 1 else f"rings={rings}; give 1 or more"


def _strides(p: int) -> list[int]:
    """Return the strides that visit all ranks."""
    return [stride for stride in range(1, p) if gcd(stride, p) == 1]


def _orders(p: int, rings: int, orders: ArrayLike | None) -> NDArray[np.int64]:
    """`(rings, p)`: the ranks along each ring; by default with strides that have no divisor in common with p."""
    if orders is not None:
        given = np.atleast_2d(np.asarray(orders, np.int64))
        if given.shape[1] != p or (np.sort(given, axis=1) != np.arange(p)).any():
            raise ScheduleError(f"ring: orders of shape {given.shape}; each must be an order of the ranks 0 to {p - 1}")
        return given
    strides = _strides(p)
    return np.array([np.arange(p) * strides[i % len(strides)] % p for i in range(rings)], np.int64)


def _around(home: NDArray[np.int64], order: NDArray[np.int64], first: int, *, reduce: bool) -> Sequence[Step]:
    """Return the p - 1 steps; in step k place i of every ring passes on the part at home at place i + first - k."""
    rings, p = order.shape
    source, destination, lane = order, np.roll(order, -1, axis=1), np.arange(rings)[:, None]
    stride = np.unique((np.roll(home, -1, axis=1) - home) % p)

    def step(k: int, **repetition: int) -> Step:
        part = np.roll(home, k - first, axis=1) * rings + lane
        return Step.of(source.ravel(), destination.ravel(), part.ravel(), reduce=reduce, **repetition)

    if len(stride) == 1:  # every step is the one before with all parts one further
        return [step(0, repeat=p - 1, shift=-int(stride[0]) * rings)]
    return [step(k) for k in range(p - 1)]


@algorithm(
    title="Ring",
    source="Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009",
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_form,
    limit=_limit,
    along_hosts=True,
)
def ring(collective: Collective, *, rings: int = 1, orders: ArrayLike | None = None) -> Schedule:
    """Build the ring; the chunks of all_reduce are numbered as in MSCCL's ring.

    Args:
        collective: An all_reduce, reduce_scatter or all_gather of any world.
        rings: Number of rings over different orders of the ranks, each of which carries 1/rings of the data.
        orders: `(rings, world)`, the ranks along each ring; by default strides without a divisor in common with the
            world's size (repeated if there are not enough of them).

    Raises:
        ScheduleError: `orders` are not orders of the ranks.
    """
    p, kind = collective.world, collective.kind
    order = _orders(p, rings, orders)
    if kind == "reduce_scatter":
        steps = _around(order, order, -1, reduce=True)
    elif kind == "all_gather":
        steps = _around(order, order, 0, reduce=False)
    else:  # the parts may be anywhere in between, so the one at home at place i is part i in all rings
        home = np.broadcast_to(np.arange(p), order.shape)
        steps = [*_around(home, order, 0, reduce=True), *_around(home, order, 1, reduce=False)]
    return Schedule("ring", collective, p * len(order), tuple(steps))
