"""Batches that a loop leaves out because this rank has few of their samples, which one device may not leave out."""

from hocket._program import warn

from ..batches import batch as _batch


class LeftOutBatches:
    """Notes which batches the model is called with, and tells of the first that is left out."""

    def __init__(self) -> None:
        self._unused: _batch.Note | None = None  # the latest, while the model was not called with it
        self._least: int | None = None  # samples of the smallest with which it was; -1 once one was left out

    def evaluated(self) -> None:
        """Forget the latest batch, with which the model was called without gradients."""
        self._unused = None

    def used(self) -> None:
        """Note that the model was called with the latest batch."""
        if self._unused is not None and self._unused.share is not None:
            samples = self._unused.share.samples
            self._least = samples if self._least is None else min(self._least, samples)
        self._unused = None

    def next(self, note: _batch.Note | None) -> None:
        """Warn if the first batch that the loop leaves out is smaller than all that it took; another one comes."""
        left, self._unused = self._unused, note
        if _batch.together():  # one batch comes before the other is used, and the model may be called with both in one
            return
        if left is None or left is note or left.share is None or self._least is None:
            return
        smaller, self._least = left.share.samples < self._least, -1
        if not smaller:
            return
        warn(
            f"the loop has left out a batch of which this rank has {left.share.samples} samples, fewer than of those "
            f"that it trained with: if it goes by len(batch), one device, whose batch has {left.share.total}, may "
            "not leave it out, and where ranks differ they wait for each other: decide by hocket.total(len(batch)), or "
            "say drop_last=True",
        )
