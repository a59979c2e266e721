"""How much of a step a pipeline's ranks do not compute: by formula, and as measured."""

from __future__ import annotations

from collections.abc import Sequence

from ._run import Span


def bubble(ranks: int, micro_batches: int, per_rank: int = 1) -> float:
    """The idle share of a step of GPipe or 1F1B with balanced stages: (N-1) / (N+K-1); Huang et al. 2019, GPipe.

    With v stages on each rank, interleaved, (N-1) / (N+vK-1); Narayanan et al. 2021.

    Args:
        ranks: N, those of the pipeline.
        micro_batches: K.
        per_rank: v, stages of each rank.
    """
    return (ranks - 1) / (ranks + per_rank * micro_batches - 1)


def idle_shares(spans: Sequence[Sequence[Span]]) -> list[float]:
    """The share of a step, from the first rank's begin to the last one's end, that each rank did not compute.

    Args:
        spans: `Pipeline.spans` of every rank. The ranks must run on one host, whose clock they share.
    """
    begin_s = min(span.begin_s for rank in spans for span in rank)
    end_s = max(span.end_s for rank in spans for span in rank)
    return [1 - sum(span.end_s - span.begin_s for span in rank) / (end_s - begin_s) for rank in spans]
