"""Replaces the forward of a module, so that a copy of the module runs its own and not that of the first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def replace_forward(
    module: torch.nn.Module, around: Callable[[Callable[..., Any], torch.nn.Module], Callable[..., Any]]
) -> None:
    """Have calls of `module` run another forward; the module stays the same object.

    `around` gives what is run, for the forward that a module had, and that module: this one, or a copy of it.
    """
    plain: Any = module.forward
    if getattr(plain, "__self__", None) is not module:  # a function of the program's own, of which copies run the same
        module.forward = functools.wraps(plain)(around(plain, module))
        return
    function = plain.__func__

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(MethodType(function, self), self)(*args, **kwargs)

    module.forward = MethodType(forward, module)
