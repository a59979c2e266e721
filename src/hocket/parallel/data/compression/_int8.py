"""Gradients as whole numbers from -127 to 127."""

import torch

from ._compressor import BucketJob
from ._rows import RowCompressor, round_to_scales

_LEVELS = 127


class Int8(RowCompressor):
    """A byte for each element and a float32 for each block: the size of a level, a 127th of the block's largest value.

    Stochastic rounding makes it unbiased (QSGD, Alistarh et al. 2017, with the largest value for the norm). Among more
    than two ranks the average is encoded once more, which is unbiased too.

    Args:
        block: Elements that share a scale.
    """

    name = "int8"
    unbiased = True
    two_phases = True

    def __init__(self, block: float) -> None:
        self.block = int(block)

    def message_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of scales, rounded up to 8, and a byte for each element."""
        return _scales_nbytes(numel // self.block) + numel

    def encode(self, rows: torch.Tensor, messages: torch.Tensor, job: BucketJob, *, keep: bool) -> None:
        count, numel = rows.shape
        blocks = rows.view(count, -1, self.block)
        original = rows.clone() if keep else None
        scales = (blocks.abs().amax(2) / _LEVELS).float()
        round_to_scales(blocks, scales, job)
        begin = _scales_nbytes(scales.shape[1])
        messages[:, : 4 * scales.shape[1]].copy_(scales.contiguous().view(torch.uint8))
        messages[:, begin:].view(torch.int8).copy_(rows)
        if original is not None:
            blocks.mul_(scales[:, :, None])
            torch.sub(original, rows, out=rows)

    def decode(self, message: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, *, add: bool) -> None:
        blocks = out.view(-1, self.block)
        begin = _scales_nbytes(len(blocks))
        scales = message[: 4 * len(blocks)].view(torch.float32)[:, None]
        levels = message[begin:].view(torch.int8).view_as(blocks)
        if add:
            blocks.add_(levels.to(out.dtype).mul_(scales))
        else:
            blocks.copy_(levels).mul_(scales)


def _scales_nbytes(blocks: int) -> int:
    return -(-4 * blocks // 8) * 8
