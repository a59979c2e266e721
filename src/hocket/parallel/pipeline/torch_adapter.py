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

    What outputs that are made of no input give to parameters would be lost in torch's grouping; it is accumulated here
    and now. So is everything where torch's halves do not come apart.
    """
    from torch.distributed.pipelining._backward import stage_backward_input  # lazy: it loads torch's compiler

    edges = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    accumulators = {torch.autograd.graph.get_gradient_edge(parameter).node: parameter for parameter in parameters}
    if not _come_apart({edge.node for edge in edges}, accumulators.keys()):
        every = torch.autograd.grad(edges, [*inputs, *parameters], list(gradients), allow_unused=True)
        _accumulate([*inputs, *parameters], every)
        return list(every[: len(inputs)]), []
    made = _made_of({torch.autograd.graph.get_gradient_edge(one).node for one in inputs}, [one.node for one in edges])
    apart = [i for i, edge in enumerate(edges) if edge.node not in made]
    if apart and parameters:
        own = [edges[i] for i in apart], parameters, [gradients[i] for i in apart]
        _accumulate(parameters, torch.autograd.grad(*own, retain_graph=True, allow_unused=True))
    met = [i for i, edge in enumerate(edges) if edge.node in made]
    if not met:
        return [None] * len(inputs), []
    roots, their = [outputs[i] for i in met], [gradients[i] for i in met]
    found, groups = stage_backward_input(roots, their, list(inputs), iter(parameters))
    return list(found), _merged(groups)


def _merged(groups: Sequence[Any]) -> list[dict[str, Any]]:
    """Merge groups that share a parameter: torch leaves it in two where its own merging comes too late."""
    # A group's parameters, and gradients by where inputs meet them; by each of its parameters and of these places.
    owners: dict[Any, tuple[set[Any], dict[Any, Any]]] = {}
    for group in groups:
        parameters, met = set(group["params"]), dict(zip(group["intermediates"], group.get("grads", ()), strict=False))
        for other_parameters, other_met in [owners[one] for one in (*parameters, *met) if one in owners]:
            parameters |= other_parameters
            met |= other_met
        owners.update(dict.fromkeys((*parameters, *met), (parameters, met)))
    found = []
    for parameters, met in {id(one): one for one in owners.values()}.values():
        known = {node: gradient for node, gradient in met.items() if gradient is not None}
        found.append({"params": parameters, "intermediates": list(known), "grads": list(known.values())})
    return found


def _made_of(inputs: Set[Any], outputs: Sequence[Any]) -> set[Any]:
    """Return the nodes of outputs' graphs that inputs take part in."""
    users: dict[Any, list[Any]] = {output: [] for output in outputs}
    left = list(users)
    while left:
        node = left.pop()
        for source, _ in node.next_functions:
            if source is not None:
                if source not in users:
                    users[source] = []
                    left.append(source)
                users[source].append(node)
    made, left = set[Any](), [one for one in inputs if one in users]
    while left:
        if (node := left.pop()) not in made:
            made.add(node)
            left += users[node]
    return made


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
    # Between two places where inputs meet one group's parameters may lie those of another, and what gives them theirs.
    shared = len(groups) > 1 and any(len(group["intermediates"]) > 1 for group in groups)
    stage_backward_weight(iter(parameters), groups, retain_graph=shared)
    seen = set()
    for parameter, old in zip(parameters, before, strict=True):
        new = parameter.grad
        if old is not None:
            parameter.grad = old if new is None else old.add_(new)
        elif new is not None:
            if new.data_ptr() in seen or 0 in new.stride():
                parameter.grad = new.clone()
            seen.add(new.data_ptr())
