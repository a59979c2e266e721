"""A world in memory: all endpoints of a schedule in one thread, with nothing but queues between them."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch.distributed import ReduceOp

from hocket.comm import EndpointExecutor, Message, PendingMessage, blocks_after, blocks_before
from hocket.comm import reducer as make_reducer
from hocket.schedule import Schedule


class MemoryWorld:
    """Endpoints that send each other copies; `world.endpoint(3)` is one's `PointToPoint`.

    A send is done at once. The k-th receive from a peer gets the k-th message of that peer.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], _MemoryLane] = {}

    def endpoint(self, number: int) -> "MemoryPointToPoint":
        """Return one endpoint's way to its peers."""
        return MemoryPointToPoint(self, number)

    def lane(self, source: int, destination: int) -> "_MemoryLane":
        """Return what is under way from one endpoint to another."""
        return self._lanes.setdefault((source, destination), _MemoryLane())


class _MemoryLane:
    """Messages and receives of one direction, matched in order."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()
        self.posted: deque[_Receive] = deque()

    def match(self) -> None:
        while self.sent and self.posted:
            message, receive = self.sent.popleft(), self.posted.popleft()
            if message.numel() != receive.flat.numel():
                raise ValueError(f"a message of {message.numel()} elements meets a receive of {receive.flat.numel()}")
            receive.flat.copy_(message)
            receive.arrived = True


class _Receive:
    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.arrived = False

    def done(self) -> bool:
        return self.arrived

    def wait(self, timeout_s: float) -> None:
        if not self.arrived:
            raise TimeoutError("in a world of one thread nobody else can send while this endpoint waits")


class _Sent:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Do nothing: it was copied."""


class MemoryPointToPoint:
    """See `hocket.comm.PointToPoint`."""

    name = "memory"

    def __init__(self, world: MemoryWorld, me: int) -> None:
        self._world = world
        self._me = me

    def send(self, flat: torch.Tensor, peer: int) -> _Sent:
        lane = self._world.lane(self._me, peer)
        lane.sent.append(flat.clone())
        lane.match()
        return _Sent()

    def receive(self, flat: torch.Tensor, peer: int) -> _Receive:
        """Receive into `flat`, at once if the message is there."""
        receive = _Receive(flat)
        lane = self._world.lane(peer, self._me)
        lane.posted.append(receive)
        lane.match()
        return receive


def run_schedule(
    schedule: Schedule, inputs: Sequence[torch.Tensor | None], op: ReduceOp.RedOpType = ReduceOp.SUM, *, pieces: int = 1
) -> list[torch.Tensor | None]:
    """Run a schedule on tensors, all of its ranks and switches in this thread, with the executor of `hocket.comm`.

    Args:
        schedule: Schedule of any collective.
        inputs: Blocks that each rank contributes, as one flat tensor: the vector for all_reduce, reduce and
            broadcast, its own block for all_gather and gather, `world` blocks for reduce_scatter, all_to_all and the
            root of scatter; None where a rank contributes nothing. Blocks are of one length.
        op: Operator that combines contributions.
        pieces: See `EndpointExecutor`.

    Returns:
        Of each rank, the blocks that the contract gives it, as one flat tensor; None where it gives it none.

    Raises:
        RuntimeError: the endpoints wait for each other.
        ScheduleError: see `EndpointExecutor`.
    """
    collective = schedule.collective
    some = next(tensor for tensor in inputs if tensor is not None)
    holder = next(rank for rank, tensor in enumerate(inputs) if tensor is not None)
    block_numel = some.numel() // len(blocks_before(collective, holder))
    reducer = make_reducer(op, some.dtype)
    world = MemoryWorld()
    parts = [EndpointExecutor(schedule, endpoint, pieces=pieces) for endpoint in range(schedule.endpoints)]
    buffers = [torch.zeros(part.numel(block_numel), dtype=some.dtype) for part in parts]
    for rank, tensor in enumerate(inputs):
        if tensor is not None:
            held = blocks_before(collective, rank)
            for block, values in zip(held, tensor.view(len(held), block_numel), strict=True):
                buffers[rank][parts[rank].block(block, block_numel)] = values
    plays = {
        endpoint: part.play(buffers[endpoint], block_numel, reducer, world.endpoint(endpoint))
        for endpoint, part in enumerate(parts)
    }
    _run_all(plays)
    results: list[torch.Tensor | None] = []
    for rank in range(schedule.world):
        places = [parts[rank].block(block, block_numel) for block in blocks_after(collective, rank)]
        results.append(torch.cat([buffers[rank][place] for place in places]) if places else None)
    return results


def _run_all(plays: dict[int, Iterator[tuple[PendingMessage, Message]]]) -> None:
    """Let every endpoint go on as far as it can, in turns, until all are done."""
    waiting: dict[int, tuple[PendingMessage, Message]] = {}
    while plays:
        moved = False
        for endpoint in list(plays):
            if endpoint in waiting and not waiting[endpoint][0].done():
                continue
            moved = True
            following = next(plays[endpoint], None)
            if following is None:
                del plays[endpoint]
                waiting.pop(endpoint, None)
            else:
                waiting[endpoint] = following
        if not moved:
            stuck = ", ".join(f"{e} for {m.peer} (step {m.step})" for e, (_, m) in sorted(waiting.items())[:6])
            raise RuntimeError(f"the endpoints wait for each other: {stuck}")
