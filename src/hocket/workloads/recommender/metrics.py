"""How well films are ranked, and what means alone can do."""

import numpy as np
import numpy.typing as npt

from hocket.workloads.recommender.ratings import FILMS, PEOPLE, Ratings

_FILM_PRIOR, _PERSON_PRIOR = (
    25.0,
    10.0,
)  # ratings that the mean of all counts as; Koren 2010 (doi:10.1145/1644873.1644874)


def auc(scores: npt.NDArray[np.float64], liked: npt.NDArray[np.bool_]) -> float:
    """Return the share of pairs of a liked and another film whose liked one has the higher score; equals count half."""
    from scipy.stats import rankdata  # lazy: half a second

    ones = int(liked.sum())
    rank_sum = float(rankdata(scores)[liked].sum())
    return (rank_sum - ones * (ones + 1) / 2) / (ones * (len(liked) - ones))


def film_means(training: Ratings, held_out: Ratings) -> npt.NDArray[np.float64]:
    """For each held-out rating the mean that its film has in training, drawn towards the mean of all films."""
    overall = float(training.stars.mean())
    return overall + _offsets(training.ids[:, 1], training.stars - overall, FILMS, _FILM_PRIOR)[held_out.ids[:, 1]]


def film_and_person_means(training: Ratings, held_out: Ratings) -> npt.NDArray[np.float64]:
    """`film_means`, and how much higher than that the person usually rates."""
    people, films = training.ids[:, 0], training.ids[:, 1]
    overall = float(training.stars.mean())
    of_film = _offsets(films, training.stars - overall, FILMS, _FILM_PRIOR)
    of_person = _offsets(people, training.stars - overall - of_film[films], PEOPLE, _PERSON_PRIOR)
    return overall + of_film[held_out.ids[:, 1]] + of_person[held_out.ids[:, 0]]


def _offsets(
    ids: npt.NDArray[np.int64], above: npt.NDArray[np.floating], count: int, prior: float
) -> npt.NDArray[np.float64]:
    sums = np.bincount(ids, weights=above, minlength=count)
    return np.asarray(sums / (np.bincount(ids, minlength=count) + prior))
