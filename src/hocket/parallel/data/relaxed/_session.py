"""What all relaxed training has in common: equal beginnings, a count of what was done, and an end at which all meet."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

import torch

from ...mesh import World
from ...state import broadcast_optimizer_state, broadcast_tensors, check_model, parameters_of
from ._progress import Progress


class RelaxedTraining(ABC):
    """Settles at the end of its `with` block, or tells the others that it has failed.

    The weights of rank 0's model count.

    Raises:
        ValueError: workers have different models.
    """

    def __init__(self, rule: str, model: torch.nn.Module, optimizer: Any, world: World) -> None:
        self.progress = Progress(rule)  # what was done so far
        self._model, self._optimizer, self._world = model, optimizer, world
        if world.size > 1:
            check_model(model, world)
            broadcast_tensors([*parameters_of(model), *model.buffers()], world)
            broadcast_optimizer_state(optimizer, world)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.settle()
        self.close(failed=kind is not None)

    @abstractmethod
    def settle(self) -> None:
        """Wait for all workers, whose parameters are the same then; a collective operation."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Leave the others, with a model of one's own.

        `failed` tells them that this worker cannot go on, rather than that all is done.
        """

    def report(self) -> dict[str, Any]:
        """Return updates, averages, seconds waited and the histogram of staleness as JSON values; see `Progress`."""
        return {**self.progress.to_json(), "serially_equivalent": False}
