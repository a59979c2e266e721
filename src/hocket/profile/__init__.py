"""Where the communication time of a run went, without slowing the run."""

from ._recorder import HVPROF_BINS as HVPROF_BINS
from ._recorder import Bin as Bin
from ._recorder import OperationTotals as OperationTotals
from ._recorder import Recorder as Recorder
from ._recorder import bus_factor as bus_factor
from ._table import histogram_table as histogram_table
from ._timeline import Recent as Recent
from ._timeline import timeline_of as timeline_of

__all__ = [
    "HVPROF_BINS",
    "Bin",
    "Recent",
    "Recorder",
    "OperationTotals",
    "bus_factor",
    "histogram_table",
    "timeline_of",
]
