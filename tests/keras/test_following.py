"""What one process does between batches and at the end of training, ranks do alike."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

pytestmark = pytest.mark.timeout(200)


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(20, 4)).astype("float32"), draw.normal(size=(20, 3)).astype("float32")


def made(wrap: Any, kind: type | None = None) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    model = (kind or keras.Model)(inputs, keras.layers.Dense(3)(keras.layers.Dense(5, activation="tanh")(inputs)))
    return wrap(model)


def warmed_up(wrap: Any) -> list[np.ndarray]:
    """Weights after training at a rate that a callback sets before each batch."""
    import keras

    class Warmup(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.02 * (batch + 1)

    model = made(wrap)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(*data(), batch_size=6, epochs=2, verbose=0, callbacks=[Warmup()])
    return [np.array(one) for one in model.get_weights()]


def restored(wrap: Any) -> list[float]:
    """The loss of an evaluation after EarlyStopping has restored weights by what a callback adds to the logs."""
    import keras

    class Score(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["score"] = float(epoch)  # gets worse from the first epoch on

    model = made(wrap)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    stop = keras.callbacks.EarlyStopping("score", mode="min", patience=2, restore_best_weights=True)
    model.fit(*data(), batch_size=6, epochs=6, verbose=0, callbacks=[Score(), stop])
    return [float(model.evaluate(*data(), batch_size=6, verbose=0))]


def of_pairs(wrap: Any) -> list[float]:
    """Losses of a function that compares the samples of a batch, and a metric along them."""
    import keras

    model = made(wrap)
    model.compile("sgd", keras.losses.Circle())
    x, y = data()
    labels = np.repeat(np.arange(4), 5).astype("int32")
    found = model.fit(x, labels, batch_size=10, epochs=2, shuffle=True, verbose=0).history["loss"]
    model = made(wrap)
    model.compile("sgd", "mse", metrics=[keras.metrics.PearsonCorrelation(axis=0)])
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0).history
    (name,) = (one for one in history if one != "loss")
    return [*found, *history["loss"], *history[name]]


def own_step(wrap: Any) -> list[np.ndarray]:
    """Weights after steps of one's own with a loss that is a function, and batches that cannot be shared equally."""
    import keras
    from keras import ops

    class Own(keras.Model):  # type: ignore[misc]
        def train_step(self, given: Any) -> dict[str, Any]:
            x, y = given
            self.zero_grad()
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss.backward()
            variables = self.trainable_weights
            self.optimizer.apply([one.value.grad for one in variables], variables)
            return {"loss": loss.detach()}

    model = made(wrap, Own)
    model.compile(keras.optimizers.SGD(0.1), loss=lambda t, p: ops.mean(ops.square(p - t), axis=-1))
    model.fit(*data(), batch_size=3, epochs=2, verbose=0)
    return [np.array(one) for one in model.get_weights()]


CASES = [warmed_up, restored, of_pairs, own_step]


def one_loader() -> tuple[list[float], list[float]]:
    """Losses of two models that are parallel in different ways and take their batches from one loader."""
    import keras
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hocket.keras

    x, y = (torch.from_numpy(one) for one in data())
    loader, losses = DataLoader(TensorDataset(x, y), batch_size=6), []
    for more in ({}, {"pipeline": 2}):
        model = made(lambda one, more=more: hocket.keras.Model(one, **more))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses.append(model.fit(loader, epochs=2, verbose=0).history["loss"])
    return losses[0], losses[1]


def every() -> tuple[list[Any], tuple[list[float], list[float]]]:
    import hocket.keras

    return [case(hocket.keras.Model) for case in CASES], one_loader()


@functools.cache
def found_by_ranks() -> list[Any]:
    return run_ranks(every, 2, timeout_s=150)


def test_two_ranks_do_what_one_process_does() -> None:
    import hocket.keras  # which chooses the backend torch

    assert hocket.keras
    expected = [case(lambda model: model) for case in CASES]
    for rank, _ in found_by_ranks():
        for case, found, wanted in zip(CASES, rank, expected, strict=True):
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=case.__name__)


def test_a_loader_serves_models_that_are_parallel_in_different_ways() -> None:
    for _, (first, second) in found_by_ranks():
        assert second == pytest.approx(first, rel=1e-5)
