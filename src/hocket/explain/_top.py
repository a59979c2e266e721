"""A running job in some lines: what each rank does now, those that keep the others first."""

from collections.abc import Sequence

from hocket.profile import LiveRank, find_hang

from ._verdict import ms

_COLUMNS = ("rank", "host", "state", "step", "ms a step", "core", "MiB", "waits s", "in", "at")


def top_lines(
    ranks: Sequence[LiveRank], before: Sequence[LiveRank] = (), *, since_s: float = 0.0, most: int = 0
) -> list[str]:
    """Return a job's state: how fast it steps, what keeps it, and a row for each rank.

    Args:
        ranks: The ranks, now.
        before: The same ranks, some time ago.
        since_s: How many seconds ago.
        most: Rows for ranks; 0 for all. Those that others wait for, and the slowest, come first.
    """
    made = {one.rank: one.steps for one in before}
    rates = [(one.steps - made[one.rank]) / since_s for one in ranks if since_s > 0 and one.rank in made]
    steps = sorted(one.steps for one in ranks)
    states = [one.state for one in ranks]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    head = f"{len(ranks)} of {ranks[0].world} ranks on {len({one.host for one in ranks})} hosts: {told}"
    made_text = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    speed = f", {sum(rates) / len(rates):.3g} steps a second" if rates else ""
    lines = [
        head.replace("on 1 hosts", "on 1 host"),
        f"{made_text}{speed}, {sum(one.nbytes for one in ranks) / 2**30:.2f} GiB",
    ]
    hang = find_hang(ranks, 5.0)
    if hang is not None and any(one.state not in ("ended", "dead") for one in ranks):
        lines.append(hang.sentence)
    order = sorted(ranks, key=lambda one: (not one.gone, one.waits_s > 0.0, one.steps, -one.step_s, one.rank))
    shown = order[:most] if most else sorted(ranks, key=lambda one: one.rank)
    rows = [_COLUMNS, *map(_row, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = (0, 1, 2, 8, 9)
    for row in rows:
        cells = [
            cell.ljust(width) if number in texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if len(shown) < len(ranks):
        lines.append(f"and {len(ranks) - len(shown)} more")
    return lines


def _row(one: LiveRank) -> tuple[str, ...]:
    group = one.waiting
    what = one.phase
    if one.waits_s > 0.0:
        peer = "any rank" if one.peer == -1 else f"rank {one.peer}"
        what = f"{group.kind} #{group.started}" if group else f"message {'from' if one.receives else 'to'} {peer}"
    return (
        str(one.rank), one.host, one.state, str(one.steps), ms(one.step_s) if one.step_s else "-",
        f"{one.busy:.0%}", f"{one.nbytes / 2**20:.0f}", f"{one.waits_s:.1f}" if one.waits_s >= 0.05 else "-",
        what or "-", one.where() or "-",
    )  # fmt: skip
