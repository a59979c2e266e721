"""What is saved under one plan goes on under another, with another number of ranks, as if never stopped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.parallel import CheckpointError
from hocket.parallel.state._shards import (
    DimSegment,
    FlatRange,
    ParameterPlacement,
    boxes,
    memory_order,
)
from hocket.planner import Plan
from hocket.testing import run_ranks

from ..trainer_programs import averages_kept, part_of_a_run, parts_of_runs, scalar_there_and_back, tensor_kept

SHARDS = ("none", "optimizer", "gradients", "parameters")


@pytest.mark.long
def test_a_run_goes_on_under_any_other_plan_and_world(tmp_path: Path) -> None:
    whole = part_of_a_run(Plan())
    paths = {shard: str(tmp_path / shard) for shard in SHARDS}
    first = run_ranks(parts_of_runs, 2, [(Plan(shard=s), "", paths[s], 7) for s in SHARDS], timeout_s=110)
    for losses in first[0]:
        assert losses == pytest.approx(whole[:7], rel=1e-12)
    others = dict(zip(SHARDS, (*SHARDS[1:], SHARDS[0]), strict=True))
    second = run_ranks(parts_of_runs, 4, [(Plan(shard=others[s]), paths[s], "", 11) for s in SHARDS], timeout_s=110)
    alone = [part_of_a_run(Plan(), paths[s]) for s in SHARDS]
    for losses in (*second[0], *second[3], *alone):
        assert losses == pytest.approx(whole[7:], rel=1e-12)


@pytest.mark.long
def test_divided_tensors_layers_and_tables_go_on_where_they_were_not_divided_and_back(tmp_path: Path) -> None:
    # Saved under one plan, loaded under the next: on two ranks, then on four, then on one.
    tensor, pipeline = Plan(tensor_parallel_degree=2), Plan(pipeline_parallel_degree=2, micro_batches=2)
    tables = Plan(embeddings="row", shard="gradients")
    v = replace(pipeline, stages_per_rank=2, pipeline_schedule="zero_bubble_v")
    first: list[tuple[str, Plan]] = [("conv", tensor), ("conv", pipeline), ("tables", tables), ("conv", v)]
    looped = replace(v, pipeline_schedule="interleaved")
    second = [pipeline, Plan(tensor_parallel_degree=2, shard="optimizer"), Plan(embeddings="table"), looped]
    whole = {name: part_of_a_run(Plan(), name=name) for name in ("conv", "tables")}
    paths = [(str(tmp_path / f"{i}a"), str(tmp_path / f"{i}b")) for i in range(4)]
    cases: list[tuple[Any, ...]] = [(plan, "", paths[i][0], 5, name) for i, (name, plan) in enumerate(first)]
    for i, losses in enumerate(run_ranks(parts_of_runs, 2, cases, timeout_s=110)[1]):
        assert losses == pytest.approx(whole[first[i][0]][:5], rel=1e-12), first[i]
    cases = [(plan, *paths[i], 9, first[i][0]) for i, plan in enumerate(second)]
    for i, losses in enumerate(run_ranks(parts_of_runs, 4, cases, timeout_s=110)[2]):
        assert losses == pytest.approx(whole[first[i][0]][5:9], rel=1e-12), (first[i], second[i])
    for i, (name, plan) in enumerate(first):
        losses = part_of_a_run(Plan(), paths[i][1], name=name)
        assert losses == pytest.approx(whole[name][9:], rel=1e-12), (plan, second[i])


@pytest.mark.long
def test_parameters_without_dimensions_or_elements_go_from_plan_to_plan(tmp_path: Path) -> None:
    # In one process all plans are the plain one.
    alone, _ = scalar_there_and_back(str(tmp_path / "alone"))
    losses, keys = run_ranks(scalar_there_and_back, 2, str(tmp_path / "two"))[1]
    assert losses == pytest.approx(alone, rel=1e-12)
    assert sorted(keys) == ["inner.bias", "inner.weight", "none", "scale"]


@pytest.mark.parametrize("plan", [Plan(tensor_parallel_degree=2), Plan(shard="parameters"), Plan(shard="gradients")])
def test_parts_of_parameters_that_rank_0_alone_would_keep_are_refused(plan: Plan, tmp_path: Path) -> None:
    whole = plan.shard == "gradients"
    for parts, *others in run_ranks(averages_kept, 2, plan, str(tmp_path / "one")):
        assert parts == "" if whole else "that is another on each rank" in parts
        assert others == ["", "", *([] if whole else ["refused before step 0"])]


def test_what_is_empty_is_kept(tmp_path: Path) -> None:
    # SGD's state has no entry but momentum, which has the weights' shape.
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer)
    trainer.step((torch.ones(4, 3), torch.ones(4, 2)))
    trainer.save(tmp_path / "one", {"seen": {}, "none": []})
    kept = optimizer.state[model.weight]["momentum_buffer"].clone()
    trainer.step((torch.ones(4, 3), torch.ones(4, 2)))
    assert trainer.load(tmp_path / "one") == {"seen": {}, "none": []}
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], kept)


def test_a_tensor_that_a_module_keeps_as_extra_state_goes_along(tmp_path: Path) -> None:
    for found in run_ranks(tensor_kept, 2, str(tmp_path / "one")):
        assert found == [[0, 1, 2]] * 3


class LeavesOut(nn.Linear):
    """Has no bias in its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if not key.endswith("bias")}


class Nests(nn.Linear):
    """Has its state dict in another."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"inside": super().state_dict(*args, **kwargs)}


@pytest.mark.parametrize("kind", [LeavesOut, Nests])
def test_a_checkpoint_has_weights_that_the_models_own_state_dict_leaves_out(kind: Any, tmp_path: Path) -> None:
    def trainer() -> tuple[nn.Linear, hocket.Trainer]:
        model = kind(3, 2)
        return model, hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))

    model, first = trainer()
    first.step((torch.ones(4, 3), torch.ones(4, 2)))
    first.save(tmp_path / "one")
    other, second = trainer()
    second.load(tmp_path / "one")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    assert set(hocket.read_state_dict(tmp_path / "one")) == ({"weight"} if kind is LeavesOut else {"weight", "bias"})


def test_weights_that_a_wrapper_has_saved_are_refused_with_what_to_take_off(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped = {f"module.{key}": value + 1 for key, value in model.state_dict().items()}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    for source in (wrapped, tmp_path / "wrapped.pt"):
        with pytest.raises(CheckpointError, match=r"with key\.removeprefix\('module\.'\)"):
            trainer.load_state_dict(source)
    trainer.load_state_dict({key.removeprefix("module."): value for key, value in wrapped.items()})
    with pytest.raises(CheckpointError, match=r"more than the model: 'module\.0\.bias', 'more'$"):
        trainer.load_state_dict({"module.0.bias": torch.ones(2), "more": torch.ones(2)})


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    def trainer(width: int, bias: bool = True) -> hocket.Trainer:
        model = nn.Sequential(nn.Linear(3, width, bias=bias))
        return hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        trainer(2).load(tmp_path / "none")
    trainer(2, bias=False).save(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"'0.weight' has the shape \[4, 3\] here and \[2, 3\]"):
        trainer(4, bias=False).load(tmp_path / "one")
    with pytest.raises(CheckpointError, match="has no '0.bias'"):
        trainer(2).load(tmp_path / "one")


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
@settings(deadline=None, max_examples=200)
def test_boxes_cover_a_range_once_and_are_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    numbers = torch.arange(numel).view(shape)
    found = []
    for offsets, sizes, at in boxes(shape, begin, end):
        box = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert box.flatten().tolist() == list(range(at, at + math.prod(sizes)))
        found += box.flatten().tolist()
    assert found == list(range(begin, end))
    assert len(list(boxes(shape, begin, end))) <= max(1, 2 * len(shape))


@given(st.permutations(range(3)), st.integers(0, 24), st.integers(0, 24))
@settings(deadline=None, max_examples=60)
def test_a_range_of_memory_finds_its_place_whatever_the_order_of_axes(axes: list[int], a: int, b: int) -> None:
    begin, end = sorted((a, b))
    tensor = torch.arange(24).view(2, 3, 4).permute(axes)
    order = tuple(memory_order(tensor.stride(), tensor.shape))
    shape = tuple(tensor.shape)
    # The second axis is divided: this rank has two stretches of it, which lie further behind in the model's.
    segments = (DimSegment(0, 1, 4), DimSegment(1, shape[1], 7)) if shape[1] > 1 else (DimSegment(0, shape[1], 4),)
    place = FlatRange(ParameterPlacement("w", (9, 12, 9), 1, segments), shape, order, begin, end)
    here = {4: 0, **{7 + i: 1 + i for i in range(shape[1])}}  # index of the model's axis, to the rank's
    seen = []
    for shard in place.shards(torch.arange(begin, end)):
        offsets = (shard.offsets[0], here[shard.offsets[1]], shard.offsets[2])
        where = tuple(slice(o, o + s) for o, s in zip(offsets, shard.tensor.shape, strict=True))
        assert torch.equal(tensor[where], shard.tensor)
        seen += shard.tensor.flatten().tolist()
    assert sorted(seen) == list(range(begin, end))


class _Counts(torch.optim.SGD):
    """Keeps a count of its own, as torch's optimizers do not."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


class _History(torch.optim.Optimizer):
    """Keeps its last gradients in a list."""

    elementwise = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            last = self.state[parameter].setdefault("last", [])
            last.append(parameter.grad.clone())
            parameter.data.add_(sum(last[-2:]), alpha=-self.param_groups[0]["lr"])


def _saved(kind: Any, plan: Plan, path: str) -> str:
    """Return what is said of saving, and of loading under sharded parameters what plain data parallelism has saved."""
    x, y = torch.ones(4, 6), torch.ones(4, 6)
    for here in dict.fromkeys((plan, Plan(shard="parameters"))):
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        trainer = hocket.Trainer(model, nn.functional.mse_loss, kind(model.parameters(), lr=0.1), here)
        trainer.step((x, y))
        try:
            if here is plan:
                trainer.save(path)
            else:
                trainer.load(path)
        except CheckpointError as error:
            return str(error)
    return ""


def test_an_optimizers_state_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    lost = run_ranks(_saved, 2, _Counts, Plan(), str(tmp_path / "counts"))
    assert all("its state dict has count besides the state by parameter" in said for said in lost)
    parted = run_ranks(_saved, 2, _History, Plan(shard="parameters"), str(tmp_path / "parted"))
    assert all(
        "its state 'last' of '0.weight', of which a rank has a part, cannot be joined" in said for said in parted
    )
    whole = run_ranks(_saved, 2, _History, Plan(), str(tmp_path / "whole"))
    assert all("has a state 'last' of '0.weight', which this plan cannot divide" in said for said in whole)
