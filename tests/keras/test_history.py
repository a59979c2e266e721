"""Any number of workers gives the history, the weights and the predictions of plain Keras on one."""

from typing import Any

import pytest

from hocket.testing import run_ranks

from . import cases
from .compare import check

pytestmark = pytest.mark.timeout(300)  # two or three processes that load Keras share a busy machine


@pytest.fixture(scope="module")
def plain(asked: set[str]) -> dict[str, Any]:
    return cases.run_all([name for name in cases.CASES if name in asked], False)


ON_FOUR = [  # where it matters how many ranks there are, beyond two
    "convolution_with_batch_norm_and_dropout",
    "seeded_noise",
    "losses_of_several_outputs_that_see_the_whole_batch",
    "losses_that_see_the_whole_batch",
    "noise_of_other_shapes",
    "own_losses_of_the_whole_batch",
    "batches_made_by_the_user",
]


@pytest.fixture(scope="module")
def two_ranks(asked: set[str]) -> list[dict[str, Any]]:
    names = [name for name in cases.CASES if name in asked]
    return run_ranks(cases.run_all, 2, [*names, "shuffled_loader"], True, timeout_s=200)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(cases.run_all, 4, ON_FOUR, True, timeout_s=200)


@pytest.mark.long
@pytest.mark.parametrize("name", list(cases.CASES))
def test_two_workers_give_what_plain_keras_gives(
    plain: dict[str, Any], two_ranks: list[dict[str, Any]], name: str
) -> None:
    check(plain[name], [result[name] for result in two_ranks])


@pytest.mark.long
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_workers_give_what_plain_keras_gives(
    plain: dict[str, Any], four_ranks: list[dict[str, Any]], name: str
) -> None:
    check(plain[name], [result[name] for result in four_ranks])


def test_loaders_that_shuffle_have_one_order_on_any_number_of_workers(
    two_ranks: list[dict[str, Any]],
) -> None:
    alone = cases.run_all(["shuffled_loader"], True)["shuffled_loader"]
    assert alone["histories"][0] != alone["histories"][1]
    on_four = run_ranks(cases.run_all, 4, ["shuffled_loader"], True, timeout_s=200)
    check(alone, [result["shuffled_loader"] for result in [*two_ranks, *on_four]])
