"""What an optimizer needs to know of parameters that other ranks hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.parallel.compose._refusals import check_arguments
from hocket.parallel.state import updates_meet
from hocket.planner import Plan, PlanError


class Clipped(torch.optim.SGD):
    """Clips by the norm over all gradients, as several optimizers of packages do by default."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        return super().step(closure)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("make", "meet"),
    [
        (lambda ps: Clipped(ps, lr=0.1), True),
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
    assert updates_meet(optimizer) == meet
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert all(torch.equal(p, one) and p.grad is None for p, one in zip(model.parameters(), before, strict=True))


def test_a_pipeline_refuses_an_optimizer_that_needs_all_gradients() -> None:
    model = _model()
    with pytest.raises(PlanError, match="depends on those of others"):
        check_arguments(model, Clipped(model.parameters(), lr=0.1), Plan(pipeline_parallel_degree=2))
    check_arguments(model, Clipped(model.parameters(), lr=0.1), Plan())


def test_an_optimizer_that_has_stepped_keeps_its_state_and_none_is_copied() -> None:
    class Held(torch.Tensor):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("state was copied")

    model = _model()
    optimizer = Clipped(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p).as_subclass(Held)
    assert updates_meet(optimizer)  # an error in it would be taken for "not found"
    assert all(bool((entry["momentum_buffer"] == 1).all()) for entry in optimizer.state.values())
