"""All algorithms by name. A new one is a file and a line here."""

from typing import Any, Final

from hocket.schedule import Collective, ScheduleError

from ._aggregation_tree import aggregation_tree
from ._algorithm import Algorithm
from ._all_to_all import bruck, pairwise
from ._binomial import binomial
from ._chain import chain
from ._circulant import circulant
from ._direct import direct, one_shot
from ._dissemination import dissemination
from ._double_tree import double_tree
from ._halving_doubling import halving_doubling
from ._hdrm import hdrm
from ._hierarchical import leaders, rails
from ._recursive_doubling import recursive_doubling
from ._ring import ring
from ._scatter_gather import scatter_gather
from ._torus import torus

REGISTRY: Final[dict[str, Algorithm]] = {
    one.name: one
    for one in (
        one_shot,
        direct,
        ring,
        recursive_doubling,
        halving_doubling,
        circulant,
        hdrm,
        double_tree,
        leaders,
        rails,
        torus,
        aggregation_tree,
        pairwise,
        bruck,
        binomial,
        chain,
        scatter_gather,
        dissemination,
    )
}


def algorithms() -> tuple[Algorithm, ...]:
    """Return all algorithms, in the order of the registry."""
    return tuple(REGISTRY.values())


def get(name: str) -> Algorithm:
    """Return the algorithm of that name.

    Raises:
        ScheduleError: there is none; the message lists those that there are.
    """
    if name not in REGISTRY:
        raise ScheduleError(f"algorithm {name!r} is unknown; there are {', '.join(REGISTRY)}")
    return REGISTRY[name]


def planned(collective: Collective, local: int = 1) -> tuple[tuple[Algorithm, dict[str, Any]], ...]:
    """Return the algorithms that planners consider for a group, each with its parameters; switches do not reduce.

    Args:
        collective: Of the group.
        local: Ranks of the group on each host; what has two levels is left out where there is only one.
    """
    found = []
    for one in REGISTRY.values():
        levels = "local" in one.parameters
        if one.in_network or (levels and not 1 < local < collective.world):
            continue
        for given in one.planned:
            parameters = {**given, **({"local": local} if levels else {})}
            if one.serves(collective, **parameters) is None:
                found.append((one, parameters))
    return tuple(found)


def candidates(collective: Collective, *, in_network: bool = False) -> tuple[Algorithm, ...]:
    """Return the algorithms that serve a collective with their default parameters; there is always one.

    Args:
        collective: Any contract.
        in_network: Whether there are switches that reduce, so that those that need them are among the candidates.
    """
    usable = (one for one in REGISTRY.values() if in_network or not one.in_network)
    return tuple(one for one in usable if one.serves(collective) is None)
