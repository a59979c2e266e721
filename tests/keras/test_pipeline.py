"""A functional model on a pipeline of stages trains as plain Keras does, and each rank has its own stage to do."""

from typing import Any

import pytest

from hocket.testing import run_ranks

from . import cases, pipeline_cases
from .compare import check

pytestmark = pytest.mark.timeout(300)  # two or four processes that load Keras share a busy machine

MICRO_BATCHES = 3
SHARED = [  # of the cases of data parallelism
    "masked_sequences",
    "losses_that_see_the_whole_batch",
    "metrics_that_are_no_sums",
    "weights_of_classes_and_samples",
    "batches_made_by_the_user",
    "torch_loaders",
    "several_outputs",
    "going_on",
    "single_batches",
]
ON_FOUR = ["losses_of_layers_and_weights", "attention_on_masked_sequences", "optimizers", "batches_made_by_the_user"]
IN_TURNS = [  # by the other schedule
    "weights_of_classes_and_samples",
    "several_outputs",
    "values_that_skip_stages",
    "losses_of_layers_and_weights",
    "optimizers",
]
WHOLE_BATCH = "convolution_with_batch_norm_and_dropout"
APART = (WHOLE_BATCH, "files", "callbacks")  # which `in_pipelines` wraps otherwise


def run_all(wrap: cases.Wrap, names: list[str]) -> dict[str, Any]:
    every = {**cases.CASES, **pipeline_cases.CASES}
    return {name: every[name](wrap) for name in names}


def in_pipelines(stages: int, names: list[str], directory: str) -> dict[str, Any]:
    import torch

    import hocket.keras

    torch.set_num_threads(1)

    def wrap(model: Any) -> Any:
        return hocket.keras.Model(model, pipeline=stages, micro_batches=MICRO_BATCHES)

    def load(path: Any) -> Any:
        return hocket.keras.load_model(path, pipeline=stages, micro_batches=MICRO_BATCHES)

    def in_turns(model: Any) -> Any:
        return hocket.keras.Model(model, pipeline=stages, micro_batches=MICRO_BATCHES, schedule="1f1b")

    cut = [name for name in names if name not in APART]
    found = run_all(wrap, cut)
    turns = run_all(in_turns, [name for name in IN_TURNS if name in names])
    found |= {f"{name} in turns": result for name, result in turns.items()}
    if WHOLE_BATCH in names:
        found[WHOLE_BATCH] = cases.CASES[WHOLE_BATCH](lambda model: hocket.keras.Model(model, pipeline=2))
    if "files" in names:
        found["files"] = pipeline_cases.files(wrap, load, directory)
    if "callbacks" in names:
        found["callbacks"] = pipeline_cases.callbacks(wrap, directory)
    if stages == 2:
        found["own part"] = pipeline_cases.own_part(wrap)
    return found


@pytest.fixture(scope="module")
def plain(asked: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import keras

    found = run_all(lambda model: model, sorted(asked - {"files", "callbacks"}))
    directory = str(tmp_path_factory.mktemp("plain"))
    if "files" in asked:
        found["files"] = pipeline_cases.files(lambda model: model, keras.models.load_model, directory)
    if "callbacks" in asked:
        found["callbacks"] = pipeline_cases.callbacks(lambda model: model, directory)
    return found


@pytest.fixture(scope="module")
def two_stages(asked: set[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [name for name in (*SHARED, *pipeline_cases.CASES, *APART) if name in asked]
    return run_ranks(in_pipelines, 2, 2, names, str(tmp_path_factory.mktemp("two")), timeout_s=200)


@pytest.fixture(scope="module")
def two_pipelines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(in_pipelines, 4, 2, [*ON_FOUR, *APART], str(tmp_path_factory.mktemp("four")), timeout_s=200)


@pytest.fixture(scope="module")
def three_stages() -> list[dict[str, Any]]:
    names = ["values_that_skip_stages", "attention_on_masked_sequences"]
    return run_ranks(in_pipelines, 3, 3, names, "", timeout_s=200)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHARED, *pipeline_cases.CASES, WHOLE_BATCH, "files", "callbacks"])
def test_two_stages_give_what_plain_keras_gives(
    plain: dict[str, Any], two_stages: list[dict[str, Any]], name: str
) -> None:
    check(plain[name], [result[name] for result in two_stages])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", IN_TURNS)
def test_forwards_and_backwards_in_turns_give_what_plain_keras_gives(
    plain: dict[str, Any], two_stages: list[dict[str, Any]], name: str
) -> None:
    check(plain[name], [result[f"{name} in turns"] for result in two_stages])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("losses_of_layers_and_weights", "two_pipelines"), ("values_that_skip_stages", "three_stages")],
)
def test_turns_of_two_pipelines_and_of_three_stages_give_it_too(
    plain: dict[str, Any], name: str, ranks: str, request: pytest.FixtureRequest
) -> None:
    check(plain[name], [result[f"{name} in turns"] for result in request.getfixturevalue(ranks)])


@pytest.mark.long
@pytest.mark.parametrize("name", [*ON_FOUR, WHOLE_BATCH, "files", "callbacks"])
def test_two_pipelines_of_two_stages_give_what_plain_keras_gives(
    plain: dict[str, Any], two_pipelines: list[dict[str, Any]], name: str
) -> None:
    check(plain[name], [result[name] for result in two_pipelines])


@pytest.mark.long
@pytest.mark.parametrize("name", ["values_that_skip_stages", "attention_on_masked_sequences"])
def test_three_stages_give_what_plain_keras_gives(
    plain: dict[str, Any], three_stages: list[dict[str, Any]], name: str
) -> None:
    check(plain[name], [result[name] for result in three_stages])


def test_a_rank_computes_and_keeps_state_for_its_own_stage_only(two_stages: list[dict[str, Any]]) -> None:
    first, second = (result["own part"] for result in two_stages)
    assert first["layers"] == ["a", "b"]
    assert second["layers"] == ["c", "d"]
    for part in (first, second):
        assert part["computed"] == part["layers"]
        assert part["gradients"] == [f"{name}/{kind}" for name in part["layers"] for kind in ("kernel", "bias")]
        assert part["state_nbytes"] == 2 * 4 * 2 * (40 * 40 + 40) + part["scalars_nbytes"]
