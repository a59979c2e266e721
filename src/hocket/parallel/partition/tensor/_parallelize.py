"""Makes a model tensor-parallel: examines it on a sample, cuts it, and makes sure that it computes what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.sharding import Shard, cut
from hocket.workload import DividedShare, divided_share, watching
from hocket.workload.division import (
    CollectiveCount,
    Recording,
    Region,
    apart,
    choose,
    record,
    sequences,
    storage_of,
    tally,
)

from ...batches import called, tensors_in
from ...batches import mapped as with_tensors
from ...mesh import World
from ...state import broadcast_tensors, check_model, give_back
from ._apply import Applied
from ._numbers import align
from ._verify import Verifier


class LayerDecision(NamedTuple):
    """What became of a layer."""

    name: str  # of the layer
    form: str  # "column", "row", "heads", "vocabulary", "channels", ..., or "whole"
    reason: str  # why


class ParameterCut(NamedTuple):
    """Where this rank's part of a parameter or buffer lies in the full one."""

    shape: tuple[int, ...]  # of the full tensor
    dim: int  # the one that is cut
    # into which the dim falls; each is shared out equally. One, unless one matrix holds several.
    segments: tuple[int, ...]


@dataclass(slots=True)
class TensorParallel:
    """A model that was made tensor-parallel in place."""

    model: nn.Module  # the user's model
    world: World  # the ranks that share it
    decisions: list[LayerDecision] = field(default_factory=list)  # what became of each layer
    # (layer, reason) of those that stayed whole although they have parameters that might be cut
    refused: list[tuple[str, str]] = field(default_factory=list)
    share: DividedShare = field(default=DividedShare(0.0, 0.0, 0.0))  # how much of the model is divided
    # how parameters and buffers are cut, by their names in the model; what is not named is whole
    pieces: dict[str, ParameterCut] = field(default_factory=dict)
    # what one training step on the sample is expected to communicate within `world`
    collectives: list[CollectiveCount] = field(default_factory=list)

    def __str__(self) -> str:
        width = max((len(d.name) for d in self.decisions), default=11)
        lines = [f"{d.name or '(the model)':{width}}  {d.form:10}  {d.reason}" for d in self.decisions]
        return "\n".join([*lines, *map(str, self.collectives)])

    def left_whole(self) -> list[str]:
        """Return the three largest layers, by bytes, that every rank has all of, each with the reason."""
        reasons = dict(self.refused)
        nbytes: Counter[str] = Counter()
        for name, parameter in self.model.named_parameters():
            owner = name
            while owner not in reasons and owner:
                owner = owner.rpartition(".")[0]
            if name not in self.pieces:
                nbytes[owner] += parameter.nbytes
        return [f"{name or 'the model'} ({reasons.get(name, 'no form for it')})" for name, _ in nbytes.most_common(3)]

    def chunks(
        self, name: str, tensor: torch.Tensor, offsets: tuple[int, ...] | None = None
    ) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Return the boxes in the full tensor that a box of this rank's part is: several, where the part has segments.

        `tensor` may also be a gradient or optimizer state that is cut alike, and begins at `offsets` in this rank's
        part, or is all of it. Each box is returned as where it begins in the full tensor, and a view of `tensor`.
        """
        offsets = offsets or (0,) * tensor.dim()
        piece = self.pieces.get(name)
        if piece is None:
            return [(offsets, tensor)]
        found, at, dim = [], 0, piece.dim
        mine = offsets[dim], offsets[dim] + tensor.shape[dim]
        for begin, end in Shard.even(dim, piece.segments, self.world.size).ranges(self.world.rank):
            low, high = max(mine[0], at), min(mine[1], at + end - begin)
            if low < high:
                where = (*offsets[:dim], begin + low - at, *offsets[dim + 1 :])
                found.append((where, tensor.narrow(dim, low - mine[0], high - low)))
            at += end - begin
        return found

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor that is to be cut as parameter `name` is."""
        piece = self.pieces.get(name)
        if piece is None:
            return full
        return cut(full, Shard.even(piece.dim, piece.segments, self.world.size), self.world.rank)


def parallelize(
    model: nn.Module, world: World, sample: Any, *, sequence: bool = False, verify: bool = True, aligned: bool = False
) -> TensorParallel:
    """Cut the layers of `model` over the ranks of `world`, in place; a collective operation.

    The model is run on the sample, and what is seen decides: pairs of layers between which every rank has its part
    (MLPs, attention by heads, convolutions) need one all_reduce forward and one backward; what pairs with nothing is
    cut alone, and its output gathered; what cannot be cut stays whole. Parameters keep their identity. All ranks begin
    with rank 0's weights, sample, and state of the default random number generators.

    Where the model has no dropout, the loss curve is that of one process up to rounding. Dropout on what is whole
    drops alike on all ranks; dropout on parts drops by other random numbers on every rank, so that a run with dropout
    is like one of one process in distribution, not in numbers.

    Args:
        model: an ordinary module, built alike on all ranks.
        world: the ranks that share the model; all of them get the same batches.
        sample: the positional inputs of one forward pass, or a dict of keywords; sizes other than the first (the
            batch's) as in training.
        sequence: whether norms, dropout and residual sums between the cut layers work on parts of the sequence.
        verify: whether to compare outputs and gradients with the plain model's; regions that differ stay whole.
        aligned: whether the ranks are known to hold the same model, with the same weights.

    Raises:
        ValueError: the ranks' models differ.
    """
    if world.size == 1:
        return TensorParallel(model, world)
    if not aligned:
        check_model(model, world)
        broadcast_tensors([*model.parameters(), *model.buffers()], world)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sample = with_tensors(sample, lambda t: t.detach().cpu().requires_grad_(t.requires_grad))
    sample = with_tensors(world.from_root(sample), lambda t: t.detach().to(device).requires_grad_(t.requires_grad))
    align(world, device)
    ignored = {storage_of(one) for one in (*model.parameters(), *model.buffers(), *tensors_in(sample))}
    traces: list[Any] = []

    @contextmanager
    def watch(recording: Recording) -> Iterator[None]:
        with watching(recording, ignored, bytes_moved=False) as trace:
            traces.append(trace)
            yield

    recording = record(model, lambda: called(model, sample), tensors_in, watch)
    give_back()  # activations
    choice = choose(model, recording, world.size)
    regions = choice.regions
    wrong: list[tuple[Region, str]] = []
    verifier = Verifier(model, sample, recording, world)
    if verify:
        regions, wrong = verifier.sort_out(regions)
        singles = [single for region, why in wrong for single in apart(region, why, world.size)]
        if singles:
            singles, _ = verifier.sort_out(singles, regions)
            regions = [*regions, *singles]
    if sequence:
        zones, unsuited = sequences(model, recording, regions, world.size)
        choice.refused.update(unsuited)
        if verify:
            zones, more = verifier.sort_out(zones, regions)
            wrong += more
        regions = [*regions, *zones]
    refused = dict(choice.refused)
    cut_layers = {name for region in regions for name in region.names}
    for region, difference in wrong:
        names = [name for name in region.names if name not in cut_layers]
        refused.update(dict.fromkeys(names, f"cut as {region.reason or 'a pair'}, {difference}"))
    share = divided_share(model, traces[0], regions, world.size)
    applied = Applied(model, regions, recording, world)
    result = TensorParallel(model, world, _decisions(model, regions, refused), list(refused.items()), share)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        split = applied.cuts.get(id(tensor))
        if split is not None:
            shape = (*tensor.shape[: split.dim], split.size, *tensor.shape[split.dim + 1 :])
            result.pieces[name] = ParameterCut(tuple(shape), split.dim, split.segments)
    result.collectives = tally(regions, recording)
    return result


def is_leaf(module: nn.Module) -> bool:
    """Return whether a graph of the model must take the module as one: it is cut."""
    return hasattr(module, "form")


def _decisions(model: nn.Module, regions: list[Region], refused: dict[str, str]) -> list[LayerDecision]:
    forms: dict[str, tuple[str, str]] = {name: ("whole", reason) for name, reason in refused.items()}
    for region in regions:
        members = ", ".join(region.names)
        for name, role in zip(region.names, region.roles.values(), strict=False):
            forms[name] = (role.kind, region.reason or f"together: {members}")
        for name, one in region.tensors.items():
            forms[name] = (f"dim {one.shard.dim}", region.reason or f"together: {members}")
    named = dict.fromkeys([*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())])
    return [LayerDecision(n, *forms[n]) for n in named if n in forms]
