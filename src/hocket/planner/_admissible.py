"""The plans that are worth a thought: every combination of degrees that the workers, the model and the batch admit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.workload import Workload

from ._findings import UNPREDICTED, PlanError, PlanFinding
from ._network import Network
from ._plan import Plan

__all__ = ["Grid", "Layout", "grid_of", "layouts", "undivided"]

_SHARDS = ("none", "optimizer", "gradients", "parameters")
_MICRO = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_STAGES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees and micro-batches; what is sharded and computed again is left open.

    Attributes:
        tensor: Degree.
        pipeline: Degree.
        data: Degree.
        stages: Of each rank of the pipeline.
        parts: Micro-batches of each data-parallel group.
    """

    tensor: int
    pipeline: int
    data: int
    stages: int
    parts: int

    def plan(self, **more: Any) -> Plan:
        """As a plan."""
        piped = self.pipeline > 1
        return Plan(
            data_parallel_degree=self.data,
            tensor_parallel_degree=self.tensor,
            pipeline_parallel_degree=self.pipeline,
            stages_per_rank=self.stages,
            pipeline_schedule=("interleaved" if self.stages > 1 else more.pop("pipeline_schedule", "1f1b")),
            micro_batches=self.parts if piped else 1,
            accumulate=1 if piped else self.parts,
            **more,
        )


@dataclass(frozen=True)
class Grid:
    """What may vary, and what the user has fixed.

    Attributes:
        workers: How many.
        batch: Samples of a global batch.
        fixed: Fields of `Plan` with the only value that they may have.
        tensor: Degrees.
        pipeline: Degrees.
        shards: Stages of sharding, the least first.
        recomputations: (recompute, recompute_part), the cheapest in time first.
        sequence: Whether the sequence is divided where tensors are.
    """

    workers: int
    batch: int
    fixed: Mapping[str, Any]
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...]
    shards: tuple[str, ...]
    recomputations: tuple[tuple[bool, str], ...]
    sequence: tuple[bool, ...]


def grid_of(workload: Workload, network: Network, workers: int, batch: int, fixed: Mapping[str, Any]) -> Grid:
    """The choices there are.

    Tensors are divided within a host only, unless a degree is fixed, or there is one worker on each host anyway.

    Raises:
        PlanError: nothing can keep what is fixed; the finding names the rule.
    """
    known = {one.name for one in dataclasses.fields(Plan)}
    for name in fixed:
        if name not in known:
            raise PlanError("no such constraint:", [PlanFinding(name, "a plan has no such field", "see Plan's fields")])
    if workers > network.world:
        rule = f"{network.name} has places for {network.world} workers, and {workers} are wanted"
        raise PlanError("there are not so many:", [PlanFinding("workers", rule, "take a larger cluster, or fewer")])
    given = Plan(**fixed)  # raises for values of a wrong type or word
    if given.spatial_parallel_degree > 1:
        raise PlanError("no plan keeps this:", [UNPREDICTED])
    if given.synchronisation != "every_step":
        rule = (
            "plans are compared by the time of a step, and workers that do not agree at every step learn less from one"
        )
        remedy = "leave it out here; measure the time to a target instead"
        raise PlanError("no prediction for this:", [PlanFinding("synchronisation", rule, remedy)])
    tensor = [t for t in _divisors(workers) if t == 1 or (_near(network, t) and _divide(workload, t))]
    pipeline = [p for p in _divisors(workers) if p <= len(workload.layers)]
    if unknown := undivided(given, workload):
        raise PlanError("no plan keeps this:", unknown)
    if (wanted := fixed.get("tensor_parallel_degree")) is not None:
        tensor = [t for t in (wanted,) if workers % t == 0]
    if (wanted := fixed.get("pipeline_parallel_degree")) is not None:
        if wanted > len(workload.layers):
            rule = f"{wanted} stages need as many layers, and {workload.name} has {len(workload.layers)}"
            remedy = f"use {len(workload.layers)} or fewer"
            raise PlanError("no plan keeps this:", [PlanFinding("pipeline_parallel_degree", rule, remedy)])
        pipeline = [p for p in (wanted,) if workers % p == 0]
    for name, found in (("tensor_parallel_degree", tensor), ("pipeline_parallel_degree", pipeline)):
        if not found:
            rule = f"{fixed[name]} does not divide {workers} workers"
            near = [one for one in _divisors(workers) if one <= fixed[name]][-1]
            raise PlanError("no plan keeps this:", [PlanFinding(name, rule, f"use a divisor, as {near}")])
    shards = (fixed["shard"],) if "shard" in fixed else _SHARDS
    core = any(one.part == "core" for layer in workload.layers for one in layer.operations)
    recomputations: list[tuple[bool, str]] = [(False, "layers"), (True, "layers")]
    if core:
        recomputations.insert(1, (True, "attention"))
    if "recompute" in fixed:
        recomputations = [one for one in recomputations if one[0] == fixed["recompute"]]
    if "recompute_part" in fixed:
        recomputations = [one for one in recomputations if not one[0] or one[1] == fixed["recompute_part"]]
    apart = core  # layers of which shared operations are known; a captured layer is divided as a whole
    sequence = (fixed["sequence_parallel"],) if "sequence_parallel" in fixed else ((True,) if apart else (False,))
    return Grid(workers, batch, fixed, tuple(tensor), tuple(pipeline), shards, tuple(recomputations), sequence)


def undivided(plan: Plan, workload: Workload) -> list[PlanFinding]:
    """What the plan divides that the workload's layers do not say how to divide."""
    tensor = plan.tensor_parallel_degree
    if tensor > 1 and not _divide(workload, tensor):
        rule = f"no layer of {workload.name} can be divided among {tensor} workers"
        return [PlanFinding("tensor_parallel_degree", rule, _remedy(workload))]
    known = any(share.sequence for layer in workload.layers for share in layer.shares if share.degree == tensor)
    if plan.sequence_parallel and workload.degrees and not known:
        rule = f"nothing between the divided layers of {workload.name} can work on parts of the sequence"
        return [PlanFinding("sequence_parallel", rule, "leave it out")]
    return []


def _near(network: Network, tensor: int) -> bool:
    return tensor <= network.local or network.local == 1


def _divide(workload: Workload, tensor: int) -> bool:
    """Whether some layer is divided among so many; the others are done by all of them."""
    return any(layer.share(tensor).degree == tensor for layer in workload.layers)


def _remedy(workload: Workload) -> str:
    """What to write for a tensor degree that divides no layer."""
    if workload.degrees:
        known = ", ".join(map(str, workload.degrees))
        return f"use one of {known}, or tell capture(..., degrees=) of others"
    most = max((layer.tensor_limit for layer in workload.layers), default=1)
    return f"use a divisor of {most}" if most > 1 else "none of them is known to be divided by any number; use 1"


def layouts(grid: Grid, layers: int) -> Iterator[Layout]:
    """All layouts of a grid, those with few parts first."""
    fixed = grid.fixed
    for tensor in grid.tensor:
        for pipeline in grid.pipeline:
            if grid.workers % (tensor * pipeline):
                continue
            data = grid.workers // (tensor * pipeline)
            if data > grid.batch or fixed.get("data_parallel_degree", -1) not in (-1, data):
                continue
            each = math.ceil(grid.batch / data)
            for stages in _stages(fixed, pipeline, layers):
                for parts in _parts(fixed, pipeline, each):
                    if pipeline > 1 and (parts < pipeline or (stages > 1 and parts % pipeline)):
                        continue  # 1F1B wants a micro-batch for every stage, and an interleaved schedule whole rounds
                    yield Layout(tensor, pipeline, data, stages, parts)


def _stages(fixed: Mapping[str, Any], pipeline: int, layers: int) -> Sequence[int]:
    if pipeline == 1:
        return (1,)
    if "stages_per_rank" in fixed:
        return (fixed["stages_per_rank"],)
    schedule = fixed.get("pipeline_schedule")
    if schedule not in (None, "interleaved"):
        return (1,)
    return [one for one in _STAGES if one * pipeline <= layers and (schedule is None or one > 1)]


def _parts(fixed: Mapping[str, Any], pipeline: int, each: int) -> Sequence[int]:
    name = "micro_batches" if pipeline > 1 else "accumulate"
    if name in fixed:
        return (fixed[name],) if fixed[name] <= each else ()
    found = {math.ceil(each / micro) for micro in _MICRO if micro <= each} | {1}
    return sorted(one for one in found if one <= each)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
