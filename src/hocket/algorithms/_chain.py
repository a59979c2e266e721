"""Chain: the data runs along all ranks, cut in pieces, so that every port is busy."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import mirrored, piece_limit, pipelined


def _form(collective: Collective, *, pieces: int) -> ClosedForm:
    p, kind = collective.world, collective.kind
    if kind in ("gather", "scatter"):
        return ClosedForm(p - 1, Fraction(p - 1, p), Fraction(p - 1, p))
    steps = p - 2 + pieces
    passed = Fraction(steps, pieces)
    return ClosedForm(steps, Fraction(1), passed, passed * (kind == "reduce"))


@algorithm(
    title="Pipelined chain",
    source="Chan, Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and experience, "
    "2007",
    kinds=("broadcast", "reduce", "scatter", "gather"),
    form=_form,
    limit=piece_limit,
    along_hosts=True,
    variants=({}, *({"pieces": pieces} for pieces in (4, 16, 64, 256))),
)
def chain(collective: Collective, *, pieces: int = 1) -> Schedule:
    """Build the chain of any root: its neighbour, and so on around.

    Args:
        collective: Broadcast, reduce, scatter or gather of any world.
        pieces: Number of pieces that broadcast and reduce cut the vector into. Of scatter and gather they are its
            blocks, that of the last rank first.
    """
    p, kind = collective.world, collective.kind
    place = (np.arange(p) + collective.root) % p
    if kind in ("scatter", "gather"):
        steps, chunks = [], p
        for k in range(p - 1):
            last = np.arange(p - 1 - k, p)  # the place where the block goes; it set out so that all arrive together
            at = last - (p - 1 - k)
            steps.append(Step.of(place[at], place[at + 1], place[last], reduce=False))
    else:
        stages = [Step.of(place[i], place[i + 1], reduce=False) for i in range(p - 1)]
        steps, chunks = pipelined(stages, pieces), pieces
    if kind in ("reduce", "gather"):
        steps = mirrored(steps, reduce=kind == "reduce")
    return Schedule("chain", collective, chunks, tuple(steps))
