"""Where the communication time of a run went, without slowing the run."""

from ._bins import HVPROF_BINS as HVPROF_BINS
from ._bins import Bin as Bin
from ._bins import bus_factor as bus_factor
from ._recent import Recent as Recent
from ._recorder import Recorder as Recorder
from ._recorder import Row as Row
from ._table import histogram_table as histogram_table
from ._timeline import timeline_of as timeline_of

__all__ = ["HVPROF_BINS", "Bin", "Recent", "Recorder", "Row", "bus_factor", "histogram_table", "timeline_of"]
