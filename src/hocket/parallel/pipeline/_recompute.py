"""Activation checkpointing: a stage keeps what it was given and computes the rest again in the backward.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; torch.utils.checkpoint does the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from ._stage import Segment, Stage

HOW: Final = ("none", "stage", "layer")


def runner(stage: Stage, how: str) -> Callable[..., Any]:
    """Return what to call instead of the stage's module.

    "stage" computes all of the stage again, "layer" each layer by itself: less memory at the height of the backward,
    more kept meanwhile; "none" nothing.

    Raises:
        ValueError: `how` is something else.
    """
    if how not in HOW:
        raise ValueError(f"recompute = {how!r} is not known; choose one of {', '.join(HOW)}")
    if how == "none":
        return stage.module
    if how == "layer":
        segments = {form.training: form.segments() for form in (stage, stage.other) if form is not None}
        return lambda *args: _layer_by_layer(stage, segments, args)
    return lambda *args: checkpointed(stage.module, stage.module, *args)


def _layer_by_layer(stage: Stage, segments: Mapping[bool, tuple[Segment, ...]], args: tuple[Any, ...]) -> Any:
    stage = stage.now
    inputs = dict(zip(stage.inputs, args, strict=False))
    values = dict(zip(stage.uses, args[len(stage.inputs) :], strict=True))
    made: Any = None
    for segment in segments[stage.training]:
        segment.module.training = stage.module.training
        used = [*(inputs[i] for i in segment.inputs), *(values[name] for name in segment.uses)]
        made = checkpointed(segment.module, segment.module, *used)
        values.update(zip(segment.makes, made, strict=False))
    return made if stage.last else tuple(values[name] for name in stage.makes)


def checkpointed(run: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Return what `run` gives, whose values are computed again in back-propagation; `module` has what it changes."""
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
    if not norms:  # Dynamo follows no context_fn
        return checkpoint(run, *args, use_reentrant=False, **kwargs)
    kept = lambda: (contextlib.nullcontext(), _BuffersKept(norms))  # noqa: E731
    return checkpoint(run, *args, use_reentrant=False, context_fn=kept, **kwargs)


class _BuffersKept:
    """Batch norm's running statistics count each batch once, however often it is computed."""

    def __init__(self, norms: list[torch.nn.modules.batchnorm._NormBase]) -> None:
        self._norms = norms
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._before = [(b, b.detach().clone()) for norm in self._norms for b in norm.buffers()]

    def __exit__(self, *_: object) -> None:
        for buffer, value in self._before:
            buffer.data.copy_(value)  # through .data: autograd need not know, the values are those it has seen
