"""Tied weights: parameters that stages on several ranks hold, each a copy of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..mesh import World
from ._stage import Stage
from ._wire import StageWire


class Tied:
    """Sums the gradients of tied weights over the ranks that hold them.

    The first of a weight's ranks adds up the others' gradients in the order of ranks and sends the sum back, so all
    copies see the very same gradient, and stay equal under the same optimizer.
    """

    def __init__(self, stages: Iterable[Stage], world: World, wire: StageWire) -> None:
        self._rank = world.rank
        self._wire = wire
        self._mine: dict[str, torch.nn.Parameter] = {}
        self._before: dict[str, torch.Tensor | None] = {}
        for stage in stages:
            parameters = stage.parameters()
            self._mine.update({name: parameters[name] for name in stage.shared if name in parameters})
        everyone = world.from_all({name: tuple(p.shape) for name, p in self._mine.items() if p.requires_grad})
        self._holders: dict[str, list[int]] = {}
        for name in sorted({name for held in everyone for name in held}):
            holders = [rank for rank, held in enumerate(everyone) if name in held]
            if len(holders) > 1:
                self._holders[name] = holders

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that other ranks hold too."""
        return [self._mine[name] for name, holders in self._holders.items() if self._rank in holders]

    def make_equal(self) -> None:
        """Give every copy the values of the first holder's."""
        for name, (first, *others) in self._holders.items():
            if self._rank == first:
                for rank in others:
                    self._wire.send(rank, [self._mine[name]])
            elif self._rank in others:
                received = torch.empty_like(self._mine[name].detach(), memory_format=torch.contiguous_format)
                self._wire.wait(self._wire.receive(first, [received]))
                self._mine[name].data.copy_(received)
        self._wire.drain()

    def set_aside(self) -> None:
        """Put away what earlier steps have accumulated, which is summed over the holders already."""
        self._before = {name: self._mine[name].grad for name in self._holders if name in self._mine}
        for name in self._before:
            self._mine[name].grad = None

    def sum_gradients(self) -> None:
        """Add up the gradients of this step; all holders must call it, after their last backward."""
        for name, (first, *others) in self._holders.items():
            if self._rank != first and self._rank not in others:
                continue
            parameter = self._mine[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._rank == first:
                for rank in others:
                    part = torch.empty_like(parameter.grad, memory_format=torch.contiguous_format)
                    self._wire.wait(self._wire.receive(rank, [part]))
                    parameter.grad.add_(part)
                for rank in others:
                    self._wire.send(rank, [parameter.grad])
            else:
                self._wire.send(first, [parameter.grad])
                whole = torch.empty_like(parameter.grad, memory_format=torch.contiguous_format)
                self._wire.wait(self._wire.receive(first, [whole]))
                parameter.grad.copy_(whole)
        self._wire.drain()
        for name, before in self._before.items():
            if before is not None:
                now = self._mine[name].grad
                self._mine[name].grad = before if now is None else before.add_(now)
        self._before = {}
