"""A copy of a model whose forward a plan has replaced runs its own weights."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

PLANS = {
    "precision": Plan(precision="bfloat16"),
    "recompute": Plan(recompute=True),
    "both, of tensors": Plan(precision="bfloat16", recompute=True, tensor_parallel_degree=2),
}
X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.ones(8, 8)


def _copied(plan: Plan) -> tuple[float, float, float, str]:
    """Return outputs and a gradient of a copy with weights of 0, the original's gradient, and how it is called."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=X)
    trainer.step((X, Y))
    twin = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for one in twin.parameters():
            one.zero_()
    for one in model.parameters():
        one.grad = None
    output = twin(X)
    output.float().sum().backward()
    own = max(float(one.grad.abs().max()) for one in twin.parameters() if one.grad is not None)
    other = sum(one.grad is not None for one in model.parameters())
    if plan.tensor_parallel_degree == 1:  # as plain torch would
        torch.save(model, kept := io.BytesIO())
        kept.seek(0)
        read = torch.load(kept, weights_only=False)
        assert read.state_dict().keys() == model.state_dict().keys()
        assert torch.allclose(read(X), model(X).float(), atol=0.05)
    return float(output.abs().max()), own, other, str(inspect.signature(model[0].forward))


@pytest.mark.parametrize("name", PLANS)
def test_a_copy_of_a_model_runs_its_own_weights(name: str) -> None:
    for output, own, other, called in run_ranks(_copied, 2, PLANS[name]):
        assert (output, other) == (0.0, 0)
        assert own > 0
        assert called == str(inspect.signature(nn.Sequential().forward))
