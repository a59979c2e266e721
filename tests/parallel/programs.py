"""Training programs as a user would write them, run by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

SAMPLES = 23
BATCH = 8
EPOCHS = 2  # of 3 batches: 6 steps


def mlp() -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)))
    return model, data, F.cross_entropy


def conv() -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2)
    )
    model = model.to(memory_format=torch.channels_last)
    data = TensorDataset(torch.randn(SAMPLES, 3, 6, 6), torch.randn(SAMPLES, 2))
    return model, data, F.mse_loss


class Words(nn.Module):
    """An embedding whose matrix is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.mix(self.embedding(words).mean(1))))


def words() -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    data = TensorDataset(torch.randint(0, 11, (SAMPLES, 5)), torch.randint(0, 11, (SAMPLES,)))
    return Words(), data, F.cross_entropy


class Tables(nn.Module):
    """Tables of embeddings below a small network; the first weight is one of the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 3)
        self.words = nn.Embedding(37, 8)
        self.bag = nn.EmbeddingBag(11, 4, mode="sum")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.words(words).mean(1), self.bag(words % 11)], 1))


def tables() -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    data = TensorDataset(torch.randint(0, 37, (SAMPLES, 5)), torch.randint(0, 3, (SAMPLES,)))
    return Tables(), data, F.cross_entropy


MODELS = {"mlp": mlp, "conv": conv, "words": words}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
}


OTHERS = {"tables": tables}
OTHER_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lars": lambda p: hocket.optim.LARS(p, lr=0.1, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.1),
    "lamb": lambda p: hocket.optim.LAMB(p, lr=1e-2, weight_decay=0.02),
}


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    return {**OPTIMIZERS, **OTHER_OPTIMIZERS}[name](parameters)


def setting(name: str, dtype: torch.dtype) -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    torch.manual_seed(7)
    model, data, loss_fn = {**MODELS, **OTHERS}[name]()
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in data.tensors]
    return model.to(dtype), TensorDataset(*tensors), loss_fn


def plain(
    name: str, optimizer_name: str, dtype: torch.dtype, epochs: int = EPOCHS
) -> tuple[list[float], list[np.ndarray]]:
    """The curve and the parameters of a program that knows nothing of hocket."""
    model, data, loss_fn = setting(name, dtype)
    optimizer = optimizer_of(optimizer_name, model.parameters())
    losses = []
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, arrays(model.parameters())


def distributed(name: str, optimizer_name: str, dtype: torch.dtype, **options: Any) -> tuple[list[float], Any, Any]:
    """The same program, changed as the README says; also evaluates."""
    model, data, loss_fn = setting(name, dtype)
    optimizer = optimizer_of(optimizer_name, model.parameters())
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, **options)
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(hocket.average(loss).item())
    return losses, arrays(model.parameters()), evaluate(model, data)


def arrays(tensors: Iterable[torch.Tensor | None]) -> list[Any]:
    """Copies that plain pickle sends by value."""
    return [None if t is None else t.detach().double().cpu().numpy().copy() for t in tensors]


def evaluate(model: Any, data: TensorDataset) -> tuple[int, float]:
    seen, total = 0, 0.0
    with torch.no_grad():
        for x, _ in hocket.shard(DataLoader(data, batch_size=5)):
            seen += len(x)
            total += model(x).double().square().sum().item()
    seen, total = hocket.total(seen, total)
    return seen, total


def all_cases(dtype: torch.dtype) -> dict[tuple[str, str], Any]:
    return {(m, o): distributed(m, o, dtype) for m in MODELS for o in OPTIMIZERS}
