"""Starts a program on several ranks of this host over torch.distributed.elastic, and cleans up after it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._arguments import ArgumentError as ArgumentError
    from ._elastic import LaunchError as LaunchError
    from ._failure import RankFailure as RankFailure
    from ._launch import LaunchResult as LaunchResult
    from ._launch import launch as launch

__all__ = ["ArgumentError", "LaunchError", "LaunchResult", "RankFailure", "launch"]

_HOMES = {
    "ArgumentError": "_arguments",
    "LaunchError": "_elastic",
    "LaunchResult": "_launch",
    "RankFailure": "_failure",
    "launch": "_launch",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: launching imports torch, and `hocket clean` need not."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
