"""What a run says for itself: who was late and why, what hung, and what costs most; one sentence each."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hocket.profile import SAMPLE, STEP, LiveRank, RankRun, RunRecord, short_place

from ._links import links_of, slow_link
from ._parts import BUBBLE, CHECKPOINT, COLLECTOR, COMPUTATION, DATA, LATE, Array, Parts
from ._replay import Replay

LEAST_STEPS = 6
_LEAST_GAIN = 0.05  # below this share of the time a finding is not worth a sentence
_MOST_LISTED = 8  # stages, ranks or hosts
_SURE = 3.5  # standard errors by which lateness differs from none, or from what was before
_LATE_SHARE = 0.6  # of the steps in which a straggler does more than the others
_MIB = 2**20
_LEAST_LOADING = 0.1  # the share of the time of which loading data is told
_LEAST_SAMPLES = 6  # of memory, four a second
_FEW_STEPS = 3  # whose memory says nothing of what each takes
_STRAIGHT = 0.9  # share of the variance of memory that a line explains
_LAST_LINES = "read that rank's last lines of output; out of memory shows in `dmesg`"
_INSTEAD = {  # what a finding says of some ranks makes another's general words idle
    "slow loader": ("loading data",), "garbage collection": ("garbage collection",),
    "slow link": ("communication", "small batches"), "unbalanced stages": ("bubbles",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding.

    Attributes:
        kind: "straggler", "slow loader", "slow link", "loading data", "communication", "unbalanced stages", "bubbles",
            "small batches", "uneven work", "busy machine", "memory growth", "checkpoints", "garbage collection", "not a
            number" or "died".
        sentence: The finding in one sentence.
        evidence: The figures behind it.
        next_step: What to do.
        confidence: "high", "medium" or "low".
        ranks: The ranks that it is about; none if about all.
        gain: Share of the steps' time that would be saved without it, 0 to 1.
        since_step: Step with which it began, where it has not always been so.
    """

    kind: str
    sentence: str
    evidence: str
    next_step: str
    confidence: str
    ranks: tuple[int, ...] = ()
    gain: float = 0.0
    since_step: int | None = field(default=None)

    def __str__(self) -> str:
        return f"{self.sentence}\n  evidence ({self.confidence} confidence): {self.evidence}\n  next: {self.next_step}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def verdicts_of(run: RunRecord, parts: Parts | None, live: Sequence[LiveRank]) -> list[Verdict]:
    """Return the findings about a run, what would save most time first; what ended it, or will, stands before.

    Args:
        run: The run.
        parts: Where the time of its steps went; None where it made none.
        live: Its ranks, now.
    """
    found = _died(run, live)
    timed: list[Verdict] = []
    if parts is not None and parts.steps >= LEAST_STEPS:
        for finder in (_straggler, _link, _communication, _loading, _stages, _bubbles, _checkpoints, _garbage, _busy):
            timed += finder(parts)
        if not any(one.ranks for one in timed):
            timed += _uneven(parts)
        if any(one.kind == "busy machine" for one in timed):  # who has no core is late at everything
            kinds = ("communication", "small batches", "loading data", "uneven work")
            clear = float(np.median(parts.ready_shares())) + _LEAST_LOADING  # more than lacking cores can explain
            timed = [
                one
                for one in timed
                if (one.kind not in kinds or (one.kind == "loading data" and one.gain > clear))
                and not (one.ranks and one.confidence != "high")
            ]
        kinds_found = {one.kind for one in timed if one.kind in _INSTEAD and (one.ranks or one.kind == "slow link")}
        instead = {kind for found_kind in kinds_found for kind in _INSTEAD[found_kind]}
        timed = [one for one in timed if one.kind not in instead or (one.ranks and one.kind in kinds_found)]
    timed.sort(key=lambda one: -one.gain)
    return [*found, *_values(run), *_memory(run), *timed]


def _died(run: RunRecord, now: Sequence[LiveRank]) -> list[Verdict]:
    """Find ranks that were gone while others waited for them, or long before the others were."""
    last_s = max(one.last_s for one in run.ranks)
    live = {one.rank: one for one in now}
    begun: dict[tuple[str, tuple[int, ...]], int] = {}  # the latest operation of a group that any rank has begun
    for one in now:
        for g in one.groups:
            begun[g.name, g.ranks] = max(begun.get((g.name, g.ranks), 0), g.started)
    gone = [
        one
        for one in run.ranks
        if one.ended_s is None and one.rank in live and live[one.rank].state in ("dead", "silent")
        and (
            last_s - one.last_s > 3.0
            or any(g.waits or g.started < begun[g.name, g.ranks] for g in live[one.rank].groups)
        )
    ]  # fmt: skip
    if len(gone) == run.world > 1:
        return _all_died(
            run, [one for one in gone if any(g.started < begun[g.name, g.ranks] for g in live[one.rank].groups)]
        )
    first_s = min((one.last_s for one in gone), default=0.0)
    return [
        Verdict(
            "died",
            f"rank {one.rank} of {run.world} (host {one.host}) ended without a word after {one.last_s:.1f} s, "
            f"{len(one.of(STEP))} steps",
            f"its record stops; that of others goes on to {last_s:.1f} s",
            _LAST_LINES,
            "high",
            (one.rank,),
        )
        for one in [one for one in gone if one.last_s < first_s + 1.0][:3]
    ]


def _all_died(run: RunRecord, awaited: list[RankRun]) -> list[Verdict]:
    """Tell whom the others waited for when all ended without a word: launchers end the others when one has died."""
    if not awaited or 2 * len(awaited) > run.world:
        return []
    ranks = ", ".join(f"{one.rank} (host {one.host})" for one in awaited[:_MOST_LISTED])
    return [
        Verdict(
            "died",
            f"all {run.world} ranks ended without a word, while the others waited for rank{'s'[: len(awaited) - 1]} "
            f"{ranks}: if nobody ended the job, that is where it began",
            f"all records stop; {len(awaited)} had not begun the operation in which the others waited",
            _LAST_LINES,
            "medium",
            tuple(one.rank for one in awaited),
        )
    ]


def _straggler(parts: Parts) -> list[Verdict]:
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
    if 1 < len(more) < (stages == stages[rank]).sum() and (found := without(more.tolist()))[1] > gain + _LEAST_GAIN:
        ranks, (after_s, gain) = more.tolist(), found
    if gain < _LEAST_GAIN:
        return []
    usual = (stages == stages[rank]) & ~np.isin(np.arange(len(work)), ranks)
    excess = work[:, since:] - np.median(work[usual, since:], axis=0)
    causes = {one: _causes(parts, one, since, usual) for one in ranks}
    told = []
    for cause in dict.fromkeys(next(iter(each)) for each in causes.values()):
        its = [one for one in ranks if next(iter(causes[one])) == cause]
        worst = max(its, key=lambda one: float(excess[one].mean()))
        extra_s, often = float(excess[worst].mean()), float((excess[worst] > 0).mean())
        word, step, kind = _explained(parts, worst, its, ranks, cause, since, extra_s)
        without_it = "it" if its == ranks else f"what ranks {_listed(parts, ranks)} do more"
        most = [f"{s / extra_s:.0%} {name}" for name, s in causes[worst].items() if name == cause or s > 0.2 * extra_s]
        told.append(
            Verdict(
                kind,
                f"{_named(parts, its)} late{f' since step {parts.first + since}' if since else ''}: {word}, "
                f"{extra_s * 1e3:.3g} ms more in each step than the others; without {without_it} steps would be "
                f"{gain:.0%} shorter",
                f"late in {often:.0%} of {excess.shape[1]} steps; it is {', '.join(most)}; "
                f"the same steps replayed take {before_s:.3g} s with and {after_s:.3g} s without",
                step,
                "high" if gain > 2 * _LEAST_GAIN and (surely[worst] or often > 0.8) else "medium",
                tuple(parts.run.ranks[one].rank for one in its),
                gain * share,
                parts.first + since if since else None,
            )
        )
    return told


def _listed(parts: Parts, ranks: Sequence[int]) -> str:
    return ", ".join(str(parts.run.ranks[one].rank) for one in ranks[:_MOST_LISTED]) + ", ..." * (
        len(ranks) > _MOST_LISTED
    )


def _named(parts: Parts, ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(parts.run.ranks[one].host for one in ranks))
    where = f"host{'s'[: len(hosts) - 1]} {', '.join(hosts[:_MOST_LISTED])}"
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
    ready, ran = parts.ready_shares(), parts.ran_shares()
    usual, usual_ran = np.median(np.delete(ready, late)), np.median(np.delete(ran, late))
    least = 0.5 * extra_s / parts.step_s
    # On a busy machine all lack cores, also while they wait: then it counts that the rank does not use more of one, and
    # is hardly ever blocked.
    blocked = 1.0 - ready[rank] - ran[rank]
    if ready[rank] > 0.1 and (ready[rank] - usual > least or (blocked < least and ran[rank] < 1.2 * usual_ran)):
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
    place = _usual_place(one, parts.bounds_s[rank][since])
    where = f", mostly in {place}" if place else ""
    step = f"compare {one.host}'s clock rate and load with the others'"
    if any(other.host == one.host for i, other in enumerate(parts.run.ranks) if i not in late):
        waits = " (it is blocked there: by a file, a lock, a GPU)" if ran[rank] and blocked > least else ""
        there = f"{place or 'the program'} does on rank {one.rank} alone{waits}"
        step = f"look what {there}: others of its host are not late"
    return f"{it} computes longer{where}", step, "straggler"


def _usual_place(one: RankRun, after_s: float) -> str:
    rows = one.of(SAMPLE)
    read = (rows["posted_s"] > after_s) & (rows["text"] > 0)
    texts, counts = np.unique(rows["text"][read], return_counts=True)
    return short_place(one.texts[int(texts[np.argmax(counts)])]) if len(texts) else ""


def _share(parts: Parts, seconds: Array) -> float:
    return float(seconds.sum() / parts.lengths_s.sum())


def _communication(parts: Parts) -> list[Verdict]:
    if len(parts.run.ranks) < 2:
        return []
    share = _share(parts, parts.communication)
    if share < 0.2:
        return []
    rows = [(name, _share(parts, parts.of(name))) for name in parts.names if name.startswith("communication")]
    name, most = max(rows, key=lambda row: row[1])
    replay = Replay(parts)
    gain = 1.0 - replay.run(own_s=lambda one: one.own_s / 2).seconds / replay.run().seconds
    own_s = float(parts.work.mean())
    kind, step = "communication", "let it overlap with back-propagation, send less (`compression`), or use a faster way"
    if own_s < 0.005:
        kind, step = "small batches", "larger batches: a step that computes this little cannot hide communication"
    return [
        Verdict(
            kind,
            f"steps wait {share:.0%} of their time for communication that nothing hides, most in {name[17:]} "
            f"({most:.0%})",
            f"{parts.communication.mean() * 1e3:.3g} ms of a step of {parts.step_s * 1e3:.3g} ms, after all ranks had "
            f"come; a network twice as fast would make steps {gain:.0%} shorter",
            step, "high" if share > 0.3 else "medium", (), share,
        )
    ]  # fmt: skip


def _link(parts: Parts) -> list[Verdict]:
    found = slow_link(links_of(parts.run))
    if found is None:
        return []
    slower = found.rate_Bps / found.others_Bps
    ranks = tuple(one.rank for one in parts.run.ranks if one.host in found.hosts)
    replay = Replay(parts)
    quicker = replay.run(
        own_s=lambda one: one.own_s * (1.0 if set(ranks).isdisjoint(one.group[1] or ranks) else slower)
    )
    gain = 1.0 - quicker.seconds / replay.run().seconds
    if gain < _LEAST_GAIN:
        return []
    again = f"; {found.resent} segments were sent again" if found.resent else ""
    return [
        Verdict(
            "slow link",
            f"{found.place} is slow: it gives {found.rate_Bps / 1e6:.3g} MB/s while it is used, others "
            f"{found.others_Bps / 1e6:.3g} MB/s; as quick as they, steps would be {gain:.0%} shorter",
            f"as the kernel counts the ranks' TCP connections{again}; communication that nothing hides takes "
            f"{_share(parts, parts.communication):.0%} of the steps",
            f"look at the cable, the port and the rate of the NIC (`ethtool`) of {' and '.join(found.hosts)}",
            "high" if slower < 0.5 else "medium", () if " from host " in found.place else ranks, gain,
        )
    ]  # fmt: skip


def _stages(parts: Parts) -> list[Verdict]:
    if not parts.of(BUBBLE).any():
        return []
    stages, work = parts.stages(), np.median(parts.work, axis=1)
    numbers = np.unique(stages)  # those whose ranks' records are there
    mean_s = np.array([work[stages == stage].mean() for stage in numbers])
    place = int(mean_s.argmax())
    slowest = int(numbers[place])
    gain = float(mean_s.max() - mean_s.mean()) / float(np.median(parts.lengths_s))
    if len(mean_s) < 2 or gain < 2 * _LEAST_GAIN or _share(parts, parts.of(BUBBLE)) < 0.1:
        return []
    each = ", ".join(f"{seconds * 1e3:.3g}" for seconds in mean_s[:_MOST_LISTED])
    return [
        Verdict(
            "unbalanced stages",
            f"stage {slowest} of the pipeline computes {mean_s[place] * 1e3:.3g} ms a step and the others "
            f"{np.delete(mean_s, place).mean() * 1e3:.3g} ms in the mean; cut evenly, steps would be {gain:.0%} "
            "shorter",
            f"ms a step of the stages: {each}{', ...' if len(mean_s) > _MOST_LISTED else ''}; "
            f"they wait {_share(parts, parts.of(BUBBLE)):.0%} of their time for messages",
            "leave out `split` so that the stages are cut by their measured times, or move layers to the others; if "
            f"all stages have equal layers, compare the host of stage {slowest} with the others'",
            "high" if gain > 4 * _LEAST_GAIN else "medium",
            tuple(one.rank for one, stage in zip(parts.run.ranks, stages, strict=True) if stage == slowest), gain,
        )
    ]  # fmt: skip


def _part(name: str, kind: str, least: float, text: str, step: str) -> Callable[[Parts], list[Verdict]]:
    def find(parts: Parts) -> list[Verdict]:
        seconds = parts.of(name)
        share = _share(parts, seconds)
        if share < least:
            return []
        evidence = f"{seconds.mean() * 1e3:.3g} ms of a step of {parts.step_s * 1e3:.3g} ms, the mean over ranks"
        return [Verdict(kind, text.format(share), evidence, step, "high" if share > 2 * least else "medium", (), share)]

    return find


_loading = _part(
    DATA, "loading data", _LEAST_LOADING, "steps wait {:.0%} of their time for data",
    "more worker processes (num_workers), prefetching, or data prepared beforehand",
)  # fmt: skip
_bubbles = _part(
    BUBBLE, "bubbles", 0.2, "stages wait {:.0%} of their time for messages of others: bubbles of the pipeline",
    "more micro-batches, or stages of more equal time (`hocket plan`)",
)  # fmt: skip
_checkpoints = _part(
    CHECKPOINT, "checkpoints", 0.05, "checkpoints take {:.0%} of the time",
    "write them less often, or in the background",
)  # fmt: skip
_garbage = _part(
    COLLECTOR, "garbage collection", 0.03, "Python's garbage collector takes {:.0%} of the time",
    "call gc.freeze() before training, and gc.collect() between steps",
)  # fmt: skip


def _uneven(parts: Parts) -> list[Verdict]:
    late, work = parts.of(LATE), parts.work
    if (share := _share(parts, late)) < 0.2:
        return []
    last = float(np.bincount(work.argmax(axis=0)).max() / parts.steps)
    return [
        Verdict(
            "uneven work",
            f"ranks wait {share:.0%} of their time for one another, and now this one and now that one is late: what "
            "they do in a step takes unequally long",
            f"the longest of a step's ranks takes {work.max(axis=0).mean() * 1e3:.3g} ms, the mean one "
            f"{work.mean() * 1e3:.3g} ms; no rank is the longest in more than {last:.0%} of {parts.steps} steps",
            "batches that cost the same on all ranks (samples of like lengths), or look what stops ranks now and then",
            "high" if share > 0.3 else "medium", (), share,
        )
    ]  # fmt: skip


def _busy(parts: Parts) -> list[Verdict]:
    ready = parts.ready_shares()
    share = float(np.median(ready))
    if share < 0.15:
        return []
    cores = {
        (one.about.get("boot") or one.host, core) for one in parts.run.ranks for core in one.about.get("cores", [])
    }
    return [
        Verdict(
            "busy machine",
            f"ranks are ready and have no core {share:.0%} of the time: more runs here than the machine has cores for",
            f"{len(parts.run.ranks)} ranks, {len(cores)} cores; up to {ready.max():.0%} on rank "
            f"{parts.run.ranks[int(ready.argmax())].rank}",
            "fewer ranks or threads on a host (OMP_NUM_THREADS), or end what else runs there",
            "high", (), share * _share(parts, parts.of(COMPUTATION)) / 3,
        )
    ]  # fmt: skip


def _values(run: RunRecord) -> list[Verdict]:
    """Find the first value of a step, as the loss, that is no finite number and stays so to the end."""
    found = []
    for one in run.ranks:
        for name, rows in one.values().items():
            bad = ~np.isfinite(rows["value"])
            if len(bad) and bad[-1]:
                at = len(bad) - int(np.argmin(bad[::-1])) if not bad.all() else 0
                found.append((int(rows["step"][at]), name, float(rows["value"][at]), one))
    if not found:
        return []
    step, name, value, one = min(found, key=lambda row: row[:2])
    ranks = {row[3].rank for row in found if row[1] == name}
    return [
        Verdict(
            "not a number", f"{name} is {value} since step {step}",
            f"as rank {one.rank} of {run.world} told; {len(ranks)} ranks told so",
            "a smaller learning rate, or clipped gradients; `torch.autograd.set_detect_anomaly(True)` tells where",
            "high", (one.rank,) if len(ranks) < run.world else (), since_step=step,
        )
    ]  # fmt: skip


def _memory(run: RunRecord) -> list[Verdict]:
    """Find ranks whose memory grows with the steps that they make, in a straight line to the end."""
    found = []
    for one in run.ranks:
        rows, edges = one.of(SAMPLE), one.steps
        if len(edges) <= _FEW_STEPS:
            continue  # what grows is what a program sets up
        # What is freed after training was there all the same.
        rows = rows[(rows["posted_s"] > edges[0]) & (rows["posted_s"] < edges[-1])]
        at = np.searchsorted(edges, rows["posted_s"]).astype(float)
        late = slice(len(rows) // 3, None)
        used, at = rows["nbytes"][late].astype(float), at[late]
        half = len(used) // 2
        if len(used) < _LEAST_SAMPLES or len({at[0], at[half], at[-1]}) < 3 or at[half - 1] == at[0]:
            continue
        slope, start = np.polyfit(at, used, 1)
        grown = float(slope * (at[-1] - at[0]))
        straight = 1.0 - float(np.var(used - slope * at - start)) / max(float(np.var(used)), 1.0)
        # A single jump gives at most 0.75, two give 0.89; what caches take comes to an end.
        first, second = (float(np.polyfit(at[part], used[part], 1)[0]) for part in (slice(half), slice(half, None)))
        if grown > max(24 * _MIB, 0.05 * used[0]) and straight > _STRAIGHT and second > 0.7 * first:
            found.append((grown, float(used[-1]), one))
    if not found:
        return []
    grown, last, one = max(found, key=lambda row: row[0])
    leaking = [each.rank for more, _, each in found if more > 0.5 * grown]
    if len(leaking) == run.world > 1:
        whose, leaking = "every rank", []
    elif len(leaking) > 1:
        whose = f"ranks {', '.join(map(str, leaking[:_MOST_LISTED]))} of {run.world}"
    else:
        whose = f"rank {one.rank} of {run.world} (host {one.host})"
    each = f"{grown / (2 * len(one.of(STEP)) // 3) / _MIB:.2g} MiB a step"
    return [
        Verdict(
            "memory growth",
            f"the memory of {whose} grows all the time: {each}, {grown / _MIB:.0f} MiB in the last two thirds",
            f"{last / _MIB:.0f} MiB at the end{f' of rank {one.rank}' if len(leaking) != 1 else ''}; it grows with the "
            "steps in a straight line, to the end",
            "look for what is kept from step to step: losses with their graphs (use loss.item()), lists of outputs",
            "high" if grown > 100 * _MIB else "medium",
            tuple(leaking),
        )
    ]  # fmt: skip
