"""Collectives as data: an algorithm is written once and verified, bounded, printed, timed and executed from one value.

Read `_collective.py` (what a collective promises), then `_ir.py` (how a schedule says what happens), then the readers:
`_text.py`, `_render.py`, `_verify.py` (with `_play.py`, `_cells.py` and `_trace.py`), `_bounds.py`, `_links.py`,
`_msccl_write.py` and `_msccl_read.py`. Only the standard library and numpy are used here.
"""

from ._bounds import Bounds as Bounds
from ._bounds import Wire as Wire
from ._bounds import lower_bounds as lower_bounds
from ._bounds import needs as needs
from ._collective import KINDS as KINDS
from ._collective import Collective as Collective
from ._collective import ScheduleError as ScheduleError
from ._findings import Finding as Finding
from ._ir import Columns as Columns
from ._ir import Schedule as Schedule
from ._ir import Step as Step
from ._links import FlowRoutes as FlowRoutes
from ._links import RoutedNetwork as RoutedNetwork
from ._links import StepLoad as StepLoad
from ._links import link_loads as link_loads
from ._links import place as place
from ._msccl_read import from_msccl as from_msccl
from ._msccl_write import to_msccl as to_msccl
from ._render import describe as describe
from ._render import grid as grid
from ._render import svg as svg
from ._text import from_json as from_json
from ._text import parse as parse
from ._text import to_json as to_json
from ._verify import verify as verify

__all__ = [
    "KINDS",
    "Bounds",
    "Collective",
    "Columns",
    "Finding",
    "FlowRoutes",
    "RoutedNetwork",
    "Schedule",
    "ScheduleError",
    "Step",
    "StepLoad",
    "Wire",
    "describe",
    "from_json",
    "from_msccl",
    "grid",
    "link_loads",
    "lower_bounds",
    "needs",
    "parse",
    "place",
    "svg",
    "to_json",
    "to_msccl",
    "verify",
]
