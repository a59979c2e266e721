"""Collectives as data: an algorithm is written once and verified, bounded, printed, timed and executed from one value.

Read `_collective.py` (what a collective promises), then `_ir.py` (how a schedule says what happens), then the readers:
`_text.py`. Only the standard library and numpy are used here.
"""

from ._collective import KINDS as KINDS
from ._collective import Collective as Collective
from ._collective import ScheduleError as ScheduleError
from ._ir import Columns as Columns
from ._ir import Schedule as Schedule
from ._ir import Step as Step
from ._network import Network as Network
from ._network import Routes as Routes
from ._text import from_json as from_json
from ._text import parse as parse
from ._text import to_json as to_json

__all__ = [
    "KINDS",
    "Collective",
    "Columns",
    "Network",
    "Routes",
    "Schedule",
    "ScheduleError",
    "Step",
    "from_json",
    "parse",
    "to_json",
]
