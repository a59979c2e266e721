"""What a program itself gathers from ranks while one of them computes with a sample that stands in for none."""

from contextlib import ExitStack

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import batch as _batch


class OwnGathers:
    """Hears of gathers in batches of which this rank has no samples, and tells of the first."""

    def __init__(self) -> None:
        self._on = ExitStack()
        self._note: _batch.Note | None = None
        self._told = False

    def next(self, note: _batch.Note | None) -> None:
        """Hear, until this is called again, if the rank has no samples of the batch that comes; None: none comes."""
        if note is self._note:  # another model has told of it
            return
        self._on.close()
        self._note = note
        if note is not None and note.share is not None and not note.share.samples and not self._told:
            self._on.enter_context(torch_adapter.hearing_collectives(self._hear))

    def _hear(self) -> None:
        name = torch_adapter.gathered_by_program()
        if not name or self._told or self._note is None or self._note.share is None:
            return
        self._told = True
        total = self._note.share.total
        warn(
            f"the program calls {name} in a batch of {total} sample{'s' * (total > 1)}, of which this rank has none: "
            "what it gives there is of a sample that stands in for them. That one weighs nothing in losses that hocket "
            "averages, but is a row like others in what is gathered: say drop_last=True, or gather how many rows count"
        )
