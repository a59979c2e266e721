"""How long each step of a model takes on this device, forward and backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..batches import trees as _trees
from . import _values
from ._kept_tensors import tensors_unchanged, without_large_gradients
from ._replay import computed
from ._trace import Traced, trace

Tensor = torch.Tensor


@dataclass(frozen=True)
class Times:
    """Of the steps of a traced model."""

    names: tuple[str, ...]  # of the steps
    modules: tuple[str, ...]  # path of the module that each step is in or is
    forward_s: tuple[float, ...]  # seconds of each
    backward_s: tuple[float, ...]  # likewise

    @property
    def total_s(self) -> tuple[float, ...]:
        """Forward and backward of each step."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))


def measure(model: torch.nn.Module, sample: Any, *, repeats: int = 5) -> Times:
    """Time each step of a model on a sample: the best of some runs after one to warm up.

    The best and not the median, because what disturbs a measurement (other processes, a clock that falls) only ever
    adds, and a single step that seems slow would make a bad split. Parameters, buffers, gradients and random numbers
    are as before afterwards.

    Raises:
        SplitError: the model's forward cannot be traced.
    """
    return measured(trace(model, sample), repeats=repeats)


def measured(traced: Traced, *, repeats: int = 5) -> Times:
    """Do as `measure` does, with a model that has been traced already."""
    runs = []
    parameters = list(traced.model.parameters())
    with tensors_unchanged(traced.model), torch.enable_grad(), without_large_gradients(traced.model):
        for _ in range(repeats + 1):
            runs.append(_run(traced))
            for parameter in parameters:
                parameter.grad = None
    columns = list(zip(*runs[1:], strict=True))
    return Times(
        tuple(node.name for node in traced.steps),
        tuple(node.meta["path"] for node in traced.steps),
        tuple(min(f for f, _ in column) for column in columns),
        tuple(min(b for _, b in column) for column in columns),
    )


def _run(traced: Traced) -> list[tuple[float, float]]:
    """Return the seconds of each step, forward and backward, of one run."""
    clock = _clock(traced.model)
    return [_step(traced, node, clock) for node in traced.steps]


def _step(traced: Traced, node: fx.Node, clock: Callable[[], float]) -> tuple[float, float]:
    def given(source: fx.Node) -> Any:
        # a copy, as a step may change it in place, which leaves of the graph do not allow
        return _trees.mapped(source.meta["value"], lambda tensor: _grown(tensor, source))

    fresh = {source: given(source) for source in node.all_input_nodes}
    begin_s = clock()
    value = computed(node, traced.model, lambda source: fresh[source])
    middle_s = clock()
    roots = [t for t in _values.tensors_of(value) if t.requires_grad and t.grad_fn is not None]
    if roots:
        ones = [torch.ones_like(root) for root in roots]
        middle_2_s = clock()
        with contextlib.suppress(RuntimeError):  # it has no derivative, as random masks have none: nothing asks for it
            torch.autograd.backward(roots, ones)
        backward_s = clock() - middle_2_s
    else:
        backward_s = 0.0
    return middle_s - begin_s, backward_s


def _grown(tensor: Tensor, source: fx.Node) -> Tensor:
    """Return the tensor as it comes out of a step with a gradient; parameters as they are."""
    if source.op == "get_attr":
        return tensor
    if not tensor.requires_grad:
        return tensor.detach().clone()
    return tensor.detach().requires_grad_().clone()


def _clock(model: torch.nn.Module) -> Callable[[], float]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
