"""Random numbers in a step that are those of one device: drawn for the whole batch, of which a rank takes its rows.

Every rank's generators are equal and draw as many numbers, so dropout drops the same units of the same samples on any
number of workers. It costs each rank the drawing of the whole batch's masks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.parallel.batches import BatchShard
from hocket.parallel.state import memory_order

from . import _private

_keras: Any = _private.torch_random


Unseeded = Callable[[Any, float, Callable[..., Any]], Any]


@contextmanager
def of_whole_batch(share: Callable[[], BatchShard | None], unseeded: Unseeded | None = None) -> Iterator[None]:
    """Open a block in which Keras' random functions draw for the whole batch where the first axis is that of samples.

    Args:
        share: A function that tells this rank's part of the batch that is being worked on; None outside of a step.
        unseeded: A function that does dropout that draws by torch's own generator, where that is not to be done in
            place: called with the inputs, the rate and Keras' function, of which it may make use.
    """
    plain = {name: getattr(_keras, name) for name in ("normal", "uniform", "randint", "dropout")}

    def drawn_whole(draw: Callable[..., Any]) -> Callable[..., Any]:
        def whole(shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            part = share()
            if part is None or not len(shape) or shape[0] != _rows(part):
                return draw(shape, *args, **kwargs)
            return draw((part.total, *shape[1:]), *args, **kwargs)[_slice(part)]

        return whole

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        if unseeded is not None and 0.0 < rate < 1.0 and noise_shape is None and _is_unseeded(seed):
            return unseeded(inputs, rate, plain["dropout"])
        part = share()
        if part is None or not inputs.ndim or inputs.shape[0] != _rows(part) or not 0.0 < rate < 1.0:
            return plain["dropout"](inputs, rate, noise_shape, seed)
        if noise_shape is not None and noise_shape[0] == inputs.shape[0]:
            noise_shape = (part.total, *noise_shape[1:])
        ones = _ones(inputs, part.total)
        kept = plain["dropout"](ones, rate, noise_shape, seed)[_slice(part)]
        return inputs * kept

    try:
        for name in ("normal", "uniform", "randint"):
            setattr(_keras, name, drawn_whole(plain[name]))
        _keras.dropout = dropout
        yield
    finally:
        for name, function in plain.items():
            setattr(_keras, name, function)


def _rows(part: BatchShard) -> int:
    return max(part.samples, 1)  # a rank without samples has one to keep step


def _slice(part: BatchShard) -> slice:
    begin = min(part.begin, part.total - 1)
    return slice(begin, begin + _rows(part))


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
