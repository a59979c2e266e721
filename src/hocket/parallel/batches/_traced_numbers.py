"""Ordinary numbers, as sizes, that know how they are computed, and tell their recorder of a branch on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch


class Numbers:
    """What numbers ask of the recorder that made them.

    Attributes:
        recording: Whether it follows them.
        hashable: Whether they may be keys, as of what is kept by sizes.
    """

    recording: bool
    hashable = False

    def computed(self, how: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Return a number that is computed from others."""
        raise NotImplementedError

    def settled(self, how: Callable[..., Any], values: tuple[Any, ...], answer: Any) -> Any:
        """Return the answer, after a check was put among the steps."""
        raise NotImplementedError

    def spelled(self, number: TracedNumber, text: str) -> str:
        """Return the text of a number, which may become the name of something."""
        return text


class TracedNumber:
    """A number of a batch, and what gives it for any batch: a step, or a function of a size."""

    recorder: Numbers
    node: Any

    def plain(self) -> Any:
        """Return the number alone."""
        if isinstance(self, float):
            return float.__float__(self)
        number = int.__int__(self)  # type: ignore[arg-type]
        return bool(number) if isinstance(self, TracedBool) else number


def plain(value: Any) -> Any:
    """Return the value with ordinary numbers in it."""
    if isinstance(value, TracedNumber):
        return value.plain()
    if type(value) in (tuple, list, torch.Size):
        return type(value)([plain(item) for item in value])
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value


def _computing(how: Callable[..., Any], *, reverse: bool = False) -> Any:
    def method(self: TracedNumber, *others: Any) -> Any:
        if others and isinstance(others[0], list | tuple | str):  # a sequence, so many times
            return how(others[0], self.recorder.settled(int, (self,), self.plain()))
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented
        return self.recorder.computed(how, (*others, self) if reverse else (self, *others))

    return method


def _settling(how: Callable[..., Any]) -> Any:
    def method(self: TracedNumber, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented
        answer = how(*plain((self, *others)))
        return self.recorder.settled(how, (self, *others), answer)

    return method


def _bit_length(number: int) -> int:
    return number.bit_length()


def _hash(self: TracedNumber) -> int:
    if not self.recorder.hashable:  # as torch's symbols: what is kept by sizes would be kept for one batch
        raise TypeError(f"unhashable type: {type(self).__name__!r}")
    return hash(self.plain())


_METHODS: Final[dict[str, Any]] = {
    **{f"__{name}__": _computing(getattr(operator, name)) for name in ("neg", "pos", "abs", "invert")},
    **{
        f"__{side}{name}__": _computing(getattr(operator, f"__{name}__"), reverse=bool(side))
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
        for side in ("", "r")
    },
    "bit_length": _computing(_bit_length),
    **{how.__name__: _settling(how) for how in (int.bit_count, float.is_integer, float.as_integer_ratio)},
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
    "__ceil__": _computing(math.ceil),
    "__floor__": _computing(math.floor),
    "__trunc__": _computing(math.trunc),
    "__round__": _computing(round),
    **{f"__{name}__": _settling(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__{kind.__name__}__": _settling(kind) for kind in (bool, int, float)},
    "__hash__": _hash,
    "__repr__": lambda self: self.recorder.spelled(self, repr(self.plain())),
    "__format__": lambda self, how: self.recorder.spelled(self, format(self.plain(), how)),
    "__reduce_ex__": lambda self, _: (type(self.plain()), (self.plain(),)),
}

TracedInt: Final[Any] = type("TracedInt", (TracedNumber, int), dict(_METHODS))
TracedFloat: Final[Any] = type("TracedFloat", (TracedNumber, float), dict(_METHODS))


class TracedBool(TracedNumber, int):
    """Whether something is so: of use for a function, while a branch on it is settled."""

    def __bool__(self) -> bool:
        return bool(self.recorder.settled(bool, (self,), self.plain()))

    def __reduce_ex__(self, _: Any) -> Any:
        return bool, (self.plain(),)


def traced(value: Any, node: Any, recorder: Numbers) -> Any:
    """Return a number that knows what gives it; any other value as it is."""
    kind = {bool: TracedBool, int: TracedInt, float: TracedFloat}.get(type(value))
    if kind is None:
        return value
    number = kind(value)
    number.node, number.recorder = node, recorder
    return number
