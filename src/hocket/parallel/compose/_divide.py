"""Divides a model: its layers among ranks that share tensors, then their sequence among the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from hocket.planner import Plan, PlanError, PlanFinding

from ..batches import mapped, samples_in
from ..embedding import distribute_embeddings
from ..mesh import Mesh, link_of
from ..partition.tensor import TensorParallel, parallelize
from ..pipeline import (
    Stage,
    measure,
    split,
)
from ..state import (
    DimSegment,
    Owned,
    ParameterPlacement,
    ShardBox,
)


def sample_inputs(sample: Any, plan: Plan) -> tuple[Any, ...]:
    """The sample as positional inputs.

    Raises:
        PlanError: the plan needs one, and there is none.
    """
    if sample is None and max(plan.tensor_parallel_degree, plan.pipeline_parallel_degree) > 1:
        rule = "tensor and pipeline parallelism run the model on a sample, to see how it can be divided"
        remedy = "pass Trainer(..., sample=inputs), the model's inputs for a few samples"
        raise PlanError("the plan cannot be carried out:", [PlanFinding("sample", rule, remedy)])
    if sample is None:
        return ()
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


def divide_tensors(
    model: torch.nn.Module, optimizer: Any, plan: Plan, mesh: Mesh, sample: tuple[Any, ...]
) -> tuple[dict[str, ParameterPlacement], TensorParallel | None]:
    """Makes the model tensor-parallel in place, and cuts the state that its optimizer has already.

    Returns:
        Where this rank's parameters and buffers lie in the model's, by name, and what was decided.
    """
    full = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if mesh.tensor.size == 1:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: ParameterPlacement.unsharded(name, tensor) for name, tensor in named}, None
    form = parallelize(model, mesh.tensor, sample, sequence=plan.sequence_parallel)
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if name in form.pieces else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) == full[name]:
                state[key] = form.part(name, value).clone()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _place(form, name, tensor) for name, tensor in named}, form


def _place(form: TensorParallel, name: str, tensor: torch.Tensor) -> ParameterPlacement:
    cut = form.pieces.get(name)
    if cut is None:
        return ParameterPlacement.unsharded(name, tensor)
    segments, begin, at = [], 0, 0
    ranks, rank = form.world.size, form.world.rank
    for size in cut.segments:
        part = size // ranks
        segments.append(DimSegment(begin, begin + part, at + rank * part))
        begin, at = begin + part, at + size
    return ParameterPlacement(name, cut.shape, cut.dim, tuple(segments))


def divide_embeddings(
    modules: Sequence[tuple[torch.nn.Module, dict[str, str]]],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    places: dict[str, ParameterPlacement],
    shared: Collection[str],
) -> tuple[list[Owned], list[str]]:
    """Divides the embedding tables of `modules` among data-parallel ranks, and the state that the optimizer has.

    Args:
        modules: what this rank computes, with the model's names.
        optimizer: the optimizer.
        plan: says how.
        mesh: the ranks.
        places: of parameters in the model's; those of divided tables are changed.
        shared: the model's names of weights that several stages of a pipeline hold.

    Returns:
        What this rank has of the tables, and a sentence about each.

    Raises:
        PlanError: a table's weight is used on several stages.
    """
    owned: list[Owned] = []
    notes: list[str] = []
    if plan.embeddings == "replicated" or mesh.data.size == 1:
        return owned, notes
    tables = {names[n] for module, names in modules for n in _tables(module)}
    if any(mesh.whole.from_all(bool(tables.intersection(shared)))):
        rule = "a table whose weight another stage of the pipeline uses too cannot be divided"
        found = PlanFinding("embeddings", rule, 'say embeddings = "replicated", or untie the weights')
        raise PlanError("the plan cannot be carried out for this model:", [found])
    for module, names in modules:
        form = distribute_embeddings(module, mesh.data, plan.embeddings)
        notes += str(form).splitlines()
        for local, (shape, offsets) in form.shards.items():
            parameter = form.parameters[local]
            for key, value in (state := optimizer.state.get(parameter, {})).items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                    state[key] = form.part(local, value).clone()
            segment = DimSegment(0, parameter.shape[0], offsets[0])
            places[names[local]] = place = ParameterPlacement(names[local], shape, 0, (segment,))
            owned.append(Owned(parameter, parameter, ShardBox.full(place), 1))
    return owned, notes


def _tables(module: torch.nn.Module) -> list[str]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [f"{name}.weight".lstrip(".") for name, inner in module.named_modules() if isinstance(inner, kinds)]


def divide_layers(
    model: torch.nn.Module, optimizer: Any, plan: Plan, mesh: Mesh, sample: Sequence[Any]
) -> tuple[list[Stage], list[str]]:
    """Splits the model into the stages of a pipeline, and frees the memory of those that are other ranks'.

    What is traced, timed and compared is as much of the sample as a micro-batch is of a whole batch.

    Returns:
        This rank's stages, and a sentence about each of all stages.
    """
    ranks = mesh.pipeline.size
    sample = _micro_batch(sample, plan.micro_batches * mesh.data.size)
    times: Any = None
    link = None
    if not plan.split:
        # Who shares tensors must measure together; one measurement must count for all.
        measured = mesh.tensor.size > 1 or mesh.whole.rank == 0
        times = mesh.whole.from_root(measure(model, sample).total_s if measured else None)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        link = link_of(mesh.pipeline, mesh.whole, device)
    count, passes = ranks * plan.stages_per_rank, plan.micro_batches * plan.stages_per_rank
    stages = split(model, count, sample, points=plan.split, times=times, link=link, micro_batches=passes)
    mine = stages[mesh.pipeline.rank :: ranks]
    kept = {id(t) for stage in mine for t in (*stage.module.parameters(), *stage.module.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in kept:
            optimizer.state.pop(tensor, None)
            tensor.grad = None
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return mine, [str(stage) for stage in stages]


def _micro_batch(sample: Sequence[Any], parts: int) -> Sequence[Any]:
    """One of so many parts of a batch, with two samples at the least, which batch norm wants."""
    whole = samples_in(sample)
    each = max(2, whole // parts)
    part: Sequence[Any] = mapped(tuple(sample), lambda one: one[:each] if one.dim() and len(one) == whole else one)
    return part
