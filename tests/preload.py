"""What the ranks of many tests need; the fork server of `hocket.testing` loads it once."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import hypothesis
import networkx
import pytest
import scipy.optimize
import sympy.tensor.tensor
import torch._functorch.aot_autograd
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint
import torch.export._trace
import torch.profiler._cupti_monitor
import torch.utils.serialization.config

import hocket.cli
import hocket.comm.group
import hocket.optim
import hocket.parallel
import hocket.planner
import hocket.profile
import hocket.workload
from hocket.parallel.compose import old_objects_set_aside

gc.disable()  # all that is imported stays, and looking through it takes long
if torch.version.cuda is None or torch.cuda._device_count_nvml() >= 0:  # else it would open the GPU here; see conftest
    with contextlib.suppress(ImportError):
        from .keras import keras

        # isort: split
        import hocket.keras

with contextlib.suppress(ImportError):
    import fsspec  # torch's checkpoints do where it is there

gc.enable()
gc.freeze()
hocket.Plan()  # the first in a process makes what checks the fields: a tenth of a second
with old_objects_set_aside():  # counts them here, and in no rank
    pass

# A fork copies the table of pages: for 300 MB of small ones that is half of the time of a rank that does nothing. Large
# pages have a short table; where the kernel has none or is older than 6.1, it says no, and all stays as it is.
_LARGE, _MADV_COLLAPSE = 2 << 20, 25
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
with contextlib.suppress(OSError):
    for _first, _end in re.findall(
        r"(?m)^(\w+)-(\w+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", Path("/proc/self/maps").read_text()
    ):
        _begin = -(int(_first, 16) // -_LARGE) * _LARGE
        if (_nbytes := int(_end, 16) // _LARGE * _LARGE - _begin) > 0:
            _madvise(_begin, _nbytes, _MADV_COLLAPSE)

__all__ = ["fsspec", "hocket", "hypothesis", "keras", "networkx", "pytest", "scipy", "sympy", "torch"]
