"""Puts a model together as its plan says: divided, synchronised, and sharded, in this order."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.planner import Plan, PlanError, PlanFinding

from . import _memory
from ._alike import align_optimizer, check_model, send_once
from ._batch_norm import synchronise
from ._buffers import Buffers
from ._distribute import take_own_gpu
from ._divide import divide_embeddings, divide_layers, divide_tensors, sample_inputs
from ._fully_sharded import FullySharded
from ._memory import StateBytes
from ._mesh import Mesh
from ._norms import WholeNorms
from ._owned import Owned, check_elementwise, hand_over
from ._passes import LossFn, Passes, Reduction, StagedPasses, WholePasses
from ._pieces import Piece, Place
from ._precision import cast_module, in_precision
from ._recompute import recompute
from ._replicas import Form, Replicas
from ._scattered import Scattered
from ._world import World
from .pipeline import Pipeline, Stage
from .pipeline._schedule import admitted
from .priority import Prioritised
from .spatial import SpatialParallel
from .spatial import parallelize as divide_samples


@dataclass(slots=True)
class Composition:
    """A model as one rank holds it.

    Attributes:
        model: the user's; where there is a pipeline, other ranks' parts of it are empty.
        modules: what this rank computes, with the model's name of each of their parameters and buffers.
        places: where these lie in the model's own.
        mesh: where this rank stands.
        form: how parameters, gradients and optimizer state are held among data-parallel ranks.
        passes: compute losses and gradients.
        buffers: the modules', kept alike.
        optimizer: works on what this rank owns.
        plan: that all follows.
        elements: of the parameters that this rank would hold if nothing were divided among data-parallel ranks.
        apart: how many of elements that are divided among data-parallel ranks whatever the form.
        cut: names of the parameters that are divided among ranks that share tensors.
        holders: how many ranks of the pipeline hold each parameter.
        spatial: how samples are divided; None where they are not.
        notes: what was decided about the model, as sentences.
        local: whether every rank holds all of the model.
    """

    model: torch.nn.Module
    modules: list[tuple[torch.nn.Module, dict[str, str]]]
    places: dict[str, Place]
    mesh: Mesh
    form: Form
    passes: Passes
    buffers: Buffers
    optimizer: Any
    plan: Plan
    elements: int
    apart: int
    cut: frozenset[str]
    holders: dict[str, int]
    spatial: SpatialParallel | None = None
    notes: list[str] = field(default_factory=list)
    local: bool = False

    def update(self) -> None:
        """Has the optimizer make its step: now, or as gradients arrive."""
        if isinstance(self.form, Prioritised):
            self.form.update()
        else:
            self.optimizer.step()

    def finish(self) -> None:
        """Makes what is due of earlier steps."""
        if isinstance(self.form, Prioritised):
            self.form.finish()

    def copies(self) -> list[tuple[Owned, int]]:
        """What this rank updates, each with how many ranks of the world update the same."""
        found = []
        for item in self.form.owned:
            sharers = 1 if item.name in self.cut else self.mesh.tensor.size
            found.append((item, item.replicas * sharers * self.holders.get(item.name, 1)))
        return found

    def pieces(self) -> list[Piece]:
        """What this rank holds of the model's parameters and buffers."""
        found = [piece for item in (*self.form.owned, *self.form.frozen) for piece in item.pieces(item.leaf.detach())]
        kept = self.model.state_dict().keys()
        for module, names in self.modules:
            for name, buffer in module.named_buffers():
                if names[name] in kept:
                    found += self.places[names[name]].pieces((0,) * buffer.ndim, buffer)
        return found

    def compression_report(self) -> dict[str, Any] | None:
        """What compression of gradients has saved and cost; None where they go as they are."""
        compression = self.form.compression
        return None if compression is None else compression.report()

    def memory(self) -> StateBytes:
        """See `Trainer.memory`."""
        parameters = [p for module, _ in self.modules for p in module.parameters()]
        weights = [*parameters, *(b for module, _ in self.modules for b in module.buffers())]
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients += [item.leaf.grad for item in self.form.owned if item.leaf.grad is not None]
        return _memory.counted(weights, gradients, self.optimizer)

    def predicted_memory(self) -> StateBytes:
        """What the formulas say for a model in float32."""
        state = _memory.state_nbytes(self.optimizer)
        divided = _memory.predicted(self.elements, self.mesh.replicas.size, self.plan.shard, optimizer_nbytes=state)
        return divided + _memory.predicted(self.apart, 1, "none", optimizer_nbytes=state)


def compose(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: Any,
    plan: Plan,
    world: World,
    *,
    sample: Any,
    reduction: Reduction,
) -> Composition:
    """Makes ranks alike and changes the model as the plan says; a collective operation.

    Args:
        model: the user's.
        loss_fn: of output and target.
        optimizer: the user's, of the model's parameters.
        plan: resolved.
        world: all ranks.
        sample: inputs of the model, or None.
        reduction: of the loss.
    """
    inputs = sample_inputs(sample, plan)
    _check_arguments(model, optimizer, plan)
    if world.size > 1:
        take_own_gpu(model)
        check_model(model, world)
    mesh = Mesh.make(
        world,
        pipeline=plan.pipeline_parallel_degree,
        tensor=plan.tensor_parallel_degree,
        batch_norm=(plan.batch_norm_group or plan.data_parallel_degree) if plan.sync_batch_norm else 1,
        spatial=plan.spatial_parallel_degree,
    )
    if world.size > 1:
        send_once([*model.parameters(), *model.buffers()], world)
        align_optimizer(optimizer, world)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    groups = _groups(model, optimizer)
    places, tensor_form = divide_tensors(model, optimizer, plan, mesh, inputs)
    notes = [] if tensor_form is None else str(tensor_form).splitlines()
    stages: list[Stage] = []
    modules = [(model, {name: name for name in places})]
    if mesh.pipeline.size > 1:
        stages, about = divide_layers(model, optimizer, plan, mesh, inputs)
        notes += about
        modules = [(stage.module, dict(stage.names)) for stage in stages]
    spatial = None
    if mesh.spatial.size > 1:
        spatial = divide_samples(model, mesh.spatial, statistics=mesh.statistics, samples=mesh.batch_norm)
        notes.append(f"each sample divided among {mesh.spatial.size} ranks along the first of its spatial dims")
    elif plan.sync_batch_norm:
        changed = [name for module, _ in modules for name in synchronise(module, mesh.batch_norm)]
        notes.append(f"batch norm over {mesh.batch_norm.size} ranks: {', '.join(changed) or 'the model has none'}")
    if plan.recompute and not stages:
        notes.append(f"computed again in back-propagation: {', '.join(recompute(model)) or 'the model has no blocks'}")
    shared = {name for stage in stages for name in stage.shared}
    apart, about = divide_embeddings(modules, optimizer, plan, mesh, places, shared)
    notes += about
    apart_ids = {id(item.leaf) for item in apart}
    device = next((p.device.type for p in model.parameters()), "cpu")
    for module, _ in modules:
        cast_module(module, plan.precision, device)
    loss = in_precision(loss_fn, plan.precision, device)
    pipeline = None
    if stages:
        pipeline = Pipeline(
            stages,
            mesh.pipeline,
            plan.pipeline_schedule,
            plan.micro_batches,
            loss,
            loss_reduction=reduction,
            recompute="stage" if plan.recompute else "none",
        )
        _check_tied(pipeline, plan, mesh)
    parameters = {
        names[n]: p for module, names in modules for n, p in module.named_parameters() if id(p) not in apart_ids
    }
    trained = {name: p for name, p in parameters.items() if id(p) not in frozen}
    kept = {name: p for name, p in parameters.items() if id(p) in frozen}
    elements = sum(p.numel() for p in trained.values())
    # Workers that do not agree at every step compute gradients as if each were alone.
    data = mesh.data if plan.synchronisation == "every_step" else World(0, 1, None)
    buffers = Buffers([module for module, _ in modules], data)
    form = _form(plan, mesh, modules, trained, kept, places, optimizer)
    form.owned += [item for item in apart if id(item.leaf) not in frozen]
    form.frozen += [item for item in apart if id(item.leaf) in frozen]
    whole = {p for group in optimizer.param_groups for p in group["params"] if id(p) in frozen}
    hand_over(optimizer, form.owned, whole)
    holders = Counter(name for names in mesh.pipeline.from_all(list(trained)) for name in names)
    passes: Passes
    answers = mesh.tensor.rank == 0
    if pipeline is None:
        running = nullcontext if spatial is None else spatial.running
        answers = answers and mesh.spatial.rank == 0
        passes = WholePasses(model, loss, reduction, form, buffers, data, answers=answers, running=running)
    else:
        answers = answers and pipeline.holds_last
        passes = StagedPasses(pipeline, reduction, form, buffers, mesh.data, answers=answers)
    composition = Composition(
        model=model,
        modules=modules,
        places=places,
        mesh=mesh,
        form=form,
        passes=passes,
        buffers=buffers,
        optimizer=optimizer,
        plan=plan,
        elements=elements,
        apart=sum(item.leaf.numel() for item in apart),
        cut=frozenset() if tensor_form is None else frozenset(tensor_form.pieces),
        holders=dict(holders),
        spatial=spatial,
        notes=notes,
    )
    copies = composition.copies()
    composition.local = all(world.from_all(all(count == world.size for _, count in copies)))
    if hasattr(optimizer, "bind_norms"):
        optimizer.bind_norms(WholeNorms(groups, copies, world, local=composition.local))
    return composition


def _groups(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """The number of its parameter group, for each parameter of the model that the optimizer is to update."""
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: numbers[id(p)] for name, p in model.named_parameters() if p.requires_grad and id(p) in numbers}


def _form(
    plan: Plan,
    mesh: Mesh,
    modules: list[tuple[torch.nn.Module, dict[str, str]]],
    trained: dict[str, torch.nn.Parameter],
    frozen: dict[str, torch.nn.Parameter],
    places: dict[str, Place],
    optimizer: Any,
) -> Form:
    if plan.priority and mesh.data.size > 1:
        ((model, _),) = modules
        return Prioritised(model, trained, frozen, places, mesh.data, plan.bucket_bytes, optimizer)
    if plan.shard == "none" or mesh.replicas.size == 1:
        averages = plan.synchronisation == "every_step"
        return Replicas(trained, frozen, places, mesh.replicas, plan.bucket_bytes, plan.compression, averages=averages)
    if plan.shard == "parameters":
        return FullySharded(modules, places, mesh.replicas)
    keep = plan.shard == "optimizer"
    return Scattered(trained, frozen, places, mesh.replicas, plan.bucket_bytes, plan.compression, keep_gradients=keep)


def _check_arguments(model: Any, optimizer: Any, plan: Plan) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if plan.shard != "none" or plan.tensor_parallel_degree > 1:
        check_elementwise(optimizer)
    elif plan.embeddings != "replicated":
        check_elementwise(optimizer, rows=True)
    if plan.priority:
        _check_priority(model, optimizer)
    if plan.recompute and plan.recompute_part != "layers":
        rule = f"the Trainer computes whole layers again, not {plan.recompute_part!r} alone"
        remedy = 'say recompute_part = "layers"'
        raise PlanError("the plan cannot be carried out:", [PlanFinding("recompute_part", rule, remedy)])
    schedule = plan.pipeline_schedule, plan.pipeline_parallel_degree, plan.stages_per_rank
    if plan.pipeline_parallel_degree > 1 and not admitted(*schedule, plan.micro_batches):
        possible = [k for k in range(1, 4 * schedule[1] + plan.micro_batches) if admitted(*schedule, k)]
        near = min(possible, key=lambda k: (abs(k - plan.micro_batches), -k))
        rule = f"{schedule[0]!r} on {schedule[1]} ranks cannot run {plan.micro_batches} micro-batches"
        remedy = f'take {near}, or pipeline_schedule = "gpipe", which takes any number'
        raise PlanError("the plan cannot be carried out:", [PlanFinding("micro_batches", rule, remedy)])
    mine = {id(p) for p in model.parameters()}
    if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that the model has not: make it of model.parameters()")


def _check_priority(model: torch.nn.Module, optimizer: Any) -> None:
    if hasattr(optimizer, "bind_norms"):
        rule = f"{type(optimizer).__name__} needs norms over whole parameters before it can update the first of them"
        finding = PlanFinding("priority", rule, "say priority = false, or take an optimizer like Adam or SGD")
        raise PlanError("the plan cannot be carried out:", [finding])
    check_elementwise(optimizer)
    other = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
    if other is not None:
        rule = f"gradients are sent by priority from the CPU's memory only, and the model is on {other}"
        finding = PlanFinding("priority", rule, "say priority = false")
        raise PlanError("the plan cannot be carried out:", [finding])


def _check_tied(pipeline: Pipeline, plan: Plan, mesh: Mesh) -> None:
    tied = any(mesh.whole.from_all(bool(pipeline.tied)))
    if tied and plan.shard == "parameters" and mesh.data.size > 1:
        rule = (
            "weights that stages share cannot be sharded themselves, and this model's first and last stage share some"
        )
        finding = PlanFinding("shard", rule, 'say shard = "gradients", or untie them')
        raise PlanError("the plan cannot be carried out for this model:", [finding])
