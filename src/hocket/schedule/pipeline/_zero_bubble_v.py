"""ZB-V: stages in a V, so that a rank has nothing to wait for where a forward and both halves of a backward are alike.

Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 6, and Pipeline Parallelism with Controllable Memory
(2024). Rank r of p holds stages r and 2p - 1 - r: micro-batches go down the ranks and up again, the loss is computed on
the rank that began, and the backwards come back the same way.
"""

from collections.abc import Iterator

from ._order import PipelineAction


def v_homes(p: int, v: int) -> tuple[int, ...]:
    """Return the rank of every stage where stages go down the ranks and up again, as often as there are for each."""
    return tuple((*range(p), *reversed(range(p)))[stage % (2 * p)] for stage in range(p * v))


def zero_bubble_v(p: int, m: int, rank: int) -> Iterator[PipelineAction]:
    """Yield what a rank does; of so few micro-batches that ranks stay idle, what is left of 2p - 1."""
    every = max(m, 2 * p - 1)
    down, up = rank, 2 * p - 1 - rank
    done = dict.fromkeys(((stage, kind) for stage in (down, up) for kind in "FIW"), 0)

    def do(stage: int, kinds: str) -> Iterator[PipelineAction]:
        for kind in kinds:
            number = done[stage, kind]
            done[stage, kind] += 1
            if number < m:
                yield PipelineAction(stage, kind, number)

    # Until the first micro-batch is back up here: forwards of one more for each rank that it passes twice.
    for _ in range(2 * (p - rank) - 1):
        yield from do(down, "F")
    for _ in range(rank):  # until it has been all the way up
        yield from do(up, "F")
        yield from do(down, "F")
    for _ in range(p - rank):  # backwards have to go down and up again before one is wanted of the first stage
        yield from do(up, "FIW")
    while done[up, "F"] < every:
        yield from do(down, "FIW" if done[down, "F"] < every else "IW")
        yield from do(up, "FIW")
    for _ in range(rank):  # other ranks wait for inputs, and weights for nobody
        yield from do(down, "I")
        yield from do(up, "I")
    for _ in range(p - rank):
        yield from do(down, "IW")
    for stage in (up, down):
        while done[stage, "W"] < every:
            yield from do(stage, "W")
