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


_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def options(kind: Any, opts: Any, *more: Any, **named: Any) -> Any:
    """Return options of `kind`: `opts` if it is such, or made of what callers of a process group give in their place.

    Args:
        kind: A class of c10d's options.
        opts: Such, None, another kind with an operator, or the first of `more`.
        more: A root, an operator and a time-out, as torch's overloads have them one after the other.
        named: The same by torch's names.

    Raises:
        TypeError: the operation has no such option.
    """
    if isinstance(opts, kind) and not more and not named:
        return opts
    made = kind()
    for value in (opts, *more):
        if isinstance(value, ReduceOp | ReduceOp.RedOpType):
            named["op"] = value
        elif isinstance(value, timedelta):
            named["timeout"] = value
        elif isinstance(value, int):
            named["root"] = value
        elif hasattr(value, "reduceOp"):
            made.reduceOp, made.asyncOp, made.timeout = value.reduceOp, value.asyncOp, value.timeout
        elif value is not None:
            raise TypeError(f"{value!r} is none of {kind.__name__}, and neither a root, an operator nor a time-out")
    for word, value in named.items():
        if word not in _FIELDS or not hasattr(made, _FIELDS[word]):
            raise TypeError(f"{kind.__name__} have no {word!r}")
        if value is not None:
            setattr(made, _FIELDS[word], value)
    return made


def check_whole(tensor: Tensor) -> None:
    """Raise TypeError for a quantized tensor, and for a DTensor, whose operations are collectives themselves."""
    if tensor.is_quantized:
        raise TypeError(
            "the hocket backend moves numbers, not quantized ones, whose scales it would lose: pass int_repr() or "
            "dequantize() of the tensor"
        )
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
