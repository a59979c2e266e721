"""Splits a model into stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from hocket.planner import CUT_SLACK, Link, balance
from hocket.workload.division import unchanged

from ..mesh import World
from . import _micro, _verify
from ._measure import Times, measured
from ._partition import build, changed, cuts, hiding, holding, loose
from ._settled import SettledModules
from ._stage import Stage
from ._trace import SplitError, Traced, traced_in_both_modes

_MOST: Final = 0.7  # of a model in one stage: more is hardly a pipeline
_SELDOM: Final = 1 << 40  # bytes: where shapes that cross depend on numbers, so that each message must be described
_NEVER: Final = 1 << 50  # bytes: where stages would have copies of what one changes, or lack tensors


def split(
    model: torch.nn.Module,
    n_stages: int,
    sample: Any,
    *,
    points: Sequence[str] = (),
    times: Times | Sequence[float] | None = None,
    link: Link | None = None,
    micro_batches: int = 0,
    world: World | None = None,
    verify: bool = True,
    cut: bool = True,
    traced: Traced | None = None,
) -> list[Stage]:
    """Cut a model into stages that make the same output one after the other.

    The model is run on the sample and what it does is noted; it is then cut where the slowest stage takes the least
    time, by measurement on this device, or before the modules in `points`. The stages hold the model's own submodules
    and Parameters.

    Args:
        model: the user's.
        n_stages: how many.
        sample: a tensor, a tuple of positional inputs, or a dict of keywords; as many samples as a micro-batch has if
            times are to be right.
        points: names of the modules that begin a stage, in the order in which the model uses them: one less than there
            are stages. Empty: balanced by measurement.
        times: seconds of each step, as `measure` gives them; None to measure now.
        link: between the ranks that hold neighbouring stages; that of two processes on one machine if not given.
        micro_batches: of a step, times the stages of a rank; 0 for so many that only the slowest stage counts.
        world: the ranks that split the model together: rank 0's measurement counts for all.
        verify: whether to compare stages and model on the sample: outputs and gradients.
        cut: whether batches will be cut into parts, so that fewer samples must go through, too.
        traced: the model on the sample, of `traced_in_both_modes`, in a block of `unchanged` that lasts; None to trace
            it now.

    Raises:
        SplitError: the model cannot be split so; the message says why and what to do.
    """
    if n_stages < 1:
        raise SplitError(f"a model cannot be split into {n_stages} stages")
    with unchanged(model) if traced is None else nullcontext():
        sample = _micro.positional(sample)
        traced = traced or traced_in_both_modes(model, sample)
        if len(traced.steps) < n_stages:
            raise SplitError(
                f"{type(model).__name__} has {len(traced.steps)} steps, too few for {n_stages} stages; "
                "take fewer stages" + _why_whole(traced)
            )
        begins, seconds = (
            (_at_points(traced, n_stages, points), ())
            if points
            else _balanced(traced, n_stages, times, link or Link(), micro_batches, world)
        )
        stages = build(traced, begins, seconds)
        fewest, written = _verify.compare(model, stages, sample, cut=cut) if verify else (1, ())
        unseen = _verify.sizes_unseen(model, stages, sample, cut=cut) if verify else ()
        forms = [one for one in (traced, traced.other) if one is not None]
        _refuse_changed_elsewhere(stages, {*written, *(name for one in forms for name in changed(one))})
        traced.forget()
    settled = SettledModules(model, {str(n.target) for one in forms for n in one.steps if n.op == "call_module"})
    told = {
        "outline": _micro.outline(sample),
        "fewest": fewest,
        "written": written,
        "settled": settled,
        "unseen": unseen,
    }
    return [replace(stage, **told) for stage in stages]


def _refuse_changed_elsewhere(stages: Sequence[Stage], names: set[str]) -> None:
    """Refuse that a stage changes what others have copies of, parameters or buffers of these names."""
    for name in sorted(names):
        homes = [str(stage.index) for stage in stages if name in stage.names.values()]
        if len(homes) > 1:
            raise SplitError(
                f"{name} is changed in the forward pass, and stages {' and '.join(homes)} use it: each has a copy of "
                "its own, and would not see what another does to it. Have all code that uses it in one stage, by "
                "split= (names of modules that begin a stage), or plan with data or tensor parallelism"
            )


def unbalanced(stages: Sequence[Stage]) -> str:
    """Return why a stage has most of what a model is made of, as a sentence; "" where none has."""
    held = [{name: p.numel() * p.element_size() for name, p in stage.parameters().items()} for stage in stages]
    nbytes, seconds = sum(map(sum, (one.values() for one in held))), sum(stage.seconds for stage in stages)
    for stage, mine in zip(stages, held, strict=True):
        share = sum(mine.values()) / nbytes if nbytes else 0.0
        time_share = stage.seconds / seconds if seconds else 0.0
        if len(stages) < 2 or max(share, time_share) <= _MOST:
            continue
        module = dict(stage.module.named_modules())
        sizes = {one: sum(p.numel() * p.element_size() for p in module[one].parameters()) for one in stage.layers}
        largest = max(sizes, key=sizes.__getitem__, default="")
        whole = "; ".join(f"{name} stayed whole ({why})" for name, why in stage.whole.items())
        if not whole and largest:
            whole = f"the largest step, {largest}, has {sizes[largest] / nbytes:.0%} and is not cut inside"
        timed = f" and {time_share:.0%} of the time" if seconds else ""
        return (
            f"stage {stage.index} of {len(stages)} has {share:.0%} of the parameters' bytes{timed}"
            + (f": {whole}" if whole else "")
            + ". Fewer stages, other axes (tensor, shard) or split= in the plan may do better"
        )
    return ""


def _balanced(
    traced: Traced,
    n_stages: int,
    times: Times | Sequence[float] | None,
    link: Link,
    micro_batches: int,
    world: World | None,
) -> tuple[list[int], Sequence[float]]:
    begins: list[int] = []
    seconds: Sequence[float] = ()
    if world is None or world.rank == 0:
        if times is None and n_stages > 1:
            times = measured(traced)
        seconds = times.total_s if isinstance(times, Times) else list(times or [0.0] * len(traced.steps))
        if len(seconds) != len(traced.steps):
            raise SplitError(f"{len(seconds)} times were given for the {len(traced.steps)} steps of the model")
        crossing = [cut.nbytes for cut in cuts(traced)]
        for first, last in changed(traced).values():
            for i in range(first + 1, last + 1):
                crossing[i] += _NEVER
        crossing = [each + _NEVER * bool(one) for each, one in zip(crossing, hiding(traced), strict=True)]
        depends = loose(traced)

        def cut_at(loose_nbytes: int) -> list[int]:
            nbytes = [each + loose_nbytes * one for each, one in zip(crossing, depends, strict=True)]
            holds = holding(traced)
            return balance(
                seconds, n_stages, nbytes, holds=holds, link=link, slack=CUT_SLACK, micro_batches=micro_batches
            )

        begins = cut_at(_SELDOM)
        if any(depends) and _largest(seconds, begins) > _MOST >= _largest(seconds, plain := cut_at(0)):
            begins = plain
    return (begins, seconds) if world is None else world.from_root((begins, seconds))


def _largest(seconds: Sequence[float], begins: Sequence[int]) -> float:
    """Return the part of the time that the slowest stage takes."""
    bounds = [0, *begins, len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds)) / (sum(seconds) or 1.0)


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
