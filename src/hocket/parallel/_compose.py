"""Puts a model together as its plan says: divided, sharded, synchronised, in this order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.planner import Plan

from . import _memory
from ._alike import align_optimizer, check_model, send_once
from ._batch_norm import synchronise
from ._buffers import Buffers
from ._distribute import take_own_gpu
from ._fully_sharded import FullySharded
from ._memory import StateBytes
from ._mesh import Mesh
from ._owned import Owned, check_elementwise, hand_over
from ._pieces import Piece, Place
from ._recompute import recompute
from ._replicas import Form, Replicas
from ._scattered import Scattered
from ._world import World


@dataclass(slots=True)
class Composition:
    """A model as one rank holds it.

    Attributes:
        model: what this rank computes.
        mesh: where it stands.
        form: how parameters, gradients and optimizer state are held among data-parallel ranks.
        buffers: the model's, kept alike.
        optimizer: works on what this rank owns.
        plan: that all follows.
        elements: of the parameters that this rank would hold if nothing were divided among data-parallel ranks.
        notes: what was decided about the model, as sentences.
    """

    model: torch.nn.Module
    mesh: Mesh
    form: Form
    buffers: Buffers
    optimizer: Any
    plan: Plan
    elements: int
    notes: list[str] = field(default_factory=list)

    def copies(self) -> list[tuple[Owned, int]]:
        """What this rank updates, each with how many ranks of the world update the same."""
        return [(item, item.replicas) for item in self.form.owned]

    def pieces(self) -> list[Piece]:
        """What this rank holds of the model's parameters and buffers; frozen parts and buffers included."""
        found = [piece for item in (*self.form.owned, *self.form.frozen) for piece in item.pieces(item.leaf.detach())]
        kept = self.model.state_dict().keys()
        for name, buffer in self.model.named_buffers():
            if name in kept:
                found += [Piece(name, tuple(buffer.shape), (0,) * buffer.ndim, buffer)]
        return found

    def memory(self) -> StateBytes:
        """See `Trainer.memory`."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        gradients += [item.leaf.grad for item in self.form.owned if item.leaf.grad is not None]
        return _memory.counted(weights, gradients, self.optimizer)

    def predicted_memory(self) -> StateBytes:
        """What the formulas say for a model in float32."""
        state = _memory.state_nbytes(self.optimizer)
        return _memory.predicted(self.elements, self.mesh.data.size, self.plan.shard, optimizer_nbytes=state)


def compose(model: torch.nn.Module, optimizer: Any, plan: Plan, world: World, sample: Any) -> Composition:
    """Makes ranks alike and changes the model as the plan says; a collective operation.

    Args:
        model: the user's.
        optimizer: the user's, of its parameters.
        plan: resolved.
        world: all ranks.
        sample: inputs of the model, or None.
    """
    _check_arguments(model, optimizer, plan)
    notes: list[str] = []
    if world.size > 1:
        take_own_gpu(model)
        check_model(model, world)
    mesh = Mesh.make(
        world,
        pipeline=plan.pipeline_parallel_degree,
        tensor=plan.tensor_parallel_degree,
        batch_norm=(plan.batch_norm_group or plan.data_parallel_degree) if plan.sync_batch_norm else 1,
    )
    if world.size > 1:
        send_once([*model.parameters(), *model.buffers()], world)
        align_optimizer(optimizer, world)
    if plan.sync_batch_norm:
        changed = synchronise(model, mesh.batch_norm)
        notes.append(f"batch norm over {mesh.batch_norm.size} ranks: {', '.join(changed) or 'the model has none'}")
    if plan.recompute:
        notes.append(f"computed again in back-propagation: {', '.join(recompute(model)) or 'the model has no blocks'}")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    places = {name: Place.whole(name, p) for name, p in model.named_parameters()}
    elements = sum(p.numel() for p in trained.values())
    buffers = Buffers([model], mesh.data)
    form: Form
    if plan.shard == "none" or mesh.data.size == 1:
        form = Replicas(trained, frozen, places, mesh.data, plan.bucket_bytes)
    elif plan.shard == "parameters":
        form = FullySharded([(model, {name: name for name in places})], places, mesh.data)
    else:
        keep = plan.shard == "optimizer"
        form = Scattered(trained, frozen, places, mesh.data, plan.bucket_bytes, keep_gradients=keep)
    managed = {id(p) for p in trained.values()}
    hand_over(optimizer, form.owned, {p for g in optimizer.param_groups for p in g["params"] if id(p) not in managed})
    return Composition(model, mesh, form, buffers, optimizer, plan, elements, notes)


def _check_arguments(model: Any, optimizer: Any, plan: Plan) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if plan.shard != "none" or plan.tensor_parallel_degree > 1:
        check_elementwise(optimizer)
    mine = {id(p) for p in model.parameters()}
    if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that the model has not: make it of model.parameters()")
