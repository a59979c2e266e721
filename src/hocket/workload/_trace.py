"""What a forward pass does, unit by unit and call by call: FLOPs, bytes, what autograd keeps, and who reads what.

On the meta device the backward pass is run, too, and what its operators do is counted where the forward pass made them.
"""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hocket.sharding import as_local, leaves, strided_parts

from ._autocast import autocast_behind, autocast_on_meta
from ._kernel import Float32Formats, Kernel
from ._kernels import FUSED, LOOKUPS, as_on_a_gpu, flops_of, is_uncounted, kernels_of
from ._recurrent import replace_recurrent
from ._share import WorkloadError
from ._units import Loss, Unit, hooked, returned
from .division import Recording, recorded, storage_of
from .torch_adapter import next_node, node_that_runs


@dataclass
class Spent:
    """What something asks for: floating-point operations, bytes read and written, bytes kept, kernels.

    Of the bytes read and written `fixed` are of weights, however large the batch is; of those kept `saved_fixed`.
    """

    flops: float = 0.0
    moved: float = 0.0
    saved: float = 0.0
    calls: int = 0
    fixed: float = 0.0
    saved_fixed: float = 0.0


class KernelKey(NamedTuple):
    """What tells kernels apart that are not counted together."""

    phase: str
    name: str
    kind: str
    number_format: str


@dataclass
class Tally:
    """Of kernels that are counted together, what they ask for; see `Kernel`."""

    flops: float = 0.0
    performed: float = 0.0
    moved: float = 0.0
    fixed: float = 0.0
    calls: int = 0
    inner_calls: int = 0

    def add(self, one: "Kernel | Tally", parts: int = 1) -> None:
        """Count one of so many parts of something."""
        self.flops += one.flops / parts
        self.performed += (one.performed or one.flops) / parts
        self.moved += one.moved / parts
        self.fixed += one.fixed / parts
        self.calls += one.calls
        self.inner_calls += one.inner_calls


@dataclass
class Trace:
    """What one forward pass did, by index of the unit."""

    recording: Recording
    order: list[int] = field(default_factory=list)
    # By unit, and the place of the call in the recording.
    spent: defaultdict[tuple[int, int], Spent] = field(default_factory=lambda: defaultdict(Spent))
    weights: set[int] = field(default_factory=set)  # storages of parameters and buffers
    casts: set[int] = field(default_factory=set)  # storages of weights in another type
    # By unit and call, as `spent`: what kernels on a GPU do. Those of the backward pass, if it was run: `passed_back`.
    kernels: defaultdict[tuple[int, int], defaultdict[KernelKey, Tally]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Tally))
    )
    passed_back: bool = False
    noise: set[int] = field(default_factory=set)  # storages of dropout's masks
    uncounted: set[str] = field(default_factory=set)  # operators of other libraries, whose FLOPs nobody knows
    # Numbers that autograd had given when units and calls ran: a node of the backward pass has its maker's.
    numbers: list[int] = field(default_factory=list)
    makers: list[tuple[int, int]] = field(default_factory=list)
    # What autograd keeps: unit, call, storage, bytes.
    saved: list[tuple[int, int, int, int]] = field(default_factory=list)
    # Of every storage that was made: bytes, and the places in `order` of its maker and of its last reader.
    lives: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def total(self, unit: int) -> Spent:
        """Of all calls in a unit."""
        mine = [spent for (where, _), spent in self.spent.items() if where == unit]
        flops, moved = sum(one.flops for one in mine), sum(one.moved for one in mine)
        saved, calls, fixed = (sum(getattr(one, name) for one in mine) for name in ("saved", "calls", "fixed"))
        return Spent(flops, moved, saved, calls, fixed, sum(one.saved_fixed for one in mine))

    @property
    def call(self) -> int:
        """Where the call that runs now will stand in the recording; -1 after the model's end."""
        return -1 if self.recording.complete else len(self.recording.calls)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs and bytes of every operation, and follows who reads what."""

    def __init__(self, trace: Trace, at: Sequence[int], ignored: Set[int], *, bytes_moved: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.at, self.ignored, self.bytes_moved = trace, at, ignored, bytes_moved
        self.alive: list[Tensor] = []  # a storage's key is its own only while it lives
        self.formats = Float32Formats.now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace, recording = self.trace, self.trace.recording
        before, recording.paused = recording.paused, True
        try:
            return self._counted(trace, func, args, kwargs)
        finally:
            recording.paused = before

    def _counted(self, trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        out = as_on_a_gpu(func, args, func(*args, **(kwargs or {})))
        flops = flops_of(func, args, kwargs or {}, out)
        if self.bytes_moved:
            self._follow(trace, func, args, kwargs, out, flops)
        if flops:
            trace.spent[self.at[-1], trace.call].flops += flops
        elif is_uncounted(func, flops):
            trace.uncounted.add(func.name())
        elif any(isinstance(one, Tensor) and one.is_nested for one in args):
            trace.uncounted.add("operators of nested tensors")
        return out

    def _follow(self, trace: Trace, func: Any, args: Any, kwargs: Any, out: Any, flops: float) -> None:
        spent = trace.spent[self.at[-1], trace.call]
        given = [one for one in leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        made = [one for one in leaves(out) if isinstance(one, Tensor)]
        given_keys = [storage_of(one) for one in given]
        made_keys = [storage_of(one) for one in made]
        keys = set(given_keys)
        step = max(0, len(trace.order) - 1)
        for key in keys:
            if key in trace.lives:
                nbytes, first, last = trace.lives[key]
                trace.lives[key] = (nbytes, first, max(last, step))
        fresh = [(one, key) for one, key in zip(made, made_keys, strict=True) if key not in keys]
        if func.overloadpacket is CAST and given_keys[0] in trace.weights:
            trace.casts.update(made_keys)
        for one, key in fresh:
            self.alive.append(one)
            if key not in self.ignored:
                trace.lives[key] = (_held_nbytes(one), step, step)
        in_place = bool(made) and func.overloadpacket.__name__.endswith("_")
        if fresh or in_place:  # a view moves nothing
            read = list(zip(given, given_keys, strict=True))
            if func.overloadpacket in LOOKUPS:  # rows, not the table that has them
                read = [*read[1:], *zip(made, made_keys, strict=True)]
            spent.moved += sum(one.numel() * one.element_size() for one in (*(one for one, _ in read), *made))
            spent.fixed += sum(one.numel() * one.element_size() for one, key in read if key in trace.weights)
            spent.calls += 1
            where = self.at[-1], trace.call
            trace.numbers.append(next_node())
            trace.makers.append(where)
            pairs = list(zip(given, given_keys, strict=True)), list(zip(made, made_keys, strict=True))
            for kernel in kernels_of(func, args, *pairs, flops, self.formats, trace.weights, trace.noise):
                trace.kernels[where][KernelKey("forward", kernel.name, kernel.kind, kernel.number_format)].add(kernel)


class _WatchBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators of a backward pass do, where the forward pass made the node that calls them."""

    def __init__(self, trace: Trace, trained: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.formats = trace, Float32Formats.now()
        self.behind, self.at = next_node(), max(0, len(trace.makers) - 1)
        self.shapes = {one.shape for one in trained}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = as_on_a_gpu(func, args, func(*args, **(kwargs or {})))
        given = [(one, storage_of(one)) for one in leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        made = [(one, storage_of(one)) for one in leaves(out) if isinstance(one, Tensor)]
        known = {key for _, key in given}
        in_place = bool(made) and func.overloadpacket.__name__.endswith("_")
        if not in_place and all(key in known for _, key in made):
            return out
        trace = self.trace
        flops = flops_of(func, args, kwargs or {}, out)
        if is_uncounted(func, flops):
            trace.uncounted.add(func.name())
        found = kernels_of(func, args, given, made, flops, self.formats, trace.weights, trace.noise, self.shapes)
        for one in found:
            key = KernelKey("backward", one.name, one.kind, one.number_format)
            trace.kernels[self._maker()][key].add(one)
        return out

    def _maker(self) -> tuple[int, int]:
        node, trace = node_that_runs(), self.trace
        if not trace.makers:
            return (0, -1)
        last = len(trace.makers) - 1
        # A node that is made now is of what runs again within another one, where `checkpoint` is reentrant.
        if node is None or node < self.behind:
            self.at = last if node is None else min(last, bisect_right(trace.numbers, node))
        return trace.makers[self.at]


CAST = torch.ops.aten._to_copy


def _pass_back(trace: Trace, model: nn.Module, loss: Tensor) -> None:
    """Run the backward pass of a loss on the meta device and count it; what cannot be run there stays unknown."""
    trained = [one for one in model.parameters() if one.requires_grad]
    before, trace.recording.paused = trace.recording.paused, True
    counted = {where: dict(kernels) for where, kernels in trace.kernels.items()}
    try:
        with as_local(), _WatchBack(trace, trained):
            _gradients(loss, trained)
        trace.passed_back = True
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # as many ways as there are models
        trace.kernels.clear()
        for where, kernels in counted.items():
            trace.kernels[where].update(kernels)
    finally:
        trace.recording.paused = before


def _gradients(loss: Tensor, trained: Sequence[Tensor]) -> None:
    """Run a backward pass and leave no gradient behind."""
    if not _has_reentrant_checkpoint(loss):
        torch.autograd.grad(loss, trained, allow_unused=True)
        return
    before = [one.grad for one in trained]  # torch refuses `grad` there
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for one, gradient in zip(trained, before, strict=True):
            one.grad = gradient


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    known, found = {loss.grad_fn}, [loss.grad_fn]
    while found:
        node = found.pop()
        if node is None:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        fresh = {one for one, _ in node.next_functions} - known
        known |= fresh
        found += fresh
    return False


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention as one operator that keeps its inputs and its output, as devices have it since 2023."""
    if min(query.dim(), key.dim(), value.dim()) != 4:
        attend = torch.ops.aten._scaled_dot_product_attention_math
        more = {"scale": scale, "enable_gqa": enable_gqa}
        plain: Tensor = attend(query, key, value, attn_mask, dropout_p, is_causal, None, **more)[0]
        return plain
    # A bias that is trained (T5's) has a gradient in devices' operators, and not in the CPU's; it is kept all the same.
    mask = None if attn_mask is None else attn_mask.detach()
    out: Tensor = FUSED(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return out


@contextmanager
def fused_on_meta(*, recurrent: bool = True) -> Iterator[None]:
    """Open a block in which attention on the meta device is one operator, and not the products that it stands for.

    Recurrent layers are one operator likewise, and not their single steps, if `recurrent` is True.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _fused, "AutogradMeta")
        if recurrent:
            replace_recurrent(library)
        yield


_OWN = tuple(str(Path(one).parent) + os.sep for one in (torch.__file__, __file__))


def _outside(file: str) -> bool:
    """Whether a file is neither torch's nor of this package."""
    return not file.startswith(_OWN)


def trace_of(model: nn.Module, units: list[Unit], batch: Any, run: Loss, *, recurrent: bool = True) -> Trace:
    """Return what a forward pass with its loss does.

    `run` gives the loss of model and batch. If `recurrent`, recurrent layers on the meta device are one operator each,
    and not their single steps.

    Raises:
        WorkloadError: it has no gradient, is no single number, or asks for a value on the meta device.
    """
    with fused_on_meta(recurrent=recurrent):  # a backward pass runs again what is checkpointed
        trace, result = _pass_ahead(model, units, batch, run)
        if not isinstance(result, Tensor) or not result.requires_grad:
            name, trained = type(model).__name__, any(one.requires_grad for one in model.parameters())
            if not trained:
                raise WorkloadError(f"capture: {name} has no parameter that is trained; there is nothing to plan")
            raise WorkloadError(f"capture: the loss of {name} has no gradient; give `loss`")
        if result.numel() != 1:
            rule = f"the loss of {type(model).__name__} has the shape {list(result.shape)}"
            raise WorkloadError(f"capture: {rule}, of which torch takes no gradient; give its mean or its sum")
        if result.is_meta:
            with autocast_behind():
                _pass_back(trace, model, result)
    return trace


def _pass_ahead(model: nn.Module, units: list[Unit], batch: Any, run: Loss) -> tuple[Trace, Any]:
    """Run the forward pass and count it."""
    at = [0]
    given = [one for one in tree_flatten(batch)[0] if isinstance(one, Tensor)]
    weights = {storage_of(one) for one in (*model.parameters(), *model.buffers())}
    ignored = weights | {storage_of(one) for one in given}
    with ExitStack() as stack:
        stack.enter_context(autocast_on_meta(model))
        recording = stack.enter_context(recorded(model, returned))
        trace = stack.enter_context(watching(recording, ignored, at))
        trace.weights = weights
        for index, unit in enumerate(units):

            def enter(*_: Any, index: int = index) -> None:
                trace.order.append(index)
                at[-1] = index

            stack.enter_context(hooked(unit.module.register_forward_pre_hook(enter)))
        try:
            result = run(model, batch)
            trace.order = trace.order or [0]  # of a model that calls none of its parts all is the first one's
            return trace, result
        except Exception as error:
            if not (refused := _refused(model, error)):
                raise
            raise refused from error


_ON_CPU = "capture on cpu"
# What torch says where the meta device lacks something, and what the program does there.
_SAYS_THAT_IT_NEEDS_A_VALUE = (
    "meta tensor",
    "convert meta device type tensor",
    "register_meta function for torch.nonzero",
)


def _refused(model: nn.Module, error: Exception) -> WorkloadError | None:
    """Return the refusal of a model that does what the meta device lacks; None if that is not what an error is of."""
    said, name = str(error), type(model).__name__
    place = next((one for one in reversed(extract_tb(error.__traceback__)) if _outside(one.filename)), None)
    where = f" ({place.filename}:{place.lineno})" if place else ""
    if "with Meta tensors" in said:  # "aten::nonesuch: attempted to run this operator with Meta tensors"
        rule = f"{name} calls {said.partition(': ')[0]}, which torch cannot run on the meta device"
        return WorkloadError(f"capture: {rule}; {_ON_CPU}")
    if "FlexAttention is only supported" in said:
        rule = f"{name} calls flex_attention{where}, which torch cannot run on the meta device, nor back on the CPU"
        return WorkloadError(f"capture: {rule}; have it call scaled_dot_product_attention, which keeps as much")
    if any(one in said for one in _SAYS_THAT_IT_NEEDS_A_VALUE):
        rule = f"{name} asks for the value of a tensor, and tensors on the meta device have none"
        remedy = f"give the inputs that it looks at on cpu, with their values, {_ON_CPU}, or have it not ask"
        return WorkloadError(f"capture: {rule}{where}; {remedy}")
    return None


@contextmanager
def _but_in_torch_func(hooks: torch.autograd.graph.saved_tensors_hooks) -> Iterator[None]:
    """Open a block with hooks that do not hold in calls of `torch.func.grad` and its kin: torch refuses them there."""
    original, depth = torch.autograd.graph.disable_saved_tensors_hooks, 0

    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        nonlocal depth
        if depth == 0:
            hooks.__exit__()
        depth += 1
        try:
            with original(error_message):
                yield
        finally:
            depth -= 1
            if depth == 0:
                hooks.__enter__()

    torch.autograd.graph.disable_saved_tensors_hooks = disabled
    try:
        with hooks:
            yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = original


@contextmanager
def watching(
    recording: Recording, ignored: Set[int], at: Sequence[int] = (0,), *, bytes_moved: bool = True
) -> Iterator[Trace]:
    """In the block what a model does is counted, for the unit whose index is the last of `at`.

    Args:
        recording: That grows while the model runs.
        ignored: Storages that are no activations: of parameters, buffers and the batch.
        at: The unit that runs.
        bytes_moved: Whether bytes that are read and written, kernels, and the lives of storages are counted, too.
    """
    trace = Trace(recording)
    seen: set[int] = set(ignored)
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        before, recording.paused = recording.paused, True
        try:
            key = storage_of(saved)
            if key not in seen:
                seen.add(key)
                packed.append(saved)
                nbytes = _held_nbytes(saved)
                trace.spent[at[-1], trace.call].saved += nbytes
                trace.spent[at[-1], trace.call].saved_fixed += nbytes if key in trace.casts else 0
                trace.saved.append((at[-1], trace.call, key, nbytes))
            return saved.detach()  # a function that keeps its own result would hold itself, and the whole graph
        finally:
            recording.paused = before

    watch = _Watch(trace, at, ignored, bytes_moved=bytes_moved)
    try:
        with _but_in_torch_func(torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)), watch:
            yield trace
    finally:
        # The graph holds `pack`, and what `pack` holds would hold the graph: nobody could free it, and parameters of
        # which a graph is alive cannot be divided.
        packed.clear()
        watch.alive.clear()


def _held_nbytes(tensor: Tensor) -> int:
    return sum(one.untyped_storage().nbytes() for one in strided_parts(tensor))
