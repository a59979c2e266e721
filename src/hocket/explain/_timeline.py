"""A run's records as a timeline of all ranks, on one clock: the type that the simulator makes too."""

from hocket.profile import GARBAGE, OPERATION, PHASE, STEP, WAIT, RunRecord
from hocket.timeline import Span, Timeline


def timeline_of_run(run: RunRecord) -> Timeline:
    """Return steps, phases, garbage collection, operations and waits of all ranks; zero is when the first rank began.

    Operations are on one stream for each group, and carry their bytes; what the program waited for is on "waits".
    """
    spans: list[Span] = []
    for one in run.ranks:
        for kind, stream in ((STEP, "steps"), (PHASE, "phases"), (GARBAGE, "phases"), (OPERATION, ""), (WAIT, "waits")):
            for row in one.of(kind):
                begin_s, end_s = float(row["started_s"]), float(row["finished_s"])
                text = one.texts[int(row["text"])]
                if kind in (OPERATION, WAIT):
                    what, path, _, label = text or ("?", "", "", "")
                    name = f"{label or what} #{int(row['seq'])} ({path})"
                    place = stream or f"group {one.groups[int(row['group'])][0]}"
                    spans.append(
                        Span(
                            one.rank, place, name, begin_s, end_s, "collective" if kind == OPERATION else "wait",
                            float(row["nbytes"]),
                        )
                    )  # fmt: skip
                else:
                    name = {STEP: f"step {int(row['seq'])}", GARBAGE: "garbage collection"}.get(kind, str(text))
                    spans.append(Span(one.rank, stream, name, begin_s, end_s, "step" if kind == STEP else "phase"))
    names = {one.rank: f"rank {one.rank} ({one.host})" for one in run.ranks}
    return Timeline(run.folder.name, tuple(spans), names=names)
