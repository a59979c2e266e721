"""Where the time of a run went, without slowing the run: a recorder to ask, and each rank's record on disk.

Names are loaded when they are first asked for: who reads a record needs no torch.
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from ._dumped_run import read_any
    from ._flight_recorder import write_flight_records
    from ._hang import Hang, StackGroup, find_hang, standing
    from ._layout import GARBAGE, LINK, OPERATION, PHASE, SAMPLE, STEP, WAIT
    from ._live import InGroup, LiveRank, live_ranks, short_place, users_frame
    from ._read import RankRun, RecordError, RunRecord, find_folder, read_run
    from ._recorder import HVPROF_BINS, Bin, OperationTotals, Recorder, bus_factor
    from ._table import histogram_table
    from ._timeline import Recent, timeline_of
    from ._watch import (
        loading,
        mark_step,
        name_run,
        no_steps,
        note,
        note_plan,
        note_value,
        phase,
        record_folder,
        tell_steps,
        watch,
    )

__all__ = [
    "GARBAGE", "HVPROF_BINS", "LINK", "OPERATION", "PHASE", "SAMPLE", "STEP", "WAIT", "Bin", "Hang", "InGroup",
    "LiveRank", "OperationTotals", "RankRun", "Recent", "RecordError", "Recorder", "RunRecord", "StackGroup",
    "bus_factor", "find_folder", "find_hang", "histogram_table", "live_ranks", "loading", "mark_step", "name_run",
    "no_steps", "note", "note_plan", "note_value", "phase", "read_any", "read_run", "record_folder", "short_place",
    "standing", "tell_steps", "timeline_of", "users_frame", "watch", "write_flight_records",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "_dumped_run": "read_any",
        "_flight_recorder": "write_flight_records",
        "_hang": "Hang StackGroup find_hang standing",
        "_layout": "GARBAGE LINK OPERATION PHASE SAMPLE STEP WAIT",
        "_live": "InGroup LiveRank live_ranks short_place users_frame",
        "_read": "RankRun RecordError RunRecord find_folder read_run",
        "_recorder": "HVPROF_BINS Bin OperationTotals Recorder bus_factor",
        "_table": "histogram_table",
        "_timeline": "Recent timeline_of",
        "_watch": "loading mark_step name_run no_steps note note_plan note_value phase record_folder tell_steps watch",
    },
)
