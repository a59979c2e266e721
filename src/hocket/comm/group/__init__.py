"""The process group "hocket": what torch calls, in which order it runs, and which transport serves it."""

from typing import Any

from .. import torch_adapter as _c10d
from ._group import HocketGroup
from ._locate import maxloc, minloc

__all__ = ["HocketGroup", "maxloc", "minloc", "open_group"]

_c10d.let_reducers_keep_works()


def open_group(given: Any) -> HocketGroup:
    """Return the group for torch's DistributedBackendOptions; torch's hooks know it where torch has them."""
    if _c10d.HAS_HOOKS:
        from ._dispatched import DispatchedGroup

        return DispatchedGroup(given)
    return HocketGroup(given)
