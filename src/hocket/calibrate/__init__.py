"""Measures ranks, links and a model for the planner, and takes its choice (`plan="auto"`)."""

from ._auto import auto_plan, including_loss
from ._calibrate import calibrate
from ._references import Calibration

__all__ = ["Calibration", "auto_plan", "calibrate", "including_loss"]
