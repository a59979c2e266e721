"""Which plan is best, and why; curves over numbers of workers."""

from ._curve import WHAT_IFS, Curve, Point, curve_of_fit, scaling_curves
from ._explain import assumptions, explain, plan_rows, with_reasons
from ._plot import curves_svg
from ._preference import NEAR, preferred
from ._search import Search, admissible_plans, search

__all__ = [
    "NEAR", "WHAT_IFS", "Curve", "Point", "Search", "admissible_plans", "assumptions", "curve_of_fit", "curves_svg",
    "explain", "plan_rows", "preferred", "scaling_curves", "search", "with_reasons",
]  # fmt: skip
