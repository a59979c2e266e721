"""Finds what a model's code has kept of the sample somewhere, where a stage of another rank would keep it."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

_DEPTH: Final = 4
_FEW: Final = 64  # entries of a list or dict: more are data
_MOST: Final = 2000  # values that are looked into
_OTHERS: Final = (type, types.ModuleType, types.MethodType, functools.partial, torch.nn.Module, torch.Tensor)
_PLAIN: Final = {bool, int, float, str, torch.Size, torch.dtype, torch.device, types.NoneType}  # no tensors
_OPERATORS: Final = (
    "float complex int bool index array format str neg pos abs round add radd sub rsub mul rmul truediv rtruediv "
    "floordiv rfloordiv mod rmod pow rpow lt le gt ge eq ne getitem len iter"
)


@contextmanager
def unnoted() -> Iterator[None]:
    """Open a block in which no `Leftovers` notes anything: where steps are timed, whose calls it would slow down."""
    current = _get_current_function_mode()  # type: ignore[no-untyped-call]
    with _pop_mode_temporarily() if isinstance(current, Leftovers) else nullcontext():
        yield


class _ValuePlace(NamedTuple):
    """Where a value is."""

    holder: Any
    key: Any  # an attribute's name, where the holder is a cell of a closure

    def read(self) -> Any:
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents
        try:
            return self.holder[self.key]
        except LookupError:
            return None

    def write(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class _NumberElsewhere:
    """Stands for a number or a tensor that another rank has: what is computed with it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(of_another_rank(self._name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse

    def __torch_function__(self, *_: Any) -> NoReturn:
        self.refuse()

    __hash__ = None  # type: ignore[assignment]


for _name in _OPERATORS.split():
    setattr(_NumberElsewhere, f"__{_name}__", _NumberElsewhere.refuse)


def of_another_rank(what: str) -> str:
    """Return the error of a loss or metric that computes with what another rank's layers keep."""
    return (
        f"the loss function, or a metric, computes with {what} that the model's code kept when the model was cut into "
        "stages, in an attribute or by a hook say, and the stages of the rank that computes the loss keep none again: "
        "have the model's forward return what the loss needs, or take a plan without a pipeline"
    )


class Leftovers(TorchFunctionMode):
    """Notes what functions make while it is on; what is there long after is kept by the program.

    Those are tensors, and numbers and tensors in the attributes of modules, also where the attribute has again what it
    had before (stages call no code of the model's that would set it), and numbers in what hooks, forwards and the loss
    function can be seen to use: their closures, global names, and the lists, dicts and objects that these hold.

    Args:
        model: what runs meanwhile.
        loss_fn: what may read what it keeps.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._model, self._loss_fn = model, loss_fn
        self._before: dict[tuple[int, Any], Any] = {}
        self._within: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._written: dict[tuple[int, Any], tuple[str, _ValuePlace]] = {}  # by what is written to while it is on
        self._left: list[tuple[str, _ValuePlace, Any]] | None = None  # with what was there when the model had been cut
        self._after = ExitStack()

    def __enter__(self) -> Any:
        self._before = {(id(place.holder), place.key): place.read() for _, place in self._used()}
        for handle in register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end):
            self._after.callback(handle.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._after.close()
        for name, place in self._used():
            key = id(place.holder), place.key
            if self._before.get(key) is not place.read():
                self._written[key] = f"a number ({name})", place
        self._before = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = type(result)
        if kind is torch.Tensor:  # most that has to do with tensors, and quickly
            if not torch.compiler.is_compiling():
                self._made.append(weakref.ref(result))
        elif kind not in _PLAIN and not torch.compiler.is_compiling():
            self._made += [weakref.ref(one) for one in tree_leaves(result) if type(one) is torch.Tensor]
        return result

    def there(self) -> dict[int, torch.Tensor]:
        """Return the tensors that are there still, by their ids."""
        self._made = [one for one in self._made if one() is not None]
        return {id(tensor): tensor for one in self._made if (tensor := one()) is not None}

    def settle(self) -> None:
        """Take note of the numbers that are there now: that they are is nothing that a stage of this rank has done."""
        self._left = [(name, place, place.read()) for name, place in self._written.values()]

    @contextmanager
    def numbers_apart(self) -> Iterator[None]:
        """Open a block in which what computes with such a number is refused, if no stage of this rank has kept one."""
        put = [(place, left, _NumberElsewhere(name)) for name, place, left in self._left or () if place.read() is left]
        class_has = [place for place, _, _ in put if isinstance(place.holder, dict) and place.key not in place.holder]
        for place, _, stand_in in put:
            place.write(stand_in)
        try:
            yield
        finally:
            for place, left, stand_in in put:
                if place.read() is stand_in:
                    place.write(left)
            for place in class_has:
                if place.read() is None:
                    del place.holder[place.key]

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        if _is_of_torch(module):  # which keeps no numbers of what it is given
            return
        self._within.append((module, {key: value for key, value in vars(module).items() if _may_be_of_samples(value)}))

    def _end(self, module: torch.nn.Module, *_: Any) -> None:
        if _is_of_torch(module):
            return
        other, before = self._within.pop()
        while other is not module:  # which has failed
            other, before = self._within.pop()
        for key, value in vars(module).items():
            if _may_be_of_samples(value) and before.get(key) is not value:
                place = _ValuePlace(vars(module), key)
                what = f"a {'number' if _is_number(value) else 'tensor'} (attribute {key!r} of {type(module).__name__})"
                self._written[id(place.holder), key] = what, place

    def _used(self) -> Iterator[tuple[str, _ValuePlace]]:
        """Return the places of numbers that the program's functions can be seen to use."""
        hooks = [
            hook
            for module in self._model.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        ]
        forwards = {type(module).forward for module in self._model.modules()}
        seen: set[int] = set()
        for function in (self._loss_fn, *hooks, *forwards):
            yield from values_in(function, "", _DEPTH, seen, _is_number)


def values_in(
    value: Any, name: str, depth: int, seen: set[int], meant: Callable[[Any], bool]
) -> Iterator[tuple[str, _ValuePlace]]:
    """Return the places of values in what one holds, or a function can be seen to use, with a name for each.

    Those are `meant`; what was `seen` before is left out.
    """
    if id(value) in seen or not depth or len(seen) > _MOST:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from values_in(part, name, depth, seen, meant)
    for key, place in _held(value):
        one = place.read()
        if meant(one):
            yield f"{name}{key}", place
        elif one is not None:
            yield from values_in(one, f"{name}{key}", depth - 1, seen, meant)


def _parts(value: Any) -> Sequence[Any]:
    """Return what a callable is made of."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    return [value.__wrapped__] if isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__") else []


def _held(value: Any) -> Iterator[tuple[str, _ValuePlace]]:
    if isinstance(value, types.FunctionType):
        if str(value.__module__).startswith(("torch.", "hocket.")):
            return
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield key, _ValuePlace(cell, key)
        for key in value.__code__.co_names:
            if key in value.__globals__:
                yield key, _ValuePlace(value.__globals__, key)
    elif isinstance(value, dict | list | deque) and len(value) <= _FEW:
        for at in value if isinstance(value, dict) else range(len(value)):
            yield f"[{at!r}]", _ValuePlace(value, at)
    elif hasattr(value, "__dict__") and not isinstance(value, _OTHERS):
        for key in list(vars(value)):
            yield f".{key}", _ValuePlace(vars(value), key)


def _is_of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _may_be_of_samples(value: Any) -> bool:
    """Return whether a module's attribute is a number or a tensor, or some tensors, that a forward may have made."""
    if isinstance(value, list | tuple) and 0 < len(value) <= _FEW:
        return any(type(one) is torch.Tensor for one in value)
    return type(value) is torch.Tensor or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, float | complex | np.ndarray | np.generic)
