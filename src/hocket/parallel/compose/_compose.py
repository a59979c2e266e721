"""Puts a model together as its plan says: divided, synchronised, and sharded, in this order."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hocket._program import warn
from hocket.planner import Plan, inner

from ..batches import LossForm
from ..data import (
    BroadcastBuffers,
    FullySharded,
    Replicated,
    SampleNumbers,
    ShardedOptimizer,
    ShardingStrategy,
    StageNumbers,
    blocks,
    on_several_hosts,
    synchronise,
)
from ..data.priority import Prioritised
from ..mesh import Mesh, World
from ..pipeline import Pipeline
from ..state import (
    Deferred,
    ModelOutline,
    Owned,
    UpdateTrial,
    WholeNorms,
    broadcast_optimizer_state,
    broadcast_tensors,
    check_model,
    check_replicas,
    give_back,
    parameters_of,
    shard_optimizer,
)
from ._composition import Composition
from ._distribute import take_own_gpu
from ._divide import CARRIED, Draft, divide_embeddings, sample_inputs
from ._garbage import old_objects_set_aside
from ._leftovers import Leftovers, of_another_rank
from ._passes import LossFn, Passes, StagedPasses, WholePasses
from ._precision import cast_module, in_precision
from ._recompute import recompute
from ._refusals import check_arguments, check_divisible, check_gradient_hooks, check_tied, check_types, use_choices

_MAGNIFIED = 1e-4  # that an optimizer's updates differ by this for gradients that differ in the last place is said


def compose(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: Any,
    plan: Plan,
    world: World,
    *,
    sample: Any,
    loss_form: LossForm,
) -> Composition:
    """Make ranks alike and change the model as the plan says; a collective operation.

    Args:
        model: the user's.
        loss_fn: of output and target.
        optimizer: the user's, of the model's parameters.
        plan: resolved.
        world: all ranks.
        sample: inputs of the model, or None.
        loss_form: how the loss adds up over parts of a batch.
    """
    inputs = sample_inputs(sample, plan)
    update = UpdateTrial.of(optimizer) if world.size > 1 else UpdateTrial()
    check_arguments(model, optimizer, plan, update)
    use_choices(plan)
    deferred = Deferred.of(model)
    mesh = _aligned(model, optimizer, plan, world, deferred)
    check_divisible(model, plan, mesh)
    parameters = dict(model.named_parameters())
    check_gradient_hooks(parameters, plan, mesh)
    frozen = {id(p) for p in parameters.values() if not p.requires_grad}
    groups, outline = _groups(parameters, optimizer), ModelOutline.of(model, optimizer)
    originals = {id(p): name for name, p in parameters.items()}
    del parameters  # sharded, they would be kept whole
    draft = Draft(model, optimizer, plan, mesh, inputs)
    leftovers = Leftovers(model, loss_fn)
    with old_objects_set_aside(), leftovers if mesh["pipeline"].size > 1 else nullcontext():
        with nullcontext() if deferred is None else deferred.streaming():
            for name, carry_out in CARRIED.items():
                if mesh[name].size > 1:
                    carry_out(draft)
            _normalised(draft)
            tables = divide_embeddings(draft)
        gc.collect()  # activations of the sample
    if deferred is not None and plan.shard == "parameters" and mesh.replicas.size > 1 and not plan.priority:
        draft.fill = deferred.fill  # a block at a time
    elif deferred is not None:
        deferred.fill(p for module, _ in draft.modules for p in parameters_of(module))
        deferred.forget()
    device = next((p.device.type for p in parameters_of(model)), "cpu")
    for module, _ in draft.modules:
        cast_module(module, plan.precision, device)
    leftovers.settle()
    guarded = functools.partial(_WithoutParts.guarded, draft=draft, originals=originals, leftovers=leftovers)
    loss = in_precision(guarded(loss_fn), plan.precision, device)
    check_replicas(draft.modules, mesh.replicas, world)
    pipeline = _pipeline(draft, loss)  # before parameters are sharded: stages may share some
    form, trained = _held(draft, tables, frozen)
    whole = {p for group in optimizer.param_groups for p in group["params"] if id(p) in frozen}
    shard_optimizer(optimizer, form.owned, whole)
    passes = _passes(draft, form, pipeline, loss, loss_form)
    composition = Composition(
        model=model,
        modules=draft.modules,
        places=draft.places,
        mesh=mesh,
        form=form,
        passes=passes,
        buffers=passes.buffers,
        optimizer=optimizer,
        plan=plan,
        outline=outline,
        elements=sum(trained.values()),
        apart=sum(item.leaf.numel() for item in tables),
        cut=draft.cut,
        holders=dict(Counter(name for names in mesh["pipeline"].from_all(list(trained)) for name in names)),
        notes=draft.notes,
        divided=draft.divided,
        guarded=guarded,
        growing=draft.growing,
        known=deferred is None or deferred.known,
        draws=update.draws,
    )
    if update.magnified > _MAGNIFIED and world.rank == 0:
        warn(
            f"{type(optimizer).__name__} magnifies rounding: in three steps of a trial, gradients that differ in the "
            f"last place gave updates that differ by up to {update.magnified:.0%}. Losses are equal to those of one "
            "process only as far as those of one process are to themselves with another number of threads",
        )
    copies = composition.copies()
    give_back()
    composition.local = all(world.from_all(all(count == world.size for _, count in copies)))
    if hasattr(optimizer, "bind_norms"):
        optimizer.bind_norms(WholeNorms(groups, copies, world, local=composition.local))
    return composition


class _WithoutParts(TorchFunctionMode):
    """Refuses that a loss is given parameters of which this rank has a part only, or what other ranks' layers make."""

    def __init__(self, names: Mapping[int, str], leftovers: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._names, self._leftovers = names, leftovers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if self._leftovers.get(id(one)) is one is not None:
                raise RuntimeError(of_another_rank(f"a tensor (of shape {list(one.shape)})"))
            if (name := self._names.get(id(one))) is None or _asks(func):
                continue
            if isinstance(one, torch.nn.Parameter):  # else a tensor has the identity of one that is gone
                raise RuntimeError(
                    f"the loss function, or a metric, computes with the model's parameter {name!r}, of which a rank "
                    "has a part or nothing by this plan: have the model's forward return what is needed of it (a norm, "
                    "say), use the optimizer's weight_decay, or take data parallelism (shard = 'gradients' at most)"
                )
        return func(*args, **(kwargs or {}))

    @classmethod
    def guarded(
        cls, loss_fn: Callable[..., Any], draft: Draft, originals: Mapping[int, str], leftovers: Leftovers
    ) -> Callable[..., Any]:
        """Return the loss function as it is, or one that is watched until it has been called without an error."""
        plan, model, watched = draft.plan, draft.model, True
        everything = plan.pipeline_parallel_degree > 1 or plan.shard == "parameters"
        if not everything and not draft.cut:
            return loss_fn

        @functools.wraps(loss_fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal watched
            if not watched:
                return loss_fn(*args, **kwargs)
            names = {**originals, **{id(p): name for name, p in model.named_parameters()}}
            given = {id(one) for one in tree_leaves((args, kwargs))}  # the model may return parameters
            parts = {k: name for k, name in names.items() if k not in given and (everything or name in draft.cut)}
            with leftovers.numbers_apart(), cls(parts, leftovers.there()):
                found = loss_fn(*args, **kwargs)
            watched = False
            return found

        return call


def _asks(func: Any) -> bool:
    """Return whether a function asks a parameter for what does not depend on its numbers."""
    return func in (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.requires_grad.__get__)  # type: ignore[attr-defined]


def _aligned(model: torch.nn.Module, optimizer: Any, plan: Plan, world: World, deferred: Deferred | None) -> Mesh:
    """Make all ranks hold what rank 0 holds, or is to hold, and the groups of the plan."""
    if world.size > 1:
        take_own_gpu(model)
        check_model(model, world)
        if deferred is not None:
            deferred.align(world)
    mesh = Mesh.of(plan, world)
    if world.size > 1:
        broadcast_tensors([*parameters_of(model), *model.buffers()], world)
        broadcast_optimizer_state(optimizer, world)
    return mesh


def _normalised(draft: Draft) -> None:
    """Synchronise batch norm, unless an axis has seen to it, and have blocks computed again."""
    plan, norms = draft.plan, draft.mesh.batch_norm
    if plan.sync_batch_norm and draft.mesh.statistics == norms:
        changed = [name for module, _ in draft.modules for name in synchronise(module, norms)]
        draft.notes.append(f"batch norm over {norms.size} ranks: {', '.join(changed) or 'the model has none'}")
    if plan.recompute and not draft.stages:
        again = ", ".join(recompute(draft.model)) or "the model has no blocks"
        draft.notes.append(f"computed again in back-propagation: {again}")


def _held(draft: Draft, tables: list[Owned], frozen: set[int]) -> tuple[ShardingStrategy, dict[str, int]]:
    """Return how ranks that hold the same parameters hold them, and the elements of each that is trained, by name."""
    apart = {id(item.leaf) for item in tables}
    parameters = {
        names[n]: p for module, names in draft.modules for n, p in module.named_parameters() if id(p) not in apart
    }
    trained = {name: p for name, p in parameters.items() if id(p) not in frozen}
    kept = {name: p for name, p in parameters.items() if id(p) in frozen}
    elements = {name: p.numel() for name, p in trained.items()}  # before they are sharded, which leaves a part of each
    form = _form(draft, trained, kept)
    form.owned += [item for item in tables if id(item.leaf) not in frozen]
    form.frozen += [item for item in tables if id(item.leaf) in frozen]
    return form, elements


def _pipeline(draft: Draft, loss: LossFn) -> Pipeline | None:
    plan, ranks = draft.plan, draft.mesh["pipeline"]
    if not draft.stages:
        return None
    again = "stage" if plan.recompute else "none"
    order = plan.pipeline_schedule, plan.micro_batches
    senders = _senders_of_parts(draft.mesh)
    # The check of the loss looks at what each pass leaves in buffers.
    pipeline = Pipeline(draft.stages, ranks, *order, loss, recompute=again, alike=senders, keeps_buffers=True)
    check_tied(pipeline, plan, draft.mesh)
    return pipeline


def _senders_of_parts(mesh: Mesh) -> World | None:
    """Return the ranks that share tensors, where they are on one host and the next stage is on another."""
    tensor = mesh["tensor"]
    if tensor.size == 1:
        return None
    spread = mesh.whole.from_all((on_several_hosts(tensor), on_several_hosts(mesh["pipeline"])))
    tensors_spread, stages_spread = map(any, zip(*spread, strict=True))
    return tensor if stages_spread and not tensors_spread else None


def _passes(
    draft: Draft, form: ShardingStrategy, pipeline: Pipeline | None, loss: LossFn, loss_form: LossForm
) -> Passes:
    """Return what computes losses and gradients."""
    plan, mesh = draft.plan, draft.mesh
    # Workers that do not agree at every step compute gradients as if each were alone.
    data = mesh["data"] if plan.synchronisation == "every_step" else World(0, 1, None)
    buffers = BroadcastBuffers([module for module, _ in draft.modules], data)
    # Of the ranks that compute the same loss one answers for it.
    answers = all(mesh[axis.name].rank == 0 for axis in inner() if axis.divides != "layers")
    samples, stages = mesh["data"], mesh["pipeline"]
    if pipeline is None:
        numbers = SampleNumbers(mesh.whole, samples.rank, own=data.size != samples.size)
        return WholePasses(
            loss_fn=loss, loss_form=loss_form, form=form, buffers=buffers, data=data, numbers=numbers, answers=answers,
            model=draft.model, running=draft.running,
        )  # fmt: skip
    return StagedPasses(
        loss_fn=loss, loss_form=loss_form, form=form, buffers=buffers, data=samples,
        numbers=StageNumbers(mesh.whole, samples.rank * stages.size + stages.rank),
        answers=answers and pipeline.holds_last, pipeline=pipeline,
    )  # fmt: skip


def _groups(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any) -> dict[str, int]:
    """Return the number of its parameter group, for each of the model's parameters that the optimizer is to update."""
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: numbers[id(p)] for name, p in parameters.items() if p.requires_grad and id(p) in numbers}


def _form(
    draft: Draft, trained: dict[str, torch.nn.Parameter], frozen: dict[str, torch.nn.Parameter]
) -> ShardingStrategy:
    plan, mesh, places = draft.plan, draft.mesh, draft.places
    if plan.priority and mesh["data"].size > 1:
        wanted = plan.bucket_bytes
        return Prioritised(draft.model, trained, frozen, places, mesh["data"], wanted, draft.optimizer)
    if plan.shard == "none" or mesh.replicas.size == 1:
        averages = plan.synchronisation == "every_step"
        return Replicated(
            trained, frozen, places, mesh.replicas, plan.bucket_bytes, plan.compression, averages=averages
        )
    if plan.shard == "parameters":
        check_types(draft.model)
        whole = [name for name, _ in blocks(draft.model)]
        return FullySharded(draft.modules, places, mesh.shards, mesh.copies, mesh.replicas, whole, draft.fill)
    keep = plan.shard == "optimizer"
    return ShardedOptimizer(
        trained, frozen, places, mesh.replicas, plan.bucket_bytes, plan.compression, keep_gradients=keep
    )
