"""Follows loops that go through a batch in parts, each with a back-propagation of its own."""

import warnings
from typing import Any


class BatchParts:
    """Follows a loop that goes through its batch in parts, each with a back-propagation."""

    def __init__(self) -> None:
        self._note: Any = None
        self._seen = self._scaled = 0.0
        self._told = False

    def add(self, note: Any, part: float, scale: float, samples: int) -> bool:
        """Take a part of a batch into account.

        Args:
            note: Of the batch.
            part: How much of it; 0 where that is not known.
            scale: By what constant the part's mean is multiplied; 0 where that is not known.
            samples: How many there are in the batch.

        Returns:
            Whether parts are single samples whose factors do not add up to one.
        """
        if self._note is not note:
            self._note, self._seen, self._scaled = note, 0.0, 0.0
        if not scale or not 0 < part < 0.999:
            return False
        second = self._seen > 0
        self._seen, self._scaled = self._seen + part, self._scaled + scale
        if abs(part * samples - 1) < 1e-3:
            return second and abs(scale * samples - 1) > 1e-3
        if self._seen > 0.999 and abs(self._scaled - 1) > 1e-3 and not self._told:
            self._told = True
            warnings.warn(
                f"the loop goes through its batch in parts whose losses add up to {self._scaled:g} times the mean: "
                "right if there are as many parts on one device; if parts are of a fixed size there are more of them "
                "there, so divide each loss by their number",
                stacklevel=5,
            )
        return False
