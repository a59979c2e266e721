"""Refuses what a pipeline cannot see of a model's Python code, which was followed once: attributes that change."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ._trace import SplitError

_PLAIN = (bool, int, float, complex, str, type(None))


class SettledAttributes:
    """The attributes that code reads of modules that were looked into, as they were when the model was split.

    Numbers and words, lists and dicts of such, tensors, and the fields of objects that hold settings. `whole` are names
    of modules whose own code runs in every step.
    """

    def __init__(self, model: torch.nn.Module, whole: Iterable[str]) -> None:
        apart = tuple(f"{name}." for name in whole)
        self._kept: list[tuple[str, dict[str, Any], str, Any]] = []
        self._trained = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # which training changes
        for name, module in model.named_modules():
            if type(module).__module__.startswith(("torch.", "hocket.")) or f"{name}.".startswith(apart):
                continue
            kind: Any = type(module)
            words = _read(kind)
            for key, value in list(vars(module).items()):
                if key == "training" or key not in words:
                    continue
                self._keep(f"{name}.{key}".lstrip("."), vars(module), key)
                if _is_settings(value):
                    for field in vars(value).keys() & words:
                        self._keep(f"{name}.{key}.{field}".lstrip("."), vars(value), field)

    def _keep(self, name: str, held: dict[str, Any], key: str) -> None:
        seen = self._seen(held[key])
        if seen is not _UNSEEN:
            self._kept.append((name, held, key, seen))

    def _seen(self, value: Any) -> Any:
        """Return what says whether a value has changed."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            settled = id(value) in self._trained or value.is_inference()
            return torch.Tensor, id(value), 0 if settled else value._version
        if type(value) in (list, tuple, dict) and len(value) <= _MOST:
            leaves = [leaf for pair in value.items() for leaf in pair] if type(value) is dict else value
            found = tuple(self._seen(leaf) for leaf in leaves)
            return _UNSEEN if any(one is _UNSEEN for one in found) else (type(value), found)
        return _UNSEEN

    def check(self) -> None:
        """Check that they are what they were, some 20 us for a thousand; SplitError if one is not."""
        for name, held, key, before in self._kept:
            value = held.get(key)
            if value is before:  # numbers and words, as a rule
                continue
            now = self._seen(value)
            if now != before:
                raise SplitError(
                    f"{name} {_told(before, now)}; its code, which "
                    "was followed once, would not see that. Set it before the model is split, keep it in a buffer, or "
                    "plan with data or tensor parallelism, which run the code as it is"
                )


class _Unseen:
    """What stands for a value of which nobody can say whether it has changed."""


_UNSEEN = _Unseen()
_NOT_RUN = "__init__", "get_extra_state", "set_extra_state"
_MOST = 256  # entries of a list that are looked at


def _is_settings(value: Any) -> bool:
    """Return whether a value is an object of the program's, or of another library's, that holds settings."""
    own = type(value).__module__.startswith(("torch.", "hocket.", "builtins"))
    return not own and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type | torch.Tensor)


def _told(before: Any, now: Any) -> str:
    plain = type(before) in _PLAIN and type(now) in _PLAIN
    when = "the model was split into stages"
    return f"was {before!r} when {when} and is {now!r} now" if plain else f"has changed since {when}"


@functools.cache
def _read(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class of the user's use, but for those that make and load it."""
    methods = (
        (name, getattr(one, "__code__", None))
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "hocket.", "builtins"))
        for name, one in vars(base).items()
    )
    return frozenset(word for name, code in methods if code and name not in _NOT_RUN for word in code.co_names)
