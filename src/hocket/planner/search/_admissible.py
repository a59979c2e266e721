"""The plans that are worth a thought: every combination of degrees that the workers, the model and the batch admit."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.schedule.pipeline import NAMED_ORDERS
from hocket.workload import Workload

from .._findings import PlanError, PlanFinding
from ..axes import AXES, axis, inner
from ..network import Network
from ..plan import SHARDS, Plan, undivided
from ..step import refuse_relaxed

_MICRO = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_STAGES = (1, 2, 3, 4, 6, 8)


_DECIDED = {one.field for one in AXES} | {
    "stages_per_rank", "micro_batches", "accumulate", "shard", "shard_degree", "recompute", "recompute_part",
    "sequence_parallel",
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Degrees and micro-batches; what is sharded and computed again is left open."""

    degrees: tuple[int, ...]  # of each axis, in the order of the table
    stages: int  # of each rank of the pipeline
    parts: int  # micro-batches of each data-parallel group

    def degree(self, name: str) -> int:
        return self.degrees[AXES.index(axis(name))]

    @property
    def replicas(self) -> int:
        """How many ranks hold the same parameters."""
        return math.prod(n for one, n in zip(AXES, self.degrees, strict=True) if one.replicates)

    def plan(self, **more: Any) -> Plan:
        piped = self.degree("pipeline") > 1
        schedule = more.pop("pipeline_schedule", "interleaved" if self.stages > 1 else "1f1b")
        degrees: dict[str, Any] = {one.field: degree for one, degree in zip(AXES, self.degrees, strict=True)}
        return Plan(
            **degrees,
            stages_per_rank=self.stages,
            pipeline_schedule=schedule,
            micro_batches=self.parts if piped else 1,
            accumulate=1 if piped else self.parts,
            **more,
        )


@dataclass(frozen=True)
class Grid:
    """What may vary, and what the user has fixed."""

    workers: int  # how many
    batch: int  # samples of a global batch
    fixed: Mapping[str, Any]  # fields of `Plan` with the only value that they may have
    degrees: Mapping[str, tuple[int, ...]]  # of each axis but the data's, by name, those that may be
    shards: tuple[str, ...]  # stages of sharding, the least first
    recomputations: tuple[tuple[bool, str], ...]  # (recompute, recompute_part), the cheapest in time first
    sequence: tuple[bool, ...]  # whether the sequence is divided where tensors are
    local: int  # workers of a host

    @property
    def besides(self) -> dict[str, Any]:
        """What is fixed of that which neither a layout nor the search decides."""
        return {name: value for name, value in self.fixed.items() if name not in _DECIDED}

    def sharded(self, layout: Layout) -> Iterator[tuple[str, int]]:
        """Yield what may be sharded among a layout's replicas, and among how many of them: all (0), or a host's."""
        wanted = self.fixed.get("shard_degree", 0)
        if wanted and layout.replicas % wanted:
            return
        if layout.replicas == 1:
            yield self.shards[0], 0
            return
        inside = self.local // layout.degree("tensor")  # replicas that a host has
        apart = 1 < inside < layout.replicas and layout.replicas % inside == 0 and "shard_degree" not in self.fixed
        for shard in self.shards:
            yield shard, wanted
            if shard == "parameters" and apart:
                yield shard, inside


def grid_of(workload: Workload, network: Network, workers: int, batch: int, fixed: Mapping[str, Any]) -> Grid:
    """Return the choices there are.

    Axes say which degrees are worth a thought; a degree that is fixed is tried in any case. Raises PlanError: nothing
    can keep what is fixed; the finding names the rule.
    """
    known = {one.name for one in dataclasses.fields(Plan)}
    for name in fixed:
        if name not in known:
            raise PlanError("no such constraint:", [PlanFinding(name, "a plan has no such field", "see Plan's fields")])
    if workers > network.world:
        rule = f"{network.name} has places for {network.world} workers, and {workers} are wanted"
        raise PlanError("there are not so many:", [PlanFinding("workers", rule, "take a larger cluster, or fewer")])
    given = Plan(**fixed)  # raises for values of a wrong type or word
    refuse_relaxed(given)
    if unknown := undivided(given, workload):
        raise PlanError("no plan keeps this:", unknown)
    degrees: dict[str, tuple[int, ...]] = {}
    for one in inner():
        wanted = fixed.get(one.field)
        if wanted is None:
            found = [n for n in _divisors(workers) if n == 1 or one.considered(workload, network, n)]
        else:
            _must_divide(one.field, wanted, workers)
            found = [wanted]
        degrees[one.name] = tuple(found)
    _must_divide("data_parallel_degree", max(1, fixed.get("data_parallel_degree", 1)), workers)
    shards = (fixed["shard"],) if "shard" in fixed else ("parameters",) if fixed.get("shard_degree") else SHARDS
    among = Plan(**{**fixed, "shard": shards[-1]})
    if wrong := [one for one in among.findings() if one.field == "shard_degree"]:
        raise PlanError("no plan keeps this:", wrong)
    _must_divide("shard_degree", among.shard_degree or 1, workers)
    core = any(one.again for layer in workload.layers for one in layer.operations)
    recomputations: list[tuple[bool, str]] = [(False, "layers"), (True, "layers")]
    if core:
        recomputations.insert(1, (True, "attention"))
    if "recompute" in fixed:
        recomputations = [one for one in recomputations if one[0] == fixed["recompute"]]
    if "recompute_part" in fixed:
        recomputations = [one for one in recomputations if not one[0] or one[1] == fixed["recompute_part"]]
    apart = core  # layers of which shared operations are known; a captured layer is divided as a whole
    sequence = (fixed["sequence_parallel"],) if "sequence_parallel" in fixed else ((True,) if apart else (False,))
    return Grid(workers, batch, fixed, degrees, shards, tuple(recomputations), sequence, network.local)


def _must_divide(field: str, degree: int, workers: int) -> None:
    if workers % degree:
        near = [n for n in _divisors(workers) if n <= degree][-1]
        rule = f"{degree} does not divide {workers} workers"
        raise PlanError("no plan keeps this:", [PlanFinding(field, rule, f"use a divisor, as {near}")])


def layouts(grid: Grid, layers: int) -> Iterator[Layout]:
    """Yield all layouts of a grid, those with few parts first."""
    fixed = grid.fixed
    named = NAMED_ORDERS.get(fixed.get("pipeline_schedule", ""))
    rule = named is not None and named.rule
    for chosen in itertools.product(*grid.degrees.values()):
        known = dict(zip(grid.degrees, chosen, strict=True))
        each, pipeline = math.prod(chosen), known["pipeline"]
        if grid.workers % each or next(_combined(known), None):
            continue
        data = grid.workers // each
        if fixed.get("accumulate" if pipeline > 1 else "micro_batches", 1) > 1:
            continue  # the one is of pipelines, the other of what has none
        if data > grid.batch or fixed.get("data_parallel_degree", -1) not in (-1, data):
            continue
        degrees = tuple(known.get(one.name, data) for one in AXES)
        samples = math.ceil(grid.batch / data)
        for stages in _stages(fixed, pipeline, layers):
            for parts in _parts(fixed, pipeline, samples):
                if pipeline > 1 and (parts < pipeline or (stages > 1 and parts % pipeline and not rule)):
                    continue  # 1F1B wants a micro-batch for every stage, and an interleaved schedule whole rounds
                yield Layout(degrees, stages, parts)


def _combined(degrees: Mapping[str, int]) -> Iterator[PlanFinding]:
    """Yield the rules of axes that other axes break."""
    fields: dict[str, Any] = {one.field: degrees[one.name] for one in inner()}
    plan = Plan(**fields)
    for one in inner():
        if one.degree(plan) > 1:
            yield from one.rules(plan)


def _stages(fixed: Mapping[str, Any], pipeline: int, layers: int) -> Sequence[int]:
    if pipeline == 1:
        return (1,)
    if "stages_per_rank" in fixed:
        return (fixed["stages_per_rank"],)
    schedule = fixed.get("pipeline_schedule")
    if schedule in NAMED_ORDERS and (each := NAMED_ORDERS[schedule].stages):
        return (each,) if each * pipeline <= layers else ()
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
