"""Collectives on emulated clusters: how many measured times lie inside the interval that was predicted of them.

    python -m benchmarks.fabric_intervals --out FOLDER

What a user does: a sweep of all-reduce over four sizes on the first cluster is measured, and what its links reach is
fitted to it (`fit_sweep`, as `hocket cluster fit` does). From that everything else is predicted before it is measured
(`expected_collective`): other sizes, other algorithms, other collectives, more hosts, another topology. The time of an
operation is counted from when its last rank has begun to when its last rank has finished.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.fabric_collectives import align, of_all_ranks

LINKS = "bandwidth=100Mbit/s,latency=0us"
CLUSTERS = (f"star:hosts=4,{LINKS}", f"star:hosts=8,{LINKS}", f"leafspine:leaves=4,ports=2,spines=2,{LINKS}")
SWEEP = (1 << 10, 16 << 10, 256 << 10, 1 << 20)
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)
ROUNDS = 3
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="keep predictions and measurements in this folder")
    parser.add_argument("--read", action="store_true", help="measure nothing; show what the folder holds")
    asked = parser.parse_args()
    folder = Path(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    if not asked.read:
        run(folder)
    show(folder)


def run(folder: Path) -> None:
    """Measure the sweep, fit, predict all, measure all."""
    from hocket.algorithms import get
    from hocket.cluster import load
    from hocket.planner import Network, expected_collective, fit_sweep
    from hocket.schedule import Collective

    first = load(CLUSTERS[0])
    swept = measure(CLUSTERS[0], [("all_reduce", "", nbytes) for nbytes in SWEEP])
    sweep = {row["nbytes"]: row["median_s"] for row in swept}
    constants, error = fit_sweep(sweep, Network.of(first), kind="all_reduce", ranks=first.world)
    fitted = {name: getattr(constants, name) for name in ("network_share", "collective_s")}
    print(f"fitted: {fitted}, median error {error:.1%}", flush=True)
    predicted = []
    for spec in CLUSTERS:
        cluster = load(spec)
        for kind in KINDS:
            for name in names(kind, cluster.world):
                schedule = get(name)(Collective(kind, cluster.world))
                times = expected_collective(schedule, cluster, [float(one) for one in SIZES], constants=constants)
                predicted += [
                    {"cluster": spec, "kind": kind, "algorithm": name, "nbytes": nbytes} | dataclasses.asdict(one)
                    for nbytes, one in zip(SIZES, times, strict=True)
                ]
    document = {"at": time.strftime("%F %T"), "swept": swept, "fitted": fitted, "rows": predicted}
    (folder / "predicted.json").write_text(json.dumps(document, indent=1))
    for spec in CLUSTERS:
        cases = [(one["kind"], one["algorithm"], one["nbytes"]) for one in predicted if one["cluster"] == spec]
        found = measure(spec, cases)
        (folder / f"measured-{CLUSTERS.index(spec)}.json").write_text(json.dumps(found, indent=1))


def names(kind: str, world: int) -> list[str]:
    """The algorithms that serve a collective of so many ranks, each to be chosen by its name alone."""
    from hocket.algorithms import candidates
    from hocket.schedule import Collective

    return [one.name for one in candidates(Collective(kind, world)) if one.name != "one_shot"]


def measure(spec: str, cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """One row for each case: kind, algorithm ("" for what hocket chooses) and bytes of the vector."""
    from hocket.cluster import load
    from hocket.fabric import Fabric

    with Fabric(load(spec)) as fabric, tempfile.TemporaryDirectory() as directory:
        given = Path(directory, "cases.json")
        given.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "hocket", "run", "--fabric", fabric.name, "-n", str(len(fabric.hosts))]
        subprocess.run([*command, "-m", "benchmarks.fabric_intervals", "--rank", directory], check=True)
        rows: list[dict[str, Any]] = json.loads(Path(directory, "rows.json").read_text())
        return rows


def work(directory: str) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    from hocket import comm

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames what it has
    torch.set_num_threads(1)
    dist.init_process_group("hocket")
    gloo = dist.new_group(backend="gloo")
    cases = json.loads(Path(directory, "cases.json").read_text())
    samples: dict[int, list[tuple[float, float]]] = {case: [] for case in range(len(cases))}
    for round_ in range(ROUNDS):
        for case, (kind, name, nbytes) in enumerate(cases):
            comm.choose(f"{kind} * {name}" if name else None)
            operation = operation_of(kind, nbytes)
            if round_ == 0 or nbytes <= 1 << 20:
                operation()
            for _ in range(5 if nbytes <= 1 << 16 else 2):
                align(gloo)
                begin_s = time.perf_counter()
                operation()
                samples[case].append((begin_s, time.perf_counter()))
    rows = []
    for case, own in samples.items():
        begins, ends = of_all_ranks(own, gloo)
        times = sorted((ends.amax(0) - begins.amax(0)).tolist())
        kind, name, nbytes = cases[case]
        facts = {"kind": kind, "algorithm": name, "nbytes": nbytes, "samples": len(times)}
        rows.append(facts | {"median_s": statistics.median(times), "best_s": times[0], "worst_s": times[-1]})
    if dist.get_rank() == 0:
        Path(directory, "rows.json").write_text(json.dumps(rows))
    dist.barrier(group=gloo)
    dist.destroy_process_group()


def operation_of(kind: str, nbytes: int) -> Any:
    """The collective over a vector of so many bytes, as nccl-tests count them."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    whole = torch.zeros(nbytes // 4)
    part = torch.zeros(nbytes // 4 // world)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }[kind]


def show(folder: Path) -> None:
    """How many lie inside, by cluster, collective and size; and the worst."""
    document = json.loads((folder / "predicted.json").read_text())
    measured = {}
    for number, spec in enumerate(CLUSTERS):
        for row in json.loads((folder / f"measured-{number}.json").read_text()):
            measured[spec, row["kind"], row["algorithm"], row["nbytes"]] = row
    rows = []
    for one in document["rows"]:
        found = measured[one["cluster"], one["kind"], one["algorithm"], one["nbytes"]]
        low, high = one["interval_s"]
        error, inside = one["seconds"] / found["median_s"] - 1, low <= found["median_s"] <= high
        rows.append(one | {"error": error, "inside": inside, "median_s": found["median_s"]})
    print(f"predicted at {document['at']} with {document['fitted']}")
    for label, key in (("cluster", "cluster"), ("collective", "kind"), ("algorithm", "algorithm"), ("bytes", "nbytes")):
        print(f"\n| {label} | predictions | inside | | median error | worst |\n|---|---|---|---|---|---|")
        for value in dict.fromkeys(row[key] for row in rows):
            line(value, [row for row in rows if row[key] == value])
    line("all", rows)
    print("\n| cluster | collective | algorithm | bytes | predicted ms | 80% | measured ms | error |")
    print("|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:12]:
        low, high = (end * 1e3 for end in row["interval_s"])
        case = f"{row['cluster'].split(',')[0]} | {row['kind']} | {row['algorithm']} | {row['nbytes']}"
        times = f"{row['seconds'] * 1e3:.2f} | {low:.2f} to {high:.2f} | {row['median_s'] * 1e3:.2f}"
        print(f"| {case} | {times} | {row['error']:+.0%} |")


def line(label: Any, rows: list[dict[str, Any]]) -> None:
    inside = sum(row["inside"] for row in rows)
    errors = [abs(row["error"]) for row in rows]
    worst = max((row["error"] for row in rows), key=abs)
    told = f"{inside} | {inside / len(rows):.0%} | {statistics.median(errors):.1%} | {worst:+.0%}"
    print(f"| {str(label).split(',')[0]} | {len(rows)} | {told} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        os.environ.pop("HOCKET_CHOICES", None)
        work(sys.argv[2])
    else:
        main()
