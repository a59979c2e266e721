"""Registers the backend "hocket" with torch; torch calls `register` at import through the package's entry point."""

import functools
import importlib
import os
import sys
from typing import Any

from hocket import _tasks
from hocket._sweep import JOB_VARIABLE

_RECORDED = {"HOCKET_RECORD", "HOCKET_RUN_DIR"}  # the variables that say where


def register() -> None:
    """Make `init_process_group("hocket")` work; do nothing if it does already, and never raise.

    An exception here would break `import torch` for every program of the environment.
    """
    try:
        from torch.distributed import Backend, is_available

        if is_available() and not hasattr(Backend, "HOCKET"):
            Backend.register_backend("hocket", _create, extended_api=True, devices=["cpu", "cuda"])
            from . import rendezvous

            rendezvous.take_over()
            _adopt_tasks_at_rendezvous()
            if JOB_VARIABLE in os.environ:
                if os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") != "1":
                    _say_if_alone()
                from hocket._last_garbage import leave_out_last_collection

                leave_out_last_collection()
    except Exception:  # a torch without distributed, or one too old: the backend is simply not there
        return


def _create(options: Any, backend_options: Any) -> Any:
    from .group import open_group

    group = open_group(options)
    if _RECORDED & os.environ.keys():
        # By name: `profile` stands above this package, and records every job that has a place for it.
        profile = importlib.import_module("hocket.profile")
        profile.watch(group.rank(), group.size())
        if not sys.modules["torch.distributed"].is_initialized():  # this is the world's group
            profile.name_run(options.store)
    return group


def _adopt_tasks_at_rendezvous() -> None:
    """Let `init_process_group` without RANK read what srun and mpirun set, where torch would raise for want of RANK."""
    handlers: Any = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    plain = handlers["env"]

    def env_rendezvous(url: str, *args: Any, **kwargs: Any) -> Any:
        if "rank=" not in url:
            from hocket._meeting_place import adopt

            _tasks.check_given()
            adopt()
        yield from plain(url, *args, **kwargs)

    handlers["env"] = env_rendezvous


def _say_if_alone() -> None:
    """Under `hocket run` with several ranks, say it if the program trains and has joined no group: then each does so.

    Said at the first back-propagation, by rank 0, once.
    """
    import torch
    import torch.distributed as dist

    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        if torch.autograd.backward is backward:
            torch.autograd.backward = plain
        if not said:
            said.append(True)
            if not dist.is_initialized():
                print(
                    f"hocket: this script trains {os.environ['WORLD_SIZE']} times, once in each rank: no rank has "
                    "joined a group. Before the loop, write: model, optimizer, loader = hocket.distribute(model, "
                    "optimizer, loader)    (Keras: model = hocket.keras.Model(model))",
                    file=sys.stderr,
                    flush=True,
                )
        plain(*args, **kwargs)

    said: list[bool] = []
    torch.autograd.backward = backward
