"""Gradients that a program takes of its inputs, or of outputs that it has cut off: they are of this rank's samples."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import BatchShard, divisors, tensors_in
from ._coupling import gathered, joined, samples_meet

_LOOKED_AT = 32  # losses that may be of outputs that were cut off


class InputGradients:
    """Tells, once and on one rank, of gradients of samples by a mean over a rank's samples."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._leaves: list[torch.Tensor] | None = []  # inputs that get gradients; None once that was told

    def given(self, inputs: Any) -> None:
        """Note what inputs of a forward pass are made of, of which back-propagation would give gradients."""
        if self._leaves is not None:
            made = (leaf for one in tensors_in(inputs) for leaf in torch_adapter.leaves(one))
            self._leaves = [one for one in made if not isinstance(one, torch.nn.Parameter)]

    def backward(self, loss: torch.Tensor, share: BatchShard) -> None:
        """Tell of what the back-propagation of a loss leaves in them."""
        if self._leaves:
            leaves, self._leaves = self._leaves, []
            self._tell("the .grad that backward() gives an input", loss, leaves, share)

    def asked(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], share: BatchShard | None) -> None:
        """Tell of what torch.autograd.grad gives."""
        if CachedGradients.looks:
            return
        if len(outputs) == 1 and self._leaves is not None:
            self._tell("torch.autograd.grad", outputs[0], inputs, share)
        # What asks for gradients so (a penalty of them, a score) has inputs require them for it, and reads no .grad.
        self._leaves = self._leaves and [one for one in self._leaves if all(one is not x for x in inputs)]

    def _tell(self, what: str, output: torch.Tensor, leaves: Sequence[torch.Tensor], share: BatchShard | None) -> None:
        """Warn of a mean's gradient by samples, on one rank."""
        if share is None or self._rank or not 0 < share.samples < share.total or output.numel() != 1:
            return
        if not any(one.is_leaf and one.dim() and len(one) == share.samples for one in leaves):
            return
        if any(count and count % share.samples == 0 for count in divisors(output, share.samples)):
            self._leaves = None
            warn(
                f"{what} is what a mean over this rank's {share.samples} samples changes by each of them: "
                f"{share.total / share.samples:g} times that of one device, whose mean is over {share.total} (the sign "
                "is the same). Take torch.autograd.grad of a sum, which is the same on any number of ranks, or of "
                "outputs with grad_outputs of ones",
            )


class CachedGradients:
    """Tells, once and on one rank, of a loss of outputs cut off from the model, in which samples meet.

    Gradient caching computes outputs without a graph, a loss of these, and takes the gradient that it leaves there to
    the model by a back-propagation of its own, whose root shows nothing of that loss.

    Attributes:
        looks: Whether one of them takes gradients now, which are none of the program.
    """

    looks: ClassVar[bool] = False

    def __init__(self, rank: int, ranks: int) -> None:
        self._ranks = ranks
        self._left = 0 if rank or ranks < 2 else _LOOKED_AT
        self._shapes = set[torch.Size]()  # of a row of the outputs of this batch

    def next(self) -> None:
        """Take notice of a batch."""
        self._shapes.clear()

    def made(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take notice of what the model gives."""
        if self._left:
            self._shapes |= {one.shape[1:] for one in outputs if one.dim()}

    def look(self, loss: torch.Tensor, share: BatchShard | None) -> None:
        """Look at the root of a back-propagation, which may end at outputs."""
        if CachedGradients.looks or not self._left or not self._shapes or torch_adapter.in_backward():
            return
        if share is None or not 1 < share.samples < share.total or loss.numel() != 1 or loss.grad_fn is None:
            return
        self._left -= 1
        leaves = torch_adapter.leaves(loss)
        cut = [one for one in leaves if one.shape[1:] in self._shapes and not isinstance(one, torch.nn.Parameter)]
        if not cut or len(cut) < len(leaves) or gathered(loss, set(), self._ranks) or joined(loss):
            return
        CachedGradients.looks = True
        try:
            meet = samples_meet(loss, cut, share.samples, leaves=True)
        finally:
            CachedGradients.looks = False
        if meet:
            self._left = 0
            warn(
                f"samples of this rank, {share.samples} of {share.total} of the batch, meet in a loss of outputs that "
                "the loop has computed without a graph, and whose gradient it keeps (gradient caching): one device "
                "compares those of the whole batch. Compute it from the outputs of all ranks (torch.distributed."
                "all_gather of them, with this rank's own in its place), and let backward() have this rank's part of "
                'what it leaves, with loss_reduction="sum"',
            )
