"""Keras with its torch backend: chosen where nothing is, and refused where another one is active."""

from __future__ import annotations

import os
import sys

from hocket._extras import require

_OLDEST = (3, 12)


def require_torch() -> None:
    """Makes sure that Keras is there and computes with torch; chooses torch where the environment says nothing.

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
