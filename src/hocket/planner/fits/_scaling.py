"""A few physical constants of a measured scaling curve, and what they say of other numbers of workers.

A step of n workers with g of them on each of k hosts takes, per sample of each worker,

    c (1 + s E(n))  +  i 2 (g - 1)/g  +  w 2 (k - 1)/k (1 + t log2 k)

c: the computation. s: the standard deviation of a rank's computation, as a part of it; E(n): by how many of them the
slowest of n is behind (`slowest_of`). i and w: what passing all gradients once through a host, and once through its
ports, adds to the step, as an all-reduce does 2 (n - 1)/n times; what computation hides is not in them. t is not
fitted: it bends curves beyond the range of a fit, where more hosts' paths meet and a network is tapered (`CONGESTION`).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .._findings import PlanError
from ..network import slowest_of
from ..step import DEVIATIONS

CONGESTION = 0.05
"""t, assumed: what hashed paths cost of a large collective on tapered networks with every doubling of the hosts."""
_SURE, _FARTHER = 0.02, 0.025  # standard deviations: of a fitted point, and for every doubling of workers beyond them
_MOST_OFF = 0.3  # of the points, by which a fit says nothing


@dataclass(frozen=True)
class ScalingFit:
    """What was fitted; seconds are per sample of one worker.

    Attributes:
        local: Workers on each host.
        sample_s: c.
        jitter: s.
        inside_s: i; 0 where a host has one worker.
        between_s: w; not a number where no point has workers on several hosts, so that nothing tells it.
        fitted_workers: The most workers of the points of its column; 0 for none.
        off: By how much its points are off the curve, the root of the mean square of the logarithm.
    """

    local: int
    sample_s: float
    jitter: float
    inside_s: float
    between_s: float
    fitted_workers: int = 0
    off: float = 0.0

    def parts(self, workers: int) -> dict[str, float]:
        """Seconds per sample of each worker, by what takes them."""
        near = min(workers, self.local)
        hosts = max(1.0, workers / self.local)
        if hosts > 1 and math.isnan(self.between_s):
            rule = f"no measured number of workers is above {self.local}, the workers of a host"
            said = f"{workers} workers are on several hosts, and {rule}, so nothing says what is lost between hosts"
            raise PlanError(f"nothing to predict: {said}; measure one that is, or ask for at most {self.local}")
        return {
            "compute": self.sample_s,
            "straggle": self.sample_s * self.jitter * slowest_of(workers),
            "inside hosts": self.inside_s * 2 * (near - 1) / near,
            "between hosts": self.between_s * 2 * (hosts - 1) / hosts * (1 + CONGESTION * math.log2(hosts))
            if hosts > 1
            else 0.0,
        }

    def throughput(self, workers: int) -> float:
        """Return samples per second of all."""
        return workers / sum(self.parts(workers).values())

    def interval(self, workers: int) -> tuple[float, float]:
        """Return samples per second of all, between which they are with 80%: less sure with every doubling.

        Nor is a curve surer than its own points are near it.
        """
        farther = max(0.0, math.log2(workers / max(1, self.fitted_workers)))
        times = math.exp(DEVIATIONS * math.hypot(max(_SURE, self.off), _FARTHER * farther))
        return self.throughput(workers) / times, self.throughput(workers) * times

    def efficiency(self, workers: int) -> float:
        """Throughput by that of so many single workers."""
        return self.throughput(workers) / (workers * self.throughput(1))

    def assumptions(self, name: str) -> list[tuple[str, str, str]]:
        """Return what a curve of such a name rests on: what, its value, and where that is from."""
        rows = [(name, f"up to {self.fitted_workers} workers, whose points are {self.off:.1%} off the curve", "fitted")]
        if not math.isnan(self.between_s):
            slower = f"{CONGESTION:.0%} slower for every doubling of the hosts"
            rows.append((f"{name} between hosts", slower, "assumed"))
        return rows

    def table(self) -> list[tuple[str, str]]:
        """Return the constants with their values."""
        return [
            ("computation, ms per sample", f"{self.sample_s * 1e3:.2f}"),
            ("jitter, of the computation", f"{self.jitter:.1%}"),
            ("inside hosts, ms per sample", f"{self.inside_s * 1e3:.2f}" if self.local > 1 else "one worker a host"),
            (
                "between hosts, ms per sample",
                "not measured" if math.isnan(self.between_s) else f"{self.between_s * 1e3:.2f}",
            ),
        ]


def fit_scaling(
    columns: Mapping[str, Mapping[int, float]], local: int, *, rounding: float = 0.0
) -> dict[str, ScalingFit]:
    """Fit curves that were measured with the same devices: one c for all, three constants for each.

    Args:
        columns: By name, throughput by workers.
        local: Workers on each host.
        rounding: Half a unit of the last digit of what was published; points count by what it leaves uncertain.

    Raises:
        PlanError: there are fewer points than constants, one is none, or no such curve comes near them.
    """
    from scipy.optimize import least_squares

    for name, column in columns.items():
        for n, rate in column.items():
            if n < 1 or not 0 < rate < math.inf:
                said = f"{name}: {rate:g} with {n} workers is no throughput"
                raise PlanError(f"nothing can be fitted: {said}; give finite ones above 0, of 1 worker or more")
    names = list(columns)
    points = [(number, n, rate) for number, name in enumerate(names) for n, rate in columns[name].items()]
    most = {name: max(column, default=0) for name, column in columns.items()}
    wanted = {name: 1 + (local > 1) + (most[name] > local) for name in names}  # constants of a column's own
    for name in names:
        if len(columns[name]) < wanted[name] + (len(names) == 1):
            points_of, own = len(columns[name]), wanted[name]
            rule = f"{name}: {points_of} measured points do not determine a computation and {own} constants"
            raise PlanError(f"nothing can be fitted: {rule}; measure at least four numbers of workers, one of them 1")
    guess = max(n / rate for _, n, rate in points if n == min(n for _, n, _ in points))

    def made(values: list[float], number: int) -> ScalingFit:
        jitter, inside, between = values[1 + 3 * number : 4 + 3 * number]
        reached = most[names[number]]
        between_s = between * guess if reached > local else math.nan
        inside_s = inside * guess if local > 1 else 0.0
        return ScalingFit(local, values[0] * guess, jitter, inside_s, between_s, reached)

    def residuals(values: list[float]) -> list[float]:
        found = []
        for number, n, rate in points:
            error = rate / made(values, number).throughput(n) - 1
            found.append(error / (0.005 + rounding / rate))
        return found

    start = [1.0, *([0.03, 0.02, 0.05] * len(names))]
    best = least_squares(residuals, start, bounds=(0.0, 5.0))
    found = {}
    for number, name in enumerate(names):
        one = made(best.x.tolist(), number)
        off = [math.log(rate / one.throughput(n)) for n, rate in columns[name].items()]
        found[name] = dataclasses.replace(one, off=math.sqrt(math.fsum(each**2 for each in off) / len(off)))
        if found[name].off > _MOST_OFF:
            rule = f"the nearest curve of these constants is off by {math.expm1(found[name].off):.0%}"
            remedy = "throughput that falls, or grows faster than the workers do, is none; look for a wrong row or unit"
            raise PlanError(f"nothing can be fitted: {name}: {rule}: {remedy}")
    return found
