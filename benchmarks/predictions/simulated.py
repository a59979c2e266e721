"""The planner's closed form beside the simulator, on random clusters and models.

python benchmarks/predictions/simulated.py

Of each case the search ranks the layouts, and the first of them are simulated: every rank, every link, every message.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hocket import cluster
from hocket.cluster import Cluster
from hocket.planner import Constants, Prediction, search, step_graph
from hocket.simulate import simulate_step
from hocket.workload import Layer, Operation, Workload, transformer

# The cluster's own rates on every link, and nothing else: what the simulator has besides its links is the plan's.
PLAIN = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)


@dataclass(frozen=True)
class Case:
    """A cluster, and what is trained on it."""

    spec: str  # of the cluster
    workload: Workload
    workers: int
    batch: int  # samples of a global batch

    @property
    def where(self) -> Cluster:
        """The cluster."""
        return cluster.load(self.spec)


def case(seed: int) -> Case:
    """Return the case of a seed: 4 to 64 ranks on any topology and server, and a model that takes 1 ms to 1 min."""
    draw = random.Random(seed)
    spec, world = _cluster(draw)
    workers = draw.choice([n for n in (4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= world] or [world])
    workload = _transformer(draw) if draw.random() < 0.5 else _chain(draw)
    return Case(spec, workload, workers, workers * draw.choice([1, 2, 4, 8]))


def _cluster(draw: random.Random) -> tuple[str, int]:
    rate = f"{10 ** draw.uniform(0.5, 2.6):.0f}Gbit/s"
    flops = f"server.flops={10 ** draw.uniform(13, 15):.2e}"
    device = f"{flops},server.device_memory=80GiB,server.device_memory_bandwidth={draw.choice([0.9, 2, 3.35])}TB/s"
    servers = [
        ("host", 1, 1, flops),
        ("host", draw.choice([2, 4]), 1, f"{flops},server.ranks={{}},server.memory_bandwidth=100GB/s"),
        ("commodity", draw.choice([2, 4, 8]), 1, f"{device},server.devices={{}}"),
        ("eflops", 4, 4, f"{device},server.devices=4"),
        ("dgx-a100", 8, 8, device),
        ("dgx-h100", 8, 8, device),
        ("ac922", 4, 2, f"{device},server.devices=4"),
        ("mi300x", 8, 8, device),
    ]
    kind, local, ports, more = draw.choice(servers)
    hosts = draw.choice([n for n in (1, 2, 3, 4, 6, 8, 16) if n * local <= 64 and n * local >= 4])
    wide = draw.choice([2, 4])  # hosts at a leaf
    shapes = [f"star:hosts={hosts}", f"rails:hosts={hosts},spines={draw.choice([1, 2])}"]
    if hosts % wide == 0 and hosts > wide:
        taper = draw.choice(["", ",taper=2"])
        shapes.append(f"leafspine:leaves={hosts // wide},ports={wide * ports}{taper}")
    if hosts == 16 and ports == 1:
        shapes.append(f"fattree:k=4,taper={draw.choice([1, 2])}")
        shapes.append("dragonfly+:groups=4,leaves=2,spines=3,ports=2,globals=2,hosts=16")
    if hosts % 4 == 0:
        shapes.append(f"bigraph:upper=2,ports={hosts // 4 * ports}")
    if kind == "host" and local == 1 and hosts >= 4:
        shapes.append({4: "torus:dims=4", 6: "torus:dims=3x2", 8: "torus:dims=4x2", 16: "torus:dims=4x4"}[hosts])
    shape = draw.choice(shapes)
    latency = f"{draw.choice([0.5, 2, 10]):g}us"
    return f"{shape},bandwidth={rate},latency={latency},server={kind},{more.format(local)}", hosts * local


def _transformer(draw: random.Random) -> Workload:
    hidden = draw.choice([512, 1024, 2048, 4096])
    return transformer(hidden, draw.choice([4, 6, 8, 12]), 16, sequence=draw.choice([256, 1024, 2048]), vocabulary=8192)


def _chain(draw: random.Random) -> Workload:
    """Return a measured chain of unlike layers, some of which ranks can divide."""
    scale, layers = 10 ** draw.uniform(-4, -2), []
    for index in range(draw.choice([4, 7, 12, 20])):
        seconds, parameters = scale * draw.uniform(0.3, 3), round(10 ** draw.uniform(4, 7.3))
        work = (Operation("forward", seconds * 1e12, saved_bytes=1e6, part="divided"),)
        output, divisible = 10 ** draw.uniform(4, 6.5), draw.random() < 0.6
        layers.append(
            Layer(
                f"layer{index}", "layer", parameters, 4 * parameters, 4 * parameters, 8 * parameters, output, work,
                seconds, 2 * seconds, draw.choice([0.0, 0.2]), 8 if divisible else 1, int(divisible),
                output * divisible,
            )
        )  # fmt: skip
    return Workload("chain", 1, tuple(layers), "float32", "by hand")


def compared(one: Case, layouts: int, constants: Constants = PLAIN) -> Iterator[tuple[Prediction, float]]:
    """Yield the first layouts that the search ranks, each with the step that the simulator says, in seconds."""
    where = one.where
    found = search(
        one.workload, where, workers=one.workers, batch=one.batch, constants=constants, memory_limit=0, keep=layouts
    )
    for each in found.ranked:
        graph = step_graph(each.plan, one.workload, where, workers=one.workers, batch=one.batch, constants=constants)
        graph.memory_nbytes = None
        yield each, simulate_step(graph, where).seconds


def main() -> None:
    """Print a row for each case, and one for each layout that is more than a tenth apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--layouts", type=int, default=50)
    given = parser.parse_args()
    for seed in range(given.first, given.first + given.seeds):
        one, begun, apart = case(seed), time.perf_counter(), []
        for each, seconds in compared(one, given.layouts):
            apart.append((each.step_s / seconds - 1, each, seconds))
        worst = max(apart, key=lambda row: abs(row[0]))[0]
        inside = sum(abs(row[0]) <= 0.1 for row in apart)
        took = time.perf_counter() - begun
        about = f"{one.workers} workers, batch {one.batch}, {one.workload.name}, {one.spec}"
        print(f"{seed}: {inside} of {len(apart)} within 10%, worst {worst:+.1%}, {took:.1f} s; {about}", flush=True)
        for error, each, seconds in apart:
            if abs(error) > 0.1:
                parts = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in each.parts.rows() if value > 0)
                print(f"    {error:+.1%} of {seconds * 1e3:.3g} ms: {each.plan.describe()}; {parts}", flush=True)


if __name__ == "__main__":
    main()
