"""All-reduce of long unregistered tensors by three and more ranks: a pipeline in the order of ranks.

Rank 0 copies piece after piece to its slot; rank r adds its own to what rank r - 1 has in its slot and puts the sum in
its own slot; the last rank's slot then holds results, which all copy out (the segmented chain by which MPI libraries
reduce long messages, here with a result that everyone can read). For S bytes a rank does S bytes of additions and S of
copies, whatever the number of ranks n, where sharing the reduction of blocks costs (1 - 1/n) S for each of copying in
and adding, and S for copying out. It takes n more phases, so it is for tensors of many pieces.
"""

from __future__ import annotations

import torch

from ..transport import Reducer, cut
from ._channel import Channel


def chain(channel: Channel, flat: torch.Tensor, op: Reducer) -> None:
    """Reduces `flat` over all ranks in place, after the phase in which ranks announced that they would."""
    n, me, dtype = channel.size, channel.rank, flat.dtype
    pieces = cut(flat, channel.sizes.piece // flat.element_size())
    before = channel.slots(dtype)
    for step in range(len(pieces) + n):
        now = channel.slots(dtype)
        if 0 <= step - me < len(pieces):
            piece = pieces[step - me]
            mine = now[me][: piece.numel()]
            if me == 0:
                mine.copy_(piece)
            else:
                op.kernel(before[me - 1][: piece.numel()], piece, out=mine)
        if step >= n:
            piece = pieces[step - n]
            op.deliver(before[n - 1][: piece.numel()], piece, n)
        if step < len(pieces) + n - 1:
            channel.phase()
        before = now
