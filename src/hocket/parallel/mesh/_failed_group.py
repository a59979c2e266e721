"""Groups that ranks have left in the middle of a step that failed: what comes next is told, or gets the group anew."""

import weakref
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from hocket.comm import CommError, torch_adapter

_TOGETHER_S = 10.0
"""Seconds in which all ranks must have said that the step has failed for them, too."""

_ANSWER_S = 3.0
"""Seconds in which the store must answer."""

_failed: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()  # what has failed, and its mark
_joined: weakref.WeakSet[Any] = weakref.WeakSet()  # the default groups that no program has made, but `join`


def give_up(groups: Iterable[Any], said: str, mark: str) -> None:
    """Leave groups whose operations the ranks will not come to any more, since a step has failed.

    Args:
        groups: The groups.
        said: What has failed, and how.
        mark: What tells this step of this Trainer from others, alike on all ranks.
    """
    for group in groups:
        group.fail(CommError(said))
        _failed[group] = said, mark


def joined(group: Any) -> None:
    """Remember that the program has not made this group itself, so that it may be made anew."""
    _joined.add(group)


def leave_failed(given: Any) -> None:
    """Leave torch's default group, to be joined anew, if a step in it has failed on all ranks and `given` is None.

    Raises:
        CommError: it has failed, and is not Hocket's to make anew, or not all ranks know of it: they would meet at
            different places of the program.
    """
    group = given if given is not None or not dist.is_initialized() else dist.group.WORLD
    if group is None or group not in _failed:
        return
    said, mark = _failed[group]
    if group is not dist.group.WORLD or group not in _joined:
        raise CommError(
            f"the ranks have left this group, for {said}; to go on, call torch.distributed.destroy_process_group() on "
            "every rank, and make the group anew"
        )
    try:
        together = torch_adapter.ask(partial(_all_say, mark), 2 * _TOGETHER_S + _ANSWER_S)
    except (RuntimeError, TimeoutError):  # the store has gone with its host, or stands still
        together = False
    if not together:
        raise CommError(
            f"the ranks have left their group, for {said}; not all of them have ended that step in an error, so that "
            "they would go on at different places of the program: start it anew"
        )
    dist.destroy_process_group()


def _all_say(mark: str) -> bool:
    store = torch_adapter.PrefixStore(f"hocket/failed/{mark}/", torch_adapter.default_store())
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    store.set(str(rank), "")
    try:
        store.wait(["0", *map(str, others)], timedelta(seconds=_TOGETHER_S))
        if rank:
            store.set(f"{rank} knows", "")
        else:  # with rank 0 its store may go
            store.wait([f"{other} knows" for other in others], timedelta(seconds=_TOGETHER_S))
    except RuntimeError:
        return False
    return True
