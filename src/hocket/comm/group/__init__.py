"""The process group "hocket": what torch calls, in which order it runs, and which transport serves it."""

from ._group import HocketGroup
from ._locate import maxloc, minloc
from ._runner import timeout_setting

__all__ = ["HocketGroup", "maxloc", "minloc", "timeout_setting"]
