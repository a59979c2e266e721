"""Plans: every decision about how a model is trained on many workers, as one value; and what a plan costs.

Read `_plan.py` (the value), `_memory.py` and `_time.py` (what it needs), `_search.py` (which is best).
"""

from . import _rules as _rules  # which a plan is held to
from ._balance import CUT_SLACK as CUT_SLACK
from ._balance import Link as Link
from ._balance import balance as balance
from ._bucket_sizes import BucketSizes as BucketSizes
from ._check import PlanCheck as PlanCheck
from ._check import check_run as check_run
from ._compression import COMPRESSIONS as COMPRESSIONS
from ._compression import CompressionSpec as CompressionSpec
from ._compression import parse_compression as parse_compression
from ._constants import Constants as Constants
from ._constants import waiting as waiting
from ._curve import WHAT_IFS as WHAT_IFS
from ._curve import Curve as Curve
from ._curve import Point as Point
from ._curve import curve_of_fit as curve_of_fit
from ._curve import scaling_curves as scaling_curves
from ._explain import explain as explain
from ._explain import plan_rows as plan_rows
from ._explain import with_reasons as with_reasons
from ._findings import PlanError as PlanError
from ._findings import PlanFinding as PlanFinding
from ._fit import MeasuredPlan as MeasuredPlan
from ._fit import fitted as fitted
from ._fit import reference_plans as reference_plans
from ._graph import step_graph as step_graph
from ._memory import Memory as Memory
from ._memory import memory_of as memory_of
from ._network import Cost as Cost
from ._network import Network as Network
from ._pipeline import plan_order as plan_order
from ._plan import PLAN_VARIABLE as PLAN_VARIABLE
from ._plan import Plan as Plan
from ._plot import curves_svg as curves_svg
from ._preference import NEAR as NEAR
from ._preference import preferred as preferred
from ._profile import Profile as Profile
from ._scaling import ScalingFit as ScalingFit
from ._scaling import fit_scaling as fit_scaling
from ._search import Search as Search
from ._search import admissible_plans as admissible_plans
from ._search import search as search
from ._stages import balanced_cuts as balanced_cuts
from ._stages import in_flight as in_flight
from ._synchronisation import Synchronisation as Synchronisation
from ._time import Prediction as Prediction
from ._time import StepParts as StepParts
from ._time import predict as predict
from .axes import AXES as AXES
from .axes import Axis as Axis
from .axes import axis as axis
from .axes import inner as inner

__all__ = [
    "AXES",
    "Axis",
    "COMPRESSIONS",
    "CUT_SLACK",
    "Link",
    "NEAR",
    "PLAN_VARIABLE",
    "WHAT_IFS",
    "BucketSizes",
    "CompressionSpec",
    "Constants",
    "Cost",
    "Curve",
    "MeasuredPlan",
    "Memory",
    "Network",
    "Plan",
    "PlanCheck",
    "PlanError",
    "PlanFinding",
    "Point",
    "Prediction",
    "Profile",
    "ScalingFit",
    "Search",
    "StepParts",
    "Synchronisation",
    "admissible_plans",
    "axis",
    "balance",
    "balanced_cuts",
    "check_run",
    "curve_of_fit",
    "curves_svg",
    "explain",
    "fit_scaling",
    "fitted",
    "in_flight",
    "inner",
    "memory_of",
    "parse_compression",
    "plan_order",
    "plan_rows",
    "predict",
    "preferred",
    "reference_plans",
    "scaling_curves",
    "search",
    "step_graph",
    "waiting",
    "with_reasons",
]
