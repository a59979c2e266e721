"""Makes stages of a traced model that is cut at given steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import _values
from ._stage import Segment, Stage
from ._trace import Traced, attribute


@dataclass(frozen=True)
class StageCut:
    """What crosses between two steps.

    Attributes:
        values: names of the steps whose values are needed behind it, in order of their making.
        nbytes: of their tensors, for the sample.
    """

    values: tuple[str, ...]
    nbytes: int


def cuts(traced: Traced) -> list[StageCut]:
    """What crosses before each step; index 0 is before the first and empty."""
    place = {node: i for i, node in enumerate(traced.steps)}
    last_use = {}
    for node, i in place.items():
        uses = [place.get(user, len(place)) for user in node.users]  # the output is used behind everything
        last_use[node] = max(uses, default=i)
    found = []
    alive: list[fx.Node] = []
    for i, node in enumerate(traced.steps):
        alive = [other for other in alive if last_use[other] >= i]
        found.append(StageCut(tuple(o.name for o in alive), sum(_values.nbytes(o.meta["value"]) for o in alive)))
        alive.append(node)
    return found


def holding(traced: Traced) -> list[bool]:
    """Which steps use parameters that are trained."""
    return [any(one.requires_grad for one in weights(traced, node)) for node in traced.steps]


def weights(traced: Traced, node: fx.Node) -> list[torch.nn.Parameter]:
    """The parameters that a step uses."""
    if node.op == "call_module":
        return list(traced.model.get_submodule(str(node.target)).parameters())
    own = [source.meta["value"] for source in node.all_input_nodes if source.op == "get_attr"]
    return [value for value in own if isinstance(value, torch.nn.Parameter)]


def build(traced: Traced, begins: Sequence[int]) -> list[Stage]:
    """The stages of a model.

    Args:
        traced: the model.
        begins: number of the first step of each stage but the first one, rising.
    """
    bounds = [0, *begins, len(traced.steps)]
    between = [*(cuts(traced)[b] for b in bounds[:-1]), StageCut((), 0)]
    names = canonical_names(traced.model)
    parts = [
        _part(traced, bounds[s], bounds[s + 1], between[s].values, between[s + 1].values)
        for s in range(len(bounds) - 1)
    ]
    holders: dict[str, int] = {}
    for part in parts:
        for name in {names[id(p)] for p in part.module.parameters()}:
            holders[name] = holders.get(name, 0) + 1
    return [
        Stage(
            index=s,
            count=len(parts),
            module=part.module,
            model=traced.model,
            inputs=part.inputs,
            takes=between[s].values,
            uses=part.uses,
            makes=part.makes,
            gives=between[s + 1].values,
            names=_names_in(part.module, names),
            shared=tuple(sorted(n for n in {names[id(p)] for p in part.module.parameters()} if holders[n] > 1)),
            layers=tuple(str(n.target) for n in traced.steps[bounds[s] : bounds[s + 1]] if n.op == "call_module"),
            nbytes=between[s + 1].nbytes,
            segments=_segments(traced, bounds[s], bounds[s + 1]),
        )
        for s, part in enumerate(parts)
    ]


def _segments(traced: Traced, begin: int, end: int) -> tuple[Segment, ...]:
    """The layers of a stage: runs of steps in one block, that is a child of a list of modules or of the model."""
    between = cuts(traced)
    bounds = [begin]
    block = None
    for at in range(begin, end):
        now = _block(traced.model, str(traced.steps[at].meta["path"]))
        if now and now != block:
            if block is not None:
                bounds.append(at)
            block = now
    bounds.append(end)
    last = (*between, StageCut((), 0))
    return tuple(
        _part(traced, a, b, last[a].values, last[b].values) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    )


def _block(model: torch.nn.Module, path: str) -> str:
    parts = path.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), torch.nn.ModuleList | torch.nn.Sequential):
            return ".".join(parts[: depth + 1])
    return parts[0]


def copied(value: Any) -> Any:
    """A node of the graph: a copy that may be changed in place."""
    tensors = [tensor.clone() for tensor in _values.tensors_of(value)]
    return _values.filled(_values.described(value), tensors)


def _part(traced: Traced, begin: int, end: int, takes: Sequence[str], gives: Sequence[str]) -> Segment:
    steps = traced.steps[begin:end]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    ends_model = end == len(traced.steps)
    needed = set(_sources([*steps, output] if ends_model else steps))
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in traced.inputs if node in needed]
    taken = set(takes)
    uses = [node for node in traced.steps[:begin] if node in needed and node.name in taken]
    for node in [*inputs, *uses]:
        twins[node] = graph.placeholder(node.name)
    changed = {name for node in steps for name in node.meta["changes"]}
    for node in [*inputs, *uses]:
        if node.name in changed:  # what arrives is a leaf of the graph, and is kept for recomputation
            twins[node] = graph.call_function(copied, (twins[node],))
    for node in traced.graph.nodes:
        if node.op == "get_attr" and node in needed:
            twins[node] = graph.node_copy(node)
    for node in steps:
        twins[node] = graph.node_copy(node, lambda source: twins[source])
    if ends_model:
        graph.output(fx.node.map_arg(output.args[0], lambda source: twins[source]))
    else:
        graph.output(tuple(twins[node] for node in steps if node.name in gives))
    return Segment(
        _Holder(traced.model, graph),
        tuple(node.meta["index"] for node in inputs),
        tuple(node.name for node in uses),
        () if ends_model else tuple(node.name for node in steps if node.name in gives),
    )


def _sources(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    for node in nodes:
        yield from node.all_input_nodes


class _Holder(fx.GraphModule):  # type: ignore[misc, unused-ignore]
    """The user's submodules and Parameters under the model's own names, and the order in which to use them."""

    def __init__(self, model: torch.nn.Module, graph: fx.Graph) -> None:
        targets = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
        super().__init__({target: attribute(model, target) for target in targets}, graph, "Stage")
        own = set(dict(model.named_buffers(remove_duplicate=False)))
        for name in [n for n, _ in self.named_buffers() if n not in own]:  # torch.fx's constants are no state
            home, _, leaf = name.rpartition(".")
            self.get_submodule(home)._non_persistent_buffers_set.add(leaf)
        self.training = model.training


def canonical_names(model: torch.nn.Module) -> dict[int, str]:
    """The model's own name of each parameter and buffer by identity; the first where there are several."""
    names: dict[int, str] = {}
    values: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    for name, value in values:
        names.setdefault(id(value), name)
    return names


def _names_in(module: torch.nn.Module, names: dict[int, str]) -> dict[str, str]:
    values: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    return {name: names[id(value)] for name, value in values if id(value) in names}
