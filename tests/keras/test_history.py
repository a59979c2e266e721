"""Any number of workers gives the history, the weights and the predictions of plain Keras on one."""

from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks
from tests.keras import cases

TOLERANCE = 2e-5  # float32, some tens of steps; most differences are below 1e-6


pytestmark = pytest.mark.timeout(300)  # two or three processes that load Keras share a busy machine


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return cases.run_all(list(cases.CASES), False)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(cases.run_all, request.param, list(cases.CASES), True, timeout_s=200)


def flat(value: Any, path: str = "") -> dict[str, np.ndarray]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: np.asarray(value, dtype=np.float64)}


@pytest.mark.parametrize("name", list(cases.CASES))
def test_program_gives_what_plain_keras_gives(plain: dict[str, Any], ranks: list[dict[str, Any]], name: str) -> None:
    wanted = flat(plain[name])
    assert wanted
    for rank, result in enumerate(ranks):
        got = flat(result[name])
        assert got.keys() == wanted.keys()
        for path, value in wanted.items():
            np.testing.assert_allclose(got[path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"rank {rank}: {path}")
