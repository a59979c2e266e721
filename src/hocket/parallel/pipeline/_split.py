"""Splits a model into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hocket.planner import CUT_SLACK, Link, balance

from ..mesh import World
from . import _verify
from ._measure import Times, measured
from ._partition import build, cuts, holding
from ._stage import Stage
from ._trace import SplitError, Traced, trace


def split(
    model: torch.nn.Module,
    n_stages: int,
    sample: Sequence[Any],
    *,
    points: Sequence[str] = (),
    times: Times | Sequence[float] | None = None,
    link: Link | None = None,
    micro_batches: int = 0,
    world: World | None = None,
    verify: bool = True,
) -> list[Stage]:
    """Cuts a model into stages that make the same output one after the other.

    The model is run on the sample and what it does is noted; it is then cut where the slowest stage takes the least
    time, by measurement on this device, or before the modules in `points`. The stages hold the model's own submodules
    and Parameters.

    Args:
        model: the user's.
        n_stages: how many.
        sample: positional inputs, as many samples as a micro-batch has if times are to be right.
        points: names of the modules that begin a stage, in the order in which the model uses them: one less than there
            are stages. Empty: balanced by measurement.
        times: seconds of each step, as `measure` gives them; None to measure now.
        link: between the ranks that hold neighbouring stages; that of two processes on one machine if not given.
        micro_batches: of a step, times the stages of a rank; 0 for so many that only the slowest stage counts.
        world: the ranks that split the model together: rank 0's measurement counts for all.
        verify: whether to compare stages and model on the sample: outputs and gradients.

    Raises:
        SplitError: the model cannot be split so; the message says why and what to do.
    """
    if n_stages < 1:
        raise SplitError(f"a model cannot be split into {n_stages} stages")
    traced = trace(model, sample)
    if len(traced.steps) < n_stages:
        raise SplitError(
            f"{type(model).__name__} has {len(traced.steps)} steps, too few for {n_stages} stages; "
            "take fewer stages" + _why_whole(traced)
        )
    begins = (
        _at_points(traced, n_stages, points)
        if points
        else _balanced(traced, n_stages, sample, times, link or Link(), micro_batches, world)
    )
    stages = build(traced, begins)
    if verify:
        _verify.compare(model, stages, sample)
    return stages


def _balanced(
    traced: Traced,
    n_stages: int,
    sample: Sequence[Any],
    times: Times | Sequence[float] | None,
    link: Link,
    micro_batches: int,
    world: World | None,
) -> list[int]:
    begins: list[int] = []
    if world is None or world.rank == 0:
        if times is None and n_stages > 1:
            times = measured(traced, sample)
        seconds = times.total_s if isinstance(times, Times) else list(times or [0.0] * len(traced.steps))
        if len(seconds) != len(traced.steps):
            raise SplitError(f"{len(seconds)} times were given for the {len(traced.steps)} steps of the model")
        crossing = [cut.nbytes for cut in cuts(traced)]
        begins = balance(
            seconds,
            n_stages,
            crossing,
            holds=holding(traced),
            link=link,
            slack=CUT_SLACK,
            micro_batches=micro_batches,
        )
    return begins if world is None else world.from_root(begins)


def _at_points(traced: Traced, n_stages: int, points: Sequence[str]) -> list[int]:
    if len(points) != n_stages - 1:
        raise SplitError(
            f"split = {list(points)} names {len(points)} modules that begin a stage; {n_stages} stages need "
            f"{n_stages - 1}: the first stage begins by itself"
        )
    begins: list[int] = []
    for point in points:
        at = next((i for i, node in enumerate(traced.steps) if _within(node, point)), None)
        if at is None:
            raise SplitError(f"split names {point!r}, which the model does not use on the sample. {_known(traced)}")
        if at <= (begins[-1] if begins else 0):
            raise SplitError(
                f"split = {list(points)}: {point!r} does not come after the point before it, or begins the model; "
                f"name modules in the order in which the model uses them. {_known(traced)}"
            )
        begins.append(at)
    return begins


def _within(node: fx.Node, module: str) -> bool:
    path = str(node.meta["path"])
    return path == module or path.startswith(f"{module}.")


def _known(traced: Traced) -> str:
    paths = list(dict.fromkeys(str(node.meta["path"]) for node in traced.steps if node.meta["path"]))
    return f"It uses, in this order: {', '.join(paths)}" + _why_whole(traced)


def _why_whole(traced: Traced) -> str:
    reasons = "; ".join(f"{path}: {reason}" for path, reason in traced.whole.items())
    return f" (not looked into: {reasons})" if reasons else ""
