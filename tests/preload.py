"""What the ranks of many tests need; the fork server of `hocket.testing` loads it once."""

import contextlib
import gc

import hypothesis
import networkx
import pytest
import scipy.optimize
import sympy.tensor.tensor
import torch._functorch.aot_autograd
import torch.distributed.checkpoint
import torch.export._trace
import torch.profiler

import hocket.cli
import hocket.comm.group
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
with old_objects_set_aside():  # counts them here, and in no rank
    pass

__all__ = ["fsspec", "hocket", "hypothesis", "keras", "networkx", "pytest", "scipy", "sympy", "torch"]
