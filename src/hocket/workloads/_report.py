"""The tables at the end of a run. Everything is read from its result."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hocket.workloads._progress import clock
from hocket.workloads._settings import ThroughputUnit

# Narrow: the widest table has to fit a terminal of 80 columns.
_TABLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "box": SIMPLE_HEAD,
    "pad_edge": False,
    "padding": (0, 1, 0, 0),
}


def report(result: dict[str, Any], console: Console) -> None:
    """Print what is known of a run, in the order in which a reader asks for it."""
    say = _Printer(console)
    if "placement" in result:
        _placement(result["config"], result["placement"], say)
    if "quality" in result:
        _quality(result["quality"], console)
        say(result["quality"]["summary"] + ".")
    unit = ThroughputUnit.from_config(result["config"])
    if "training" in result:
        training = result["training"]
        say(
            f"Throughput: {_number(training['samples_per_s'] * unit.per_sample)} {unit.name}/s "
            f"({training['samples']:,} {unit.samples} in {training['steps']:,} steps, {clock(training['training_s'])})."
        )
    if "scaling" in result:
        _scaling(result["scaling"], result["placement"], unit, say)
    if "communication" in result:
        _communication(result["communication"], console, say)
    if "compression" in result:
        say(f"Compression, which is not serially equivalent: {result['compression']['verdict']}")
    if result["status"] == "interrupted":
        say("Interrupted: this is what was known by then.")
    if result["error"]:
        say(f"Failed: {result['error']}")
    if "picture" in result:
        say(f"Picture: {result['picture']}")
    say(f"Run directory: {result['run']}")


class _Printer:
    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)


def _placement(config: dict[str, Any], placement: dict[str, Any], say: _Printer) -> None:
    workers = placement["workers"]
    device = placement["device"] if placement["device"] == "CPU" else f"{placement['gpus']} x {placement['device']}"
    each = " each" if workers > 1 and placement["exclusive_cores"] else ""
    say(
        f"{config['workload']}, {placement['parameters']:,} parameters; {workers} worker{'s' * (workers > 1)} on "
        f"{device}, {placement['cores']}{each}."
    )


def _quality(quality: dict[str, Any], console: Console) -> None:
    table = Table(title=quality["title"], **_TABLE)
    keys = list(quality["columns"])
    for number, label in enumerate(quality["columns"].values()):
        table.add_column(label, justify="right" if number else "left")
    for row in quality["rows"]:
        table.add_row(*(_cell(row[key]) for key in keys))
    if "mean" in quality:
        table.add_section()
        table.add_row("mean", *(_cell(quality["mean"][key]) for key in keys[1:]))
    console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _scaling(scaling: dict[str, Any], placement: dict[str, Any], unit: ThroughputUnit, say: _Printer) -> None:
    workers = scaling["workers"]
    rate, rate_alone = (scaling[key] * unit.per_sample for key in ("samples_per_s", "one_samples_per_s"))
    say(
        f"Scaling efficiency: {scaling['efficiency']:.1%} ({scaling['efficiency_lowest']:.1%} to "
        f"{scaling['efficiency_highest']:.1%} in {scaling['rounds']} rounds): {workers} workers "
        f"{_number(rate)} {unit.name}/s, one alone {_number(rate_alone)}."
    )
    cores = placement["cores_in_all"]
    had = (
        f"Each of the {workers}, and the one alone, had {placement['cores']}."
        if placement["exclusive_cores"]
        else f"There are fewer cores than workers: the one alone had a core to itself, and the {workers} shared "
        f"{cores}. The efficiency could not be above {cores / workers:.1%}."
    )
    steps = scaling["steps_per_block"]
    say(
        f"  {had} A worker's share of a step was {scaling['samples_per_worker']} {unit.samples} in both cases. One "
        f"worker and all {workers} took turns, {steps} step{'s' * (steps > 1)} each. Workers that waited for their "
        f"turn used at most {scaling['idle_core_share']:.1%} of a core."
    )
    if 0 < placement["gpus"] < workers:
        say(f"  The {workers} workers share {placement['gpus']} GPU; the one had it to itself.")


def _communication(communication: dict[str, Any], console: Console, say: _Printer) -> None:
    if not communication["bins"]:
        return
    table = Table(title="Collectives while training, by message size, as rank 0 saw them", **_TABLE)
    table.add_column("collective")
    table.add_column("message size")
    for heading in ("count", "MB", "time\nms", "exposed\nms", "skew\nms", "algbw\nGB/s", "busbw\nGB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in communication["bins"]:
        times_ms = (row[key] * 1e3 for key in ("time_s", "exposed_s", "skew_s"))
        rates_GBps = (row[key] / 1e9 for key in ("algbw_Bps", "busbw_Bps"))
        table.add_row(
            row["kind"],
            row["bin"],
            f"{row['count']:,}",
            _number(row["nbytes"] / 1e6),
            *(_number(value) for value in times_ms),
            *(f"{value:.2f}" for value in rates_GBps),
        )
    console.print(table)
    say("algbw and busbw divide the bytes by the time without skew. Skew is the wait for ranks that arrive late.")
    if communication["hidden_share"] is not None:
        say(
            f"Hidden behind back-propagation: {communication['hidden_share']:.1%} of "
            f"{communication['communication_s']:.2f} s of communication. Training waited for "
            f"{communication['exposed_s']:.2f} s."
        )


def _number(value: float) -> str:
    """Return three digits or more, so that small and large ones fit a column."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
