"""`hocket schedule`: collective algorithms and orders of pipelines, to read, to verify and to time."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._output import MOST_RANKS, RANKS, Json, bad_input, one_error, print_columns, print_json, write_file

if TYPE_CHECKING:
    from hocket.schedule import Finding, Schedule, StepLoad

    from ._schedules.resolve import Asked

schedule = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_What = Annotated[
    list[str],
    typer.Argument(metavar="SCHEDULE", help="ring, double_tree pieces=4, 1f1b, or a .txt, .json or MSCCL .xml file."),
]
_Stages = Annotated[int | None, typer.Option(min=1, help="Of a pipeline: all stages; by default one a rank.")]
_Micro = Annotated[int | None, typer.Option("--micro-batches", min=1, help="Of a pipeline: of a step; by default 8.")]
_World = Annotated[
    int | None, typer.Option(*RANKS, "--world", min=1, max=MOST_RANKS, help="Ranks; by default the cluster's, or 4.")
]
_Kind = Annotated[str, typer.Option("--collective", help="all_reduce, reduce_scatter, broadcast, ...")]
_Root = Annotated[int, typer.Option(help="Of reduce, broadcast, gather and scatter.")]
_Cluster = Annotated[str | None, typer.Option(help="A name, a spec (bigraph:upper=4,ports=2) or a .toml file.")]


@schedule.command("list", help="The algorithms: what each serves, and what it costs.")
def list_(
    world: Annotated[
        int, typer.Option(*RANKS, "--world", min=1, max=MOST_RANKS, help="Ranks for the numbers shown.")
    ] = 8,
    kind: _Kind = "all_reduce",
    as_json: Json = False,
) -> None:
    """Show every algorithm that serves a collective, with its closed form beside the lower bounds."""
    from hocket.algorithms import algorithms
    from hocket.schedule import Collective, lower_bounds
    from hocket.schedule.pipeline import NAMED_ORDERS

    with one_error("schedule list"):
        collective = Collective(kind, world)
    bound = lower_bounds(collective)
    rows: list[dict[str, Any]] = []
    for one in algorithms():
        reason = one.serves(collective)
        row: dict[str, Any] = {"name": one.name, "title": one.title, "source": one.source, "why_not": reason}
        if reason is None:
            form = one.form(collective)
            row |= {"steps": form.steps, "sent": float(form.sent)}
        rows.append(row)
    if as_json:
        document = {"collective": kind, "world": world, "bounds": _bounds(bound), "algorithms": rows}
        orders = [{"name": one.name, "title": one.title, "source": one.source} for one in NAMED_ORDERS.values()]
        print_json(document | {"pipeline_orders": orders})
        return
    typer.echo(
        f"{collective}: with one port a rank, no algorithm needs fewer than {bound.steps} steps or "
        f"{float(bound.moved):.4g} S per port; direct ones send on all at once, in fewer"
    )
    print_columns(
        ("name", "steps", "sent", ""),
        [
            (r["name"], str(r["steps"]), f"{r['sent']:.4g} S", r["title"])
            if r["why_not"] is None
            else (r["name"], "-", "-", r["why_not"].removeprefix(f"{r['name']}, {collective}: "))
            for r in rows
        ],
    )
    typer.echo("orders of pipelines (hocket schedule show 1f1b --stages 4):")
    print_columns(("name", ""), [(one.name, one.title) for one in NAMED_ORDERS.values()])


@schedule.command()
def show(
    what: _What,
    world: _World = None,
    kind: _Kind = "all_reduce",
    root: _Root = 0,
    cluster: _Cluster = None,
    stages: _Stages = None,
    micro_batches: _Micro = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
    msccl: Annotated[Path | None, typer.Option(help="Also write it as MSCCL XML into this file.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print all transfers, in the form that is read back.")] = False,
    as_json: Json = False,
) -> None:
    """Show a schedule as a grid: who sends which chunk to whom in every step."""
    from hocket import schedule as schedules

    from ._schedules import orders

    order = orders.asked("show", what, world, stages, micro_batches)
    if order is not None:
        if given := [
            flag for flag, one in (("--svg", svg), ("--msccl", msccl), ("--cluster", cluster)) if one is not None
        ]:
            bad_input("schedule show", f"{', '.join(given)}: an order of a pipeline has none; leave it out")
        orders.show(order, text=text, as_json=as_json)
        return
    asked = _resolve("show", what, kind, world, root, cluster)
    if svg is not None:
        _write("show", svg, schedules.svg(asked.schedule))
    if msccl is not None:
        with one_error("schedule show"):
            _write("show", msccl, schedules.to_msccl(asked.schedule))
    if as_json:
        typer.echo(schedules.to_json(asked.schedule))
        return
    if text:
        typer.echo(str(asked.schedule), nl=False)
        return
    typer.echo(schedules.describe(asked.schedule))
    typer.echo(schedules.grid(asked.schedule), nl=False)
    if asked.cluster is not None:
        _show_links(schedules.link_loads(asked.schedule, asked.cluster))


@schedule.command()
def verify(
    what: _What,
    world: _World = None,
    kind: _Kind = "all_reduce",
    root: _Root = 0,
    cluster: _Cluster = None,
    stages: _Stages = None,
    micro_batches: _Micro = None,
    in_flight: Annotated[
        float | None, typer.Option(help="Of a pipeline: micro-batches whose activations a rank may hold.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a schedule: its contract, its closed form, how far it is from the bounds, and the links that it loads.

    Of a pipeline's order: each forward and backward once and in order, messages that meet, and nobody who waits for
    ever. The exit code is 1 if something is broken, else 0.
    """
    from hocket import schedule as schedules

    from ._schedules import orders

    order = orders.asked("verify", what, world, stages, micro_batches)
    if order is not None:
        orders.check(order, in_flight=in_flight, as_json=as_json)
        return
    asked = _resolve("verify", what, kind, world, root, cluster)
    one = asked.schedule
    with one_error("schedule verify"):
        findings = schedules.verify(one)
    needs, bound = schedules.needs(one), schedules.lower_bounds(one.collective, in_network=bool(one.switches))
    closed = _closed_form(asked)
    loads = () if asked.cluster is None else schedules.link_loads(one, asked.cluster)
    broken = any(finding.breaks for finding in findings) or (closed is not None and not closed["agrees"])
    if as_json:
        print_json(
            {
                "schedule": one.name,
                "collective": str(one.collective),
                "keeps_contract": not broken,
                "findings": [asdict(finding) for finding in findings],
                "needs": _bounds(needs),
                "bounds": _bounds(bound),
                "closed_form": closed,
                "links": [asdict(load) for load in loads],
            }
        )
    else:
        typer.echo(schedules.describe(one))
        _show_findings(one, findings)
        if closed is not None:
            word = "as the closed form says" if closed["agrees"] else "NOT what the closed form says"
            typer.echo(f"{closed['steps']} steps, {closed['sent']:.6g} S sent by the busiest rank: {word}")
        typer.echo(
            f"distance from the bounds: {needs.steps} rounds of messages (at least {bound.steps}), "
            f"{float(needs.moved):.6g} S through the busiest port (at least {float(bound.moved):.6g})"
        )
        _show_links(loads)
    if broken:
        raise typer.Exit(1)


@schedule.command()
def time(
    what: _What,
    size: Annotated[
        str | None,
        typer.Option("--bytes", help="Of the vector: 1MiB, or 1KiB,1MiB. Of a pipeline: between stages, each way."),
    ] = None,
    cluster: _Cluster = None,
    world: _World = None,
    kind: _Kind = "all_reduce",
    root: _Root = 0,
    stages: _Stages = None,
    micro_batches: _Micro = None,
    forward: Annotated[str, typer.Option(help="Of a pipeline: a micro-batch's forward through one stage.")] = "10ms",
    backward: Annotated[str, typer.Option(help="Of a pipeline: its backward.")] = "20ms",
    message: Annotated[str, typer.Option(help="Of a pipeline without a cluster: a message between stages.")] = "0s",
    at_once: Annotated[
        float | None, typer.Option(min=0.01, help="Of a pipeline: how many ranks compute at full speed at once.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a trace for Perfetto into this file; of several sizes the last, and others beside it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict how long a schedule takes, by simulation; no clock is involved.

    A collective needs --bytes and --cluster. A pipeline's order is timed with messages of a given time, or of given
    bytes on a cluster.
    """
    from ._schedules import orders

    order = orders.asked("time", what, world, stages, micro_batches)
    if order is not None:
        asked_for = orders.Timed(forward, backward, message, size, cluster, at_once)
        orders.time(order, asked_for, trace=trace, as_json=as_json)
        return
    if size is None or cluster is None:
        bad_input(
            "schedule time", "a collective is timed with --bytes, on a --cluster: --bytes 1MiB --cluster star:hosts=8"
        )
    from hocket import schedule as schedules
    from hocket.planner import Constants, expected_collective
    from hocket.simulate import simulate_schedule
    from hocket.units import parse_bytes

    asked = _resolve("time", what, kind, world, root, cluster)
    assert asked.cluster is not None
    rows = []
    words = size.split(",")
    with one_error("schedule time"):
        for word in words:
            nbytes = parse_bytes(word)
            timing = simulate_schedule(asked.schedule, asked.cluster, nbytes, trace=trace is not None)
            (expected,) = expected_collective(asked.schedule, asked.cluster, [nbytes])
            rows.append(_timing_row(timing, nbytes) | {"expected": expected.facts()})
            if trace is not None:
                # The last size has the file itself, the others stand beside it, as trace.1MiB.json.
                where = trace if word == words[-1] else trace.with_name(f"{trace.stem}.{word.strip()}{trace.suffix}")
                _write("time", where, _perfetto(timing))
    if as_json:
        print_json({"schedule": asked.schedule.name, "cluster": asked.cluster.name, "rows": rows})
        return
    typer.echo(f"{schedules.describe(asked.schedule)}; on {asked.cluster.name}, predicted")
    print_columns(
        ("bytes", "time", "algbw", "busbw", "busiest link", "used", "expected", "80% of runs"),
        [
            (r["shown"], r["time"], r["algbw"], r["busbw"], r["busiest_link"], f"{r['used']:.0%}", *_expected(r))
            for r in rows
        ],
    )
    basis = Constants.of(asked.cluster.reached).basis
    typer.echo(f"time: at the rates of the links; expected: with what runs reach of them ({basis})")


def _expected(row: dict[str, Any]) -> tuple[str, str]:
    low, high = row["expected"]["interval_s"]
    from hocket.units import format_time

    return format_time(row["expected"]["seconds"], 4), f"{format_time(low, 4)} to {format_time(high, 4)}"


def _timing_row(timing: Any, nbytes: int) -> dict[str, Any]:
    from hocket.units import format_bytes, format_rate, format_time

    busiest = timing.busiest(1)
    return {
        "nbytes": nbytes,
        "seconds": timing.seconds,
        "algbw_Bps": timing.algbw_Bps,
        "busbw_Bps": timing.busbw_Bps,
        "busiest_link": busiest[0].name if busiest else "",
        "used": busiest[0].busy if busiest else 0.0,
        "shown": format_bytes(nbytes),
        "time": format_time(timing.seconds, 4),
        "algbw": format_rate(timing.algbw_Bps, 4),
        "busbw": format_rate(timing.busbw_Bps, 4),
    }


def _perfetto(timing: Any) -> str:
    import json

    from hocket.timeline import to_perfetto

    return json.dumps(to_perfetto(timing.timeline()))


def _resolve(verb: str, what: list[str], kind: str, world: int | None, root: int, cluster: str | None) -> Asked:
    from hocket.schedule import ScheduleError
    from hocket.schedule.pipeline import NAMED_ORDERS

    from ._schedules.resolve import resolve

    with one_error(f"schedule {verb}"):
        try:
            return resolve(" ".join(what), kind, world, root, cluster)
        except ScheduleError as error:
            near = difflib.get_close_matches(what[0].lower().replace("-", "_"), NAMED_ORDERS, 1, 0.75)
            if not near or "is unknown" not in str(error):
                raise
            raise ScheduleError(f"{what[0]!r} is unknown; the order of a pipeline is called {near[0]}") from error


def _write(verb: str, path: Path, text: str) -> None:
    write_file(f"schedule {verb}", path, text)
    typer.echo(f"wrote {path}", err=True)


def _closed_form(asked: Asked) -> dict[str, Any] | None:
    if asked.algorithm is None:
        return None
    form = asked.algorithm.form(asked.schedule.collective, **asked.parameters)
    sent = max(asked.schedule.sent()[: asked.schedule.world], default=0)
    agrees = (form.steps, form.sent) == (asked.schedule.step_count, sent)
    return {"steps": form.steps, "sent": float(form.sent), "agrees": agrees}


def _bounds(bounds: Any) -> dict[str, Any]:
    return {"steps": bounds.steps, "moved": float(bounds.moved), "reduced": float(bounds.reduced)}


def _show_findings(one: Schedule, findings: tuple[Finding, ...]) -> None:
    from hocket import schedule as schedules

    if not findings:
        typer.echo("contract: kept")
        return
    broken = any(finding.breaks for finding in findings)
    typer.echo("contract: BROKEN" if broken else "contract: kept, with remarks")
    for finding in findings:
        typer.echo(f"  {finding}")
    typer.echo(schedules.grid(one, findings), nl=False)


def _show_links(loads: tuple[StepLoad, ...]) -> None:
    if not loads:
        return
    worst = max(loads, key=lambda load: load.most_flows)
    shared = (
        "no link carries two flows in any step"
        if worst.most_flows < 2
        else f"up to {worst.most_flows} flows share a link: {worst.busiest} in step {worst.step}"
    )
    typer.echo(f"links: {shared}; paths of up to {max(load.hops for load in loads)} links")
