"""Capture: one real training step of a module on one device, read off layer by layer.

Activations are what autograd saves (`saved_tensors_hooks`), each storage once; FLOPs are torch's own counts; bytes are
what operations read and write; times are those between hooks; of each layer's two passes the moment is sought at which
most memory is in use (`_peaks`). On the meta device nothing is computed, nothing is
timed, and a model of any size can be captured. Ops between layers belong to the layer before.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from ._autocast import autocast_of_a_gpu
from ._dry_runs import DryRun, dry_shares
from ._meta_device import on_meta
from ._optimizers import OptimizerMaker, Update
from ._peaks import Peak, peaks_of
from ._share import Share, WorkloadError
from ._shares import Holding, operations_of, shares_of
from ._timing import Timing, optimizer_time, time_of
from ._trace import Trace, trace_of
from ._trial import sum_of_outputs, tried_out
from ._units import Loss, Unit, entries, samples, units_of
from ._workload import Layer, Workload


def capture(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    name: str = "",
    device: str | torch.device | None = None,
    optimizer: str | OptimizerMaker = "adam",
    repeats: int = 3,
    degrees: Sequence[int] = (2, 4, 8),
    dry_runs: Mapping[str, DryRun] | None = None,
    unit: str = "sample",
) -> Workload:
    """Run a step of a model and say what it asked for. Its parameters and gradients stay as they are.

    Layers are the module's parts at which a pipeline can be cut: what stands in it, in its sequences and lists of
    modules, and in a module that holds a list of blocks (the encoder of a model with a head), in the order in which
    they run.

    Args:
        model: On any device; a copy is moved if `device` is another.
        sample: A batch: a tensor, a tuple of what the model takes, a dict (or another mapping) of keywords, or a
            dataclass. Dimension 0 of the first tensor counts samples.
        loss: From the model and the batch, a scalar; if not given the model's own, named `loss` in what it returns,
            or else the sum of its outputs.
        name: Of the workload; the class of the model if not given.
        device: Where to run: "meta" to run nothing; the model's own if not given.
        optimizer: "sgd", "momentum", "adam", or what makes one of parameters: a class of torch.optim, or a function.
            How much state it has for each parameter, and what its step takes.
        repeats: Timed steps at the least, up to four times as many if they are short; the lower quartile counts.
        degrees: Numbers of workers for which to tell how they divide the layers' tensors, by the rule by which the
            Trainer does (`hocket.workload.division`).
        dry_runs: By the name of an axis of parallelism, what has the model do one rank's part: it is run so for all of
            `degrees`, too.
        unit: What a sample is called.

    Raises:
        WorkloadError: the optimizer is unknown or takes no step on these parameters, which may have no shape yet, the
            batch has no tensor, or the model gives nothing that can be back-propagated.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise WorkloadError(f"capture: {type(model).__name__} is compiled by torch.jit; give the module it was made of")
    if lazy := next((name for name, one in model.named_parameters() if is_lazy(one)), None):
        raise WorkloadError(f"capture: parameter {lazy} has no shape yet; call the model once before, on its sample")
    with _eager():
        update = Update.of(optimizer, model.parameters())
    parts, remade = entries(sample)
    place = torch.device(device) if device is not None else _device_of(model)
    here = model if place == _device_of(model) else _copied(model, place)
    size = samples(parts)
    batch = _moved(parts, place)
    run: Loss = lambda model, given: (loss or sum_of_outputs)(model, remade(given))  # noqa: E731
    units, known = units_of(here), {id(one) for one in here.parameters()}
    timing, optimizer_s = None, 0.0
    with ExitStack() as stack:
        stack.enter_context(tried_out(here))
        if place.type == "meta":
            made, of = (tree_leaves([*one]) for one in ((batch, *here.buffers()), (parts, *model.buffers())))
            stack.enter_context(on_meta(zip(made, of, strict=True)))
            stack.enter_context(autocast_of_a_gpu())
        with _eager():
            trace = trace_of(here, units, batch, run)
        if late := next((name for name, one in here.named_parameters() if id(one) not in known), None):
            rule = f"{type(here).__name__} makes its parameter {late} when it is called"
            raise WorkloadError(f"capture: {rule}; call the model once before, on its sample")
        with _eager():
            peaks = peaks_of(here, units, batch, run)
        if place.type != "meta":
            timing = time_of(here, units, batch, run, repeats)
            optimizer_s = optimizer_time(here, update.make)
        alone = partial(dry_shares, here, units, batch, run, dry_runs or {}, degrees)
        in_steps = partial(trace_of, here, units, batch, run, recurrent=False) if timing is None else None
        with _eager() if timing is None else nullcontext():
            layers = _layers(here, units, trace, peaks, timing, update, degrees, alone, repeats, in_steps)
    precision = str(next((p.dtype for p in here.parameters()), torch.float32)).removeprefix("torch.")
    source = "captured on the meta device" if place.type == "meta" else f"captured on {place.type}"
    if place.type == "meta" and not trace.passed_back:
        source += ", its backward pass taken for twice the forward pass"
    if trace.uncounted:
        source += f", without the FLOPs of {', '.join(sorted(trace.uncounted))}, which are not known"
    passes = 0 if timing else update.passes
    return Workload(
        name or type(model).__name__, size, layers, precision, source, unit, optimizer_s, passes,
        update_values=update.values,
    )  # fmt: skip


def _layers(
    model: nn.Module,
    units: list[Unit],
    trace: Trace,
    peaks: Mapping[int, Peak],
    timing: Timing | None,
    update: Update,
    degrees: Sequence[int],
    alone: Callable[[Mapping[int, tuple[int, int, int]], int], dict[int, tuple[Share, ...]]],
    repeats: int,
    in_steps: Callable[[], Trace] | None,
) -> tuple[Layer, ...]:
    order = list(dict.fromkeys(trace.order))  # a unit that runs twice stands where it ran first
    order += [index for index in range(len(units)) if index not in order]
    place = {index: position for position, index in enumerate(order)}
    owned = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    loose = [parameter for parameter in model.parameters() if id(parameter) not in owned]
    held: dict[int, Holding] = {}
    first: dict[int, str] = {}  # of each parameter the unit that holds it first
    tied: dict[int, str] = {}
    for index in order:
        own = [*units[index].module.parameters(), *(loose if place[index] == 0 else ())]
        held[index] = Holding([one for one in own if id(one) not in first], update.state_bytes)
        before = {first[id(one)] for one in own if id(one) in first}
        tied[index] = next((units[other].name for other in order if units[other].name in before), "")
        first.update((id(one), units[index].name) for one in held[index].parameters)
    shares = shares_of(model, trace, held, degrees, known=timing is None, in_steps=in_steps)
    state = {index: holding.nbytes() for index, holding in held.items()}
    for index, found in alone(state, repeats if timing else 0).items():
        shares[index] = (*shares.get(index, ()), *found)
    layers = []
    trained_before = False
    last: nn.Parameter | None = None  # of those before that are trained
    calls = sum(max(1, trace.total(index).calls) for index in order)
    passing, fixed = _apart(order, trace, state, peaks)
    for index in order:
        unit, own_state, spent = units[index], held[index], trace.total(index)
        work = operations_of(trace, index, (spent.saved, spent.saved_fixed), known=timing is None)
        crossing = sum(
            nbytes
            for nbytes, first, last in trace.lives.values()
            if place[trace.order[first]] <= place[index] < place[trace.order[last]]
        )
        layers.append(
            Layer(
                unit.name,
                type(unit.module).__name__,
                sum(one.numel() for one in own_state.parameters),
                *own_state.nbytes(),
                float(crossing),
                work,
                forward_s=timing.forward_s[index] if timing else 0.0,
                backward_s=timing.backward_s[index] if timing else 0.0,
                fixed_share=round(timing.fixed_share[index], 6) if timing else 0.0,
                backward_share=_backward_share(own_state.parameters, trained_before),
                tensors=len(own_state.parameters),
                frozen_tensors=sum(not one.requires_grad for one in own_state.parameters),
                launch_s=timing.launch_s * max(1, spent.calls) / calls if timing else 0.0,
                peak_bytes=passing[index],
                peak_fixed_bytes=fixed[index],
                update_bytes=update.single_bytes(own_state.parameters, last),
                tied_to=tied[index],
            )
        )
        in_loss = index in peaks and peaks[index].in_loss
        own_shares = tuple(_with_peak(one, layers[-1], in_loss) for one in shares.get(index, ()))
        layers[-1] = dataclasses.replace(layers[-1], shares=own_shares)
        last = next((one for one in reversed(own_state.parameters) if one.requires_grad), last)
        trained_before |= any(one.requires_grad for one in unit.module.parameters())
    return tuple(layers)


def _apart(
    order: Sequence[int], trace: Trace, state: Mapping[int, tuple[int, int, int]], peaks: Mapping[int, Peak]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return `Layer.peak_bytes` and `Layer.peak_fixed_bytes`: what a peak has besides what others keep at that time."""
    passing: dict[int, float] = {}
    fixed: dict[int, float] = {}
    saved = casts = 0.0  # by layers before it
    gradients = float(sum(state[index][1] for index in order))
    for index in order:
        gradients -= state[index][1]  # now of the parameters of layers behind it
        peak = peaks.get(index, Peak())
        rest = peak.fixed - gradients - casts  # fewer where it is the forward pass that needs most
        passing[index] = max(0.0, peak.passing - saved + min(0.0, rest))
        fixed[index] = max(0.0, rest)
        spent = trace.total(index)
        saved, casts = saved + spent.saved - spent.saved_fixed, casts + spent.saved_fixed
    return passing, fixed


def _with_peak(share: Share, layer: Layer, in_loss: bool) -> Share:
    """Return the share with the peak of its rank: what passes is divided as what is saved; the loss is not divided."""
    if not layer.peak_bytes:
        return share
    saved = sum(one.saved_bytes - one.saved_fixed_bytes for one in share.operations)
    whole = sum(one.saved_bytes - one.saved_fixed_bytes for one in layer.operations)
    part = saved / whole if whole and not in_loss else 1.0
    fixed = share.gradient_bytes / layer.gradient_bytes if layer.gradient_bytes else 1.0
    passing = max(0.0, saved + (layer.peak_bytes - whole) * part)
    return dataclasses.replace(share, peak_bytes=passing, peak_fixed_bytes=layer.peak_fixed_bytes * fixed)


def _backward_share(parameters: Sequence[nn.Parameter], trained_before: bool) -> float:
    """Return `Layer.backward_share`: half of a backward pass is for the inputs, half for the parameters."""
    count = sum(one.numel() for one in parameters)
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    if not count:
        return 1.0 if trained_before else 0.0
    return round(0.5 * (trained_before or trained > 0) + 0.5 * trained / count, 6)


def _eager() -> Any:
    """Open a block in which nothing is compiled: where operators are counted `torch.compile` refuses to, or fails."""
    return torch.compiler.set_stance("force_eager")


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _copied(model: nn.Module, place: torch.device) -> nn.Module:
    """Return a copy on another device; shared parameters stay shared, which `nn.Module.to` does not see to."""
    # What a hook computes of parameters anew (torch's older `weight_norm`) has a graph, which is not copied.
    made = [one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor)]
    moved = copy.deepcopy(model, {id(one): one.detach() for one in made if not one.is_leaf}).to(place)
    first: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home, _, key = name.rpartition(".")
        owner = moved.get_submodule(home)
        if id(parameter) in first:
            setattr(owner, key, first[id(parameter)])
        first[id(parameter)] = getattr(owner, key)
    return moved


def _moved(value: Any, place: torch.device) -> Any:
    return tree_map(lambda one: one.to(place) if isinstance(one, Tensor) else one, value)
