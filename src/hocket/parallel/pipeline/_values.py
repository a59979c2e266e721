"""What crosses a cut: structures of tensors and plain values, taken apart into a description and flat tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..batches import trees as _trees

Tensor = torch.Tensor


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in a structure, in order."""
    return _trees.tensors_in(values)


def hidden(value: Any, depth: int = 3) -> str:
    """Return the type of an object in a structure in which tensors are that nobody sees here; "" if there is none."""
    if isinstance(value, Tensor | torch.nn.Module | type) or callable(value):
        return ""
    inside = _trees.children(value)
    if not inside and depth and hasattr(value, "__dict__"):
        held = list(vars(value).values())
        return type(value).__name__ if tensors_of(held) or any(hidden(one, depth - 1) for one in held) else ""
    return next(filter(None, (hidden(one, depth) for one in inside)), "")


def described(values: Any) -> Any:
    """Return the structure with meta tensors (shape, type, whether a gradient flows back) instead of tensors."""
    return _trees.mapped(values, _meta)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def pickled(description: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(description)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Has named tuples made again without their constructors: a PackedSequence's refuses tensors of the meta device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(type(value), "_make"):
            return _remade, (type(value), tuple(value))
        return NotImplemented


def _remade(kind: Any, items: tuple[Any, ...]) -> Any:
    return kind._make(items)


def filled(description: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the structure of `description` with these tensors in it."""
    source = iter(tensors)
    return _trees.mapped(description, lambda _: next(source))


def empty_for(description: Any, device: torch.device) -> list[Tensor]:
    """Return tensors to receive into; leaves of the autograd graph where a gradient flows back."""
    return [
        torch.empty(meta.shape, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad)
        for meta in tensors_of(description)
    ]


def leaves(values: Any) -> Any:
    """Return the structure with its tensors cut off from the graph that made them, to collect gradients themselves."""
    return _trees.mapped(values, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def fingerprint(values: Any) -> bytes:
    """Return bytes that are equal for structures that differ in the numbers inside tensors at most."""
    return pickle.dumps(_trees.mapped(values, _shape))


def _shape(tensor: Tensor) -> Any:
    return _Shape(tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)


class _Shape(tuple[Any, ...]):
    """Shape, type and whether a gradient flows; told apart from a user's tuple by its type."""

    def __new__(cls, *parts: Any) -> _Shape:
        return super().__new__(cls, parts)

    def __reduce__(self) -> Any:
        return (_Shape, tuple(self))


def nbytes(values: Any) -> int:
    """Return the bytes of the tensors in a structure."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(values))


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as they are sent: outside the graph, contiguous."""
    return [tensor.detach().contiguous() for tensor in tensors]
