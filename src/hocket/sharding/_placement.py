"""How one tensor lies on the ranks of an axis: replicated, sharded along a dim, or partial (addends)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Interval = tuple[int, int]
"""Indices from the first to one below the second."""


class CannotShard(Exception):
    """An operator cannot be applied to a rank's shard alone.

    Args:
        reason: what and why, for the user.
        segments: segments of the dim that would do, the likeliest first.
    """

    def __init__(self, reason: str, segments: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.segments = tuple(segments)


class Placement:
    """How one tensor lies on the ranks of an axis: `REPLICATED`, `PARTIAL`, or a `Shard`."""

    __slots__ = ()


REPLICATED = Placement()
"""Every rank has the same full tensor."""
PARTIAL = Placement()
"""Every rank has an addend of the full shape; the tensor is their sum."""


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """One dim of a tensor is divided: every rank owns an interval of each segment, in the order of ranks.

    Most tensors have one segment. A matrix that makes queries, keys and values at once has three, for each rank needs
    its share of all three.

    Attributes:
        dim: the divided dim, from 0.
        bounds: for each segment where the ranks' shares begin in it, and last the segment's size; rank r owns the
            indices from bounds[s][r] to bounds[s][r + 1] of segment s. A share may be empty.
    """

    dim: int
    bounds: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, dim: int, segments: int | Sequence[int], ranks: int) -> "Shard":
        """Return the shard with shares as equal as can be, the first ranks having one index more."""
        sizes = (segments,) if isinstance(segments, int) else tuple(segments)
        return cls(dim, tuple(tuple(r * (s // ranks) + min(r, s % ranks) for r in range(ranks + 1)) for s in sizes))

    @property
    def ranks(self) -> int:
        """Number of ranks that share the dim."""
        return len(self.bounds[0]) - 1

    @property
    def segments(self) -> tuple[int, ...]:
        """Sizes of the segments in the full tensor."""
        return tuple(one[-1] for one in self.bounds)

    @property
    def size(self) -> int:
        """Size of the dim in the full tensor."""
        return sum(one[-1] for one in self.bounds)

    @property
    def equal(self) -> bool:
        """Whether all ranks own the same number of indices of each segment, and at least one."""
        return all(s > 0 and s % self.ranks == 0 for s in self.segments) and self == self.even(
            self.dim, self.segments, self.ranks
        )

    def at(self, dim: int) -> "Shard":
        """Return the same division along another dim."""
        return Shard(dim, self.bounds)

    def length(self, rank: int) -> int:
        """Return how many indices a rank owns."""
        return sum(one[rank + 1] - one[rank] for one in self.bounds)

    def ranges(self, rank: int) -> list[Interval]:
        """Return where in the full dim the shares of `rank` lie, one interval for each segment."""
        found, begin = [], 0
        for one in self.bounds:
            found.append((begin + one[rank], begin + one[rank + 1]))
            begin += one[-1]
        return found

    def intervals(self) -> list[Interval]:
        """Return what each rank owns of a dim that has one segment."""
        assert len(self.bounds) == 1
        return list(zip(self.bounds[0], self.bounds[0][1:], strict=False))

    def scaled(self, times: int, by: int = 1) -> "Shard":
        """Return the division of a dim of `times / by` times the size, every bound being multiplied alike."""
        return Shard(self.dim, tuple(tuple(bound * times // by for bound in one) for one in self.bounds))


def cut(tensor: torch.Tensor, shard: Shard, rank: int) -> torch.Tensor:
    """Return the shard of a full tensor that `rank` owns; a view where there is one segment."""
    parts = [tensor.narrow(shard.dim, begin, end - begin) for begin, end in shard.ranges(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, shard.dim)


def join(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """Return the full tensor from the shards of all ranks; the reverse of `cut`."""
    if len(shard.bounds) == 1:
        return torch.cat(list(parts), shard.dim)
    lengths = [[one[r + 1] - one[r] for one in shard.bounds] for r in range(shard.ranks)]
    pieces = [torch.split(part, sizes, shard.dim) for part, sizes in zip(parts, lengths, strict=True)]
    return torch.cat([mine[s] for s in range(len(shard.bounds)) for mine in pieces], shard.dim)


def full_shape(shape: Sequence[int], shard: Shard | None) -> tuple[int, ...]:
    """Return the full tensor's shape, given the shape of a shard."""
    if shard is None:
        return tuple(shape)
    return (*shape[: shard.dim], shard.size, *shape[shard.dim + 1 :])


def reshaped(shard: Shard, old: Sequence[int], new: Sequence[int]) -> Shard:
    """Return where the divided dim is after a view of shape `old` as shape `new` (both of the full tensor).

    Raises:
        CannotShard: a rank's share of the result is no interval of segments of one dim.
    """
    outer, inner = math.prod(old[: shard.dim]), math.prod(old[shard.dim + 1 :])
    if shard.equal and len(set(shard.segments)) == 1 and (found := _regrouped(shard, outer, new)):
        return found
    for dim in range(len(new)):
        if math.prod(new[:dim]) != outer or not new[dim] or not shard.size:
            continue
        if new[dim] % shard.size == 0 and inner % (new[dim] // shard.size) == 0:
            return shard.at(dim).scaled(new[dim] // shard.size)
        by = shard.size // new[dim]
        if shard.size % new[dim] == 0 and all(bound % by == 0 for one in shard.bounds for bound in one):
            return shard.at(dim).scaled(1, by)
    raise CannotShard(
        f"a view of {list(old)} as {list(new)}, whose dim {shard.dim} cannot stay divided among {shard.ranks}",
        _alternatives(shard, old, new),
    )


def _regrouped(shard: Shard, outer: int, new: Sequence[int]) -> Shard | None:
    """Return where equal segments, equally divided, are: they may become dims of their own, or come from such."""
    blocks, block, ranks = len(shard.bounds), shard.segments[0], shard.ranks
    before = outer * blocks  # everything outside the axis that is divided
    for dim in range(len(new)):
        here = math.prod(new[:dim])
        if not here <= before < here * new[dim]:
            continue
        count = before // here
        width = new[dim] // count if before % here == 0 and new[dim] % count == 0 else 0
        if width and width % ranks == 0 and (block % width == 0 or width % block == 0):
            return Shard.even(dim, (width,) * count, ranks)
        return None
    return None


def _alternatives(shard: Shard, old: Sequence[int], new: Sequence[int]) -> list[tuple[int, ...]]:
    """Return other segments that a view as `new` would leave whole: one for each of the dims that the dim becomes."""
    outer, ranks = math.prod(old[: shard.dim]), shard.ranks
    found = []
    for dim in range(len(new)):
        here = math.prod(new[:dim])
        if here < outer or here >= outer * shard.size or here % outer:
            continue
        count = here // outer
        if shard.size % count == 0 and new[dim] % ranks == 0 and (shard.size // count) % ranks == 0:
            found.append((shard.size // count,) * count)
    return found
