"""Weights and the optimizer's state by stages: each rank trains its own, and they are brought together when needed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.parallel.mesh import Mesh, World

from ._broadcast import StateBroadcast
from ._engine import Engine
from ._zero import ZeroOptimizer, publish


class StagedOptimizer(ZeroOptimizer):
    """A Keras optimizer that keeps the state of this rank's stage.

    `variables` are all that it is to train, and `owners` the stage of each. Raises ValueError: an option of the
    optimizer needs the state of all variables in one place.
    """

    remedy = "leave pipeline= out"

    def __init__(self, optimizer: Any, variables: list[Any], mesh: Mesh, owners: list[int]) -> None:
        super().__init__(optimizer, variables, mesh["pipeline"], owners)
        self._everyone = mesh.whole

    def apply(self, gradients: Any, variables: Any = None) -> None:
        """Update this stage's variables, in the place of the optimizer's own method."""
        pairs = list(zip(gradients, self._variables if variables is None else variables, strict=True))
        limit = self.optimizer.global_clipnorm
        if limit is not None:
            scale = self._clipping(limit, [g for g, _ in pairs if g is not None])
            pairs = [(None if g is None else g * scale.to(g.device, g.dtype), v) for g, v in pairs]
        self._update(pairs)

    def _clipping(self, limit: float, mine: list[torch.Tensor]) -> torch.Tensor:
        """By what gradients are multiplied, as Keras does, so that the norm over all stages is `limit` at most."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for gradient in mine:
            total += gradient.detach().to(torch.float64).square().sum().to(total.device)
        with comm.label("keras gradient norm"):
            dist.all_reduce(total, group=self._world.group)
        norm = total.sqrt()
        return limit * torch.minimum(1.0 / norm, torch.full_like(norm, 1.0 / limit)) + (norm - norm)

    def _agreed(self, state: Any) -> Any:
        return self._everyone.from_root(state)


class StagedStateBroadcast(StateBroadcast):
    """Broadcasts, but for the weights that other stages have trained since they were last brought together.

    `engine` makes or gives this rank's stage of the built model; a collective operation.
    """

    gathers = True

    def __init__(self, model: Any, mesh: Mesh, engine: Callable[[], Engine]) -> None:
        super().__init__(model, mesh.whole, shard=True)
        self._mesh = mesh
        self._engine = engine
        self._apart = False

    def note_step(self) -> None:
        """Stages have trained: other ranks' copies of their weights are old now."""
        self._apart = True

    def shard_optimizer(self) -> None:
        """See StateBroadcast; by stages."""
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        if optimizer is None:
            return
        if self.zero_optimizer is None or not self.zero_optimizer.holds(optimizer, variables):
            self.zero_optimizer = None
            self.align()
            owners = self._owners(self._engine(), variables)
            self.zero_optimizer = StagedOptimizer(optimizer, variables, self._mesh, owners)

    def align(self) -> None:
        self.gather()
        super().align()

    def send_state(self) -> None:
        self.gather()
        super().send_state()

    def collect(self) -> None:
        """Put weights, and on rank 0 the optimizer's state, together; a collective operation."""
        self.gather()
        if self._mesh["data"].rank == 0:  # rank 0 is in the first pipeline, and the others have the same
            super().collect()

    def gather(self) -> None:
        """Give every rank the weights of all stages; a collective operation."""
        if not self._apart:
            return
        self._apart = False
        variables = self.model.variables
        publish(variables, self._owners(self._engine(), variables), self._mesh["pipeline"])

    def _owners(self, engine: Engine, variables: list[Any]) -> list[int]:
        edges = [*engine.begins, len(engine.graph.steps)]
        owner_of = {
            id(v): stage
            for stage, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True))
            for step in engine.graph.steps[begin:end]
            for v in step.variables
        }
        return [owner_of.get(id(v), 0) for v in variables]


def check_world(world: World, pipeline: int) -> None:
    """Raise ValueError unless the ranks make whole pipelines."""
    if world.size % pipeline:
        near = pipeline * max(1, round(world.size / pipeline))
        raise ValueError(
            f"pipeline={pipeline} does not divide the {world.size} ranks into whole pipelines: start a multiple of "
            f"{pipeline} workers (hocket run -n {near}), or say another pipeline="
        )
