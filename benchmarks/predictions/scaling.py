"""How long the simulator itself takes, by ranks."""

import time
from collections.abc import Callable
from functools import partial

from plots import table

from hocket import algorithms, cluster
from hocket.schedule import Collective
from hocket.simulate import StepGraph, simulate_schedule, simulate_step


def timed(function: Callable[[], object]) -> str:
    """Wall seconds, the best of two."""
    walls = []
    for _ in range(2):
        begin = time.perf_counter()
        function()
        walls.append(time.perf_counter() - begin)
    return f"{min(walls):.2f}"


def step(world: int, described: cluster.Cluster) -> None:
    """A data-parallel step of 20 buckets."""
    schedule = algorithms.get("halving_doubling")(Collective("all_reduce", world))
    graph = StepGraph(world)
    graph.compute(None, 0.050)
    for _ in range(20):
        graph.collective(schedule, 8e6, after=[graph.compute(None, 0.005)])
    simulate_step(graph, described)


def report() -> str:
    """A table."""
    rows = []
    for upper, ports in ((4, 4), (8, 8), (16, 16), (32, 16), (32, 32)):
        world = 2 * upper * ports
        spread = cluster.load(f"leafspine:leaves={2 * upper},ports={ports}")
        star = cluster.load(f"star:hosts={world}")
        schedule = algorithms.get("halving_doubling")(Collective("all_reduce", world))
        row = [str(world)]
        row += [timed(partial(simulate_schedule, schedule, where, 1e8)) for where in (star, spread)]
        row += [timed(partial(step, world, where)) for where in (star, spread)]
        rows.append(row)
    head = ["ranks", "HD, star", "HD, leaf-spine ECMP", "step of 20 buckets, star", "the same, leaf-spine ECMP"]
    return table(head, rows)
