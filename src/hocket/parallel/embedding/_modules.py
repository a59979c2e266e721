"""Embeddings whose tables are sharded: what `torch.nn`'s become in place, with the same arguments and results."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._exchange import RowExchange


class ShardedEmbedding(nn.Embedding):
    """`torch.nn.Embedding` of whose weight this rank has some rows; `num_embeddings` counts all of them."""

    exchange: RowExchange

    def forward(self, input: Tensor) -> Tensor:
        """Rows for numbers of any shape; a collective operation."""
        rows = self.exchange.look_up(input.flatten(), self._local)
        return rows.view(*input.shape, self.embedding_dim)

    def _local(self, ids: Tensor) -> Tensor:
        padding = self.padding_idx
        local = padding is not None and self.exchange.begin <= padding < self.exchange.end
        return F.embedding(
            ids,
            self.weight,
            padding_idx=padding - self.exchange.begin if padding is not None and local else None,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )


class ShardedEmbeddingBag(nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` of whose weight this rank has some rows; `num_embeddings` counts all of them.

    Rows travel, and are added up where they were wanted.
    """

    exchange: RowExchange

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """As torch's: bags in the rows of a matrix, or one after the other with offsets; a collective operation.

        Raises:
            ValueError: the arguments do not fit together.
        """
        ids, counts = self._bags(input, offsets)
        if per_sample_weights is not None:
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"{self.exchange.decision.name}: per_sample_weights have shape {list(per_sample_weights.shape)}, "
                    f"the numbers of rows {list(input.shape)}"
                )
            per_sample_weights = per_sample_weights.flatten()
        if self.padding_idx is not None:  # rows that count for nothing need not travel
            kept = ids != self.padding_idx
            bag = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts)
            ids, counts = ids[kept], torch.bincount(bag[kept], minlength=len(counts))
            per_sample_weights = None if per_sample_weights is None else per_sample_weights[kept]
        rows = self.exchange.look_up(ids, self._local)
        result: Tensor = F.embedding_bag(
            torch.arange(len(rows), device=ids.device),
            rows,
            counts.cumsum(0) - counts,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
        )
        return result

    def _bags(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return numbers of rows one after the other, and how many each bag has."""
        name = self.exchange.decision.name
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(f"{name}: a matrix of bags has no offsets")
            bags, each = input.shape
            return input.flatten(), torch.full((bags,), each, dtype=torch.int64, device=input.device)
        if input.dim() != 1 or offsets is None:
            raise ValueError(f"{name}: bags are a matrix, or one axis with offsets; not {input.dim()} axes")
        ends = offsets[1:] if self.include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(input)])])
        return input, (ends - offsets[: len(ends)]).to(torch.int64)

    def _local(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, sparse=self.sparse)


ShardableEmbedding = nn.Embedding | nn.EmbeddingBag

SHARDED: dict[type[ShardableEmbedding], type[ShardedEmbedding] | type[ShardedEmbeddingBag]] = {
    nn.Embedding: ShardedEmbedding,
    nn.EmbeddingBag: ShardedEmbeddingBag,
}


def become_sharded(module: ShardableEmbedding, exchange: RowExchange) -> None:
    """Turn a module, in place, into its sharded class; its weight must be sharded already."""
    module.__class__ = SHARDED[type(module)]
    module.exchange = exchange  # type: ignore[assignment]
