"""Measures ranks, links and a model for the planner, and takes its choice (`plan="auto"`)."""

from ._auto import auto_plan as auto_plan
from ._calibrate import calibrate as calibrate
from ._references import Calibration as Calibration

__all__ = ["Calibration", "auto_plan", "calibrate"]
