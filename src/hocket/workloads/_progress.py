"""A run as it goes on: a progress bar on a terminal, plain lines elsewhere.

It follows the run directory, so it works wherever the workers are and whatever becomes of their output.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hocket.workloads._run import EVENTS, METRICS, RunDirectory, Tail
from hocket.workloads._settings import ThroughputUnit

_LOOK_EVERY_S = 0.2
_PLAIN_LINE_EVERY_S = 5.0
_STAGES = {"evaluating": "judging the model", "scaling": "comparing with one worker alone"}


class Follower:
    """Shows a run from a thread of its own while the block lasts.

    Args:
        run: The run; its config must be there.
        console: Where to show it.
    """

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._console = console
        config = run.config
        self._steps = config["settings"]["steps"]
        self._unit = ThroughputUnit.from_config(config)
        self._metrics, self._events = Tail(run.path / METRICS), Tail(run.path / EVENTS)
        self._bar = _bar(console) if console.is_terminal else None
        self._task = self._bar.add_task("training", total=self._steps, facts="") if self._bar else None
        self._line_due_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hocket-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._bar:
            self._bar.stop()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._look()
        self._look()  # what was written until the end

    def _look(self) -> None:
        self._show_metrics(self._metrics.new())
        for event in self._events.new():
            if event["event"] in _STAGES:
                self._console.print(f"{_STAGES[event['event']]} ...", highlight=False)

    def _show_metrics(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            facts = describe(record, self._steps, self._unit)
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=record["step"], facts=facts)
            elif time.monotonic() >= self._line_due_s or record["step"] == self._steps:
                self._line_due_s = time.monotonic() + _PLAIN_LINE_EVERY_S
                self._console.print(facts, highlight=False, soft_wrap=True)


def describe(record: dict[str, Any], steps: int, unit: ThroughputUnit) -> str:
    """Return one line of metrics for people."""
    loss = "nan" if record["loss"] is None else f"{record['loss']:.4f}"
    return (
        f"step {record['step']}/{steps}  loss {loss}  "
        f"{_three_digits(record['samples_per_s'] * unit.per_sample)} {unit.name}/s  {clock(record['left_s'])} left"
    )


def clock(seconds: float) -> str:
    """Return minutes and seconds, with hours when there are any."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[facts]}"), console=console
    )
