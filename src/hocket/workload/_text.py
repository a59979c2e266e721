"""The text form of a workload: a line a layer, a line an operation; layers that are alike are written once."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from ._workload import Layer, Operation, Workload, WorkloadError

__all__ = ["parse", "to_text"]

_HEAD = ("batch", "precision", "source", "unit", "optimizer_s")


def to_text(workload: Workload) -> str:
    """A workload as text; `parse` reads it. A layer like an earlier one is `layer NAME like EARLIER`."""
    lines = [f"workload {_word(workload.name)}"]
    lines += [f"{name} {_word(str(getattr(workload, name)))}" for name in _HEAD]
    seen: dict[Layer, str] = {}
    for layer in workload.layers:
        nameless = dataclasses.replace(layer, name="")
        if nameless in seen:
            lines.append(f"layer {_word(layer.name)} like {_word(seen[nameless])}")
            continue
        seen[nameless] = layer.name
        lines.append(f"layer {_word(layer.name)}{_fields(layer)}")
        lines += [f"  {_word(one.name)}{_fields(one)}" for one in layer.operations]
    return "\n".join(lines) + "\n"


def parse(text: str) -> Workload:
    """Read what `to_text` wrote.

    Raises:
        WorkloadError: it is not a workload's text; the message names the line.
    """
    head: dict[str, Any] = {}
    layers: list[Layer] = []
    by_name: dict[str, Layer] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
            if line.startswith("  "):
                if not layers:
                    raise WorkloadError("an operation stands before the first layer")
                operation = Operation(words[0], **_values(Operation, words[1:]))
                layers[-1] = dataclasses.replace(layers[-1], operations=(*layers[-1].operations, operation))
            elif words[0] == "layer" and words[2:3] == ["like"]:
                layers.append(dataclasses.replace(by_name[words[3]], name=words[1]))
            elif words[0] == "layer":
                layers.append(Layer(words[1], **_values(Layer, words[2:])))
            elif words[0] in ("workload", *_HEAD):
                head[words[0]] = words[1] if len(words) > 1 else ""
            else:
                raise WorkloadError(f"no line begins with {words[0]!r}; write workload, {', '.join(_HEAD)} or layer")
            if layers:
                by_name[layers[-1].name] = layers[-1]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            said = f"no layer {error} stands above" if isinstance(error, KeyError) else error
            raise WorkloadError(f"workload, line {number}: {line.strip()!r}: {said}") from None
    missing = [name for name in ("workload", "batch") if name not in head]
    if missing:
        raise WorkloadError(f"this is no workload: it has no line {missing[0]!r}")
    name = head.pop("workload")
    try:
        batch = int(head.pop("batch"))
        optimizer_s = float(head.pop("optimizer_s", "0"))
    except ValueError as error:
        raise WorkloadError(f"workload {name!r}: {error}; write numbers for batch and optimizer_s") from None
    return Workload(name, batch, tuple(layers), optimizer_s=optimizer_s, **head)


def _word(text: str) -> str:
    return shlex.quote(text)


def _fields(value: Layer | Operation) -> str:
    """Every field that is not as it is by default, as " name=value"."""
    words = []
    for one in dataclasses.fields(value):
        entry = getattr(value, one.name)
        if one.name in ("name", "operations") or entry == one.default:
            continue
        words.append(f" {one.name}={_word(entry) if isinstance(entry, str) else json.dumps(entry)}")
    return "".join(words)


def _values(kind: type[Layer] | type[Operation], words: list[str]) -> dict[str, Any]:
    types = {one.name: str(one.type) for one in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in types or name in ("name", "operations"):
            raise WorkloadError(f"{word!r} is no field of a {kind.__name__.lower()}; there are {', '.join(types)}")
        read = {"int": int, "float": float}.get(types[name], str)
        values[name] = read(text)
    return values
