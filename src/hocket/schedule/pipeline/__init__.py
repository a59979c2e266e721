"""Orders of pipelines as values: what each rank does when, written once, read by the Trainer, planner and simulator.

Read `_order.py` (what an order is, its text, and what happens if it is followed), then `_named.py` (GPipe, 1F1B,
interleaved, zero bubble), `_zero_bubble_v.py`, `_verify.py` and `_grid.py`.
"""

from ._grid import describe, grid
from ._named import (
    NAMED_ORDERS,
    NamedOrder,
    breadth_first,
    bubble,
    order_for_batch,
    order_name,
    pipeline_order,
    read_order,
    stage_homes,
)
from ._order import COMPUTES, MESSAGES, UNIT, PipelineAction, PipelineOrder, Played
from ._verify import OrderFinding, verify

__all__ = [
    "COMPUTES", "MESSAGES", "NAMED_ORDERS", "UNIT", "NamedOrder", "OrderFinding", "PipelineAction", "PipelineOrder",
    "Played", "breadth_first", "bubble", "describe", "grid", "order_for_batch", "order_name", "pipeline_order",
    "read_order", "stage_homes", "verify",
]  # fmt: skip
