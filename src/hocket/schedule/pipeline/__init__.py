"""Orders of pipelines as values: what each rank does when, written once, read by the Trainer, planner and simulator.

Read `_order.py` (what an order is, its text, and what happens if it is followed), then `_named.py` (GPipe, 1F1B,
interleaved, zero bubble), `_verify.py` and `_grid.py`.
"""

from ._grid import describe as describe
from ._grid import grid as grid
from ._named import NAMED_ORDERS as NAMED_ORDERS
from ._named import NamedOrder as NamedOrder
from ._named import bubble as bubble
from ._named import order_for_batch as order_for_batch
from ._named import order_name as order_name
from ._named import pipeline_order as pipeline_order
from ._named import read_order as read_order
from ._order import COMPUTES as COMPUTES
from ._order import MESSAGES as MESSAGES
from ._order import UNIT as UNIT
from ._order import PipelineAction as PipelineAction
from ._order import PipelineOrder as PipelineOrder
from ._order import Played as Played
from ._verify import OrderFinding as OrderFinding
from ._verify import verify as verify

__all__ = [
    "COMPUTES",
    "MESSAGES",
    "NAMED_ORDERS",
    "UNIT",
    "NamedOrder",
    "OrderFinding",
    "PipelineAction",
    "PipelineOrder",
    "Played",
    "bubble",
    "describe",
    "grid",
    "order_for_batch",
    "order_name",
    "pipeline_order",
    "read_order",
    "verify",
]
