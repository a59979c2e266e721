"""The tables at the end of a run. Everything is read from its result."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hocket.workloads._progress import clock


def report(result: dict[str, Any], console: Console) -> None:
    """Print what is known of a run, in the order in which a reader asks for it."""
    say = _Printer(console)
    if "placement" in result:
        _placement(result["config"], result["placement"], say)
    if "quality" in result:
        _quality(result["quality"], console)
        say(result["quality"]["summary"] + ".")
    if "training" in result:
        training = result["training"]
        say(
            f"Throughput: {_number(training['images_per_s'])} images/s ({training['images']:,} images in "
            f"{training['steps']:,} steps, {clock(training['training_s'])})."
        )
    if "scaling" in result:
        _scaling(result["scaling"], result["placement"], say)
    if "communication" in result:
        _communication(result["communication"], console, say)
    if result["status"] == "interrupted":
        say("Interrupted: this is what was known by then.")
    if result["error"]:
        say(f"Failed: {result['error']}")
    if "picture" in result:
        say(f"Picture: {result['picture']}")
    say(f"All of it: {result['run']}")


class _Printer:
    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)


def _placement(config: dict[str, Any], placement: dict[str, Any], say: _Printer) -> None:
    workers = placement["workers"]
    device = placement["device"] if placement["device"] == "CPU" else f"{placement['gpus']} x {placement['device']}"
    each = " each" if workers > 1 else ""
    say(
        f"{config['workload']}, {placement['parameters']:,} parameters; {workers} worker{'s' * (workers > 1)} on "
        f"{device}, {placement['cores']}{each}; gradients in buckets of {size(placement['bucket_bytes'])}."
    )


def _quality(quality: dict[str, Any], console: Console) -> None:
    table = Table(title=quality["title"], title_justify="left", title_style="")
    keys = list(quality["columns"])
    for number, label in enumerate(quality["columns"].values()):
        table.add_column(label, justify="right" if number else "left")
    for row in quality["rows"]:
        table.add_row(*(_cell(row[key]) for key in keys))
    table.add_section()
    table.add_row("mean", *(_cell(quality["mean"][key]) for key in keys[1:]))
    console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _scaling(scaling: dict[str, Any], placement: dict[str, Any], say: _Printer) -> None:
    workers = scaling["workers"]
    say(
        f"Scaling efficiency: {scaling['efficiency']:.1%} ({scaling['efficiency_lowest']:.1%} to "
        f"{scaling['efficiency_highest']:.1%} in {scaling['rounds']} rounds): {workers} workers "
        f"{_number(scaling['images_per_s'])} images/s, one alone {_number(scaling['one_images_per_s'])}."
    )
    held = (
        f"The one had {placement['cores']}, as each of the {workers}"
        if placement["exclusive_cores"]
        else f"There are fewer cores than workers: the one had the cores to itself, the {workers} had to share them"
    )
    steps = scaling["steps_per_block"]
    say(
        f"  {held}; and {scaling['images_per_worker']} images a step, the same share of the batch. Blocks of {steps} "
        f"step{'s' * (steps > 1)} of one and of all took turns; meanwhile the waiting used at most "
        f"{scaling['idle_core_share']:.1%} of a core."
    )
    if 0 < placement["gpus"] < workers:
        say(f"  The {workers} workers share {placement['gpus']} GPU; the one had it to itself.")


def _communication(communication: dict[str, Any], console: Console, say: _Printer) -> None:
    if not communication["bins"]:
        return
    table = Table(title="Collectives of the training by message size, first worker", title_justify="left")
    table.add_column("collective")
    table.add_column("message size")
    for column in ("count", "bytes", "time", "exposed", "algbw", "busbw"):
        table.add_column(column, justify="right")
    for row in communication["bins"]:
        table.add_row(
            row["kind"],
            row["bin"],
            f"{row['count']:,}",
            size(row["nbytes"]),
            f"{row['time_s'] * 1e3:,.1f} ms",
            f"{row['exposed_s'] * 1e3:,.1f} ms",
            f"{row['algbw_Bps'] / 1e9:.2f} GB/s",
            f"{row['busbw_Bps'] / 1e9:.2f} GB/s",
        )
    console.print(table)
    if communication["hidden_share"] is not None:
        say(f"Hidden behind back-propagation: {communication['hidden_share']:.1%} of the communication time.")


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1,000."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
