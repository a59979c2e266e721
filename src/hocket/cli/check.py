"""`hocket check`: does a script learn the same on one rank and on several?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._output import bad_input, print_json

if TYPE_CHECKING:
    from hocket.parallel.equivalence import Comparison

_SHOWN = 12


def check(
    script: Annotated[Path, typer.Argument(help="A training script that uses hocket.distribute.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, after --.")] = None,
    n: Annotated[int, typer.Option("-n", "--np", min=2, help="Ranks to compare one rank with.")] = 2,
    steps: Annotated[int, typer.Option(min=0, help="Backward passes to compare; 0 for all of the script's.")] = 20,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative difference that counts as rounding.")] = 1e-4,
    timeout: Annotated[float, typer.Option(help="Seconds for each of the two runs.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare a script on one rank and on several: the losses must agree."""
    if not script.is_file():
        bad_input("check", f"there is no script {str(script)!r}")
    from hocket.launch import launch
    from hocket.parallel.equivalence import compare, read_runs

    with tempfile.TemporaryDirectory(prefix="hocket-check-") as directory:
        runs = []
        for ranks in (1, n):
            result = Path(directory) / f"losses-of-{ranks}"
            log = Path(directory) / f"output-of-{ranks}"
            command = ["hocket.parallel.check_runner", str(result), str(steps), str(script), *(arguments or [])]
            with log.open("wb") as output:
                ended = launch(command, ranks, flags=["-m"], timeout_s=timeout, stdout=output, stderr=output)
            if ended.exit_code:
                typer.echo(log.read_text(errors="replace"), err=True)
                typer.echo(f"hocket check: the run on {ranks} rank(s) {ended.outcome}; its output is above", err=True)
                raise typer.Exit(2)
            runs.append(read_runs(result, ranks))
    one, several = runs
    comparison = compare(one, several, tolerance)
    if not comparison.one:
        bad_input("check", f"{script} made no backward pass, so there is nothing to compare")
    if as_json:
        print_json({"n": n, **comparison.to_json()})
    else:
        _show(comparison, n)
    raise typer.Exit(0 if comparison.equivalent else 1)


def _show(comparison: Comparison, n: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Loss over the global batch", title_justify="left")
    for header in ("backward", "1 rank", f"{n} ranks", "relative difference"):
        table.add_column(header, justify="right")
    rows = list(zip(comparison.one, comparison.several, strict=False))
    start = max(0, (comparison.first_divergent or 0) - _SHOWN // 2)
    for number, (one, several) in enumerate(rows[start : start + _SHOWN], start=start + 1):
        scale = max(abs(one), abs(several)) or 1.0
        table.add_row(str(number), f"{one:.8g}", f"{several:.8g}", f"{abs(one - several) / scale:.1e}")
    console = Console(soft_wrap=True)
    console.print(table)
    if comparison.equivalent:
        console.print(
            f"Equivalent: {len(rows)} losses agree; the largest relative difference is {comparison.worst:.1e} "
            f"(tolerance {comparison.tolerance:.0e})."
        )
        return
    console.print(
        f"Not equivalent: backward pass {comparison.first_divergent} is the first beyond the tolerance of "
        f"{comparison.tolerance:.0e}; {len(comparison.one)} losses on one rank, {len(comparison.several)} on {n}."
    )
    for hint in comparison.hints:
        console.print(f"  - {hint}")
