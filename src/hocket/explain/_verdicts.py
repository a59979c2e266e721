"""What a run says for itself: who was late and why, what hung, and what costs most; one sentence each."""

from collections.abc import Callable, Sequence, Set

import numpy as np

from hocket.profile import SAMPLE, STEP, LiveRank, RunRecord

from ._ending import ending
from ._links import links_of, slow_link
from ._parts import BUBBLE, CHECKPOINT, COLLECTOR, COMPUTATION, DATA, LATE, Parts
from ._places import place_of_most
from ._replay import Replay
from ._slow_steps import slow_steps
from ._straggler import straggler
from ._verdict import BUSY, LEAST_GAIN, LEAST_STEPS, Verdict, listed, ms

_MIB = 2**20
_LEAST_LOADING = 0.1  # the share of the time of which loading data is told
_LEAST_PAUSE = 0.1  # the share of the time of which pauses are told, of which all but a quarter of the ranks have more
_LEAST_RUN = 0.05  # share of the time in which a main thread that trains has a core: in others' programs it only waits
_LEAST_SAMPLES = 6  # of memory, four a second
_FEW_STEPS = 3  # whose memory says nothing of what each takes
_STOOD_S = 10.0  # without a step, and five times a usual one: a job that is ended then may be so since it stood
_STRAIGHT = 0.9  # share of the variance of memory that a line explains
_LAST_LINES = "read that rank's last lines of output; out of memory shows in `dmesg`"
_NAMED = ("checkpoints", "garbage collection")  # whose begin and end are recorded: nothing is concluded
_INSTEAD = {  # what a finding says of some ranks makes another's general words idle
    "slow loader": ("loading data",), "garbage collection": ("garbage collection",), "checkpoints": ("checkpoints",),
    "slow link": ("communication", "small batches"), "unbalanced stages": ("bubbles",),
}  # fmt: skip


def verdicts_of(run: RunRecord, parts: Parts | None, live: Sequence[LiveRank]) -> list[Verdict]:
    """Return the findings about a run, what would save most time first; what ended it, or will, stands before.

    Args:
        run: The run.
        parts: Where the time of its steps went; None where it made none.
        live: Its ranks, now.
    """
    over = ending(run.folder, run.world)
    found = _died(run, live) if over is None else [over, *(_stood(run, live) if over.kind == "ended" else [])]
    timed: list[Verdict] = []
    if parts is not None and parts.steps >= LEAST_STEPS:
        for finder in (
            straggler, _link, _communication, _loading, _stages, _bubbles, _checkpoints, _garbage, _pauses, _busy,
        ):  # fmt: skip
            told = {(one.kind, one.ranks) for one in timed}
            timed += [one for one in finder(parts) if (one.kind, one.ranks) not in told]
        timed = _without_what_few_steps_explain(timed, slow_steps(parts))
        if not any(one.ranks or one.kind == "slow steps" for one in timed):
            timed += _uneven(parts)
        if any(one.kind == "busy machine" for one in timed):  # who has no core is late at everything
            kinds = ("communication", "small batches", "loading data", "uneven work", "pauses")
            clear = float(np.median(parts.ready_shares())) + _LEAST_LOADING  # more than lacking cores can explain
            timed = [
                one
                for one in timed
                if (one.kind not in kinds or (one.kind == "loading data" and one.gain > clear))
                and not (one.ranks and one.confidence != "high" and one.kind not in _NAMED)
            ]
        timed = _without_general_words(timed)
    timed.sort(key=lambda one: -one.gain)
    return [*found, *_values(run), *_memory(run), *timed]


def _without_general_words(found: list[Verdict]) -> list[Verdict]:
    """Return all findings but those whose cause others name; one rank's late data is all of it only if it is half."""
    named: dict[str, float] = {}  # by kind: the gain up to which others say it better
    for one in found:
        if one.ranks or one.kind == "slow link":
            most = 2.0 * one.gain if one.kind == "slow loader" else np.inf
            named |= {kind: max(named.get(kind, 0.0), most) for kind in _INSTEAD.get(one.kind, ())}
    return [one for one in found if one.ranks or one.gain > named.get(one.kind, -1.0)]


def _without_what_few_steps_explain(found: list[Verdict], slow: list[Verdict]) -> list[Verdict]:
    """Return all findings but those about all steps that tell of no more than the few slow ones do."""
    kinds = ("straggler", "slow loader", "loading data", "pauses")
    kept = [
        one
        for one in found
        if not any(one.kind in kinds and one.ranks == few.ranks and one.gain < 1.5 * few.gain for few in slow)
    ]
    return [*kept, *slow]


def _died(run: RunRecord, now: Sequence[LiveRank]) -> list[Verdict]:
    """Find ranks that were gone while others waited for them, or long before the others were."""
    last_s = max(one.last_s for one in run.ranks)
    live = {one.rank: one for one in now}
    behind = _behind(now)
    gone = [
        one
        for one in run.ranks
        if one.ended_s is None and one.rank in live and live[one.rank].state in ("dead", "silent")
        and (last_s - one.last_s > 3.0 or one.rank in behind or any(g.waits for g in live[one.rank].groups))
    ]  # fmt: skip
    if len(gone) == run.world > 1:
        how = f"all {run.world} ranks ended without a word"
        return _awaited(run, behind, how, ": if nobody ended the job, that is where it began")
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


def _stood(run: RunRecord, now: Sequence[LiveRank]) -> list[Verdict]:
    """Tell whom the others of a job waited for that was ended from outside, if no step had ended for long."""
    steps = [one.steps for one in run.ranks if len(one.steps) > 1]
    if not steps:
        return []
    stood_s = max(one.last_s for one in run.ranks) - max(one[-1] for one in steps)
    if stood_s < max(_STOOD_S, 5 * max(float(np.median(np.diff(one))) for one in steps)):
        return []
    return _awaited(run, _behind(now), f"the job had made no step for {stood_s:.0f} s", "")


def _behind(now: Sequence[LiveRank]) -> set[int]:
    """Return the ranks that had not begun the latest operation which others of a group of theirs had."""
    begun: dict[tuple[str, tuple[int, ...]], int] = {}
    for one in now:
        for g in one.groups:
            begun[g.name, g.ranks] = max(begun.get((g.name, g.ranks), 0), g.started)
    return {one.rank for one in now if any(g.started < begun[g.name, g.ranks] for g in one.groups)}


def _awaited(run: RunRecord, behind: Set[int], how: str, then: str) -> list[Verdict]:
    """Tell whom the others waited for when all ended at once: launchers end the others when one has died."""
    awaited = [one for one in run.ranks if one.rank in behind]
    if not awaited or 2 * len(awaited) > run.world:
        return []
    ranks = listed(f"{one.rank} (host {one.host})" for one in awaited)
    return [
        Verdict(
            "died",
            f"{how}, while the others waited for rank{'s'[: len(awaited) - 1]} {ranks}{then}",
            f"all records stop; {len(awaited)} had not begun the operation in which the others waited",
            _LAST_LINES,
            "medium",
            tuple(one.rank for one in awaited),
        )
    ]


def _communication(parts: Parts) -> list[Verdict]:
    if len(parts.run.ranks) < 2:
        return []
    share = parts.share(parts.communication)
    if share < 0.2:
        return []
    rows = [(name, parts.share(parts.of(name))) for name in parts.names if name.startswith("communication")]
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
            f"{ms(parts.communication.mean())} ms of a step of {ms(parts.step_s)} ms, after all ranks had "
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
    if gain < LEAST_GAIN:
        return []
    again = f"; {found.resent} segments were sent again" if found.resent else ""
    return [
        Verdict(
            "slow link",
            f"{found.place} is slow: it gives {found.rate_Bps / 1e6:.3g} MB/s while it is used, others "
            f"{found.others_Bps / 1e6:.3g} MB/s; as quick as they, steps would be {gain:.0%} shorter",
            f"as the kernel counts the ranks' TCP connections{again}; communication that nothing hides takes "
            f"{parts.share(parts.communication):.0%} of the steps",
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
    if len(mean_s) < 2 or gain < 2 * LEAST_GAIN or parts.share(parts.of(BUBBLE)) < 0.1:
        return []
    return [
        Verdict(
            "unbalanced stages",
            f"stage {slowest} of the pipeline computes {ms(mean_s[place])} ms a step and the others "
            f"{ms(np.delete(mean_s, place).mean())} ms in the mean; cut evenly, steps would be {gain:.0%} "
            "shorter",
            f"ms a step of the stages: {listed(map(ms, mean_s))}; "
            f"they wait {parts.share(parts.of(BUBBLE)):.0%} of their time for messages",
            "leave out `split` so that the stages are cut by their measured times, or move layers to the others; if "
            f"all stages have equal layers, compare the host of stage {slowest} with the others'",
            "high" if gain > 4 * LEAST_GAIN else "medium",
            tuple(one.rank for one, stage in zip(parts.run.ranks, stages, strict=True) if stage == slowest), gain,
        )
    ]  # fmt: skip


def _part(
    name: str, kind: str, least: float, text: str, step: str, *, alone: bool = False
) -> Callable[[Parts], list[Verdict]]:
    """Return a finder of a part that takes a share of the steps.

    Args:
        name: Of the part.
        kind: Of the verdict.
        least: Share of which it is told.
        text: The sentence, with a place for the share and one for the ranks.
        step: What to do.
        alone: Whether a few ranks may do it alone, for whom the others then wait: the share is that of theirs.
    """

    def find(parts: Parts) -> list[Verdict]:
        seconds, run = parts.of(name), parts.run
        each = seconds.sum(axis=1)
        its = np.flatnonzero(each > 0.5 * each.max()) if alone else np.arange(len(each))
        share = float(each[its].sum() / parts.lengths_s[its].sum()) if len(its) else 0.0
        if share < least:
            return []
        some = len(its) < len(each)
        ranks = tuple(run.ranks[one].rank for one in its) if some else ()
        whose = f" of rank{'s'[: len(ranks) - 1]} {listed(ranks)}" if some else ""
        over = "the mean over ranks"
        if some:
            over = f"{'the mean over these ranks' if len(ranks) > 1 else 'on that rank'}, for which the others wait"
        evidence = f"{ms(seconds[its].mean())} ms of a step of {ms(parts.step_s)} ms, {over}"
        confidence = "high" if share > 2 * least else "medium"
        return [Verdict(kind, text.format(share) + whose, evidence, step, confidence, ranks, share)]

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
    "write them less often, or in the background", alone=True,
)  # fmt: skip
_garbage = _part(
    COLLECTOR, "garbage collection", 0.03, "Python's garbage collector takes {:.0%} of the time",
    "call gc.freeze() before training, and gc.collect() between steps", alone=True,
)  # fmt: skip


def _pauses(parts: Parts) -> list[Verdict]:
    """Find that all ranks wait while they should compute, for nothing that is recorded."""
    if parts.ran_shares().min() < _LEAST_RUN:
        return []
    recorded = sum(parts.of(name).sum(axis=1) for name in (DATA, CHECKPOINT, COLLECTOR)) / parts.lengths_s.sum(axis=1)
    share = float(np.quantile(parts.blocked_shares() - recorded, 0.25))
    if share < _LEAST_PAUSE:
        return []
    place = place_of_most(parts)
    return [
        Verdict(
            "pauses",
            f"ranks pause {share:.0%} of their time, when they could compute{f', mostly in {place}' if place else ''}",
            f"{ms(share * parts.step_s)} ms of a step of {ms(parts.step_s)} ms, in which the main thread neither ran "
            "nor lacked a core, outside of what loads data, waits for ranks or writes checkpoints",
            "look what the program waits for: a file, the network, a lock, another process, a GPU, time.sleep()",
            "high" if share > 2 * _LEAST_PAUSE else "medium", (), share,
        )
    ]  # fmt: skip


def _uneven(parts: Parts) -> list[Verdict]:
    late, work = parts.of(LATE), parts.work
    if (share := parts.share(late)) < 0.2:
        return []
    last = float(np.bincount(work.argmax(axis=0)).max() / parts.steps)
    return [
        Verdict(
            "uneven work",
            f"ranks wait {share:.0%} of their time for one another, and now this one and now that one is late: what "
            "they do in a step takes unequally long",
            f"the longest of a step's ranks takes {ms(work.max(axis=0).mean())} ms, the mean one "
            f"{ms(work.mean())} ms; no rank is the longest in more than {last:.0%} of {parts.steps} steps",
            "batches that cost the same on all ranks (samples of like lengths), or look what stops ranks now and then",
            "high" if share > 0.3 else "medium", (), share,
        )
    ]  # fmt: skip


def _busy(parts: Parts) -> list[Verdict]:
    ready = parts.ready_shares()
    share = float(np.median(ready))
    if share < BUSY:
        return []
    cores = {
        (one.about.get("boot") or one.host, core) for one in parts.run.ranks for core in one.about.get("cores", [])
    }
    ranks = len(parts.run.ranks)
    return [
        Verdict(
            "busy machine",
            f"ranks are ready and have no core {share:.0%} of the time: more runs here than the machine has cores for",
            f"{ranks} rank{'s' * (ranks != 1)}, {len(cores)} core{'s' * (len(cores) != 1)}; "
            f"up to {ready.max():.0%} on rank {parts.run.ranks[int(ready.argmax())].rank}",
            "fewer ranks or threads on a host (OMP_NUM_THREADS), or end what else runs there",
            "high", (), share * parts.share(parts.of(COMPUTATION)) / 3,
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
        whose = f"ranks {listed(leaking)} of {run.world}"
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
