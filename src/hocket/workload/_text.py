"""The text form of a workload: a line a layer, an operation, a share, an exchange; layers that are alike come once.

Of the finer layers each is a line that begins with `step`.
"""

import dataclasses
import shlex
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

from hocket._ends import is_cut_off

from ._share import Exchange, Operation, Share, WorkloadError, placed
from ._workload import HEAD, Layer, Workload


def parse(text: str) -> Workload:
    """Read what `str(workload)` wrote.

    Raises:
        WorkloadError: it is not a workload's text; the message names the line.
    """
    if is_cut_off(text):
        raise WorkloadError("it was cut off: its last line is not there; write or copy it again")
    head: dict[str, Any] = {}
    found: dict[str, list[Layer]] = {"layer": [], "step": []}
    layers = found["layer"]
    by_name: dict[str, Layer] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
            if line.startswith("  "):
                if not layers:
                    raise WorkloadError("an operation stands before the first layer")
                layers[-1] = _with(layers[-1], words, inner=line.startswith("    "))
            elif words[0] == "layer" and words[2:3] == ["like"]:
                layers = found["layer"]
                layers.append(dataclasses.replace(by_name[words[3]], name=words[1]))
            elif words[0] in found:
                layers = found[words[0]]
                layers.append(Layer(words[1], **_values(Layer, words[2:])))
            elif words[0] in ("workload", *HEAD):
                head[words[0]] = words[1] if len(words) > 1 else ""
            else:
                raise WorkloadError(f"no line begins with {words[0]!r}; write workload, {', '.join(HEAD)} or layer")
            if layers is found["layer"] and layers:
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
        optimizer_s, update_passes, disturbed = (
            _number(one, head.pop(one, "0")) for one in ("optimizer_s", "update_passes", "disturbed")
        )
        update_values = _number("update_values", head.pop("update_values")) if "update_values" in head else None
    except ValueError as error:
        raise WorkloadError(
            f"workload {name!r}: {error}; write numbers for batch, optimizer_s, update_passes, update_values and "
            "disturbed"
        ) from None
    layers, finer = found.values()
    if not layers:
        raise WorkloadError(f"workload {name!r}: it has no line 'layer'")
    return Workload(
        name, batch, tuple(layers), optimizer_s=optimizer_s, update_passes=update_passes, finer=tuple(finer),
        disturbed=disturbed, update_values=update_values, **head,
    )  # fmt: skip


def _with(layer: Layer, words: list[str], *, inner: bool) -> Layer:
    """Return the layer with what a line below it says: of itself, or, in an inner line, of the last of its shares."""
    if not inner and words[0] == "over" and words[1:2] and words[1].isdecimal():
        share = Share(int(words[1]), **_values(Share, words[2:]))
        return dataclasses.replace(layer, shares=(*layer.shares, share))
    if not inner:
        operation = Operation(words[0], **_values(Operation, words[1:]))
        return dataclasses.replace(layer, operations=(*layer.operations, operation))
    if not layer.shares:
        raise WorkloadError("what a share holds stands before the first line `over DEGREE`")
    *others, share = layer.shares
    if words[0] == "exchange" and len(words) > 2 and "=" not in words[1]:
        exchange = Exchange(words[1], words[2], **_values(Exchange, words[3:]))
        share = dataclasses.replace(share, exchanges=(*share.exchanges, exchange))
    else:
        operation = Operation(words[0], **_values(Operation, words[1:]))
        share = dataclasses.replace(share, operations=(*share.operations, operation))
    return dataclasses.replace(layer, shares=(*others, share))


def _number(name: str, text: str) -> float:
    """Return a number of a workload's head. Raises ValueError: it is none, or not a finite one of 0 or more."""
    value = float(text)
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} {text!r} is not a finite number of 0 or more")
    return value


_Value = Layer | Operation | Share | Exchange


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise WorkloadError(f"{text!r} is neither true nor false")
    return text == "true"


_READERS: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: _truth}


def _values(kind: type[_Value], words: list[str]) -> dict[str, Any]:
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in types or name in placed(kind):
            raise WorkloadError(f"{word!r} is no field of a {kind.__name__.lower()}; there are {', '.join(types)}")
        value = values[name] = _READERS.get(types[name], str)(text)
        if isinstance(value, int | float) and not 0 <= value <= (1 if name == "fixed_share" else sys.float_info.max):
            raise WorkloadError(f"{word!r} is no such number; give a finite one of 0 or more, and of a share at most 1")
    return values
