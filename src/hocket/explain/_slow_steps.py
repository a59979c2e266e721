"""Steps now and then that take many times as long as the others: which, on whose account, and where."""

from typing import NamedTuple

import numpy as np

from ._parts import BUBBLE, CHECKPOINT, COLLECTOR, COMMUNICATION, COMPUTATION, DATA, LATE, WARM_UP, Array, Parts
from ._places import place_of_slow
from ._verdict import LEAST_GAIN, MOST_LISTED, Verdict, listed, ms

_TIMES = 3.0  # as long as the middle step
_MOST = 0.2  # of the steps: of more, these would be the usual ones
_SURELY = 10.0  # times as long, which no machine that is merely busy makes of a step


_NEXT = {
    "evaluation": "evaluate less often, or on fewer batches",
    DATA: "workers that stay from epoch to epoch (persistent_workers=True), more prefetching, or look at the disk",
}


class _SlowSteps(NamedTuple):
    """A few steps that take much longer than the others."""

    places: Array
    """Their places in the run: int of (steps,)."""
    blamed: Array
    """Places of the ranks that are longer at work in most of them: int of (ranks,); none where nobody is."""
    cause: str
    """The part of a step that takes longest more."""
    share: float
    """Of the time that they take more, how much is the cause."""
    gain: float
    """How much shorter the run would be if they took as long as the others, as a share of it."""
    usual_s: float
    """The middle step of all."""
    mean_s: float
    """The mean of these."""

    def period(self, steps: int) -> int:
        """Return each how many-th of all steps is one of them; 0 where they are not regular, or too few to tell."""
        gaps = np.unique(np.diff(self.places))
        if len(self.places) < 3 or len(gaps) > 1 or gaps[0] < 2:  # those that follow one another come once
            return 0
        gap, first, after = int(gaps[0]), int(self.places[0]), steps - int(self.places[-1])
        return gap if max(first, after) <= gap else 0  # all through the run


def slow_steps(parts: Parts) -> list[Verdict]:
    """Find a few steps that take much longer than the others, and which ranks do what in them.

    Those that write checkpoints or collect garbage have verdicts of their own, which tell of less time already.
    """
    found = _found(parts)
    return [] if found is None or found.cause in (CHECKPOINT, COLLECTOR) else [_verdict(parts, found)]


def _found(parts: Parts) -> _SlowSteps | None:
    lengths = parts.lengths_s.mean(axis=0)
    usual_s = float(np.median(lengths))
    slow = np.flatnonzero(lengths > _TIMES * usual_s)
    more_s = float((lengths[slow] - usual_s).sum())
    gain = more_s / float(lengths.sum())
    if not len(slow) or len(slow) > _MOST * parts.steps or gain < LEAST_GAIN:
        return None
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
    share = min(1.0, float(excess[:, number].max(axis=0).sum()) / more_s)
    return _SlowSteps(slow, blamed, parts.names[number], share, gain, usual_s, float(lengths[slow].mean()))


def _verdict(parts: Parts, found: _SlowSteps) -> Verdict:
    count, ranks, times = len(found.places), len(parts.run.ranks), found.mean_s / found.usual_s
    many = count > 1
    whose = found.blamed if len(found.blamed) else np.arange(ranks)
    place = ""
    if found.cause == COMPUTATION:
        place = place_of_slow(parts, whose.tolist(), found.places, found.usual_s / found.mean_s)
    who = _named(parts, found.blamed)
    doing = {COMPUTATION: "computes longer", DATA: "waits for data"}.get(found.cause, f"is longer in {found.cause!r}")
    if who.startswith(("ranks", "all")):  # several
        doing = doing.replace("computes", "compute").replace("waits", "wait").replace("is longer", "are longer")
    where = f", mostly in {place}" if place else ""
    look = (
        f"as a rule it comes once, however long the run (kernels are compiled, caches filled): look at "
        f"{place or 'what the program does first'} if the run goes on to do so"
        if _opens(parts, found)
        else f"look what {place or 'the program'} does in {'these steps' if many else 'that step'} and in no other: an "
        "evaluation, a file, a lock, a pause"
    )
    sure = found.period(parts.steps) or times > _SURELY or (len(found.blamed) and count > MOST_LISTED)
    return Verdict(
        "slow steps",
        f"{_which(parts, found)} {_rounded(times)} times as long as the others: {who} {doing} in "
        f"{'them' if many else 'it'}{where}; without that the run would be {found.gain:.0%} shorter",
        f"{count} of {parts.steps} steps, {ms(found.mean_s)} ms{' in the mean' * many}, and {ms(found.usual_s)} ms the "
        f"middle step; of what {'they take' if many else 'it takes'} more, {found.share:.0%} is {found.cause}",
        _NEXT.get(found.cause, look),
        "high" if sure else "medium",
        tuple(parts.run.ranks[one].rank for one in found.blamed) if 0 < len(found.blamed) < ranks else (),
        found.gain,
    )


def _which(parts: Parts, found: _SlowSteps) -> str:
    """Return which steps take long, with their verb."""
    if period := found.period(parts.steps):
        return f"every {_nth(period)} step takes"
    numbers = (parts.first + found.places).tolist()
    runs = [[numbers[0], numbers[0]]]  # of steps that follow one another
    for number in numbers[1:]:
        if number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    names = [str(a) if a == b else f"{a}{', ' if a + 1 == b else ' to '}{b}" for a, b in runs]
    return f"steps {listed(names)} take" if len(numbers) > 1 else f"step {numbers[0]} takes"


def _opens(parts: Parts, found: _SlowSteps) -> bool:
    """Return whether these are the first steps of the program, one after the other."""
    known = parts.first <= WARM_UP + 1
    return known and found.places.tolist() == list(range(len(found.places)))


def _named(parts: Parts, blamed: Array) -> str:
    ranks = [parts.run.ranks[one] for one in blamed]
    if len(ranks) == len(parts.run.ranks):
        return "all ranks" if len(ranks) > 1 else f"rank {ranks[0].rank}"
    if not ranks:
        return "now this rank and now that one"
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} of {parts.run.world} (host {ranks[0].host})"
    return f"ranks {listed(one.rank for one in ranks)} of {parts.run.world}"


def _rounded(times: float) -> str:
    return f"{times:.0f}" if times >= 9.95 else f"{times:.1f}"


def _nth(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
