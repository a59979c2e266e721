"""The only module of this package that touches private names of `torch.distributed.pipelining`: the backward in halves.

Orders are `hocket.schedule.pipeline`'s, and are carried out by our own loop, because torch's wants every micro-batch of
every step to have the same shapes, and all that crosses a cut to be tensors of the model's making.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

Tensor = torch.Tensor


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[torch.nn.Parameter],
) -> tuple[list[Tensor | None], Any]:
    """Return the gradients of `inputs` only, and what `backward_of_weights` needs (Qi et al. 2023, Zero Bubble).

    A parameter that no input meets on its way to the outputs would be lost in torch's grouping; its gradient is
    accumulated here and now. So are all where torch's halves do not come apart.
    """
    from torch.distributed.pipelining._backward import stage_backward_input  # lazy: it loads torch's compiler

    edges = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    accumulators = {torch.autograd.graph.get_gradient_edge(parameter).node: parameter for parameter in parameters}
    if not _come_apart({edge.node for edge in edges}, accumulators.keys()):
        every = torch.autograd.grad(edges, [*inputs, *parameters], list(gradients), allow_unused=True)
        _accumulate([*inputs, *parameters], every)
        return list(every[: len(inputs)]), []
    found, groups = stage_backward_input(list(outputs), list(gradients), list(inputs), iter(parameters))
    grouped = {node for group in groups for node in group["params"]}
    lost = [parameter for node, parameter in accumulators.items() if node not in grouped]
    if lost:
        _accumulate(lost, torch.autograd.grad(edges, lost, list(gradients), retain_graph=True, allow_unused=True))
    return list(found), groups


def _come_apart(outputs: Set[Any], accumulators: Set[Any]) -> bool:
    """Return whether torch's halves are right: no parameter is used twice, and no output is made of another one."""
    reached, left, used = set(outputs), list(outputs), set()
    while left:
        for node, _ in left.pop().next_functions:
            if node in outputs or node in used:
                return False
            if node in accumulators:
                used.add(node)
            elif node is not None and node not in reached:
                reached.add(node)
                left.append(node)
    return True


def _accumulate(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient


def backward_of_weights(parameters: Sequence[torch.nn.Parameter], groups: Any) -> None:
    """Accumulate the gradients of `parameters` that `backward_of_inputs` has left over.

    torch stores what autograd hands out as it is; two parameters may then hold the same memory, or one an expanded
    number, and adding the next micro-batch's to it in place would be wrong.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    stage_backward_weight(iter(parameters), groups)
    seen = set()
    for parameter, old in zip(parameters, before, strict=True):
        new = parameter.grad
        if old is not None:
            parameter.grad = old if new is None else old.add_(new)
        elif new is not None:
            if new.data_ptr() in seen or 0 in new.stride():
                parameter.grad = new.clone()
            seen.add(new.data_ptr())
