"""A divided optimizer trains as a whole one, keeps a part of its state on each rank, and saves all of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from . import callback_cases, cases
from .compare import TOLERANCE, flat

RANKS = 3


def optimizers(wrap: cases.Wrap) -> dict[str, Any]:
    import keras

    x, y = cases.vectors(48)
    found: dict[str, Any] = {}
    kinds = {
        "clipped globally": keras.optimizers.Adam(0.05, global_clipnorm=0.1, weight_decay=0.01),
        "clipped": keras.optimizers.Lamb(0.05, clipnorm=0.2),
        "accumulating": keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    }
    for name, optimizer in kinds.items():
        model = wrap(cases.dense())
        model.compile(optimizer, "binary_crossentropy")
        found[name] = [model.fit(x, y, batch_size=12, epochs=2, verbose=0).history, model.get_weights()]
    for trainable in (False, True):  # without another compile
        model.layers[0].trainable = trainable
        model.fit(x, y, batch_size=12, verbose=0)
        found[f"{trainable=}"] = model.get_weights()
    return found


def going_on_after_saving(wrap: cases.Wrap, directory: Path, load: Any) -> dict[str, Any]:
    model, _ = callback_cases.trained(wrap, [], epochs=2)
    model.save(directory / "saved.keras")
    model.optimizer.learning_rate = 0.003  # the state has been put together, and this is set after it
    model.save(directory / "saved.keras")
    loaded = load(directory / "saved.keras")
    x, y = cases.vectors(60)
    fitted = loaded.fit(x, y, batch_size=10, epochs=2, verbose=0)
    loaded.train_on_batch(x, y)
    return {"history": fitted.history, "weights": loaded.get_weights()}


NAMES = ["optimizers", "going on", "backup", "loading"]


def run_all(names: Iterable[str], wrap: cases.Wrap, load: Any, directory: str) -> dict[str, Any]:
    place = Path(directory)
    every: dict[str, Callable[[], Any]] = {
        "optimizers": lambda: optimizers(wrap),
        "going on": lambda: cases.going_on(wrap),
        "backup": lambda: callback_cases.backup_and_restore(wrap, place),
        "loading": lambda: going_on_after_saving(wrap, place, load),
    }
    return {name: every[name]() for name in names}


def divided(names: Iterable[str], directory: str) -> dict[str, Any]:
    import keras
    import torch

    import hocket.keras

    torch.set_num_threads(1)

    def wrap(model: Any) -> Any:
        return hocket.keras.Model(model, shard="optimizer")

    found = run_all(names, wrap, lambda path: hocket.keras.load_model(path, shard="optimizer"), directory)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(40) for _ in range(6)]
    model = wrap(keras.Sequential([keras.Input((40,)), *layers]))
    model.compile("adam", "mse")
    x = np.ones((9, 40), "float32")
    model.fit(x, x, batch_size=9, verbose=0)
    found["nbytes"] = sum(v.value.nbytes for v in model._broadcast.zero_optimizer.optimizer.variables)
    with pytest.raises(RuntimeError, match="sharded among ranks"):
        model.model.optimizer.save_own_variables({})
    best = keras.callbacks.ModelCheckpoint(Path(directory) / "best.keras", save_freq=2)
    with pytest.raises(ValueError, match='ModelCheckpoint has save_freq=2.*say save_freq="epoch"'):
        model.fit(x, x, batch_size=9, verbose=0, callbacks=[best])
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    with pytest.raises(ValueError, match='use_ema=True needs all variables in one place: .*shard="none"'):
        model.fit(x, x, batch_size=9, verbose=0)
    layers[0].trainable = False
    model.compile("sgd", "mse")
    model.train_on_batch(x, x)
    layers[0].trainable = True
    with pytest.raises(ValueError, match="the optimizer was built without '.*', which is trained now: compile"):
        model.train_on_batch(x, x)
    with pytest.raises(ValueError, match='resume: with shard="optimizer" no rank holds all'):
        model.resume(Path(directory) / "resume")
    with pytest.raises(ValueError, match="shard='gradients' must be"):
        hocket.keras.Model(model.model, shard="gradients")
    return found


@pytest.fixture(scope="module")
def results(asked: set[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import keras

    names = sorted(asked)
    plain = run_all(names, lambda model: model, keras.models.load_model, str(tmp_path_factory.mktemp("plain")))
    ranks = run_ranks(divided, RANKS, names, str(tmp_path_factory.mktemp("ranks")), timeout_s=200)
    return plain, ranks


pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_plain_keras(results: tuple[dict[str, Any], list[dict[str, Any]]], name: str) -> None:
    wanted = flat(results[0][name])
    for rank, result in enumerate(results[1]):
        got = flat(result[name])
        assert got.keys() == wanted.keys()
        for path, value in wanted.items():
            np.testing.assert_allclose(got[path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{rank}: {path}")


def test_each_rank_keeps_its_part_of_the_state(results: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    whole = 2 * 4 * 6 * (40 * 40 + 40)  # Adam's two moments of six layers, in float32
    for result in results[1]:
        assert result["nbytes"] < 1.02 * whole / RANKS
    assert sum(result["nbytes"] for result in results[1]) >= whole
