"""Follows a module's forward on a sample, and lists its steps with the value of each.

The model runs as it always does, on real tensors, while what it calls is noted: functions of torch, by a mode of
torch's, and modules. The modules of torch.nn and those of this package (tensor-parallel forms) are single steps, as are
those whose code cannot be followed; all others are looked into. The list is a torch.fx graph.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from hocket.workload.division import plain_values, unchanged

from ..batches import trees as _trees
from ._forward_recorder import DataDependentError, ForwardRecorder
from ._kept_tensors import tensors_unchanged

Tensor = torch.Tensor
_REMEDY: Final = (
    "Move that code into a submodule (which then stays whole, in one stage), write the model's forward as a sequence "
    "of calls of submodules, or, if it computes the loss, leave that to loss_fn and give the model no labels"
)
UNCUT: Final = (
    "If a batch cannot be cut (all of it is one graph, say), choose micro_batches = 1, with which batches stay whole, "
    "or tensor parallelism"
)
_NUMBER: Final = re.compile(r"\d+")


class SplitError(ValueError):
    """A model cannot be split into stages as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Traced:
    """A model as a list of steps."""

    model: torch.nn.Module  # the user's
    # torch.fx's; every node has in `meta` its "value" on the sample and the "path" of the module it is in
    graph: fx.Graph
    training: bool  # whether the model trains so; if not, it evaluates
    whole: dict[str, str] = field(default_factory=dict)  # submodules that could not be looked into, with the reason
    # the model when it evaluates, if this is the model when it trains, or the other way round
    other: Traced | None = None

    @functools.cached_property
    def steps(self) -> list[fx.Node]:
        """What is computed, in order: neither inputs, nor parameters and buffers, nor the output."""
        return [node for node in self.graph.nodes if node.op.startswith("call_")]

    def forget(self) -> None:
        """Let go of the values on the sample, which stages would keep as long as they live."""
        for form in (self, *([] if self.other is None else [self.other])):
            for node in form.graph.nodes:
                node.meta.pop("value", None)

    @functools.cached_property
    def inputs(self) -> list[fx.Node]:
        """The model's inputs, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def trace(model: torch.nn.Module, sample: Any) -> Traced:
    """Run a model once on a sample and note what it does.

    Args:
        model: the user's; its buffers and the random numbers are as before afterwards.
        sample: positional inputs, or a dict of keywords.

    Raises:
        SplitError: the model's own forward cannot be followed.
    """
    with unchanged(model):
        return traced_in_both_modes(model, sample)


def traced_in_both_modes(model: torch.nn.Module, sample: Any) -> Traced:
    """Do as `trace` does, but let the model's Python state go on: a comparison sees what changes in each forward."""
    earlier: dict[int, Tensor] = {}
    found = _followed(model, sample, True, earlier)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(not model.training)
        return replace(found, other=_followed(model, sample, model.training, earlier))
    finally:
        earlier.clear()
        for module, mode in modes:
            module.training = mode


def _followed(model: torch.nn.Module, sample: Any, grad: bool, earlier: dict[int, Tensor]) -> Traced:
    """Do as `trace` does, in the mode in which the model is, with gradients or without."""
    whole: dict[str, str] = {}
    compiled: set[str] = set()
    while True:
        recorder = ForwardRecorder(model, whole, compiled, grad, earlier)
        before = plain_values(model)
        try:
            with tensors_unchanged(model), torch.set_grad_enabled(grad):
                recorder.follow(sample)
            _refuse_state(model, sample, before)
            earlier.update(recorder.tensors())
            return Traced(model, recorder.graph, model.training, whole)
        except SplitError:
            raise
        except Exception as error:
            path = recorder.failed
            alike = [one for one, _ in model.named_modules() if _NUMBER.sub("#", one) == _NUMBER.sub("#", path)]
            if isinstance(error, DataDependentError) and path not in compiled:
                compiled.update(alike)  # code that may be compiled has a way without branches on data
            elif path and path not in whole:
                whole.update(dict.fromkeys(alike, f"{type(error).__name__}: {error}"))
            else:
                said = f"{type(error).__name__} while following its forward: "
                said += str(error).splitlines()[0] if str(error) else "no message"
                name = type(model).__name__
                if _runs(model, sample):
                    raise SplitError(f"cannot split {name} into stages: {said}. {_REMEDY}") from error
                raise SplitError(
                    f"{name} does not run on the sample, or on as much of it as a micro-batch has: {said}. {UNCUT}"
                ) from error


def _refuse_state(model: torch.nn.Module, sample: Any, before: dict[str, Any]) -> None:
    """Refuse a model whose forward changes numbers of Python's own each time: its steps were noted for one of them."""
    after = plain_values(model)
    if all(after[name] == before.get(name) for name in after):
        return
    with tensors_unchanged(model), torch.no_grad():
        _trees.called(model, sample)
    again = plain_values(model)
    if changing := [name for name in again if again[name] != after.get(name)]:
        raise SplitError(
            f"cannot split {type(model).__name__} into stages: each forward changes {', '.join(changing[:3])}, which "
            "may decide what the next one does. Keep such state in buffers, and draw random numbers with torch, "
            "from its default generator"
        )


def _runs(model: torch.nn.Module, sample: Any) -> bool:
    try:
        with tensors_unchanged(model), torch.no_grad():
            _trees.called(model, sample)
    except Exception:
        return False
    return True
