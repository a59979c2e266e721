"""On a GPU that ranks share, Keras' history is that of one process; HOCKET_TEST_DEVICE=cpu tries the tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hocket.testing import run_ranks

from . import cases
from .compare import check

DEVICE = os.environ.get("HOCKET_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch finds no GPU here"),
    pytest.mark.timeout(300),
]
PIPELINES = {"one batch": 1, "micro-batches": 2}


def run_all(names: list[str], distributed: bool) -> dict[str, Any]:
    """The results, and the devices of the weights; convolutions are not cut to 10 bits."""
    import keras

    torch.backends.cudnn.allow_tf32 = False
    keras.utils.set_random_seed(0)  # of layers that a case makes before it seeds
    return cases.run_all(names, distributed) | {"device": cases.dense().weights[0].value.device.type}


@pytest.mark.parametrize("name", list(cases.CASES))
def test_two_workers_on_a_gpu_give_what_plain_keras_gives(name: str) -> None:
    (plain,) = run_ranks(run_all, 1, [name], False, backend=None, timeout_s=200)
    ranks = run_ranks(run_all, 2, [name], True, timeout_s=200)
    assert {rank["device"] for rank in (plain, *ranks)} == {DEVICE}
    check(plain[name], [rank[name] for rank in ranks])


def pipelined(stages: int, micro_batches: int) -> dict[str, Any]:
    """A functional model on the stages of a pipeline, or plainly; with dropout and batch norm."""
    import keras
    from keras import layers

    import hocket.keras

    torch.backends.cudnn.allow_tf32 = False
    keras.utils.set_random_seed(3)
    model: Any = keras.Sequential(
        [
            keras.Input((5,)),
            *(layers.Dense(16, activation="tanh") for _ in range(4)),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    if stages > 1:
        model = hocket.keras.Model(model, pipeline=stages, micro_batches=micro_batches)
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    x, y = cases.vectors(50)
    history = model.fit(x, y, batch_size=12, epochs=2, verbose=0).history
    return {"history": history, "prediction": model.predict(x, batch_size=20, verbose=0)}


@pytest.mark.parametrize("micro_batches", PIPELINES.values(), ids=PIPELINES)
def test_two_stages_on_a_gpu_give_what_plain_keras_gives(micro_batches: int) -> None:
    (plain,) = run_ranks(pipelined, 1, 1, 1, backend=None, timeout_s=200)
    check(plain, run_ranks(pipelined, 2, 2, micro_batches, timeout_s=200))
