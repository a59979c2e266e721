"""The orders that have a name: a rule for each, and what follows from the rule without writing the order out."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .._collective import ScheduleError
from ._order import IN_FLIGHT, PipelineAction, PipelineOrder, line_of, most
from ._verify import verify
from ._zero_bubble_v import v_homes, zero_bubble_v


def looped(p: int, v: int) -> tuple[int, ...]:
    """Return the rank of every stage where stages go down the ranks, and begin again with the first."""
    return tuple(stage % p for stage in range(p * v))


@dataclass(frozen=True)
class NamedOrder:
    """A rule that makes an order for any number of ranks."""

    name: str  # name as it stands in a plan
    title: str  # what it is, in a few words
    source: str  # where it was published
    # forwards that a rank does before it takes turns between forwards and backwards. Called with the number of ranks,
    # the stages of each, the micro-batches of a round (see `round_of`), and the rank. None if all of them.
    ahead: Callable[[int, int, int, int], int] | None
    halves: bool  # whether backwards are done in halves, those for the weights later
    # called with the stages of each rank: by how much it divides the time in which GPipe's ranks are idle
    divisor: Callable[[int], float]
    rounds: bool  # whether micro-batches pass in rounds, all of which must be equal
    # called with the number of ranks and the stages of each: the rank of every stage
    homes: Callable[[int, int], tuple[int, ...]] = looped
    # what a rank does of an order that is none of forwards and backwards in turns: called with the number of ranks, the
    # micro-batches and the rank
    rule: Callable[[int, int, int], Iterator[PipelineAction]] | None = None
    stages: int | None = None  # of each rank, where it is for so many alone

    def admits(self, ranks: int, stages_per_rank: int, micro_batches: int) -> bool:
        """Return whether there is such an order for so many micro-batches."""
        if micro_batches < 1 or self.stages not in (None, stages_per_rank):
            return False
        whole_rounds = micro_batches % max(1, micro_batches // ranks) == 0
        return whole_rounds or not (self.rounds or (stages_per_rank > 1 and self.ahead is not None))

    def nearest(self, ranks: int, stages_per_rank: int, micro_batches: int) -> int:
        """Return the number of micro-batches nearest to this one that the order admits; of two the larger.

        That is for as many stages on each rank as it is for.
        """
        each = self.stages or stages_per_rank
        possible = (n for n in range(1, micro_batches + ranks + 1) if self.admits(ranks, each, n))
        return min(possible, key=lambda n: (abs(n - micro_batches), -n))

    def in_flight(self, ranks: int, stages_per_rank: int, micro_batches: int, rank: int) -> float:
        """Return what `PipelineOrder.in_flight` does: with turns a rank holds most when its warm-up ends."""
        if self.rule is not None:
            return most(tuple(self.rule(ranks, micro_batches, rank)), IN_FLIGHT) / stages_per_rank
        if self.ahead is None or self._too_few(ranks, stages_per_rank, micro_batches):
            return micro_batches
        ahead = self.ahead(ranks, stages_per_rank, round_of(ranks, micro_batches), rank)
        return min(micro_batches, (ahead + 1) / stages_per_rank)

    def idle_share(self, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
        """Return the part of a step in which ranks with equal stages wait for the pipeline to fill and to drain."""
        if self.rule is not None:  # of few micro-batches no formula is known
            return _built(self.name, ranks, stages_per_rank, micro_batches).idle_share()
        return bubble(ranks, micro_batches, self.divisor(stages_per_rank))

    def build(self, ranks: int, stages_per_rank: int, micro_batches: int) -> PipelineOrder:
        """Make the order.

        Raises:
            ScheduleError: it does not admit so many micro-batches; the message says how many it does.
        """
        p, v, m = ranks, stages_per_rank, micro_batches
        if min(p, v, m) < 1:
            raise ScheduleError(f"a pipeline of {p} ranks x {v} stages x {m} micro-batches is empty")
        if self.stages not in (None, v):
            raise ScheduleError(f"the schedule {self.name!r} has {self.stages} stages on each rank, not {v}")
        if not self.admits(p, v, m):
            raise ScheduleError(
                f"micro_batches = {m} cannot be run by the schedule {self.name!r} on {p} ranks x {v} stages; take "
                f"{self.nearest(p, v, m)}, or the schedule 'gpipe', which takes any number"
            )
        if self.rule is not None:
            rows = tuple(tuple(self.rule(p, m, rank)) for rank in range(p))
        elif self.ahead is None or self._too_few(p, v, m):
            rows = breadth_first(self.homes(p, v), m).ranks
        else:
            rows = tuple(tuple(self._in_turns(p, v, m, rank)) for rank in range(p))
        return PipelineOrder(self.name, p * v, m, rows)

    def _too_few(self, ranks: int, stages_per_rank: int, micro_batches: int) -> bool:
        """Return whether 1F1B would be all warm-up on the first rank, which is GPipe."""
        return not self.rounds and stages_per_rank == 1 and micro_batches < ranks

    def _in_turns(self, p: int, v: int, m: int, rank: int) -> Iterator[PipelineAction]:
        """Yield some forwards ahead; then a forward and a backward in turns; then the backwards that are left.

        Micro-batches pass in rounds: all of a round through the rank's first stage, then through its next. Of halves
        those for the weights are done as many backwards later as there are ranks before this one.
        """
        size, every = round_of(p, m), m * v
        assert self.ahead is not None
        ahead = min(every, self.ahead(p, v, size, rank))

        def at(number: int) -> tuple[int, int]:
            """Return which of the rank's stages, and which micro-batch, the forward of this number is of."""
            turn, inside = divmod(number, size * v)
            return inside // size, turn * size + inside % size

        def backward(number: int, kind: str) -> PipelineAction:
            local, micro_batch = at(number)
            return PipelineAction((v - 1 - local) * p + rank, kind, micro_batch)

        weights = 0
        for number in range(every + ahead):
            if number < every:
                local, micro_batch = at(number)
                yield PipelineAction(local * p + rank, "F", micro_batch)
            if number >= ahead:
                yield backward(number - ahead, "I" if self.halves else "B")
                if self.halves and number - ahead >= rank:
                    yield backward(weights, "W")
                    weights += 1
        if self.halves:
            yield from (backward(number, "W") for number in range(weights, every))


@functools.lru_cache(maxsize=64)
def breadth_first(homes: tuple[int, ...], micro_batches: int) -> PipelineOrder:
    """Return GPipe's order for stages on any ranks: all forwards, stage by stage; all backwards the other way round.

    Args:
        homes: Of every stage the rank that holds it.
        micro_batches: Micro-batches of a step.
    """
    rows: list[tuple[PipelineAction, ...]] = []
    for rank in range(max(homes) + 1):
        own = [stage for stage, home in enumerate(homes) if home == rank]
        forwards = [PipelineAction(stage, "F", n) for stage in own for n in range(micro_batches)]
        rows.append((*forwards, *(action._replace(kind="B") for action in reversed(forwards))))
    return PipelineOrder("gpipe", len(homes), micro_batches, tuple(rows))


def round_of(ranks: int, micro_batches: int) -> int:
    """Return the micro-batches of a round: about as many as there are ranks."""
    return micro_batches // max(1, micro_batches // ranks)


def bubble(ranks: int, micro_batches: int, divisor: float = 1) -> float:
    """Return the idle share of a step of a pipeline with balanced stages: (N-1) / (N-1 + dK).

    With N ranks and K micro-batches it is GPipe's and 1F1B's for d = 1 (Huang et al. 2019); with v stages on each rank,
    interleaved, d = v (Narayanan et al. 2021); with the backward of weights last, d = 3 (Qi et al. 2023).

    Args:
        ranks: N, those of the pipeline.
        micro_batches: K.
        divisor: d, by how much the order divides the time to fill and to drain the pipeline.
    """
    return (ranks - 1) / (ranks - 1 + divisor * micro_batches)


NAMED_ORDERS: Final = {
    one.name: one
    for one in (
        NamedOrder(
            "gpipe",
            "all forwards, then all backwards (breadth first with several stages a rank)",
            "Huang et al. 2019, GPipe; Lamy-Poirier 2022, Breadth-First Pipeline Parallelism",
            None,
            halves=False,
            divisor=lambda v: v,
            rounds=False,
        ),
        NamedOrder(
            "1f1b",
            "one forward, one backward in turns, after a warm-up; interleaved with several stages a rank",
            "Narayanan et al. 2019, PipeDream-Flush",
            lambda p, v, size, rank: (v - 1) * size + (p - 1 - rank) * (1 if v == 1 else 2),
            halves=False,
            divisor=lambda v: v,
            rounds=False,
        ),
        NamedOrder(
            "interleaved",
            "1F1B with several stages a rank, through which micro-batches pass in rounds",
            "Narayanan et al., SC'21, section 2.2.2",
            lambda p, v, size, rank: (v - 1) * size + 2 * (p - 1 - rank),
            halves=False,
            divisor=lambda v: v,
            rounds=True,
        ),
        NamedOrder(
            "zero_bubble",
            "1F1B with backwards in halves, those for the weights where ranks were idle (ZB1P)",
            "Qi et al. 2023, Zero Bubble Pipeline Parallelism",
            lambda p, v, size, rank: (v - 1) * size + (p - 1 - rank),
            halves=True,
            divisor=lambda v: 3,
            rounds=True,
        ),
        NamedOrder(
            "zero_bubble_v",
            "zero bubble with two stages a rank, in a V: the first rank has the last stage, too (ZB-V)",
            "Qi et al. 2024, Pipeline Parallelism with Controllable Memory",
            None,
            halves=True,
            divisor=lambda v: 6,
            rounds=False,
            homes=v_homes,
            rule=zero_bubble_v,
            stages=2,
        ),
    )
}
"""The orders by name; one row makes a new one known to the Trainer, the planner, the simulator and the command."""


def pipeline_order(spelled: str, ranks: int, stages_per_rank: int, micro_batches: int) -> PipelineOrder:
    """Return the order that is meant, for a pipeline of this shape; messages are implied.

    Args:
        spelled: A name of `NAMED_ORDERS`, the path of a file with an order, or the text of one.
        ranks: Ranks in the pipeline.
        stages_per_rank: Stages of each rank.
        micro_batches: Micro-batches of a step.

    Raises:
        ScheduleError: there is no such order, it is for another shape, or it cannot be carried out (see `verify`).
    """
    if spelled in NAMED_ORDERS:
        return _built(spelled, ranks, stages_per_rank, micro_batches)
    order = read_order(spelled)
    shape = (order.world, order.stages_per_rank, order.micro_batches)
    if shape != (ranks, stages_per_rank, micro_batches):
        raise ScheduleError(
            f"the order {order.name} is for {shape[0]} ranks x {shape[1]} stages x {shape[2]} micro-batches, not for "
            f"{ranks} x {stages_per_rank} x {micro_batches}"
        )
    return order


def stage_homes(spelled: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of every stage of the order that is meant; arguments and errors are those of `pipeline_order`."""
    if spelled in NAMED_ORDERS:
        return NAMED_ORDERS[spelled].homes(ranks, stages_per_rank)
    order = read_order(spelled)
    return pipeline_order(spelled, ranks, stages_per_rank, order.micro_batches).homes


def read_order(spelled: str) -> PipelineOrder:
    """Read a user's order, and verify it.

    Args:
        spelled: The path of a file, or its text.

    Raises:
        ScheduleError: it cannot be read, or it cannot be carried out.
    """
    if "\n" in spelled:
        return _parsed(spelled)
    try:
        text = Path(spelled).read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ScheduleError(f"pipeline_schedule = {spelled!r}: the file is no text in UTF-8") from None
    except OSError as error:
        known = ", ".join(NAMED_ORDERS)
        raise ScheduleError(
            f"pipeline_schedule = {spelled!r} is not known; choose one of {known}, or a file with an order "
            f"({error.strerror})"
        ) from None
    try:
        return _parsed(text)
    except ScheduleError as error:
        raise ScheduleError(f"{spelled}: {error}") from None


def order_name(spelled: str) -> str:
    """Return what people call an order: its name, that in its text, or that of its file."""
    if "\n" not in spelled:
        return spelled if spelled in NAMED_ORDERS else Path(spelled).stem
    words = (line.split() for line in spelled.splitlines())
    return next((line[1] for line in words if line[:1] == ["order"] and len(line) > 1), "by hand")


def order_for_batch(spelled: str, ranks: int, stages_per_rank: int, micro_batches: int) -> PipelineOrder:
    """Return the order for a batch that may be short: GPipe's where the one that is meant does not admit so few.

    The gradients are the same. Arguments and errors are those of `pipeline_order`.
    """
    if spelled in NAMED_ORDERS:
        fits = NAMED_ORDERS[spelled].admits(ranks, stages_per_rank, micro_batches)
    else:
        fits = read_order(spelled).micro_batches == micro_batches
    if fits:
        return pipeline_order(spelled, ranks, stages_per_rank, micro_batches)
    return breadth_first(stage_homes(spelled, ranks, stages_per_rank), micro_batches)


@functools.lru_cache(maxsize=64)
def _built(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> PipelineOrder:
    return NAMED_ORDERS[name].build(ranks, stages_per_rank, micro_batches)


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> PipelineOrder:
    order = PipelineOrder.parse(text)
    for found in verify(order, limit=1):
        line = line_of(text, found.rank, found.action)
        raise ScheduleError(f"line {line}: the order {order.name} cannot be carried out: {found}")
    return order
