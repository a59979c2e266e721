"""``hocket train``: the bundled workloads."""

import dataclasses
import io
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import typer
from rich.console import Console
from rich.text import Text

import hocket
from hocket.workloads import (
    Follower,
    RunDirectory,
    SettingsError,
    ThroughputUnit,
    WorkloadSettings,
    check_device,
    conclude,
    names,
    report,
    settings_from_options,
)

from ._output import RANKS, bad_input, print_json

if TYPE_CHECKING:
    from hocket.explain import Explanation

_FAILED = 1


def train(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(names())}.")],
    workers: Annotated[int, typer.Option(*RANKS, help="Processes that train together.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs, as another way to say --steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, over all workers.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses initial weights and data.")] = None,
    size: Annotated[
        str | None, typer.Option(help="How large a model: full, demo or tiny; edsr: also baseline.")
    ] = None,
    scale: Annotated[int | None, typer.Option(help="edsr: magnification, 2, 3 or 4.")] = None,
    patch: Annotated[int | None, typer.Option(help="edsr: side of a training patch in pixels.")] = None,
    image_size: Annotated[int | None, typer.Option(help="resnet50, resnet101: side of the images in pixels.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="resnet50, recommender: train on made-up data.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="recommender: a recbole wheel, which has MovieLens-100K.")] = None,
    language: Annotated[str | None, typer.Option(help="translation: french or german.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; auto takes a GPU if there is one.")] = None,
    autocast: Annotated[bool, typer.Option("--autocast", help="Forward pass in bfloat16.")] = False,
    out: Annotated[Path | None, typer.Option(help="Run directory [default: runs/NAME-TIME].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Train a bundled workload on several workers, and say how well and how fast.

    The run directory holds config.json, metrics.jsonl, events.jsonl, trace.json, result.json, picture.png and record,
    which `hocket report` reads; readable at any time.

    Exit codes: 0 finished, 1 a worker failed, 2 bad input, 130 interrupted (143 by SIGTERM).
    """
    options: dict[str, Any] = {
        "steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "seed": seed,
        "size": size,
        "scale": scale,
        "patch": patch,
        "image_size": image_size,
        "synthetic": synthetic or None,
        "data": None if data is None else str(data.absolute()),
        "language": language,
        "device": device,
        "autocast": autocast or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = settings_from_options(name, {"workers": workers, **given})
        check_device(settings.device)
        settings.check_data()
        run = _make_directory(settings, out)
    except (SettingsError, OSError) as error:
        bad_input("train", error)

    console = Console(stderr=as_json)
    with Follower(run, console):
        status, failure, exit_code = _run_workers(run, console)
    result = run.result()
    if result is None or result["status"] != status or failure is not None:
        result = conclude(run, status, failure)
    explained = _explained(run)
    if as_json:
        print_json(result | {"explained": None if explained is None else explained.to_json()})
    else:
        report(result, console)
        for line in () if explained is None else explained.lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(exit_code)


def _make_directory(settings: WorkloadSettings, out: Path | None) -> RunDirectory:
    now = datetime.now().astimezone()
    path = out or Path("runs") / f"{settings.workload}-{now:%Y%m%d-%H%M%S}"
    values = dataclasses.asdict(settings)
    config = {
        "workload": values.pop("workload"),
        "settings": values,
        "unit": dataclasses.asdict(ThroughputUnit.of(settings)),
        "command": sys.argv,
        "started": now.isoformat(timespec="seconds"),
        "hocket": hocket.__version__,
    }
    return RunDirectory.create(path, config)


def _run_workers(run: RunDirectory, console: Console) -> tuple[str, str | None, int]:
    """Run the workers to their end; returns the status, of a failure what went wrong, and the exit code."""
    from hocket.launch import launch  # imports torch, which bad input need not wait for

    workers = run.config["settings"]["workers"]
    above = cast(BinaryIO, _Above(console))
    ended = launch(
        ["hocket.workloads", str(run.path)],
        workers,
        # A worker takes its cores itself; this keeps the launcher from choosing, and from saying so.
        flags=["-m", "-x", "OMP_NUM_THREADS=1"],
        env={"HOCKET_RECORD": str((run.path / "record").absolute())},
        stdout=above,
        stderr=above,
    )
    if ended.outcome == "failed":
        first = ended.failures[0]
        return "failed", f"rank {first.rank}: {first.error or first.how()}", _FAILED
    return ("finished" if ended.outcome == "finished" else "interrupted"), None, ended.exit_code


def _explained(run: RunDirectory) -> "Explanation | None":
    """Return what the ranks' records say; None if they left none, as one rank that trains alone may."""
    from hocket.explain import explain
    from hocket.profile import RecordError

    try:
        return explain(run.path / "record")
    except RecordError:
        return None


class _Above(io.RawIOBase):
    """A stream whose lines appear above the progress bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data).decode(errors="replace").removesuffix("\n")
        self._console.print(Text.from_ansi(text), soft_wrap=True)
        return len(data)
