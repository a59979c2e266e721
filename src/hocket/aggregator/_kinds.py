"""What an aggregator can be asked to do: operations, operators and types of elements, with their wire numbers."""

from enum import IntEnum
from typing import Final


class Kind(IntEnum):
    """What an operation does."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    REDUCE_SCATTER = 4
    ALL_GATHER = 5


REDUCING: Final = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})
COPYING: Final = frozenset({Kind.BROADCAST, Kind.ALL_GATHER})
COMMITTED: Final = frozenset({Kind.REDUCE, Kind.BROADCAST, Kind.REDUCE_SCATTER})
"""Kinds after which not every member holds the whole result: these are over for nobody before all have their part."""
IN_BLOCKS: Final = frozenset({Kind.REDUCE_SCATTER, Kind.ALL_GATHER})


class Operator(IntEnum):
    """How contributions are combined. NONE for operations that only copy."""

    NONE = 0
    SUM = 1
    MIN = 2
    MAX = 3
    MINLOC = 4
    MAXLOC = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    LAND = 9
    LOR = 10
    LXOR = 11


class ElementType(IntEnum):
    """The type of an element, or of the value of a pair of value and location (MINLOC and MAXLOC)."""

    INT8 = 1
    UINT8 = 2
    INT16 = 3
    UINT16 = 4
    INT32 = 5
    UINT32 = 6
    INT64 = 7
    UINT64 = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12


FLOATS: Final = frozenset({ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32, ElementType.FLOAT64})
LOCATING: Final = frozenset({Operator.MINLOC, Operator.MAXLOC})
BITWISE: Final = frozenset({Operator.BAND, Operator.BOR, Operator.BXOR})
PAIR_NBYTES: Final = 16
"""A pair: its value in the first bytes, filled up to 8, and its location as int64."""

_WIDTHS = {
    ElementType.INT8: 1,
    ElementType.UINT8: 1,
    ElementType.INT16: 2,
    ElementType.UINT16: 2,
    ElementType.FLOAT16: 2,
    ElementType.BFLOAT16: 2,
    ElementType.INT32: 4,
    ElementType.UINT32: 4,
    ElementType.FLOAT32: 4,
    ElementType.INT64: 8,
    ElementType.UINT64: 8,
    ElementType.FLOAT64: 8,
}


def element_nbytes(operator: Operator, element: ElementType) -> int:
    """Return the bytes of one element on the wire."""
    return PAIR_NBYTES if operator in LOCATING else _WIDTHS[element]
