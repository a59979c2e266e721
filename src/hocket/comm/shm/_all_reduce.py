"""All-reduce and reduce over one host's shared memory.

Four ways, chosen by size and by where the buffers lie (n ranks, S bytes):

- direct: every rank's buffer is registered. Rank r reduces chunk r of n straight from all buffers and writes the result
  into all of them, piece by piece, so that a piece is still in cache when it is written. Each rank reads S and writes S
  bytes, the least that any in-place algorithm can; two phases.
- one-shot: every rank copies its piece to its slot and reduces all slots itself: one phase a piece, (1 + n - 1) S bytes
  of kernel work. Best for two ranks and for small messages.
- blocks: reduce-scatter and all-gather through slots, block by block; the results of one block travel in the phase that
  carries the contributions of the next: for messages of three and more ranks that make few blocks.
- chain: see `_chain`; for long messages of three and more ranks.

In all of them a result is computed in the order of ranks: bitwise the same on every rank and from run to run.
"""

from collections import OrderedDict

import torch

from ..transport import ReduceOperator, cut
from ._channel import Channel
from ._memory import MemoryHandle, shared_memory
from ._registration import registration_cache

_PLANS_KEPT = 64
DirectPlan = list[tuple[torch.Tensor, ...]]  # for each piece of this rank's chunk, its view in every rank's buffer


class DirectPlans:
    """The views that direct operations use, kept because training reduces the same buffers in every step.

    They are views of arenas, this rank's too: arenas stay, and a view of a tensor would keep it alive.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[object, ...], DirectPlan] = OrderedDict()

    def get(self, channel: Channel, flat: torch.Tensor, places: list[MemoryHandle]) -> DirectPlan:
        """For each piece of this rank's chunk, the views of all ranks' buffers, in the order of ranks."""
        key = (*places, flat.dtype, flat.numel())
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        n, me = channel.size, channel.rank
        share = -(-flat.numel() // n)
        lo, hi = min(me * share, flat.numel()), min((me + 1) * share, flat.numel())
        piece = channel.sizes.direct_piece // flat.element_size()
        with torch.inference_mode(False):
            buffers = [
                shared_memory.at(place, flat.dtype, flat.numel())
                if r == me
                else peer_buffer(channel, r, place, flat.dtype, flat.numel())
                for r, place in enumerate(places)
            ]
            columns = [cut(buffer[lo:hi], piece) for buffer in buffers]
        plan = list(zip(*columns, strict=True)) if hi > lo else []
        self._plans[key] = plan
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)
        return plan


def peer_buffer(channel: Channel, rank: int, place: MemoryHandle, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return the registered buffer of `rank` as a flat tensor, mapped through the registration cache."""
    peer = channel.peers[rank]
    try:
        arena = registration_cache.lookup(peer.pid, peer.nonce, place)
    except OSError as error:
        raise channel.unseen(rank, error) from error
    return arena.narrow(0, place.offset, numel * dtype.itemsize).view(dtype)


def all_reduce(
    channel: Channel,
    plans: DirectPlans,
    flat: torch.Tensor,
    op: ReduceOperator,
    place: MemoryHandle | None,
    timeout_s: float,
) -> str:
    """Reduce `flat` (contiguous, 1-d, any length) over all ranks in place; return the path taken."""
    nbytes = flat.numel() * flat.element_size()
    if nbytes < channel.sizes.direct:
        place = None
    channel.begin(
        "all_reduce", timeout_s=timeout_s, dtype=flat.dtype, numel=flat.numel(), operator=op.number, place=place
    )
    if op.view is not None:
        flat = flat.view(op.view)
    if channel.size == 2 or nbytes <= channel.one_shot:
        return _one_shot(channel, plans, flat, op, place)
    if nbytes >= channel.sizes.chain:
        channel.meet()
        if channel.registered() == channel.size:
            return _direct(channel, plans, flat, op)
        _chain(channel, flat, op)
        return "shm-staged"
    blocks = _Blocks(channel, flat)
    if place is None:
        blocks.contribute(0)
    channel.meet()
    registered = channel.registered()
    if registered == channel.size:
        return _direct(channel, plans, flat, op)
    if registered:  # some ranks' buffers are registered, and they have not contributed theirs
        blocks.contribute(0)
        channel.phase()
    blocks.reduce(flat, op)
    return "shm-staged"


def reduce(channel: Channel, flat: torch.Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
    """Reduce `flat` over all ranks; only the root's `flat` changes."""
    channel.begin("reduce", timeout_s=timeout_s, dtype=flat.dtype, numel=flat.numel(), operator=op.number, root=root)
    if op.view is not None:
        flat = flat.view(op.view)
    blocks = _Blocks(channel, flat)
    blocks.contribute(0)
    channel.meet()
    blocks.reduce(flat if channel.rank == root else None, op)
    return "shm-staged"


def _one_shot(
    channel: Channel, plans: DirectPlans, flat: torch.Tensor, op: ReduceOperator, place: MemoryHandle | None
) -> str:
    me, dtype, nbytes = channel.rank, flat.dtype, flat.numel() * flat.element_size()
    piece_nbytes = channel.sizes.piece
    pieces = (flat,) if nbytes <= piece_nbytes else cut(flat, piece_nbytes // flat.element_size())
    views = channel.heads(dtype, pieces[0].numel())
    if place is None:
        views[me].copy_(pieces[0])
    channel.meet()
    if nbytes >= channel.sizes.direct and (registered := channel.registered()):
        if registered == channel.size:
            return _direct(channel, plans, flat, op)
        # Some ranks' buffers are registered, and they have not copied theirs.
        views = channel.heads(dtype, pieces[0].numel())
        views[me].copy_(pieces[0])
        channel.phase()
    _combine(channel, op, views, pieces[0])
    for piece in pieces[1:]:
        views = channel.heads(dtype, piece.numel())
        views[me].copy_(piece)
        channel.phase()
        _combine(channel, op, views, piece)
    return "shm-staged"


def _combine(channel: Channel, op: ReduceOperator, views: tuple[torch.Tensor, ...], piece: torch.Tensor) -> None:
    kernel = op.kernel
    if channel.size == 2:
        # This rank's part is still in its own piece; the order stays that of ranks.
        if channel.rank == 0:
            kernel(piece, views[1], out=piece)
        else:
            kernel(views[0], piece, out=piece)
    else:
        kernel(views[0], views[1], out=piece)
        for view in views[2:]:
            kernel(piece, view, out=piece)
    if op.average:
        op.finish(piece, channel.size)


def _direct(channel: Channel, plans: DirectPlans, flat: torch.Tensor, op: ReduceOperator) -> str:
    kernel, n = op.kernel, channel.size
    places = [place for place in channel.places() if place is not None]
    for first, *rest in plans.get(channel, flat, places):
        for view in rest:
            kernel(first, view, out=first)
        op.finish(first, n)
        for view in rest:
            view.copy_(first)
    channel.phase()
    return "shm-direct"


class _Blocks:
    """Reduction of a long tensor block by block, every rank its share of each block.

    A slot holds n shares of contributions to one block and one share of results of the block before.
    """

    def __init__(self, channel: Channel, source: torch.Tensor) -> None:
        n = channel.size
        share = min(channel.sizes.block // n, channel.sizes.slot // (n + 1)) // source.element_size()
        self._channel = channel
        self._dtype = source.dtype
        self._block_numel = n * share
        self._blocks = cut(source, self._block_numel)
        self._slots: list[torch.Tensor] = []
        self._bounds: list[tuple[int, int]] = []

    def contribute(self, number: int) -> None:
        """Put this rank's part of block `number` into its slot of the phase to come, but for its own share."""
        n, me, block = self._channel.size, self._channel.rank, self._blocks[number]
        numel = block.numel()
        part = -(-numel // n)
        self._slots = self._channel.slots(self._dtype)
        self._bounds = [(min(r * part, numel), min((r + 1) * part, numel)) for r in range(n)]
        lo, hi = self._bounds[me]
        if lo:
            self._slots[me][:lo].copy_(block[:lo])
        if hi < numel:
            self._slots[me][hi:numel].copy_(block[hi:])

    def reduce(self, target: torch.Tensor | None, op: ReduceOperator) -> None:
        """Reduce everything, after the phase in which all ranks have contributed block 0.

        The result goes into `target`, block by block; with None it is left to others.
        """
        targets = cut(target, self._block_numel) if target is not None else None
        for k, block in enumerate(self._blocks):
            bounds = self._bounds
            self._reduce_share(block, op)
            if k + 1 < len(self._blocks):
                self.contribute(k + 1)
            else:
                self._slots = self._channel.slots(self._dtype)
            self._channel.phase()
            if targets is not None:
                for slot, (lo, hi) in zip(self._slots, bounds, strict=True):
                    if hi > lo:
                        targets[k][lo:hi].copy_(slot[self._block_numel : self._block_numel + hi - lo])

    def _reduce_share(self, block: torch.Tensor, op: ReduceOperator) -> None:
        me = self._channel.rank
        lo, hi = self._bounds[me]
        if hi == lo:
            return
        result = self._channel.slots(self._dtype)[me][self._block_numel : self._block_numel + hi - lo]
        parts = [block[lo:hi] if r == me else slot[lo:hi] for r, slot in enumerate(self._slots)]
        op.kernel(parts[0], parts[1], out=result)
        for other in parts[2:]:
            op.kernel(result, other, out=result)
        op.finish(result, self._channel.size)


def _chain(channel: Channel, flat: torch.Tensor, op: ReduceOperator) -> None:
    """Reduce `flat` over all ranks in place, after the phase in which ranks announced that they would.

    Rank 0 copies piece after piece to its slot; rank r adds its own to what rank r - 1 has in its slot and puts the
    sum in its own slot; the last rank's slot then holds results, which all copy out (the segmented chain by which MPI
    libraries reduce long messages, here with a result that everyone can read). For S bytes a rank does S bytes of
    additions and S of copies, whatever the number of ranks n, where sharing the reduction of blocks costs (1 - 1/n) S
    for each of copying in and adding, and S for copying out. It takes n more phases, so it is for tensors of many
    pieces.
    """
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
