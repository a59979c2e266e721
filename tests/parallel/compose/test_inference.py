"""A model that is used under torch.inference_mode() between steps, as a program for one device does."""

from typing import Any

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


@pytest.mark.long
def test_inference_between_steps_leaves_nothing_that_training_could_not_use() -> None:
    plain = used(Plan())
    for rank in run_ranks(under_plans, 2, timeout_s=120):
        for found in rank:
            assert found == pytest.approx(plain, rel=1e-9)


def between() -> list[list[float]]:
    """Losses of `Trainer` and `distribute` where the model is asked in inference mode before each step."""
    found = []
    for distributed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
        data = [(torch.randn(4, dtype=torch.float64), torch.randn(2, dtype=torch.float64)) for _ in range(24)]
        loader: Any = torch.utils.data.DataLoader(data, 8)
        optimizer, mse = torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss
        trainer: Any = None
        if distributed:
            model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        else:
            trainer = hocket.Trainer(model, mse, optimizer, Plan())
            loader = trainer.batches(loader)
        losses = []
        for x, y in loader:
            with torch.inference_mode():
                (model if trainer is None else trainer.predict)(torch.ones(4, 4, dtype=torch.float64))
                (model if trainer is None else trainer.model)(x)
            torch.randint(0, 9, (2,))  # torch's internal error where a look that had begun before ended in there
            if trainer is not None:
                losses.append(float(trainer.step((x, y))))
                continue
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(hocket.average(loss.detach())))
        found.append(losses)
    return found


def test_a_model_that_is_asked_in_inference_mode_between_steps_trains_as_by_one_process() -> None:
    (alone,) = run_ranks(between, 1)
    for rank in run_ranks(between, 2):
        for losses, expected in zip(rank, alone, strict=True):
            assert losses == pytest.approx(expected, rel=1e-12)
