"""The planner against measuring every plan: six workloads, 2 and 4 local ranks, 8 emulated hosts at 100 Mbit/s.

    python -m benchmarks.plans --ranks 2,4                        local ranks
    python -m benchmarks.plans --fabric star:hosts=8,bandwidth=100Mbit/s --ranks 8
    python -m benchmarks.plans --ranks 2 --workloads edsr         a look
    python -m benchmarks.plans --read FOLDER                      the table of what --out FOLDER holds

For every workload and world: ranks are calibrated as `Trainer(plan="auto")` does it, by `hocket.parallel.calibrate`;
then every admissible plan is predicted, run, and measured: the lower quartile of the slowest rank's steps, in two
rounds over all plans, because the machine has slow phases (of the same plan the median went from 107 ms to 188 ms, the
fastest from 104 to 113). What counts is how far the plan that is predicted to be the fastest is behind the one that was
measured to be, and the error of the predictions. On a machine where nothing else runs. Of parts of a batch, 1 and 4 (of
a pipeline with p ranks p and 4 p) stand for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import hocket
from hocket.parallel import calibrate
from hocket.planner import Plan, PlanError, admissible_plans, predict
from hocket.workloads import Example, example

# Size and samples of a global batch: steps of 50 ms to 400 ms on one core.
WORKLOADS = {
    "edsr": ("demo", 64),
    "resnet50": ("tiny", 64),
    "resnet101": ("demo", 32),
    "language_model": ("demo", 32),
    "translation": ("demo", 128),
    "recommender": ("demo", 4096),
}


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


# --- on the ranks -----------------------------------------------------------------------------------------------------


def measured(name: str, plan: Plan, steps: int) -> list[float]:
    """The slowest rank's steps, without the first two."""
    made, batch = setting(name)
    optimizer = torch.optim.Adam(made.model.parameters(), lr=1e-4)
    trainer = hocket.Trainer(made.model, made.loss_fn, optimizer, plan=plan, sample=batch[:-1])
    each = []
    for _ in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter()
        trainer.step(batch)
        each.append(time.perf_counter() - begin)
    slowest = torch.tensor(each[2:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


def rank_main(name: str, steps: int, rounds: int, out: Path) -> None:
    """Everything of one workload in one world; rank 0 writes it down."""
    dist.init_process_group("hocket")
    rank, world = dist.get_rank(), dist.get_world_size()
    made, batch = setting(name)
    size = WORKLOADS[name][1]
    found = calibrate(made.model, torch.optim.Adam(made.model.parameters()), batch[:-1])
    given: list[Any] = [None]
    if rank == 0:
        plans = admissible_plans(found.workload, found.network, workers=world, batch=size, fixed={"recompute": False})
        given = [[plan.to_json() for plan in plans if is_measured(plan)]]
    dist.broadcast_object_list(given)
    rows: dict[int, dict[str, Any]] = {}
    for _ in range(rounds):
        for number, document in enumerate(given[0]):
            plan = Plan.from_json(document)
            try:
                seconds = measured(name, plan, steps)
            except (PlanError, NotImplementedError, ValueError) as error:  # the same on every rank
                rows[number] = {"plan": document, "refused": str(error)}
                continue
            one = predict(plan, found.workload, found.network, workers=world, batch=size, constants=found.constants)
            known = {"predicted_s": one.step_s, "parts": dict(one.parts.rows()), "steps_s": []}
            row = rows.setdefault(number, {"plan": document, **known})
            row["steps_s"] += seconds
            row["measured_s"] = statistics.quantiles(row["steps_s"], n=4, method="inclusive")[0]
            if rank == 0:
                shown = f"{row['measured_s'] * 1e3:.1f} ms, predicted {one.step_s * 1e3:.1f}"
                print(f"{plan.describe()}: {shown}", flush=True)
    if rank == 0:
        link = {"rate_Bps": found.network.rank_Bps, "latency_s": found.network.between_s}
        link |= {"at_once": found.network.at_once}
        text = {"workload": name, "world": world, "known": link, "constants": vars(found.constants)}
        out.write_text(json.dumps({**text, "rows": list(rows.values())}, indent=1))
    dist.destroy_process_group()


# --- on the caller's side ---------------------------------------------------------------------------------------------


def judged(document: dict[str, Any]) -> dict[str, Any]:
    """How good the pick is, and the predictions."""
    rows = [row for row in document["rows"] if "measured_s" in row]
    pick = min(rows, key=lambda row: row["predicted_s"])
    best = min(rows, key=lambda row: row["measured_s"])
    errors = [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
    return {
        "workload": document["workload"],
        "world": document["world"],
        "plans": len(rows),
        "refused": len(document["rows"]) - len(rows),
        "pick": Plan.from_json(pick["plan"]).resolve(document["world"]).describe(),
        "behind": pick["measured_s"] / best["measured_s"] - 1,
        "best": Plan.from_json(best["plan"]).resolve(document["world"]).describe(),
        "median": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--fabric", default="")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="over all plans")
    parser.add_argument("--out", type=Path, help="a folder for what was measured, as JSON")
    parser.add_argument("--read", type=Path, help="measure nothing; judge the files of this folder")
    parser.add_argument("--rank", nargs=2, metavar=("WORKLOAD", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank[0], given.steps, given.rounds, Path(given.rank[1]))
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
                "--steps",
                str(given.steps),
                "--rounds",
                str(given.rounds),
                "--rank",
                name,
                str(files[-1]),
            ]
            subprocess.run(words, check=True, stdout=sys.stderr)
    show([json.loads(file.read_text()) for file in files])


def show(documents: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("| workload | ranks | plans | planner's pick | behind the best | best measured | median error | worst |")
    print("|---|---|---|---|---|---|---|---|")
    found = [judged(document) for document in documents]
    for one in found:
        print(
            f"| {one['workload']} | {one['world']} | {one['plans']} | {one['pick']} | {one['behind']:.1%} | "
            f"{one['best']} | {one['median']:.1%} | {one['worst']:+.1%} |"
        )
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for d in documents for row in d["rows"] if "parts" in row]
    near = sum(one["behind"] <= 0.10 for one in found)
    print(
        f"\nThe pick is within 10% of the best in {near} of {len(found)} cases. Of {len(errors)} predictions the median"
    )
    print(f"error is {statistics.median(errors):.1%}, the worst {max(errors):.1%}.")


if __name__ == "__main__":
    main()
