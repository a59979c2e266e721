"""Loops that go through their batch in parts, each with a back-propagation, which have to add up as on one device."""

from typing import Any

from hocket._program import warn


class BatchParts:
    """Follows a loop that goes through its batch in parts, each with a back-propagation."""

    def __init__(self) -> None:
        self._note: Any = None
        self._seen = self._scaled = 0.0
        self._told = self._told_updates = False
        self._updates = 0

    def apart(self, note: Any, part: float, updates: int, *, anew: bool) -> bool:
        """Return whether the gradient of a part of a batch is taken by itself; tell where a part makes an update.

        `updates` is how often the optimizer has updated, and `anew` whether there is no gradient before this one.
        """
        before, self._updates = self._updates, updates
        if self._note is not note or not 0 < part < 0.999 or not anew:
            return False
        if updates == before:
            return True
        if not self._told_updates:
            self._told_updates = True
            warn(
                "the loop updates the model after a part of its batch: the first parts of all ranks are other samples "
                "than one device's first part, so that losses differ from its own: make the loader's batch as large as "
                "one update takes",
            )
        return False

    def add(self, note: Any, part: float, scale: float, samples: int) -> bool:
        """Take a part of a batch into account.

        `part` says how much of a batch, and `scale` by what constant its mean is multiplied; 0 where that is not known.

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
            warn(
                f"the loop goes through its batch in parts whose losses add up to {self._scaled:g} times the mean: "
                "right if there are as many parts on one device; if parts are of a fixed size there are more of them "
                "there, so divide each loss by their number",
            )
        return False
