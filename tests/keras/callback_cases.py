"""Keras programs with callbacks; what they write lies in a directory that the ranks share."""

import contextlib
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch
from keras import callbacks

from hocket.parallel import CheckpointError

from .cases import Wrap, dense, vectors

CASES: dict[str, Callable[[Wrap, Path], dict[str, Any]]] = {}


def hocket_model() -> Any:
    """The class that wraps models where ranks train, if it is loaded."""
    return getattr(sys.modules.get("hocket.keras"), "Model", None)


def case(function: Callable[[Wrap, Path], dict[str, Any]]) -> Callable[[Wrap, Path], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def trained(wrap: Wrap, used: list[Any], *, epochs: int = 4, rate: float = 0.05, model: Any = None) -> Any:
    model = model or wrap(dense())
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=["accuracy"])
    x, y = vectors(60)
    fitted = model.fit(
        x[:43], y[:43], batch_size=10, epochs=epochs, callbacks=used, validation_data=(x[43:], y[43:]), verbose=0
    )
    return model, fitted


@case
def checkpoint(wrap: Wrap, directory: Path) -> dict[str, Any]:
    used = [
        callbacks.ModelCheckpoint(directory / "best.keras", monitor="val_loss", save_best_only=True),
        callbacks.ModelCheckpoint(directory / "{epoch:02d}.weights.h5", save_weights_only=True),
        callbacks.ModelCheckpoint(directory / "batch.keras", save_freq=7),
    ]
    model, fitted = trained(wrap, used)
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def early_stopping(wrap: Wrap, directory: Path) -> dict[str, Any]:
    stop = callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True, verbose=1)
    model, fitted = trained(wrap, [stop], epochs=30, rate=1.0)
    assert len(fitted.epoch) < 30
    return {"epochs": fitted.epoch, "weights": model.get_weights(), "stopped": stop.stopped_epoch}


@case
def learning_rates(wrap: Wrap, directory: Path) -> dict[str, Any]:
    plateau = callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.5)
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    model, fitted = trained(wrap, [scheduler, plateau], epochs=5)
    assert fitted.history["learning_rate"][-1] < 0.05 * 0.9**4
    return {"history": fitted.history, "rate": float(model.optimizer.learning_rate)}


@case
def names_of_its_own(wrap: Wrap, directory: Path) -> dict[str, Any]:
    """A callback whose methods call the logs otherwise than Keras does, which gives them by place."""

    class Slower(callbacks.Callback):
        def on_epoch_end(self, number: int, results: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.01 * results["loss"] / (1 + number)

    silent = callbacks.LambdaCallback(on_epoch_begin=lambda e, _: None, on_train_end=lambda _: None)
    _, fitted = trained(wrap, [Slower(), silent], epochs=3)
    return {"history": fitted.history}


@case
def terminate_on_nan(wrap: Wrap, directory: Path) -> dict[str, Any]:
    model = wrap(dense())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = vectors(40)
    x[30] = np.nan  # in one rank's part of one batch
    fitted = model.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0, callbacks=[callbacks.TerminateOnNaN()])
    return {"epochs": fitted.epoch, "iterations": int(model.optimizer.iterations)}


@case
def csv(wrap: Wrap, directory: Path) -> dict[str, Any]:
    trained(wrap, [callbacks.CSVLogger(directory / "log.csv")])
    return {}


@case
def backup_and_restore(wrap: Wrap, directory: Path) -> dict[str, Any]:
    used = [callbacks.BackupAndRestore(str(directory / "backup"), delete_checkpoint=False)]
    trained(wrap, used, epochs=2)
    model, fitted = trained(wrap, used, epochs=4)  # a new model: it goes on with epoch 2
    assert fitted.epoch == [2, 3]
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def resumed(wrap: Wrap, directory: Path) -> dict[str, Any]:
    """Told to end in the middle of epoch 2, and gone on; plain Keras is not interrupted."""

    class End(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == 12:
                os.kill(os.getpid(), signal.SIGUSR1)

    def run(*more: Any) -> Any:
        model = wrap(dense(keras.layers.Dropout(0.3)))
        if wrap is hocket_model():
            model.resume(directory.parent / "resume")  # beside what plain Keras writes, too
        plateau = callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.5)
        return trained(wrap, [plateau, *more], model=model)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        if wrap is hocket_model():
            with contextlib.suppress(SystemExit):
                run(End())
                raise AssertionError("it went on after it had been told to end")
        model, fitted = run()
        if wrap is hocket_model():
            other = wrap(dense(keras.layers.Dropout(0.3)))
            other.resume(directory.parent / "resume")
            other.compile("adamw", "binary_crossentropy")
            with pytest.raises(CheckpointError, match=r"another model or optimizer \(Adam; here AdamW\)"):
                other.fit(*vectors(60), verbose=0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert fitted.epoch == [0, 1, 2, 3]
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def averaged_weights(wrap: Wrap, directory: Path) -> dict[str, Any]:
    model = wrap(dense())
    model.compile(keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5), "binary_crossentropy")
    x, y = vectors(40)
    fitted = model.fit(
        x, y, batch_size=10, epochs=3, validation_split=0.2, verbose=0, callbacks=[callbacks.SwapEMAWeights()]
    )
    return {"history": fitted.history, "weights": model.get_weights()}


class Meddling(callbacks.Callback):
    """A user's: halves the learning rate in an epoch, stops training in a batch, and predicts on the side."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
        self.model.predict(vectors(7)[0], verbose=0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 12:
            self.model.stop_training = True


@case
def meddling(wrap: Wrap, directory: Path) -> dict[str, Any]:
    model, fitted = trained(wrap, [Meddling()])
    return {
        "history": fitted.history,
        "weights": model.get_weights(),
        "rate": float(model.optimizer.learning_rate),
        "iterations": int(model.optimizer.iterations),
    }


class Annealed(keras.layers.Layer):
    """Adds a loss by a variable and by a plain attribute, which a callback changes."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = 0.0
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.add_loss((self.kept + self.plain) * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@case
def annealing(wrap: Wrap, directory: Path) -> dict[str, Any]:
    """A user's callback, of rank 0, that changes what the loss and the optimizer go by, and weights in a batch."""
    layer = Annealed()
    model = wrap(dense(layer))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.3), "binary_crossentropy")

    class Anneal(callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            layer.plain, self.model.optimizer.momentum = 0.5 * epoch, 0.3 + 0.2 * epoch
            layer.kept.assign(epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.layers[0].kernel
            kernel.assign(keras.ops.clip(kernel, -0.4, 0.4))

    x, y = vectors(40)
    fitted = model.fit(x, y, batch_size=15, epochs=3, verbose=0, callbacks=[Anneal()])
    return {"history": fitted.history, "weights": model.get_weights()}


@case
def verbs_within_fit(wrap: Wrap, directory: Path) -> dict[str, Any]:
    """A callback of all ranks evaluates and predicts by the verbs of the wrapped model, between steps that go on."""
    model, seen = wrap(dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.2))), list[Any]()
    x, y = vectors(15)

    class Judge(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                seen.append(model.predict(x, batch_size=7, verbose=0))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(model.evaluate(x, y, batch_size=7, verbose=0))

    judge = Judge() if wrap is not hocket_model() else placed_everywhere(Judge())
    _, fitted = trained(wrap, [judge], epochs=2, model=model)
    return {"history": fitted.history, "weights": model.get_weights(), "seen": seen}


def placed_everywhere(callback: Any) -> Any:
    import hocket.keras

    return hocket.keras.callbacks.Callback(callback, run_on_all_ranks=True)


@case
def tensorboard(wrap: Wrap, directory: Path) -> dict[str, Any]:
    with summary_stand_in():
        board = callbacks.TensorBoard(str(directory), update_freq=2, write_graph=False, profile_batch=0)
        trained(wrap, [board], epochs=2)
    return {}


@contextlib.contextmanager
def summary_stand_in() -> Iterator[None]:
    """Keras' TensorBoard writes by tensorflow.summary, which the torch backend has not: lines of text instead."""
    current: list[Any] = []

    class Writer:
        def __init__(self, path: str) -> None:
            Path(path).mkdir(parents=True, exist_ok=True)
            self.file = open(Path(path) / "events", "a")  # noqa: SIM115

        @contextlib.contextmanager
        def as_default(self, step: Any = None) -> Iterator[None]:
            current.append(self)
            yield
            current.pop()

        def close(self) -> None:
            self.file.close()

    def scalar(name: str, value: Any, step: Any = None) -> None:
        if current[-1] is not None:
            print(json.dumps([name, round(float(value), 4), int(step)]), file=current[-1].file)

    @contextlib.contextmanager
    def record_if(condition: Callable[[], bool]) -> Iterator[None]:
        current.append(current[-1] if condition() else None)
        yield
        current.pop()

    summary: Any = types.ModuleType("tensorflow.summary")
    summary.create_file_writer, summary.scalar, summary.record_if = Writer, scalar, record_if
    package: Any = types.ModuleType("tensorflow")
    package.summary = summary
    sys.modules.update({"tensorflow": package, "tensorflow.summary": summary})
    try:
        yield
    finally:
        del sys.modules["tensorflow"], sys.modules["tensorflow.summary"]


def run_all(names: list[str], directory: str, distributed: bool) -> dict[str, Any]:
    """The results of cases, of Keras alone or of hocket on the world that this process is in."""
    torch.set_num_threads(1)
    if distributed:
        import hocket.keras

        wrap: Wrap = hocket.keras.Model
    else:

        def wrap(model: Any) -> Any:
            return model

    found = {}
    for name in names:
        own = Path(directory) / name
        own.mkdir(parents=True, exist_ok=True)
        found[name] = CASES[name](wrap, own)
    return found


def placement() -> dict[str, Any]:
    """Which callbacks run on this rank, and which logs they see."""
    import hocket.keras

    class Seeing(callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.losses.append(logs["loss"])

    place = hocket.keras.callbacks.Callback
    root, everywhere, own = Seeing(), Seeing(), Seeing()
    used = [root, place(everywhere, run_on_all_ranks=True), place(own, run_on_all_ranks=True, aggregate_logs=False)]
    _, fitted = trained(hocket.keras.Model, used)
    keras.utils.set_random_seed(1)
    norm = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    apart, norms = trained(None, [], model=hocket.keras.Model(norm, synchronise_batch_norm=False))
    return {
        "apart": [norms.history, apart.get_weights(), apart.evaluate(*vectors(30), verbose=0)],
        "history": fitted.history["loss"],
        "root": root.losses,
        "everywhere": everywhere.losses,
        "own": own.losses,
    }


def saving(directory: str) -> dict[str, Any]:
    """Saves on rank 0, loads on all, by the verbs of the model."""
    import hocket.keras

    model, _ = trained(hocket.keras.Model, [], epochs=1)
    model.save(Path(directory) / "model.keras")
    model.save_weights(Path(directory) / "model.weights.h5")
    loaded = hocket.keras.load_model(Path(directory) / "model.keras")
    other = hocket.keras.Model(dense(seed=torch.distributed.get_rank()))
    other.load_weights(Path(directory) / "model.weights.h5")
    x, y = vectors(20)
    try:
        other.load_weights(Path(directory) / "missing.weights.h5")
    except OSError as error:
        message = str(error)
    except ValueError as error:
        message = str(error)
    return {
        "weights": [model.get_weights(), loaded.get_weights(), other.get_weights()],
        "evaluations": [model.evaluate(x, y, verbose=0), loaded.evaluate(x, y, verbose=0)],
        "missing": message,
    }
