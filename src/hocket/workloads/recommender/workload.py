"""How the recommender is trained and judged."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hocket
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.recommender import metrics, ratings
from hocket.workloads.recommender.data import Shuffled
from hocket.workloads.recommender.model import Recommender
from hocket.workloads.recommender.settings import RecommenderSettings

_RATINGS_PER_BATCH = 1000


class RecommenderWorkload(BundledWorkload[RecommenderSettings]):
    """Binary cross entropy and Adam; the learning rate rises over fifty steps and falls along a cosine."""

    warm_up_steps = 50

    def __init__(self, settings: RecommenderSettings) -> None:
        super().__init__(settings)
        found = ratings.synthetic() if settings.synthetic else ratings.movielens(Path(settings.data))
        self._training, self._held_out = ratings.split(found)

    def model(self) -> Recommender:
        """Return a recommender of the chosen size."""
        return Recommender(self.settings.size, tables=tuple(ratings.TABLES.values()), genres=ratings.GENRES + 1)

    def dataset(self) -> Dataset[Batch]:
        """Return the training ratings in random order."""
        return cast(Dataset[Batch], Shuffled(self._training, seed=self.settings.seed))

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Binary cross entropy of whether the film is liked, the mean over the ratings."""
        return F.binary_cross_entropy_with_logits(output.float(), target)

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Return how well held-out ratings are ranked, beside means; the ratings shared out among the workers."""
        training, held_out = self._training, self._held_out
        columns = (held_out.numbers, held_out.ids, held_out.genres)
        numbered = TensorDataset(torch.arange(len(held_out)), *map(torch.from_numpy, columns))
        table = torch.zeros(len(held_out), dtype=torch.float64)
        for index, *inputs in hocket.shard(DataLoader(numbered, batch_size=_RATINGS_PER_BATCH)):
            table[index] = model(*(part.to(device) for part in inputs)).double().cpu()
        scores = hocket.total(table).numpy()
        liked = held_out.liked > 0.5
        ranked_by = {
            "mean of the film": metrics.film_means(training, held_out),
            "means of film and person": metrics.film_and_person_means(training, held_out),
            "DLRM": scores,
        }
        rows: list[dict[str, Any]] = [
            {"ranked_by": name, "auc_percent": 100.0 * metrics.auc(ranks, liked)} for name, ranks in ranked_by.items()
        ]
        name = "made-up ratings" if self.settings.synthetic else "ratings of MovieLens-100K"
        return {
            "title": f"Ranking {len(held_out):,} held-out {name}: {ratings.LIKED} stars or more before fewer",
            "columns": {"ranked_by": "ranked by", "auc_percent": "area under the curve (%)"},
            "rows": rows,
            "summary": (
                f"The area under the curve is {rows[2]['auc_percent']:.2f}% on held-out {name}; means of film and "
                f"person give {rows[1]['auc_percent']:.2f}%"
            ),
        }
