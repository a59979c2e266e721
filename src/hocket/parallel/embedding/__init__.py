"""Embedding tables divided over data-parallel ranks: rows travel to where they are looked up, gradients travel back."""

from ._distribute import EmbeddingParallel as EmbeddingParallel
from ._distribute import distribute_embeddings as distribute_embeddings
from ._sharding import REPLICATE_BELOW_NBYTES as REPLICATE_BELOW_NBYTES
from ._sharding import How as How
from ._sharding import TableSharding as TableSharding

__all__ = ["REPLICATE_BELOW_NBYTES", "EmbeddingParallel", "How", "TableSharding", "distribute_embeddings"]
