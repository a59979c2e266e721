"""Starts a program on several ranks of this host over torch.distributed.elastic, and cleans up after it."""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from ._arguments import LaunchArguments, parse_arguments
    from ._clean import Leftover, leftovers, remove_leftover
    from ._doctor import Diagnosis, examine
    from ._fabric import PlacementError, enter_fabric
    from ._failure import ArgumentError, LaunchError, RankFailure
    from ._flags import argument_parser
    from ._hosts import read_hosts
    from ._kubernetes import write_manifests
    from ._launch import dry_run, launch, run
    from ._rank_environment import threads_of_rank
    from ._result import LaunchResult
    from ._slurm import batch_script, run_step, step_command
    from ._ssh import examine_hosts

__all__ = [
    "ArgumentError", "Diagnosis", "LaunchArguments", "LaunchError", "LaunchResult", "Leftover", "PlacementError",
    "RankFailure", "argument_parser", "batch_script", "dry_run", "enter_fabric", "examine", "examine_hosts", "launch",
    "leftovers", "parse_arguments", "read_hosts", "remove_leftover", "run", "run_step", "step_command",
    "threads_of_rank", "write_manifests",
]  # fmt: skip

__getattr__ = lazy(  # launching several hosts imports torch; `hocket clean` and ranks of this host need not
    __name__,
    {
        "_arguments": "LaunchArguments parse_arguments",
        "_doctor": "Diagnosis examine",
        "_launch": "dry_run launch run",
        "_rank_environment": "threads_of_rank",
        "_result": "LaunchResult",
        "_clean": "Leftover leftovers remove_leftover",
        "_fabric": "PlacementError enter_fabric",
        "_flags": "argument_parser",
        "_failure": "ArgumentError LaunchError RankFailure",
        "_slurm": "batch_script run_step step_command",
        "_ssh": "examine_hosts",
        "_hosts": "read_hosts",
        "_kubernetes": "write_manifests",
    },
)
