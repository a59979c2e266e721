"""Tensors of any layout: whether two hold the same, and one that is given what another holds."""

from typing import Any

import torch

_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same in the same layout; a sparse one's zeros by where they are kept."""
    if one.layout is torch.strided and other.layout is torch.strided:
        return torch.equal(one, other)
    if one.layout is not other.layout or one.shape != other.shape:
        return False
    return all(map(torch.equal, strided_parts(one), strided_parts(other)))


@torch.no_grad()
def set_values(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor what another of its layout and shape holds; zeros of a sparse one may be elsewhere there."""
    if tensor.layout is torch.sparse_coo:
        tensor.data = value.to(tensor.device, tensor.dtype)
    elif tensor.layout in _COMPRESSED:
        # What is assigned to the data of one of these is lost, without a word.
        tensor.detach().resize_as_sparse_(value).copy_(value)
    else:
        tensor.detach().copy_(value)


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with strides that a tensor consists of: itself, or values and where they are.

    Of one that is made of others (of a class with `__tensor_flatten__`, as those in 8 bits are), these's.
    """
    if tensor.layout is torch.strided:
        if not hasattr(tensor, "__tensor_flatten__"):
            return (tensor,)
        return tuple(part for name in tensor.__tensor_flatten__()[0] for part in strided_parts(getattr(tensor, name)))
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED:
        rows, columns = _COMPRESSED[tensor.layout]
        return rows(tensor), columns(tensor), tensor.values()
    if tensor.layout is torch.jagged:
        jagged: Any = tensor
        return jagged.values(), jagged.offsets()
    return (tensor.to_dense(),)
