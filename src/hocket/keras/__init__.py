"""Keras 3 on torch: compile, fit, evaluate and predict on all ranks as on one device."""

from ._backend import require_torch

require_torch()

from . import callbacks as callbacks  # noqa: E402  (a wrong backend is to be told before Keras fails at it)
from ._model import Model as Model  # noqa: E402
from ._model import load_model as load_model  # noqa: E402

__all__ = ["Model", "callbacks", "load_model"]
