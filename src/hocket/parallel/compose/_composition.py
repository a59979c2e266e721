"""A model as one rank holds it, once its plan is carried out: what `compose` makes and the Trainer works with."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.planner import AXES, Plan
from hocket.workload import DividedShare

from ..data import BroadcastBuffers, ShardingStrategy
from ..mesh import Mesh
from ..state import ModelOutline, Owned, ParameterPlacement, StateBytes, TensorShard, drawn_alike, parameters_of
from ..state import memory as _memory
from ._passes import LossFn, Passes


@dataclass(slots=True)
class Composition:
    """See the head of this module."""

    model: torch.nn.Module  # the user's; where there is a pipeline, other ranks' parts of it are empty
    # what this rank computes, with the model's name of each of their parameters and buffers
    modules: list[tuple[torch.nn.Module, dict[str, str]]]
    places: dict[str, ParameterPlacement]  # where these lie in the model's own
    mesh: Mesh  # where this rank stands
    form: ShardingStrategy  # how parameters, gradients and optimizer state are held among data-parallel ranks
    passes: Passes  # compute losses and gradients
    buffers: BroadcastBuffers  # the modules', kept alike
    optimizer: Any  # works on what this rank owns
    plan: Plan  # that all follows
    outline: ModelOutline  # of the user's model and the groups of its optimizer, before they were divided
    # gives a loss function or metric that is refused what this rank has not, or a part of, until it has been called
    guarded: Callable[[LossFn], LossFn]
    elements: int  # of the parameters that this rank would hold if nothing were divided among data-parallel ranks
    apart: int  # how many of elements that are divided among data-parallel ranks whatever the form
    cut: frozenset[str]  # names of the parameters that are divided among ranks that share tensors
    holders: dict[str, int]  # how many ranks of the pipeline hold each parameter
    notes: list[str] = field(default_factory=list)  # what was decided about the model, as sentences
    # how much of the model is divided among ranks that share tensors; None where none do
    divided: DividedShare | None = None
    growing: list[object] = field(default_factory=list)  # what is decided while the model runs; sentences as their text
    local: bool = False  # whether every rank holds all of the model
    # whether weights are what they are to be: not before a state is loaded into a model of the meta device
    known: bool = True
    draws: bool = False  # whether the optimizer draws random numbers

    def update(self) -> None:
        """Have the optimizer make its step: now, or as gradients arrive."""
        with drawn_alike(self.mesh.whole) if self.draws else nullcontext():
            self.form.update(self.optimizer)

    def finish(self) -> None:
        """Make what is due of earlier steps."""
        self.form.finish()

    def copies(self) -> list[tuple[Owned, int]]:
        """Return what this rank updates, each with how many ranks of the world update the same."""
        found = []
        sharing = math.prod(self.mesh[axis.name].size for axis in AXES if axis.divides == "tensors")
        for item in self.form.owned:
            sharers = 1 if item.name in self.cut else sharing
            found.append((item, item.replicas * sharers * self.holders.get(item.name, 1)))
        return found

    def shards(self) -> list[TensorShard]:
        """Return what this rank holds of the model's parameters and buffers."""
        found = [shard for item in (*self.form.owned, *self.form.frozen) for shard in item.shards(item.leaf.detach())]
        for module, names in self.modules:
            for name, buffer in module.named_buffers():
                if names.get(name) in self.outline.tensors:  # not one that a forward pass has made
                    found += self.places[names[name]].shards((0,) * buffer.ndim, buffer)
        return found

    def parts(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that not every rank holds whole, by the model's names."""
        all_of_them, staged = self.outline.tensors, self.mesh["pipeline"].size > 1
        return {
            name: p
            for name, p in self.model.named_parameters()
            if staged or hasattr(p, "to_local") or tuple(p.shape) != all_of_them.get(name, (tuple(p.shape),))[0]
        }

    def compression_report(self) -> dict[str, Any] | None:
        """Return what compression of gradients has saved and cost; None where they go as they are."""
        compression = self.form.compression
        return None if compression is None else compression.report()

    def memory(self) -> StateBytes:
        """See `Trainer.memory`."""
        parameters = [p for module, _ in self.modules for p in parameters_of(module)]
        weights = [*parameters, *(b for module, _ in self.modules for b in module.buffers())]
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients += [item.leaf.grad for item in self.form.owned if item.leaf.grad is not None]
        return _memory.counted(weights, gradients, self.optimizer)

    def predicted_memory(self) -> StateBytes:
        """Return what the formulas say for a model in float32."""
        state = _memory.state_nbytes(self.optimizer)
        divided = _memory.predicted(self.elements, self.mesh.shards.size, self.plan.shard, optimizer_nbytes=state)
        return divided + _memory.predicted(self.apart, 1, "none", optimizer_nbytes=state)
