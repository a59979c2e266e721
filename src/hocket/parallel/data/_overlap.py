"""Collectives of sharded blocks that go on while other blocks are computed, where a device has no streams.

On GPUs torch's FSDP2 has them on streams of their own; on CPUs it waits for each. What is here starts them and waits
when their result is needed. Between hosts that pays: 1.3 times as fast on two of them at 100 Mbit/s (a language model,
`benchmarks/2026-11-22-plans.md`). Inside one it does not: what moves the bytes is what computes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket.comm import host_identity, torch_adapter

from ..mesh import World

_AT_ONCE = 2  # reductions under way, whose gradients are still held whole


def on_several_hosts(world: World) -> bool:
    """Return whether some ranks of the world share no memory; a collective operation."""
    return len(set(world.from_all(host_identity()))) > 1


class _Allocating:
    """What FSDP2 asks of its collectives besides."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class OverlappedAllGather(_Allocating):
    """All-gathers that FSDP2 waits for when it needs the parameters."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Start one."""
        return torch_adapter.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


class OverlappedReduceScatter(_Allocating):
    """Reduce-scatters of one block's gradients, which are there after `finish`.

    FSDP2 makes what comes out the gradient of the sharded parameters at once, before it is there, and would add it to
    what an earlier pass left; here the passes are added up instead. `under_way` are the reductions of all blocks that
    have begun, the oldest first.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], under_way: deque[Any]) -> None:
        self._parameters = parameters
        self._under_way = under_way
        self._work: Any = None
        self._sums: dict[torch.nn.Parameter, Any] = {}  # of earlier passes

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Start one."""
        self.finish()
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._sums[parameter], parameter.grad = parameter.grad, None
        while len(self._under_way) >= _AT_ONCE:
            self._under_way.popleft().wait()
        self._work = torch_adapter.reduce_scatter_single(output_tensor, input_tensor, op, group=group, async_op=True)
        self._under_way.append(self._work)
        if op != dist.ReduceOp.AVG:
            self._work.wait()  # FSDP2 divides the sum by itself
        return self._work

    def finish(self) -> None:
        """Wait for the last pass, and add the earlier ones to it."""
        if self._work is not None:
            self._work.wait()
            if self._work in self._under_way:
                self._under_way.remove(self._work)
        for parameter, earlier in self._sums.items():
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad.to_local().add_(earlier.to_local())  # type: ignore[attr-defined]  # a DTensor
        self.forget()

    def forget(self) -> None:
        """Drop what earlier passes left."""
        self._work = None
        self._sums.clear()


class ForwardPrefetch:
    """Prefetches each block of a module while the one before it is computed, once it is known which that is.

    `groups` are modules that FSDP2 gathers together, all inside one.
    """

    def __init__(self, groups: Iterable[Sequence[Any]]) -> None:
        self._order: dict[int, Sequence[Any]] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._seen(number, group))
            for number, group in enumerate(groups)
            for module in group
        ]

    def _seen(self, number: int, group: Sequence[Any]) -> Callable[[Any, Any], None]:
        def hook(module: Any, inputs: Any) -> None:
            self._order.setdefault(number, group)

        return hook

    def settle(self) -> None:
        """Whoever was computed after another one is gathered ahead from now on."""
        if not self._hooks or not self._order:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        order = list(self._order.values())
        for group, following in zip(order[:-1], order[1:], strict=True):
            group[0].set_modules_to_forward_prefetch([following[0]])
