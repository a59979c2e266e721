"""Embedding tables divided over data-parallel ranks: rows travel to where they are looked up, gradients travel back."""

from ._decide import REPLICATE_BELOW_NBYTES as REPLICATE_BELOW_NBYTES
from ._decide import Decision as Decision
from ._decide import How as How
from ._distribute import EmbeddingParallel as EmbeddingParallel
from ._distribute import distribute_embeddings as distribute_embeddings

__all__ = [
    "REPLICATE_BELOW_NBYTES",
    "Decision",
    "EmbeddingParallel",
    "How",
    "distribute_embeddings",
]
