"""Steps of a model's own give what one process gives, or are refused, or what is other is told once."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

pytestmark = pytest.mark.timeout(200)

Step = Callable[[Any, Any, Any], Any]


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(13, 4)).astype("float32"), draw.normal(size=(13, 3)).astype("float32")


def fitted(step: Step, wrap: Callable[[Any], Any]) -> list[np.ndarray]:
    """Weights after batches of five, of which ranks have three and two, and one of three; what is told of them."""
    import keras

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            normed = [keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
            self.inner = keras.Sequential([keras.Input((4,)), *normed])
            self.other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
            self.last = keras.Variable(np.zeros(3, "float32"), trainable=False, name="last")
            self.late = keras.layers.Dense(3)
            self.seeds = keras.random.SeedGenerator(7)
            late = step is not by_hand  # its variables are made by the first batch
            self.right = keras.metrics.F1Score("macro", threshold=0.1, name="right") if late else keras.metrics.Sum()
            self.total = keras.metrics.Sum(name="total")
            self.built = True

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, given: Any) -> dict[str, Any]:
            self.rate(*given)
            return {"loss": step(self, *given), "right": self.right.result()}

        def test_step(self, given: Any) -> dict[str, Any]:
            self.rate(*given)
            return {"loss": getattr(step, "judge", distance)(self, *given)}

        def rate(self, x: Any, y: Any) -> None:
            if step is not by_hand:
                self.right.update_state(y > 0, self.inner(x))

        def update(self, loss: Any, inner: Any = None) -> Any:
            self.zero_grad()
            loss.backward()
            variables = (inner or self.inner).trainable_weights
            self.optimizer.apply([one.value.grad for one in variables], variables)
            return loss.detach()

    keras.utils.set_random_seed(1)
    model = wrap(Own())
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[spread] if step is by_hand else None)
    model.optimizer.build(model.trainable_variables)
    x, y = data()
    history = model.fit(x, y, batch_size=5, epochs=2, verbose=0, validation_data=(x[:7], y[:7])).history
    return [np.array(one) for one in (*model.get_weights(), *(value for _, value in sorted(history.items())))]


def spread(y: Any, found: Any) -> Any:
    return found.std()


def distance(model: Any, x: Any, y: Any) -> Any:
    from keras import ops

    return ops.mean(ops.square(model.inner(x) - y))


def adversaries(model: Any, x: Any, y: Any) -> Any:
    """Two losses, each for weights of its own, with batch norm over what is made and what is real."""
    import keras
    from keras import ops

    made = model.other(keras.random.normal((len(x), 3), seed=model.seeds))
    judged = model.inner(ops.concatenate([made, x]), training=True)
    model.update(ops.mean(judged[: len(x)]) + ops.mean(ops.square(judged[len(x) :] - y)))
    return model.update(ops.mean(ops.square(model.inner(model.other(y), training=True))), model.other)


def clipped(model: Any, x: Any, y: Any) -> Any:
    import torch
    from keras import ops

    loss = ops.mean(ops.square(model.inner(x, training=True) - y))
    model.zero_grad()
    loss.backward()
    variables = model.inner.trainable_weights
    torch.nn.utils.clip_grad_norm_([one.value for one in variables], 0.1)
    model.optimizer.apply([one.value.grad for one in variables], variables)
    return loss.detach()


def summed(model: Any, x: Any, y: Any) -> Any:
    from keras import ops

    return model.update(ops.sum(ops.square(model.inner(x, training=True) - y)))


def contrasted(model: Any, x: Any, y: Any) -> Any:
    import keras
    from keras import ops

    alike = ops.matmul(model.inner(x, training=True), ops.transpose(y))
    own = ops.arange(len(x))
    return model.update(ops.mean(keras.losses.sparse_categorical_crossentropy(own, alike, from_logits=True)))


def not_backward(model: Any, x: Any, y: Any) -> Any:
    import torch
    from keras import ops

    loss = ops.mean(ops.square(model.inner(x, training=True) - y))
    variables = model.inner.trainable_weights
    model.optimizer.apply(list(torch.autograd.grad(loss, [one.value for one in variables])), variables)
    return loss.detach()


def built_late(model: Any, x: Any, y: Any) -> Any:
    from keras import ops

    model.late(x)
    return model.update(ops.mean(ops.square(model.inner(x, training=True) - y)))


def drawn_by_torch(model: Any, x: Any, y: Any) -> Any:
    import torch

    return clipped(model, x + torch.randn_like(x), y)


def drawn_in_two_blocks(model: Any, x: Any, y: Any) -> Any:
    import keras
    from keras import ops

    both = ops.concatenate([x, x]) + keras.random.normal((2 * len(x), 4), seed=model.seeds)
    return clipped(model, both, ops.concatenate([y, y]))


def kept(model: Any, x: Any, y: Any) -> Any:
    model.last.assign(y[-1])
    return clipped(model, x, y)


def largest(model: Any, x: Any, y: Any) -> Any:
    from keras import ops

    clipped(model, x, y)
    return ops.max(y)


def sum_of_means(model: Any, x: Any, y: Any) -> Any:
    model.total.update_state(distance(model, x, y).detach())
    return clipped(model, x, y)


def by_hand(model: Any, x: Any, y: Any) -> Any:
    (compiled,) = (one for one in model.metrics if one.name == "compile_metrics")
    compiled.update_state(y, model.inner(x))
    return clipped(model, x, y)


def judged_among_others(model: Any, x: Any, y: Any) -> Any:
    return clipped(model, x, y)


judged_among_others.judge = lambda model, x, y: model.inner(x).std()  # type: ignore[attr-defined]


RIGHT = [adversaries, clipped]
REFUSED = {
    summed: r"Own.train_step back-propagates what ranks.*cannot average: the gradient of 'sequential.*' is 0\.\d+ off",
    contrasted: r"Own.train_step back-propagates what ranks.*self.compute_loss, of which a loss given to compile",
    not_backward: r"Own.train_step back-propagates.*the gradient of '.*kernel' is not from backward\(\)",
    largest: r"Own.train_step tells of a batch in 'loss' what cannot be put together",
    sum_of_means: r"Own.train_step tells of a batch in 'total' what.*Mean the mean over the batch",
    by_hand: r"Own.train_step tells of a batch in 'spread' what.*updated by self.compute_metrics",
    judged_among_others: r"Own.test_step tells of a batch in 'loss' what cannot be put together",
    built_late: r"Own.train_step back-propagates.*it builds layers, which is to be done before",
}
TOLD = {
    drawn_by_torch: r"whether Own.train_step is on 2 ranks what it is on one.*another way than by keras.random",
    drawn_in_two_blocks: r"the model draws random numbers by shapes whose rows are not those of the samples",
    kept: r"Own.train_step keeps in '.*last' what it sees of the data",
}


def every() -> list[Any]:
    import hocket.keras

    found: list[Any] = [fitted(step, hocket.keras.Model) for step in RIGHT]
    for step in REFUSED:
        with pytest.raises(ValueError) as refused:
            fitted(step, hocket.keras.Model)
        found.append(str(refused.value))
    for step in TOLD:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            fitted(step, hocket.keras.Model)
        found.append([str(one.message) for one in caught if "rank" in str(one.message)])
    return found


@functools.cache
def found_by_ranks() -> list[Any]:
    return run_ranks(every, 2, timeout_s=150)


def test_two_ranks_train_by_a_step_of_the_model_s_own_as_one_process() -> None:
    import hocket.keras  # which chooses the backend torch

    assert hocket.keras
    for place, step in enumerate(RIGHT):
        for one, *others in zip(fitted(step, lambda model: model), *(r[place] for r in found_by_ranks()), strict=True):
            for other in others:
                np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5, err_msg=step.__name__)


def test_steps_whose_gradients_ranks_cannot_average_are_refused() -> None:
    for rank in found_by_ranks():
        for place, (step, wanted) in enumerate(REFUSED.items()):
            assert re.match(wanted, rank[len(RIGHT) + place]), step.__name__


def test_what_cannot_be_as_in_one_process_or_found_out_is_told_once() -> None:
    first, second = found_by_ranks()
    for place, (step, wanted) in enumerate(TOLD.items()):
        (said,) = first[len(RIGHT) + len(REFUSED) + place]
        assert re.match(wanted, said), step.__name__
        assert not second[len(RIGHT) + len(REFUSED) + place]
