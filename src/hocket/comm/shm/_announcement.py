"""What ranks announce of an operation before they start it, so that a mismatch is found and never a wrong sum.

A rank writes its announcement into its own header; the phase that follows publishes it. There are two places, by parity
of the sequence number: a peer may still read the one while the other is written.
"""

import struct
from collections.abc import Sequence

import torch

from hocket.schedule import KINDS

from ._memory import MemoryHandle
from ._segment import SharedSegment

_LINE = 64
_OFFSETS = (2 * _LINE, 4 * _LINE)  # in the header, by parity

# The contract, in which all ranks must agree: seq, kind, operator, dtype, root, numel; then this rank's own place:
# arena, fd, arena_nbytes, offset. Together less than a cache line.
_ANNOUNCEMENT = struct.Struct("<IHHHHxxxxQ" + "qqQQ")
_CONTRACT = struct.Struct("<IHHHHxxxxQ")
_PLACE = struct.Struct("<qqQQ")
_SEQ_MASK = 0xFFFFFFFF

_KIND_NUMBERS = {kind: i for i, kind in enumerate(KINDS)}

DTYPES = tuple(
    dict.fromkeys(value for name in sorted(dir(torch)) if isinstance(value := getattr(torch, name), torch.dtype))
)
DTYPE_NUMBERS = {dtype: i for i, dtype in enumerate(DTYPES)}
NO_OPERATOR = 99
NO_ROOT = 0xFFFF
_OPERATORS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class AnnouncementBoard:
    """Everyone's announcements. The announcements lie in the headers of the segments of all ranks."""

    def __init__(self, segments: Sequence[SharedSegment], rank: int) -> None:
        self._rank = rank
        self._others = tuple(r for r in range(len(segments)) if r != rank)
        both = [[s.view[at : at + _ANNOUNCEMENT.size] for s in segments] for at in _OFFSETS]
        self._own = tuple(views[rank] for views in both)
        self._contracts = tuple([view[: _CONTRACT.size] for view in views] for views in both)
        self._places = tuple([view[_CONTRACT.size :] for view in views] for views in both)
        self._arenas = tuple([view[:8].cast("q") for view in views] for views in self._places)

    def write(
        self, seq: int, kind: str, dtype: torch.dtype, numel: int, operator: int, root: int, place: MemoryHandle | None
    ) -> None:
        """Write this rank's announcement of operation `seq`, to be published."""
        contract = seq & _SEQ_MASK, _KIND_NUMBERS[kind], operator, DTYPE_NUMBERS[dtype], root, numel
        _ANNOUNCEMENT.pack_into(self._own[seq & 1], 0, *contract, *(place or (-1, -1, 0, 0)))

    def agree(self, seq: int) -> bool:
        """Return whether all ranks have announced the same operation as this one."""
        contracts = self._contracts[seq & 1]
        mine = contracts[self._rank]
        # Not `all(...)`: this runs with cold caches, where a generator costs as much as the comparison.
        for r in self._others:  # noqa: SIM110
            if contracts[r] != mine:
                return False
        return True

    def registered(self, seq: int) -> int:
        """Return how many ranks announced that their buffer is registered."""
        found = 0
        for arenas in self._arenas[seq & 1]:
            if arenas[0] >= 0:
                found += 1
        return found

    def places(self, seq: int) -> list[MemoryHandle | None]:
        """Return where every rank announced that its buffer lies; None where that is not registered."""
        handles = (MemoryHandle(*_PLACE.unpack_from(view, 0)) for view in self._places[seq & 1])
        return [handle if handle.arena >= 0 else None for handle in handles]

    def last(self, rank: int) -> str:
        """Return the latest announcement of `rank`, for messages."""
        seq, kind = max(_CONTRACT.unpack_from(contracts[rank], 0) for contracts in self._contracts)[:2]
        return f"{KINDS[kind]} #{seq}" if seq else "no operation yet"

    def differences(self, seq: int, names: Sequence[int]) -> str:
        """Return which ranks, by their numbers in `names`, announced what."""
        return describe(self._contracts[seq & 1], names)


def describe(contracts: Sequence[memoryview], names: Sequence[int]) -> str:
    """Return which ranks, by their `names`, announced which contract."""
    by_contract: dict[str, list[int]] = {}
    for name, contract in zip(names, contracts, strict=True):
        by_contract.setdefault(_describe(contract), []).append(name)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {what}"
        for what, ranks in by_contract.items()
    )


def _describe(contract: memoryview) -> str:
    seq, kind, operator, dtype, root, numel = _CONTRACT.unpack_from(contract, 0)
    text = f"{KINDS[kind]} #{seq}"
    if KINDS[kind] != "barrier":
        text += f" of {numel} x {str(DTYPES[dtype]).removeprefix('torch.')}"
    if operator < len(_OPERATORS):
        text += f" with {_OPERATORS[operator]}"
    if root != NO_ROOT:
        text += f", root {root}"
    return text
