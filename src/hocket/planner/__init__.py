"""Plans: every decision about how a model is trained on many workers, as one value that can be read and compared."""

from ._findings import PlanError as PlanError
from ._findings import PlanFinding as PlanFinding
from ._plan import Plan as Plan

__all__ = ["Plan", "PlanError", "PlanFinding"]
