"""A loss function that computes with the model's own parameters, or with what its code has kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.parallel.compose._compose import _WithoutParts
from hocket.parallel.pipeline import StageError
from hocket.planner import Plan
from hocket.testing import run_ranks

DIVIDING = [Plan(shard="parameters"), Plan(tensor_parallel_degree=2), Plan(pipeline_parallel_degree=2, micro_batches=2)]
WHOLE = [Plan(), Plan(shard="gradients")]


def outcomes(plans: list[Plan]) -> list[list[float] | str]:
    found: list[list[float] | str] = []
    for plan in plans:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        x, y = torch.randn(4, 6).double(), torch.randn(4, 2).double()

        def decayed(output: torch.Tensor, target: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return nn.functional.mse_loss(output, target) + 0.1 * sum(one.data.norm() for one in model.parameters())

        trainer = hocket.Trainer(model, decayed, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x)
        try:
            found.append([float(trainer.step((x, y))) for _ in range(2)])
        except (RuntimeError, StageError) as error:
            found.append(str(error))
    return found


@pytest.mark.long
def test_it_is_right_where_parameters_are_whole_and_refused_where_they_are_divided() -> None:
    (expected,) = outcomes([Plan()])
    for rank in run_ranks(outcomes, 2, [*WHOLE, *DIVIDING]):
        for losses in rank[: len(WHOLE)]:
            assert losses == pytest.approx(expected, rel=1e-11)
        for said in rank[len(WHOLE) :]:
            assert "the loss function, or a metric, computes with the model's parameter '0.weight'" in said


def test_a_tensor_that_has_the_identity_of_a_parameter_that_is_gone_is_none() -> None:
    parameter, output = nn.Parameter(torch.ones(2)), torch.ones(2)
    with _WithoutParts({id(output): "0.weight", id(parameter): "0.bias"}, {}):
        assert float(output.sum()) == 2
        with pytest.raises(RuntimeError, match="parameter '0.bias'"):
            parameter.sum()


def captured(plan: Plan, layer: int) -> list[float] | str:
    """Return losses that have a term of what a hook has kept of a layer, or the error."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double(), {}
    model[layer].register_forward_hook(lambda _, __, output: kept.update(output=output))
    x, y = torch.randn(4, 6).double(), torch.randn(4, 6).double()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target) + kept["output"].square().mean()

    trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x)
    try:
        return [float(trainer.step((x, y))) for _ in range(2)]
    except StageError as error:
        return str(error)


@pytest.mark.long
def test_what_a_hook_has_kept_of_another_rank_s_layer_is_no_part_of_a_loss() -> None:
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2, split=("2",))
    for found in run_ranks(captured, 2, plan, 3, timeout_s=110):
        assert found == pytest.approx(captured(Plan(), 3), rel=1e-11)
    for said in run_ranks(captured, 2, plan, 0, timeout_s=110):
        assert "a tensor (of shape [1, 6]) that the model's code kept when the model was cut into stages" in said


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.open = nn.Linear(6, 6), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.open = x.detach().square().mean().item()
        return self.inner(x)


def with_numbers(plan: Plan, layer: int, how: str) -> list[float] | str:
    """Return losses, or means of a metric, with a number that a layer's hook or its forward has kept, or the error."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(*(Gate() for _ in range(4))).double(), {"here": 0.0}
    model[layer].register_forward_hook(lambda _, __, output: kept.update(here=output.square().mean().item()))
    x, y = torch.randn(4, 6).double(), torch.randn(4, 6).double()

    def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        number = model[layer].open if how == "attribute" else kept["here"]
        return nn.functional.mse_loss(output, target) * number

    plain = nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, plain if how == "metric" else scaled, optimizer, plan, sample=x[:2])
    try:
        return [
            trainer.evaluate([(x, y)], scaled) if how == "metric" else float(trainer.step((x, y))) for _ in range(2)
        ]
    except StageError as error:
        return str(error)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["attribute", "hook", "metric"])
def test_a_number_that_another_rank_s_layer_has_kept_is_no_part_of_a_loss_or_metric(how: str) -> None:
    """The loss was computed with the number that the sample had given, or with that of before."""
    plan = Plan(pipeline_parallel_degree=2, micro_batches=1, split=("2",))
    for found in run_ranks(with_numbers, 2, plan, 3, how, timeout_s=110):
        assert found == pytest.approx(with_numbers(Plan(), 3, how), rel=1e-11)
    for said in run_ranks(with_numbers, 2, plan, 0, how, timeout_s=110):
        name = "attribute 'open' of Gate" if how == "attribute" else "kept['here']"
        assert f"a number ({name}) that the model's code kept when the model was cut into stages" in said


class Auxiliary(nn.Module):
    aux: torch.Tensor | float = 0.0  # there before the first forward

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.shift = nn.Linear(6, 6), nn.Linear(6, 6), torch.tensor(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        self.aux = y.square().mean()
        return self.outer(y)


def with_attributes(plan: Plan, name: str) -> list[float] | str:
    torch.manual_seed(0)
    model = nn.Sequential(*(Auxiliary() for _ in range(4))).double()
    x, y = torch.randn(4, 6).double(), torch.randn(4, 6).double()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target) + 0.1 * getattr(model[0], name)

    trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x[:2])
    try:
        return [float(trainer.step((x, y))) for _ in range(2)]
    except StageError as error:
        return str(error)


@pytest.mark.long
def test_a_tensor_that_a_forward_keeps_in_an_attribute_is_no_part_of_a_loss_in_a_pipeline() -> None:
    """The loss was computed with what the attribute had before the first forward, in silence."""
    plan = Plan(pipeline_parallel_degree=2, micro_batches=1)
    for found in run_ranks(with_attributes, 2, plan, "shift", timeout_s=110):
        assert found == pytest.approx(with_attributes(Plan(), "shift"), rel=1e-11)
    for said in run_ranks(with_attributes, 2, plan, "aux", timeout_s=110):
        assert "a tensor (attribute 'aux' of Auxiliary) that the model's code kept" in said


def judged(plan: Plan) -> str | list[float]:
    """Return the error of a step whose loss calls a model that another Trainer trains, or losses where it is frozen."""
    torch.manual_seed(0)
    x = torch.randn(4, 6).double()
    models = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    judge = hocket.Trainer(models[1], nn.functional.mse_loss, optimizers[1], plan, sample=x)

    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return models[1](output).square().mean()

    trainer = hocket.Trainer(models[0], loss_fn, optimizers[0], Plan(pipeline_parallel_degree=2), sample=x)
    if plan == Plan():
        models[1].requires_grad_(False)
        losses = [float(trainer.step((x, x)))]
        models[1].requires_grad_(True)
        losses += [float(judge.step((x, x)))]
        models[1].requires_grad_(False)
        losses += [float(trainer.step((x, x)))]
        models[1].requires_grad_(True)
    with pytest.raises(StageError) as caught:
        trainer.step((x, x))
    return losses if plan == Plan() and "model.requires_grad_(False)" in str(caught.value) else str(caught.value)


@pytest.mark.long
def test_a_loss_that_calls_another_model_that_is_divided_is_refused_at_once() -> None:
    for said in run_ranks(judged, 2, Plan(pipeline_parallel_degree=2), timeout_s=60):
        assert "a loss or metric calls a model that is in a pipeline" in said
    for plan in (Plan(tensor_parallel_degree=2), Plan(shard="parameters")):
        for said in run_ranks(judged, 2, plan, timeout_s=60):
            assert "a loss or metric calls a model that is divided among ranks" in said


def one_process() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(4, 6).double()
    models = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    found = []
    for i in (0, 1, 0):
        optimizers[i].zero_grad()
        loss = models[1](models[0](x)).square().mean() if i == 0 else (models[1](x) - x).square().mean()
        loss.backward()
        optimizers[i].step()
        found.append(float(loss))
    return found


@pytest.mark.long
def test_a_loss_of_a_pipeline_that_calls_a_model_of_another_trainer_needs_it_frozen() -> None:
    """Its gradients were averaged with ranks that computed none: all hung until the time-out."""
    for losses in run_ranks(judged, 2, Plan(), timeout_s=60):
        assert losses == pytest.approx(one_process(), rel=1e-11)
