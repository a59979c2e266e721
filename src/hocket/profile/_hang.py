"""Why nothing moves: who waits for whom, and what keeps those that all others wait for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ._links import UndeliveredSegments
from ._live import LiveRank

_NAMED = 8
_BRIEF_S = 1.0  # shorter waits are not told


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose programs are at the same place.

    Attributes:
        where: The place, "train.py:40 (step)".
        ranks: Which ranks.
        stack: Frames of the first of them, the innermost first.
    """

    where: str
    ranks: tuple[int, ...]
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hang:
    """What keeps a job.

    Attributes:
        kind: "stopped", "dead", "ended", "native", "silent", "blocked", "busy", "recorded" (of a dump, which does not
            tell), "order" (ranks wait for each other in a circle), "stalled" (all have come, and nothing moves),
            "undelivered" (the network loses what a rank sends), "unseen" (the records of those that are waited for are
            elsewhere), or "standing" (nobody waits for long).
        sentence: All of it in one sentence.
        next_step: What to do.
        ranks: The ranks that the others wait for.
        waiting: The ranks that wait.
        waited_s: How long the first of them has waited.
        speaker: The lowest of those that wait and can speak.
        stacks: The places where the ranks are, the rarest first.
    """

    kind: str
    sentence: str
    next_step: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    waited_s: float
    speaker: int
    stacks: tuple[StackGroup, ...]

    def __str__(self) -> str:
        places = [f"  {_ranks(group.ranks)} in {group.where or 'an unknown place'}" for group in self.stacks]
        return "\n".join([self.sentence, *([f"  next: {self.next_step}"] if self.next_step else []), *places])

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def find_hang(ranks: Sequence[LiveRank], after_s: float) -> Hang | None:
    """Return why ranks wait, if one has waited longer than `after_s` seconds; None if nobody has.

    Args:
        ranks: All ranks of the job, as far as they have records.
        after_s: Seconds.
    """
    waiting = [one for one in ranks if one.waits_s > after_s and not one.gone]
    if not waiting:
        return None
    at = {one.rank: one for one in ranks}
    awaited = {one.rank: _awaited(one, at) for one in ranks if one.waits_s > 0.0 and not one.gone}
    first = max(waiting, key=lambda one: one.waits_s)
    # Follow whom the first waits for to those that wait for nobody.
    reached, ahead = set[int](), [first.rank]
    while ahead:
        rank = ahead.pop()
        if rank not in reached:
            reached.add(rank)
            ahead += awaited.get(rank, ())
    roots = sorted(rank for rank in reached if not awaited.get(rank) and rank != first.rank)
    stacks = _stacks(ranks)
    who = tuple(one.rank for one in waiting)
    speaker = min((one.rank for one in waiting if one.state in ("running", "blocked")), default=min(who))
    if roots:
        return _for_roots(roots, first, at, stacks, who, speaker)
    if not at.keys() >= _met(first):
        return None  # some ranks' records are elsewhere, on their hosts: who is late cannot be told from here
    circle = _circle(first.rank, awaited)
    if circle:
        each = "; ".join(f"rank {rank} is in {_operation(at[rank])}, {at[rank].where()}" for rank in circle[:_NAMED])
        then = "make all ranks call the same operations in the same order"
        if len({at[rank].host for rank in circle}) > 1:  # messages that have been sent may be lost on their way
            then += "; if they do, look at the network between the hosts (`hocket doctor`)"
        return Hang(
            "order", f"ranks {_list(circle)} of {first.world} wait for each other: {each}", then, tuple(circle), who,
            first.waits_s, speaker, stacks,
        )  # fmt: skip
    return Hang(
        "stalled",
        f"all ranks have entered {_operation(first)}, and it has not finished for {first.waits_s:.0f} s: "
        f"the way between them stalls; {len(who)} wait in {first.where()}",
        "look at the network between the hosts (`hocket doctor`)", (), who, first.waits_s, speaker, stacks,
    )  # fmt: skip


def lost_on_the_way(ranks: Sequence[LiveRank], rank: int, lost: UndeliveredSegments) -> Hang | None:
    """Return that the network loses what a rank sends, where it waits for ranks that have no records here.

    Args:
        ranks: The ranks that have, on this host.
        rank: Which of them asks.
        lost: What it has sent in vain.
    """
    one = next((one for one in ranks if one.rank == rank and one.waits_s > 0.0), None)
    if one is None:
        return None
    return Hang(
        "undelivered",
        f"rank {rank} of {one.world} (host {one.host}) has waited {one.waits_s:.0f} s in {_operation(one)}, and what "
        f"it sends to {lost.peer} does not arrive: it was sent again {lost.times} times, and nothing has been "
        f"acknowledged for {lost.since_s:.0f} s",
        f"look at the network between the hosts; if `ping {lost.peer}` is answered and `ping -M do -s 1472 "
        f"{lost.peer}` is not, packets of a usual size are too large for it (MTU)",
        (), (rank,), one.waits_s, rank, _stacks(ranks),
    )  # fmt: skip


def standing(ranks: Sequence[LiveRank]) -> Hang:
    """Return where all ranks are, though nobody waits, or nobody knows for whom: for who asks."""
    waiting = [one for one in ranks if one.waits_s > _BRIEF_S and not one.gone]
    unseen = sorted(set(range(max((one.world for one in ranks), default=0))) - {one.rank for one in ranks})
    if waiting and unseen:  # else `find_hang` had said for whom
        first = max(waiting, key=lambda one: one.waits_s)
        return Hang(
            "unseen",
            f"rank {first.rank} of {first.world} has waited {first.waits_s:.0f} s in {_operation(first)}; who is late "
            f"is not known, since {_count_of_records(unseen)}",
            "ask on the other hosts, too, or let all hosts use one folder (HOCKET_RECORD)", (),
            tuple(one.rank for one in waiting), first.waits_s, first.rank, _stacks(ranks),
        )  # fmt: skip
    steps = sorted({one.steps for one in ranks})
    made = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}" if steps else "no"
    return Hang(
        "standing", f"no rank waits for another; {len(ranks)} ranks have made {made} steps", "", (), (), 0.0,
        min((one.rank for one in ranks), default=0), _stacks(ranks),
    )  # fmt: skip


def _met(one: LiveRank) -> set[int]:
    """Return the ranks that what a rank waits in is carried out with."""
    if one.waiting is not None:
        return set(one.waiting.ranks)
    return set(range(one.world)) if one.peer == -1 else {one.rank, *([] if one.peer is None else [one.peer])}


def _awaited(one: LiveRank, at: dict[int, LiveRank]) -> list[int]:
    group = one.waiting
    if one.peer is not None and (group is None or not group.ranks):
        return [one.peer] if one.peer in at else []
    if group is None:
        return []
    late = []
    for rank in group.ranks:
        other = at.get(rank)
        if rank == one.rank or other is None:
            continue
        same = [theirs for theirs in other.groups if theirs.name == group.name and theirs.ranks == group.ranks]
        if not same or same[-1].started < group.started or (other.gone and same[-1].finished < group.started):
            late.append(rank)
    return late


def _for_roots(
    roots: list[int],
    first: LiveRank,
    at: dict[int, LiveRank],
    stacks: tuple[StackGroup, ...],
    who: tuple[int, ...],
    speaker: int,
) -> Hang:
    order = ("dead", "ended", "stopped", "silent", "native", "blocked", "running", "recorded")
    roots.sort(key=lambda rank: (order.index(at[rank].state), rank))
    state = at[roots[0]].state
    alike = [rank for rank in roots if at[rank].state == state]
    one = at[alike[0]]
    subject = (
        f"rank {one.rank} of {one.world}{f' (host {one.host})' if one.host else ''}"
        if len(alike) == 1
        else f"ranks {_list(alike)} of {one.world}"
    )
    entered = _entered(first, one)
    is_, its = ("is", "its") if len(alike) == 1 else ("are", "their")
    place = one.where()
    where = f"in {place}" if place else "at an unknown place"
    phase = f" ({one.phase})" if one.phase else ""
    what, step = {
        "dead": (
            f"has died (process {one.pid} is gone); {its} last place was {place or 'unknown'}",
            "read that rank's last lines of output; out of memory shows in `dmesg`",
        ),
        "ended": ("has ended its program", "make every rank run as many steps: ranks must not leave a loop early"),
        "stopped": (
            f"{is_} stopped by a signal or a debugger, {where}",
            f"`kill -CONT {one.pid}` on {one.host} lets it go on",
        ),
        "silent": (f"{is_} not heard of any more, {where}", f"look whether {one.host} runs and can be reached"),
        "native": (
            f"{is_} in compiled code that does not let Python run, called {where}",
            f"look with `gdb -p {one.pid}` on {one.host}",
        ),
        "blocked": (f"{is_} blocked{phase} {where}", f"look why {place} waits: a lock, a file, a queue"),
        "running": (f"{is_} computing{phase} {where}", f"look why {place} takes so long"),
        "recorded": (
            f"called {its} last operation {where}",
            f"look what the program does after {place or 'its last operation'}",
        ),
    }[state]
    users = _common([at[rank] for rank in who])
    sentence = f"{subject} {entered}: it {what}" if len(alike) == 1 else f"{subject} {entered}: they {what}"
    if len(alike) > 1:
        sentence = sentence.replace("they has", "they have")
    return Hang(
        {"running": "busy"}.get(state, state),
        f"{sentence}, while {_count(len(who))} {first.waits_s:.0f} s in {users}",
        step, tuple(alike), who, first.waits_s, speaker, stacks,
    )  # fmt: skip


def _entered(first: LiveRank, one: LiveRank) -> str:
    group = first.waiting
    if group is None:
        verb, end = ("sent", "for") if first.receives else ("taken", "to send")
        return f"has not {verb} what rank {first.rank} waits {end}"
    if one.rank in group.ranks:
        return f"never entered {_operation(first)}"
    return f"keeps the others from {_operation(first)}"


def _operation(one: LiveRank) -> str:
    group = one.waiting
    if group is None:
        return f"a message {'from' if one.receives else 'to'} {'any rank' if one.peer == -1 else f'rank {one.peer}'}"
    return f"{group.kind} #{group.started} of group {group.name}"


def _circle(start: int, awaited: dict[int, list[int]]) -> list[int]:
    path: list[int] = []
    rank = start
    while rank not in path:
        path.append(rank)
        further = awaited.get(rank)
        if not further:
            return []
        rank = further[0]
    return sorted(path[path.index(rank) :])


def _stacks(ranks: Sequence[LiveRank]) -> tuple[StackGroup, ...]:
    """Return the ranks by their place: those few that are elsewhere than all others stand first."""
    by_place: dict[str, list[LiveRank]] = {}
    for one in ranks:
        by_place.setdefault(
            f"{one.where()}{'' if one.state in ('running', 'blocked') else f', {one.state}'}", []
        ).append(one)
    groups = [StackGroup(where, tuple(one.rank for one in some), some[0].stack) for where, some in by_place.items()]
    return tuple(sorted(groups, key=lambda group: (len(group.ranks), group.ranks)))


def _common(ranks: list[LiveRank]) -> str:
    places = [one.where() or "an unknown place" for one in ranks]
    most = max(set(places), key=lambda place: (places.count(place), place))
    return most if places.count(most) == len(places) else f"{most} and elsewhere"


def _count(number: int) -> str:
    return "1 has waited" if number == 1 else f"{number} have waited"


def _count_of_records(unseen: Sequence[int]) -> str:
    return f"{_ranks(unseen)} {'has no record' if len(unseen) == 1 else 'have no records'} here"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED]))
    return f"{shown} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else shown
