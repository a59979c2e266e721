"""Steps of training, and updates of optimizers, that torch.compile has compiled as a whole, in a loop of distribute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

WAYS = "step", "halves", "optimizer"


def trained(way: str, *, statistic: bool = False) -> tuple[list[float], list[list[float]]]:
    """Train a model on uneven batches; return the losses and the weights."""
    torch.manual_seed(0)
    x, y = torch.randn(29, 6).double(), torch.randint(0, 3, (29,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=6))

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(model(x), y, reduction="none")
        loss = (each / each.std().detach()).mean() if statistic else each.mean() / 2
        loss.backward()
        return loss.detach()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(x, y)
        optimizer.step()
        return hocket.average(loss)

    update = optimizer.step
    if way == "step":
        step = torch.compile(step, backend="eager")
    if way == "halves":
        backward = torch.compile(backward, backend="eager")
    if way in ("halves", "optimizer"):
        update = torch.compile(update, backend="eager")
    losses = []
    for batch in loader:
        if way == "step":
            losses.append(step(*batch).item())
        else:
            optimizer.zero_grad()
            losses.append(hocket.average(backward(*batch)).item())
            update()
        torch.zeros(3)  # of no tensor: raw, where a mode of torch's is gone and not forgotten
    return losses, [p.detach().flatten().tolist() for p in model.parameters()]


def all_ways() -> list[tuple[list[float], list[list[float]]]]:
    return [trained(way) for way in WAYS]


@pytest.mark.long
def test_a_step_or_an_update_that_is_compiled_as_a_whole_is_that_of_one_process() -> None:
    plain = trained("none")
    for rank in run_ranks(all_ways, 2, timeout_s=200):
        for losses, weights in rank:
            assert losses == pytest.approx(plain[0], rel=1e-9)
            for mine, whole in zip(weights, plain[1], strict=True):
                assert mine == pytest.approx(whole, rel=1e-9, abs=1e-12)


def refused() -> str:
    try:
        trained("step", statistic=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_statistic_of_a_ranks_samples_is_seen_in_a_step_that_is_compiled() -> None:
    for said in run_ranks(refused, 2, timeout_s=200):
        assert "depends on other samples of its batch" in said
