"""Makes stages of a traced model that is cut at given steps."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from hocket.sharding import gathered

from ..batches import trees as _trees
from ..partition.tensor import CutParameters, reading_cut_parameters
from . import _values
from ._replay import attribute, computed, given
from ._stage import Segment, Stage
from ._trace import SplitError, Traced


@dataclass(frozen=True)
class StageCut:
    """What crosses between two steps."""

    values: tuple[str, ...]  # names of the steps whose values are needed behind it, in order of their making
    nbytes: int  # of their tensors, for the sample


def cuts(traced: Traced) -> list[StageCut]:
    """Return what crosses before each step; index 0 is before the first and empty."""
    sizes = {node: _values.nbytes(node.meta["value"]) for node in traced.steps}
    return [StageCut(tuple(one.name for one in alive), sum(sizes[one] for one in alive)) for alive in _crossing(traced)]


def _crossing(traced: Traced) -> list[list[fx.Node]]:
    """Return the steps whose values are needed behind each step, and made before it."""
    place = {node: i for i, node in enumerate(traced.steps)}
    last_use = {}
    for node, i in place.items():
        uses = [place.get(user, len(place)) for user in node.users]  # the output is used behind everything
        last_use[node] = max(uses, default=i)
    found = []
    alive: list[fx.Node] = []
    for i, node in enumerate(traced.steps):
        alive = [other for other in alive if last_use[other] >= i]
        found.append(alive)
        alive = [*alive, node]
    return found


def holding(traced: Traced) -> list[bool]:
    """Return which steps use parameters that are trained."""
    return [any(one.requires_grad for one in weights(traced, node)) for node in traced.steps]


def weights(traced: Traced, node: fx.Node) -> list[torch.nn.Parameter]:
    """Return the parameters that a step uses."""
    if node.op == "call_module":
        return list(traced.model.get_submodule(str(node.target)).parameters())
    own = [source.meta["value"] for source in node.all_input_nodes if source.op == "get_attr"]
    return [value for value in own if isinstance(value, torch.nn.Parameter)]


def build(traced: Traced, begins: Sequence[int], seconds: Sequence[float] = ()) -> list[Stage]:
    """Build the stages of a model.

    Args:
        traced: the model.
        begins: number of the first step of each stage but the first one, rising.
        seconds: of each step; empty if unknown.

    Raises:
        SplitError: an object with tensors in it would cross.
    """
    names = canonical_names(traced.model)
    if kind := next(filter(None, (hiding(traced)[begin] for begin in begins)), ""):
        raise SplitError(
            f"cannot split {type(traced.model).__name__} into stages here: an object of type {kind} would cross a cut, "
            "and its tensors with it, which are not sent. Have the model make none (a cache of keys and values: "
            "model.config.use_cache = False), or split elsewhere with split= (names of modules that begin a stage)"
        )
    forms = [(traced, _Cutting(traced, begins))]
    if traced.other is not None:
        forms.append((traced.other, _Cutting(traced.other, _aligned(traced, begins, traced.other))))
    graphs = [{form.training: cutting.parts[s].graph for form, cutting in forms} for s in range(len(begins) + 1)]
    used = {id(one) for graph in graphs for one in _tensors(_Holder(traced.model, graph))}
    # What no step uses is the first stage's, so that checkpoints have it.
    unused = [name for key, name in names.items() if key not in used]
    modules = [_Holder(traced.model, one, () if s else unused) for s, one in enumerate(graphs)]
    held = [{names[id(p)] for p in module.parameters()} for module in modules]
    fixed = not any(loose(form)[begin] for form, cutting in forms for begin in cutting.bounds[1:-1])
    holders = Counter(name for mine in held for name in mine)

    def stage(s: int, form: Traced, cutting: _Cutting, other: Stage | None = None) -> Stage:
        part, between, bounds = cutting.parts[s], cutting.between, cutting.bounds
        layers = [str(n.target) for n in form.steps[bounds[s] : bounds[s + 1]] if n.op == "call_module"]
        return Stage(
            index=s,
            count=len(modules),
            module=modules[s],
            model=traced.model,
            inputs=part.inputs,
            takes=between[s].values,
            uses=part.uses,
            makes=part.makes,
            gives=between[s + 1].values,
            names=_names_in(modules[s], names),
            shared=tuple(sorted(name for name in held[s] if holders[name] > 1)),
            layers=tuple(layers),
            nbytes=between[s + 1].nbytes,
            segments=functools.partial(_segments, form, bounds[s], bounds[s + 1]),
            seconds=sum(seconds[bounds[s] : bounds[s + 1]]) if form is traced else 0.0,
            whole={layer: form.whole[layer] for layer in layers if layer in form.whole},
            fixed_shapes=fixed,
            training=form.training,
            other=other,
        )

    return [stage(s, *forms[0], other=stage(s, *forms[1]) if len(forms) > 1 else None) for s in range(len(modules))]


class _Cutting:
    """The parts of a model that is cut before some steps."""

    def __init__(self, traced: Traced, begins: Sequence[int]) -> None:
        self.bounds = [0, *begins, len(traced.steps)]
        crossing = cuts(traced)
        self.between = [*(crossing[b] for b in self.bounds[:-1]), StageCut((), 0)]
        self.parts = [
            _part(traced, self.bounds[s], self.bounds[s + 1], self.between[s].values, self.between[s + 1].values)
            for s in range(len(begins) + 1)
        ]


def changed(traced: Traced) -> dict[str, tuple[int, int]]:
    """Return the parameters and buffers that steps are seen to change, with the first and last step that use each."""
    names = canonical_names(traced.model)
    sources = {node.name: node for node in traced.graph.nodes if node.op == "get_attr"}
    uses: dict[str, list[int]] = {}
    for i, node in enumerate(traced.steps):
        for one in (*node.all_input_nodes, node):
            # What has changed a buffer is what later code has read from it.
            for source in {one.name, *one.meta.get("changes", ())} & sources.keys():
                uses.setdefault(source, []).append(i)
    found: dict[str, tuple[int, int]] = {}
    for source in sorted({source for node in traced.steps for source in node.meta["changes"] if source in sources}):
        name = names.get(id(attribute(traced.model, str(sources[source].target))))
        if name is not None:
            found[name] = min(uses[source]), max(uses[source])
    return found


def loose(traced: Traced) -> list[bool]:
    """Return whether the shape of something that crosses before each step depends on the numbers in tensors, or may."""
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        sources = node.args[:1] if node.meta.get("shaped_by_first") else node.all_input_nodes
        if node.meta.get("loose") or not found.isdisjoint(one for one in sources if isinstance(one, fx.Node)):
            found.add(node)
    return [not found.isdisjoint(alive) for alive in _crossing(traced)]


def hiding(traced: Traced) -> list[str]:
    """Return the type of an object that crosses before each step with tensors that would not be sent; "" for none."""
    found = {node: _values.hidden(node.meta["value"]) for node in traced.steps}
    return [next(filter(None, map(found.__getitem__, alive)), "") for alive in _crossing(traced)]


def _aligned(traced: Traced, begins: Sequence[int], other: Traced) -> list[int]:
    """Find where the other mode's steps begin the same stages: before the same call, or the next that it makes, too."""
    places = {mark: i for i, mark in enumerate(_marks(other))}
    marks = _marks(traced)
    found: list[int] = []
    for begin in begins:
        at = next((places[mark] for mark in marks[begin:] if mark in places), len(other.steps) - 1)
        found.append(max(at, found[-1] if found else 0))
    return found


def _marks(traced: Traced) -> list[tuple[str, str, int]]:
    """Return, of each step, what it calls in which module, and how many times that was called before."""
    seen: Counter[tuple[str, str]] = Counter()
    marks = []
    for node in traced.steps:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        call = str(node.meta["path"]), name
        marks.append((*call, seen[call]))
        seen[call] += 1
    return marks


def _segments(traced: Traced, begin: int, end: int) -> tuple[Segment, ...]:
    """Return the layers of a stage: runs of steps in one block, a child of a list of modules or of the model."""
    bounds = [begin]
    block = None
    for at in range(begin, end):
        now = _block(traced.model, str(traced.steps[at].meta["path"]))
        if now and now != block:
            if block is not None:
                bounds.append(at)
            block = now
    bounds.append(end)
    crossing = [[node.name for node in alive] for alive in (*_crossing(traced), [])]
    parts = [_part(traced, a, b, crossing[a], crossing[b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    return tuple(
        Segment(_Holder(traced.model, {True: one.graph, False: one.graph}), one.inputs, one.uses, one.makes)
        for one in parts
    )


def _block(model: torch.nn.Module, path: str) -> str:
    parts = path.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), torch.nn.ModuleList | torch.nn.Sequential):
            return ".".join(parts[: depth + 1])
    return parts[0]


def copied(value: Any) -> Any:
    """Return a copy that may be changed in place: a node of the graph."""
    tensors = [tensor.clone() for tensor in _values.tensors_of(value)]
    return _values.filled(_values.described(value), tensors)


class _StepRun(NamedTuple):
    """Some steps in a row; see Segment."""

    graph: fx.Graph
    inputs: tuple[int | str, ...]
    uses: tuple[str, ...]
    makes: tuple[str, ...]


def _part(traced: Traced, begin: int, end: int, takes: Sequence[str], gives: Sequence[str]) -> _StepRun:
    steps = traced.steps[begin:end]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    ends_model = end == len(traced.steps)
    needed = {source for node in ([*steps, output] if ends_model else steps) for source in node.all_input_nodes}
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
    for twin in twins.values():
        twin.meta.pop("value", None)  # see Traced.forget
    if ends_model:
        graph.output(fx.node.map_arg(output.args[0], lambda source: twins[source]))
    else:
        graph.output(tuple(twins[node] for node in steps if node.name in gives))
    return _StepRun(
        graph,
        tuple(node.meta["index"] for node in inputs),
        tuple(node.name for node in uses),
        () if ends_model else tuple(node.name for node in steps if node.name in gives),
    )


class _Holder(torch.nn.Module):
    """The user's submodules and Parameters under the model's own names, and the order in which to use them."""

    def __init__(self, model: torch.nn.Module, graphs: dict[bool, fx.Graph], besides: Iterable[str] = ()) -> None:
        super().__init__()
        self._graphs = graphs
        self._cut = False  # whether functions use parameters that ranks have parts of
        nodes = [node for graph in graphs.values() for node in graph.nodes]
        # In the order of use, which is every rank's: that of a set is not, and parameters are reduced in theirs.
        targets = dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr"))
        # A module before what is inside it.
        for target in (*sorted(targets, key=lambda one: one.count(".")), *besides):
            home: torch.nn.Module = self
            *parents, leaf = target.split(".")
            for name in parents:
                if name not in home._modules:
                    home.add_module(name, torch.nn.Module())
                home = home.get_submodule(name)
            owner = model.get_submodule(".".join(parents))._parameters
            if isinstance(owner, CutParameters) and leaf in owner.named:  # by functions, not by a layer
                self._cut = True
                home._parameters = owner.like(home._parameters)
            value = attribute(model, target)
            if isinstance(value, torch.nn.Module):
                home.add_module(leaf, value)
            elif isinstance(value, torch.nn.Parameter):
                home.register_parameter(leaf, value)
            else:
                home.register_buffer(leaf, value)
        left: set[fx.Node] = set()
        self._over: dict[fx.Node, list[fx.Node]] = {}  # values that are not needed behind a step
        for node in reversed(nodes):
            self._over[node] = [one for one in dict.fromkeys((node, *node.all_input_nodes)) if one not in left]
            left.update(self._over[node])
        self.training = model.training

    def said(self) -> list[Any]:
        """Return the steps as plain values: what is called, and with the values of which others."""
        return [
            (training, node.op, node.name, _said(node.target), [one.name for one in node.all_input_nodes])
            for training, graph in sorted(self._graphs.items())
            for node in graph.nodes
        ]

    def forward(self, *taken: Any) -> Any:
        """Take the steps."""
        if not self._cut:
            return self._taken(taken)
        with reading_cut_parameters():
            return _trees.mapped(self._taken(taken), gathered)

    def _taken(self, taken: Sequence[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        source = iter(taken)
        for node in self._graphs[self.training].nodes:
            if node.op == "output":
                return given(node.args[0], values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(source)
            elif node.op == "get_attr":
                values[node] = attribute(self, str(node.target))
            else:
                values[node] = computed(node, self, values.__getitem__)
            for one in self._over[node]:
                del values[one]
        raise AssertionError("a graph ends with its output")


def _said(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__qualname__", type(target).__qualname__))


def order_digest(stages: Sequence[Stage]) -> str:
    """Return what tells whether two processes have split a model into the same steps, in the same order.

    A forward that goes through a set does so in an order of each process's own, and values that cross a cut, which go
    by their order, would be others' than the next stage takes them for.
    """
    steps = [stage.module.said() for stage in stages if isinstance(stage.module, _Holder)]
    crossing = [(stage.takes, stage.gives, stage.inputs) for stage in stages]
    return hashlib.sha256(repr((steps, crossing)).encode()).hexdigest()


def _tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def canonical_names(model: torch.nn.Module) -> dict[int, str]:
    """Return the model's own name of each parameter and buffer by identity; the first where there are several."""
    names: dict[int, str] = {}
    values: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    for name, value in values:
        names.setdefault(id(value), name)
    return names


def _names_in(module: torch.nn.Module, names: dict[int, str]) -> dict[str, str]:
    values: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    return {name: names[id(value)] for name, value in values if id(value) in names}
