"""The histogram as a table for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._recorder import OperationTotals

if TYPE_CHECKING:
    from rich.table import Table


def histogram_table(rows: Sequence[OperationTotals], title: str = "Collectives by message size") -> "Table":
    """Return a table in the manner of hvprof: times in ms, bandwidths in GB/s (10^9 bytes) of time less skew."""
    from rich.table import Table  # lazy: every rank imports this package, and few print

    caption = "algbw and busbw: bytes over time less skew (waiting for late peers)"
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    table.add_column("collective")
    table.add_column("message size")
    for column in ("count", "MB", "time ms", "exposed ms", "skew ms", "algbw GB/s", "busbw GB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.kind,
            row.bin,
            f"{row.count:,}",
            f"{row.nbytes / 1e6:,.1f}",
            f"{row.time_s * 1e3:,.1f}",
            f"{row.exposed_s * 1e3:,.1f}",
            f"{row.skew_s * 1e3:,.1f}",
            f"{row.algbw_Bps / 1e9:.2f}",
            f"{row.busbw_Bps / 1e9:.2f}",
        )
    return table
