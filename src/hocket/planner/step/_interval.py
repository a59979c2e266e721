"""How sure a prediction is: an interval that holds 80% of what is measured.

Each part of a step errs with the constants that it is made of: parts that share constants err together, the others
apart. What is hidden behind computation may stay exposed, what no formula knows is a part of the step, and who goes far
beyond the runs that the constants were fitted on knows less. The spreads were set so that between 75% and 90% of the
published runs that were not fitted lie inside (docs/predictions.md has the table).
"""

import math
from collections.abc import Mapping

from ..network import Constants

LEVEL = 0.8
"""Of what is measured, the part that is to lie inside of an interval."""
DEVIATIONS = 1.2816  # of a normal distribution, to both sides, for 80%

# Standard deviations of the logarithm of parts, by what makes them err together, where constants are only assumed.
_TOGETHER = (
    (0.20, ("compute", "recompute", "bubble", "optimizer")),
    (0.30, _LINKS := ("tensor", "messages", "gather", "gradients")),
    (0.60, ("straggle", "interference")),
    (0.50, ("crowding", "overhead")),
)
_KNOWN = {"assumed": 1.0, "fitted": 0.4, "measured": 0.3}  # what is left of that, by where constants are from
# Of layers that are counted from operators: of 44 steps of eleven models that no formula had seen, on an H100, 30 lay
# inside of what 0.2 says, and 37 do of this (docs/predictions.md).
_COUNTED = 1.35
# The same on processors, where what a cache holds passes several times as fast as what is in memory, and a library may
# run a layer as one kernel: of models that a cache may hold, small ones took from 0.29 to 1.5 times what is counted.
_COUNTED_ON_PROCESSORS, _COUNTED_IN_CACHES = 3.0, 5.0
_CACHE_NBYTES = 32 * 2**20  # of a processor's last level, assumed
_UNMODELLED = {"assumed": 0.05, "fitted": 0.03, "measured": 0.04}  # of a step, where no runs tell it
NOISE = 0.07
"""Standard deviation of a measured step, as a part of it."""
# Where constants were measured: how much faster or slower such a machine, which is shared, is later on. Chosen with the
# answers in view, on two days with slow phases: with 0.1 214 of 300 plans lay inside (benchmarks/2026-11-30-plans.md).
_PHASE = 0.15
_HIDDEN = 0.1  # of the communication that computation is said to hide
_SPARED = 0.25  # of the computation that fusion and float8 are assumed to take away
# Of the steps of recurrent layers, which no run has told: cuDNN has several ways, and chooses. Published times of older
# GPUs are off by 0.3 (`tests/planner/test_recurrent.py`), and those of newer ones may be farther off.
_RECURRENT = 0.5
# Of the step of a plan that uses an axis which no run did: of one model six such steps were off by 0.15 to 0.63, and of
# another by 0.33 to 0.39 (benchmarks/2026-11-29-plans.md).
_UNTRIED = 0.3
# Of computation that was measured while others computed on the same cores: it took up to 20 times as long, as threads
# waited for each other, and is never shorter than alone.
_DISTURBED = 1.0
_FARTHER = 0.015  # of a step, for every doubling of the workers beyond those of the fitted runs


def spread(
    parts: Mapping[str, float],
    constants: Constants,
    *,
    workers: int,
    hidden_s: float,
    measured: bool,
    spared_s: float = 0.0,
    recurrent_s: float = 0.0,
    alike: float = 0.0,
    untried: bool = False,
    counted: bool = False,
    on_processors: bool = False,
    nbytes: float = math.inf,
    disturbed: bool = False,
) -> float:
    """Return the factor between a prediction and either end of its interval.

    Args:
        parts: Of the step, seconds by name (`StepParts`); what is left out takes none.
        constants: What they are made of.
        workers: How many there are.
        hidden_s: Seconds of communication that computation is said to hide.
        measured: Whether the layers' times were measured, whatever constants are.
        spared_s: Seconds that fusion and float8 are assumed to take away.
        recurrent_s: Seconds that the steps of recurrent layers are counted to take.
        counted: Whether layers' times are counted from a captured model's operators, of which a fit on others says
            nothing.
        on_processors: Whether devices are processors.
        nbytes: Of a worker's state and activations, which a processor's cache may hold.
        alike: How like the plan is, from 0 to 1, to the run that is most like it.
        untried: Whether the plan uses an axis that no run did.
        disturbed: Whether others computed while the layers were measured, and it is the lower end that is asked for.
    """
    known, step_s = _KNOWN[constants.basis], sum(parts.values())
    guessed = _COUNTED_ON_PROCESSORS if nbytes > _CACHE_NBYTES else _COUNTED_IN_CACHES
    guessed = guessed if on_processors else _COUNTED
    errors = []
    for each, names in _TOGETHER:
        less = known
        if "compute" in names:
            less = _KNOWN["measured"] if measured else guessed if counted and constants.basis != "measured" else known
        if constants.swept and names == _LINKS:  # a sweep says as much of so many ranks, and less with every doubling
            less = min(less, _KNOWN["fitted"] * (1 + max(0.0, math.log2(workers / constants.swept))))
        less = max(less, _DISTURBED / each) if disturbed and "compute" in names else less
        errors.append(each * less * sum(parts.get(name, 0.0) for name in names))
    farther = max(0.0, math.log2(workers / max(1, constants.fitted_workers)))
    unmodelled = constants.unmodelled or _UNMODELLED[constants.basis]
    errors += [
        math.hypot(unmodelled * math.sqrt(1 - alike**2), min(unmodelled, NOISE) * alike) * step_s,
        (_PHASE if constants.basis == "measured" else 0.0) * step_s,
        _HIDDEN * known * hidden_s,
        _SPARED * spared_s,
        _RECURRENT * recurrent_s,
        _FARTHER * farther * step_s,
        (_UNTRIED if untried else 0.0) * step_s,
    ]
    return math.exp(DEVIATIONS * math.hypot(*errors) / step_s) if step_s else 1.0
