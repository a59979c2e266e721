"""Numbers spelled in two languages, as tokens."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hocket.workloads._drawn import Drawn
from hocket.workloads.translation.model import BEGIN, END, PADDING
from hocket.workloads.translation.settings import PAIRS_PER_EPOCH
from hocket.workloads.translation.spelling import LIMIT, SPELL

_MOST_DIGITS = 6
_HELD_OUT_SEED = 20_170_612


def is_held_out(number: int) -> bool:
    """Return whether a number is kept from training: above a thousand one in ten, as Fibonacci hashing chooses."""
    return number > 1000 and (number * 2_654_435_769 % 2**32) >> 16 < 2**16 // 10


def held_out_numbers(count: int) -> list[int]:
    """Return different numbers that training never sees, most of them of six digits; always the same."""
    random = np.random.default_rng(_HELD_OUT_SEED)
    return [int(number) for number in random.permutation(LIMIT) if is_held_out(int(number))][:count]


@dataclass(frozen=True)
class Language:
    """A language's tokens, and how many a number has at most."""

    name: str  # one of `SPELL`

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Names of the tokens; the first three are no words."""
        # Below a hundred, and with each multiplier of a hundred and a thousand, every word occurs.
        some = [*range(1000), *range(1000, 101_000, 1000)]
        found = dict.fromkeys(word for number in some for word in SPELL[self.name](number))
        return ("(padding)", "(begin)", "(end)", *found)

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words)}

    @cached_property
    def length(self) -> int:
        """Most words of a number, and one for the end."""
        spell = SPELL[self.name]
        thousands = max(len(spell(1000 * number)) for number in range(1, 1000))
        return thousands + max(len(spell(number)) for number in range(1000)) + 1

    def encode(self, words: list[str]) -> list[int]:
        """Return the tokens of words, the end, and padding up to `length`."""
        tokens = [*(self._tokens[word] for word in words), END]
        return tokens + [PADDING] * (self.length - len(tokens))

    def decode(self, tokens: list[int]) -> list[str]:
        """Return the words of tokens up to the end."""
        return [self.words[token] for token in tokens[: tokens.index(END) if END in tokens else None]]


def pair(number: int, source: Language, target: Language) -> tuple[Tensor, Tensor, Tensor]:
    """Return a number as (source, target behind `BEGIN`, target): what is read, written so far, and comes next."""
    expected = target.encode(SPELL[target.name](number))
    read = source.encode(SPELL[source.name](number))
    return torch.tensor(read), torch.tensor([BEGIN, *expected[:-1]]), torch.tensor(expected)


class Pairs(Drawn[tuple[Tensor, Tensor, Tensor]]):
    """Random numbers as `pair`: each number of digits is as likely as any other, and none is held out.

    A pair is a function of (seed, epoch, index) alone, so that it does not matter which worker draws it.
    """

    def __init__(self, source: Language, target: Language, *, seed: int = 0, length: int = PAIRS_PER_EPOCH) -> None:
        super().__init__(seed=seed, length=length)
        self._source, self._target = source, target

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return pair(self.number(index), self._source, self._target)

    def number(self, index: int) -> int:
        """Return the number of pair ``index``."""
        random = self.random(index)
        while True:
            number = int(random.integers(10 ** int(random.integers(1, _MOST_DIGITS + 1))))
            if not is_held_out(number):
                return number


class HeldOut(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Numbers that training never sees, as `pair`."""

    def __init__(self, source: Language, target: Language, count: int) -> None:
        self._source, self._target = source, target
        self.numbers = held_out_numbers(count)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return pair(self.numbers[index], self._source, self._target)
