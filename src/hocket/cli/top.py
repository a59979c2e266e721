"""`hocket top`: a running job in the terminal."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ._output import Json, one_error, print_json, write_file


def top(
    run: Annotated[
        Path, typer.Argument(help="A running job's folder; or a folder of runs, of which the newest is taken.")
    ] = Path("runs"),
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one look to the next.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end; this is also what happens where stdout is no terminal.")
    ] = False,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write the ranks' state here at each look, as text that Prometheus reads.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what every rank of a running job does: steps, memory, and who waits for whom; ends with the job."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from hocket.explain import prometheus_text, top_lines
    from hocket.profile import LiveRank, find_folder, live_ranks

    with one_error("top"):
        folder = find_folder(run)

    def look() -> list[LiveRank]:
        ranks = live_ranks(folder, dump=False)
        if prometheus is not None:
            write_file("top", prometheus, prometheus_text(ranks), "--prometheus ")
        return ranks

    ranks = look()
    if not ranks:
        with one_error("top"):
            raise ValueError(f"the records in {str(folder)!r} are damaged, or of another version of hocket")
    if as_json:
        print_json([asdict(one) for one in ranks])
        return
    if once or (not sys.stdout.isatty() and prometheus is None):
        print("\n".join(top_lines(ranks)))
        return
    console = Console()
    before: list[LiveRank] = []
    moment_s, since_s = time.monotonic(), 0.0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            lines = top_lines(ranks, before, since_s=since_s, most=max(4, console.height - 5))
            if console.is_terminal:
                live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            if all(one.state in ("ended", "dead") for one in ranks):
                break
            time.sleep(every)
            before, ranks = ranks, look() or ranks
            moment_s, since_s = time.monotonic(), time.monotonic() - moment_s
    print("\n".join(top_lines(ranks)))
