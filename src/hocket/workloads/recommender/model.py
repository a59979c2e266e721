"""DLRM: tables of embeddings for what is looked up, a network for what is measured, and products of their rows.

Naumov et al. 2019 (arXiv:1906.00091). All pairs of vectors are multiplied, each twice: the network above takes what it
needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hocket.workloads.recommender.settings import SIZES, Size


class Recommender(nn.Module):
    """Numbers (N, F), rows of the tables (N, tables) and of the table of genres (N, G) to scores (N,).

    A score is the logarithm of the odds that a film is liked.

    Args:
        size: One of `SIZES`, or a `Size` of your own.
        tables: Rows of each table that is looked up once.
        genres: Rows of the table whose rows are added up; row 0 stands for nothing.
        numbers: How many numbers F there are.
        sparse: Whether tables get sparse gradients, which hold the rows that were looked up and no others.
    """

    def __init__(
        self, size: str | Size, *, tables: Sequence[int], genres: int, numbers: int = 2, sparse: bool = False
    ) -> None:
        super().__init__()
        recipe = SIZES[size] if isinstance(size, str) else size
        self.numbers = nn.Sequential(
            nn.Linear(numbers, recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, recipe.width), nn.ReLU()
        )
        self.tables = nn.ModuleList(nn.Embedding(rows, recipe.width, sparse=sparse) for rows in tables)
        self.genres = nn.EmbeddingBag(genres, recipe.width, mode="sum", padding_idx=0, sparse=sparse)
        vectors = len(tables) + 2
        self.top = nn.Sequential(
            nn.Linear(vectors * (vectors + recipe.width), recipe.hidden),
            nn.ReLU(),
            nn.Linear(recipe.hidden, recipe.hidden),
            nn.ReLU(),
            nn.Linear(recipe.hidden, 1),
        )
        for table in (*self.tables, self.genres):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, numbers: Tensor, ids: Tensor, genres: Tensor) -> Tensor:
        """Score each person's interest in each film."""
        found = [table(ids[:, column]) for column, table in enumerate(self.tables)]
        vectors = torch.stack([self.numbers(numbers), *found, self.genres(genres)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        score: Tensor = self.top(torch.cat([vectors.flatten(1), products.flatten(1)], dim=1))
        return score.squeeze(-1)
