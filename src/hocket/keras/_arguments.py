"""Arguments that cannot be, told with what to do instead."""

from __future__ import annotations

from typing import Any

import keras

from . import _private


def check_model(model: Any) -> None:
    """Raises TypeError if `model` is no Keras model, ValueError if another distribution is active."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"hocket.keras.Model wraps a keras.Model (Sequential, functional or a subclass), not {type(model).__name__}"
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "keras.distribution is active, and hocket distributes the model by itself: remove "
            "keras.distribution.set_distribution(...)"
        )


def check_shard(shard: Any) -> None:
    """Raises ValueError unless `shard` is one of the ways."""
    if shard not in ("none", "optimizer"):
        raise ValueError(
            f'shard={shard!r} must be "none" or "optimizer"; Keras keeps whole gradients and parameters on each rank'
        )


def check_compile(steps_per_execution: Any, jit_compile: Any) -> None:
    """Raises ValueError for what Keras on torch, or hocket, cannot do."""
    if steps_per_execution != 1:
        raise ValueError(
            f"steps_per_execution={steps_per_execution} is not possible with Keras on torch: leave it out, or say 1"
        )
    if jit_compile is True:
        raise ValueError(
            "jit_compile=True would compile the step as a whole, in which hocket's exchange between ranks takes part: "
            'leave it out, or say jit_compile="auto"'
        )


def check_batch_size(value: Any, world: int, name: str = "batch_size") -> None:
    """Raises ValueError or TypeError unless `value` is a batch size of which every rank gets a sample."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, the samples of a batch over all ranks, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more")
    if value < world:
        raise ValueError(
            f"{name}={value} is the number of samples of a batch over all ranks, and there are {world} ranks: make it "
            f"{world} or more, or start fewer workers"
        )


def check_data(x: Any, world: int, name: str = "x") -> None:
    """Raises TypeError or ValueError if batches of `x` cannot be shared out."""
    for test, what in ((_private.is_tf_dataset, "tf.data.Dataset"), (_private.is_grain_dataset, "grain dataset")):
        if test(x):
            raise TypeError(
                f"{name} is a {what}, which hocket cannot share out among ranks: pass arrays, a torch DataLoader, a "
                "keras.utils.PyDataset or a generator of batches"
            )
    if _private.is_torch_dataloader(x):
        check_batch_size(x.batch_size, world, f"{name}.batch_size")
