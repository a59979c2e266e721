"""Rules of padding, and the rows of zeros that empty shards get for operators that refuse to work on nothing."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from ._call import OperatorCall, Outcome
from ._placement import Shard, cut
from ._table import rule


@rule("pad")
def pad(call: OperatorCall, input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Outcome:
    """Return how a padded tensor lies; padding of the divided dim by other than constants needs all of the tensor."""
    shard, sides = call.shard(input), list(pad)
    at = 2 * (input.ndim - 1 - shard.dim)
    if not call.exchanges and (at >= len(sides) or sides[at : at + 2] == [0, 0]):
        return shard
    call.exchange("pads the dim that is divided")
    low, high = (sides[at], sides[at + 1]) if at < len(sides) else (0, 0)
    (bounds,) = shard.bounds
    moved = (0, *(bound + low for bound in bounds[1:-1]), shard.size + low + high)
    outputs = Shard(shard.dim, (moved,))
    if any(a > b for a, b in itertools.pairwise(moved)):
        call.refuse("takes whole shards away")
    if mode != "constant":
        if (low, high) == (0, 0) and all(shard.length(rank) for rank in range(shard.ranks)):
            return shard
        call.gathered = f"padding mode {mode!r} of the divided dim"
        whole = [(0, shard.size)] * call.ranks
        call.run = lambda local: cut(F.pad(local.rows(input, whole), sides, mode), outputs, call.rank)
        return outputs
    if at < len(sides):
        sides[at] = sides[at + 1] = 0
    wanted = [(a - low, b - low) for a, b in outputs.intervals()]
    call.run = lambda local: F.pad(local.rows(input, wanted, value or 0.0), sides, "constant", value)
    return outputs


def nonempty(rows: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return the rows of an empty shard with `count` more, for operators that refuse to work on nothing.

    What others took of the rows has a way back by autograd all the same.
    """
    return torch.cat([rows, rows_like(rows, dim, count)], dim)


def rows_like(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return new rows of zeros that go with a tensor."""
    shape = list(tensor.shape)
    shape[dim] = count
    return tensor.new_zeros(shape)
