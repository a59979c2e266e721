"""How a tensor lies on the ranks: whole on each, or cut along one dim, perhaps in several segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class CannotSplit(Exception):
    """Something cannot be done on a rank's part alone.

    Args:
        reason: what and why, for the user.
        segments: cuts of the dim that would do, the likeliest first.
    """

    def __init__(self, reason: str, segments: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.segments = tuple(segments)


@dataclass(frozen=True, slots=True)
class Split:
    """One dim of a tensor is cut: every rank has an equal part of each segment, in the order of ranks.

    A matrix that makes queries, keys and values at once has three segments, for each rank needs its part of all three.

    Attributes:
        dim: which, from 0.
        segments: their sizes in the full tensor; they add up to the dim's size.
    """

    dim: int
    segments: tuple[int, ...]

    @property
    def size(self) -> int:
        """The dim's size in the full tensor."""
        return sum(self.segments)

    def at(self, dim: int) -> Split:
        """The same along another dim."""
        return Split(dim, self.segments)

    def divides(self, ranks: int) -> bool:
        """Whether all segments can be shared out equally."""
        return all(segment % ranks == 0 and segment > 0 for segment in self.segments)

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Where in the full dim the parts of `rank` lie: (begin, end), one for each segment."""
        found, begin = [], 0
        for segment in self.segments:
            part = segment // ranks
            found.append((begin + rank * part, begin + (rank + 1) * part))
            begin += segment
        return found


def cut(tensor: torch.Tensor, split: Split, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of a full tensor; a view where the split has one segment."""
    parts = [tensor.narrow(split.dim, begin, end - begin) for begin, end in split.ranges(rank, ranks)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, split.dim)


def join(parts: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """The full tensor from the ranks' parts; the reverse of `cut`."""
    ranks = len(parts)
    if len(split.segments) == 1:
        return torch.cat(list(parts), split.dim)
    local = [segment // ranks for segment in split.segments]
    pieces = [torch.split(part, local, split.dim) for part in parts]
    return torch.cat([pieces[r][s] for s in range(len(local)) for r in range(ranks)], split.dim)


def reshaped(split: Split, old: Sequence[int], new: Sequence[int], ranks: int) -> Split:
    """Where the cut dim is after a view of shape `old` as shape `new` (both of the full tensor).

    Raises:
        CannotSplit: a rank's part of the result is no equal part of segments of one dim.
    """
    outer, inner = math.prod(old[: split.dim]), math.prod(old[split.dim + 1 :])
    blocks, block = len(split.segments), split.segments[0]
    if len(set(split.segments)) > 1:
        for dim in range(len(new)):
            if math.prod(new[:dim]) == outer and new[dim] % split.size == 0 and inner % (new[dim] // split.size) == 0:
                return Split(dim, tuple(s * (new[dim] // split.size) for s in split.segments))
        raise CannotSplit(f"a view as {list(new)} of parts of {list(split.segments)}")
    before = outer * blocks  # everything outside the axis that is cut
    for dim in range(len(new)):
        here = math.prod(new[:dim])
        if not here <= before < here * new[dim]:
            continue
        count = before // here
        width = new[dim] // count if before % here == 0 and new[dim] % count == 0 else 0
        if width and width % ranks == 0 and (block % width == 0 or width % block == 0):
            return Split(dim, (width,) * count)
        break
    raise CannotSplit(
        f"a view of {list(old)} as {list(new)}, whose dim {split.dim} cannot stay cut into {ranks}",
        alternatives(split, old, new, ranks),
    )


def alternatives(split: Split, old: Sequence[int], new: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Other segments of the dim that a view as `new` would leave whole: one for each of the dims that it becomes."""
    outer = math.prod(old[: split.dim])
    found = []
    for dim in range(len(new)):
        here = math.prod(new[:dim])
        if here < outer or here % outer or here >= outer * split.size:
            continue
        count = here // outer
        if split.size % count == 0 and new[dim] % ranks == 0 and (split.size // count) % ranks == 0:
            found.append((split.size // count,) * count)
    return found
