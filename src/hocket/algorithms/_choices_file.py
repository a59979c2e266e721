"""Choices as a small TOML file that people can edit."""

import json
import tomllib
from dataclasses import fields
from typing import Any, Final

from hocket.schedule import ScheduleError

from ._choice import Choice
from ._choices import Choices

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "kind": (str,),
    "algorithm": (str,),
    "parameters": (dict,),
    "world": (int,),
    "local": (int,),
    "start": (int,),
    "stop": (int,),
    "nbytes": (int,),
    "seconds": (float, int),
    "runner_up": (str,),
    "margin": (float, int),
    "origin": (str,),
}
_NAMES: Final = {"start": "from_nbytes", "stop": "below_nbytes", "nbytes": "at_nbytes"}


def to_toml(choices: Choices) -> str:
    """Write a table; what is None is left out. `from_toml` reads it back to an equal one."""
    lines = ["# Which algorithm carries out which collective; the first row that covers an operation is used."]
    for row in choices.rows:
        lines += ["", "[[choice]]"]
        for one in fields(Choice):
            value = getattr(row, one.name)
            if value is not None and not (one.name == "parameters" and not value):
                lines.append(f"{_NAMES.get(one.name, one.name)} = {_value(value)}")
    return "\n".join(lines) + "\n"


def from_toml(text: str) -> Choices:
    """Read a table.

    Raises:
        ScheduleError: no TOML, or with the path in the document of what is not understood.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ScheduleError(f"no TOML: {error}") from None
    if unknown := sorted(document.keys() - {"choice"}):
        raise ScheduleError(f"$.{unknown[0]} is unknown; rows are written as [[choice]]")
    entries = document.get("choice", [])
    if not isinstance(entries, list):
        raise ScheduleError("$.choice is no list; rows are written as [[choice]]")
    return Choices(tuple(_row(entry, f"$.choice[{number}]") for number, entry in enumerate(entries)))


def _row(entry: Any, path: str) -> Choice:
    if not isinstance(entry, dict):
        raise ScheduleError(f"{path} is no table; rows are written as [[choice]]")
    keys = {_NAMES.get(name, name): name for name in _TYPES}
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in keys:
            raise ScheduleError(f"{path}.{key} is unknown; there are {', '.join(keys)}")
        if not isinstance(value, _TYPES[keys[key]]) or isinstance(value, bool):
            raise ScheduleError(f"{path}.{key}: {value!r} is no {_TYPES[keys[key]][0].__name__}")
        values[keys[key]] = value
    for name in ("kind", "algorithm"):
        if name not in values:
            raise ScheduleError(f"{path}.{name} is missing")
    for name, value in values.get("parameters", {}).items():
        if not isinstance(value, int | str):
            raise ScheduleError(f"{path}.parameters.{name}: {value!r} is no number, word or truth value")
    try:
        return Choice(**values)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
