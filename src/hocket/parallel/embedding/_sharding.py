"""Which tables are sharded, and how: plain numbers in, plain decisions out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

How = Literal["table", "row", "hybrid"]

REPLICATE_BELOW_NBYTES = 16 * 2**10
"""A table smaller than this is cheaper to average than to look up elsewhere: one message against four."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the model has it."""

    name: str  # name of the table's weight, in the model
    rows: int  # how many rows the table has
    nbytes: int  # bytes of all rows
    sparse: bool = False  # whether the table's gradients are sparse


@dataclass(frozen=True, slots=True)
class TableSharding:
    """How one table is sharded."""

    name: str  # name of the table's weight, in the model
    # "table": one rank has all rows; "row": every rank has some; "replicated": every rank has all
    form: Literal["table", "row", "replicated"]
    # for each rank its first row, and at the end the number of rows; empty where it is replicated
    bounds: tuple[int, ...]
    reason: str  # why, for people

    def range(self, rank: int) -> tuple[int, int]:
        """Return the rows of a rank: the first, and one past the last."""
        return self.bounds[rank], self.bounds[rank + 1]

    def __str__(self) -> str:
        return f"{self.name}: {self.form}, {self.reason}"


def decide(
    tables: Sequence[Table], world: int, how: How, replicate_below: int = REPLICATE_BELOW_NBYTES
) -> list[TableSharding]:
    """Divide tables so that every rank has about as many bytes.

    "row" gives each rank as many rows of every table, up to one. "table" gives whole tables, the largest first, to the
    rank that has the least so far, which is at most a third worse than the best (Graham 1969, doi:10.1137/0117039).
    "hybrid" keeps small tables everywhere, divides by row what is larger than a rank's fair share, and gives out the
    others whole. `replicate_below`, in bytes, is for "hybrid" only.
    """
    small = {t.name for t in tables if how == "hybrid" and t.nbytes < replicate_below and not t.sparse}
    rest = [t for t in tables if t.name not in small]
    fair = sum(t.nbytes for t in rest) / world
    by_row = {t.name for t in rest if how == "row" or (how == "hybrid" and t.nbytes > fair)}
    load = [0] * world
    for table in rest:
        if table.name in by_row:
            for rank, (begin, end) in enumerate(itertools.pairwise(_even(table.rows, world))):
                load[rank] += (end - begin) * table.nbytes // max(1, table.rows)
    found = {}
    for table in sorted(rest, key=lambda t: -t.nbytes):
        if table.name in by_row:
            reason = "asked for" if how == "row" else f"{table.nbytes} bytes are more than a rank's share of {fair:.0f}"
            found[table.name] = TableSharding(table.name, "row", _even(table.rows, world), reason)
        else:
            owner = min(range(world), key=load.__getitem__)
            load[owner] += table.nbytes
            bounds = (0,) * (owner + 1) + (table.rows,) * (world - owner)
            found[table.name] = TableSharding(table.name, "table", bounds, f"all of it on rank {owner}")
    reason = f"less than {replicate_below} bytes"
    return [found.get(t.name) or TableSharding(t.name, "replicated", (), f"{t.nbytes} bytes, {reason}") for t in tables]


def _even(rows: int, world: int) -> tuple[int, ...]:
    """Bounds of parts that differ by one row at most, the larger ones first."""
    each, extra = divmod(rows, world)
    return tuple(rank * each + min(rank, extra) for rank in range(world + 1))
