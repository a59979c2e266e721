"""The search: all admissible plans under a memory limit, pruned with bounds, ranked by their predicted step."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hocket.cluster import Cluster
from hocket.schedule.pipeline import NAMED_ORDERS
from hocket.units import format_bytes
from hocket.workload import Workload

from .._findings import PlanError, PlanFinding
from ..axes import replicas
from ..network import CUT_SLACK, Constants, Network, network_of
from ..plan import Plan
from ..step import (
    Memory,
    Prediction,
    Profile,
    advised_cut,
    cuts_of,
    in_precision,
    least_longer,
    memory_of,
    predict_within,
    ties_across,
)
from ._admissible import Grid, Layout, grid_of, layouts
from ._preference import NEAR, preferred

# Of the memory: what a plan may need that is preferred for being simple.
_ROOMY = 0.9
_PRECISIONS = ("bfloat16", "float8")  # of a workload, that a plan has a word for
_BUCKETS = tuple(round(2**20 * size) for size in (1, 2, 4, 8, 16, 25, 50, 100, 200))


@dataclass(frozen=True)
class Search:
    """What was found.

    Attributes:
        ranked: The best plans that fit, the fastest first; one for every combination of degrees and sharding, and the
            winner.
        too_large: The fastest plans that would be among them and do not fit, the fastest first.
        considered: How many plans were thought of.
        timed: How many step times were predicted in full, with the sizes of buckets that were tried for the best; what
            was not timed could not be among these.
        memory_limit: Of a worker; 0 for none.
        given_split: What the plan had to name as the begins of stages; () if stages are cut by the search.
        choice: The winner's place among the ranked: the fastest, or a simpler one that is predicted to be as fast.
    """

    ranked: tuple[Prediction, ...]
    too_large: tuple[Prediction, ...]
    considered: int
    timed: int
    memory_limit: int
    choice: int = 0
    given_split: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction:
        """The winner."""
        return self.ranked[self.choice]

    @property
    def others(self) -> tuple[Prediction, ...]:
        """The ranked ones without the winner."""
        return self.ranked[: self.choice] + self.ranked[self.choice + 1 :]


def admissible_plans(
    workload: Workload, cluster: Cluster | Network, *, workers: int, batch: int, fixed: Mapping[str, Any] | None = None
) -> list[Plan]:
    """Every plan that the search considers, for measuring them all where that can be done.

    Args:
        workload: What is trained.
        cluster: Where.
        workers: How many.
        batch: Samples of a global batch.
        fixed: As for `search`.

    Raises:
        PlanError: no plan keeps the constraints.
    """
    grid = grid_of(workload, network_of(cluster).first(workers), workers, batch, fixed or {})
    found = []
    for layout in layouts(grid, len(workload.layers)):
        for (shard, among), (again, part) in itertools.product(grid.sharded(layout), grid.recomputations):
            plan = layout.plan(
                shard=shard,
                shard_degree=among,
                recompute=again,
                recompute_part=part,
                sequence_parallel=layout.degree("tensor") > 1 and grid.sequence[-1],
                **grid.besides,
            )
            # Without the times of layers any of them may begin a stage.
            anywhere = range(1, len(workload.layers)) if layout.degree("pipeline") > 1 else ()
            if not plan.findings(workers, batch=batch) and not ties_across(plan, workload, anywhere):
                found.append(plan)
    return found


def search(
    workload: Workload,
    cluster: Cluster | Network,
    *,
    workers: int,
    batch: int,
    constants: Constants | None = None,
    memory_limit: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 8,
) -> Search:
    """Find the fastest plans.

    Args:
        workload: What is trained.
        cluster: Where.
        workers: How many.
        batch: Samples of a global batch.
        constants: What is reached of nominal rates.
        memory_limit: Bytes of each worker; the cluster's own if not given, 0 for none.
        fixed: Fields of the plan that are given, as {"tensor_parallel_degree": 2}.
        keep: How many to rank.

    Raises:
        PlanError: no plan keeps the constraints, or none fits; the findings name the rule, or what is missing.
    """
    network = network_of(cluster)
    constants = constants or Constants.of(network.reached)
    grid = grid_of(workload, network.first(workers), workers, batch, fixed or {})
    limit = network.memory_nbytes if memory_limit is None else memory_limit
    if not limit and memory_limit is None:
        rule = f"{network.name} does not say how much memory a worker has, so nothing says what fits"
        give = "server.device_memory=80GiB, or server.memory of hosts"
        remedy = f"give it (--memory 80GiB), or to the cluster's servers ({give}); 0 is no limit"
        raise PlanError("no plan was found:", [PlanFinding("memory", rule, remedy)])
    network = network.first(workers)
    precision = {"precision": fixed["precision"]} if fixed and "precision" in fixed else {}
    workload = in_precision(Plan(**precision), workload)
    state = sum(one.parameter_bytes + one.gradient_bytes + one.optimizer_bytes for one in workload.layers)
    if limit and state > limit * workers:  # the hunt would try all that there is
        rule = (
            f"parameters, gradients and the optimizer's state are {format_bytes(state, 3)}, "
            f"{format_bytes(state / workers, 3)} on each of {workers} workers if nothing is held twice, "
            f"and there are {format_bytes(limit, 3)}"
        )
        remedy = (
            f"use more than {math.ceil(state / limit) - 1} workers, "
            f"or devices with more than {format_bytes(state / workers, 3)}"
        )
        raise PlanError("no plan was found:", [PlanFinding("memory", rule, remedy)])
    hunt = _Hunt(workload, network, constants, grid, limit, keep)
    # Layouts by their lower bound: the first ones are good, and the bound of one that cannot be ranked ends the hunt.
    bounds = sorted(((hunt.bound(one), index, one) for index, one in enumerate(layouts(grid, len(workload.layers)))))
    for bound, _, layout in bounds:
        if bound >= hunt.worst_kept and bound > hunt.fastest * (1 + NEAR):
            break
        hunt.visit(layout)
    if not hunt.found:
        raise PlanError("no plan was found:", [hunt.why_none(bool(bounds))])
    ranked = sorted(hunt.found.values(), key=lambda one: (one.step_s, one.memory.total))[:keep]
    ranked = [hunt.with_best_buckets(one) for one in ranked]
    winner = hunt.preferred(ranked)
    ranked = sorted([*ranked, *([] if winner in ranked else [winner])], key=lambda one: (one.step_s, one.memory.total))
    large = sorted(hunt.large.values(), key=lambda one: one.step_s)
    large = [one for one in large if one.step_s < ranked[0].step_s][:3]
    return Search(
        tuple(ranked),
        tuple(large),
        hunt.considered,
        hunt.timed,
        limit,
        ranked.index(winner),
        tuple((fixed or {}).get("split", ())),
    )


class _Hunt:
    """The state of one search."""

    def __init__(
        self, workload: Workload, network: Network, constants: Constants, grid: Grid, limit: int, keep: int
    ) -> None:
        self.workload, self.network, self.constants = workload, network, constants
        self.grid, self.limit, self.keep = grid, limit, keep
        self.profile = Profile(workload, network, constants)
        self.least_longer = least_longer(constants, grid.workers)
        self.found: dict[tuple[Any, ...], Prediction] = {}
        self.large: dict[tuple[Any, ...], Prediction] = {}
        self.misfits: set[tuple[Any, ...]] = set()  # the large ones and those that are slower than what fits
        self.close: list[Prediction] = []  # that fit, and were near the fastest when they were found
        self.fastest = float("inf")
        self.least: tuple[Memory, Plan] | None = None
        self.refused: PlanFinding | None = None  # what stands in the way of a plan that keeps all other rules
        self.considered = self.timed = 0

    @property
    def worst_kept(self) -> float:
        """The step that a plan must beat to be ranked."""
        if len(self.found) < self.keep:
            return float("inf")
        return heapq.nsmallest(self.keep, (one.step_s for one in self.found.values()))[-1]

    def micro(self, layout: Layout) -> int:
        """Return samples of a micro-batch."""
        return -(-self.grid.batch // (layout.degree("data") * layout.parts))

    def bound(self, layout: Layout) -> float:
        """Return the least of a step: computation and tensor exchange, evenly over the pipeline, and its bubble."""
        plan = layout.plan(sequence_parallel=layout.degree("tensor") > 1 and self.grid.sequence[-1])
        stages = layout.degree("pipeline")
        each = float(self.profile.times(plan, self.micro(layout)).total.sum()) / stages
        named = NAMED_ORDERS.get(self.grid.fixed.get("pipeline_schedule", plan.pipeline_schedule))
        bubble = 0.0 if named is None else (stages - 1) / named.divisor(layout.stages)
        return self.least_longer * each * (layout.parts + bubble)

    def visit(self, layout: Layout) -> None:
        """Try what is left open, the cheapest first: what costs more time is tried only if that does not fit."""
        for sequence in self.grid.sequence if layout.degree("tensor") > 1 else (False,):
            for recompute, part in self.grid.recomputations:
                if self._shards(layout, sequence, recompute, part):
                    break

    def _shards(self, layout: Layout, sequence: bool, recompute: bool, part: str) -> bool:
        """Whether all stages of sharding fit: computing more again gains nothing then."""
        every, cuts = True, None
        for shard, among in self.grid.sharded(layout):
            open_fields = {
                "shard": shard,
                "shard_degree": among,
                "sequence_parallel": sequence,
                "recompute": recompute,
                "recompute_part": part,
                "precision": self.workload.precision if self.workload.precision in _PRECISIONS else "float32",
            }
            plan = layout.plan(**open_fields | self.grid.besides)
            self.considered += 1
            if plan.findings(self.grid.workers, batch=self.grid.batch):
                continue
            profile, micro = self.profile.of(plan), self.micro(layout)
            if cuts is None:
                cuts = cuts_of(plan, profile, profile.times(plan, micro).total, micro)
            if tied := ties_across(plan, profile.workload, cuts):
                self.refused = tied[0]
                continue
            memory = memory_of(plan, profile.workload, batch=self.grid.batch, cuts=cuts, sharers=self.network.sharers)
            useful_s = max(self.worst_kept, self.fastest * (1 + NEAR))
            other: tuple[Plan, Memory] | None = None
            if cuts and not plan.split:
                times = profile.times(plan, micro)
                other = advised_cut(
                    plan, self.profile, times, cuts, memory, batch=self.grid.batch, limit=self.limit, most_s=useful_s
                )
            if other and self.limit and memory.total > self.limit:
                (plan, memory), other = other, None
            fits = not self.limit or memory.total <= self.limit
            if self.least is None or memory.total < self.least[0].total:
                self.least = (memory, plan)
            key = (layout.degrees, layout.stages, shard, among)
            if not fits:
                every = False
                if recompute or len(self.misfits) >= 64:
                    continue
                self.misfits.add(key)
            most_s = useful_s if fits else self.fastest
            one = self._timed(plan, memory, most_s)
            if other:
                cut = self._timed(*other, most_s)
                one = cut if one is None or (cut and cut.step_s < (1 - CUT_SLACK) * one.step_s) else one
            if one is None:
                continue
            table = self.found if fits else self.large
            if fits:
                self.fastest = min(self.fastest, one.step_s)
                if one.step_s <= self.fastest * (1 + NEAR):
                    self.close.append(one)
            if key not in table or one.step_s < table[key].step_s:
                table[key] = one
        return every

    def _timed(self, plan: Plan, memory: Memory | None = None, most_s: float = float("inf")) -> Prediction | None:
        found = predict_within(
            most_s,
            plan,
            self.workload,
            self.network,
            workers=self.grid.workers,
            batch=self.grid.batch,
            constants=self.constants,
            profile=self.profile,
            memory_limit=self.limit,
            memory=memory,
        )
        self.timed += found is not None
        return found

    def with_best_buckets(self, one: Prediction) -> Prediction:
        """Return the same with the size of bucket that leaves least exposed; it is kept where it gains nothing."""
        if replicas(one.plan)[0] == 1 or one.plan.bucket_bytes or not self.constants.overlap:
            return one
        tries = [self._timed(dataclasses.replace(one.plan, bucket_bytes=size)) for size in _BUCKETS]
        fit = [each for each in tries if each is not None and (each.fits or not one.fits)]
        best = min(fit, key=lambda each: each.step_s, default=one)
        return best if best.step_s < one.step_s * (1 - 1e-4) else one

    def preferred(self, ranked: list[Prediction]) -> Prediction:
        """Return the simplest of those that are as fast as the fastest, by all that predictions can say.

        One that fills the memory is not preferred to one that does not: what memory is predicted errs, too.
        """
        every = [*ranked, *self.close]
        roomy = [one for one in every if not self.limit or one.memory.total <= _ROOMY * self.limit]
        fastest = min(every, key=lambda one: one.step_s)
        every = [fastest, *roomy]
        winner = every[preferred([(one.plan, one.step_s) for one in every])]
        made = winner if winner in ranked else self.with_best_buckets(winner)
        return next((one for one in ranked if one.plan == made.plan), made)

    def why_none(self, any_layout: bool) -> PlanFinding:
        """Return what stands in the way, of the plan that comes nearest."""
        if self.least is None and self.refused is not None:
            return self.refused
        if not any_layout or self.least is None:
            fixed = ", ".join(f"{name} = {value}" for name, value in self.grid.fixed.items())
            rule = f"no degrees of {self.grid.workers} workers go with a batch of {self.grid.batch}"
            rule, first = (f"{rule} and {fixed}", "fix less") if fixed else (rule, "use fewer workers")
            return PlanFinding("data_parallel_degree", rule, f"{first}, or make the batch larger")
        memory, plan = self.least
        samples = -(-self.grid.batch // (plan.data_parallel_degree * plan.micro_batches * plan.accumulate))
        kinds = {name: nbytes for name, nbytes in memory.rows() if name not in ("total", "resident", "absent")}
        most = max(kinds, key=lambda name: kinds[name])
        rule = (
            f"the plan that needs least, {plan.describe()}, needs {format_bytes(memory.total, 3)} on a worker, "
            f"most of it ({format_bytes(kinds[most], 3)}) for {most}, and there are {format_bytes(self.limit, 3)}"
        )
        fixed = ", ".join(name for name in self.grid.fixed if name not in self.grid.besides)
        uses = [f"devices with more than {format_bytes(memory.total, 3)}"]
        if most != "process":
            uses.insert(0, "more workers")
        if most in ("activations", "working"):
            one = "samples, as shorter sequences (one at a time is computed already)"
            uses.insert(0, f"smaller {'batches' if samples > 1 else one}")
        remedy = f"{f'leave {fixed} open, or ' if fixed else ''}use {', or '.join(uses)}"
        return PlanFinding("memory", rule, remedy)
