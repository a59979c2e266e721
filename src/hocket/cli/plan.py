"""`hocket plan`: the fastest plan for a model on so many workers, why it is, and what comes second."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hocket._ends import with_end

from ._optimizers import OptimizerName, undivided
from ._output import RANKS, Json, bad_input, check_place, print_json, print_paragraph, print_table, write_file
from ._question import MOST_SAMPLES, Constant, Device, Target, ask, show_assumptions

if TYPE_CHECKING:
    from hocket.planner import Prediction, Search
    from hocket.workload import DividedShare, Workload


def plan(
    target: Target,
    workers: Annotated[int, typer.Option(*RANKS, min=1, help="How many ranks.")],
    cluster: Annotated[str, typer.Option(help="A name, a spec (star:hosts=8) or a .toml file.")] = "laptop",
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST_SAMPLES, help="Samples of a global batch; one a worker if not given.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of each worker, as 40GiB; the cluster's own if not given.")
    ] = None,
    tensor: Annotated[
        int | None, typer.Option("--tensor-parallel-degree", "--tensor", min=1, help="Fix the tensor-parallel degree.")
    ] = None,
    pipeline: Annotated[
        int | None,
        typer.Option("--pipeline-parallel-degree", "--pipeline", min=1, help="Fix the pipeline-parallel degree."),
    ] = None,
    data: Annotated[
        int | None, typer.Option("--data-parallel-degree", "--data", min=1, help="Fix the data-parallel degree.")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="Fix it: none, optimizer, gradients, parameters.")] = None,
    shard_degree: Annotated[
        int | None, typer.Option(min=0, help="Fix among how many neighbours parameters are sharded (HSDP); 0 for all.")
    ] = None,
    recompute: Annotated[bool | None, typer.Option("--recompute/--no-recompute", help="Fix recomputation.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Fix the pipeline's micro-batches.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of matrix products: the workload's own, or fp8 beside bfloat16 (planned only).")
    ] = None,
    given: Annotated[Path | None, typer.Option("--plan", help="Judge this plan's file instead of searching.")] = None,
    device: Device = None,
    optimizer: OptimizerName = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the plan into this file.")] = None,
    workload_out: Annotated[Path | None, typer.Option(help="Write the workload's text into this file.")] = None,
    constant: Constant = None,
    keep: Annotated[int, typer.Option(min=1, help="How many plans to rank.")] = 8,
    as_json: Json = False,
) -> None:
    """Choose how to train a model on many workers: the fastest plan that fits, why, and what comes second."""
    from hocket.cluster import load
    from hocket.planner import Plan, explain, plan_rows, predict, search, with_reasons
    from hocket.units import parse_bytes

    wanted = {
        "tensor_parallel_degree": tensor,
        "pipeline_parallel_degree": pipeline,
        "data_parallel_degree": data,
        "shard": shard,
        "shard_degree": shard_degree,
        "recompute": recompute,
        "micro_batches": micro_batches,
        "precision": precision,
    }
    fixed: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    if given is not None and (said := [name for name in fixed if name != "precision"] + ["out"] * (out is not None)):
        flags = ", ".join(f"--{name.removesuffix('_parallel_degree').replace('_', '-')}" for name in said)
        bad_input("plan", f"{flags}: --plan judges the plan of a file as it is; change the file, or leave --plan out")
    check_place("plan", out, "--out ")
    check_place("plan", workload_out, "--workload-out ")
    try:
        limit = parse_bytes(memory) if memory is not None else None
        where = load(cluster)
        judged = None if given is None else Plan.from_toml(given)
        asked = ask(
            target, where, workers, device=device, plan=judged, precision=precision, constant=constant,
            optimizer=optimizer, degrees=_degrees(workers, tensor if judged is None else judged.tensor_parallel_degree),
        )  # fmt: skip
        workload = asked.workload
        for name, value in (undivided(optimizer) if optimizer is not None else {}).items():
            if (fixed.setdefault(name, value) if judged is None else getattr(judged, name)) != value:
                rule = f"{optimizer} needs whole parameters, which neither shards nor divided tensors are"
                bad_input("plan", f"--optimizer {rule}; take {name} = {value}")
        if workload_out is not None:
            write_file("plan", workload_out, with_end(str(workload)), "--workload-out ")
        more: dict[str, Any] = {"workers": workers, "batch": batch or workers, "memory_limit": limit}
        more["constants"] = asked.constants
        if given is not None:
            one = predict(asked.plan, workload, where, **more)
            _judge(one, workload, asked.assumed(one), as_json)
            return
        found = search(workload, where, **more, fixed=fixed, keep=keep)
        taken = asked.assumed(found.best)
        chosen = with_reasons(found)
        if out is not None:
            write_file("plan", out, with_end(chosen.to_toml()), "--out ")
    except ValueError as error:
        bad_input("plan", error)
    if as_json:
        print_json(_as_json(found, workload, taken, chosen.to_json()))
        return
    print_paragraph(explain(found))
    typer.echo("")
    print_table(plan_rows(found))
    typer.echo("")
    _parts(found.best, workload, taken)
    if out is not None and chosen.precision == "float8":
        typer.echo(f"\nwrote {out}; nothing carries out products in float8 yet")
    elif out is not None:
        typer.echo(f"\nwrote {out}; `hocket run --plan {out}` or Trainer(plan={str(out)!r}) carries it out")
    else:
        typer.echo("\n" + chosen.to_toml().rstrip())


def _degrees(workers: int, tensor: int | None) -> list[int]:
    """Return the numbers of workers that may divide a captured model's tensors: those of a host, and the asked one."""
    return [degree for degree in range(2, 9) if workers % degree == 0 or degree in (2, 4, 8)] + [tensor or 1]


def _judge(one: Prediction, workload: Workload, taken: list[dict[str, str]], as_json: bool) -> None:
    from hocket.units import format_bytes

    if as_json:
        print_json(_facts(one) | _row(one, workload) | {"assumptions": taken})
    else:
        typer.echo(f"{one.plan.describe()} on {one.workers} workers of {one.cluster}, batch {one.batch}")
        _parts(one, workload, taken)
        if not one.fits:
            typer.echo(f"it does not fit: a worker has {format_bytes(one.memory_limit, 3)}")
    if not one.fits:
        raise SystemExit(1)


def _parts(one: Prediction, workload: Workload, taken: list[dict[str, str]]) -> None:
    from hocket.planner import LEVEL
    from hocket.units import format_bytes

    for name, seconds in one.parts.rows():
        if seconds:
            typer.echo(f"  {name:12} {seconds * 1e3:12.3f} ms {seconds / one.step_s:7.1%}")
    typer.echo(f"  {'step':12} {one.step_s * 1e3:12.3f} ms   {one.throughput:.4g} samples/s")
    low, high = one.interval_s
    typer.echo(f"  {f'{LEVEL:.0%} within':12} {low * 1e3:12.3f} ms to {high * 1e3:.3f} ms")
    if one.flops:
        peak = f", {one.mfu:.1%} of the device's {one.mfu_format} peak" if one.mfu else ""
        typer.echo(f"  model FLOPs  {one.flops_per_worker / 1e12:12.4g} TFLOP/s a device{peak}")
    kinds = ", ".join(f"{kind} {format_bytes(nbytes, 3)}" for kind, nbytes in one.memory.rows() if nbytes)
    typer.echo(f"  memory of the fullest worker: {kinds}")
    if (share := _divided(one, workload)) is not None:
        typer.echo(f"  tensor parallelism {share}")
    show_assumptions(taken)


def _divided(one: Prediction, workload: Workload) -> DividedShare | None:
    """Return how much of a model the plan's tensor parallelism divides; None where it has none."""
    degree = one.plan.tensor_parallel_degree
    return workload.divided(degree, sequence=one.plan.sequence_parallel) if degree > 1 else None


def _facts(one: Prediction) -> dict[str, Any]:
    names = ("workload", "cluster", "workers", "batch", "memory_limit")
    return {name: getattr(one, name) for name in names}


def _row(one: Prediction, workload: Workload) -> dict[str, Any]:
    from hocket.planner import LEVEL

    return {
        "plan": one.plan.to_json(),
        "describe": one.plan.describe(),
        "step_s": one.step_s,
        "samples_per_s": one.throughput,
        "interval": {"level": LEVEL, "step_s": one.interval_s, "samples_per_s": one.throughput_interval},
        "flops_per_s_per_worker": one.flops_per_worker,
        "mfu": one.mfu,
        "mfu_format": one.mfu_format,
        "number_formats": dict(one.number_formats),
        "parts_s": dict(one.parts.rows()),
        "exposed_s": one.parts.exposed,
        "idle_share": one.parts.idle_share,
        "memory_bytes": dict(one.memory.rows()),
        "fits": one.fits,
        "divided": None if (share := _divided(one, workload)) is None else dataclasses.asdict(share),
    }


def _as_json(found: Search, workload: Workload, taken: list[dict[str, str]], chosen: dict[str, Any]) -> dict[str, Any]:
    from hocket.planner import explain, plan_rows

    rows = dict(zip(map(id, [found.best, *found.others, *found.too_large]), plan_rows(found), strict=True))

    def row(one: Prediction) -> dict[str, Any]:
        return _row(one, workload) | {"describe": rows[id(one)]["plan"], "why_not": rows[id(one)]["why not"]}

    return {
        **_facts(found.best),
        "considered": found.considered,
        "timed": found.timed,
        "chosen": chosen,
        "explanation": explain(found),
        "assumptions": taken,
        "ranked": [row(one) for one in found.ranked],
        "too_large": [row(one) for one in found.too_large],
    }
