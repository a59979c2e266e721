"""Which of several plans to take: the fastest, unless a simpler one is predicted to be as fast."""

from collections.abc import Sequence

from ..axes import copy_group, inner, product
from ..plan import SHARDS, Plan

NEAR = 0.05
"""Predicted times that differ by less say nothing of which plan is faster.

Predictions err by more, yet like plans err alike. Where all were measured (`benchmarks/2026-11-21-plans.md`), picks
that were far behind the best were forms of it that were predicted to be a few percent faster: on eight hosts sharded
gradients by 4%, where plain data parallelism took 16% less in truth. A plan that is taken for being simple is behind
by this much at the most, if predictions are right: half of what a pick may be behind the best.
"""


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return a key, less for simpler plans: how many ways to divide a model, what is sharded, degrees, stages, parts.

    So plain data parallelism comes before a sharded optimizer, that before sharded gradients and parameters, sharding
    among all before sharding among some, and all of them before plans that divide tensors or layers, or compute
    activations again: the model runs as it was written.
    """
    ways = sum(axis.degree(plan) > 1 for axis in inner()) + plan.recompute
    return (
        ways,
        SHARDS.index(plan.shard),
        copy_group(plan)[0] > 1,
        product(plan, *inner()),
        plan.stages_per_rank,
        plan.accumulate * plan.micro_batches,
    )


def preferred(steps: Sequence[tuple[Plan, float]], near: float = NEAR) -> int:
    """Return the place of the plan to take: the simplest of those that are within `near` of the fastest.

    Args:
        steps: Plans with the predicted seconds of a step; one at the least.
        near: By which part more a step may take.
    """
    fastest = min(seconds for _, seconds in steps)
    close = [index for index, (_, seconds) in enumerate(steps) if seconds <= fastest * (1 + near)]
    return min(close, key=lambda index: (simplicity(steps[index][0]), steps[index][1]))
