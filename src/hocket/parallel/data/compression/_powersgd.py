"""Gradients as products of two narrow matrices."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hocket.comm import torch_adapter

from ._compressor import BucketJob, Compressor, Matrix, announced_dense, exchange_dense

_SEED = 2019
_EPSILON = 1e-8  # so that a column of zeros stays one
_LEAST_RATE = 2.0  # a matrix that becomes smaller by less than that is sent as it is, as torch's hook has it


@dataclass(frozen=True, slots=True)
class _Division:
    """Which gradients of a bucket are approximated, and the elements that their two factors have together."""

    low: list[Matrix]
    whole: list[Matrix]
    left: int
    right: int


class PowerSgd(Compressor):
    """PowerSGD (Vogels et al. 2019): each matrix M becomes P Q^T of a small rank, by one power iteration a step.

    Two sums over ranks: P = M Q, whose columns are then made orthonormal, and Q = M^T P, with which the next step
    begins. What a rank's own M P P^T lacks of M is added to its next gradients. It is a projection, so that
    ||C(M) - M||^2 = ||M||^2 - ||P P^T M||^2, a contraction, with delta > 0 unless M is orthogonal to the P that all
    ranks share; alone, a matrix of that rank comes out as it is. Vectors, and matrices that would not become smaller by
    half, are sent whole along with P.

    torch's hook for DDP posts its sums from callbacks of the one before and waits for them there, which needs a thread
    for each; so its functions are used (`_orthogonalize`, `_should_compress`), and the two sums are posted from here.

    Args:
        rank: Rank of the approximation.
    """

    name = "powersgd"
    feedback = True

    def __init__(self, rank: float) -> None:
        self.rank = int(rank)

    def exchange(self, job: BucketJob) -> Iterator[Any]:
        flat, link, dtype = job.flat, job.link, job.computing
        cut = self._divide(job)
        if not cut.low:
            if job.measure:
                job.error = 0.0
            yield from exchange_dense(job)
            return
        left = job.memory.zeros("left", [flat.numel()], dtype, flat.device)
        finite = math.isfinite(float(flat.sum()))
        if finite:
            left.add_(flat)
        squares = float(left.square().sum()) if job.measure else 0.0
        ps = job.memory.wire("ps", [cut.left], dtype, flat.device)
        qs = self._start(job, cut)
        p_of, q_of = _factors(cut, ps, self.rank, rows=True), _factors(cut, qs, self.rank, rows=False)
        begin = 0
        for one in cut.whole:
            ps[begin : begin + one.rows * one.columns].copy_(one.of(left).reshape(-1))
            begin += one.rows * one.columns
        for one, p, q in zip(cut.low, p_of, q_of, strict=True):
            torch.mm(one.of(left), q, out=p)
        ps.mul_(1 / link.size if finite else math.nan)
        yield link.all_reduce(ps)
        if not math.isfinite(float(ps.sum())):  # of some rank's gradients; all ranks see it
            if finite:
                left.sub_(flat)
            job.out.fill_(math.nan)
            return
        for one, p, q in zip(cut.low, p_of, q_of, strict=True):
            torch_adapter.orthogonalize(p, _EPSILON)
            torch.mm(one.of(left).t(), p, out=q)
            one.of(left).addmm_(p, q.t(), alpha=-1)
        for one in cut.whole:
            one.of(left).zero_()
        left.index_fill_(0, job.gaps, 0)
        if job.measure:
            job.note(left, squares)
        qs.mul_(1 / link.size)
        yield link.all_reduce(qs)
        begin = 0
        for one in cut.whole:
            one.of(flat).copy_(ps[begin : begin + one.rows * one.columns].view(one.rows, one.columns))
            begin += one.rows * one.columns
        for one, p, q in zip(cut.low, p_of, q_of, strict=True):
            one.of(flat).copy_(p @ q.t())
        self._revive(q_of)

    def announced(self, job: BucketJob) -> list[tuple[str, int]]:
        """See Compressor: P with what is sent whole, then Q."""
        cut = self._divide(job)
        if not cut.low:
            return announced_dense(job)
        return [("all_reduce", numel * job.computing.itemsize) for numel in (cut.left, cut.right)]

    def residual(self, job: BucketJob) -> torch.Tensor | None:
        left = job.memory.find("left")
        return None if left is None else left.clone()

    def restore(self, job: BucketJob, residual: torch.Tensor) -> None:
        job.memory.zeros("left", [job.flat.numel()], job.computing, job.flat.device).copy_(residual)

    def _divide(self, job: BucketJob) -> _Division:
        pays = [torch_adapter.pays_low_rank(m.rows, m.columns, self.rank, _LEAST_RATE) for m in job.matrices]
        low = [m for m, yes in zip(job.matrices, pays, strict=True) if yes]
        whole = [m for m, yes in zip(job.matrices, pays, strict=True) if not yes]
        left = sum(m.rows * m.columns for m in whole) + sum(m.rows * self.rank for m in low)
        return _Division(low, whole, left, sum(m.columns * self.rank for m in low))

    def _start(self, job: BucketJob, cut: _Division) -> torch.Tensor:
        """Return the Q of the step before; at first, normal numbers that are the same on every rank."""
        fresh = job.memory.find("qs") is None
        qs = job.memory.wire("qs", [cut.right], job.computing, job.flat.device)
        if fresh:
            qs.copy_(torch.randn(cut.right, generator=torch.Generator().manual_seed(_SEED)))
        return qs

    def _revive(self, factors: list[torch.Tensor]) -> None:
        """Draw columns anew that became zero, as those of a parameter without a gradient: they would stay so."""
        generator = torch.Generator().manual_seed(_SEED)
        for q in factors:
            dead = q.abs().sum(0) == 0
            if dead.any():
                drawn = torch.randn(q.shape, generator=generator).to(q)
                q.copy_(torch.where(dead, drawn, q))


def _factors(cut: _Division, flat: torch.Tensor, rank: int, *, rows: bool) -> list[torch.Tensor]:
    """Return the matrices of `rank` columns that lie one behind the other at the end of `flat`."""
    found, end = [], flat.numel()
    for one in reversed(cut.low):
        size = one.rows if rows else one.columns
        found.append(flat[end - size * rank : end].view(size, rank))
        end -= size * rank
    return found[::-1]
