"""Computes in bfloat16 what can be, whoever calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ._forward import replace_forward

R = TypeVar("R")


_exact = False


@contextmanager
def exactly() -> Iterator[None]:
    """Open a block in which all is computed in the precision of the parameters."""
    global _exact
    before, _exact = _exact, True
    try:
        yield
    finally:
        _exact = before


def in_precision(function: Callable[..., R], precision: str, device: str) -> Callable[..., R]:
    """Return the function under autocast where `precision` is "bfloat16": forward only, as torch wants it."""
    if precision == "float32":
        return function

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> R:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not _exact):
            return function(*args, **kwargs)

    return cast


def cast_module(module: torch.nn.Module, precision: str, device: str) -> None:
    """Have calls of `module` computed in that precision; the module stays the same object."""
    if precision != "float32":
        replace_forward(module, lambda forward, _: in_precision(forward, precision, device))
