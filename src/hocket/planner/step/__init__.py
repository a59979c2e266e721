"""What a step of a plan takes: its time part by part, its memory, how sure that is, and the same as tasks."""

from ._advice import advised_cut
from ._expected import ExpectedTime, expected_collective, expected_order, expected_step, reached_links
from ._graph import step_graph
from ._interval import DEVIATIONS, LEVEL, NOISE, spread
from ._likeness import least_longer, place, resemblance, untried, weights
from ._memory import Memory, memory_of
from ._prediction import Prediction, StepParts
from ._profile import LEAST_PART_NBYTES, Profile, in_precision
from ._stages import balanced_cuts, in_flight, ties_across
from ._time import cuts_of, predict, predict_within, refuse_relaxed

__all__ = [
    "DEVIATIONS", "LEAST_PART_NBYTES", "LEVEL", "NOISE", "ExpectedTime", "Memory", "Prediction", "Profile", "StepParts",
    "advised_cut", "balanced_cuts", "cuts_of", "expected_collective", "expected_order", "expected_step", "in_flight",
    "in_precision", "least_longer", "memory_of", "place", "predict", "predict_within", "reached_links",
    "refuse_relaxed", "resemblance", "spread", "step_graph", "ties_across", "untried", "weights",
]  # fmt: skip
