"""An order for people: one line that says what it is, and a grid of ranks and time."""

from collections.abc import Sequence
from typing import Final

from ._order import UNIT, PipelineOrder
from ._verify import OrderFinding

GRID_RANKS: Final = 64
GRID_COLUMNS: Final = 96


def describe(order: PipelineOrder) -> str:
    """Return one line: name, size, and how idle its ranks are with equal stages."""
    stages = f"{order.stages} stages, " if order.stages_per_rank > 1 else ""
    parts = f"{order.name}: {order.world} ranks, {stages}{order.micro_batches} micro-batches"
    return f"{parts}; idle {order.idle_share():.1%}"


def grid(order: PipelineOrder, findings: Sequence[OrderFinding] = ()) -> str:
    """Return what each rank computes over time, one row a rank, one column for the time of a forward; a dot is idle.

    `F3` is the forward of micro-batch 3, `B3` its backward, which takes two columns; `I3` and `W3` are the halves for
    the inputs and for the weights. With several stages a rank the stage comes first, as in `4F3`. An action that a
    finding names is marked with !. What never happens is left out; a large grid is cut, and says so.
    """
    marks = {(one.rank, one.action) for one in findings}
    plain = order.computes() if order.explicit and not findings else order
    played = plain.played
    rows = []
    for rank, actions in enumerate(plain.ranks[:GRID_RANKS]):
        row = [f"rank {rank}"]
        for at, begin in enumerate(played.begins[rank]):
            stage, kind, micro_batch = actions[at]
            if kind not in UNIT:
                continue
            name = f"{stage}{kind}{micro_batch}" if order.stages_per_rank > 1 else f"{kind}{micro_batch}"
            row.extend("." * (int(begin) + 1 - len(row)))
            row.append(name + "!" * ((rank, at) in marks))
            row.extend("-" * (int(UNIT[kind]) - 1))
        row.extend("." * (int(played.seconds) + 1 - len(row)))
        rows.append(row)
    columns = min(GRID_COLUMNS, int(played.seconds))
    head = ["time", *(str(column) if column % 5 == 0 else "" for column in range(columns))]
    lines = [head, *(row[: columns + 1] for row in rows)]
    widest = max((len(cell) for row in lines for cell in row[1:]), default=0)  # nothing may ever happen
    widths = [max(len(line[0]) for line in lines), *[widest] * columns]
    text = [" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    if order.world > GRID_RANKS:
        text.append(f"{order.world - GRID_RANKS} more ranks are not shown.")
    if played.seconds > columns:
        text.append(f"{int(played.seconds) - columns} more columns are not shown.")
    return "\n".join(text) + "\n"
