"""How a plan names the compression of gradients, as "int8" or "topk:0.01"."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Parameter:
    """The number that may follow a method's name after a colon."""

    name: str  # what it is
    default: float  # where the plan gives none
    least: float  # the smallest that is allowed
    most: float  # the largest
    whole: bool = False  # whether it must be a whole number
    step: int = 1  # what it must be a multiple of, where it is whole


COMPRESSIONS: dict[str, _Parameter | None] = {
    "fp16": None,
    "bf16": None,
    "int8": _Parameter("elements that share a scale", 256, 8, 65536, whole=True, step=8),
    "topk": _Parameter("share of the elements that is sent", 0.01, 1e-6, 1.0),
    "1bit": _Parameter("elements that share two values", 128, 8, 65536, whole=True, step=8),
    "terngrad": _Parameter("standard deviations at which to clip (0: not at all)", 2.5, 0.0, 100.0),
    "powersgd": _Parameter("rank of the approximation", 2, 1, 256, whole=True),
}
"""The methods by name, each with its parameter. `hocket.parallel.data.compression` carries them out."""


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """A method and its parameter.

    Attributes:
        method: one of COMPRESSIONS.
        value: of the parameter; None where the method has none.
    """

    method: str
    value: float | None

    def __str__(self) -> str:
        return self.method if self.value is None else f"{self.method}:{self.value:g}"


def parse_compression(text: str) -> CompressionSpec | None:
    """Read a plan's `compression`.

    Args:
        text: "none", or a method's name, as "int8", with its parameter after a colon if need be, as "topk:0.01".

    Returns:
        The method with its parameter or the default one; None for "none".

    Raises:
        ValueError: there is no such method, or its parameter makes no sense.
    """
    if text == "none":
        return None
    method, colon, given = text.partition(":")
    if method not in COMPRESSIONS:
        raise ValueError(f"{text!r} is no compression of gradients: none, {', '.join(COMPRESSIONS)} are")
    parameter = COMPRESSIONS[method]
    if parameter is None:
        if colon:
            raise ValueError(f"{text!r}: {method} takes no parameter; say {method!r}")
        return CompressionSpec(method, None)
    if not colon:
        return CompressionSpec(method, parameter.default)
    kind = f"a {'whole ' if parameter.whole else ''}number from {parameter.least:g} to {parameter.most:g}"
    if parameter.step > 1:
        kind += f" that {parameter.step} divides"
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    whole = not parameter.whole or (value == value // 1 and value % parameter.step == 0)
    if not (parameter.least <= value <= parameter.most and whole):
        raise ValueError(
            f"{text!r}: behind the colon stands the {parameter.name}, {kind}, as {method}:{parameter.default:g}"
        )
    return CompressionSpec(method, value)
