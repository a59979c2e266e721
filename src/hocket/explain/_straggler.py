"""Who is late in the steps of a run, since when, and why."""

from collections.abc import Sequence

import numpy as np

from ._parts import CHECKPOINT, COLLECTOR, COMPUTATION, DATA, Array, Parts
from ._places import place_of_late
from ._replay import Replay
from ._verdict import BUSY, LEAST_GAIN, LEAST_STEPS, Verdict, listed, ms

_SURE = 3.5  # standard errors by which lateness differs from none, or from what was before
_STEADY = 20  # steps for which a rank must be late on a busy machine, if it was not so from the beginning
_LATE_SHARE = 0.6  # of the steps in which a straggler does more than the others


def straggler(parts: Parts) -> list[Verdict]:
    """Find ranks that are later than others like them, and why; what steps would take without is replayed."""
    if len(parts.run.ranks) < 2:
        return []
    work = parts.work
    stages = parts.stages()
    others = work.copy()
    for stage in np.unique(stages):  # the stages of a pipeline do not do the same
        if (stages == stage).sum() > 1:
            others[stages == stage] = _of_the_others(work[stages == stage])
    excess = work - others
    rank = int(np.argmax(excess.sum(axis=1)))
    since = began(excess[rank])
    late = excess[:, since:]
    typical_s = float(np.median(parts.lengths_s[:, since:]))
    # Compared with what the others differ among each other from step to step, and sign by sign.
    surely = late.mean(axis=1) > _SURE * late.std(axis=1) / np.sqrt(late.shape[1])
    often = (late > 0.03 * typical_s).mean(axis=1) >= _LATE_SHARE
    if not surely[rank] and not often[rank] and late[rank].sum() < 0.2 * parts.lengths_s[rank, since:].sum():
        return []
    replay = Replay(parts)
    before_s = replay.run().seconds
    share = float(parts.lengths_s[:, since:].sum() / parts.lengths_s.sum())

    def without(ranks: list[int]) -> tuple[float, float]:
        """Return the seconds of the steps in which these ranks are as the others, and the gain since they are late."""
        # They would be like another, now this and now that one: their median is less restless than any rank.
        at = np.arange(since, parts.steps)
        factors = {}
        for one in ranks:
            alike = np.setdiff1d(np.flatnonzero(stages == stages[one]), ranks)
            factors[one] = np.ones(parts.steps)
            usual = work[alike[at % len(alike)], at]
            factors[one][since:] = np.clip(usual / np.maximum(work[one, since:], 1e-9), 0.0, 4.0)
        after_s = replay.run(factors).seconds
        return after_s, (1.0 - after_s / before_s) / max(share, 1e-9)

    ranks = [rank]
    after_s, gain = without(ranks)
    # Where others are about as late, all of a host's for example, one alone tells little: they are looked at together.
    more = np.flatnonzero((surely | often) & (stages == stages[rank]) & (late.mean(axis=1) > 0.5 * late[rank].mean()))
    if 1 < len(more) < (stages == stages[rank]).sum() and (found := without(more.tolist()))[1] > gain + LEAST_GAIN:
        ranks, (after_s, gain) = more.tolist(), found
    if gain < LEAST_GAIN:
        return []
    usual = (stages == stages[rank]) & ~np.isin(np.arange(len(work)), ranks)
    excess = work[:, since:] - np.median(work[usual, since:], axis=0)
    causes = {one: _causes(parts, one, since, usual) for one in ranks}
    told = []
    for cause in dict.fromkeys(next(iter(each)) for each in causes.values()):
        its = [one for one in ranks if next(iter(causes[one])) == cause]
        worst = max(its, key=lambda one: float(excess[one].mean()))
        extra_s, often = float(excess[worst].mean()), float((excess[worst] > 0).mean())
        much = float((excess[worst] > 0.5 * extra_s).mean())  # of the steps; a checkpoint is in few of them
        word, step, kind = _explained(parts, worst, its, ranks, cause, since, extra_s)
        without_it = "it" if its == ranks else f"what ranks {_listed(parts, ranks)} do more"
        parts_s = {name: s for name, s in causes[worst].items() if name == cause or s > 0.2 * extra_s}
        most = [f"{min(1.0, s / extra_s):.0%} {name}" for name, s in parts_s.items()]
        # On a busy machine other programs come and go, and one rank may have less of it for a few seconds.
        passing = since > 0 and late.shape[1] < _STEADY and float(np.median(parts.ready_shares(since))) > BUSY
        sure = gain > 2 * LEAST_GAIN and (surely[worst] or often > 0.8) and not passing
        steps = "each step" if much > 0.5 else "the mean step"
        told.append(
            Verdict(
                kind,
                f"{_named(parts, its)} late{f' since step {parts.first + since}' if since else ''}: {word}, "
                f"{ms(extra_s)} ms more in {steps} than the others; without {without_it} steps would be "
                f"{gain:.0%} shorter",
                f"late in {much:.0%} of {excess.shape[1]} steps; it is {', '.join(most)}; "
                f"the same steps replayed take {before_s:.3g} s with and {after_s:.3g} s without",
                step,
                "high" if sure else "medium",
                tuple(parts.run.ranks[one].rank for one in its),
                gain * share,
                parts.first + since if since else None,
            )
        )
    return told


def _listed(parts: Parts, ranks: Sequence[int]) -> str:
    return listed(parts.run.ranks[one].rank for one in ranks)


def _named(parts: Parts, ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(parts.run.ranks[one].host for one in ranks))
    where = f"host{'s'[: len(hosts) - 1]} {listed(hosts)}"
    many = len(ranks) > 1
    return f"rank{'s' * many} {_listed(parts, ranks)} of {parts.run.world} ({where}) {'are' if many else 'is'}"


def _of_the_others(values: Array) -> Array:
    """Return for each row the median of the other rows, column by column."""
    ordered, places = np.sort(values, axis=0), np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0)
    count = len(values)
    middle = [np.where(m < places, ordered[m], ordered[m + 1]) for m in ((count - 2) // 2, (count - 1) // 2)]
    return np.asarray((middle[0] + middle[1]) / 2)


def began(excess: Array) -> int:
    """Return from which step on a series is larger, if it clearly was not before; else 0."""
    if len(excess) < 2 * LEAST_STEPS:
        return 0
    turn = int(np.argmin(np.cumsum(excess - excess.mean()))) + 1
    if turn < LEAST_STEPS // 2 or len(excess) - turn < LEAST_STEPS:
        return 0
    before, after = excess[:turn], excess[turn:]
    # A delay that comes and goes has no beginning, and chance has one, too: the turn is where it looks most like one.
    within = (before.var() * len(before) + after.var() * len(after)) / len(excess)
    error = np.sqrt(within * (1 / len(before) + 1 / len(after)))
    begun = before.mean() < 0.3 * after.mean() and after.mean() - before.mean() > _SURE * error
    return turn if begun and np.median(before) < 0.3 * np.median(after) else 0


def _causes(parts: Parts, rank: int, since: int, usual: Array) -> dict[str, float]:
    """Return of each part how many seconds of a step a rank has more than those that are not late, the most first."""
    found: dict[str, float] = {}
    for number, name in enumerate(parts.names):
        if not name.startswith(("waiting", "communication")):
            mine = parts.seconds[:, number, since:].mean(axis=1)
            found[name] = float(mine[rank] - np.median(mine[usual]))
    return dict(sorted(found.items(), key=lambda row: -row[1]))


def _explained(
    parts: Parts, rank: int, its: Sequence[int], late: Sequence[int], cause: str, since: int, extra_s: float
) -> tuple[str, str, str]:
    """Return what the cause of some late ranks is called, what to do, and the kind of the verdict.

    `rank` is the latest of `its`, those that have the cause; it does `extra_s` more in a step, from step `since` on.
    """
    one = parts.run.ranks[rank]
    it, whose = ("each", "each one's") if len(its) > 1 else ("it", "its")
    if cause == COLLECTOR:
        return (
            f"Python's garbage collector runs in {it}",
            "call gc.freeze() before training, and gc.collect() between steps",
            "garbage collection",
        )  # fmt: skip
    if cause == CHECKPOINT:
        return f"{it} writes checkpoints", "write them less often, or in the background", "checkpoints"
    ready, ran, blocked = parts.ready_shares(since), parts.ran_shares(since), parts.blocked_shares(since)
    least = 0.5 * extra_s / float(parts.lengths_s[:, since:].mean())
    others = np.setdiff1d(np.arange(len(ready)), late)
    # On a busy machine all lack cores, and who computes longer lacks them longer: what the others would lack with as
    # much to compute is no cause.
    lacks = ready[rank] - ran[rank] * float(np.median(ready[others] / np.maximum(ran[others], 1e-3)))
    if ready[rank] > 0.1 and min(lacks, ready[rank] - float(np.median(ready[others]))) > least:
        return (
            f"other processes take {whose} core {ready[rank]:.0%} of the time",
            "look who else runs there (`top`), and give every rank cores of its own",
            "straggler",
        )
    if cause == DATA:
        return (
            f"{whose} data comes late",
            "more worker processes for the loader, or look at that host's disk",
            "slow loader",
        )
    if cause != COMPUTATION:
        return f"{it} spends longer in {cause!r}", f"look what {cause!r} does on that rank", "straggler"
    place = place_of_late(parts, rank, others.tolist(), since, 2.0 * least)
    where = f", mostly in {place}" if place else ""
    step = f"compare {one.host}'s clock rate and load with the others'"
    if any(other.host == one.host for i, other in enumerate(parts.run.ranks) if i not in late):
        waits = (
            " (it is blocked there: by a file, a lock, a GPU)"
            if ran[rank] and blocked[rank] - np.median(blocked[others]) > least
            else ""
        )
        there = f"{place or 'the program'} does on rank {one.rank} alone{waits}"
        step = f"look what {there}: others of its host are not late"
    return f"{it} computes longer{where}", step, "straggler"
