"""How tensor programs are divided among ranks: placements, one table of operator rules, one engine that applies them.

Capture examines recorded programs by the table, tensor parallelism and spatial parallelism run programs by it. A rule
takes one call of an operator, tells how its results lie on the ranks, and changes the call into this rank's own.
Operators that torch knows to work element by element share one rule; those without a rule are looked up through the
simpler operators into which torch decomposes them.
"""

from . import _indexing, _norms, _padding, _pointwise, _products, _reductions, _resample, _views, _windowed
from ._call import NO_ANSWER, FetchedRows, LocalShard, NeedsShard, Operand, OperatorCall, ShardPeers, placements_of
from ._decompose import apply_rule
from ._function_mode import WholeBatchNorms
from ._guards import guard_torch
from ._layouts import same_values, set_values, strided_parts
from ._operators import changes_first, operator_name
from ._placement import PARTIAL, REPLICATED, CannotShard, Interval, Placement, Shard, cut, full_shape, join, reshaped
from ._sharded_tensor import GatheredView, ShardedTensor, ShardingError, as_local, gathered, note, noted
from ._table import RULES, rule_for
from ._trees import leaves, mapped
from ._windows import SlidingWindow, halo_nbytes, halo_rows, overlap

# Whose import enters the rules in the table.
_ = (_indexing, _norms, _padding, _pointwise, _products, _reductions, _resample, _views, _windowed)

__all__ = [
    "NO_ANSWER", "PARTIAL", "REPLICATED", "RULES", "CannotShard", "FetchedRows", "GatheredView", "Interval",
    "LocalShard", "NeedsShard", "Operand", "OperatorCall", "Placement", "Shard", "ShardPeers", "ShardedTensor",
    "ShardingError", "SlidingWindow", "WholeBatchNorms", "apply_rule", "as_local", "changes_first", "cut", "full_shape",
    "gathered", "guard_torch", "halo_nbytes", "halo_rows", "join", "leaves", "mapped", "note",
    "noted", "operator_name", "overlap", "placements_of", "reshaped", "rule_for", "same_values", "set_values",
    "strided_parts",
]  # fmt: skip
