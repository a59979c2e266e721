"""Capture: one real training step of a module on one device, read off layer by layer.

Activations are what autograd saves (`saved_tensors_hooks`), each storage once; FLOPs are torch's own counts; bytes are
what operations read and write; times are those between hooks. On the meta device nothing is computed, nothing is
timed, and a model of any size can be captured. Ops between layers belong to the layer before.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from ._workload import Layer, Operation, Workload, WorkloadError

__all__ = ["capture"]

_STATE_NBYTES = {"sgd": 0, "momentum": 4, "adam": 8}
Loss = Callable[[nn.Module, Any], Tensor]


def capture(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    name: str = "",
    device: str | torch.device | None = None,
    optimizer: str = "adam",
    repeats: int = 3,
    tensor: Mapping[str, int] | None = None,
    unit: str = "sample",
) -> Workload:
    """Run a step of a model and say what it asked for. Its parameters and gradients stay as they are.

    Layers are the module's parts at which a pipeline can be cut: what stands in it, and in its sequences and lists of
    modules, in the order in which they run.

    Args:
        model: On any device; a copy is moved if `device` is another.
        sample: A batch: a tensor, or a tuple of what the model takes. Dimension 0 of the first tensor counts samples.
        loss: From the model and the batch, a scalar; the sum of the model's outputs if not given.
        name: Of the workload; the class of the model if not given.
        device: Where to run: "meta" to run nothing; the model's own if not given.
        optimizer: "sgd", "momentum" or "adam": how much state it has per parameter.
        repeats: Timed steps, of which the medians are taken; after one that warms up.
        tensor: By name of a layer, among how many workers it can be divided; others are not divided.
        unit: What a sample is called.

    Raises:
        WorkloadError: the optimizer is unknown, the batch has no tensor, or the model gives nothing that can be
            back-propagated.
    """
    if optimizer not in _STATE_NBYTES:
        raise WorkloadError(f"capture: optimizer {optimizer!r} is not one of {', '.join(_STATE_NBYTES)}")
    place = torch.device(device) if device is not None else _device_of(model)
    here = model if place == _device_of(model) else copy.deepcopy(model).to(place)
    batch = _moved(sample, place)
    run = loss or _sum_of_outputs
    units = _units(here)
    kept = [(parameter, parameter.grad) for parameter in here.parameters()]
    buffers = {key: value.clone() for key, value in here.named_buffers()} if place.type != "meta" else {}
    modes = [(module, module.training) for module in here.modules()]
    try:
        here.train()
        trace = _trace(here, units, batch, run)
        timing = None
        if place.type != "meta":
            timing = _time(here, units, batch, run, repeats)
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for key, value in here.named_buffers():
                if key in buffers:
                    value.copy_(buffers[key])
    size = _samples(batch)
    layers = _layers(here, units, trace, timing, _STATE_NBYTES[optimizer], tensor or {})
    precision = str(next((p.dtype for p in here.parameters()), torch.float32)).removeprefix("torch.")
    source = "captured on the meta device" if place.type == "meta" else f"captured on {place.type}"
    return Workload(name or type(model).__name__, size, layers, precision, source, unit)


@dataclass
class _Unit:
    name: str
    module: nn.Module


@dataclass
class _Trace:
    """What one forward pass did, by index of the unit."""

    order: list[int] = field(default_factory=list)
    flops: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    moved: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    calls: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    saved: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    # Of every storage that was made: bytes, and the places in `order` of its maker and of its last reader.
    lives: dict[int, tuple[int, int, int]] = field(default_factory=dict)


@dataclass
class _Timing:
    forward_s: dict[int, float]
    backward_s: dict[int, float]
    fixed_share: float


def _units(model: nn.Module) -> list[_Unit]:
    """The parts at which a chain can be cut."""
    found: list[_Unit] = []

    def visit(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            inner = f"{name}.{key}" if name else key
            if isinstance(child, nn.Sequential | nn.ModuleList) and len(child):
                visit(child, inner)
            else:
                found.append(_Unit(inner, child))

    visit(model, "")
    return found or [_Unit("model", model)]


class _Watch(TorchDispatchMode):
    """Counts FLOPs and bytes of every operation, and follows who reads what."""

    def __init__(self, trace: _Trace, at: list[int], ignored: set[int]) -> None:
        super().__init__()
        self.trace, self.at, self.ignored = trace, at, ignored
        self._alive: list[Tensor] = []  # a storage's key is its own only while it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        trace, unit = self.trace, self.at[-1]
        given = [one for one in tree_flatten((args, kwargs or {}))[0] if isinstance(one, Tensor)]
        made = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        keys = {_key(one) for one in given}
        step = max(0, len(trace.order) - 1)
        for key in keys:
            if key in trace.lives:
                nbytes, first, last = trace.lives[key]
                trace.lives[key] = (nbytes, first, max(last, step))
        fresh = [one for one in made if _key(one) not in keys]
        for one in fresh:
            self._alive.append(one)
            if _key(one) not in self.ignored:
                trace.lives[_key(one)] = (one.untyped_storage().nbytes(), step, step)
        in_place = bool(made) and func.overloadpacket.__name__.endswith("_")
        if fresh or in_place:  # a view moves nothing
            trace.moved[unit] += sum(one.numel() * one.element_size() for one in (*given, *made))
            trace.calls[unit] += 1
        if func.overloadpacket in flop_registry:
            trace.flops[unit] += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def _trace(model: nn.Module, units: list[_Unit], batch: Any, run: Loss) -> _Trace:
    trace, at = _Trace(), [0]
    ignored = {_key(one) for one in (*model.parameters(), *model.buffers())}
    for one in tree_flatten(batch)[0]:
        if isinstance(one, Tensor):
            ignored.add(_key(one))
    seen: set[int] = set(ignored)
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        key = _key(saved)
        if key not in seen:
            seen.add(key)
            packed.append(saved)
            trace.saved[at[-1]] += saved.untyped_storage().nbytes()
        return saved

    def enter(index: int) -> None:
        trace.order.append(index)
        at[-1] = index

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            stack.enter_context(_hooked(unit.module.register_forward_pre_hook(lambda *_, i=index: enter(i))))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved))
        stack.enter_context(_Watch(trace, at, ignored))
        result = run(model, batch)
    if not isinstance(result, Tensor) or not result.requires_grad:
        raise WorkloadError(f"capture: the loss of {type(model).__name__} has no gradient; give `loss`")
    return trace


def _time(model: nn.Module, units: list[_Unit], batch: Any, run: Loss, repeats: int) -> _Timing:
    """Medians over the repeats; and how much of the time half a batch takes too."""
    _timed_step(model, units, batch, run)
    rounds = [_timed_step(model, units, batch, run) for _ in range(max(1, repeats))]
    forward = {i: median(one[0].get(i, 0.0) for one in rounds) for i in range(len(units))}
    backward = {i: median(one[1].get(i, 0.0) for one in rounds) for i in range(len(units))}
    whole, size = sum(forward.values()) + sum(backward.values()), _samples(batch)
    fixed = 0.0
    if size >= 2 and whole:
        half = tree_map(lambda one: one[: size // 2] if _counts(one, size) else one, batch)
        halves = [_timed_step(model, units, half, run) for _ in range(max(1, repeats))]
        part = median(sum(one[0].values()) + sum(one[1].values()) for one in halves)
        # t = fixed + size x slope, of two sizes.
        slope = (whole - part) / (size - size // 2)
        fixed = min(1.0, max(0.0, 1 - slope * size / whole))
    return _Timing(forward, backward, fixed)


def _timed_step(
    model: nn.Module, units: list[_Unit], batch: Any, run: Loss
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of each unit forward, and backward: from when its output's gradient is there to the next one's."""
    cuda = any(one.is_cuda for one in tree_flatten(batch)[0] if isinstance(one, Tensor))

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    begun: list[tuple[int, float]] = []
    arrived: list[tuple[int, float]] = []

    def left(index: int, output: Any) -> None:
        for one in tree_flatten(output)[0]:
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(lambda _, i=index: arrived.append((i, now())))

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            module = unit.module
            stack.enter_context(_hooked(module.register_forward_pre_hook(lambda *_, i=index: begun.append((i, now())))))
            stack.enter_context(_hooked(module.register_forward_hook(lambda _m, _a, out, i=index: left(i, out))))
        start = now()
        result = run(model, batch)
        middle = now()
        result.backward()  # type: ignore[no-untyped-call]
        end = now()
    model.zero_grad(set_to_none=True)
    forward: defaultdict[int, float] = defaultdict(float)
    backward: defaultdict[int, float] = defaultdict(float)
    if begun:
        begun[0] = (begun[0][0], start)  # what comes before the first layer is the first layer's
    for (index, at), (_, until) in zip(begun, [*begun[1:], (0, middle)], strict=True):
        forward[index] += until - at
    if arrived:
        arrived[0] = (arrived[0][0], middle)
    for (index, at), (_, until) in zip(arrived, [*arrived[1:], (0, end)], strict=True):
        backward[index] += until - at
    return dict(forward), dict(backward)


def _layers(
    model: nn.Module,
    units: list[_Unit],
    trace: _Trace,
    timing: _Timing | None,
    state_nbytes: int,
    tensor: Mapping[str, int],
) -> tuple[Layer, ...]:
    order = list(dict.fromkeys(trace.order))  # a unit that runs twice stands where it ran first
    order += [index for index in range(len(units)) if index not in order]
    place = {index: position for position, index in enumerate(order)}
    owned = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    loose = [parameter for parameter in model.parameters() if id(parameter) not in owned]
    counted: set[int] = set()
    layers = []
    for index in order:
        unit = units[index]
        own = [*unit.module.parameters(), *(loose if place[index] == 0 else ())]
        fresh = [one for one in own if id(one) not in counted]
        counted.update(id(one) for one in fresh)
        trained = [one for one in fresh if one.requires_grad]
        limit = tensor.get(unit.name, 1)
        work = Operation(
            "forward",
            trace.flops[index],
            trace.moved[index],
            trace.saved[index],
            "divided" if limit > 1 else "shared",
            max(1, trace.calls[index]),
        )
        crossing = sum(
            nbytes
            for nbytes, first, last in trace.lives.values()
            if place[trace.order[first]] <= place[index] < place[trace.order[last]]
        )
        layers.append(
            Layer(
                unit.name,
                type(unit.module).__name__,
                sum(one.numel() for one in fresh),
                sum(one.numel() * one.element_size() for one in fresh),
                sum(one.numel() * one.element_size() for one in trained),
                sum(one.numel() for one in trained) * state_nbytes,
                float(crossing),
                (work,),
                forward_s=timing.forward_s[index] if timing else 0.0,
                backward_s=timing.backward_s[index] if timing else 0.0,
                fixed_share=round(timing.fixed_share, 6) if timing else 0.0,
                tensor_limit=limit,
                reductions=1 if limit > 1 else 0,
                reduced_bytes=float(crossing) if limit > 1 else 0.0,
            )
        )
    return tuple(layers)


def _key(one: Tensor) -> int:
    key: int = StorageWeakRef(one.untyped_storage()).cdata
    return key


@contextmanager
def _hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _moved(value: Any, place: torch.device) -> Any:
    return tree_map(lambda one: one.to(place) if isinstance(one, Tensor) else one, value)


def _counts(one: Any, size: int) -> bool:
    return isinstance(one, Tensor) and one.dim() > 0 and one.shape[0] == size


def _samples(batch: Any) -> int:
    for one in tree_flatten(batch)[0]:
        if isinstance(one, Tensor) and one.dim():
            return int(one.shape[0])
    raise WorkloadError("capture: the sample holds no tensor with a dimension that counts samples")


def _sum_of_outputs(model: nn.Module, batch: Any) -> Tensor:
    output = model(*batch) if isinstance(batch, tuple) else model(batch)
    found = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor) and one.is_floating_point()]
    if not found:
        raise WorkloadError(f"capture: {type(model).__name__} gives no tensor of floating-point numbers; give `loss`")
    return torch.stack([one.float().sum() for one in found]).sum()
