"""Looking up rows that lie on other ranks: numbers of rows go there, rows come back, and gradients go there again.

The layout of Naumov et al. 2019 (arXiv:1906.00091, section 4): tables divided, everything else data-parallel, and an
all-to-all between them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket import comm
from hocket.workload.division import CollectiveCount

from ..mesh import World
from ._sharding import TableSharding


@dataclass(frozen=True, slots=True)
class _LookupRoute:
    """How the rows of one look-up travel."""

    asked: list[int]  # how many rows this rank wants of each
    owed: list[int]  # how many rows each wants of this one
    # for each row in the order of their owners, where it stands among those looked up; None for as they are
    order: Tensor | None


class RowExchange:
    """Look-ups in one table; all ranks must make them in the same order."""

    def __init__(self, decision: TableSharding, world: World) -> None:
        self.decision = decision  # how the rows of the table are sharded
        self.begin, self.end = decision.range(world.rank)
        self.weight: Callable[[], float] = _one
        self._world = world  # the ranks
        self._bounds = torch.tensor(decision.bounds[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowExchange":
        return self  # copies of a model look up in the same group

    def look_up(self, ids: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of the whole table; a collective operation. Raises IndexError: a number is not one of a row.

        Args:
            ids: Numbers of the rows, (n,), int32 or int64; any n, also none.
            table: A function that gives rows (m, width) of this rank's part for their numbers (m,) in it.

        Returns:
            (n, width), through which gradients flow to the ranks that have the rows: there the gradient is the average
            over ranks, weighted by `weight`, as data-parallel gradients are.
        """
        self._check(ids)
        ids = ids.to(torch.int64)
        self._bounds = self._bounds.to(ids.device)
        owners = torch.searchsorted(self._bounds, ids, right=True)
        order = torch.argsort(owners, stable=True) if self.decision.form == "row" else None
        counts = torch.bincount(owners, minlength=self._world.size)
        owed = torch.empty_like(counts)
        with comm.label("rows wanted"):
            dist.all_to_all_single(owed, counts, group=self._world.group)
        route = _LookupRoute(counts.tolist(), owed.tolist(), order)
        wanted = ids.new_empty(sum(route.owed))
        with comm.label("numbers of rows"):
            self._all_to_all(wanted, ids if order is None else ids[order], route.owed, route.asked)
        rows: Tensor = _ExchangeRows.apply(table(wanted - self.begin), self, route)  # type: ignore[no-untyped-call]
        return rows

    def expected(self, ids: int, width: int, element_size: int, *, trained: bool) -> Iterator[CollectiveCount]:
        """Return what one look-up communicates.

        All ranks together look up `ids` rows; `trained` says whether gradients travel back.
        """
        size = self._world.size
        yield CollectiveCount("forward", "all_to_all", 3, 8 * size * size + 8 * ids + ids * width * element_size)
        if trained:
            yield CollectiveCount("backward", "all_to_all", 1, ids * width * element_size)

    def _check(self, ids: Tensor) -> None:
        if not ids.numel():
            return
        low, high = (int(end) for end in torch.aminmax(ids))
        rows = self.decision.bounds[-1]
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise IndexError(f"{self.decision.name}: row {wrong} was looked up, and there are rows 0 to {rows - 1}")

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        dist.all_to_all_single(output, tensor.contiguous(), received, sent, group=self._world.group)

    def send(self, rows: Tensor, route: _LookupRoute) -> Tensor:
        """Send this rank's rows to those who want them; return what it wanted itself, in the order of its look-up."""
        got = rows.new_empty((sum(route.asked), rows.shape[1]))
        with comm.label("rows"):
            self._all_to_all(got, rows, route.asked, route.owed)
        if route.order is None:
            return got
        placed = torch.empty_like(got)
        placed[route.order] = got
        return placed

    def give_back(self, gradient: Tensor, route: _LookupRoute) -> Tensor:
        """Send gradients of rows looked up here to who has them; return those of this rank's rows, from all ranks."""
        if route.order is not None:
            gradient = gradient[route.order]
        weight = self.weight()
        # What weighs nothing must not be heard of even if it is infinite.
        gradient = gradient * (weight / self._world.size) if weight else torch.zeros_like(gradient)
        back = gradient.new_empty((sum(route.owed), gradient.shape[1]))
        with comm.label("gradients of rows"):
            self._all_to_all(back, gradient, route.owed, route.asked)
        return back


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange, route: _LookupRoute) -> Tensor:
        ctx.exchange, ctx.route = exchange, route
        return exchange.send(rows, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.give_back(gradient, ctx.route), None, None


def _one() -> float:
    return 1.0
