"""All-reduce on an emulated cluster: Gloo's, and ours by schedule, beside the simulator's predictions.

    python benchmarks/fabric_collectives.py star:hosts=8,bandwidth=100Mbit/s,latency=0us --sizes 1KiB,64KiB,1MiB

Every host has one rank. The same processes hold a hocket group and a Gloo group, which take turns in every round; an
operation starts at an instant that all ranks agreed on. Where ranks share cores they do not all start then; so its time
is counted from when the last rank has begun it ("ms") to when the last has finished, and beside it from when the first
had begun ("with start"). What is predicted is
`hocket.simulate.simulate_schedule` on the same cluster, plainly, and again with one constant that is fitted to the run:
what a message costs the processors, once for every message of whoever sends most, one after the other. Gloo's is
predicted as a ring, which it is; the aggregator's as a switch that streams, and for every aggregator on the way the
time of one of the pieces in which it takes and gives. Bytes are counted by the fabric's links.

With several ranks to a host ours are predicted as one rank a host, since a two-level collective sends from each host
what one rank would; Gloo's as a ring of all ranks.
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
from collections.abc import Callable
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
    parser.add_argument("--ranks-per-host", type=int, default=1, help="with more, for clusters of a builder")
    parser.add_argument("--overhead-us", type=float, help="the constant; fitted to this run if not given")
    parser.add_argument("--out", help="write the numbers as JSON into this file")
    parser.add_argument("--read", nargs="*", help="measure nothing; show what these files hold")
    asked = parser.parse_args()

    from hocket.cluster import load

    cluster = load(asked.cluster)
    if asked.read:
        rows = [row for file in asked.read for row in json.loads(Path(file).read_text())["rows"]]
    else:
        rows = measure(cluster, asked)
    flat = load(f"{asked.cluster},server.ranks={asked.ranks_per_host}") if asked.ranks_per_host > 1 else cluster
    for row in rows:
        predict(row, flat if row["system"] == "gloo" else cluster)
    show(rows, fit(rows) if asked.overhead_us is None else asked.overhead_us * 1e-6)
    if asked.out:
        Path(asked.out).write_text(json.dumps({"cluster": asked.cluster, "rows": rows}))


def measure(cluster: Any, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each size and system."""
    from hocket.fabric import Fabric, check
    from hocket.units import parse_bytes

    sizes = [parse_bytes(word) for word in asked.sizes.split(",")]
    with Fabric(cluster) as fabric, tempfile.TemporaryDirectory() as directory:
        print(check(fabric).describe(), flush=True)
        spec = {"sizes": sizes, "systems": asked.systems.split(","), "rounds": asked.rounds, "directory": directory}
        command = ["-m", "hocket", "run", "--fabric", fabric.name, "-n"]
        command[3:3] = ["--aggregate"] if "aggregator" in spec["systems"] else []
        command += [str(len(fabric.hosts) * asked.ranks_per_host), __file__]
        subprocess.run([sys.executable, *command, "--rank", json.dumps(spec)], check=True)
        rows: list[dict[str, Any]] = json.loads(Path(directory, "rows.json").read_text())
        return rows


def work(spec: dict[str, Any]) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    from hocket import comm
    from hocket.fabric import Fabric

    torch.set_num_threads(1)
    aggregator = os.environ.pop("HOCKET_AGGREGATOR", None)
    dist.init_process_group("hocket")
    groups = {"gloo": dist.new_group(backend="gloo")}
    gloo = groups["gloo"]
    if aggregator is not None:
        os.environ["HOCKET_AGGREGATOR"] = aggregator
        groups["aggregator"] = dist.new_group(backend="hocket")
    fabric = Fabric.attach(os.environ["HOCKET_FABRIC"])
    rank = dist.get_rank()
    nodes = fabric.wiring.nodes
    trunks = [port.link for node in nodes for port in node.ports if node.kind == nodes[port.peer].kind == "switch"]
    rows = []
    for nbytes in spec["sizes"]:
        data = torch.zeros(nbytes // 4)
        samples: dict[str, list[tuple[float, float]]] = {system: [] for system in spec["systems"]}
        carried: dict[str, dict[str, int]] = {}
        for round_ in range(spec["rounds"]):
            for system in spec["systems"]:
                comm.choose(None if system in groups else f"all_reduce * {system}")
                group = groups.get(system, dist.group.WORLD)
                if nbytes <= 1 << 20 or round_ == 0:
                    dist.all_reduce(data, group=group)
                if round_ == 0:  # once to count, which delays what follows, and is not timed
                    align(gloo)
                    before = fabric.counters() if rank == 0 else {}
                    align(gloo)
                    dist.all_reduce(data, group=group)
                    if rank == 0:
                        time.sleep(0.02)  # the last host may still be sending to another one
                        after = fabric.counters()
                        carried[system] = {link: after[link] - before[link] for link in after}
                    align(gloo)
                for _ in range(6 if nbytes <= 1 << 16 else 3 if nbytes <= 1 << 20 else 2):
                    align(gloo)
                    begin_s = time.perf_counter()
                    dist.all_reduce(data, group=group)
                    samples[system].append((begin_s, time.perf_counter()))
        for system, own in samples.items():
            begins, ends = of_all_ranks(own, gloo)
            times = sorted((ends.amax(0) - begins.amax(0)).tolist())
            whole = (ends.amax(0) - begins.amin(0)).tolist()
            rows.append(
                {
                    "system": system,
                    "nbytes": nbytes,
                    "median_s": statistics.median(times),
                    "best_s": times[0],
                    "worst_s": times[-1],
                    "whole_s": statistics.median(whole),
                    "samples": len(times),
                    "most_carried": max(carried[system].values()) if rank == 0 else 0,
                    "most_trunk": max((carried[system][link] for link in trunks), default=0) if rank == 0 else 0,
                }
            )
    if rank == 0:
        Path(spec["directory"], "rows.json").write_text(json.dumps(rows))
    dist.barrier(group=gloo)
    dist.destroy_process_group()


def align(group: Any = None) -> None:
    """Returns at the same instant on all ranks: they agree on one a little ahead and wait for it.

    Args:
        group: through which they agree; not the one that is measured, whose threads may still look after it.
    """
    import torch
    import torch.distributed as dist

    start = torch.tensor([time.perf_counter() + AHEAD_S], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX, group=group)
    time.sleep(max(0.0, start.item() - time.perf_counter()))


def of_all_ranks(own: list[tuple[float, float]], group: Any) -> Any:
    """When operations began and ended, by rank and sample, by a clock that all ranks of this machine share."""
    import torch
    import torch.distributed as dist

    mine = torch.tensor(own, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).unbind(-1)


def slowest(action: Callable[[], Any], group: Any) -> float:
    """The seconds that an action takes on the slowest rank; all begin at once."""
    import torch
    import torch.distributed as dist

    align(group)
    begin_s = time.perf_counter()
    action()
    took_s = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    dist.all_reduce(took_s, dist.ReduceOp.MAX, group=group)
    return took_s.item()


def built(system: str, cluster: Any, nbytes: int) -> Any:
    """The schedule, messages cut as the executor cuts them, so that it reduces one while the next is on the wire."""
    from hocket.algorithms import get
    from hocket.comm.scheduled._scheduled import MOST_PIECES, PIECE_NBYTES
    from hocket.schedule import Collective

    if system == "aggregator":
        from hocket.algorithms import cluster_tree

        parents, names = cluster_tree(cluster)
        return get("aggregation_tree").build(Collective("all_reduce", cluster.world), parents=parents, switches=names)
    name = "ring" if system == "gloo" else system
    schedule = get(name).build(Collective("all_reduce", cluster.world)).merged()
    largest = max(int((step.stop - step.start).max()) for step in schedule.steps if len(step))
    pieces = 1 if system == "gloo" else max(1, min(MOST_PIECES, nbytes * largest // schedule.chunks // PIECE_NBYTES))
    return schedule.split(pieces)


def predict(row: dict[str, Any], cluster: Any) -> None:
    """From the described links alone; and how many messages the busiest node sends."""
    from hocket.simulate import Settings, simulate_schedule

    if row["system"] == "aggregator":
        from hocket.cluster import Reduction

        nodes = [node for node, kind in enumerate(cluster.kinds) if kind == "switch"]
        reduction = Reduction(streaming=True, efficiency=1.0)
        cluster = dataclasses.replace(cluster, reductions=dict.fromkeys(nodes, reduction))
    schedule = built(row["system"], cluster, row["nbytes"])
    timing = simulate_schedule(schedule, cluster, row["nbytes"], settings=Settings(bandwidth_factor=FRAMING))
    row["simulated_s"] = timing.seconds
    if row["system"] == "aggregator":
        from hocket.aggregator import segment_nbytes

        stages = (
            1 if schedule.endpoints == cluster.world + 1 else 3
        )  # the root; or leaf, root, and leaf on the way down
        piece_nbytes = min(segment_nbytes(row["nbytes"]), row["nbytes"])
        row["simulated_s"] += stages * piece_nbytes / float(cluster.capacity_Bps.min()) / FRAMING
    row["most_predicted"] = float(timing.link_nbytes.max())
    sends = [0] * schedule.endpoints
    for step in schedule.steps:
        for source in step.source.tolist():
            sends[source] += step.repeat
    row["sends"] = max(sends)


def fit(rows: list[dict[str, Any]]) -> float:
    """What a message costs, so that the mean error of our schedules is least."""

    def error(overhead_s: float) -> float:
        return statistics.mean(abs(wrong(row, overhead_s)) for row in rows if row["system"] != "gloo")

    return min((step * 25e-6 for step in range(120)), key=error)


def wrong(row: dict[str, Any], overhead_s: float) -> float:
    return float((row["simulated_s"] + overhead_s * row["sends"]) / row["median_s"] - 1)


def show(rows: list[dict[str, Any]], overhead_s: float) -> None:
    gloo = {row["nbytes"]: row["median_s"] for row in rows if row["system"] == "gloo"}
    print(f"one constant: {overhead_s * 1e6:.0f} us a message")
    head = ("bytes", "system", "ms", "best", "worst", "x Gloo", "with start", "simulated ms", "error")
    head = (*head, "with constant", "error", "bytes of busiest link", "of simulated", "of busiest trunk")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        times = gloo.get(row["nbytes"], float("nan")) / row["median_s"]
        keys = ("median_s", "best_s", "worst_s", "whole_s", "simulated_s")
        median, best, worst, whole, plain = (row[key] * 1e3 for key in keys)
        print(
            f"| {row['nbytes']} | {row['system']} | {median:.2f} | {best:.2f} | {worst:.2f} | {times:.2f} "
            f"| {whole:.2f} | {plain:.2f} | {wrong(row, 0.0):+.0%} "
            f"| {plain + overhead_s * row['sends'] * 1e3:.2f} | {wrong(row, overhead_s):+.0%} "
            f"| {row['most_carried']} | {row['most_carried'] / row['most_predicted']:.3f} | {row['most_trunk']} |"
        )
    for least in (0, 1 << 16, 1 << 18, 1 << 20):
        ours = [row for row in rows if row["system"] != "gloo" and row["nbytes"] >= least]
        for name, constant_s in (("simulated", 0.0), ("with the constant", overhead_s)):
            errors = [abs(wrong(row, constant_s)) for row in ours]
            if errors:
                print(
                    f"from {least} bytes, {name}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
