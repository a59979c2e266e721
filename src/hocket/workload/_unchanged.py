"""A model that is run to be examined is afterwards as it was: its tensors, its Python state, and all random numbers."""

from __future__ import annotations

import collections
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.sharding import same_values, set_values

Undo = Callable[[], object]
# Registries that torch keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers"}
_HOOKS = sorted(name for name in _OF_TORCH if "hooks" in name)
_SHARED = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, types.CodeType)
_MOST_ITEMS = 10_000  # of a list whose items are looked into: more are data
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_STATELESS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Make a block in which `model` may be run, and after which nothing that it keeps has changed.

    Put back are buffers, modes, gradients (in the block there are none), attributes of all its modules and of what they
    hold (numbers, lists, dicts, sets, arrays, tensors, objects), class attributes that its own classes define, and the
    random numbers of torch, Python and numpy. Hooks that were registered in the block are gone. A lazy module that got
    its parameters in the block keeps them.
    """
    state = _KeptState()
    for module in model.modules():
        state.keep_attributes(module)
        for base in type(module).__mro__:
            if _is_users(base):
                state.keep_class(base)
    numpy_state, python_state = np.random.get_state(legacy=False), random.getstate()
    with without_gradients(model):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            state.put_back()


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Make a block in which a model has no gradients, and after which those and torch's random numbers are as before.

    A lazy module may get its parameters in the block.
    """
    modules = list(model.modules())
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}.values()
    plainly = torch._C.DisableTorchFunction  # a mode of who looks on costs ten times what a gradient's taking does
    with plainly():
        gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
    try:
        with torch.random.fork_rng(devices=sorted({p.device for p in parameters if p.is_cuda}, key=str)):
            yield
    finally:
        with plainly():
            for parameter, gradient in gradients:
                parameter.grad = gradient


def seed(number: int) -> None:
    """Seed torch's random numbers, as `torch.manual_seed` does, on this machine's devices.

    Where there is none but the CPU, that notes the seed, with the stack, for kinds of devices that might yet come.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def plain_values(model: nn.Module) -> dict[str, str]:
    """Return what plain values (numbers, texts, lists of such) decide in a model besides its tensors, by name.

    Those are attributes of its modules and their classes, generators of random numbers among them, and the states of
    Python's and numpy's random numbers.
    """
    found = {"Python's random numbers": repr(random.getstate())}
    found["numpy's random numbers"] = repr(_with_bytes(np.random.get_state(legacy=False)))
    for name, module in model.named_modules():
        owners: list[Any] = [module, *(base for base in type(module).__mro__ if _is_users(base))]
        for owner in owners:
            for key, value in vars(owner).items():
                if key not in _OF_TORCH and not key.startswith("__") and (text := _as_text(value)) is not None:
                    found[f"{name}.{key}".lstrip(".")] = text
    return found


def _with_bytes(state: Any) -> Any:
    """Return a state of random numbers with bytes in the places of arrays, whose text takes a hundred times as long."""
    if isinstance(state, dict):
        return {key: _with_bytes(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _as_text(value: Any, depth: int = 3) -> str | None:
    """Return a text that is equal for equal plain values; None for what is none."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Generator):
        return repr(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return repr(_with_bytes(_bit_generator(value).state))
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | collections.deque) and depth and len(value) <= _MOST_ITEMS:
        return f"{len(value)}: " + ", ".join(_as_text(item, depth - 1) or "" for item in value)
    return None


def _bit_generator(value: Any) -> Any:
    """Return what holds the state of one of numpy's generators."""
    return value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator


def _is_users(kind: type) -> bool:
    home = kind.__module__.partition(".")[0]
    return home not in ("torch", "hocket") and (home not in sys.stdlib_module_names or home in ("__main__", "types"))


class _KeptState:
    """What was found, and how it is put back."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []
        self._kept: list[Any] = []  # so that no id is used twice
        self._seen: set[int] = set()

    def put_back(self) -> None:
        """Put everything back, the outermost first."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def keep_attributes(self, owner: Any) -> None:
        """Keep an object's attributes, and what they hold."""
        attributes, kind = vars(owner), type(owner)
        torchs = _OF_TORCH if isinstance(owner, nn.Module) else frozenset()
        before = {name: value for name, value in attributes.items() if name not in torchs}

        def undo() -> None:
            if type(owner) is kind:
                for name in [n for n in attributes if n not in before and n not in torchs]:
                    del attributes[name]
                attributes.update(before)

        self._undo.append(undo)
        for value in before.values():
            self.keep(value)
        if isinstance(owner, nn.Module):
            # It may register some when it is run first, and note that in an attribute. Lazy modules take theirs out.
            hooks = [found for name in _HOOKS if (found := attributes.get(name)) is not None]
            self._undo.append(partial(_drop_new, [(found, set(found)) for found in hooks]))

    def keep_class(self, owner: type) -> None:
        """Keep the plain values among a class's attributes: a counter of all its instances, say."""
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        kinds = (*_STATELESS, tuple, list, dict, set, torch.Tensor, np.ndarray)
        before = {n: v for n, v in vars(owner).items() if isinstance(v, kinds) and not n.startswith("__")}

        def undo() -> None:
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)

        self._undo.append(undo)
        for value in before.values():
            self.keep(value)

    def keep(self, value: Any) -> None:
        """Keep what is in a value, at any depth."""
        if isinstance(value, _STATELESS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, dict):
            self._undo.append(partial(_refill, value, list(value.items())))
            self._keep_all(value.values())
        elif isinstance(value, list | collections.deque | set):
            self._undo.append(partial(_refill, value, list(value)))
            self._keep_all(value)
        elif isinstance(value, tuple | frozenset):
            self._keep_all(value)
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator | np.random.RandomState):
            drawn = _bit_generator(value)
            self._undo.append(partial(setattr, drawn, "state", drawn.state))
        elif hasattr(value, "__dict__") and not isinstance(value, _SHARED) and _is_users(type(value)):
            self.keep_attributes(value)

    def _keep_all(self, values: Any) -> None:
        items = list(islice(values, _MOST_ITEMS + 1))  # e3nn's tuples have no length
        for value in items if len(items) <= _MOST_ITEMS else ():
            self.keep(value)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or tensor.device.type == "meta" or tensor.is_inference():
            return
        copy = tensor.detach().clone()

        def undo() -> None:
            if not same_values(tensor, copy):  # batch norm writes its statistics without a new version
                set_values(tensor, copy)

        self._undo.append(undo)


def _drop_new(hooks: list[tuple[dict[int, Any], set[int]]]) -> None:
    for found, before in hooks:
        for key in found.keys() - before:
            del found[key]


def _refill(held: Any, items: list[Any]) -> None:
    now, then = _flat(list(held.items() if isinstance(held, dict) else held)), _flat(items)
    if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
        held.clear()
        (held.update if isinstance(held, dict | set) else held.extend)(items)


def _flat(items: list[Any]) -> list[Any]:
    """Return items, and of pairs of a dict both."""
    return [one for item in items for one in (item if type(item) is tuple else (item,))]
