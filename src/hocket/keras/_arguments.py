"""Arguments that cannot be, told with what to do instead."""

from typing import Any

import keras

from . import _private


def check_model(model: Any) -> None:
    """Raise TypeError if `model` is no Keras model, ValueError if another distribution is active."""
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
    """Raise ValueError unless `shard` is one of the ways."""
    if shard not in ("none", "optimizer"):
        raise ValueError(
            f'shard={shard!r} must be "none" or "optimizer"; Keras keeps whole gradients and parameters on each rank'
        )


def check_compile(steps_per_execution: Any, jit_compile: Any) -> None:
    """Raise ValueError for what Keras on torch, or hocket, cannot do."""
    if steps_per_execution != 1:
        raise ValueError(
            f"steps_per_execution={steps_per_execution} is not possible with Keras on torch: leave it out, or say 1"
        )
    if jit_compile is True:
        raise ValueError(
            "jit_compile=True would compile the step as a whole, in which hocket's exchange between ranks takes part: "
            'leave it out, or say jit_compile="auto"'
        )


def check_pipeline(model: Any, pipeline: Any, micro_batches: Any, split: Any, shard: str, schedule: Any) -> None:
    """Raise ValueError or TypeError if the model cannot be a pipeline's, or the numbers make none."""
    for name, value in (("pipeline", pipeline), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {value!r}")
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f'schedule={schedule!r} must be "gpipe" or "1f1b"')
    if pipeline == 1:
        for name, value in (("micro_batches", micro_batches if micro_batches > 1 else None), ("split", split)):
            if value:
                raise ValueError(f"{name}={value!r} is for a pipeline: say pipeline=2 or more, or leave it out")
        return
    if isinstance(split, str):
        raise TypeError(f"split={split!r} must be a list of the names of layers: say split=[{split!r}]")
    if shard != "none":
        raise ValueError(
            f"shard={shard!r} and pipeline={pipeline} do not go together: in a pipeline each rank keeps the "
            "optimizer's state of its own stage only; leave shard= out"
        )
    functional = isinstance(model, keras.Sequential | _private.Functional)
    if not functional or type(model).call not in (keras.Sequential.call, _private.Functional.call):
        raise ValueError(
            f"pipeline={pipeline} cannot cut {model.name!r} of type {type(model).__name__} into stages: it is no "
            "functional model, and what its call() does is known to itself alone. Build it by keras.Sequential or "
            "keras.Model(inputs, outputs), or leave pipeline= out"
        )
    for name in ("train_step", "test_step", "predict_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"{type(model).__name__}.{name} is the model's own, and with pipeline={pipeline} no rank has the whole "
                f"model to run it: remove {name}, or leave pipeline= out"
            )


def check_micro_batches(model: Any, micro_batches: int) -> None:
    """Raise ValueError if micro-batches in training would change what layers normalise by."""
    if micro_batches == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise ValueError(
                f"layer {layer.name!r} is a BatchNormalization, which would normalise each of the micro_batches="
                f"{micro_batches} by itself and give another history than plain Keras: say micro_batches=1, use "
                "LayerNormalization or GroupNormalization, or freeze it by layer.trainable = False"
            )
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise ValueError(
                f"layer {layer.name!r} is a SpectralNormalization, which changes its weights in each of the "
                f"micro_batches={micro_batches} and gives another history than plain Keras: say micro_batches=1, or "
                "leave pipeline= out"
            )


def check_stateless(model: Any, parts: int) -> None:
    """Raise ValueError if a layer keeps something of each sample for the next batch, and batches are cut in parts."""
    for layer in model._flatten_layers() if parts > 1 else ():
        if getattr(layer, "stateful", False) is True:
            raise ValueError(
                f"layer {layer.name!r} has stateful=True: it begins with a batch's samples where the batch before has "
                "ended, and is made for batches of one size, of which a rank has a part: say stateful=False, or start "
                "one worker"
            )


def check_batch_size(value: Any, world: int, name: str = "batch_size", *, micro_batches: int = 1) -> None:
    """Raise ValueError or TypeError unless `value` is a batch size of which every rank gets a sample.

    `world` ranks, or pipelines of them, share a batch, and each cuts its part into `micro_batches`.
    """
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, the samples of a batch over all ranks, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more")
    if value < world * micro_batches and micro_batches > 1:
        raise ValueError(
            f"{name}={value} is the number of samples of a batch over all ranks, and does not reach for {world} "
            f"pipeline(s) of micro_batches={micro_batches}: make it {world * micro_batches} or more, or micro_batches= "
            "less"
        )
    if value < world:
        raise ValueError(
            f"{name}={value} is the number of samples of a batch over all ranks, and there are {world} ranks: make it "
            f"{world} or more, or start fewer workers"
        )


def check_data(x: Any, world: int, name: str = "x", *, micro_batches: int = 1) -> None:
    """Raise TypeError or ValueError if batches of `x` cannot be shared out."""
    if _private.is_tf_dataset(x):
        raise TypeError(
            f"{name} is a tf.data.Dataset, which hocket cannot share out among ranks: pass arrays, a torch DataLoader, "
            "a grain dataset, a keras.utils.PyDataset or a generator of batches (KerasHub makes tf.data of arrays "
            "where grain is not installed: pip install grain)"
        )
    if _private.is_torch_dataloader(x):
        check_batch_size(x.batch_size, world, f"{name}.batch_size", micro_batches=micro_batches)
