"""All algorithms by name. A new one is a file and a line here."""

from __future__ import annotations

from typing import Final

from hocket.schedule import Collective, ScheduleError

from ._algorithm import Algorithm
from ._direct import direct, one_shot
from ._double_tree import double_tree
from ._halving_doubling import halving_doubling
from ._hdrm import hdrm
from ._recursive_doubling import recursive_doubling
from ._ring import ring

REGISTRY: Final[dict[str, Algorithm]] = {
    one.name: one
    for one in (
        one_shot,
        direct,
        ring,
        recursive_doubling,
        halving_doubling,
        hdrm,
        double_tree,
    )
}


def algorithms() -> tuple[Algorithm, ...]:
    """All algorithms, in the order of the registry."""
    return tuple(REGISTRY.values())


def get(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        ScheduleError: there is none; the message lists those that there are.
    """
    if name not in REGISTRY:
        raise ScheduleError(f"algorithm {name!r} is unknown; there are {', '.join(REGISTRY)}")
    return REGISTRY[name]


def candidates(collective: Collective) -> tuple[Algorithm, ...]:
    """The algorithms that serve a collective with their default parameters; there is always one."""
    return tuple(one for one in REGISTRY.values() if one.serves(collective) is None)
