"""Blocks that are computed again: gradients, weights and running statistics are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

STEPS = 3


class Block(nn.Module):
    """A block whose matrices a function multiplies with, as GPT-2's layers do; no layer of torch's has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 64) * 0.1), nn.Parameter(torch.randn(64, 16) * 0.1)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.relu(x @ self.up) @ self.down)  # type: ignore[no-any-return]


class Masked(nn.Module):
    """A block that saves what has no gradient: frozen matrices, as a base model's under LoRA, and a mask."""

    def __init__(self, by_itself: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 64) * 0.1), nn.Parameter(torch.randn(64, 16) * 0.1)
        self.up.requires_grad_(False)
        self.slope, self.by_itself = nn.Parameter(torch.tensor([0.8])), by_itself

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        up = x @ self.up
        return x + torch.where(up > 0, self.slope * up * up, up.expm1()) @ self.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._compute, x, use_reentrant=False) if self.by_itself else self._compute(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Codebook(nn.Module):
    """Takes the nearest code of a buffer, moves all codes, and counts in another buffer, which is replaced."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)
        self.register_buffer("codes", torch.linspace(-1, 1, 5 * width).view(5, width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, codes = self.line(x), self.codes.clone()
        nearest = codes[torch.cdist(made, codes).argmin(1)]
        if self.training:
            self.codes.data.mul_(0.9).add_(0.1)  # of which torch counts no change
            self.calls = self.calls + 1
        return x + (nearest - made).detach() + made * codes.mean()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 8).double(), torch.randn(6, 4).double()


def made(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    if kind == "matrices":
        return Net().double(), *rows()
    if kind in ("masks", "masks, computed again by themselves"):
        model = nn.Sequential(nn.Linear(8, 16), *(Masked(kind != "masks") for _ in range(2)), nn.Linear(16, 4))
        return model.double(), *rows()
    if kind == "powers":  # an iteration in each pass, of which a pipeline keeps one for all micro-batches
        layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(a, b)) for a, b in ((8, 16), (16, 16), (16, 4))]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double(), *rows()
    if kind == "codebooks":
        blocks = nn.Sequential(Codebook(), Codebook())
        return nn.Sequential(blocks, nn.Linear(8, 4)).double(), *rows()
    if kind == "tables":
        model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 4))
        return model.double(), torch.randint(9, (6, 3)), torch.randn(6, 4).double()
    if kind == "channels":  # each layer is a block, and the norms' hooks are outside of what is computed again
        convolutions = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)]
        model = nn.Sequential(*convolutions, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 4))
        return model.double(), torch.randn(6, 3, 5, 5).double(), torch.randn(6, 4).double()
    stages = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.ModuleDict({"body": nn.Sequential(*stages)})["body"], nn.Flatten(), nn.Linear(75, 4))
    return model.double(), torch.randn(6, 3, 5, 5).double(), torch.randn(6, 4).double()


def trained(kind: str, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, x, y = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    losses = [float(trainer.step(batch)) for _ in range(STEPS) for batch in trainer.batches(loader)]
    return losses, trainer.state_dict()


RUNS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("norms", {}), ("codebooks", {})],
    2: [
        ("matrices", {"tensor_parallel_degree": 2}),
        ("masks", {"tensor_parallel_degree": 2}),
        ("masks, computed again by themselves", {"tensor_parallel_degree": 2, "recompute": False}),
        ("matrices", {"shard": "parameters"}),
        ("norms", {"sync_batch_norm": True}),
        ("channels", {"tensor_parallel_degree": 2}),
        ("tables", {"embeddings": "row"}),
        ("powers", {"pipeline_parallel_degree": 2, "micro_batches": 2}),
        ("powers", {"pipeline_parallel_degree": 2, "micro_batches": 3, "pipeline_schedule": "zero_bubble"}),
    ],
}


def recomputed(ranks: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [trained(kind, Plan(**{"recompute": True, **fields})) for kind, fields in RUNS[ranks]]


@functools.cache
def on_ranks(ranks: int) -> list[Any]:
    return run_ranks(recomputed, ranks, ranks)


@pytest.mark.parametrize(("ranks", "run"), [(ranks, run) for ranks, runs in RUNS.items() for run in range(len(runs))])
def test_losses_and_what_is_left_are_those_of_one_process(ranks: int, run: int) -> None:
    losses, state = trained(RUNS[ranks][run][0], Plan())
    for found, kept in (rank[run] for rank in on_ranks(ranks)):
        assert found == pytest.approx(losses, rel=1e-11)
        for name, value in kept.items():
            torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-12, msg=name)


class Nested(Net):
    """Computes its blocks, one of them twice, again by itself, in back-propagations nested in that of the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]


def nested(plans: list[Plan]) -> list[list[float]]:
    found = []
    for plan in plans:
        torch.manual_seed(5)
        model, batch = Nested().double(), (torch.randn(6, 8).double(), torch.randn(6, 4).double())
        trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.5), plan)
        found.append([float(trainer.step(batch)) for _ in range(STEPS)])
    return found


@pytest.mark.long
def test_gradients_of_nested_back_propagations_are_reduced_once() -> None:
    plans = [Plan(shard=shard, accumulate=parts) for shard in ("none", "optimizer", "gradients") for parts in (1, 2)]
    (expected,) = nested([Plan()])
    for rank in run_ranks(nested, 2, plans):
        for plan, losses in zip(plans, rank, strict=True):
            assert losses == pytest.approx(expected, rel=1e-11), plan


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, Codebook])
def test_a_compiled_model_computes_its_blocks_again(norm: Any) -> None:
    def trained(compiled: bool) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), norm(6), nn.Tanh()) for _ in range(2)))
        if norm is Codebook:  # which Dynamo comes to in the model's own forward
            model = Net()
            model.first, model.last = nn.Identity(), nn.Identity()  # type: ignore[assignment]
            model.blocks = nn.ModuleList([Codebook(6), Codebook(6)])
        if compiled:
            torch._dynamo.reset()  # it compiles a function no more that it has compiled often
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, Plan(recompute=True))
        batch = torch.linspace(-1, 1, 48).view(8, 6), torch.ones(8, 6)
        return [float(trainer.step(batch)) for _ in range(3)], trainer.state_dict()

    losses, state = trained(False)
    again, others = trained(True)
    assert again == pytest.approx(losses, rel=1e-6)
    for key, value in state.items():
        assert torch.allclose(others[key], value, rtol=1e-5, atol=1e-6), key
