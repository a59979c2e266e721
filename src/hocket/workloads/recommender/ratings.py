"""Ratings of films: MovieLens-100K out of a recbole wheel, or made-up ones of the same shape.

MovieLens-100K (Harper and Konstan 2015, doi:10.1145/2827872): 100,000 ratings from 1 to 5 that 943 people gave to 1,682
films. It is read where the user's wheel lies; nothing of it is installed or passed on.
"""

import csv
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hocket.workloads.recommender import FETCH, HELD_OUT, RATINGS

PEOPLE, FILMS, OCCUPATIONS, SEXES, REGIONS, GENRES = 943, 1682, 21, 2, 11, 19
TABLES = {"person": PEOPLE, "film": FILMS, "occupation": OCCUPATIONS, "sex": SEXES, "region": REGIONS}
"""Rows of the tables that are looked up once per rating, in the order of `Ratings.ids`."""

MOST_GENRES = 6  # of one film
LIKED = 4
_HOME = "recbole/dataset_example/ml-100k/ml-100k"
_SPLIT_SEED = 1997
_OLDEST_YEAR = 1922

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings in columns, one row each."""

    numbers: Floats  # (n, 2): age of the person, and year of the film, both from about 0 to about 1
    ids: Integers  # (n, 5): rows in the tables of `TABLES`
    genres: Integers  # (n, `MOST_GENRES`): rows in the table of genres, 1 or more, filled up with 0
    stars: Floats  # (n,): 1 to 5

    def __len__(self) -> int:
        return len(self.stars)

    @property
    def liked(self) -> Floats:
        """(n,): 1 where the rating is `LIKED` or more, else 0."""
        return (self.stars >= LIKED).astype(np.float32)

    def take(self, rows: Integers) -> "Ratings":
        """Return some of the ratings."""
        return Ratings(self.numbers[rows], self.ids[rows], self.genres[rows], self.stars[rows])


def split(ratings: Ratings) -> tuple[Ratings, Ratings]:
    """Return nine in ten ratings to train with, and the rest, held out; drawn at random, always the same."""
    rows = np.random.default_rng(_SPLIT_SEED).permutation(len(ratings))
    return ratings.take(np.sort(rows[HELD_OUT:])), ratings.take(np.sort(rows[:HELD_OUT]))


def movielens(wheel: Path) -> Ratings:
    """MovieLens-100K as a recbole wheel holds it. Raises ValueError: the file is no such wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            tables = [list(_table(archive, kind)) for kind in ("user", "item", "inter")]
        return _joined(*tables)
    # Anything can be in a file, and be missing: names and columns, numbers, the end of what is packed.
    except Exception as error:
        raise ValueError(
            f"{wheel}: no wheel of recbole with MovieLens-100K ({_first_line(error)}); fetch one with {FETCH}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _joined(users: list[dict[str, str]], items: list[dict[str, str]], ratings: list[dict[str, str]]) -> Ratings:
    people = {row["user_id"]: row for row in users}
    films = {row["item_id"]: row for row in items}
    person_of, film_of = _numbering(people), _numbering(films)
    occupation_of = _numbering(row["occupation"] for row in people.values())
    genre_of = _numbering(genre for row in films.values() for genre in _genres(row))
    columns = ([], [], [], [])  # type: tuple[list[list[float]], list[list[int]], list[list[int]], list[float]]
    for row in ratings:
        person, film = people[row["user_id"]], films[row["item_id"]]
        genres = [genre_of[genre] + 1 for genre in _genres(film)][:MOST_GENRES]
        columns[0].append([int(person["age"]) / 100, _year(film["release_year"])])
        columns[1].append(
            [
                person_of[row["user_id"]],
                film_of[row["item_id"]],
                occupation_of[person["occupation"]],
                int(person["gender"] == "F"),
                _region(person["zip_code"]),
            ]
        )
        columns[2].append(genres + [0] * (MOST_GENRES - len(genres)))
        columns[3].append(float(row["rating"]))
    numbers, ids, genre_rows, stars = columns
    return Ratings(
        np.array(numbers, dtype=np.float32),
        np.array(ids, dtype=np.int64),
        np.array(genre_rows, dtype=np.int64),
        np.array(stars, dtype=np.float32),
    )


def synthetic(seed: int = 0) -> Ratings:
    """Made-up ratings: people and films have tastes in eight hidden directions, and some films are seen far more often.

    There is something to learn, but nothing to learn from it about people or films.
    """
    random = np.random.default_rng(seed)
    taste, charm = random.normal(size=(PEOPLE, 8)), random.normal(size=(FILMS, 8))
    kindness, quality = random.normal(scale=0.4, size=PEOPLE), random.normal(scale=0.5, size=FILMS)
    popularity = 1.0 / (np.arange(FILMS) + 20.0)  # falls off like a power law, as MovieLens's does
    film = random.choice(FILMS, size=RATINGS, p=popularity / popularity.sum())
    person = random.integers(PEOPLE, size=RATINGS)
    stars = 3.5 + kindness[person] + quality[film] + 0.25 * (taste[person] * charm[film]).sum(axis=1)
    stars += random.normal(scale=0.7, size=RATINGS)
    age, year = random.uniform(0.1, 0.7, size=PEOPLE), random.uniform(size=FILMS)
    occupation, sex = random.integers(OCCUPATIONS, size=PEOPLE), random.integers(SEXES, size=PEOPLE)
    region = random.integers(REGIONS, size=PEOPLE)
    genres = np.where(
        random.uniform(size=(FILMS, MOST_GENRES)) < 0.3, random.integers(1, GENRES + 1, (FILMS, MOST_GENRES)), 0
    )
    return Ratings(
        np.stack([age[person], year[film]], axis=1).astype(np.float32),
        np.stack([person, film, occupation[person], sex[person], region[person]], axis=1),
        genres[film],
        np.clip(np.rint(stars), 1, 5).astype(np.float32),
    )


def _table(archive: zipfile.ZipFile, kind: str) -> Iterable[dict[str, str]]:
    """Read a tab-separated table whose first line names the columns with their types, as in ``user_id:token``."""
    lines = io.StringIO(archive.read(f"{_HOME}.{kind}").decode("utf-8", errors="replace"))
    names = [name.partition(":")[0] for name in next(lines).rstrip("\n").split("\t")]
    return list(csv.DictReader(lines, names, delimiter="\t", quoting=csv.QUOTE_NONE))


def _numbering(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted(set(names)))}


def _genres(film: dict[str, str]) -> list[str]:
    return (film["class"] or "").split()


def _year(text: str) -> float:
    return (int(text) - _OLDEST_YEAR) / 100 if text.isdigit() else 0.5


def _region(zip_code: str) -> int:
    """Return the first digit, which stands for a part of the United States, or the last number for other codes."""
    return int(zip_code[0]) if zip_code[:1].isdigit() else REGIONS - 1
