"""Random numbers in a step that are those of one device: drawn for the whole batch, of which a rank takes its rows.

Every rank's generators are equal and draw as many numbers, so dropout drops the same units of the same samples on any
number of workers. It costs each rank the drawing of the whole batch's masks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket._program import warn
from hocket.parallel.batches import BatchShard
from hocket.parallel.state import memory_order

from . import _private

_keras: Any = _private.torch_random


Unseeded = Callable[[Any, float, Callable[..., Any]], Any]

_BY_SHAPE = ("normal", "uniform", "randint", "gamma", "binomial", "beta")
_OTHERS = ("categorical", "shuffle")
OTHER_AXIS = "a shape with samples along another axis than the first"
BY_TORCH = "torch's own functions (torch.rand, torch.nn.Dropout)"
BY_PYTHON = "functions of numpy or Python"
MIXED = "shapes whose rows are not those of the samples one after the other"


class DrawnShapes:
    """Tells shapes with rows for the samples from others, which may happen to be as long as a rank's part.

    What the model draws for two numbers of samples tells: a kernel's noise has the same shape for both.
    """

    def __init__(self) -> None:
        self._fixed: set[tuple[int, ...]] = set()
        self._folded: set[tuple[int, tuple[int, ...]]] = set()

    def learn(self, runs: dict[int, list[tuple[int, ...]]]) -> bool:
        """Take notice of the shapes that were drawn, in order, by the number of samples.

        Returns:
            Whether some have the samples along another axis than the first.
        """
        others = False
        if len(runs) < 2 or len({len(one) for one in runs.values()}) > 1:
            return others
        for drawn in zip(*runs.values(), strict=True):
            if len(set(drawn)) == 1:
                self._fixed.add(drawn[0])
            elif all(one and one[0] % rows == 0 for one, rows in zip(drawn, runs, strict=True)):
                self._folded |= {(one[0] // rows, one[1:]) for one, rows in zip(drawn, runs, strict=True)}
            others |= len({one[1:] for one in drawn}) > 1
        return others

    def per_sample(self, shape: Sequence[int], rows: int) -> int:
        """Return how many rows of `shape` belong to each of `rows` samples; 0 if the first axis is another."""
        given = tuple(shape)
        if not given:
            return 0
        each, rest = divmod(given[0], rows)
        if given in self._fixed:
            if not rest and (each, given[1:]) in self._folded:
                warn(
                    f"the model draws random numbers of the shape {given} for its samples, of which this rank has "
                    f"{rows}, and others of that shape, which cannot be told apart: they are other ones than those of "
                    "one process. Take another batch size",
                )
            return 0
        return each if not rest and (each == 1 or (each, given[1:]) in self._folded) else 0


@contextmanager
def of_whole_batch(
    share: Callable[[], BatchShard | None], shapes: "DrawnShapes", unseeded: Unseeded | None = None
) -> Iterator[None]:
    """Open a block in which Keras' random functions draw for the whole batch where the first axis is that of samples.

    Args:
        share: A function that tells this rank's part of the batch that is being worked on; None outside of a step.
        shapes: What is known of the shapes that the model draws.
        unseeded: A function that does dropout that draws by torch's own generator, where that is not to be done in
            place: called with the inputs, the rate and Keras' function, of which it may make use.
    """
    plain = {name: getattr(_keras, name) for name in (*_BY_SHAPE, "dropout")}

    def drawn_whole(draw: Callable[..., Any]) -> Callable[..., Any]:
        def whole(shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            part = share()
            each = 0 if part is None else shapes.per_sample(shape, _rows(part))
            if part is None or not each or _of_rows(args, kwargs):
                return draw(shape, *args, **kwargs)
            return draw((part.total * each, *shape[1:]), *args, **kwargs)[_slice(part, each)]

        return whole

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        if unseeded is not None and 0.0 < rate < 1.0 and noise_shape is None and _is_unseeded(seed):
            return unseeded(inputs, rate, plain["dropout"])
        part = share()
        each = 0 if part is None else shapes.per_sample(inputs.shape, _rows(part))
        if part is None or not each or not 0.0 < rate < 1.0:
            return plain["dropout"](inputs, rate, noise_shape, seed)
        if noise_shape is not None:
            drawn = _noise_shape(inputs, noise_shape)
            per = shapes.per_sample(drawn, _rows(part)) if len(drawn) == inputs.ndim else 0
            noise_shape = (part.total * per, *drawn[1:]) if per else drawn
        ones = _ones(inputs, part.total * each)
        kept = plain["dropout"](ones, rate, noise_shape, seed)[_slice(part, each)]
        return inputs * kept

    with _replaced({**{name: drawn_whole(plain[name]) for name in _BY_SHAPE}, "dropout": dropout}):
        yield


@contextmanager
def calm(note: Callable[[tuple[int, ...]], None], other: Callable[[str], None]) -> Iterator[None]:
    """Open a block in which Keras' random functions give one number throughout, and dropout what it is given.

    Args:
        note: A function that is told the shape of each draw.
        other: A function that is told by what numbers are drawn in another way than by their shape.
    """
    plain = {name: getattr(_keras, name) for name in (*_BY_SHAPE, *_OTHERS)}

    def one_number(name: str) -> Callable[..., Any]:
        draw = plain[name]

        def draw_one(shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            if _of_rows(args, kwargs):
                other(f"keras.random.{name} with an argument for each sample")
                return draw(shape, *args, **kwargs)
            note(tuple(shape))
            return draw((1,) * len(shape), *args, **kwargs).expand(tuple(shape)).clone()

        return draw_one

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        note(tuple(inputs.shape))
        if noise_shape is not None:
            note(_noise_shape(inputs, noise_shape))
        return inputs

    def told(name: str) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if name != "shuffle" or (args[1] if len(args) > 1 else kwargs.get("axis", 0)) != 0:
                other(f"keras.random.{name}")
            return plain[name](*args, **kwargs)

        return draw

    others = {name: told(name) for name in _OTHERS}
    with _replaced({**{name: one_number(name) for name in _BY_SHAPE}, **others, "dropout": dropout}):
        yield


@contextmanager
def _replaced(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    plain = {name: getattr(_keras, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(_keras, name, function)
        yield
    finally:
        for name, function in plain.items():
            setattr(_keras, name, function)


def _of_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a random function is given tensors of more than one number, as one for each sample."""
    return any(getattr(one, "shape", ()) and one.shape[0] != 1 for one in (*args, *kwargs.values()))


def _noise_shape(inputs: torch.Tensor, given: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(size if one is None else one for one, size in zip(given, inputs.shape, strict=False))


def _rows(part: BatchShard) -> int:
    return max(part.samples, 1)  # a rank without samples has one to keep step


def _slice(part: BatchShard, each: int) -> slice:
    begin = min(part.begin, part.total - 1)
    return slice(begin * each, (begin + _rows(part)) * each)


def _ones(inputs: torch.Tensor, total: int) -> torch.Tensor:
    """Ones as many as the whole batch has, laid out in memory as `inputs` is: masks are drawn in that order."""
    empty = torch.empty_permuted(
        (total, *inputs.shape[1:]),
        memory_order(inputs.stride(), inputs.shape),
        dtype=inputs.dtype,
        device=inputs.device,
    )
    return empty.fill_(1)


def _is_unseeded(seed: Any) -> bool:
    """Return whether Keras' dropout draws by torch's own generator, as it does where the user has given no seed."""
    return seed is None or (isinstance(seed, _private.SeedGenerator) and seed._initial_seed is None)
