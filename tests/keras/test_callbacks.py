"""Callbacks do on any number of workers what Keras documents, and write their files once."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from . import callback_cases as cases
from .compare import TOLERANCE, flat

RANKS = 2
WRITING = ("checkpoint", "csv", "backup_and_restore", "tensorboard")

pytestmark = pytest.mark.timeout(300)  # two or three processes that load Keras share a busy machine


@pytest.fixture(scope="module")
def names(asked: set[str]) -> list[str]:
    return [name for name in cases.CASES if name in asked or name in WRITING]


@pytest.fixture(scope="module")
def plain(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    directory = tmp_path_factory.mktemp("plain")
    return cases.run_all(names, str(directory), False), directory


def everything(names: list[str], directory: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return cases.run_all(names, directory, True), cases.placement(), cases.saving(directory)


@pytest.fixture(scope="module")
def ranks(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    directory = tmp_path_factory.mktemp("ranks")
    return run_ranks(everything, RANKS, names, str(directory), timeout_s=200), directory


@pytest.mark.long
@pytest.mark.parametrize("name", list(cases.CASES))
def test_callback_has_the_effect_that_it_has_in_plain_keras(
    plain: tuple[dict[str, Any], Path], ranks: tuple[list[Any], Path], name: str
) -> None:
    wanted = flat(plain[0][name])
    for rank, (results, _, _) in enumerate(ranks[0]):
        got = flat(results[name])
        assert got.keys() == wanted.keys()
        for path, value in wanted.items():
            np.testing.assert_allclose(got[path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{rank}: {path}")


@pytest.mark.parametrize(
    "name", [name if name in WRITING else pytest.param(name, marks=pytest.mark.long) for name in cases.CASES]
)
def test_callback_writes_the_files_that_it_writes_in_plain_keras(
    plain: tuple[dict[str, Any], Path], ranks: tuple[list[Any], Path], name: str
) -> None:
    found = [sorted(str(p.relative_to(d / name)) for p in (d / name).rglob("*")) for d in (plain[1], ranks[1])]
    assert found[0] == found[1]
    assert bool(found[0]) == (name in WRITING)


def test_checkpoints_are_those_of_plain_keras_and_plain_keras_reads_them(
    plain: tuple[dict[str, Any], Path], ranks: tuple[list[Any], Path]
) -> None:
    import keras

    for file in ("best.keras", "batch.keras"):
        models = [keras.models.load_model(directory / "checkpoint" / file) for directory in (plain[1], ranks[1])]
        assert int(models[0].optimizer.iterations) == int(models[1].optimizer.iterations) > 0
        for one, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_csv_has_one_line_an_epoch_with_the_logs_of_the_whole_batches(
    plain: tuple[dict[str, Any], Path], ranks: tuple[list[Any], Path]
) -> None:
    tables = [list(csv.DictReader((d / "csv" / "log.csv").open())) for d in (plain[1], ranks[1])]
    assert [row["epoch"] for row in tables[1]] == ["0", "1", "2", "3"]
    for wanted, got in zip(*tables, strict=True):
        assert {k: float(v) for k, v in got.items()} == pytest.approx(
            {k: float(v) for k, v in wanted.items()}, abs=1e-4
        )


def test_tensorboard_gets_every_scalar_once(plain: tuple[dict[str, Any], Path], ranks: tuple[list[Any], Path]) -> None:
    for kind in ("train", "validation"):
        texts = [(d / "tensorboard" / kind / "events").read_text().splitlines() for d in (plain[1], ranks[1])]
        assert len(texts[0]) == len(texts[1]) > 3
        for wanted, got in zip(*texts, strict=True):
            (name, value, step), (name_here, value_here, step_here) = (eval(text) for text in (wanted, got))
            assert (name_here, step_here) == (name, step)
            assert value_here == pytest.approx(value, abs=2e-4)


def test_callbacks_run_where_the_user_says_and_see_the_logs_that_the_user_wants(ranks: tuple[list[Any], Path]) -> None:
    first, second = (placement for _, placement, _ in ranks[0])
    assert first["root"] == first["everywhere"] == second["everywhere"] == first["history"] == second["history"]
    assert second["root"] == []
    assert first["own"] != second["own"]
    # Of 43 samples in batches of 10, 10, 10, 10 and 3 rank 0 has 22, and rank 1 has 21.
    together = (22 * np.array(first["own"]) + 21 * np.array(second["own"])) / 43
    np.testing.assert_allclose(together, first["history"], rtol=1e-5)


def test_models_are_saved_once_and_loaded_by_all(ranks: tuple[list[Any], Path]) -> None:
    for _, _, saved in ranks[0]:
        model, loaded, other = saved["weights"]
        for one, two, three in zip(model, loaded, other, strict=True):
            assert np.array_equal(one, two)
            assert np.array_equal(one, three)
        assert saved["evaluations"][0] == saved["evaluations"][1] == ranks[0][0][2]["evaluations"][0]
        assert "missing.weights.h5" in saved["missing"]


def test_ranks_have_the_same_model_where_batch_norm_is_not_synchronised(ranks: tuple[list[Any], Path]) -> None:
    one, other = (flat(placement["apart"]) for _, placement, _ in ranks[0])
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[path], other[path]) for path in one)
