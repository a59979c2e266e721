"""A plan as a value, the rules that it is held to, and a run compared with it."""

from . import _rules as _rules  # which a plan is held to
from ._bucket_sizes import BucketSizes
from ._check import PLANNED_PARTS, PlanCheck, check_run
from ._compression import COMPRESSIONS, CompressionSpec, parse_compression
from ._order import order_of, plan_homes, plan_order
from ._plan import PLAN_VARIABLE, SHARDS, SPLIT_REASON, Plan
from ._rules import undivided
from ._synchronisation import Synchronisation

__all__ = [
    "COMPRESSIONS", "PLANNED_PARTS", "PLAN_VARIABLE", "SHARDS", "SPLIT_REASON", "BucketSizes", "CompressionSpec",
    "Plan", "PlanCheck", "Synchronisation", "check_run", "order_of", "parse_compression", "plan_homes", "plan_order",
    "undivided",
]  # fmt: skip
