"""Collectives as data: an algorithm is written once and verified, bounded, printed, timed and executed from one value.

Read `_collective.py` (what a collective promises), then `_ir.py` (how a schedule says what happens), then the readers:
`_text.py`, `_render.py`, `_verify.py` (with `_play.py`, `_cells.py` and `_trace.py`), `_bounds.py`, `_links.py`,
`_msccl_write.py` and `_msccl_read.py`. Only the standard library and numpy are used here.
"""

from ._bounds import Bounds, Wire, lower_bounds, needs
from ._collective import KINDS, Collective, ScheduleError
from ._findings import Finding
from ._ir import Columns, Schedule, Step
from ._links import FlowRoutes, RoutedNetwork, StepLoad, link_loads, place
from ._msccl_read import from_msccl
from ._msccl_write import to_msccl
from ._render import describe, grid, svg
from ._text import from_json, parse, to_json
from ._verify import verify

__all__ = [
    "KINDS", "Bounds", "Collective", "Columns", "Finding", "FlowRoutes", "RoutedNetwork", "Schedule", "ScheduleError",
    "Step", "StepLoad", "Wire", "describe", "from_json", "from_msccl", "grid", "link_loads", "lower_bounds", "needs",
    "parse", "place", "svg", "to_json", "to_msccl", "verify",
]  # fmt: skip
