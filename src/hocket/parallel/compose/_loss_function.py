"""What a loss function can be seen to use: modules, and what it keeps from call to call."""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..batches import unaltered

_DEPTH = 3
_FEW = 64  # values of a list or dict, in whose contents state may be
_LARGE = 2**24  # elements of a tensor that is no state, but data


def modules_in(function: Any, depth: int = _DEPTH) -> list[torch.nn.Module]:
    """Return the modules that a loss function is, or that it can be seen to use: its own names, closure and object."""
    if isinstance(function, torch.nn.Module):
        return [function]
    used = [one for one, _ in _used(function)]
    if not isinstance(function, types.FunctionType | types.MethodType | functools.partial):
        used = [one for one in used if isinstance(one, torch.nn.Module) or hasattr(function, "__wrapped__")]
    found = {id(one): one for use in used if depth for one in modules_in(use, depth - 1)}
    return list(found.values())


@contextmanager
def as_before(function: Any) -> Iterator[None]:
    """Open a block after which what a loss function keeps, but in modules, is as it was.

    Names that functions of its file assign there or in a closure, attributes of objects whose class that file has, and
    contents of tensors, lists and dicts that these hold. What libraries keep, as what they have loaded, is left alone.
    """
    places: list[tuple[Any, Callable[[Any], None]]] = []
    values: dict[int, Any] = {}
    home = getattr(function, "__module__", None)
    todo: list[tuple[Any, int]] = [(function, _DEPTH)]
    while todo:
        one, depth = todo.pop()
        if isinstance(one, torch.nn.Module):
            continue
        if type(one) in (list, dict) and len(one) <= _FEW:
            values |= {id(value): value for value in (one.values() if type(one) is dict else one)}
        for value, put in _used(one) if depth and id(one) not in values and _is_of(one, home) else ():
            places += [(value, put)] if put is not None else []
            todo.append((value, depth - 1))
        values[id(one)] = one
    kept = [one for one in values.values() if not isinstance(one, torch.Tensor) or one.numel() <= _LARGE]
    with ExitStack() as after:
        for value, put in places:
            after.callback(put, value)
        after.enter_context(unaltered(kept))
        yield


def _is_of(one: Any, home: str | None) -> bool:
    """Return whether a file has a function, or an object's class."""
    if isinstance(one, functools.partial | types.MethodType):
        return True  # what they are made of tells
    return (one.__module__ if isinstance(one, types.FunctionType) else type(one).__module__) == home


def _used(function: Any) -> Sequence[tuple[Any, Callable[[Any], None] | None]]:
    """Return what a callable uses, and how another value is put in its place if the callable can do so itself."""
    if isinstance(function, functools.partial):
        return [(one, None) for one in (function.func, *function.args, *function.keywords.values())]
    if isinstance(function, types.MethodType):
        return [(function.__self__, None), (function.__func__, None)]
    if isinstance(function, types.FunctionType):
        if str(function.__module__).startswith(("torch.", "hocket.")):
            return []
        cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        return [
            *((cell.cell_contents, functools.partial(setattr, cell, "cell_contents")) for cell in cells),
            *((function.__globals__[name], functools.partial(_assign, function.__globals__, name)) for name in names),
        ]
    if hasattr(function, "__wrapped__"):
        return [(function.__wrapped__, None)]
    if hasattr(function, "__dict__") and not isinstance(function, type | types.ModuleType):
        held = vars(function)
        return [(value, functools.partial(_assign, held, name)) for name, value in held.items()]
    return []


def _assign(names: dict[str, Any], name: str, value: Any) -> None:
    if names.get(name) is not value:
        names[name] = value
