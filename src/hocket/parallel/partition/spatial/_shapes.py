"""What rearranges tensors: the divided dim keeps its division wherever it goes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...batches import tensors_in
from ._elementwise import alike
from ._register import rule
from ._site import CannotDivide, Site, full_shape, join_rows, note, rows_like
from ._slabs import Slabs


@rule("cat", "concat", "concatenate")
def concatenate(site: Site, tensors: Any, dim: int = 0) -> Any:
    """torch.cat along another dim than the divided one."""
    ndim = tensors[0].ndim
    mine, slabs = alike(site, list(tensors))
    if (dim - ndim if dim >= 0 else dim) == slabs.dim:
        raise CannotDivide("it joins tensors along the divided dim")
    for tensor in mine:
        if tensor.shape[slabs.dim] != site.mine(slabs):
            raise CannotDivide("it joins tensors of other sizes")
    return note(torch.cat(mine, dim), slabs)


@rule("stack")
def stack(site: Site, tensors: Any, dim: int = 0) -> Any:
    """torch.stack."""
    mine, slabs = alike(site, list(tensors))
    return note(torch.stack(mine, dim), _inserted(slabs, mine[0].ndim, dim))


@rule("unsqueeze")
def unsqueeze(site: Site, input: torch.Tensor, dim: int) -> Any:  # noqa: A002
    """torch.unsqueeze."""
    return note(site.func(input, dim), _inserted(site.slabs(input), input.ndim, dim))


def _inserted(slabs: Slabs, ndim: int, dim: int) -> Slabs:
    place = dim if dim >= 0 else dim + ndim + 1
    return Slabs(slabs.dim - (place > slabs.dim + ndim), slabs.bounds)


@rule("squeeze")
def squeeze(site: Site, input: torch.Tensor, dim: int | None = None) -> Any:  # noqa: A002
    """torch.squeeze of one dim that is not the divided one."""
    slabs = site.slabs(input)
    if dim is None or (place := dim - input.ndim if dim >= 0 else dim) == slabs.dim:
        raise CannotDivide("it may take the divided dim away")
    made = input.squeeze(place)
    gone = made.ndim < input.ndim and place > slabs.dim
    return note(made, Slabs(slabs.dim + gone, slabs.bounds))


@rule("permute")
def permute(site: Site, input: torch.Tensor, *dims: Any) -> Any:  # noqa: A002
    """torch.permute."""
    order = list(dims[0]) if dims and isinstance(dims[0], tuple | list) else list(dims)
    slabs, ndim = site.slabs(input), input.ndim
    place = [d % ndim for d in order].index(slabs.dim + ndim)
    return note(input.permute(order), Slabs(place - ndim, slabs.bounds))


@rule("transpose", "swapaxes", "swapdims")
def transpose(site: Site, input: torch.Tensor, dim0: int, dim1: int) -> Any:  # noqa: A002
    """torch.transpose."""
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(site, input, order)


@rule("movedim", "moveaxis")
def move_dim(site: Site, input: torch.Tensor, source: int, destination: int) -> Any:  # noqa: A002
    """torch.movedim of one dim."""
    if not (isinstance(source, int) and isinstance(destination, int)):
        raise CannotDivide("it moves several dims")
    order = list(range(input.ndim))
    order.insert(destination % input.ndim, order.pop(source % input.ndim))
    return permute(site, input, order)


@rule("flatten")
def flatten(site: Site, input: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:  # noqa: A002
    """torch.flatten of dims before or after the divided one."""
    slabs, ndim = site.slabs(input), input.ndim
    start, end = start_dim % ndim, end_dim % ndim
    place = slabs.dim + ndim
    if start <= place <= end and start < end:
        raise CannotDivide("the divided dim is flattened")
    return note(input.flatten(start, end), Slabs(slabs.dim + (end - start if place < start else 0), slabs.bounds))


@rule("view", "reshape")
def reshape(site: Site, input: torch.Tensor, *shape: Any) -> Any:  # noqa: A002
    """torch.reshape that leaves the divided dim and what comes after it as they are."""
    sizes = list(shape[0]) if shape and isinstance(shape[0], tuple | list) else list(shape)
    slabs = site.slabs(input)
    if not all(isinstance(size, int) for size in sizes):
        raise CannotDivide("it is viewed as another type")
    if len(sizes) < -slabs.dim or sizes[slabs.dim :] != list(full_shape(input)[slabs.dim :]):
        raise CannotDivide("the divided dim is reshaped")
    sizes[slabs.dim] = site.mine(slabs)
    if -1 in sizes:  # which torch cannot find for a slab that is empty
        known = torch.Size(size for size in sizes[: slabs.dim] if size != -1).numel()
        sizes[sizes.index(-1)] = torch.Size(input.shape[: slabs.dim]).numel() // known
    return note(site.func(input, sizes), slabs)


@rule("chunk", "split", "unbind", "tensor_split", "narrow", "select", "index_select", "flip", "roll")
def divide_another(site: Site, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """What takes parts of a tensor along one dim that is not the divided one."""
    slabs, ndim = site.slabs(input), input.ndim
    place = {"chunk": 1, "split": 1, "tensor_split": 1, "roll": 1}.get(site.name, 0)
    dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else 0))
    dims = (dim,) if isinstance(dim, int) else tuple(dim) if isinstance(dim, tuple | list) else (slabs.dim,)
    if any((d - ndim if d >= 0 else d) == slabs.dim for d in dims) or (site.name == "roll" and len(args) < 2):
        raise CannotDivide("it works along the divided dim")
    made = site.func(input, *args, **kwargs)
    for tensor in tensors_in(made):
        gone = tensor.ndim < ndim and (dims[0] - ndim if dims[0] >= 0 else dims[0]) > slabs.dim
        note(tensor, Slabs(slabs.dim + gone, slabs.bounds))
    return made


@rule("getitem")
def get_item(site: Site, input: torch.Tensor, index: Any) -> Any:  # noqa: A002
    """Indexing by numbers, slices, None and ...; the divided dim by slices of step 1 only."""
    slabs, ndim = site.slabs(input), input.ndim
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(one, int | slice | None) or one is Ellipsis for one in given):
        raise CannotDivide("it is indexed by tensors")
    used = sum(one is not None and one is not Ellipsis for one in given)
    if Ellipsis in given:
        at = given.index(Ellipsis)
        given[at : at + 1] = [slice(None)] * (ndim - used)
    else:
        given += [slice(None)] * (ndim - used)
    places = [i for i, one in enumerate(given) if one is not None]
    at = places[slabs.dim + ndim]
    mine = given[at]
    if not isinstance(mine, slice):
        raise CannotDivide("one index of the divided dim is taken")
    start, stop, step = mine.indices(slabs.size)
    if step != 1:
        raise CannotDivide("the divided dim is sliced with steps")
    stop = max(start, stop)
    bounds = tuple(min(max(bound, start), stop) - start for bound in slabs.bounds)
    begin, end = slabs.interval(site.world.rank)
    given[at] = slice(min(max(start, begin), end) - begin, min(max(stop, begin), end) - begin)
    made = site.func(input, tuple(given))
    after = sum(not isinstance(one, int) for one in given[at + 1 :])
    return note(made, Slabs(-1 - after, bounds))


@rule("pad")
def pad(site: Site, input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:  # noqa: A002
    """torch.nn.functional.pad; where the divided dim is padded by other than constants, the tensor is gathered for it.

    What comes out is divided again, so that what follows works on slabs.
    """
    slabs = site.slabs(input)
    sides = list(pad)
    at = 2 * (-slabs.dim - 1)
    low, high = (sides[at], sides[at + 1]) if at < len(sides) else (0, 0)
    bounds = (0, *(bound + low for bound in slabs.bounds[1:-1]), slabs.size + low + high)
    outputs = Slabs(slabs.dim, bounds)
    if any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise CannotDivide("it takes whole slabs away")
    if mode == "constant":
        rows = site.fetch(input, [(a - low, b - low) for a, b in outputs.intervals()], value or 0.0)
        if at < len(sides):
            sides[at] = sides[at + 1] = 0
        return note(F.pad(rows, sides, "constant", value), outputs)
    if (low, high) == (0, 0) and all(slabs.length(rank) for rank in range(slabs.ranks)):
        return note(F.pad(input, sides, mode), slabs)
    site.say("gathered", f"padding mode {mode!r} of the divided dim")
    whole = F.pad(site.whole(input), sides, mode)
    return note(site.moved(whole, outputs), outputs)


@rule("pixel_shuffle")
def pixel_shuffle(site: Site, input: torch.Tensor, upscale_factor: int) -> Any:  # noqa: A002
    """torch.nn.functional.pixel_shuffle."""
    slabs = site.slabs(input, 2)
    bounds = tuple(bound * upscale_factor for bound in slabs.bounds)
    if not site.mine(slabs):
        one = F.pixel_shuffle(join_rows(slabs.dim, input, rows_like(input, slabs.dim, 1)), upscale_factor)
        return note(one.narrow(slabs.dim, 0, 0), Slabs(slabs.dim, bounds))
    return note(F.pixel_shuffle(input, upscale_factor), Slabs(slabs.dim, bounds))


@rule("pixel_unshuffle")
def pixel_unshuffle(site: Site, input: torch.Tensor, downscale_factor: int) -> Any:  # noqa: A002
    """torch.nn.functional.pixel_unshuffle, after moving slabs' borders to multiples of the factor."""
    slabs = site.slabs(input, 2)
    outputs = Slabs(slabs.dim, tuple(bound // downscale_factor for bound in slabs.bounds))
    blocks = Slabs(slabs.dim, tuple(bound * downscale_factor for bound in outputs.bounds))
    if blocks.size != slabs.size:
        raise CannotDivide(f"{slabs.size} is no multiple of {downscale_factor}")
    rows = site.moved(input, blocks)
    if not site.mine(blocks):
        rows = join_rows(slabs.dim, rows, rows_like(rows, slabs.dim, downscale_factor))
        return note(F.pixel_unshuffle(rows, downscale_factor).narrow(slabs.dim, 0, 0), outputs)
    return note(F.pixel_unshuffle(rows, downscale_factor), outputs)


@rule("shape", "get_shape")
def shape(site: Site, input: torch.Tensor) -> Any:  # noqa: A002
    """The shape of the full tensor: the user's code computes with it."""
    return full_shape(input)


@rule("size")
def size(site: Site, input: torch.Tensor, dim: int | None = None) -> Any:  # noqa: A002
    """A size of the full tensor."""
    found = full_shape(input)
    return found if dim is None else found[dim]


@rule("numel", "nelement")
def numel(site: Site, input: torch.Tensor) -> Any:  # noqa: A002
    """The number of the full tensor's elements."""
    return full_shape(input).numel()


@rule("len")
def length(site: Site, input: torch.Tensor) -> Any:  # noqa: A002
    """The first size of the full tensor."""
    return full_shape(input)[0]
