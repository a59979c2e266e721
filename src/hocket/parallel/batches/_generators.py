"""Random generators that an object has of its own: torch's, Python's and numpy's, in all that it is made of."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (str, bytes, int, float, type, ModuleType, torch.Tensor, np.ndarray, type(None))
_DEPTH = 5
_LOOKS = 3  # in an epoch
_MOST_ENTRIES = 100  # of a container: transforms are few, and samples need not be looked through


_GLOBAL: Any = (torch.default_generator, cast(Any, random.random).__self__, cast(Any, np.random.random).__self__)


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator whose state can be had, and none of the global ones."""
    return (
        isinstance(value, _KINDS)
        and not isinstance(value, random.SystemRandom)
        and all(value is not g for g in _GLOBAL)
    )


def state_of(generator: Any) -> Any:
    """Return its state."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    """Make it go on from what `state_of` gave."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def seed(generator: Any, number: int) -> None:
    """Make it begin anew, from 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    else:
        generator.seed(number & 0xFFFFFFFF)


class OwnGenerators:
    """The generators that an object holds, looked for in the first batches of an epoch: a look takes up to some ms."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._epoch: int | None = None
        self._looks_left = 0
        self._found: list[Any] = []

    def of(self, epoch: int) -> list[Any]:
        """Return them, in a batch of that epoch; the first batch may be what makes one."""
        if epoch != self._epoch:
            self._epoch, self._looks_left = epoch, _LOOKS
        if self._looks_left:
            self._looks_left -= 1
            self._found = own_generators(self._root)
        return self._found

    def __reduce__(self) -> Any:
        return OwnGenerators, (self._root,)


def own_generators(*roots: Any) -> list[Any]:
    """Return the generators that objects hold, in an order that does not depend on the process.

    Attributes are looked through, containers that are not long, and what functions and methods name.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            if is_generator(value):
                found[id(value)] = value
            else:
                inner += _inside(value)
        level = inner
    return list(found.values())


def put_back_generators(states: Sequence[Any], *roots: Any) -> None:
    """Make the generators that objects hold go on from states that were taken of as many."""
    if len(found := own_generators(*roots)) == len(states):
        for generator, state in zip(found, states, strict=True):
            set_state(generator, state)


def names_in(code: CodeType) -> Iterable[str]:
    """Return what a function's code names, also in functions and comprehensions within."""
    return [*code.co_names, *(name for one in code.co_consts if isinstance(one, CodeType) for name in names_in(one))]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, FunctionType):
        yield from (value.__globals__.get(name) for name in names_in(value.__code__))
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict | list | tuple):
        if len(value) <= _MOST_ENTRIES:
            yield from value.values() if isinstance(value, dict) else value
    else:
        yield from list(getattr(value, "__dict__", {}).values())
        yield from (one for one in vars(type(value)).values() if isinstance(one, FunctionType))
