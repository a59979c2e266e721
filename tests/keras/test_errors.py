"""What cannot be is told at once, by the argument's name and with what to do."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hocket.testing import deadline, run_ranks

from . import cases

RANKS = 2


def attempts() -> dict[str, Callable[[], Any]]:
    import keras
    import torch

    import hocket.keras

    x, y = cases.vectors(40)
    rank = torch.distributed.get_rank()

    def model(**compiled: Any) -> Any:
        made = hocket.keras.Model(cases.dense())
        made.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
        return made

    class Keeping(keras.Model):
        class Last(keras.metrics.Metric):
            def result(self) -> Any:
                return 0.0

        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)
            self.last = self.Last(name="last")

        def call(self, inputs: Any) -> Any:
            return self.layer(inputs)

    def keep() -> Any:
        made = hocket.keras.Model(Keeping())
        made.compile("sgd", "mse")
        return made.fit(x, y, verbose=0)

    class Shuffling(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.order = list(range(40))

        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> Any:
            those = self.order[8 * number : 8 * number + 8]
            return x[those], y[those]

        def on_epoch_end(self) -> None:
            self.order = self.order[rank + 3 :] + self.order[: rank + 3]

    class Subclassed(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    class Stepping(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {}

    def piped(made: Any = None, micro: int = 2, optimizer: Any = "sgd", **options: Any) -> Any:
        wrapped = hocket.keras.Model(made or cases.dense(), pipeline=RANKS, micro_batches=micro, **options)
        wrapped.compile(optimizer, "mse")
        return wrapped

    def normed() -> Any:
        return piped(cases.dense(keras.layers.BatchNormalization(name="norm"))).fit(x, y, verbose=0)

    def one_layer() -> Any:
        return piped(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, name="only")])).fit(x, y, verbose=0)

    def single_number() -> Any:
        inputs = keras.Input((5,))
        number = keras.ops.mean(keras.layers.Dense(1)(inputs))
        return piped(keras.Model(inputs, number)).predict(x, verbose=0)

    def going_on_with_samples() -> Any:
        recurrent = keras.layers.GRU(2, stateful=True, name="recurrent")
        made = hocket.keras.Model(keras.Sequential([keras.Input((5, 1), batch_size=4), recurrent]))
        made.compile("sgd", "mse")
        return made.fit(x[..., None], y, batch_size=4, verbose=0)

    def no_loss() -> Any:
        made = hocket.keras.Model(cases.dense(), pipeline=RANKS, micro_batches=2)
        made.compile("sgd")
        return made.fit(x, y, verbose=0)

    def whole_loss() -> Any:
        made = hocket.keras.Model(cases.dense(), pipeline=RANKS, micro_batches=2, schedule="1f1b")
        made.compile("sgd", "dice")
        return made

    def masks() -> Any:
        between = [keras.layers.Reshape((5, 1)), keras.layers.Masking(), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((5,)), *between])
        return piped(made, schedule="1f1b").fit(x, x[..., None], verbose=0)

    def telling() -> Any:
        class Telling(keras.layers.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.told = keras.metrics.Mean(name="told")

            def call(self, inputs: Any) -> Any:
                self.told.update_state(keras.ops.mean(inputs))
                return inputs

        return piped(cases.dense(Telling()))

    def in_the_middle() -> Any:
        often = keras.callbacks.ModelCheckpoint("never.keras", save_freq=2)
        return piped().fit(x, y, verbose=0, callbacks=[often])

    def added(function: Callable[[Any, Any], Any]) -> Any:
        class Adding(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                return function(self, inputs)

        made = hocket.keras.Model(cases.dense(Adding()))
        made.compile("sgd", "mse")
        return made

    def centred(_: Any, inputs: Any) -> Any:
        return inputs - keras.ops.mean(inputs, axis=0)

    class Centring(Subclassed):
        def predict_step(self, data: Any) -> Any:
            return centred(self, data).detach().numpy()

    def summed(layer: Any, inputs: Any) -> Any:
        layer.add_loss(keras.ops.sum(keras.ops.square(inputs)))
        return inputs

    tf_dataset = type("DatasetV2", (), {"__module__": "tensorflow.python.data"})
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x))
    return {
        "fewer samples than ranks": lambda: model().fit(x, y, batch_size=1),
        "fewer samples to validate": lambda: model().fit(x, y, validation_batch_size=1),
        "no samples": lambda: model().evaluate(x, y, batch_size=0),
        "no number": lambda: model().predict(x, batch_size=8.5),
        "small loader": lambda: model().fit(torch.utils.data.DataLoader(dataset, batch_size=1)),
        "several steps": lambda: model(steps_per_execution=4),
        "compiled": lambda: model(jit_compile=True),
        "tf.data": lambda: model().fit(tf_dataset()),
        "divided by the user": lambda: model().fit(x[rank::RANKS], y[rank::RANKS], verbose=0),
        "other batches": lambda: model().fit(((x + rank, y) for _ in range(3)), verbose=0),
        "other batches in the second epoch": lambda: model().fit(Shuffling(), epochs=2, shuffle=False, verbose=0),
        "not compiled": lambda: hocket.keras.Model(cases.dense()).fit(x, y),
        "no model": lambda: hocket.keras.Model(torch.nn.Linear(2, 2)),
        "no callback": lambda: model().fit(x, y, callbacks=["checkpoint"]),
        "callback list": lambda: model().fit(x, y, callbacks=keras.callbacks.CallbackList([])),
        "a metric of the model's own": keep,
        "samples that meet": lambda: added(centred).fit(x, y, verbose=0),
        "samples that meet in predictions": lambda: added(centred).predict(x, verbose=0),
        "a predict_step in which samples meet": lambda: hocket.keras.Model(Centring()).predict(x, verbose=0),
        "a sum that a layer adds": lambda: added(summed).fit(x, y, verbose=0),
        "subclassed in a pipeline": lambda: piped(Subclassed(name="own")),
        "a step of one's own in a pipeline": lambda: piped(Stepping()),
        "whole batches for batch norm": normed,
        "more stages than layers": one_layer,
        "fewer samples than micro-batches": lambda: piped(micro=4).fit(x, y, batch_size=3),
        "micro-batches without a pipeline": lambda: hocket.keras.Model(cases.dense(), micro_batches=4),
        "no number of stages": lambda: hocket.keras.Model(cases.dense(), pipeline=1.5),
        "no stages": lambda: hocket.keras.Model(cases.dense(), pipeline=0),
        "ranks that make no pipelines": lambda: hocket.keras.Model(cases.dense(), pipeline=3),
        "divided twice": lambda: piped(shard="optimizer"),
        "unknown layer": lambda: piped(split=["nowhere"]).fit(x, y, verbose=0),
        "too many layers": lambda: piped(split=["dense", "dense_1"]).fit(x, y, verbose=0),
        "a string of layers": lambda: piped(split="dense"),
        "averages of all stages": lambda: piped(optimizer=keras.optimizers.SGD(use_ema=True)).fit(x, y, verbose=0),
        "an output without samples": single_number,
        "saving in an epoch": in_the_middle,
        "a stateful layer": going_on_with_samples,
        "no loss": no_loss,
        "a loss for each sample": lambda: model(loss=keras.losses.MeanSquaredError(reduction="none")).fit(
            x, y, verbose=0
        ),
        "unknown schedule": lambda: piped(schedule="zero"),
        "a loss that is no mean": lambda: whole_loss().fit(x, y, verbose=0),
        "masks in turns": masks,
        "a metric of a layer": lambda: telling().fit(x, y, verbose=0),
        "keras' own": lambda: model().fit(x, y, class_weight={0: 1}, sample_weight=y[:, 0], verbose=0),
    }


EXPECTED = {
    "fewer samples than ranks": "ValueError: batch_size=1 is the number of samples of a batch over all ranks, and "
    "there are 2 ranks: make it 2 or more, or start fewer workers",
    "fewer samples to validate": "ValueError: validation_batch_size=1 is the number of samples",
    "no samples": "ValueError: batch_size=0 must be 1 or more",
    "no number": "TypeError: batch_size must be an integer, the samples of a batch over all ranks, not 8.5",
    "small loader": "ValueError: x.batch_size=1 is the number of samples of a batch over all ranks",
    "several steps": "ValueError: steps_per_execution=4 is not possible with Keras on torch: leave it out, or say 1",
    "compiled": 'ValueError: jit_compile=True would compile.*say jit_compile="auto"',
    "tf.data": "TypeError: x is a tf.data.Dataset, which hocket cannot share out among ranks: pass arrays, a torch",
    "divided by the user": "ValueError: x on rank 1 is not that of rank 0 .*Give every rank the same, whole data",
    "other batches": "ValueError: the first batch on rank 1 is not that of rank 0 .*Give every rank the same",
    "other batches in the second epoch": "ValueError: the first batch on rank 1 is not that of rank 0",
    "not compiled": "ValueError: You must call `compile",
    "no model": "TypeError: hocket.keras.Model wraps a keras.Model .*not Linear",
    "no callback": "TypeError: callbacks are instances of keras.callbacks.Callback, and 'checkpoint' is none",
    "callback list": "TypeError: pass callbacks as a list of callbacks",
    "a metric of the model's own": "ValueError: metric 'last' of type Last is kept by the model.*additive = True",
    "samples that meet": "ValueError: the model computes what it gives for a sample from other samples .* is .* off",
    "samples that meet in predictions": "ValueError: the model computes what it gives for a sample from other samples",
    "a predict_step in which samples meet": "ValueError: Centring.predict_step computes what it gives for a sample "
    "from other samples",
    "a sum that a layer adds": "ValueError: a layer adds a loss.*as a sum over samples is.*divide it by the number "
    ".*but have an activity_regularizer return a sum",
    "subclassed in a pipeline": "ValueError: pipeline=2 cannot cut 'own' of type Subclassed into stages: .*Build it by "
    "keras.Sequential or keras.Model\\(inputs, outputs\\)",
    "a step of one's own in a pipeline": "ValueError: Stepping.train_step is the model's own.*remove train_step",
    "whole batches for batch norm": "ValueError: layer 'norm' is a BatchNormalization.*micro_batches=2.*say "
    "micro_batches=1, use LayerNormalization or GroupNormalization, or freeze it",
    "more stages than layers": "ValueError: pipeline=2 is more than the 1 parts .*only.*make it 1 or less",
    "fewer samples than micro-batches": "ValueError: batch_size=3 .*1 pipeline.*micro_batches=4: make it 4 or more",
    "micro-batches without a pipeline": "ValueError: micro_batches=4 is for a pipeline: say pipeline=2 or more",
    "no number of stages": "TypeError: pipeline must be an integer, not 1.5",
    "no stages": "ValueError: pipeline=0 must be 1 or more",
    "ranks that make no pipelines": "ValueError: pipeline=3 does not divide the 2 ranks .*hocket run -n 3",
    "divided twice": "ValueError: shard='optimizer' and pipeline=2 do not go together.*leave shard= out",
    "unknown layer": "ValueError: split=\\['nowhere'\\]: 'nowhere' cannot begin a stage.*out of: dense",
    "too many layers": "ValueError: split=.* names 2 layers that begin a stage, and pipeline=2 needs 1",
    "a string of layers": "TypeError: split='dense' must be a list.*say split=\\['dense'\\]",
    "averages of all stages": "ValueError: an optimizer with use_ema=True .*leave it out, or leave pipeline= out",
    "an output without samples": "ValueError: an output of 'functional[_0-9]*' has the shape \\(\\), without an axis",
    "saving in an epoch": 'ValueError: ModelCheckpoint has save_freq=2.*pipeline= .*say save_freq="epoch"',
    "a stateful layer": "ValueError: layer 'recurrent' has stateful=True.*say stateful=False, or start one worker",
    "no loss": "ValueError: No loss to compute",
    "a loss for each sample": "ValueError: the loss has the shape \\[32\\], of which Keras takes no .*give its mean",
    "unknown schedule": 'ValueError: schedule=\'zero\' must be "gpipe" or "1f1b"',
    "a loss that is no mean": 'ValueError: schedule="1f1b" computes the loss of each micro-batch.*say schedule="gpipe"',
    "masks in turns": 'ValueError: an output of the model has a mask.*say schedule="gpipe"',
    "a metric of a layer": "ValueError: metric 'told' is updated by a layer.*pass it to compile\\(metrics=...\\), or "
    "leave pipeline= out",
    "keras' own": "ValueError: You cannot `class_weight` and `sample_weight` at the same time",
}


def messages() -> dict[str, str]:
    found = {}
    for name, attempt in attempts().items():
        try:
            attempt()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


pytestmark = pytest.mark.timeout(300)  # two or three processes that load Keras share a busy machine


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run_ranks(messages, RANKS, timeout_s=200)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_every_rank_tells_what_is_wrong_and_what_to_do(told: list[dict[str, str]], name: str) -> None:
    import re

    assert all(found.keys() == EXPECTED.keys() for found in told)
    for found in told:
        assert re.match(EXPECTED[name], found[name], re.DOTALL), found[name]


def drawing_by_categories() -> list[str]:
    import warnings

    import keras

    import hocket.keras

    class Drawing(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(5)

        def call(self, inputs: Any) -> Any:
            return inputs * keras.ops.cast(keras.random.categorical(inputs, 1, seed=self.seed), inputs.dtype)

    x, y = cases.vectors(8)
    model = hocket.keras.Model(cases.dense(Drawing()))
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, verbose=0)
    return [str(one.message) for one in caught if "random numbers" in str(one.message)]


def test_random_numbers_that_are_not_those_of_one_process_are_told_once() -> None:
    first, second = run_ranks(drawing_by_categories, RANKS, timeout_s=100)
    assert not second
    assert len(first) == 1
    assert "by keras.random.categorical" in first[0]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=deadline(60)
    )


@pytest.mark.long
def test_torch_is_chosen_where_no_backend_is() -> None:
    quick = "import sys; sys.modules.update(matplotlib=None, sklearn=None)"  # Keras loads them, and does without
    done = run_python(f"{quick}; import hocket; hocket.keras; import keras; print(keras.backend.backend())")
    assert done.stdout.strip() == "torch", done.stderr


def test_another_backend_is_refused_before_keras_is_loaded() -> None:
    done = run_python("import hocket.keras", KERAS_BACKEND="jax")
    assert "KERAS_BACKEND is 'jax', and hocket.keras distributes Keras on torch only: set KERAS_BACKEND=torch" in (
        done.stderr
    )


STAND_IN = """
import sys, types
keras = types.ModuleType("keras")
keras.__version__ = {version!r}
keras.backend = types.SimpleNamespace(backend=lambda: "jax")
sys.modules["keras"] = keras
import hocket.keras
"""


def test_keras_that_was_loaded_with_another_backend_is_refused() -> None:
    done = run_python(STAND_IN.format(version="3.15.1"), KERAS_BACKEND="jax")
    assert "imported with backend 'jax'" in done.stderr
    assert "import hocket.keras before keras" in done.stderr


def test_an_old_keras_is_refused() -> None:
    done = run_python(STAND_IN.format(version="2.15.0"))
    assert "hocket.keras needs Keras 3.14 or later, and 2.15.0 is installed" in done.stderr


def test_a_missing_keras_is_told_with_the_extra_to_install() -> None:
    done = run_python("import sys; sys.modules['keras'] = None; import hocket.keras")
    assert "hocket[keras]" in done.stderr


@pytest.mark.long
def test_help_goes_over_a_missing_keras() -> None:
    look = "import inspect, hocket; print(dict(inspect.getmembers(hocket)).keys()); hocket.keras"
    done = run_python(f"import sys; sys.modules['keras'] = None; {look}")
    assert "'Trainer'" in done.stdout
    assert "'keras'" not in done.stdout
    assert "AttributeError: hocket.keras needs Keras 3, which is not installed: pip install" in done.stderr
