"""The loss of the first batch: whether weights of ranks can make it that of one device at all."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket._program import warn

from ..batches import BatchShard, divisors, is_empty
from ..mesh import World
from ._apart import PADDED, Apart
from ._compared import compares_samples
from ._coupling import (
    bends_one,
    gathered,
    outputs_apart,
    samples_compete,
    samples_meet,
    samples_paired,
    sums_of_samples,
    taken_beside,
)

SMALL_SUM = (
    "a term of the loss is a sum over this rank's {} samples times a constant: if that is not one divided by how many "
    "the loop has, the term counts 1/{} of what it does on one device, since ranks' losses are averaged: make it a "
    "mean over the samples that the loop has"
)


class FirstLoss(NamedTuple):
    """What a rank's loss of the first batch is like."""

    gathers: bool
    """Whether ranks' losses have samples in common, by a collective that the loop calls."""
    by_passes: bool
    """Whether the loop calls the model for each sample, which has rows of its own."""
    meet: bool
    """Whether samples meet in it."""
    summed: str
    """Which sum over samples it is: "sum", "weights", "small", or none."""
    ranked: str
    """The operator by which it ranks samples."""
    mixed: str
    """What the model computes for a sample from others, and how much that changes."""
    batch_second: bool
    """Whether it does so since it takes the batch as the second dimension."""
    padded: str
    """What padding changes."""
    length: int
    """The length to which samples are padded; 0 where that is not known."""
    blind: bool
    """Whether there is one sample, so that nothing shows whether samples meet."""
    alone: bool
    """Whether there is one sample, and the loss compares samples."""
    empty: bool
    """Whether nothing counts in it, so that it does not show what it is."""


class FirstLosses(NamedTuple):
    """What all ranks' losses of the first batch are like."""

    gathers: bool
    """Whether some rank's gathers."""
    empty: bool
    """Whether nothing counts on any rank."""
    blind: bool
    """Whether no rank has two samples that would show whether they meet."""
    compares: bool
    """Whether each rank has one sample, and was told that the loss compares samples."""


def first_loss(
    loss: torch.Tensor,
    outputs: Sequence[list[torch.Tensor]],
    kept: Sequence[torch.Tensor],
    made: set[int],
    share: BatchShard,
    apart: Apart | None,
) -> FirstLoss:
    """Return what this rank's loss is like.

    `outputs` are what the model gave in each forward pass for the first batch, `kept` what it has in attributes after
    the last of them, and `made` places in the graph of what that gave; `apart` is what the model computes for a sample
    from others, None where that was not found out.
    """
    samples, single = share.samples, loss.numel() == 1
    gathers = gathered(loss, made, share.world)  # then no second derivative: it would be a collective, too
    taken = taken_beside(loss, kept, made)
    rows = [one for i, one in enumerate(taken, apart.outputs) if i in apart.rows and one is not None] if apart else []
    given = [one for some in outputs for one in some if one.dim()]
    by_passes = len(outputs) >= samples > 1 and any(len(one) != samples for one in given)
    looked = single and share.total > 1 and not gathers and not by_passes
    mixed, padded = ("", "") if apart is None else apart.relevant(outputs[-1], taken, loss)
    return FirstLoss(
        gathers=gathers,
        by_passes=by_passes,
        meet=not gathers
        and (samples_meet(loss, outputs_apart(outputs) + rows, samples) or samples_paired(loss, made, samples)),
        summed=sums_of_samples(loss, made, samples) if single else "",
        ranked=samples_compete(loss, made, samples) if looked else "",
        mixed=mixed,
        batch_second=apart is not None and apart.batch_second,
        padded=padded,
        length=0 if apart is None else apart.length,
        blind=looked and samples == 1 and (not divisors(loss, samples) or bends_one(loss, made)),
        alone=looked and samples == 1 and compares_samples(loss, given, made),
        empty=not samples or (single and (loss.grad_fn is None or is_empty(loss.grad_fn))),
    )


def check_first(mine: FirstLoss, share: BatchShard, world: World) -> FirstLosses:
    """Refuse losses that no weights of ranks make that of one device; a collective operation.

    Raises:
        RuntimeError: samples meet in it, or it is a sum; on every rank alike.
    """
    everyone = world.from_all(mine)
    _refuse(everyone)
    compares = any(one.alone for one in everyone) and all(one.alone or one.empty for one in everyone)
    if not world.rank:
        _tell(everyone, share, compares=compares)
    shown = share.total > share.world or not all(one.blind or one.empty for one in everyone)
    return FirstLosses(
        gathers=any(one.gathers for one in everyone),
        empty=all(one.empty for one in everyone),
        blind=not shown and any(one.blind for one in everyone),
        compares=compares,
    )


def _refuse(everyone: Sequence[FirstLoss]) -> None:
    if said := next((one for one in everyone if one.mixed), None):
        if said.batch_second:
            raise RuntimeError(
                "the model computes what it gives for a sample from other samples of its batch: it has recurrent "
                "layers or attention that take the batch as the second dimension, and hocket divides the first "
                "among ranks. Have the loader give samples first, or say batch_first=True if that is what was meant"
            )
        if said.mixed.endswith("as a sum over samples is"):
            raise RuntimeError(
                f"the model computes a loss that is a sum over samples ({said.mixed}), and ranks' losses are averaged: "
                'pass hocket.distribute(..., loss_reduction="sum"), or divide it by the number of samples. Where the '
                "loop tells the model what to divide by (num_items_in_batch), leave that out, or pass "
                'loss_reduction="sum" and give it hocket.total(count): a sum over ranks is divided by what all count'
            )
        raise RuntimeError(
            "the model computes what it gives for a sample, or its loss, from other samples of its batch (a "
            f"statistic or ranking of the batch, in-batch negatives), and a rank has only some of them: {said.mixed}. "
            "Compute it within each sample, gather what it needs with a collective that has a gradient, or take "
            "hocket.Trainer with a plan that does not cut batches"
        )
    lengths = {one.length for one in everyone} - {0}  # alike where a loop pads to one length
    if padded := next((one.padded for one in everyone if one.padded and (not one.length or len(lengths) > 1)), ""):
        raise RuntimeError(PADDED.format(padded))
    if operator := next((one.ranked for one in everyone if one.ranked), ""):
        raise RuntimeError(
            f"the loss ranks the samples of the batch (by {operator}), and a rank has only some of them: gather "
            "what it ranks with a collective that has a gradient, rank within each sample, take it "
            "of a detached tensor if it is there for stability alone, or take hocket.Trainer with a plan that does "
            "not cut batches"
        )
    if any(one.meet for one in everyone):
        raise RuntimeError(
            "samples of the batch meet in the loss (in-batch negatives, a root, absolute value or largest of "
            "means, a statistic of the batch), so that it is not that of one device when ranks have parts each: "
            "gather what it needs with a collective that has a gradient (torch.distributed.nn.functional."
            "all_gather), or take hocket.Trainer with a plan that does not cut batches"
        )
    if any(one.summed == "weights" for one in everyone):
        raise RuntimeError(
            "the loss is a sum weighted by what adds up to one over this rank's samples, so that nothing tells how "
            "much other ranks' samples weigh: pass hocket.distribute(..., loss_weight=) with the sum of a batch's "
            "weights before, or divide the weighted sum by it (loss = (losses * w).sum() / w.sum())"
        )
    if any(one.summed == "sum" for one in everyone):
        raise RuntimeError(
            "the loss is a sum over samples, or has a term that is one, and ranks' losses are averaged: pass "
            'hocket.distribute(..., loss_reduction="sum") if all of it is a sum, and report it by '
            "hocket.total(loss); else make that term a mean over the samples that the loop has"
        )


def _tell(everyone: Sequence[FirstLoss], share: BatchShard, *, compares: bool) -> None:
    if compares:
        warn(
            "each rank has one sample of the batch, and the loss seems to compare samples (in-batch negatives, a "
            "triplet, a statistic of the batch): it puts them in another order, makes a matrix of samples by samples, "
            "or has a term that does not depend on what the model gave. One device compares those of the whole batch. "
            "Gather what is compared with a collective that has a gradient (torch.distributed.nn.functional."
            "all_gather), or take hocket.Trainer with a plan that does not cut batches. All is right if that term has "
            "nothing to count in this batch, or a factor of zero",
        )
    if everyone[0].summed == "small":
        warn(SMALL_SUM.format(share.samples, share.world))
