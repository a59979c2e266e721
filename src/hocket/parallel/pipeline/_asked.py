"""Has lists, `math` and numpy tell of sizes that they are given: they take what a number is without asking it."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import math
import operator
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..batches import TracedNumber
from ._whole_sizes import size_ints

_OURS: Final = ("torch.", "hocket.", "builtins")
_MADE_BY_SIZE: Final = ("arange", "empty", "eye", "full", "identity", "linspace", "ones", "tri", "zeros")


class IndexedList(list[Any]):
    """A list whose entries are taken by numbers that are settled."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(settled_index(key))


class IndexedTuple(tuple[Any, ...]):
    """A tuple whose entries are taken by numbers that are settled."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(settled_index(key))


def settled_index(key: Any) -> Any:
    """Return an index as an ordinary number, or a slice of such, after each batch is to give the same."""
    if isinstance(key, slice):
        return slice(*map(_settled, (key.start, key.stop, key.step)))
    return _settled(key)


@contextlib.contextmanager
def indexed_by_settled(model: torch.nn.Module) -> Iterator[None]:
    """Open a block where lists and tuples, of which code takes entries by what it computes, settle what that is.

    Those are in attributes of the model's modules and global names of the files that define them.
    """
    held = [(vars(home), _names_in(str(getattr(home, "__file__", "")))) for home in _homes(model)]
    for module in model.modules():
        kind: Any = type(module)
        held.append((vars(module), _taken_from(kind)))
    put: list[tuple[dict[str, Any], str, Any, Any]] = []
    for holder, names in held:
        for name in holder.keys() & names:
            if type(value := holder[name]) is list:
                put.append((holder, name, value, IndexedList(value)))
            elif type(value) is tuple:
                put.append((holder, name, value, IndexedTuple(value)))
    for holder, name, _, stand_in in put:
        holder[name] = stand_in
    try:
        yield
    finally:
        for holder, name, value, stand_in in put:
            if holder.get(name) is stand_in:
                holder[name] = value
            if type(value) is list and (len(value) != len(stand_in) or not all(map(operator.is_, value, stand_in))):
                value[:] = list(stand_in)


def number_functions(model: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Return functions that take numbers without asking them, by owner and name, and what is to stand for them."""
    homes = _homes(model)
    for name, function in vars(math).items():
        if callable(function):
            stand_in = _computing(function)
            yield math, name, stand_in
            for home in homes:  # `from math import log`
                yield from ((home, own, stand_in) for own, one in list(vars(home).items()) if one is function)
    yield from size_ints(homes)
    for name in _MADE_BY_SIZE:
        yield np, name, _settling(vars(np)[name])


def _homes(model: torch.nn.Module) -> list[ModuleType]:
    """Return the files of the user's that define the classes of a model's modules."""
    names = sorted({type(module).__module__ for module in model.modules()})
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith(_OURS)]


@functools.cache
def _taken_from(kind: Any) -> frozenset[str]:
    """Return the names in the code of a class of the user's of what it takes entries of by what it computes."""
    found: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith(_OURS):
            with contextlib.suppress(TypeError, OSError):
                found |= _names_in(inspect.getfile(base))
    return frozenset(found)


@functools.cache
def _names_in(file: str) -> frozenset[str]:
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return frozenset()
    taken = [one.value for one in nodes if isinstance(one, ast.Subscript) and not isinstance(one.slice, ast.Constant)]
    attributes = {one.attr for one in taken if isinstance(one, ast.Attribute)}
    return frozenset(attributes | {one.id for one in taken if isinstance(one, ast.Name)})


def _computing(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        one = next((one for one in tree_leaves(args) if isinstance(one, TracedNumber)), None)
        if one is None or kwargs:
            return function(*args, **kwargs)
        return one.recorder.computed(function, args)

    return call


def _settling(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*tree_map(_settled, args), **tree_map(_settled, kwargs))

    return call


def _settled(value: Any) -> Any:
    if not isinstance(value, TracedNumber):
        return value
    return int(value) if isinstance(value, int) else value.__float__()  # type: ignore[attr-defined]
