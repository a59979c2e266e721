"""Compressors that make of a row of numbers a message of fixed length, which anybody can decode alone."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from ._compressor import BucketJob, Compressor, announced_dense, exchange_dense
from ._pack import round_stochastically

_SMALLEST = torch.finfo(torch.float32).tiny


class RowCompressor(Compressor):
    """Sends messages; each rank decodes those of all and averages them.

    Where every rank needs the whole average, all messages go to all ranks (all_gather). Where each needs its part only,
    each part is a row of its own, and goes to the rank that needs it (all_to_all). Methods that say `two_phases` do
    both among more than two ranks: parts go to their ranks, which average them, encode the average, and send it to all;
    the bytes then do not grow with the number of ranks.
    """

    block: int  # elements that are encoded together; rows are filled up with zeros to whole blocks
    two_phases: ClassVar[bool] = False  # whether parts go to their ranks first, see above

    # --- what a method says -----------------------------------------------------------------------------------------

    @abstractmethod
    def message_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return bytes of the message for a row of `numel` elements, a multiple of `block`; a multiple of 8."""

    @abstractmethod
    def encode(self, rows: torch.Tensor, messages: torch.Tensor, job: BucketJob, *, keep: bool) -> None:
        """Write the messages of some rows.

        Args:
            rows: Shape [count, numel], float32 or float64, `block` divides numel; overwritten. With `keep`, what is
                left of them after taking away what the messages say.
            messages: uint8, shape [count, message_nbytes].
            job: The job, which has the random numbers, and the type of the gradients.
            keep: Whether `rows` keep what is left.
        """

    @abstractmethod
    def decode(self, message: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, *, add: bool) -> None:
        """Put what a message, [message_nbytes], says into `out`, [numel], float32 or float64, or add it there."""

    def dense(self, numel: int, dtype: torch.dtype, world: int, *, scattered: bool) -> bool:
        """Return whether it pays to send a bucket as it is."""
        return False

    # --- how it is carried out --------------------------------------------------------------------------------------

    def exchange(self, job: BucketJob) -> Iterator[Any]:
        link, memory, dtype, device = job.link, job.memory, job.flat.dtype, job.flat.device
        if self.dense(job.flat.numel(), dtype, link.size, scattered=job.scattered):
            if job.measure:
                job.error = 0.0
            yield from exchange_dense(job)
            return
        count, width, nbytes = self._shape(job)
        messages = memory.wire("messages", [count, nbytes], torch.uint8, device)
        received = memory.wire("received", [link.size, nbytes], torch.uint8, device)
        self._write(job, messages)
        mean = memory.zeros("mean", [width], job.computing, device)
        if count == 1:
            yield link.all_gather(received, messages)
            self._average(received, mean, dtype)
            job.out.copy_(mean[: job.out.numel()])
            return
        yield link.all_to_all(received, messages)
        self._average(received, mean, dtype)
        if job.scattered:
            job.out.copy_(mean[: job.out.numel()])
            return
        mine = memory.wire("mine", [1, nbytes], torch.uint8, device)
        self.encode(mean[None], mine, job, keep=False)
        yield link.all_gather(received, mine)
        whole = self._rows(job).view(-1)
        for rank in range(link.size):
            self.decode(received[rank], whole[rank * width : (rank + 1) * width], dtype, add=False)
        job.out.copy_(whole[: job.out.numel()])

    def announced(self, job: BucketJob) -> list[tuple[str, int]]:
        """See Compressor: n messages in an operation."""
        n = job.link.size
        if self.dense(job.flat.numel(), job.flat.dtype, n, scattered=job.scattered):
            return announced_dense(job)
        count, _, nbytes = self._shape(job)
        if count == 1:
            return [("all_gather", n * nbytes)]
        found = [("all_to_all", n * nbytes)]
        return found if job.scattered else [*found, ("all_gather", n * nbytes)]

    def residual(self, job: BucketJob) -> torch.Tensor | None:
        if not self.feedback or job.memory.find("rows") is None:
            return None
        return self._inside(job).reshape(-1).clone()

    def restore(self, job: BucketJob, residual: torch.Tensor) -> None:
        inside = self._inside(job)
        inside.copy_(residual.view_as(inside))

    def _shape(self, job: BucketJob) -> tuple[int, int, int]:
        """Return how many rows, of how many elements, and the bytes of a row's message."""
        n, numel = job.link.size, job.flat.numel()
        count = n if job.scattered or (self.two_phases and n > 2) else 1
        width = math.ceil(math.ceil(numel / count) / self.block) * self.block
        return count, width, self.message_nbytes(width, job.flat.dtype)

    def _rows(self, job: BucketJob) -> torch.Tensor:
        """Return memory for the rows; with feedback it holds the residual between steps."""
        count, width, _ = self._shape(job)
        return job.memory.zeros("rows", [count, width], job.computing, job.flat.device)

    def _inside(self, job: BucketJob) -> torch.Tensor:
        """Return where the bucket's elements lie in the rows: by part where each part has a row, else in sequence."""
        rows = self._rows(job)
        if job.scattered:
            return rows[:, : job.flat.numel() // job.link.size]
        return rows.view(-1)[: job.flat.numel()]

    def _write(self, job: BucketJob, messages: torch.Tensor) -> None:
        rows, inside = self._rows(job), self._inside(job)
        values = job.flat.view_as(inside)
        if not self.feedback:
            inside.copy_(values)
        elif math.isfinite(float(values.sum())):
            inside.add_(values)
        else:  # all bits set: whatever the scale's type, it is no number
            messages.fill_(0xFF)
            return
        squares = float(inside.square().sum()) if job.measure else 0.0
        self.encode(rows, messages, job, keep=self.feedback or job.measure)
        if job.measure:
            job.note(inside, squares)
        # What is left of elements that are none would come back as gradients of nothing.
        if job.scattered:
            rows[:, job.out.numel() :] = 0
        else:
            rows.view(-1)[job.flat.numel() :] = 0
        if self.feedback:
            part = inside.shape[-1]
            rows.view(-1).index_fill_(0, job.gaps // part * rows.shape[1] + job.gaps % part, 0)

    def _average(self, received: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype) -> None:
        for rank in range(len(received)):
            self.decode(received[rank], mean, dtype, add=rank > 0)
        mean.mul_(1 / len(received))


def round_to_scales(blocks: torch.Tensor, scales: torch.Tensor, job: BucketJob) -> None:
    """Divide blocks by their scales and round the quotients stochastically, in place.

    `blocks`, [rows, blocks, block], are contiguous; `scales` are float32, [rows, blocks], and where one is next to zero
    the quotients are zeros.
    """
    inverse = torch.where(scales < _SMALLEST, 0.0, 1 / scales)  # NaN stays NaN
    blocks.mul_(inverse[:, :, None])
    count = blocks.numel()
    noise = job.memory.zeros(f"noise {count}", [-(-count // 4)], torch.int64, blocks.device)
    round_stochastically(blocks, noise, job.generator)
