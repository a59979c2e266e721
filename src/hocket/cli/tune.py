"""`hocket tune`: measures the algorithms on real ranks and writes the table of choices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ._output import RANKS, bad_input, check_place, one_error, print_json, write_file

_KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "barrier")
_SIZES = "4KiB,32KiB,256KiB,2MiB,16MiB"


def tune(
    n: Annotated[int, typer.Option(*RANKS, min=2, help="Number of ranks on this host.")] = 4,
    collectives: Annotated[str, typer.Option(help="Comma-separated.")] = "all_reduce",
    sizes: Annotated[str, typer.Option(help="Comma-separated bytes of the full vector.")] = _SIZES,
    transport: Annotated[str, typer.Option(help="What moves the bytes: gloo or shm (shared memory).")] = "gloo",
    rounds: Annotated[int, typer.Option(min=1, help="How often all algorithms take turns.")] = 5,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the table of choices (TOML) here.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it is given up.")] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all measurements as JSON.")] = False,
) -> None:
    """Measure every algorithm by message size, and write which is the fastest where.

    Use the table with HOCKET_CHOICES=FILE or hocket.comm.choose("FILE").
    """
    from ._bench.world import BenchError, run_world
    from .bench import check_memory, parse_sizes

    kinds = [kind.strip() for kind in collectives.split(",") if kind.strip()]
    if not kinds:
        bad_input("tune", f"--collectives: {collectives!r} names none; there are {', '.join(_KINDS)}")
    for kind in kinds:
        if kind not in _KINDS:
            bad_input("tune", f"--collectives: {kind!r} is none of {', '.join(_KINDS)}")
    if transport not in ("gloo", "shm"):
        bad_input("tune", f"--transport: {transport!r} is neither gloo nor shm")
    check_place("tune", out, "--out ")
    with one_error("tune", BenchError):
        spec: dict[str, Any] = {
            "collectives": kinds,
            "sizes": sorted(set(parse_sizes(sizes))),
            "transport": transport,
            "rounds": rounds,
            "systems": [],
        }
        written = {"all_reduce": n, "all_gather": n, "broadcast": n - 1}
        # By the engine, and by ours.
        check_memory(spec["sizes"], 2 * max(written.get(kind, 1) for kind in kinds))
        result = run_world(
            "hocket.cli._schedules.measure", spec, n, what=", ".join(kinds), mpi=False, timeout_s=timeout
        )
    choices = choices_of(result["rows"], n)
    if out is not None:
        from hocket.algorithms import to_toml

        write_file("tune", out, to_toml(choices))
    if as_json:
        print_json({**result, "transport": transport, "choices": str(choices).splitlines()})
        return
    typer.echo(table(result["rows"], transport))
    typer.echo(str(choices), nl=False)
    if out is not None:
        typer.echo(f"wrote {out}; use it with HOCKET_CHOICES={out}", err=True)


def choices_of(rows: list[dict[str, Any]], world: int) -> Any:
    """Return the table of choices of measured rows."""
    from hocket.algorithms import Choices

    from ._schedules import ENGINE

    choices = Choices()
    for kind in dict.fromkeys(row["collective"] for row in rows):
        times: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["collective"] == kind and row["algorithm"] != ENGINE:
                times.setdefault(row["algorithm"], {})[row["nbytes"]] = row["median_s"]
        choices = choices | Choices.by_times(kind, world, times)
    return choices


def table(rows: list[dict[str, Any]], transport: str) -> str:
    """Return medians, one line an algorithm and one column a size, with each one's gain over the engine's own."""
    from hocket.units import format_bytes

    from ._bench.tables import seconds
    from ._schedules import ENGINE

    lines: list[list[str]] = []
    for kind in dict.fromkeys(row["collective"] for row in rows):
        mine = [row for row in rows if row["collective"] == kind]
        sizes = list(dict.fromkeys(row["nbytes"] for row in mine))
        medians = {(row["algorithm"], row["nbytes"]): row["median_s"] for row in mine}
        lines.append([f"{kind} over {transport}", *map(format_bytes, sizes)])
        for label in dict.fromkeys(row["algorithm"] for row in mine):
            cells = [
                f"{seconds(medians[label, nbytes])} ({medians[ENGINE, nbytes] / medians[label, nbytes]:.2f}x)"
                for nbytes in sizes
            ]
            lines.append(["gloo's own" if label == ENGINE else label, *cells])
        lines.append([])
    columns = max(map(len, lines))
    widths = [max(len(line[i]) for line in lines if len(line) > i) for i in range(columns)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
