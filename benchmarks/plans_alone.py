"""Predictions beside plans that run alone, each in a program of its own, as a user has it; and that measured twice.

    python -m benchmarks.plans_alone --ranks 4 --out FOLDER                  four workloads, about 12 minutes
    python -m benchmarks.plans_alone --ranks 4 --workloads edsr --out FOLDER a look
    python -m benchmarks.plans_alone --read FOLDER                           the table of what FOLDER holds

`benchmarks/plans.py` keeps all plans of a workload in one process, to compare them in turns. Thirty trained models fill
the memory, and of four ranks that share two cores a step takes 5% to 12% longer among them than alone. Here each
workload is calibrated for 20 s, as `Trainer(plan="auto")` does it, and all of its plans are predicted, which is
written down with the time of day. Then every third of those that are within twice the fastest, by their predictions,
is run in a program of its own: steps of which the lower quartile counts, on the slowest rank. All are run twice, the
second time after all have been run once. On a machine where nothing else runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks are started with this file's path

import hocket
from benchmarks.plans import WORKLOADS, median_and_worst, predictions, setting, timed, usual
from hocket.calibrate import calibrate, including_loss
from hocket.parallel.mesh import join
from hocket.planner import Plan, PlanError

SECONDS = 20.0
WITHIN, EVERY = 2.0, 3  # times the fastest; one of so many
STEPS = 16
ROUNDS = 2


def predicted(name: str, out: Path) -> None:
    """Calibrate on the ranks, and write down what is predicted of the plans that will be run."""
    dist.init_process_group("hocket")
    made, batch = setting(name)
    optimizer, size = torch.optim.Adam(made.model.parameters()), WORKLOADS[name][1]
    found = calibrate(made.model, optimizer, batch[:-1], seconds=SECONDS)
    world = join()
    if world.rank == 0:
        found = including_loss(found, made.model, optimizer, batch[:-1], world, made.loss_fn)
        rows = [
            {"plan": one.plan.to_json(), "predicted_s": one.step_s, "interval_s": one.interval_s, "rounds": []}
            for one in predictions(found, world.size, size, WITHIN)
        ]
        text = {"workload": name, "world": world.size, "at": time.strftime("%Y-%m-%d %H:%M"), "rows": rows[::EVERY]}
        out.write_text(json.dumps(text, indent=1))
    dist.destroy_process_group()


def run_alone(name: str, plan: Plan) -> None:
    """Train by one plan on the ranks; rank 0 prints what a step took."""
    dist.init_process_group("hocket")
    made, batch = setting(name)
    model = copy.deepcopy(made.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    try:
        trainer = hocket.Trainer(model, made.loss_fn, optimizer, plan=plan, sample=batch[:-1])
    except PlanError as error:  # the same on every rank
        if dist.get_rank() == 0:
            print("\nalone []", error, sep="\n", flush=True)
        dist.destroy_process_group()
        return
    step = partial(trainer.step, batch)
    step()
    took = timed(step, STEPS)
    if dist.get_rank() == 0:
        print(f"\nalone {json.dumps(took)}", flush=True)
    dist.destroy_process_group()


def ranks(world: int, *words: str) -> str:
    """What the ranks of this file print."""
    command = [sys.executable, "-m", "hocket", "run", "-n", str(world), "--no-run-dir", "--timeout", "300", __file__]
    return subprocess.run([*command, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(world: int, names: list[str], folder: Path) -> None:
    """Everything, for all workloads; each has a file, which is written again after every round."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"alone-{world}-{name}.json" for name in names}
    for name, file in files.items():
        ranks(world, "--predict", name, str(file))
    for _ in range(ROUNDS):
        for name, file in files.items():
            document = json.loads(file.read_text())
            for row in document["rows"]:
                printed = ranks(world, "--rank", name, json.dumps(row["plan"]))
                took = next(json.loads(line.split("alone ")[1]) for line in printed.splitlines() if "alone [" in line)
                if not took:
                    continue
                row["rounds"].append(took)
                plan = Plan.from_json(row["plan"]).describe()
                told = f"{usual(took) * 1e3:.1f} ms, predicted {row['predicted_s'] * 1e3:.1f}"
                print(f"{time.strftime('%H:%M:%S')} {name}, {plan}: {told}", file=sys.stderr, flush=True)
            file.write_text(json.dumps(document, indent=1))


def show(folder: Path) -> None:
    """Print how far predictions are off in each round, and how far the rounds are from each other."""
    print("| workload | ranks | plans | first round: median, worst | second | the same plan, twice | inside | pick |")
    print("|---|---|---|---|---|---|---|---|")
    every: list[list[float]] = [[] for _ in range(ROUNDS + 1)]
    held = [0, 0]
    for file in sorted(folder.glob("alone-*.json")):
        document: dict[str, Any] = json.loads(file.read_text())
        rows = [row for row in document["rows"] if row["rounds"]]  # others were refused
        took = [[usual(row["rounds"][number]) for row in rows] for number in range(ROUNDS)]
        errors = [[row["predicted_s"] / seconds - 1 for row, seconds in zip(rows, own, strict=True)] for own in took]
        errors.append([second / first - 1 for first, second in zip(*took, strict=True)])
        every = [[*known, *new] for known, new in zip(every, errors, strict=True)]
        inside = sum(
            low <= seconds <= high for own in took for row, seconds in zip(rows, own, strict=True)
            for low, high in [row["interval_s"]]
        )  # fmt: skip
        held = [held[0] + inside, held[1] + ROUNDS * len(rows)]
        means = [sum(each) / ROUNDS for each in zip(*took, strict=True)]
        cells = [document["workload"], document["world"], len(rows), *map(_pair, errors)]
        cells += [f"{inside} of {ROUNDS * len(rows)}", f"{means[0] / min(means) - 1:.1%} behind"]
        print("| " + " | ".join(map(str, cells)) + " |")
    cells = ["all", "", len(every[0]), *map(_pair, every), f"{held[0]} of {held[1]}", ""]
    print("| " + " | ".join(map(str, cells)) + " |")


def _pair(errors: list[float]) -> str:
    return ", ".join(median_and_worst(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workloads", default="language_model,edsr,translation,recommender")
    parser.add_argument("--out", type=Path, help="a folder for what was measured, as JSON")
    parser.add_argument("--read", type=Path, help="measure nothing; judge the files of this folder")
    parser.add_argument("--predict", nargs=2, metavar=("WORKLOAD", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=2, metavar=("WORKLOAD", "PLAN"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.predict:
        predicted(given.predict[0], Path(given.predict[1]))
    elif given.rank:
        run_alone(given.rank[0], Plan.from_json(json.loads(given.rank[1])))
    elif given.read:
        show(given.read)
    elif given.out:
        measure(given.ranks, given.workloads.split(","), given.out)
        show(given.out)
    else:
        parser.error("--out FOLDER or --read FOLDER is needed")


if __name__ == "__main__":
    main()
