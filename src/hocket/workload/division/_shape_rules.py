"""What becomes of cut tensors in functions that rearrange them or tell their shapes. See `_rules`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._call import Operand, Part, Site, cut_operand
from ._index_rule import getitem
from ._rules import HARMLESS, RULES, Outcome, Rule
from ._split import CannotSplit, Split, reshaped


def view(site: Site) -> Outcome:
    """view, reshape: sizes are those of the full tensor."""
    operand = site.first()
    sizes, packed = _sizes(site, 1)
    full = _resolved(sizes, operand.shape)
    split = reshaped(site.split_of(operand), operand.shape, full, site.ranks)
    return _with_sizes(site, sizes, packed, split, full)


def _with_sizes(site: Site, sizes: list[int], packed: bool, split: Split, full: tuple[int, ...]) -> Split:
    if sizes[split.dim] != -1:
        sizes[split.dim] = full[split.dim] // site.ranks
        site.aware = True
    if "shape" in site.kwargs or "size" in site.kwargs:
        site.kwargs = dict.fromkeys(site.kwargs, sizes)
    else:
        site.args = [site.args[0], tuple(sizes)] if packed else [site.args[0], *sizes]
    return split


def _sizes(site: Site, place: int) -> tuple[list[int], bool]:
    given: Any = site.args[place:] or site.kwargs.get("shape", site.kwargs.get("size"))
    packed = len(given) == 1 and isinstance(given[0], tuple | list)
    sizes = list(given[0] if packed else given)
    if any(isinstance(s, Operand) or not isinstance(s, int) for s in sizes):
        raise site.impossible("is given something else than sizes")
    return sizes, packed


def _resolved(sizes: list[int], old: tuple[int, ...]) -> tuple[int, ...]:
    known = math.prod(s for s in sizes if s != -1)
    return tuple(math.prod(old) // max(known, 1) if s == -1 else s for s in sizes)


def flatten(site: Site) -> Outcome:
    """Several dims become one."""
    operand = site.first()
    rank = len(operand.shape)
    start, end = site.argument(1, "start_dim", 0) % rank, site.argument(2, "end_dim", -1) % rank
    full = (*operand.shape[:start], math.prod(operand.shape[start : end + 1]), *operand.shape[end + 1 :])
    return reshaped(site.split_of(operand), operand.shape, full, site.ranks)


def unflatten(site: Site) -> Outcome:
    """One dim becomes several."""
    operand = site.first()
    dim = site.argument(1, "dim") % len(operand.shape)
    sizes = list(site.argument(2, "sizes"))
    middle = _resolved(sizes, (operand.shape[dim],))
    full = (*operand.shape[:dim], *middle, *operand.shape[dim + 1 :])
    split = reshaped(site.split_of(operand), operand.shape, full, site.ranks)
    at = split.dim - dim
    if 0 <= at < len(sizes) and sizes[at] != -1:
        sizes[at] //= site.ranks
        site.set_argument(2, "sizes", tuple(sizes))
    return split


def squeeze(site: Site) -> Outcome:
    """Dims of one element vanish."""
    operand = site.first()
    split = site.split_of(operand)
    dims = site.argument(1, "dim")
    rank = len(operand.shape)
    chosen = set(range(rank)) if dims is None else {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    if dims is None and split.size == site.ranks:
        raise site.impossible("would take the part's only element for a dim of size one")
    gone = [d for d in chosen if operand.shape[d] == 1]
    return split.at(split.dim - sum(d < split.dim for d in gone))


def unsqueeze(site: Site) -> Outcome:
    """A dim of one element comes in."""
    operand = site.first()
    split = site.split_of(operand)
    dim = site.argument(1, "dim") % (len(operand.shape) + 1)
    return split.at(split.dim + (dim <= split.dim))


def transpose(site: Site) -> Outcome:
    """Two dims change places."""
    operand = site.first()
    split = site.split_of(operand)
    rank = len(operand.shape)
    if site.name in ("t", "get_T", "get_mT", "get_H", "get_mH", "adjoint"):
        a, b = rank - 2, rank - 1
        if site.name == "get_T" and rank != 2:
            raise site.impossible("of a tensor that is no matrix")
    else:
        a, b = site.argument(1, "dim0") % rank, site.argument(2, "dim1") % rank
    return split.at({a: b, b: a}.get(split.dim, split.dim))


def permute(site: Site) -> Outcome:
    """All dims change places."""
    operand = site.first()
    split = site.split_of(operand)
    given = site.args[1:] or [site.kwargs["dims"]]
    order = list(given[0]) if isinstance(given[0], tuple | list) else list(given)
    return split.at([d % len(operand.shape) for d in order].index(split.dim))


def movedim(site: Site) -> Outcome:
    """Some dims go elsewhere."""
    operand = site.first()
    source, target = site.argument(1, "source"), site.argument(2, "destination")
    shape = [1] * len(operand.shape)  # torch's own arithmetic, on a mark instead of elements
    shape[site.split_of(operand).dim] = 2
    moved = torch.empty(shape).movedim(source, target).shape
    return site.split_of(operand).at(list(moved).index(2))


def expand(site: Site) -> Outcome:
    """Dims of one element are repeated."""
    operand = site.first()
    split = site.split_of(operand)
    sizes, packed = _sizes(site, 1)
    at = split.dim + len(sizes) - len(operand.shape)
    full = tuple(operand.shape[i - len(sizes)] if s == -1 else s for i, s in enumerate(sizes))
    return _with_sizes(site, sizes, packed, split.at(at), full)


def repeat(site: Site) -> Outcome:
    """All elements are repeated along some dims; not along the one that is cut."""
    operand = site.first()
    split = site.split_of(operand)
    times, _ = _sizes(site, 1)
    at = split.dim + len(times) - len(operand.shape)
    if times[at] != 1:
        raise site.impossible("repeats along the dim that is cut")
    return split.at(at)


def repeat_interleave(site: Site) -> Outcome:
    """Each element is repeated in its place: keys and values that several heads of queries share."""
    operand = site.first()
    split = site.split_of(operand)
    times, dim = site.argument(1, "repeats"), site.argument(2, "dim")
    if dim is None or not isinstance(times, int):
        raise site.impossible("along no dim, or by different numbers")
    if dim % len(operand.shape) != split.dim:
        return split
    return Split(split.dim, tuple(s * times for s in split.segments))


def pieces(site: Site) -> Outcome:
    """split, chunk: along the dim that is cut, every piece must be shared out by itself."""
    operand = site.first()
    split = site.split_of(operand)
    dim = site.argument(2, "dim", 0) % len(operand.shape)
    size = operand.shape[dim]
    if site.name == "chunk":
        count = site.argument(1, "chunks")
        each = -(-size // count)
    else:
        each = site.argument(1, "split_size_or_sections", site.kwargs.get("split_size"))
    sizes = list(each) if isinstance(each, list | tuple) else [min(each, size - at) for at in range(0, size, each)]
    if dim != split.dim:
        return [split] * len(sizes)
    remaining = list(split.segments)
    found: list[Split | None] = []
    for piece in sizes:
        mine: list[int] = []
        while remaining and sum(mine) < piece:
            mine.append(remaining.pop(0))
        if sum(mine) != piece:
            raise CannotSplit(f"{site.name} takes pieces of {sizes} out of the dim that is cut", [tuple(sizes)])
        found.append(Split(dim, tuple(mine)))
    if site.name != "chunk" or len(set(sizes)) > 1:
        place = "split_size_or_sections" if "split_size" not in site.kwargs else "split_size"
        site.set_argument(1, place, [piece // site.ranks for piece in sizes])
        site.name = "split"
    return found


def without_dim(site: Site) -> Outcome:
    """unbind, select: one dim vanishes."""
    operand = site.first()
    split = site.split_of(operand)
    dim = site.argument(1, "dim", 0) % len(operand.shape)
    if dim == split.dim:
        raise site.impossible("takes single elements of the dim that is cut")
    count = operand.shape[dim] if site.name == "unbind" else 1
    return [split.at(split.dim - (dim < split.dim))] * count


def cat(site: Site) -> Outcome:
    """Tensors side by side: along the dim that is cut their segments follow each other."""
    tensors: list[Operand] = list(site.argument(0, "tensors"))
    first = next((o for o in tensors if o.split is not None), None)
    if first is None:
        raise site.impossible("has no parts")
    rank = len(first.shape)
    dim = site.argument(1, "dim", 0) % (rank + (site.name == "stack"))
    split = first.split
    assert split is not None
    along = site.name != "stack" and dim == split.dim
    parts: list[Operand | Part] = []
    segments: list[int] = []
    for operand in tensors:
        if operand.split is None:
            parts.append(cut_operand(operand, Split(split.dim, (operand.shape[split.dim],)) if along else split))
            segments.append(operand.shape[split.dim])
            continue
        if operand.split.dim != split.dim or (not along and operand.split.segments != split.segments):
            raise site.impossible("meets parts that are cut differently")
        parts.append(operand)
        segments += operand.split.segments
    if any(isinstance(part, Part) for part in parts):
        site.set_argument(0, "tensors", parts)
    if not along:
        return split.at(split.dim + (site.name == "stack" and dim <= split.dim))
    return Split(dim, tuple(segments))


def pixel_shuffle(site: Site) -> Outcome:
    """Groups of channels become pixels: whole groups must be on one rank."""
    operand = site.first()
    split = site.split_of(operand)
    group = site.argument(1, "upscale_factor") ** 2
    if split.dim != len(operand.shape) - 3 or any(s % group or s // group % site.ranks for s in split.segments):
        raise site.impossible("makes pixels of channels that are on several ranks")
    return Split(split.dim, tuple(s // group for s in split.segments))


def tell(site: Site) -> Outcome:
    """Shapes and sizes are told as those of the full tensor."""
    operand = site.first()
    if site.name in HARMLESS:
        return None
    dim = site.argument(1, "dim")
    if site.name == "size" and dim is not None:
        site.answer = operand.shape[dim]
        site.aware = dim % len(operand.shape) == site.split_of(operand).dim
        return None
    site.aware = True
    if site.name in ("size", "get_shape"):
        site.answer = torch.Size(operand.shape)
    elif site.name in ("numel", "nelement"):
        site.answer = math.prod(operand.shape)
    else:
        site.answer = operand.shape[0]
    return None


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(["view", "reshape"], view),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "t", "get_T", "get_mT", "get_H", "get_mH"], transpose),
    **dict.fromkeys(["split", "chunk", "split_with_sizes"], pieces),
    **dict.fromkeys(["unbind", "select"], without_dim),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], cat),
    **dict.fromkeys([*HARMLESS, "size", "get_shape", "numel", "nelement", "len"], tell),
    **dict.fromkeys(["movedim", "moveaxis"], movedim),
    "flatten": flatten,
    "unflatten": unflatten,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "permute": permute,
    "expand": expand,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "getitem": getitem,
    "pixel_shuffle": pixel_shuffle,
}

ALL_RULES: dict[str, Rule] = {**RULES, **SHAPE_RULES}
