"""What no algorithm can beat: lower bounds of a collective, and how far a schedule is from them."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ._collective import Collective
from ._ir import Schedule


@dataclass(frozen=True, slots=True)
class Wire:
    """The alpha-beta-gamma model of one rank's port, full duplex.

    Attributes:
        latency_s: Alpha, seconds a message takes however short it is.
        seconds_per_byte: Beta, seconds per byte in each direction.
        reduce_seconds_per_byte: Gamma, seconds per byte to combine two operands.
        message_s: What posting each message takes besides, one after the other (the o of LogP); no bound counts it.
    """

    latency_s: float
    seconds_per_byte: float
    reduce_seconds_per_byte: float = 0.0
    message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds, or what a schedule needs of the same three things.

    Attributes:
        steps: Rounds in which a port sends one message and receives one, in units of alpha. A step of a schedule in
            which a rank has several messages is as many rounds.
        moved: The most bytes that cross one port in one direction, in units of S.
        reduced: The most bytes combined by one rank, in units of S.
    """

    steps: int
    moved: Fraction
    reduced: Fraction

    def seconds(self, nbytes: float, wire: Wire) -> float:
        """Return the time for S = `nbytes` if nothing overlaps; as a lower bound each of the three holds by itself."""
        return (
            self.steps * wire.latency_s
            + float(self.moved) * nbytes * wire.seconds_per_byte
            + float(self.reduced) * nbytes * wire.reduce_seconds_per_byte
        )


def lower_bounds(collective: Collective, *, in_network: bool = False) -> Bounds:
    """Return what any algorithm over one full-duplex port a rank needs.

    The latency is ceil(log2 p) rounds of one message a port for everything in which data of one rank reaches all, or of
    all reaches one. Sources: Patarasu and Yuan (JPDC 2009) and Chan et al. (2007) for bandwidth; nccl-tests,
    PERFORMANCE.md.

    Args:
        collective: Kind and world; the root makes no difference.
        in_network: Whether switches may reduce and multicast. An all_reduce then needs every byte sent once and
            received once, two hops, and no rank computes.
    """
    p = collective.world
    share = Fraction(p - 1, p)
    if p == 1:
        return Bounds(0, Fraction(0), Fraction(0))
    rounds = 1 if in_network else (p - 1).bit_length()
    zero = Fraction(0)
    match collective.kind:
        case "all_reduce":
            return Bounds(2, Fraction(1), zero) if in_network else Bounds(rounds, 2 * share, share)
        case "reduce_scatter":
            return Bounds(rounds, share, zero if in_network else share)
        case "all_gather":
            return Bounds(rounds, share, zero)
        case "broadcast":
            return Bounds(rounds, Fraction(1), zero)
        case "reduce":
            # Each rank's S must leave it; combining can be shared out, but all of it is p - 1 times S by p ranks.
            return Bounds(rounds, Fraction(1), zero if in_network else share)
        case "barrier":
            return Bounds(2 if in_network else rounds, zero, zero)
        case _:
            return Bounds(rounds, share, zero)


def needs(schedule: Schedule) -> Bounds:
    """Return what a schedule needs of the same three things: its rounds, its busiest port and its busiest rank."""
    moved = max((max(sent, got) for sent, got in _ranks(schedule)), default=Fraction(0))
    return Bounds(_rounds(schedule), moved, max(_reduced(schedule), default=Fraction(0)))


def _rounds(schedule: Schedule) -> int:
    """For each step the most messages that one rank sends or receives, at least one."""
    total = 0
    for step in schedule.steps:
        pairs = np.sort(step.source.astype(np.int64) * schedule.endpoints + step.destination)
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        ends = np.concatenate([pairs // schedule.endpoints, pairs % schedule.endpoints + schedule.endpoints])
        messages = np.bincount(ends, minlength=2 * schedule.endpoints).reshape(2, -1)[:, : schedule.world]
        total += step.repeat * max(1, int(messages.max()))
    return total


def _ranks(schedule: Schedule) -> list[tuple[Fraction, Fraction]]:
    return list(zip(schedule.sent()[: schedule.world], schedule.received()[: schedule.world], strict=True))


def _reduced(schedule: Schedule) -> list[Fraction]:
    """Return what each rank combines, in units of S."""
    total = np.zeros(schedule.endpoints, np.int64)
    for step in schedule.steps:
        length = (step.stop - step.start).astype(np.int64) * step.repeat
        np.add.at(total, step.destination[step.reduce], length[step.reduce])
    return [Fraction(int(chunks), schedule.vector_chunks) for chunks in total[: schedule.world]]
