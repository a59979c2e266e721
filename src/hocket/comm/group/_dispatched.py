"""The group on torch >= 2.14, whose dispatcher knows hooks, a flight recorder and groups split from others.

There torch offers two shells. A subclass of its `Backend` is called below the dispatcher, where hooks fire, but torch
then hides the backend's handles: `is_completed` is never true and a receive from any rank does not know its source. A
subclass of `ProcessGroup` keeps its handles and is called at once, and hooks never fire. So the group is both: it is
the `ProcessGroup`, and has registered a `Backend` that calls the same methods. Its operations take the way through the
dispatcher while somebody listens there, and give back their own handles all the same.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from .. import torch_adapter as c10d
from ._group import HocketGroup

_OPERATIONS = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall", "barrier", "send", "recv", "recv_anysource",
)  # fmt: skip
_OLD_NAMES = (
    "_allgather_base", "alltoall_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_LISTENERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_DIST_NAN_CHECK")
"""Variables that turn on listeners of torch's own, which do not say so to the group. By themselves flight recorders are
on in torch; here they are not unless asked for: Hocket has its own record, which costs less than the dispatcher."""


class _Thread(threading.local):
    below = False  # whether the dispatcher has called
    work: Any = None  # what it was given


class DispatchedGroup(HocketGroup):
    """A HocketGroup that torch's hooks and flight recorder see, and that can be split. Needs torch >= 2.14."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._hooks: set[int] = set()
        self._always = any(os.environ.get(name, "0") not in ("", "0") for name in _LISTENERS)
        self.heard = self._always
        self.thread = _Thread()
        self._registered = RegisteredBackend(self)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), c10d.CUSTOM_BACKEND, self._registered)
        self._set_default_backend(c10d.CUSTOM_BACKEND)

    def setGroupName(self, name: str) -> None:  # noqa: N802, D102
        super().setGroupName(name)
        self._registered._set_group_uid(name)

    def _get_backend(self, device: torch.device) -> Any:
        return self._nccl_engine() if torch.device(device).type == "cuda" else self._registered

    def _hook(self, kind: str, hook_id: int, *hook: Any) -> None:
        getattr(c10d.ProcessGroupBase, kind)(self, hook_id, *hook)
        (self._hooks.add if hook else self._hooks.discard)(hook_id)
        self.heard = self._always or bool(self._hooks)

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have `hook` called before each operation."""
        self._hook("register_pre_hook", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Forget a hook."""
        self._hook("unregister_pre_hook", hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have `hook` called when an operation has been posted."""
        self._hook("register_post_hook", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Forget a hook."""
        self._hook("unregister_post_hook", hook_id)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "DispatchedGroup | None":
        """Return the group of some ranks of this one, numbered as in `new_ranks`; None on other ranks."""
        if self._rank not in new_ranks:
            return None
        name = group_name or f"{self._name}:split:{','.join(map(str, new_ranks))}"
        child = DispatchedGroup(
            SimpleNamespace(
                store=c10d.PrefixStore(f"{name}/", self._given_store), group_rank=list(new_ranks).index(self._rank),
                group_size=len(new_ranks), timeout=timeout or self.timeout, group_id=name,
                global_ranks_in_group=[self._global_ranks[rank] for rank in new_ranks],
            )
        )  # fmt: skip
        child.setGroupName(name)
        child.setGroupDesc(group_desc or f"{self._description}:split")
        return child


def _dispatched(name: str) -> Callable[..., Any]:
    """Return an operation that goes through torch's dispatcher while somebody listens there."""
    direct, through = getattr(HocketGroup, name), getattr(c10d.ProcessGroupBase, name)

    def operation(self: DispatchedGroup, *given: Any, **named: Any) -> Any:
        if not self.heard or self.thread.below:
            return direct(self, *given, **named)
        through(self, *given, **named)  # which returns a wrapper of our handle
        work, self.thread.work = self.thread.work, None
        return work

    # torch calls a method's override unless the override of this name calls it: so the code has the name, too.
    operation.__code__ = operation.__code__.replace(co_name=name)
    operation.__doc__ = direct.__doc__
    return c10d.outside_compiler(operation) if hasattr(direct, "_torchdynamo_disable") else operation


class RegisteredBackend(c10d.BackendBase):  # type: ignore[misc]
    """What torch's dispatcher finds below it: calls the methods of a group, which must outlive it."""

    supports_splitting = True
    # torch asks these of the object again and again, without an end, where a class does not answer.
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False  # of torch 2.14, and of later ones

    def __init__(self, group: DispatchedGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group: Callable[[], Any] = weakref.ref(
            group
        )  # torch holds this object where Python's collector does not see it

    def getBackendName(self) -> str:  # noqa: N802, D102
        return "hocket"

    @property
    def options(self) -> Any:
        """Torch's options, which say the time-out."""
        return c10d.BackendBase.Options("hocket", self.group().timeout)


def _called_below(name: str) -> Callable[..., Any]:
    direct = getattr(HocketGroup, name)

    def operation(self: RegisteredBackend, *given: Any) -> Any:
        group = self.group()
        group.thread.below = True
        try:
            group.thread.work = work = direct(group, *given)
        finally:
            group.thread.below = False
        return work

    return operation


for _name in _OPERATIONS:
    setattr(DispatchedGroup, _name, _dispatched(_name))
    setattr(RegisteredBackend, _name, _called_below(_name))
for _name in _OLD_NAMES:  # torch would call these where an operation that has a new name too goes to the dispatcher
    setattr(DispatchedGroup, _name, getattr(c10d.ProcessGroupBase, _name, None))
RegisteredBackend.allreduce_sparse = RegisteredBackend.allreduce
