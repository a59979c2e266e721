"""DGX H100/H200 with and without reduction in its NVSwitches, calibrated on points of 8 GPUs only."""

import numpy as np
from plots import table

from hocket import algorithms, cluster
from hocket.schedule import Collective, Schedule, Step
from hocket.simulate import Settings, simulate_schedule
from hocket.units import format_bytes

# 8 GPUs, large messages, busbw in GB/s (nccl issue 1455): ring 365 to 370, NVLS 480; 450 GB/s is the wire.
RING_BUSBW, NVLS_BUSBW, WIRE = 367.5e9, 480e9, 450e9
# 8 x H200, NCCL 2.27.7, algbw in GB/s (ml-engineering). NCCL takes its ring to 1 MiB and NVLS from 2 MiB.
RING_POINTS = {2**16: 1.67e9, 2**20: 22.82e9}
NVLS_POINTS = {2**24: 125.65e9, 2**28: 249.23e9}


def nvls(world: int) -> Schedule:
    """The owner of chunk r pulls its sum through the switch, then has it multicast, as NCCL's NVLS does."""
    ranks, chunk = (grid.ravel() for grid in np.meshgrid(np.arange(world), np.arange(world)))
    own = np.arange(world)
    steps = (
        Step.of(ranks, world, chunk, reduce=True),
        Step.of(world, own, own, reduce=False),
        Step.of(own, world, own, reduce=False),
        Step.of(world, ranks, chunk, reduce=False),
    )
    return Schedule("nvls", Collective("all_reduce", world), world, steps, ("host0.nvswitch",))


def machine(efficiency: float) -> cluster.Cluster:
    """One DGX H100 whose links reach a part of their nominal rate."""
    return cluster.load(f"single:server=dgx-h100,server.nvlink={WIRE * efficiency}B/s")


def seconds(schedule: Schedule, efficiency: float, nbytes: int, overhead_s: float) -> float:
    """Simulated time; the overhead is that of every step at the rank."""
    return simulate_schedule(schedule, machine(efficiency), nbytes, settings=Settings(overhead_s=overhead_s)).seconds


def report() -> str:
    """The fit, and what it says of 2 to 8 GPUs."""
    ring_rate = RING_BUSBW / WIRE
    # NVLS has S + S/n cross every link, so busbw = wire x 2 (n - 1) / (n + 1), and at 8 GPUs the wire reaches this:
    nvls_rate = NVLS_BUSBW / (2 * 7 / 9) / WIRE
    ring8, nvls8 = algorithms.get("ring")(Collective("all_reduce", 8)), nvls(8)
    # Least squares of the relative error in the one unknown, which time is linear in.
    ring_s = _overhead(ring8, ring_rate, RING_POINTS)
    nvls_s = _overhead(nvls8, nvls_rate, NVLS_POINTS)
    rows = []
    for world in range(2, 9):
        ring, pulled = algorithms.get("ring")(Collective("all_reduce", world)), nvls(world)
        factor = 2 * (world - 1) / world
        row = [str(world)]
        large = 2**33
        for schedule, rate, overhead_s in ((ring, ring_rate, ring_s), (pulled, nvls_rate, nvls_s)):
            row.append(f"{large / seconds(schedule, rate, large, overhead_s) * factor / 1e9:.0f}")
        better = (
            "NVLS"
            if float(row[2]) > float(row[1]) * 1.02
            else "ring"
            if float(row[1]) > float(row[2]) * 1.02
            else "equal"
        )
        crossing = next(
            (
                format_bytes(2**exponent)
                for exponent in range(10, 34)
                if seconds(pulled, nvls_rate, 2**exponent, nvls_s) < seconds(ring, ring_rate, 2**exponent, ring_s)
            ),
            "never",
        )
        rows.append([*row, better, crossing])
    fitted = (
        f"Fitted: the ring reaches {ring_rate:.1%} of the wire and needs {ring_s * 1e6:.1f} us a step; NVLS reaches "
        f"{nvls_rate:.1%} and needs {nvls_s * 1e6:.1f} us for each of its two posts.\n\n"
    )
    return fitted + table(["GPUs", "ring, busbw GB/s", "NVLS, busbw GB/s", "8 GiB", "NVLS is faster from"], rows)


def _overhead(schedule: Schedule, rate: float, points: dict[int, float]) -> float:
    top = bottom = 0.0
    for nbytes, algbw in points.items():
        measured, base = nbytes / algbw, seconds(schedule, rate, nbytes, 0.0)
        slope = (seconds(schedule, rate, nbytes, 1e-6) - base) / 1e-6
        top += slope * (measured - base) / measured**2
        bottom += slope**2 / measured**2
    return top / bottom
