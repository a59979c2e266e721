"""HDRM on a BiGraph beside halving-doubling and ring, there and on a leaf-spine of equal cost, with ECMP.

    python benchmarks/fabric_hdrm.py --seeds 20 --size 1MiB

Each seed is a new group of the same ranks: its connections have new ports, so that switches spread them anew. What is
predicted is the simulator's for as many seeds of its own hash, which is another one: compare how they are spread.
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

from fabric_collectives import FRAMING, align

RATE = "bandwidth=100Mbit/s,latency=0us"
CLUSTERS = {
    f"bigraph:upper=2,ports=2,{RATE}": ("hdrm", "halving_doubling", "ring"),
    f"leafspine:leaves=2,ports=4,spines=2,{RATE}": ("halving_doubling", "ring"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--size", default="1MiB")
    parser.add_argument("--clusters", default=",".join(str(index) for index in range(len(CLUSTERS))), help="0, 1")
    asked = parser.parse_args()

    from hocket.cluster import load
    from hocket.fabric import Fabric, check
    from hocket.units import parse_bytes

    head = ("cluster", "schedule", "best ms", "median ms", "worst ms", "simulated best", "median", "worst")
    print(f"| {' | '.join((*head, 'most bytes on a link between switches', 'worst'))} |\n{'|---' * (len(head) + 2)}|")
    for number in asked.clusters.split(","):
        word, schedules = list(CLUSTERS.items())[int(number)]
        cluster = load(word)
        with Fabric(cluster) as fabric, tempfile.TemporaryDirectory() as directory:
            found = check(fabric)
            if not found.ok:
                print(found.describe())
            nbytes = parse_bytes(asked.size)
            spec = {"nbytes": nbytes, "schedules": schedules, "seeds": asked.seeds, "directory": directory}
            command = ["-m", "hocket", "run", "--fabric", fabric.name, "-n", "8", __file__, "--rank", json.dumps(spec)]
            subprocess.run([sys.executable, *command], check=True, stderr=subprocess.DEVNULL)
            told = json.loads(Path(directory, "told.json").read_text())
        for schedule in schedules:
            show(cluster, schedule, nbytes, told[schedule])


def show(cluster: Any, schedule: str, nbytes: int, told: dict[str, Any]) -> None:
    from hocket.algorithms import get
    from hocket.schedule import Collective
    from hocket.simulate import Settings, simulate_schedule

    plan = get(schedule).build(Collective("all_reduce", 8))
    setting = Settings(bandwidth_factor=FRAMING)
    simulated = [
        simulate_schedule(plan, cluster, nbytes, settings=setting, seed=seed).seconds
        for seed in range(len(told["times_s"]))
    ]
    trunks = [max(size for link, size in one.items() if "host" not in link) for one in told["carried"]]
    cells = [cluster.name, schedule]
    for times in (told["times_s"], simulated):
        cells += [f"{value * 1e3:.0f}" for value in (min(times), statistics.median(times), max(times))]
    print(
        f"| {' | '.join(cells)} | {statistics.median(trunks) / nbytes:.2f} S | {max(trunks) / nbytes:.2f} S |",
        flush=True,
    )


def work(spec: dict[str, Any]) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    from hocket import comm
    from hocket.fabric import Fabric

    torch.set_num_threads(1)
    dist.init_process_group("hocket")
    fabric = Fabric.attach(os.environ["HOCKET_FABRIC"])
    first = dist.get_rank() == 0
    data = torch.zeros(spec["nbytes"] // 4)
    told: dict[str, Any] = {name: {"times_s": [], "carried": []} for name in spec["schedules"]}
    for _ in range(spec["seeds"]):
        group = dist.new_group(backend="hocket")
        for name in spec["schedules"]:
            comm.choose(f"all_reduce * {name}")
            dist.all_reduce(data[:8], group=group)
            before = fabric.counters() if first else {}
            align()
            begin_s = time.perf_counter()
            dist.all_reduce(data, group=group)
            took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            after = fabric.counters() if first else {}
            told[name]["times_s"].append(took.item())
            told[name]["carried"].append({link: after[link] - before[link] for link in after})
        dist.destroy_process_group(group)
    if first:
        Path(spec["directory"], "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
