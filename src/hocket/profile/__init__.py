"""Where the communication time of a run went, without slowing the run."""

from ._recorder import HVPROF_BINS, Bin, OperationTotals, Recorder, bus_factor
from ._table import histogram_table
from ._timeline import Recent, timeline_of

__all__ = [
    "HVPROF_BINS", "Bin", "OperationTotals", "Recent", "Recorder", "bus_factor", "histogram_table", "timeline_of",
]  # fmt: skip
