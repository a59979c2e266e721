"""Blocks of a model that are compiled one by one, as the refusal of a compiled model in a pipeline has it."""

import pytest
import torch
from torch import nn

import hocket
from hocket import Plan
from hocket.testing import run_ranks


class CompiledBlock(nn.Module):
    """Several layers, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.inner(self.norm(x)))
        return x + (y if scale is None else y * scale)


class OfBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CompiledBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


def trained(plan: Plan, *, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model, x, y = OfBlocks().double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    for block in model.blocks if compiled else ():
        block.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    return [trainer.step((x, y)).item() for _ in range(3)]


def in_a_pipeline() -> list[float]:
    return trained(Plan(pipeline_parallel_degree=2, micro_batches=2), compiled=True)


@pytest.mark.long
def test_blocks_that_are_compiled_one_by_one_train_in_a_pipeline() -> None:
    plain = trained(Plan(), compiled=False)
    for losses in run_ranks(in_a_pipeline, 2, timeout_s=240):
        assert losses == pytest.approx(plain, rel=1e-9)
