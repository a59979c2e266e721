"""What a loop draws from random generators of its own: `numpy.random.default_rng(0)`, a `torch.Generator`."""

import copy
import random
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import numpy as np
import torch

from hocket._program import program_frame

from ..batches import names_in, own_generators, set_state, state_of
from ._generator_marks import digest

_FRAMES: Final = 4  # of the program: the loop may be in what iterates for it


class OwnDraws:
    """Generators that a program's loop can reach, as they were at one time."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a program's object says when it is looked at
            try:
                found = own_generators(*_reached())
            except Exception:  # of an object that does not let itself be looked at, such as an unbound proxy
                found = []
            self._before = [(one, copy.deepcopy(state_of(one))) for one in found]

    def drawn(self, words: int) -> set[int]:
        """Return digests of what those were like from which at least so many words of 32 bits were drawn since."""
        return {_digest(state) for one, state in self._before if _drew(one, state, words)}

    def again(self) -> None:
        """Take the generators as they are now."""
        self._before = [(one, copy.deepcopy(state_of(one))) for one, _ in self._before]


def _reached() -> Iterator[Any]:
    """Yield what the program's innermost functions name."""
    frame: FrameType | None = program_frame()
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield from list(frame.f_locals.values())
        yield from [frame.f_globals[name] for name in names_in(frame.f_code) if name in frame.f_globals]
        frame = frame.f_back


def _drew(generator: Any, before: Any, words: int) -> bool:
    """Return whether a generator has drawn so many words of 32 bits, or was seeded anew, since it had a state."""
    now = _core(state_of(generator))
    if _core(before) == now:
        return False
    if isinstance(generator, torch.Generator) and generator.device.type != "cpu":
        return True
    if isinstance(generator, torch.Generator):
        other: Any = torch.Generator()
    else:
        other = copy.deepcopy(generator)
    set_state(other, before)
    for _ in range(words - 1):
        _step(other)
        if _core(state_of(other)) == now:
            return False
    return True


def _step(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        torch.randint(2, (1,), generator=generator)
    elif isinstance(generator, random.Random):
        generator.getrandbits(32)
    else:
        generator.bytes(4)


def _core(state: Any) -> bytes:
    """Return what of a state tells how much was drawn, without the normal number that it may have in hand."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()[: 24 + 624 * 8]
    if isinstance(state, dict):
        return repr([_plain(state["state"]), state.get("has_uint32")]).encode()
    return repr([_plain(one) for one in state[1:3]] if isinstance(state[0], str) else state[1]).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _digest(state: Any) -> int:
    return digest(_core(state))
