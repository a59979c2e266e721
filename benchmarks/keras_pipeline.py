"""What a rank has to do and to keep when Keras trains a model on a pipeline, beside plain Keras and data parallelism.

    python benchmarks/keras_pipeline.py

Each way trains the same model in processes of its own, one thread a rank. A step is from one `on_train_batch_end` of
rank 0 to the next. The peak is what a process has had resident at most, up to the last batch's end, beyond what it had
before the model was made: data, weights, gradients, the optimizer's state, activations.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import hocket.keras

# isort: split
import keras
import numpy as np
import torch

from hocket.testing import run_ranks

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain Keras": (1, {}),
    "data parallel": (2, {}),
    'shard="optimizer"': (2, {"shard": "optimizer"}),
    "pipeline=2, micro_batches=4": (2, {"pipeline": 2, "micro_batches": 4}),
    "pipeline=2, micro_batches=8": (2, {"pipeline": 2, "micro_batches": 8}),
    'pipeline=2, micro_batches=8, schedule="1f1b"': (2, {"pipeline": 2, "micro_batches": 8, "schedule": "1f1b"}),
}


class Clock(keras.callbacks.Callback):
    """Notes when batches end, and what the process has had resident by then."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_s: list[float] = []
        self.peak_nbytes = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends_s.append(time.perf_counter())
        self.peak_nbytes = peak_nbytes()


def peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def trained(options: dict[str, Any], steps: int, width: int, layers: int, batch: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    before_nbytes = peak_nbytes()
    dense = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = hocket.keras.Model(keras.Sequential([keras.Input((width,)), *dense, keras.layers.Dense(10)]), **options)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    x, y = random.normal(size=(steps * batch, width)).astype("float32"), random.integers(0, 10, steps * batch)
    clock = Clock()
    everywhere = hocket.keras.callbacks.Callback(clock, run_on_all_ranks=True)
    history = model.fit(x, y, batch_size=batch, callbacks=[everywhere], verbose=0).history
    own = [v.value for v in model.trainable_variables if v.value.grad is not None]
    return {
        "loss": history["loss"][0],
        "steps_s": [b - a for a, b in zip(clock.ends_s[:-1], clock.ends_s[1:], strict=True)][3:],
        "gradient_nbytes": sum(v.numel() * v.element_size() for v in own),
        "state_nbytes": sum(v.value.numel() * v.value.element_size() for v in model.optimizer.variables),
        "peak_nbytes": clock.peak_nbytes - before_nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    asked = parser.parse_args()
    shape = (asked.steps, asked.width, asked.layers, asked.batch)
    print("| way | ranks | step, ms (least to most) | MB of gradients | of Adam's state | MB at the peak | loss |")
    print("|---|---|---|---|---|---|---|")
    for name, (ranks, options) in WAYS.items():
        found = run_ranks(trained, ranks, options, *shape, timeout_s=120)
        times = [1e3 * value for value in found[0]["steps_s"]]
        cells = [f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"]
        for kind in ("gradient", "state", "peak"):
            cells.append(" + ".join(f"{rank[f'{kind}_nbytes'] / 1e6:.1f}" for rank in found))
        print(f"| {name} | {ranks} | {' | '.join(cells)} | {found[0]['loss']:.6f} |", flush=True)


if __name__ == "__main__":
    main()
