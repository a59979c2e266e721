"""One stage of a split model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Segment:
    """Some steps of a model in a row, as a module."""

    # called with the values of `inputs`, then of `uses`; returns a tuple of the values of `makes`, or the model's
    # output if it comes last
    module: torch.nn.Module
    inputs: tuple[int | str, ...]  # which of the model's inputs it uses: places, or keywords
    uses: tuple[str, ...]  # names of the values that it uses
    makes: tuple[str, ...]  # names of the values that it computes for what comes behind it


@dataclass(frozen=True)
class Stage:
    """A contiguous part of a model that one rank runs.

    Values are named. A value that a later stage needs is passed on from stage to stage, whoever uses it. The inputs of
    the model are not passed on: every rank of a pipeline has the batch.
    """

    index: int  # from 0
    count: int  # stages of the model
    # the user's own submodules and Parameters, and the order in which to use them. Called with the values of `inputs`,
    # then of `uses`; returns a tuple of the values of `makes`, the last stage the model's output.
    module: torch.nn.Module
    model: torch.nn.Module  # the user's; says whether the stage trains or evaluates
    inputs: tuple[int | str, ...] = ()  # which of the model's inputs it uses: places, or keywords
    takes: tuple[str, ...] = ()  # values that cross the cut before it
    uses: tuple[str, ...] = ()  # those of `takes` that `module` is called with
    makes: tuple[str, ...] = ()  # values that it computes for later stages
    gives: tuple[str, ...] = ()  # values that cross the cut behind it: some of `takes`, and `makes`
    # name in `module` of each of its parameters and buffers, to the model's own name for it
    names: dict[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()  # the model's names of the parameters that other stages hold too (tied weights)
    layers: tuple[str, ...] = ()  # the model's names of the submodules that it runs, in order; for people
    nbytes: int = 0  # of the values that cross the cut behind it, for the sample's batch
    # makes the layers of `module`, one by one, of the parameters as they are then
    segments: Callable[[], tuple[Segment, ...]] = field(default=tuple, compare=False, repr=False)
    outline: Any = None  # of the model's inputs, see `_micro.outline`; None if it does not matter
    fewest: int = 1  # samples that a micro-batch must have for it
    # sizes of the sample by which it holds alone: of each the tensor of the inputs, in order, its dim, and the size
    unseen: tuple[tuple[int, int, int], ...] = ()
    # what must stay as it was when the model was split; None if that is not watched
    settled: Any = field(default=None, compare=False, repr=False)
    seconds: float = 0.0  # that its steps take, forward and backward; 0 if that was not measured
    # submodules of it that are one step each although they have parts, and why they could not be looked into
    whole: dict[str, str] = field(default_factory=dict)
    # buffers of the model, but for batch norm's, that each forward changes while it trains
    written: tuple[str, ...] = ()
    fixed_shapes: bool = True  # whether shapes that cross the model's cuts follow from those of its inputs
    training: bool = True  # whether all this is so while the model trains, or while it evaluates
    other: Stage | None = None  # the stage in the other mode, of the same `module`; None if modes do not differ

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
