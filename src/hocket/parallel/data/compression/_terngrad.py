"""Gradients as -1, 0 and 1."""

import torch

from ._compressor import BucketJob
from ._pack import pack_pairs, unpack_pairs
from ._rows import RowCompressor, round_to_scales


class TernGrad(RowCompressor):
    """Two bits for each element, and a float32 for each block: the largest value, to which 1 stands.

    TernGrad (Wen et al. 2017): an element g becomes sign(g) with probability |g| / s and 0 else, which is unbiased. As
    in the paper, values beyond some standard deviations are clipped first, which makes s smaller and with it the
    variance; the expected value is then the clipped gradient. The paper takes s for each layer, and shares it among
    workers so that a server can add up whole numbers; here s is taken for each block of a bucket, and each rank's own
    goes along, since messages are decoded before they are added.
    """

    name = "terngrad"
    unbiased = True
    block = 2048

    def __init__(self, clip: float) -> None:
        self.clip = clip  # standard deviations beyond which gradients are clipped; 0 for no clipping

    def message_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return 8 bytes for each block, of which the scale takes 4, and two bits for each element."""
        return 8 * (numel // self.block) + numel // 4

    def encode(self, rows: torch.Tensor, messages: torch.Tensor, job: BucketJob, *, keep: bool) -> None:
        count, numel = rows.shape
        blocks = rows.view(count, -1, self.block)
        original = rows.clone() if keep else None
        if self.clip > 0:
            limit = blocks.square().mean(2, keepdim=True).sub_(blocks.mean(2, keepdim=True).square()).clamp_(min=0)
            limit = limit.sqrt_().mul_(self.clip)
            torch.maximum(torch.minimum(blocks, limit, out=blocks), -limit, out=blocks)
        scales = blocks.abs().amax(2).float()
        round_to_scales(blocks, scales, job)
        begin = 8 * scales.shape[1]
        messages[:, :begin].copy_(torch.stack([scales, scales], 2).view(count, -1).view(torch.uint8))
        codes = (rows + 1).to(torch.uint8).bitwise_and_(3)  # of a block that is not finite, any
        messages[:, begin:].copy_(pack_pairs(codes.view(-1)).view(count, -1))
        if original is not None:
            blocks.mul_(scales[:, :, None])
            torch.sub(original, rows, out=rows)

    def decode(self, message: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, *, add: bool) -> None:
        blocks = out.view(-1, self.block)
        begin = 8 * len(blocks)
        scales = message[:begin].view(torch.float32).view(-1, 2)[:, :1]
        found = unpack_pairs(message[begin:], out.dtype).view_as(blocks).sub_(1).mul_(scales)
        if add:
            blocks.add_(found)
        else:
            blocks.copy_(found)
