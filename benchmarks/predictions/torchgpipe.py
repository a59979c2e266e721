"""torchgpipe's AmoebaNet-D (18, 256) on 2 to 8 Tesla P40: two constants, fitted on 2 and 4 devices, predict 8.

python benchmarks/predictions/torchgpipe.py

What is published: `benchmarks/amoebanetd-speed` of kakaobrain/torchgpipe, whose code has batches, balances and
recomputation of each row. The source had been read before 2026-11-23: this is not blind.
"""

import math
from typing import NamedTuple

import numpy as np
from plots import table
from scipy.optimize import least_squares
from scipy.stats import t as student

from hocket.schedule.pipeline import NAMED_ORDERS
from hocket.simulate import StageWork, simulate_order


class Row(NamedTuple):
    """A published row."""

    micro_batches: int
    batch: int  # samples
    layers: tuple[int, ...]  # of each device
    rate: float  # samples/s


ROWS = (
    Row(1, 96, (7, 17), 26.733),
    Row(4, 256, (9, 15), 41.133),
    Row(32, 1280, (9, 15), 47.386),
    Row(1, 160, (3, 4, 5, 12), 26.827),
    Row(4, 360, (3, 6, 7, 8), 44.543),
    Row(32, 1152, (3, 6, 7, 8), 72.412),
    Row(1, 196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918),
    Row(4, 480, (2, 2, 2, 3, 3, 4, 4, 4), 70.065),
    Row(32, 1280, (2, 2, 2, 3, 3, 4, 4, 4), 132.413),
)
FITTED = ROWS[:6]


def rate(row: Row, sample_s: float, shrink: float) -> float:
    """Return samples/s.

    Args:
        row: Whose batch, devices and layers.
        sample_s: Seconds of a sample's forward and backward pass on one device.
        shrink: What a cell takes of the time of one before the next reduction, which halves height and width and
            doubles the channels. The network has a stem of three layers and three groups of six cells, a reduction
            between them, and a classifier, which takes nothing.
    """
    cells = np.repeat([1.0, shrink, shrink**2, 0.0], [9, 7, 7, 1])
    each = np.split(cells / cells.sum() * sample_s * row.batch / row.micro_batches, np.cumsum(row.layers)[:-1])
    # A third is the forward pass, which is done again but for the last of several micro-batches.
    again = 1.0 if row.micro_batches == 1 else 1 - 1 / row.micro_batches
    works = [StageWork(part.sum() / 3, part.sum() * (2 + again) / 3) for part in each]
    order = NAMED_ORDERS["gpipe"].build(len(row.layers), 1, row.micro_batches)
    return row.batch / simulate_order(order, works).seconds


def fit() -> tuple[float, float, float]:
    """Return both constants, and the factor between a prediction and an end of its 80% interval (Student's t)."""

    def errors(logs: np.ndarray) -> list[float]:
        return [math.log(rate(row, *np.exp(logs)) / row.rate) for row in FITTED]

    found = least_squares(errors, np.log([0.03, 0.8]))
    free = len(FITTED) - 2
    spread = math.sqrt(float(np.square(found.fun).sum()) / free) * float(student.ppf(0.9, free))
    sample_s, shrink = np.exp(found.x)
    return float(sample_s), float(shrink), math.exp(spread)


def report() -> str:
    """The table, and what was fitted."""
    sample_s, shrink, times = fit()
    rows = []
    for row in ROWS:
        found = rate(row, sample_s, shrink)
        inside = "fitted" if row in FITTED else "yes" if 1 / times <= found / row.rate <= times else "no"
        what = (
            f"{row.rate:.1f} | {found:.1f} | {found / times:.1f} to {found * times:.1f} | {found / row.rate - 1:+.1%}"
        )
        rows.append([str(len(row.layers)), str(row.micro_batches), *what.split(" | "), inside])
    head = ["devices", "micro-batches", "published samples/s", "predicted", "80% within", "error", "inside"]
    said = (
        f"a sample takes {sample_s * 1e3:.1f} ms on one device, a cell behind a reduction {shrink:.0%} of one before it"
    )
    return f"{table(head, rows)}\n\nFitted: {said}."


if __name__ == "__main__":
    print(report())
