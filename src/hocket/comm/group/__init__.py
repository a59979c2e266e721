"""The process group "hocket": what torch calls, in which order it runs, and which transport serves it."""

from ._group import HocketGroup as HocketGroup
from ._locate import maxloc as maxloc
from ._locate import minloc as minloc

__all__ = ["HocketGroup", "maxloc", "minloc"]
