"""How a run ended, as far as its launcher has written it beside the record (`run.json`)."""

import json
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ._verdict import Verdict

_MOST = 300  # characters of an error
_WROTE = "its launcher wrote so into run.json"
_OUTCOMES = {
    "interrupted": (
        "was interrupted", "if nobody did this, look at the scheduler: a limit of time or memory, or a preemption"
    ),
    "timed-out": ("was ended by its own time limit", "give it longer (--timeout), or fewer steps"),
    "output-lost": ("ended since its disk had no space for what it printed", "free some, or write it elsewhere"),
    "output-closed": ("ended since nobody read what it printed", "write the output into a file, and read that"),
}  # fmt: skip


def ending(folder: Path, world: int) -> Verdict | None:
    """Return how a run ended before its end; None where that is not known, or it came to its end.

    Args:
        folder: Of its record; a launcher keeps it in the run's own.
        world: How many ranks it had.
    """
    if folder.name != "record":
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((folder.parent / "run.json").read_text(encoding="utf-8"))
        if about["outcome"] == "failed":
            return _failed(about, world)
        if about["outcome"] in _OUTCOMES:
            how, next_step = _OUTCOMES[about["outcome"]]
            with suppress(ValueError):
                how += f" ({signal.Signals(about['exit_code'] - 128).name})" if how == "was interrupted" else ""
            return Verdict("ended", f"the job {how} after {about['wall_s']:.3g} s", _WROTE, next_step, "high")
    return None


def _failed(about: dict[str, Any], world: int) -> Verdict | None:
    own = [one for one in about["failures"] if not one["ended_by_launcher"]]
    if not own:
        return None
    first = own[0]
    after_s = max(0.0, first["failed_s"] - datetime.fromisoformat(about["started"]).timestamp())
    how = f"was killed by {first['signal']}" if first["signal"] else f"ended with status {first['exit_code']}"
    said = (first["error"] or "").partition("\n")[0]
    if said:
        how = f"failed with {said[:_MOST]}{'...' * (len(said) > _MOST)}"
    others = sorted(one["rank"] for one in own[1:])
    more = f", and {len(others)} more rank{'s' * (len(others) > 1)} failed after it" if others else ""
    where = "run.json has its traceback" if first["traceback"] else f"its last lines are in rank-{first['rank']}.err"
    memory = "; out of memory shows in `dmesg`" if first["signal"] == "SIGKILL" else ""
    return Verdict(
        "failed",
        f"rank {first['rank']} of {world} {how}, {after_s:.1f} s after the start",
        f"{_WROTE}{more}",
        f"{where}{memory}",
        "high",
        (first["rank"],),
    )
