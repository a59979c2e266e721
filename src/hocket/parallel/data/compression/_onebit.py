"""Gradients as signs."""

import torch

from ._compressor import BucketJob
from ._pack import pack_bits, unpack_bits
from ._rows import RowCompressor


class OneBit(RowCompressor):
    """A bit for each element, and two float32 for each block: the means of what is not negative and of what is.

    1-bit SGD with error feedback (Seide et al. 2014); a block stands for the paper's column of a matrix. The mean is
    the nearest that one value can be to many, so that

        ||C(x) - x||^2 = ||x||^2 - (||x+||_1^2 / n+ + ||x-||_1^2 / n-) <= (1 - ||x||_1^2 / (d ||x||^2)) ||x||^2

    for a block x of d elements, of which n+ and n- have either sign: a contraction with delta = ||x||_1^2 /
    (d ||x||^2), which is 1/d at least (Karimireddy et al. 2019 for the scaled sign), and about 2/pi for normal values.

    Args:
        block: Elements that share two values.
    """

    name = "1bit"
    feedback = True

    def __init__(self, block: float) -> None:
        self.block = int(block)

    def message_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return 8 bytes for each block and a bit for each element, rounded up to 8 bytes."""
        return 8 * (numel // self.block) + -(-numel // 64) * 8

    def encode(self, rows: torch.Tensor, messages: torch.Tensor, job: BucketJob, *, keep: bool) -> None:
        count, numel = rows.shape
        blocks = rows.view(count, -1, self.block)
        bits = blocks >= 0
        ones = bits.to(rows.dtype)
        positive = ones.sum(2)
        above = blocks.clamp(min=0).sum(2) / positive.clamp(min=1)
        below = blocks.clamp(max=0).sum(2) / (self.block - positive).clamp(min=1)
        values = torch.stack([below, above - below], 2).float()
        begin = 8 * values.shape[1]
        messages[:, :begin].copy_(values.view(count, -1).view(torch.uint8))
        messages[:, begin : begin + numel // 8].copy_(pack_bits(bits.view(-1)).view(count, -1))
        if keep:
            exact = values.to(rows.dtype)
            blocks.sub_(torch.addcmul(exact[:, :, :1], ones, exact[:, :, 1:]))

    def decode(self, message: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, *, add: bool) -> None:
        blocks = out.view(-1, self.block)
        begin = 8 * len(blocks)
        values = message[:begin].view(torch.float32).view(-1, 2).to(out.dtype)
        ones = unpack_bits(message[begin : begin + out.numel() // 8], out.dtype).view_as(blocks)
        found = torch.addcmul(values[:, :1], ones, values[:, 1:])
        if add:
            blocks.add_(found)
        else:
            blocks.copy_(found)
