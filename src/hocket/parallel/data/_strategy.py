"""How data-parallel ranks hold parameters, gradients and optimizer state, and the plain way: replicated on all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..mesh import World
from ..state import Owned, ParameterPlacement, ShardBox
from ._reducer import GradientReducer
from .compression import Compression


class ShardingStrategy:
    """How data-parallel ranks hold parameters, gradients and optimizer state; here as if there were one rank."""

    def __init__(self, owned: Sequence[Owned] = (), frozen: Sequence[Owned] = ()) -> None:
        self.owned = list(owned)  # what this rank's optimizer updates
        self.frozen = list(frozen)  # what this rank holds of parameters that are not trained

    @property
    def compression(self) -> Compression | None:
        """Compresses gradients among the ranks; None where they go as they are."""
        return None

    def passing(self, last: bool) -> AbstractContextManager[None]:
        """Open a block for a forward and a backward pass of a part of the batch; `last` of the parts of this step."""
        return nullcontext()

    def adding(self) -> AbstractContextManager[None]:
        """Open a block whose passes add up gradients on this rank, for `reduce`."""
        return nullcontext()

    def reduce(self) -> None:
        """Average gradients that have added up in passes of `adding`; a collective operation."""

    def collect(self) -> None:
        """Make the averaged gradients those of what this rank owns, after the last pass."""

    def scale(self, factor: float) -> None:
        """Multiply the averaged gradients of what this rank owns, after `collect`; by the same factor on every rank."""
        gradients = {id(item.leaf.grad): item.leaf.grad for item in self.owned if item.leaf.grad is not None}
        if gradients:
            torch._foreach_mul_(list(gradients.values()), factor)

    def publish(self) -> None:
        """Give all ranks the weights that were updated; a collective operation."""

    def update(self, optimizer: Any) -> None:
        """Have the optimizer make its step: now, unless a strategy makes it as gradients arrive."""
        optimizer.step()

    def finish(self) -> None:
        """Make what is due of earlier steps: nothing, where updates are made at once."""
        return

    def forget(self) -> None:
        """Drop all gradients."""
        for item in self.owned:
            item.leaf.grad = None


def replicated(
    parameters: Mapping[str, torch.nn.Parameter], places: Mapping[str, ParameterPlacement], world: World
) -> list[Owned]:
    """Return parameters as held in full by every rank of `world`."""
    return [Owned(p, p, ShardBox.full(places[name]), world.size) for name, p in parameters.items()]


class Replicated(ShardingStrategy):
    """Every rank holds all parameters of its modules, and the average of their gradients."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],  # trained parameters by the model's names
        frozen: Mapping[str, torch.nn.Parameter],  # parameters that are not trained
        places: Mapping[str, ParameterPlacement],  # where each parameter lies in the model's own
        world: World,  # the data-parallel ranks
        bucket_bytes: int | None,  # see `DataParallel`
        compression: str = "none",  # compression of the gradients; see `hocket.planner.Plan`
        *,
        averages: bool = True,  # whether gradients are averaged at all; each rank keeps its own if not
    ) -> None:
        super().__init__(replicated(parameters, places, world), replicated(frozen, places, world))
        self._reducer: GradientReducer | None = None
        if averages and world.size > 1 and parameters:
            self._reducer = GradientReducer(
                list(parameters), list(parameters.values()), world, bucket_bytes, None, compression
            )

    @property
    def compression(self) -> Compression | None:
        return None if self._reducer is None else self._reducer.compression

    def resize(self, bucket_bytes: int) -> None:
        """Make the buckets of gradients so large, from the next step on."""
        if self._reducer is not None:
            self._reducer.resize(bucket_bytes)

    @contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        reducer = self._reducer
        if reducer is None:
            yield
            return
        with reducer.owning(), nullcontext() if last else reducer.no_sync():
            reducer.prepare()
            yield

    def adding(self) -> AbstractContextManager[None]:
        return self.passing(last=False)

    def reduce(self) -> None:
        if self._reducer is not None:
            self._reducer.reduce_all()
