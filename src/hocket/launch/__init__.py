"""Starts a program on several ranks of this host over torch.distributed.elastic, and cleans up after it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._arguments import ArgumentError, LaunchArguments, argument_parser, parse_arguments
    from ._clean import Leftover, leftovers, remove_leftover
    from ._doctor import Diagnosis, examine
    from ._fabric import PlacementError, enter_fabric
    from ._failure import RankFailure
    from ._hosts import read_hosts
    from ._kubernetes import write_manifests
    from ._launch import LaunchResult, dry_run, launch, run, threads_of_rank
    from ._meeting import LaunchError
    from ._slurm import batch_script, step_command
    from ._ssh import examine_hosts

_HOMES = {
    "ArgumentError": "_arguments",
    "Diagnosis": "_doctor",
    "LaunchArguments": "_arguments",
    "LaunchError": "_meeting",
    "LaunchResult": "_launch",
    "Leftover": "_clean",
    "PlacementError": "_fabric",
    "RankFailure": "_failure",
    "argument_parser": "_arguments",
    "batch_script": "_slurm",
    "dry_run": "_launch",
    "enter_fabric": "_fabric",
    "examine": "_doctor",
    "examine_hosts": "_ssh",
    "launch": "_launch",
    "leftovers": "_clean",
    "parse_arguments": "_arguments",
    "read_hosts": "_hosts",
    "remove_leftover": "_clean",
    "run": "_launch",
    "step_command": "_slurm",
    "threads_of_rank": "_launch",
    "write_manifests": "_kubernetes",
}

__all__ = [
    "ArgumentError", "Diagnosis", "LaunchArguments", "LaunchError", "LaunchResult", "Leftover", "PlacementError",
    "RankFailure", "argument_parser", "batch_script", "dry_run", "enter_fabric", "examine", "examine_hosts", "launch",
    "leftovers",
    "parse_arguments", "read_hosts", "remove_leftover", "run", "step_command", "threads_of_rank",
    "write_manifests",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: launching imports torch, and `hocket clean` need not."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
