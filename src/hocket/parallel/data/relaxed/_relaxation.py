"""What a Trainer does by a plan whose workers do not agree at every step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from hocket.planner import Synchronisation

from ...batches import BatchPart, DistributedLoader, SharedLoader
from ...batches import batch as _batch
from ...mesh import World
from ...state import parameters_of
from ._hogwild import Hogwild
from ._local import LocalSGD
from ._stale import BoundedStaleness
from ._tickets import TicketLoader, Tickets

Train = Callable[[Sequence[BatchPart]], Callable[[], torch.Tensor]]


class Relaxation:
    """Runs the steps of one worker."""

    def __init__(
        self,
        synchronisation: Synchronisation,  # synchronisation of the plan
        model: torch.nn.Module,  # the model, whole on every worker
        optimizer: Any,  # optimizer of its parameters
        world: World,  # the workers
        # a function that computes gradients of parts of a batch on this worker alone, and gives what tells their loss
        train: Train,
        reduction: Literal["mean", "sum"],  # reduction of the loss
    ) -> None:
        self._world, self._train, self._reduction = world, train, reduction
        self._model, self._optimizer = model, optimizer
        group, number = world.group, synchronisation.number
        self._form: LocalSGD | BoundedStaleness | Hogwild
        if synchronisation.rule == "local":
            self._form = LocalSGD(model, optimizer, number, group=group)
        elif synchronisation.rule == "hogwild":
            self._form = Hogwild(model, optimizer, group=group)
        else:
            rule: Literal["stale", "ssp"] = "stale" if synchronisation.rule == "stale" else "ssp"
            self._form = BoundedStaleness(model, optimizer, number, rule, group=group)
        self._tickets = Tickets(world)
        self._settled = True

    def loader(self, loader: Iterable[Any]) -> SharedLoader:
        """Return the user's loader as workers share it: equal parts where they keep step, parts by need where not."""
        if isinstance(self._form, LocalSGD):
            return DistributedLoader(loader, among=self._world)
        return TicketLoader(loader, self._world, self._tickets)

    def batches(self, shared: SharedLoader) -> Iterator[Any]:
        """Return this worker's parts of an epoch; at its end the workers meet."""
        self._settled = False  # on all workers, whether or not they will get a part
        if isinstance(shared, TicketLoader):
            try:
                for share, part in shared:
                    _batch.enter(shared, share, part)
                    yield part
            finally:
                _batch.leave(shared)
        else:
            yield from shared
        self.settle()

    def step(self, parts: Sequence[BatchPart], clip: Callable[[], None]) -> torch.Tensor:
        """Make one step of this worker; return the loss of its part, as that of a whole batch of such samples.

        `parts` make up this worker's part of the batch; `clip` clips the gradients before they are used.
        """
        samples, total = sum(part.samples for part in parts), parts[0].total
        self._settled = False
        form = self._form
        if not isinstance(form, LocalSGD):
            form.begin()
        loss = self._train([replace(part, total=max(1, samples)) for part in parts])()
        if self._reduction == "sum" and samples:
            gradients = [p.grad for p in parameters_of(self._model) if p.grad is not None]
            for gradient in gradients:
                gradient.mul_(total / samples)
            loss = loss * (total / samples)
        clip()
        if isinstance(form, LocalSGD):
            self._optimizer.step()
            form.step(samples=samples)
        else:
            form.step(weight=samples / total, samples=samples)
        return loss

    def settle(self) -> None:
        """Wait for all workers and make their parameters equal; a collective operation."""
        if not self._settled:
            self._form.settle()
        self._settled = True

    def close(self) -> None:
        """Leave, with a model of one's own."""
        self._form.close()

    def report(self) -> dict[str, Any]:
        """See `Progress.to_json`."""
        return self._form.report()
