"""A model that is used under torch.inference_mode() between steps, as a program for one device does."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import Plan
from hocket.testing import run_ranks

PLANS = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2, "micro_batches": 2}, {"shard": "parameters"}


def used(plan: Plan) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 6).double(), torch.randn(8, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    found = []
    for _ in range(3):
        trainer.model.eval()
        with torch.inference_mode():
            found += [trainer.predict(x * 1).sum().item(), trainer.model(x * 1).sum().item()]
            found.append(trainer.evaluate(DataLoader(TensorDataset(x, y), batch_size=4)))
        trainer.model.train()
        found.append(trainer.step((x, y)).item())
    return found


def under_plans() -> list[list[float]]:
    return [used(Plan(**plan)) for plan in PLANS]


def test_inference_between_steps_leaves_nothing_that_training_could_not_use() -> None:
    plain = used(Plan())
    for rank in run_ranks(under_plans, 2, timeout_s=120):
        for found in rank:
            assert found == pytest.approx(plain, rel=1e-9)
