"""Numbers while a model is followed: sizes, and what is computed from them, are ordinary numbers that know their steps.

What Python must know of one at once (a branch, the length of a loop) is answered from the sample, and a check is put
among the steps that a later batch gives the same answer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx


class OtherBranchError(RuntimeError):
    """A batch takes another way through the model than the sample that it was split with."""

    def __init__(self, check: SameAnswer, value: Any) -> None:
        super().__init__(
            f"{check.what} gave {check.allowed[0]!r} for the sample that the model was split with and gives {value!r} "
            "for this batch, so its code would take another way. Give a sample whose sizes are those of the batches "
            "(Trainer(sample=)), pad batches to the same sizes, or keep what depends on them in one submodule; where "
            "they are numbers in the data and no sizes (which expert takes how many tokens), say "
            "pipeline_parallel_degree = 1"
        )
        self.check, self.value = check, value


class SameAnswer:
    """A step: checks that code which was followed once holds for this batch too, as `how` gives the same answer."""

    __name__ = "check"

    def __init__(self, how: Callable[..., Any], answer: Any, what: str) -> None:
        self.how, self.what = how, what
        self.allowed = [answer]  # answers by which the code gives the same results

    def __call__(self, *values: Any) -> None:
        """Check a batch; OtherBranchError if it gives another answer."""
        value = self.how(*values)
        if value not in self.allowed:
            raise OtherBranchError(self, value)


class Numbers:
    """What numbers ask of the recorder that made them; see `Recorder`."""

    recording: bool

    def computed(self, how: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Return a number that is computed from others."""
        raise NotImplementedError

    def settled(self, how: Callable[..., Any], values: tuple[Any, ...], answer: Any) -> Any:
        """Return the answer, after a check was put among the steps."""
        raise NotImplementedError


class TracedNumber:
    """A number of the sample, and the step that gives it for any batch."""

    recorder: Numbers
    node: fx.Node

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


_METHODS: Final[dict[str, Any]] = {
    **{f"__{name}__": _computing(getattr(operator, name)) for name in ("neg", "abs")},
    **{
        f"__{side}{name}__": _computing(getattr(operator, name), reverse=bool(side))
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
        for side in ("", "r")
    },
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
    "__ceil__": _computing(math.ceil),
    "__floor__": _computing(math.floor),
    "__trunc__": _computing(math.trunc),
    "__round__": _computing(round),
    **{f"__{name}__": _settling(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__{kind.__name__}__": _settling(kind) for kind in (bool, int, float)},
    "__hash__": None,  # as of torch's symbols: what is kept by sizes would be kept for one batch
    "__repr__": lambda self: repr(self.plain()),
    "__format__": lambda self, how: format(self.plain(), how),
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


def traced(value: Any, node: fx.Node, recorder: Numbers) -> Any:
    """Return a number that knows its step; any other value as it is."""
    kind = {bool: TracedBool, int: TracedInt, float: TracedFloat}.get(type(value))
    if kind is None:
        return value
    number = kind(value)
    number.node, number.recorder = node, recorder
    return number
