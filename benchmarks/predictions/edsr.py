"""EDSR's published scaling table: fitted on 1 to 16 GPUs, predicted from 32 on (facts, section 1)."""

from plots import table

from hocket.planner import ScalingFit, fit_scaling

# Images per second on Lassen (4 V100 a node); the source rounds to whole numbers.
PUBLISHED = {
    "NCCL": {1: 11, 2: 20, 4: 40, 8: 76, 16: 142, 32: 269, 64: 511},
    "MPI": {1: 11, 2: 21, 4: 41, 8: 75, 16: 126, 32: 242, 64: 490},
    "MPI-Opt": {1: 11, 2: 22, 4: 44, 8: 83, 16: 156, 32: 296, 64: 588},
}
FITTED_UP_TO, LOCAL, ROUNDING = 16, 4, 0.5


def fits() -> dict[str, ScalingFit]:
    """One computation for all columns, three constants for each."""
    given = {name: {n: v for n, v in column.items() if n <= FITTED_UP_TO} for name, column in PUBLISHED.items()}
    return fit_scaling(given, LOCAL, rounding=ROUNDING)


def errors() -> dict[tuple[str, int], float]:
    """Of every published number the error of the prediction."""
    found = fits()
    return {
        (name, n): found[name].throughput(n) / rate - 1
        for name, column in PUBLISHED.items()
        for n, rate in column.items()
    }


def report() -> str:
    """The constants and the table."""
    found = fits()
    head = ["column", *(name for name, _ in next(iter(found.values())).table())]
    constants = table(head, [[name, *(value for _, value in one.table())] for name, one in found.items()])
    rows = []
    for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        row = [str(n)]
        for name, one in found.items():
            rate, said = one.throughput(n), PUBLISHED[name].get(n)
            row.append(f"{said or ''}")
            low, high = one.interval(n)
            error = f"{rate / said - 1:+.1%}" if said else f"{one.efficiency(n):.0%}"
            row.append(f"{rate:.0f} ({error}), {low:.0f} to {high:.0f}")
        rows.append(row)
    head = ["GPUs", *(word for name in found for word in (f"{name}, published", f"{name}, model"))]
    return constants + "\n\n" + table(head, rows)


if __name__ == "__main__":
    print(report())
