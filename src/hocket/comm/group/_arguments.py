"""c10d's argument conventions: lists of one, options or bare operators, split sizes."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from .. import torch_adapter as c10d
from ..transport import cut


def only(tensors: Any) -> Tensor:
    """Return the one tensor of a list of one (c10d once had several a rank, one for each of its GPUs)."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"the hocket backend takes one tensor a rank, not {len(tensors)}")
    tensor: Tensor = tensors[0]
    return tensor


def only_list(tensors: Any) -> Sequence[Tensor]:
    """Return the one list of tensors of a list of one."""
    if tensors and isinstance(tensors[0], Tensor):
        found: Sequence[Tensor] = tensors
        return found
    if len(tensors) != 1:
        raise ValueError(f"the hocket backend takes one list of tensors a rank, not {len(tensors)}")
    return tensors[0]  # type: ignore[no-any-return]


def options(kind: Any, opts: Any, timeout: timedelta | None = None) -> Any:
    """`opts` as options of `kind`; it may be such, another kind with the same fields, an operator, or None."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if isinstance(opts, ReduceOp | ReduceOp.RedOpType):
        made.reduceOp = opts
    elif opts is not None and hasattr(opts, "reduceOp"):
        made.reduceOp, made.asyncOp, made.timeout = opts.reduceOp, opts.asyncOp, opts.timeout
    if timeout is not None:
        made.timeout = timeout
    return made


def check_whole(tensor: Tensor) -> None:
    """Raise TypeError for a DTensor, whose operations are collectives themselves."""
    if type(tensor) is not Tensor and c10d.is_dtensor(tensor):
        raise TypeError(
            f"the hocket backend moves this rank's own memory, not a DTensor of shape {tuple(tensor.shape)}: pass its "
            "to_local(), or call its redistribute() or full_tensor() in place of the collective"
        )


def check_root(kind: str, root: int, world: int) -> None:
    """Raise ValueError if `root` is no rank of a group of `world`."""
    if not 0 <= root < world:
        raise ValueError(f"{kind}: {root} is no rank of this group, which has ranks 0 to {world - 1}")


def check_list(kind: str, what: str, tensors: Sequence[Tensor], like: Tensor, world: int) -> None:
    """Raise ValueError unless there is a tensor for each rank, each of the elements, type and device of `like`."""
    if len(tensors) != world:
        raise ValueError(f"{kind}: {len(tensors)} {what}s for {world} ranks")
    for r, tensor in enumerate(tensors):
        if tensor.numel() != like.numel():
            raise ValueError(f"{kind}: {what} {r} has {tensor.numel()} elements, the other side has {like.numel()}")
        check_alike(kind, f"{what} {r}", tensor, like)


def check_alike(kind: str, what: str, tensor: Tensor, like: Tensor) -> None:
    """Raise ValueError unless a tensor has the type and device of another."""
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{kind}: {what} is {tensor.dtype} on {tensor.device}, the other side {like.dtype} on {like.device}"
        )


def check_writable(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if elements of a tensor that is to be written share memory, as those of `expand` do.

    Raises:
        TypeError: One of them is a DTensor.
    """
    for tensor in tensors:
        check_whole(tensor)
        if not tensor.is_contiguous() and any(
            step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise ValueError(
                f"{kind}: the result cannot be written to a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}, whose elements share memory; clone() it first"
            )


def check_splits(which: str, tensor: Tensor, sizes: Sequence[int], world: int) -> None:
    """Raise ValueError if `tensor` cannot be split along its first axis as `sizes` says (empty: equally)."""
    if not tensor.dim():
        raise ValueError(f"all_to_all: the {which} has no axis along which it could be divided")
    rows = tensor.size(0)
    if sizes and (len(sizes) != world or sum(sizes) != rows or min(sizes) < 0):
        raise ValueError(
            f"all_to_all: the {which} split sizes {list(sizes)} must be {world} numbers, none below 0, that add up to "
            f"the first axis of the tensor, {rows}"
        )
    if not sizes and rows % world:
        raise ValueError(f"all_to_all: the first axis of the {which}, {rows}, cannot be divided among {world} ranks")


def split_rows(flat: Tensor, tensor: Tensor, sizes: Sequence[int], world: int) -> Sequence[Tensor]:
    """Return views of `flat` (the flat form of `tensor`) for `sizes` rows each (empty: equally many)."""
    rows = tensor.size(0)
    row = flat.numel() // rows if rows else 0
    return cut(flat, [n * row for n in sizes] if sizes else [rows // world * row] * world)
