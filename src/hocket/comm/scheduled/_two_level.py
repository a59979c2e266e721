"""Collectives of ranks on several hosts: shared memory inside each host, schedules over an engine between them.

Every host has the same number of ranks, and rank j of each host belongs to *rail* j. An all_reduce scatters the sum
over the ranks of a host, which each reduce their part along their rail, and gathers: every byte crosses the network
once for each host and not once for each rank. The order of ranks among hosts may be any.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..transport import Flats, ReduceOperator, Transport
from ._execute import PendingMessage, PointToPoint

RAILS_NBYTES: Final = 32 * 2**10
"""From this size on an all_reduce is shared out to all rails; below, two phases inside the host cost more than they
save, and one rank of each host speaks for it."""


class Subset:
    """Point-to-point among some of the ranks, numbered anew. Number i here is `ranks[i]` there."""

    def __init__(self, points: PointToPoint, ranks: Sequence[int]) -> None:
        self._point_to_point = points
        self._ranks = tuple(ranks)
        self.name = points.name

    def send(self, flat: Tensor, peer: int) -> PendingMessage:
        return self._point_to_point.send(flat, self._ranks[peer])

    def receive(self, flat: Tensor, peer: int) -> PendingMessage:
        return self._point_to_point.receive(flat, self._ranks[peer])


class TwoLevelTransport:
    """See the head of this module; a `Transport`.

    Args:
        hosts: The ranks of each host, in order; all of one length.
        rank: Number of this rank.
        inside: Collectives among the ranks of this host, numbered in that order.
        between: Collectives along this rank's rail, hosts numbered in order.
        flat: Collectives among all ranks, for what has no form with two levels.
    """

    def __init__(
        self, hosts: Sequence[Sequence[int]], rank: int, inside: Transport, between: Transport, flat: Transport
    ) -> None:
        self._inside = inside
        self.between = between
        self._flat = flat
        self._rank = rank
        self._local_size = len(hosts[0])
        self._places = {r: (host, local) for host, ranks in enumerate(hosts) for local, r in enumerate(ranks)}
        self._hosts = [tuple(ranks) for ranks in hosts]
        self._size = len(self._places)
        self._host, self._local = self._places[rank]

    def all_reduce(self, flat: Tensor, op: ReduceOperator, timeout_s: float) -> str:
        plain = _plain(op)
        if flat.numel() * flat.element_size() < RAILS_NBYTES:
            self._inside.reduce(flat, plain, 0, timeout_s)
            path = "leaders"
            if self._local == 0:
                path = self.between.all_reduce(flat, plain, timeout_s)
            self._inside.broadcast(flat, 0, timeout_s)
        else:
            path = self._by_rails(flat, plain, timeout_s)
        op.finish(flat, self._size)
        return f"shm + {path}"

    def _by_rails(self, flat: Tensor, op: ReduceOperator, timeout_s: float) -> str:
        """reduce_scatter inside, all_reduce along the rails, all_gather inside; the ends that do not divide last."""
        share = flat.numel() // self._local_size
        body, rest = flat[: share * self._local_size], flat[share * self._local_size :]
        mine, parts = torch.empty(share, dtype=flat.dtype), list(body.view(self._local_size, share))
        self._inside.reduce_scatter(mine, parts, op, timeout_s)
        path = self.between.all_reduce(mine, op, timeout_s)
        self._inside.all_gather(parts, mine, timeout_s)
        if rest.numel():
            self._inside.all_reduce(rest, op, timeout_s)
            self.between.all_reduce(rest, op, timeout_s)
        return path

    def reduce(self, flat: Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        root_host, root_local = self._places[root]
        plain = _plain(op)
        data = flat if self._rank == root else flat.clone()
        self._inside.reduce(data, plain, root_local, timeout_s)
        path = ""
        if self._local == root_local:
            path = self.between.reduce(data, plain, root_host, timeout_s)
        if self._rank == root:
            op.finish(data, self._size)
        return f"shm + {path}"

    def broadcast(self, flat: Tensor, root: int, timeout_s: float) -> str:
        root_host, root_local = self._places[root]
        path = ""
        if self._local == root_local:
            path = self.between.broadcast(flat, root_host, timeout_s)
        self._inside.broadcast(flat, root_local, timeout_s)
        return f"shm + {path}"

    def all_gather(self, outputs: Flats, flat: Tensor, timeout_s: float) -> str:
        if any(output.numel() != flat.numel() for output in outputs):
            return self._flat.all_gather(outputs, flat, timeout_s)
        rail = torch.empty(len(self._hosts), flat.numel(), dtype=flat.dtype)
        path = self.between.all_gather(list(rail), flat, timeout_s)
        everything = torch.empty(self._local_size, *rail.shape, dtype=flat.dtype)
        self._inside.all_gather([part.view(-1) for part in everything], rail.view(-1), timeout_s)
        for r, output in enumerate(outputs):
            host, local = self._places[r]
            output.copy_(everything[local, host])
        return f"shm + {path}"

    def reduce_scatter(self, output: Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        if any(one.numel() != output.numel() for one in inputs):
            return self._flat.reduce_scatter(output, inputs, op, timeout_s)
        plain = _plain(op)
        of_rails = [torch.cat([inputs[ranks[local]] for ranks in self._hosts]) for local in range(self._local_size)]
        rail = torch.empty(len(self._hosts) * output.numel(), dtype=output.dtype)
        self._inside.reduce_scatter(rail, of_rails, plain, timeout_s)
        path = self.between.reduce_scatter(output, list(rail.view(len(self._hosts), -1)), plain, timeout_s)
        op.finish(output, self._size)
        return f"shm + {path}"

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        return self._flat.all_to_all(outputs, inputs, timeout_s)

    def gather(self, outputs: Flats | None, flat: Tensor, root: int, timeout_s: float) -> str:
        return self._flat.gather(outputs, flat, root, timeout_s)

    def scatter(self, flat: Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        return self._flat.scatter(flat, inputs, root, timeout_s)

    def barrier(self, timeout_s: float) -> str:
        self._inside.barrier(timeout_s)
        path = self.between.barrier(timeout_s) if self._local == 0 else "leaders"
        self._inside.barrier(timeout_s)
        return f"shm + {path}"


def _plain(op: ReduceOperator) -> ReduceOperator:
    """Return the same without what is done once, after the last level."""
    return op._replace(average=False)
