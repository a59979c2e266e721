"""What the recorder needs of torch: updates of optimizers, loaders of data, and checkpoints."""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from hocket.comm.torch_adapter import outside_compiler


def rank_and_world() -> tuple[int, int]:
    """Return this rank's number and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def default_store() -> Any:
    """Return the store of the world's group (`torch.distributed.Store`); None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()


def follow_updates(before: Callable[[], None], after: Callable[[], None]) -> list[Callable[[], object]]:
    """Call these around every `step` of every optimizer of the process; return what ends that."""
    hooks = [
        register_optimizer_step_pre_hook(outside_compiler(lambda *_: before())),
        register_optimizer_step_post_hook(outside_compiler(lambda *_: after())),
    ]
    return [hook.remove for hook in hooks]


def wrap_loaders(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap what gives the next batch of any DataLoader; return what takes that back."""
    kind = dataloader._BaseDataLoaderIter
    plain = kind.__next__
    kind.__next__ = wrap(plain)  # type: ignore[method-assign]

    def undo() -> None:
        kind.__next__ = plain  # type: ignore[method-assign]

    return undo


def wrap_save(phase: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Do each `torch.save` in a context; return what takes that back."""
    plain = torch.save

    @functools.wraps(plain)
    def save(*args: Any, **kwargs: Any) -> None:
        with phase():
            plain(*args, **kwargs)

    torch.save = save

    def undo() -> None:
        torch.save = plain

    return undo
