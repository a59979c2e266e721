"""What the look at a model before its first batch finds."""

from typing import Any

import numpy as np
import pytest
import torch


def test_a_layer_that_keeps_what_it_sees_of_the_data_is_found_and_is_as_it_was() -> None:
    import keras

    import hocket.keras
    from hocket.keras._look import BatchLook
    from hocket.keras._random import DrawnShapes

    class Codebook(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            return x

    assert hocket.keras
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))
    for between, wanted in ((Codebook(), "mean"), (keras.layers.SpectralNormalization(keras.layers.Dense(3)), "")):
        model = keras.Sequential([keras.Input((3,)), between, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        before = [np.array(one) for one in model.non_trainable_weights]
        look = BatchLook(model, (x, x[:, :1]), training=True, own_loss=False, known=DrawnShapes())
        assert look.state.endswith(wanted)
        assert bool(look.state) == bool(wanted)
        for one, other in zip(before, model.non_trainable_weights, strict=True):
            np.testing.assert_array_equal(one, np.array(other))


def test_numbers_and_lists_of_layers_are_as_they_were_and_those_of_the_data_are_found() -> None:
    """torch's modules() gives no layer of a Keras model: each look counted, and its samples stayed in lists."""
    import keras

    from hocket.keras._look import BatchLook
    from hocket.keras._random import DrawnShapes

    class Follows(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.passes, self.mean, self.means = kind, 0, 0.0, []

        def call(self, x: Any, training: bool = False) -> Any:
            before = self.mean + sum(self.means)
            self.passes += bool(training)
            if training and self.kind == "mean":
                self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
            if training and self.kind == "means":
                self.means.append(float(x.detach().mean()))
            return x - before

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))
    for kind in ("", "mean", "means"):
        layer = Follows(kind)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        before = layer.passes, layer.mean, list(layer.means)
        look = BatchLook(model, (x, x[:, :1]), training=True, own_loss=False, known=DrawnShapes())
        assert look.state.rpartition("/")[2] == kind
        assert (layer.passes, layer.mean, list(layer.means)) == before


def test_a_metric_that_a_layer_updates_by_one_number_a_batch_is_found_and_is_as_it_was() -> None:
    """Ranks' sums of means are no sum of means of the batch; a `Mean` takes such a number by its samples."""
    import keras

    from hocket.keras._look import BatchLook
    from hocket.keras._random import DrawnShapes

    class Telling(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, metric: Any, by_sample: bool = False) -> None:
            super().__init__()
            self.metric, self.by_sample = metric, by_sample

        def call(self, x: Any) -> Any:
            self.metric.update_state(keras.ops.mean(keras.ops.abs(x), axis=-1 if self.by_sample else None))
            return x

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))
    mean, total, of_samples = (keras.metrics.Mean(name="mean"), *(keras.metrics.Sum(name=name) for name in "ab"))
    for layer, wanted in ((Telling(mean), ""), (Telling(total), "a"), (Telling(of_samples, by_sample=True), "")):
        layer.metric.update_state(3.0)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        before = float(layer.metric.result())
        look = BatchLook(model, (x, x[:, :1]), training=True, own_loss=False, known=DrawnShapes())
        assert look.untold == wanted
        assert float(layer.metric.result()) == before


def test_rounding_of_mixed_precision_does_not_hide_that_samples_meet() -> None:
    import keras

    from hocket.keras._look import BatchLook
    from hocket.keras._random import DrawnShapes
    from hocket.keras._step_look import StepLook

    class Own(keras.Model):  # type: ignore[misc]
        def train_step(self, given: Any) -> dict[str, Any]:
            x, y = given
            found = keras.ops.cast(self(x), "float32")
            loss = keras.ops.mean((found - y) ** 2) + self.spread * keras.ops.std(found)
            self.zero_grad()
            loss.backward()
            return {"loss": loss}

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))
    for share in (0.0, 0.1):
        keras.utils.set_random_seed(0)
        given = keras.Input((3,))
        inner = keras.layers.Dense(4, dtype="mixed_bfloat16")(given)
        plain = keras.layers.Dense(1, dtype="mixed_bfloat16")(inner)
        model = Own(given, plain)
        model.spread = 10 * share
        model.compile("sgd")
        step = StepLook(model, (x, x[:, :1]), DrawnShapes(), lambda _: False, [], [], "train_step")
        meeting = keras.Model(given, plain - share * keras.ops.mean(plain, axis=0, keepdims=True))
        look = BatchLook(meeting, (x, x[:, :1]), training=True, own_loss=False, known=DrawnShapes())
        assert [bool(step.wrong), bool(look.meets), step.unknown] == [bool(share), bool(share), ""]
        assert model.layers[1].compute_dtype == "bfloat16"


def test_micro_batches_refuse_spectral_normalization() -> None:
    import keras

    from hocket.keras import _arguments

    layer = keras.layers.SpectralNormalization(keras.layers.Dense(3), name="spectral")
    model = keras.Sequential([keras.Input((3,)), layer])
    _arguments.check_micro_batches(model, 1)
    with pytest.raises(ValueError, match="'spectral' is a SpectralNormalization.*micro_batches=2"):
        _arguments.check_micro_batches(model, 2)


def test_rand_augment_is_told() -> None:
    import keras

    from hocket.keras._look import BatchLook
    from hocket.keras._random import DrawnShapes

    layers = [keras.Input((8, 8, 3)), keras.layers.RandAugment(), keras.layers.Flatten(), keras.layers.Dense(1)]
    x = torch.rand(4, 8, 8, 3)
    look = BatchLook(keras.Sequential(layers), (x, x[:, 0, 0, 0]), training=True, own_loss=False, known=DrawnShapes())
    assert any("RandAugment" in one for one in look.draws)


def test_shapes_that_cannot_be_told_apart_are_told() -> None:
    from hocket.keras._random import DrawnShapes

    known = DrawnShapes()
    known.learn({8: [(8,), (2,)], 3: [(3,), (2,)]})
    assert [known.per_sample((4,), 4), known.per_sample((2,), 4), known.per_sample((1,), 1)] == [1, 0, 1]
    with pytest.warns(UserWarning, match="cannot be told apart"):
        assert not known.per_sample((2,), 2)


def test_numbers_that_a_model_draws_for_its_samples_by_torch_or_numpy_are_told() -> None:
    """A layer with `torch.nn.Dropout` gave each rank masks of its own, and nothing was said: losses were 4e-2 off."""
    import keras

    from hocket.keras._look import BatchLook
    from hocket.keras._random import DrawnShapes

    class Drawing(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, draw: Any) -> None:
            super().__init__()
            self.draw = draw

        def call(self, x: Any, training: bool = False) -> Any:
            return x + self.draw(x) if training else x

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))
    by_torch, by_numpy = {"torch's own functions (torch.rand, torch.nn.Dropout)"}, {"functions of numpy or Python"}
    cases: list[tuple[Any, set[str]]] = [
        (keras.layers.TorchModuleWrapper(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())), by_torch),
        (Drawing(torch.rand_like), by_torch),
        (Drawing(lambda x: torch.from_numpy(np.random.uniform(size=x.shape)).to(x)), by_numpy),
        (Drawing(lambda _: torch.rand(())), set()),  # for the batch: alike on all ranks
        (keras.layers.Dropout(0.5), set()),
        (keras.layers.GaussianNoise(0.5, seed=1), set()),
    ]
    for layer, wanted in cases:
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        for training in (True, False):
            look = BatchLook(model, (x, x[:, :1]), training=training, own_loss=False, known=DrawnShapes())
            assert look.draws == (wanted if training else set())
            assert not look.error("the model")
