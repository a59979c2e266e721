"""The planner against measuring every plan: eight workloads, 2 and 4 local ranks, 8 emulated hosts at 100 Mbit/s.

    python -m benchmarks.plans --ranks 2,4                        local ranks
    python -m benchmarks.plans --fabric star:hosts=8,bandwidth=100Mbit/s --ranks 8
    python -m benchmarks.plans --ranks 2 --workloads edsr         a look
    python -m benchmarks.plans --read FOLDER                      the table of what --out FOLDER holds
    python -m benchmarks.plans --read FOLDER --twice ANOTHER      its predictions beside the same plans measured twice

For every workload and world: ranks are calibrated as `Trainer(plan="auto")` does it, by `hocket.calibrate`; then every
admissible plan is predicted, run, and measured: all plans take turns, three steps each of which the last two count;
those near the fastest have more turns. What slowed all plans of a turn alike is divided out, and the lower quartile of
the slowest rank's steps is taken, because the machine has slow phases (of the same plan the median went from 107 ms to
188 ms, the fastest from 104 to 113). What counts is how far the plan that the planner prefers (the simplest of those
that are predicted to be as fast as the fastest) is behind the one that was measured to be the fastest, and the error of
the predictions: of those made before, which hold for the machine as it was during calibration; of the same times how
much longer bare computation took in the turns than around the calibration ("drift"), which hold for the machine "in
phase"; and of those whose constants are fitted again on the reference plans as measured in the turns, which hold for
the machine as it was when all others were measured ("blind": without the references themselves). "Itself" is how far
the first half of a plan's own turns is from the second; "apart", how far its steps in the calibration are from those in
the turns: the same plan measured twice, as far apart as a prediction is from what it foretells. On a machine where
nothing else runs. Of parts of a batch, 1 and 4 (of a pipeline with p ranks p and 4 p) stand for all.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import hocket
from hocket.calibrate import Calibration, calibrate, including_loss
from hocket.parallel.mesh import join
from hocket.planner import (
    Constants,
    MeasuredPlan,
    Network,
    Plan,
    PlanError,
    Prediction,
    admissible_plans,
    fitted,
    predict,
    preferred,
    reference_plans,
)
from hocket.workload import parse
from hocket.workloads import Example, example

# Size and samples of a global batch: steps of 50 ms to 400 ms on one core.
WORKLOADS = {
    "edsr": ("demo", 64),
    "resnet50": ("tiny", 64),
    "resnet101": ("demo", 32),
    "language_model": ("demo", 32),
    "translation": ("demo", 128),
    "recommender": ("demo", 32768),
    "cosmoflow": ("demo", 16),
    "climate": ("demo", 8),
}
# A plan that takes so many times what the fastest before it took is measured in fewer turns.
HOPELESS = 4.0
TURNS_OF_HOPELESS = 2
NEAR = 1.5  # times the fastest: among those it counts which one is the fastest, so they have more turns
FAR = 0.25  # a prediction that is further off is shown by itself


def setting(name: str) -> tuple[Example, Any]:
    """The workload, and the batch that it is trained on again and again."""
    size, batch = WORKLOADS[name]
    made = example(name, size, batch_size=batch)
    return made, tuple(default_collate([made.dataset[index % 1024] for index in range(batch)]))


def is_measured(plan: Plan) -> bool:
    """Whether a plan is one of those that stand for all."""
    p = plan.pipeline_parallel_degree
    if p == 1:
        return plan.accumulate in (1, 4)
    return plan.micro_batches in (p, 4 * p) and plan.stages_per_rank in (1, 2)


def predictions(found: Calibration, world: int, batch: int, within: float = math.inf) -> list[Prediction]:
    """Of the plans that stand for all, the fastest first; up to so many times the fastest."""
    plans = admissible_plans(found.workload, found.network, workers=world, batch=batch, fixed={"recompute": False})
    foretold = partial(predict, workload=found.workload, cluster=found.network, workers=world, batch=batch)
    each = [foretold(plan, constants=found.constants) for plan in plans if is_measured(plan)]
    each.sort(key=lambda one: one.step_s)
    return [one for one in each if one.step_s <= within * each[0].step_s]


# --- on the ranks -----------------------------------------------------------------------------------------------------


def timed(step: Callable[[], object], number: int = 3) -> list[float]:
    """Some steps without the first one, on the slowest rank; one if only one is wanted."""
    each = []
    for _ in range(number):
        dist.barrier()
        begin = time.perf_counter()
        step()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        each.append(seconds.item())
    return each[1:] or each


def usual(each: list[float]) -> float:
    """The lower quartile: whatever disturbs a step makes it longer."""
    return statistics.quantiles(each, n=4, method="inclusive")[0] if len(each) > 1 else each[0]


def say(rank: int, row: dict[str, Any], seconds: float) -> None:
    """A line about a plan."""
    if rank == 0:
        told = f"{seconds * 1e3:.1f} ms, predicted {row['predicted_s'] * 1e3:.1f}"
        print(f"{time.strftime('%H:%M:%S')} {Plan.from_json(row['plan']).describe()}: {told}", flush=True)


def alone(made: Example, batch: Any) -> Callable[[], object]:
    """A step of the rank's part of the batch without communication and update."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = copy.deepcopy(made.model)
    *inputs, target = [one.chunk(world)[rank] for one in batch]

    def step() -> None:
        made.loss_fn(model(*inputs), target).backward()

    return step


def rank_main(name: str, turns: int, more: int, within: float, seconds: float | None, out: Path) -> None:
    """Everything of one workload in one world; rank 0 writes it down."""
    dist.init_process_group("hocket")
    rank, world = dist.get_rank(), dist.get_world_size()
    made, batch = setting(name)
    size = WORKLOADS[name][1]
    compute = alone(made, batch)
    before = [one for _ in range(3) for one in timed(compute)]
    began = time.perf_counter()
    optimizer = torch.optim.Adam(made.model.parameters())
    found = calibrate(made.model, optimizer, batch[:-1], seconds=seconds)
    if rank == 0:
        found = including_loss(found, made.model, optimizer, batch[:-1], join(), made.loss_fn)
    took_s = time.perf_counter() - began
    before += [one for _ in range(3) for one in timed(compute)]
    given: list[Any] = [None]
    if rank == 0:
        each = predictions(found, world, size, within)
        given = [
            [
                {"plan": p.plan.to_json(), "predicted_s": p.step_s, "interval_s": p.interval_s}
                | {"parts": dict(p.parts.rows())}
                for p in each
            ]
        ]
    dist.broadcast_object_list(given)
    rows = given[0]
    steps: dict[int, Callable[[], object]] = {}
    shortest = math.inf
    for number, row in enumerate(rows):
        plan, model = Plan.from_json(row["plan"]), copy.deepcopy(made.model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        try:
            trainer = hocket.Trainer(model, made.loss_fn, optimizer, plan=plan, sample=batch[:-1])
            step = partial(trainer.step, batch)
            (first_s,) = timed(step, 1)
        except (PlanError, NotImplementedError, ValueError) as error:  # the same on every rank
            row["refused"] = str(error)
            continue
        row["steps_s"] = []
        (second_s,) = timed(step, 1)
        shortest = min(shortest, second_s)
        steps[number] = step
        row["turns"] = turns if second_s <= HOPELESS * shortest else min(turns, TURNS_OF_HOPELESS)
        say(rank, row, first_s)
    gc.collect()
    gc.freeze()  # the collector would visit every trainer in the middle of a step, for half a second; users have one
    meanwhile: list[float] = []
    for turn in range(turns + more):
        if turn == turns:
            so_far = torch.tensor([usual(rows[number]["steps_s"]) for number in steps], dtype=torch.float64)
            dist.broadcast(so_far, 0)
            for number, seconds in zip(steps, so_far.tolist(), strict=True):
                rows[number]["turns"] += more if seconds <= NEAR * so_far.min().item() else 0
        meanwhile += timed(compute)
        for number, step in steps.items():
            if turn < rows[number]["turns"]:
                rows[number]["steps_s"] += timed(step)
    for row in rows:
        if "steps_s" in row:
            row["measured_s"] = usual(row["steps_s"])
            say(rank, row, row["measured_s"])
    if rank == 0:
        text = {"workload": name, "world": world, "seconds": took_s, "drift": usual(meanwhile) / usual(before)}
        text |= {"network": dataclasses.asdict(found.network), "constants": dataclasses.asdict(found.constants)}
        text |= {"captured": str(found.workload), "rows": rows}
        text |= {"runs": [{"plan": run.plan.to_json(), "step_s": run.step_s} for run in found.runs]}
        out.write_text(json.dumps(text, indent=1))
    dist.destroy_process_group()


# --- on the caller's side ---------------------------------------------------------------------------------------------


def evened(document: dict[str, Any]) -> None:
    """Divide out what made all plans of a turn slower alike: a phase of the machine, which says nothing of any plan.

    The design is one of blocks: plans of one turn are compared. A turn's factor is the median over all plans that had
    every turn of how much longer than usual they took in it; the lower quartile of the turns is taken for 1.
    """
    rows = [row for row in document["rows"] if "measured_s" in row]
    turns = max(row["turns"] for row in rows)
    whole = [row["steps_s"] for row in rows if row["turns"] == turns]
    count = len(whole[0]) // turns  # steps of a turn that count
    turn_s = [[statistics.mean(steps[count * t : count * (t + 1)]) for t in range(turns)] for steps in whole]
    factors = [statistics.median(own[t] / statistics.median(own) for own in turn_s) for t in range(turns)]
    phases = [factor / usual(factors) for factor in factors]
    for row in rows:
        row["steps_s"] = [seconds / phases[number // count] for number, seconds in enumerate(row["steps_s"])]
        row["measured_s"] = usual(row["steps_s"])


def judged(document: dict[str, Any]) -> dict[str, Any]:
    """How good the pick is, and the predictions."""
    evened(document)
    rows = [row for row in document["rows"] if "measured_s" in row]
    pick = rows[preferred([(Plan.from_json(row["plan"]), row["predicted_s"]) for row in rows])]
    best = min(rows, key=lambda row: row["measured_s"])
    plans = [Plan.from_json(row["plan"]).resolve(document["world"]) for row in rows]
    again_s, references = fitted_again(document, rows)
    again = [seconds / row["measured_s"] - 1 for seconds, row in zip(again_s, rows, strict=True)]
    return {
        "workload": document["workload"],
        "world": document["world"],
        "plans": len(rows),
        "pick": plans[rows.index(pick)].describe(),
        "behind": pick["measured_s"] / best["measured_s"] - 1,
        "best": plans[rows.index(best)].describe(),
        "before": [row["predicted_s"] / row["measured_s"] - 1 for row in rows],
        "in phase": [document["drift"] * row["predicted_s"] / row["measured_s"] - 1 for row in rows],
        "inside": [low <= row["measured_s"] <= high for row in rows for low, high in [row["interval_s"]]],
        "again": again,
        "blind": [error for error, reference in zip(again, references, strict=True) if not reference],
        "itself": [usual(halves[0]) / usual(halves[1]) - 1 for row in rows if (halves := halved(row["steps_s"]))],
        "apart": apart(document, plans, rows),
        "beyond": [one for one in zip(plans, rows, again, strict=True) if abs(one[2]) > FAR],
        "drift": document["drift"],
    }


def halved(steps: list[float]) -> tuple[list[float], list[float]] | None:
    """Steps of the first turns and of the last ones: what a measurement says of itself some minutes later."""
    half = len(steps) // 2
    return (steps[:half], steps[half:]) if half else None


def apart(document: dict[str, Any], plans: list[Plan], rows: list[dict[str, Any]]) -> list[float]:
    """What the calibration measured of plans that it ran, against what the turns did."""
    ran = {Plan.from_json(run["plan"]).resolve(document["world"]): run["step_s"] for run in document["runs"]}
    return [ran[plan] / row["measured_s"] - 1 for plan, row in zip(plans, rows, strict=True) if plan in ran]


def fitted_again(document: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[float], list[bool]]:
    """Predictions with constants fitted on the references as they were measured; and which plans are references."""
    workload, world, batch = parse(document["captured"]), document["world"], WORKLOADS[document["workload"]][1]
    plans = [Plan.from_json(row["plan"]) for row in rows]
    chosen = reference_plans(plans, world)
    references = [any(plan is one for one in chosen) for plan in plans]
    each = zip(plans, rows, references, strict=True)
    runs = [MeasuredPlan(plan, row["measured_s"]) for plan, row, reference in each if reference]
    network, constants = Network(**document["network"]), Constants(**document["constants"])
    network, constants = fitted(runs, workload, network, constants, batch=batch)
    foretold = partial(predict, workload=workload, cluster=network, workers=world, batch=batch, constants=constants)
    return [foretold(plan).step_s for plan in plans], references


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--fabric", default="")
    parser.add_argument("--turns", type=int, default=12, help="of every plan")
    parser.add_argument("--more", type=int, default=8, help="turns of those that are near the fastest")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="leave out plans predicted to take so many times the fastest"
    )
    parser.add_argument("--seconds", type=float, help="of each calibration; one to two minutes if not given")
    parser.add_argument("--out", type=Path, help="a folder for what was measured, as JSON")
    parser.add_argument("--read", type=Path, help="measure nothing; judge the files of this folder")
    parser.add_argument("--rank", nargs=2, metavar=("WORKLOAD", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--twice", type=Path, help="with --read: files of another run of the same, minutes apart")
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank[0], given.turns, given.more, given.within, given.seconds, Path(given.rank[1]))
        return
    if given.read and given.twice:
        show_twice(given.read, given.twice)
        return
    if given.read:
        show([json.loads(file.read_text()) for file in sorted(given.read.glob("*.json"))])
        return
    folder = given.out or Path(tempfile.mkdtemp(prefix="plans"))
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for world in map(int, given.ranks.split(",")):
        for name in given.workloads.split(","):
            files.append(folder / f"{'fabric' if given.fabric else 'local'}-{world}-{name}.json")
            words = [sys.executable, "-m", "hocket", "run", "-n", str(world), "--timeout", "3000"]
            words += ["--fabric", given.fabric] if given.fabric else []
            words += [
                __file__,
                "--turns",
                str(given.turns),
                "--more",
                str(given.more),
                "--within",
                str(given.within),
                *(["--seconds", str(given.seconds)] if given.seconds else []),
                "--rank",
                name,
                str(files[-1]),
            ]
            subprocess.run(words, check=True, stdout=sys.stderr)
    show([json.loads(file.read_text()) for file in files])


def show(documents: list[dict[str, Any]]) -> None:
    """Print the tables."""
    words = "workload, ranks, plans, planner's pick, behind the best, best measured, drift, before: median, worst"
    words += ", inside, in phase: median, worst, again: median, worst, blind: median, worst"
    heads = words.split(", ")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    found = [judged(document) for document in documents]
    for one in found:
        cells = [one["workload"], one["world"], one["plans"], one["pick"], f"{one['behind']:.1%}", one["best"]]
        cells += [f"{one['drift']:.2f}"]
        for name in ("before", "in phase", "again", "blind"):
            cells += median_and_worst(one[name])
            if name == "before":
                cells.append(f"{sum(one['inside'])} of {len(one['inside'])}")
        print("| " + " | ".join(map(str, cells)) + " |")
    near = sum(one["behind"] <= 0.10 for one in found)
    print(f"\nThe pick is within 10% of the best in {near} of {len(found)} cases.")
    for world in (None, *sorted({one["world"] for one in found})):
        held = [one for each in found if world in (None, each["world"]) for one in each["inside"]]
        print(f"{world or 'all'} ranks: {sum(held)} of {len(held)} inside the interval that is to hold 80%")
        for name in ("before", "in phase", "again", "blind", "itself", "apart"):
            errors = [error for one in found if world in (None, one["world"]) for error in one[name]]
            within = sum(abs(error) <= FAR for error in errors)
            median, worst = median_and_worst(errors)
            print(f"{world or 'all'} ranks, {name}: {len(errors)} predictions, {median}, {worst}; {within} within 25%")
    print("\n| workload | ranks | plan | measured, and its steps | error again |\n|---|---|---|---|---|")
    for one in found:
        for plan, row, error in one["beyond"]:
            parts = f", {plan.accumulate} parts" if plan.accumulate > 1 else ""
            steps = [1e3 * seconds for seconds in (row["measured_s"], min(row["steps_s"]), max(row["steps_s"]))]
            told = "{:.0f} ms, {:.0f} to {:.0f}".format(*steps)
            print(f"| {one['workload']} | {one['world']} | {plan.describe()}{parts} | {told} | {error:+.0%} |")


def show_twice(one: Path, other: Path) -> None:
    """Print, for what two runs measured, how far predictions are off in each, and how far the runs are from each other.

    Each run has its own calibration. A prediction can be no nearer to what is measured than the next measurement is.
    """
    print("| workload | ranks | plans | first run: median, worst | second: median, worst | the same plan, twice |")
    print("|---|---|---|---|---|---|")
    every: list[list[float]] = [[], [], []]
    for file in (found for found in sorted(one.glob("*.json")) if (other / found.name).exists()):
        documents = [json.loads((folder / file.name).read_text()) for folder in (one, other)]
        rows: list[dict[str, dict[str, Any]]] = []
        for document in documents:
            evened(document)
            rows.append({json.dumps(row["plan"]): row for row in document["rows"] if "measured_s" in row})
        both = [(rows[0][plan], rows[1][plan]) for plan in rows[0] if plan in rows[1]]
        errors = [[row["predicted_s"] / row["measured_s"] - 1 for row in column] for column in zip(*both, strict=True)]
        errors.append([second["measured_s"] / first["measured_s"] - 1 for first, second in both])
        every = [[*known, *new] for known, new in zip(every, errors, strict=True)]
        cells = [documents[0]["workload"], documents[0]["world"], len(both), *map(_pair, errors)]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("| " + " | ".join(map(str, ["all", "", len(every[0]), *map(_pair, every)])) + " |")


def _pair(errors: list[float]) -> str:
    return ", ".join(median_and_worst(errors))


def median_and_worst(errors: list[float]) -> list[str]:
    """Median of their sizes, and the largest with its sign."""
    if not errors:
        return ["", ""]
    return [f"{statistics.median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"]


if __name__ == "__main__":
    main()
