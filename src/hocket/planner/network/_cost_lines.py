"""What each algorithm takes of a group, as a line over the bytes: latency, and seconds for each byte; the best of them.

The costs are those of the algorithms' own closed forms (`hocket.algorithms`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hocket.algorithms import Algorithm, ClosedForm, planned
from hocket.schedule import Collective


@dataclass(frozen=True, slots=True)
class Cost:
    """What a collective takes.

    Attributes:
        seconds: All of it.
        algorithm: Which.
        link: Where it spends most of its time: "inside hosts", "between hosts", "latency inside hosts" or "latency".
        given: The algorithm's parameters.
        latency_s: Of the seconds, those that do not grow with the bytes.
    """

    seconds: float
    algorithm: str = ""
    link: str = ""
    given: tuple[tuple[str, Any], ...] = ()
    latency_s: float = 0.0


NOTHING = Cost(0.0)


class CostLine(NamedTuple):
    """What an algorithm takes of a group, on the wires of two hosts."""

    place: int  # among those that serve the group
    algorithm: Algorithm
    given: tuple[tuple[str, Any], ...]
    hosts: int
    late_inside: float  # seconds
    late_between: float
    inside: float  # seconds for each byte
    between: float
    late_s: float
    each: float  # seconds for each byte, everywhere
    # latency and seconds for each byte on the links that are really used, by who talks beside (`Contention.rates`)
    routed: Callable[[tuple[int, tuple[float, ...]] | None], tuple[float, float]]
    # by how many times that is wrong because steps do not wait for each other (`Contention.astray`)
    astray: Callable[[tuple[int, tuple[float, ...]] | None], tuple[float, float, float]]

    def slowest(self, nbytes: float) -> str:
        """Where most of the time goes, in the words of `Cost.link`."""
        parts = {
            "inside hosts": self.inside * nbytes,
            "between hosts" if self.hosts > 1 else "inside hosts ": self.between * nbytes,
            "latency inside hosts": self.late_inside,
            "latency": self.late_between,
        }
        return max(parts, key=lambda part: parts[part]).strip()


@functools.lru_cache(maxsize=4096)
def forms_of(kind: str, size: int, local: int) -> tuple[tuple[Algorithm, tuple[tuple[str, Any], ...], ClosedForm], ...]:
    """Return what serves a group, with its parameters and its closed form."""
    collective = Collective(kind, size)
    return tuple(
        (one, tuple(given.items()), one.form(collective, **given)) for one, given in planned(collective, local)
    )


def fastest_astray(
    found: Sequence[tuple[float, int, float, float]],
    lines: Sequence[CostLine],
    nbytes: float,
    start_s: float,
    beside: tuple[int, tuple[float, ...]] | None,
) -> tuple[CostLine, tuple[float, float]]:
    """Return the fastest algorithm where steps do not wait for each other, its latency and its seconds a byte.

    `found` are seconds, place, latency and seconds a byte of algorithms step by step, the fastest first. What is
    slower than the best so far even if nothing is left of its latency, and a quarter less of its bytes, is not
    looked at: that costs a simulation.
    """
    best, least = lines[found[0][1]], (0.0, float("inf"))
    for _, place, late, each in found:
        if start_s + 0.75 * each * nbytes >= least[0] + least[1] * nbytes:
            continue
        later, slower, steep = lines[place].astray(beside)
        late, moved = (late - start_s) * later, each * slower * nbytes
        longer = max(late, moved)
        both = longer * (1 + (min(late, moved) / longer) ** steep) ** (1 / steep) if longer else 0.0
        late, each = start_s + late, (both - late) / nbytes
        if late + each * nbytes < least[0] + least[1] * nbytes:
            best, least = lines[place], (late, each)
    return best, least
