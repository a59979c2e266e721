"""What a plan asks for that this model, this optimizer or this runtime cannot do."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hocket import comm
from hocket.planner import AXES, Plan, PlanError, PlanFinding, inner
from hocket.schedule import ScheduleError

from ..data import blocks, changes_gradient, has_own_hooks, is_nonlinear
from ..mesh import Mesh
from ..pipeline import Pipeline
from ..state import UpdateTrial, check_elementwise, is_excluded, parameters_of


def check_arguments(model: Any, optimizer: Any, plan: Plan, update: UpdateTrial) -> None:
    """Refuse what can be seen before anything is changed.

    Raises:
        PlanError: the plan cannot be carried out on this model with this optimizer.
        TypeError: the model or the optimizer is none.
        ValueError: the optimizer is of another model, or cannot work on parts of parameters.
    """
    check_plain(model)
    check_optimizer(optimizer)
    if plan.shard != "none" or any(axis.elementwise and axis.degree(plan) > 1 for axis in AXES):
        check_elementwise(optimizer)
    elif plan.embeddings != "replicated":
        check_elementwise(optimizer, rows=True)
    elif plan.pipeline_parallel_degree > 1 and not hasattr(optimizer, "bind_norms") and update.meets:
        rule = (
            f"a rank has the gradients of its stage alone, and {type(optimizer).__name__}'s update of a parameter "
            "depends on those of others (it clips by their norm, say, or makes one estimate of all)"
        )
        raise _refusal(
            "pipeline_parallel_degree", rule, "clip by clip_norm in the plan, or take a plan of data parallelism"
        )
    if update.draws and (field := _dividing(plan)):
        rule = f"{type(optimizer).__name__} draws random numbers, other ones for a part of the parameters than for all"
        raise _refusal(field, rule, "take a plan of data parallelism")
    if plan.pipeline_parallel_degree > 1 and (compiled := _compiled(model)):
        rule = f"{compiled} is compiled (torch.compile), and what is compiled is not cut into stages"
        raise _refusal("pipeline_parallel_degree", rule, "compile the blocks of the model one by one: block.compile()")
    if plan.priority:
        _check_priority(model, optimizer)
    check_carried_out(plan)
    if plan.recompute and plan.recompute_part != "layers":
        rule = f"the Trainer computes whole layers again, not {plan.recompute_part!r} alone"
        raise _refusal("recompute_part", rule, 'say recompute_part = "layers"')
    check_pair(model, optimizer)


def check_pair(model: Any, optimizer: Any) -> None:
    """Refuse a model and an optimizer that no plan trains.

    Raises:
        TypeError: one is none.
        ValueError: the model is another library's, the optimizer another model's, or it wants a closure.
    """
    check_plain(model)
    check_optimizer(optimizer)
    mine = {id(p) for p in parameters_of(model)}
    if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that the model has not: make it of model.parameters()")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure, and a step of the "
            "Trainer does so once: keep your loop, with hocket.distribute, or take another optimizer"
        )


def _compiled(model: torch.nn.Module) -> str:
    """Return what torch.compile has wrapped, or the whole model if that was compiled in place; "" for neither."""
    wrapped = (name for name, one in model.named_modules() if "_orig_mod" in one._modules)
    whole = getattr(model, "_compiled_call_impl", None) is not None
    return next((name or "the model" for name in wrapped), "the model" if whole else "")


def _dividing(plan: Plan) -> str:
    """Return the field by which a plan has ranks update parts of the model each, or some before others; "" for none."""
    axes = [axis.field for axis in AXES if (axis.elementwise or axis.divides == "layers") and axis.degree(plan) > 1]
    said = {"shard": plan.shard != "none", "embeddings": plan.embeddings != "replicated", "priority": plan.priority}
    return next(iter([*axes, *(field for field, divides in said.items() if divides)]), "")


def check_carried_out(plan: Plan) -> None:
    """Refuse, as a PlanError, what plans can say, for predictions, and nothing carries out."""
    if plan.precision == "float8":
        rule = "products in float8 are planned and predicted, not carried out"
        raise _refusal("precision", rule, 'say precision = "bfloat16"')


def use_choices(plan: Plan) -> None:
    """Have collectives run by the table that a plan names, if it does, from here on in this process.

    A table that cannot be read is a PlanError.
    """
    if plan.choices:
        try:
            comm.choose(plan.choices)
        except ScheduleError as error:
            raise _refusal("choices", str(error), "name a table that `hocket tune` wrote") from None


def check_plain(model: Any) -> None:
    """Refuse a model that another library has made one of several ranks already.

    Raises:
        TypeError: it is no module.
        ValueError: a part of it is wrapped or sharded, by what, and what to do.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    # What is not loaded has wrapped nothing; loading it takes seconds.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    wrappers: list[Any] = [torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel]
    wrappers += [fsdp.FullyShardedDataParallel, fsdp.FSDPModule] if fsdp is not None else []
    kinds_of_wrappers = tuple(wrappers)
    found = next((m for m in model.modules() if isinstance(m, kinds_of_wrappers)), None)
    if found is not None:
        kinds = [wrapper.__name__ for wrapper in wrappers if isinstance(found, wrapper)]
        what = kinds[0].replace("FSDPModule", "fully_shard")
    elif tensors is not None and any(isinstance(p, tensors.DTensor) for p in parameters_of(model)):
        what = "DTensor"
    else:
        return
    raise ValueError(
        f"the model is distributed by {what} already, and its gradients would be averaged twice or not at all: give "
        "hocket the plain model (for shards hocket.Trainer and a plan), or keep the wrapper and use the backend alone, "
        'by dist.init_process_group("hocket")'
    )


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer. Raises TypeError."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(
            f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}; "
            "without one pass None, and the loader third"
        )


def _check_priority(model: torch.nn.Module, optimizer: Any) -> None:
    if hasattr(optimizer, "bind_norms"):
        rule = f"{type(optimizer).__name__} needs norms over whole parameters before it can update the first of them"
        raise _refusal("priority", rule, "say priority = false, or take an optimizer like Adam or SGD")
    check_elementwise(optimizer)
    other = next((p.device for p in parameters_of(model) if p.device.type != "cpu"), None)
    if other is not None:
        rule = f"gradients are sent by priority from the CPU's memory only, and the model is on {other}"
        raise _refusal("priority", rule, "say priority = false")


def check_divisible(model: torch.nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Refuse to divide what torch.jit has compiled, and programs of torch.export, as a PlanError."""
    axes = [one for one in ("tensor_parallel_degree", "pipeline_parallel_degree") if getattr(plan, one) > 1]
    fields = ["shard", *axes] if plan.shard == "parameters" else axes
    if not fields or mesh.whole.size == 1:
        return
    for name, module in model.named_modules():
        what = name or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            rule = f"what torch.jit has compiled can be neither divided nor hooked, as {what} is"
            remedy = "give the module itself, and compile it for inference; or take data parallelism"
            raise _refusal(fields[0], rule, remedy)
        if axes and isinstance(module, torch.fx.GraphModule) and "train" in vars(module):
            rule = f"{what} is a program of torch.export, of one mode, and a divided model is compared with it in both"
            remedy = "give the module itself, and export it once it is trained; or take data parallelism"
            raise _refusal(axes[0], rule, remedy)


def check_types(model: torch.nn.Module) -> None:
    """Refuse to shard blocks whose trained parameters have several types; what is divided otherwise does not count.

    The PlanError names two.
    """
    holders = {id(p): name for name, block in blocks(model) for p in parameters_of(block)}
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or is_excluded(parameter):
            continue
        other, dtype = first.setdefault(holders.get(id(parameter), ""), (name, parameter.dtype))
        if dtype != parameter.dtype:
            rule = (
                "FSDP2 reduces the gradients of a block together, and wants one type for them: "
                f"{other} is of {dtype}, {name} of {parameter.dtype}"
            )
            raise _refusal("shard", rule, 'say shard = "gradients", or give them one type')


def check_gradient_hooks(parameters: Mapping[str, torch.nn.Parameter], plan: Plan, mesh: Mesh) -> None:
    """Refuse hooks of the program on parameters where the plan would call them with other gradients than one device.

    A collective operation: a program may have hooks on one rank alone, to log there, say.

    Raises:
        PlanError: no rank has a parameter's whole gradient, or parts of a batch meet a hook that is not linear; on
            every rank.
        ValueError: some ranks alone have a hook that changes a gradient; on every rank.
    """
    refused: tuple[str, str, str] | None = None
    if hooked := {name: p for name, p in parameters.items() if has_own_hooks(p)}:
        where = f"the program has a hook on the gradient of parameter {next(iter(hooked))!r}"
        remedy = "take the hook off, and do its work in the optimizer, or take a plan of data parallelism alone"
        plain = Plan()
        fields = ["shard", "priority", "embeddings", *(axis.field for axis in inner())]
        changed = [field for field in fields if getattr(plan, field) != getattr(plain, field)]
        if changed and mesh.whole.size > 1:
            rule = f"{where}, and no rank would call it with this parameter's whole gradient"
            refused = changed[0], rule, remedy
        elif plan.accumulate > 1 and any(map(is_nonlinear, hooked.values())):
            refused = "accumulate", f"{where}, which is not linear, and would be called for parts of a batch", remedy
    if (said := mesh.whole.first(refused)) is not None:
        raise _refusal(*said)
    alone = hooked.keys() - set.intersection(*mesh.whole.from_all(set(hooked)))
    apart = next((name for name in sorted(alone) if changes_gradient(hooked[name])), None)
    rank_and_name = mesh.whole.first(None if apart is None else (mesh.whole.rank, apart))
    if rank_and_name is not None:
        rank, name = rank_and_name
        raise ValueError(
            f"rank {rank} has a hook that changes the gradient of {name!r}, and other ranks have none: their "
            "parameters would become different ones. Register it on every rank"
        )


def check_tied(pipeline: Pipeline, plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError for plans that weights which stages share do not allow; a collective operation."""
    tied = any(mesh.whole.from_all(any(stage.shared for stage in pipeline.stages)))
    if tied and plan.shard == "parameters" and mesh["data"].size > 1:
        rule = "weights that stages share cannot be sharded themselves, and stages of this model share some"
        raise _refusal("shard", rule, 'say shard = "gradients", or untie them')


def _refusal(field: str, rule: str, remedy: str) -> PlanError:
    return PlanError("the plan cannot be carried out:", [PlanFinding(field, rule, remedy)])
