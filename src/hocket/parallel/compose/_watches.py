"""All that looks, around a Trainer's steps, at what the program does beside it, and whether ranks do the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.planner import Plan, inner

from ..data import ReplicaMarks
from ._between import BetweenCalls, LossReadings
from ._claim import Claim
from ._composition import Composition
from ._outside import (
    ChangedModel,
    LateHooks,
    OtherParameters,
    WrittenParts,
    check_step_hooks,
    hint_at_loading,
    hint_at_saving,
    mark_parts,
    refuse_other_steps,
    refuse_tracing,
)
from ._part_numbers import MarkedParts
from ._passes import shared
from ._same_batch import SameBatch, SameCalls, SameNumbers
from ._step_errors import StepErrors


class Watches:
    """What is looked at before and after each step, and before state goes out or comes in. Made by all ranks at once.

    Attributes:
        same: by call, "step" or "evaluate", whether ranks were given the same batch.
        numbers: what ranks that compute the same draw at random.
        between: what the program does to a batch between `batches` and `step`.
        readings: what the loss function reads of tensors as Python numbers.
    """

    def __init__(
        self,
        composition: Composition,
        plan: Plan,
        claim: Claim,
        errors: StepErrors,
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: Any,
    ) -> None:
        mesh = composition.mesh
        world, data, staged = mesh.whole, mesh["data"], mesh["pipeline"].size > 1
        self._composition, self._claim, self._optimizer = composition, claim, optimizer
        claim.settle(model, plan, local=composition.local, divided=self._guard(plan, errors, model))
        divided = plan.shard in ("optimizer", "gradients") or plan.priority
        own_groups = staged or (divided and data.size > 1)
        self._others = OtherParameters(composition.model, optimizer, own_groups=own_groups)
        self._changed = ChangedModel(model, staged=staged)
        parts = {} if world.rank or plan.priority else composition.parts()
        self._written, self._late = WrittenParts(parts), LateHooks(parts, staged=staged)
        shapes = {name: shape for name, (shape, *_) in composition.outline.tensors.items()}
        cut = {name: p for name, p in parts.items() if p.numel() and tuple(p.shape) != shapes.get(name, tuple(p.shape))}
        shared = plan.shard == "optimizer" and mesh.replicas.size > 1 and not (world.rank or plan.priority)
        freed = plan.shard == "gradients" and mesh.replicas.size > 1 and not (world.rank or plan.priority)
        others = [p for name, p in composition.model.named_parameters() if p.numel() and name not in cut]
        trained = [p for p in others if p.requires_grad and type(p) is torch.nn.Parameter]
        self._parts = MarkedParts(model, cut.values(), others if shared else (), trained if freed else ())
        self._parts.mark()
        self._hooked = not composition.local or plan.priority
        self._marks: ReplicaMarks | None = None
        relaxed = plan.synchronisation != "every_step"
        if world.size > 1 and not plan.priority and not relaxed:
            # What is frozen may be cut, where all that is trained is whole.
            whole = {name: one for name, one in model.named_parameters() if name not in composition.cut}
            self._marks = ReplicaMarks(whole if composition.local else {})
            self._marks.follow(optimizer, counted=False)
        self._schedules = ReplicaMarks({}) if world.size > 1 and self._marks is None else None
        if self._schedules is not None:  # ranks' settings may differ
            self._schedules.follow(optimizer, counted=False)
        self.same = {kind: SameBatch(world, f"trainer.{kind}") for kind in ("step", "evaluate")}
        self.numbers = SameNumbers([mesh[one.name] for one in inner() if one.divides != "layers"])
        # With priority gradients are under way after the first step.
        self.between = BetweenCalls(world, 0 if relaxed or data.size == 1 else 1 if plan.priority else 2)
        self.readings = LossReadings(world, loss_fn)

    def _guard(self, plan: Plan, errors: StepErrors, model: torch.nn.Module) -> bool:
        """Refuse, or tell of, what the program would do to model and optimizer without the Trainer; collective.

        Returns:
            Whether some rank has a part of the model alone.
        """
        composition, mesh = self._composition, self._composition.mesh
        world, staged, spatial = mesh.whole, mesh["pipeline"].size > 1, mesh["spatial"].size > 1
        if world.size > 1:
            refuse_other_steps(self._optimizer, self)
            hint_at_loading(model)
        if not composition.local:
            mark_parts(self._optimizer, world)
        apart = plan.embeddings != "replicated" and any(world.from_all(composition.apart))
        parts = apart or composition.cut or staged
        divided = world.size > 1 and (bool(parts) or plan.shard == "parameters")
        if divided:
            hint_at_saving(model, quiet=not parts)  # FSDP2's tensors say themselves that they are parts
        if divided or spatial:
            refuse_tracing(model)
        for axis in inner():
            if mesh[axis.name].size > 1:
                calls = SameCalls(mesh[axis.name], lambda: not errors.inside)
                model.register_forward_pre_hook(calls, prepend=True, with_kwargs=True)
        if world.size > 1:
            shared(model, "in a pipeline" if staged else "divided among ranks" if divided or spatial else "")
        return divided

    def mark_parts(self) -> None:
        """Have weights and gradients of which this rank has a part tell the program so, until the next check."""
        self._parts.mark()

    def check_model(self) -> None:
        """Raise an error if the model has changed, or has no weights yet."""
        self._parts.clear()
        self.between.pause()
        self._changed.check()
        if not self._composition.known:
            raise RuntimeError(
                "the model, or what was added to it later, was built on the meta device or moved there, and nothing "
                "says what its weights are: load a checkpoint or a state dict first, or build it all in the function "
                "that hocket.deferred(build) is given, which initialises it as it would be"
            )

    def check_claim(self) -> None:
        """Raise an error if the model has changed, or is another's; it may have no weights yet."""
        self._changed.check()
        self._claim.check()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Open a block for the state that goes out; an error if the model has changed, or is another's."""
        self.check_model()
        self._claim.check()
        yield
        self.mark_parts()

    def check_step(self) -> None:
        """Raise an error if model, optimizer or weights are not as the last step has left them; collective."""
        self.check_model()
        self._parts.step()
        if self._marks is not None:
            self._marks.compare(self._composition.mesh.whole)
        if self._schedules is not None:
            self._schedules.look_at_schedules(self._composition.mesh.whole)
        self._claim.check()
        self._others.check()
        self._written.check()
        self._late.check()
        if self._hooked:
            check_step_hooks(self._optimizer)

    def note_written(self) -> None:
        """Take the weights as they are now: the Trainer itself has written them."""
        self._written.note()
        self.mark_parts()
