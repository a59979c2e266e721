"""The fullest moment of a step's passes: what is captured beside what the CPU's allocator counts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from hocket.planner import Plan, memory_of
from hocket.workload import capture

TOKENS, WIDTH = 64, 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.inner(x)


class _Language(nn.Module):
    def __init__(self, classes: int, blocks: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _in_16_bits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _loss(model, tokens)


def _allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that the CPU's allocator has given out, besides what was there: at the most, and at the end."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    found = [
        (one.start_ns(), one.nbytes()) for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"
    ]
    now = most = 0
    for _, nbytes in sorted(found, key=lambda pair: pair[0]):
        now += nbytes
        most = max(most, now)
    return most, now


CASES = {
    "many classes": (5_000, 2, False),
    "many classes, tied": (5_000, 2, True),
    "many blocks": (50, 6, False),
    "mostly weights": (50, 1, False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_the_peak_of_a_device_with_its_own_memory_is_what_an_allocator_counts(name: str, kind: str) -> None:
    classes, blocks, tied = CASES[name]
    torch.manual_seed(0)
    model = _Language(classes, blocks, tied=tied)
    if kind == "bfloat16":
        model = model.bfloat16()
    loss = _in_16_bits if kind == "autocast" else _loss
    tokens = torch.arange((1 if name == "mostly weights" else 8) * TOKENS).reshape(-1, TOKENS) * 7 % classes
    if name == "mostly weights":
        tokens = tokens[:, :4].contiguous()
    # Autocast has no rules for the meta device.
    found = capture(model, tokens, device="cpu" if kind == "autocast" else "meta", loss=loss, degrees=(), repeats=1)
    said = memory_of(Plan().resolve(1), found, batch=len(tokens))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)  # as on a GPU
    loss(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = sum(one.nbytes for one in model.parameters()) * 3
    passes, gradients = _allocated(lambda: loss(model, tokens).backward())
    update, _ = _allocated(optimizer.step)
    measured = state + max(passes, gradients + update)
    # Processors without products in 16 bits convert factors first, in memory that no device needs.
    native = kind == "float32" or "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert said.total == pytest.approx(measured, rel=0.005 if native else 0.025)
    assert said.absent > 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["float32", "autocast"])
def test_the_peak_of_another_batch_is_known_from_one(name: str, kind: str) -> None:
    classes, blocks, tied = CASES[name]
    with torch.device("meta"):
        model = _Language(classes, blocks, tied=tied)
    loss = _in_16_bits if kind == "autocast" else _loss
    taken = {
        size: capture(model, torch.zeros(size, TOKENS, dtype=torch.long), device="meta", loss=loss, degrees=())
        for size in (2, 8, 32)
    }
    for size, own in taken.items():
        said = memory_of(Plan().resolve(1), taken[8], batch=size)
        assert said.total == pytest.approx(memory_of(Plan().resolve(1), own, batch=size).total, rel=0.005)


def test_each_of_ranks_that_divide_tensors_has_all_of_the_loss() -> None:
    with torch.device("meta"):
        model = _Language(5_000, 2, tied=False)
    tokens = torch.zeros(8, TOKENS, dtype=torch.long)
    head = capture(model, tokens, device="meta", loss=_loss, degrees=(2,)).layers[-1]
    logits = 4 * 8 * TOKENS * 5_000
    divided = head.share(2)
    kept = sum(one.saved_bytes for one in divided.operations)
    assert divided.parameter_bytes == head.parameter_bytes / 2
    for peak, saved in ((head.peak_bytes, head.saved_bytes), (divided.peak_bytes, kept)):
        assert peak - saved == pytest.approx(2 * logits, rel=0.01)
