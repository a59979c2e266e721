"""`hocket predict`: throughput, efficiency and cost by workers, what-ifs, and where it stops scaling."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._optimizers import OptimizerName
from ._output import RANKS, Json, bad_input, check_place, print_json, write_file
from ._question import MOST_SAMPLES, Constant, Device, Target, ask, show_assumptions

if TYPE_CHECKING:
    from hocket.planner import Curve, ScalingFit


def predict(
    target: Target,
    cluster: Annotated[str, typer.Option(help="A name, a spec (star:hosts=8) or a .toml file.")],
    workers: Annotated[str, typer.Option(*RANKS, help="Numbers of ranks: 1,2,4,8.")] = "1,2,4,8",
    what_if: Annotated[str, typer.Option(help="sharp, bigraph, double-network, fp16; several with commas.")] = "",
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_SAMPLES, help="Samples of each worker; the workload's own if not given."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan's file; data parallelism if not given.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of matrix products, instead of the plan's: fp8 beside bfloat16 (planned only).")
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="A CSV of workers and throughput, to be fitted.")] = None,
    rounding: Annotated[float, typer.Option(min=0, help="Half a unit of the last digit of what was measured.")] = 0.0,
    fit_up_to: Annotated[
        int | None, typer.Option(help="Fit only measurements of so many workers, judge the rest.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, max=1e12, help="Of a worker's hour, for the cost.")] = None,
    device: Device = None,
    optimizer: OptimizerName = None,
    constant: Constant = None,
    svg: Annotated[Path | None, typer.Option(help="Write a plot into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Predict throughput, efficiency and cost by workers, and what another network would do."""
    from hocket.cluster import load
    from hocket.planner import LEVEL, Network, Plan, curve_of_fit, curves_svg, fit_scaling, scaling_curves
    from hocket.planner import predict as predict_plan

    fits: dict[str, ScalingFit] = {}
    columns: dict[str, dict[int, float]] = {}
    unit = "samples"
    taken: list[dict[str, str]] = []
    check_place("predict", svg, "--svg ")
    try:
        counts = _numbers(workers)
        what_ifs = [word for word in what_if.split(",") if word]
        where = load(cluster)
        how: dict[str, Any] = {"precision": precision, "device": device, "optimizer": optimizer, "constant": constant}
        plain = {"plan": plan, "batch": batch, **how}
        fitting = {"rounding": rounding or None, "fit-up-to": fit_up_to}
        _refuse_unused(plain if measured is not None else fitting, "without" if measured is None else "with")
        if measured is not None:
            columns = _read(measured)
            known = {
                name: {n: rate for n, rate in column.items() if fit_up_to is None or n <= fit_up_to}
                for name, column in columns.items()
            }
            network = Network.of(where)
            fits = fit_scaling(known, network.local, rounding=rounding)
            curves = [
                curve_of_fit(name, fit, network, counts, changed)
                for name, fit in fits.items()
                for changed in ("", *what_ifs)
            ]
            taken = _taken(fits, network.local, measured)
        else:
            most = max(counts)
            given = None if plan is None else Plan.from_toml(plan)
            asked = ask(target, where, most, plan=given, **how)
            workload, constants = asked.workload, asked.constants
            unit = f"{workload.unit}s"
            each = batch or workload.batch
            more: dict[str, Any] = {"plan": asked.plan, "what_ifs": what_ifs, "constants": constants}
            curves = scaling_curves(workload, where, counts, batch_per_worker=each, **more)
            largest = predict_plan(asked.plan, workload, where, workers=most, batch=each * most, constants=constants)
            taken = asked.assumed(largest)
        if svg is not None:
            title = f"{target} on {where.name}"
            write_file("predict", svg, curves_svg(curves, title=title, unit=unit, measured=columns), "--svg ")
    except ValueError as error:
        bad_input("predict", error)
    if as_json:
        print_json({"target": target, "cluster": where.name, "fits": {n: _fit(f) for n, f in fits.items()},
                    "level": LEVEL, "assumptions": taken}
                   | {"curves": [_curve(one, columns, price) for one in curves]})  # fmt: skip
        return
    for name, fit in fits.items():
        typer.echo(f"{name}, fitted: " + "; ".join(f"{label} {value}" for label, value in fit.table()))
    for one in curves:
        typer.echo("")
        _show(one, columns.get(one.name, {}), unit, price)
    typer.echo("")
    for one in curves:
        typer.echo(one.verdict())
    if taken:
        typer.echo("")
        show_assumptions(taken)
    if svg is not None:
        typer.echo(f"wrote {svg}")


def _refuse_unused(options: dict[str, Any], what: str) -> None:
    """Raise ValueError for an option that would change nothing."""
    if given := next((name for name, value in options.items() if value not in (None, [])), None):
        raise ValueError(f"--{given} changes nothing {what} --measured; leave it out")


def _taken(fits: "dict[str, ScalingFit]", local: int, file: Path) -> list[dict[str, str]]:
    """Return what the curves of fits rest on."""
    rows = [("ranks of a host", str(local), "given"), ("points", f"of {file.name}", "measured")]
    for name, fit in fits.items():
        rows += fit.assumptions(name)
    rows.append(("batch", "a worker's, its program and its precision are those of the points", "assumed"))
    return [dict(zip(("what", "value", "basis"), row, strict=True)) for row in rows]


def _fit(one: "ScalingFit") -> dict[str, float | None]:
    """Return the constants; None for what was not measured, which JSON has no number for."""
    return {name: None if math.isnan(value) else value for name, value in vars(one).items()}


def _numbers(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"-n {text}: write numbers of ranks, as 1,2,4") from None
    if min(found) < 1:
        raise ValueError(f"-n {min(found)}: give 1 rank or more")
    return found


def _read(path: Path) -> dict[str, dict[int, float]]:
    """Return the columns of a CSV whose first column is the number of workers; cells may be empty."""
    import csv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row and not row[0].startswith("#")]
    except OSError as error:
        raise ValueError(f"--measured {str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--measured {path} is no CSV: {error}") from None
    if len(rows) < 2 or len(rows[0]) < 2:
        raise ValueError(f"{path}: wants a line of names (workers,images_per_s) and lines of numbers")
    names = [name.strip() for name in rows[0][1:]]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{path}: two columns are named {twice!r}; give them names of their own")
    columns: dict[str, dict[int, float]] = {name: {} for name in names}
    for number, row in enumerate(rows[1:], 2):
        where = f"{path}, line {number}: {','.join(row)!r}"
        if len(row) > len(rows[0]):
            raise ValueError(f"{where} has {len(row)} cells, and there are {len(rows[0])} names")
        for name, cell in zip(columns, row[1:], strict=False):
            try:
                workers, rate = int(row[0]), float(cell.strip() or "nan")
            except ValueError:
                raise ValueError(f"{where} are no numbers") from None
            if workers in columns[name]:
                raise ValueError(f"{where} says {name} of {workers} workers again; say it once")
            if cell.strip():
                columns[name][workers] = rate
    return columns


def _show(curve: "Curve", said: dict[int, float], unit: str, price: float | None) -> None:
    typer.echo(curve.name)
    cost = "cost per 1,000" if price is not None else "worker-s per 1,000"
    head = f"{'workers':>9} {unit + '/s':>14} {'80% within':>19} {'efficiency':>11} {cost:>19}"
    with_mfu = any(point.mfu for point in curve.points)
    head += f" {'TFLOP/s':>8} {'MFU':>6}" if with_mfu else ""
    typer.echo(head + ("  measured" if said else "") + "  lost to")
    for point in curve.points:
        spent = _number(point.worker_seconds * (price / 3600 if price is not None else 1))
        within = " to ".join(_number(rate) for rate in point.interval)
        rate = _number(point.throughput)
        row = f"{point.workers:>9} {rate:>14} {within:>19} {point.efficiency:>11.1%} {spent:>19}"
        row += f" {point.flops_per_worker / 1e12:>8.4g} {point.mfu:>6.1%}" if with_mfu else ""
        if said:
            told = said.get(point.workers)
            row += f"  {told:g} ({point.throughput / told - 1:+.1%})" if told else "  -"
        blame = point.blame if point.blame and point.efficiency < 0.9999 else "-"
        typer.echo(row + f"  {blame}" + ("" if point.fits else "; does not fit in memory"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _curve(curve: "Curve", columns: dict[str, dict[int, float]], price: float | None) -> dict[str, Any]:
    end = curve.stops
    return {
        "name": curve.name,
        "stops_at": end.workers if end else None,
        "verdict": curve.verdict(),
        "measured": columns.get(curve.name, {}),
        "points": [
            {
                "workers": point.workers,
                "samples_per_s": point.throughput,
                "interval_samples_per_s": point.interval,
                "flops_per_s_per_worker": point.flops_per_worker,
                "mfu": point.mfu,
                "mfu_format": point.mfu_format,
                "efficiency": point.efficiency,
                "worker_s_per_1000": point.worker_seconds,
                "cost_per_1000": None if price is None else point.worker_seconds * price / 3600,
                "parts_s": dict(point.parts),
                "blame": point.blame,
                "fits": point.fits,
            }
            for point in curve.points
        ],
    }
