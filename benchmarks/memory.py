"""The memory of a process, predicted and measured: a GPT of 185 million parameters, plain and under plans.

    python -m benchmarks.memory [--ranks 1,2,4] [--plans stages] [--batch 8] [--tokens 64]

Each row is a world of fresh processes. The peak of resident memory (VmHWM) of the rank that needs most, after building
and after two steps of AdamW, stands beside `hocket.planner.memory_of` on the model as captured on the meta device,
which is what `hocket plan` says. "Plain" is torch alone, with the loop that everybody writes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hocket
from hocket.parallel.state import process_memory
from hocket.planner import Plan, memory_of
from hocket.testing import preload, run_ranks
from hocket.workload import capture

MIB = 2**20
LAYERS, WIDTH, HEADS, VOCABULARY = 12, 1024, 16, 32_768  # 185 million parameters
PLANS = {
    1: {"plain": None},
    2: {
        "data": Plan(),
        "optimizer": Plan(shard="optimizer"),
        "parameters": Plan(shard="parameters"),
        "2 tensor": Plan(tensor_parallel_degree=2),
        "2 stages, 2 micro-batches": Plan(pipeline_parallel_degree=2, micro_batches=2),
    },
    4: {
        "gradients": Plan(shard="gradients"),
        "parameters": Plan(shard="parameters"),
        "2 tensor, optimizer": Plan(tensor_parallel_degree=2, shard="optimizer"),
        "2 stages, optimizer": Plan(pipeline_parallel_degree=2, micro_batches=2, shard="optimizer"),
        "2 tensor, 2 stages": Plan(tensor_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=2),
        "4 stages, 4 micro-batches": Plan(pipeline_parallel_degree=4, micro_batches=4),
    },
}


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return batch x tokens x width."""
        batch, tokens, _ = x.shape
        shape = (batch, tokens, -1, WIDTH // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.attention(self.norm(x)).chunk(3, -1))
        found = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, batch x tokens x vocabulary."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets."""
    drawn = torch.randint(VOCABULARY, (batch, tokens + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def measured(plan: Plan | None, batch: int, tokens: int) -> dict[str, Any]:
    """Return bytes before building, and the peaks after building and after two steps; on every rank."""
    inputs, targets = batch_of(batch, tokens)
    found: dict[str, Any] = {"base": process_memory()["resident"]}
    if plan is None:
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters())
        found["built"] = process_memory()["peak"]
        for _ in range(2):
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        return {**found, "trained": process_memory()["peak"]}
    trainer = hocket.Trainer(
        hocket.deferred(GPT), loss_fn, lambda parameters: torch.optim.AdamW(parameters), plan, sample=(inputs,)
    )
    found["built"] = process_memory()["peak"]
    for _ in range(2):
        trainer.step((inputs, targets))
    return {**found, "trained": process_memory()["peak"]}


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--plans", default="", help="only those in whose names this is")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    a = parser.parse_args()
    preload("hocket.parallel", "torch.distributed.tensor", "torch.distributed.fsdp")
    with torch.device("meta"):
        model = GPT()
    inputs, targets = batch_of(a.batch, a.tokens)
    sample = {"tokens": inputs}
    workload = capture(
        model,
        sample,
        device="meta",
        loss=lambda model, batch: loss_fn(model(**batch), targets.to("meta")),
        degrees=(2,),
    )
    print("| ranks | plan | base | built | trained | predicted | of it: state | activations | buffers |", end=" ")
    print("process | mapped | error |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for ranks in map(int, a.ranks.split(",")):
        for name, plan in ((name, plan) for name, plan in PLANS[ranks].items() if a.plans in name):
            fullest = max(
                run_ranks(measured, ranks, plan, a.batch, a.tokens, timeout_s=600, group_timeout_s=500),
                key=lambda rank: rank["trained"],
            )
            said = memory_of((plan or Plan()).resolve(ranks), workload, batch=a.batch, sharers=ranks)
            cells = [fullest["base"], fullest["built"], fullest["trained"], said.resident]
            cells += [said.state, said.activations + said.working, said.buffers, said.process, said.mapped]
            row = " | ".join(f"{nbytes / MIB:.0f}" for nbytes in cells)
            print(f"| {ranks} | {name} | {row} | {said.resident / fullest['trained'] - 1:+.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
