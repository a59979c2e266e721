"""Text and JSON forms of a schedule, read and written; both round-trip exactly."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ._collective import Collective, ScheduleError
from ._ir import Schedule, Step

_Columns = tuple[list[int], list[int], list[int], list[int], list[bool]]
_TRANSFER: Final = re.compile(r"(\S+) -> (\S+) (reduce|copy) (\d{1,10})(?::(\d{1,10}))?")


def parse(text: str) -> Schedule:
    """Read what `str(schedule)` wrote; empty lines and what follows a # are left out.

    Raises:
        ScheduleError: with the number of the line that is not understood.
    """
    lines = [
        (number, line) for number, raw in enumerate(text.splitlines(), 1) if (line := raw.split("#", 1)[0].rstrip())
    ]
    rows = iter(lines)
    number, head = next(rows, (1, ""))
    words = head.split()
    if len(words) < 4 or words[0] != "schedule":
        raise ScheduleError(f"line {number}: {head!r}; expected 'schedule NAME COLLECTIVE world=N chunks=N'")
    settings = _settings(number, words[3:], {"world", "root", "chunks"})
    if "world" not in settings or "chunks" not in settings:
        raise ScheduleError(f"line {number}: {head!r}; world=N and chunks=N must be given")
    with _at(number):
        collective = Collective(words[2], settings["world"], settings.get("root", 0))
    switches: tuple[str, ...] = ()
    if len(lines) > 1 and lines[1][1].split()[0] == "switches":
        switches = tuple(next(rows)[1].split()[1:])
    steps = tuple(_steps(rows, collective.world, {name: i for i, name in enumerate(switches, collective.world)}))
    return Schedule(words[1], collective, settings["chunks"], steps, switches)


def _steps(rows: Iterator[tuple[int, str]], world: int, switches: dict[str, int]) -> Iterator[Step]:
    """Read the lines from the first `step` on."""
    begin, repeat, shift = 0, 1, 0
    columns: _Columns | None = None
    for number, line in rows:
        words = line.split()
        if words[0] == "step":
            if columns is not None:
                yield _step(begin, columns, repeat, shift)
            begin = number
            settings = _settings(number, words[1:], {"repeat", "shift"})
            repeat, shift = settings.get("repeat", 1), settings.get("shift", 0)
            columns = [], [], [], [], []
            continue
        match = _TRANSFER.fullmatch(line.strip())
        if match is None or columns is None:
            raise ScheduleError(f"line {number}: {line!r}; expected 'step' or '  SOURCE -> DESTINATION reduce 0:4'")
        source, destination, verb, start, stop = match.groups()
        columns[0].append(_endpoint(number, source, world, switches))
        columns[1].append(_endpoint(number, destination, world, switches))
        columns[2].append(int(start))
        columns[3].append(int(stop) if stop else int(start) + 1)
        columns[4].append(verb == "reduce")
    if columns is not None:
        yield _step(begin, columns, repeat, shift)


def _step(number: int, columns: _Columns, repeat: int, shift: int) -> Step:
    with _at(number):
        return Step.of(*columns[:4], reduce=columns[4], repeat=repeat, shift=shift)


def _endpoint(number: int, name: str, world: int, switches: dict[str, int]) -> int:
    if name in switches:
        return switches[name]
    if name.isdecimal() and len(name) <= 10 and int(name) < world:
        return int(name)
    raise ScheduleError(f"line {number}: endpoint {name!r} is neither a rank below {world} nor a switch of the header")


def _settings(number: int, words: list[str], known: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not re.fullmatch(r"-?\d{1,10}", value):
            raise ScheduleError(f"line {number}: {word!r}; expected {' or '.join(sorted(known))} = a whole number")
        found[name] = int(value)
    return found


@contextmanager
def _at(number: int) -> Iterator[None]:
    """Add the line's number to the errors of what is made from it."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(f"line {number}: {error}") from None


def to_json(schedule: Schedule) -> str:
    """Write a schedule as JSON: the header and, for each stored step, its columns."""
    return json.dumps(
        {
            "schedule": schedule.name,
            "collective": {"kind": schedule.collective.kind, "world": schedule.world, "root": schedule.collective.root},
            "chunks": schedule.chunks,
            "switches": list(schedule.switches),
            "steps": [
                {
                    "repeat": step.repeat,
                    "shift": step.shift,
                    "source": step.source.tolist(),
                    "destination": step.destination.tolist(),
                    "start": step.start.tolist(),
                    "stop": step.stop.tolist(),
                    "reduce": step.reduce.tolist(),
                }
                for step in schedule.steps
            ],
        }
    )


def from_json(text: str) -> Schedule:
    """Read what `to_json` wrote.

    Raises:
        ScheduleError: no JSON, or with the path in the document of what is missing or of the wrong type.
    """
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ScheduleError(f"no JSON: {error}") from None
    if isinstance(document, dict) and "order" in document:
        raise ScheduleError("it is the order of a pipeline, which is read from text alone: take `show --text`")
    whole = _field(document, "$", "collective", dict)
    collective = Collective(
        _field(whole, "$.collective", "kind", str),
        _field(whole, "$.collective", "world", int),
        _field(whole, "$.collective", "root", int),
    )
    steps = []
    for number, step in enumerate(_field(document, "$", "steps", list)):
        path = f"$.steps[{number}]"
        columns = [_column(step, path, name) for name in ("source", "destination", "start", "stop", "reduce")]
        if len({len(column) for column in columns}) > 1:
            raise ScheduleError(f"{path}: the columns are of different lengths")
        repeat, shift = _field(step, path, "repeat", int), _field(step, path, "shift", int)
        steps.append(Step.of(*columns[:4], reduce=columns[4], repeat=repeat, shift=shift))
    return Schedule(
        _field(document, "$", "schedule", str),
        collective,
        _field(document, "$", "chunks", int),
        tuple(steps),
        tuple(str(name) for name in _field(document, "$", "switches", list)),
    )


def _field(document: Any, path: str, name: str, kind: type) -> Any:
    if not isinstance(document, dict) or name not in document:
        raise ScheduleError(f"{path}.{name} is missing")
    value = document[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ScheduleError(f"{path}.{name}: {value!r} is no {kind.__name__}")
    return value


def _column(document: Any, path: str, name: str) -> list[int]:
    column: list[int] = _field(document, path, name, list)
    wanted = bool if name == "reduce" else int
    for row, value in enumerate(column):
        if type(value) is not wanted:
            raise ScheduleError(f"{path}.{name}[{row}]: {value!r} is no {wanted.__name__}")
    return column
