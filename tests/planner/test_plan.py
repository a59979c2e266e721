"""A plan as a value: what it refuses, how it is written, and how it is read back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket._ends import with_end
from hocket.planner import Plan, PlanError, Synchronisation
from hocket.testing import deadline

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
plans = st.builds(
    Plan,
    data_parallel_degree=st.integers(-1, 9),
    shard=st.sampled_from(["none", "optimizer", "gradients", "parameters"]),
    tensor_parallel_degree=st.integers(1, 9),
    sequence_parallel=st.booleans(),
    pipeline_schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
    spatial_parallel_degree=st.integers(1, 9),
    split=st.lists(names, max_size=3).map(tuple),
    clip_norm=st.none() | st.floats(1e-9, 1e9),
    bucket_bytes=st.none() | st.integers(1, 2**40),
    choices=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    predicted=st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
    reasons=st.dictionaries(names, names, max_size=3),
)


@given(plans)
@settings(deadline=None, max_examples=150)
def test_a_plan_is_what_is_read_back_from_toml_and_from_json(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_file_has_a_line_for_each_decision_and_nothing_else(tmp_path: Path) -> None:
    plan = Plan(shard="gradients", bucket_bytes=4096, split=("a.b",), reasons={"shard": "memory"})
    text = plan.to_toml()
    assert text == (
        '[data]\nshard = "gradients"\n\n[pipeline]\nsplit = [\n    "a.b",\n]\n\n[reduce]\nbucket_bytes = 4096\n\n'
        '[reasons]\nshard = "memory"\n'
    )
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert Plan.from_toml(path) == Plan.from_toml(str(path)) == plan
    assert Plan.from_toml("") == Plan()


def test_files_without_sections_are_read_as_they_were() -> None:
    flat = 'shard = "gradients"\ntensor_parallel_degree = 2\nsplit = ["a.b"]\nclip_norm = 1\nbucket_bytes = 4096\n'
    nested = 'clip_norm = 1\nbucket_bytes = 4096\n[data]\nshard = "gradients"\n[tensor]\ndegree = 2\n'
    assert Plan.from_toml(flat + '[reasons]\nshard = "memory"\n') == Plan.from_toml(
        nested + '[pipeline]\nsplit = ["a.b"]\n[reasons]\nshard = "memory"\n'
    )


def test_bytes_are_read_as_people_write_them() -> None:
    assert Plan.from_toml('bucket_bytes = "25 MiB"').bucket_bytes == 25 * 2**20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shards = 1", "shards: a plan has no such field"),
        ("[tensor]\ndegrees = 2", "tensor.degrees: a plan has no such field; it has degree, sequence"),
        ("tensor_parallel_degree = 2\n[tensor]\ndegree = 2", "tensor.degree: tensor_parallel_degree is said twice"),
        ("[tensor]\ndegree = true", "tensor_parallel_degree: must be of type int, not True"),
        ("tensor = 2", "tensor: a plan has no such field"),
        ('shard = "all"', "shard: there is no 'all'; choose among 'none', 'optimizer'"),
        ("micro_batches = 1.5", "micro_batches: must be of type int, not 1.5"),
        ("sync_batch_norm = 1", "sync_batch_norm: must be of type bool"),
        ("clip_norm = -1", "clip_norm: must be a positive number, not -1"),
        ('bucket_bytes = "4 hours"', "bucket_bytes: '4 hours' is no"),
        ("split = [1]", "split: must be names of modules"),
        ("predicted = {step_s = 'soon'}", "predicted: must be a table of numbers"),
        ("a = = 1", "is not TOML"),
        ('topology = "star"\nhosts = 2', "the plan describes a cluster; give it as --cluster"),
        ("/no/such/plan.toml", "cannot read plan '/no/such/plan.toml': No such file"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [[1, 2], 3, "shard", None])
def test_json_that_is_no_table_is_no_plan(value: Any) -> None:
    with pytest.raises(PlanError, match=f"no table of fields but of type {type(value).__name__}"):
        Plan.from_json(value)


def test_an_empty_file_is_no_plan_though_all_may_be_as_by_default(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(" \n")
    with pytest.raises(PlanError, match="is empty; write or copy it again"):
        Plan.from_toml(path)
    path.write_text(Plan().to_toml())
    assert Plan.from_toml(path) == Plan()


def test_degrees_are_filled_in_for_the_world() -> None:
    assert Plan(tensor_parallel_degree=2).resolve(8).data_parallel_degree == 4
    assert Plan(spatial_parallel_degree=2).resolve(8).data_parallel_degree == 4
    assert Plan().resolve(1).data_parallel_degree == 1
    assert Plan(data_parallel_degree=2, pipeline_parallel_degree=2).resolve(4).data_parallel_degree == 2


@pytest.mark.parametrize(
    ("settings", "world", "batch", "field"),
    [
        ({"tensor_parallel_degree": 3}, 4, None, "tensor_parallel_degree"),
        ({"data_parallel_degree": 3}, 4, None, "data_parallel_degree"),
        ({"data_parallel_degree": 0}, 4, None, "data_parallel_degree"),
        ({"micro_batches": 0}, 4, None, "micro_batches"),
        ({"micro_batches": 4}, 4, None, "micro_batches"),
        ({"stages_per_rank": 2}, 4, None, "stages_per_rank"),
        ({"split": ("a",)}, 4, None, "split"),
        ({"split": ("a", "b"), "pipeline_parallel_degree": 2}, 4, None, "split"),
        ({"pipeline_parallel_degree": 2, "accumulate": 2}, 4, None, "accumulate"),
        ({"pipeline_parallel_degree": 2, "stages_per_rank": 2}, 4, None, "stages_per_rank"),
        ({"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved"}, 4, None, "stages_per_rank"),
        ({"sequence_parallel": True}, 4, None, "sequence_parallel"),
        ({"batch_norm_group": 2}, 4, None, "batch_norm_group"),
        ({"batch_norm_group": 3, "sync_batch_norm": True}, 4, None, "batch_norm_group"),
        ({"batch_norm_group": -1, "sync_batch_norm": True}, None, None, "batch_norm_group"),
        ({"shard": "parameters", "shard_degree": -1}, None, None, "shard_degree"),
        ({"shard": "parameters", "shard_degree": 1}, None, None, "shard_degree"),
        ({"shard": "parameters", "shard_degree": 3}, 4, None, "shard_degree"),
        ({"shard": "parameters", "shard_degree": 4, "tensor_parallel_degree": 2}, 4, None, "shard_degree"),
        ({"shard": "gradients", "shard_degree": 2}, 4, None, "shard_degree"),
        ({"compression": "zip"}, 4, None, "compression"),
        ({"compression": "topk:7"}, 4, None, "compression"),
        ({"compression": "int8", "shard": "parameters"}, 4, None, "compression"),
        ({"synchronisation": "stale:4", "shard": "gradients"}, 4, None, "shard"),
        ({"synchronisation": "local:8", "tensor_parallel_degree": 2}, 4, None, "tensor_parallel_degree"),
        ({"synchronisation": "ssp:0", "pipeline_parallel_degree": 2}, 4, None, "pipeline_parallel_degree"),
        ({"synchronisation": "hogwild", "embeddings": "row"}, 4, None, "embeddings"),
        ({"accumulate": 4}, 4, 15, "accumulate"),
        ({"spatial_parallel_degree": 0}, 4, None, "spatial_parallel_degree"),
        ({"spatial_parallel_degree": 3}, 4, None, "spatial_parallel_degree"),
        ({"spatial_parallel_degree": 2, "data_parallel_degree": 4}, 4, None, "data_parallel_degree"),
        ({"spatial_parallel_degree": 2, "tensor_parallel_degree": 2}, 4, None, "tensor_parallel_degree"),
        ({"spatial_parallel_degree": 2, "pipeline_parallel_degree": 2}, 4, None, "pipeline_parallel_degree"),
        ({"spatial_parallel_degree": 2, "shard": "parameters"}, 4, None, "shard"),
        ({"spatial_parallel_degree": 2, "embeddings": "row"}, 4, None, "embeddings"),
        ({"spatial_parallel_degree": 2, "recompute": True}, 4, None, "recompute"),
        ({"pipeline_parallel_degree": 2, "micro_batches": 4}, 4, 7, "micro_batches"),
    ],
)
def test_each_broken_rule_is_found_alone_and_with_a_remedy(
    settings: dict[str, Any], world: int | None, batch: int | None, field: str
) -> None:
    found = Plan(**settings).findings(world, batch=batch)
    assert [finding.field for finding in found] == [field]
    assert found[0].rule
    assert found[0].remedy
    if world is not None and batch is None:
        with pytest.raises(PlanError, match=field):
            Plan(**settings).resolve(world)


def test_the_remedy_of_degrees_that_do_not_fit_can_be_carried_out() -> None:
    (found,) = Plan(data_parallel_degree=3).findings(4)
    assert found.remedy.startswith("say 4")
    assert Plan(data_parallel_degree=4).findings(4) == []


def test_a_plan_says_in_a_few_words_what_it_is() -> None:
    plan = Plan(2, "gradients", 2, True, 2, micro_batches=4, embeddings="row")
    said = (
        "2 data (gradients sharded) x 2 tensor (sequence too) x 2 pipeline (1f1b, 4 micro-batches), embeddings by row"
    )
    assert plan.describe() == said
    assert Plan().describe() == "all data"


def test_a_plan_cannot_be_changed_and_does_not_load_torch() -> None:
    assert len({Plan(), Plan(reasons={"shard": "memory"})}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().shard = "none"  # type: ignore[misc]
    code = "import sys; import hocket.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=deadline(60)).returncode == 0


@pytest.mark.parametrize(
    "word", ["stale:0", "stale", "local:0", "local:-1", "ssp:x", "hogwild:2", "every_step:1", "later"]
)
def test_a_synchronisation_that_is_none_is_refused_with_what_may_be_written(word: str) -> None:
    with pytest.raises(PlanError, match=r'synchronisation: there is no synchronisation .*"local:8"'):
        Plan(synchronisation=word)


@pytest.mark.parametrize(("word", "number"), [("local:8", 8), ("stale:4", 4), ("ssp:0", 0), ("hogwild", 0)])
def test_a_relaxed_synchronisation_says_why_it_is_not_serially_equivalent(word: str, number: int) -> None:
    found = Synchronisation.parse(word)
    assert (found.rule, found.number) == (word.partition(":")[0], number)
    assert found.reason.startswith("not serially equivalent: ")
    plan = Plan(synchronisation=word)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert plan.describe().endswith(f"synchronisation {word}")
    assert Synchronisation.parse("every_step").reason == ""


def test_a_plan_that_was_cut_off_is_refused_wherever_it_was(tmp_path: Path) -> None:
    plan = Plan(shard="gradients", tensor_parallel_degree=2, bucket_bytes=4096)
    path, text = tmp_path / "plan.toml", with_end(plan.to_toml())
    for length in range(1, len(text) - 1):  # the last byte is a line's end
        path.write_text(text[:length])
        with pytest.raises(PlanError, match="cut off"):
            Plan.from_toml(path)
    path.write_text(text)
    assert Plan.from_toml(path) == plan


def test_a_variable_that_holds_no_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_PLAN", '{"shard": "optimizer",}')
    with pytest.raises(
        PlanError, match=r"HOCKET_PLAN is no JSON \(.*line 1 column 2[23].*\): \{\"shard\": \"optimizer\",\}; give"
    ):
        Plan.from_environment()
    monkeypatch.setenv("HOCKET_PLAN", '{"shards": 1, "tensors": 2}')
    with pytest.raises(
        PlanError, match="HOCKET_PLAN cannot be read:\n  shards: .*; it has .*\n  tensors: .*; choose among those"
    ):
        Plan.from_environment()
