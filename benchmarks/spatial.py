"""Samples divided among ranks: time of a step, bytes of halos, bytes kept for back-propagation, and equal losses.

    python -m benchmarks.spatial steps [--workloads cosmoflow,climate] [--rounds N] [--out FILE]
    python -m benchmarks.spatial equivalence [--workloads NAME,...] [--out FILE]

`steps` trains each workload's "demo" size by several plans, all in worlds of one thread for each rank, and prints for
each plan the median step, the spread (least and most), the bytes that one rank sends of its slabs in a step, and those
that autograd keeps of activations on the rank that keeps the most. `equivalence` is `benchmarks.equivalence` for plans
that divide samples.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hocket
from benchmarks import equivalence
from hocket import comm
from hocket.parallel.partition.spatial import LABEL
from hocket.planner import Plan
from hocket.testing import run_ranks
from hocket.workloads import example

PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {"2 data": {}, "2 spatial": {"spatial_parallel_degree": 2}},
    4: {
        "4 data": {},
        "2 data x 2 spatial": {"spatial_parallel_degree": 2},
        "4 spatial": {"spatial_parallel_degree": 4},
    },
}
EQUIVALENCE: dict[int, dict[str, dict[str, Any]]] = {
    2: {"data": {}, "spatial": {"spatial_parallel_degree": 2}},
    3: {"spatial, optimizer": {"spatial_parallel_degree": 3, "shard": "optimizer"}},
    4: {
        "spatial": {"spatial_parallel_degree": 4},
        "data x spatial": {"spatial_parallel_degree": 2},
        "data x spatial, gradients": {"spatial_parallel_degree": 2, "shard": "gradients"},
    },
}


class _Halos:
    """Adds up what is announced."""

    nbytes = 0

    def operation_finished(self, op: comm.OperationRecord) -> None:
        """See Observer."""
        self.nbytes += op.nbytes if op.label == LABEL else 0

    def operation_waited(self, op: comm.OperationRecord, begin_s: float, end_s: float) -> None:
        """See Observer."""


class _Kept:
    """Adds up the bytes that autograd keeps, each tensor's memory once and without the parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.nbytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called with each tensor that is kept."""
        where = tensor.untyped_storage().data_ptr()
        if where not in self._seen:
            self._seen.add(where)
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor


def train(name: str, fields: dict[str, Any], rounds: int) -> tuple[list[float], int, int]:
    """Seconds of each step, and of one step the bytes sent of slabs and kept of activations, on this rank."""
    found = example(name, "demo")
    optimizer = found.optimizer(found.model)
    plan = Plan(**fields, sync_batch_norm=True)
    trainer = hocket.Trainer(found.model, found.loss_fn, optimizer, plan)
    batches = found.batches(2)
    halos, kept = _Halos(), _Kept(found.model)
    trainer.step(batches[0])
    stop = comm.observe(halos)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        trainer.step(batches[1])
    stop()
    seconds = []
    for i in range(rounds):
        begin = time.perf_counter()
        trainer.step(batches[i % 2])
        seconds.append(time.perf_counter() - begin)
    return seconds, halos.nbytes, kept.nbytes


def train_by_turns(name: str, plans: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """What `train` gives, by plan."""
    return {title: train(name, fields, rounds) for title, fields in plans.items()}


def steps(names: list[str], rounds: int) -> str:
    """The table of all plans, as Markdown."""
    lines = ["| workload | plan | step | least to most | halo bytes sent a step | activations kept |", "|---" * 6 + "|"]
    for name in names:
        for ranks, plans in PLANS.items():
            results = run_ranks(train_by_turns, ranks, name, plans, rounds, timeout_s=280, group_timeout_s=120)
            for title in plans:
                each = [result[title] for result in results]
                seconds = [1e3 * s for s in each[0][0]]
                sent, kept = max(one[1] for one in each), max(one[2] for one in each)
                lines.append(
                    f"| {name} | {title} | {statistics.median(seconds):.0f} ms | {min(seconds):.0f} to "
                    f"{max(seconds):.0f} ms | {sent / 1e3:,.0f} kB | {kept / 1e6:.1f} MB |"
                )
    return "\n".join(lines) + "\n"


def equal(names: list[str]) -> str:
    """The largest relative difference of any step's loss from one process, as Markdown."""
    titles = [f"{ranks}: {title}" for ranks, plans in EQUIVALENCE.items() for title in plans]
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name in names:
        reference = {o: equivalence.alone(name, o) for o in equivalence.OPTIMIZERS}
        cells: dict[str, list[str]] = {o: [] for o in equivalence.OPTIMIZERS}
        for ranks, plans in EQUIVALENCE.items():
            results = run_ranks(equivalence.by_plans, ranks, name, plans, timeout_s=200, group_timeout_s=120)
            for (optimizer, _), losses in results[0].items():
                apart = equivalence.difference(losses, reference[optimizer])
                cells[optimizer].append(apart if isinstance(apart, str) else f"{apart:.0e}")
        # Results come by plan, and within a plan by optimizer, as the titles do.
        lines += [f"| {name}, {optimizer} | " + " | ".join(row) + " |" for optimizer, row in cells.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "equivalence"])
    parser.add_argument("--workloads", default="cosmoflow,climate")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.workloads.split(",")
    text = steps(names, arguments.rounds) if arguments.what == "steps" else equal(names)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
