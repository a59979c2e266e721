"""Refuses what a pipeline cannot see of a model's Python code, which was followed once: what changes after that."""

import enum
import functools
from collections.abc import Iterable
from typing import Any

import torch

from hocket.comm import torch_adapter

from ._trace import SplitError

_PLAIN = (bool, int, float, complex, str, type(None))
_OURS = ("torch.", "hocket.")


class SettledModules:
    """The code of modules that were looked into, and what it reads of them, as they were when the model was split.

    That is their class, a forward of their own, the program's hooks, buffers, and attributes: numbers and words, lists
    and dicts of such, tensors, functions, objects that hold settings, and their fields. `whole` are names of modules
    whose own code runs in every step.
    """

    def __init__(self, model: torch.nn.Module, whole: Iterable[str]) -> None:
        self._model, self._apart = model, tuple(f"{name}." for name in whole)
        self.note()

    def note(self) -> None:
        """Take the model as it is now for what it has to stay."""
        model = self._model
        self._kept: list[tuple[str, dict[str, Any], str, Any]] = []
        self._code: list[tuple[str, torch.nn.Module, Any]] = []
        self._trained = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # which training changes
        for name, module in model.named_modules():
            if f"{name}.".startswith(self._apart):
                continue
            self._code.append((name or type(module).__name__, module, _code_of(module)))
            for key in module._buffers:
                self._keep(f"{name}.{key}".lstrip("."), module._buffers, key)
            kind: Any = type(module)
            if kind.__module__.startswith(_OURS):
                continue
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
            return torch.Tensor, id(value), 0 if id(value) in self._trained else torch_adapter.version_of(value)
        if type(value) in (list, tuple, dict) and len(value) <= _MOST:
            leaves = [leaf for pair in value.items() for leaf in pair] if type(value) is dict else value
            found = tuple(self._seen(leaf) for leaf in leaves)
            return _UNSEEN if any(one is _UNSEEN for one in found) else (type(value), found)
        fixed = callable(value) or isinstance(value, enum.Enum | torch.dtype | torch.device) or _is_settings(value)
        return value if fixed else _UNSEEN

    def check(self) -> None:
        """Check that they are what they were, some 20 us for a thousand attributes; SplitError if one is not."""
        for name, module, code in self._code:
            if _code_of(module, code[1]) != code:
                raise SplitError(f"{name} has got another class, forward or hook since {_WHEN}{_UNSEEN_BY}")
        for name, held, key, before in self._kept:
            value = held.get(key)
            if value is before:  # numbers and words, as a rule
                continue
            now = self._seen(value)
            if now != before:
                raise SplitError(f"{name} {_told(before, now)}{_UNSEEN_BY}")


class _Unseen:
    """What stands for a value of which nobody can say whether it has changed."""


_UNSEEN = _Unseen()
_WHEN = "the model was split into stages"
_UNSEEN_BY = (
    "; the model's code, which was followed once, would not see that. Set it before the model is split, keep numbers "
    "in a buffer, which is filled in place, or plan with data or tensor parallelism, which run the code as it is"
)
_NOT_RUN = "__init__", "get_extra_state", "set_extra_state"
_MOST = 256  # entries of a list that are looked at


def _is_settings(value: Any) -> bool:
    """Return whether a value is an object of the program's, or of another library's, that holds settings."""
    own = type(value).__module__.startswith((*_OURS, "builtins"))
    return not own and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type | torch.Tensor)


def _code_of(module: torch.nn.Module, known: Any = None) -> Any:
    """Return what runs when a module is called; what stands for a pipeline's model counts as the forward `known`."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = [hook for one in kinds for hook in one.values()]
    theirs = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_OURS)]
    forward = vars(module).get("forward")
    return type(module), known if type(forward).__module__.startswith(_OURS) else forward, theirs


def _told(before: Any, now: Any) -> str:
    plain = type(before) in _PLAIN and type(now) in _PLAIN
    return f"was {before!r} when {_WHEN} and is {now!r} now" if plain else f"has changed since {_WHEN}"


@functools.cache
def _read(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class of the user's use, but for those that make and load it."""
    methods = (
        (name, getattr(one, "__code__", None))
        for base in kind.__mro__
        if not base.__module__.startswith((*_OURS, "builtins"))
        for name, one in vars(base).items()
    )
    return frozenset(word for name, code in methods if code and name not in _NOT_RUN for word in code.co_names)
