"""Two levels: first within hosts, then between them; through one leader a host, or through all ranks (rails)."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import Algorithm, ClosedForm, algorithm
from ._binomial import binomial
from ._circulant import circulant
from ._direct import direct
from ._halving_doubling import halving_doubling
from ._recursive_doubling import recursive_doubling
from ._ring import ring
from ._steps import mirrored, placed, relabelled

_SOURCE = "the cl/hier layer of UCC (rab and split_rail); Chan et al., Collective communication, 2007, section 7"
_BETWEEN = {one.name: one for one in (halving_doubling, ring, recursive_doubling, circulant, direct)}
_INSIDE = {one.name: one for one in (direct, ring)}


def _hosts(collective: Collective, local: int, between: str) -> str | None:
    if local < 2 or collective.world % local:
        return f"local={local}: give the ranks a host, 2 or more, which must divide the world's size"
    if between not in _BETWEEN:
        return f"between={between!r}; give one of {', '.join(_BETWEEN)}"
    return None


def _leaders_form(collective: Collective, *, local: int, between: str) -> ClosedForm:
    hosts, kind = collective.world // local, collective.kind
    rooted = collective.rooted
    far = (binomial if rooted else _BETWEEN[between]).form(Collective(kind if rooted else "all_reduce", hosts))
    ways = 1 if rooted else 2  # inside a host: to the leader or from it, or both
    others = Fraction(local - 1)
    return ClosedForm(
        far.steps + ways,
        Fraction(1) if kind == "reduce" else far.sent + others,
        far.wire + ways * others,
        far.reduced + others * (kind != "broadcast"),
        ways,
        ways * others,
        far.messages + ways * (local - 1),
        ways * (local - 1),
    )


@algorithm(
    title="Two levels, leaders",
    source=_SOURCE,
    kinds=("all_reduce", "barrier", "broadcast", "reduce"),
    form=_leaders_form,
    limit=_hosts,
    planned=(),
)
def leaders(collective: Collective, *, local: int = 1, between: str = "halving_doubling") -> Schedule:
    """Build: to the leader of each host, between the leaders, and back; fewest messages between hosts.

    Args:
        collective: Contract of hosts with `local` ranks each, those of a host one after the other. The root is
            the leader of its host, elsewhere the first rank is.
        local: Ranks a host.
        between: The all_reduce of the leaders; broadcast and reduce use a binomial tree.
    """
    p, root, kind = collective.world, collective.root, collective.kind
    hosts = p // local
    leader = np.arange(hosts) * local
    leader[root // local] = root
    rank = np.arange(p)
    member = np.setdiff1d(rank, leader)
    boss = leader[member // local]
    if kind in ("broadcast", "reduce"):
        far = binomial(Collective("broadcast", hosts, root // local))
        steps = [*placed(far.steps, leader), Step.of(boss, member, reduce=False)]
        if kind == "reduce":
            steps = mirrored(steps, reduce=True)
        return Schedule("leaders", collective, 1, tuple(steps))
    far = _BETWEEN[between](Collective("all_reduce", hosts))
    steps = [
        Step.of(member, boss, 0, far.chunks, reduce=True),
        *placed(far.steps, leader, chunks=far.chunks),
        Step.of(boss, member, 0, far.chunks, reduce=False),
    ]
    return Schedule("leaders", collective, far.chunks, tuple(steps))


def _rails_form(collective: Collective, *, local: int, inside: str, between: str) -> ClosedForm:
    near, far = (
        one.form(Collective(collective.kind, size)) for one, size in _levels(collective, local, inside, between)
    )
    return ClosedForm(
        near.steps + far.steps,
        near.sent + far.sent / local,
        near.wire + far.wire / local,
        near.reduced + far.reduced / local,
        near.steps,
        near.wire,
        near.messages + far.messages,
        near.messages,
    )


def _rails_limit(collective: Collective, *, local: int, inside: str, between: str) -> str | None:
    if reason := _hosts(collective, local, between):
        return reason
    if inside not in _INSIDE:
        return f"inside={inside!r}; give one of {', '.join(_INSIDE)}"
    one, hosts = _levels(collective, local, inside, between)[1]
    return one.serves(Collective(collective.kind, hosts))


def _levels(collective: Collective, local: int, inside: str, between: str) -> list[tuple[Algorithm, int]]:
    return [(_INSIDE[inside], local), (_BETWEEN[between], collective.world // local)]


@algorithm(
    title="Two levels, rails",
    source=_SOURCE,
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_rails_form,
    limit=_rails_limit,
    planned=({}, {"between": "circulant"}),
)
def rails(
    collective: Collective, *, local: int = 1, inside: str = "direct", between: str = "halving_doubling"
) -> Schedule:
    """Build: reduce_scatter within hosts, all_reduce of each part between the ranks of one place, all_gather back.

    The ranks of all places work at once, each over its own NIC (rail) and with 1/local of the data. reduce_scatter
    and all_gather are its halves, with some world^2 transfers.

    Args:
        collective: Contract of hosts with `local` ranks each, those of a host one after the other.
        local: Ranks a host.
        inside: Algorithm within hosts, direct or ring.
        between: Algorithm between hosts; one that serves their number.
    """
    kind, hosts = collective.kind, collective.world // local
    host_major = np.arange(collective.world).reshape(hosts, local)
    near, far = _levels(collective, local, inside, between)
    outer = far[0](Collective(kind, hosts))
    parts = outer.chunks  # of each of the `local` shards
    middle = placed(outer.steps, host_major.T, np.arange(local) * parts, chunks=parts)

    def within(half: str) -> list[Step]:
        inner = near[0](Collective(half, local))
        return placed(inner.steps, host_major, scale=parts, chunks=inner.chunks)

    before = within("reduce_scatter") if kind != "all_gather" else []
    after = within("all_gather") if kind != "reduce_scatter" else []
    steps = [*before, *middle, *after]
    if kind != "all_reduce":  # part h of shard i is the block of rank i of host h
        steps = relabelled(steps, host_major.T.ravel())
    return Schedule("rails", collective, local * parts, tuple(steps))
