"""Direct: every rank sends to every other at once; one step, or two where the reduced parts go back."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import KINDS, Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import check_count, mirrored

_SOURCE = "NVIDIA, Scaling deep learning training, Hot Chips 2020 tutorial: one-shot and two-phase all-reduce"


def _one_shot_form(collective: Collective) -> ClosedForm:
    others = Fraction(collective.world - 1)
    return ClosedForm(1, others, others, others, messages=collective.world - 1)


@algorithm(title="One-shot direct", source=_SOURCE, kinds=("all_reduce", "barrier"), form=_one_shot_form, planned=())
def one_shot(collective: Collective) -> Schedule:
    """Build one step in which every rank sends its whole vector to every other: the fewest latencies, most bytes."""
    source, destination = _pairs(collective.world)
    return Schedule("one_shot", collective, 1, (Step.of(source, destination, reduce=True),))


def _form(collective: Collective) -> ClosedForm:
    p, kind = collective.world, collective.kind
    part, others = Fraction(p - 1, p), Fraction(p - 1)
    none = Fraction(0)
    sent, wire, reduced = {
        "all_reduce": (2 * part, 2 * part, part),
        "reduce_scatter": (part, part, part),
        "all_gather": (part, part, none),
        "all_to_all": (part, part, none),
        "reduce": (Fraction(1), others, others),  # the port of the root passes them all
        "broadcast": (others, others, none),
        "gather": (Fraction(1, p), part, none),
        "scatter": (part, part, none),
        "barrier": (others, others, others),
    }[kind]
    phases = 2 if kind == "all_reduce" else 1
    return ClosedForm(phases, sent, wire, reduced, messages=phases * (p - 1))


@algorithm(title="Direct", source=_SOURCE, kinds=KINDS, form=_form, planned=())
def direct(collective: Collective) -> Schedule:
    """Build the schedule that serves every collective: whoever has a part sends it to whoever needs it.

    all_reduce has two phases: part j of every rank goes to rank j, which sends the reduced part to all.
    """
    p, root, kind = collective.world, collective.root, collective.kind
    source, destination = _pairs(p)
    others = np.delete(np.arange(p), root)
    to_home = Step.of(source, destination, destination, reduce=True)
    from_home = Step.of(source, destination, source, reduce=False)
    if kind == "all_to_all":
        steps = [Step.of(source, destination, source * p + destination, reduce=False)]
    elif kind in ("broadcast", "reduce"):
        steps = [Step.of(root, others, 0, reduce=False)]
    elif kind in ("scatter", "gather"):
        steps = [Step.of(root, others, others, reduce=False)]
    elif kind == "barrier":
        steps = [Step.of(source, destination, reduce=True)]
    else:
        steps = {"reduce_scatter": [to_home], "all_gather": [from_home], "all_reduce": [to_home, from_home]}[kind]
    if kind in ("reduce", "gather"):
        steps = mirrored(steps, reduce=kind == "reduce")
    return Schedule("direct", collective, p if kind == "all_reduce" else collective.blocks, tuple(steps))


def _pairs(p: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all ordered pairs of different ranks; at offset k rank r comes with r + k: no receiver is hit first."""
    check_count(p * (p - 1))
    offset, rank = np.meshgrid(np.arange(1, p), np.arange(p), indexing="ij")
    return rank.ravel(), ((rank + offset) % p).ravel()
