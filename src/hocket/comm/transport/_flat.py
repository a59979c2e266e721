"""Between users' tensors (any shape, strides, autograd) and the flat contiguous ones that transports move."""

from collections.abc import Sequence

import torch


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a contiguous 1-d tensor without autograd; a view where strides permit, else a copy."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)
    # Any stride is contiguous for one element, but not every one can be seen as bytes.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put `flat` into `tensor` if it was a copy rather than a view of it."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))


def split(flat: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
    """`flat` in `parts` equal views. Raises ValueError: its length is not a multiple of `parts`."""
    if flat.numel() % parts:
        raise ValueError(f"a tensor of {flat.numel()} elements cannot be divided equally among {parts} ranks")
    each = flat.numel() // parts
    return [flat[i * each : (i + 1) * each] for i in range(parts)]


def cut(flat: torch.Tensor, sizes: int | Sequence[int]) -> Sequence[torch.Tensor]:
    """Return views of `flat` of the given sizes, or of one size each but for a shorter last."""
    views: Sequence[torch.Tensor] = flat.split(sizes)  # type: ignore[no-untyped-call]
    return views
