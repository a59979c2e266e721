"""What a forward pass does, unit by unit: FLOPs, bytes, what autograd keeps, and who reads what."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from ._units import Loss, Unit, hooked
from ._workload import WorkloadError

__all__ = ["Trace", "trace_of"]


@dataclass
class Trace:
    """What one forward pass did, by index of the unit."""

    order: list[int] = field(default_factory=list)
    flops: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    moved: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    calls: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    saved: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    # Of every storage that was made: bytes, and the places in `order` of its maker and of its last reader.
    lives: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs and bytes of every operation, and follows who reads what."""

    def __init__(self, trace: Trace, at: list[int], ignored: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


def trace_of(model: nn.Module, units: list[Unit], batch: Any, run: Loss) -> Trace:
    trace, at = Trace(), [0]
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
            stack.enter_context(hooked(unit.module.register_forward_pre_hook(lambda *_, i=index: enter(i))))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved))
        stack.enter_context(_Watch(trace, at, ignored))
        result = run(model, batch)
    if not isinstance(result, Tensor) or not result.requires_grad:
        raise WorkloadError(f"capture: the loss of {type(model).__name__} has no gradient; give `loss`")
    return trace


def _key(one: Tensor) -> int:
    key: int = StorageWeakRef(one.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    return key
