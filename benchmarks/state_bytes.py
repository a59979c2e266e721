"""Bytes of state that each of four ranks holds under each plan, counted and as the formulas say: a Markdown table.

    python -m benchmarks.state_bytes [--width 512] [--layers 8]

Counted are the tensors that a rank holds between a step's back-propagation and the next, each element once.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

RANKS = 4


def plans(layers: int) -> dict[str, Plan]:
    """What is compared."""
    points = tuple(str(i * layers // RANKS) for i in range(1, RANKS))
    return {
        "data": Plan(),
        "shard = optimizer": Plan(shard="optimizer"),
        "shard = gradients": Plan(shard="gradients"),
        "shard = parameters": Plan(shard="parameters"),
        "4 tensor": Plan(tensor_parallel_degree=4),
        "4 pipeline": Plan(pipeline_parallel_degree=4, micro_batches=4, split=points),
        "2 tensor x 2 data, gradients": Plan(tensor_parallel_degree=2, shard="gradients"),
    }


def states(width: int, layers: int) -> dict[str, dict[str, Any]]:
    """The report of each plan after a step."""
    found = {}
    for name, plan in plans(layers).items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.Adam(model.parameters())
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=torch.ones(2, width))
        trainer.step((torch.ones(8, width), torch.ones(8, width)))
        found[name] = trainer.report()
    return found


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    a = parser.parse_args()
    ranks = run_ranks(states, RANKS, a.width, a.layers, timeout_s=300)
    print("| plan on 4 ranks, MiB | weights | gradients | Adam | all | by the formulas |\n|---|---|---|---|---|---|")
    for name in ranks[0]:
        largest = max((rank[name] for rank in ranks), key=lambda report: float(report["memory"]["total"]))
        cells = [f"{largest['memory'][key] / 2**20:.2f}" for key in ("weights", "gradients", "optimizer", "total")]
        print(f"| {name} | " + " | ".join(cells) + f" | {largest['memory_predicted']['total'] / 2**20:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
