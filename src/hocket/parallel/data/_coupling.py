"""Finds losses in which samples meet, from the loss's graph alone: the program that computes it is the user's."""

from collections.abc import Sequence

import torch

_MEET = 1e-5
"""Relative to a sample's own second derivative; that by another sample is zero to the bit where they do not meet."""


def samples_meet(loss: torch.Tensor, outputs: Sequence[torch.Tensor], samples: int) -> bool:
    """Return whether a loss is more than a sum of terms of one sample each, beyond the outputs of a model.

    In such a sum the derivative by one sample's output does not depend on another's. In-batch negatives, a root of a
    mean or a statistic of the batch are none. The graph is kept; where it cannot be derived twice, nothing is found.

    Args:
        loss: A scalar.
        outputs: Of the model; those count that have one row for each sample.
        samples: How many there are.
    """
    rows = [one for one in outputs if one.requires_grad and one.dim() and len(one) == samples and not one.is_leaf]
    if samples < 2 or not rows or loss.numel() != 1 or not loss.requires_grad:
        return False
    try:
        with torch.enable_grad():
            first = torch.autograd.grad(loss, rows, create_graph=True, allow_unused=True)
            some = [one[0] for one in first if one is not None and one.requires_grad]
            if not some:
                return False
            weights = [torch.linspace(-1, 1.3, one.numel(), dtype=one.dtype, device=one.device) for one in some]
            probe = torch.stack([(one.reshape(-1) * w).sum() for one, w in zip(some, weights, strict=True)]).sum()
            second = torch.autograd.grad(probe, rows, retain_graph=True, allow_unused=True)
    except RuntimeError:  # a part has no second derivative, or changes what it needs in place
        return False
    found = [one.detach().abs() for one in second if one is not None and one.numel()]
    own = max((float(one[0].max()) for one in found), default=0.0)
    other = max((float(one[1:].max()) for one in found), default=0.0)
    return other > _MEET * max(own, 1e-30)
