"""How tensor programs are divided among ranks: placements, one table of operator rules, one engine that applies them.

Capture examines recorded programs by the table, tensor parallelism and spatial parallelism run programs by it. A rule
takes one call of an operator, tells how its results lie on the ranks, and changes the call into this rank's own.
Operators that torch knows to work element by element share one rule; those without a rule are looked up through the
simpler operators into which torch decomposes them.
"""

from . import _norms, _pointwise, _products, _reductions, _resample, _shapes, _windowed
from ._call import NO_ANSWER as NO_ANSWER
from ._call import FetchedRows as FetchedRows
from ._call import LocalShard as LocalShard
from ._call import NeedsShard as NeedsShard
from ._call import Operand as Operand
from ._call import OperatorCall as OperatorCall
from ._call import ShardPeers as ShardPeers
from ._call import placements_of as placements_of
from ._decompose import apply_rule as apply_rule
from ._engine import ShardingMode as ShardingMode
from ._engine import as_local as as_local
from ._engine import gathered as gathered
from ._engine import interpreted as interpreted
from ._engine import interpreting as interpreting
from ._engine import note as note
from ._engine import noted as noted
from ._operators import changes_first as changes_first
from ._operators import operator_name as operator_name
from ._placement import PARTIAL as PARTIAL
from ._placement import REPLICATED as REPLICATED
from ._placement import CannotShard as CannotShard
from ._placement import Interval as Interval
from ._placement import Placement as Placement
from ._placement import Shard as Shard
from ._placement import cut as cut
from ._placement import full_shape as full_shape
from ._placement import join as join
from ._placement import reshaped as reshaped
from ._table import RULES as RULES
from ._table import rule_for as rule_for
from ._trees import leaves as leaves
from ._trees import mapped as mapped
from ._windows import SlidingWindow as SlidingWindow
from ._windows import halo_nbytes as halo_nbytes
from ._windows import halo_rows as halo_rows
from ._windows import overlap as overlap

# Whose import enters the rules in the table.
_ = (_norms, _pointwise, _products, _reductions, _resample, _shapes, _windowed)

__all__ = [
    "NO_ANSWER",
    "PARTIAL",
    "REPLICATED",
    "RULES",
    "CannotShard",
    "FetchedRows",
    "ShardingMode",
    "Interval",
    "LocalShard",
    "NeedsShard",
    "Operand",
    "OperatorCall",
    "ShardPeers",
    "Placement",
    "Shard",
    "SlidingWindow",
    "apply_rule",
    "as_local",
    "changes_first",
    "cut",
    "full_shape",
    "gathered",
    "halo_nbytes",
    "halo_rows",
    "interpreted",
    "interpreting",
    "join",
    "leaves",
    "mapped",
    "note",
    "noted",
    "operator_name",
    "overlap",
    "placements_of",
    "reshaped",
    "rule_for",
]
