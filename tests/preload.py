"""What the ranks of many tests need; the fork server of `hocket.testing` loads it once."""

import contextlib
import gc
import os
import sys

import hypothesis
import pytest
import scipy.optimize
import torch.distributed.checkpoint
import torch.profiler

import hocket.comm.group
import hocket.parallel
import hocket.planner
import hocket.profile
import hocket.workload
from hocket.parallel.compose import old_objects_set_aside

gc.disable()  # all that is imported stays, and looking through it takes long
_HIDDEN = {"matplotlib", "sklearn"} - sys.modules.keys()  # Keras loads them, two seconds long, for what no test asks
sys.modules.update(dict.fromkeys(_HIDDEN))
with contextlib.suppress(ImportError):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    import hocket.keras
for _name in _HIDDEN:
    del sys.modules[_name]

with contextlib.suppress(ImportError):
    import fsspec  # torch's checkpoints do where it is there

gc.enable()
gc.freeze()
with old_objects_set_aside():  # counts them here, and in no rank
    pass

__all__ = ["fsspec", "hocket", "hypothesis", "keras", "pytest", "scipy", "torch"]
