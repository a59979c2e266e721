"""Embedding tables divided over data-parallel ranks: rows travel to where they are looked up, gradients travel back."""

from ._distribute import EmbeddingParallel, distribute_embeddings
from ._sharding import REPLICATE_BELOW_NBYTES, How, TableSharding

__all__ = ["REPLICATE_BELOW_NBYTES", "EmbeddingParallel", "How", "TableSharding", "distribute_embeddings"]
