"""`hocket report`: one HTML page about a run, and all its ranks in one trace."""

from pathlib import Path
from typing import Annotated

import typer

from ._output import Json, one_error, print_json, write_file, writing


def report(
    run: Annotated[
        Path, typer.Argument(help="A run's folder; or a folder of runs, of which the newest is taken.")
    ] = Path("runs"),
    other: Annotated[Path | None, typer.Argument(help="Another run, to be shown beside it.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
    trace: Annotated[
        Path | None, typer.Option(help="Write all ranks as a trace here, too; https://ui.perfetto.dev opens it.")
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write the ranks' state here, as text that Prometheus reads.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write each step's parts into this folder, as TensorBoard reads them.")
    ] = None,
    flight_recorder: Annotated[
        Path | None, typer.Option(help="Write each rank's collectives into this folder, as torchfrtrace reads them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: verdicts, where a step's time goes, ranks, collectives, memory, environment."""
    from hocket.explain import explain, prometheus_text, timeline_of_run, write_scalars
    from hocket.explain import report as page_of
    from hocket.profile import live_ranks, write_flight_records
    from hocket.timeline import write_perfetto

    with one_error("report"):
        found = explain(run)
        beside = None if other is None else explain(other)
    write_file("report", output, page_of(found, beside), "--output ")
    if trace is not None:
        with writing("report", trace, "--trace "):
            write_perfetto(timeline_of_run(found.run), trace)
    if prometheus is not None:
        write_file("report", prometheus, prometheus_text(live_ranks(found.run.folder)), "--prometheus ")
    if tensorboard is not None:
        with one_error("report", OSError):
            write_scalars(found, tensorboard)
    if flight_recorder is not None:
        with one_error("report", OSError):
            write_flight_records(found.run, flight_recorder)
    if as_json:
        print_json(found.to_json() if beside is None else {"run": found.to_json(), "other": beside.to_json()})
        return
    for verdict in found.verdicts:
        typer.echo(verdict.sentence)
    typer.echo(f"wrote {output}" + (f" and {trace}" if trace else ""))
