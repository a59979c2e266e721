"""Constants that are fitted: on plans that were run, on a scaling curve, on a sweep of a collective."""

from ._fit import MeasuredPlan, fitted, reference_plans
from ._scaling import ScalingFit, fit_scaling
from ._sweep import fit_sweep, read_sweep

__all__ = ["MeasuredPlan", "ScalingFit", "fit_scaling", "fit_sweep", "fitted", "read_sweep", "reference_plans"]
