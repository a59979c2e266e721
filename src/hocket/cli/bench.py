"""`hocket bench`: collectives and training steps, measured beside other systems in the same processes."""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hocket._limits import memory, processor, usable_cores
from hocket._versions import installed
from hocket.cli._bench import tables
from hocket.cli._bench.world import BenchError, require_mpi, run_world
from hocket.cli._output import RANKS, check_place, write_file, writing
from hocket.units import format_bytes, parse_bytes


class _Spellings(TyperGroup):
    """Commands whose names are known however the words in them are parted: all_reduce, all-reduce, allreduce."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        same = [name for name in self.list_commands(ctx) if _letters(name) == _letters(cmd_name)]
        return super().get_command(ctx, same[0] if same else cmd_name)


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "")


bench = typer.Typer(
    cls=_Spellings, no_args_is_help=True, help="Measure collectives and training steps beside other systems."
)

_PEERS = ("gloo", "mpi")

Ranks = Annotated[int, typer.Option(*RANKS, min=1, help="Number of ranks on this host.")]
Sizes = Annotated[str, typer.Option(help="Comma-separated bytes of the full vector: 1KiB, 64KiB, 1MiB, ...")]
Against = Annotated[str, typer.Option(help="Comma-separated peers in the same run: gloo, mpi; empty for none.")]
Registered = Annotated[bool, typer.Option("--registered", help="Measure hocket.comm tensors too, reduced in place.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often the systems take turns.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")]
Markdown = Annotated[Path | None, typer.Option(help="Also append a dated section to this Markdown file.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which the measurement is given up.")]


def _fail(message: str) -> typer.Exit:
    typer.echo(f"hocket bench: {message}", err=True)
    return typer.Exit(2)


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of each size in a comma-separated list. Raises BenchError, naming the item that is no size."""
    sizes = []
    for item in text.split(","):
        try:
            sizes.append(parse_bytes(item))
        except ValueError:
            sizes.append(0)
        if sizes[-1] == 0:
            raise BenchError(f"--sizes: {item.strip()!r} is no size; write 1KiB, 64KiB, 16MiB or plain bytes")
    return sizes


def check_memory(sizes: Sequence[int], vectors: int) -> None:
    """Refuse sizes of which this host has not the memory for so many vectors at once.

    Raises:
        BenchError: naming the size, and the largest that fits.
    """
    free = memory()[1]
    if (largest := max(sizes)) * vectors > free:
        most = free // vectors >> 20
        raise BenchError(
            f"--sizes: {format_bytes(largest, 3)} is too much: the ranks fill {vectors} vectors of that size at once, "
            f"and {format_bytes(free, 3)} of this host's memory are free; take {most} MiB or less, or fewer ranks"
        )


def parse_peers(text: str) -> list[str]:
    """Return the peers in a comma-separated list.

    Raises:
        BenchError: naming the one that is unknown or cannot run here.
    """
    peers = [name.strip() for name in text.split(",") if name.strip()]
    for name in peers:
        if name not in _PEERS:
            raise BenchError(f"--against: {name!r} is unknown; known are {', '.join(_PEERS)}")
    if "mpi" in peers:
        require_mpi()
    return peers


def _finish(
    result: dict[str, Any],
    title: str,
    table: tuple[list[str], tables.Cells],
    as_json: bool,
    out: Path | None,
    markdown: Path | None,
) -> None:
    machine = _machine()
    document = json.dumps({**result, "machine": machine}, indent=2)
    if as_json:  # first, so that what took minutes is not lost where no file can be written
        print(document)
    else:
        Console(width=None if sys.stdout.isatty() else 150).print(tables.terminal_table(title, *table))
    if out is not None:
        write_file("bench", out, document + "\n", "--out ")
    if markdown is not None:
        with writing("bench", markdown, "--markdown "), markdown.open("a") as file:
            file.write("\n" + tables.markdown(title, machine, *table))


_DEFAULT_SIZES = "1KiB,64KiB,1MiB,16MiB,64MiB"


def _add(collective: str) -> None:
    def command(
        n: Ranks = 2,
        sizes: Sizes = _DEFAULT_SIZES,
        against: Against = "gloo",
        registered: Registered = False,
        rounds: Rounds = 10,
        as_json: AsJson = False,
        out: Out = None,
        markdown: Markdown = None,
        timeout: Timeout = 600.0,
    ) -> None:
        check_place("bench", out, "--out ")
        check_place("bench", markdown, "--markdown ")
        try:
            systems = ["hocket", *parse_peers(against)]
            spec: dict[str, Any] = {"collective": collective, "sizes": parse_sizes(sizes), "systems": systems}
            spec |= {"registered": registered, "rounds": rounds}
            # What ranks write to, which is less than what they read: pages of zeros that were never written are none.
            written = {"broadcast": n - 1, "reduce_scatter": 0}.get(collective, n) * (len(systems) + registered)
            check_memory(spec["sizes"], written + n)  # and a copy to measure the floor by
            module, mpi = "hocket.cli._bench.collective", "mpi" in systems
            result = run_world(module, spec, n, what=collective, mpi=mpi, timeout_s=timeout)
        except BenchError as error:
            raise _fail(str(error)) from None
        _finish(result, f"{collective}, {n} ranks", tables.collective_cells(result), as_json, out, markdown)

    bench.command(collective, help=f"Measure {collective} by message size.")(command)


for _collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"):
    _add(_collective)


@bench.command()
def step(
    n: Ranks = 2,
    models: Annotated[
        str, typer.Option(help="Comma-separated: heavy (50 M parameters), edsr (baseline).")
    ] = "heavy,edsr",
    rounds: Rounds = 3,
    as_json: AsJson = False,
    out: Out = None,
    markdown: Markdown = None,
    timeout: Timeout = 600.0,
) -> None:
    """Measure one training step: torch DDP on Gloo, DDP on hocket, hocket.distribute."""
    names = [name.strip() for name in models.split(",")]
    for name in names:
        if name not in ("heavy", "edsr"):
            raise _fail(f"--models: {name!r} is unknown; known are heavy, edsr")
    check_place("bench", out, "--out ")
    check_place("bench", markdown, "--markdown ")
    spec = {"systems": [], "models": names, "rounds": rounds}
    try:
        result = run_world("hocket.cli._bench.step", spec, n, what="training steps", mpi=False, timeout_s=timeout)
    except BenchError as error:
        raise _fail(str(error)) from None
    _finish(result, f"training step, {n} ranks", tables.step_cells(result), as_json, out, markdown)


def _machine() -> dict[str, Any]:
    """Hardware, system, versions, command and date, as JSON values."""
    return {
        "cpu": processor() or platform.machine(),
        "cores": usable_cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "hocket": installed("hocket"),
        "torch": installed("torch"),
        "openmpi": installed("openmpi"),
        "mpi4py": installed("mpi4py"),
        "command": shlex.join(["hocket", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
