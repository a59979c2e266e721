"""Trains with Keras' TensorBoard callback, in data parallel and in a pipeline; run by `hocket run`, or on one process.

Its argument is a directory. Each rank writes there its process's number and the history that it has seen.
"""

import hocket.keras

# isort: split
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

directory = Path(sys.argv[1])
x = np.random.default_rng(6).normal(size=(60, 5)).astype("float32")
y = x[:, :1] > 0
ways: dict[str, tuple[dict[str, int], int | str]] = {
    "data": ({}, 2),
    "pipeline": ({"pipeline": 2, "micro_batches": 2}, "epoch"),
}
for name, (options, frequency) in ways.items():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, activation="sigmoid")]
    model = hocket.keras.Model(keras.Sequential(layers), **options)
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    board = keras.callbacks.TensorBoard(str(directory / name), update_freq=frequency, histogram_freq=1)
    fitted = model.fit(
        x[:43], y[:43], batch_size=10, epochs=3, validation_data=(x[43:], y[43:]), callbacks=[board], verbose=0
    )
    found = {"process": os.getpid(), "history": fitted.history}
    (directory / f"{name}.{model.world.rank}.json").write_text(json.dumps(found))
