"""Random numbers that do not depend on how many workers there are.

Two things in a training loop draw random numbers on the side of the data: the sampler (in which order) and the data set
(augmentation). Ranks consume torch's global generator unequally (dropout on shards of different sizes), so neither may
draw from it. The sampler draws from a `RandomStream` that is the same on every rank; a sample's augmentation is seeded
by the sample's place in training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from . import _generators
from ._generators import set_state, state_of

_MASK = 2**64 - 1
_numpy_random: Any = np.random  # its annotations leave out get_bit_generator and set_bit_generator


class RngStates(NamedTuple):
    """The states of the global generators that samplers and data sets use: torch's for the CPU, Python's, numpy's."""

    torch_state: torch.Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls) -> RngStates:
        """Return the states at this moment."""
        return cls(torch.get_rng_state(), random.getstate(), _numpy_random.get_bit_generator().state)

    def install(self) -> None:
        """Make the global generators continue from here."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        _numpy_random.set_bit_generator(_numpy_generator(self.numpy_state))

    def apart(self, number: int) -> RngStates:
        """Return the states of other random numbers, which these and `number` give; these themselves for 0."""
        if not number:
            return self
        with restored():
            torch.set_rng_state(self.torch_state)
            seed_everything(mix(int(torch.randint(2**62, ())), number))
            return RngStates.now()


class RandomStream:
    """Random numbers kept apart: inside `with stream:` the global generators continue where that last ended."""

    def __init__(self, states: RngStates) -> None:
        self._depth = 0
        self._outside: tuple[torch.Tensor, Any, Any] | None = None
        self.restart(states)

    @property
    def states(self) -> RngStates:
        """Where it continues; not to be asked inside of a block."""
        return RngStates(self._torch.clone(), self._python, self._numpy.state)

    def restart(self, states: RngStates) -> None:
        """Continue from `states`."""
        self._torch = states.torch_state.clone()
        self._python = states.python_state
        self._numpy = _numpy_generator(states.numpy_state)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._outside = (torch.get_rng_state(), random.getstate(), _numpy_random.get_bit_generator())
            torch.set_rng_state(self._torch)
            random.setstate(self._python)
            _numpy_random.set_bit_generator(self._numpy)

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            assert self._outside is not None
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(self._outside[0])
            random.setstate(self._outside[1])
            _numpy_random.set_bit_generator(self._outside[2])
            self._outside = None


@contextmanager
def restored(own: Sequence[Any] = ()) -> Iterator[None]:
    """Open a block in which generators may be seeded at will, the global ones and `own`; then they are as they were."""
    torch_state, python_state, numpy_generator = (
        torch.get_rng_state(),
        random.getstate(),
        _numpy_random.get_bit_generator(),
    )
    _numpy_random.set_bit_generator(_scratch)
    states = [state_of(generator) for generator in own]
    try:
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            set_state(generator, state)
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        _numpy_random.set_bit_generator(numpy_generator)


def seed_everything(seed: int, own: Sequence[Any] = ()) -> None:
    """Seed torch's generator for the CPU, Python's and numpy's, some 10 us, and `own`."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    for number, generator in enumerate(own):
        _generators.seed(generator, mix(seed, number))


def mix(*numbers: int) -> int:
    """Return a 64-bit seed from integers; neighbours give unrelated seeds (finalizer of SplitMix64, Steele 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _numpy_generator(state: Any) -> Any:
    generator = getattr(np.random, state["bit_generator"])()
    generator.state = state
    return generator


_scratch = np.random.MT19937(0)
