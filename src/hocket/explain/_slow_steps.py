"""Steps now and then that take many times as long as the others: which, on whose account, and where."""

import numpy as np

from hocket.profile import SAMPLE, short_place

from ._parts import BUBBLE, CHECKPOINT, COLLECTOR, COMMUNICATION, COMPUTATION, DATA, LATE, Array, Parts
from ._verdict import LEAST_GAIN, MOST_LISTED, Verdict, ms

_TIMES = 3.0  # as long as the middle step
_MOST = 0.2  # of the steps: of more, these would be the usual ones
_SURELY = 10.0  # times as long, which no machine that is merely busy makes of a step


def slow_steps(parts: Parts) -> list[Verdict]:
    """Find a few steps that take much longer than the others, and which ranks do what in them.

    Those that write checkpoints or collect garbage have verdicts of their own, which tell of less time already.
    """
    lengths = parts.lengths_s.mean(axis=0)
    usual_s = float(np.median(lengths))
    slow = np.flatnonzero(lengths > _TIMES * usual_s)
    more_s = float((lengths[slow] - usual_s).sum())
    gain = more_s / float(lengths.sum())
    if not len(slow) or len(slow) > _MOST * parts.steps or gain < LEAST_GAIN:
        return []
    typical = np.median(parts.seconds, axis=2, keepdims=True)
    excess = np.maximum(parts.seconds[:, :, slow] - typical, 0.0)  # by rank, part and slow step
    own = [n for n, name in enumerate(parts.names) if name not in (LATE, BUBBLE) and not name.startswith(COMMUNICATION)]
    work = excess[:, own].sum(axis=1)
    if work.max(axis=0).sum() < 0.5 * more_s:  # nobody is longer at work: the ranks wait together
        blamed, number = np.arange(0), int(excess.mean(axis=(0, 2)).argmax())
    else:
        often = (work > 0.5 * work.max(axis=0)).mean(axis=1)
        blamed = np.flatnonzero(often > 0.6)
        whose = blamed if len(blamed) else np.arange(len(work))
        number = own[int(excess[whose][:, own].mean(axis=(0, 2)).argmax())]
    cause = parts.names[number]
    if cause in (CHECKPOINT, COLLECTOR):
        return []
    who = _named(parts, blamed)
    place = _place(parts, blamed, slow) if cause == COMPUTATION else ""
    gaps = np.unique(np.diff(slow))
    regular = len(slow) > 2 and len(gaps) == 1
    times = float(lengths[slow].mean()) / usual_s
    numbers = ", ".join(str(parts.first + int(one)) for one in slow[:MOST_LISTED])
    many = len(slow) > 1
    if regular:
        which = f"every {_nth(int(gaps[0]))} step takes"
    elif many:
        which = f"steps {numbers}{', ...' * (len(slow) > MOST_LISTED)} take"
    else:
        which = f"step {numbers} takes"
    doing = {COMPUTATION: "computes longer", DATA: "waits for data"}.get(cause, f"is longer in {cause!r}")
    if who.startswith(("ranks", "all")):  # several
        doing = doing.replace("computes", "compute").replace("waits", "wait").replace("is longer", "are longer")
    return [
        Verdict(
            "slow steps",
            f"{which} {_rounded(times)} times as long as the others: "
            f"{who} {doing} in {'them' if many else 'it'}{f', mostly in {place}' if place else ''}; "
            f"without that the run would be {gain:.0%} shorter",
            f"{len(slow)} of {parts.steps} steps, {ms(float(lengths[slow].mean()))} ms{' in the mean' * many}, and "
            f"{ms(usual_s)} ms the middle step; of what {'they take' if many else 'it takes'} more, "
            f"{min(1.0, excess[:, number].max(axis=0).sum() / more_s):.0%} is {cause}",
            _NEXT.get(cause, "")
            or f"look what {place or 'the program'} does in {'these steps' if many else 'that step'} and in no other: "
            "an evaluation, a file, a lock, a pause",
            "high" if regular or times > _SURELY or (len(blamed) and len(slow) > MOST_LISTED) else "medium",
            tuple(parts.run.ranks[one].rank for one in blamed) if 0 < len(blamed) < len(work) else (),
            gain,
        )
    ]


_NEXT = {
    "evaluation": "evaluate less often, or on fewer batches",
    DATA: "workers that stay from epoch to epoch (persistent_workers=True), more prefetching, or look at the disk",
}


def _named(parts: Parts, blamed: Array) -> str:
    ranks = [parts.run.ranks[one] for one in blamed]
    if len(ranks) == len(parts.run.ranks):
        return "all ranks" if len(ranks) > 1 else f"rank {ranks[0].rank}"
    if not ranks:
        return "now this rank and now that one"
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} of {parts.run.world} (host {ranks[0].host})"
    listed = ", ".join(str(one.rank) for one in ranks[:MOST_LISTED])
    return f"ranks {listed}{', ...' * (len(ranks) > MOST_LISTED)} of {parts.run.world}"


def _rounded(times: float) -> str:
    return f"{times:.0f}" if times >= 9.95 else f"{times:.1f}"


def _nth(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


def _place(parts: Parts, blamed: Array, slow: Array) -> str:
    """Return where these ranks are read to be in the slow steps most often; "" if they were read in none."""
    counts: dict[str, int] = {}
    for one in blamed if len(blamed) else range(len(parts.run.ranks)):
        rank, bounds = parts.run.ranks[one], parts.bounds_s[one]
        rows = rank.of(SAMPLE)
        step = np.searchsorted(bounds, rows["posted_s"]) - 1
        for text in rows["text"][np.isin(step, slow) & (rows["text"] > 0)].tolist():
            counts[rank.texts[text]] = counts.get(rank.texts[text], 0) + 1
    return short_place(max(counts, key=counts.__getitem__)) if counts else ""
