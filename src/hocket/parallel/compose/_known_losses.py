"""Tells of a loss that is computed otherwise than those that were compared with the losses of their parts."""

from typing import Any

import torch

from hocket.comm import torch_adapter

from ..batches import tensors_in
from ..data import form_of

_LOOKS = 3
"""How often losses are compared anew: where each batch takes another branch, there would be no end of it."""

_PADS = 2.0**20


class KnownLosses:
    """The forms of losses: the operators that they are made of beyond the model's output.

    A term may come after some epochs, or its factor grow from 0, and samples may meet in it.

    Attributes:
        new: Whether the loss of the last step had a form on some rank that none had had before.
        pads: Whether the batch of the step has samples on this rank that others pad, to be compared without them.
        padded: Whether that of the last step had such on some rank.
    """

    def __init__(self) -> None:
        self.new = self.pads = self.padded = False
        self._seen: set[frozenset[Any]] | None = None
        self._first = False
        self._looks = _LOOKS

    def begin(self) -> None:
        """Look at losses from now on; the forms of the next step are known."""
        self._seen, self._first = set(), True

    @property
    def looks(self) -> bool:
        """Whether losses are looked at."""
        return self._seen is not None and self._looks > 0

    def takes(self, value: Any, output: Any, samples: int) -> float:
        """Return 1 if a loss of so many samples has a form that is not known, and know it; more if one pads samples.

        That is what ranks add up, and `end_step` takes.
        """
        pads, self.pads = _PADS * self.pads, False
        return pads + self._is_new(value, output, samples)

    def _is_new(self, value: Any, output: Any, samples: int) -> bool:
        loss = value[0] if isinstance(value, tuple | list) else value
        if self._seen is None or not self._looks or not samples or not isinstance(loss, torch.Tensor):
            return False
        made = [one for one in tensors_in(output) if one.dim()]  # a model may give its own loss
        form = form_of(loss, torch_adapter.graph_marks(made), samples)
        new = form not in self._seen
        self._seen.add(form)
        return new

    def end_step(self, found: torch.Tensor) -> None:
        """Take what `takes` has given for all parts of the step's batch, the same on every rank."""
        if self._seen is None:
            return
        self.padded = bool(found >= _PADS)
        if self.looks:
            self.new = bool(found % _PADS) and not self._first
            self._first = False

    def compared(self) -> None:
        """Note that such a loss was compared."""
        self.new = False
        self._looks -= 1
