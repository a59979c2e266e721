"""What an optimizer's update is like, as its trial finds it, and what a plan makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.parallel.compose._refusals import check_arguments
from hocket.parallel.state import UpdateTrial
from hocket.planner import Plan, PlanError
from hocket.testing import run_ranks

from ..trainer_programs import noisy_updates


class Clipped(torch.optim.SGD):
    """Clips by the norm over all gradients, as several optimizers of packages do by default."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = 0.5

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.norm)
        return super().step(closure)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class ByEigenvectors(torch.optim.SGD):
    """Takes steps of one size along the eigenvectors of the gradient's products, as SOAP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.dim() == 2):
            basis = torch.linalg.eigh(p.grad @ p.grad.T)[1]
            p.sub_(basis @ torch.nn.functional.normalize(basis.T @ p.grad, eps=1e-30), alpha=0.1)


def _warming_up(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return optimizer


@pytest.mark.parametrize(
    ("make", "meet"),
    [
        (lambda ps: Clipped(ps, lr=0.1), True),
        (lambda ps: _warming_up(Clipped(ps, lr=0.1)), True),
        (lambda ps: torch.optim.AdamW(ps), False),
        (lambda ps: torch.optim.Adafactor(ps), False),
        (lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]), False),
        (lambda ps: torch.optim.LBFGS(ps), False),  # not found: it wants a closure
    ],
)
def test_updates_that_depend_on_the_gradients_of_other_parameters_are_found(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], meet: bool
) -> None:
    model = _model()
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    optimizer = make(list(model.parameters()))
    assert UpdateTrial.of(optimizer).meets == meet
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert all(torch.equal(p, one) and p.grad is None for p, one in zip(model.parameters(), before, strict=True))


def test_a_pipeline_refuses_an_optimizer_that_needs_all_gradients() -> None:
    model = _model()
    optimizer = Clipped(model.parameters(), lr=0.1)
    update = UpdateTrial.of(optimizer)
    with pytest.raises(PlanError, match="depends on those of others"):
        check_arguments(model, optimizer, Plan(pipeline_parallel_degree=2), update)
    check_arguments(model, optimizer, Plan(), update)


def test_an_optimizer_that_magnifies_rounding_is_found() -> None:
    assert UpdateTrial.of(ByEigenvectors(_model().parameters(), lr=0.1)).magnified > 1e-2
    assert UpdateTrial.of(Clipped(_model().parameters(), lr=0.1)).magnified < 1e-9


def test_an_optimizer_that_draws_random_numbers_draws_the_same_on_all_ranks_or_is_refused() -> None:
    # Dropout and a batch that cannot be shared equally: ranks have drawn unlike numbers before.
    (weights, refused), (others, _) = run_ranks(noisy_updates, 2, timeout_s=60)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    assert "shard: Noisy draws random numbers" in refused
    assert "pipeline_parallel_degree: Noisy draws random numbers" in refused
    (plain, _) = noisy_updates(dropout=0.0)
    (alike, _) = run_ranks(noisy_updates, 2, 0.0, timeout_s=60)[1]
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(plain, alike, strict=True))


def test_an_optimizer_that_has_stepped_keeps_its_state_and_none_is_copied() -> None:
    class Held(torch.Tensor):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("state was copied")

    model = _model()
    optimizer = Clipped(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p).as_subclass(Held)
    assert UpdateTrial.of(optimizer).meets  # an error in it would be taken for "not found"
    assert all(bool((entry["momentum_buffer"] == 1).all()) for entry in optimizer.state.values())
