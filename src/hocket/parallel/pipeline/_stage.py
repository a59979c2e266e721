"""One stage of a split model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Segment:
    """Some steps of a model in a row, as a module.

    Attributes:
        module: called with the values of `inputs`, then of `uses`; returns a tuple of the values of `makes`, or the
            model's output if it comes last.
        inputs: which of the model's inputs it uses: places, or keywords.
        uses: names of the values that it uses.
        makes: names of the values that it computes for what comes behind it.
    """

    module: torch.nn.Module
    inputs: tuple[int | str, ...]
    uses: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """A contiguous part of a model that one rank runs.

    Values are named. A value that a later stage needs is passed on from stage to stage, whoever uses it. The inputs of
    the model are not passed on: every rank of a pipeline has the batch.

    Attributes:
        index: from 0.
        count: stages of the model.
        module: the user's own submodules and Parameters, and the order in which to use them. Called with the values of
            `inputs`, then of `uses`; returns a tuple of the values of `makes`, the last stage the model's output.
        model: the user's; says whether the stage trains or evaluates.
        inputs: which of the model's inputs it uses: places, or keywords.
        takes: values that cross the cut before it.
        uses: those of `takes` that `module` is called with.
        makes: values that it computes for later stages.
        gives: values that cross the cut behind it: some of `takes`, and `makes`.
        names: name in `module` of each of its parameters and buffers, to the model's own name for it.
        shared: the model's names of the parameters that other stages hold too (tied weights).
        layers: the model's names of the submodules that it runs, in order; for people.
        nbytes: of the values that cross the cut behind it, for the sample's batch.
        segments: makes the layers of `module`, one by one, of the parameters as they are then.
        outline: of the model's inputs, see `_micro.outline`; None if it does not matter.
        fewest: samples that a micro-batch must have for it.
        seconds: that its steps take, forward and backward; 0 if that was not measured.
        whole: submodules of it that are one step each although they have parts, and why they could not be looked into.
        written: buffers of the model, but for batch norm's, that each forward changes while it trains.
        fixed_shapes: whether shapes that cross the model's cuts follow from those of its inputs.
        training: whether all this is so while the model trains, or while it evaluates.
        settled: what must stay as it was when the model was split; None if that is not watched.
        other: the stage in the other mode, of the same `module`; None if modes do not differ.
    """

    index: int
    count: int
    module: torch.nn.Module
    model: torch.nn.Module
    inputs: tuple[int | str, ...] = ()
    takes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    nbytes: int = 0
    segments: Callable[[], tuple[Segment, ...]] = field(default=tuple, compare=False, repr=False)
    outline: Any = None
    fewest: int = 1
    settled: Any = field(default=None, compare=False, repr=False)
    seconds: float = 0.0
    whole: dict[str, str] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    fixed_shapes: bool = True
    training: bool = True
    other: Stage | None = None

    @property
    def now(self) -> Stage:
        """The stage in the mode in which the model is."""
        return self if self.other is None or self.training == self.model.training else self.other

    @property
    def first(self) -> bool:
        """Whether nothing comes before it."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it makes the model's output."""
        return self.index == self.count - 1

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return its parameters by the model's names."""
        return {self.names[name]: parameter for name, parameter in self.module.named_parameters()}

    def __str__(self) -> str:
        layers = ", ".join(self.layers) or "no module"
        return f"stage {self.index} of {self.count}: {layers}; {self.nbytes} bytes go on to the next"
