"""Starts a program on several ranks of this host over torch.distributed.elastic, and cleans up after it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._arguments import ArgumentError as ArgumentError
    from ._arguments import LaunchArguments as LaunchArguments
    from ._arguments import argument_parser as argument_parser
    from ._arguments import parse_arguments as parse_arguments
    from ._clean import Leftover as Leftover
    from ._clean import leftovers as leftovers
    from ._clean import remove_leftover as remove_leftover
    from ._doctor import Diagnosis as Diagnosis
    from ._doctor import examine as examine
    from ._elastic import LaunchError as LaunchError
    from ._fabric import PlacementError as PlacementError
    from ._fabric import enter_fabric as enter_fabric
    from ._failure import RankFailure as RankFailure
    from ._launch import LaunchResult as LaunchResult
    from ._launch import dry_run as dry_run
    from ._launch import launch as launch
    from ._launch import run as run

_HOMES = {
    "ArgumentError": "_arguments",
    "Diagnosis": "_doctor",
    "LaunchArguments": "_arguments",
    "LaunchError": "_elastic",
    "LaunchResult": "_launch",
    "Leftover": "_clean",
    "PlacementError": "_fabric",
    "RankFailure": "_failure",
    "argument_parser": "_arguments",
    "dry_run": "_launch",
    "enter_fabric": "_fabric",
    "examine": "_doctor",
    "launch": "_launch",
    "leftovers": "_clean",
    "parse_arguments": "_arguments",
    "remove_leftover": "_clean",
    "run": "_launch",
}

__all__ = [
    "ArgumentError",
    "Diagnosis",
    "LaunchArguments",
    "LaunchError",
    "LaunchResult",
    "Leftover",
    "PlacementError",
    "RankFailure",
    "argument_parser",
    "dry_run",
    "enter_fabric",
    "examine",
    "launch",
    "leftovers",
    "parse_arguments",
    "remove_leftover",
    "run",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: launching imports torch, and `hocket clean` need not."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
