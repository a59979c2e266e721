"""Between users' tensors (any shape, strides, autograd) and the flat contiguous ones that transports move."""

from collections.abc import Callable, Sequence

import torch


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a contiguous 1-d tensor without autograd; a view where strides permit, else a copy."""
    tensor = tensor.detach()  # which one that only later requires gradients needs, too
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


def apart(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], twins: Callable[[int, int], bool]
) -> Sequence[torch.Tensor]:
    """Return `sources`, or copies of them where a target that is written would change one that others still need.

    Args:
        sources: Flat tensors that an operation reads.
        targets: Flat tensors that it writes, apart from each other.
        twins: Whether the source and the target of these numbers may be one and the same memory.
    """
    spans = [_span(target) for target in targets]
    lowest, highest = min(begin for begin, _ in spans), max(end for _, end in spans)
    for i, source in enumerate(sources):
        begin, end = _span(source)
        if begin < highest and lowest < end:
            for j, span in enumerate(spans):
                if begin < span[1] and span[0] < end and not (span == (begin, end) and twins(i, j)):
                    return [one.clone() for one in sources]
    return sources


def _span(flat: torch.Tensor) -> tuple[int, int]:
    begin = flat.data_ptr()
    return begin, begin + flat.nbytes


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
