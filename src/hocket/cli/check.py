"""`hocket check`: does a script learn the same on one rank and on several?"""

import contextlib
import importlib.util
import os
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._output import BAD_INPUT, RANKS, Json, bad_input, print_json
from ._scratch import ScratchCopy

if TYPE_CHECKING:
    from ._check.equivalence import LossComparison, RecordedRun

_SHOWN = 20
_NAMED = 5
_SEED = 271_828  # a number that scripts do not choose, so that a script that seeds is told from one that does not


def check(
    script: Annotated[Path, typer.Argument(help="A script with hocket.distribute or Trainer.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, after --.")] = None,
    n: Annotated[int, typer.Option(*RANKS, min=2, help="Ranks to compare one rank with.")] = 2,
    steps: Annotated[int, typer.Option(min=0, help="Backward passes, or a Trainer's steps, to compare; 0: all.")] = 20,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative difference that counts as rounding.")] = 1e-4,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31, help="For a script that does not seed: ranks get this and their number.")
    ] = _SEED,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each of the two runs.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Compare a script on one rank and on several: the losses must agree.

    The script is not changed. Each run has a working directory of its own, a copy of this one made of links: files are
    found there under the same paths, and what a run makes there, such as checkpoints, the other run does not see. It is
    removed in the end.

    Training with relaxed synchronisation (local SGD, asynchronous, Hogwild) is refused, with the reason.

    Exit code: 0 if the losses agree and the ranks share the work, 1 if not, 2 for bad input or a run that failed.
    """
    if not script.is_file():
        bad_input("check", f"there is no script {str(script)!r}")
    if not timeout >= 1:  # some versions of click let NaN pass
        bad_input("check", f"--timeout {timeout}: give a number of seconds, 1 or more")
    if wrong := _no_python(script):
        bad_input("check", wrong)
    from ._check.equivalence import NothingRecorded, compare

    command = [str(script.absolute()), *(arguments or [])]
    with tempfile.TemporaryDirectory(prefix="hocket-check-") as directory:
        runs: list[RecordedRun] = []
        for ranks in (1, n):
            place = Path(directory) / str(ranks)
            (place / "root").mkdir(parents=True)
            scratch = ScratchCopy(Path.cwd(), place / "root")
            try:
                with contextlib.chdir(scratch.path):
                    runs.append(_run(command, ranks, place, steps, seed, timeout))
            except NothingRecorded as error:
                bad_input("check", f"{script}: {error}")
            if runs[-1].relaxed:
                bad_input(
                    "check", f'{script} is {"; ".join(runs[-1].relaxed)}. Compare by synchronisation = "every_step"'
                )
            if ranks == 1 and (changed := scratch.changed()):
                typer.echo(_warning(changed), err=True)
    comparison = compare(runs[0], runs[1], tolerance)
    if as_json:
        print_json(comparison.to_json())
    else:
        _show(comparison)
    raise typer.Exit(0 if comparison.equivalent else 1)


def _no_python(script: Path) -> str:
    """Return why a file is no Python program; "" if it is one, or what Python runs too: an archive, compiled code."""
    text = script.read_bytes()
    if zipfile.is_zipfile(script):
        with zipfile.ZipFile(script) as archive:
            runs = {"__main__.py", "__main__.pyc"} & set(archive.namelist())
        return "" if runs else f"{str(script)!r} is no Python program: it is an archive without a __main__.py"
    if text.startswith(importlib.util.MAGIC_NUMBER):
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, str(script), "exec", dont_inherit=True)
    except SyntaxError as error:  # of zero bytes it tells no line
        where = "" if error.lineno is None else f" (line {error.lineno})"
        return f"{str(script)!r} is no Python program: {error.msg}{where}"
    return ""


def _warning(changed: list[str]) -> str:
    shown = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
    return (
        f"hocket check: warning: during the first run {shown} changed in this directory, where the second run finds "
        "it. If the script goes on from there, the runs do not begin alike; have it write to new files in its working "
        "directory"
    )


def _run(command: list[str], ranks: int, directory: Path, steps: int, seed: int, timeout_s: float) -> "RecordedRun":
    from hocket.launch import launch

    from ._check import rank as check_runner
    from ._check.equivalence import read

    typer.echo(f"hocket check: {' '.join(command)} on {ranks} rank{'s' * (ranks > 1)}", err=True)
    # One thread in both runs, so that kernels cut their work alike.
    env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    runner = [check_runner.__file__, str(directory), str(steps), str(seed)]
    log = directory / "output"
    with log.open("wb") as output:
        ended = launch([*runner, *command], ranks, env=env, timeout_s=timeout_s, stdout=output, stderr=output)
    if ended.exit_code:
        typer.echo(log.read_text(errors="replace"), err=True)
        typer.echo(f"hocket check: the run on {ranks} rank(s) {ended.outcome}; its output is above", err=True)
        raise typer.Exit(ended.exit_code if ended.outcome == "interrupted" else BAD_INPUT)
    return read(directory, ranks)


def _show(comparison: "LossComparison") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Loss over the global batch", title_justify="left")
    for header in ("backward", "1 rank", f"{comparison.n} ranks", "relative difference"):
        table.add_column(header, justify="right")
    start = max(0, (comparison.first_divergent or 0) - _SHOWN // 2)
    for number, (one, several, difference) in enumerate(comparison.rows(), start=1):
        if start < number <= start + _SHOWN:
            table.add_row(str(number), f"{one:.8g}", f"{several:.8g}", f"{difference:.1e}")
    console = Console(soft_wrap=True)
    console.print(table)
    for relaxed in comparison.relaxed:
        console.print(relaxed, highlight=False, markup=False)
    allowed = f"the largest relative difference is {comparison.worst:.1e} (tolerance {comparison.tolerance:.0e})"
    if comparison.equivalent:
        console.print(f"Equivalent: {len(comparison.rows())} losses agree; {allowed}.")
        return
    if comparison.first_divergent is None:
        console.print(f"Not equivalent, though the losses agree; {allowed}.")
    else:
        console.print(
            f"Not equivalent: backward pass {comparison.first_divergent} is the first that differs; {allowed}; "
            f"{len(comparison.one)} losses on one rank, {len(comparison.several)} on {comparison.n}."
        )
    for hint in comparison.hints:
        console.print(f"  - {hint}", highlight=False, markup=False)
