"""`hocket explain`: why a run is slow, who was late, why it hangs."""

from pathlib import Path
from typing import Annotated

import typer

from ._output import Json, one_error, print_json


def explain(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, running or over; or a folder of runs, of which the newest is taken.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Say why a run is slow, who was late, and why it hangs; of a running job where every rank is."""
    from hocket.explain import explain as found_in

    with one_error("explain"):
        found = found_in(run)
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines():
        typer.echo(line)
