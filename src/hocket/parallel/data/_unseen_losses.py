"""Losses that a program computes of the model by another way than its forward pass, which weights do not follow."""

from collections.abc import Iterable

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import batch as _batch
from ..batches import divisors, due, of_parameters


class UnseenLosses:
    """Tells, once and on one rank, of one that does not divide by samples: by their numbers ranks are weighted then."""

    def __init__(self, rank: int) -> None:
        self._looks = rank == 0
        self._count = 0

    def backward(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        """Look at a loss whose back-propagation begins, in the calls that are powers of two and in every 32nd."""
        note = _batch.trained()
        if not self._looks or note is None or note.share is None or note.stated or _batch.contested():
            return
        self._count += 1
        samples = note.share.samples
        if not due(self._count) or not 0 < samples < note.share.total or loss.numel() != 1 or loss.grad_fn is None:
            return
        odd = [one for one in divisors(loss, samples) if one and one % samples and samples % one]
        if not odd or of_parameters(loss.grad_fn):
            return
        mine = {id(one) for one in parameters}
        if not any(id(one) in mine for one in torch_adapter.leaves(loss)):
            return
        self._looks = False
        warn(
            f"a loss that is not computed by model(...) (but by another method of it, its module, or "
            f"torch.func.functional_call) divides by {odd[0]:g}, and this rank has {samples} samples, by which ranks "
            "are weighted then: if it is a mean over something else (tokens that count, weights), it is not that of "
            "one device. Compute it from model(...), or pass hocket.distribute(..., loss_weight=)",
        )
