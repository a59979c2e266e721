"""All-reduce on an emulated cluster: Gloo's, and ours by schedule, beside the simulator's predictions.

    python benchmarks/fabric_collectives.py star:hosts=8,bandwidth=100Mbit/s,latency=0us --sizes 1KiB,64KiB,1MiB

Every host has one rank. The same processes hold a hocket group and a Gloo group, which take turns in every round; an
operation starts at an instant that all ranks agreed on, and its time is that of the slowest. What is predicted is
`hocket.simulate.simulate_schedule` on the same cluster (Gloo's as a ring, which it is), plainly, and again with one
constant that is fitted to this run: what posting a message costs. Bytes are counted by the fabric's links.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SYSTEMS = ("gloo", "ring", "halving_doubling", "recursive_doubling", "double_tree", "direct")
FRAMING = 8948 / 9014  # of a frame of 9000 bytes and its Ethernet header, TCP leaves so many for data
AHEAD_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster")
    parser.add_argument("--sizes", default="1KiB,16KiB,64KiB,256KiB,1MiB")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overhead-us", type=float, help="the constant; fitted to this run if not given")
    parser.add_argument("--out", help="write the numbers as JSON into this file")
    asked = parser.parse_args()

    from hocket.cluster import load, parse_bytes
    from hocket.fabric import Fabric, check

    cluster = load(asked.cluster)
    sizes = [parse_bytes(word) for word in asked.sizes.split(",")]
    with Fabric(cluster) as fabric, tempfile.TemporaryDirectory() as directory:
        print(check(fabric).describe(), flush=True)
        spec = {"sizes": sizes, "systems": asked.systems.split(","), "rounds": asked.rounds, "directory": directory}
        command = ["-m", "hocket", "run", "--fabric", fabric.name, "-n", str(len(fabric.hosts)), __file__]
        subprocess.run([sys.executable, *command, "--rank", json.dumps(spec)], check=True)
        rows = json.loads(Path(directory, "rows.json").read_text())
    overhead_s = fit(rows, cluster) if asked.overhead_us is None else asked.overhead_us * 1e-6
    for row in rows:
        predict(row, cluster, overhead_s)
    show(rows, overhead_s)
    if asked.out:
        Path(asked.out).write_text(json.dumps({"cluster": asked.cluster, "overhead_s": overhead_s, "rows": rows}))


def work(spec: dict[str, Any]) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    from hocket import comm
    from hocket.fabric import Fabric

    torch.set_num_threads(1)
    dist.init_process_group("hocket")
    gloo = dist.new_group(backend="gloo")
    fabric = Fabric.attach(os.environ["HOCKET_FABRIC"])
    rank = dist.get_rank()
    rows = []
    for nbytes in spec["sizes"]:
        data = torch.zeros(nbytes // 4)
        samples: dict[str, list[float]] = {system: [] for system in spec["systems"]}
        carried: dict[str, dict[str, int]] = {}
        for round_ in range(spec["rounds"]):
            for system in spec["systems"]:
                comm.choose(None if system == "gloo" else f"all_reduce * {system}")
                group = gloo if system == "gloo" else dist.group.WORLD
                if nbytes <= 1 << 20 or round_ == 0:
                    dist.all_reduce(data, group=group)
                for _ in range(6 if nbytes <= 1 << 16 else 3 if nbytes <= 1 << 20 else 1):
                    align()
                    before = fabric.counters() if rank == 0 and round_ == 0 else {}
                    align()
                    begin_s = time.perf_counter()
                    dist.all_reduce(data, group=group)
                    samples[system].append(time.perf_counter() - begin_s)
                    if rank == 0 and round_ == 0:
                        time.sleep(0.005)
                        after = fabric.counters()
                        carried[system] = {link: after[link] - before[link] for link in after}
        for system, own in samples.items():
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=gloo)
            times = sorted(slowest.tolist())
            rows.append(
                {
                    "system": system,
                    "nbytes": nbytes,
                    "median_s": statistics.median(times),
                    "best_s": times[0],
                    "samples": len(times),
                    "most_carried": max(carried[system].values()) if rank == 0 else 0,
                }
            )
    if rank == 0:
        Path(spec["directory"], "rows.json").write_text(json.dumps(rows))
    dist.barrier(group=gloo)
    dist.destroy_process_group()


def align() -> None:
    """Returns at the same instant on all ranks: they agree on one a little ahead and wait for it."""
    import torch
    import torch.distributed as dist

    start = torch.tensor([time.perf_counter() + AHEAD_S], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    time.sleep(max(0.0, start.item() - time.perf_counter()))


def simulated(row: dict[str, Any], cluster: Any, **settings: float) -> Any:
    from hocket.algorithms import get
    from hocket.schedule import Collective
    from hocket.simulate import Settings, simulate_schedule

    name = "ring" if row["system"] == "gloo" else row["system"]
    schedule = get(name).build(Collective("all_reduce", cluster.world)).merged()
    if row["system"] != "gloo":
        schedule = schedule.split(pieces(schedule, row["nbytes"]))
    return simulate_schedule(schedule, cluster, row["nbytes"], settings=Settings(**settings))


def pieces(schedule: Any, nbytes: int) -> int:
    """In how many pieces the executor cuts messages, so that it reduces one while the next is on the wire."""
    largest = max(int((step.stop - step.start).max()) for step in schedule.steps if len(step))
    return max(1, min(8, nbytes * largest // schedule.chunks >> 20))


def fit(rows: list[dict[str, Any]], cluster: Any) -> float:
    """The overhead of a message for which the median error of all of our schedules is least."""

    def error(overhead_s: float) -> float:
        ours = [row for row in rows if row["system"] != "gloo"]
        return statistics.median(
            abs(simulated(row, cluster, overhead_s=overhead_s, bandwidth_factor=FRAMING).seconds / row["median_s"] - 1)
            for row in ours
        )

    return min((step * 25e-6 for step in range(80)), key=error)


def predict(row: dict[str, Any], cluster: Any, overhead_s: float) -> None:
    plain = simulated(row, cluster)
    row["plain_s"] = plain.seconds
    row["predicted_s"] = simulated(row, cluster, overhead_s=overhead_s, bandwidth_factor=FRAMING).seconds
    row["most_predicted"] = float(plain.link_nbytes.max())


def show(rows: list[dict[str, Any]], overhead_s: float) -> None:
    gloo = {row["nbytes"]: row["median_s"] for row in rows if row["system"] == "gloo"}
    print(f"one constant: {overhead_s * 1e6:.0f} us a message")
    head = "bytes,system,median ms,best ms,x Gloo,plain ms,error,predicted ms,error,busiest link,of predicted".split(
        ","
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        times = gloo.get(row["nbytes"], float("nan")) / row["median_s"]
        plain, error = row["plain_s"] / row["median_s"] - 1, row["predicted_s"] / row["median_s"] - 1
        median, best = row["median_s"] * 1e3, row["best_s"] * 1e3
        print(
            f"| {row['nbytes']} | {row['system']} | {median:.2f} | {best:.2f} | {times:.2f} "
            f"| {row['plain_s'] * 1e3:.2f} | {plain:+.0%} | {row['predicted_s'] * 1e3:.2f} | {error:+.0%} "
            f"| {row['most_carried']} | {row['most_carried'] / row['most_predicted']:.3f} |"
        )
    ours = [abs(row["predicted_s"] / row["median_s"] - 1) for row in rows if row["system"] != "gloo"]
    print(f"ours: median error {statistics.median(ours):.1%}, worst {max(ours):.1%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
