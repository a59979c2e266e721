"""Tests of `hocket.keras`; Keras is loaded here, without what it loads for no test: a second less in each process."""

import os
import sys

_HIDDEN = {"matplotlib", "sklearn"} - sys.modules.keys()
sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type]
os.environ.setdefault("KERAS_BACKEND", "torch")
try:
    import keras as keras
finally:
    for _name in _HIDDEN:
        del sys.modules[_name]
