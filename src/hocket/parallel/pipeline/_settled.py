"""Refuses what a pipeline cannot see of a model's Python code, which was followed once: attributes that change."""

import functools
from collections.abc import Iterable

import torch

from ._trace import SplitError

_PLAIN = (bool, int, float, complex, str, type(None))


class SettledAttributes:
    """The plain attributes that code reads of modules that were looked into, as they were when the model was split.

    Args:
        model: the user's.
        whole: names of modules whose own code runs in every step.
    """

    def __init__(self, model: torch.nn.Module, whole: Iterable[str]) -> None:
        apart = tuple(f"{name}." for name in whole)
        self._kept = [
            (f"{name}.{key}".lstrip("."), vars(module), key, value)
            for name, module in model.named_modules()
            if not type(module).__module__.startswith(("torch.", "hocket.")) and not f"{name}.".startswith(apart)
            for key, value in vars(module).items()
            if key != "training" and type(value) in _PLAIN and key in _read(type(module))  # type: ignore[arg-type]
        ]

    def check(self) -> None:
        """Check that they are what they were: some 20 us for a thousand.

        Raises:
            SplitError: one is not.
        """
        for name, held, key, value in self._kept:
            now = held.get(key, value)
            if now is not value and now != value:
                raise SplitError(
                    f"{name} was {value!r} when the model was split into stages and is {now!r} now; its code, which "
                    "was followed once, would not see that. Set it before the model is split, keep it in a buffer, or "
                    "plan with data or tensor parallelism, which run the code as it is"
                )


@functools.cache
def _read(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class of the user's use, but for its constructor."""
    methods = (
        (name, getattr(one, "__code__", None))
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "hocket.", "builtins"))
        for name, one in vars(base).items()
    )
    return frozenset(word for name, code in methods if code and name != "__init__" for word in code.co_names)
