"""Packs small integers into bytes, a machine word at a time."""

from __future__ import annotations

import functools

import torch

# A word holds one value in each byte. Multiplied by the constant, the values stand side by side in its top byte: the
# products of other bytes fall on bits of their own below it, so that none carries, or beyond the word.
_GATHER_BITS = sum(1 << (56 - 7 * i) for i in range(8))
_GATHER_PAIRS = sum(1 << (24 - 6 * i) for i in range(4))


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Booleans, a number of them that 8 divides, as bytes: the first is the lowest bit. Shape [n] to [n / 8]."""
    return (bits.view(torch.int64) * _GATHER_BITS >> 56).to(torch.uint8)


def pack_pairs(values: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 3 as uint8, a number of them that 4 divides, in bytes: the first is lowest. Shape [n] to [n / 4]."""
    return (values.view(torch.int32) * _GATHER_PAIRS >> 24).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `pack_bits` packed, as 0 and 1 of a float type. Shape [n / 8] to [n / 8, 8]."""
    return _table(1, dtype, packed.device).index_select(0, packed.int())


def unpack_pairs(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `pack_pairs` packed, as a float type. Shape [n / 4] to [n / 4, 4]."""
    return _table(2, dtype, packed.device).index_select(0, packed.int())


@functools.cache
def _table(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values in each of the 256 bytes, from the lowest bits on."""
    byte = torch.arange(256, device=device)[:, None]
    shifts = torch.arange(0, 8, width, device=device)
    found: torch.Tensor = (byte >> shifts & (2**width - 1)).to(dtype)
    return found
