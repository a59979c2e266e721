"""What default generators of random numbers are like: torch's, Python's and numpy's."""

import hashlib
import random
from typing import Any, Final, NamedTuple

import numpy as np
import torch

_MANY: Final = 1 << 30  # words drawn, where they cannot be counted


class Mark(NamedTuple):
    """What a default generator is like."""

    digest: int
    place: int = 0  # in what a Mersenne Twister has ready
    ready: Any = None

    def words(self, later: "Mark") -> int:
        """Return how many words of 32 bits were drawn since: a sample takes one or more."""
        if self[:2] == later[:2]:
            return 0
        if self.ready is None or later.ready is None:
            return _MANY
        words = later.place - self.place + (self.digest != later.digest) * len(self.ready)
        if words < 0:  # it was seeded anew
            return _MANY
        twister: Any = np.random.MT19937(0)
        twister.state = {"bit_generator": "MT19937", "state": {"key": self.ready, "pos": self.place}}
        twister.random_raw(words, output=False)
        return words if np.array_equal(twister.state["state"]["key"], later.ready) else _MANY


def marks() -> list[Mark]:
    """Return what torch's, Python's and numpy's default generators are like."""
    state: Any = np.random.get_bit_generator().state  # type: ignore[attr-defined]
    numpy, (_, python, _) = state["state"], random.getstate()
    pairs = [(np.array(python[:-1], dtype=np.uint32), python[-1])]
    pairs += [(numpy["key"], numpy["pos"])] if state["bit_generator"] == "MT19937" else []
    marks = [Mark(digest(b"".join(one.get_state().numpy().tobytes() for one in default_generators())))]
    marks += [Mark(digest(key.tobytes()), place, key.copy()) for key, place in pairs]
    return marks if len(pairs) > 1 else [*marks, Mark(digest(repr(numpy).encode()))]


def default_generators() -> list[torch.Generator]:
    """Return those of torch: the CPU's, and that of the GPU in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def digest(state: bytes) -> int:
    """Return a number of 64 bits that tells a state."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
