"""All that is said of one run: what keeps it now, its verdicts, and where its steps' time went."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.profile import OPERATION, STEP, Hang, RunRecord, find_hang, read_any, standing

from ._parts import QUICK, Parts, parts_of
from ._places import places_of_all
from ._predicted import PredictedStep, predicted_of
from ._straggler import began
from ._verdict import LEAST_STEPS, SHOWN, Verdict, listed, ms
from ._verdicts import verdicts_of

_LEAST_READ, _PLACES, _LEAST_PART = 20, 5, 0.05  # readings of places in all, places that are shown, and share of each


@dataclass(frozen=True)
class Explanation:
    """What is said of one run.

    Attributes:
        run: The run.
        hang: What keeps it, if it still runs and somebody waits; where its ranks are, if nobody does; None: it is over.
        parts: Where the time of its steps went; None without steps.
        verdicts: The findings.
        predicted: A step as it should be, beside it; None without steps.
    """

    run: RunRecord
    hang: Hang | None
    parts: Parts | None
    verdicts: tuple[Verdict, ...]
    predicted: PredictedStep | None

    @property
    def operations_only(self) -> bool:
        """Whether it is a dump of another tool, which tells of operations only."""
        return bool(self.run.ranks[0].about.get("operations_only"))

    @property
    def places(self) -> list[tuple[str, float]]:
        """The lines of the program in which ranks compute the most, each with its share of the readings there.

        None where there are too few readings: they are made four times a second.
        """
        counts = Counter[str]() if self.parts is None else places_of_all(self.parts)
        every = counts.total()
        if every < _LEAST_READ:
            return []
        return [(place, n / every) for place, n in counts.most_common(_PLACES) if n >= _LEAST_PART * every]

    @property
    def remarks(self) -> list[str]:
        """Sentences on what is not known, and what stands for the verdicts where there is none."""
        unread = set(range(self.run.world)) - {one.rank for one in self.run.ranks}
        others = unread & set(self.run.others)
        found = [
            f"nothing is known of {len(ranks)} of {self.run.world} ranks ({listed(sorted(ranks))}): {why}"
            for ranks, why in (
                (unread - others, "no record, or a damaged one"),
                (others, "what the folder has of them is of another run, which began before"),
            )
            if ranks
        ]
        made = [len(one.of(STEP)) for one in self.run.ranks]
        if self.parts is None:
            none = "no steps of training are recorded, so none is predicted: "
            some = f"ranks updated {min(made)} to {max(made)} times, and a step goes from one update to the next"
            if not self.operations_only:
                found.append(none + (some if any(made) else "no optimizer was stepped in this run"))
        elif self.parts.steps < LEAST_STEPS:
            found.append(f"who is late, and what takes more than it should, is said of {LEAST_STEPS} steps or more")
        elif (
            not self.verdicts
            and self.predicted is not None
            and self.predicted.measured_s > self.predicted.interval_s[1]
        ):
            lengths_s = self.parts.lengths_s.mean(axis=0)
            since = began(lengths_s - np.quantile(lengths_s, QUICK))
            name, usual_s, took_s = max(self.predicted.rows, key=lambda row: row[2] - row[1])
            found.append(
                f"steps take {self.predicted.measured_s / self.predicted.step_s - 1.0:.0%} longer than the quickest of "
                f"them{f', since step {self.parts.first + since}' if since else ''}, most in {name} "
                f"({ms(took_s - usual_s)} ms more), and no rank is to blame"
            )
        elif not self.verdicts:
            other = " other" * bool(unread)
            found.append(f"nothing stands out: no{other} rank is late, and no part of a step takes more than it should")
        return found

    def lines(self) -> list[str]:
        """Return it for a terminal."""
        lines = [] if self.hang is None else str(self.hang).splitlines()
        for verdict in self.verdicts:
            lines += str(verdict).splitlines()
        lines += self.remarks
        if self.operations_only:
            count = sum(len(one.of(OPERATION)) for one in self.run.ranks)
            lines.append(f"{count} operations of {len(self.run.ranks)} of {self.run.world} ranks; a dump has no steps")
        if self.parts is None:
            return lines
        step_s = self.parts.step_s
        over = f"{self.parts.steps} steps on {len(self.run.ranks)} ranks"
        lines.append(f"a step takes {ms(step_s)} ms (mean of {over}); from one rank alone to it:")
        rows = [row for row in self.parts.waterfall() if abs(row[1]) >= SHOWN * step_s]
        width = max(len(name) for name, _ in rows)
        lines += [f"  {name:{width}} {seconds * 1e3:>+10.3f} ms {seconds / step_s:>6.1%}" for name, seconds in rows]
        if places := self.places:
            told = ", ".join(f"{place} {share:.0%}" for place, share in places)
            lines.append(f"computation, by where ranks were read in it: {told}")
        return lines if self.predicted is None else [*lines, *self.predicted.lines()]

    def brief(self) -> list[str]:
        """Return what a step took beside what it should have, part by part, in a few lines; none without an update."""
        if self.predicted is None or self.predicted.steps < LEAST_STEPS:
            made = max((len(set(one.of(STEP)["seq"].tolist())) for one in self.run.ranks), default=0)
            text = (
                f"no step is predicted: {made} were made; the first two do not count, and {LEAST_STEPS} more are needed"
            )
            return [text] if made else []
        return self.predicted.brief()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        parts = self.parts
        return {
            "folder": str(self.run.folder),
            "world": self.run.world,
            "hosts": sorted({one.host for one in self.run.ranks}),
            "hang": None if self.hang is None else self.hang.to_json(),
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "remarks": self.remarks,
            "steps": 0 if parts is None else parts.steps,
            "step_s": None if parts is None else parts.step_s,
            "parts": [] if parts is None else [{"part": name, "seconds": s} for name, s in parts.means()],
            "waterfall": [] if parts is None else [{"part": name, "seconds": s} for name, s in parts.waterfall()],
            "places": [{"place": place, "share": share} for place, share in self.places],
            "prediction": None if self.predicted is None else self.predicted.to_json(),
        }


def explain(path: str | Path) -> Explanation:
    """Explain a run, whether it is over or still runs.

    Args:
        path: Its folder, or one that holds runs: the newest is taken; or a folder of dumps of PyTorch's flight recorder
            or of NCCL Inspector.

    Raises:
        hocket.profile.RecordError: there is no record.
    """
    run, ranks = read_any(path)
    parts = parts_of(run)
    over = all(one.state in ("ended", "dead") for one in ranks)
    return Explanation(
        run, None if over else find_hang(ranks, 1.0) or standing(ranks), parts, tuple(verdicts_of(run, parts, ranks)),
        None if parts is None else predicted_of(parts),
    )  # fmt: skip
