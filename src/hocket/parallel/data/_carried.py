"""What a loop carries from batch to batch for each place in it, as the state of a recurrent network."""

import weakref
from collections.abc import Iterable, Sequence

import torch

from hocket._program import warn

from ..batches import BatchShard
from ..batches import batch as _batch


class CarriedState:
    """Tells, once and on one rank, of batches of another size than those whose places have something carried.

    A rank has the same places of each batch of one size, so that there it carries what one device does.
    """

    def __init__(self, rank: int) -> None:
        self._tells = rank == 0
        self._made: tuple[_batch.Note, list[weakref.ref[torch.UntypedStorage]]] | None = None  # of which batch, what
        self._share: BatchShard | None = None  # of the batches for which something is carried

    def made(self, outputs: Sequence[torch.Tensor], note: _batch.Note | None) -> None:
        """Note what a model has given for a batch."""
        if note is not None and note.share is not None and self._tells:
            self._made = note, [weakref.ref(one.untyped_storage()) for one in _plain(outputs)]

    def given(self, inputs: Sequence[torch.Tensor], note: _batch.Note | None) -> None:
        """Look whether a model is given what it has given for the batch before, with a place for each sample."""
        if note is None or note.share is None or self._made is None or self._made[0] is note:
            return
        before = self._made[0].share
        alive = {one.data_ptr() for reference in self._made[1] if (one := reference()) is not None}
        places = [one for one in _plain(inputs) if note.share.samples in one.shape]
        if before == note.share and any(one.untyped_storage().data_ptr() in alive for one in places):
            self._share = before

    def next(self, share: BatchShard) -> None:
        """Warn if a batch of another size comes."""
        usual = self._share
        if usual is None or share.total == usual.total or not self._tells:
            return
        self._tells, self._made, self._share = False, None, None
        warn(
            "the loop gives the model what it gave for the batch before (the state of a recurrent network), and this "
            f"batch has {share.total} samples, and not {usual.total}: of their places a rank has others than before, "
            "so that what is carried meets other samples than on one device. Say drop_last=True, or begin anew where "
            "the size changes; where the loop does that, all is right"
        )


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one for one in tensors if one.layout is torch.strided and not one.is_meta and one.numel()]
