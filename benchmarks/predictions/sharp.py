"""SHARP: calibrated on two published points of 128 hosts, then asked for 1,500 hosts with 40 ranks each."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from plots import curves, table

from hocket import algorithms, cluster
from hocket.cluster import Cluster
from hocket.schedule import Collective, Schedule
from hocket.simulate import Settings, simulate_schedule
from hocket.units import format_bytes

# COMHPC 2016, abstract: 8 B MPI_Allreduce on 128 hosts, Switch-IB 2, EDR.
HOST_BASED_S, SHARP_S = 6.01e-6, 2.83e-6
LINK = "150ns"  # assumed: 90 ns of the switch (data sheet) and cable


def fabric(delay_s: float) -> Cluster:
    """128 hosts in a fat tree of 36-port switches."""
    return cluster.load(
        f"leafspine:leaves=8,ports=16,spines=16,bandwidth=100Gbit/s,latency={LINK},reduction.delay={delay_s}s"
    )


def tree(described: Cluster, world: int, local: int = 1) -> Schedule:
    """The aggregation tree of a cluster's switches."""
    parents, switches = algorithms.cluster_tree(described, range(world))
    return algorithms.get("aggregation_tree")(
        Collective("all_reduce", world), parents=parents, switches=switches, local=local
    )


@dataclass(frozen=True)
class Fit:
    """What the two points give: a message's overhead at the host, and a switch's time to reduce one operation."""

    overhead_s: float
    delay_s: float


def fit() -> Fit:
    """Two unknowns from two points; time is linear in each, so a secant is exact."""
    doubling = algorithms.get("recursive_doubling")(Collective("all_reduce", 128))

    def host_based(overhead_s: float) -> float:
        return simulate_schedule(doubling, fabric(0.0), 8, settings=Settings(overhead_s=overhead_s)).seconds

    overhead_s = solve(host_based, HOST_BASED_S, 1e-6)

    def in_network(delay_s: float) -> float:
        described = fabric(delay_s)
        return simulate_schedule(tree(described, 128), described, 8, settings=Settings(overhead_s=overhead_s)).seconds

    return Fit(overhead_s, solve(in_network, SHARP_S, 1e-6))


def solve(function: Callable[[float], float], target: float, probe: float) -> float:
    """Where a linear function has a value."""
    low, high = function(0.0), function(probe)
    return (target - low) / (high - low) * probe


def report() -> tuple[str, str, str]:
    """Two tables and a plot."""
    fitted = fit()
    settings = Settings(overhead_s=fitted.overhead_s)
    described = fabric(fitted.delay_s)
    small = [["fitted: overhead of a message at the host", f"{fitted.overhead_s * 1e9:.0f} ns"]]
    small.append(["fitted: a switch's time to reduce one operation", f"{fitted.delay_s * 1e9:.0f} ns"])
    for nbytes in (8, 64, 256, 1024, 4096):
        host = simulate_schedule(
            algorithms.get("recursive_doubling")(Collective("all_reduce", 128)), described, nbytes, settings=settings
        ).seconds
        there = simulate_schedule(tree(described, 128), described, nbytes, settings=settings).seconds
        word = "fitted" if nbytes == 8 else "predicted"
        small.append([f"{word}: {nbytes} B", f"{host * 1e6:.2f} -> {there * 1e6:.2f} us ({host / there:.2f}x)"])
    begin = time.perf_counter(), time.process_time()
    spec = cluster.preset_text("sharp-1500").replace('"250 ns"', f'"{LINK}"')
    spec = spec.replace("outstanding = 2", f"outstanding = 2\ndelay = {fitted.delay_s}")
    big = cluster.from_toml(spec)
    streaming = cluster.from_toml(spec.replace("outstanding = 2", "outstanding = 2\nstreaming = true"))
    collective = Collective("all_reduce", big.world)
    host_based = {
        "recursive doubling": algorithms.get("leaders")(collective, local=40, between="recursive_doubling"),
        "halving-doubling": algorithms.get("leaders")(collective, local=40, between="halving_doubling"),
    }
    in_network = {
        "tree, low latency": (tree(big, big.world, 40), big),
        "tree, streaming": (tree(big, big.world, 40), streaming),
    }
    rows, lines = [], {}
    for exponent in range(3, 25, 3):
        nbytes = 2**exponent
        seconds = {
            name: simulate_schedule(one, big, nbytes, settings=settings).seconds for name, one in host_based.items()
        }
        seconds |= {
            name: simulate_schedule(one, where, nbytes, settings=settings).seconds
            for name, (one, where) in in_network.items()
        }
        best = min(seconds[name] for name in host_based)
        least = min(seconds[name] for name in in_network)
        rows.append([format_bytes(nbytes), *(f"{one * 1e6:,.1f}" for one in seconds.values()), f"{best / least:.2f}"])
        for name, one in seconds.items():
            lines.setdefault(name, []).append((nbytes, one * 1e6))
    taken, worked = time.perf_counter() - begin[0], time.process_time() - begin[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    head = ["bytes", *host_based, *in_network, "host-based / tree"]
    walls = f"{taken:.0f} s ({worked:.0f} s of processor time), {peak:.1f} GiB at the peak"
    note = f"\n\n60,000 ranks, {len(rows)} sizes, {len(head) - 2} algorithms: {walls}."
    plot = curves("All-reduce, 1,500 hosts x 40 ranks, Dragonfly+", "bytes", "us", lines, dashed="tree")
    return table(["128 hosts, 8 B", ""], small), table(head, rows) + note, plot
