"""Functional Keras programs, for pipelines: what crosses cuts, what layers add, and what is brought together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from . import callback_cases, cases

Wrap = cases.Wrap
CASES: dict[str, Callable[[Wrap], dict[str, Any]]] = {}


def case(function: Callable[[Wrap], dict[str, Any]]) -> Callable[[Wrap], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def trained(model: Any, x: Any, y: Any, loss: Any = "mse", optimizer: Any = "adam", **options: Any) -> dict[str, Any]:
    model.compile(optimizer, loss, **options)
    fitted = model.fit(x, y, batch_size=12, epochs=2, validation_split=0.1, verbose=0)
    return {
        "history": fitted.history,
        "prediction": model.predict(x, batch_size=16, verbose=0),
        "weights": model.get_weights(),
    }


@case
def values_that_skip_stages(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    given = keras.Input((5,))
    early = layers.Dense(6, activation="tanh")(given)
    middle = layers.Dense(6, activation="tanh")(layers.Dropout(0.3)(early))
    late = layers.Dense(6)(layers.Dropout(0.2)(middle))
    joined = layers.concatenate([late, early * ops.sigmoid(middle), given])
    outputs = {"early": layers.Dense(1, name="early")(early), "late": layers.Dense(1, name="late")(joined)}
    model = wrap(keras.Model(given, outputs))
    x, y = cases.vectors(50)
    return trained(model, x, {"early": y, "late": -y}, {"early": "mse", "late": "mae"})


@case
def losses_of_layers_and_weights(wrap: Wrap) -> dict[str, Any]:
    class Small(layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.count.assign_add(1.0)
            self.add_loss(0.1 * ops.mean(ops.square(inputs)) / (1.0 + ops.copy(self.count)))
            return inputs

    keras.utils.set_random_seed(2)
    model = wrap(
        keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"),
                Small(),
                layers.Dense(8, activation="relu", bias_regularizer="l1", activity_regularizer="l2"),
                Small(),
                layers.Dense(1, kernel_regularizer="l1"),
            ]
        )
    )
    x, y = cases.vectors(50)
    found = trained(model, x, y)
    return {**found, "evaluation": model.evaluate(x, y, batch_size=20, verbose=0)}


@case
def attention_on_masked_sequences(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    words = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(9, 8, mask_zero=True)(words)
    mixed = layers.MultiHeadAttention(2, 4, dropout=0.2)(embedded, embedded)
    mixed = layers.LayerNormalization()(embedded + layers.Dropout(0.1)(mixed))
    states = layers.LSTM(6, dropout=0.2)(mixed)
    model = wrap(keras.Model(words, layers.Dense(3)(states)))
    random = np.random.default_rng(0)
    x = random.integers(1, 9, (44, 7))
    for row, length in enumerate(random.integers(1, 8, 44)):
        x[row, length:] = 0
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return trained(model, x, x[:, 0] % 3, loss, metrics=["accuracy"])


@case
def models_in_models_and_shared_layers(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(4)
    tower = keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="relu"), layers.Dense(4)])
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    apart = tower(left) - tower(right)
    inner = keras.Input((4,))
    head = keras.Model(inner, layers.Dense(1)(layers.Dense(5, activation="tanh")(inner)), name="head")
    model = wrap(keras.Model({"left": left, "right": right}, head(apart)))
    x, y = cases.vectors(46)
    return trained(model, {"left": x, "right": x[::-1].copy()}, y)


@case
def frozen_layers(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(5)
    base = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(4, 3), layers.BatchNormalization()], name="base")
    base.trainable = False
    model = wrap(keras.Sequential([keras.Input((6, 6, 2)), base, layers.Flatten(), layers.Dense(4)]))
    x, y = cases.images(50)
    found = trained(model, x, y)
    base.layers[0].trainable = base.trainable = True
    base.layers[1].trainable = False
    thawed = trained(model, x, y)
    model.compile(keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction="sum"))
    weighted = model.fit(x, y, sample_weight=x[:, 0, 0, 0] ** 2, batch_size=12, verbose=0).history
    return {"frozen": found, "thawed": thawed, "weighted": [weighted, model.get_weights()]}


@case
def optimizers(wrap: Wrap) -> dict[str, Any]:
    x, y = cases.vectors(48)
    found: dict[str, Any] = {}
    kinds = {
        "clipped globally": keras.optimizers.Adam(0.05, global_clipnorm=0.1, weight_decay=0.01),
        "clipped": keras.optimizers.Lamb(0.05, clipnorm=0.2),
        "accumulating": keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "scaled": keras.optimizers.SGD(0.1, loss_scale_factor=64.0),
    }
    for name, optimizer in kinds.items():
        keras.utils.set_random_seed(6)  # layers take seeds where they are made
        model = wrap(cases.dense(layers.Dense(7, kernel_regularizer="l2"), layers.Dropout(0.2)))
        model.compile(optimizer, "binary_crossentropy")
        found[name] = [model.fit(x, y, batch_size=12, epochs=2, verbose=0).history, model.get_weights()]
    return found


def files(wrap: Wrap, load: Any, directory: str) -> dict[str, Any]:
    """Saving, loading and going on; checkpoints and backups in the middle of a fit."""
    place = Path(directory)
    model, _ = callback_cases.trained(wrap, [], epochs=2)
    model.save(place / "saved.keras")
    loaded = load(place / "saved.keras")
    x, y = cases.vectors(60)
    best = keras.callbacks.ModelCheckpoint(place / "best.keras", monitor="loss", save_best_only=True)
    fitted = loaded.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[best])
    again = load(place / "best.keras")
    loaded.train_on_batch(x, y)
    return {
        "history": fitted.history,
        "weights": loaded.get_weights(),
        "checkpoint": again.evaluate(x, y, verbose=0),
        "after the checkpoint": again.fit(x, y, batch_size=10, verbose=0).history,
        "backup": callback_cases.backup_and_restore(wrap, place),
    }


@case
def a_model_that_the_data_builds(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    model = wrap(keras.Sequential([layers.Dense(6, activation="relu"), layers.Dropout(0.3), layers.Dense(1)]))
    return trained(model, *cases.vectors(50))


CALLBACKS = ("early_stopping", "learning_rates", "terminate_on_nan", "csv", "meddling")


def callbacks(wrap: Wrap, directory: str) -> dict[str, Any]:
    """What callbacks do; those that need the optimizer's whole state in the middle of an epoch are refused."""
    found = {}
    for name in CALLBACKS:
        own = Path(directory) / name
        own.mkdir(exist_ok=True)
        found[name] = callback_cases.CASES[name](wrap, own)
    return found


def own_part(wrap: Wrap) -> dict[str, Any]:
    """Which layers this rank has run in a step, which weights have gradients, and the bytes of Adam's state."""
    computed: list[str] = []

    class Noting(layers.Dense):
        def call(self, inputs: Any, training: Any = None) -> Any:
            computed.append(self.name)
            return super().call(inputs)

    keras.utils.set_random_seed(0)
    model = wrap(keras.Sequential([keras.Input((40,)), *(Noting(40, name=name) for name in "abcd")]))
    model.compile("adam", "mse")
    x = np.ones((12, 40), "float32")
    model.fit(x, x, batch_size=12, verbose=0)
    computed.clear()
    model.train_on_batch(x, x)
    state = [v.value for v in model.optimizer.variables]
    return {
        "layers": [path.partition("/")[0] for path in model._steps.engine().stage.layers],
        "computed": sorted(set(computed)),
        "gradients": ["/".join(v.path.split("/")[-2:]) for v in model.trainable_variables if v.value.grad is not None],
        "state_nbytes": sum(v.numel() * v.element_size() for v in state),
        "scalars_nbytes": sum(v.numel() * v.element_size() for v in state if not v.ndim),
    }
