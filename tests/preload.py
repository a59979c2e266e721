"""What the ranks of many tests need; the fork server of `hocket.testing` loads it once."""

import contextlib
import os

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

with contextlib.suppress(ImportError):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    import hocket.keras

with contextlib.suppress(ImportError):
    import fsspec  # torch's checkpoints do where it is there

__all__ = ["fsspec", "hocket", "hypothesis", "keras", "pytest", "scipy", "torch"]
