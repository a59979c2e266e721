"""Walks through structures of tuples, lists, mappings and dataclasses that hold tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for child in children(value) for tensor in tensors_in(child)]


def called(model: Callable[..., Any], inputs: Any) -> Any:
    """Return what a model gives for its inputs: a mapping holds keywords, anything else the positional ones."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a structure like `value` with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: mapped(value[key], change) for key in _keys(value)})
    if isinstance(value, tuple | list):
        return like_sequence(value, [mapped(item, change) for item in value])
    if is_dataclass(value):
        parts = {name: mapped(getattr(value, name), change) for name in value.__dataclass_fields__}
        return like_dataclass(value, parts)
    return value


def views_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a flat tensor, one after the other, as views that have the shapes of some tensors."""
    parts = torch.split(flat, [one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]


def like_mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `value`, if such can be made, with the contents of `parts`."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    if not (rows := hasattr(value, "auto_batch_size_")):
        twin: Any = copy.copy(value)
    else:  # a TensorDict, whose entries are as long as it says: the parts may have fewer rows
        twin = value.empty()  # type: ignore[attr-defined]
        twin.batch_size = ()
    for key, part in parts.items():
        twin[key] = part
    if rows:
        twin.auto_batch_size_(value.batch_dims)  # type: ignore[attr-defined]
    return twin


def like_sequence(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Return a list, tuple or named tuple as `value` is, with other items."""
    if isinstance(value, list):
        return items
    make: Any = getattr(type(value), "_make", tuple)  # of named tuples, whose constructors may look at the items
    return make(items)


def like_dataclass(value: Any, parts: Mapping[str, Any]) -> Any:
    """Return a dataclass as `value` is, frozen or not, with other fields."""
    twin = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(twin, name, part)
    return twin


def children(value: Any) -> Collection[Any]:
    """Return what is in a tuple, list, mapping or dataclass; nothing for anything else."""
    if isinstance(value, Mapping):
        return [value[key] for key in _keys(value)]
    if isinstance(value, tuple | list):
        return value
    if is_dataclass(value):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return ()


def _keys(value: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of a mapping; of one that is a dataclass as its fields are, for copies of it have them so.

    A TensorDict gives its rows if one iterates over it.
    """
    fields = [name for name in getattr(value, "__dataclass_fields__", ()) if name in value]
    return [*fields, *(key for key in value.keys() if key not in fields)]  # noqa: SIM118


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an object of a dataclass."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, type)
