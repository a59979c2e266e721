"""Constants of a cluster, fitted to a measured sweep of a collective: nccl-tests' output, or bytes and times."""

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

from ._constants import Constants
from ._findings import PlanError
from ._network import Network

_LEAST = 3  # sizes


def read_sweep(text: str) -> dict[int, float]:
    """Return seconds by bytes.

    Args:
        text: nccl-tests' output (its first column is bytes, the sixth the microseconds out of place), or lines "bytes,
            microseconds"; other lines are passed over.

    Raises:
        PlanError: fewer than three sizes are in it.
    """
    found: dict[int, float] = {}
    for line in text.splitlines():
        words = re.split(r"[,\s]+", line.strip())
        numbers = words[:1] + (words[5:6] if len(words) >= 8 else words[1:2])
        try:
            nbytes, microseconds = int(numbers[0]), float(numbers[1])
        except (ValueError, IndexError):
            continue
        if nbytes > 0 and microseconds > 0:
            found[nbytes] = microseconds * 1e-6
    if len(found) < _LEAST:
        raise PlanError(
            f"{len(found)} sizes were read; give lines of bytes,microseconds or nccl-tests' output, 3 or more"
        )
    return found


def fit_sweep(sweep: Mapping[int, float], network: Network, *, kind: str, ranks: int) -> tuple[Constants, float]:
    """Return what the links reach and what starting a collective costs, and the median error of the fit.

    Least squares of the logarithm of time; two constants: the share of the links that the group is bound by (inside a
    host, or between hosts), and `collective_s`.

    Args:
        sweep: Seconds by bytes, as `read_sweep` gives.
        network: Where it was measured.
        kind: Of the collective, as "all_reduce".
        ranks: How many took part, the first of the cluster.

    Raises:
        PlanError: the cluster has not so many ranks.
    """
    from scipy.optimize import least_squares

    if not 2 <= ranks <= network.world:
        raise PlanError(f"{network.name} has {network.world} ranks, and {ranks} were measured; give 2 or more of them")
    wires = network.first(ranks)
    share = "inside_share" if ranks <= wires.local else "network_share"
    known = Constants.of(network.reached)

    def made(values: list[float]) -> Constants:
        changed: dict[str, Any] = {share: min(1.0, math.exp(values[0])), "collective_s": math.exp(values[1])}
        return dataclasses.replace(known, **changed)

    def residuals(values: list[float]) -> list[float]:
        constants = made(values)
        times = (wires.collective(kind, float(nbytes), ranks, 1, constants).seconds for nbytes in sweep)
        return [math.log(time / measured) for time, measured in zip(times, sweep.values(), strict=True)]

    begin = [math.log(0.7), math.log(max(1e-7, 0.5 * min(sweep.values())))]
    best = least_squares(residuals, begin, bounds=([math.log(0.01), math.log(1e-9)], [0.0, math.log(1.0)]))
    found = dataclasses.replace(made(best.x.tolist()), basis="fitted", fitted_workers=ranks)
    return found, statistics.median(abs(one) for one in residuals(best.x.tolist()))
