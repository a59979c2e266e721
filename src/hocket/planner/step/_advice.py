"""Where a pipeline is best cut by all that its stages do, not by what they compute alone.

The Trainer cuts by computation and messages, unless a plan names the modules with which stages begin. The search, which
knows the cluster, names them where that is worth it: where layers' sharded parameters take longer to gather than the
layers to compute, where a stage's gradients are reduced and its parameters updated last, where a stage does not fit.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..axes import replicas
from ..network import CUT_SLACK
from ..plan import Plan, plan_homes
from ._ends import block_times, copies_times
from ._memory import Memory, layer_bytes, memory_of
from ._profile import LayerTimes, Profile
from ._stages import in_flight, ties_across
from ._time import cuts_of

Floats = NDArray[np.float64]
_TRIAL, _ROUNDS = 4, 30  # of moving cuts: to be no worse than by computation, and at most
_BAD = 1e6  # times as long is the step of a cut that cannot be
_ALL = 1000  # ways to cut, of which each is looked at
_FOLLOWED = 8  # ranks of a pipeline, of which it is known closely when they are done
_MOST = 16  # stages; the search would take long to move more
_FEW = 400  # layers; more are cut as they compute


def advised_cut(
    plan: Plan,
    profile: Profile,
    times: LayerTimes,
    cuts: Sequence[int],
    memory: Memory,
    *,
    batch: int,
    limit: int,
    most_s: float = math.inf,
) -> tuple[Plan, Memory] | None:
    """Return the plan with its stages named, and its memory, if another cut may make a step shorter or make it fit.

    Whether the step is shorter is for `predict` to say: here a step is what the slowest stage takes for each
    micro-batch, all for one of them, and the last exchange and update.

    Args:
        plan: With all degrees filled in, several stages, and none named.
        profile: Of the workload, its layers whole.
        times: Of the layers between which the plan is cut otherwise (`Profile.of`), for a micro-batch.
        cuts: Of these, where.
        memory: Of the plan with these cuts.
        batch: Samples of a global batch.
        limit: Bytes of a worker; 0 for none.
        most_s: Of a step; a plan that takes longer is of no use.
    """
    layers, stages = profile.workload.layers, plan.pipeline_parallel_degree * plan.stages_per_rank
    sharers, fits = profile.network.sharers, not limit or memory.total <= limit
    if stages > _MOST or not stages <= len(layers) <= _FEW or len({layer.name for layer in layers}) < len(layers):
        return None
    if _least_s(plan, times.total) > most_s:
        return None
    base = _Loads.of(plan, profile.of(plan), times, batch)
    now = float(base.step(np.array([cuts]))[0])
    if (fits and now <= (1 + CUT_SLACK) * base.least_s) or base.least_s > most_s:
        return None
    micro = -(-batch // (plan.data_parallel_degree * plan.micro_batches * plan.accumulate))
    named = dataclasses.replace(plan, split=tuple(layer.name for layer in layers[1:stages]))  # any: layers stay whole
    whole = profile.of(named)
    if whole is not profile.of(plan):
        times = whole.times(plan, micro)
        loads = _Loads.of(plan, whole, times, batch)
    else:
        loads = base
    free = np.inf
    if limit:
        free = limit - (memory.total - float(base.held(np.array([cuts])).max()))
        if loads.least_bytes > free:
            return None
    starts = _starts(plan, whole, loads, micro, not fits)
    if loads is base:
        starts.append(list(cuts))
    found = loads.best(starts, free, now if fits else math.inf)
    if found is None or ties_across(plan, whole.workload, found):
        return None
    named = dataclasses.replace(plan, split=tuple(layers[cut].name for cut in found))
    needed = memory_of(named, whole.workload, batch=batch, cuts=found, sharers=sharers)
    return (named, needed) if not limit or needed.total <= limit else None


def _starts(plan: Plan, profile: Profile, loads: "_Loads", micro: int, limited: bool) -> list[list[int]]:
    """Return cuts to begin with: by what passes cost, with and without what a step ends with, and by memory."""
    each = [loads.passes, loads.passes + loads.ending / plan.micro_batches]
    if limited:
        each.append(loads.state + loads.saved * loads.flight.max())
    return [cuts_of(plan, profile, costs, micro) for costs in each]


@dataclass(frozen=True, eq=False)
class _Loads:
    """What layers ask of the stages that have them: seconds and bytes of each layer, on one rank."""

    plan: Plan
    passes: Floats  # both passes of a micro-batch, with what its exchanges of parameters are not hidden behind
    backward: Floats  # the backward pass alone
    ending: Floats  # reducing gradients, once a step, the update, and gathering what was updated
    state: Floats  # bytes of parameters, gradients and the optimizer's state
    saved: Floats  # bytes of activations of a micro-batch
    weights: Floats  # 1 for a layer that has any, else 0
    flight: Floats  # of each rank, how many micro-batches are under way
    homes: Floats  # of each stage (rows) 1 for its rank

    @classmethod
    def of(cls, plan: Plan, profile: Profile, times: LayerTimes, batch: int) -> "_Loads":
        held, constants, every = profile.held(plan), profile.constants, np.arange(len(times.forward))
        (copies, stride), p = replicas(plan), plan.pipeline_parallel_degree
        total = max(1.0, float(held.trained_bytes.sum()))
        passes, ending = times.total.copy(), profile.update_s(plan, every) * held.trained_bytes / total
        if copies > 1 and plan.shard == "parameters":
            columns = block_times(plan, profile, times, every, (0, (1.0,) * p))
            gather, again, reduce, forward, backward = columns
            if constants.overlap and constants.prefetch:
                more = np.maximum(gather - forward, 0.0) + np.maximum(again + reduce - backward, 0.0)
            else:
                more = gather + again + reduce
            passes += _dealt(profile, more, held.parameter_bytes)
            ending = ending + _dealt(profile, copies_times(plan, profile, every), held.parameter_bytes)
        elif copies > 1:
            kinds = [("all_reduce" if plan.shard == "none" else "reduce_scatter", held.gradient_bytes)]
            kinds += [("all_gather", held.trained_bytes)] * (plan.shard != "none")
            for kind, sizes in kinds:
                whole = float(sizes.sum())
                seconds = profile.network.collective(kind, whole / p, copies, stride, constants).seconds
                ending = ending + seconds * p * sizes / max(1.0, whole)
        state, saved = layer_bytes(plan, profile.workload, batch)
        homes = list(plan_homes(plan))
        flight = np.array([in_flight(plan, rank) for rank in range(p)], dtype=np.float64)
        back = times.backward + times.again + times.tensor_backward
        return cls(
            plan,
            passes,
            back,
            ending,
            state,
            saved,
            (held.parameter_bytes > 0).astype(np.float64),
            flight,
            np.eye(p)[homes],
        )

    @functools.cached_property
    def least_s(self) -> float:
        """What no cut of these layers makes a step shorter than."""
        return _least_s(self.plan, self.passes)

    @property
    def least_bytes(self) -> float:
        """What no cut makes the fullest rank hold less than."""
        return float(self.state.sum() + self.saved.sum() * self.flight.min()) / self.plan.pipeline_parallel_degree

    def by_rank(self, values: Floats, cuts: NDArray[np.int64]) -> Floats:
        """Return sums over the layers of each rank (columns) for each of several cuts (rows)."""
        found: Floats = self.by_stage(values, cuts) @ self.homes
        return found

    def by_stage(self, values: Floats, cuts: NDArray[np.int64]) -> Floats:
        """Return sums over the layers of each stage (columns) for each of several cuts (rows)."""
        sums = np.concatenate([[0.0], np.cumsum(values)])
        edges = sums[cuts]
        found = np.empty((len(cuts), cuts.shape[1] + 1))
        found[:, 0], found[:, -1] = edges[:, 0], sums[-1] - edges[:, -1]
        np.subtract(edges[:, 1:], edges[:, :-1], out=found[:, 1:-1])
        return found

    def step(self, cuts: NDArray[np.int64]) -> Floats:
        """Return seconds of a step for each of several cuts."""
        stages, last = self.by_stage(self.passes, cuts), self.by_rank(self.ending, cuts)
        each, p = stages @ self.homes, self.plan.pipeline_parallel_degree
        most = each.max(axis=1)
        if len(self.homes) > p:  # where the stages of a rank are unlike, ranks wait for each other besides
            rounds = stages.reshape(len(stages), -1, p).max(axis=2).sum(axis=1)
            most = (most + rounds) / 2
        last = last - self.early(self.by_stage(self.backward, cuts)[:, :p], stages[:, :p])
        waited = (each.sum(axis=1) - each.max(axis=1)) / self.plan.stages_per_rank
        found: Floats = self.plan.micro_batches * most + waited + last.max(axis=1)
        return found

    def early(self, back: Floats, passes: Floats) -> Floats:
        """Return how long before the first rank each is done: it ends its step meanwhile.

        Args:
            back: Of each rank's first stage, of several cuts (rows), the backward pass of a micro-batch.
            passes: Both passes.
        """
        behind = np.cumsum(back, axis=1) - back
        if len(self.homes) > back.shape[1] or back.shape[1] > _FOLLOWED:
            return behind
        # A rank that takes long still has a backward pass to do for each rank behind it when the last one is through.
        through, apart = np.cumsum(passes, axis=1), np.arange(back.shape[1])
        left = (apart[:, None] - apart + 1) * back[:, None, :] + (behind + through)[:, None, :] - through[:, :, None]
        found: Floats = np.maximum(behind, np.where(apart[:, None] > apart, left, 0.0).max(axis=2))
        return found

    def held(self, cuts: NDArray[np.int64]) -> Floats:
        """Return bytes of each rank, for each of several cuts: state, and activations under way."""
        return self.by_rank(self.state, cuts) + self.by_rank(self.saved, cuts) * self.flight

    def best(self, starts: Sequence[Sequence[int]], free: float, now: float) -> list[int] | None:
        """Return the cut with the shortest step, of all if these are few, else of what the best of `starts` leads to.

        There cuts are moved by some layers, by themselves or with all behind them.
        None where ranks hold more than `free` bytes, stages have no weights, or the step is hardly shorter than `now`.
        """
        every = _every(len(self.passes), len(starts[0]))
        begun = every if len(every) else np.array(starts, dtype=np.int64)
        values = self._values(begun, free)
        value, cut = values.min(), begun[values.argmin()]
        moves, count = _moves(len(cut)), len(self.passes)
        for number in range(0 if len(every) else _ROUNDS):
            if number == _TRIAL and value > now:
                return None
            tried = cut + moves
            rising = (tried[:, 0] > 0) & (tried[:, -1] < count) & (np.diff(tried, axis=1) > 0).all(axis=1)
            if not rising.any():
                break
            tried = tried[rising]
            values = self._values(tried, free)
            if values.min() >= value:
                break
            value, cut = values.min(), tried[values.argmin()]
        return [int(one) for one in cut] if value < min((1 - CUT_SLACK) * now, _BAD * self.least_s) else None

    def _values(self, cuts: NDArray[np.int64], free: float) -> Floats:
        """Return steps of several cuts; many times as long where a stage has no weights or the fullest rank no memory.

        The longer the more of that is missing, so that moving cuts leads out of it.
        """
        bare = (self.by_stage(self.weights, cuts) < 1).sum(axis=1)
        missing = np.zeros(len(cuts))
        if math.isfinite(free):
            missing = np.maximum(0.0, self.held(cuts).max(axis=1) / max(free, 1.0) - 1)
        found: Floats = self.step(cuts) + (_BAD * self.least_s) * (bare + missing + (missing > 0))
        return found


@functools.lru_cache(maxsize=64)
def _moves(count: int) -> NDArray[np.int64]:
    """Return what is tried: each of so many cuts some layers later or earlier, by itself, and with those behind."""
    one = np.eye(count, dtype=np.int64)
    moves = np.concatenate([one, np.triu(np.ones_like(one))])
    return np.concatenate([moves, -moves, 3 * moves, -3 * moves])


@functools.lru_cache(maxsize=64)
def _every(count: int, cuts: int) -> NDArray[np.int64]:
    """Return all that so many layers can be cut at so often; none if these are many."""
    if not cuts or math.comb(count - 1, cuts) > _ALL:
        return np.empty((0, cuts), dtype=np.int64)
    return np.array(list(itertools.combinations(range(1, count), cuts)), dtype=np.int64)


def _least_s(plan: Plan, passes: Floats) -> float:
    """Return what no cut makes a step shorter than, of layers that take so long for both passes of a micro-batch."""
    p, whole = plan.pipeline_parallel_degree, float(passes.sum())
    slowest = max(whole / p, float(passes.max()))
    return plan.micro_batches * slowest + (whole - slowest) / plan.stages_per_rank


def _dealt(profile: Profile, blocks: Floats, nbytes: Floats) -> Floats:
    """Return of each layer its part of what its block takes, by bytes."""
    every = np.arange(len(nbytes))
    begins = np.diff(profile.blocks[every], prepend=-1) != 0
    block = np.cumsum(begins) - 1
    whole = np.bincount(block, nbytes)[block]
    found: Floats = blocks[block] * np.divide(nbytes, whole, out=np.zeros_like(nbytes), where=whole > 0)
    return found
