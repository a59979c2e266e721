"""Stochastic rounding."""

from __future__ import annotations

import torch

_LEAST, _MOST = -(2**63), None


def round_stochastically(values: torch.Tensor, noise: torch.Tensor, generator: torch.Generator) -> None:
    """Rounds each value to one of the two integers next to it, in place, so that the expected value is the value.

    Uniform noise between -1/2 and 1/2 is added before rounding to the nearest. It has 16 bits, since to draw random
    numbers is what takes longest: the expected value is off by 2^-17 at most, which for int8 is less than the rounding
    of a float32 as large as the largest of the block.

    Args:
        values: a float type, contiguous.
        noise: int64, to be overwritten; a quarter as many as `values`, rounded up.
        generator: of the noise.
    """
    noise.random_(_LEAST, _MOST, generator=generator)
    flat = values.view(-1)
    flat.add_(noise.view(torch.int16)[: flat.numel()].to(values.dtype), alpha=2.0**-16)
    flat.round_()
