"""Loops that go through their batch in parts, each with a back-propagation, which have to add up as on one device."""

from typing import Any

from hocket._program import warn

_AFTER_PART = (
    "the loop updates the model after a part of its batch: the first parts of all ranks are other samples than one "
    "device's first part, so that losses differ from its own: make the loader's batch as large as one update takes"
)


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
            warn(_AFTER_PART)
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


class PartUpdates:
    """Tells, once and on one rank, of updates by chosen parts of a batch (minibatches), all of one size.

    The memory of `x[indices]` is not the batch's, so that its size alone shows what it is. There are more such parts in
    the whole batch, and so more updates. Samples that masks choose are as many only by chance.
    """

    def __init__(self, rank: int) -> None:
        self._told = rank > 0
        self._rows: list[int] = []  # of the parts of this batch, one for each update
        self._note: Any = None
        self._samples = 0  # of this batch
        self._updates = -1
        self._batches = 0  # of which all were such parts

    def add(self, note: Any, part: float, rows: int, samples: int, updates: int) -> None:
        """Take notice of a loss, of what the model was called with for it, and of how often it was updated before."""
        self._told |= 0 < part < 0.999  # `BatchParts` tells of what is known for a part
        if self._told:
            return
        if note is not self._note:
            self._end()
            self._note, self._samples = note, samples
        self._rows += [rows if updates != self._updates else 0]
        self._updates = updates

    def _end(self) -> None:
        """Judge a batch that is over."""
        rows, self._rows = self._rows, []
        size = max(rows, default=0)
        rest = self._samples % size if size else 0
        whole = 0 < size < self._samples and sum(rows) % self._samples == 0
        parts = whole and {*rows} <= {size, rest or size} and rows.count(size) >= 2 * max(1, rows.count(rest))
        self._batches = self._batches + 1 if parts else 0
        if self._batches > 1:
            self._told = True
            warn(_AFTER_PART)
