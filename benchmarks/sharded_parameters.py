"""Sharded parameters: blocks that are gathered and reduced while others are computed, against waiting for each.

    python -m benchmarks.sharded_parameters --fabric star:hosts=2,bandwidth=100Mbit/s --ranks 2
    python -m benchmarks.sharded_parameters --fabric star:hosts=8,bandwidth=100Mbit/s --ranks 8 --workloads translation
    python -m benchmarks.sharded_parameters --ranks 2                       one host, where Trainers wait

Both trainers take turns, three steps each, of which the last two count; medians and quartiles of the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hocket
from benchmarks.plans import setting, timed
from hocket.planner import Plan

TURNS = 6


def step_of(name: str, meanwhile: bool) -> Callable[[], Any]:
    """A step that has been made once; `meanwhile` whatever the ranks' hosts are."""
    made, batch = setting(name)
    model = copy.deepcopy(made.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with mock.patch("hocket.parallel.data._fully_sharded.on_several_hosts", return_value=meanwhile):
        trainer = hocket.Trainer(model, made.loss_fn, optimizer, Plan(shard="parameters"), sample=batch[:-1])
    trainer.step(batch)
    return partial(trainer.step, batch)


def rank_main(name: str) -> None:
    """Rank 0 prints a row."""
    dist.init_process_group("hocket")
    steps = {"waiting": step_of(name, False), "meanwhile": step_of(name, True)}
    took: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(TURNS):
        for key, step in steps.items():
            took[key] += [1e3 * seconds for seconds in timed(step)]
    if dist.get_rank() == 0:
        cells = []
        for each in took.values():
            low, middle, high = statistics.quantiles(each, n=4)
            cells.append(f"{middle:.0f} ({low:.0f} to {high:.0f})")
        ratio = statistics.median(took["waiting"]) / statistics.median(took["meanwhile"])
        print(f"| {name} | {dist.get_world_size()} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workloads", default="edsr,language_model,resnet50,translation")
    parser.add_argument("--fabric", default="")
    parser.add_argument("--rank", metavar="WORKLOAD", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank)
        return
    print("| workload | ranks | waiting, ms | meanwhile, ms | times as fast |\n|---|---|---|---|---|", flush=True)
    for name in given.workloads.split(","):
        words = [sys.executable, "-m", "hocket", "run", "-n", str(given.ranks)]
        words += ["--fabric", given.fabric] if given.fabric else []
        words += ["-m", "benchmarks.sharded_parameters", "--rank", name]
        run = subprocess.run(words, check=True, capture_output=True, text=True)
        print(*(line.partition("] ")[2] for line in run.stdout.splitlines() if "] | " in line), sep="\n", flush=True)


if __name__ == "__main__":
    main()
