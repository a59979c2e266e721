"""Plans: every decision about how a model is trained on many workers, as one value; and what a plan costs.

Read `_plan.py` (the value), `_memory.py` and `_time.py` (what it needs), `_search.py` (which is best).
"""

from . import _rules as _rules  # which a plan is held to
from ._balance import CUT_SLACK, Link, balance
from ._bucket_sizes import BucketSizes
from ._check import PlanCheck, check_run
from ._compression import COMPRESSIONS, CompressionSpec, parse_compression
from ._constants import Constants, slowest_of, waiting
from ._curve import WHAT_IFS, Curve, Point, curve_of_fit, scaling_curves
from ._explain import assumptions, explain, plan_rows, with_reasons
from ._findings import PlanError, PlanFinding
from ._fit import MeasuredPlan, fitted, reference_plans
from ._graph import step_graph
from ._interval import LEVEL, spread
from ._likeness import resemblance
from ._memory import Memory, memory_of
from ._network import Cost, Network
from ._pipeline import plan_order
from ._plan import PLAN_VARIABLE, Plan
from ._plot import curves_svg
from ._preference import NEAR, preferred
from ._profile import Profile
from ._scaling import ScalingFit, fit_scaling
from ._search import Search, admissible_plans, search
from ._stages import balanced_cuts, in_flight
from ._sweep import fit_sweep, read_sweep
from ._synchronisation import Synchronisation
from ._time import Prediction, StepParts, predict
from .axes import AXES, Axis, axis, inner

__all__ = [
    "AXES", "COMPRESSIONS", "CUT_SLACK", "LEVEL", "NEAR", "PLAN_VARIABLE", "WHAT_IFS", "Axis", "BucketSizes",
    "CompressionSpec", "Constants", "Cost", "Curve", "Link", "MeasuredPlan", "Memory", "Network", "Plan", "PlanCheck",
    "PlanError", "PlanFinding", "Point", "Prediction", "Profile", "ScalingFit", "Search", "StepParts",
    "Synchronisation", "admissible_plans", "assumptions", "axis", "balance", "balanced_cuts", "check_run",
    "curve_of_fit", "curves_svg", "explain", "fit_scaling", "fit_sweep", "fitted", "in_flight", "inner", "memory_of",
    "parse_compression", "plan_order", "plan_rows", "predict", "preferred", "read_sweep", "reference_plans",
    "resemblance",    "scaling_curves", "search", "slowest_of", "spread", "step_graph", "waiting", "with_reasons",
]  # fmt: skip
