import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hocket.cli import main
from hocket.workloads import SettingsError, settings_from_options
from hocket.workloads.recommender import metrics, ratings
from hocket.workloads.recommender.data import Shuffled
from hocket.workloads.recommender.model import Recommender

HOME = "recbole/dataset_example/ml-100k/ml-100k"


def wheel(path: Path) -> Path:
    """A wheel as recbole's is laid out, with three ratings."""
    people = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    people += "7\t30\tM\twriter\t12345\n9\t50\tF\tartist\tV5A2B\n"
    films = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    films += '1\tA "quoted" film\t1972\tComedy Drama\n5\tAnother\t\t\n'
    given = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t1\t3\t1\n9\t5\t5\t2\n9\t1\t4\t3\n"
    with zipfile.ZipFile(path, "w") as archive:
        for kind, text in (("user", people), ("item", films), ("inter", given)):
            archive.writestr(f"{HOME}.{kind}", text)
    return path


def test_ratings_are_read_out_of_the_wheel(tmp_path: Path) -> None:
    found = ratings.movielens(wheel(tmp_path / "recbole-1-py3-none-any.whl"))
    assert found.stars.tolist() == [3, 5, 4]
    assert found.liked.tolist() == [0, 1, 1]
    assert found.ids.tolist() == [[0, 0, 1, 0, 1], [1, 1, 0, 1, 10], [1, 0, 0, 1, 10]]
    assert found.genres.tolist() == [[1, 2, 0, 0, 0, 0], [0] * 6, [1, 2, 0, 0, 0, 0]]
    np.testing.assert_allclose(found.numbers, [[0.3, 0.5], [0.5, 0.5], [0.5, 0.5]])


def test_another_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    (tmp_path / "torn.whl").write_bytes(b"PK")
    whole = wheel(tmp_path / "whole.whl").read_bytes()
    (tmp_path / "flipped.whl").write_bytes(whole.replace(b"writer", b"waiter"))
    (tmp_path / "text.whl").write_bytes(b"user_id,item_id\n" * 100)
    for kind, text in (("user", ""), ("inter", "user_id:token\titem_id:token\n7\t3\n"), ("item", "item_id:token\n1\n")):
        with zipfile.ZipFile(tmp_path / f"{kind}.whl", "w") as archive, zipfile.ZipFile(tmp_path / "whole.whl") as old:
            for name in old.namelist():
                archive.writestr(name, text if name.endswith(kind) else old.read(name))
    for name in ("other", "torn", "flipped", "text", "user", "inter", "item"):
        with pytest.raises(ValueError, match=rf"{name}.whl: no wheel of recbole .*pip download --no-deps"):
            ratings.movielens(tmp_path / f"{name}.whl")


def test_training_refuses_another_file_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.whl").write_text("no wheel")
    few, out = wheel(tmp_path / "few.whl"), tmp_path / "run"
    for path, said in (
        (tmp_path / "notes.whl", "no wheel of recbole with MovieLens-100K (File is not a zip file)"),
        (few, "it holds 3 ratings, and MovieLens-100K has 100,000"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", "recommender", "-n", "2", "--data", str(path), "--out", str(out)])
        assert ended.value.code == 2
        assert f"hocket train: --data {path}: {said}" in capsys.readouterr().err
        assert not out.exists()


def test_the_wheel_in_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings_from_options("recommender", {"workers": 1}).synthetic  # type: ignore[attr-defined]
    (tmp_path / "hocket").mkdir()
    path = wheel(tmp_path / "hocket" / "recbole-1-py3-none-any.whl")
    settings = settings_from_options("recommender", {"workers": 1})
    assert (settings.data, settings.synthetic) == (str(path), False)  # type: ignore[attr-defined]
    assert settings_from_options("recommender", {"workers": 1, "synthetic": True}).data == ""  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="--data nowhere: there is no such file; fetch a wheel with pip download"):
        settings_from_options("recommender", {"workers": 1, "data": "nowhere"})
    with pytest.raises(SettingsError, match="name two sets of ratings"):
        settings_from_options("recommender", {"workers": 1, "data": str(path), "synthetic": True})


def test_made_up_ratings_have_the_shape_of_movielens_and_something_to_learn() -> None:
    found = ratings.synthetic()
    assert len(found) == 100_000
    assert (found.ids.max(axis=0) < list(ratings.TABLES.values())).all()
    assert found.genres.max() == ratings.GENRES
    assert 0.4 < found.liked.mean() < 0.7
    training, held_out = ratings.split(found)
    assert (len(training), len(held_out)) == (90_000, 10_000)
    assert metrics.auc(metrics.film_and_person_means(training, held_out), held_out.liked > 0.5) > 0.7


def test_epochs_are_orders_of_the_same_ratings() -> None:
    data = Shuffled(ratings.split(ratings.synthetic())[1], seed=2)
    first = [tuple(data[index][1].tolist()) for index in range(len(data))]
    data.set_epoch(1)
    second = [tuple(data[index][1].tolist()) for index in range(len(data))]
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_area_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(1)
    scores, liked = random.integers(9, size=200).astype(np.float64), random.uniform(size=200) < 0.4
    assert metrics.auc(scores, liked) == pytest.approx(roc_auc_score(liked, scores))


def test_sparse_gradients_hold_the_rows_that_were_looked_up() -> None:
    model = Recommender("tiny", tables=(50, 60), genres=5, sparse=True)
    ids = torch.tensor([[3, 4], [3, 7]])
    model(torch.rand(2, 2), ids, torch.tensor([[1, 2, 0], [4, 0, 0]])).sum().backward()
    rows = [table.weight.grad.coalesce().indices()[0].tolist() for table in model.tables]
    assert rows == [[3], [4, 7]]
    assert model.genres.weight.grad.is_sparse
