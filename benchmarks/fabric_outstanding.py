"""Sixteen all-reduces outstanding in four groups at once: do the links stay full?

    python benchmarks/fabric_outstanding.py star:hosts=8,bandwidth=100Mbit/s,latency=0us --sizes 64KiB,1MiB

All ranks begin four operations in each of four groups and then wait for all; the time is that of the slowest rank.
What a host's link must carry at least, framing counted, is that of sixteen messages through an aggregator, and
2(n-1)/n times as much in rings.
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

from fabric_collectives import FRAMING, align

GROUPS, EACH = 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster")
    parser.add_argument("--sizes", default="64KiB,1MiB")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()

    from hocket.cluster import load
    from hocket.fabric import Fabric, check
    from hocket.units import parse_bytes

    cluster = load(asked.cluster)
    sizes = [parse_bytes(word) for word in asked.sizes.split(",")]
    with Fabric(cluster) as fabric, tempfile.TemporaryDirectory() as directory:
        print(check(fabric).describe(), flush=True)
        spec = json.dumps({"sizes": sizes, "rounds": asked.rounds, "directory": directory})
        command = ["-m", "hocket", "run", "--fabric", fabric.name, "--aggregate", "-n", str(len(fabric.hosts))]
        subprocess.run([sys.executable, *command, __file__, "--rank", spec], check=True)
        rows = json.loads(Path(directory, "rows.json").read_text())
        rate_Bps = min(port.rate_Bps for node in fabric.wiring.nodes for port in node.ports) * FRAMING
    hosts = len(cluster.host_names)
    head = ("bytes each", "system", "median ms", "best ms", "links' least ms", "of line rate", "x Gloo")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    gloo = {row["nbytes"]: row["median_s"] for row in rows if row["system"] == "gloo"}
    for row in rows:
        share = 1.0 if row["system"] == "aggregator" else 2 * (hosts - 1) / hosts
        least_s = GROUPS * EACH * row["nbytes"] * share / rate_Bps
        median_s, best_s = row["median_s"], row["best_s"]
        print(
            f"| {row['nbytes']} | {row['system']} | {median_s * 1e3:.1f} | {best_s * 1e3:.1f} | {least_s * 1e3:.1f} "
            f"| {least_s / median_s:.0%} | {gloo[row['nbytes']] / median_s:.2f} |"
        )


def work(spec: dict[str, object]) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    aggregator = os.environ.pop("HOCKET_AGGREGATOR")
    dist.init_process_group("hocket")
    systems = {"gloo": [dist.new_group(backend="gloo") for _ in range(GROUPS)]}
    systems["host-based"] = [dist.new_group(backend="hocket") for _ in range(GROUPS)]
    os.environ["HOCKET_AGGREGATOR"] = aggregator
    systems["aggregator"] = [dist.new_group(backend="hocket") for _ in range(GROUPS)]
    rows = []
    for nbytes in spec["sizes"]:
        samples = {system: [] for system in systems}
        for round_ in range(spec["rounds"] + 1):
            for system, groups in systems.items():
                data = [torch.ones(nbytes // 4) for _ in range(GROUPS * EACH)]
                align(systems["gloo"][0])
                begin_s = time.perf_counter()
                works = [
                    dist.all_reduce(one, group=groups[number % GROUPS], async_op=True)
                    for number, one in enumerate(data)
                ]
                for one in works:
                    one.wait()
                if round_:
                    samples[system].append(time.perf_counter() - begin_s)
                assert all(float(one[-1]) == dist.get_world_size() for one in data)
        for system, own in samples.items():
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=systems["gloo"][0])
            times = slowest.tolist()
            rows.append(
                {"system": system, "nbytes": nbytes, "median_s": statistics.median(times), "best_s": min(times)}
            )
    if dist.get_rank() == 0:
        Path(spec["directory"], "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
