"""Gradients that a program takes of its inputs: those of a mean are over this rank's samples, and not the batch's."""

from collections.abc import Sequence
from typing import Any

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import BatchShard, divisors, tensors_in


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
