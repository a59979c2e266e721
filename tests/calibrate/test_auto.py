"""An automatic plan, before anything is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.calibrate import Calibration, _auto, auto_plan
from hocket.parallel.mesh import join
from hocket.planner import Constants, MeasuredPlan, Network, Plan, PlanError
from hocket.testing import run_ranks
from hocket.workload import WorkloadError, capture


def test_a_sample_with_targets_and_fewer_samples_than_workers_is_refused_with_what_to_pass() -> None:
    model, image = nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8)
    world: Any = SimpleNamespace(size=2, rank=0)
    with pytest.raises(PlanError, match="has 1 of the global batch's samples.* without targets"):
        auto_plan(model, torch.optim.SGD(model.parameters()), (image, torch.ones(1)), world)


def test_a_word_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wrote `none` had a calibration taken and kept."""
    monkeypatch.setenv("HOCKET_CALIBRATION", "none")
    model, world = nn.Linear(3, 4), SimpleNamespace(size=2, rank=0, first=lambda one: one)
    with pytest.raises(PlanError, match="HOCKET_CALIBRATION=none: there is no such word; write again, off, keep"):
        auto_plan(model, torch.optim.SGD(model.parameters()), torch.ones(4, 3), world)  # type: ignore[arg-type]


class Mixed(nn.Module):
    """Two parameters of two types in one block, which FSDP2 refuses to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.own(x) * self.scale).float()


def chosen(ranked: list[Plan], runs: int) -> tuple[str, list[str]]:
    torch.manual_seed(1)
    model, x, world = nn.Sequential(Mixed(), Mixed()), torch.ones(4, 8), join()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    network = Network("two ranks", 2, 1, 1e9, 1.1e-5, 1e9, 1e9, 1e-5, 0.0, 0.0, 2**33, 0.0, at_once=2.0)
    known = Calibration(capture(model, x, optimizer="sgd"), network, Constants(), (MeasuredPlan(Plan(), 1e-3),) * runs)
    wanted: list[dict[str, Any]] = []

    def found(measured: Any, workers: int, batch: int, fixed: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        wanted.append(fixed)
        return [one.to_json() for one in (ranked if len(wanted) == 1 else [Plan()])], ""

    said: list[str] = []
    _auto._ranked = found  # type: ignore[assignment]
    _auto._say = lambda world, line: said.append(line)  # type: ignore[assignment]
    before = [one.detach().clone() for one in model.parameters()]
    plan = _auto._carried_out(known, model, optimizer, (x,), world, {})
    assert all(map(torch.equal, before, model.parameters()))
    return plan.describe(), said


SHARDED = Plan(shard="parameters")


def test_what_the_model_refuses_is_not_chosen() -> None:
    for plan, (told,) in run_ranks(chosen, 2, [SHARDED, Plan(shard="optimizer")], 1):
        assert plan == "all data (optimizer sharded)"
        assert told.startswith("2 data (parameters sharded) is predicted to be faster, and is refused: the plan cannot")


def test_data_parallelism_is_left_where_the_model_refuses_all_else() -> None:
    assert [plan for plan, _ in run_ranks(chosen, 2, [SHARDED], 1)] == ["all data"] * 2


def test_where_no_copy_could_be_run_the_preferred_plan_is_taken_unseen() -> None:
    assert run_ranks(chosen, 2, [SHARDED], 0) == [("all data (parameters sharded)", [])] * 2


def test_a_plan_calls_the_hooks_of_the_program_with_whole_gradients() -> None:
    model = nn.Linear(3, 4)
    assert _auto._for_hooks(model) == {}
    handle = model.weight.register_hook(lambda gradient: 2 * gradient)
    alone = _auto._for_hooks(model)
    assert alone["shard"] == "none"
    assert alone["tensor_parallel_degree"] == alone["pipeline_parallel_degree"] == 1
    handle.remove()
    model.bias.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert _auto._for_hooks(model) == alone | {"accumulate": 1}


def failing(rank_of_nothing: int) -> str:
    model = nn.Sequential(nn.Linear(3, 4))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: 1 // rank_of_nothing)
    try:
        auto_plan(model, torch.optim.SGD(model.parameters()), torch.ones(4, 3), join(), seconds=1.0)
    except WorkloadError as error:
        return str(error)
    return ""


def test_what_only_one_rank_measures_fails_on_every_rank() -> None:
    told = "the model cannot be measured: ZeroDivisionError: integer division or modulo by zero"
    assert run_ranks(failing, 2, 0) == [told] * 2


def closure() -> tuple[str, list[str]]:
    model, said = nn.Linear(3, 4), []
    _auto._say = lambda world, line: said.append(line)  # type: ignore[assignment]
    try:
        hocket.Trainer(model, nn.MSELoss(), torch.optim.LBFGS(model.parameters()), plan="auto", sample=torch.ones(4, 3))
    except ValueError as error:
        return str(error), said
    return "", said


def test_an_optimizer_that_no_plan_trains_with_is_refused_before_a_minute_of_measuring() -> None:
    for refused, said in run_ranks(closure, 2):
        assert refused.startswith("LBFGS computes the loss several times")
        assert said == []


def hooked(rank: int, hook: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    if join().rank == rank:
        model.weight.register_hook(hook)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def hooked_on(rank: int) -> tuple[list[str], dict[str, Any]]:
    """What is refused, and what of a plan is fixed, for a model of which one rank alone has a hook."""
    found, wanted = [], list[dict[str, Any]]()
    for plan, hook in (
        (Plan(shard="optimizer"), lambda gradient: None),
        (Plan(), lambda gradient: None),
        (Plan(), lambda gradient: gradient.clamp(-1, 1)),
    ):
        model, optimizer = hooked(rank, hook)
        try:
            hocket.Trainer(model, nn.MSELoss(), optimizer, plan)
            found.append("")
        except ValueError as error:
            found.append(str(error))

    def carried_out(*given: Any) -> Plan:
        wanted.append(given[-1])
        return Plan()

    _auto._carried_out = carried_out
    _auto._measured = lambda *given: None  # type: ignore[assignment, return-value]
    auto_plan(*hooked(rank, lambda gradient: None), torch.ones(4, 4), join())
    return found, wanted[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_on_one_rank_alone_counts_for_all(rank: int) -> None:
    results = run_ranks(hooked_on, 2, rank)
    assert results[0][1] == _auto._ALONE
    for (sharded, plain, changed), _ in results:
        assert "the program has a hook on the gradient of parameter 'weight', and no rank" in sharded
        assert not plain
        assert changed.startswith(f"rank {rank} has a hook that changes the gradient of 'weight', and other ranks")
