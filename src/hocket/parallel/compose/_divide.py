"""Divides a model along the axes of its plan: the table of how each is carried out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from hocket._program import warn
from hocket.planner import AXES, SPLIT_REASON, Plan, PlanError, PlanFinding, inner, plan_homes
from hocket.workload import DividedShare
from hocket.workload.division import unchanged

from ..batches import cut_fields, samples_in
from ..embedding import distribute_embeddings
from ..mesh import Mesh, World, link_of
from ..partition.spatial import parallelize as share_samples
from ..partition.tensor import TensorParallel, parallelize
from ..pipeline import (
    SplitError,
    Stage,
    measured,
    order_digest,
    split,
    traced_in_both_modes,
    unbalanced,
)
from ..state import DimSegment, Owned, ParameterPlacement, ShardBox, is_deferred, parameters_of
from ._elsewhere import leave_elsewhere
from ._leftovers import unnoted

_FEWEST = 2  # that batch norm takes
_EXAMINED = 4
"""Samples on which a divided model is compared with the whole: batch norm of two amplifies what is rounded."""
T = TypeVar("T")
Inputs = tuple[Any, ...] | dict[str, Any]


def sample_inputs(sample: Any, plan: Plan) -> Inputs:
    """Return the sample as positional inputs, or as keywords; PlanError if the plan needs one, and there is none."""
    names = [axis.name for axis in inner() if axis.sampled]
    if sample is None and any(axis.sampled and axis.degree(plan) > 1 for axis in AXES):
        rule = f"{' and '.join(names)} parallelism run the model on a sample, to see how it can be divided"
        remedy = "pass Trainer(..., sample=inputs), the model's inputs for a few samples"
        raise PlanError("the plan cannot be carried out:", [PlanFinding("sample", rule, remedy)])
    if sample is None:
        return ()
    if isinstance(sample, Mapping):
        return dict(sample)
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


@dataclass
class Draft:
    """A model on its way to a `Composition`: what the axes of its plan have made of it so far."""

    model: torch.nn.Module  # the user's
    optimizer: Any  # the user's
    plan: Plan  # what it is to become
    mesh: Mesh  # the ranks
    inputs: Inputs  # of the model, as a sample, positional or by keyword; () if there are none
    # where this rank's parameters and buffers lie in the model's, by name
    places: dict[str, ParameterPlacement] = field(init=False)
    # what this rank computes, with the model's name of each of their parameters and buffers
    modules: list[tuple[torch.nn.Module, dict[str, str]]] = field(init=False)
    stages: list[Stage] = field(default_factory=list)  # those of modules that are stages of a pipeline
    cut: frozenset[str] = frozenset()  # names of the parameters that are divided among ranks that share tensors
    # makes the block in which the model and its loss run
    running: Callable[[], AbstractContextManager[None]] = nullcontext
    notes: list[str] = field(default_factory=list)  # what was decided about the model, as sentences
    # how much of the model is divided among ranks that share tensors; None where none do
    divided: DividedShare | None = None
    growing: list[object] = field(default_factory=list)  # what is decided while the model runs
    # gives parameters their memory, if they have none yet
    fill: Callable[[Iterable[torch.Tensor]], None] = lambda _: None

    def __post_init__(self) -> None:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.places = {name: ParameterPlacement.unsharded(name, tensor) for name, tensor in named}
        self.modules = [(self.model, {name: name for name in self.places})]


def divide_tensors(draft: Draft) -> None:
    """Make the model tensor-parallel in place, and cut the state that its optimizer has already.

    All ranks hold rank 0's model by now, see `compose`.

    It is examined on a few samples, which show as much as many and take less time and memory. Of a model that has no
    memory yet these are two: activations of more might take more than a rank's part.
    """
    model = draft.model
    full = {name: tuple(p.shape) for name, p in model.named_parameters()}
    few = _first(_FEWEST if any(map(is_deferred, parameters_of(model))) else _EXAMINED, draft.inputs)
    try:
        try:
            form = parallelize(model, draft.mesh["tensor"], few, sequence=draft.plan.sequence_parallel, aligned=True)
        except Exception:  # of a model that takes no part of its inputs: whatever its forward raises
            if few is draft.inputs:
                raise
            form = parallelize(
                model, draft.mesh["tensor"], draft.inputs, sequence=draft.plan.sequence_parallel, aligned=True
            )
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        rule = "single gradients of the divided model are compared, which checkpoint(..., use_reentrant=True) forbids"
        found = PlanFinding("tensor_parallel_degree", rule, "say use_reentrant=False, as torch recommends")
        raise PlanError("the plan cannot be carried out for this model:", [found]) from error
    for name, parameter in model.named_parameters():
        state = draft.optimizer.state.get(parameter, {}) if name in form.pieces else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) == full[name]:
                state[key] = form.part(name, value).clone()
    named = [*model.named_parameters(), *model.named_buffers()]
    draft.places = {name: _place(form, name, tensor) for name, tensor in named}
    draft.modules = [(model, {name: name for name in draft.places})]
    draft.cut = frozenset(form.pieces)
    draft.notes += str(form).splitlines()
    draft.divided = form.share
    line = f"tensor parallelism {form.share}"
    if draft.mesh.whole.rank == 0 and min(form.share.parameters, form.share.flops) < 0.5:
        left = "; ".join(form.left_whole())
        warn(f"{line}. The largest layers that every rank has all of: {left}")
    elif draft.mesh.whole.rank == 0:
        print(f"hocket: {line}", file=sys.stderr, flush=True)


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


def divide_embeddings(draft: Draft) -> list[Owned]:
    """Divide the embedding tables, and the optimizer's state of them, among data-parallel ranks; return this one's.

    Raises:
        PlanError: A table's weight is used on several stages of a pipeline.
    """
    owned: list[Owned] = []
    plan, mesh, modules = draft.plan, draft.mesh, draft.modules
    if plan.embeddings == "replicated" or mesh["data"].size == 1:
        return owned
    shared = {name for stage in draft.stages for name in stage.shared}
    tables = {names[n] for module, names in modules for n in _tables(module)}
    if any(mesh.whole.from_all(bool(tables.intersection(shared)))):
        rule = "a table whose weight another stage of the pipeline uses too cannot be divided"
        found = PlanFinding("embeddings", rule, 'say embeddings = "replicated", or untie the weights')
        raise PlanError("the plan cannot be carried out for this model:", [found])
    for module, names in modules:
        form = distribute_embeddings(module, mesh["data"], plan.embeddings)
        draft.notes += str(form).splitlines()
        for local, (shape, offsets) in form.shards.items():
            parameter = form.parameters[local]
            for key, value in (state := draft.optimizer.state.get(parameter, {})).items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                    state[key] = form.part(local, value).clone()
            segment = DimSegment(0, parameter.shape[0], offsets[0])
            draft.places[names[local]] = place = ParameterPlacement(names[local], shape, 0, (segment,))
            owned.append(Owned(parameter, parameter, ShardBox.full(place), 1))
    return owned


def _tables(module: torch.nn.Module) -> list[str]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [f"{name}.weight".lstrip(".") for name, inner in module.named_modules() if isinstance(inner, kinds)]


def divide_layers(draft: Draft) -> None:
    """Split the model into the stages of a pipeline, and free the memory of those that are other ranks'.

    What is traced, timed and compared is as much of the sample as a micro-batch is of a whole batch; of a model that
    has no memory yet two samples, whose activations are small beside a stage.

    Raises:
        SplitError: the model cannot be split; on every rank, whichever has found it.
    """
    model, plan, mesh = draft.model, draft.plan, draft.mesh
    parts = plan.micro_batches * mesh["data"].size
    deferred = any(map(is_deferred, parameters_of(model)))
    sample = _first(_FEWEST, draft.inputs) if deferred else _micro_batch(draft.inputs, parts)
    try:
        stages = _stages(draft, sample, plan.split, cut=parts > 1)
    except SplitError as error:
        if plan.reasons.get("split") != SPLIT_REASON:
            raise
        # The search has named layers of the workload that it was given, without a look at what the model's code does.
        line = f"the stages that the plan names are left, and the model is cut by computation ({error})"
        draft.notes.append(line)
        if mesh.whole.rank == 0:
            print(f"hocket: {line}", file=sys.stderr, flush=True)
        stages = _stages(draft, sample, (), cut=parts > 1)
    stages[0].settled.note()  # all stages': hooks that the model has registered as it first ran are gone again
    orders = mesh["pipeline"].from_all(order_digest(stages))
    if any(mesh.whole.from_all(len(set(orders)) > 1)):
        raise SplitError(
            f"the forward of {type(model).__name__} takes its steps in another order in each process, as where it goes "
            "through a set of strings, so that stages would take values for others: go through sorted(...) there, or "
            "set PYTHONHASHSEED to one number for all ranks (hocket run does)"
        )
    if lopsided := unbalanced(stages):
        draft.notes.append(lopsided)
        if mesh.whole.rank == 0:
            warn(f"the pipeline is not balanced: {lopsided}")
    mine = [stage for stage, home in zip(stages, plan_homes(plan), strict=True) if home == mesh["pipeline"].rank]
    kept = {id(t) for stage in mine for t in (*parameters_of(stage.module), *stage.module.buffers())}
    ranks = mesh["pipeline"].from_all(mesh.whole.rank)
    homes = {
        id(t): (stage.names[name], ranks[home])
        for stage, home in zip(stages, plan_homes(plan), strict=True)
        for name, t in (*stage.module.named_parameters(), *stage.module.named_buffers())
        if name in stage.names
    }
    for tensor in (*parameters_of(model), *model.buffers()):
        if id(tensor) not in kept:
            draft.optimizer.state.pop(tensor, None)
            tensor.grad = None
            if tensor.layout is not torch.strided:  # of a sparse buffer torch makes none that is empty
                continue
            leave_elsewhere(tensor, homes.get(id(tensor)))
    draft.stages = mine
    draft.modules = [(stage.module, dict(stage.names)) for stage in mine]
    draft.notes += [str(stage) for stage in stages]


def _stages(draft: Draft, sample: Any, points: Sequence[str], *, cut: bool) -> list[Stage]:
    """Return the stages that begin at these modules, or, where none are named, those that computation balances."""
    model, plan, mesh = draft.model, draft.plan, draft.mesh
    count, passes = mesh["pipeline"].size * plan.stages_per_rank, plan.micro_batches * plan.stages_per_rank
    times: Any = None
    link = None
    with unchanged(model):
        traced = _alike(mesh.whole, lambda: traced_in_both_modes(model, sample))
        if not points:
            # Who shares tensors must measure together; one measurement must count for all.
            measures = mesh["tensor"].size > 1 or mesh.whole.rank == 0
            with unnoted():
                times = _alike(mesh.whole, lambda: measured(traced).total_s if measures else None)
            times = mesh.whole.from_root(times)
            device = next((p.device for p in parameters_of(model)), torch.device("cpu"))
            link = link_of(mesh["pipeline"], mesh.whole, device)
        asked: dict[str, Any] = {"points": points, "times": times, "link": link, "micro_batches": passes}
        return _alike(mesh.whole, lambda: split(model, count, sample, **asked, cut=cut, traced=traced))


def _alike(world: World, work: Callable[[], T]) -> T:
    """Return what `work` gives on this rank, unless it fails on any: a collective operation.

    Raises:
        SplitError: it has failed on some rank; on every rank the same.
    """
    found: Any = None
    failure: str | None = None
    cause: Exception | None = None
    try:
        found = work()
    except SplitError as error:
        failure, cause = str(error), error
    except Exception as error:  # of a step that cannot be taken by itself: autograd.grad of what is before it, say
        failure, cause = f"{type(error).__name__}: {error}", error
        failure = (
            f"the model cannot be taken apart into steps ({failure}). Keep the code that says so in one submodule, or "
            "say pipeline_parallel_degree = 1 (data, sharded and tensor parallelism do not split models)"
        )
    if first := world.first(failure):
        raise SplitError(first) from cause
    return cast(T, found)


def divide_samples(draft: Draft) -> None:
    """Have the model work on this rank's part of each sample."""
    mesh = draft.mesh
    form = share_samples(
        draft.model, mesh["spatial"], statistics=mesh.statistics, samples=mesh.batch_norm, aligned=True
    )
    draft.running = form.running
    draft.growing.append(form)
    draft.notes.append(f"each sample divided among {form.world.size} ranks along the first of its spatial dims")


CARRIED: dict[str, Callable[[Draft], None]] = {
    "tensor": divide_tensors,
    "pipeline": divide_layers,
    "spatial": divide_samples,
}
"""By the name of an axis, how a model is divided along it, in this order. An axis that only replicates has no line."""


def _micro_batch(sample: Inputs, parts: int) -> Inputs:
    """Return one of so many parts of a batch."""
    return _first(max(_FEWEST, samples_in(sample) // parts), sample)


def _first(count: int, sample: Inputs) -> Inputs:
    """Return so many of the samples; the sample itself where it has no more."""
    whole = samples_in(sample)
    if count >= whole:
        return sample
    part: Inputs = cut_fields(sample, None, 0, count, whole)[0]
    return part
