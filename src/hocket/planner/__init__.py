"""Plans: every decision about how a model is trained on many workers, as one value; and what a plan costs.

Read `plan` (the value, its rules) with `axes` (forms of parallelism), `network` (the wires), `step` (what it takes),
`fits` (constants that runs tell), `search` (which is best).
"""

from ._findings import PlanError, PlanFinding
from .axes import AXES, Axis, axis, inner
from .fits import MeasuredPlan, ScalingFit, fit_scaling, fit_sweep, fitted, read_sweep, reference_plans
from .network import CUT_SLACK, Constants, Cost, Link, Network, balance, slowest_of, waiting
from .plan import (
    COMPRESSIONS,
    PLAN_VARIABLE,
    PLANNED_PARTS,
    SPLIT_REASON,
    BucketSizes,
    CompressionSpec,
    Plan,
    PlanCheck,
    Synchronisation,
    check_run,
    parse_compression,
    plan_homes,
    plan_order,
)
from .search import (
    NEAR,
    WHAT_IFS,
    Curve,
    Point,
    Search,
    admissible_plans,
    assumptions,
    curve_of_fit,
    curves_svg,
    explain,
    plan_rows,
    preferred,
    scaling_curves,
    search,
    with_reasons,
)
from .step import (
    LEAST_PART_NBYTES,
    LEVEL,
    ExpectedTime,
    Memory,
    Prediction,
    Profile,
    StepParts,
    balanced_cuts,
    expected_collective,
    expected_order,
    expected_step,
    in_flight,
    memory_of,
    predict,
    reached_links,
    resemblance,
    spread,
    step_graph,
)

__all__ = [
    "AXES", "COMPRESSIONS", "CUT_SLACK", "LEAST_PART_NBYTES", "LEVEL", "NEAR", "PLANNED_PARTS", "PLAN_VARIABLE",
    "SPLIT_REASON", "WHAT_IFS", "Axis", "BucketSizes", "CompressionSpec", "Constants", "Cost", "Curve", "ExpectedTime",
    "Link", "MeasuredPlan", "Memory", "Network", "Plan", "PlanCheck", "PlanError", "PlanFinding", "Point", "Prediction",
    "Profile", "ScalingFit", "Search", "StepParts", "Synchronisation", "admissible_plans", "assumptions", "axis",
    "balance", "balanced_cuts", "check_run", "curve_of_fit", "curves_svg", "expected_collective", "expected_order",
    "expected_step", "explain", "fit_scaling", "fit_sweep", "fitted", "in_flight", "inner", "memory_of",
    "parse_compression", "plan_homes", "plan_order", "plan_rows", "predict", "preferred", "reached_links", "read_sweep",
    "reference_plans", "resemblance", "scaling_curves", "search", "slowest_of", "spread", "step_graph", "waiting",
    "with_reasons",
]  # fmt: skip
