"""The plain form: every data-parallel rank holds everything, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from ..mesh import World
from ..state import Owned, ParameterPlacement, ShardBox
from ._reducer import Reducer
from .compression import Compression


class Form(Protocol):
    """How parameters, gradients and optimizer state are held by data-parallel ranks.

    Attributes:
        owned: what this rank's optimizer updates.
        frozen: what it holds of parameters that are not trained.
    """

    owned: list[Owned]
    frozen: list[Owned]

    @property
    def compression(self) -> Compression | None:
        """Compresses gradients among the ranks; None where they go as they are."""

    def passing(self, last: bool) -> AbstractContextManager[None]:
        """A block for a forward and a backward pass of a part of the batch; `last` of the parts of this step."""

    def adding(self) -> AbstractContextManager[None]:
        """A block whose passes add up gradients on this rank, for `reduce`."""

    def reduce(self) -> None:
        """Averages gradients that have added up in passes of `adding`; a collective operation."""

    def collect(self) -> None:
        """Makes the averaged gradients those of what this rank owns, after the last pass."""

    def publish(self) -> None:
        """Gives all ranks the weights that were updated; a collective operation."""

    def forget(self) -> None:
        """Drops all gradients."""


class Replicas:
    """Every rank holds all parameters of its modules, and the average of their gradients.

    Args:
        parameters: by the model's names.
        frozen: parameters that are not trained.
        places: where each lies in the model's own parameter.
        world: the data-parallel ranks.
        bucket_bytes: see `DataParallel`.
        compression: of the gradients; see `hocket.planner.Plan`.
        averages: whether gradients are averaged at all; each rank keeps its own if not.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        frozen: Mapping[str, torch.nn.Parameter],
        places: Mapping[str, ParameterPlacement],
        world: World,
        bucket_bytes: int | None,
        compression: str = "none",
        *,
        averages: bool = True,
    ) -> None:
        self.owned = [Owned(p, p, ShardBox.all_of(places[name]), world.size) for name, p in parameters.items()]
        self.frozen = [Owned(p, p, ShardBox.all_of(places[name]), world.size) for name, p in frozen.items()]
        self._reducer: Reducer | None = None
        if averages and world.size > 1 and parameters:
            self._reducer = Reducer(list(parameters), list(parameters.values()), world, bucket_bytes, None, compression)

    @property
    def compression(self) -> Compression | None:
        """See Form."""
        return None if self._reducer is None else self._reducer.compression

    def resize(self, bucket_bytes: int) -> None:
        """Makes the buckets of gradients so large, from the next step on."""
        if self._reducer is not None:
            self._reducer.resize(bucket_bytes)

    @contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        """See Form."""
        reducer = self._reducer
        if reducer is None:
            yield
            return
        with nullcontext() if last else reducer.no_sync():
            reducer.prepare()
            yield

    def adding(self) -> AbstractContextManager[None]:
        """See Form."""
        return self.passing(last=False)

    def reduce(self) -> None:
        """See Form."""
        if self._reducer is not None:
            self._reducer.reduce_all()

    def collect(self) -> None:
        """See Form."""

    def publish(self) -> None:
        """See Form."""

    def forget(self) -> None:
        """See Form."""
        for item in self.owned:
            item.leaf.grad = None
