"""`hocket clean`: what crashed jobs have left."""

from dataclasses import asdict
from typing import Annotated

import typer

from ._output import print_json


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Remove what crashed jobs of yours have left on this host: processes and temporary directories.

    A job removes its own traces, also when it is interrupted or its launcher is killed. Something remains only if the
    job's warden was killed as well. Jobs that still run are never touched.
    """
    from hocket.launch import leftovers, remove_leftover

    found = leftovers()
    stays = False
    for leftover in found:
        done = "would remove" if dry_run else "removed"
        if not dry_run and not remove_leftover(leftover):
            stays, done = True, "could not remove"
        if not as_json:
            parts = [f"{len(leftover.processes)} processes"] if leftover.processes else []
            parts += [f"{leftover.directory} ({leftover.nbytes / 1024:.0f} KiB)"] if leftover.directory else []
            typer.echo(f"{done} {' and '.join(parts)} of job {leftover.job}")
    if as_json:
        print_json({"dry_run": dry_run, "leftovers": [asdict(leftover) for leftover in found]})
    elif not found:
        typer.echo("nothing to clean")
    if stays:
        raise typer.Exit(1)
