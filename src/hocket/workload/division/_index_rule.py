"""What becomes of cut tensors under indices and slices. See `_rules`."""

from __future__ import annotations

from typing import Any

from ._call import Operand, Site
from ._rules import Outcome
from ._split import CannotSplit, Split


def getitem(site: Site) -> Outcome:
    """Indices and slices of other dims; slices of the one that is cut only where segments end."""
    operand = site.first()
    split = site.split_of(operand)
    index: list[Any] = list(site.args[1]) if isinstance(site.args[1], tuple) else [site.args[1]]
    if any(isinstance(i, Operand | list | bool) for i in index):
        raise site.impossible("is given indices in a tensor or list")
    used = sum(i is not None and i is not Ellipsis for i in index)
    if not any(i is Ellipsis for i in index):
        index.append(Ellipsis)
    at = next(n for n, i in enumerate(index) if i is Ellipsis)
    index[at : at + 1] = [slice(None)] * (len(operand.shape) - used)
    dim = new_dim = 0
    result: Split | None = None
    for n, entry in enumerate(index):
        if entry is None:
            new_dim += 1
            continue
        if dim == split.dim:
            if not isinstance(entry, slice):
                raise site.impossible("takes single elements of the dim that is cut")
            result = Split(new_dim, split.segments)
            if entry != slice(None):
                result, index[n] = _sliced(site, split, entry, new_dim)
                site.args = [site.args[0], tuple(index)]
                site.aware = True
        dim += 1
        new_dim += isinstance(entry, slice)
    assert result is not None
    return result


def _sliced(site: Site, split: Split, entry: slice, dim: int) -> tuple[Split, slice]:
    begin, end, step = entry.indices(split.size)
    ends = [sum(split.segments[:i]) for i in range(len(split.segments) + 1)]
    if step != 1 or begin not in ends or end not in ends or begin >= end:
        bounds = sorted({*ends, begin, end})
        wanted = tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        raise CannotSplit(f"slices {begin}:{end} out of the dim that is cut", [wanted] if step == 1 else ())
    kept = split.segments[ends.index(begin) : ends.index(end)]
    return Split(dim, kept), slice(begin // site.ranks, end // site.ranks)
