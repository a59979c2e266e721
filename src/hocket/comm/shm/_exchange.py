"""The other collectives over one host's shared memory; each works in pieces that fit a slot, one phase a piece."""

from collections.abc import Sequence

import torch

from ..transport import CollectiveMismatchError, ReduceOperator, cut
from ._all_reduce import peer_buffer
from ._channel import Channel
from ._memory import MemoryHandle

_BYTES = torch.uint8


def barrier(channel: Channel, timeout_s: float) -> str:
    """Wait until all ranks have called it."""
    channel.begin("barrier", timeout_s=timeout_s)
    channel.meet()
    return "shm-staged"


def broadcast(channel: Channel, flat: torch.Tensor, root: int, place: MemoryHandle | None, timeout_s: float) -> str:
    """Copy the root's `flat` to all ranks' `flat`."""
    channel.begin("broadcast", timeout_s=timeout_s, dtype=flat.dtype, numel=flat.numel(), root=root, place=place)
    data = flat.view(_BYTES)
    pieces = cut(data, channel.sizes.piece)
    slot = channel.slots(_BYTES)[root]
    if channel.rank == root and place is None and pieces:
        slot[: pieces[0].numel()].copy_(pieces[0])
    channel.meet()
    source = channel.places()[root]
    if source is not None:
        if channel.rank != root:
            data.copy_(peer_buffer(channel, root, source, _BYTES, data.numel()))
        channel.phase()
        return "shm-direct"
    for k, piece in enumerate(pieces):
        if k:
            slot = channel.slots(_BYTES)[root]
            if channel.rank == root:
                slot[: piece.numel()].copy_(piece)
            channel.phase()
        if channel.rank != root:
            piece.copy_(slot[: piece.numel()])
    return "shm-staged"


def all_gather(
    channel: Channel, outputs: Sequence[torch.Tensor], flat: torch.Tensor, place: MemoryHandle | None, timeout_s: float
) -> str:
    """Copy rank r's `flat` to `outputs[r]` of all ranks; each of them contiguous and as long as `flat`."""
    if flat.numel() * flat.element_size() < channel.sizes.direct:
        place = None
    channel.begin("all_gather", timeout_s=timeout_s, dtype=flat.dtype, numel=flat.numel(), place=place)
    data = flat.view(_BYTES)
    targets = [output.view(_BYTES) for output in outputs]
    pieces = cut(data, channel.sizes.piece)
    columns = [cut(target, channel.sizes.piece) for target in targets]
    slots = channel.heads(_BYTES, pieces[0].numel())
    if place is None:
        slots[channel.rank].copy_(pieces[0])
    channel.meet()
    places = channel.places()
    if all(places):
        for r in channel.others:
            source = peer_buffer(channel, r, places[r], _BYTES, data.numel())  # type: ignore[arg-type]
            targets[r].copy_(source)
        if targets[channel.rank].data_ptr() != data.data_ptr():
            targets[channel.rank].copy_(data)
        channel.phase()
        return "shm-direct"
    again = any(places)
    for k, piece in enumerate(pieces):
        numel = piece.numel()
        if k or again:
            slots = channel.heads(_BYTES, numel)
            slots[channel.rank].copy_(piece)
            channel.phase()
        for r in channel.others:
            columns[r][k].copy_(slots[r])
        own = columns[channel.rank][k]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
    return "shm-staged"


def reduce_scatter(
    channel: Channel,  # channel of the group
    output: torch.Tensor,  # contiguous, 1-d; may be this rank's own input
    inputs: Sequence[torch.Tensor],  # one contiguous tensor a rank, each as long as `output`; not changed otherwise
    op: ReduceOperator,  # the operator
    place: MemoryHandle | None,  # memory of the inputs, if they are one registered buffer
    timeout_s: float,  # seconds for the whole operation
) -> str:
    """Reduce everyone's `inputs[r]` into `output` of rank r."""
    n, me, kernel, numel = channel.size, channel.rank, op.kernel, output.numel()
    if output.numel() * output.element_size() < channel.sizes.direct:
        place = None
    channel.begin(
        "reduce_scatter", timeout_s=timeout_s, dtype=output.dtype, numel=numel, operator=op.number, place=place
    )
    channel.meet()
    places = channel.places()
    dtype = op.view or output.dtype
    output, inputs = output.view(dtype), [i.view(dtype) for i in inputs]
    direct = all(places)
    if direct:
        whole = n * numel
        buffers = [
            inputs[me] if r == me else peer_buffer(channel, r, places[r], dtype, whole)[me * numel : (me + 1) * numel]  # type: ignore[arg-type]
            for r in range(n)
        ]
        step = channel.sizes.direct_piece // output.element_size()
    else:
        step = min(channel.sizes.piece, channel.sizes.slot // n) // output.element_size()
    # A rank whose output is its own input must not overwrite it before its turn in the order of ranks.
    overlaps = me >= 2 and output.data_ptr() == inputs[me].data_ptr()
    for start in range(0, numel, step):
        length = min(step, numel - start)
        target = output[start : start + length]
        if direct:
            parts = [buffer[start : start + length] for buffer in buffers]
        else:
            slots = channel.slots(dtype)
            for r in channel.others:
                slots[me][r * step : r * step + length].copy_(inputs[r][start : start + length])
            channel.phase()
            parts = [slot[me * step : me * step + length] for slot in slots]
            parts[me] = inputs[me][start : start + length]
        if overlaps:
            parts[me] = parts[me].clone()
        kernel(parts[0], parts[1], out=target)
        for part in parts[2:]:
            kernel(target, part, out=target)
        op.finish(target, n)
    if direct:
        channel.phase()
    return "shm-direct" if direct else "shm-staged"


def all_to_all(
    channel: Channel, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout_s: float
) -> str:
    """Copy `inputs[s]` of rank r to `outputs[r]` of rank s; lengths may differ, dtypes not.

    Raises:
        CollectiveMismatchError: on all ranks, if any rank expects another length than its peer sends.
    """
    n, me = channel.size, channel.rank
    channel.begin("all_to_all", timeout_s=timeout_s, dtype=inputs[0].dtype, numel=0)
    sizes = channel.slots(torch.int64)
    sizes[me][: 2 * n].copy_(torch.tensor([t.numel() for t in inputs] + [t.numel() for t in outputs]))
    channel.meet()
    table = torch.stack([s[: 2 * n] for s in sizes]).cpu()  # one copy, where slots are on a GPU
    sent, expected = table[:, :n], table[:, n:].T
    if not torch.equal(sent, expected):
        r, s = (sent != expected).nonzero()[0].tolist()
        raise CollectiveMismatchError(
            f"all_to_all #{channel.seq} of group {channel.name!r}: rank {channel.global_ranks[r]} sends "
            f"{int(sent[r, s])} elements to rank {channel.global_ranks[s]}, which expects {int(expected[r, s])}; "
            "input splits and output splits must agree"
        )
    sources = [t.view(_BYTES) for t in inputs]
    targets = [t.view(_BYTES) for t in outputs]
    if targets[me].data_ptr() != sources[me].data_ptr():
        targets[me].copy_(sources[me])
    longest = int(sent.masked_fill(torch.eye(n, dtype=torch.bool), 0).max()) * inputs[0].element_size()
    share_nbytes = channel.sizes.slot // n // 16 * 16
    for start in range(0, longest, share_nbytes):
        slots = channel.slots(_BYTES)
        for r in channel.others:
            part = sources[r][start : start + share_nbytes]
            slots[me][r * share_nbytes : r * share_nbytes + part.numel()].copy_(part)
        channel.phase()
        for r in channel.others:
            part = targets[r][start : start + share_nbytes]
            part.copy_(slots[r][me * share_nbytes : me * share_nbytes + part.numel()])
    return "shm-staged"


def gather(
    channel: Channel, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int, timeout_s: float
) -> str:
    """Copy rank r's `flat` to the root's `outputs[r]`."""
    channel.begin("gather", timeout_s=timeout_s, dtype=flat.dtype, numel=flat.numel(), root=root)
    channel.meet()
    data = flat.view(_BYTES)
    targets = [t.view(_BYTES) for t in outputs] if outputs is not None else None
    if targets is not None:
        targets[root].copy_(data)
    for start in range(0, data.numel(), channel.sizes.piece):
        slots = channel.slots(_BYTES)
        piece = data[start : start + channel.sizes.piece]
        if targets is None:
            slots[channel.rank][: piece.numel()].copy_(piece)
        channel.phase()
        if targets is not None:
            for r in channel.others:
                targets[r][start : start + piece.numel()].copy_(slots[r][: piece.numel()])
    return "shm-staged"


def scatter(
    channel: Channel, flat: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, timeout_s: float
) -> str:
    """Copy the root's `inputs[r]` to `flat` of rank r."""
    n, me = channel.size, channel.rank
    channel.begin("scatter", timeout_s=timeout_s, dtype=flat.dtype, numel=flat.numel(), root=root)
    channel.meet()
    data = flat.view(_BYTES)
    sources = [t.view(_BYTES) for t in inputs] if inputs is not None else None
    if sources is not None:
        data.copy_(sources[root])
    share_nbytes = channel.sizes.slot // n // 16 * 16
    for start in range(0, data.numel(), share_nbytes):
        slot = channel.slots(_BYTES)[root]
        piece = data[start : start + share_nbytes]
        if sources is not None:
            for r in channel.others:
                slot[r * share_nbytes : r * share_nbytes + piece.numel()].copy_(
                    sources[r][start : start + share_nbytes]
                )
        channel.phase()
        if sources is None:
            piece.copy_(slot[me * share_nbytes : me * share_nbytes + piece.numel()])
    return "shm-staged"
