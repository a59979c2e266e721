"""Keras 3 on torch: compile, fit, evaluate and predict on all ranks as on one device."""

import os
import sys

from hocket._extras import require

_OLDEST = (3, 14)


def _require_torch() -> None:
    """Make sure that Keras is there and computes with torch; choose torch where the environment says nothing.

    Raises:
        MissingExtraError: Keras is not installed.
        ImportError: Keras is too old, or another backend is active or asked for.
    """
    wanted = os.environ.get("KERAS_BACKEND")
    if "keras" not in sys.modules:
        if wanted not in (None, "torch"):
            raise ImportError(
                f"the environment variable KERAS_BACKEND is {wanted!r}, and hocket.keras distributes Keras on torch "
                "only: set KERAS_BACKEND=torch, or unset it"
            )
        os.environ["KERAS_BACKEND"] = "torch"
    require("hocket.keras", "keras")
    import keras

    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if version < _OLDEST:
        raise ImportError(
            f"hocket.keras needs Keras {'.'.join(map(str, _OLDEST))} or later, and {keras.__version__} is installed"
        )
    if keras.backend.backend() != "torch":
        raise ImportError(
            f"Keras has been imported with backend {keras.backend.backend()!r}, and hocket.keras distributes Keras on "
            "torch only: set KERAS_BACKEND=torch in the environment, or import hocket.keras before keras"
        )


_require_torch()

from . import callbacks as callbacks  # noqa: E402  (a wrong backend is to be told before Keras fails at it)
from ._model import Model as Model  # noqa: E402
from ._model import load_model as load_model  # noqa: E402

__all__ = ["Model", "callbacks", "load_model"]
