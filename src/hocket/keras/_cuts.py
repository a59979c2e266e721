"""Where a functional model is cut into stages."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import torch

from hocket.parallel.mesh import Mesh, link_of
from hocket.planner import CUT_SLACK, balance

from ._graph import Graph

_SAMPLES = 8
_UNKNOWN_LENGTH = 16
_REPEATS = 3
_PASSES = 3  # forward, and backward, which does two products for each one of the forward pass


def begins(graph: Graph, mesh: Mesh, points: Sequence[str], micro_batches: int) -> list[int]:
    """Return the number of the first step of each stage; a collective operation.

    Steps that use the same weights stay together. Among the rest cuts are where the slowest stage takes the least time,
    by what rank 0 measures of the forward pass on a few zeros, as a micro-batch would be. Raises ValueError: there are
    not so many stages in the model, or `points` are no such layers. `points` are names of the layers that begin the
    second and later stages; none to choose by time.
    """
    stages, blocks = mesh["pipeline"].size, _together(graph)
    if len(blocks) < stages:
        raise ValueError(
            f"pipeline={stages} is more than the {len(blocks)} parts that {graph.model.name!r} can be cut into "
            f"({_paths(graph, blocks)}; layers that share weights stay in one stage): make it {len(blocks)} or less"
        )
    if points:
        return [0, *_at(graph, stages, points, blocks)]
    found: list[int] = []
    device = next((v.value.device for v in graph.model.variables), mesh.whole.device)
    link = link_of(mesh["pipeline"], mesh.whole, device)
    if mesh.whole.rank == 0:
        costs, nbytes = _measured(graph)
        edges = [*blocks, len(graph.steps)]
        times = [_PASSES * math.fsum(costs[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        holds = [
            any(v.trainable for step in graph.steps[a:b] for v in step.variables)
            for a, b in zip(edges[:-1], edges[1:], strict=True)
        ]
        crossing = [nbytes[b] for b in blocks]
        cuts = balance(times, stages, crossing, holds=holds, link=link, slack=CUT_SLACK, micro_batches=micro_batches)
        found = [0, *(blocks[cut] for cut in cuts)]
    return mesh.whole.from_root(found)


def _together(graph: Graph) -> list[int]:
    """Return numbers of the steps that may begin a stage: those that do not stand between two uses of one variable."""
    first: dict[int, int] = {}
    inside: set[int] = set()
    for number, step in enumerate(graph.steps):
        for variable in step.variables:
            begin = first.setdefault(id(variable), number)
            inside.update(range(begin + 1, number + 1))
    return [number for number in range(len(graph.steps)) if number not in inside]


def _at(graph: Graph, stages: int, points: Sequence[str], blocks: list[int]) -> list[int]:
    if len(points) != stages - 1:
        raise ValueError(
            f"split={list(points)} names {len(points)} layers that begin a stage, and pipeline={stages} needs "
            f"{stages - 1}: the first stage begins by itself"
        )
    found: list[int] = []
    for point in points:
        at = next((n for n, s in enumerate(graph.steps) if s.path == point or s.path.startswith(f"{point}/")), None)
        if at is None or at not in blocks or at <= (found[-1] if found else 0):
            raise ValueError(
                f"split={list(points)}: {point!r} cannot begin a stage there; name layers, in the order in which the "
                f"model uses them, out of: {_paths(graph, blocks[1:])}"
            )
        found.append(at)
    return found


def _paths(graph: Graph, blocks: Sequence[int]) -> str:
    return ", ".join(graph.steps[number].path for number in blocks)


def _measured(graph: Graph) -> tuple[list[float], list[int]]:
    """Return seconds of each step forward, or weights where zeros are no input, and bytes that cross before it."""
    costs = [math.inf] * len(graph.steps)
    sizes: dict[str, int] = {}

    def observe(number: int, seconds: float, made: list[Any]) -> None:
        costs[number] = min(costs[number], seconds)
        sizes.update(
            (name, t.numel() * t.element_size()) for name, t in zip(graph.steps[number].makes, made, strict=True)
        )

    try:
        for _ in range(_REPEATS):
            graph.try_out([_zeros(t) for t in graph.functional.inputs], False, observe)
    except Exception:  # a layer may take only inputs of its own kind: text, lengths that fit together
        costs = [1.0 + sum(v.value.numel() for v in step.variables) for step in graph.steps]
    last = graph.last_uses()
    crossing = [0] * len(graph.steps)
    for number, step in enumerate(graph.steps):
        for name in step.makes:
            for later in range(number + 1, min(last[name] + 1, len(graph.steps))):
                crossing[later] += sizes.get(name, 0)
    return costs, crossing


def _zeros(symbolic: Any) -> torch.Tensor:
    shape = [_SAMPLES, *(_UNKNOWN_LENGTH if size is None else size for size in symbolic.shape[1:])]
    zeros: torch.Tensor = keras.ops.zeros(shape, dtype=symbolic.dtype)
    return zeros
