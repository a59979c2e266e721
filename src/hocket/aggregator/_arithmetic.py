"""Combines contributions with numpy, in the order of children, so that results are the same bits every time.

The reference for one aggregator with children 0 .. n-1 is `((c0 op c1) op c2) ...` in the element's own type, but for:

- SUM of float16 and everything of bfloat16: computed in float32 and rounded once, to nearest even, at the end;
- MINLOC and MAXLOC: of equal values the lowest location; a NaN beats every number, as in `numpy.argmin`;
- LAND, LOR, LXOR: 1 where true, 0 elsewhere, in the element's type.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from ._kinds import BITWISE, FLOATS, LOCATING, PAIR_NBYTES, ElementType, Operator

Array = np.ndarray[Any, Any]

NUMPY_TYPES: Final[dict[ElementType, np.dtype[Any]]] = {
    ElementType.INT8: np.dtype("<i1"),
    ElementType.UINT8: np.dtype("<u1"),
    ElementType.INT16: np.dtype("<i2"),
    ElementType.UINT16: np.dtype("<u2"),
    ElementType.INT32: np.dtype("<i4"),
    ElementType.UINT32: np.dtype("<u4"),
    ElementType.INT64: np.dtype("<i8"),
    ElementType.UINT64: np.dtype("<u8"),
    ElementType.FLOAT16: np.dtype("<f2"),
    ElementType.BFLOAT16: np.dtype("<u2"),  # the bits; numpy has no such type
    ElementType.FLOAT32: np.dtype("<f4"),
    ElementType.FLOAT64: np.dtype("<f8"),
}

_UFUNCS: Final[dict[Operator, Any]] = {
    Operator.SUM: np.add,
    Operator.MIN: np.minimum,
    Operator.MAX: np.maximum,
    Operator.BAND: np.bitwise_and,
    Operator.BOR: np.bitwise_or,
    Operator.BXOR: np.bitwise_xor,
    Operator.LAND: np.logical_and,
    Operator.LOR: np.logical_or,
    Operator.LXOR: np.logical_xor,
}
_LOGICAL: Final = frozenset({Operator.LAND, Operator.LOR, Operator.LXOR})


class Fold(Protocol):
    """Combines raw contributions (flat uint8 arrays) one after the other."""

    def begin(self, part: Array) -> Array:
        """Return the total of the first contribution alone; it may use that one's memory."""

    def add(self, total: Array, part: Array) -> None:
        """Combine one more into the total."""

    def end(self, total: Array, buffer: Array) -> Array:
        """Return the total as flat uint8: its own memory, or `buffer`, which has as many bytes as a contribution."""


class _Plain:
    def __init__(self, operator: Operator, element: ElementType) -> None:
        self._dtype = NUMPY_TYPES[element]
        self._ufunc = _UFUNCS[operator]
        self._logical = operator in _LOGICAL

    def begin(self, part: Array) -> Array:
        total: Array = part.view(self._dtype)
        if self._logical:
            np.not_equal(total, 0, out=total, casting="unsafe")
        return total

    def add(self, total: Array, part: Array) -> None:
        with np.errstate(all="ignore"):  # infinities and overflow are results, not events
            self._ufunc(total, part.view(self._dtype), out=total)

    def end(self, total: Array, buffer: Array) -> Array:
        return total.view(np.uint8)


class _Wide:
    """Through float32, for 16-bit floats."""

    def __init__(self, operator: Operator, element: ElementType) -> None:
        self._ufunc = _UFUNCS[operator]
        self._logical = operator in _LOGICAL
        self._brain = element == ElementType.BFLOAT16

    def _widen(self, part: Array) -> Array:
        return widen_bfloat16(part.view(np.uint16)) if self._brain else part.view(np.float16).astype(np.float32)

    def begin(self, part: Array) -> Array:
        total = self._widen(part)
        return (total != 0).astype(np.float32) if self._logical else total

    def add(self, total: Array, part: Array) -> None:
        with np.errstate(all="ignore"):
            self._ufunc(total, self._widen(part), out=total)

    def end(self, total: Array, buffer: Array) -> Array:
        with np.errstate(all="ignore"):
            narrow: Array = round_bfloat16(total) if self._brain else total.astype(np.float16)
        buffer[:] = narrow.view(np.uint8)
        return buffer


class _Locating:
    """Pairs of a value and a location."""

    def __init__(self, operator: Operator, element: ElementType) -> None:
        fields = {"names": ["value", "place"], "formats": [NUMPY_TYPES[element], "<i8"], "offsets": [0, 8]}
        self._pair = np.dtype({**fields, "itemsize": PAIR_NBYTES})  # type: ignore[call-overload]
        self._before: Callable[[Any, Any], Any] = np.less if operator == Operator.MINLOC else np.greater
        self._float = element in FLOATS
        self._brain = element == ElementType.BFLOAT16

    def begin(self, part: Array) -> Array:
        return part.view(self._pair)

    def add(self, total: Array, part: Array) -> None:
        new = part.view(self._pair)
        old_value, new_value = total["value"], new["value"]
        if self._brain:
            old_value, new_value = widen_bfloat16(old_value), widen_bfloat16(new_value)
        lower = new["place"] < total["place"]
        better = self._before(new_value, old_value) | ((new_value == old_value) & lower)
        if self._float:
            old_nan, new_nan = np.isnan(old_value), np.isnan(new_value)
            better = np.where(old_nan, new_nan & lower, new_nan | better)
        total[better] = new[better]

    def end(self, total: Array, buffer: Array) -> Array:
        return total.view(np.uint8)


def fold(operator: Operator, element: ElementType) -> Fold:
    """Return how contributions of one type are combined.

    Raises:
        ValueError: there is no such arithmetic.
    """
    if operator == Operator.NONE or (operator in BITWISE and element in FLOATS):
        raise ValueError(f"there is no {operator.name} of {element.name}")
    if operator in LOCATING:
        return _Locating(operator, element)
    if element == ElementType.BFLOAT16 or (element == ElementType.FLOAT16 and operator == Operator.SUM):
        return _Wide(operator, element)
    return _Plain(operator, element)


def widen_bfloat16(bits: Array) -> Array:
    """bfloat16, given as uint16 bits, in float32; exact."""
    wide: Array = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def round_bfloat16(values: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16 bits; every NaN becomes 0x7FC0, as in torch."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: Array = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded
