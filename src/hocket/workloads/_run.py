"""The run directory: everything that is known of a run, readable at any moment.

    config.json     what was asked for
    metrics.jsonl   one line every few steps: loss, samples per second
    events.jsonl    one line for every turn of the run, with what was found out by then, and for every collective of
                    the training as the first worker saw it
    picture.png     if the workload draws one
    trace.json      the last steps of the first worker, for Perfetto and `hocket compare`
    result.json     the summary, written once at the end

Lines are handed to the kernel as soon as they are made, so that a killed process loses at most the line it was
writing; whole files are written beside their place and renamed. The summary is a function of the other files: whoever
finds a directory without one can make it.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from hocket._files import json_value, write_whole

CONFIG, METRICS, EVENTS, PICTURE, TRACE, RESULT = (
    "config.json",
    "metrics.jsonl",
    "events.jsonl",
    "picture.png",
    "trace.json",
    "result.json",
)


class RunDirectory:
    """A run's files. Any process may read them; one at a time appends or writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> "RunDirectory":
        """Make the directory with its config.

        Raises:
            FileExistsError: If there is a run in ``path`` already; runs are not overwritten.
        """
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG).exists():
            raise FileExistsError(f"{path} already holds a run; choose another directory or remove it")
        run = cls(path)
        run.write(CONFIG, config)
        return run

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        config: dict[str, Any] = json.loads((self.path / CONFIG).read_text())
        return config

    @property
    def picture(self) -> Path:
        """Where the picture lies if there is one."""
        return self.path / PICTURE

    def metric(self, **values: Any) -> None:
        """Append a line to the metrics."""
        self._append(METRICS, [values])

    def event(self, name: str, **values: Any) -> None:
        """Append a line to the events, with the wall-clock time in seconds since 1970."""
        self._append(EVENTS, [{"event": name, "time_s": time.time(), **values}])

    def add_events(self, records: list[dict[str, Any]]) -> None:
        """Append lines to the events as they are."""
        self._append(EVENTS, records)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all metrics so far."""
        return Tail(self.path / METRICS).new()

    def events(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        return Tail(self.path / EVENTS).new()

    def result(self) -> dict[str, Any] | None:
        """Return the summary; None before the end of the run."""
        try:
            result: dict[str, Any] = json.loads((self.path / RESULT).read_text())
        except FileNotFoundError:
            return None
        return result

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Write a whole JSON file so that a reader finds the old one or the new one, never a part."""
        write_whole(self.path / name, json.dumps(json_value(document), indent=2) + "\n")

    def _append(self, name: str, records: list[dict[str, Any]]) -> None:
        # One write, unbuffered: a line is in the kernel's hands, whole, or not written at all.
        with (self.path / name).open("ab", buffering=0) as file:
            file.write(b"".join(json.dumps(json_value(record)).encode() + b"\n" for record in records))


class Tail:
    """Reads a JSON-lines file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records added since the last call; a line that is not yet whole waits for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            # A killed writer may have left a part of a line, to which the next writer added its own.
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
        return records


# Events that carry a part of the result, and its name there.
_PARTS = {
    "started": "placement",
    "trained": "training",
    "profiled": "communication",
    "compressed": "compression",
    "evaluated": "quality",
    "scaled": "scaling",
}


def conclude(run: RunDirectory, status: str, error: str | None = None) -> dict[str, Any]:
    """Write the result of a run that has ended one way or another, from what is known of it.

    Args:
        run: The run.
        status: "finished", "interrupted" or "failed".
        error: What went wrong.

    Returns:
        The result: "status", "error", "run" (the directory), "config", "training", and as far as the run came
        "placement", "quality", "scaling", "communication", "compression" and "picture" (its path).
    """
    config = run.config
    result: dict[str, Any] = {"status": status, "error": error, "run": str(run.path), "config": config}
    metrics = run.metrics()
    if metrics:
        last = metrics[-1]
        result["training"] = {
            "steps": last["step"],
            "samples": last["samples"],
            "training_s": last["elapsed_s"],
            "samples_per_s": last["samples_per_s"],
            "loss": last["loss"],
        }
    for event in run.events():
        if event["event"] in _PARTS:
            result[_PARTS[event["event"]]] = {k: v for k, v in event.items() if k not in ("event", "time_s")}
    if run.picture.exists():
        result["picture"] = str(run.picture)
    run.write(RESULT, result)
    return run.result() or result
