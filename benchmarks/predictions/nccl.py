"""nccl-tests sweeps: constants fitted on five sizes predict the rest of the curve.

NCCL has three protocols. LL puts a flag beside every word: little latency, a rate far below the links'. LL128 does so
for 128 bytes, 120 of which are data. Simple has the most latency and the full rate; it passes the ring in pieces of
which the next rank needs a whole one to begin: the smaller they are, the less it waits, and the more often each costs
its latency. With the best size of pieces that adds a term in the root of the message.

    LL      up to 1 MiB       launch + 15.0 us + S / ll
    LL128   up to a size      launch + 40.6 us + S / (120/128 rate)
    Simple  beyond            launch + 56.0 us + S / rate + pipeline sqrt(S / rate)

The latencies are those of NCCL's own model (facts, algorithms 6): a ring's base, and 14 hops over NVLink. That LL is
taken up to 1 MiB on eight GPUs is published (facts, algorithms 2.9). Fitted are the launch, both rates, the pipeline's
factor, and from which size on Simple is taken: on the A100 16 MiB take more than twice as long as 8 MiB, which no
single protocol would do.
"""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plots import table

KIB, MIB, GIB = 2**10, 2**20, 2**30
# NCCL's tuning model, microseconds: base of a ring, and one hop over NVLink.
_LATENCY = {"LL": (6.6, 0.6), "LL128": (14.0, 1.9), "Simple": (8.4, 3.4)}
_LL128, _LL_UP_TO = 120 / 128, MIB

# 8 x A100, NVSwitch, microseconds (facts, section 4).
A100 = {
    32 * KIB: 43.83, 64 * KIB: 46.80, 128 * KIB: 51.76, 256 * KIB: 61.38, 512 * KIB: 80.40,
    MIB: 101.9, 2 * MIB: 101.4, 4 * MIB: 101.5, 8 * MIB: 133.5, 16 * MIB: 276.6, 32 * MIB: 424.0, 64 * MIB: 684.6,
    128 * MIB: 1327.6, 256 * MIB: 2420.6, 512 * MIB: 4218.4, GIB: 8203.9, 2 * GIB: 16240.0, 4 * GIB: 32136.0,
    8 * GIB: 64074.0, 16 * GIB: 127997.0,
}  # fmt: skip
A100_FITTED = (512 * KIB, 8 * MIB, 16 * MIB, 128 * MIB, 4 * GIB)
# 8 x B200, busbw in GB/s (facts, section 4).
_B200 = {
    256 * KIB: 9.54, 512 * KIB: 18.71, MIB: 36.06, 2 * MIB: 63.09, 4 * MIB: 76.48, 8 * MIB: 126.49, 16 * MIB: 254.96,
    32 * MIB: 325.97, 64 * MIB: 400.60, 128 * MIB: 568.38, 256 * MIB: 646.11, 512 * MIB: 688.99, GIB: 723.34,
    2 * GIB: 734.97, 4 * GIB: 740.64, 8 * GIB: 839.07, 16 * GIB: 845.67,
}  # fmt: skip
B200 = {size: size * 2 * 7 / 8 / (rate * 1e9) * 1e6 for size, rate in _B200.items()}
B200_FITTED = (512 * KIB, 8 * MIB, 16 * MIB, 128 * MIB, 4 * GIB)
# 8 x H200, algbw in GB/s: calibration points; the rest of its curve is not in the facts.
H200 = {size: size / (rate * 1e9) * 1e6 for size, rate in
        {64 * KIB: 1.67, MIB: 22.82, 16 * MIB: 125.65, 256 * MIB: 249.23, 16 * GIB: 275.58}.items()}  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """What was fitted.

    Attributes:
        launch_us: Of the kernel, both protocols.
        ll_GBps: algbw of LL.
        rate_GBps: algbw of Simple, large messages.
        pipeline: The factor of the root, in root microseconds.
        simple_from: Bytes from which on Simple is taken.
        ranks: Around the ring.
    """

    launch_us: float
    ll_GBps: float
    rate_GBps: float
    pipeline: float
    simple_from: int
    ranks: int = 8

    def microseconds(self, nbytes: float) -> float:
        """Time of an all-reduce."""
        hops = 2 * (self.ranks - 1)
        ll, ll128, simple = (self.launch_us + base + hops * hop for base, hop in _LATENCY.values())
        wire = nbytes / (self.rate_GBps * 1e3)
        if nbytes <= _LL_UP_TO:
            return ll + nbytes / (self.ll_GBps * 1e3)
        if nbytes < self.simple_from:
            return ll128 + wire / _LL128
        return simple + wire + self.pipeline * math.sqrt(wire)


def fit(points: Mapping[int, float]) -> Sweep:
    """Least squares of the logarithm of time, for every size from which Simple may be taken; the best is kept."""
    from scipy.optimize import least_squares

    top = max(size / time / 1e3 for size, time in points.items())
    tries = []
    for simple_from in (size for size in points if size > _LL_UP_TO):

        def residuals(given: list[float], simple_from: int = simple_from) -> list[float]:
            found = Sweep(*(math.exp(one) for one in given), simple_from)
            return [math.log(found.microseconds(size) / time) for size, time in points.items()]

        for launch, ll in ((10, top / 8), (30, top / 15)):
            start = [math.log(one) for one in (launch, ll, top, 1.0)]
            found = least_squares(residuals, start)
            tries.append((found.cost, Sweep(*(math.exp(one) for one in found.x), simple_from)))
    return min(tries, key=lambda pair: pair[0])[1]


def errors(points: Mapping[int, float], fitted: tuple[int, ...]) -> dict[int, float]:
    """Of all sizes the error of the prediction from the fitted ones."""
    found = fit({size: points[size] for size in fitted})
    return {size: found.microseconds(size) / time - 1 for size, time in points.items()}


def spread(size: int, fitted: Collection[int]) -> float:
    """Return the factor between a prediction and either end of its 80% interval: less sure far from fitted sizes."""
    doublings = min(abs(math.log2(size / one)) for one in fitted)
    return math.exp(1.2816 * (0.03 + 0.04 * doublings))


def judged(found: Mapping[int, float], fitted: tuple[int, ...]) -> tuple[float, float]:
    """Median and worst error of the sizes that were not fitted."""
    sizes = [abs(error) for size, error in found.items() if size not in fitted]
    return statistics.median(sizes), max(sizes)


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // KIB} KiB"


def report() -> str:
    """Tables of the three machines."""
    parts = []
    for name, points, fitted in (("8 x A100", A100, A100_FITTED), ("8 x B200", B200, B200_FITTED)):
        sweep, found = fit({size: points[size] for size in fitted}), errors(points, fitted)
        median, worst = judged(found, fitted)
        rows = [
            [
                _size(size),
                f"{time:.1f}",
                f"{sweep.microseconds(size):.1f}",
                " to ".join(
                    f"{sweep.microseconds(size) * way:.1f}" for way in (1 / spread(size, fitted), spread(size, fitted))
                ),
                f"{found[size]:+.1%}",
                "*" * (size in fitted),
            ]
            for size, time in points.items()
        ]
        parts.append(
            table([name, "measured us", "predicted us", "80% within", "error", "fitted"], rows) + "\n\n" + _said(sweep)
        )
        parts.append(f"Of the sizes that were not fitted: median {median:.1%}, worst {worst:.1%}.")
    sweep = fit(H200)
    rows = []
    for size in (64 * KIB * 2**k for k in range(19)):
        time, times = sweep.microseconds(size), spread(size, H200)
        rows.append([_size(size), f"{time:.1f}", f"{time / times:.1f} to {time * times:.1f}", "*" * (size in H200)])
    parts.append(table(["8 x H200", "predicted us", "80% within", "fitted"], rows) + "\n\n" + _said(sweep))
    parts.append(_four_hosts())
    return "\n\n".join(parts)


def four_hosts(nbytes: float, sweep: Sweep) -> float:
    """Microseconds on 4 hosts of 8 B200 with 8 x 50 GB/s: both levels of a hierarchical all-reduce, overlapped in part.

    Reduce-scatter and all-gather inside take what the host's own all-reduce does; each device's shard is reduced among
    4 hosts at 90% of its port. Pipelined, the longer of both hides `HIDDEN` of the shorter one (fitted on 1 GiB).
    """
    inside = sweep.microseconds(nbytes)
    between = 2 * (4 - 1) * 20 + 2 * (4 - 1) / 4 * nbytes / 8 / (50e3 * 0.9)
    return max(inside, between) + (1 - HIDDEN) * min(inside, between)


HIDDEN = 0.56
# busbw GB/s; 4 GiB take 22.05 ms (facts, section 4 and algorithms 2.6: ml-engineering).
FOUR_HOSTS = {GIB: 361.99, 4 * GIB: 4 * GIB * 2 * 31 / 32 / 22.05e-3 / 1e9}


def four_hosts_spread(nbytes: float) -> float:
    """Return the factor between a prediction and either end of its 80% interval."""
    return math.exp(1.2816 * (0.08 + 0.04 * abs(math.log2(nbytes / GIB))))


def _four_hosts() -> str:
    sweep = fit({size: B200[size] for size in B200_FITTED})
    rows = []
    for size in (16 * MIB * 2**k for k in range(11)):
        time, times = four_hosts(size, sweep), four_hosts_spread(size)
        busbw = size * 2 * 31 / 32 / time / 1e3
        interval = f"{busbw / times:.0f} to {busbw * times:.0f}"
        rows.append(
            [
                _size(size),
                f"{time:.0f}",
                f"{busbw:.0f}",
                interval,
                f"{FOUR_HOSTS[size]:.0f}" if size in FOUR_HOSTS else "",
            ]
        )
    head = ["4 x 8 B200", "predicted us", "busbw GB/s", "80% within", "measured GB/s"]
    return table(head, rows)


def _said(sweep: Sweep) -> str:
    return (
        f"Fitted: launch {sweep.launch_us:.1f} us, LL {sweep.ll_GBps:.1f} GB/s, large messages {sweep.rate_GBps:.1f} "
        f"GB/s (algbw), pipeline {sweep.pipeline:.2f} root us, Simple from {_size(sweep.simple_from)} on."
    )


if __name__ == "__main__":
    print(report())
