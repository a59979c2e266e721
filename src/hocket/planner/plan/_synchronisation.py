"""How often the workers agree: at every step, or less strictly, in the words of a plan."""

from dataclasses import dataclass
from typing import Literal

Rule = Literal["every_step", "local", "stale", "ssp", "hogwild"]

WRITTEN = '"every_step", "local:8", "stale:4", "ssp:4" or "hogwild"'
"""How each rule is written, for messages."""

_LEAST = {"local": 1, "stale": 1, "ssp": 0}
_REASONS = {
    "local": (
        "each worker makes {number} steps on its own part of the batches before the parameters are averaged "
        "(local SGD, Stich 2019)"
    ),
    "stale": (
        "each worker goes on without the others, and a gradient may miss up to {number} updates of each other worker "
        "(asynchronous SGD with bounded delay)"
    ),
    "ssp": (
        "each worker goes on until it is {number} steps ahead of the slowest "
        "(stale-synchronous parallel, Ho et al. 2013)"
    ),
    "hogwild": (
        "the workers write to the same parameters without locks, in whatever order they come "
        "(Hogwild, Recht et al. 2011)"
    ),
}


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """What `Plan.synchronisation` says.

    Attributes:
        rule: how the workers agree.
        number: for "local" the steps between two averages, for "stale" and "ssp" the bound; else 0.
    """

    rule: Rule
    number: int = 0

    @property
    def reason(self) -> str:
        """Why the losses are not those of one process; "" if they are."""
        if self.rule == "every_step":
            return ""
        return f"not serially equivalent: {_REASONS[self.rule].format(number=self.number)}"

    @classmethod
    def parse(cls, text: str) -> "Synchronisation":
        """Read a word of a plan, as "stale:4".

        Raises:
            ValueError: it is none; the message says what may be written.
        """
        word, colon, number = text.partition(":")
        if not colon and word == "every_step":
            return cls("every_step")
        if not colon and word == "hogwild":
            return cls("hogwild")
        if word in _LEAST and number.isascii() and number.isdigit() and int(number) >= _LEAST[word]:
            rule: Rule = "local" if word == "local" else "stale" if word == "stale" else "ssp"
            return cls(rule, int(number))
        least = f"; the number is at least {_LEAST[word]}" if word in _LEAST else ""
        raise ValueError(f"there is no synchronisation {text!r}: write {WRITTEN}{least}")
