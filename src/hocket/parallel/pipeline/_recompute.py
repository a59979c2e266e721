"""Activation checkpointing: a stage keeps what it was given and computes the rest again in the backward.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; torch.utils.checkpoint does the work.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from hocket.comm.torch_adapter import outside_compiler, version_of
from hocket.sharding import same_values

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
    if next(module.buffers(), None) is None:
        return checkpoint(run, *args, use_reentrant=False, **kwargs)
    return _with_buffers(run, module, args, kwargs)


@outside_compiler  # Dynamo follows no context_fn
def _with_buffers(run: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    kept = _BuffersKept(module)
    return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (kept.first(), kept), **kwargs)


_Place = tuple[torch.nn.Module, str]
_Seen = tuple[torch.nn.Module, str, torch.Tensor, int, torch.Tensor | None]
"""A buffer by its place, and as it was: the tensor, its version, and a copy unless it is known to stay."""

_changing: Final[weakref.WeakKeyDictionary[torch.nn.Module, set[str]]] = weakref.WeakKeyDictionary()
"""The names of the buffers that a module's forward pass has been seen to change, for modules that have been watched."""


class _BuffersKept:
    """What a forward pass changes in buffers counts once, and is read by the second computation as by the first.

    Running statistics, counters and moving averages (of a codebook, say) would else be updated twice for a batch, and
    gradients be those of the values after the update.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._places: list[_Place] = [(m, k) for m in module.modules() for k, b in m._buffers.items() if b is not None]
        self._before: dict[_Place, torch.Tensor | None] = {}
        self._now: dict[_Place, torch.Tensor | None] = {}

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Note the values before the computation of those buffers that it changes."""
        seen = self._now_there()

        def note(*_: object) -> None:  # again, if a hook of the module has put them back to what they were
            seen[:] = self._now_there()

        hook = self._module.register_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        for owner, name, buffer, version, value in seen:
            changed, now = _changing.setdefault(owner, set()), owner._buffers[name]
            told = now is not buffer or version_of(buffer) != version
            if told or name in changed or (value is not None and not same_values(value, buffer)):
                changed.add(name)
                self._before[owner, name] = value

    def _now_there(self) -> list[_Seen]:
        seen = []
        for owner, name in self._places:
            buffer = owner._buffers[name]
            if isinstance(owner, _NormBase):  # which changes them without telling, and reads them in evaluation alone
                self._before[owner, name] = None
            elif buffer is not None:
                value = buffer.detach().clone() if name in _changing.get(owner, {name}) else None
                seen.append((owner, name, buffer, version_of(buffer), value))
        return seen

    def __enter__(self) -> None:
        """Let them be computed with copies of the values before; back-propagation in two halves does so twice."""
        self._now = {(owner, name): owner._buffers[name] for owner, name in self._before}
        for (owner, name), value in self._before.items():
            read = self._now[owner, name] if value is None else value
            owner._buffers[name] = None if read is None else read.detach().clone()

    def __exit__(self, *_: object) -> None:
        for (owner, name), buffer in self._now.items():
            owner._buffers[name] = buffer
