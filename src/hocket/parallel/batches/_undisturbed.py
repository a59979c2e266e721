"""Runs of a model that leave no trace in it, nor in random numbers."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hocket.comm import torch_adapter
from hocket.sharding import same_values, set_values

from ._generators import is_generator, set_state, state_of
from ._rng import restored

_OWN = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, set, OrderedDict)  # the last holds hooks, which a model may register when it is run first


@contextlib.contextmanager
def undisturbed(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Open a block after which buffers, attributes and modes of modules, and random states, are as they were.

    Attributes that are lists, dicts, sets, tensors or generators of random numbers have their contents put back, too;
    what lies deeper is not seen.
    """
    inner = list({id(one): one for module in modules for one in module.modules()}.values())
    scripted = [one for one in inner if isinstance(one, torch.jit.ScriptModule)]  # their attributes are not Python's
    held = [(buffer, _copy(buffer)) for one in scripted for buffer in one.buffers(recurse=False)]
    inner = [one for one in inner if not isinstance(one, torch.jit.ScriptModule)]
    kept = [(one, dict(vars(one)), dict(one._buffers), [(v, _copy(v)) for v in _changeable(one)]) for one in inner]
    devices = sorted({p.device for one in inner for p in one.parameters(recurse=False) if p.is_cuda}, key=str)
    with restored(), torch_adapter.unsaved(), torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for buffer, copy in held:
                _put_back(buffer, copy)
            for one, attributes, buffers, contents in kept:
                for name in vars(one).keys() - attributes.keys():
                    del one.__dict__[name]
                one.__dict__.update({name: value for name, value in attributes.items() if name not in _OWN})
                one._buffers.clear()
                one._buffers.update(buffers)
                for value, copy in contents:
                    _put_back(value, copy)


@contextlib.contextmanager
def unaltered(values: Sequence[Any]) -> Iterator[None]:
    """Open a block after which tensors, lists, dicts, sets and generators of random numbers have their old contents.

    Other values are left alone, and what lies deeper is not seen.
    """
    contents = [(one, _copy(one)) for one in values if _has_contents(one)]
    try:
        yield
    finally:
        for one, copy in contents:
            _put_back(one, copy)


def _has_contents(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list) or is_generator(value) or type(value) in _CONTAINERS


def _changeable(module: torch.nn.Module) -> list[Any]:
    values = [*module._buffers.values(), *(v for name, v in vars(module).items() if name not in _OWN)]
    return [v for v in values if _has_contents(v)]


def _copy(value: Any) -> Any:
    if is_generator(value):
        return state_of(value)
    if isinstance(value, list):
        return list(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            if value.shape != copy.shape:
                value.set_(copy)
            elif not same_values(value, copy):  # what back-propagation needs may not be written to, be it the same
                set_values(value, copy)
    elif is_generator(value):
        set_state(value, copy)
    elif isinstance(value, list):
        if len(value) != len(copy) or any(a is not b for a, b in zip(value, copy, strict=True)):
            value[:] = copy
    else:
        value.clear()
        value.update(copy)
