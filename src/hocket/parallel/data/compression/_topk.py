"""The largest gradients only."""

import math

import torch

from ._compressor import BucketJob
from ._rows import RowCompressor

_INDEX_NBYTES = 4
_SAMPLED_FROM = 2**16  # elements from which on candidates are looked for by a sample
_SAMPLE = 2**13


class TopK(RowCompressor):
    """The k elements of largest absolute value, each with its place; the others wait for the next step.

    With error feedback (Stich et al. 2018), and a contraction with delta = k / d: ||C(x) - x||^2 <= (1 - k/d) ||x||^2.
    Values and places are gathered from all ranks, which is more than a dense reduction sends when k or the number of
    ranks is large: then the bucket is sent dense, and whole (the switch of SparCML, Renggli et al. 2019; there it is
    made while partial sums fill up, here beforehand, since k is known). Values have the type of the gradients.
    """

    name = "topk"
    feedback = True
    block = 1

    def __init__(self, density: float) -> None:
        self.density = density  # the part of the elements that is sent, k / d

    def chosen(self, numel: int) -> int:
        """Return how many of `numel` elements are sent."""
        return min(numel, max(1, math.ceil(self.density * numel)))

    def message_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of values, and of places of 4 bytes, each rounded up to 8."""
        k = self.chosen(numel)
        return _rounded(k * dtype.itemsize) + _rounded(k * _INDEX_NBYTES)

    def dense(self, numel: int, dtype: torch.dtype, world: int, *, scattered: bool) -> bool:
        """Return whether a rank would send no less than densely: 2 (n-1)/n of the bucket, half where scattered."""
        parts = world if scattered else 1
        message = self.message_nbytes(-(-numel // parts), dtype)
        ways = 1 if scattered else 2
        return message * (world - 1) >= ways * (world - 1) / world * numel * dtype.itemsize

    def encode(self, rows: torch.Tensor, messages: torch.Tensor, job: BucketJob, *, keep: bool) -> None:
        k, dtype = self.chosen(rows.shape[1]), job.flat.dtype
        begin = _rounded(k * dtype.itemsize)
        for row, message in zip(rows, messages, strict=True):
            places = largest(row, k)
            values = row[places].to(dtype)
            message[: k * dtype.itemsize].view(dtype).copy_(values)
            message[begin : begin + k * _INDEX_NBYTES].view(torch.int32).copy_(places)
            row.index_add_(0, places, values.to(row.dtype), alpha=-1)

    def decode(self, message: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, *, add: bool) -> None:
        k = self.chosen(out.numel())
        begin = _rounded(k * dtype.itemsize)
        values = message[: k * dtype.itemsize].view(dtype).to(out.dtype)
        places = message[begin : begin + k * _INDEX_NBYTES].view(torch.int32)
        if not add:
            out.zero_()
        if values.isnan().any():
            out.fill_(math.nan)
        else:
            out.index_add_(0, places, values)


def largest(row: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the `k` elements of largest absolute value; int64, shape [k], in no order.

    To select among all elements takes ten times as long as all the rest, so a sample says how large they will be, and
    the selection is made among those that are: of fewer than k, among all.
    """
    sizes = row.abs()
    if row.numel() >= _SAMPLED_FROM and k < row.numel() // 8:
        sample = sizes[:: row.numel() // _SAMPLE]
        wanted = min(len(sample), math.ceil(1.25 * k / row.numel() * len(sample)) + 16)
        threshold = sample.topk(wanted).values[-1]
        candidates = (sizes > threshold).nonzero().view(-1)
        if len(candidates) >= k:
            return candidates[sizes[candidates].topk(k, sorted=False).indices]
    return sizes.topk(k, sorted=False).indices


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
