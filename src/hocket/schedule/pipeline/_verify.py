"""Can an order be carried out, and does it compute every gradient once?"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ._order import PipelineAction, PipelineOrder


@dataclass(frozen=True, slots=True)
class OrderFinding:
    """Something that is wrong with a pipeline's order."""

    # "misplaced" (a stage that another rank holds), "missing", "duplicate", "order" (before something that it needs, on
    # one rank), "message" (a send and a receive that do not meet), "deadlock" (ranks wait for each other), or "memory"
    # (more micro-batches in flight than allowed)
    kind: str
    rank: int  # the rank where it shows
    # the number of the action on that rank; None if it is not there, or if no single one is to blame
    action: int | None
    message: str  # all of it in one sentence

    def __str__(self) -> str:
        return self.message


def verify(order: PipelineOrder, *, in_flight: float | None = None, limit: int = 20) -> tuple[OrderFinding, ...]:
    """Check that every stage does every micro-batch once forward and once backward, and that nobody waits for ever.

    Halves of a backward are both there and in order; messages, if they are written, are sent after they are made,
    received before they are used, and received from each rank in the order in which it sends them. A send waits for
    nothing; a receive is taken to hold up what stands behind it until its message is there, which is more than the
    Trainer does: an order without findings ends, whatever the transport does.

    Args:
        order: Any.
        in_flight: Micro-batches whose activations a rank may hold, see `PipelineOrder.in_flight`; None for any number.
        limit: Findings, at most.

    Returns:
        The findings; none if the order can be carried out, and gives the gradients of one process.
    """
    found = list(itertools.islice(_faults(order), limit))
    if not found:
        found = list(itertools.islice(_circles(order), limit))
    if in_flight is not None and len(found) < limit:
        found += _crowded(order, in_flight)
    return tuple(found[:limit])


def _faults(order: PipelineOrder) -> Iterator[OrderFinding]:
    """Yield what can be seen without letting the order happen."""
    counts = Counter(action for rank in order.ranks for action in rank)
    places: list[dict[PipelineAction, int]] = []
    for rank, actions in enumerate(order.ranks):
        place: dict[PipelineAction, int] = {}
        places.append(place)
        for at, action in enumerate(actions):
            home = order.home(action.stage)
            if home != rank:
                yield _finding("misplaced", rank, at, f"{action}: stage {action.stage} is on rank {home}")
            elif action in place:
                yield _finding("duplicate", rank, at, f"{action} is done already, by action {place[action]}")
            place.setdefault(action, at)
    yield from _uneven(order)
    yield from _counts(order, counts)
    for rank, actions in enumerate(order.ranks):
        for at, action in enumerate(actions):
            for need in order.needs(action):
                whole = need._replace(kind="B") if need.kind == "I" else need
                behind = places[rank].get(need, places[rank].get(whole, -1))
                if behind > at:
                    yield _finding("order", rank, at, f"{action} needs {actions[behind]}, which comes later")
    yield from _crossings(order)


def _uneven(order: PipelineOrder) -> Iterator[OrderFinding]:
    """Yield the ranks that do something of more stages than there are for each."""
    held: dict[int, set[int]] = {}
    for rank, actions in enumerate(order.ranks):
        held[rank] = {action.stage for action in actions if order.home(action.stage) == rank}
        if len(held[rank]) > order.stages_per_rank:
            said = ", ".join(map(str, sorted(held[rank])))
            message = f"it does stages {said}, and of {order.stages} stages each rank does {order.stages_per_rank}"
            yield _finding("misplaced", rank, None, message)


def _counts(order: PipelineOrder, counts: Counter[PipelineAction]) -> Iterator[OrderFinding]:
    """Yield faults of counts: every stage and micro-batch once each way, every needed message if any is written."""
    # No itertools.product, which would first write out what a file with wrong numbers says.
    for stage, micro_batch in ((stage, m) for stage in range(order.stages) for m in range(order.micro_batches)):
        rank = order.home(stage)
        forward, whole, inputs, weights, *messages = (
            PipelineAction(stage, kind, micro_batch)
            for kind in ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
        )
        if not counts[forward]:
            yield _finding("missing", rank, None, f"{forward} is missing")
        if counts[whole] and (counts[inputs] or counts[weights]):
            yield _finding("duplicate", rank, None, f"{whole} is done whole, and in halves too")
        elif not counts[whole]:
            missing = [str(one) for one in (inputs, weights) if not counts[one]]
            if missing:
                word = f"{whole} (or {inputs} and {weights})" if len(missing) == 2 else missing[0]
                yield _finding("missing", rank, None, f"{word} is missing")
        if not order.explicit:
            continue
        onward, back = order.apart(stage), order.apart(stage - 1)
        for message, wanted in zip(messages, (onward, back, back, onward), strict=True):
            if wanted and not counts[message]:
                yield _finding("message", rank, None, f"{message} is missing")
            elif counts[message] and not wanted:
                yield _finding("message", rank, None, f"{message}: there is no other rank to talk to")


def _crossings(order: PipelineOrder) -> Iterator[OrderFinding]:
    """Yield the messages that are received in another order than the one in which they are sent."""
    sent: dict[tuple[int, int], list[PipelineAction]] = {}
    received: dict[tuple[int, int], list[tuple[int, PipelineAction]]] = {}
    for rank, actions in enumerate(order.ranks):
        for at, action in enumerate(actions):
            verb, _, way = action.kind.partition("_")
            ahead = 1 if (way == "F") == (verb == "SEND") else -1
            peer = order.home(action.stage + ahead)
            if verb == "SEND":
                arrives = PipelineAction(action.stage + ahead, f"RECV_{way}", action.micro_batch)
                sent.setdefault((rank, peer), []).append(arrives)
            elif verb == "RECV":
                received.setdefault((peer, rank), []).append((at, action))
    for (source, rank), row in received.items():
        for (at, action), arrives in zip(row, sent.get((source, rank), ()), strict=False):
            if action != arrives:
                message = f"{action} takes what is meant for {arrives}: rank {source} sends that first"
                yield _finding("message", rank, at, message)
                break


def _circles(order: PipelineOrder) -> Iterator[OrderFinding]:
    for rank, action, missing in order.played.stuck:
        at, peer = order.ranks[rank].index(action), order.home(missing.stage)
        whole = missing._replace(kind="B")
        missing = whole if missing.kind == "I" and whole in order.ranks[peer] else missing
        message = f"{action} waits for {missing} of rank {peer}, which waits, too"
        yield _finding("deadlock", rank, at, message)


def _crowded(order: PipelineOrder, most: float) -> list[OrderFinding]:
    return [
        _finding("memory", rank, None, f"{held:g} micro-batches are in flight, and {most:g} are allowed")
        for rank in range(order.world)
        if (held := order.in_flight(rank)) > most
    ]


def _finding(kind: str, rank: int, action: int | None, message: str) -> OrderFinding:
    where = f"rank {rank}" if action is None else f"rank {rank}, action {action}"
    return OrderFinding(kind, rank, action, f"{where}: {message}")
