"""Small Keras programs: each trains, evaluates and predicts, plainly or on the ranks of a world."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers, ops

Wrap = Callable[[Any], Any]
CASES: dict[str, Callable[[Wrap], dict[str, Any]]] = {}


def case(function: Callable[[Wrap], dict[str, Any]]) -> Callable[[Wrap], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(count, 6, 6, 2)).astype("float32")
    labels = (x.mean((1, 2, 3)) > 0).astype(int) + 2 * (x[:, :3].mean((1, 2, 3)) > 0)
    return x, np.eye(4, dtype="float32")[labels]


def vectors(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(6)
    x = random.normal(size=(count, 5)).astype("float32")
    return x, (x[:, :2].sum(1) + 0.1 * random.normal(size=count) > 0).astype("float32")[:, None]


def dense(*between: Any, seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, activation="tanh"), *between, layers.Dense(1, activation="sigmoid")]
    )


@case
def convolution_with_batch_norm_and_dropout(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model = wrap(
        keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(4, 3, activation="relu", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.SpatialDropout2D(0.2),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(4, activation="softmax"),
            ]
        )
    )
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc"), "mae"])
    x, y = images(75)
    fitted = model.fit(x, y, batch_size=16, epochs=3, validation_split=0.1, verbose=0)
    return {
        "history": fitted.history,
        "evaluation": model.evaluate(x, y, batch_size=20, verbose=0),
        "prediction": model.predict(x, batch_size=32, verbose=0),
        "weights": model.get_weights(),
    }


@case
def seeded_noise(wrap: Wrap) -> dict[str, Any]:
    model = wrap(dense(layers.GaussianNoise(0.3, seed=4), layers.Dropout(0.3, seed=5), layers.GaussianDropout(0.2)))
    model.compile("sgd", "binary_crossentropy")
    x, y = vectors(50)
    return {"history": model.fit(x, y, batch_size=12, epochs=2, verbose=0).history, "weights": model.get_weights()}


@case
def masked_sequences(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(2)
    model = wrap(
        keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(9, 6, mask_zero=True), layers.Dense(9)])
    )
    random = np.random.default_rng(0)
    x = random.integers(1, 9, (41, 7))
    for row, length in enumerate(random.integers(1, 8, 41)):
        x[row, length:] = 0
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["sparse_categorical_accuracy"])
    fitted = model.fit(x, x, batch_size=10, epochs=2, validation_data=(x[:13], x[:13]), verbose=0)
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def losses_that_see_the_whole_batch(wrap: Wrap) -> dict[str, Any]:
    def contrast(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_pred - ops.mean(y_pred) - y_true))

    x, y = vectors(38)
    found: dict[str, Any] = {}
    summed = keras.losses.MeanSquaredError(reduction="sum")
    weighted = keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight")
    for name, loss in {"own": contrast, "dice": "dice", "sum": summed, "weighted": weighted}.items():
        model = wrap(dense())
        model.compile(keras.optimizers.SGD(0.01), loss)
        weights = 1 + np.arange(38) % 3 if name == "weighted" else None
        fitted = model.fit(x, y, batch_size=9, epochs=2, sample_weight=weights, verbose=0)
        found[name] = [fitted.history, model.get_weights()]
    return found


@case
def a_class_that_is_left_out(wrap: Wrap) -> dict[str, Any]:
    x, _ = vectors(31)
    labels = np.random.default_rng(1).integers(0, 3, 31)
    keras.utils.set_random_seed(4)
    model = wrap(keras.Sequential([keras.Input((5,)), layers.Dense(3)]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    model.compile("sgd", loss, weighted_metrics=["accuracy"])
    fitted = model.fit(
        x, labels, batch_size=7, epochs=2, sample_weight=np.linspace(0.1, 2, 31, dtype="float32"),
        validation_data=(x[:9], labels[:9]), verbose=0,
    )  # fmt: skip
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def losses_of_several_outputs_that_see_the_whole_batch(wrap: Wrap) -> dict[str, Any]:
    x, y = vectors(14)  # of batches of six the last has fewer samples than four ranks
    keras.utils.set_random_seed(4)
    inputs = keras.Input((5,))
    model = wrap(keras.Model(inputs, [layers.Dense(1, name="one")(inputs), layers.Dense(1, name="two")(inputs)]))
    model.compile("sgd", ["mse", keras.losses.MeanSquaredError(reduction="sum")])
    return {"history": model.fit(x, [y, y], batch_size=6, epochs=2, verbose=0).history, "weights": model.get_weights()}


@case
def own_losses_of_the_whole_batch(wrap: Wrap) -> dict[str, Any]:
    """Losses of models of one's own that look at other samples, or count some, and a mean that the model keeps."""

    def of(function: Callable[[Any, Any, Any], Any]) -> Any:
        class Own(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.mean = layers.Dense(3), keras.metrics.Mean(name="mean")

            def call(self, x: Any) -> Any:
                return self.inner(x)

            def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
                loss = function(x, y, y_pred)
                self.mean.update_state(loss)
                return loss

        return Own()

    def pairs(x: Any, y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.logsumexp(ops.matmul(y_pred, ops.transpose(x[:, :3])), axis=-1))

    def some(_: Any, y: Any, y_pred: Any) -> Any:
        kept = ops.cast(y > 0, "float32")
        return ops.sum(kept * ops.square(y_pred)) / (1 + ops.sum(kept))

    def all_alike(_: Any, y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_pred - y))

    x, y = vectors(31)
    found: dict[str, Any] = {}
    for function in (pairs, some, all_alike):
        keras.utils.set_random_seed(4)
        model = wrap(of(function))
        model.compile(keras.optimizers.SGD(0.05))
        found[function.__name__] = [model.fit(x, y, batch_size=9, epochs=2, verbose=0).history, model.get_weights()]
    return found


@case
def noise_of_other_shapes(wrap: Wrap) -> dict[str, Any]:
    """Shapes whose first axis may be as long as a rank's part, or has several rows for each sample."""

    class Folded(layers.Layer):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any, training: bool = False) -> Any:
            rows = ops.reshape(x, (-1, x.shape[-1]))
            return ops.reshape(self.inner(rows, training=training), (-1, *x.shape[1:]))

    class Scaled(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(5)

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x
            kernel = keras.random.normal((3, 3), seed=self.seed)
            return ops.matmul(x, kernel) * keras.random.gamma((ops.shape(x)[0], 1, 1), 2.0, seed=self.seed)

    x = np.random.default_rng(3).normal(size=(14, 4, 3)).astype("float32")
    keras.utils.set_random_seed(4)
    between = [
        layers.Dropout(0.4, noise_shape=(1, 4, 3)),
        Folded(layers.Dropout(0.5)),
        Folded(layers.GaussianNoise(1.0)),
    ]
    model = wrap(keras.Sequential([keras.Input((4, 3)), *between, Scaled(), layers.Flatten(), layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    fitted = model.fit(x, x[:, 0, :1], batch_size=6, epochs=2, verbose=0)  # parts of three samples, and of one
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def metrics_that_are_no_sums(wrap: Wrap) -> dict[str, Any]:
    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

        def result(self) -> Any:
            return self.value

    def spread(y_true: Any, y_pred: Any) -> Any:
        return ops.std(y_pred)

    model = wrap(dense())
    model.compile("adam", "binary_crossentropy", metrics=[Largest(), spread, "accuracy", keras.metrics.F1Score()])
    x, y = vectors(45)
    fitted = model.fit(x, y, batch_size=10, epochs=2, validation_data=(x[:7], y[:7]), verbose=0)
    return {"history": fitted.history, "evaluation": model.evaluate(x, y, batch_size=11, verbose=0, return_dict=True)}


@case
def weights_of_classes_and_samples(wrap: Wrap) -> dict[str, Any]:
    x, y = vectors(47)
    found: dict[str, Any] = {}
    for name, weight in {
        "class": {"class_weight": {0: 0.5, 1: 2.0}},
        "sample": {"sample_weight": np.linspace(0.1, 2, 47)},
    }.items():
        model = wrap(dense())
        model.compile("rmsprop", "binary_crossentropy", weighted_metrics=["accuracy"], metrics=["mse"])
        found[name] = model.fit(x, y, batch_size=10, epochs=2, verbose=0, **weight).history
        found[name + " evaluation"] = model.evaluate(
            x, y, batch_size=10, sample_weight=np.arange(47.0), verbose=0, return_dict=True
        )
    return found


class Batches(keras.utils.PyDataset):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.x, self.y = vectors(43)
        self.epochs = 0

    def on_epoch_end(self) -> None:
        self.epochs += 1
        order = np.random.default_rng(self.epochs).permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * 10, index * 10 + 10)
        return self.x[rows], self.y[rows]


@case
def batches_made_by_the_user(wrap: Wrap) -> dict[str, Any]:
    def endless() -> Any:
        random = np.random.default_rng(3)
        while True:
            x, y = vectors(90)
            rows = random.integers(0, 90, 13)
            yield x[rows], y[rows]

    found: dict[str, Any] = {}
    data = {
        "py_dataset": (lambda: Batches(workers=2), {"class_weight": {0: 1.0, 1: 3.0}}),
        "generator": (endless, {"steps_per_epoch": 4}),
    }
    for name, (make, options) in data.items():
        model = wrap(dense(layers.Dropout(0.2)))
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
        fitted = model.fit(make(), epochs=3, validation_data=Batches(), verbose=0, **options)
        found[name] = [fitted.history, model.predict(Batches(), verbose=0)]
    return found


@case
def torch_loaders(wrap: Wrap) -> dict[str, Any]:
    x, y = vectors(43)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    model = wrap(dense(layers.Dropout(0.3)))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    plain = torch.utils.data.DataLoader(dataset, batch_size=8)
    fitted = model.fit(plain, epochs=2, validation_data=plain, verbose=0)
    return {
        "history": fitted.history,
        "evaluation": model.evaluate(plain, verbose=0),
        "prediction": model.predict(torch.utils.data.DataLoader(x, batch_size=8), verbose=0),
    }


@case
def several_outputs(wrap: Wrap) -> dict[str, Any]:
    keras.utils.set_random_seed(9)
    first, second = keras.Input((5,), name="first"), keras.Input((5,), name="second")
    joined = layers.concatenate([first, layers.Dense(4, activity_regularizer="l2")(second)])
    left, right = layers.Dense(1, name="left")(joined), layers.Dense(3, activation="softmax", name="right")(joined)
    model = wrap(keras.Model([first, second], [left, right]))
    model.compile(
        keras.optimizers.AdamW(0.01, clipnorm=0.5),
        {"left": "mse", "right": "categorical_crossentropy"},
        loss_weights={"left": 1.0, "right": 0.3},
        metrics={"left": ["mae"], "right": ["accuracy"]},
    )
    x, y = vectors(40)
    targets = {"left": y, "right": np.eye(3)[np.arange(40) % 3]}
    inputs = {"first": x, "second": x[::-1].copy()}
    fitted = model.fit(inputs, targets, batch_size=8, epochs=2, validation_split=0.2, verbose=0)
    return {"history": fitted.history, "prediction": model.predict(inputs, verbose=0)}


@case
def a_step_of_the_user_s_own(wrap: Wrap) -> dict[str, Any]:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers.Dense(3, activation="relu")
            self.outer = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.outer(self.inner(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            error = ops.mean(ops.square(self(x, training=True) - y))
            error.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, self(x))
            # a metric of several; the model's tracker of the loss, which was not told
            return {"error": error, "loss": error, **{m.name: m.result() for m in self.metrics if m.name != "loss"}}

    keras.utils.set_random_seed(4)
    model = wrap(Own())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    x, y = vectors(43)
    fitted = model.fit(x, y, batch_size=10, epochs=2, verbose=0)
    return {
        "history": fitted.history,
        "weights": model.get_weights(),
        "evaluation": model.evaluate(x, y, verbose=0),
    }


@case
def a_loss_of_the_user_s_own(wrap: Wrap) -> dict[str, Any]:
    class Own(keras.Sequential):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            return ops.sum(ops.square(y - y_pred)) / 10

    x, y = vectors(43)
    keras.utils.set_random_seed(4)
    model = wrap(Own([keras.Input((x.shape[1],)), layers.Dense(3, activation="tanh"), layers.Dense(1)]))
    model.compile("adam", "mse")
    before = model.evaluate(x, y, batch_size=10, verbose=0)
    fitted = model.fit(x, y, batch_size=10, epochs=3, verbose=0, validation_data=(x, y))
    return {"before": before, "history": fitted.history, "weights": model.get_weights()}


@case
def optimizers(wrap: Wrap) -> dict[str, Any]:
    x, y = vectors(48)
    found: dict[str, Any] = {}
    kinds = {
        "clipped": keras.optimizers.Adam(0.05, global_clipnorm=0.1),
        "accumulating": keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "averaged": keras.optimizers.Adam(0.05, use_ema=True, ema_overwrite_frequency=3),
        "scheduled": keras.optimizers.Lion(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.7)),
    }
    for name, optimizer in kinds.items():
        model = wrap(dense())
        model.compile(optimizer, "binary_crossentropy")
        found[name] = [model.fit(x, y, batch_size=12, epochs=2, verbose=0).history, model.get_weights()]
    halved = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**22)
    model = wrap(keras.Sequential([keras.Input((5,)), layers.Dense(1, dtype="mixed_float16")]))
    model.compile(halved, "mse")
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    found["overflowing"] = [int(halved.iterations), float(halved.dynamic_scale)]
    return found


@case
def going_on(wrap: Wrap) -> dict[str, Any]:
    """Two fits, freezing a layer in between, other shuffles, fewer steps, epochs that begin later."""
    x, y = vectors(50)
    model = wrap(dense(layers.Dropout(0.1)))
    model.compile("adam", "binary_crossentropy")
    options: dict[str, Any] = {"batch_size": 10, "verbose": 0}
    first = model.fit(x, y, epochs=2, **options).history
    model.layers[0].trainable = False
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    second = model.fit(
        x, y, epochs=5, initial_epoch=3, shuffle="batch", steps_per_epoch=3, validation_data=(x, y),
        validation_steps=2, validation_batch_size=7, **options,
    )  # fmt: skip
    return {"first": first, "second": second.history, "epochs": second.epoch, "weights": model.get_weights()}


@case
def single_batches(wrap: Wrap) -> dict[str, Any]:
    x, y = vectors(11)
    model = wrap(dense())
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    return {
        "train": [model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0}) for _ in range(3)],
        "test": model.test_on_batch(x, y, return_dict=True),
        "predict": model.predict_on_batch(x),
        "few": model.predict(x[:1], verbose=0),
        "by a function": _by_a_function(model, x, y),
        "before training": _predicting_first(wrap, x, y),
    }


def _predicting_first(wrap: Wrap, x: Any, y: Any) -> Any:
    """Have verbs that know no targets build a model, with other weights on each rank, and a metric of several."""

    class Two(keras.metrics.MeanSquaredError):  # type: ignore[misc]
        additive = True

        def result(self) -> Any:
            return {"mean": super().result(), "root": ops.sqrt(super().result())}

    found = []
    for late, verb in enumerate((lambda model: model.predict(x, verbose=0), lambda model: model.predict_on_batch(x))):
        keras.utils.set_random_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        model = wrap(keras.Sequential([layers.Dense(3), layers.Dense(1)]))
        options = {"optimizer": "sgd", "loss": "mse", "metrics": [Two()]}
        if not late:
            model.compile(**options)
        found.append(verb(model))
        if late:
            model.compile(**options)
        found.append(model.fit(x, y, batch_size=4, verbose=0).history)
    return found


def _by_a_function(model: Any, x: Any, y: Any) -> Any:
    model.compile("sgd", lambda y_true, y_pred: keras.ops.mean(keras.ops.square(y_true - y_pred)))
    return [model.train_on_batch(x[:rows], y[:rows]) for rows in (11, 2)]


@case
def verbs_of_its_own(wrap: Wrap) -> dict[str, Any]:
    """As KerasHub's tasks, which prepare what they are given, as another kind of data, for Keras' verbs."""

    class Task(keras.Model):  # type: ignore[misc]
        def fit(self, x: Any, y: Any, batch_size: int, **kwargs: Any) -> Any:
            return super().fit(_prepared(x, y, batch_size), steps_per_epoch=-(-len(x) // batch_size), **kwargs)

        def evaluate(self, x: Any, y: Any = None, batch_size: int | None = None, **kwargs: Any) -> Any:
            if not kwargs.get("_use_cached_eval_dataset"):
                x = keras.ops.stack([len(text) * keras.ops.arange(5.0) for text in x])
            return super().evaluate(x, y, batch_size, **kwargs)

        def train_on_batch(self, x: Any, y: Any) -> Any:
            return super().train_on_batch(*next(_prepared(x, y, len(x))))

    plain = dense()
    model = wrap(Task(plain.inputs, plain.outputs))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    texts = ["a" * (one % 3) for one in range(11)]
    y = vectors(11)[1]
    valid = (vectors(7)[0], y[:7])
    return {
        "history": model.fit(texts, y, 4, epochs=2, validation_data=valid, verbose=0).history,
        "evaluated": model.evaluate(texts, y, 5, verbose=0),
        "batch": model.train_on_batch(texts[:7], y[:7]),
        "weights": model.get_weights(),
    }


def _prepared(texts: list[str], y: Any, batch_size: int) -> Any:
    while True:
        for begin in range(0, len(texts), batch_size):
            some = texts[begin : begin + batch_size]
            yield (
                np.array([[len(text) * k for k in range(5)] for text in some], "float32"),
                y[begin : begin + batch_size],
            )


def shuffled_loader(wrap: Wrap) -> dict[str, Any]:
    """Its order is hocket's own, so that it is compared between numbers of workers only."""
    x, y = vectors(43)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    model = wrap(dense())
    model.compile("adam", "binary_crossentropy")
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    histories = [model.fit(loader, epochs=2, verbose=0).history for _ in range(2)]
    return {"histories": histories, "weights": model.get_weights()}


def run_all(names: list[str], distributed: bool) -> dict[str, Any]:
    """The results of the cases, of Keras alone or of hocket on the world that this process is in."""
    torch.set_num_threads(1)
    if distributed:
        import hocket.keras

        wrap: Wrap = hocket.keras.Model
    else:

        def wrap(model: Any) -> Any:
            return model

    return {name: CASES.get(name, shuffled_loader)(wrap) for name in names}
