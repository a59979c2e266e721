"""Takes a step that was noted with other values: the arguments, casts and gradients of the model's forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def computed(node: fx.Node, root: torch.nn.Module, value_of: Callable[[fx.Node], Any]) -> Any:
    """Take one step with the values of its arguments: with gradients and casts as in the model's forward."""
    args, kwargs = given(node.args, value_of), given(node.kwargs, value_of)
    if node.op == "call_module":
        function: Any = root.get_submodule(str(node.target))
    else:
        function = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        args = args[1:] if isinstance(node.target, str) else args
    grad, cast = node.meta.get("within", (True, None))
    if grad and cast is None:
        return function(*args, **kwargs)
    with contextlib.nullcontext() if grad else torch.no_grad():
        if cast is None:
            return function(*args, **kwargs)
        with torch.autocast(*cast):
            return function(*args, **kwargs)


def given(noted: Any, value_of: Callable[[fx.Node], Any]) -> Any:
    """Return arguments as they were noted, with values for their nodes: in lists and dicts that a callee may change."""
    if isinstance(noted, fx.Node):
        return value_of(noted)
    if isinstance(noted, tuple | list):
        items = (given(item, value_of) for item in noted)
        return tuple(items) if isinstance(noted, tuple) else list(items)
    if isinstance(noted, dict):
        return {key: given(item, value_of) for key, item in noted.items()}
    if isinstance(noted, slice):
        return slice(*(given(one, value_of) for one in (noted.start, noted.stop, noted.step)))
    return noted


def attribute(root: torch.nn.Module, path: str) -> Any:
    """Return the parameter or buffer at a dotted path."""
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value
