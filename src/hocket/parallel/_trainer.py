"""The one object behind which every form of parallelism stands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hocket.planner import Plan, PlanError, PlanFinding

from . import _batch, _checkpoint, _world
from ._clip import clip
from ._compose import Composition, compose
from ._loader import DistributedLoader
from ._memory import StateBytes
from ._parts import Part, Splitter

PLAN_VARIABLE = "HOCKET_PLAN"
"""Environment variable in which `hocket run --plan` hands over a plan, as JSON; a path is understood too."""


class Trainer:
    """Trains a model by any plan: the loss curve, and the model in the end, are those of one process.

    The model, the loss, the optimizer and its learning-rate schedule stay as they are for one device; batch sizes are
    global. What the plan cannot combine, or the world cannot hold, is refused before anything is allocated.

    A batch is a tuple or list: the model's positional inputs, and the target last. The loss is
    `loss_fn(model(*inputs), target)`.

    Args:
        model: the model, built alike on every rank; rank 0's weights count.
        loss_fn: gives a scalar for the model's output and the target.
        optimizer: a torch optimizer of the model's parameters. It keeps its identity, settings and groups; where the
            plan divides parameters among ranks, the groups hold this rank's parts.
        plan: how to train: a `Plan`, or the path of one; None for the one that `hocket run --plan` has given, or plain
            data parallelism over all ranks.
        sample: inputs of the model (a tuple, or one tensor), by which plans with tensor or pipeline parallelism trace
            and check it.
        loss_reduction: whether the loss is a "mean" over the samples of the batch or a "sum".

    Raises:
        PlanError: a rule of the plan is broken; with the rule and the remedy.
        ValueError: ranks hold different models, or the optimizer cannot work on parts of parameters.

    Example::

        trainer = hocket.Trainer(model, loss_fn, optimizer, plan=Plan(shard="gradients"))
        for epoch in range(epochs):
            for batch in trainer.batches(loader):
                loss = trainer.step(batch)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: Any,
        plan: Plan | str | Path | None = None,
        *,
        sample: Any = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", not {loss_reduction!r}')
        chosen = read_plan(plan)
        world = _world.join()
        self.plan = chosen.resolve(world.size)
        self.optimizer = optimizer
        self.steps = 0
        self.grad_norm: float | None = None
        self._loss_fn = loss_fn
        self._reduction: Literal["mean", "sum"] = loss_reduction
        self._composition: Composition = compose(model, optimizer, self.plan, world, sample)
        self._mesh = self._composition.mesh
        self._splitter = Splitter(self._mesh.data)
        self._loaders: list[DistributedLoader] = []
        self._positions: list[dict[str, Any]] = []

    # --- training ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The model as this rank holds it."""
        return self._composition.model

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's part of each batch of the next epoch over `loader`; see `hocket.distribute` for what it may be.

        After `load`, the first call for each loader goes on where the saved run had stopped.
        """
        return iter(self._shared(loader))

    def step(self, batch: Any) -> torch.Tensor:
        """One step of training: forward, backward, and the update of the weights.

        Args:
            batch: what `batches` has yielded, or a global batch that is the same on every rank.

        Returns:
            The loss of the global batch, the same on every rank; a scalar without gradient.

        Raises:
            TypeError: the batch is no tuple or list, or the loss no scalar.
        """
        form, plan = self._composition.form, self.plan
        form.forget()
        loss = self._passes(self._splitter.parts(batch, plan.accumulate))
        form.collect()
        if plan.clip_norm is not None:
            owned = self._composition.copies()
            local = all(count == self._mesh.whole.size for _, count in owned)
            self.grad_norm = clip(owned, plan.clip_norm, self._mesh.whole, local=local)
        self.optimizer.step()
        form.publish()
        self.steps += 1
        return loss()

    def _passes(self, parts: list[Part]) -> Callable[[], torch.Tensor]:
        """Forward and backward passes of all parts; returns what waits for the global loss."""
        form, data = self._composition.form, self._mesh.data
        total = torch.zeros((), dtype=torch.float64, device=data.device)
        work: Any = None
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with form.passing(last), _batch.counting(part.samples):
                self._composition.buffers.send()
                loss = self._loss(part)
                weight = part.weight(self._reduction)
                if part.samples:
                    total += loss.detach().to(total) * weight
                if last and data.size > 1:  # on its way during back-propagation
                    work = dist.all_reduce(total, group=data.group, async_op=True)
                torch.autograd.backward(loss * (weight * data.size))

        def wait() -> torch.Tensor:
            if work is not None:
                work.wait()
            return total

        return wait

    def _loss(self, part: Part) -> torch.Tensor:
        with self._precision():
            loss = self._loss_fn(self.model(*part.inputs), part.target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"loss_fn must give a scalar tensor, not {_describe(loss)}")
        return loss.reshape(())

    def _precision(self) -> AbstractContextManager[Any]:
        if self.plan.precision == "float32":
            return nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, dtype=torch.bfloat16)

    # --- evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], metric: Callable[[Any, Any], Any] | None = None) -> float:
        """The mean over all samples of `loader`, each exactly once, of a metric or of the loss; the same on every rank.

        Args:
            loader: batches of inputs and target, as for training.
            metric: gives the mean over samples for an output and a target; None for the loss, as it was reduced.
        """
        model, training = self.model, self.model.training
        self._composition.buffers.send()
        found = torch.zeros(2, dtype=torch.float64)
        model.eval()
        try:
            for batch in DistributedLoader(loader, among=self._mesh.data):
                (part,) = self._splitter.parts(batch, 1)
                with self._precision():
                    value = (metric or self._loss_fn)(model(*part.inputs), part.target)
                summed = metric is None and self._reduction == "sum"
                if part.samples:
                    found[0] += float(value) * (1 if summed else part.samples)
                    found[1] += part.samples
        finally:
            model.train(training)
        found = found.to(self._mesh.data.device)
        if self._mesh.data.size > 1:
            dist.all_reduce(found, group=self._mesh.data.group)
        total, samples = found.tolist()
        return total if metric is None and self._reduction == "sum" else total / samples if samples else float("nan")

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, extra: Any = None) -> None:
        """Writes a checkpoint that can be loaded under any plan and with any number of ranks; a collective operation.

        It holds weights, buffers, the optimizer's state and settings, random states, the number of steps, and where the
        loaders of `batches` stand: files of torch's DCP, under the model's own names.

        Args:
            path: a directory; an older checkpoint there is replaced when the new one is whole.
            extra: anything picklable to be kept with it (the state of a learning-rate schedule, say); rank 0's counts.
        """
        self._composition.buffers.send()
        positions = [shared.position() for shared in self._loaders]
        about = {"steps": self.steps, "plan": self.plan.to_json(), "loaders": positions, "extra": extra}
        composition = self._composition
        _checkpoint.write(
            Path(path), composition.pieces(), composition.form.owned, self.optimizer, about, self._mesh.whole
        )

    def load(self, path: str | Path) -> Any:
        """Goes on where `save` was called, whatever the plan and the number of ranks were; a collective operation.

        Returns:
            The `extra` that was saved.

        Raises:
            CheckpointError: there is no checkpoint, or it is of another model.
        """
        composition = self._composition
        about = _checkpoint.read(
            Path(path), composition.pieces(), composition.form.owned, self.optimizer, self._mesh.whole
        )
        composition.form.publish()
        self.steps = about["steps"]
        self._positions = about["loaders"]
        for shared, position in zip(self._loaders, self._positions, strict=False):
            shared.resume(position)
        return about["extra"]

    # --- what it says of itself -------------------------------------------------------------------------------------

    def memory(self) -> StateBytes:
        """The bytes of weights, gradients and optimizer state that this rank holds now."""
        return self._composition.memory()

    def report(self) -> dict[str, Any]:
        """The plan, this rank's place in it, its memory, and what was decided about the model; JSON values."""
        mesh, expected = self._mesh, self._composition.predicted_memory()
        return {
            "plan": self.plan.describe(),
            "rank": mesh.whole.rank,
            "world": mesh.whole.size,
            "place": {"pipeline": mesh.pipeline.rank, "data": mesh.data.rank, "tensor": mesh.tensor.rank},
            "memory": self.memory().to_json(),
            "memory_predicted": expected.to_json(),
            "notes": list(self._composition.notes),
            "steps": self.steps,
        }

    def _shared(self, loader: Iterable[Any]) -> DistributedLoader:
        for shared in self._loaders:
            if shared.loader is loader or shared is loader:
                return shared
        shared = DistributedLoader(loader, among=self._mesh.data)
        if len(self._loaders) < len(self._positions):
            shared.resume(self._positions[len(self._loaders)])
        self._loaders.append(shared)
        return shared


def read_plan(plan: Plan | str | Path | None) -> Plan:
    """The plan that was meant: as given, of a file, of the launcher, or the default one.

    Raises:
        PlanError: it cannot be read.
    """
    if isinstance(plan, Plan):
        return plan
    if plan == "auto":
        remedy = "give a Plan, or the path of one"
        raise PlanError(
            "no plan was found:", [PlanFinding("plan", '"auto" needs a planner, which is not here', remedy)]
        )
    if plan is not None:
        return Plan.from_toml(Path(plan))
    given = os.environ.get(PLAN_VARIABLE, "")
    if given.startswith("{"):
        return Plan.from_json(json.loads(given))
    return Plan.from_toml(Path(given)) if given else Plan()


def _describe(value: Any) -> str:
    return f"one of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
