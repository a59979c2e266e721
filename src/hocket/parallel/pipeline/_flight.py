"""One micro-batch in one stage: its forward, and its backward whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hocket.sharding import gathered

from ..batches import trees as _trees
from . import _values, torch_adapter
from ._stage import Stage

Tensor = torch.Tensor


class TakenGradient(NamedTuple):
    """The gradient of a tensor that a stage was given."""

    tensor: Tensor
    there: bool
    """Whether there is one. If not, as behind a `detach()`, the tensor has zeros: parameters behind it then have none
    either, as in one process, where optimizers leave them alone, while zeros would have their weights decay."""

    @property
    def value(self) -> Tensor | None:
        return self.tensor if self.there else None


class Flight:
    """A micro-batch between its forward and its backward in one stage; tensors in `taken` are leaves of autograd."""

    def __init__(self, stage: Stage, taken: Sequence[Any]) -> None:
        self._stage = stage = stage.now
        self._taken = dict(zip(stage.takes, taken, strict=True))
        self._made: dict[str, Any] = {}
        self._roots: list[Tensor] = []
        self._root_gradients: list[Tensor] = []
        self._passed: dict[str, list[Tensor | None]] = {}
        self._rest: Any = None
        self.loss: Tensor | None = None

    def forward(self, run: Callable[..., Any], inputs: Any, *, split_backward: bool) -> Any:
        """Run the stage: return the values of `stage.gives`, or the model's output.

        `run` is the stage's module, or what runs it with recomputation; with `split_backward` the backward comes in two
        halves.
        """
        stage = self._stage
        used = [self._taken[name] for name in stage.uses]
        output = _trees.mapped(run(*(inputs[i] for i in stage.inputs), *used), gathered)  # what crosses is whole
        if stage.last:
            given = {id(tensor) for tensor in self._leaves()}  # which a loss could not change in place
            return _trees.mapped(output, lambda tensor: _own(tensor) if id(tensor) in given else tensor)
        if (
            split_backward
        ):  # torch's detaches what it starts from in place, which leaves, views and saved tensors resent
            output = tuple(_values.filled(_values.described(o), map(_own, _values.tensors_of(o))) for o in output)
        self._made = dict(zip(stage.makes, output, strict=True))
        return [self._taken[name] if name in self._taken else self._made[name] for name in stage.gives]

    def expects(self) -> list[Tensor]:
        """Return those tensors of `stage.gives` that have a gradient, in order."""
        values = [self._taken[n] if n in self._taken else self._made[n] for n in self._stage.gives]
        return [tensor for tensor in _values.tensors_of(values) if tensor.requires_grad]

    def arrived(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of those tensors of `stage.gives` that have one, in order; None where nothing came."""
        source = iter(gradients)
        for name in self._stage.gives:
            passes = name in self._taken
            for tensor in _values.tensors_of(self._taken[name] if passes else self._made[name]):
                gradient = next(source) if tensor.requires_grad else None
                if passes:
                    self._passed.setdefault(name, []).append(gradient)
                elif gradient is not None:
                    self._roots.append(tensor)
                    self._root_gradients.append(gradient)

    def start_from_loss(self) -> None:
        """Make the loss what the backward starts from."""
        assert self.loss is not None
        self.start_from([self.loss], [torch.ones_like(self.loss)])

    def start_from(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Make tensors of the model's output what the backward starts from."""
        self._roots, self._root_gradients = roots, gradients

    def backward(self) -> list[TakenGradient]:
        """Accumulate the parameters' gradients; return those of the tensors of `stage.takes` that have one."""
        if self._roots:
            torch.autograd.backward(self._roots, self._root_gradients)
        return self._gradients_of_taken()

    def backward_of_inputs(self) -> list[TakenGradient]:
        """Do the first half of `backward`: all of what it returns, and as little as can be of what it accumulates."""
        wanted = [t for t in self._leaves() if t.requires_grad]
        if self._roots and wanted:
            _, self._rest = torch_adapter.backward_of_inputs(self._roots, self._root_gradients, wanted, self._trained())
            self._roots = []
        return self._gradients_of_taken()

    def backward_of_weights(self) -> None:
        """Do the second half of `backward`."""
        if self._rest is not None:
            torch_adapter.backward_of_weights(self._trained(), self._rest)
        elif self._roots:
            torch.autograd.backward(self._roots, self._root_gradients)
        self._rest, self._roots = None, []

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._stage.module.parameters() if parameter.requires_grad]

    def _leaves(self) -> list[Tensor]:
        return [tensor for name in self._stage.takes for tensor in _values.tensors_of(self._taken[name])]

    def _gradients_of_taken(self) -> list[TakenGradient]:
        """Return, for every tensor that takes part in the graph, what came back through this stage, and past it."""
        found = []
        for name in self._stage.takes:
            tensors = _values.tensors_of(self._taken[name])
            passed = self._passed.get(name) or [None] * len(tensors)
            for tensor, beside in zip(tensors, passed, strict=True):
                if tensor.requires_grad:
                    parts = [part for part in (tensor.grad, beside) if part is not None]
                    total = sum(parts[1:], parts[0]) if parts else torch.zeros_like(tensor)
                    found.append(TakenGradient(total, bool(parts)))
                    tensor.grad = None
        return found


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad else tensor


class KeptFlow:
    """Runs a stage; what it hands on takes gradients as it did first, though what makes it is frozen or thawed since.

    Later stages were told once what has a gradient. Of what is frozen, that ends here.
    """

    def __init__(self, stage: Stage, run: Callable[..., Any]) -> None:
        self._stage, self._run = stage, run
        self._trained = {name for name, p in stage.module.named_parameters() if p.requires_grad}
        self._flows: dict[Any, list[bool]] = {}  # by the shapes and types of what it hands on

    def __call__(self, *args: Any) -> Any:
        """Return what the stage makes."""
        output = self._run(*args)
        if not torch.is_grad_enabled():
            return output
        tensors = _values.tensors_of(output)
        place = self._stage.model.training, *((tensor.shape, tensor.dtype) for tensor in tensors)
        if place not in self._flows:
            frozen = any(not p.requires_grad for n, p in self._stage.module.named_parameters() if n in self._trained)
            self._flows[place] = [frozen and (t.is_floating_point() or t.is_complex()) for t in tensors]
        flows = self._flows[place] = [
            one or t.requires_grad for one, t in zip(self._flows[place], tensors, strict=True)
        ]
        if all(t.requires_grad for one, t in zip(flows, tensors, strict=True) if one):
            return output
        source = iter(flows)
        return _trees.mapped(output, lambda t: t.detach().requires_grad_() if next(source) > t.requires_grad else t)
