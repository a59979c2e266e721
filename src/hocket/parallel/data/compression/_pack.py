"""Stochastic rounding, and packing small integers into bytes, a machine word at a time."""

import functools

import torch

_LEAST, _MOST = -(2**63), None
# A word holds one value in each byte. Multiplied by the constant, the values stand side by side in its top byte: the
# products of other bytes fall on bits of their own below it, so that none carries, or beyond the word.
_GATHER_BITS = sum(1 << (56 - 7 * i) for i in range(8))
_GATHER_PAIRS = sum(1 << (24 - 6 * i) for i in range(4))


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack booleans into bytes, the first as the lowest bit. Shape [n] to [n / 8]; 8 divides n."""
    return (bits.view(torch.int64) * _GATHER_BITS >> 56).to(torch.uint8)


def pack_pairs(values: torch.Tensor) -> torch.Tensor:
    """Pack uint8 numbers 0 to 3 into bytes, the first as the lowest bits. Shape [n] to [n / 4]; 4 divides n."""
    return (values.view(torch.int32) * _GATHER_PAIRS >> 24).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack what `pack_bits` packed, as 0 and 1 of a float type. Shape [n / 8] to [n / 8, 8]."""
    return _table(1, dtype, packed.device).index_select(0, packed.int())


def unpack_pairs(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack what `pack_pairs` packed, as a float type. Shape [n / 4] to [n / 4, 4]."""
    return _table(2, dtype, packed.device).index_select(0, packed.int())


@functools.cache
def _table(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the values in each of the 256 bytes, from the lowest bits on."""
    byte = torch.arange(256, device=device)[:, None]
    shifts = torch.arange(0, 8, width, device=device)
    found: torch.Tensor = (byte >> shifts & (2**width - 1)).to(dtype)
    return found


def round_stochastically(values: torch.Tensor, noise: torch.Tensor, generator: torch.Generator) -> None:
    """Round each value to one of the two integers next to it, in place, so that the expected value is the value.

    Uniform noise between -1/2 and 1/2 is added before rounding to the nearest. It has 16 bits, since to draw random
    numbers is what takes longest: the expected value is off by 2^-17 at most, which for int8 is less than the rounding
    of a float32 as large as the largest of the block.

    Args:
        values: Values of a float type, contiguous.
        noise: int64, to be overwritten; a quarter as many as `values`, rounded up.
        generator: Generator of the noise.
    """
    noise.random_(_LEAST, _MOST, generator=generator)
    flat = values.view(-1)
    flat.add_(noise.view(torch.int16)[: flat.numel()].to(values.dtype), alpha=2.0**-16)
    flat.round_()
